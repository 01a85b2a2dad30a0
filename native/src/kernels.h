// The table of kernels that each instruction set fills. One call works through one range on one
// thread; dispatch.cpp cuts ranges and picks the table.
#pragma once

#include "flux_native.h"

namespace flux {

// 8-bit block-wise states.
struct States8 {
    uint8_t *m, *v;
    float *m_scale, *v_scale;
};

// One range of an update; the pointers of the arguments are those of its first element.
using AdamW = void (*)(const flux_adamw_args&);

struct Kernels {
    AdamW adamw[3][3][2][2];  // by pass, format of states, weights and gradient; null: not offered
    AdamW stream[3][3];       // by pass and format of states
    void (*quantise8)(const float*, uint8_t*, float*, size_t, bool is_signed);
    void (*encode8)(const float*, uint8_t*, size_t, bool is_signed);
    void (*decode8)(const uint8_t*, float*, size_t, bool is_signed);
};

// Whether two or three streams are fetched far ahead too, as more of them are (lanes.h).
extern const bool kFetchesFewFar;

extern const Kernels kScalarKernels;
#ifdef FLUX_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace flux
