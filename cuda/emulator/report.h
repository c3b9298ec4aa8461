// SPDX-License-Identifier: MIT
//
// What the emulator found wrong.  A report is a kind ("race", "out of bounds", ..) and a sentence; places in the
// code are kept as addresses and become file and line when somebody reads the report.

#ifndef K3EMU_REPORT_H
#define K3EMU_REPORT_H

#include <stddef.h>
#include <stdint.h>

#include <initializer_list>
#include <string>

namespace k3emu {

// `format` is printf's, with @0, @1 .. for the places.  The same kind at the same places is reported once.
__attribute__((format(printf, 3, 4))) void report(const char* kind, std::initializer_list<uintptr_t> places, const char* format,
                                                  ...);

size_t report_count();
const char* report_text(size_t i);       // "kind: sentence"; stays valid until clear_reports
void clear_reports();

// "file:line" of the innermost frame in a .cu file, for the address of an instruction of this library.
const std::string& where(uintptr_t pc);

// The name of the kernel that runs now, or "".
extern const char* g_kernel_name;

// Code that must not be left half-way, whatever a signal finds: it is counted up while it runs.
extern volatile int g_no_escape;
struct NoEscape {
    NoEscape() { g_no_escape = g_no_escape + 1; }
    ~NoEscape() { g_no_escape = g_no_escape - 1; }
};

}  // namespace k3emu
#endif
