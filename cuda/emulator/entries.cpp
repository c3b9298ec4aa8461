// SPDX-License-Identifier: MIT
//
// cuGetProcAddress: which function a name means depends on the CUDA version that the caller was written for.  A name
// that had an older meaning (with 32-bit sizes, say) has none here below the version of its new one.

#include "entries.h"

#include <string.h>

#include <set>

#include "driver.h"

extern "C" {
// A name of its own for each symbol, since its arguments do not matter here.
#define X(NAME, SUFFIX, VERSION) void entry_##NAME##SUFFIX() __asm__(#NAME #SUFFIX);
#include "entries.inc"
#undef X
}

namespace {

struct Entry {
    const char* name;
    void (*function)();
    int version;
};
const Entry kEntries[] = {
#define X(NAME, SUFFIX, VERSION) {#NAME, entry_##NAME##SUFFIX, VERSION},
#include "entries.inc"
#undef X
};
constexpr size_t kCount = sizeof kEntries / sizeof kEntries[0];

}  // namespace

namespace k3emu {

std::string entry_name(const char* symbol) {
    std::string name = symbol;
    const size_t n = name.size();
    if (n > 3 && name[n - 3] == '_' && name[n - 2] == 'v' && name[n - 1] >= '2' && name[n - 1] <= '9') name.resize(n - 3);
    return name;
}

bool is_entry(const std::string& name) {
    for (const Entry& entry : kEntries) {
        if (name == entry.name) return true;
    }
    return false;
}

const char* entry_at(size_t i) { return i < kCount ? kEntries[i].name : nullptr; }

}  // namespace k3emu

using namespace k3emu;

// Flag 2 asks for per-thread default streams, which the emulator does not have.
K3EMU_API int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* found) {
    K3EMU_CALL(kAnyTime);
    if (!name || !function || flags > 2) return kInvalidValue;
    *function = nullptr;
    const Entry* best = nullptr;
    bool newer = false;
    for (const Entry& entry : kEntries) {
        if (strcmp(entry.name, name) != 0) continue;
        if (entry.version > version || entry.version > (int)options().driver) {
            newer = true;
        } else if (!best || entry.version > best->version) {
            best = &entry;
        }
    }
    if (found) *found = best ? 0 : newer ? 2 : 1;            // found, not at this version, not at all
    if (!best) return kNotFound;
    *function = reinterpret_cast<void*>(best->function);
    return kSuccess;
}
