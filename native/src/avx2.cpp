// Eight lanes. A tail goes through a small buffer, because AVX2 cannot mask 16-bit lanes.
#include <immintrin.h>

#include "adamw.h"

namespace flux {
namespace {

struct Avx2 {
    static constexpr size_t width = 8;
    static constexpr bool kInterleaved = true;  // vectors of a turn (lanes.h)
    using Float = __m256;
    using Int = __m256i;

    static FLUX_INLINE __m128i low_halves(Int x) {
        const Int masked = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
        const Int packed = _mm256_packus_epi32(masked, masked);  // per 128-bit half
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }

    static FLUX_INLINE __m128i low_bytes(Int x) {
        const __m128i halves = low_halves(_mm256_and_si256(x, _mm256_set1_epi32(0xff)));
        return _mm_packus_epi16(halves, halves);
    }

    struct Whole {
        FLUX_INLINE Int load(const uint8_t* at) const {
            return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        }
        FLUX_INLINE Int load(const uint16_t* at) const {
            return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        }
        FLUX_INLINE Float load(const float* at) const { return _mm256_loadu_ps(at); }
        FLUX_INLINE void store(float* at, Float x) const { _mm256_storeu_ps(at, x); }
        FLUX_INLINE void store_low_half(uint16_t* at, Int x) const {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(at), low_halves(x));
        }
        FLUX_INLINE void store_low_byte(uint8_t* at, Int x) const {
            _mm_storel_epi64(reinterpret_cast<__m128i*>(at), low_bytes(x));
        }
        FLUX_INLINE Float only(Float x) const { return x; }
    };

    struct Tail {
        size_t count;
        explicit FLUX_INLINE Tail(size_t count) : count(count) {}

        FLUX_INLINE Int load(const uint8_t* at) const {
            uint8_t lanes[width] = {};
            for (size_t j = 0; j < count; ++j) lanes[j] = at[j];
            return Whole{}.load(lanes);
        }
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
        FLUX_INLINE void store_low_byte(uint8_t* at, Int x) const {
            uint8_t lanes[width];
            Whole{}.store_low_byte(lanes, x);
            for (size_t j = 0; j < count; ++j) at[j] = lanes[j];
        }
        // Zero past the end: the lowest code of the signed map does not stand for zero.
        FLUX_INLINE Float only(Float x) const {
            float lanes[width];
            Whole{}.store(lanes, x);
            return load(lanes);
        }
    };

    static FLUX_INLINE Float all(float x) { return _mm256_set1_ps(x); }
    static FLUX_INLINE Int all_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    template <uint32_t value>
    static FLUX_INLINE Int constant() {
        return all_int(value);
    }
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

    using Table = __m256;
    static FLUX_INLINE Table table(const float (&entries)[8]) { return _mm256_loadu_ps(entries); }
    static FLUX_INLINE Float look_up(Table table, Int at) {
        return _mm256_permutevar8x32_ps(table, at);
    }
    static FLUX_INLINE Float mul_add(Float a, Float b, Float c) {
        return _mm256_fmadd_ps(a, b, c);
    }
    static FLUX_INLINE Float smaller(Float a, Float b) { return _mm256_min_ps(a, b); }
    static FLUX_INLINE Float larger(Float a, Float b) { return _mm256_max_ps(a, b); }
    static FLUX_INLINE float largest(Float a) {
        float lanes[width];
        _mm256_storeu_ps(lanes, a);
        float most = lanes[0];
        for (size_t j = 1; j < width; ++j) most = lanes[j] > most ? lanes[j] : most;
        return most;
    }
    static FLUX_INLINE Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
    static FLUX_INLINE Float at_least(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
    static FLUX_INLINE Float below(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static FLUX_INLINE Float both(Float a, Float b) { return _mm256_and_ps(a, b); }
    static FLUX_INLINE Float keep_where(Float mask, Float a) { return _mm256_and_ps(mask, a); }
    static FLUX_INLINE Int add_one_where(Float mask, Int a) {
        return _mm256_sub_epi32(a, as_int(mask));
    }
    static FLUX_INLINE Int larger_int(Int a, Int b) { return _mm256_max_epi32(a, b); }
    static FLUX_INLINE Int bit_xor(Int a, Int b) { return _mm256_xor_si256(a, b); }
    static FLUX_INLINE Int mul_low(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
    static FLUX_INLINE Int mul_high_16(Int a, Int b) { return _mm256_mulhi_epu16(a, b); }
    static FLUX_INLINE Int count_from(uint32_t first) {
        return _mm256_add_epi32(all_int(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    template <int count>
    static FLUX_INLINE Int shift_right(Int a) {
        return _mm256_srli_epi32(a, count);
    }

    // -- for pairs and groups of vectors (pairs.h, block8.h) -------------------------------------

    static FLUX_INLINE Int load_words(const void* at) {
        return _mm256_loadu_si256(static_cast<const Int*>(at));
    }
    static FLUX_INLINE void store_words(void* at, Int x) {
        _mm256_storeu_si256(static_cast<Int*>(at), x);
    }
    static FLUX_INLINE Int add_16(Int a, Int b) { return _mm256_add_epi16(a, b); }
    static FLUX_INLINE Int sub_16(Int a, Int b) { return _mm256_sub_epi16(a, b); }
    static FLUX_INLINE Int sign_16(Int a) { return _mm256_srai_epi16(a, 15); }
    static FLUX_INLINE Int zero_where_no_bits_16(Int a, Int b, Int mask) {
        const Int none = _mm256_cmpeq_epi16(bit_and(b, mask), _mm256_setzero_si256());
        return _mm256_andnot_si256(none, a);
    }
    static FLUX_INLINE Int unpack_low_16(Int a, Int b) { return _mm256_unpacklo_epi16(a, b); }
    static FLUX_INLINE Int unpack_high_16(Int a, Int b) { return _mm256_unpackhi_epi16(a, b); }
    static FLUX_INLINE void split_16(Int a, Int b, Int& low, Int& high) {
        const Int halves = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        a = _mm256_shuffle_epi8(a, halves);
        b = _mm256_shuffle_epi8(b, halves);
        low = _mm256_unpacklo_epi64(a, b);
        high = _mm256_unpackhi_epi64(a, b);
    }
    // The order of pairs: in each 128 bits the first vector has four elements, the second the next four.
    static FLUX_INLINE void join_pair(Int low, Int high, Float& a, Float& b) {
        a = as_float(unpack_low_16(low, high));
        b = as_float(unpack_high_16(low, high));
    }
    static FLUX_INLINE void join_pair(Int high, Float& a, Float& b) {
        join_pair(_mm256_setzero_si256(), high, a, b);
    }
    static FLUX_INLINE void split_pair(Int a, Int b, Int& low, Int& high) { split_16(a, b, low, high); }
    static FLUX_INLINE void to_pair_order(Float& a, Float& b) {
        const Float first = _mm256_permute2f128_ps(a, b, 0x20);
        b = _mm256_permute2f128_ps(a, b, 0x31);
        a = first;
    }
    static FLUX_INLINE void to_memory_order(Float& a, Float& b) { to_pair_order(a, b); }
    static FLUX_INLINE void count_pair_from(uint32_t first, Int& a, Int& b) {
        a = _mm256_add_epi32(all_int(first), _mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11));
        b = _mm256_add_epi32(a, all_int(4));
    }
    static FLUX_INLINE Float larger_size(Float a, Float b) {
        return _mm256_max_ps(as_float(bit_and(as_int(a), all_int(0x7fffffffu))),
                             as_float(bit_and(as_int(b), all_int(0x7fffffffu))));
    }
    static FLUX_INLINE void largest(Float a, Float b, float& of_a, float& of_b) {
        of_a = largest(a);
        of_b = largest(b);
    }
    static FLUX_INLINE bool any_nan(Float a, Float b) {
        return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
    }
    static FLUX_INLINE bool any_nan(const Float (&x)[4]) {
        return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q),
                                               _mm256_cmp_ps(x[2], x[3], _CMP_UNORD_Q))) != 0;
    }

    // Each 128-bit lane gets 64 bits of the first half and 64 of the second.
    static FLUX_INLINE Int load_interleaved(const void* at) {
        return _mm256_permute4x64_epi64(load_words(at), 0xd8);
    }
    static FLUX_INLINE void store_interleaved(void* at, Int x) {
        store_words(at, _mm256_permute4x64_epi64(x, 0xd8));
    }
    struct Masks {};
    // Bits 16 to 23 of the lanes of four vectors, as the bytes of one.
    static FLUX_INLINE Int third_bytes(const Int (&x)[4], Masks) {
        const Int third = all_int(0x0e0a0602u);
        const Int low = _mm256_blend_epi32(_mm256_shuffle_epi8(x[0], third),
                                           _mm256_shuffle_epi8(x[1], third), 0x22);
        const Int high = _mm256_blend_epi32(_mm256_shuffle_epi8(x[2], third),
                                            _mm256_shuffle_epi8(x[3], third), 0x88);
        return _mm256_blend_epi32(low, high, 0xcc);
    }
    // 127 + k, or 127 - k (no less than 0) where x is negative.
    static FLUX_INLINE Int signed_codes(Int k, const Int (&x)[4]) {
        const Int zero = _mm256_set1_epi8(127);
        const Int signs = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]),
                                             _mm256_packs_epi32(x[2], x[3]));
        return _mm256_blendv_epi8(_mm256_add_epi8(zero, k), _mm256_subs_epu8(zero, k), signs);
    }
    static FLUX_INLINE Int unsigned_codes(Int k_plus_one) {
        return _mm256_sub_epi8(k_plus_one, _mm256_set1_epi8(1));
    }

    // A slot is about three octaves; the factor is one with which no slot holds two borders.
    static constexpr int kSlots = 8, kSlotsInOctave = 20140;
    static constexpr int slot_of(int exponent) { return exponent * kSlotsInOctave >> 16; }
    static constexpr uint32_t border_of(uint32_t bits, int) { return bits; }
    struct OnLines {
        Int line[4];
    };
    struct Lines {
        Float border, slope, offset, most;

        FLUX_INLINE Lines(const Lines8<kSlots>& lines, const Map8&)
            : border(_mm256_loadu_ps(reinterpret_cast<const float*>(lines.border))),
              slope(_mm256_loadu_ps(lines.slope)),
              offset(_mm256_loadu_ps(lines.offset)),
              most(_mm256_loadu_ps(lines.most)) {}

        // The lines of pair `i`. All slots are taken: where y has a sign the line for zero is put in.
        template <bool may_have_sign>
        FLUX_INLINE void put(Float first, Float second, size_t i, OnLines& of) const {
            of.line[2 * i] = as_int(at<may_have_sign>(first));
            of.line[2 * i + 1] = as_int(at<may_have_sign>(second));
        }
        template <bool may_have_sign>
        FLUX_INLINE Float at(Float sign) const {
            const Float y = may_have_sign ? larger(sign, all(kLeastY)) : sign;
            const Int low = mul_high_16(shift_right<23>(as_int(y)), all_int(kSlotsInOctave));
            const Int slot = add_one_where(at_least(y, _mm256_permutevar8x32_ps(border, low)), low);
            const Float line = mul_add(_mm256_permutevar8x32_ps(slope, slot), y,
                                       _mm256_permutevar8x32_ps(offset, slot));
            const Float k = smaller(line, _mm256_permutevar8x32_ps(most, slot));
            return may_have_sign ? _mm256_blendv_ps(k, all(129.5f), sign) : k;
        }

        // Bits 16 to 23 of the lines.
        FLUX_INLINE Int bytes(const OnLines& of, Masks masks) const {
            return third_bytes(of.line, masks);
        }
    };

    struct Decoder {
        Float slope, offset;
        static constexpr Values8<8, 18> kSigned{kSignedMap};
        FLUX_INLINE Decoder(Float slope, Float offset) : slope(slope), offset(offset) {}
        explicit FLUX_INLINE Decoder(bool is_signed)
            : slope(_mm256_loadu_ps(is_signed ? kSigned.slope : kUnsignedMap.slope)),
              offset(_mm256_loadu_ps(is_signed ? kSigned.offset : kUnsignedMap.offset)) {}
        FLUX_INLINE Decoder times(float scale) const {
            return {mul(slope, all(scale)), mul(offset, all(scale))};
        }

        // The values of the codes of a group.
        template <bool is_signed>
        FLUX_INLINE void values(Int codes, Float (&x)[4]) const {
            if (is_signed) codes = _mm256_xor_si256(codes, _mm256_set1_epi8(127));  // 127 - code
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const Int from = _mm256_broadcastsi128_si256(
                    is_signed ? _mm_setr_epi8(-1, -1, -1, 4 * j, -1, -1, -1, 4 * j + 1, -1, -1, -1,
                                              4 * j + 2, -1, -1, -1, 4 * j + 3)
                              : _mm_setr_epi8(4 * j, -1, -1, -1, 4 * j + 1, -1, -1, -1, 4 * j + 2,
                                              -1, -1, -1, 4 * j + 3, -1, -1, -1));
                const Int code = _mm256_shuffle_epi8(codes, from);
                if (is_signed) {
                    const Float f = to_float(_mm256_srai_epi32(code, 6));
                    const Int entry = shift_right<23>(as_int(f));
                    const Float sign = as_float(
                        _mm256_andnot_si256(as_int(f), all_int(0x80000000u)));
                    const Float b = _mm256_xor_ps(_mm256_permutevar8x32_ps(offset, entry), sign);
                    x[j] = _mm256_fmadd_ps(_mm256_permutevar8x32_ps(slope, entry), f, b);
                } else {
                    const Float f = add(to_float(code), all(1));
                    const Int entry = shift_right<23>(as_int(f));
                    x[j] = _mm256_fmadd_ps(_mm256_permutevar8x32_ps(slope, entry), f,
                                           _mm256_permutevar8x32_ps(offset, entry));
                }
            }
        }
    };

    template <class Value>
    static FLUX_INLINE Value opaque(Value a) {
        asm volatile("" : "+x"(a));
        return a;
    }
};

}  // namespace

extern const Kernels kAvx2Kernels = AdamWOver<Avx2>::table();

}  // namespace flux
