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

}  // namespace flux
