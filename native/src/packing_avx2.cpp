// Eight lanes.
#include <immintrin.h>

#include "packing_lanes.h"

namespace flux {
namespace {

struct Avx2 {
    static constexpr size_t width = 8;
    using Float = __m256;
    using Int = __m256i;

    static FLUX_INLINE __m128i halves(const void* at) {
        return _mm_loadu_si128(static_cast<const __m128i*>(at));
    }
    static FLUX_INLINE Float load(const float* at) { return _mm256_loadu_ps(at); }
    static FLUX_INLINE Float load(const Bf16* at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves(at)), 16));
    }
    static FLUX_INLINE Float load(const F16* at) { return _mm256_cvtph_ps(halves(at)); }
    static FLUX_INLINE Float load_int8(const uint8_t* at) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }

    static FLUX_INLINE void store(float* at, Float x) { _mm256_storeu_ps(at, x); }
    static FLUX_INLINE void store(Bf16* at, Float x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), rounded(x, Bf16{}));
    }
    static FLUX_INLINE void store(F16* at, Float x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), rounded(x, F16{}));
    }
    static FLUX_INLINE void store_int8(uint8_t* at, Float x) {
        const Int whole = _mm256_cvtps_epi32(x);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                              _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(words, words));
    }

    static FLUX_INLINE __m128i rounded(Float x, Bf16) {
        const Int bits = _mm256_castps_si256(x);
        const Int odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const Int up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const Int is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const Int kept = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), is_nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
    }
    static FLUX_INLINE __m128i rounded(Float x, F16) {
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    }

    static FLUX_INLINE Int zero() { return _mm256_setzero_si256(); }
    static FLUX_INLINE Float all(float x) { return _mm256_set1_ps(x); }
    static FLUX_INLINE Float mul(Float a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
    static FLUX_INLINE Int larger_magnitude(Int most, Float x) {
        const Int magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
        return _mm256_max_epi32(most, magnitude);
    }
    static FLUX_INLINE uint32_t largest(Int most) {
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
    }

    static FLUX_INLINE Int add_bit(Int code, Float x, Float border) {
        const Int is_more = _mm256_castps_si256(_mm256_cmp_ps(x, border, _CMP_GT_OQ));  // -1 or 0
        return _mm256_sub_epi32(_mm256_add_epi32(code, code), is_more);
    }
    static FLUX_INLINE Int nf4_of(Float x) {
        Int code = add_bit(zero(), x, all(kBorder));
        code = add_bit(code, x, _mm256_permutevar8x32_ps(_mm256_load_ps(kBorders1), code));
        code = add_bit(code, x, _mm256_permutevar8x32_ps(_mm256_load_ps(kBorders2), code));
        return add_bit(code, x, _mm256_permutevar8x32_ps(_mm256_load_ps(kBorders3), code));
    }
    // 32 codes as words of two codes each, in the order of lanes that packing leaves.
    static FLUX_INLINE Int pairs(const Float* values) {
        const Int low = _mm256_packus_epi32(nf4_of(values[0]), nf4_of(values[1]));
        const Int high = _mm256_packus_epi32(nf4_of(values[2]), nf4_of(values[3]));
        return _mm256_maddubs_epi16(_mm256_packus_epi16(low, high), _mm256_set1_epi16(0x0110));
    }
    static FLUX_INLINE void store_nf4(uint8_t* codes, const Float (&values)[8]) {
        // Each pack works within 128 bits: bytes are, in fours of codes, 0 2 4 6 | 1 3 5 7 of 32.
        const Int bytes = _mm256_packus_epi16(pairs(values), pairs(values + 4));
        const Int order = _mm256_setr_epi8(0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1,
                                           -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7);
        const Int order_high = _mm256_setr_epi8(
            8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15, -1, -1, -1, -1, 8, 9, -1, -1, 10,
            11, -1, -1, 12, 13, -1, -1, 14, 15);
        const Int first = _mm256_shuffle_epi8(bytes, order);
        const Int second = _mm256_shuffle_epi8(bytes, order_high);
        __m128i* at = reinterpret_cast<__m128i*>(codes);
        _mm_storeu_si128(at, _mm_or_si128(_mm256_castsi256_si128(first),
                                          _mm256_extracti128_si256(first, 1)));
        _mm_storeu_si128(at + 1, _mm_or_si128(_mm256_castsi256_si128(second),
                                              _mm256_extracti128_si256(second, 1)));
    }

    static FLUX_INLINE void unpack_block(const uint8_t* codes, float absmax, float* out) {
        const Float low = mul(_mm256_load_ps(kNf4), absmax);
        const Float high = mul(_mm256_load_ps(kNf4 + 8), absmax);
        for (size_t j = 0; j < kPackedBlock; j += width) {
            int32_t four;
            __builtin_memcpy(&four, codes + j / 2, sizeof four);
            const Int two = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));  // two codes in 64 bits
            const Int second = _mm256_slli_epi64(_mm256_and_si256(two, _mm256_set1_epi64x(15)), 32);
            const Int code = _mm256_or_si256(_mm256_srli_epi64(two, 4), second);
            const Float is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
            store(out + j, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                            _mm256_permutevar8x32_ps(high, code), is_high));
        }
    }
    // Of 16 bits: a table of the products' lower bytes and one of their upper bytes.
    template <class Half>
    static FLUX_INLINE void unpack_block(const uint8_t* codes, float absmax, Half* out) {
        const __m128i first = rounded(mul(_mm256_load_ps(kNf4), absmax), Half{});
        const __m128i last = rounded(mul(_mm256_load_ps(kNf4 + 8), absmax), Half{});
        const __m128i byte = _mm_set1_epi16(0xff);
        const Int lower = _mm256_broadcastsi128_si256(
            _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(last, byte)));
        const Int upper = _mm256_broadcastsi128_si256(
            _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8)));
        for (size_t j = 0; j < kPackedBlock; j += 32) {
            const Int two = _mm256_cvtepu8_epi16(halves(codes + j / 2));  // two codes in 16 bits
            const Int second = _mm256_slli_epi16(_mm256_and_si256(two, _mm256_set1_epi16(15)), 8);
            const Int code = _mm256_or_si256(_mm256_srli_epi16(two, 4), second);
            const Int low = _mm256_shuffle_epi8(lower, code), high = _mm256_shuffle_epi8(upper, code);
            const Int a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
            Int* at = reinterpret_cast<Int*>(out + j);
            _mm256_storeu_si256(at, _mm256_permute2x128_si256(a, b, 0x20));
            _mm256_storeu_si256(at + 1, _mm256_permute2x128_si256(a, b, 0x31));
        }
    }
};

}  // namespace

extern const PackingKernels kAvx2Packing = packing_over<Avx2>();

}  // namespace flux
