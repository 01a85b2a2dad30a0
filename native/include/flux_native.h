/* The C interface of FluxTrain's host kernels.
 *
 * Arrays are flat, of n elements, of any alignment, and must not overlap. Every result is the same
 * bit for bit whatever the instruction set, the number of threads, and however a range is cut into
 * calls. `threads` <= 0 means the OpenMP default (OMP_NUM_THREADS, else the processors).
 *
 * A split master weight is an fp32 value kept as two 16-bit halves:
 *
 *   encode   hi = (bits + 0x8000) >> 16      what the device computes with, a bf16
 *            lo = bits & 0xffff              the rest of the fp32
 *   decode   bits = ((hi - (lo >> 15)) << 16) | lo
 *
 * hi is the bf16 nearest to the master, ties away from zero. hi = +-0 decodes to +-0 whatever lo
 * holds, so that a weight zeroed from outside is zero. A NaN is stored as 0x7fc00000, never as what
 * rounding its payload would give.
 *
 * One AdamW update of one element, each operation rounded to fp32, in this order:
 *
 *   g = grad * grad_scale
 *   p = p * decay                                            decay = 1 - lr * weight_decay
 *   m = beta1 * m + one_minus_beta1 * g
 *   v = beta2 * v + (one_minus_beta2 * g) * g
 *   p = p - (step_size * m) / (sqrt(v) * rsqrt_correction2 + eps)
 *
 * with step_size = lr / (1 - beta1^t) and rsqrt_correction2 = 1 / sqrt(1 - beta2^t). The caller
 * computes the coefficients in double precision and rounds each once. NaN results are 0x7fc00000.
 * (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW.)
 */
#ifndef FLUX_NATIVE_H
#define FLUX_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define FLUX_API __attribute__((visibility("default")))
#define FLUX_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct flux_adamw_step {
    float grad_scale;
    float decay;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;
    float rsqrt_correction2;
    float eps;
} flux_adamw_step;

enum flux_isa_level { FLUX_SCALAR = 0, FLUX_AVX2 = 1, FLUX_AVX512 = 2 };

FLUX_API int flux_abi_version(void);

/* The instruction set in use. FLUXTRAIN_ISA=scalar|avx2|avx512 lowers what the processor has. */
FLUX_API int flux_isa(void);
/* Use `level`, or the best allowed one below it; returns what is now in use. */
FLUX_API int flux_set_isa(int level);

FLUX_API void flux_adamw_split_bf16(uint16_t* hi, uint16_t* lo, float* m, float* v,
                                    const uint16_t* grad_bf16, size_t n,
                                    const flux_adamw_step* step, int threads);
FLUX_API void flux_adamw_split_f32(uint16_t* hi, uint16_t* lo, float* m, float* v,
                                   const float* grad, size_t n,
                                   const flux_adamw_step* step, int threads);
FLUX_API void flux_adamw_f32(float* p, float* m, float* v, const float* grad, size_t n,
                             const flux_adamw_step* step, int threads);

/* sum += x */
FLUX_API void flux_accumulate_bf16(float* sum, const uint16_t* x_bf16, size_t n, int threads);
FLUX_API void flux_accumulate_f32(float* sum, const float* x, size_t n, int threads);

/* Sum of squares in double precision: 16 interleaved sums per block of 16384 elements, folded in
 * halves, blocks added in order. */
FLUX_API double flux_sum_squares_bf16(const uint16_t* x_bf16, size_t n, int threads);
FLUX_API double flux_sum_squares_f32(const float* x, size_t n, int threads);

/* For measurements: reads and writes what flux_adamw_split_bf16 does, and computes nothing. */
FLUX_API void flux_stream_split(uint16_t* hi, uint16_t* lo, float* m, float* v,
                                const uint16_t* grad_bf16, size_t n, int threads);

#ifdef __cplusplus
}
#endif
#endif
