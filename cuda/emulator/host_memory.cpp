// SPDX-License-Identifier: MIT
//
// The ranges of registered host memory.

#include "host_memory.h"

#include <iterator>
#include <map>

namespace k3emu {

namespace {
std::map<uintptr_t, size_t> g_ranges;                    // start, size

std::map<uintptr_t, size_t>::iterator range_of(uintptr_t address) {
    auto after = g_ranges.upper_bound(address);
    if (after == g_ranges.begin()) return g_ranges.end();
    auto range = std::prev(after);
    return address - range->first < range->second ? range : g_ranges.end();
}
}  // namespace

bool register_host(uintptr_t start, size_t size) {
    auto after = g_ranges.lower_bound(start);
    if (range_of(start) != g_ranges.end() || (after != g_ranges.end() && after->first < start + size)) return false;
    g_ranges[start] = size;
    return true;
}

bool unregister_host(uintptr_t start) { return g_ranges.erase(start) == 1; }

bool find_registered(uintptr_t address, size_t size) {
    if (g_ranges.empty()) return false;
    auto range = range_of(address);
    return range != g_ranges.end() && address + size <= range->first + range->second;
}

size_t registered_count() { return g_ranges.size(); }
void forget_registered() { g_ranges.clear(); }

}  // namespace k3emu
