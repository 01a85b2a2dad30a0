// Sixteen lanes; tails are masked.
#include <immintrin.h>

#include "adamw.h"

namespace flux {
namespace {

struct Avx512 {
    static constexpr size_t width = 16;
    static constexpr bool kInterleaved = false;  // vectors of a turn (lanes.h)
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

    static FLUX_INLINE Float all(float x) { return _mm512_set1_ps(x); }
    static FLUX_INLINE Int all_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    // Constants of hot loops come from memory: the compiler would make them anew in each turn, with
    // operations that compete with the arithmetic.
    template <uint32_t value>
    static FLUX_INLINE Int constant() {
        static constexpr uint32_t kValue = value;
        Int x;
        asm("vpbroadcastd %1, %0" : "=v"(x) : "m"(kValue));
        return x;
    }
    static FLUX_INLINE Float as_float(Int x) { return _mm512_castsi512_ps(x); }
    static FLUX_INLINE Int as_int(Float x) { return _mm512_castps_si512(x); }
    static FLUX_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static FLUX_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static FLUX_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static FLUX_INLINE Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static FLUX_INLINE Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
    static FLUX_INLINE Float quiet(Float a) {
        // By kind of a, from the lowest four bits: both NaN keep the constant, others become a.
        return _mm512_fixupimm_ps(as_float(all_int(0x7fc00000u)), a, all_int(0x11111100u), 0);
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
    static FLUX_INLINE Float mul_add(Float a, Float b, Float c) {
        return _mm512_fmadd_ps(a, b, c);
    }
    static FLUX_INLINE Float smaller(Float a, Float b) { return _mm512_min_ps(a, b); }
    static FLUX_INLINE Float larger(Float a, Float b) { return _mm512_max_ps(a, b); }
    static FLUX_INLINE float largest(Float a) { return _mm512_reduce_max_ps(a); }
    static FLUX_INLINE Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
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
    static FLUX_INLINE Int larger_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
    static FLUX_INLINE Int bit_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
    static FLUX_INLINE Int mul_low(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static FLUX_INLINE Int mul_high_16(Int a, Int b) { return _mm512_mulhi_epu16(a, b); }
    static FLUX_INLINE Int count_from(uint32_t first) {
        return _mm512_add_epi32(all_int(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                                                  11, 12, 13, 14, 15));
    }
    template <int count>
    static FLUX_INLINE Int shift_right(Int a) {
        return _mm512_srli_epi32(a, count);
    }

    // -- for pairs and groups of vectors (pairs.h, block8.h) -------------------------------------

    static FLUX_INLINE Int load_words(const void* at) { return _mm512_loadu_si512(at); }
    static FLUX_INLINE void store_words(void* at, Int x) { _mm512_storeu_si512(at, x); }
    static FLUX_INLINE Int add_16(Int a, Int b) { return _mm512_add_epi16(a, b); }
    static FLUX_INLINE Int sub_16(Int a, Int b) { return _mm512_sub_epi16(a, b); }
    static FLUX_INLINE Int sign_16(Int a) { return _mm512_srai_epi16(a, 15); }
    static FLUX_INLINE Int zero_where_no_bits_16(Int a, Int b, Int mask) {
        return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(b, mask), a);
    }
    static FLUX_INLINE Int unpack_low_16(Int a, Int b) { return _mm512_unpacklo_epi16(a, b); }
    static FLUX_INLINE Int unpack_high_16(Int a, Int b) { return _mm512_unpackhi_epi16(a, b); }
    static FLUX_INLINE void split_16(Int a, Int b, Int& low, Int& high) {
        const Int halves = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        a = _mm512_shuffle_epi8(a, halves);
        b = _mm512_shuffle_epi8(b, halves);
        low = _mm512_unpacklo_epi64(a, b);
        high = _mm512_unpackhi_epi64(a, b);
    }
    // The order of pairs: elements with even numbers, and those with odd ones. Then one masked shuffle
    // puts halves of two vectors together.
    static constexpr __mmask64 kLowHalves = 0x3333333333333333u, kHighHalves = 0xccccccccccccccccu;
    static FLUX_INLINE Int halves_exchanged() {
        return _mm512_broadcast_i32x4(
            _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    }
    static FLUX_INLINE Int low_halves(Int a, Int b) {
        return _mm512_mask_shuffle_epi8(a, kHighHalves, b, halves_exchanged());
    }
    static FLUX_INLINE Int high_halves(Int a, Int b) {
        return _mm512_mask_shuffle_epi8(b, kLowHalves, a, halves_exchanged());
    }
    static FLUX_INLINE void join_pair(Int low, Int high, Float& a, Float& b) {
        a = as_float(low_halves(low, high));
        b = as_float(high_halves(low, high));
    }
    static FLUX_INLINE void join_pair(Int high, Float& a, Float& b) {
        a = as_float(shift_left_16(high));
        b = as_float(bit_and(high, all_int(0xffff0000u)));
    }
    static FLUX_INLINE void split_pair(Int a, Int b, Int& low, Int& high) {
        low = low_halves(a, b);
        high = high_halves(a, b);
    }
    static FLUX_INLINE void to_pair_order(Float& a, Float& b) {
        const Int even = _mm512_add_epi32(count_from(0), count_from(0));
        const Float first = _mm512_permutex2var_ps(a, even, b);
        b = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, all_int(1)), b);
        a = first;
    }
    static FLUX_INLINE void to_memory_order(Float& a, Float& b) {
        const Int first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const Float low = _mm512_permutex2var_ps(a, first, b);
        b = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, all_int(8)), b);
        a = low;
    }
    static FLUX_INLINE void count_pair_from(uint32_t first, Int& a, Int& b) {
        a = _mm512_add_epi32(all_int(first), _mm512_add_epi32(count_from(0), count_from(0)));
        b = _mm512_add_epi32(a, all_int(1));
    }
    static FLUX_INLINE Float larger_size(Float a, Float b) {
        return _mm512_range_ps(a, b, 0x0b);  // the larger magnitude, without a sign
    }
    // The largest lanes of both, which are not NaN: halves of both are one vector.
    static FLUX_INLINE void largest(Float a, Float b, float& of_a, float& of_b) {
        Float x = larger(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        x = larger(x, _mm512_shuffle_f32x4(x, x, 0xb1));
        x = larger(x, _mm512_permute_ps(x, 0x4e));
        x = larger(x, _mm512_permute_ps(x, 0xb1));
        of_a = _mm512_cvtss_f32(x);
        of_b = _mm_cvtss_f32(_mm512_extractf32x4_ps(x, 2));
    }
    static FLUX_INLINE bool any_nan(Float a, Float b) {
        return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
    }
    static FLUX_INLINE bool any_nan(const Float (&x)[4]) {
        return !_kortestz_mask16_u8(_mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q),
                                    _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q));
    }

    // Each 128-bit lane gets 64 bits of the first half and 64 of the second.
    static FLUX_INLINE Int load_interleaved(const void* at) {
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load_words(at));
    }
    static FLUX_INLINE void store_interleaved(void* at, Int x) {
        store_words(at, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x));
    }
    // Bytes of the later vectors of a group. Opaque, or the compiler would make them anew each time.
    struct Masks {
        __mmask64 second = kept(0x00aa00aa00aa00aau), third = kept(0x5500550055005500u),
                  fourth = kept(0xaa00aa00aa00aa00u);

        static FLUX_INLINE __mmask64 kept(__mmask64 mask) {
            asm volatile("" : "+k"(mask));
            return mask;
        }
    };
    // Bits 16 to 23 of the lanes of four vectors, as the bytes of one.
    static FLUX_INLINE Int third_bytes(const Int (&x)[4], const Masks& of) {
        const Int third =
            _mm512_broadcast_i32x4(_mm_setr_epi8(2, 2, 6, 6, 10, 10, 14, 14, 2, 2, 6, 6, 10, 10, 14, 14));
        Int bytes = _mm512_shuffle_epi8(x[0], third);
        bytes = _mm512_mask_shuffle_epi8(bytes, of.second, x[1], third);
        bytes = _mm512_mask_shuffle_epi8(bytes, of.third, x[2], third);
        return _mm512_mask_shuffle_epi8(bytes, of.fourth, x[3], third);
    }
    // 127 + k, or 127 - k (no less than 0) where x is negative.
    static FLUX_INLINE Int signed_codes(Int k, const Int (&x)[4]) {
        const Int zero = constant<0x7f7f7f7fu>();
        const __mmask64 negative = _mm512_movepi8_mask(
            _mm512_packs_epi16(high_halves(x[0], x[1]), high_halves(x[2], x[3])));
        return _mm512_mask_subs_epu8(_mm512_add_epi8(zero, k), negative, zero, k);
    }
    static FLUX_INLINE Int unsigned_codes(Int k_plus_one) {
        return _mm512_sub_epi8(k_plus_one, constant<0x01010101u>());
    }

    // Two octaves are a slot, which the upper halves of two vectors tell together. What is added to them
    // carries into the next slot from the border on.
    static constexpr int kSlots = 16;
    static constexpr uint32_t kLeastY16 = kLeastExponent << 7;
    static constexpr int slot_of(int exponent) { return exponent / 2; }
    static constexpr uint32_t border_of(uint32_t bits, int slot) {
        return bits >> 24 == static_cast<uint32_t>(slot) ? 256 - (bits >> 16 & 0xff) : 0;
    }
    // Lines of a group, and their slots as 16-bit numbers, pairs in two vectors.
    struct OnLines {
        Int line[4], slots[2];
    };
    struct Lines {
        Float slope, offset;
        Int border, most;  // bytes

        // The slot of a sign is 0x80, a multiple of 16, and the largest byte of the first half: slots
        // from 50 to 62 leave both entries free.
        FLUX_INLINE Lines(const Lines8<kSlots>& lines, const Map8& map) {
            alignas(64) float slopes[kSlots], offsets[kSlots];
            alignas(16) uint8_t borders[kSlots], mosts[kSlots];
            for (int i = 0; i < kSlots; ++i) {
                slopes[i] = lines.slope[i], offsets[i] = lines.offset[i];
                borders[i] = static_cast<uint8_t>(lines.border[i]);
                uint32_t most;
                __builtin_memcpy(&most, &lines.most[i], sizeof most);
                mosts[i] = static_cast<uint8_t>(most >> 16);
            }
            if (!map.is_signed) slopes[0] = 0, offsets[0] = 129.5f, borders[0] = 0, mosts[15] = 1;
            slope = _mm512_load_ps(slopes), offset = _mm512_load_ps(offsets);
            border = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<__m128i*>(borders)));
            most = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<__m128i*>(mosts)));
        }

        // The lines of pair `i`. What is less than the least y has its slot, which is enough for a line.
        template <bool may_be_less>
        FLUX_INLINE void put(Float first, Float second, size_t i, OnLines& of) const {
            Int halves = high_halves(as_int(first), as_int(second));
            if (may_be_less)  // as unsigned numbers those with a sign are the largest
                halves = _mm512_max_epu16(halves, constant<kLeastY16 << 16 | kLeastY16>());
            const Int carry = _mm512_shuffle_epi8(border, _mm512_srli_epi16(halves, 8));
            const Int slots = _mm512_srli_epi16(_mm512_add_epi16(halves, carry), 8);
            of.slots[i] = slots;
            of.line[2 * i] = as_int(at(slots, first));
            of.line[2 * i + 1] = as_int(at(shift_right_16(slots), second));
        }
        FLUX_INLINE Float at(Int slot, Float y) const {
            return mul_add(_mm512_permutexvar_ps(slot, slope), y, _mm512_permutexvar_ps(slot, offset));
        }

        // Bits 16 to 23 of the lines, no larger than in their decades.
        FLUX_INLINE Int bytes(const OnLines& of, const Masks& masks) const {
            const Int slots = _mm512_packs_epi16(of.slots[0], of.slots[1]);
            return _mm512_min_epu8(third_bytes(of.line, masks), _mm512_shuffle_epi8(most, slots));
        }
    };

    struct Decoder {
        Float slope, offset;
        __mmask64 tops = Masks::kept(0x8888888888888888u);  // of the lanes, their highest bytes
        static constexpr Values8<16, 24> kSigned{kSignedMap}, kUnsigned{kUnsignedMap};
        explicit FLUX_INLINE Decoder(bool is_signed)
            : slope(_mm512_loadu_ps(is_signed ? kSigned.slope : kUnsigned.slope)),
              offset(_mm512_loadu_ps(is_signed ? kSigned.offset : kUnsigned.offset)) {}
        FLUX_INLINE Decoder times(float scale) const {
            Decoder scaled = *this;
            scaled.slope = mul(slope, all(scale));
            scaled.offset = mul(offset, all(scale));
            return scaled;
        }

        // The values of the codes of a group.
        template <bool is_signed>
        FLUX_INLINE void values(Int codes, Float (&x)[4]) const {
            if (is_signed) codes = _mm512_xor_si512(codes, constant<0x7f7f7f7fu>());  // 127 - code
            // Unsigned, 2^24 - 1 below the code: the sum is rounded up to (code + 1) * 2^24.
            const Int fill = is_signed ? all_int(0) : constant<0x00ffffffu>();
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t first = j / 2 * 8 + j % 2;
                const Int from = _mm512_broadcast_i32x4(_mm_setr_epi32(
                    first << 24, (first + 2) << 24, (first + 4) << 24, (first + 6) << 24));
                const Int top = _mm512_mask_shuffle_epi8(fill, tops, codes, from);
                const Float f = is_signed ? _mm512_cvtepi32_ps(top) : _mm512_cvtepu32_ps(top);
                const Int entry = shift_right<23>(as_int(f));
                Float b = _mm512_permutexvar_ps(entry, offset);
                if (is_signed)  // b ^ (sign & ~f)
                    b = as_float(_mm512_ternarylogic_epi32(as_int(b), as_int(f),
                                                           all_int(0x80000000u), 0xd2));
                x[j] = _mm512_fmadd_ps(_mm512_permutexvar_ps(entry, slope), f, b);
            }
        }
    };

    template <class Value>
    static FLUX_INLINE Value opaque(Value a) {
        asm volatile("" : "+v"(a));
        return a;
    }
};

}  // namespace

extern const Kernels kAvx512Kernels = AdamWOver<Avx512>::table();

}  // namespace flux
