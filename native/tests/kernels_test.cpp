// Every instruction set against the scalar reference, bit for bit, through the C interface.
//
// kernels_test          samples of all bit patterns (seconds)
// kernels_test --all    every one of the 2^32 masters through decode and encode (a minute)
#include "kernel_cases.h"

namespace {

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

// Blocks whose moments are not finite, huge, tiny or partly zero, each alone among ordinary ones, are
// coded as the reference does, and so are those beside them, which wide sets work on meanwhile.
void test_an_odd_block_leaves_its_neighbours_alone(int level, std::mt19937& random) {
    const size_t blocks = 5, n = blocks * 256;
    const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, 9e20f, 1e-30f, 1e-38f, 0.0f};
    for (Kernel kernel : {k8SplitBf16, k8SplitF32, k8F32}) {
        for (float value : odd) {
            for (size_t block = 0; block < blocks; ++block) {
                const flux_adamw_step step = any_step(random);
                State expected(n, random, true);
                for (float& scale : expected.m_scale) scale = 0;
                for (float& scale : expected.v_scale) scale = 0;
                for (size_t i = block * 256; i < block * 256 + 256; i += 1 + random() % 80) {
                    expected.grad[i] = value;
                    expected.grad_bf16[i] = static_cast<uint16_t>(bits_of(value) >> 16);
                }
                State got = expected;
                for (int repeat = 0; repeat < 2; ++repeat) {
                    flux_set_isa(FLUX_SCALAR);
                    run(kernel, expected, 0, n, step, 1);
                    flux_set_isa(level);
                    run(kernel, got, 0, n, step, 1);
                }
                CHECK(got == expected, "kernel %d, set %d, %g in block %zu", kernel, level, value, block);
            }
        }
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
        flux_adamw_args args{};
        args.size = sizeof args, args.n = batch, args.step = nothing;
        args.weight_format = FLUX_WEIGHTS_SPLIT_BF16, args.gradient_format = FLUX_GRADIENT_BF16;
        args.weights = hi.data(), args.lo = lo.data(), args.gradient = grad.data();
        args.m = m.data(), args.v = v.data();
        CHECK(flux_adamw(&args) == FLUX_OK, "set %d", level);
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

void test_zeros_are_written_where_asked_and_nowhere_else() {
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{100}, size_t{1} << 20, (size_t{5} << 20) + 7}) {
        for (int threads : {1, 3, 0}) {
            std::vector<uint8_t> memory(bytes + 2, 0xa5), expected(bytes + 2, 0);
            expected.front() = expected.back() = 0xa5;
            flux_zero(memory.data() + 1, bytes, threads);
            CHECK(memory == expected, "%zu bytes, %d threads", bytes, threads);
        }
    }
}

void test_arguments_that_cannot_be_followed_touch_nothing(std::mt19937& random) {
    const size_t n = 600;
    const flux_adamw_step step = any_step(random);
    State state(n, random, true);
    const State before = state;
    const auto status = [&](Kernel kernel, auto change) {
        flux_adamw_args args = args_of(call_of(kernel), state, 0, n, step, 1);
        change(args);
        return flux_adamw(&args);
    };
    using A = flux_adamw_args;
    CHECK(flux_adamw(nullptr) == FLUX_NULL_POINTER, "no arguments");
    CHECK(status(kF32, [](A& a) { a.size -= 8; }) == FLUX_WRONG_SIZE, "size");
    CHECK(status(kF32, [](A& a) { a.pass = 3; }) == FLUX_UNKNOWN_FORMAT, "pass");
    CHECK(status(kF32, [](A& a) { a.state_format = 3; }) == FLUX_UNKNOWN_FORMAT, "states");
    CHECK(status(kF32, [](A& a) { a.weight_format = 2; }) == FLUX_UNKNOWN_FORMAT, "weights");
    CHECK(status(kF32, [](A& a) { a.gradient_format = 2; }) == FLUX_UNKNOWN_FORMAT, "gradient");
    CHECK(status(kF32, [](A& a) { a.gradient_format = FLUX_GRADIENT_BF16; }) == FLUX_NOT_OFFERED,
          "fp32 weights with bf16 gradients");
    CHECK(status(k8F32, [](A& a) { a.pass = FLUX_PASS_WEIGHTS; }) == FLUX_NOT_OFFERED,
          "8-bit states in two passes");
    CHECK(status(kF32, [](A& a) { a.m = nullptr; }) == FLUX_NULL_POINTER, "m");
    CHECK(status(kF32, [](A& a) { a.v = nullptr; }) == FLUX_NULL_POINTER, "v");
    CHECK(status(kF32, [](A& a) { a.weights = nullptr; }) == FLUX_NULL_POINTER, "weights");
    CHECK(status(kF32, [](A& a) { a.gradient = nullptr; }) == FLUX_NULL_POINTER, "gradient");
    CHECK(status(kSplitF32, [](A& a) { a.lo = nullptr; }) == FLUX_NULL_POINTER, "lo");
    CHECK(status(k8F32, [](A& a) { a.v_scale = nullptr; }) == FLUX_NULL_POINTER, "scales");
    CHECK(state == before, "refused arguments changed something");
    CHECK(status(kMomentsF32, [](A& a) { a.weights = nullptr; }) == FLUX_OK, "moments alone");
    CHECK(status(kF32, [](A& a) { a.n = 0, a.m = nullptr; }) == FLUX_OK, "nothing to do");
}

}  // namespace

int main(int count, char** arguments) {
    const bool all = count > 1 && strcmp(arguments[1], "--all") == 0;
    const int best = flux_set_isa(FLUX_AVX512);
    std::mt19937 random(20240607);
    test_zeros_are_written_where_asked_and_nowhere_else();
    test_arguments_that_cannot_be_followed_touch_nothing(random);
    for (int level = FLUX_SCALAR; level <= best; ++level) {
        test_every_set_gives_the_bits_of_the_reference(level, random);
        test_cuts_and_threads_do_not_matter(level, random);
        test_an_odd_block_leaves_its_neighbours_alone(level, random);
        test_two_passes_are_the_update_in_one(level, random);
        test_masters_survive_the_split(level, all ? 1 : 509);
        test_codes_are_those_of_the_reference(level, all ? 1 : 1009);
        test_values_are_those_of_the_reference(level);
        printf("instruction set %d: %s\n", level, failures ? "failed" : "as the reference");
    }
    return failures != 0;
}
