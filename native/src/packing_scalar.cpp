// The reference: one lane, plain C++. The wide sets must equal it bit for bit.
#include "packing_lanes.h"

namespace flux {
namespace {

struct Scalar {
    static constexpr size_t width = 1;
    using Float = float;
    using Int = uint32_t;

    template <class Dense>
    static Float load(const Dense* at) {
        return widened(*at);
    }
    static Float load_int8(const uint8_t* at) { return static_cast<int8_t>(*at); }
    template <class Dense>
    static void store(Dense* at, Float x) {
        narrow(x, at);
    }
    static void store_int8(uint8_t* at, Float x) { *at = int8_of(x); }

    static Int zero() { return 0; }
    static Float all(float x) { return x; }
    static Float mul(Float a, float b) { return a * b; }
    static Int larger_magnitude(Int most, Float x) {
        const Int magnitude = bits_of(x) & 0x7fffffffu;
        return magnitude > most ? magnitude : most;
    }
    static uint32_t largest(Int most) { return most; }

    static unsigned nf4_of(Float x) {
        unsigned code = x > kBorder;
        code = 2 * code + (x > kBorders1[code]);
        code = 2 * code + (x > kBorders2[code]);
        return 2 * code + (x > kBorders3[code]);
    }
    static void store_nf4(uint8_t* codes, const Float (&values)[kPackedBlock]) {
        for (size_t j = 0; j < kPackedBlock / 2; ++j)
            codes[j] = static_cast<uint8_t>(nf4_of(values[2 * j]) << 4 | nf4_of(values[2 * j + 1]));
    }

    template <class Dense>
    static void unpack_block(const uint8_t* codes, float absmax, Dense* out) {
        Dense products[16];
        for (size_t j = 0; j < 16; ++j) narrow(kNf4[j] * absmax, products + j);
        for (size_t j = 0; j < kPackedBlock / 2; ++j) {
            out[2 * j] = products[codes[j] >> 4];
            out[2 * j + 1] = products[codes[j] & 15];
        }
    }
};

}  // namespace

extern const PackingKernels kScalarPacking = packing_over<Scalar>();

}  // namespace flux
