// Two vectors at a time, on wide lanes: halves of 32-bit values are unpacked and packed within 128-bit
// lanes, two vectors in one operation. So a pair holds its elements in another order than memory,
// always the same one: in each 128 bits the first vector has four, the second the next four. In memory
// order halves are interleaved as they are loaded and stored: less work where most values are fp32.
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
        const Int top = Set::add_16(hi, Set::sign_16(lo));
        a = Set::as_float(Set::unpack_low_16(lo, top));
        b = Set::as_float(Set::unpack_high_16(lo, top));
    }
    static FLUX_INLINE void store(SplitWeights at, Float a, Float b) {
        Int lo, top;
        Set::split_16(Set::as_int(a), Set::as_int(b), lo, top);
        store_halves(at.hi, Set::sub_16(top, Set::sign_16(lo)));
        store_halves(at.lo, lo);
    }
    static FLUX_INLINE void load(const float* at, Float& a, Float& b) {
        a = Whole{}.load(at);
        b = Whole{}.load(at + Set::width);
        if constexpr (!in_memory_order) Set::from_memory_order(a, b);
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
        a = Set::as_float(Set::unpack_low_16(none, words));
        b = Set::as_float(Set::unpack_high_16(none, words));
    }
    // The upper halves of both.
    static FLUX_INLINE void store_high(uint16_t* at, Int a, Int b) {
        Int low, high;
        Set::split_16(a, b, low, high);
        store_halves(at, high);
    }
};

}  // namespace flux
