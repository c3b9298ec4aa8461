// SPDX-License-Identifier: MIT
//
// cp.async: issue, commit, wait.

#include "async.h"

#include <string.h>

#include <vector>

#include "block.h"
#include "check.h"
#include "memory.h"
#include "report.h"
#include "status.h"

using namespace k3emu;

namespace {

struct AsyncCopy {
    unsigned char* shared;
    const unsigned char* global;
    unsigned bytes, from_global;
    uintptr_t pc;
};

struct InFlight {                        // of one thread
    std::vector<AsyncCopy> copies;       // oldest first
    std::vector<unsigned> groups;        // copies in each committed group, oldest first
};

InFlight g_in_flight[kMaxThreads];
int g_in_use = 0;                        // threads of the block up to the last that has used its entry

InFlight& mine() {
    const int id = g_block.self->id;
    if (id >= g_in_use) g_in_use = id + 1;
    return g_in_flight[id];
}

void carry_out(const AsyncCopy& c) {
    clear_pending(c.shared, c.bytes);
    memset(c.shared, 0, c.bytes);
    memcpy(c.shared, c.global, c.from_global);
    check_access((uintptr_t)c.shared, c.bytes, Access::kWrite, c.pc);
}

void wait_until(size_t groups_left) {
    NoEscape guard;
    InFlight& t = mine();
    size_t groups = 0, copies = 0;
    while (t.groups.size() - groups > groups_left) copies += t.groups[groups++];
    for (size_t i = 0; i < copies; ++i) carry_out(t.copies[i]);
    t.copies.erase(t.copies.begin(), t.copies.begin() + (long)copies);
    t.groups.erase(t.groups.begin(), t.groups.begin() + (long)groups);
}

}  // namespace

namespace k3emu {

void async_begin_block() {
    for (int i = 0; i < g_in_use; ++i) {
        g_in_flight[i].copies.clear();
        g_in_flight[i].groups.clear();
    }
    g_in_use = 0;
}

void async_at_exit(int thread) {
    if (thread >= g_in_use || g_in_flight[thread].copies.empty()) return;
    const std::vector<AsyncCopy>& copies = g_in_flight[thread].copies;
    report("async copy", {copies[0].pc}, "a thread ends with %zu copies in flight, the first issued at @0", copies.size());
    for (const AsyncCopy& c : copies) clear_pending(c.shared, c.bytes);
}

}  // namespace k3emu

extern "C" {

void k3emu_async_copy(void* shared, const void* global, unsigned bytes, unsigned from_global) {
    const uintptr_t pc = K3EMU_PC, to = (uintptr_t)shared, from = (uintptr_t)global;
    g_block.self->pc = pc;
    if (to % bytes || from % bytes) {
        report("misaligned", {pc}, "an asynchronous copy of %u bytes at @0 goes from 0x%zx to 0x%zx", bytes, from, to);
        stop_launch(kMisalignedAddress);
    }
    if (from_global > bytes || !in_shared(to, bytes)) {
        report("out of bounds", {pc}, "an asynchronous copy of %u bytes at @0 does not end in shared memory of the kernel",
               bytes);
        stop_launch(kIllegalAddress);
    }
    if (from_global > 0) {
        if (!find_live(from, from_global)) bad_address(from, from_global, "copies asynchronously", pc);
        check_access(from, from_global, Access::kRead, pc);
    }
    {
        NoEscape guard;
        check_access(to, bytes, Access::kWrite, pc);         // the copy may land at any time from now on
        memset(shared, kPoison, bytes);
        set_pending(shared, bytes, pc);
        mine().copies.push_back(
            AsyncCopy{static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), bytes, from_global, pc});
    }
}

void k3emu_async_commit() {
    NoEscape guard;
    InFlight& t = mine();
    size_t committed = 0;
    for (unsigned n : t.groups) committed += n;
    t.groups.push_back((unsigned)(t.copies.size() - committed));
}

void k3emu_async_wait(unsigned groups_left) { wait_until(groups_left); }

void k3emu_async_wait_all() {
    k3emu_async_commit();
    wait_until(0);
}

}  // extern "C"
