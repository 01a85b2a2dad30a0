// Packed weights: every instruction set against the scalar reference, bit for bit, with any number of
// threads, and against the formula where it can be written down shortly.
#include "kernel_cases.h"

namespace {

constexpr size_t kBlock = 64, kNested = 256, kMember = kBlock * kNested;
constexpr size_t kBytes[] = {4, 2, 2};

std::vector<float> any_map(std::mt19937& random) {
    std::vector<float> map(256);
    float at = -0.9929688f;
    for (float& value : map) {
        value = at;
        at += static_cast<float>(1 + random() % 100) * 1.5e-4f;
    }
    map[127] = 0;
    return map;
}

// One weight in its packed form; all bytes are set beforehand, to see which are written.
struct Packed {
    std::vector<uint8_t> codes;
    std::vector<float> absmax, scales, offsets, map;
    std::vector<uint8_t> absmax8;
    size_t n, padded, columns, not_finite = 0;

    Packed(size_t n, size_t columns, const std::vector<float>& map)
        : map(map), n(n), padded((n + kMember - 1) / kMember * kMember), columns(columns) {
        codes.assign(padded, 0xaa);
        absmax.assign(padded, -3.0f);  // rows of int8 are fewer
        scales.assign(padded / kMember, -3.0f);
        offsets = scales;
        absmax8.assign(padded / kBlock, 0xaa);
    }

    flux_packing_args args(uint32_t format, uint32_t dense_format, void* dense, int threads) {
        flux_packing_args a = {};
        a.size = sizeof a;
        a.format = format;
        a.dense_format = dense_format;
        a.threads = threads;
        a.n = n;
        a.padded = padded;
        a.columns = columns;
        a.dense = dense;
        a.codes = codes.data();
        a.absmax = format == FLUX_PACKED_NF4_DOUBLE ? static_cast<void*>(absmax8.data()) : absmax.data();
        a.scales = scales.data();
        a.offsets = offsets.data();
        a.map = map.data();
        return a;
    }

    void pack(uint32_t format, uint32_t dense_format, std::vector<uint8_t>& dense, int threads) {
        flux_packing_args a = args(format, dense_format, dense.data(), threads);
        const int status = flux_pack(&a);
        CHECK(status == FLUX_OK, "status %d", status);
        not_finite = a.not_finite;
    }

    std::vector<uint8_t> unpack(uint32_t format, uint32_t dense_format, int threads) {
        std::vector<uint8_t> dense(padded * kBytes[dense_format] + 1, 0xaa);
        flux_packing_args a = args(format, dense_format, dense.data() + 1, threads);  // odd address
        const int status = flux_unpack(&a);
        CHECK(status == FLUX_OK, "status %d", status);
        return dense;
    }

    bool operator==(const Packed& other) const {
        return codes == other.codes && same_bits(absmax, other.absmax) && absmax8 == other.absmax8 &&
               same_bits(scales, other.scales) && same_bits(offsets, other.offsets) &&
               not_finite == other.not_finite;
    }
};

uint32_t exponent_bits(uint32_t dense_format) {
    const uint32_t of_format[] = {0x7f800000, 0x7f80, 0x7c00};
    return of_format[dense_format];
}

enum Kind { kTame, kFinite, kAny, kKinds };

// Ordinary weights; else also random bits, subnormals, blocks of zeros, and of any kind NaN and infinity.
std::vector<uint8_t> any_dense(size_t n, uint32_t dense_format, int kind, std::mt19937& random) {
    const bool wild = kind != kTame;
    const size_t bytes = kBytes[dense_format];
    std::vector<uint8_t> dense(n * bytes);
    const bool is_zero = wild && random() % 8 == 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(any_float(random, !wild || i / kBlock % 3 != 0));
        uint32_t stored = bits;
        if (dense_format == FLUX_DENSE_BF16) stored = bits >> 16;
        if (dense_format == FLUX_DENSE_F16) stored = (bits >> 16 & 0x83ff) + 0x2000;
        if (dense_format == FLUX_DENSE_F16 && wild) stored = random() & 0xffff;
        const uint32_t exponent = exponent_bits(dense_format);
        if (kind == kFinite && (stored & exponent) == exponent) stored &= ~exponent;
        if (is_zero && i / kBlock % 2 == 0) stored = 0;
        memcpy(dense.data() + i * bytes, &stored, bytes);
    }
    return dense;
}

void test_every_set_and_number_of_threads_gives_the_bits_of_the_reference(int level,
                                                                          std::mt19937& random) {
    const std::vector<float> map = any_map(random);
    const size_t shapes[][2] = {{1, 1},   {1, 63},   {1, 64},    {3, 65},     {7, 17},  {100, 96},
                                {64, 72}, {33, 777}, {5, 16384}, {300, 1001}, {2, 40000}};
    for (const auto& shape : shapes) {
        const size_t n = shape[0] * shape[1];
        for (uint32_t format = 0; format < 3; ++format) {
            for (uint32_t dense_format = 0; dense_format < 3; ++dense_format) {
                const int kind = static_cast<int>(random() % kKinds);
                std::vector<uint8_t> dense = any_dense(n, dense_format, kind, random);
                Packed expected(n, shape[1], map), got = expected;
                flux_set_isa(FLUX_SCALAR);
                expected.pack(format, dense_format, dense, 1);
                flux_set_isa(level);
                got.pack(format, dense_format, dense, 1 + random() % 5);
                CHECK(got == expected, "format %u of %u, set %d, n %zu: packed", format, dense_format,
                      level, n);
                for (uint32_t to = 0; to < 3 && got.not_finite == 0; ++to) {
                    flux_set_isa(FLUX_SCALAR);
                    const std::vector<uint8_t> wanted = expected.unpack(format, to, 1);
                    flux_set_isa(level);
                    CHECK(got.unpack(format, to, 1 + random() % 5) == wanted,
                          "format %u to %u, set %d, n %zu: unpacked", format, to, level, n);
                }
            }
        }
    }
}

// Every fp32 that a table of products can hold, through both 16-bit formats.
void test_products_are_rounded_to_nearest_even(int level, std::mt19937& random) {
    const std::vector<float> map = any_map(random);
    Packed packed(kMember, kMember, map);
    for (size_t i = 0; i < kMember / 2; ++i) packed.codes[i] = 0x0f;  // -1 and 1
    for (int repeat = 0; repeat < 200; ++repeat) {
        for (float& absmax : packed.absmax) absmax = float_of(random() & 0x7fffffff);
        for (uint32_t to : {FLUX_DENSE_BF16, FLUX_DENSE_F16}) {
            flux_set_isa(FLUX_SCALAR);
            const std::vector<uint8_t> wanted = packed.unpack(FLUX_PACKED_NF4, to, 1);
            flux_set_isa(level);
            CHECK(packed.unpack(FLUX_PACKED_NF4, to, 1) == wanted, "to %u, set %d", to, level);
        }
    }
}

void test_what_is_not_finite_is_counted(int level) {
    std::vector<float> map(256);
    for (int i = 0; i < 256; ++i) map[i] = static_cast<float>(i - 127) / 128.0f;
    flux_set_isa(level);
    for (uint32_t format = 0; format < 3; ++format) {
        std::vector<float> x(70000, 0.5f);
        for (size_t i : {0, 1, 63, 64, 35000, 69999}) x[i] = i % 2 ? NAN : -INFINITY;
        std::vector<uint8_t> dense(x.size() * 4);
        memcpy(dense.data(), x.data(), dense.size());
        Packed packed(x.size(), 700, map);
        packed.pack(format, FLUX_DENSE_F32, dense, 3);
        CHECK(packed.not_finite == 6, "format %u, set %d: %zu", format, level, packed.not_finite);
    }
}

void test_arguments_that_do_not_go_together_are_refused() {
    std::vector<float> map(256);
    std::vector<uint8_t> dense(4 * kMember);
    Packed packed(kMember, 64, map);
    const auto status = [&](auto change) {
        flux_packing_args a = packed.args(FLUX_PACKED_INT8, FLUX_DENSE_F32, dense.data(), 1);
        change(a);
        const int packing = flux_pack(&a), unpacking = flux_unpack(&a);
        CHECK(packing == unpacking, "%d, %d", packing, unpacking);
        return packing;
    };
    CHECK(status([](auto& a) { a.size -= 8; }) == FLUX_WRONG_SIZE, "size");
    CHECK(status([](auto& a) { a.format = 3; }) == FLUX_UNKNOWN_FORMAT, "format");
    CHECK(status([](auto& a) { a.dense_format = 3; }) == FLUX_UNKNOWN_FORMAT, "dense format");
    CHECK(status([](auto& a) { a.columns = 0; }) == FLUX_WRONG_COUNT, "no columns");
    CHECK(status([](auto& a) { a.columns = 63; }) == FLUX_WRONG_COUNT, "no whole rows");
    CHECK(status([](auto& a) { a.padded -= 64; }) == FLUX_WRONG_COUNT, "padding");
    CHECK(status([](auto& a) { a.codes = nullptr; }) == FLUX_NULL_POINTER, "codes");
    CHECK(status([](auto& a) { a.format = 1, a.map = nullptr; }) == FLUX_NULL_POINTER, "map");
    CHECK(status([](auto& a) { a.n = a.padded = 0; }) == FLUX_OK, "nothing to do");
    CHECK(flux_pack(nullptr) == FLUX_NULL_POINTER && flux_unpack(nullptr) == FLUX_NULL_POINTER, "null");
}

}  // namespace

int main() {
    std::mt19937 random(7);
    const int best = flux_set_isa(FLUX_AVX512);
    for (int level = FLUX_SCALAR; level <= best; ++level) {
        for (int repeat = 0; repeat < 5; ++repeat)
            test_every_set_and_number_of_threads_gives_the_bits_of_the_reference(level, random);
        test_products_are_rounded_to_nearest_even(level, random);
        test_what_is_not_finite_is_counted(level);
    }
    test_arguments_that_do_not_go_together_are_refused();
    printf("packing: sets up to %d, %d failures\n", best, failures);
    return failures != 0;
}
