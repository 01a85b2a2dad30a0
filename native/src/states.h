// AdamW with states smaller than fp32, over the lanes of one instruction set: 8-bit block-wise, and
// bf16 with stochastic rounding. lanes.h has the update itself.
#pragma once

#include "map8.h"

namespace flux {

// One of the two maps in registers: values of codes, and the code nearest to a value.
template <class Set>
struct MapOver {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Table = typename Set::Table;

    static constexpr uint32_t kSign = 0x80000000u;

    const Map8& map;
    Table slope, offset, next, guess_slope, guess_offset, midpoint_slope, midpoint_offset, largest;

    explicit FLUX_INLINE MapOver(const Map8& map)
        : map(map),
          slope(Set::table(map.slope)),
          offset(Set::table(map.offset)),
          next(Set::table(map.next)),
          guess_slope(Set::table(map.guess_slope)),
          guess_offset(Set::table(map.guess_offset)),
          midpoint_slope(Set::table(map.midpoint_slope)),
          midpoint_offset(Set::table(map.midpoint_offset)),
          largest(Set::table(map.largest)) {}

    // The fraction that a code stands for, in [-1, 1].
    template <bool is_signed>
    FLUX_INLINE Float value(Int code) const {
        if (is_signed) code = Set::sub(code, Set::all_int(127));
        const Int bits = Set::as_int(Set::to_float(code));
        const Int k = is_signed ? Set::bit_and(bits, Set::all_int(~kSign)) : bits;
        const Float k_float = Set::as_float(k);
        const Int entry =
            Set::template shift_right<23>(Set::as_int(Set::add(k_float, Set::all(map.half))));
        const Float x =
            Set::exact_mul_add(Set::look_up(slope, entry), k_float, Set::look_up(offset, entry));
        if (!is_signed) return x;
        return Set::as_float(Set::bit_or(Set::as_int(x), Set::bit_and(bits, Set::all_int(kSign))));
    }

    // The code whose value is nearest to x, of two equally near the one further from zero; the
    // unsigned map gives zero for zero alone. x is finite, |x| <= 1 but for its last bit.
    template <bool is_signed>
    FLUX_INLINE Int nearest(Float x) const {
        const Int bits = Set::as_int(x);
        const Int positive = is_signed ? Set::bit_and(bits, Set::all_int(~kSign)) : bits;
        const Float y = Set::as_float(positive);
        // floor(log10(y)) + 7 from the exponent alone, low by one at most.
        const Int exponent = Set::subtract_to_zero_16(Set::template shift_right<23>(positive),
                                                      Set::all_int(kLeastExponent));
        Int decade = Set::mul_high_16(exponent, Set::all_int(kLog10Of2));
        decade = Set::add_one_where(Set::at_least(y, Set::look_up(next, decade)), decade);
        Float k = Set::whole_part(Set::exact_mul_add(Set::look_up(guess_slope, decade), y,
                                                     Set::look_up(guess_offset, decade)));
        const Float midpoint = Set::exact_mul_add(Set::look_up(midpoint_slope, decade), k,
                                                  Set::look_up(midpoint_offset, decade));
        k = Set::add_one_where(Set::at_least(y, midpoint), k);
        k = Set::smaller(k, Set::look_up(largest, decade));
        if (!is_signed) {
            const Float least = Set::as_float(Set::zero_where_no_bits(
                Set::all_int(0x3f800000u), positive));
            return Set::to_int(Set::larger(k, least));
        }
        const Int sign = Set::bit_and(bits, Set::all_int(kSign));
        const Int towards = Set::to_int(Set::as_float(Set::bit_or(Set::as_int(k), sign)));
        // The signed map has no -1: its lowest code stands for -0.993.
        return Set::larger_int(Set::add(towards, Set::all_int(127)), Set::all_int(0));
    }

    static constexpr uint32_t kLeastExponent = 127 - 22;
    static constexpr uint32_t kLog10Of2 = 19728;  // times 2^16
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
    static FLUX_INLINE flux_states8 from(flux_states8 at, size_t i) {
        const size_t block = i / kStateBlock;
        return {at.m + i, at.v + i, at.m_scale + block, at.v_scale + block};
    }

    template <class Weights, class Grad>
    static void adamw8(Weights weights, flux_states8 states, const Grad* grad, size_t n,
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
    static void adamw8_by_block(Weights weights, flux_states8 states, const Grad* __restrict grad,
                                size_t n, const flux_adamw_step& step) {
        const Coefficients c(step);
        const MapOver<Set> map_m(kSignedMap), map_v(kUnsignedMap);
        const Int magnitude_bits = Set::all_int(0x7fffffffu);
        for (size_t at = 0; at < n; at += kStateBlock) {
            const size_t count = n - at < kStateBlock ? n - at : kStateBlock;
            alignas(64) float new_m[kStateBlock], new_v[kStateBlock];
            uint8_t *const m_codes = states.m + at, *const v_codes = states.v + at;
            float *const m_scale = states.m_scale + at / kStateBlock,
                         *const v_scale = states.v_scale + at / kStateBlock;
            const Float old_m_scale = Set::all(*m_scale), old_v_scale = Set::all(*v_scale);
            Float m_most = Set::all(0), v_most = Set::all(0);
            Base::for_each(count, [&](auto lanes, size_t i) __attribute__((always_inline)) {
                const Float fraction = map_m.template value<true>(lanes.load(m_codes + i));
                Float m = Set::mul(lanes.only(fraction), old_m_scale);
                Float v = Set::mul(map_v.template value<false>(lanes.load(v_codes + i)), old_v_scale);
                Float p = load(lanes, weights, at + i);
                Base::advance(p, m, v, Base::load_grad(lanes, grad + at + i), c);
                store(lanes, weights, at + i, Set::quiet(p));
                restart_where_not_finite(m, v);
                m_most = Set::larger(m_most, Set::as_float(Set::bit_and(Set::as_int(m), magnitude_bits)));
                v_most = Set::larger(v_most, v);
                typename Set::Whole{}.store(new_m + i, m);
                typename Set::Whole{}.store(new_v + i, v);
            });
            *m_scale = scale_of(m_most);
            *v_scale = scale_of(v_most);
            const Float m_inverse = Set::all(1.0f / *m_scale), v_inverse = Set::all(1.0f / *v_scale);
            Base::for_each(count, [&](auto lanes, size_t i) __attribute__((always_inline)) {
                const Float m = Set::mul(typename Set::Whole{}.load(new_m + i), m_inverse);
                const Float v = Set::mul(typename Set::Whole{}.load(new_v + i), v_inverse);
                lanes.store_low_byte(m_codes + i, map_m.template nearest<true>(m));
                lanes.store_low_byte(v_codes + i, map_v.template nearest<false>(v));
            });
        }
    }

    // No smaller than the smallest normal number, so that its inverse is finite.
    static FLUX_INLINE float scale_of(Float most) {
        const float largest = Set::largest(most);
        return largest < 0x1p-126f ? 0x1p-126f : largest;
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
            const Int code = is_signed ? map.template nearest<true>(at) : map.template nearest<false>(at);
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
            lanes.store(x + whole + j, is_signed ? map.template value<true>(code)
                                                 : map.template value<false>(code));
        });
    }

    static void adamw8_split_bf16(uint16_t* hi, uint16_t* lo, flux_states8 s, const uint16_t* grad,
                                  size_t n, const flux_adamw_step& step) {
        adamw8(SplitWeights{hi, lo}, s, grad, n, step);
    }
    static void adamw8_split_f32(uint16_t* hi, uint16_t* lo, flux_states8 s, const float* grad,
                                 size_t n, const flux_adamw_step& step) {
        adamw8(SplitWeights{hi, lo}, s, grad, n, step);
    }
    static void adamw8_f32(float* p, flux_states8 s, const float* grad, size_t n,
                           const flux_adamw_step& step) {
        adamw8(WholeWeights{p}, s, grad, n, step);
    }
    static void adamw16_split_bf16(uint16_t* hi, uint16_t* lo, uint16_t* m, uint16_t* v,
                                   const uint16_t* grad, size_t n, const flux_rounding& key,
                                   const flux_adamw_step& step) {
        States16<Set>::adamw16(SplitWeights{hi, lo}, m, v, grad, n, key, step);
    }
    static void adamw16_split_f32(uint16_t* hi, uint16_t* lo, uint16_t* m, uint16_t* v,
                                  const float* grad, size_t n, const flux_rounding& key,
                                  const flux_adamw_step& step) {
        States16<Set>::adamw16(SplitWeights{hi, lo}, m, v, grad, n, key, step);
    }
    static void adamw16_f32(float* p, uint16_t* m, uint16_t* v, const float* grad, size_t n,
                            const flux_rounding& key, const flux_adamw_step& step) {
        States16<Set>::adamw16(WholeWeights{p}, m, v, grad, n, key, step);
    }
    static void stream8(uint16_t* hi, uint16_t* lo, uint8_t* m, uint8_t* v, const uint16_t* grad,
                        size_t n) {
        stream(SplitWeights{hi, lo}, m, v, grad, n);
    }
    static void stream16(uint16_t* hi, uint16_t* lo, uint16_t* m, uint16_t* v,
                         const uint16_t* grad, size_t n) {
        stream(SplitWeights{hi, lo}, m, v, grad, n);
    }

    static constexpr StateKernels table() {
        return {adamw8_split_bf16, adamw8_split_f32, adamw8_f32, adamw16_split_bf16,
                adamw16_split_f32, adamw16_f32,      stream8,    stream16,
                encode,            decode};
    }
};

}  // namespace flux

#include "block8.h"
#include "states16.h"
