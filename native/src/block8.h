// AdamW with 8-bit states over whole blocks, on wide lanes: the bits of the loop in states.h in less
// than half of its operations.
//
// A group is four vectors, two pairs (pairs.h) in their order; codes are put into it as bytes. In a
// turn one group is begun, the one before it is finished, and one of the block before that is coded,
// vector by vector: look-ups, roots and divisions take turns. What is rare is found by one test for a
// group or a block and then done as that loop does it: fractions close to a border between two codes,
// moments and weights that are not finite, scales whose inverse is subnormal.
#pragma once

#include "pairs.h"

namespace flux {

template <class Set>
struct Blocks8 {
    using Float = typename Set::Float;
    using Int = typename Set::Int;
    using Base = KernelsOver<Set>;
    using Coefficients = typename Base::Coefficients;
    using Whole = typename Set::Whole;
    using Search = Search8<Set::kSlots, Set::kZeroIsApart>;

    static constexpr size_t kVector = Set::width;
    static constexpr size_t kGroup = 4 * kVector;
    static_assert(kStateBlock % kGroup == 0);
    static constexpr float kLargestScale = 0x1p126f;  // its inverse is normal

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

    // New moments of one block in the order of the vectors, and the largest of them with its inverse.
    struct Moments {
        alignas(64) float m[kStateBlock];
        alignas(64) float v[kStateBlock];
        alignas(64) uint32_t sure[kVector];  // in each lane kSureLanes, or 0 where the search decides all
        float m_most, v_most, m_inverse, v_inverse;
    };

    // What groups of a block give for the whole of it.
    struct Most {
        Float m = Set::all(0), v = Set::all(0);
        bool strange = false;
    };

    // What all blocks are updated with.
    struct Constants {
        Coefficients c;
        typename Set::Decoder decode_m, decode_v;

        explicit FLUX_INLINE Constants(const flux_adamw_step& step)
            : c(step), decode_m(true), decode_v(false) {}
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
    static FLUX_INLINE void read(Weights weights, flux_states8 states, const Grad* grad,
                                 const Constants& with, Group& group, Read& of) {
        StatesOver<Set>::fetch_all(0, kGroup, weights, grad, states.m, states.v);
        load(weights, group.p);
        load(grad, of.g);
        with.decode_m.template values<true>(Set::load_interleaved(states.m), of.m);
        with.decode_v.template values<false>(Set::load_interleaved(states.v), of.v);
    }

    // The first half for vector j: its new moments too.
    static FLUX_INLINE void begin(Group& group, Read& of, size_t j, Float m_scale, Float v_scale,
                                  const Constants& with, float* new_m, float* new_v, Most& most) {
        Float m = Set::mul(of.m[j], m_scale), v = Set::mul(of.v[j], v_scale);
        group.root[j] = Base::begin(group.p[j], m, v, of.g[j], with.c);
        Whole{}.store(new_m + j * kVector, m);
        Whole{}.store(new_v + j * kVector, v);
        most.m = Set::larger_size(most.m, m);
        most.v = Set::larger(most.v, v);
    }

    // The second half.
    static FLUX_INLINE void finish(Group& group, size_t j, const float* new_m, const Constants& with) {
        Base::finish(group.p[j], Whole{}.load(new_m + j * kVector), group.root[j], with.c);
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

    // The lines of one map in registers.
    struct Lines {
        typename Set::SlotTable border, slope, offset, most;

        explicit FLUX_INLINE Lines(const Search& search)
            : border(Set::slot_table(search.border)),
              slope(Set::slot_table(search.slope)),
              offset(Set::slot_table(search.offset)),
              most(Set::slot_table(search.most)) {}

        FLUX_INLINE Float at(Float y) const {
            const Int slot = Set::slot_of(y, border);
            const Float line = Set::exact_mul_add(Set::look_up_slot(slope, slot), y,
                                                  Set::look_up_slot(offset, slot));
            return Set::smaller(line, Set::look_up_slot(most, slot));
        }
    };
    static constexpr Search kSearchM{kSignedMap, Set::slot_of, Set::border_of};
    static constexpr Search kSearchV{kUnsignedMap, Set::slot_of, Set::border_of};

    // The lines of both maps.
    struct Maps {
        Lines m{kSearchM}, v{kSearchV};
        typename Set::Masks masks;
    };

    // Lanes whose codes the exact search has to decide have low halves of kSure or more.
    struct Doubt {
        Int m, v;
    };
    static constexpr uint32_t kSureLanes = Search::kSure | 0xffff0000u;

    // The lines of a group, with m for its signs.
    struct Guess {
        Int m[4], of_m[4], of_v[4];
        Doubt doubt;
    };

    // Those of vector j; vectors come in order.
    static FLUX_INLINE void guess(Guess& of, size_t j, const float* from_m, const float* from_v,
                                  Float m_inverse, Float v_inverse, const Maps& maps) {
        const Float least = Set::all(Search::kLeast);
        const Float m = Whole{}.load(from_m + j * kVector);
        of.m[j] = Set::as_int(m);
        of.of_m[j] = Set::as_int(maps.m.at(Set::larger_size(Set::mul(m, m_inverse), least)));
        const Float v = Set::mul(Whole{}.load(from_v + j * kVector), v_inverse);
        Float y = Set::larger(v, least);
        if constexpr (Set::kZeroIsApart) y = Set::apart_where_zero(v, y);
        Float line = maps.v.at(y);
        if constexpr (!Set::kZeroIsApart) line = Set::where_not_zero(v, line, Set::all(129.5f));
        of.of_v[j] = Set::as_int(line);
        of.doubt.m = j == 0 ? of.of_m[j] : Set::larger_16(of.doubt.m, of.of_m[j]);
        of.doubt.v = j == 0 ? of.of_v[j] : Set::larger_16(of.doubt.v, of.of_v[j]);
    }

    // Their codes, but for those in doubt.
    static FLUX_INLINE void store_codes(const Guess& of, const Maps& maps, uint8_t* m_codes,
                                        uint8_t* v_codes) {
        const Int k_m = Set::third_bytes(of.of_m, maps.masks);
        const Int k_v = Set::third_bytes(of.of_v, maps.masks);
        Set::store_interleaved(m_codes, Set::signed_codes(k_m, of.m));
        Set::store_interleaved(v_codes, Set::unsigned_codes(k_v));
    }

    template <bool is_signed>
    static __attribute__((noinline)) void search(const float* from, const float& inverse,
                                                 uint8_t* codes) {
        const MapOver<Set> map(is_signed ? kSignedMap : kUnsignedMap);
        Int code[4];
        for (size_t j = 0; j < 4; ++j) {
            const Float x = Set::mul(Whole{}.load(from + j * kVector), Set::all(inverse));
            code[j] = Set::shift_left_16(map.template nearest<is_signed>(x));
        }
        Set::store_interleaved(codes, Set::third_bytes(code, typename Set::Masks{}));
    }

    // Search for the codes in doubt of the group at element i of a block.
    static FLUX_INLINE void settle(const Doubt& doubt, const Moments& moments, size_t i,
                                   uint8_t* m_codes, uint8_t* v_codes) {
        const float *const m = moments.m + i, *const v = moments.v + i;
        const Int sure = Set::load_words(moments.sure);
        if (__builtin_expect(Set::any_half_at_least(Set::larger_16(doubt.m, doubt.v), sure), 0)) {
            if (Set::any_half_at_least(doubt.m, sure)) search<true>(m, moments.m_inverse, m_codes);
            if (Set::any_half_at_least(doubt.v, sure)) search<false>(v, moments.v_inverse, v_codes);
        }
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
        moments.m_most = Set::largest(m_most);
        moments.v_most = Set::largest(v_most);
    }

    // The scales of a block.
    static FLUX_INLINE void scale(Moments& moments, const Most& most, flux_states8 states) {
        moments.m_most = Set::largest(most.m);
        moments.v_most = Set::largest(most.v);
        bool strange =
            most.strange || !(moments.m_most <= __FLT_MAX__ && moments.v_most <= __FLT_MAX__);
        if (__builtin_expect(strange, 0)) restart(moments);
        if (moments.m_most < 0x1p-126f) moments.m_most = 0x1p-126f;
        if (moments.v_most < 0x1p-126f) moments.v_most = 0x1p-126f;
        strange |= moments.m_most > kLargestScale || moments.v_most > kLargestScale;
        Set::store_words(moments.sure, Set::all_int(strange ? 0 : kSureLanes));
        *states.m_scale = moments.m_most;
        *states.v_scale = moments.v_most;
        moments.m_inverse = 1.0f / moments.m_most;
        moments.v_inverse = 1.0f / moments.v_most;
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
            Guess of;
            for (size_t j = 0; j < 4; ++j) guess(of, j, m, v, Set::all(1), Set::all(1), maps);
            store_codes(of, maps, m_codes, v_codes);
            const Int doubt = is_signed ? of.doubt.m : of.doubt.v;
            if (Set::any_half_at_least(doubt, Set::all_int(kSureLanes)))
                is_signed ? search<true>(m, 1.0f, m_codes) : search<false>(v, 1.0f, v_codes);
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
    static FLUX_INLINE void turn(Weights weights, flux_states8 states, const Grad* grad,
                                 const Constants& with, const Maps& maps, Moments& now,
                                 const Moments& before) {
        using States = StatesOver<Set>;
        Float m_scale, v_scale, m_inverse, v_inverse;
        if (advances) m_scale = Set::all(*states.m_scale), v_scale = Set::all(*states.v_scale);
        if (codes) m_inverse = Set::all(before.m_inverse), v_inverse = Set::all(before.v_inverse);
        Most most;
        Group group, begun;
        Read of;
        if (advances) {
            read(weights, states, grad, with, begun, of);
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j)
                begin(begun, of, j, m_scale, v_scale, with, now.m, now.v, most);
        }
        for (size_t i = 0; i < kStateBlock; i += kGroup) {
            const size_t next = i + kGroup;
            const bool begins = advances && next < kStateBlock;
            group = begun;
            if (begins)
                read(States::from(weights, next), States::from(states, next), grad + next, with,
                     begun, of);
            Guess guesses;
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) {
                if (codes) guess(guesses, j, before.m + i, before.v + i, m_inverse, v_inverse, maps);
                if (advances) finish(group, j, now.m + i, with);
                if (begins)
                    begin(begun, of, j, m_scale, v_scale, with, now.m + next, now.v + next, most);
            }
            uint8_t* const m_codes = states.m + i - kStateBlock;
            uint8_t* const v_codes = states.v + i - kStateBlock;
            if (codes) store_codes(guesses, maps, m_codes, v_codes);
            if (advances) write(group, States::from(weights, i), most);
            if (codes) settle(guesses.doubt, before, i, m_codes, v_codes);
        }
        if (advances) scale(now, most, states);
    }

    // `blocks` whole blocks, one at least.
    template <class Weights, class Grad>
    static void adamw8(Weights weights, flux_states8 states, const Grad* grad, size_t blocks,
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
