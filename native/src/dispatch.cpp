// The C interface: picks the instruction set once and runs the kernels on several threads.
// The only file that knows CPUID.
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "map8.h"
#include "threads.h"

namespace {

using flux::kCut;
using flux::Kernels;
using flux::over_ranges;

static_assert(flux::kStateBlock % kCut == 0);

int processor_level() {
#ifdef FLUX_X86
    __builtin_cpu_init();
    // Every processor with AVX2 that is sold has FMA, which 8-bit states are defined with.
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

bool is_of_intel() {
#ifdef FLUX_X86
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
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

const flux::RowKernels& row_kernels() {
#ifdef FLUX_X86
    if (in_use == FLUX_AVX512) return flux::kAvx512RowKernels;
    if (in_use == FLUX_AVX2) return flux::kAvx2RowKernels;
#endif
    return flux::kScalarRowKernels;
}

// run(out, ..., rows, count, width, step) for ranges of the rows.
template <class Out, class Run, class... Arrays>
void over_rows(Run run, Out* out, const flux_rows* rows, const flux_adamw_step* step, int threads,
               Arrays... arrays) {
    const size_t width = rows->width;
    if (width == 0) return;
    over_ranges(rows->count * width, threads, width, [&](size_t i, size_t count) {
        run(out + i, arrays..., rows->numbers + i / width, count / width, width, *step);
    });
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

// Measured: AMD's Zen 5 is a tenth slower with it, an Intel server a tenth faster (docs/benchmarks.md).
extern const bool flux::kFetchesFewFar = is_of_intel();

extern "C" {

int flux_abi_version(void) { return FLUX_ABI_VERSION; }

int flux_isa(void) { return in_use; }

int flux_set_isa(int level) {
    in_use = level < FLUX_SCALAR ? FLUX_SCALAR : level < kAllowed ? level : kAllowed;
    return in_use;
}

void flux_zero(void* memory, size_t bytes, int threads) {
    char* const start = static_cast<char*>(memory);
    over_ranges(bytes, threads, kCut * sizeof(uint16_t), [&](size_t i, size_t count) {
        memset(start + i, 0, count);
    });
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

void flux_adamw_rows_split_bf16(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const float*
                                m, const float* v, const uint16_t* grad, const flux_rows* rows,
                                const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().split_bf16, out, rows, step, threads, hi, lo, m, v, grad);
}

void flux_adamw_rows_split_f32(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const float*
                               m, const float* v, const float* grad, const flux_rows* rows, const
                               flux_adamw_step* step, int threads) {
    over_rows(row_kernels().split_f32, out, rows, step, threads, hi, lo, m, v, grad);
}

void flux_adamw_rows_f32(float* out, const float* p, const float* m, const float* v, const float*
                         grad, const flux_rows* rows, const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().f32, out, rows, step, threads, p, m, v, grad);
}

void flux_adamw8_rows_split_bf16(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const
                                 flux_states8* states, const uint16_t* grad, const flux_rows* rows,
                                 const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().split8_bf16, out, rows, step, threads, hi, lo, *states, grad);
}

void flux_adamw8_rows_split_f32(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const
                                flux_states8* states, const float* grad, const flux_rows* rows,
                                const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().split8_f32, out, rows, step, threads, hi, lo, *states, grad);
}

void flux_adamw8_rows_f32(float* out, const float* p, const flux_states8* states, const float* grad,
                          const flux_rows* rows, const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().f32_8, out, rows, step, threads, p, *states, grad);
}

void flux_adamw16_rows_split_bf16(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const
                                  uint16_t* m, const uint16_t* v, const uint16_t* grad, const
                                  flux_rows* rows, const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().split16_bf16, out, rows, step, threads, hi, lo, m, v, grad);
}

void flux_adamw16_rows_split_f32(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const
                                 uint16_t* m, const uint16_t* v, const float* grad, const flux_rows*
                                 rows, const flux_adamw_step* step, int threads) {
    over_rows(row_kernels().split16_f32, out, rows, step, threads, hi, lo, m, v, grad);
}

void flux_adamw16_rows_f32(float* out, const float* p, const uint16_t* m, const uint16_t* v, const
                           float* grad, const flux_rows* rows, const flux_adamw_step* step, int
                           threads) {
    over_rows(row_kernels().f32_16, out, rows, step, threads, p, m, v, grad);
}

void flux_quantise8(const float* x, uint8_t* codes, float* scales, size_t n, int is_signed,
                    int threads) {
    const auto run = state_kernels().quantise8;
    over_ranges(n, threads, flux::kStateBlock, [&](size_t i, size_t count) {
        run(x + i, codes + i, scales + i / flux::kStateBlock, count, is_signed != 0);
    });
}

void flux_encode8(const float* x, uint8_t* codes, size_t n, int is_signed) {
    flux::DefaultRounding rounding;
    state_kernels().encode8(x, codes, n, is_signed != 0);
}

void flux_decode8(const uint8_t* codes, float* x, size_t n, int is_signed) {
    flux::DefaultRounding rounding;
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
