// SPDX-License-Identifier: MIT
//
// One block of threads, run to its end: threads as fibers on one stack each, in the order of the seed, each until it
// waits.  A barrier or a warp function suspends the thread; the last one to arrive lets the others go on.
// One block runs at a time in the whole process, so the block is a global.

#ifndef K3EMU_BLOCK_H
#define K3EMU_BLOCK_H

#include "device.h"
#include "fiber.h"
#include "options.h"

namespace k3emu {

enum : int { kWarp = 32, kMaxWarps = kMaxThreads / kWarp };
enum State : unsigned char { kReady = 1, kAtBarrier, kAtWarp, kDone };

// The last lane to arrive at a warp function computes for all: lanes are the bits of `arrived`, operands theirs.
typedef void (*WarpFunction)(int warp, unsigned arrived, void* const* operands);

struct alignas(64) Thread : k3emu_thread {     // one line of the cache, as a switch reads all of it
    short id, warp, lane, position;
    Context context;
    uintptr_t pc;                        // of the barrier or warp function where it waits
    void* operand;                       // of the warp function
};

struct WarpMeeting {                     // lanes that wait for each other
    unsigned mask = 0, arrived = 0;
    WarpFunction function = nullptr;
};

struct Warp {
    unsigned live = 0;                   // lanes that have not left the kernel
    unsigned active = 0;                 // meetings under way
    WarpMeeting meetings[kWarp];
};

struct Block {
    int threads = 0, live = 0;
    int cursor = 0;                      // position of the thread that runs
    Thread* self = nullptr;
    Thread* at[kMaxThreads];             // thread by position
    unsigned char state[kMaxThreads + 1];        // of the thread at a position
    Thread all[kMaxThreads];             // thread by its number
    Warp warps[kMaxWarps];
    Context main;
    int status = 0;                      // of the launch, where it was stopped
    int at_barrier = 0;
    uintptr_t barrier_pc = 0;            // where the first thread waits
    int votes = 0, vote_result = 0;
    void (*entry)() = nullptr;
    Random random;
};

extern Block g_block;

// Runs `entry` once per thread of a block of `size`; 0, or the status with which a thread stopped it.
int run_block(const dim3& size, void (*entry)(), uint64_t schedule);

// From a thread of the block: stops the launch, all threads at once; does not return.
[[noreturn]] void stop_launch(int status);
// Lets another thread of the block run, if one can; the order is the seed's.
void yield_thread();
// Waits until all live lanes of `mask` have called it with the same function.
void meet(unsigned mask, WarpFunction function, void* operand, uintptr_t pc);

#define K3EMU_PC ((uintptr_t)__builtin_return_address(0) - 1)

}  // namespace k3emu
#endif
