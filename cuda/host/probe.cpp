// SPDX-License-Identifier: MIT
//
// Reads memory and does nothing else with it: the limit that a decode step is measured against.

#include "host.h"

namespace {

enum { PIECE = 1 << 20 };

struct Run {
    const char* start;
    int64_t bytes;
    uint64_t* sums;
};

typedef uint64_t words __attribute__((vector_size(16), aligned(1), may_alias));

void piece(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const words* p = (const words*)(run->start + i * PIECE);
    const int64_t n = (run->bytes - i * PIECE < PIECE ? run->bytes - i * PIECE : PIECE) / 128 * 8;
    words a = {}, b = {}, c = {}, d = {};
    for (int64_t j = 0; j < n; j += 8) {
        a ^= p[j] ^ p[j + 4];
        b ^= p[j + 1] ^ p[j + 5];
        c ^= p[j + 2] ^ p[j + 6];
        d ^= p[j + 3] ^ p[j + 7];
    }
    a ^= b ^ c ^ d;
    __atomic_fetch_xor(run->sums, a[0] ^ a[1], __ATOMIC_RELAXED);
}

}  // namespace

extern "C" uint64_t k3_probe_read(int threads, const void* start, int64_t bytes) {
    uint64_t sum = 0;
    Run run = {(const char*)start, bytes, &sum};
    k3_pool_run(threads, (bytes + PIECE - 1) / PIECE, piece, &run);
    return sum;
}
