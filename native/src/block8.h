// AdamW with 8-bit states over whole blocks, on wide lanes: the bits of the loop in states.h in less
// than half of its operations.
//
// A group is four vectors, two pairs (pairs.h) in their order; codes are put into it as bytes. What is
// rare is found by one test for a group or a block and then done as
// that loop does it: fractions close to a border between two codes, moments and weights that are
// not finite, scales whose inverse is subnormal.
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
    using Search = Search8<Set::kSlots>;

    static constexpr size_t kVector = Set::width;
    static constexpr size_t kGroup = 4 * kVector;
    static_assert(kStateBlock % kGroup == 0);
    static constexpr float kLargestScale = 0x1p126f;  // its inverse is normal

    // Blocks are updated and then coded a few at a time: what is held in registers is loaded once for
    // all of them, no block's codes wait for its scales, and their moments stay in the first cache.
    static constexpr size_t kTogether = 4;

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

    // New moments of one block in the order of the vectors, and the largest of them.
    struct Moments {
        alignas(64) float m[kStateBlock];
        alignas(64) float v[kStateBlock];
        float m_most, v_most;
        bool strange;  // some are not finite, or may not be
    };

    // The weights of one block and their new moments.
    template <class Weights, class Grad>
    static FLUX_INLINE void advance(Weights weights, flux_states8 states, const Grad* grad,
                                    const Coefficients& c, const typename Set::Decoder& decode_m,
                                    const typename Set::Decoder& decode_v, Moments& moments) {
        using States = StatesOver<Set>;
        const Float m_scale = Set::all(*states.m_scale), v_scale = Set::all(*states.v_scale);
        Float m_most = Set::all(0), v_most = Set::all(0);
        bool strange = false;
        constexpr size_t ahead = kTogether * kStateBlock;
        States::template fetch<ahead>(weights, kStateBlock);
        States::template fetch<ahead>(grad, kStateBlock);
        States::template fetch<ahead>(states.m, kStateBlock);
        States::template fetch<ahead>(states.v, kStateBlock);
        for (size_t i = 0; i < kStateBlock; i += kGroup) {
            Float p[4], g[4], m[4], v[4];
            load(States::from(weights, i), p);
            load(grad + i, g);
            decode_m.template values<true>(Set::load_codes(states.m + i), m);
            decode_v.template values<false>(Set::load_codes(states.v + i), v);
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) {
                m[j] = Set::mul(m[j], m_scale);
                v[j] = Set::mul(v[j], v_scale);
                Base::advance(p[j], m[j], v[j], g[j], c);
                Whole{}.store(moments.m + i + j * kVector, m[j]);
                Whole{}.store(moments.v + i + j * kVector, v[j]);
                m_most = Set::larger_size(m_most, m[j]);
                v_most = Set::larger(v_most, v[j]);
            }
            if (__builtin_expect(Set::any_nan(p), 0)) {  // also where m or v is NaN or v negative
                strange = true;
                for (Float& x : p) x = Set::quiet(x);
            }
            store(States::from(weights, i), p);
        }
        moments.m_most = Set::largest(m_most);
        moments.v_most = Set::largest(v_most);
        moments.strange =
            strange || !(moments.m_most <= __FLT_MAX__ && moments.v_most <= __FLT_MAX__);
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

    // Codes of a group's moments, but for those that the exact search has to decide: then true.
    static FLUX_INLINE bool guess(const float* from_m, const float* from_v, Float m_inverse,
                                  Float v_inverse, const Lines& lines_m, const Lines& lines_v,
                                  uint8_t* m_codes, uint8_t* v_codes) {
        const Float least = Set::all(Search::kLeast), zero = Set::all(129.5f);
        Int m[4], k_m[4], k_v[4], doubt = Set::all_int(0);
        Float v[4], y[4], line[4];
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            const Float x = Whole{}.load(from_m + j * kVector);
            m[j] = Set::as_int(x);
            y[j] = Set::larger_size(Set::mul(x, m_inverse), least);
        }
        lines_m.at(y, line);
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            k_m[j] = Set::as_int(line[j]);
            doubt = Set::larger_16(doubt, k_m[j]);
            v[j] = Set::mul(Whole{}.load(from_v + j * kVector), v_inverse);
            y[j] = Set::larger(v[j], least);
        }
        Set::store_codes(m_codes, Set::signed_codes(Set::third_bytes(k_m), m));
        lines_v.at(y, line);
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            k_v[j] = Set::as_int(Set::where_not_zero(v[j], line[j], zero));
            doubt = Set::larger_16(doubt, k_v[j]);
        }
        Set::store_codes(v_codes, Set::unsigned_codes(Set::third_bytes(k_v)));
        return Set::any_low_half_at_least(doubt, Search::kSure);
    }

    template <bool is_signed>
    static __attribute__((noinline)) void search(const float* from, float inverse, uint8_t* codes) {
        const MapOver<Set> map(is_signed ? kSignedMap : kUnsignedMap);
        Int code[4];
        for (size_t j = 0; j < 4; ++j) {
            const Float x = Set::mul(Whole{}.load(from + j * kVector), Set::all(inverse));
            code[j] = Set::shift_left_16(map.template nearest<is_signed>(x));
        }
        Set::store_codes(codes, Set::third_bytes(code));
    }

    // Codes of one block.
    static FLUX_INLINE void quantise(const Moments& moments, const Lines& lines_m,
                                     const Lines& lines_v, uint8_t* m_codes, uint8_t* v_codes) {
        const float m_inverse = 1.0f / moments.m_most, v_inverse = 1.0f / moments.v_most;
        const Float by_m = Set::all(m_inverse), by_v = Set::all(v_inverse);
        for (size_t i = 0; i < kStateBlock; i += kGroup) {
            const float *const m = moments.m + i, *const v = moments.v + i;
            const bool doubt = guess(m, v, by_m, by_v, lines_m, lines_v, m_codes + i, v_codes + i);
            if (__builtin_expect(doubt || moments.strange, 0)) {
                search<true>(m, m_inverse, m_codes + i);
                search<false>(v, v_inverse, v_codes + i);
            }
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

    // The scales of a block, which take the place of its largest moments.
    static FLUX_INLINE void scale(Moments& moments, flux_states8 states) {
        if (__builtin_expect(moments.strange, 0)) restart(moments);
        if (moments.m_most < 0x1p-126f) moments.m_most = 0x1p-126f;
        if (moments.v_most < 0x1p-126f) moments.v_most = 0x1p-126f;
        if (moments.m_most > kLargestScale || moments.v_most > kLargestScale)
            moments.strange = true;
        *states.m_scale = moments.m_most;
        *states.v_scale = moments.v_most;
    }

    template <class Weights, class Grad>
    static __attribute__((noinline)) void advance_all(Weights weights, flux_states8 states,
                                                      const Grad* grad, size_t blocks,
                                                      const flux_adamw_step& step,
                                                      Moments* moments) {
        using States = StatesOver<Set>;
        const Coefficients c(step);
        const typename Set::Decoder decode_m(true), decode_v(false);
        for (size_t block = 0; block < blocks; ++block) {
            const size_t at = block * kStateBlock;
            const flux_states8 here = States::from(states, at);
            advance(States::from(weights, at), here, grad + at, c, decode_m, decode_v,
                    moments[block]);
            scale(moments[block], here);
        }
    }
    static __attribute__((noinline)) void quantise_all(const Moments* moments, flux_states8 states,
                                                       size_t blocks) {
        const Lines lines_m(kSearchM), lines_v(kSearchV);
        for (size_t block = 0; block < blocks; ++block)
            quantise(moments[block], lines_m, lines_v, states.m + block * kStateBlock,
                     states.v + block * kStateBlock);
    }

    // For tests: codes of the fractions of whole groups, and back.
    static void encode(const float* x, uint8_t* codes, size_t n, bool is_signed) {
        const Lines lines_m(kSearchM), lines_v(kSearchV);
        alignas(64) float m[kGroup] = {}, v[kGroup] = {};
        uint8_t unused[kGroup];
        for (size_t i = 0; i < n; i += kGroup) {
            Float four[4];
            load(x + i, four);
            for (size_t j = 0; j < 4; ++j) Whole{}.store((is_signed ? m : v) + j * kVector, four[j]);
            uint8_t *const m_codes = is_signed ? codes + i : unused;
            uint8_t *const v_codes = is_signed ? unused : codes + i;
            if (guess(m, v, Set::all(1), Set::all(1), lines_m, lines_v, m_codes, v_codes))
                is_signed ? search<true>(m, 1, m_codes) : search<false>(v, 1, v_codes);
        }
    }
    static void decode(const uint8_t* codes, float* x, size_t n, bool is_signed) {
        const typename Set::Decoder decoder(is_signed);
        for (size_t i = 0; i < n; i += kGroup) {
            Float four[4];
            if (is_signed)
                decoder.template values<true>(Set::load_codes(codes + i), four);
            else
                decoder.template values<false>(Set::load_codes(codes + i), four);
            store(x + i, four);
        }
    }

    // `blocks` whole blocks.
    template <class Weights, class Grad>
    static void adamw8(Weights weights, flux_states8 states, const Grad* grad, size_t blocks,
                       const flux_adamw_step& step) {
        using States = StatesOver<Set>;
        Moments moments[kTogether];
        for (size_t block = 0; block < blocks; block += kTogether) {
            const size_t at = block * kStateBlock;
            const size_t count = blocks - block < kTogether ? blocks - block : kTogether;
            const flux_states8 here = States::from(states, at);
            advance_all(States::from(weights, at), here, grad + at, count, step, moments);
            quantise_all(moments, here, count);
        }
    }
};

}  // namespace flux
