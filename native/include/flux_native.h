/* The C interface of FluxTrain's host kernels.
 *
 * Arrays are flat, of n elements, of any alignment, and must not overlap. Every result is the same
 * bit for bit whatever the instruction set, the number of threads, and (but for sums of squares,
 * whose parts are added in order) however a range is cut into calls. `threads` <= 0 means the OpenMP default (OMP_NUM_THREADS, else the processors).
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
 *
 * 8-bit states (the meaning of bitsandbytes' block-wise AdamW): m and v are codes of a signed and an
 * unsigned map (src/map8.h), one scale for each block of 256 elements: x = value(code) * scale. The
 * update takes fewer operations, the terms of a sum joined in fused multiply-adds: fma(a, b, c) is
 * a * b + c, rounded once. A value is slope * k + offset, with k of its code's line,
 *
 *   left = scale * beta; where that is less than 2^-80, or NaN, 0 for m and 2^-80 for v
 *   m = fma(grad, one_minus_beta1 * grad_scale, fma(slope * left, k, offset * left))
 *   g = grad * (sqrt(one_minus_beta2) * grad_scale)
 *   v = fma(g, g, fma(slope * left, k, offset * left))
 *   p = fma(m / (sqrt(v) + eps / rsqrt_correction2), -(step_size / rsqrt_correction2), p * decay)
 *
 * which is the update above in the form of Kingma and Ba, Adam, 2015, end of section 2. Then, for each
 * block,
 *
 *   scale = max(|x| of the block, 2^-79)
 *   y     = x * (c / scale) for m, fma(x, c / scale, -2^-126) for v      with c of the map
 *   code  = by y, as src/map8.h says: that of the nearest value, but for what is close to the middle of
 *           two; for v, zero stands for what has a sign then: zero, and less than 2^-121 of the scale
 *
 * An element whose new m or v is not finite keeps the weight of the formula (NaN where that is NaN)
 * and starts anew from m = v = 0. All bytes zero is the state before the first step. An array of
 * scales has one element for each block begun; calls may cut a range where a block begins.
 *
 * The same update in two passes, fp32 states: FLUX_PASS_WEIGHTS writes the weights and leaves m and v
 * as they are, FLUX_PASS_MOMENTS writes m and v. Both compute the new moments from the same old
 * ones, so that after both, with one gradient and one step, every bit is that of the update in one.
 * Each moves 18 of the 26 bytes of a split weight with a bf16 gradient. The weights come first, and
 * the gradient must stay until the moments are done.
 *
 * bf16 states: the update of 8-bit states with the decayed moments beta1 * m and beta2 * v in place of
 * the values of codes. m and v are rounded to bf16 at random, up or down so that the mean is right: to
 * the nearest, v would stand still, because 1 - beta2 is less than the spacing of bf16. A random
 * number is the exclusive-or of two hashes with the step's two keys: of the element's number modulo
 * 1024, and of the complement of how many times 1024 it is. Low half m, high half v.
 *
 * Packed weights, of Dettmers et al. 2023 (QLoRA) and 2022 (LLM.int8()), with the arithmetic of
 * bitsandbytes' CUDA kernels. A dense range of n elements becomes, each operation rounded to fp32,
 *
 *   nf4     for each 64 elements absmax = max|x| and codes: how many of 15 borders are less than
 *           x * (1 / absmax). Two codes a byte, the first in its upper four bits. A code's value is
 *           value[code] * absmax
 *   double  the same codes. absmax of the weight's blocks have a mean, summed in fp64 as sums of squares
 *           are (16 interleaved sums of each 256, folded in halves, added in order), divided by their
 *           number and rounded to fp32: the offset. For each 256 scale = max|absmax - offset|, and
 *           codes of 8 bits: the value of the map nearest to (absmax - offset) * (1 / scale); in the
 *           middle of two, that with the even code. absmax is map[code] * scale + offset
 *   int8    for each row absmax = max|x|, codes: x * ((1 / absmax) * 127) to the nearest integer, ties
 *           to even. A code's value is (code * absmax) * (1 / 127 in fp32)
 *
 * Where an absmax or a scale is zero, or so small that its reciprocal is infinite, all codes are those of
 * zero. Elements behind n up to `padded` have codes of zero and an absmax of zero; unpacked they are 0.
 * Where an absmax is NaN, which flux_pack reports, the bits of the NaN that it unpacks to are not defined.
 */
#ifndef FLUX_NATIVE_H
#define FLUX_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define FLUX_API __attribute__((visibility("default")))
#define FLUX_ABI_VERSION 9

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

typedef struct flux_rounding {
    uint32_t first_element; /* number of the range's first element; counts on modulo 2^32 */
    uint32_t first_key;
    uint32_t second_key;
} flux_rounding;

enum flux_weight_format { FLUX_WEIGHTS_F32 = 0, FLUX_WEIGHTS_SPLIT_BF16 = 1 };
enum flux_state_format { FLUX_STATES_F32 = 0, FLUX_STATES_BF16 = 1, FLUX_STATES_8BIT = 2 };
enum flux_gradient_format { FLUX_GRADIENT_F32 = 0, FLUX_GRADIENT_BF16 = 1 };
enum flux_pass { FLUX_PASS_UPDATE = 0, FLUX_PASS_WEIGHTS = 1, FLUX_PASS_MOMENTS = 2 };

enum flux_status {
    FLUX_OK = 0,
    FLUX_WRONG_SIZE = 1,     /* `size` is not that of this library's flux_adamw_args */
    FLUX_UNKNOWN_FORMAT = 2, /* a format or the pass is none of its enum */
    FLUX_NOT_OFFERED = 3,    /* no kernel has this combination of them */
    FLUX_NULL_POINTER = 4,   /* an array that this combination needs is missing */
    FLUX_WRONG_COUNT = 5,    /* n, padded and columns do not go together */
    FLUX_NO_MEMORY = 6       /* for 4 bytes of each 64 elements */
};

/* One call of flux_adamw. fp32 weights take fp32 gradients, and only fp32 states have two passes; the
 * pass over the moments takes either gradient and ignores weights. */
typedef struct flux_adamw_args {
    uint32_t size; /* sizeof(flux_adamw_args) */
    uint32_t weight_format;
    uint32_t state_format;
    uint32_t gradient_format;
    uint32_t pass;
    int32_t threads;
    size_t n;
    void* weights; /* fp32, or the upper halves `hi` of split masters */
    uint16_t* lo;  /* of split masters */
    void* m;       /* fp32, bf16, or codes of 8 bits */
    void* v;
    float* m_scale; /* of 8-bit states */
    float* v_scale;
    const void* gradient;
    flux_rounding rounding; /* of bf16 states */
    flux_adamw_step step;
} flux_adamw_args;

enum flux_packed_format { FLUX_PACKED_NF4 = 0, FLUX_PACKED_NF4_DOUBLE = 1, FLUX_PACKED_INT8 = 2 };
enum flux_dense_format { FLUX_DENSE_F32 = 0, FLUX_DENSE_BF16 = 1, FLUX_DENSE_F16 = 2 };

/* One call of flux_pack or flux_unpack. `padded` is a multiple of 16384; flux_unpack writes it all. */
typedef struct flux_packing_args {
    uint32_t size; /* sizeof(flux_packing_args) */
    uint32_t format;
    uint32_t dense_format;
    int32_t threads;
    size_t n;       /* elements; of int8 whole rows */
    size_t padded;  /* elements of the packed range, n or more */
    size_t columns; /* of int8: elements of a row */
    void* dense;    /* flux_pack reads n elements, flux_unpack writes `padded` */
    uint8_t* codes;
    void* absmax;      /* fp32; of nf4-double codes of 8 bits */
    float* scales;     /* of nf4-double, as the two that follow */
    float* offsets;
    const float* map;  /* 256 values, ascending */
    size_t not_finite; /* flux_pack: how many elements are NaN or infinite; the rest is packed */
} flux_packing_args;

enum flux_isa_level { FLUX_SCALAR = 0, FLUX_AVX2 = 1, FLUX_AVX512 = 2 };

FLUX_API int flux_abi_version(void);

/* The instruction set in use. FLUXTRAIN_ISA=scalar|avx2|avx512 lowers what the processor has. */
FLUX_API int flux_isa(void);
/* Use `level`, or the best allowed one below it; returns what is now in use. */
FLUX_API int flux_set_isa(int level);

/* Zeros, by all threads. Memory that was never written has pages afterwards: to read it first would
 * give it the one page of zeros, which Linux before 6.13 replaces by small pages when it is written. */
FLUX_API void flux_zero(void* memory, size_t bytes, int threads);

/* AdamW in place over one flat range, as `args` says. Returns FLUX_OK, or why nothing was touched. */
FLUX_API int flux_adamw(const flux_adamw_args* args);

/* Packs one weight, and unpacks one or, of nf4, a range of several. Return FLUX_OK, or why nothing was
 * touched. */
FLUX_API int flux_pack(flux_packing_args* args);
FLUX_API int flux_unpack(const flux_packing_args* args);

/* For measurements: reads and writes what flux_adamw does with the same arguments, and computes
 * nothing. Split weights with a bf16 gradient alone; scales, a hundredth of it, are left out. */
FLUX_API int flux_adamw_stream(const flux_adamw_args* args);

/* Codes and scales of fp32 moments, as an update leaves them: what is not finite is zero. The number of
 * the first element is a multiple of 256. */
FLUX_API void flux_quantise8(const float* x, uint8_t* codes, float* scales, size_t n, int is_signed,
                             int threads);

/* Codes of fractions in [-1, 1] (unsigned map: [0, 1]), and the fractions of codes. */
FLUX_API void flux_encode8(const float* x, uint8_t* codes, size_t n, int is_signed);
FLUX_API void flux_decode8(const uint8_t* codes, float* x, size_t n, int is_signed);

#ifdef __cplusplus
}
#endif
#endif
