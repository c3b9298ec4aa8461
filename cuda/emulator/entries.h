// SPDX-License-Identifier: MIT
//
// The entry points by name.

#ifndef K3EMU_ENTRIES_H
#define K3EMU_ENTRIES_H

#include <stddef.h>

#include <string>

namespace k3emu {

std::string entry_name(const char* symbol);      // without _v2, _v3, ..
bool is_entry(const std::string& name);
const char* entry_at(size_t i);                  // NULL after the last

}  // namespace k3emu
#endif
