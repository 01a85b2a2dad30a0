// The table of one instruction set: which kernel takes which formats and which pass.
#pragma once

#include "lanes.h"

namespace flux {

template <class Set>
struct AdamWOver {
    using Base = KernelsOver<Set>;
    using States = StatesOver<Set>;
    using Args = const flux_adamw_args&;

    template <class State>
    static FLUX_INLINE State* m_of(Args a) {
        return static_cast<State*>(a.m);
    }
    template <class State>
    static FLUX_INLINE State* v_of(Args a) {
        return static_cast<State*>(a.v);
    }
    template <class Grad>
    static FLUX_INLINE const Grad* gradient_of(Args a) {
        return static_cast<const Grad*>(a.gradient);
    }

    // -- fp32 states, in one pass or two -------------------------------------------------------------

    template <class Grad>
    static FLUX_INLINE void update(SplitWeights w, float* m, float* v, const Grad* grad, Args a) {
        Base::adamw_split(w.hi, w.lo, m, v, grad, a.n, a.step);
    }
    static FLUX_INLINE void update(WholeWeights w, float* m, float* v, const float* grad, Args a) {
        Base::adamw_f32(w.p, m, v, grad, a.n, a.step);
    }
    template <class Grad>
    static FLUX_INLINE void weights(SplitWeights w, float* m, float* v, const Grad* grad, Args a) {
        Base::adamw_weights_split(w.hi, w.lo, m, v, grad, a.n, a.step);
    }
    static FLUX_INLINE void weights(WholeWeights w, float* m, float* v, const float* grad, Args a) {
        Base::adamw_weights_f32(w.p, m, v, grad, a.n, a.step);
    }
    template <class Weights, class Grad>
    static void update_f32(Args a) {
        update(Weights::of(a), m_of<float>(a), v_of<float>(a), gradient_of<Grad>(a), a);
    }
    template <class Weights, class Grad>
    static void weights_f32(Args a) {
        weights(Weights::of(a), m_of<float>(a), v_of<float>(a), gradient_of<Grad>(a), a);
    }
    template <class Grad>
    static void moments_f32(Args a) {
        Base::adamw_moments(m_of<float>(a), v_of<float>(a), gradient_of<Grad>(a), a.n, a.step);
    }

    // -- states of fewer bits ------------------------------------------------------------------------

    template <class Weights, class Grad>
    static void update_bf16(Args a) {
        States16<Set>::adamw16(Weights::of(a), m_of<uint16_t>(a), v_of<uint16_t>(a),
                               gradient_of<Grad>(a), a.n, a.rounding, a.step);
    }
    template <class Weights, class Grad>
    static void update_8bit(Args a) {
        const States8 states{m_of<uint8_t>(a), v_of<uint8_t>(a), a.m_scale, a.v_scale};
        States::adamw8(Weights::of(a), states, gradient_of<Grad>(a), a.n, a.step);
    }

    // -- streams -------------------------------------------------------------------------------------

    static void stream_update(Args a) {
        const SplitWeights w = SplitWeights::of(a);
        Base::stream_split(w.hi, w.lo, m_of<float>(a), v_of<float>(a), gradient_of<uint16_t>(a), a.n);
    }
    static void stream_weights(Args a) {
        const SplitWeights w = SplitWeights::of(a);
        Base::stream_weights(w.hi, w.lo, m_of<float>(a), v_of<float>(a), gradient_of<uint16_t>(a),
                             a.n);
    }
    static void stream_moments(Args a) {
        Base::stream_moments(m_of<float>(a), v_of<float>(a), gradient_of<uint16_t>(a), a.n);
    }
    template <class State>
    static void stream_low_bit(Args a) {
        States::stream(SplitWeights::of(a), m_of<State>(a), v_of<State>(a),
                       gradient_of<uint16_t>(a), a.n);
    }

    // -- the table -----------------------------------------------------------------------------------

    template <class Weights, class Grad>
    static constexpr void add(Kernels& to, int weight_format, int gradient_format) {
        const auto put = [&](int pass, int state_format, AdamW kernel) {
            to.adamw[pass][state_format][weight_format][gradient_format] = kernel;
        };
        put(FLUX_PASS_UPDATE, FLUX_STATES_F32, update_f32<Weights, Grad>);
        put(FLUX_PASS_UPDATE, FLUX_STATES_BF16, update_bf16<Weights, Grad>);
        put(FLUX_PASS_UPDATE, FLUX_STATES_8BIT, update_8bit<Weights, Grad>);
        put(FLUX_PASS_WEIGHTS, FLUX_STATES_F32, weights_f32<Weights, Grad>);
        put(FLUX_PASS_MOMENTS, FLUX_STATES_F32, moments_f32<Grad>);
    }

    static constexpr Kernels table() {
        Kernels made{};
        add<WholeWeights, float>(made, FLUX_WEIGHTS_F32, FLUX_GRADIENT_F32);
        add<SplitWeights, float>(made, FLUX_WEIGHTS_SPLIT_BF16, FLUX_GRADIENT_F32);
        add<SplitWeights, uint16_t>(made, FLUX_WEIGHTS_SPLIT_BF16, FLUX_GRADIENT_BF16);
        made.adamw[FLUX_PASS_MOMENTS][FLUX_STATES_F32][FLUX_WEIGHTS_F32][FLUX_GRADIENT_BF16] =
            moments_f32<uint16_t>;
        made.stream[FLUX_PASS_UPDATE][FLUX_STATES_F32] = stream_update;
        made.stream[FLUX_PASS_WEIGHTS][FLUX_STATES_F32] = stream_weights;
        made.stream[FLUX_PASS_MOMENTS][FLUX_STATES_F32] = stream_moments;
        made.stream[FLUX_PASS_UPDATE][FLUX_STATES_BF16] = stream_low_bit<uint16_t>;
        made.stream[FLUX_PASS_UPDATE][FLUX_STATES_8BIT] = stream_low_bit<uint8_t>;
        made.quantise8 = States::quantise;
        made.encode8 = States::encode;
        made.decode8 = States::decode;
        return made;
    }
};

}  // namespace flux
