// SPDX-License-Identifier: MIT
//
// The schedule of a block, barriers, and the meetings of lanes.

#include "block.h"

#include <string.h>

#include "async.h"
#include "check.h"
#include "report.h"
#include "status.h"

using namespace k3emu;

extern "C" {
const k3emu_thread* k3emu_self = nullptr;
k3emu_place k3emu_here;
unsigned char* k3emu_dynamic = nullptr;
}

namespace k3emu {

Block g_block;

namespace {

int next_ready(int from) {               // the first position after `from`, around, whose thread can run; -1 for none
    Block& b = g_block;
    if (b.state[from + 1] == kReady) return from + 1;         // state[threads] is never ready
    const void* p = memchr(b.state + from + 1, kReady, (size_t)(b.threads - from - 1));
    if (!p) p = memchr(b.state, kReady, (size_t)(from + 1));
    return p ? (int)(static_cast<const unsigned char*>(p) - b.state) : -1;
}

void run_at(int position) {              // switches to that thread; returns when this one is run again
    Block& b = g_block;
    if (position == b.cursor) return;
    Thread* from = b.self;
    b.cursor = position;
    b.self = b.at[position];
    k3emu_self = b.self;
    switch_context(&from->context, &b.self->context);
}

// Nothing can run, but threads are left: says where they wait.
[[noreturn]] void stuck() {
    Block& b = g_block;
    const Thread* groups[3] = {};
    int sizes[3] = {0, 0, 0}, n = 0;
    for (int i = 0; i < b.threads; ++i) {
        const Thread& t = b.all[i];
        if (b.state[t.position] == kDone) continue;
        int g = 0;
        while (g < n && groups[g]->pc != t.pc) ++g;
        if (g == 3) continue;
        if (g == n) groups[n++] = &t;
        ++sizes[g];
    }
    const uintptr_t a = groups[0]->pc, c = groups[n > 1 ? 1 : 0]->pc;
    if (n > 1) {
        report("barrier divergence", {a, c}, "%d threads wait at @0 and %d at @1, and none can go on", sizes[0], sizes[1]);
    } else {
        report("barrier divergence", {a}, "%d threads wait at @0 for %d that have left or are not named", sizes[0],
               b.threads - sizes[0]);
    }
    stop_launch(kLaunchTimeout);
}

void wait(State state, uintptr_t pc) {
    Block& b = g_block;
    b.self->pc = pc;
    b.state[b.cursor] = state;
    const int next = next_ready(b.cursor);
    if (next < 0) stuck();
    run_at(next);
}

void release_barrier() {
    Block& b = g_block;
    for (int w = 0; w * kWarp < b.threads; ++w) {
        const unsigned all = b.threads - w * kWarp >= kWarp ? ~0u : (1u << (b.threads - w * kWarp)) - 1;
        if (b.warps[w].live != 0 && b.warps[w].live != all) {
            report("barrier divergence", {b.barrier_pc},
                   "lanes of warp %d left the kernel before the barrier at @0 where the others wait", w);
        }
    }
    if (b.at_barrier == b.threads) {
        memset(b.state, kReady, (size_t)b.threads);
    } else {
        for (int i = 0; i < b.threads; ++i) {
            if (b.state[i] == kAtBarrier) b.state[i] = kReady;
        }
    }
    b.vote_result = b.votes;
    b.votes = 0;
    b.at_barrier = 0;
    next_era();
}

int barrier(int predicate, uintptr_t pc) {
    Block& b = g_block;
    b.votes += predicate;
    if (b.at_barrier++ == 0) b.barrier_pc = pc;
    // One barrier in the source can be two in the code, so addresses that differ say little; lines do.
    if (pc != b.barrier_pc && where(pc) != where(b.barrier_pc)) {
        report("barrier divergence", {b.barrier_pc, pc}, "threads of a block wait at different barriers, @0 and @1");
    }
    if (b.at_barrier == b.live) {
        b.self->pc = pc;
        b.state[b.cursor] = kAtBarrier;
        release_barrier();
    } else {
        wait(kAtBarrier, pc);
    }
    return b.vote_result;
}

void finish_meeting(int warp, int meeting) {
    Block& b = g_block;
    const WarpMeeting* m = &b.warps[warp].meetings[meeting];
    void* operands[kWarp] = {};
    for (unsigned left = m->arrived; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        Thread& t = b.all[warp * kWarp + lane];
        operands[lane] = t.operand;
        b.state[t.position] = kReady;
    }
    b.warps[warp].active &= ~(1u << meeting);
    m->function(warp, m->arrived, operands);
}

void leave() {                           // the end of a thread; never returns
    Block& b = g_block;
    Thread& t = *b.self;
    async_at_exit(t.id);
    b.state[b.cursor] = kDone;
    --b.live;
    Warp& warp = b.warps[t.warp];
    warp.live &= ~(1u << t.lane);
    for (unsigned left = warp.active; left; left &= left - 1) {
        const int i = __builtin_ctz(left);
        if ((warp.meetings[i].mask & warp.live) == warp.meetings[i].arrived) finish_meeting(t.warp, i);
    }
    if (b.live > 0 && b.at_barrier == b.live) release_barrier();
    if (b.live == 0) {
        switch_context(&t.context, &b.main);
    } else {
        const int next = next_ready(b.cursor);
        if (next < 0) stuck();
        run_at(next);
    }
    __builtin_unreachable();
}

void thread_main() {
    g_block.entry();
    leave();
}

}  // namespace

int run_block(const dim3& size, void (*entry)(), uint64_t schedule) {
    Block& b = g_block;
    b.threads = b.live = (int)(size.x * size.y * size.z);
    b.status = b.at_barrier = b.votes = 0;
    b.entry = entry;
    b.random.seed(options().seed, schedule);
    for (int i = 0; i < b.threads; ++i) {
        Thread& t = b.all[i];
        t.index = uint3{(unsigned)i % size.x, (unsigned)i / size.x % size.y, (unsigned)i / (size.x * size.y)};
        t.id = (short)i;
        t.warp = (short)(i / kWarp);
        t.lane = (short)(i % kWarp);
        t.pc = 0;
        b.at[i] = &t;
        b.state[i] = kReady;
        start_context(&t.context, (size_t)i, thread_main);
    }
    if (options().seed) {
        for (int i = b.threads - 1; i > 0; --i) {
            const int j = (int)b.random.below((uint64_t)i + 1);
            Thread* other = b.at[i];
            b.at[i] = b.at[j];
            b.at[j] = other;
        }
    }
    for (int i = 0; i < b.threads; ++i) b.at[i]->position = (short)i;
    b.state[b.threads] = kDone;
    async_begin_block();
    for (int w = 0; w * kWarp < b.threads; ++w) {
        const int lanes = b.threads - w * kWarp;
        b.warps[w].live = lanes >= kWarp ? ~0u : (1u << lanes) - 1;
        b.warps[w].active = 0;
    }
    b.cursor = 0;
    b.self = b.at[0];
    k3emu_self = b.self;
    switch_context(&b.main, &b.self->context);
    return b.status;
}

void stop_launch(int status) {
    Block& b = g_block;
    b.status = status;
    switch_context(&b.self->context, &b.main);       // the stacks of all threads are abandoned as they are
    __builtin_unreachable();
}

void yield_thread() {
    Block& b = g_block;
    const int from = options().seed ? (int)b.random.below((uint64_t)b.threads) : b.cursor;
    const int next = next_ready(from);
    if (next >= 0) run_at(next);
}

void meet(unsigned mask, WarpFunction function, void* operand, uintptr_t pc) {
    Block& b = g_block;
    Thread& t = *b.self;
    const unsigned me = 1u << t.lane;
    if (!(mask & me)) {
        report("warp divergence", {pc}, "the mask 0x%08x of a warp function at @0 does not name lane %d, which called it", mask,
               t.lane);
        stop_launch(kLaunchFailed);
    }
    Warp& warp = b.warps[t.warp];
    int i = -1;
    for (unsigned left = warp.active; left && i < 0; left &= left - 1) {
        if (warp.meetings[__builtin_ctz(left)].mask == mask) i = __builtin_ctz(left);
    }
    if (i < 0) {
        i = __builtin_ctz(~warp.active);
        warp.active |= 1u << i;
        warp.meetings[i] = WarpMeeting{mask, 0, function};
    }
    WarpMeeting& m = warp.meetings[i];
    if (m.function != function) {
        const uintptr_t other = b.all[t.warp * kWarp + __builtin_ctz(m.arrived)].pc;
        report("warp divergence", {other, pc}, "lanes of one warp meet in different warp functions, at @0 and at @1");
        stop_launch(kLaunchFailed);
    }
    m.arrived |= me;
    t.operand = operand;
    if (m.arrived == (mask & warp.live)) {
        finish_meeting(t.warp, i);
    } else {
        wait(kAtWarp, pc);
    }
}

}  // namespace k3emu

extern "C" {
void k3emu_barrier() { barrier(0, K3EMU_PC); }
int k3emu_barrier_count(int predicate) { return barrier(predicate, K3EMU_PC); }
void k3emu_nap() {
    g_block.self->pc = K3EMU_PC;
    yield_thread();
}
void k3emu_trap() {
    report("trap", {K3EMU_PC}, "__trap at @0");
    stop_launch(kIllegalInstruction);
}
}
