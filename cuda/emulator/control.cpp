// SPDX-License-Identifier: MIT
//
// What tests ask the emulator itself: counters, faults on command, reports, what is still alive, options.
// k3emu.h declares these functions.

#include "k3emu.h"

#include <stdlib.h>
#include <string.h>

#include <map>

#include "block.h"
#include "check.h"
#include "driver.h"
#include "entries.h"
#include "host_memory.h"
#include "memory.h"

using namespace k3emu;

namespace {

struct Plan {
    uint64_t calls_left;                 // the call that brings it to 0 fails
    Status status;
};

std::map<std::string, uint64_t>& counters() {
    static std::map<std::string, uint64_t> all;
    return all;
}
std::map<std::string, Plan>& plans() {
    static std::map<std::string, Plan> all;
    return all;
}

Status default_status(const std::string& entry) {
    if (entry == "kernel") return kIllegalAddress;
    return entry.find("Alloc") != std::string::npos || entry.find("Create") != std::string::npos ? kOutOfMemory : kUnknown;
}

Status step_plan(const std::string& entry) {
    auto plan = plans().find(entry);
    if (plan == plans().end() || --plan->second.calls_left > 0) return kSuccess;
    const Status status = plan->second.status;
    plans().erase(plan);
    return status;
}

bool plan_failure(const char* entry, uint64_t nth, int status) {
    const std::string name = entry_name(entry);
    if (nth == 0 || (name != "kernel" && !is_entry(name))) return false;
    plans()[name] = Plan{nth, status ? (Status)status : default_status(name)};
    return true;
}

void read_plans() {                                          // "cuMemAlloc:3:2,cuLaunchKernel:1"
    plans().clear();
    const char* text = getenv("K3EMU_FAIL");
    std::string all = text ? text : "";
    for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find(',', at), all.size());
        const std::string item = all.substr(at, end - at);
        const size_t first = item.find(':'), second = first == std::string::npos ? first : item.find(':', first + 1);
        const uint64_t nth = first == std::string::npos ? 1 : strtoull(item.c_str() + first + 1, nullptr, 10);
        const int status = second == std::string::npos ? 0 : atoi(item.c_str() + second + 1);
        if (!plan_failure(item.substr(0, first).c_str(), nth, status)) {
            report("option", {}, "K3EMU_FAIL names %s, which is no entry point", item.c_str());
        }
        at = end + 1;
    }
}

struct Start {                                               // when the library is loaded
    Start() {
        read_options();
        read_plans();
    }
} g_start;

template <class T> uint64_t count_objects() {
    uint64_t n = 0;
    for (const auto& object : all_objects()) n += dynamic_cast<T*>(object.get()) != nullptr;
    return n;
}

uint64_t pools_made() {
    uint64_t n = 0;
    for (const auto& object : all_objects()) {
        const Pool* pool = dynamic_cast<Pool*>(object.get());
        n += pool && !pool->is_default;
    }
    return n;
}

struct Kind {
    const char* name;
    uint64_t (*count)();
};
const Kind kKinds[] = {
    {"device_memory", [] { return (uint64_t)live_count(Space::kDevice); }},
    {"pinned_memory", [] { return (uint64_t)live_count(Space::kPinned); }},
    {"registered_memory", [] { return (uint64_t)registered_count(); }},
    {"streams", count_objects<Stream>},
    {"events", count_objects<Event>},
    {"graphs", count_objects<Graph>},
    {"graph_execs", count_objects<GraphExec>},
    {"libraries", count_objects<Library>},
    {"pools", pools_made},
    {"contexts", count_objects<Context_>},
};

class Locked {
public:
    Locked() { lock_driver(); }
    ~Locked() { unlock_driver(); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
};

}  // namespace

namespace k3emu {

uint64_t& counter(const char* name) { return counters()[name]; }

Status count_call(const char* entry) {
    const std::string name = entry_name(entry);
    ++counters()[name];
    return step_plan(name);
}

Status count_kernel(const char* name) {
    ++counters()["kernels"];
    ++counters()[name];
    return step_plan("kernel");
}

}  // namespace k3emu

K3EMU_API int k3emu_checking() { return g_checking; }

K3EMU_API int k3emu_guards_host() {
    Locked lock;
    return guards_host();
}

K3EMU_API int k3emu_set(const char* option, uint64_t value) {
    Locked lock;
    return set_option(option, value) ? 0 : -1;
}

K3EMU_API int k3emu_fail(const char* entry, uint64_t nth, int status) {
    Locked lock;
    return plan_failure(entry, nth, status) ? 0 : -1;
}

K3EMU_API void k3emu_clear_failures() {
    Locked lock;
    plans().clear();
}

K3EMU_API size_t k3emu_failures_left() {
    Locked lock;
    return plans().size();
}

K3EMU_API uint64_t k3emu_count(const char* name) {
    Locked lock;
    auto found = counters().find(entry_name(name));
    return found == counters().end() ? 0 : found->second;
}

K3EMU_API void k3emu_clear_counts() {
    Locked lock;
    counters().clear();
}

K3EMU_API const char* k3emu_entry(size_t i) { return entry_at(i); }

K3EMU_API const char* k3emu_kernel_name(size_t i) { return i < all_kernels().size() ? all_kernels()[i]->name : nullptr; }

K3EMU_API size_t k3emu_report_count() {
    Locked lock;
    check_tails();
    return report_count();
}

K3EMU_API const char* k3emu_report(size_t i) {
    Locked lock;
    return report_text(i);
}

K3EMU_API void k3emu_clear_reports() {
    Locked lock;
    clear_reports();
}

K3EMU_API uint64_t k3emu_live(const char* kind) {
    Locked lock;
    if (strcmp(kind, "device_bytes") == 0) return live_bytes(Space::kDevice);
    if (strcmp(kind, "pinned_bytes") == 0) return live_bytes(Space::kPinned);
    for (const Kind& k : kKinds) {
        if (strcmp(k.name, kind) == 0) return k.count();
    }
    return ~0ull;
}

K3EMU_API uint64_t k3emu_leaks() {
    Locked lock;
    uint64_t total = 0;
    for (const Kind& k : kKinds) {
        const uint64_t n = k.count();
        total += n;
        if (n) report("leak", {}, "%llu of %s are alive", (unsigned long long)n, k.name);
    }
    int listed = 0;
    for (const Allocation* a = next_live(0); a && listed < 20; a = next_live(a->serial), ++listed) {
        report("leak", {}, "%s was not freed", describe(a));
    }
    return total;
}

K3EMU_API void k3emu_reset() {
    Locked lock;
    forget_contexts();
    while (Allocation* a = next_live(0)) release(a);
    forget_registered();
    forget_objects();
    forget_launches();
    counters().clear();
    read_options();
    clear_reports();
    read_plans();
}
