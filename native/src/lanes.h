// The kernels, written once over `Set`, the lanes of one instruction set.
//
// A Set has `width`, the types Float and Int (32 bits a lane), the operations below, and two ways
// to touch memory: Set::Whole for `width` elements and Set::Tail for fewer. A tail runs the very
// same operations as the body, so a result never depends on where a range was cut.
// No std header here: the linker could pick its inline code, compiled for wide lanes, elsewhere.
#pragma once

#include "kernels.h"

#define FLUX_INLINE inline __attribute__((always_inline))
// A function of its own: inlined, a kernel would lose what its __restrict tells the compiler.
#define FLUX_KERNEL __attribute__((noinline))

namespace flux {

// The weights of an update: split masters, or fp32.
struct SplitWeights {
    uint16_t *hi, *lo;
    static SplitWeights of(const flux_adamw_args& a) {
        return {static_cast<uint16_t*>(a.weights), a.lo};
    }
};
struct WholeWeights {
    float* p;
    static WholeWeights of(const flux_adamw_args& a) { return {static_cast<float*>(a.weights)}; }
};

// Two vectors at a time (pairs.h).
template <class Set, bool in_memory_order = false>
struct Pairs;

// How many elements ahead the streams are fetched, and how many bytes before that into the second
// cache. The hardware prefetchers follow fewer streams than AdamW has and stop at each page: without
// the first one core is a tenth slower. It waits for fewer lines at a time than memory could send:
// without the second an Intel server's is slower by 5 to 16 % (docs/native-adamw.md). 256 elements are
// too near, 1024 are no faster.
constexpr size_t kAhead = 512;
constexpr size_t kFarBytes = 2048;
// Elements of 16 bits in a cache line. A prefetch for each vector would ask for most lines twice or
// four times, a tenth slower with AVX2.
constexpr size_t kLineBytes = 64;
constexpr size_t kLine = kLineBytes / sizeof(uint16_t);
// Elements of a turn of the loop whose vectors may be interleaved, and of one whose vectors follow each
// other. With fp32 weights, which need no unpacking, a turn is one vector: more only cost.
constexpr size_t kWide = 2 * kLine;
constexpr size_t kNarrow = kLine;

template <class Set>
struct KernelsOver {
    using Float = typename Set::Float;
    using Int = typename Set::Int;

    struct Coefficients {
        Float grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size,
            rsqrt_correction2, eps;

        explicit FLUX_INLINE Coefficients(const flux_adamw_step& step)
            : grad_scale(Set::all(step.grad_scale)),
              decay(Set::all(step.decay)),
              beta1(Set::all(step.beta1)),
              one_minus_beta1(Set::all(step.one_minus_beta1)),
              beta2(Set::all(step.beta2)),
              one_minus_beta2(Set::all(step.one_minus_beta2)),
              step_size(Set::all(step.step_size)),
              rsqrt_correction2(Set::all(step.rsqrt_correction2)),
              eps(Set::all(step.eps)) {}
    };

    template <class Body>
    static FLUX_INLINE void for_each(size_t n, Body body) {
        size_t i = 0;
        for (; i + Set::width <= n; i += Set::width) body(typename Set::Whole{}, i);
        if (i < n) body(typename Set::Tail(n - i), i);
    }

    // The cache lines of `count` elements that are kAhead of `at`, and those `far` ahead. Past the end
    // too: a prefetch never faults. One lane at a time it would only cost.
    template <bool far = true, class Value>
    static FLUX_INLINE void fetch(const Value* at, size_t count) {
        if constexpr (Set::width > 1) {
            const char* const ahead = reinterpret_cast<const char*>(at + kAhead);
            for (size_t byte = 0; byte < count * sizeof(Value); byte += kLineBytes) {
                __builtin_prefetch(ahead + byte);
                if constexpr (far) __builtin_prefetch(ahead + kFarBytes + byte, 0, 2);
            }
        }
    }

    // for_each over `streams`, which are in no cache: each line of a turn is fetched ahead. Vectors are
    // interleaved where arithmetic takes the time; where memory does, that only keeps it waiting
    // (docs/native-adamw.md).
    template <size_t turn = Set::kInterleaved ? kWide : kNarrow, bool far = true, class Body,
              class... Values>
    static FLUX_INLINE void for_each_fetched(size_t n, Body body, const Values*... streams) {
        size_t done = 0;
        for (; done + turn <= n; done += turn) {
            if constexpr (turn != kNarrow) {
#pragma GCC unroll 8
                for (size_t j = 0; j < turn; j += Set::width) {
                    (fetch_line_of<far>(streams + done, j), ...);
                    body(typename Set::Whole{}, done + j);
                }
            } else {
                (fetch<far>(streams + done, turn), ...);
#pragma GCC unroll 1
                for (size_t j = 0; j < turn; j += Set::width)
                    body(typename Set::Whole{}, done + j);
            }
        }
        for_each(n - done, [&](auto lanes, size_t j) __attribute__((always_inline)) {
            body(lanes, done + j);
        });
    }
    template <bool far, class Value>
    static FLUX_INLINE void fetch_line_of(const Value* at, size_t j) {
        if (j * sizeof(Value) % kLineBytes == 0) fetch<far>(at + j, 1);
    }
    // The same for pairs of vectors: `pair` for the first element of each, `one` for what is left.
    template <class Pair, class One, class... Values>
    static FLUX_INLINE void for_each_pair_fetched(size_t n, Pair pair, One one,
                                                  const Values*... streams) {
        size_t done = 0;
        if constexpr (Set::width > 1)
            for (; done + kLine <= n; done += kLine) {
                (fetch(streams + done, kLine), ...);
                for (size_t j = 0; j < kLine; j += 2 * Set::width) pair(done + j);
            }
        for_each(n - done, [&](auto lanes, size_t j) __attribute__((always_inline)) {
            one(lanes, done + j);
        });
    }

    static FLUX_INLINE Float from_bf16(Int bits16) { return Set::as_float(Set::shift_left_16(bits16)); }

    static FLUX_INLINE Float decode(Int hi, Int lo) {
        lo = Set::zero_where_no_bits(lo, Set::bit_and(hi, Set::all_int(0x7fff)));
        const Int top = Set::sub(hi, Set::shift_right_15(lo));
        return Set::as_float(Set::bit_or(Set::shift_left_16(top), lo));
    }

    // The new moments of the lanes, any NaN as it comes.
    static FLUX_INLINE void average(Float& m, Float& v, Float grad, const Coefficients& c) {
        const Float g = Set::mul(grad, c.grad_scale);
        m = Set::add(Set::mul(c.beta1, m), Set::mul(c.one_minus_beta1, g));
        v = Set::add(Set::mul(c.beta2, v), Set::mul(Set::mul(c.one_minus_beta2, g), g));
    }

    // The first half of an update of the lanes: the new moments and the decayed weight in place, and
    // the root of v, for which nothing waits before the second half. Any NaN as it comes.
    static FLUX_INLINE Float begin(Float& p, Float& m, Float& v, Float grad, const Coefficients& c) {
        average(m, v, grad, c);
        p = Set::mul(p, c.decay);
        return Set::sqrt(v);
    }
    // The second half: the weight's step.
    static FLUX_INLINE void finish(Float& p, Float m, Float root, const Coefficients& c) {
        const Float denominator = Set::add(Set::mul(root, c.rsqrt_correction2), c.eps);
        p = Set::sub(p, Set::div(Set::mul(c.step_size, m), denominator));
    }

    // One update of the lanes: p, m and v in place, any NaN as it comes.
    static FLUX_INLINE void advance(Float& p, Float& m, Float& v, Float grad, const Coefficients& c) {
        const Float root = begin(p, m, v, grad, c);
        finish(p, m, root, c);
    }

    static FLUX_INLINE void update(Float& p, Float& m, Float& v, Float grad, const Coefficients& c) {
        advance(p, m, v, grad, c);
        quiet(p, m, v);
    }
    static FLUX_INLINE void quiet(Float& p, Float& m, Float& v) {
        p = Set::quiet(p);
        m = Set::quiet(m);
        v = Set::quiet(v);
    }

    static FLUX_INLINE Int high_half(Int bits) {
        return Set::shift_right_16(Set::add(bits, Set::all_int(0x8000)));
    }

    template <class Lanes>
    static FLUX_INLINE void store_split(Lanes lanes, uint16_t* hi, uint16_t* lo, Float p) {
        const Int bits = Set::as_int(p);
        lanes.store_low_half(hi, high_half(bits));
        lanes.store_low_half(lo, bits);
    }

    template <class Lanes>
    static FLUX_INLINE Float load_grad(Lanes lanes, const uint16_t* grad) {
        return from_bf16(lanes.load(grad));
    }
    template <class Lanes>
    static FLUX_INLINE Float load_grad(Lanes lanes, const float* grad) {
        return lanes.load(grad);
    }

    // A moment that is a NaN has made its weight one.
    static FLUX_INLINE void quiet_pair(Float (&p)[2], Float (&m)[2], Float (&v)[2]) {
        if (__builtin_expect(!Set::any_nan(p[0], p[1]), true)) return;
        for (size_t j = 0; j < 2; ++j) quiet(p[j], m[j], v[j]);
    }

    using InOrder = Pairs<Set, true>;
    template <class Grad>
    static FLUX_INLINE void load_pair(uint16_t* hi, uint16_t* lo, const float* m, const float* v,
                                      const Grad* grad, Float (&p)[2], Float (&m_i)[2],
                                      Float (&v_i)[2], Float (&g)[2]) {
        InOrder::load(SplitWeights{hi, lo}, p[0], p[1]);
        InOrder::load(m, m_i[0], m_i[1]);
        InOrder::load(v, v_i[0], v_i[1]);
        InOrder::load(grad, g[0], g[1]);
    }

    template <class Grad>
    static FLUX_KERNEL void adamw_split(uint16_t* __restrict hi, uint16_t* __restrict lo, float* __restrict m,
                            float* __restrict v, const Grad* __restrict grad, size_t n,
                            const flux_adamw_step& step) {
        const Coefficients c(step);
        for_each_pair_fetched(n, [&](auto i) __attribute__((always_inline)) {
            Float p[2], g[2], m_i[2], v_i[2];
            load_pair(hi + i, lo + i, m + i, v + i, grad + i, p, m_i, v_i, g);
            for (size_t j = 0; j < 2; ++j) advance(p[j], m_i[j], v_i[j], g[j], c);
            quiet_pair(p, m_i, v_i);
            InOrder::store(SplitWeights{hi + i, lo + i}, p[0], p[1]);
            InOrder::store(m + i, m_i[0], m_i[1]);
            InOrder::store(v + i, v_i[0], v_i[1]);
        }, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Float p = decode(lanes.load(hi + i), lanes.load(lo + i));
            Float m_i = lanes.load(m + i);
            Float v_i = lanes.load(v + i);
            update(p, m_i, v_i, load_grad(lanes, grad + i), c);
            store_split(lanes, hi + i, lo + i, p);
            lanes.store(m + i, m_i);
            lanes.store(v + i, v_i);
        }, hi, lo, m, v, grad);
    }

    static FLUX_KERNEL void adamw_f32(float* __restrict p, float* __restrict m, float* __restrict v,
                          const float* __restrict grad, size_t n, const flux_adamw_step& step) {
        const Coefficients c(step);
        for_each_fetched<Set::width>(n, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Float p_i = lanes.load(p + i);
            Float m_i = lanes.load(m + i);
            Float v_i = lanes.load(v + i);
            update(p_i, m_i, v_i, lanes.load(grad + i), c);
            lanes.store(p + i, p_i);
            lanes.store(m + i, m_i);
            lanes.store(v + i, v_i);
        }, p, m, v, grad);
    }

    template <class Grad>
    static FLUX_KERNEL void adamw_weights_split(uint16_t* __restrict hi, uint16_t* __restrict lo,
                                    const float* __restrict m, const float* __restrict v,
                                    const Grad* __restrict grad, size_t n,
                                    const flux_adamw_step& step) {
        const Coefficients c(step);
        for_each_pair_fetched(n, [&](auto i) __attribute__((always_inline)) {
            Float p[2], g[2], m_i[2], v_i[2];
            load_pair(hi + i, lo + i, m + i, v + i, grad + i, p, m_i, v_i, g);
            for (size_t j = 0; j < 2; ++j) {
                advance(p[j], m_i[j], v_i[j], g[j], c);
                p[j] = Set::quiet(p[j]);
            }
            InOrder::store(SplitWeights{hi + i, lo + i}, p[0], p[1]);
        }, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Float p = decode(lanes.load(hi + i), lanes.load(lo + i));
            Float m_i = lanes.load(m + i);
            Float v_i = lanes.load(v + i);
            advance(p, m_i, v_i, load_grad(lanes, grad + i), c);
            store_split(lanes, hi + i, lo + i, Set::quiet(p));
        }, hi, lo, m, v, grad);
    }

    static FLUX_KERNEL void adamw_weights_f32(float* __restrict p, const float* __restrict m,
                                  const float* __restrict v, const float* __restrict grad, size_t n,
                                  const flux_adamw_step& step) {
        const Coefficients c(step);
        for_each_fetched<Set::width>(n, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Float p_i = lanes.load(p + i);
            Float m_i = lanes.load(m + i);
            Float v_i = lanes.load(v + i);
            advance(p_i, m_i, v_i, lanes.load(grad + i), c);
            lanes.store(p + i, Set::quiet(p_i));
        }, p, m, v, grad);
    }

    // Of few streams, which some processors' own prefetchers follow best when they are left to it.
    template <size_t turn = Set::kInterleaved ? kWide : kNarrow, class Body, class... Values>
    static FLUX_INLINE void for_each_of_few(size_t n, Body body, const Values*... streams) {
        if (kFetchesFewFar)
            for_each_fetched<turn, true>(n, body, streams...);
        else
            for_each_fetched<turn, false>(n, body, streams...);
    }

    template <class Grad>
    static FLUX_KERNEL void adamw_moments(float* __restrict m, float* __restrict v, const Grad* __restrict grad,
                              size_t n, const flux_adamw_step& step) {
        const Coefficients c(step);
        for_each_of_few(n, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Float m_i = lanes.load(m + i);
            Float v_i = lanes.load(v + i);
            average(m_i, v_i, load_grad(lanes, grad + i), c);
            lanes.store(m + i, Set::quiet(m_i));
            lanes.store(v + i, Set::quiet(v_i));
        }, m, v, grad);
    }

    static FLUX_KERNEL void stream_split(uint16_t* __restrict hi, uint16_t* __restrict lo, float* __restrict m,
                             float* __restrict v, const uint16_t* __restrict grad, size_t n) {
        // Opaque, or the compiler would see that nothing changes and drop the loads and stores. Wide
        // turns are the fastest where there is nothing to compute.
        for_each_fetched<kWide>(n, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Set::opaque(lanes.load(grad + i));
            lanes.store_low_half(hi + i, Set::opaque(lanes.load(hi + i)));
            lanes.store_low_half(lo + i, Set::opaque(lanes.load(lo + i)));
            lanes.store(m + i, Set::opaque(lanes.load(m + i)));
            lanes.store(v + i, Set::opaque(lanes.load(v + i)));
        }, hi, lo, m, v, grad);
    }

    static FLUX_KERNEL void stream_weights(uint16_t* __restrict hi, uint16_t* __restrict lo,
                               const float* __restrict m, const float* __restrict v,
                               const uint16_t* __restrict grad, size_t n) {
        for_each_fetched<kWide>(n, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Set::opaque(lanes.load(grad + i));
            Set::opaque(lanes.load(m + i));
            Set::opaque(lanes.load(v + i));
            lanes.store_low_half(hi + i, Set::opaque(lanes.load(hi + i)));
            lanes.store_low_half(lo + i, Set::opaque(lanes.load(lo + i)));
        }, hi, lo, m, v, grad);
    }

    static FLUX_KERNEL void stream_moments(float* __restrict m, float* __restrict v,
                               const uint16_t* __restrict grad, size_t n) {
        for_each_of_few<kWide>(n, [&](auto lanes, size_t i) __attribute__((always_inline)) {
            Set::opaque(lanes.load(grad + i));
            lanes.store(m + i, Set::opaque(lanes.load(m + i)));
            lanes.store(v + i, Set::opaque(lanes.load(v + i)));
        }, m, v, grad);
    }
};

}  // namespace flux

#include "states.h"
