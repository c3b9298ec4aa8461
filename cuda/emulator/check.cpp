// SPDX-License-Identifier: MIT
//
// What an address is - device, pinned, shared, the thread's own stack, this library's data, or nothing a kernel may
// touch - and whether the bytes there have been written.

#include "check.h"

#include <link.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "block.h"
#include "host_memory.h"
#include "memory.h"
#include "report.h"
#include "status.h"
#include "symbols.h"

namespace k3emu {

uintptr_t g_image = 0;
size_t g_image_size = 0;
size_t g_static_bytes = 0;
size_t g_dynamic_bytes = 0;
uintptr_t g_dynamic_range = 0;
size_t g_dynamic_range_size = 0;

namespace {

constexpr size_t kShared = 512 * 1024;           // static of all kernels and dynamic of one, at most

unsigned char* g_written = nullptr;              // a bit per byte of the arena
unsigned char g_shared_written[kShared / 8];
uintptr_t g_pending[kShared / 4];                // by word: where the copy was issued, 0 for none
bool g_any_pending = false;
std::vector<const SharedArray*> g_own;           // that the kernel may use
std::vector<uint16_t> g_array_at;                // by 16 bytes of the static part: number of the array + 1

uintptr_t shared_start() { return reinterpret_cast<uintptr_t>(g_shared_start); }
bool in_static(uintptr_t a) { return a - shared_start() < g_static_bytes; }
bool in_dynamic(uintptr_t a) { return k3emu_dynamic && a - reinterpret_cast<uintptr_t>(k3emu_dynamic) < g_dynamic_bytes; }

bool all_set(const unsigned char* bits, size_t from, size_t n) {
    for (size_t i = from; i < from + n;) {
        const size_t in_byte = i % 8, count = std::min<size_t>(8 - in_byte, from + n - i);
        const unsigned mask = ((1u << count) - 1) << in_byte;
        if ((bits[i / 8] & mask) != mask) return false;
        i += count;
    }
    return true;
}

void set_all(unsigned char* bits, size_t from, size_t n) {
    const size_t end = from + n;
    while (from < end && from % 8) bits[from / 8] |= (unsigned char)(1u << from % 8), ++from;
    if (from < end) memset(bits + from / 8, 0xff, (end - from) / 8);
    for (size_t i = std::max(from, end / 8 * 8); i < end; ++i) bits[i / 8] |= (unsigned char)(1u << i % 8);
}

unsigned char* written_bits() {
    if (!g_written) {
        void* p = mmap(nullptr, g_arena_size / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) g_written = static_cast<unsigned char*>(p);
    }
    return g_written;
}

const char* verb(Access access) { return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "updates"; }

// The static array at an address; NULL for the space between arrays, and for the arrays of other kernels.
const SharedArray* array_at(uintptr_t a, bool any_kernel) {
    const uint16_t n = g_array_at[(a - shared_start()) / 16];
    if (n == 0) return nullptr;
    const SharedArray& array = shared_arrays()[n - 1];
    if (a >= array.end) return nullptr;
    return any_kernel || array.kernel.empty() || array.kernel == g_kernel_name ? &array : nullptr;
}

void map_arrays() {
    g_static_bytes = ((size_t)(g_shared_end - g_shared_start) + 15) / 16 * 16;
    g_array_at.assign(g_static_bytes / 16, 0);
    const std::vector<SharedArray>& arrays = shared_arrays();
    for (size_t n = 0; n < arrays.size(); ++n) {
        for (uintptr_t a = arrays[n].start; a < arrays[n].end; a += 16) g_array_at[(a - shared_start()) / 16] = (uint16_t)(n + 1);
    }
}

void check_pending(size_t offset, size_t size, Access access, uintptr_t pc) {
    for (size_t word = offset / 4; word <= (offset + size - 1) / 4; ++word) {
        if (!g_pending[word]) continue;
        report("async copy", {pc, g_pending[word]},
               "thread %d %s shared memory at @0 that a copy issued at @1 may still write: its wait is missing", g_block.self->id,
               verb(access));
        return;
    }
}

void check_memory(bool shared, unsigned char* written, size_t offset, size_t size, Access access, uintptr_t pc) {
    if (access != Access::kWrite && !all_set(written, offset, size)) {
        report("uninitialised read", {pc}, "thread %d %s %zu bytes of %s memory at @0 that nothing has written", g_block.self->id,
               verb(access), size, shared ? "shared" : "global");
        set_all(written, offset, size);
    }
    if (access != Access::kRead) set_all(written, offset, size);
    race_check(shared, offset, size, access, pc);
}

}  // namespace

void find_image() {
    if (g_image) return;
    map_arrays();
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
            uintptr_t low = ~(uintptr_t)0, high = 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
                const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
                low = std::min(low, start);
                high = std::max(high, start + info->dlpi_phdr[i].p_memsz);
            }
            const uintptr_t here = reinterpret_cast<uintptr_t>(&g_image);
            if (here < low || here >= high) return 0;
            g_image = low;
            g_image_size = high - low;
            return 1;
        },
        nullptr);
}

void report_address(uintptr_t address, size_t size, const char* does, uintptr_t pc) {
    const Allocation* a = find_allocation(address);
    if (a && !a->live) {
        report("use after free", {pc}, "a kernel %s %zu bytes at @0, in %s", does, size, describe(a));
    } else if (a && address >= a->start) {
        report("out of bounds", {pc}, "a kernel %s %zu bytes at @0, %zu bytes after the start of %s", does, size,
               (size_t)(address - a->start), describe(a));
    } else if (a) {
        report("out of bounds", {pc}, "a kernel %s %zu bytes at @0, %zu bytes before the start of %s", does, size,
               (size_t)(a->start - address), describe(a));
    } else if (in_arena(address)) {
        report("out of bounds", {pc}, "a kernel %s %zu bytes at @0, where nothing was allocated", does, size);
    } else if (address < 65536) {
        report("null pointer", {pc}, "a kernel %s %zu bytes at @0, at the address 0x%zx", does, size, (size_t)address);
    } else {
        report("host pointer", {pc}, "a kernel %s %zu bytes at @0, at 0x%zx, which is no device memory", does, size,
               (size_t)address);
    }
}

void bad_address(uintptr_t address, size_t size, const char* does, uintptr_t pc) {
    report_address(address, size, does, pc);
    stop_launch(kIllegalAddress);
}

void require_address(uintptr_t address, size_t size, uintptr_t pc) {
    if (find_live(address, size) || in_shared(address, size) || find_registered(address, size)) return;
    if (address - g_image < g_image_size && !in_static(address)) return;
    bad_address(address, size, "updates", pc);
}

bool in_shared(uintptr_t a, size_t size) {
    if (in_dynamic(a)) return a + size <= reinterpret_cast<uintptr_t>(k3emu_dynamic) + g_dynamic_bytes;
    if (!in_static(a)) return false;
    if (shared_arrays().empty()) return a + size <= reinterpret_cast<uintptr_t>(g_shared_end);
    const SharedArray* array = array_at(a, false);
    return array && a + size <= array->end;
}

size_t shared_offset(uintptr_t a) {
    return in_static(a) ? a - shared_start() : g_static_bytes + (a - reinterpret_cast<uintptr_t>(k3emu_dynamic));
}

void shared_begin_launch(size_t dynamic_bytes) {
    g_dynamic_bytes = dynamic_bytes;
    memset(g_shared_tail, kPoison, kSharedTail);
    g_own.clear();
    for (const SharedArray& array : shared_arrays()) {
        if (array.kernel.empty() || array.kernel == g_kernel_name) g_own.push_back(&array);
    }
}

void shared_begin_block() {
    for (const SharedArray* array : g_own) memset(reinterpret_cast<void*>(array->start), kPoison, array->end - array->start);
    if (shared_arrays().empty()) memset(g_shared_start, kPoison, (size_t)(g_shared_end - g_shared_start));
    if (g_dynamic_bytes) memset(k3emu_dynamic, kPoison, (g_dynamic_bytes + 15) / 16 * 16);
    if (g_checking) clear_shared_written();
}

void shared_end_launch() {
    const auto poison = [](const unsigned char* p, size_t n) {
        return std::all_of(p, p + n, [](int c) { return c == kPoison; });
    };
    if (!poison(g_shared_tail, kSharedTail)) {
        report("out of bounds", {}, "bytes after the end of all static shared arrays were written");
    }
    if (!poison(k3emu_dynamic + g_dynamic_bytes, (16 - g_dynamic_bytes % 16) % 16)) {
        report("out of bounds", {}, "bytes after the end of %zu bytes of dynamic shared memory were written", g_dynamic_bytes);
    }
}

void clear_shared_written() {
    memset(g_shared_written, 0, (g_static_bytes + g_dynamic_bytes) / 8 + 1);
    if (g_any_pending) memset(g_pending, 0, sizeof g_pending);
    g_any_pending = false;
}

int shared_static_bytes(const char* kernel) {
    size_t bytes = 0;
    for (const SharedArray& array : shared_arrays()) {
        if (array.kernel == kernel) bytes += array.end - array.start;
    }
    return (int)bytes;
}

void set_pending(const void* shared, size_t bytes, uintptr_t pc) {
    if (!g_checking) return;
    g_any_pending = true;
    const size_t offset = shared_offset(reinterpret_cast<uintptr_t>(shared));
    for (size_t i = 0; i < bytes; i += 4) g_pending[(offset + i) / 4] = pc;
}

void clear_pending(const void* shared, size_t bytes) { set_pending(shared, bytes, 0); }

void mark_written(uintptr_t address, size_t size) {
    if (g_checking && in_arena(address) && written_bits()) set_all(g_written, address - g_arena, size);
}

void copy_written(uintptr_t to, uintptr_t from, size_t size) {
    if (!g_checking || !in_arena(to) || !written_bits()) return;
    if (!in_arena(from) || find_allocation(from)->space == Space::kPinned) return mark_written(to, size);
    size_t a = to - g_arena, b = from - g_arena;
    for (const size_t end = a + size; a < end;) {
        if (a % 8 == 0 && b % 8 == 0 && end - a >= 8) {                // whole bytes of the map
            const size_t n = (end - a) / 8;
            memmove(g_written + a / 8, g_written + b / 8, n);
            a += 8 * n;
            b += 8 * n;
        } else {
            const unsigned bit = g_written[b / 8] >> b % 8 & 1u;
            g_written[a / 8] = (unsigned char)((g_written[a / 8] & ~(1u << a % 8)) | (bit << a % 8));
            ++a, ++b;
        }
    }
}

void forget_range(uintptr_t address, size_t size) {        // whole pages of the arena
    if (!g_checking || !g_written) return;
    const uintptr_t offset = address - g_arena;
    memset(g_written + offset / 8, 0, size / 8);
    race_forget(offset, size);
}

void check_access(uintptr_t address, size_t size, Access access, uintptr_t pc) {
    if (!g_checking || !g_block.self) return;
    if (in_stacks(address)) {
        if (stack_of(address) == (size_t)g_block.self->id) return;
        report("local memory", {pc}, "thread %d %s %zu bytes at @0 in the local memory of thread %zu", g_block.self->id,
               verb(access), size, stack_of(address));
        return;
    }
    const bool shared = in_static(address) || address - g_dynamic_range < g_dynamic_range_size;
    if (!shared && address - g_image < g_image_size) return;
    if (options().preempt && g_block.random.below(options().preempt) == 0) yield_thread();
    if (shared) {
        if (!in_shared(address, size)) {
            const SharedArray* array = in_static(address) ? array_at(address, true) : nullptr;
            report("out of bounds", {pc}, "thread %d %s %zu bytes at @0, %s%s", g_block.self->id, verb(access), size,
                   array ? "in shared memory of another kernel or past the end of " : "outside all shared arrays of the kernel",
                   array ? array->name.c_str() : "");
            stop_launch(kIllegalAddress);
        }
        const size_t offset = shared_offset(address);
        if (g_any_pending) check_pending(offset, size, access, pc);
        check_memory(true, g_shared_written, offset, size, access, pc);
    } else if (const Allocation* a = find_live(address, size)) {
        if (!written_bits()) return;
        if (a->space == Space::kPinned) set_all(g_written, address - g_arena, size);
        check_memory(false, g_written, address - g_arena, size, access, pc);
    } else if (!find_registered(address, size)) {
        bad_address(address, size, verb(access), pc);
    }
}

}  // namespace k3emu
