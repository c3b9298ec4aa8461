// SPDX-License-Identifier: MIT
//
// The arena of device and pinned memory.

#include "memory.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <set>

#include "check.h"
#include "options.h"
#include "report.h"

namespace k3emu {

uintptr_t g_arena = 0;
size_t g_arena_size = 0;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlign = 256;                       // what cuMemAlloc promises
constexpr size_t kArenaSize = 256ull << 30;

uintptr_t g_next = 0;                                // the first address that was never used
uint32_t* g_owner = nullptr;                         // [pages of the arena] serial of the allocation, 0 for none
std::deque<Allocation> g_all;                        // by serial - 1; entries stay, for messages about old pointers
std::map<uint64_t, Allocation*> g_live;
std::set<Allocation*> g_with_tail;                   // live, size no multiple of 256
size_t g_bytes[2] = {0, 0}, g_count[2] = {0, 0};

int g_key = -1;                                      // of protection, for device memory

struct sigaction g_before_host_fault;

void on_host_fault(int number, siginfo_t* info, void*) {
    const Allocation* a = find_allocation(reinterpret_cast<uintptr_t>(info->si_addr));
    if (a && a->live && a->space == Space::kDevice) {
        const char text[] = "k3emu: host code touches device memory; what follows is where\n";
        if (write(2, text, sizeof text - 1) < 0) _exit(1);
    }
    sigaction(number, &g_before_host_fault, nullptr);         // and once more, for whoever was there before
}

void make_key() {
    g_key = options().guard ? pkey_alloc(0, 0) : -1;
    if (g_key < 0) return;
    struct sigaction action = {};
    action.sa_sigaction = on_host_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &g_before_host_fault);
}

void* reserve(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

bool ready() {
    if (g_arena) return true;
    for (size_t size = kArenaSize; size >= (1ull << 30); size /= 2) {
        void* p = reserve(size, PROT_NONE);
        if (!p) continue;
        g_owner = static_cast<uint32_t*>(reserve(size / kPage * sizeof(uint32_t), PROT_READ | PROT_WRITE));
        if (!g_owner) return false;
        g_arena = reinterpret_cast<uintptr_t>(p);
        g_arena_size = size;
        g_next = g_arena + kPage;
        make_key();
        return true;
    }
    return false;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

uintptr_t tail_of(const Allocation& a) { return a.start + a.size; }

bool tail_is_whole(const Allocation& a) {
    const unsigned char* end = reinterpret_cast<const unsigned char*>(a.pages + a.pages_size);
    for (const unsigned char* p = reinterpret_cast<const unsigned char*>(tail_of(a)); p < end; ++p) {
        if (*p != kPoison) return false;
    }
    return true;
}

void check_tail(Allocation* a) {
    if (tail_is_whole(*a)) return;
    report("out of bounds", {}, "bytes after the end of %s were written", describe(a));
    memset(reinterpret_cast<void*>(tail_of(*a)), kPoison, a->pages + a->pages_size - tail_of(*a));
}

}  // namespace

Allocation* allocate(Space space, size_t size, void* context) {
    if (!ready()) return nullptr;
    const size_t used = round_up(size, kAlign), pages_size = round_up(used, kPage);
    if (pages_size + kPage > g_arena + g_arena_size - g_next) return nullptr;
    void* pages = reinterpret_cast<void*>(g_next);
    const int key = space == Space::kDevice ? g_key : -1;         // -1: none
    if (pkey_mprotect(pages, pages_size, PROT_READ | PROT_WRITE, key) != 0) return nullptr;
    memset(pages, kPoison, pages_size);
    const uint64_t serial = g_all.size() + 1;
    g_all.push_back(Allocation{g_next + pages_size - used, size, g_next, pages_size, space, context, serial, true});
    Allocation* a = &g_all.back();
    // The guard page belongs to the allocation before it, so that running past the end names the right one.
    for (size_t i = 0; i < pages_size / kPage + 1; ++i) g_owner[(g_next - g_arena) / kPage + i] = (uint32_t)serial;
    g_next += pages_size + kPage;
    g_live[serial] = a;
    if (size % kAlign) g_with_tail.insert(a);
    g_bytes[(int)space] += size;
    g_count[(int)space] += 1;
    return a;
}

void release(Allocation* a) {
    check_tail(a);
    // A fresh mapping without access joins its neighbours; changing the protection of this one would leave it apart,
    // and the kernel allows a process only so many.
    mmap(reinterpret_cast<void*>(a->pages), a->pages_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    forget_range(a->pages, a->pages_size);
    a->live = false;
    g_live.erase(a->serial);
    g_with_tail.erase(a);
    g_bytes[(int)a->space] -= a->size;
    g_count[(int)a->space] -= 1;
}

Allocation* find_allocation(uintptr_t address) {
    if (!in_arena(address)) return nullptr;
    const uint32_t serial = g_owner[(address - g_arena) / kPage];
    return serial ? &g_all[serial - 1] : nullptr;
}

Allocation* find_live(uintptr_t address, size_t size) {
    Allocation* a = find_allocation(address);
    return a && a->live && address >= a->start && size <= a->size && address - a->start <= a->size - size ? a : nullptr;
}

size_t live_bytes(Space space) { return g_bytes[(int)space]; }
size_t live_count(Space space) { return g_count[(int)space]; }

Allocation* next_live(uint64_t after_serial) {
    auto next = g_live.upper_bound(after_serial);
    return next == g_live.end() ? nullptr : next->second;
}

void open_device_memory() {
    if (g_key >= 0) pkey_set(g_key, 0);
}

void close_device_memory() {
    if (g_key >= 0) pkey_set(g_key, PKEY_DISABLE_ACCESS);
}

bool guards_host() { return ready() && g_key >= 0; }

void check_tails() {
    for (Allocation* a : g_with_tail) check_tail(a);
}

const char* describe(const Allocation* a) {
    static char text[4][160];
    static int turn = 0;
    char* out = text[turn++ % 4];
    if (!a) return "no allocation";
    snprintf(out, sizeof text[0], "allocation %llu (%zu bytes of %s memory%s)", (unsigned long long)a->serial, a->size,
             a->space == Space::kDevice ? "device" : "pinned host", a->live ? "" : ", freed");
    return out;
}

}  // namespace k3emu
