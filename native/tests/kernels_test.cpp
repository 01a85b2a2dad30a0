// Every instruction set against the scalar reference, bit for bit, through the C interface.
//
// kernels_test          samples of all bit patterns (seconds)
// kernels_test --all    every one of the 2^32 masters through decode and encode (a minute)
#include <stdio.h>
#include <string.h>

#include <cmath>
#include <random>
#include <vector>

#include "flux_native.h"

namespace {

int failures = 0;

#define CHECK(condition, ...)                                   \
    do {                                                        \
        if (!(condition)) {                                     \
            printf("FAILED line %d (%s): ", __LINE__, #condition); \
            printf(__VA_ARGS__);                                \
            printf("\n");                                       \
            if (++failures > 20) exit(1);                       \
        }                                                       \
    } while (0)

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <class Value>
bool same_bits(const std::vector<Value>& a, const std::vector<Value>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0;
}

// Ordinary magnitudes, every kind of special value, and plain random bits, mixed.
float any_float(std::mt19937& random, bool tame = false) {
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
    kAccumulateBf16, kAccumulateF32, kStream, kStreamWeights, kStreamMoments, kStream8, kStream16,
    kKernels
};

bool is_blockwise(int kernel) { return kernel >= k8SplitBf16 && kernel <= k8F32; }

void run(Kernel kernel, State& s, size_t first, size_t n, const flux_adamw_step& step, int threads) {
    uint16_t *hi = s.hi.data() + first, *lo = s.lo.data() + first;
    float *p = s.p.data() + first, *m = s.m.data() + first, *v = s.v.data() + first;
    const uint16_t* grad_bf16 = s.grad_bf16.data() + first;
    const float* grad = s.grad.data() + first;
    uint16_t *m16 = s.m16.data() + first, *v16 = s.v16.data() + first;
    uint8_t *m8 = s.m8.data() + first, *v8 = s.v8.data() + first;
    const flux_states8 states{m8, v8, s.m_scale.data() + first / 256, s.v_scale.data() + first / 256};
    const flux_rounding rounding{static_cast<uint32_t>(first), 0x12345678u, 0x9abcdef0u};
    switch (kernel) {
        case k8SplitBf16:
            return flux_adamw8_split_bf16(hi, lo, &states, grad_bf16, n, &step, threads);
        case k8SplitF32: return flux_adamw8_split_f32(hi, lo, &states, grad, n, &step, threads);
        case k8F32: return flux_adamw8_f32(p, &states, grad, n, &step, threads);
        case k16SplitBf16:
            return flux_adamw16_split_bf16(hi, lo, m16, v16, grad_bf16, n, &rounding, &step, threads);
        case k16SplitF32:
            return flux_adamw16_split_f32(hi, lo, m16, v16, grad, n, &rounding, &step, threads);
        case k16F32: return flux_adamw16_f32(p, m16, v16, grad, n, &rounding, &step, threads);
        case kStream8: return flux_stream8(hi, lo, m8, v8, grad_bf16, n, threads);
        case kStream16: return flux_stream16(hi, lo, m16, v16, grad_bf16, n, threads);
        case kSplitBf16: return flux_adamw_split_bf16(hi, lo, m, v, grad_bf16, n, &step, threads);
        case kSplitF32: return flux_adamw_split_f32(hi, lo, m, v, grad, n, &step, threads);
        case kF32: return flux_adamw_f32(p, m, v, grad, n, &step, threads);
        case kWeightsSplitBf16:
            return flux_adamw_weights_split_bf16(hi, lo, m, v, grad_bf16, n, &step, threads);
        case kWeightsSplitF32:
            return flux_adamw_weights_split_f32(hi, lo, m, v, grad, n, &step, threads);
        case kWeightsF32: return flux_adamw_weights_f32(p, m, v, grad, n, &step, threads);
        case kMomentsBf16: return flux_adamw_moments_bf16(m, v, grad_bf16, n, &step, threads);
        case kMomentsF32: return flux_adamw_moments_f32(m, v, grad, n, &step, threads);
        case kStreamWeights: return flux_stream_weights(hi, lo, m, v, grad_bf16, n, threads);
        case kStreamMoments: return flux_stream_moments(m, v, grad_bf16, n, threads);
        case kAccumulateBf16: return flux_accumulate_bf16(p, grad_bf16, n, threads);
        case kAccumulateF32: return flux_accumulate_f32(p, grad, n, threads);
        default: return flux_stream_split(hi, lo, m, v, grad_bf16, n, threads);
    }
}

flux_adamw_step any_step(std::mt19937& random) {
    const float t = 1 + static_cast<float>(random() % 1000);
    flux_adamw_step step{0.37f, 0.99999f, 0.9f, 0.1f, 0.999f, 0.001f, 0, 0, 1e-8f};
    step.step_size = 1e-3f / (1 - std::pow(0.9f, t));
    step.rsqrt_correction2 = 1 / std::sqrt(1 - std::pow(0.999f, t));
    return step;
}

void test_every_set_gives_the_bits_of_the_reference(int level, std::mt19937& random) {
    for (size_t n : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 100, 1000, 4099}) {
        for (int kernel = 0; kernel < kKernels; ++kernel) {
            const flux_adamw_step step = any_step(random);
            const State before(n + 3, random, random() % 2);
            State expected = before, got = before;
            for (int repeat = 0; repeat < 3; ++repeat) {
                flux_set_isa(FLUX_SCALAR);
                run(static_cast<Kernel>(kernel), expected, 1, n, step, 1);
                flux_set_isa(level);
                run(static_cast<Kernel>(kernel), got, 1, n, step, 1);  // from an odd address
            }
            CHECK(got == expected, "kernel %d, set %d, n %zu", kernel, level, n);
            if (kernel >= kStream) CHECK(got == before, "the stream changed something, n %zu", n);
        }
    }
}

void test_cuts_and_threads_do_not_matter(int level, std::mt19937& random) {
    const size_t n = 200000;
    flux_set_isa(level);
    for (int kernel = 0; kernel < kKernels; ++kernel) {
        const flux_adamw_step step = any_step(random);
        const State before(n, random, kernel % 2);
        State whole = before, threaded = before, cut = before;
        run(static_cast<Kernel>(kernel), whole, 0, n, step, 1);
        run(static_cast<Kernel>(kernel), threaded, 0, n, step, 5);
        for (size_t first = 0; first < n;) {
            const size_t left = n - first, some = 1 + random() % 5000;
            const size_t count = is_blockwise(kernel) ? (some / 256 + 1) * 256 : some;
            run(static_cast<Kernel>(kernel), cut, first, count < left ? count : left, step, 2);
            first += count;
        }
        CHECK(threaded == whole, "kernel %d, set %d: threads", kernel, level);
        CHECK(cut == whole, "kernel %d, set %d: cuts", kernel, level);
    }
}

// The weights first and the moments later, each with its own cut, are the update in one.
void test_two_passes_are_the_update_in_one(int level, std::mt19937& random) {
    const Kernel whole[] = {kSplitBf16, kSplitF32, kF32};
    const Kernel weights[] = {kWeightsSplitBf16, kWeightsSplitF32, kWeightsF32};
    const Kernel moments[] = {kMomentsBf16, kMomentsF32, kMomentsF32};
    for (size_t n : {1, 7, 17, 33, 100, 4099, 200000}) {
        for (int form = 0; form < 3; ++form) {
            const State before(n + 3, random, random() % 2);
            State expected = before, got = before;
            for (int repeat = 0; repeat < 3; ++repeat) {
                const flux_adamw_step step = any_step(random);
                flux_set_isa(FLUX_SCALAR);
                run(whole[form], expected, 1, n, step, 1);
                flux_set_isa(level);
                const State untouched = got;
                run(weights[form], got, 1, n, step, 3);
                CHECK(same_bits(got.m, untouched.m) && same_bits(got.v, untouched.v),
                      "form %d, set %d, n %zu: the pass over weights wrote moments", form, level, n);
                const size_t first = 1 + random() % n;
                run(moments[form], got, first, n + 1 - first, step, 2);
                run(moments[form], got, 1, first - 1, step, 1);
            }
            CHECK(got == expected, "form %d, set %d, n %zu: two passes", form, level, n);
        }
    }
}

void test_sums_of_squares_are_the_same_everywhere(int level, std::mt19937& random) {
    for (size_t n : {0, 1, 15, 16, 17, 16384, 16385, 100001}) {
        std::vector<float> x(n);
        std::vector<uint16_t> x_bf16(n);
        double exact = 0;
        for (size_t i = 0; i < n; ++i) {
            x[i] = std::normal_distribution<float>(0, 3)(random);
            x_bf16[i] = static_cast<uint16_t>(bits_of(x[i]) >> 16);
            exact += static_cast<double>(x[i]) * x[i];
        }
        flux_set_isa(FLUX_SCALAR);
        const double expected = flux_sum_squares_f32(x.data(), n, 1);
        const double expected_bf16 = flux_sum_squares_bf16(x_bf16.data(), n, 1);
        CHECK(std::fabs(expected - exact) <= 1e-12 * exact, "n %zu: %g, not %g", n, expected, exact);
        flux_set_isa(level);
        for (int threads : {1, 2, 3, 7}) {
            CHECK(flux_sum_squares_f32(x.data(), n, threads) == expected, "set %d n %zu", level, n);
            CHECK(flux_sum_squares_bf16(x_bf16.data(), n, threads) == expected_bf16, "set %d n %zu",
                  level, n);
        }
    }
}

// An update that changes nothing shows decode followed by encode.
void test_masters_survive_the_split(int level, uint64_t stride) {
    const size_t batch = 1 << 20;
    const flux_adamw_step nothing{0, 1, 0, 0, 0, 0, 0, 1, 1};
    std::vector<uint16_t> hi(batch), lo(batch), grad(batch);
    std::vector<float> m(batch), v(batch);
    flux_set_isa(level);
    for (uint64_t start = 0; start < (1ull << 32); start += batch * stride) {
        for (size_t i = 0; i < batch; ++i) {
            const uint32_t bits = static_cast<uint32_t>(start + i * stride);
            hi[i] = static_cast<uint16_t>((bits + 0x8000) >> 16);
            lo[i] = static_cast<uint16_t>(bits);
        }
        flux_adamw_split_bf16(hi.data(), lo.data(), m.data(), v.data(), grad.data(), batch,
                              &nothing, 0);
        for (size_t i = 0; i < batch; ++i) {
            const uint32_t bits = static_cast<uint32_t>(start + i * stride);
            const uint32_t magnitude = bits & 0x7fffffff;
            if (magnitude > 0x7fff7fff) continue;  // a NaN whose payload rounds away: never stored
            uint32_t want_hi = (bits + 0x8000) >> 16, want_lo = bits & 0xffff;
            if (magnitude > 0x7f800000) want_hi = 0x7fc0, want_lo = 0;
            if (magnitude < 0x8000) want_lo = 0;  // hi = +-0 decodes to +-0
            CHECK(hi[i] == (want_hi & 0xffff) && lo[i] == want_lo, "set %d, %08x: %04x %04x", level,
                  bits, hi[i], lo[i]);
        }
    }
}

std::vector<uint8_t> codes_of(const std::vector<float>& x, int level, int is_signed) {
    std::vector<uint8_t> codes(x.size());
    flux_set_isa(level);
    flux_encode8(x.data(), codes.data(), x.size(), is_signed);
    return codes;
}

// The same, with neighbours far apart: wide sets search a whole group exactly where one of its
// elements asks for it, which neighbours would do together.
std::vector<uint8_t> codes_apart(const std::vector<float>& x, int level, int is_signed) {
    const size_t n = x.size(), apart = n / 64 + 1;
    std::vector<float> moved(64 * apart);
    for (size_t i = 0; i < n; ++i) moved[i % apart * 64 + i / apart] = x[i];
    const std::vector<uint8_t> codes = codes_of(moved, level, is_signed);
    std::vector<uint8_t> back(n);
    for (size_t i = 0; i < n; ++i) back[i] = codes[i % apart * 64 + i / apart];
    return back;
}

// Every stride-th fraction in [0, 1], and the neighbours of every border (both signs), through the
// search for the nearest code.
void test_codes_are_those_of_the_reference(int level, uint32_t stride) {
    for (int is_signed = 0; is_signed < 2; ++is_signed) {
        std::vector<float> x;
        const auto compare = [&] {
            const auto expected = codes_of(x, FLUX_SCALAR, is_signed);
            const auto got = codes_apart(x, level, is_signed);
            for (size_t i = 0; i < x.size(); ++i)
                CHECK(got[i] == expected[i], "set %d, signed %d, %a", level, is_signed, x[i]);
            for (size_t i = 1; i < x.size(); ++i)
                CHECK(got[i] >= got[i - 1] || x[i] < x[i - 1], "set %d: %a has a smaller code",
                      level, x[i]);
            x.clear();
        };
        for (uint64_t bits = 0; bits <= 0x3f800000u; bits += stride) {
            x.push_back(float_of(static_cast<uint32_t>(bits)));
            if (x.size() == 1 << 20) compare();
        }
        compare();
        uint8_t codes[256];
        float values[256];
        for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
        flux_decode8(codes, values, 256, is_signed);
        for (int i = 1; i < 256; ++i) {
            const uint32_t middle = bits_of((std::fabs(values[i]) + std::fabs(values[i - 1])) / 2);
            for (uint32_t j = 0; j < 129; ++j) {
                x.push_back(float_of(middle < 64 ? j : middle - 64 + j));
                if (is_signed) x.push_back(-x.back());
            }
        }
        for (float& value : x) value = std::fabs(value) > 1 ? 1 : value;
        const auto expected = codes_of(x, FLUX_SCALAR, is_signed);
        CHECK(same_bits(codes_of(x, level, is_signed), expected), "set %d, signed %d: beside a border",
              level, is_signed);
        for (size_t i = 0; i < x.size(); ++i) {  // each alone with its copies
            const std::vector<float> copies(64, x[i]);
            const std::vector<uint8_t> wanted(64, expected[i]);
            CHECK(same_bits(codes_of(copies, level, is_signed), wanted), "set %d, signed %d: %a",
                  level, is_signed, x[i]);
        }
    }
}

// What codes stand for, whole groups and the rest.
void test_values_are_those_of_the_reference(int level) {
    for (int is_signed = 0; is_signed < 2; ++is_signed) {
        std::vector<uint8_t> codes(256 + 37);
        for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 101);
        std::vector<float> expected(codes.size()), got(codes.size());
        flux_set_isa(FLUX_SCALAR);
        flux_decode8(codes.data(), expected.data(), codes.size(), is_signed);
        flux_set_isa(level);
        flux_decode8(codes.data(), got.data(), codes.size(), is_signed);
        CHECK(same_bits(got, expected), "set %d, signed %d", level, is_signed);
    }
}

}  // namespace

int main(int count, char** arguments) {
    const bool all = count > 1 && strcmp(arguments[1], "--all") == 0;
    const int best = flux_set_isa(FLUX_AVX512);
    std::mt19937 random(20240607);
    for (int level = FLUX_SCALAR; level <= best; ++level) {
        test_every_set_gives_the_bits_of_the_reference(level, random);
        test_cuts_and_threads_do_not_matter(level, random);
        test_two_passes_are_the_update_in_one(level, random);
        test_sums_of_squares_are_the_same_everywhere(level, random);
        test_masters_survive_the_split(level, all ? 1 : 509);
        test_codes_are_those_of_the_reference(level, all ? 1 : 1009);
        test_values_are_those_of_the_reference(level);
        printf("instruction set %d: %s\n", level, failures ? "failed" : "as the reference");
    }
    return failures != 0;
}
