// The C interface: picks the instruction set once and runs the kernels on several threads.
// The only file that knows CPUID.
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "map8.h"
#include "packing.h"
#include "threads.h"

namespace {

using flux::kCut;
using flux::Kernels;
using flux::over_ranges;

static_assert(flux::kStateBlock % kCut == 0);

int processor_level() {
#ifdef FLUX_X86
    __builtin_cpu_init();
    // Every processor with AVX2 that is sold has FMA, which 8-bit states are defined with, and F16C.
    if (!__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return FLUX_SCALAR;
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

// The arguments of the elements [first, first + count) of an update.
flux_adamw_args part_of(const flux_adamw_args& whole, size_t first, size_t count) {
    constexpr size_t kWeightBytes[] = {4, 2}, kStateBytes[] = {4, 2, 1}, kGradientBytes[] = {4, 2};
    const auto later = [first](auto* at, size_t bytes) {  // as a number: some may be null
        return reinterpret_cast<decltype(at)>(reinterpret_cast<uintptr_t>(at) + first * bytes);
    };
    flux_adamw_args part = whole;
    part.n = count;
    part.weights = later(whole.weights, kWeightBytes[whole.weight_format]);
    part.lo = later(whole.lo, sizeof(uint16_t));
    part.m = later(whole.m, kStateBytes[whole.state_format]);
    part.v = later(whole.v, kStateBytes[whole.state_format]);
    part.gradient = later(whole.gradient, kGradientBytes[whole.gradient_format]);
    if (whole.state_format == FLUX_STATES_8BIT) {
        part.m_scale += first / flux::kStateBlock;
        part.v_scale += first / flux::kStateBlock;
    }
    part.rounding.first_element += static_cast<uint32_t>(first);
    return part;
}

// Why these arguments cannot be followed, or FLUX_OK.
int status_of(const flux_adamw_args& a) {
    if (a.size != sizeof a) return FLUX_WRONG_SIZE;
    if (a.pass > FLUX_PASS_MOMENTS || a.state_format > FLUX_STATES_8BIT ||
        a.weight_format > FLUX_WEIGHTS_SPLIT_BF16 || a.gradient_format > FLUX_GRADIENT_BF16)
        return FLUX_UNKNOWN_FORMAT;
    if (a.n == 0) return FLUX_OK;
    const bool has_weights = a.weights && (a.lo || a.weight_format != FLUX_WEIGHTS_SPLIT_BF16);
    const bool has_scales = (a.m_scale && a.v_scale) || a.state_format != FLUX_STATES_8BIT;
    const bool has_all = a.m && a.v && a.gradient && has_scales &&
                         (has_weights || a.pass == FLUX_PASS_MOMENTS);
    return has_all ? FLUX_OK : FLUX_NULL_POINTER;
}

int over_parts(flux::AdamW run, const flux_adamw_args& args) {
    if (run == nullptr) return FLUX_NOT_OFFERED;
    const size_t cut = args.state_format == FLUX_STATES_8BIT ? flux::kStateBlock : kCut;
    over_ranges(args.n, args.threads, cut, [&](size_t first, size_t count) {
        run(part_of(args, first, count));
    });
    return FLUX_OK;
}

}  // namespace

// Measured: AMD's Zen 5 is a tenth slower with it, an Intel server a tenth faster (docs/benchmarks.md).
extern const bool flux::kFetchesFewFar = is_of_intel();

const flux::PackingKernels& flux::packing_kernels() {
#ifdef FLUX_X86
    if (in_use == FLUX_AVX512) return kAvx512Packing;
    if (in_use == FLUX_AVX2) return kAvx2Packing;
#endif
    return kScalarPacking;
}

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

int flux_adamw(const flux_adamw_args* args) {
    if (args == nullptr) return FLUX_NULL_POINTER;
    const flux_adamw_args& a = *args;
    const int status = status_of(a);
    if (status != FLUX_OK) return status;
    return over_parts(
        kernels().adamw[a.pass][a.state_format][a.weight_format][a.gradient_format], a);
}

int flux_adamw_stream(const flux_adamw_args* args) {
    if (args == nullptr) return FLUX_NULL_POINTER;
    const int status = status_of(*args);
    if (status != FLUX_OK) return status;
    const bool is_offered = args->weight_format == FLUX_WEIGHTS_SPLIT_BF16 &&
                            args->gradient_format == FLUX_GRADIENT_BF16;
    return over_parts(
        is_offered ? kernels().stream[args->pass][args->state_format] : nullptr, *args);
}

void flux_quantise8(const float* x, uint8_t* codes, float* scales, size_t n, int is_signed,
                    int threads) {
    const auto run = kernels().quantise8;
    over_ranges(n, threads, flux::kStateBlock, [&](size_t i, size_t count) {
        run(x + i, codes + i, scales + i / flux::kStateBlock, count, is_signed != 0);
    });
}

void flux_encode8(const float* x, uint8_t* codes, size_t n, int is_signed) {
    flux::DefaultRounding rounding;
    kernels().encode8(x, codes, n, is_signed != 0);
}

void flux_decode8(const uint8_t* codes, float* x, size_t n, int is_signed) {
    flux::DefaultRounding rounding;
    kernels().decode8(codes, x, n, is_signed != 0);
}
}
