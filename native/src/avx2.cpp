// Eight lanes. A tail goes through a small buffer, because AVX2 cannot mask 16-bit lanes.
#include <immintrin.h>

#include "lanes.h"

namespace flux {
namespace {

struct Avx2 {
    static constexpr size_t width = 8;
    using Float = __m256;
    using Int = __m256i;

    static FLUX_INLINE __m128i low_halves(Int x) {
        const Int masked = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
        const Int packed = _mm256_packus_epi32(masked, masked);  // per 128-bit half
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }

    struct Whole {
        FLUX_INLINE Int load(const uint16_t* at) const {
            return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        }
        FLUX_INLINE Float load(const float* at) const { return _mm256_loadu_ps(at); }
        FLUX_INLINE void store(float* at, Float x) const { _mm256_storeu_ps(at, x); }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(at), low_halves(x));
        }
    };

    struct Tail {
        size_t count;
        explicit FLUX_INLINE Tail(size_t count) : count(count) {}

        FLUX_INLINE Int load(const uint16_t* at) const {
            uint16_t lanes[width] = {};
            for (size_t j = 0; j < count; ++j) lanes[j] = at[j];
            return Whole{}.load(lanes);
        }
        FLUX_INLINE Float load(const float* at) const {
            float lanes[width] = {};
            for (size_t j = 0; j < count; ++j) lanes[j] = at[j];
            return Whole{}.load(lanes);
        }
        FLUX_INLINE void store(float* at, Float x) const {
            float lanes[width];
            Whole{}.store(lanes, x);
            for (size_t j = 0; j < count; ++j) at[j] = lanes[j];
        }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            uint16_t lanes[width];
            Whole{}.store_low_half(lanes, x);
            for (size_t j = 0; j < count; ++j) at[j] = lanes[j];
        }
    };

    struct Sums {
        __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                           _mm256_setzero_pd()};

        // Sums of lanes 0 to 7 when i is a multiple of 16, else of lanes 8 to 15.
        FLUX_INLINE void add_square(Float x, size_t i) {
            const size_t half = i % 16 / 8 * 2;
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
            sums[half] = _mm256_add_pd(sums[half], _mm256_mul_pd(low, low));
            sums[half + 1] = _mm256_add_pd(sums[half + 1], _mm256_mul_pd(high, high));
        }
        FLUX_INLINE void store(double* to) const {
            for (size_t j = 0; j < 4; ++j) _mm256_storeu_pd(to + 4 * j, sums[j]);
        }
    };

    static FLUX_INLINE Float all(float x) { return _mm256_set1_ps(x); }
    static FLUX_INLINE Int all_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static FLUX_INLINE Float as_float(Int x) { return _mm256_castsi256_ps(x); }
    static FLUX_INLINE Int as_int(Float x) { return _mm256_castps_si256(x); }
    static FLUX_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static FLUX_INLINE Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static FLUX_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static FLUX_INLINE Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
    static FLUX_INLINE Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
    static FLUX_INLINE Float quiet(Float a) {
        const Float is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
        return _mm256_blendv_ps(a, as_float(all_int(0x7fc00000u)), is_nan);
    }
    static FLUX_INLINE Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static FLUX_INLINE Int sub(Int a, Int b) { return _mm256_sub_epi32(a, b); }
    static FLUX_INLINE Int bit_and(Int a, Int b) { return _mm256_and_si256(a, b); }
    static FLUX_INLINE Int bit_or(Int a, Int b) { return _mm256_or_si256(a, b); }
    static FLUX_INLINE Int shift_left_16(Int a) { return _mm256_slli_epi32(a, 16); }
    static FLUX_INLINE Int shift_right_15(Int a) { return _mm256_srli_epi32(a, 15); }
    static FLUX_INLINE Int shift_right_16(Int a) { return _mm256_srli_epi32(a, 16); }
    static FLUX_INLINE Int zero_where_no_bits(Int a, Int bits) {
        return _mm256_andnot_si256(_mm256_cmpeq_epi32(bits, _mm256_setzero_si256()), a);
    }
    template <class Value>
    static FLUX_INLINE Value opaque(Value a) {
        asm volatile("" : "+x"(a));
        return a;
    }
};

}  // namespace

extern const Kernels kAvx2Kernels = KernelsOver<Avx2>::table();

}  // namespace flux
