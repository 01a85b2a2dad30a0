// The C interface: picks the instruction set once, cuts ranges over threads, and runs the kernels.
// The only file that knows CPUID and OpenMP.
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef FLUX_X86
#include <xmmintrin.h>
#endif

#include "kernels.h"
#include "map8.h"

namespace {

using flux::Kernels;

// Below this many elements a second thread costs more than it saves.
constexpr size_t kLeastPerThread = 32768;
// Ranges are cut at whole cache lines of every stream (64 bytes of 16-bit halves).
constexpr size_t kCut = 32;
static_assert(flux::kStateBlock % kCut == 0);
// Elements at most of the ranges that threads take one after another: a millisecond of AdamW each.
constexpr size_t kRange = 1 << 18;

int processor_level() {
#ifdef FLUX_X86
    __builtin_cpu_init();
    // Every processor with AVX2 that is sold has FMA; the 8-bit maps use it where it rounds nothing.
    if (!__builtin_cpu_supports("fma")) return FLUX_SCALAR;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return FLUX_AVX512;
    if (__builtin_cpu_supports("avx2")) return FLUX_AVX2;
#endif
    return FLUX_SCALAR;
}

int allowed_level() {
    const int level = processor_level();
    const char* wish = getenv("FLUXTRAIN_ISA");
    if (wish == nullptr) return level;
    if (strcmp(wish, "scalar") == 0) return FLUX_SCALAR;
    if (strcmp(wish, "avx2") == 0 && level > FLUX_AVX2) return FLUX_AVX2;
    return level;
}

const int kAllowed = allowed_level();
int in_use = kAllowed;

const Kernels& kernels() {
#ifdef FLUX_X86
    if (in_use == FLUX_AVX512) return flux::kAvx512Kernels;
    if (in_use == FLUX_AVX2) return flux::kAvx2Kernels;
#endif
    return flux::kScalarKernels;
}

const flux::StateKernels& state_kernels() {
#ifdef FLUX_X86
    if (in_use == FLUX_AVX512) return flux::kAvx512StateKernels;
    if (in_use == FLUX_AVX2) return flux::kAvx2StateKernels;
#endif
    return flux::kScalarStateKernels;
}

// Round to nearest and keep subnormals while a kernel runs, whatever the process chose: a thread
// that flushes subnormals would give other bits than its neighbour.
class DefaultRounding {
#ifdef FLUX_X86
  public:
    DefaultRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultRounding() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
  public:
    DefaultRounding() {}
    ~DefaultRounding() {}
#endif
};

int threads_for(size_t n, int threads) {
#ifdef _OPENMP
    const size_t wanted = static_cast<size_t>(threads > 0 ? threads : omp_get_max_threads());
    const size_t useful = n / kLeastPerThread + 1;
    return static_cast<int>(wanted < useful ? wanted : useful);
#else
    (void)n, (void)threads;
    return 1;
#endif
}

// body(first, count) on contiguous ranges that cover [0, n), by up to `threads` threads. There are
// more ranges than threads, and each goes to who is free: a core that also runs the program's other
// threads does fewer, where in equal shares all others would wait for it.
template <class Body>
void over_ranges(size_t n, int threads, size_t cut, Body body) {
    const int workers = threads_for(n, threads);
    if (workers <= 1) {
        DefaultRounding rounding;
        body(0, n);
        return;
    }
    const size_t each = n / static_cast<size_t>(workers);
    const size_t share = (each / (each / kRange + 1) + cut) / cut * cut;
#ifdef _OPENMP
#pragma omp parallel num_threads(workers)
#endif
    {
        DefaultRounding rounding;
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1) nowait
#endif
        for (size_t first = 0; first < n; first += share) {
            body(first, n - first < share ? n - first : share);
        }
    }
}

// States of the range that begins at element i, where a block begins.
flux_states8 from(const flux_states8* s, size_t i) {
    const size_t block = i / flux::kStateBlock;
    return {s->m + i, s->v + i, s->m_scale + block, s->v_scale + block};
}

flux_rounding from(const flux_rounding* rounding, size_t i) {
    flux_rounding at = *rounding;
    at.first_element += static_cast<uint32_t>(i);
    return at;
}

template <class Value>
double sum_squares(const Value* x, size_t n, int threads, double (*of_block)(const Value*, size_t)) {
    const size_t block = flux::kSumBlock;
    const size_t blocks = (n + block - 1) / block;
    double* sums = static_cast<double*>(malloc((blocks + 1) * sizeof(double)));
    if (sums == nullptr) return __builtin_nan("");
    over_ranges(n, threads, block, [&](size_t first, size_t count) {
        for (size_t at = first; at < first + count; at += block) {
            const size_t left = first + count - at;
            sums[at / block] = of_block(x + at, left < block ? left : block);
        }
    });
    double total = 0;
    for (size_t i = 0; i < blocks; ++i) total += sums[i];
    free(sums);
    return total;
}

}  // namespace

extern "C" {

int flux_abi_version(void) { return FLUX_ABI_VERSION; }

int flux_isa(void) { return in_use; }

int flux_set_isa(int level) {
    in_use = level < FLUX_SCALAR ? FLUX_SCALAR : level < kAllowed ? level : kAllowed;
    return in_use;
}

void flux_adamw_split_bf16(uint16_t* hi, uint16_t* lo, float* m, float* v, const uint16_t* grad,
                           size_t n, const flux_adamw_step* step, int threads) {
    const auto run = kernels().adamw_split_bf16;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count, *step);
    });
}

void flux_adamw_split_f32(uint16_t* hi, uint16_t* lo, float* m, float* v, const float* grad,
                          size_t n, const flux_adamw_step* step, int threads) {
    const auto run = kernels().adamw_split_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count, *step);
    });
}

void flux_adamw_f32(float* p, float* m, float* v, const float* grad, size_t n,
                    const flux_adamw_step* step, int threads) {
    const auto run = kernels().adamw_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(p + i, m + i, v + i, grad + i, count, *step);
    });
}

void flux_adamw_weights_split_bf16(uint16_t* hi, uint16_t* lo, const float* m, const float* v,
                                   const uint16_t* grad, size_t n, const flux_adamw_step* step,
                                   int threads) {
    const auto run = kernels().adamw_weights_split_bf16;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count, *step);
    });
}

void flux_adamw_weights_split_f32(uint16_t* hi, uint16_t* lo, const float* m, const float* v,
                                  const float* grad, size_t n, const flux_adamw_step* step,
                                  int threads) {
    const auto run = kernels().adamw_weights_split_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count, *step);
    });
}

void flux_adamw_weights_f32(float* p, const float* m, const float* v, const float* grad, size_t n,
                            const flux_adamw_step* step, int threads) {
    const auto run = kernels().adamw_weights_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(p + i, m + i, v + i, grad + i, count, *step);
    });
}

void flux_adamw_moments_bf16(float* m, float* v, const uint16_t* grad, size_t n,
                             const flux_adamw_step* step, int threads) {
    const auto run = kernels().adamw_moments_bf16;
    over_ranges(n, threads, kCut,
                [&](size_t i, size_t count) { run(m + i, v + i, grad + i, count, *step); });
}

void flux_adamw_moments_f32(float* m, float* v, const float* grad, size_t n,
                            const flux_adamw_step* step, int threads) {
    const auto run = kernels().adamw_moments_f32;
    over_ranges(n, threads, kCut,
                [&](size_t i, size_t count) { run(m + i, v + i, grad + i, count, *step); });
}

void flux_accumulate_bf16(float* sum, const uint16_t* x, size_t n, int threads) {
    const auto run = kernels().accumulate_bf16;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) { run(sum + i, x + i, count); });
}

void flux_accumulate_f32(float* sum, const float* x, size_t n, int threads) {
    const auto run = kernels().accumulate_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) { run(sum + i, x + i, count); });
}

double flux_sum_squares_bf16(const uint16_t* x, size_t n, int threads) {
    return sum_squares(x, n, threads, kernels().sum_squares_bf16);
}

double flux_sum_squares_f32(const float* x, size_t n, int threads) {
    return sum_squares(x, n, threads, kernels().sum_squares_f32);
}

void flux_stream_split(uint16_t* hi, uint16_t* lo, float* m, float* v, const uint16_t* grad,
                       size_t n, int threads) {
    const auto run = kernels().stream_split;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count);
    });
}

void flux_stream_weights(uint16_t* hi, uint16_t* lo, const float* m, const float* v,
                         const uint16_t* grad, size_t n, int threads) {
    const auto run = kernels().stream_weights;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count);
    });
}

void flux_stream_moments(float* m, float* v, const uint16_t* grad, size_t n, int threads) {
    const auto run = kernels().stream_moments;
    over_ranges(n, threads, kCut,
                [&](size_t i, size_t count) { run(m + i, v + i, grad + i, count); });
}

void flux_adamw8_split_bf16(uint16_t* hi, uint16_t* lo, const flux_states8* states,
                            const uint16_t* grad, size_t n, const flux_adamw_step* step,
                            int threads) {
    const auto run = state_kernels().adamw8_split_bf16;
    over_ranges(n, threads, flux::kStateBlock, [&](size_t i, size_t count) {
        run(hi + i, lo + i, from(states, i), grad + i, count, *step);
    });
}

void flux_adamw8_split_f32(uint16_t* hi, uint16_t* lo, const flux_states8* states,
                           const float* grad, size_t n, const flux_adamw_step* step, int threads) {
    const auto run = state_kernels().adamw8_split_f32;
    over_ranges(n, threads, flux::kStateBlock, [&](size_t i, size_t count) {
        run(hi + i, lo + i, from(states, i), grad + i, count, *step);
    });
}

void flux_adamw8_f32(float* p, const flux_states8* states, const float* grad, size_t n,
                     const flux_adamw_step* step, int threads) {
    const auto run = state_kernels().adamw8_f32;
    over_ranges(n, threads, flux::kStateBlock, [&](size_t i, size_t count) {
        run(p + i, from(states, i), grad + i, count, *step);
    });
}

void flux_adamw16_split_bf16(uint16_t* hi, uint16_t* lo, uint16_t* m, uint16_t* v,
                             const uint16_t* grad, size_t n, const flux_rounding* rounding,
                             const flux_adamw_step* step, int threads) {
    const auto run = state_kernels().adamw16_split_bf16;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count, from(rounding, i), *step);
    });
}

void flux_adamw16_split_f32(uint16_t* hi, uint16_t* lo, uint16_t* m, uint16_t* v,
                            const float* grad, size_t n, const flux_rounding* rounding,
                            const flux_adamw_step* step, int threads) {
    const auto run = state_kernels().adamw16_split_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count, from(rounding, i), *step);
    });
}

void flux_adamw16_f32(float* p, uint16_t* m, uint16_t* v, const float* grad, size_t n,
                      const flux_rounding* rounding, const flux_adamw_step* step, int threads) {
    const auto run = state_kernels().adamw16_f32;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(p + i, m + i, v + i, grad + i, count, from(rounding, i), *step);
    });
}

void flux_encode8(const float* x, uint8_t* codes, size_t n, int is_signed) {
    DefaultRounding rounding;
    state_kernels().encode8(x, codes, n, is_signed != 0);
}

void flux_decode8(const uint8_t* codes, float* x, size_t n, int is_signed) {
    DefaultRounding rounding;
    state_kernels().decode8(codes, x, n, is_signed != 0);
}

void flux_stream8(uint16_t* hi, uint16_t* lo, uint8_t* m, uint8_t* v, const uint16_t* grad,
                  size_t n, int threads) {
    const auto run = state_kernels().stream8;
    over_ranges(n, threads, flux::kStateBlock, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count);
    });
}

void flux_stream16(uint16_t* hi, uint16_t* lo, uint16_t* m, uint16_t* v, const uint16_t* grad,
                   size_t n, int threads) {
    const auto run = state_kernels().stream16;
    over_ranges(n, threads, kCut, [&](size_t i, size_t count) {
        run(hi + i, lo + i, m + i, v + i, grad + i, count);
    });
}
}
