// SPDX-License-Identifier: MIT
//
// A pool of our own rather than OpenMP: a forked child of a process that had used libgomp hangs in its first
// parallel region, and two OpenMP runtimes in one process fight over the cores.
//
// How a run works.  The caller writes the job, opens it, and wakes the workers.  A worker joins by raising the
// count in `gate`, which only succeeds while the job is open, takes pieces from `next` until none is left, and
// leaves.  The caller takes pieces as well, then closes the gate and waits for those who joined.  A worker that
// wakes late finds the gate closed and sleeps again, so nobody waits for it.

#include "host.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace {

constexpr int kMaxWorkers = 255;
constexpr int kSpin = 50;                       // pauses before sleeping: longer starves a thread on a shared core
constexpr uint32_t kOpen = 1u << 31;

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>* word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

struct Pool {
    std::atomic<bool> busy{false};              // one run at a time
    alignas(64) std::atomic<uint32_t> wake{0};  // raised at each run; workers sleep on it
    alignas(64) std::atomic<uint32_t> gate{0};  // kOpen | workers inside
    alignas(64) std::atomic<int64_t> next{0};
    std::atomic<bool> stop{false};
    std::atomic<int> seats{0};                  // workers that may still join this run
    k3_task task = nullptr;                     // the job: written while the gate is closed and empty
    void* arg = nullptr;
    int64_t pieces = 0;
    std::atomic<int> workers{0};
    pthread_t threads[kMaxWorkers];
};

Pool* g_pool = nullptr;                         // never destroyed: a detached exit must find it whole
int g_holders = 0;
pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;

void take_pieces(Pool* p) {
    for (;;) {
        const int64_t i = p->next.fetch_add(1, std::memory_order_relaxed);
        if (i >= p->pieces) return;
        p->task(p->arg, i);
    }
}

bool join(Pool* p) {
    uint32_t g = p->gate.load(std::memory_order_acquire);
    while (g & kOpen) {
        if (p->gate.compare_exchange_weak(g, g + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
}

void leave(Pool* p) {
    if (p->gate.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(&p->gate, 1);   // closed, and the last
}

void* worker(void* pool) {
    Pool* p = static_cast<Pool*>(pool);
    k3_float_mode_enter();
    uint32_t seen = p->wake.load(std::memory_order_acquire);
    for (;;) {
        if (p->stop.load(std::memory_order_acquire)) return nullptr;
        if (join(p)) {
            if (p->seats.fetch_sub(1, std::memory_order_relaxed) > 0) take_pieces(p);
            leave(p);
        }
        for (int i = 0; i < kSpin && p->wake.load(std::memory_order_acquire) == seen; ++i) pause_core();
        while (p->wake.load(std::memory_order_acquire) == seen && !p->stop.load(std::memory_order_acquire))
            futex_wait(&p->wake, seen);
        seen = p->wake.load(std::memory_order_acquire);
    }
}

// The child of a fork has one thread: the pool starts anew there, and the parent's memory is left as it is.
void after_fork_in_child() {
    new (&g_lock) pthread_mutex_t(PTHREAD_MUTEX_INITIALIZER);
    g_pool = nullptr;
}

Pool* pool() {
    pthread_mutex_lock(&g_lock);
    if (g_pool == nullptr) {
        static bool registered = false;
        if (!registered) {
            pthread_atfork(nullptr, nullptr, after_fork_in_child);
            registered = true;
        }
        g_pool = new (std::nothrow) Pool();
    }
    Pool* p = g_pool;
    pthread_mutex_unlock(&g_lock);
    return p;
}

// Called with `busy` held.  Signals stay with the threads of the program.
void grow(Pool* p, int wanted) {
    if (wanted > kMaxWorkers) wanted = kMaxWorkers;
    if (p->workers.load(std::memory_order_relaxed) >= wanted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int n = p->workers.load(std::memory_order_relaxed);
    while (n < wanted && pthread_create(&p->threads[n], nullptr, worker, p) == 0) ++n;
    p->workers.store(n, std::memory_order_relaxed);          // fewer than wanted is slower, not wrong
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void k3_pool_run(int threads, int64_t pieces, k3_task task, void* arg) {
    Pool* p = threads > 1 && pieces > 1 ? pool() : nullptr;
    if (p == nullptr || p->busy.exchange(true, std::memory_order_acquire)) {
        for (int64_t i = 0; i < pieces; ++i) task(arg, i);
        return;
    }
    int helpers = threads - 1;
    if (helpers > pieces - 1) helpers = static_cast<int>(pieces - 1);
    grow(p, helpers);
    p->task = task;
    p->arg = arg;
    p->pieces = pieces;
    p->next.store(0, std::memory_order_relaxed);
    p->seats.store(helpers, std::memory_order_relaxed);
    p->gate.store(kOpen, std::memory_order_release);
    p->wake.fetch_add(1, std::memory_order_release);
    futex_wake(&p->wake, helpers);
    take_pieces(p);
    uint32_t g = p->gate.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int i = 0; g != 0 && i < kSpin; ++i) {
        pause_core();
        g = p->gate.load(std::memory_order_acquire);
    }
    while (g != 0) {
        futex_wait(&p->gate, g);
        g = p->gate.load(std::memory_order_acquire);
    }
    p->busy.store(false, std::memory_order_release);
}

void k3_pool_hold() {
    pthread_mutex_lock(&g_lock);
    ++g_holders;
    pthread_mutex_unlock(&g_lock);
}

void k3_pool_release() {
    pthread_mutex_lock(&g_lock);
    Pool* p = --g_holders == 0 ? g_pool : nullptr;
    if (p != nullptr) g_pool = nullptr;
    pthread_mutex_unlock(&g_lock);
    if (p == nullptr) return;
    while (p->busy.exchange(true, std::memory_order_acquire)) usleep(100);   // the last run of a closed model
    p->stop.store(true, std::memory_order_release);
    p->wake.fetch_add(1, std::memory_order_release);
    futex_wake(&p->wake, kMaxWorkers);
    const int n = p->workers.load(std::memory_order_relaxed);
    for (int i = 0; i < n; ++i) pthread_join(p->threads[i], nullptr);
    delete p;
}

int k3_pool_workers() {
    pthread_mutex_lock(&g_lock);
    const int n = g_pool ? g_pool->workers.load(std::memory_order_relaxed) : 0;
    pthread_mutex_unlock(&g_lock);
    return n;
}
