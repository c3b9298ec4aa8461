// SPDX-License-Identifier: MIT
//
// The functions that the emulator's library has besides the driver's: for tests, through ctypes or a header.
// Strings that are returned stay valid until the next k3emu_reset or k3emu_clear_reports.

#ifndef K3EMU_H
#define K3EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// 1 in the checking build, 0 in the fast one.
int k3emu_checking(void);

// 1 where host code that touches device memory faults: the processor has protection keys, and K3EMU_GUARD is not 0.
int k3emu_guards_host(void);

// Changes an option of README.md's table, by its name without K3EMU_ in lower case; -1 for an unknown name.
int k3emu_set(const char* option, uint64_t value);

// The nth call of an entry point from now on fails with `status` (0: one that suits it).  Names are the driver's, with
// or without _v2.  "kernel" is the nth kernel that runs, which ends as if it had faulted.  A call that frees something
// frees it all the same.  -1 for an unknown name.
int k3emu_fail(const char* entry, uint64_t nth, int status);
void k3emu_clear_failures(void);
size_t k3emu_failures_left(void);        // planned and not met yet

// Calls of an entry point by name, runs of a kernel by its own, or: allocations, frees, pinned_allocations, launches, graph_launches, kernels,
// synchronisations, fills, copies_in, copies_out, copies_within, copies_on_host, bytes_in, bytes_out, bytes_within,
// bytes_on_host.  What is captured is not counted, kernels are counted when they run.
uint64_t k3emu_count(const char* name);
void k3emu_clear_counts(void);
const char* k3emu_entry(size_t i);  // the names of all entry points; NULL after the last
const char* k3emu_kernel_name(size_t i);  // and of all kernels

// What was found wrong: "kind: sentence", with file and line.
size_t k3emu_report_count(void);
const char* k3emu_report(size_t i);
void k3emu_clear_reports(void);

// How many are alive of: device_memory, pinned_memory, registered_memory, streams, events, graphs, graph_execs,
// libraries, pools, contexts; and device_bytes, pinned_bytes.
uint64_t k3emu_live(const char* kind);
// The sum of the former; each kind and each allocation is reported as a leak.
uint64_t k3emu_leaks(void);

// As if the process had just loaded the library: everything is gone, options are read from the environment again.
void k3emu_reset(void);

#ifdef __cplusplus
}
#endif
#endif
