// SPDX-License-Identifier: MIT
//
// Device memory and pinned host memory: one range of addresses, reserved once.  An allocation ends at a page without
// access, starts at a multiple of 256, is filled with 0xFF (a NaN in every float format), and its addresses are
// never given out again, so that a read past the end or after the free stops the kernel even in the fast build.

#ifndef K3EMU_MEMORY_H
#define K3EMU_MEMORY_H

#include <stddef.h>
#include <stdint.h>

namespace k3emu {

enum class Space { kDevice, kPinned };
enum : unsigned char { kPoison = 0xff };

struct Allocation {
    uintptr_t start;
    size_t size;
    uintptr_t pages;             // the mapping: start lies in it, and its end is the next multiple of 256 after size
    size_t pages_size;
    Space space;
    void* context;               // that it was made in
    uint64_t serial;             // 1 for the first of the process
    bool live;
};

// The arena, for quick tests of an address.
extern uintptr_t g_arena;
extern size_t g_arena_size;
inline bool in_arena(uintptr_t a) { return a - g_arena < g_arena_size; }

Allocation* allocate(Space space, size_t size, void* context);   // NULL when the addresses are used up
void release(Allocation* allocation);
// The allocation that an address belongs or has belonged to, or NULL; find_live only a live one, with all the bytes.
Allocation* find_allocation(uintptr_t address);
Allocation* find_live(uintptr_t address, size_t size);
size_t live_bytes(Space space);
size_t live_count(Space space);
Allocation* next_live(uint64_t after_serial);                    // in order of allocation; NULL at the end

// Where the processor has protection keys, host code that touches device memory faults, as it does beside a real
// device: access is open to a thread only while it is inside a call.
void open_device_memory();
void close_device_memory();
bool guards_host();

// Reports writes into the bytes between the end of an allocation and its guard page.
void check_tails();
// "allocation 3 (1024 bytes of device memory, freed)", in a buffer that the next calls reuse.
const char* describe(const Allocation* allocation);

}  // namespace k3emu
#endif
