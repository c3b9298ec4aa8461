// SPDX-License-Identifier: MIT
//
// How the emulator behaves: read from the environment when it is loaded and at k3emu_reset, changed by k3emu_set.
// README.md describes each variable.

#ifndef K3EMU_OPTIONS_H
#define K3EMU_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

namespace k3emu {

struct Options {
    uint64_t seed = 0;              // K3EMU_SEED: 0 is program order
    uint64_t preempt = 0;           // K3EMU_PREEMPT: one access in so many lets another thread run; checking build
    uint64_t deferred = 1;          // K3EMU_DEFERRED: streams run when something waits for them
    uint64_t watchdog_ms = 60000;   // K3EMU_WATCHDOG_MS: processor time that one kernel may take
    uint64_t memory = 8ull << 30;   // K3EMU_MEMORY: bytes of the device
    uint64_t devices = 1;           // K3EMU_DEVICES
    uint64_t arch = 90;             // K3EMU_ARCH: compute capability, major * 10 + minor
    uint64_t driver = 13000;        // K3EMU_DRIVER: what cuDriverGetVersion says
    uint64_t init = 0;              // K3EMU_INIT: the status of cuInit
    uint64_t guard = 1;             // K3EMU_GUARD: host code that touches device memory faults; read once
    uint64_t log = 0;               // K3EMU_LOG: reports go to stderr as well
};

Options& options();
void read_options();                                   // from the environment
bool set_option(const char* name, uint64_t value);     // "seed", "preempt", ...; false for any other name

// A small generator: the same seed gives the same schedule everywhere.
struct Random {
    uint64_t state = 1;
    void seed(uint64_t a, uint64_t b);
    uint64_t next();
    uint64_t below(uint64_t n) { return next() % n; }
};
Random& schedule();              // of streams and graphs; begins anew whenever the seed is set

}  // namespace k3emu
#endif
