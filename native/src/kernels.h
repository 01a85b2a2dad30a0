// The table of kernels that each instruction set fills. One call works through one range on one
// thread; dispatch.cpp cuts ranges and picks the table.
#pragma once

#include "flux_native.h"

namespace flux {

constexpr size_t kSumBlock = 16384;  // elements per partial sum; a multiple of 16

struct Kernels {
    void (*adamw_split_bf16)(uint16_t*, uint16_t*, float*, float*, const uint16_t*, size_t,
                             const flux_adamw_step&);
    void (*adamw_split_f32)(uint16_t*, uint16_t*, float*, float*, const float*, size_t,
                            const flux_adamw_step&);
    void (*adamw_f32)(float*, float*, float*, const float*, size_t, const flux_adamw_step&);
    void (*accumulate_bf16)(float*, const uint16_t*, size_t);
    void (*accumulate_f32)(float*, const float*, size_t);
    double (*sum_squares_bf16)(const uint16_t*, size_t);  // of one block
    double (*sum_squares_f32)(const float*, size_t);
    void (*stream_split)(uint16_t*, uint16_t*, float*, float*, const uint16_t*, size_t);
};

extern const Kernels kScalarKernels;
#ifdef FLUX_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace flux
