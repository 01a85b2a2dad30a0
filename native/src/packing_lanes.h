// Packing and unpacking over the lanes of an instruction set, and the numbers that all share.
//
// Nothing here may differ between instruction sets: an absolute maximum is found in integers, which
// order as the magnitudes do and put NaN above infinity; a code depends on comparisons alone; the 16
// products of a block are rounded once each, and its elements only choose among them.
#pragma once

#include "packing.h"

#define FLUX_INLINE inline __attribute__((always_inline))

namespace flux {
namespace {

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

constexpr uint32_t kInfinityBits = 0x7f800000u;

// The 16 values of NF4: quantiles of the normal distribution, scaled to [-1, 1] (QLoRA, appendix E).
alignas(64) const float kNf4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// A code is the count of these that are less than the value. In the order of a binary search: level k
// holds 2^k borders, and is looked up by the k bits of the code that are known.
const float kBorder = 0.03979014977812767f;
alignas(64) const float kBorders1[16] = {-0.33967943489551544f, 0.3893125355243683f};
alignas(64) const float kBorders2[16] = {-0.6106329262256622f, -0.13791173323988914f,
                                         0.2035212516784668f, 0.6427869200706482f};
alignas(64) const float kBorders3[16] = {-0.8480964004993439f,  -0.4599952697753906f,
                                         -0.23460740596055984f, -0.045525018125772476f,
                                         0.1202552504837513f,   0.2920137718319893f,
                                         0.5016634166240692f,   0.8614784181118011f};

FLUX_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

FLUX_INLINE float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

FLUX_INLINE float widened(float x) { return x; }
FLUX_INLINE float widened(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
FLUX_INLINE float widened(F16 x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    const uint32_t quiet = rest > 0x7c00u ? 0x00400000u : 0;  // of a NaN, as the processors make it
    if (rest >= 0x7c00u) return float_of(sign | kInfinityBits | quiet | (rest & 0x3ffu) << 13);
    if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + 0x38000000u));
    return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
}

// Rounded to nearest, ties to even.
FLUX_INLINE void narrow(float x, float* to) { *to = x; }
FLUX_INLINE void narrow(float x, Bf16* to) {
    const uint32_t bits = bits_of(x);
    const bool is_nan = (bits & 0x7fffffffu) > kInfinityBits;
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    to->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}
FLUX_INLINE void narrow(float x, F16* to) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest > kInfinityBits) {
        half = 0x7e00u | (rest >> 13 & 0x3ffu);  // what the processor's instruction makes of a NaN
    } else if (rest >= 0x477ff000u) {  // 65520: nearer to 65536 than to the largest number
        half = 0x7c00u;
    } else if (rest < 0x38800000u) {  // below the smallest normal number: in units of 2^-24
        half = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13;
    }
    to->bits = static_cast<uint16_t>(sign | half);
}

// The nearest integer, ties to even, as a byte: adding 1.5 * 2^23 leaves no bits for a fraction.
FLUX_INLINE uint8_t int8_of(float x) { return static_cast<uint8_t>(bits_of(x + 12582912.0f)); }

// What elements are multiplied by: 0 where the largest is not finite, or so small that this is not.
FLUX_INLINE float inverse_of(uint32_t absmax_bits, float factor) {
    const float inverse = 1.0f / float_of(absmax_bits) * factor;
    return absmax_bits < kInfinityBits && bits_of(inverse) < kInfinityBits ? inverse : 0.0f;
}

template <class Dense>
size_t count_not_finite(const Dense* x, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) count += (bits_of(widened(x[i])) & kInfinityBits) == kInfinityBits;
    return count;
}

template <class Lanes, class Dense>
struct Packing {
    static constexpr size_t kVectors = kPackedBlock / Lanes::width;

    static size_t pack_nf4(const void* dense, uint8_t* codes, float* absmax, size_t n) {
        const Dense* x = static_cast<const Dense*>(dense);
        size_t not_finite = 0, i = 0;
        for (; i + kPackedBlock <= n; i += kPackedBlock)
            not_finite += pack_block(x + i, codes + i / 2, absmax + i / kPackedBlock);
        if (i < n) {
            Dense rest[kPackedBlock] = {};
            for (size_t j = 0; j < n - i; ++j) rest[j] = x[i + j];
            not_finite += pack_block(rest, codes + i / 2, absmax + i / kPackedBlock);
        }
        return not_finite;
    }

    static FLUX_INLINE size_t pack_block(const Dense* x, uint8_t* codes, float* absmax) {
        typename Lanes::Float values[kVectors];
        typename Lanes::Int most = Lanes::zero();
        for (size_t j = 0; j < kVectors; ++j) {
            values[j] = Lanes::load(x + j * Lanes::width);
            most = Lanes::larger_magnitude(most, values[j]);
        }
        const uint32_t bits = Lanes::largest(most);
        *absmax = float_of(bits);
        const float inverse = inverse_of(bits, 1.0f);
        if (__builtin_expect(inverse > 0, 1)) {
            for (size_t j = 0; j < kVectors; ++j) values[j] = Lanes::mul(values[j], inverse);
            Lanes::store_nf4(codes, values);
            return 0;
        }
        for (size_t j = 0; j < kPackedBlock / 2; ++j) codes[j] = kZeroCodes;
        return bits < kInfinityBits ? 0 : count_not_finite(x, kPackedBlock);
    }

    static size_t pack_int8(const void* dense, uint8_t* codes, float* absmax, size_t rows,
                            size_t columns) {
        const Dense* x = static_cast<const Dense*>(dense);
        size_t not_finite = 0;
        for (size_t row = 0; row < rows; ++row, x += columns, codes += columns) {
            const uint32_t bits = largest_of(x, columns);
            absmax[row] = float_of(bits);
            const float inverse = inverse_of(bits, 127.0f);
            if (__builtin_expect(!(inverse > 0), 0)) {
                __builtin_memset(codes, 0, columns);
                if (bits >= kInfinityBits) not_finite += count_not_finite(x, columns);
                continue;
            }
            size_t i = 0;
            for (; i + Lanes::width <= columns; i += Lanes::width)
                Lanes::store_int8(codes + i, Lanes::mul(Lanes::load(x + i), inverse));
            for (; i < columns; ++i) codes[i] = int8_of(widened(x[i]) * inverse);
        }
        return not_finite;
    }

    static FLUX_INLINE uint32_t largest_of(const Dense* x, size_t n) {
        typename Lanes::Int most = Lanes::zero();
        size_t i = 0;
        for (; i + Lanes::width <= n; i += Lanes::width)
            most = Lanes::larger_magnitude(most, Lanes::load(x + i));
        uint32_t bits = Lanes::largest(most);
        for (; i < n; ++i) {
            const uint32_t one = bits_of(widened(x[i])) & 0x7fffffffu;
            bits = one > bits ? one : bits;
        }
        return bits;
    }

    static void unpack_nf4(const uint8_t* codes, const float* absmax, void* dense, size_t blocks) {
        Dense* out = static_cast<Dense*>(dense);
        for (size_t i = 0; i < blocks; ++i)
            Lanes::unpack_block(codes + i * (kPackedBlock / 2), absmax[i], out + i * kPackedBlock);
    }

    static void unpack_int8(const uint8_t* codes, const float* absmax, void* dense, size_t rows,
                            size_t columns) {
        Dense* out = static_cast<Dense*>(dense);
        for (size_t row = 0; row < rows; ++row, out += columns, codes += columns) {
            size_t i = 0;
            for (; i + Lanes::width <= columns; i += Lanes::width) {
                const auto scaled = Lanes::mul(Lanes::load_int8(codes + i), absmax[row]);
                Lanes::store(out + i, Lanes::mul(scaled, kInt8Step));
            }
            for (; i < columns; ++i) {
                const float scaled = static_cast<float>(static_cast<int8_t>(codes[i])) * absmax[row];
                narrow(scaled * kInt8Step, out + i);
            }
        }
    }
};

template <class Lanes>
constexpr PackingKernels packing_over() {
    using F32 = Packing<Lanes, float>;
    using B16 = Packing<Lanes, Bf16>;
    using H16 = Packing<Lanes, F16>;
    return {{F32::pack_nf4, B16::pack_nf4, H16::pack_nf4},
            {F32::pack_int8, B16::pack_int8, H16::pack_int8},
            {F32::unpack_nf4, B16::unpack_nf4, H16::unpack_nf4},
            {F32::unpack_int8, B16::unpack_int8, H16::unpack_int8}};
}

}  // namespace
}  // namespace flux
