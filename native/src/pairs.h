// Two vectors at a time, on wide lanes: halves of 32-bit values are unpacked and packed within 128-bit
// lanes, two vectors in one operation. So a pair holds its elements in another order than memory, always
// the same one of its set, which knows what is cheap. In memory order halves are interleaved as they are
// loaded and stored: less work where most values are fp32.
#pragma once

#include "map8.h"

namespace flux {

template <class Set, bool in_memory_order>
struct Pairs {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Whole = typename Set::Whole;

    static constexpr size_t kPair = 2 * Set::width;

    static FLUX_INLINE Int load_halves(const uint16_t* at) {
        if constexpr (in_memory_order) return Set::load_interleaved(at);
        else return Set::load_words(at);
    }
    static FLUX_INLINE void store_halves(uint16_t* at, Int x) {
        if constexpr (in_memory_order) Set::store_interleaved(at, x);
        else Set::store_words(at, x);
    }

    static FLUX_INLINE void load(SplitWeights at, Float& a, Float& b) {
        const Int hi = load_halves(at.hi);
        const Int lo = Set::zero_where_no_bits_16(load_halves(at.lo), hi,
                                                  Set::template constant<0x7fff7fffu>());
        join(lo, Set::add_16(hi, Set::sign_16(lo)), a, b);
    }
    static FLUX_INLINE void store(SplitWeights at, Float a, Float b) {
        Int lo, top;
        split(Set::as_int(a), Set::as_int(b), lo, top);
        store_halves(at.hi, Set::sub_16(top, Set::sign_16(lo)));
        store_halves(at.lo, lo);
    }
    static FLUX_INLINE void load(const float* at, Float& a, Float& b) {
        a = Whole{}.load(at);
        b = Whole{}.load(at + Set::width);
        if constexpr (!in_memory_order) Set::to_pair_order(a, b);
    }
    static FLUX_INLINE void store(float* at, Float a, Float b) {
        if constexpr (!in_memory_order) Set::to_memory_order(a, b);
        Whole{}.store(at, a);
        Whole{}.store(at + Set::width, b);
    }
    static FLUX_INLINE void load(WholeWeights at, Float& a, Float& b) { load(at.p, a, b); }
    static FLUX_INLINE void store(WholeWeights at, Float a, Float b) { store(at.p, a, b); }
    static FLUX_INLINE void load(const uint16_t* bf16, Float& a, Float& b) {
        const Int words = load_halves(bf16), none = Set::all_int(0);
        if constexpr (in_memory_order) join(none, words, a, b);
        else Set::join_pair(words, a, b);
    }
    // The upper halves of both.
    static FLUX_INLINE void store_high(uint16_t* at, Int a, Int b) {
        Int low, high;
        split(a, b, low, high);
        store_halves(at, high);
    }

    // Halves of both, the lower and the upper ones, and back.
    static FLUX_INLINE void join(Int lo, Int top, Float& a, Float& b) {
        if constexpr (in_memory_order) {
            a = Set::as_float(Set::unpack_low_16(lo, top));
            b = Set::as_float(Set::unpack_high_16(lo, top));
        } else {
            Set::join_pair(lo, top, a, b);
        }
    }
    static FLUX_INLINE void split(Int a, Int b, Int& lo, Int& top) {
        if constexpr (in_memory_order) Set::split_16(a, b, lo, top);
        else Set::split_pair(a, b, lo, top);
    }
};

}  // namespace flux
