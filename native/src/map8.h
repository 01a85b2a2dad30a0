// The two maps between 8-bit codes and fractions of a block's largest magnitude: the dynamic maps of
// bitsandbytes (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015), signed for the
// first moment and unsigned for the second, codes in ascending order of their values.
//
// A map has seven decades below 1, each with twice as many values as the one below it and linear
// in the code, so that a value is computed, not looked up: slope * k + offset, where k is how many
// codes lie between it and zero. Slopes are rounded to 16 (15) bits and offsets to the same grid:
// then values and the midpoints between them are exact in fp32, which makes the nearest code the
// same everywhere. Values are within 1e-4 of bitsandbytes' (neighbours are 7e-3 apart or more).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace flux {

constexpr size_t kStateBlock = 256;  // elements that share one scale

struct Map8 {
    static constexpr int kDecades = 7;
    static constexpr int kEntries = 8;  // decades, and one for the value 1

    bool is_signed;
    float half;  // added to k, its fp32 exponent tells the decade
    int last;    // k of the value 1

    // By the low 3 bits of the exponent of k + half.
    float slope[kEntries], offset[kEntries];

    // By decade: the smallest x of the next one; the guess for k; the x from which k + 1 is nearer
    // than k, midpoint_slope * k + midpoint_offset; the largest k.
    float next[kEntries], guess_slope[kEntries], guess_offset[kEntries];
    float midpoint_slope[kEntries], midpoint_offset[kEntries], largest[kEntries];

    struct Decade {
        int slope, offset, exponent;  // value(k) = (slope * k + offset) * 2^exponent
    };

    static constexpr double power_of_two(int exponent) {
        double power = 1;
        for (; exponent < 0; ++exponent) power /= 2;
        return power;
    }

    // The smallest fp32 that is not below x: fp32 values compare with it as they do with x.
    static constexpr float rounded_up(double x) {
        const float near = static_cast<float>(x);
        constexpr double kNextFactor = 1 + 0.75 / (1 << 23);
        return static_cast<double>(near) < x ? static_cast<float>(near * kNextFactor) : near;
    }

    // Those of a normal number below 4.
    static constexpr uint32_t bits_of(float x) {
        if (!(x < 4)) return 0x7f800000u;
        uint32_t exponent = 127;
        for (; x < 1; x *= 2) --exponent;
        for (; x >= 2; x /= 2) ++exponent;
        return exponent << 23 | static_cast<uint32_t>((x - 1) * (1 << 23));
    }

    constexpr Map8(bool is_signed, const Decade (&decades)[kDecades])
        : is_signed(is_signed),
          half(is_signed ? 0.5f : 1.5f),
          last(is_signed ? 128 : 255),
          slope(),
          offset(),
          next(),
          guess_slope(),
          guess_offset(),
          midpoint_slope(),
          midpoint_offset(),
          largest() {
        double below = 0;  // the largest value of the decade below
        for (int i = 0; i < kDecades; ++i) {
            const double grid = power_of_two(decades[i].exponent);
            const double a = decades[i].slope * grid, b = decades[i].offset * grid;
            const int first = is_signed ? 1 << i : (2 << i) - 1;
            const int final = is_signed ? 2 * first - 1 : 2 * first;
            const int entry = (is_signed ? i + 7 : i) % kEntries;
            slope[entry] = static_cast<float>(a);
            offset[entry] = static_cast<float>(b);
            if (i > 0) next[i - 1] = rounded_up((below + a * first + b) / 2);
            below = a * final + b;
            double middle_slope = a, middle_offset = b + a / 2;
            if (i == 0) {  // below its first value lies zero, at another distance
                middle_slope = (is_signed ? 2 * (a + b) : 2 * a + b) / 2;
                middle_offset = (a + b) / 2;
            }
            fill(i, middle_slope, middle_offset, final);
        }
        next[kDecades - 1] = rounded_up((below + 1) / 2);
        next[kDecades] = __builtin_inff();
        guess_offset[kDecades] = static_cast<float>(last);
        midpoint_offset[kDecades] = __builtin_inff();
        largest[kDecades] = static_cast<float>(last);
        // Zero and one share an entry: both lie on the line through the origin.
        const int both = is_signed ? 6 : 7;
        slope[both] = static_cast<float>(1.0 / last);
        offset[both] = 0;
    }

    // The guess is the nearest k or the one below it.
    constexpr void fill(int i, double middle_slope, double middle_offset, int final) {
        guess_slope[i] = static_cast<float>(1 / middle_slope);
        guess_offset[i] = static_cast<float>(0.75 - middle_offset / middle_slope);
        midpoint_slope[i] = static_cast<float>(middle_slope);
        midpoint_offset[i] = static_cast<float>(middle_offset);
        largest[i] = static_cast<float>(final);
    }
};

// round(0.9 * 10^(i-6) / values in decade i) on the grid 2^exponent; tests compute them anew.
constexpr Map8 kSignedMap(true, {{61848, -24052, -36},
                                 {38655, -49393, -33},
                                 {48318, -147637, -31},
                                 {60398, -399298, -29},
                                 {37749, -518003, -26},
                                 {47186, -1318588, -24},
                                 {58982, -3325914, -22}});
constexpr Map8 kUnsignedMap(false, {{30924, -8590, -36},
                                    {19327, -39727, -33},
                                    {24159, -135558, -31},
                                    {30199, -384198, -29},
                                    {18874, -508542, -26},
                                    {23593, -1306792, -24},
                                    {29491, -3311168, -22}});

// How the wide kernels search for codes: k is the whole part of a line in the fraction y, one line for
// each slot of exponents. A slot spans less than a decade, so it holds one border between decades at
// most; its line is that of the decade in which it begins, and from the border on the next slot's.
// Lines are rounded to fp32, so k is sure only where the line is not close to a whole number: where
// it is, the search of MapOver decides.
template <int entries, bool zero_is_apart>
struct Search8 {
    // Lines are taken down by more than they and their products are off by, in units of 2^-16, so k
    // is sure unless the line lies within twice that below a whole number.
    static constexpr int kDown = 2;
    static constexpr uint32_t kSure = 65536 - 2 * kDown;

    // Below it all have the code of zero or, not being zero, the least one above.
    static constexpr float kLeast = 0x1p-22f;
    static constexpr int kLeastExponent = 127 - 22;

    // Stands for zero among the fractions of the unsigned map where a slot is left for it.
    static constexpr int kApartExponent = 127 + 6;  // of 90

    // By slot: where the next decade begins (as the set wants it), the line, its largest value.
    uint32_t border[entries];
    float slope[entries], offset[entries], most[entries];

    // Bits 16 to 23 of the line are k (signed) or k + 1 (unsigned), modulo 256, and the bits below
    // are the fraction: from 128 on a unit of k is 1, from 256 on, for the longest decade, it is 2.
    constexpr Search8(const Map8& map, int (*slot_of)(int exponent),
                      uint32_t (*border_of)(uint32_t bits, int slot))
        : border(), slope(), offset(), most() {
        for (int exponent = 128; exponent >= kLeastExponent; --exponent) {
            const int slot = slot_of(exponent), at = slot % entries;
            const double y = exponent > 127 ? 2 : Map8::power_of_two(exponent - 127);
            int decade = 0;
            while (y >= map.next[decade]) ++decade;
            const bool wide = !map.is_signed && decade == Map8::kDecades - 1;
            const double unit = wide ? 2 : 1, base = wide ? 2 : map.is_signed ? 128 : 129;
            border[at] = border_of(Map8::bits_of(map.next[decade]), slot);
            most[at] = offset[at] = map.is_signed ? 256.5f : 512.5f;  // one
            if (decade == Map8::kDecades) continue;
            most[at] = static_cast<float>(base + unit * (map.largest[decade] + 0.75));
            const double a = map.midpoint_slope[decade], b = map.midpoint_offset[decade];
            const bool from_zero = !map.is_signed && decade == 0;  // zero stands for zero alone
            const double k = (from_zero ? 1.5 : 1 - b / a) - kDown / 65536.0;
            slope[at] = static_cast<float>(unit * (from_zero ? 0.5 / (a + b) : 1 / a));
            offset[at] = static_cast<float>(base + unit * k);
        }
        if (!zero_is_apart) return;
        const int apart = slot_of(kApartExponent) % entries;
        border[apart] = 0;
        slope[apart] = 0;
        offset[apart] = most[apart] = 129.5f;
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
            offset[entry] = map.is_signed ? map.offset[from] : map.offset[from] - map.slope[from];
        }
        slope[one % entries] = static_cast<float>(map.is_signed ? -unit / 128 : unit / 256);
        // Zero has no exponent and comes out as +0, because the offset's sign is that of -f.
        if (map.is_signed) offset[0] = offset[one % entries] = -0.0f;
    }
};

}  // namespace flux
