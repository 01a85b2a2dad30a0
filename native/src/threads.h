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
// Elements of the ranges that threads take one after another, the longest and about the shortest. The longest
// takes a core a third of a millisecond with 8-bit states; each costs some microseconds, for what is
// fetched ahead of its end is fetched into the cache of the wrong core.
constexpr size_t kLongest = 1 << 18;
constexpr size_t kShortest = 1 << 16;

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

// Contiguous ranges that cover [0, n), each for the thread that asks first: a core that also runs the
// program's other threads does fewer, where in equal shares all others would wait for it. They get
// shorter to the end, so that all threads are done at about the same time: half of an equal share of
// what is left (factoring; Hummel, Schonberg and Flynn, 1992). The shortest divide an equal share of
// all evenly: where there are few ranges, each thread gets as many. For n of 1 or more.
class Ranges {
  public:
    Ranges(size_t n, int workers, size_t cut)
        : n_(n), workers_(static_cast<size_t>(workers)), cut_(cut) {
        const size_t share = (n + workers_ - 1) / workers_;
        const size_t pieces = (share + kShortest - 1) / kShortest;
        shortest_ = pieces > 0 ? (share + pieces - 1) / pieces : 0;
    }

    // The next one; false when none is left.
    bool take(size_t& first, size_t& count) {
        first = __atomic_load_n(&next_, __ATOMIC_RELAXED);
        do {
            if (first == n_) return false;
            count = length(n_ - first);
        } while (!__atomic_compare_exchange_n(&next_, &first, first + count, true, __ATOMIC_RELAXED,
                                              __ATOMIC_RELAXED));
        return true;
    }

  private:
    size_t length(size_t left) const {
        size_t length = left / (2 * workers_);
        if (length > kLongest) length = kLongest;
        if (length < shortest_) length = shortest_;
        length = (length + cut_ - 1) / cut_ * cut_;
        return length < left ? length : left;
    }

    const size_t n_, workers_, cut_;
    size_t shortest_, next_ = 0;
};

// body(first, count) on ranges that cover [0, n), by up to `threads` threads.
template <class Body>
void over_ranges(size_t n, int threads, size_t cut, Body body) {
    const int workers = threads_for(n, threads);
    if (workers <= 1) {
        DefaultRounding rounding;
        body(0, n);
        return;
    }
    Ranges ranges(n, workers, cut);
#ifdef _OPENMP
#pragma omp parallel num_threads(workers)
#endif
    {
        DefaultRounding rounding;
        for (size_t first = 0, count = 0; ranges.take(first, count);) body(first, count);
    }
}

}  // namespace flux
