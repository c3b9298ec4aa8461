// SPDX-License-Identifier: MIT
//
// Running a kernel: the kernels that were compiled in, and a launch from its first block to its last.

#ifndef K3EMU_LAUNCH_H
#define K3EMU_LAUNCH_H

#include <stddef.h>

#include <string>
#include <vector>

#include "device.h"
#include "status.h"

namespace k3emu {

struct Launch {
    const k3emu_kernel* kernel;
    dim3 grid, block;
    unsigned dynamic_bytes;
    std::vector<unsigned char> arguments;        // laid out as the kernel's parameters
};

enum : unsigned { kMaxDynamic = 232448, kDefaultDynamic = 48 * 1024 };     // of compute capability 9.0

const k3emu_kernel* find_kernel(const std::string& name);
const std::vector<const k3emu_kernel*>& all_kernels();
size_t parameter_offset(const k3emu_kernel* kernel, int i);
size_t parameter_bytes(const k3emu_kernel* kernel);

Status run_launch(const Launch& launch);         // the statuses that a kernel can end with
void forget_launches();                          // the schedules of a seed begin anew

}  // namespace k3emu
#endif
