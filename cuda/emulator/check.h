// SPDX-License-Identifier: MIT
//
// The checks of memory accesses.  In the checking build the kernels call check_access at every access that the
// compiler does not know to be private (hooks.cpp); in the fast build nothing calls it, and what is left are guard
// pages, poison, and the few functions here that both builds use.

#ifndef K3EMU_CHECK_H
#define K3EMU_CHECK_H

#include <stddef.h>
#include <stdint.h>

namespace k3emu {

enum class Access { kRead, kWrite, kAtomic };

extern const bool g_checking;            // written by build.py: the kernels of this library are instrumented

void check_access(uintptr_t address, size_t size, Access access, uintptr_t pc);

// From a kernel: reports an address that no device has and stops the launch; "reads 4 bytes" is what it `does`.
[[noreturn]] void bad_address(uintptr_t address, size_t size, const char* does, uintptr_t pc);
void report_address(uintptr_t address, size_t size, const char* does, uintptr_t pc);
// Both builds: device, pinned, shared or module memory, or it is a bad address.
void require_address(uintptr_t address, size_t size, uintptr_t pc);

// Shared memory of the kernel that runs: its static arrays, and the dynamic part.
bool in_shared(uintptr_t address, size_t size);
void shared_begin_launch(size_t dynamic_bytes);
void shared_begin_block();               // poison
void shared_end_launch();                // reports writes past the end of static shared memory
extern uintptr_t g_dynamic_range;        // where dynamic shared memory can be at all, with the guard page
extern size_t g_dynamic_range_size;
int shared_static_bytes(const char* kernel);
extern size_t g_static_bytes;            // of all kernels together, rounded up to 16: where the dynamic part's shadow starts
extern size_t g_dynamic_bytes;
// The place of a shared byte in shadow memory.
size_t shared_offset(uintptr_t address);

// Which bytes have been written.  Bytes of pinned memory always count as written.
void mark_written(uintptr_t address, size_t size);
void copy_written(uintptr_t to, uintptr_t from, size_t size);
void forget_range(uintptr_t address, size_t size);       // the memory was freed
void clear_shared_written();

// Shared bytes that an asynchronous copy may write at any time.
void set_pending(const void* shared, size_t bytes, uintptr_t pc);
void clear_pending(const void* shared, size_t bytes);

// race.cpp: who has touched a byte last, and whether that comes before the access of the thread that runs.
void race_begin_launch();
void race_begin_block();
void next_era();                         // after each barrier of the block
void sync_lanes(int warp, unsigned lanes);
void note_fence();
void note_atomic(uintptr_t address);
void race_check(bool shared, size_t offset, size_t size, Access access, uintptr_t pc);
void race_forget(size_t offset, size_t size);

// The addresses of this library: instructions, constants, __device__ variables.
extern uintptr_t g_image;
extern size_t g_image_size;
void find_image();

}  // namespace k3emu
#endif
