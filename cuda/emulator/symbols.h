// SPDX-License-Identifier: MIT
//
// The static shared arrays of all kernels, from the symbol table of this library.

#ifndef K3EMU_SYMBOLS_H
#define K3EMU_SYMBOLS_H

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

namespace k3emu {

struct SharedArray {
    uintptr_t start, end;
    std::string kernel;              // that declares it; "" where a device function does
    std::string name;
};

extern unsigned char* const g_shared_start;      // the section of all static shared memory
extern unsigned char* const g_shared_end;
extern unsigned char* const g_shared_tail;       // the last of it, which belongs to no kernel
enum : size_t { kSharedTail = 4096 };
// Sorted by address.  Empty where the library has no symbol table.
const std::vector<SharedArray>& shared_arrays();

}  // namespace k3emu
#endif
