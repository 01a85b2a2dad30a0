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
        FLUX_INLINE Int load(const uint8_t* at) const {
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        }
        FLUX_INLINE Int load(const uint16_t* at) const {
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        }
        FLUX_INLINE Float load(const float* at) const { return _mm512_loadu_ps(at); }
        FLUX_INLINE void store(float* at, Float x) const { _mm512_storeu_ps(at, x); }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(x));
        }
        FLUX_INLINE void store_low_byte(uint8_t* at, Int x) const {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(x));
        }
        FLUX_INLINE Float only(Float x) const { return x; }
    };

    struct Tail {
        __mmask16 mask;
        explicit FLUX_INLINE Tail(size_t count) : mask(static_cast<__mmask16>((1u << count) - 1)) {}

        FLUX_INLINE Int load(const uint8_t* at) const {
            return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, at));
        }
        FLUX_INLINE Int load(const uint16_t* at) const {
            return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at));
        }
        FLUX_INLINE Float load(const float* at) const { return _mm512_maskz_loadu_ps(mask, at); }
        FLUX_INLINE void store(float* at, Float x) const { _mm512_mask_storeu_ps(at, mask, x); }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            _mm256_mask_storeu_epi16(at, mask, _mm512_cvtepi32_epi16(x));
        }
        FLUX_INLINE void store_low_byte(uint8_t* at, Int x) const {
            _mm_mask_storeu_epi8(at, mask, _mm512_cvtepi32_epi8(x));
        }
        // Zero past the end: the lowest code of the signed map does not stand for zero.
        FLUX_INLINE Float only(Float x) const { return _mm512_maskz_mov_ps(mask, x); }
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

    using Table = __m512;  // the eight entries twice: a look-up reads four bits
    static FLUX_INLINE Table table(const float (&entries)[8]) {
        const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(entries));
        return _mm512_shuffle_f32x4(low, low, 0x44);
    }
    static FLUX_INLINE Float look_up(Table table, Int at) {
        return _mm512_permutexvar_ps(at, table);
    }
    static FLUX_INLINE Float exact_mul_add(Float a, Float b, Float c) {
        return _mm512_fmadd_ps(a, b, c);
    }
    static FLUX_INLINE Float smaller(Float a, Float b) { return _mm512_min_ps(a, b); }
    static FLUX_INLINE Float larger(Float a, Float b) { return _mm512_max_ps(a, b); }
    static FLUX_INLINE float largest(Float a) { return _mm512_reduce_max_ps(a); }
    static FLUX_INLINE Float whole_part(Float a) {
        return _mm512_roundscale_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    }
    static FLUX_INLINE Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
    static FLUX_INLINE Int to_int(Float a) { return _mm512_cvttps_epi32(a); }
    static FLUX_INLINE __mmask16 at_least(Float a, Float b) {
        return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
    }
    static FLUX_INLINE __mmask16 below(Float a, Float b) {
        return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
    }
    static FLUX_INLINE __mmask16 both(__mmask16 a, __mmask16 b) { return a & b; }
    static FLUX_INLINE Float keep_where(__mmask16 mask, Float a) {
        return _mm512_maskz_mov_ps(mask, a);
    }
    static FLUX_INLINE Int add_one_where(__mmask16 mask, Int a) {
        return _mm512_mask_add_epi32(a, mask, a, all_int(1));
    }
    static FLUX_INLINE Float add_one_where(__mmask16 mask, Float a) {
        return _mm512_mask_add_ps(a, mask, a, all(1));
    }
    static FLUX_INLINE Int larger_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
    static FLUX_INLINE Int bit_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
    static FLUX_INLINE Int mul_low(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static FLUX_INLINE Int subtract_to_zero_16(Int a, Int b) { return _mm512_subs_epu16(a, b); }
    static FLUX_INLINE Int mul_high_16(Int a, Int b) { return _mm512_mulhi_epu16(a, b); }
    static FLUX_INLINE Int count_from(uint32_t first) {
        return _mm512_add_epi32(all_int(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                                                  11, 12, 13, 14, 15));
    }
    template <int count>
    static FLUX_INLINE Int shift_right(Int a) {
        return _mm512_srli_epi32(a, count);
    }
    template <class Value>
    static FLUX_INLINE Value opaque(Value a) {
        asm volatile("" : "+v"(a));
        return a;
    }
};

}  // namespace

extern const Kernels kAvx512Kernels = KernelsOver<Avx512>::table();
extern const StateKernels kAvx512StateKernels = StatesOver<Avx512>::table();

}  // namespace flux
