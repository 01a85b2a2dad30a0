// Sixteen lanes.
#include <immintrin.h>

#include "packing_lanes.h"

namespace flux {
namespace {

struct Avx512 {
    static constexpr size_t width = 16;
    using Float = __m512;
    using Int = __m512i;

    static FLUX_INLINE __m256i halves(const void* at) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(at));
    }
    static FLUX_INLINE __m128i bytes(const void* at) {
        return _mm_loadu_si128(static_cast<const __m128i*>(at));
    }
    static FLUX_INLINE Float load(const float* at) { return _mm512_loadu_ps(at); }
    static FLUX_INLINE Float load(const Bf16* at) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(at)), 16));
    }
    static FLUX_INLINE Float load(const F16* at) { return _mm512_cvtph_ps(halves(at)); }
    static FLUX_INLINE Float load_int8(const uint8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(at)));
    }

    static FLUX_INLINE void store(float* at, Float x) { _mm512_storeu_ps(at, x); }
    static FLUX_INLINE void store(Bf16* at, Float x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), rounded(x, Bf16{}));
    }
    static FLUX_INLINE void store(F16* at, Float x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), rounded(x, F16{}));
    }
    static FLUX_INLINE void store_int8(uint8_t* at, Float x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
    }

    static FLUX_INLINE __m256i rounded(Float x, Bf16) {
        const Int bits = _mm512_castps_si512(x);
        const Int odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const Int up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const Int kept = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan,
                                               _mm512_set1_epi32(0x7fc0));
        return _mm512_cvtepi32_epi16(kept);
    }
    static FLUX_INLINE __m256i rounded(Float x, F16) {
        return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    }

    static FLUX_INLINE Int zero() { return _mm512_setzero_si512(); }
    static FLUX_INLINE Float all(float x) { return _mm512_set1_ps(x); }
    static FLUX_INLINE Float mul(Float a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
    static FLUX_INLINE Int larger_magnitude(Int most, Float x) {
        const Int magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
        return _mm512_max_epi32(most, magnitude);
    }
    static FLUX_INLINE uint32_t largest(Int most) {
        return static_cast<uint32_t>(_mm512_reduce_max_epi32(most));
    }

    static FLUX_INLINE Int add_bit(Int code, Float x, Float border) {
        const Int twice = _mm512_add_epi32(code, code);
        const __mmask16 is_more = _mm512_cmp_ps_mask(x, border, _CMP_GT_OQ);
        return _mm512_mask_add_epi32(twice, is_more, twice, _mm512_set1_epi32(1));
    }
    static FLUX_INLINE Int nf4_of(Float x) {
        Int code = add_bit(zero(), x, all(kBorder));
        code = add_bit(code, x, _mm512_permutexvar_ps(code, _mm512_load_ps(kBorders1)));
        code = add_bit(code, x, _mm512_permutexvar_ps(code, _mm512_load_ps(kBorders2)));
        return add_bit(code, x, _mm512_permutexvar_ps(code, _mm512_load_ps(kBorders3)));
    }
    static FLUX_INLINE void store_nf4(uint8_t* codes, const Float (&values)[4]) {
        Int all64 = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(nf4_of(values[0])));
        all64 = _mm512_inserti32x4(all64, _mm512_cvtepi32_epi8(nf4_of(values[1])), 1);
        all64 = _mm512_inserti32x4(all64, _mm512_cvtepi32_epi8(nf4_of(values[2])), 2);
        all64 = _mm512_inserti32x4(all64, _mm512_cvtepi32_epi8(nf4_of(values[3])), 3);
        const Int pairs = _mm512_maddubs_epi16(all64, _mm512_set1_epi16(0x0110));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi16_epi8(pairs));
    }

    static FLUX_INLINE void unpack_block(const uint8_t* codes, float absmax, float* out) {
        const Float products = mul(_mm512_load_ps(kNf4), absmax);
        for (size_t j = 0; j < kPackedBlock; j += width) {
            const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + j / 2));
            const Int two = _mm512_cvtepu8_epi64(eight);  // two codes in 64 bits
            const Int second = _mm512_slli_epi64(_mm512_and_si512(two, _mm512_set1_epi64(15)), 32);
            const Int code = _mm512_or_si512(_mm512_srli_epi64(two, 4), second);
            store(out + j, _mm512_permutexvar_ps(code, products));
        }
    }
    template <class Half>
    static FLUX_INLINE void unpack_block(const uint8_t* codes, float absmax, Half* out) {
        const __m256i products = rounded(mul(_mm512_load_ps(kNf4), absmax), Half{});
        const Int table = _mm512_broadcast_i64x4(products);
        for (size_t j = 0; j < kPackedBlock; j += 32) {
            const Int two = _mm512_cvtepu8_epi32(bytes(codes + j / 2));  // two codes in 32 bits
            const Int second = _mm512_slli_epi32(_mm512_and_si512(two, _mm512_set1_epi32(15)), 16);
            const Int code = _mm512_or_si512(_mm512_srli_epi32(two, 4), second);
            _mm512_storeu_si512(out + j, _mm512_permutexvar_epi16(code, table));
        }
    }
};

}  // namespace

extern const PackingKernels kAvx512Packing = packing_over<Avx512>();

}  // namespace flux
