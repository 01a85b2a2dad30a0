// AdamW with 8-bit states over whole blocks, on wide lanes: the bits of the loop in states.h in less
// than half of its operations.
//
// A group is four vectors, two pairs (pairs.h) in their order; codes are put into it as bytes. A block is
// updated while the one before it is coded. What is rare is found by one test for a group or a block
// and then done as that loop does it: fractions close to a border between two codes, moments and
// weights that are not finite, scales whose inverse is subnormal.
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

    // The weights of a group and its new moments.
    template <class Weights, class Grad>
    static FLUX_INLINE void advance(Weights weights, flux_states8 states, const Grad* grad,
                                    const Constants& with, float* new_m, float* new_v, Most& most) {
        StatesOver<Set>::fetch_all(0, kGroup, weights, grad, states.m, states.v);
        const Float m_scale = Set::all(*states.m_scale), v_scale = Set::all(*states.v_scale);
        Float p[4], g[4], m[4], v[4];
        load(weights, p);
        load(grad, g);
        with.decode_m.template values<true>(Set::load_interleaved(states.m), m);
        with.decode_v.template values<false>(Set::load_interleaved(states.v), v);
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            m[j] = Set::mul(m[j], m_scale);
            v[j] = Set::mul(v[j], v_scale);
            Base::advance(p[j], m[j], v[j], g[j], with.c);
            Whole{}.store(new_m + j * kVector, m[j]);
            Whole{}.store(new_v + j * kVector, v[j]);
            most.m = Set::larger_size(most.m, m[j]);
            most.v = Set::larger(most.v, v[j]);
        }
        if (__builtin_expect(Set::any_nan(p), 0)) {  // also where m or v is NaN or v negative
            most.strange = true;
            for (Float& x : p) x = Set::quiet(x);
        }
        store(weights, p);
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

        FLUX_INLINE void at(const Float (&y)[4], Float (&line)[4]) const {
            Int slot[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) slot[j] = Set::slot_of(y[j], border);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                line[j] = Set::exact_mul_add(Set::look_up_slot(slope, slot[j]), y[j],
                                             Set::look_up_slot(offset, slot[j]));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                line[j] = Set::smaller(line[j], Set::look_up_slot(most, slot[j]));
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

    // Codes of a group's moments, but for those in doubt.
    static FLUX_INLINE Doubt guess(const float* from_m, const float* from_v, Float m_inverse,
                                   Float v_inverse, const Maps& maps, uint8_t* m_codes,
                                   uint8_t* v_codes) {
        const Float least = Set::all(Search::kLeast);
        Int m[4], k[4];
        Float v[4], y[4], line[4];
        Doubt doubt;
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            const Float x = Whole{}.load(from_m + j * kVector);
            m[j] = Set::as_int(x);
            y[j] = Set::larger_size(Set::mul(x, m_inverse), least);
        }
        maps.m.at(y, line);
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            k[j] = Set::as_int(line[j]);
            doubt.m = j == 0 ? k[j] : Set::larger_16(doubt.m, k[j]);
            v[j] = Set::mul(Whole{}.load(from_v + j * kVector), v_inverse);
            y[j] = Set::larger(v[j], least);
            if constexpr (Set::kZeroIsApart) y[j] = Set::apart_where_zero(v[j], y[j]);
        }
        Set::store_interleaved(m_codes, Set::signed_codes(Set::third_bytes(k, maps.masks), m));
        maps.v.at(y, line);
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            if constexpr (!Set::kZeroIsApart)
                line[j] = Set::where_not_zero(v[j], line[j], Set::all(129.5f));
            k[j] = Set::as_int(line[j]);
            doubt.v = j == 0 ? k[j] : Set::larger_16(doubt.v, k[j]);
        }
        Set::store_interleaved(v_codes, Set::unsigned_codes(Set::third_bytes(k, maps.masks)));
        return doubt;
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

    // Codes of the group at element i of a block.
    static FLUX_INLINE void quantise(const Moments& moments, size_t i, const Maps& maps,
                                     uint8_t* m_codes, uint8_t* v_codes) {
        const float *const m = moments.m + i, *const v = moments.v + i;
        const Doubt doubt = guess(m, v, Set::all(moments.m_inverse), Set::all(moments.v_inverse),
                                  maps, m_codes, v_codes);
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
            const Doubt doubt = guess(m, v, Set::all(1), Set::all(1), maps, m_codes, v_codes);
            if (Set::any_half_at_least(is_signed ? doubt.m : doubt.v, Set::all_int(kSureLanes)))
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
    // time, and neither waits for the other's roots, divisions and scales.
    template <bool advances, bool codes, class Weights, class Grad>
    static FLUX_INLINE void turn(Weights weights, flux_states8 states, const Grad* grad,
                                 const Constants& with, const Maps& maps, Moments& now,
                                 const Moments& before) {
        using States = StatesOver<Set>;
        Most most;
        for (size_t i = 0; i < kStateBlock; i += kGroup) {
            if (advances)
                advance(States::from(weights, i), States::from(states, i), grad + i, with, now.m + i,
                        now.v + i, most);
            if (codes)
                quantise(before, i, maps, states.m + i - kStateBlock, states.v + i - kStateBlock);
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
