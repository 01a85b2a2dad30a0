// AdamW with 8-bit states over whole blocks, on wide lanes: the bits of the loop in states.h in less
// than half of its operations.
//
// A group is four vectors, two pairs (pairs.h) in their order; codes are put into it as bytes. In a
// turn one group is begun, the one before it is finished, and one of the block before that is coded,
// vector by vector: look-ups, roots and divisions take turns. Weights and moments that are not finite
// are rare: one test finds them for a group or a block.
#pragma once

#include "pairs.h"

namespace flux {

template <class Set>
struct Blocks8 {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Base = KernelsOver<Set>;
    using Coefficients = LowBitCoefficients<Set>;
    using Whole = typename Set::Whole;

    static constexpr size_t kVector = Set::width;
    static constexpr size_t kGroup = 4 * kVector;
    static_assert(kStateBlock % kGroup == 0);

    // Weights, gradients or moments of a group, from and to memory.
    template <class From>
    static FLUX_INLINE void load(From at, Float (&x)[4]) {
        Pairs<Set>::load(at, x[0], x[1]);
        Pairs<Set>::load(StatesOver<Set>::from(at, 2 * kVector), x[2], x[3]);
    }
    template <class To>
    static FLUX_INLINE void store(To at, const Float (&x)[4]) {
        Pairs<Set>::store(at, x[0], x[1]);
        Pairs<Set>::store(StatesOver<Set>::from(at, 2 * kVector), x[2], x[3]);
    }

    // -- the update ------------------------------------------------------------------------------

    // New moments of one block in the order of the vectors, the largest of them, and what makes y of them
    // (map8.h).
    struct Moments {
        alignas(64) float m[kStateBlock];
        alignas(64) float v[kStateBlock];
        float m_most, v_most, m_to_y, v_to_y;
    };

    // What groups of a block give for the whole of it.
    struct Most {
        Float m = Set::all(0), v = Set::all(0);
        bool strange = false;
    };

    // The values of codes in one block, decayed by a step.
    struct Decoders {
        typename Set::Decoder m, v;
    };

    // What all blocks are updated with.
    struct Constants {
        Coefficients c;
        Decoders fractions;

        explicit FLUX_INLINE Constants(const flux_adamw_step& step)
            : c(step), fractions{typename Set::Decoder(true), typename Set::Decoder(false)} {}

        FLUX_INLINE Decoders decoders(States8 states) const {
            return {fractions.m.times(c.decayed_m(*states.m_scale)),
                    fractions.v.times(c.decayed_v(*states.v_scale))};
        }
    };

    // A group between the two halves of its update.
    struct Group {
        Float p[4], root[4];
    };

    // What the first half of an update takes beside the weights.
    struct Read {
        Float g[4], m[4], v[4];
    };

    template <class Weights, class Grad>
    static FLUX_INLINE void read(Weights weights, States8 states, const Grad* grad,
                                 const Decoders& decode, Group& group, Read& of) {
        StatesOver<Set>::fetch_all(0, kGroup, weights, grad, states.m, states.v);
        load(weights, group.p);
        load(grad, of.g);
        decode.m.template values<true>(Set::load_interleaved(states.m), of.m);
        decode.v.template values<false>(Set::load_interleaved(states.v), of.v);
    }

    // The first half for vector j: its new moments too.
    static FLUX_INLINE void begin(Group& group, Read& of, size_t j, const Constants& with, float* new_m,
                                  float* new_v, Most& most) {
        group.root[j] = with.c.begin(group.p[j], of.m[j], of.v[j], of.g[j]);
        Whole{}.store(new_m + j * kVector, of.m[j]);
        Whole{}.store(new_v + j * kVector, of.v[j]);
        most.m = Set::larger_size(most.m, of.m[j]);
        most.v = Set::larger(most.v, of.v[j]);
    }

    // The second half.
    static FLUX_INLINE void finish(Group& group, size_t j, const float* new_m, const Constants& with) {
        with.c.finish(group.p[j], Whole{}.load(new_m + j * kVector), group.root[j]);
    }
    template <class Weights>
    static FLUX_INLINE void write(Group& group, Weights weights, Most& most) {
        if (__builtin_expect(Set::any_nan(group.p), 0)) {  // also where m or v is NaN or v negative
            most.strange = true;
            for (Float& x : group.p) x = Set::quiet(x);
        }
        store(weights, group.p);
    }

    // -- the codes -------------------------------------------------------------------------------

    static constexpr Lines8<Set::kSlots> kLinesM{kSignedMap, Set::slot_of, Set::border_of};
    static constexpr Lines8<Set::kSlots> kLinesV{kUnsignedMap, Set::slot_of, Set::border_of};

    // The lines of both maps in registers.
    struct Maps {
        typename Set::Lines m{kLinesM, kSignedMap}, v{kLinesV, kUnsignedMap};
        typename Set::Masks masks;
    };

    // The lines of a group, with m for its signs.
    struct Coded {
        Int m[4];
        Float y_m[4], y_v[4];
        typename Set::OnLines of_m, of_v;
    };

    // Those of vector j; vectors come in order, and lines in pairs.
    static FLUX_INLINE void code(Coded& of, size_t j, const float* from_m, const float* from_v,
                                 Float m_to_y, Float v_to_y, const Maps& maps) {
        const Float m = Whole{}.load(from_m + j * kVector), v = Whole{}.load(from_v + j * kVector);
        of.m[j] = Set::as_int(m);
        of.y_m[j] = Set::larger_size(Set::mul(m, m_to_y), Set::all(kLeastY));
        of.y_v[j] = Set::mul_add(v, v_to_y, Set::all(-kTellsZero));
        if (j % 2 == 0) return;
        maps.m.template put<false>(of.y_m[j - 1], of.y_m[j], j / 2, of.of_m);
        maps.v.template put<true>(of.y_v[j - 1], of.y_v[j], j / 2, of.of_v);
    }

    static FLUX_INLINE void store_codes(const Coded& of, const Maps& maps, uint8_t* m_codes,
                                        uint8_t* v_codes) {
        const Int k_m = maps.m.bytes(of.of_m, maps.masks);
        const Int k_v = maps.v.bytes(of.of_v, maps.masks);
        Set::store_interleaved(m_codes, Set::signed_codes(k_m, of.m));
        Set::store_interleaved(v_codes, Set::unsigned_codes(k_v));
    }

    // Moments that are not finite start anew; the largest of the others.
    static __attribute__((noinline)) void restart(Moments& moments) {
        Float m_most = Set::all(0), v_most = Set::all(0);
        for (size_t i = 0; i < kStateBlock; i += kVector) {
            Float m = Whole{}.load(moments.m + i), v = Whole{}.load(moments.v + i);
            StatesOver<Set>::restart_where_not_finite(m, v);
            Whole{}.store(moments.m + i, m);
            Whole{}.store(moments.v + i, v);
            m_most = Set::larger_size(m_most, m);
            v_most = Set::larger(v_most, v);
        }
        Set::largest(m_most, v_most, moments.m_most, moments.v_most);
    }

    // The scales of a block.
    static FLUX_INLINE void scale(Moments& moments, const Most& most, States8 states) {
        Set::largest(most.m, most.v, moments.m_most, moments.v_most);
        const bool finite = moments.m_most <= __FLT_MAX__ && moments.v_most <= __FLT_MAX__;
        if (__builtin_expect(most.strange || !finite, 0)) restart(moments);
        constexpr float kLeast = StatesOver<Set>::kLeastScale;
        if (moments.m_most < kLeast) moments.m_most = kLeast;
        if (moments.v_most < kLeast) moments.v_most = kLeast;
        *states.m_scale = moments.m_most;
        *states.v_scale = moments.v_most;
        moments.m_to_y = kSignedMap.scale / moments.m_most;
        moments.v_to_y = kUnsignedMap.scale / moments.v_most;
    }

    // For tests: codes of the fractions of whole groups, and back.
    static void encode(const float* x, uint8_t* codes, size_t n, bool is_signed) {
        const Maps maps;
        alignas(64) float m[kGroup] = {}, v[kGroup] = {};
        uint8_t unused[kGroup];
        for (size_t i = 0; i < n; i += kGroup) {
            Float four[4];
            load(x + i, four);
            for (size_t j = 0; j < 4; ++j) Whole{}.store((is_signed ? m : v) + j * kVector, four[j]);
            uint8_t *const m_codes = is_signed ? codes + i : unused;
            uint8_t *const v_codes = is_signed ? unused : codes + i;
            Coded of;
            for (size_t j = 0; j < 4; ++j)
                code(of, j, m, v, Set::all(kSignedMap.scale), Set::all(kUnsignedMap.scale), maps);
            store_codes(of, maps, m_codes, v_codes);
        }
    }
    static void decode(const uint8_t* codes, float* x, size_t n, bool is_signed) {
        const typename Set::Decoder decoder(is_signed);
        for (size_t i = 0; i < n; i += kGroup) {
            Float four[4];
            if (is_signed)
                decoder.template values<true>(Set::load_interleaved(codes + i), four);
            else
                decoder.template values<false>(Set::load_interleaved(codes + i), four);
            store(x + i, four);
        }
    }

    // One block is updated while the one before it is coded, group by group: memory is busy all the
    // time, and neither waits for the other's roots, divisions and scales. A group is finished a turn
    // after it was begun.
    template <bool advances, bool codes, class Weights, class Grad>
    static FLUX_INLINE void turn(Weights weights, States8 states, const Grad* grad,
                                 const Constants& with, const Maps& maps, Moments& now,
                                 const Moments& before) {
        using States = StatesOver<Set>;
        Float m_to_y, v_to_y;
        Decoders decode = with.fractions;
        if (advances) decode = with.decoders(states);
        if (codes) m_to_y = Set::all(before.m_to_y), v_to_y = Set::all(before.v_to_y);
        Most most;
        Group group, begun;
        Read of;
        if (advances) {
            read(weights, states, grad, decode, begun, of);
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) begin(begun, of, j, with, now.m, now.v, most);
        }
        for (size_t i = 0; i < kStateBlock; i += kGroup) {
            const size_t next = i + kGroup;
            const bool begins = advances && next < kStateBlock;
            group = begun;
            if (begins)
                read(States::from(weights, next), States::from(states, next), grad + next, decode,
                     begun, of);
            Coded coded;
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) {
                if (codes) code(coded, j, before.m + i, before.v + i, m_to_y, v_to_y, maps);
                if (advances) finish(group, j, now.m + i, with);
                if (begins) begin(begun, of, j, with, now.m + next, now.v + next, most);
            }
            uint8_t* const m_codes = states.m + i - kStateBlock;
            uint8_t* const v_codes = states.v + i - kStateBlock;
            if (codes) store_codes(coded, maps, m_codes, v_codes);
            if (advances) write(group, States::from(weights, i), most);
        }
        if (advances) scale(now, most, states);
    }

    // `blocks` whole blocks, one at least.
    template <class Weights, class Grad>
    static void adamw8(Weights weights, States8 states, const Grad* grad, size_t blocks,
                       const flux_adamw_step& step) {
        using States = StatesOver<Set>;
        const Constants with(step);
        const Maps maps;
        Moments two[2];
        turn<true, false>(weights, states, grad, with, maps, two[0], two[1]);
        for (size_t block = 1; block < blocks; ++block) {
            const size_t at = block * kStateBlock;
            turn<true, true>(States::from(weights, at), States::from(states, at), grad + at, with,
                             maps, two[block % 2], two[1 - block % 2]);
        }
        turn<false, true>(weights, States::from(states, blocks * kStateBlock), grad, with, maps,
                          two[blocks % 2], two[1 - blocks % 2]);
    }
};

}  // namespace flux
