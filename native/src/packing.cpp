// The C interface of packed weights: cuts ranges over threads, and quantises absolute maxima again.
#include "packing.h"

#include <stdlib.h>
#include <string.h>

#include "threads.h"

namespace {

using flux::kNested;
using flux::kPackedBlock;
using flux::kPackedMember;
using flux::over_ranges;

constexpr size_t kDenseBytes[] = {4, 2, 2};

int status_of(const flux_packing_args& a) {
    if (a.size != sizeof a) return FLUX_WRONG_SIZE;
    if (a.format > FLUX_PACKED_INT8 || a.dense_format > FLUX_DENSE_F16) return FLUX_UNKNOWN_FORMAT;
    if (a.padded == 0 && a.n == 0) return FLUX_OK;
    if (a.n > a.padded || a.padded % kPackedMember != 0) return FLUX_WRONG_COUNT;
    if (a.format == FLUX_PACKED_INT8 && (a.columns == 0 || a.n % a.columns != 0))
        return FLUX_WRONG_COUNT;
    const bool has_nested = a.scales && a.offsets && a.map;
    const bool has_all = a.codes && a.absmax && (a.dense || a.n == 0) &&
                         (has_nested || a.format != FLUX_PACKED_NF4_DOUBLE);
    return has_all ? FLUX_OK : FLUX_NULL_POINTER;
}

char* dense_at(const flux_packing_args& a, size_t element) {
    return static_cast<char*>(a.dense) + element * kDenseBytes[a.dense_format];
}

// Codes and fp32 absolute maxima of the whole range.
void pack_nf4(flux_packing_args& a, float* absmax) {
    const auto run = flux::packing_kernels().pack_nf4[a.dense_format];
    over_ranges(a.padded, a.threads, kPackedMember, [&](size_t first, size_t count) {
        const size_t there = a.n > first ? a.n - first : 0;
        const size_t real = there < count ? there : count;
        const size_t bad = run(dense_at(a, first), a.codes + first / 2, absmax + first / kPackedBlock, real);
        if (bad != 0) __atomic_fetch_add(&a.not_finite, bad, __ATOMIC_RELAXED);
        const size_t packed = (real + kPackedBlock - 1) / kPackedBlock * kPackedBlock;
        memset(a.codes + (first + packed) / 2, flux::kZeroCodes, (count - packed) / 2);
        memset(absmax + (first + packed) / kPackedBlock, 0,
               (count - packed) / kPackedBlock * sizeof(float));
    });
}

double sum_of(const float* absmax) {
    double sums[16] = {};
    for (size_t i = 0; i < kNested; ++i) sums[i % 16] += static_cast<double>(absmax[i]);
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
}

// The borders between the codes of a map, for comparison by "less": what lies in the middle of two has
// the even code, so a border above an odd one is the number before it. In the order of a binary search:
// behind node k come 2k and 2k + 1, and behind the last level 256 + code. No branch depends on a value.
struct Borders {
    float node[256];

    explicit Borders(const float* map) {
        for (unsigned k = 1; k < 256; ++k) {
            unsigned last = 2 * k;  // on its left side the last code is right of all that follow
            while (last < 256) last = 2 * last + 1;
            node[k] = border_above(map, last - 256);
        }
    }

    static float border_above(const float* map, unsigned code) {
        const float border = (map[code] + map[code + 1]) / 2.0f;
        if (code % 2 == 0) return border;
        int32_t bits;
        memcpy(&bits, &border, sizeof bits);
        bits += bits > 0 ? -1 : 1;  // no border is zero
        float before;
        memcpy(&before, &bits, sizeof before);
        return before;
    }

    // Level by level, so that the processor works on many values at once.
    void code(const float* x, uint8_t* codes) const {
        uint32_t k[kNested];
        for (size_t i = 0; i < kNested; ++i) k[i] = x[i] > node[1] ? 3 : 2;
        for (int level = 1; level < 8; ++level)
            for (size_t i = 0; i < kNested; ++i) k[i] = 2 * k[i] + (x[i] > node[k[i]] ? 1 : 0);
        for (size_t i = 0; i < kNested; ++i) codes[i] = static_cast<uint8_t>(k[i]);
    }
};

// One scale and the codes of 256 absolute maxima, of which the first `real` are no padding.
void nest(const float* absmax, size_t real, float offset, const Borders& borders, uint8_t* codes,
          float* scale) {
    float centred[kNested] = {};
    float most = 0;
    for (size_t i = 0; i < real; ++i) {
        centred[i] = absmax[i] - offset;
        const float size = __builtin_fabsf(centred[i]);
        most = size > most ? size : most;
    }
    *scale = most;
    const float reciprocal = 1.0f / most;
    const float inverse = reciprocal <= 3.4028234663852886e38f ? reciprocal : 0.0f;
    for (size_t i = 0; i < kNested; ++i) centred[i] *= inverse;
    borders.code(centred, codes);
}

void nest_all(const flux_packing_args& a, const float* absmax, double* sums) {
    const size_t groups = a.padded / kPackedMember;
    const size_t real = (a.n + kPackedBlock - 1) / kPackedBlock;
    over_ranges(a.padded, a.threads, kPackedMember, [&](size_t first, size_t count) {
        for (size_t at = first; at < first + count; at += kPackedMember)
            sums[at / kPackedMember] = sum_of(absmax + at / kPackedBlock);
    });
    double total = 0;
    for (size_t i = 0; i < groups; ++i) total += sums[i];
    const float offset = static_cast<float>(total / static_cast<double>(real > 0 ? real : 1));
    const Borders borders(a.map);
    uint8_t* const codes = static_cast<uint8_t*>(a.absmax);
    over_ranges(a.padded, a.threads, kPackedMember, [&](size_t first, size_t count) {
        for (size_t at = first; at < first + count; at += kPackedMember) {
            const size_t block = at / kPackedBlock, group = at / kPackedMember;
            const size_t there = real > block ? real - block : 0;
            nest(absmax + block, there < kNested ? there : kNested, offset, borders, codes + block,
                 a.scales + group);
            a.offsets[group] = offset;
        }
    });
}

int pack_nf4_double(flux_packing_args& a) {
    const size_t groups = a.padded / kPackedMember;
    double* sums = static_cast<double*>(malloc(groups * (sizeof(double) + kNested * sizeof(float))));
    if (sums == nullptr) return FLUX_NO_MEMORY;
    float* absmax = reinterpret_cast<float*>(sums + groups);
    pack_nf4(a, absmax);
    nest_all(a, absmax, sums);
    free(sums);
    return FLUX_OK;
}

void pack_int8(flux_packing_args& a) {
    const auto run = flux::packing_kernels().pack_int8[a.dense_format];
    float* const absmax = static_cast<float*>(a.absmax);
    over_ranges(a.n, a.threads, a.columns, [&](size_t first, size_t count) {
        const size_t bad = run(dense_at(a, first), a.codes + first, absmax + first / a.columns,
                               count / a.columns, a.columns);
        if (bad != 0) __atomic_fetch_add(&a.not_finite, bad, __ATOMIC_RELAXED);
    });
    memset(a.codes + a.n, 0, a.padded - a.n);
}

void unpack_nf4(const flux_packing_args& a) {
    const auto run = flux::packing_kernels().unpack_nf4[a.dense_format];
    const float* const absmax = static_cast<const float*>(a.absmax);
    over_ranges(a.padded, a.threads, kPackedMember, [&](size_t first, size_t count) {
        run(a.codes + first / 2, absmax + first / kPackedBlock, dense_at(a, first),
            count / kPackedBlock);
    });
}

void unpack_nf4_double(const flux_packing_args& a) {
    const auto run = flux::packing_kernels().unpack_nf4[a.dense_format];
    const uint8_t* const codes = static_cast<const uint8_t*>(a.absmax);
    over_ranges(a.padded, a.threads, kPackedMember, [&](size_t first, size_t count) {
        float absmax[kNested];
        for (size_t at = first; at < first + count; at += kPackedMember) {
            const float scale = a.scales[at / kPackedMember], offset = a.offsets[at / kPackedMember];
            const uint8_t* const group = codes + at / kPackedBlock;
            for (size_t i = 0; i < kNested; ++i) absmax[i] = a.map[group[i]] * scale + offset;
            run(a.codes + at / 2, absmax, dense_at(a, at), kNested);
        }
    });
}

void unpack_int8(const flux_packing_args& a) {
    const auto run = flux::packing_kernels().unpack_int8[a.dense_format];
    const float* const absmax = static_cast<const float*>(a.absmax);
    over_ranges(a.n, a.threads, a.columns, [&](size_t first, size_t count) {
        run(a.codes + first, absmax + first / a.columns, dense_at(a, first), count / a.columns,
            a.columns);
    });
    memset(dense_at(a, a.n), 0, (a.padded - a.n) * kDenseBytes[a.dense_format]);
}

}  // namespace

extern "C" {

int flux_pack(flux_packing_args* args) {
    if (args == nullptr) return FLUX_NULL_POINTER;
    const int status = status_of(*args);
    if (status != FLUX_OK) return status;
    args->not_finite = 0;
    if (args->padded == 0) return FLUX_OK;
    if (args->format == FLUX_PACKED_NF4_DOUBLE) return pack_nf4_double(*args);
    if (args->format == FLUX_PACKED_NF4)
        pack_nf4(*args, static_cast<float*>(args->absmax));
    else
        pack_int8(*args);
    return FLUX_OK;
}

int flux_unpack(const flux_packing_args* args) {
    if (args == nullptr) return FLUX_NULL_POINTER;
    const int status = status_of(*args);
    if (status != FLUX_OK || args->padded == 0) return status;
    if (args->format == FLUX_PACKED_INT8)
        unpack_int8(*args);
    else if (args->format == FLUX_PACKED_NF4_DOUBLE)
        unpack_nf4_double(*args);
    else
        unpack_nf4(*args);
    return FLUX_OK;
}
}
