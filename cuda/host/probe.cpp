// SPDX-License-Identifier: MIT
//
// Reads memory and does nothing else with it: the limit that a decode step is measured against.

#include "host.h"

namespace {

// Several streams at a time, as a multiplication has with its rows: with one, some processors read half as fast.
enum { PIECE = 1 << 20, STREAMS = 8 };

struct Run {
    const char* start;
    int64_t bytes;
    uint64_t* sums;
};

typedef uint64_t words __attribute__((vector_size(16), aligned(1), may_alias));

void piece(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const char* p = run->start + i * PIECE;
    const int64_t n = (run->bytes - i * PIECE < PIECE ? run->bytes - i * PIECE : PIECE) / (STREAMS * 16) * 16;   // of a stream
    words sum[STREAMS] = {};
    for (int64_t j = 0; j < n; j += 16)
        for (int s = 0; s < STREAMS; ++s) sum[s] ^= *(const words*)(p + s * n + j);
    for (int s = 1; s < STREAMS; ++s) sum[0] ^= sum[s];
    __atomic_fetch_xor(run->sums, sum[0][0] ^ sum[0][1], __ATOMIC_RELAXED);
}

}  // namespace

extern "C" uint64_t k3_probe_read(int threads, const void* start, int64_t bytes) {
    uint64_t sum = 0;
    Run run = {(const char*)start, bytes, &sum};
    k3_pool_run(threads, (bytes + PIECE - 1) / PIECE, piece, &run);
    return sum;
}
