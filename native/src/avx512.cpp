// Sixteen lanes; tails are masked.
#include <immintrin.h>

#include "lanes.h"

namespace flux {
namespace {

struct Avx512 {
    static constexpr size_t width = 16;
    using Float = __m512;
    using Int = __m512i;

    struct Whole {
        FLUX_INLINE Int load(const uint16_t* at) const {
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        }
        FLUX_INLINE Float load(const float* at) const { return _mm512_loadu_ps(at); }
        FLUX_INLINE void store(float* at, Float x) const { _mm512_storeu_ps(at, x); }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(x));
        }
    };

    struct Tail {
        __mmask16 mask;
        explicit FLUX_INLINE Tail(size_t count) : mask(static_cast<__mmask16>((1u << count) - 1)) {}

        FLUX_INLINE Int load(const uint16_t* at) const {
            return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at));
        }
        FLUX_INLINE Float load(const float* at) const { return _mm512_maskz_loadu_ps(mask, at); }
        FLUX_INLINE void store(float* at, Float x) const { _mm512_mask_storeu_ps(at, mask, x); }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            _mm256_mask_storeu_epi16(at, mask, _mm512_cvtepi32_epi16(x));
        }
    };

    struct Sums {
        __m512d low = _mm512_setzero_pd();
        __m512d high = _mm512_setzero_pd();

        FLUX_INLINE void add_square(Float x, size_t) {
            const __m256d top = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
            const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            const __m512d b = _mm512_cvtps_pd(_mm256_castpd_ps(top));
            low = _mm512_add_pd(low, _mm512_mul_pd(a, a));
            high = _mm512_add_pd(high, _mm512_mul_pd(b, b));
        }
        FLUX_INLINE void store(double* to) const {
            _mm512_storeu_pd(to, low);
            _mm512_storeu_pd(to + 8, high);
        }
    };

    static FLUX_INLINE Float all(float x) { return _mm512_set1_ps(x); }
    static FLUX_INLINE Int all_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static FLUX_INLINE Float as_float(Int x) { return _mm512_castsi512_ps(x); }
    static FLUX_INLINE Int as_int(Float x) { return _mm512_castps_si512(x); }
    static FLUX_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static FLUX_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static FLUX_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static FLUX_INLINE Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static FLUX_INLINE Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
    static FLUX_INLINE Float quiet(Float a) {
        const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
        return _mm512_mask_mov_ps(a, is_nan, as_float(all_int(0x7fc00000u)));
    }
    static FLUX_INLINE Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static FLUX_INLINE Int sub(Int a, Int b) { return _mm512_sub_epi32(a, b); }
    static FLUX_INLINE Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
    static FLUX_INLINE Int bit_or(Int a, Int b) { return _mm512_or_si512(a, b); }
    static FLUX_INLINE Int shift_left_16(Int a) { return _mm512_slli_epi32(a, 16); }
    static FLUX_INLINE Int shift_right_15(Int a) { return _mm512_srli_epi32(a, 15); }
    static FLUX_INLINE Int shift_right_16(Int a) { return _mm512_srli_epi32(a, 16); }
    static FLUX_INLINE Int zero_where_no_bits(Int a, Int bits) {
        return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(bits, bits), a);
    }
    template <class Value>
    static FLUX_INLINE Value opaque(Value a) {
        asm volatile("" : "+v"(a));
        return a;
    }
};

}  // namespace

extern const Kernels kAvx512Kernels = KernelsOver<Avx512>::table();

}  // namespace flux
