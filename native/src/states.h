// AdamW with states smaller than fp32, over the lanes of one instruction set: 8-bit block-wise, and
// bf16 with stochastic rounding. lanes.h has the update itself.
#pragma once

#include "map8.h"

namespace flux {

// One of the two maps in registers: values of codes, and the codes of fractions.
template <class Set>
struct MapOver {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Table = typename Set::Table;

    static constexpr uint32_t kSign = 0x80000000u;

    Table slope, offset, next, line_slope, line_offset, line_most;

    explicit FLUX_INLINE MapOver(const Map8& map)
        : slope(Set::table(map.slope)),
          offset(Set::table(map.offset)),
          next(Set::table(map.next)),
          line_slope(Set::table(map.line_slope)),
          line_offset(Set::table(map.line_offset)),
          line_most(Set::table(map.line_most)) {}

    // What a code stands for in a block with this scale.
    template <bool is_signed>
    FLUX_INLINE Float value(Int code, Float scale) const {
        if (is_signed) code = Set::sub(code, Set::all_int(127));
        const Float k = Set::to_float(code);
        const Int sign = Set::bit_and(Set::as_int(k), Set::all_int(is_signed ? kSign : 0));
        const Float size = Set::as_float(Set::bit_xor(Set::as_int(k), sign));
        const Float above = Set::add(size, Set::all(is_signed ? 0.5f : 1.0f));
        const Int entry = Set::template shift_right<23>(Set::as_int(above));
        const Float b = Set::mul(Set::look_up(offset, entry), scale);
        return Set::mul_add(Set::mul(Set::look_up(slope, entry), scale), is_signed ? k : above,
                            Set::as_float(Set::bit_xor(Set::as_int(b), sign)));
    }

    // The code of a moment that is finite, by what makes y of it (map8.h).
    template <bool is_signed>
    FLUX_INLINE Int code_of(Float x, Float to_y) const {
        const Float signed_y = is_signed ? Set::mul(x, to_y)
                                         : Set::mul_add(x, to_y, Set::all(-kTellsZero));
        const Int sign = Set::bit_and(Set::as_int(signed_y), Set::all_int(kSign));
        const Int size = Set::bit_and(Set::as_int(signed_y), Set::all_int(~kSign));
        const Float y = Set::larger(Set::as_float(size), Set::all(kLeastY));
        // Of the decades the one of y's power of two, or the one below it.
        const Int exponent = Set::sub(Set::template shift_right<23>(Set::as_int(y)),
                                      Set::all_int(kLeastExponent));
        Int decade = Set::mul_high_16(exponent, Set::all_int(kLog10Of2));
        decade = Set::add_one_where(Set::at_least(y, Set::look_up(next, decade)), decade);
        const Float line = Set::mul_add(Set::look_up(line_slope, decade), y,
                                        Set::look_up(line_offset, decade));
        const Float k_bits = Set::smaller(line, Set::look_up(line_most, decade));
        const Int k = Set::bit_and(Set::shift_right_16(Set::as_int(k_bits)), Set::all_int(0xff));
        if (is_signed) {
            // Minus one where negative. The signed map has no -1: its lowest code stands for -0.993.
            const Int all_ones = Set::sub(Set::all_int(0), Set::template shift_right<31>(sign));
            const Int towards = Set::sub(Set::bit_xor(k, all_ones), all_ones);
            return Set::larger_int(Set::add(towards, Set::all_int(127)), Set::all_int(0));
        }
        const Int code = Set::bit_and(Set::sub(k, Set::all_int(1)), Set::all_int(0xff));
        return Set::zero_where_no_bits(code, Set::bit_xor(sign, Set::all_int(kSign)));
    }

    static constexpr uint32_t kLog10Of2 = 19728;  // times 2^16
};

// What updates with states of fewer bits multiply with (flux_native.h).
template <class Set>
struct LowBitCoefficients {
    using Float = typename Set::Float;
    using Base = KernelsOver<Set>;

    // Scales that a step takes below this, far from subnormal numbers, are zero for m and this for v: a
    // weight's step must not be divided by eps alone while there is something to divide.
    static constexpr float kLeastDecayed = 0x1p-80f;

    float beta1, beta2;
    Float decay, of_m, of_v, minus_step, eps;

    explicit FLUX_INLINE LowBitCoefficients(const flux_adamw_step& step)
        : beta1(step.beta1),
          beta2(step.beta2),
          decay(Set::all(step.decay)),
          of_m(Set::all(step.one_minus_beta1 * step.grad_scale)),
          of_v(Set::all(__builtin_sqrtf(step.one_minus_beta2) * step.grad_scale)),
          minus_step(Set::all(-(step.step_size / step.rsqrt_correction2))),
          eps(Set::all(step.eps / step.rsqrt_correction2)) {}

    // The scales of moments that a step has decayed. NaN is less than the least.
    FLUX_INLINE float decayed_m(float scale) const {
        const float x = scale * beta1;
        return x >= kLeastDecayed ? x : 0;
    }
    FLUX_INLINE float decayed_v(float scale) const {
        const float x = scale * beta2;
        return x >= kLeastDecayed ? x : kLeastDecayed;
    }

    // The first half of an update of the lanes: decayed moments become the new ones, and the weight is
    // decayed; the root of v, for which nothing waits before the second half. Any NaN as it comes.
    FLUX_INLINE Float begin(Float& p, Float& m, Float& v, Float grad) const {
        m = Set::mul_add(grad, of_m, m);
        const Float g = Set::mul(grad, of_v);
        v = Set::mul_add(g, g, v);
        p = Set::mul(p, decay);
        return Set::sqrt(v);
    }
    // The second half: the weight's step.
    FLUX_INLINE void finish(Float& p, Float m, Float root) const {
        p = Set::mul_add(minus_step, Set::div(m, Set::add(root, eps)), p);
    }
    FLUX_INLINE void advance(Float& p, Float& m, Float& v, Float grad) const {
        const Float root = begin(p, m, v, grad);
        finish(p, m, root);
    }
};

template <class Set>
struct Blocks8;

template <class Set>
struct States16;

template <class Set>
struct StatesOver {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Base = KernelsOver<Set>;
    using Coefficients = typename Base::Coefficients;

    template <class Lanes>
    static FLUX_INLINE Float load(Lanes lanes, SplitWeights at, size_t i) {
        return Base::decode(lanes.load(at.hi + i), lanes.load(at.lo + i));
    }
    template <class Lanes>
    static FLUX_INLINE Float load(Lanes lanes, WholeWeights at, size_t i) {
        return lanes.load(at.p + i);
    }
    template <class Lanes>
    static FLUX_INLINE void store(Lanes lanes, SplitWeights at, size_t i, Float p) {
        Base::store_split(lanes, at.hi + i, at.lo + i, p);
    }
    template <class Lanes>
    static FLUX_INLINE void store(Lanes lanes, WholeWeights at, size_t i, Float p) {
        lanes.store(at.p + i, p);
    }

    template <class Value>
    static FLUX_INLINE void fetch(const Value* at, size_t count) {
        Base::fetch(at, count);
    }
    static FLUX_INLINE void fetch(SplitWeights at, size_t count) {
        fetch(at.hi, count);
        fetch(at.lo, count);
    }
    static FLUX_INLINE void fetch(WholeWeights at, size_t count) { fetch(at.p, count); }

    // Moments that are not finite would spoil their block's scale: such an element starts anew.
    static FLUX_INLINE void restart_where_not_finite(Float& m, Float& v) {
        const Int magnitude_bits = Set::all_int(0x7fffffffu);
        const Float infinite = Set::as_float(Set::all_int(0x7f800000u));
        const Float m_size = Set::as_float(Set::bit_and(Set::as_int(m), magnitude_bits));
        const auto finite = Set::both(Set::below(m_size, infinite), Set::below(v, infinite));
        m = Set::keep_where(finite, m);
        v = Set::keep_where(finite, v);
    }

    template <class Value>
    static FLUX_INLINE Value* from(Value* at, size_t i) {
        return at + i;
    }
    static FLUX_INLINE SplitWeights from(SplitWeights at, size_t i) { return {at.hi + i, at.lo + i}; }
    static FLUX_INLINE WholeWeights from(WholeWeights at, size_t i) { return {at.p + i}; }
    // Of every stream the `count` elements from i on.
    template <class... Streams>
    static FLUX_INLINE void fetch_all(size_t i, size_t count, Streams... streams) {
        (fetch(from(streams, i), count), ...);
    }
    static FLUX_INLINE States8 from(States8 at, size_t i) {
        const size_t block = i / kStateBlock;
        return {at.m + i, at.v + i, at.m_scale + block, at.v_scale + block};
    }

    template <class Weights, class Grad>
    static void adamw8(Weights weights, States8 states, const Grad* grad, size_t n,
                       const flux_adamw_step& step) {
        size_t whole = 0;
        if constexpr (Set::width > 1) {
            whole = n / kStateBlock * kStateBlock;
            if (whole > 0) Blocks8<Set>::adamw8(weights, states, grad, whole / kStateBlock, step);
        }
        if (whole == n) return;
        adamw8_by_block(from(weights, whole), from(states, whole), grad + whole, n - whole, step);
    }

    template <class Weights, class Grad>
    static void adamw8_by_block(Weights weights, States8 states, const Grad* __restrict grad,
                                size_t n, const flux_adamw_step& step) {
        const LowBitCoefficients<Set> c(step);
        const MapOver<Set> map_m(kSignedMap), map_v(kUnsignedMap);
        const Int magnitude_bits = Set::all_int(0x7fffffffu);
        for (size_t at = 0; at < n; at += kStateBlock) {
            const size_t count = n - at < kStateBlock ? n - at : kStateBlock;
            alignas(64) float new_m[kStateBlock], new_v[kStateBlock];
            uint8_t *const m_codes = states.m + at, *const v_codes = states.v + at;
            float *const m_scale = states.m_scale + at / kStateBlock,
                         *const v_scale = states.v_scale + at / kStateBlock;
            const Float old_m_scale = Set::all(c.decayed_m(*m_scale));
            const Float old_v_scale = Set::all(c.decayed_v(*v_scale));
            Float m_most = Set::all(0), v_most = Set::all(0);
            Base::for_each(count, [&](auto lanes, size_t i) __attribute__((always_inline)) {
                Float m = lanes.only(map_m.template value<true>(lanes.load(m_codes + i), old_m_scale));
                Float v = map_v.template value<false>(lanes.load(v_codes + i), old_v_scale);
                Float p = load(lanes, weights, at + i);
                c.advance(p, m, v, Base::load_grad(lanes, grad + at + i));
                store(lanes, weights, at + i, Set::quiet(p));
                restart_where_not_finite(m, v);
                m_most = Set::larger(m_most, Set::as_float(Set::bit_and(Set::as_int(m), magnitude_bits)));
                v_most = Set::larger(v_most, v);
                typename Set::Whole{}.store(new_m + i, m);
                typename Set::Whole{}.store(new_v + i, v);
            });
            *m_scale = scale_of(m_most);
            *v_scale = scale_of(v_most);
            const Float m_to_y = Set::all(kSignedMap.scale / *m_scale);
            const Float v_to_y = Set::all(kUnsignedMap.scale / *v_scale);
            Base::for_each(count, [&](auto lanes, size_t i) __attribute__((always_inline)) {
                const Float m = typename Set::Whole{}.load(new_m + i);
                const Float v = typename Set::Whole{}.load(new_v + i);
                lanes.store_low_byte(m_codes + i, map_m.template code_of<true>(m, m_to_y));
                lanes.store_low_byte(v_codes + i, map_v.template code_of<false>(v, v_to_y));
            });
        }
    }

    static constexpr float kLeastScale = 2 * LowBitCoefficients<Set>::kLeastDecayed;
    static FLUX_INLINE float scale_of(Float most) {
        const float largest = Set::largest(most);
        return largest < kLeastScale ? kLeastScale : largest;
    }

    // The memory traffic of an update with states of `State`, and no arithmetic.
    template <class State>
    static void stream(SplitWeights weights, State* __restrict m, State* __restrict v,
                       const uint16_t* __restrict grad, size_t n) {
        for (size_t at = 0; at < n; at += kStateBlock) {
            const size_t count = n - at < kStateBlock ? n - at : kStateBlock;
            fetch_all(at, count, weights, m, v, grad);
            Base::for_each(count, [&](auto lanes, size_t j) __attribute__((always_inline)) {
                const size_t i = at + j;
                Set::opaque(lanes.load(grad + i));
                lanes.store_low_half(weights.hi + i, Set::opaque(lanes.load(weights.hi + i)));
                lanes.store_low_half(weights.lo + i, Set::opaque(lanes.load(weights.lo + i)));
                store_low(lanes, m + i, Set::opaque(lanes.load(m + i)));
                store_low(lanes, v + i, Set::opaque(lanes.load(v + i)));
            });
        }
    }
    template <class Lanes>
    static FLUX_INLINE void store_low(Lanes lanes, uint8_t* at, Int x) {
        lanes.store_low_byte(at, x);
    }
    template <class Lanes>
    static FLUX_INLINE void store_low(Lanes lanes, uint16_t* at, Int x) {
        lanes.store_low_half(at, x);
    }

    // Codes and scales of moments; what is not finite is zero.
    template <bool is_signed>
    static void quantise_by_block(const float* x, uint8_t* codes, float* scales, size_t n) {
        const Map8& map = is_signed ? kSignedMap : kUnsignedMap;
        const MapOver<Set> over(map);
        const Int magnitude_bits = Set::all_int(0x7fffffffu);
        for (size_t at = 0; at < n; at += kStateBlock) {
            const size_t count = n - at < kStateBlock ? n - at : kStateBlock;
            alignas(64) float finite[kStateBlock];
            Float most = Set::all(0);
            Base::for_each(count, [&](auto lanes, size_t i) __attribute__((always_inline)) {
                Float m = lanes.load(x + at + i), v = m;
                restart_where_not_finite(m, v);
                most = Set::larger(most, Set::as_float(Set::bit_and(Set::as_int(m), magnitude_bits)));
                typename Set::Whole{}.store(finite + i, m);
            });
            float& scale = scales[at / kStateBlock];
            scale = scale_of(most);
            const Float to_y = Set::all(map.scale / scale);
            Base::for_each(count, [&](auto lanes, size_t i) __attribute__((always_inline)) {
                const Float m = typename Set::Whole{}.load(finite + i);
                lanes.store_low_byte(codes + at + i, over.template code_of<is_signed>(m, to_y));
            });
        }
    }
    static void quantise(const float* x, uint8_t* codes, float* scales, size_t n, bool is_signed) {
        if (is_signed) quantise_by_block<true>(x, codes, scales, n);
        else quantise_by_block<false>(x, codes, scales, n);
    }

    // For tests: codes of fractions, and back.
    static void encode(const float* x, uint8_t* codes, size_t n, bool is_signed) {
        size_t whole = 0;
        if constexpr (Set::width > 1) {
            whole = n / Blocks8<Set>::kGroup * Blocks8<Set>::kGroup;
            Blocks8<Set>::encode(x, codes, whole, is_signed);
        }
        const MapOver<Set> map(is_signed ? kSignedMap : kUnsignedMap);
        Base::for_each(n - whole, [&](auto lanes, size_t j) __attribute__((always_inline)) {
            const Float at = lanes.load(x + whole + j);
            const Int code = is_signed ? map.template code_of<true>(at, Set::all(kSignedMap.scale))
                                       : map.template code_of<false>(at, Set::all(kUnsignedMap.scale));
            lanes.store_low_byte(codes + whole + j, code);
        });
    }
    static void decode(const uint8_t* codes, float* x, size_t n, bool is_signed) {
        size_t whole = 0;
        if constexpr (Set::width > 1) {
            whole = n / Blocks8<Set>::kGroup * Blocks8<Set>::kGroup;
            Blocks8<Set>::decode(codes, x, whole, is_signed);
        }
        const MapOver<Set> map(is_signed ? kSignedMap : kUnsignedMap);
        Base::for_each(n - whole, [&](auto lanes, size_t j) __attribute__((always_inline)) {
            const Int code = lanes.load(codes + whole + j);
            lanes.store(x + whole + j, is_signed ? map.template value<true>(code, Set::all(1))
                                                 : map.template value<false>(code, Set::all(1)));
        });
    }
};

}  // namespace flux

#include "block8.h"
#include "states16.h"
