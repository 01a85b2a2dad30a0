// AdamW with bf16 states, rounded at random, over the lanes of one instruction set.
#pragma once

#include "pairs.h"

namespace flux {

template <class Set>
struct States16 {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Base = KernelsOver<Set>;
    using States = StatesOver<Set>;

    // What an update multiplies with.
    struct Coefficients {
        LowBitCoefficients<Set> low_bit;
        Float beta1, beta2;

        explicit FLUX_INLINE Coefficients(const flux_adamw_step& step)
            : low_bit(step), beta1(Set::all(step.beta1)), beta2(Set::all(step.beta2)) {}

        // The first half of an update of the lanes, as of 8-bit states once old moments are decayed.
        FLUX_INLINE Float begin(Float& p, Float& m, Float& v, Float grad) const {
            m = Set::mul(m, beta1);
            v = Set::mul(v, beta2);
            return low_bit.begin(p, m, v, grad);
        }
        FLUX_INLINE void finish(Float& p, Float m, Float root) const { low_bit.finish(p, m, root); }
        FLUX_INLINE void advance(Float& p, Float& m, Float& v, Float grad) const {
            const Float root = begin(p, m, v, grad);
            finish(p, m, root);
        }
    };

    // -- random numbers --------------------------------------------------------------------------

    // A hash of a number with the step's two keys between the rounds (Wellons, Prospecting for Hash
    // Functions, 2018, with his later constants).
    static FLUX_INLINE Int hash(Int number, const flux_rounding& key) {
        const uint32_t first = key.first_key ^ key.first_key >> 16;
        Int x = folded(number, Set::shift_right_16(number), Set::all_int(first));
        x = Set::mul_low(x, Set::all_int(0x21f0aaadu));
        x = folded(x, Set::shift_right_15(x), Set::all_int(key.second_key));
        x = Set::mul_low(x, Set::all_int(0xd35a2d97u));
        return Set::bit_xor(x, Set::shift_right_15(x));
    }

    // 32 random bits of an element in a step are those of its place in its segment with those of the
    // segment: one look-up for most elements (tabulation: Zobrist, A New Hashing Method, 1970; any
    // three are independent: Patrascu and Thorup, The Power of Simple Tabulation Hashing, 2012).
    static constexpr uint32_t kSegment = 1024;

    static FLUX_INLINE Int bits_of_segment(uint32_t element, const flux_rounding& key) {
        return hash(Set::all_int(~(element / kSegment)), key);
    }

    // By place, in the order of pairs.
    struct Places {
        alignas(64) uint32_t bits[kSegment];

        explicit FLUX_INLINE Places(const flux_rounding& key) {
            for (uint32_t i = 0; i < kSegment; i += 2 * Set::width) {
                Int first, second;
                Set::count_pair_from(i, first, second);
                Set::store_words(bits + i, hash(first, key));
                Set::store_words(bits + i + Set::width, hash(second, key));
            }
        }
    };

    static FLUX_INLINE Int folded(Int a, Int b, Int c) { return Set::bit_xor(Set::bit_xor(a, b), c); }

    // -- the update ------------------------------------------------------------------------------

    // x with random bits added below bf16: cut off, it is rounded up or down with the probability that
    // leaves it right on average.
    static FLUX_INLINE Int dithered(Float x, Int random16) {
        return Set::add(Set::as_int(Set::quiet(x)), random16);
    }

    template <class Weights, class Grad>
    static void adamw16(Weights weights, uint16_t* __restrict m, uint16_t* __restrict v,
                        const Grad* __restrict grad, size_t n, flux_rounding key,
                        const flux_adamw_step& step) {
        const Coefficients c(step);
        size_t done = 0;
        if constexpr (Set::width > 1) {
            if (n >= 2 * kLine) {  // one line at least begins where a line of the table does
                const Places places(key);
                done = -key.first_element % kLine;
                adamw16_by_one(weights, m, v, grad, 0, done, key, c);
                const size_t lines = (n - done) / kLine * kLine;
                adamw16_by_pairs(weights, m, v, grad, done, done + lines, places, key, c);
                done += lines;
            }
        }
        adamw16_by_one(weights, m, v, grad, done, n, key, c);
    }

    // Those from `first` up to `end`, whole lines. A pair is finished a turn after it was begun, also
    // where a segment ends: then no turn waits for its own root and its division.
    template <class Weights, class Grad>
    static FLUX_INLINE void adamw16_by_pairs(Weights weights, uint16_t* m, uint16_t* v,
                                             const Grad* grad, size_t first, size_t end,
                                             const Places& places, const flux_rounding& key,
                                             const Coefficients& c) {
        constexpr size_t kPair = 2 * Set::width;
        Int of_segment = bits_of_segment(key.first_element + static_cast<uint32_t>(first), key);
        const auto begin_at = [&](size_t i) __attribute__((always_inline)) {
            return begin_pair(States::from(weights, i), m + i, v + i, grad + i, c);
        };
        const auto finish_at = [&](Pair pair, size_t i) __attribute__((always_inline)) {
            const uint32_t element = key.first_element + static_cast<uint32_t>(i);
            const uint32_t place = element % kSegment;
            if (place == 0) of_segment = bits_of_segment(element, key);
            finish_pair(pair, States::from(weights, i), m + i, v + i, places.bits + place,
                        of_segment, c);
        };
        const auto fetch_at = [&](size_t i) __attribute__((always_inline)) {
            if (kPair == kLine || (i - first) % kLine == 0)
                States::fetch_all(i, kLine, weights, m, v, grad);
        };
        Pair begun = begin_at(first);
        size_t i = first;
        for (; i + kPair < end; i += kPair) {
            fetch_at(i);
            const Pair pair = begun;
            begun = begin_at(i + kPair);
            finish_at(pair, i);
        }
        fetch_at(i);
        finish_at(begun, i);
    }

    // Those from `first` up to `end`, one vector at a time.
    template <class Weights, class Grad>
    static void adamw16_by_one(Weights weights, uint16_t* __restrict m, uint16_t* __restrict v,
                               const Grad* __restrict grad, size_t first, size_t end,
                               const flux_rounding& key, const Coefficients& c) {
        while (first < end) {
            const uint32_t element = key.first_element + static_cast<uint32_t>(first);
            const uint32_t place = element % kSegment;
            const size_t count = end - first < kSegment - place ? end - first : kSegment - place;
            const Int of_segment = bits_of_segment(element, key);
            Base::for_each(count, [&](auto lanes, size_t j) __attribute__((always_inline)) {
                const size_t i = first + j;
                Float p = States::load(lanes, weights, i);
                Float m_i = Base::from_bf16(lanes.load(m + i));
                Float v_i = Base::from_bf16(lanes.load(v + i));
                c.advance(p, m_i, v_i, Base::load_grad(lanes, grad + i));
                States::store(lanes, weights, i, Set::quiet(p));
                const Int of_place = hash(Set::count_from(place + static_cast<uint32_t>(j)), key);
                const Int bits = Set::bit_xor(of_place, of_segment);
                const Int for_m = dithered(m_i, Set::bit_and(bits, Set::all_int(0xffff)));
                const Int for_v = dithered(v_i, Set::shift_right_16(bits));
                lanes.store_low_half(m + i, Set::shift_right_16(for_m));
                lanes.store_low_half(v + i, Set::shift_right_16(for_v));
            });
            first += count;
        }
    }

    // Two vectors between the halves of their update.
    struct Pair {
        Float p[2], m[2], v[2], root[2];
    };

    template <class Weights, class Grad>
    static FLUX_INLINE Pair begin_pair(Weights weights, const uint16_t* m, const uint16_t* v,
                                       const Grad* grad, const Coefficients& c) {
        Pair pair;
        Float g[2];
        Pairs<Set>::load(weights, pair.p[0], pair.p[1]);
        Pairs<Set>::load(grad, g[0], g[1]);
        Pairs<Set>::load(m, pair.m[0], pair.m[1]);
        Pairs<Set>::load(v, pair.v[0], pair.v[1]);
        for (uint32_t j = 0; j < 2; ++j)
            pair.root[j] = c.begin(pair.p[j], pair.m[j], pair.v[j], g[j]);
        return pair;
    }

    // The second half, with the bits of their places.
    template <class Weights>
    static FLUX_INLINE void finish_pair(Pair& pair, Weights weights, uint16_t* m, uint16_t* v,
                                        const uint32_t* of_places, Int of_segment,
                                        const Coefficients& c) {
        for (uint32_t j = 0; j < 2; ++j) c.finish(pair.p[j], pair.m[j], pair.root[j]);
        if constexpr (Set::kInterleaved) {  // few registers: looking back at all six costs more
            for (uint32_t j = 0; j < 2; ++j) Base::quiet(pair.p[j], pair.m[j], pair.v[j]);
        } else {
            Base::quiet_pair(pair.p, pair.m, pair.v);
        }
        Int for_m[2], for_v[2];
        for (uint32_t j = 0; j < 2; ++j) {
            const Int bits = Set::bit_xor(Set::load_words(of_places + j * Set::width), of_segment);
            for_m[j] = Set::add(Set::as_int(pair.m[j]), Set::bit_and(bits, Set::all_int(0xffff)));
            for_v[j] = Set::add(Set::as_int(pair.v[j]), Set::shift_right_16(bits));
        }
        Pairs<Set>::store(weights, pair.p[0], pair.p[1]);
        Pairs<Set>::store_high(m, for_m[0], for_m[1]);
        Pairs<Set>::store_high(v, for_v[0], for_v[1]);
    }
};

}  // namespace flux
