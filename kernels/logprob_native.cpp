// The log-prob kernel for CPUs: contract in backends.py, maths in README.md. Plain functions for ctypes; no Python, no torch.
//
// The arithmetic is compiled for several instruction sets, so that a library built on one machine is fast on others and
// runs on all. A row's result depends on that row and on the instruction set alone: not on its alignment, its neighbours or
// the number of threads.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t BLOCK = 4096;          // columns whose maximum is found before their exponentials: stays in the L1 cache
constexpr int64_t THREAD_MINIMUM = 1 << 17;  // logits that are worth starting a thread for
constexpr int MAX_THREADS = 256;
constexpr uintptr_t HUGE_PAGE = 1 << 21;
constexpr int64_t IGNORED = -100;

struct Statistics {
    const void *logits;
    int64_t logits_stride, columns, first;
    const int64_t *targets;
    float *out;
    int64_t out_stride, out_step;
    float temperature;
    bool bfloat16, moment;
};

struct Gradient {
    const void *logits;
    void *gradient;
    int64_t logits_stride, gradient_stride, columns, width, first;
    const int64_t *targets;
    const float *lse, *entropies, *upstream, *upstream_entropy;
    float temperature;
    bool bfloat16;
};

template <typename Job> struct Slice {
    const Job *job;
    void (*rows)(const Job &, int64_t, int64_t);
    int64_t begin, end;
};

template <typename Job> void *run_slice(void *argument) {
    auto *slice = static_cast<Slice<Job> *>(argument);
    slice->rows(*slice->job, slice->begin, slice->end);
    return nullptr;
}

// Threads live for one call: starting them costs microseconds, and there is no pool that a fork would leave behind.
template <typename Job>
void in_threads(const Job &job, void (*rows)(const Job &, int64_t, int64_t), int64_t count, int64_t threads) {
    const int64_t worth = count * (job.columns + 1) / THREAD_MINIMUM;
    threads = threads < worth ? threads : worth;
    threads = threads < count ? threads : count;
    threads = threads > MAX_THREADS ? MAX_THREADS : threads < 1 ? 1 : threads;
    Slice<Job> slices[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    bool started[MAX_THREADS];
    for (int64_t i = 0; i < threads; i++) slices[i] = {&job, rows, count * i / threads, count * (i + 1) / threads};
    for (int64_t i = 1; i < threads; i++)
        started[i] = pthread_create(&handles[i], nullptr, run_slice<Job>, &slices[i]) == 0;
    run_slice<Job>(&slices[0]);
    for (int64_t i = 1; i < threads; i++) {
        if (started[i])
            pthread_join(handles[i], nullptr);
        else
            run_slice<Job>(&slices[i]);
    }
}

// Asks for large pages under memory that is about to be filled. A gradient fresh from the allocator has no pages yet, and
// a fault for every 4 KiB of it takes longer than computing it.
void expect_writes([[maybe_unused]] const void *from, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t start = ((uintptr_t)from + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    const uintptr_t end = ((uintptr_t)from + bytes) & ~(HUGE_PAGE - 1);
    if (start < end) madvise((void *)start, end - start, MADV_HUGEPAGE);
#endif
}

struct Kernels {
    void (*statistics)(const Statistics &, int64_t, int64_t);
    void (*gradient)(const Gradient &, int64_t, int64_t);
};

}  // namespace

#if defined(__x86_64__)
#define VARIANT avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define LANES 16
#include "logprob_native_rows.h"
#define VARIANT avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "logprob_native_rows.h"
#endif
#define VARIANT portable
#define TARGET
#define LANES 4
#include "logprob_native_rows.h"

namespace {

// The widest that this machine has, or one that is `narrower` places behind it (at most the last).
Kernels kernels(int narrower) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && narrower-- == 0)
        return {avx512::statistics_rows, avx512::gradient_rows};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && narrower-- == 0)
        return {avx2::statistics_rows, avx2::gradient_rows};
#endif
    return {portable::statistics_rows, portable::gradient_rows};
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Counts changes of the functions below, so that a library of another version than its caller is noticed.
EXPORTED int logprob_native_interface() { return 1; }

// Strides are in elements, `columns` excludes padding, `narrower` as in kernels().
EXPORTED void logprob_native_statistics(int64_t rows, int64_t columns, int64_t first, const void *logits,
                                        int64_t logits_stride, int bfloat16, const int64_t *targets, float *out,
                                        int64_t out_stride, int64_t out_step, float temperature, int moment,
                                        int64_t threads, int narrower) {
    const Statistics job = {logits,     logits_stride, columns,     first,         targets,    out,
                            out_stride, out_step,      temperature, bfloat16 != 0, moment != 0};
    in_threads(job, kernels(narrower).statistics, rows, threads);
}

// `width` includes padding; upstream_entropy may be null.
EXPORTED void logprob_native_gradient(int64_t rows, int64_t columns, int64_t width, int64_t first, const void *logits,
                                      int64_t logits_stride, void *gradient, int64_t gradient_stride, int bfloat16,
                                      const int64_t *targets, const float *lse, const float *entropies,
                                      const float *upstream, const float *upstream_entropy, float temperature,
                                      int64_t threads, int narrower) {
    const Gradient job = {logits,  gradient, logits_stride, gradient_stride, columns,          width,       first,
                          targets, lse,      entropies,     upstream,        upstream_entropy, temperature, bfloat16 != 0};
    if (gradient != logits && rows > 0)
        expect_writes(gradient, ((rows - 1) * gradient_stride + width) * (bfloat16 ? 2 : 4));
    in_threads(job, kernels(narrower).gradient, rows, threads);
}
