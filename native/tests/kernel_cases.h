// Weights, gradients and states of every kind, and one name for each kernel over them.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <random>
#include <vector>

#include "flux_native.h"

inline int failures = 0;

#define CHECK(condition, ...)                                   \
    do {                                                        \
        if (!(condition)) {                                     \
            printf("FAILED line %d (%s): ", __LINE__, #condition); \
            printf(__VA_ARGS__);                                \
            printf("\n");                                       \
            if (++failures > 20) exit(1);                       \
        }                                                       \
    } while (0)

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <class Value>
bool same_bits(const std::vector<Value>& a, const std::vector<Value>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0;
}

// Ordinary magnitudes, every kind of special value, and plain random bits, mixed.
inline float any_float(std::mt19937& random, bool tame = false) {
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff,
                                       0x00800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                                       0x7f800001, 0x7fc00000, 0xffffffff, 0x3f808000, 0x00008000};
    switch (tame ? 2 : random() % 4) {
        case 0: return float_of(special[random() % (sizeof special / sizeof *special)]);
        case 1: return float_of(random());
        default: return std::normal_distribution<float>(0, 0.05f)(random);
    }
}

struct State {
    std::vector<uint16_t> hi, lo, grad_bf16, m16, v16;
    std::vector<float> p, m, v, grad, m_scale, v_scale;
    std::vector<uint8_t> m8, v8;

    // Tame ones are finite and of ordinary size, as nearly all are: the rest goes other ways.
    State(size_t n, std::mt19937& random, bool tame)
        : hi(n), lo(n), grad_bf16(n), m16(n), v16(n), p(n), m(n), v(n), grad(n),
          m_scale(n / 256 + 2), v_scale(n / 256 + 2), m8(n), v8(n) {
        for (float& scale : m_scale) scale = std::fabs(any_float(random, tame));
        for (float& scale : v_scale) scale = std::fabs(any_float(random, tame));
        for (size_t i = 0; i < n; ++i) {
            hi[i] = static_cast<uint16_t>(bits_of(any_float(random, tame)) >> 16);
            lo[i] = static_cast<uint16_t>(random());
            grad_bf16[i] = static_cast<uint16_t>(bits_of(any_float(random, tame)) >> 16);
            p[i] = any_float(random, tame);
            m[i] = any_float(random, tame);
            v[i] = random() % 8 ? std::fabs(any_float(random, tame)) : any_float(random, tame);
            grad[i] = any_float(random, tame);
            m16[i] = static_cast<uint16_t>(bits_of(m[i]) >> 16);
            v16[i] = static_cast<uint16_t>(bits_of(std::fabs(v[i])) >> 16);
            m8[i] = static_cast<uint8_t>(random());
            v8[i] = static_cast<uint8_t>(random());
        }
    }

    bool operator==(const State& other) const {
        return same_bits(hi, other.hi) && same_bits(lo, other.lo) && same_bits(p, other.p) &&
               same_bits(m, other.m) && same_bits(v, other.v) && same_bits(grad, other.grad) &&
               same_bits(m16, other.m16) && same_bits(v16, other.v16) && same_bits(m8, other.m8) &&
               same_bits(v8, other.v8) && same_bits(m_scale, other.m_scale) &&
               same_bits(v_scale, other.v_scale);
    }
};

enum Kernel {
    kSplitBf16, kSplitF32, kF32, k8SplitBf16, k8SplitF32, k8F32, k16SplitBf16, k16SplitF32, k16F32,
    kWeightsSplitBf16, kWeightsSplitF32, kWeightsF32, kMomentsBf16, kMomentsF32,
    kStream, kStreamWeights, kStreamMoments, kStream8, kStream16,
    kKernels
};

inline bool is_blockwise(int kernel) { return kernel >= k8SplitBf16 && kernel <= k8F32; }

// What flux_adamw, or the stream beside it, is called with for a kernel.
struct Call {
    uint32_t pass, state_format, weight_format, gradient_format;
    bool is_stream;
};

inline Call call_of(Kernel kernel) {
    const uint32_t f32 = FLUX_WEIGHTS_F32, split = FLUX_WEIGHTS_SPLIT_BF16;
    const uint32_t wide = FLUX_GRADIENT_F32, half = FLUX_GRADIENT_BF16;
    switch (kernel) {
        case kSplitBf16: return {FLUX_PASS_UPDATE, FLUX_STATES_F32, split, half, false};
        case kSplitF32: return {FLUX_PASS_UPDATE, FLUX_STATES_F32, split, wide, false};
        case kF32: return {FLUX_PASS_UPDATE, FLUX_STATES_F32, f32, wide, false};
        case k8SplitBf16: return {FLUX_PASS_UPDATE, FLUX_STATES_8BIT, split, half, false};
        case k8SplitF32: return {FLUX_PASS_UPDATE, FLUX_STATES_8BIT, split, wide, false};
        case k8F32: return {FLUX_PASS_UPDATE, FLUX_STATES_8BIT, f32, wide, false};
        case k16SplitBf16: return {FLUX_PASS_UPDATE, FLUX_STATES_BF16, split, half, false};
        case k16SplitF32: return {FLUX_PASS_UPDATE, FLUX_STATES_BF16, split, wide, false};
        case k16F32: return {FLUX_PASS_UPDATE, FLUX_STATES_BF16, f32, wide, false};
        case kWeightsSplitBf16: return {FLUX_PASS_WEIGHTS, FLUX_STATES_F32, split, half, false};
        case kWeightsSplitF32: return {FLUX_PASS_WEIGHTS, FLUX_STATES_F32, split, wide, false};
        case kWeightsF32: return {FLUX_PASS_WEIGHTS, FLUX_STATES_F32, f32, wide, false};
        case kMomentsBf16: return {FLUX_PASS_MOMENTS, FLUX_STATES_F32, f32, half, false};
        case kMomentsF32: return {FLUX_PASS_MOMENTS, FLUX_STATES_F32, f32, wide, false};
        case kStreamWeights: return {FLUX_PASS_WEIGHTS, FLUX_STATES_F32, split, half, true};
        case kStreamMoments: return {FLUX_PASS_MOMENTS, FLUX_STATES_F32, split, half, true};
        case kStream8: return {FLUX_PASS_UPDATE, FLUX_STATES_8BIT, split, half, true};
        case kStream16: return {FLUX_PASS_UPDATE, FLUX_STATES_BF16, split, half, true};
        default: return {FLUX_PASS_UPDATE, FLUX_STATES_F32, split, half, true};
    }
}

inline flux_adamw_args args_of(const Call& call, State& s, size_t first, size_t n,
                               const flux_adamw_step& step, int threads) {
    flux_adamw_args a{};
    a.size = sizeof a;
    a.weight_format = call.weight_format, a.state_format = call.state_format;
    a.gradient_format = call.gradient_format, a.pass = call.pass;
    a.threads = threads, a.n = n, a.step = step;
    if (call.weight_format == FLUX_WEIGHTS_F32) a.weights = s.p.data() + first;
    else a.weights = s.hi.data() + first, a.lo = s.lo.data() + first;
    if (call.state_format == FLUX_STATES_F32) a.m = s.m.data() + first, a.v = s.v.data() + first;
    else if (call.state_format == FLUX_STATES_BF16)
        a.m = s.m16.data() + first, a.v = s.v16.data() + first;
    else a.m = s.m8.data() + first, a.v = s.v8.data() + first;
    a.m_scale = s.m_scale.data() + first / 256, a.v_scale = s.v_scale.data() + first / 256;
    if (call.gradient_format == FLUX_GRADIENT_BF16) a.gradient = s.grad_bf16.data() + first;
    else a.gradient = s.grad.data() + first;
    a.rounding = {static_cast<uint32_t>(first), 0x12345678u, 0x9abcdef0u};
    return a;
}

inline void run(Kernel kernel, State& s, size_t first, size_t n, const flux_adamw_step& step, int threads) {
    const Call call = call_of(kernel);
    const flux_adamw_args args = args_of(call, s, first, n, step, threads);
    const int status = call.is_stream ? flux_adamw_stream(&args) : flux_adamw(&args);
    CHECK(status == FLUX_OK, "kernel %d: status %d", kernel, status);
}

inline flux_adamw_step any_step(std::mt19937& random) {
    const float t = 1 + static_cast<float>(random() % 1000);
    flux_adamw_step step{0.37f, 0.99999f, 0.9f, 0.1f, 0.999f, 0.001f, 0, 0, 1e-8f};
    step.step_size = 1e-3f / (1 - std::pow(0.9f, t));
    step.rsqrt_correction2 = 1 / std::sqrt(1 - std::pow(0.999f, t));
    return step;
}
