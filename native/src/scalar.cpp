// The reference: one lane, plain C++. The wide sets must equal it bit for bit.
#include "adamw.h"

namespace flux {
namespace {

struct Scalar {
    static constexpr size_t width = 1;
    static constexpr bool kInterleaved = true;  // vectors of a turn (lanes.h)
    using Float = float;
    using Int = uint32_t;

    struct Whole {
        Whole() = default;
        explicit Whole(size_t) {}
        Int load(const uint8_t* at) const { return *at; }
        Int load(const uint16_t* at) const { return *at; }
        Float load(const float* at) const { return *at; }
        void store(float* at, Float x) const { *at = x; }
        void store_low_half(uint16_t* at, Int x) const { *at = static_cast<uint16_t>(x); }
        void store_low_byte(uint8_t* at, Int x) const { *at = static_cast<uint8_t>(x); }
        Float only(Float x) const { return x; }
    };
    using Tail = Whole;  // one lane leaves no tail

    static Float all(float x) { return x; }
    static Int all_int(uint32_t x) { return x; }
    static Float as_float(Int x) {
        Float y;
        __builtin_memcpy(&y, &x, sizeof y);
        return y;
    }
    static Int as_int(Float x) {
        Int y;
        __builtin_memcpy(&y, &x, sizeof y);
        return y;
    }
    static Float add(Float a, Float b) { return a + b; }
    static Float sub(Float a, Float b) { return a - b; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float div(Float a, Float b) { return a / b; }
    static Float sqrt(Float a) { return __builtin_sqrtf(a); }
    static Float quiet(Float a) { return a != a ? as_float(0x7fc00000u) : a; }
    static Int add(Int a, Int b) { return a + b; }
    static Int sub(Int a, Int b) { return a - b; }
    static Int bit_and(Int a, Int b) { return a & b; }
    static Int bit_or(Int a, Int b) { return a | b; }
    static Int shift_left_16(Int a) { return a << 16; }
    static Int shift_right_15(Int a) { return a >> 15; }
    static Int shift_right_16(Int a) { return a >> 16; }
    static Int zero_where_no_bits(Int a, Int bits) { return bits ? a : 0; }

    using Table = const float*;
    static Table table(const float (&entries)[8]) { return entries; }
    static Float look_up(Table table, Int at) { return table[at & 7]; }
    // a * b + c, rounded once. Where there is no instruction for it, libm takes a microsecond: the product
    // is exact in double, and the sum rounded to odd is rounded to fp32 as the exact one (Boldo and
    // Melquiond, 2008).
    static Float mul_add(Float a, Float b, Float c) {
#ifdef __FP_FAST_FMAF
        return __builtin_fmaf(a, b, c);
#else
        const double product = static_cast<double>(a) * b;
        double sum = product + c;
        const double part = sum - product;
        const double lost = (product - (sum - part)) + (c - part);
        if (lost < 0 || lost > 0) {  // not where it is NaN, for a sum that is not finite
            int64_t bits;
            __builtin_memcpy(&bits, &sum, sizeof bits);
            if (bits % 2 == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
            __builtin_memcpy(&sum, &bits, sizeof sum);
        }
        return static_cast<Float>(sum);
#endif
    }
    static Float smaller(Float a, Float b) { return a < b ? a : b; }
    static Float larger(Float a, Float b) { return a > b ? a : b; }
    static float largest(Float a) { return a; }
    static Float to_float(Int a) { return static_cast<Float>(static_cast<int32_t>(a)); }
    static bool at_least(Float a, Float b) { return a >= b; }
    static bool below(Float a, Float b) { return a < b; }
    static bool both(bool a, bool b) { return a && b; }
    static Float keep_where(bool mask, Float a) { return mask ? a : 0; }
    static Int add_one_where(bool mask, Int a) { return a + mask; }
    static Int larger_int(Int a, Int b) {
        return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
    }
    static Int bit_xor(Int a, Int b) { return a ^ b; }
    static Int mul_low(Int a, Int b) { return a * b; }
    static Int mul_high_16(Int a, Int b) { return a * b >> 16; }
    static Int count_from(uint32_t first) { return first; }
    template <int count>
    static Int shift_right(Int a) {
        return a >> count;
    }
    template <class Value>
    static Value opaque(Value a) {
        asm volatile("" : "+m"(a));
        return a;
    }
};

}  // namespace

extern const Kernels kScalarKernels = AdamWOver<Scalar>::table();

}  // namespace flux
