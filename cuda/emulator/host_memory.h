// SPDX-License-Identifier: MIT
//
// Host memory that was registered with the driver (cuMemHostRegister): pinned, and usable by kernels.

#ifndef K3EMU_HOST_MEMORY_H
#define K3EMU_HOST_MEMORY_H

#include <stddef.h>
#include <stdint.h>

namespace k3emu {

bool register_host(uintptr_t start, size_t size);        // false where it overlaps a registered range
bool unregister_host(uintptr_t start);
bool find_registered(uintptr_t address, size_t size);
size_t registered_count();
void forget_registered();

}  // namespace k3emu
#endif
