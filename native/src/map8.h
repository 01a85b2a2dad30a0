// The two maps between 8-bit codes and fractions of a block's largest magnitude: the dynamic maps of
// bitsandbytes (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015), signed for the
// first moment and unsigned for the second, codes in ascending order of their values.
//
// A map has seven decades below 1, each with twice as many values as the one below it and linear
// in the code, so that a value is computed, not looked up: slope * f + offset, where f is k, how many
// codes lie between it and zero (signed), or k + 1 (unsigned). Slopes are rounded to 16 (15) bits and offsets to the same grid:
// then values are exact in fp32. They are within 1e-4 of bitsandbytes' (neighbours are 7e-3 apart or
// more).
//
// A code too is computed: k is the whole part of a line in y, which is the fraction times a constant of the
// map, rounded to fp32 once. So it is that of the nearest value but for fractions close to a midpoint,
// which may get either neighbour, the same one everywhere: within 2^-15 of the distance of the two in a
// decade, within 0.8 % of it between two decades. There the border is rounded to a bf16, for 16 bits tell
// the decade then, and the constants are those with which all borders are near one. (Scales above 4e36,
// whose inverses are subnormal, are off by up to 2^-10 and 1 %.)
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace flux {

constexpr size_t kStateBlock = 256;  // elements that share one scale

struct Map8 {
    static constexpr int kDecades = 7;
    static constexpr int kEntries = 8;  // decades, and one for the value 1

    bool is_signed;
    float scale;  // of y to fractions
    int last;     // k of the value 1

    // By the low 3 bits of the fp32 exponent of k + 0.5 (signed) or k + 1 (unsigned).
    float slope[kEntries], offset[kEntries];

    // By decade: the smallest y of the next one, and the line in y whose bits 16 to 23 are k (signed) or
    // k + 1 (unsigned), modulo 256, with its largest value. From 128 on a unit of k is 1, from 256 on, for
    // the longest decade, it is 2.
    float next[kEntries], line_slope[kEntries], line_offset[kEntries], line_most[kEntries];

    struct Decade {
        int slope, offset, exponent;  // value(k) = (slope * k + offset) * 2^exponent
    };

    static constexpr double power_of_two(int exponent) {
        double power = 1;
        for (; exponent < 0; ++exponent) power /= 2;
        for (; exponent > 0; --exponent) power *= 2;
        return power;
    }

    // The bf16 nearest to a normal x.
    static constexpr float to_bf16(double x) {
        double unit = 1.0 / 128;
        for (; x < 128 * unit;) unit /= 2;
        return static_cast<float>(static_cast<int>(x / unit + 0.5) * unit);
    }

    // Those of a normal number below 4.
    static constexpr uint32_t bits_of(float x) {
        if (!(x < 4)) return 0x7f800000u;
        uint32_t exponent = 127;
        for (; x < 1; x *= 2) --exponent;
        for (; x >= 2; x /= 2) ++exponent;
        return exponent << 23 | static_cast<uint32_t>((x - 1) * (1 << 23));
    }

    constexpr Map8(bool is_signed, float scale, const Decade (&decades)[kDecades])
        : is_signed(is_signed),
          scale(scale),
          last(is_signed ? 128 : 255),
          slope(),
          offset(),
          next(),
          line_slope(),
          line_offset(),
          line_most() {
        double below = 0;  // the largest value of the decade below
        for (int i = 0; i < kDecades; ++i) {
            const double grid = power_of_two(decades[i].exponent);
            const double a = decades[i].slope * grid, b = decades[i].offset * grid;
            const int first = is_signed ? 1 << i : (2 << i) - 1;
            const int final = is_signed ? 2 * first - 1 : 2 * first;
            const int entry = (is_signed ? i + 7 : i) % kEntries;
            slope[entry] = static_cast<float>(a);
            offset[entry] = static_cast<float>(is_signed ? b : b - a);
            if (i > 0) next[i - 1] = to_bf16((below + a * first + b) / 2 * scale);
            below = a * final + b;
            // A value above the last one takes it up by 1, and midpoints are where it is whole.
            double distance = a, at_zero = 0.5 - b / a;
            if (i == 0) {  // zero lies at another distance, and unsigned it stands for itself alone
                distance = is_signed ? a + b : 2 * (1.5 * a + b);
                at_zero = is_signed ? 0.5 : 1.5;
            }
            const bool wide = !is_signed && i == kDecades - 1;
            const double unit = wide ? 2 : 1, base = wide ? 2 : is_signed ? 128 : 129;
            line_slope[i] = static_cast<float>(unit / (distance * scale));
            line_offset[i] = static_cast<float>(base + unit * at_zero);
            line_most[i] = static_cast<float>(base + unit * (final + 0.75));
        }
        next[kDecades - 1] = to_bf16((below + 1) / 2 * scale);
        next[kDecades] = __builtin_inff();
        line_offset[kDecades] = line_most[kDecades] = is_signed ? 256.5f : 512.5f;
        // Zero and one share an entry: both lie on one line.
        const int both = is_signed ? 6 : 7;
        slope[both] = static_cast<float>(1.0 / last);
        offset[both] = is_signed ? 0 : -slope[both];
    }
};

// round(0.9 * 10^(i-6) / values in decade i) on the grid 2^exponent; tests compute them anew.
// The scales leave all borders within 1.6 % of the distance to their neighbours.
constexpr Map8 kSignedMap(true, 4239.0f / 65536, {{61848, -24052, -36},
                                 {38655, -49393, -33},
                                 {48318, -147637, -31},
                                 {60398, -399298, -29},
                                 {37749, -518003, -26},
                                 {47186, -1318588, -24},
                                 {58982, -3325914, -22}});
constexpr Map8 kUnsignedMap(false, 6155.0f / 131072, {{30924, -8590, -36},
                                    {19327, -39727, -33},
                                    {24159, -135558, -31},
                                    {30199, -384198, -29},
                                    {18874, -508542, -26},
                                    {23593, -1306792, -24},
                                    {29491, -3311168, -22}});

// Smaller y get the code of this one, but for zero; the scales are such that 1 is below 2^-3.
constexpr float kLeastY = 0x1p-26f;
constexpr int kLeastExponent = 127 - 26, kMostExponent = 127 - 3;

// An unsigned y is taken down by this much, which changes no larger one: then zero alone (and what is less
// than this, some of it -0) has a sign.
constexpr float kTellsZero = 0x1p-126f;

// Lines as the wide kernels look them up, one for each slot of exponents. A slot spans less than a
// decade, so it holds one border between decades at most; its line is that of the decade in which it
// begins, and from the border on the next slot's.
template <int entries>
struct Lines8 {
    // By slot: where the next decade begins (as the set wants it), the line, its largest value.
    uint32_t border[entries];
    float slope[entries], offset[entries], most[entries];

    constexpr Lines8(const Map8& map, int (*slot_of)(int exponent),
                     uint32_t (*border_of)(uint32_t bits, int slot))
        : border(), slope(), offset(), most() {
        for (int exponent = kMostExponent; exponent >= kLeastExponent; --exponent) {
            const int slot = slot_of(exponent), at = slot % entries;
            const double y = Map8::power_of_two(exponent - 127);
            int decade = 0;
            while (y >= map.next[decade]) ++decade;
            border[at] = border_of(Map8::bits_of(map.next[decade]), slot);
            slope[at] = map.line_slope[decade];
            offset[at] = map.line_offset[decade];
            most[at] = map.line_most[decade];
        }
    }

};

// The values of codes by the low bits of the exponent of f. Signed: f is (127 - code) * 2^shift, so
// it has the other sign. Unsigned: f is (code + 1) * 2^shift, but for code 0 just below it.
template <int entries, int shift>
struct Values8 {
    float slope[entries], offset[entries];

    constexpr explicit Values8(const Map8& map) : slope(), offset() {
        const double unit = Map8::power_of_two(-shift);
        const int first = 127 + shift + (map.is_signed ? 0 : 1), one = first + Map8::kDecades;
        for (int i = 0; i < Map8::kDecades; ++i) {
            const int entry = (first + i) % entries, from = map.is_signed ? (i + 7) % 8 : i;
            slope[entry] = static_cast<float>((map.is_signed ? -unit : unit) * map.slope[from]);
            offset[entry] = map.offset[from];
        }
        const int from = map.is_signed ? 6 : 7;
        slope[one % entries] = static_cast<float>((map.is_signed ? -unit : unit) * map.slope[from]);
        offset[one % entries] = map.offset[from];
        // Zero has no exponent and comes out as +0, because the offset's sign is that of -f.
        if (map.is_signed) offset[0] = offset[one % entries] = -0.0f;
    }
};

}  // namespace flux
