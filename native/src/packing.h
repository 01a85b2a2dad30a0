// The table of kernels over packed weights that each instruction set fills. One call works through
// one range on one thread; packing.cpp cuts ranges and picks the table.
#pragma once

#include "flux_native.h"

namespace flux {

constexpr size_t kPackedBlock = 64;       // elements with one absolute maximum
constexpr size_t kNested = 256;           // absolute maxima with one scale and one offset
constexpr size_t kPackedMember = kPackedBlock * kNested;
constexpr uint8_t kZeroCodes = 0x77;      // two codes of zero
constexpr float kInt8Step = 7.874015718698502e-3f;  // 1 / 127 as bitsandbytes writes it

struct PackingKernels {
    // Pack n elements; return how many of them are NaN or infinite. By the format of the elements.
    size_t (*pack_nf4[3])(const void* dense, uint8_t* codes, float* absmax, size_t n);
    size_t (*pack_int8[3])(const void* dense, uint8_t* codes, float* absmax, size_t rows,
                           size_t columns);
    void (*unpack_nf4[3])(const uint8_t* codes, const float* absmax, void* dense, size_t blocks);
    void (*unpack_int8[3])(const uint8_t* codes, const float* absmax, void* dense, size_t rows,
                           size_t columns);
};

extern const PackingKernels kScalarPacking;
#ifdef FLUX_X86
extern const PackingKernels kAvx2Packing;
extern const PackingKernels kAvx512Packing;
#endif

// Of the instruction set in use (dispatch.cpp).
const PackingKernels& packing_kernels();

}  // namespace flux
