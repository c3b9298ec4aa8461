// SPDX-License-Identifier: MIT
//
// The thread pool by itself, so that ThreadSanitizer sees every access of it and nothing else: each piece runs exactly
// once, a run returns only when its pieces are done, callers that find the pool busy work alone, the pool stops and
// starts again, and a forked child has a pool of its own.

#include "host/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <vector>

// dispatch.cpp names these; no op is called here.
extern "C" void k3_base_table(struct k3_ops*) {}
extern "C" void k3_avx2_table(struct k3_ops*) {}
extern "C" void k3_avx512_table(struct k3_ops*) {}

namespace {

#define CHECK(WHAT)                                                \
    do {                                                           \
        if (!(WHAT)) {                                             \
            printf("pool_test:%d: not so: %s\n", __LINE__, #WHAT); \
            exit(1);                                               \
        }                                                          \
    } while (0)

// Plain memory, written by whichever thread has the piece and read by the caller afterwards: a run that returned too
// early, or a piece that ran twice, is a data race or a wrong count.
struct Job {
    std::vector<int64_t> count;
    int64_t spin;
};

void piece(void* arg, int64_t i) {
    Job* job = static_cast<Job*>(arg);
    volatile int64_t waste = 0;
    for (int64_t n = 0; n < job->spin * (i % 3); ++n) waste = waste + 1;
    job->count[static_cast<size_t>(i)] += 1;
}

void run_once(int threads, int64_t pieces, int64_t spin) {
    Job job;
    job.count.assign(static_cast<size_t>(pieces), 0);
    job.spin = spin;
    k3_pool_run(threads, pieces, piece, &job);
    for (int64_t n : job.count) CHECK(n == 1);
}

void counts() {
    k3_pool_hold();
    for (int64_t pieces : {0, 1, 2, 3, 7, 64, 1000})
        for (int threads : {1, 2, 3, 8})
            for (int i = 0; i < 20; ++i) run_once(threads, pieces, i);
    CHECK(k3_pool_workers() == 7);
    k3_pool_release();
    CHECK(k3_pool_workers() == 0);
}

// A run inside a run finds the pool busy.
void nested_piece(void* arg, int64_t i) {
    run_once(3, 5, 1);
    piece(arg, i);
}
void nested() {
    k3_pool_hold();
    Job job;
    job.count.assign(8, 0);
    job.spin = 1;
    k3_pool_run(3, 8, nested_piece, &job);
    for (int64_t n : job.count) CHECK(n == 1);
    k3_pool_release();
}

// Several callers, each of which holds the pool while it runs; between two holds the pool may stop and start.
void* caller(void* number) {
    const int me = static_cast<int>(reinterpret_cast<intptr_t>(number));
    for (int round = 0; round < 60; ++round) {
        k3_pool_hold();
        for (int i = 0; i < 10; ++i) run_once(2 + me % 3, 1 + (me * 7 + i * 5) % 40, i);
        k3_pool_release();
        if (round % 16 == me) usleep(1000);
    }
    return nullptr;
}
void callers() {
    pthread_t threads[5];
    for (intptr_t i = 0; i < 5; ++i) CHECK(pthread_create(&threads[i], nullptr, caller, reinterpret_cast<void*>(i)) == 0);
    for (pthread_t t : threads) pthread_join(t, nullptr);
    CHECK(k3_pool_workers() == 0);
}

// Signals are for the program's own threads.
std::atomic<int> g_signals{0};
std::atomic<bool> g_foreign{false};
pthread_t g_main;
void on_signal(int) {
    g_signals.fetch_add(1);
    if (!pthread_equal(pthread_self(), g_main)) g_foreign.store(true);
}
void signals() {
    g_main = pthread_self();
    struct sigaction action = {}, before;
    action.sa_handler = on_signal;
    CHECK(sigaction(SIGUSR1, &action, &before) == 0);
    k3_pool_hold();
    for (int i = 0; i < 50; ++i) {
        run_once(4, 64, 1);
        kill(getpid(), SIGUSR1);
    }
    k3_pool_release();
    for (int i = 0; i < 1000 && g_signals.load() == 0; ++i) usleep(1000);
    CHECK(g_signals.load() > 0 && !g_foreign.load());
    sigaction(SIGUSR1, &before, nullptr);
}

// The child of a process that has used the pool runs with workers of its own, and so does its child.
void forks(int depth) {
    k3_pool_hold();
    run_once(4, 100, 1);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);  // a hang is a failure
        CHECK(k3_pool_workers() == 0);
        run_once(4, 100, 1);
        CHECK(k3_pool_workers() == 3);
        if (depth > 0) forks(depth - 1);
        k3_pool_release();
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    run_once(4, 100, 1);
    k3_pool_release();
}

}  // namespace

int main() {
    counts();
    nested();
    callers();
    signals();
#if !defined(__SANITIZE_THREAD__)  // it cannot start threads in the child of a process with threads
    forks(1);
#endif
    printf("pool: all passed\n");
    return 0;
}
