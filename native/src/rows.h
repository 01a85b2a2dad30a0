// What the weights of some rows of a table will be after an update, over the lanes of one
// instruction set. Nothing of the table is written; the operations are those of its own update.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace flux {

template <class Set>
struct RowsOver {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Base = KernelsOver<Set>;

    template <class... Values>
    static FLUX_INLINE void prefetch(const Values*... at) {
        if constexpr (Set::width > 1) (__builtin_prefetch(at, 0), ...);
    }

    // Moments in fp32 or bf16.
    template <class Value>
    struct Plain {
        static constexpr bool kNarrow = sizeof(Value) == 2;
        using Coefficients = std::conditional_t<kNarrow, typename States16<Set>::Coefficients,
                                                typename Base::Coefficients>;
        const Value *m, *v;
        Coefficients c;

        FLUX_INLINE Plain(const Value* old_m, const Value* old_v, const flux_adamw_step& step)
            : m(old_m), v(old_v), c(step) {}

        // Elements from `at` on that are read alike: all of them.
        FLUX_INLINE size_t begin(size_t, size_t count) { return count; }
        template <class Lanes>
        FLUX_INLINE void advance(Lanes lanes, size_t i, Float& p, Float grad) const {
            Float m_i = Base::load_grad(lanes, m + i), v_i = Base::load_grad(lanes, v + i);
            if constexpr (kNarrow)
                c.advance(p, m_i, v_i, grad);
            else
                Base::advance(p, m_i, v_i, grad, c);
        }
    };

    // Codes of 8 bits; a row may begin and end within a block.
    struct Coded {
        const uint8_t *m, *v;
        const float *m_scales, *v_scales;
        NarrowCoefficients<Set> c;
        MapOver<Set> map_m{kSignedMap}, map_v{kUnsignedMap};
        Float m_scale, v_scale;

        FLUX_INLINE Coded(const flux_states8& s, const flux_adamw_step& step)
            : m(s.m), v(s.v), m_scales(s.m_scale), v_scales(s.v_scale), c(step) {}

        // Up to the end of the block.
        FLUX_INLINE size_t begin(size_t at, size_t count) {
            m_scale = Set::all(c.decayed_m(m_scales[at / kStateBlock]));
            v_scale = Set::all(c.decayed_v(v_scales[at / kStateBlock]));
            const size_t left = kStateBlock - at % kStateBlock;
            return left < count ? left : count;
        }
        template <class Lanes>
        FLUX_INLINE void advance(Lanes lanes, size_t i, Float& p, Float grad) const {
            Float m_i = map_m.template value<true>(lanes.load(m + i), m_scale);
            Float v_i = map_v.template value<false>(lanes.load(v + i), v_scale);
            c.advance(p, m_i, v_i, grad);
        }
    };

    // Masters, and where their new weights go.
    struct Split {
        uint16_t* out;
        const uint16_t *hi, *lo;

        template <class Lanes>
        FLUX_INLINE Float load(Lanes lanes, size_t i) const {
            return Base::decode(lanes.load(hi + i), lanes.load(lo + i));
        }
        template <class Lanes>
        FLUX_INLINE void store(Lanes lanes, size_t i, Float p) const {
            lanes.store_low_half(out + i, Base::high_half(Set::as_int(p)));
        }
        FLUX_INLINE void fetch(size_t i) const { prefetch(hi + i, lo + i); }
    };
    struct Whole {
        float* out;
        const float* p;

        template <class Lanes>
        FLUX_INLINE Float load(Lanes lanes, size_t i) const {
            return lanes.load(p + i);
        }
        template <class Lanes>
        FLUX_INLINE void store(Lanes lanes, size_t i, Float x) const {
            lanes.store(out + i, x);
        }
        FLUX_INLINE void fetch(size_t i) const { prefetch(p + i); }
    };

    // Elements [first, first + count) of the table, to `to` on; meanwhile as many from `ahead` on are
    // fetched.
    template <class Weights, class Moments, class Grad>
    static FLUX_INLINE void range(const Weights& weights, Moments& moments, const Grad* grad,
                                  size_t first, size_t count, size_t to, size_t ahead) {
        while (count > 0) {
            const size_t alike = moments.begin(first, count);
            Base::for_each(alike, [&](auto lanes, size_t j) __attribute__((always_inline)) {
                weights.fetch(ahead + j);
                prefetch(moments.m + ahead + j, moments.v + ahead + j, grad + ahead + j);
                Float p = weights.load(lanes, first + j);
                moments.advance(lanes, first + j, p, Base::load_grad(lanes, grad + first + j));
                weights.store(lanes, to + j, Set::quiet(p));
            });
            first += alike, to += alike, ahead += alike, count -= alike;
        }
    }

    // No stream of the table goes on where a row ends: the next row's are fetched instead.
    template <class Weights, class Moments, class Grad>
    static FLUX_INLINE void over(const Weights& weights, Moments moments, const Grad* grad,
                                 const int64_t* rows, size_t count, size_t width) {
        const size_t ahead = width < kAhead ? width : kAhead, body = width - ahead;
        for (size_t r = 0; r < count; ++r) {
            const size_t first = static_cast<size_t>(rows[r]) * width;
            const size_t next = static_cast<size_t>(rows[r + 1 < count ? r + 1 : r]) * width;
            range(weights, moments, grad, first, body, r * width, first + ahead);
            range(weights, moments, grad, first + body, ahead, r * width + body, next);
        }
    }

    template <class Value, class Grad>
    static void split(uint16_t* out, const uint16_t* hi, const uint16_t* lo, const Value* m,
                      const Value* v, const Grad* grad, const int64_t* rows, size_t count,
                      size_t width, const flux_adamw_step& step) {
        over(Split{out, hi, lo}, Plain<Value>(m, v, step), grad, rows, count, width);
    }
    template <class Value>
    static void whole(float* out, const float* p, const Value* m, const Value* v, const float* grad,
                      const int64_t* rows, size_t count, size_t width, const flux_adamw_step& step) {
        over(Whole{out, p}, Plain<Value>(m, v, step), grad, rows, count, width);
    }
    template <class Grad>
    static void split8(uint16_t* out, const uint16_t* hi, const uint16_t* lo,
                       const flux_states8& states, const Grad* grad, const int64_t* rows,
                       size_t count, size_t width, const flux_adamw_step& step) {
        over(Split{out, hi, lo}, Coded(states, step), grad, rows, count, width);
    }
    static void whole8(float* out, const float* p, const flux_states8& states, const float* grad,
                       const int64_t* rows, size_t count, size_t width,
                       const flux_adamw_step& step) {
        over(Whole{out, p}, Coded(states, step), grad, rows, count, width);
    }

    static constexpr RowKernels table() {
        return {split<float, uint16_t>,
                split<float, float>,
                whole<float>,
                split8<uint16_t>,
                split8<float>,
                whole8,
                split<uint16_t, uint16_t>,
                split<uint16_t, float>,
                whole<uint16_t>};
    }
};

}  // namespace flux
