// Cuts ranges over threads. The only file that knows OpenMP.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef FLUX_X86
#include <xmmintrin.h>
#endif

#include "flux_native.h"

namespace flux {

// Below this many elements a second thread costs more than it saves.
constexpr size_t kLeastPerThread = 32768;
// Ranges are cut at whole cache lines of every stream (64 bytes of 16-bit halves).
constexpr size_t kCut = 32;
// Elements at most of the ranges that threads take one after another: half a millisecond of AdamW or less.
constexpr size_t kRange = 1 << 18;

// Round to nearest and keep subnormals while a kernel runs, whatever the process chose: a thread
// that flushes subnormals would give other bits than its neighbour.
class DefaultRounding {
#ifdef FLUX_X86
  public:
    DefaultRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultRounding() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
  public:
    DefaultRounding() {}
    ~DefaultRounding() {}
#endif
};

inline int threads_for(size_t n, int threads) {
#ifdef _OPENMP
    const size_t wanted = static_cast<size_t>(threads > 0 ? threads : omp_get_max_threads());
    const size_t useful = n / kLeastPerThread + 1;
    return static_cast<int>(wanted < useful ? wanted : useful);
#else
    (void)n, (void)threads;
    return 1;
#endif
}

// body(first, count) on contiguous ranges that cover [0, n), by up to `threads` threads. There are
// more ranges than threads, and each goes to who is free: a core that also runs the program's other
// threads does fewer, where in equal shares all others would wait for it.
template <class Body>
void over_ranges(size_t n, int threads, size_t cut, Body body) {
    const int workers = threads_for(n, threads);
    if (workers <= 1) {
        DefaultRounding rounding;
        body(0, n);
        return;
    }
    const size_t each = n / static_cast<size_t>(workers);
    const size_t share = (each / (each / kRange + 1) + cut) / cut * cut;
#ifdef _OPENMP
#pragma omp parallel num_threads(workers)
#endif
    {
        DefaultRounding rounding;
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1) nowait
#endif
        for (size_t first = 0; first < n; first += share) {
            body(first, n - first < share ? n - first : share);
        }
    }
}

}  // namespace flux
