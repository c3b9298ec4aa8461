// SPDX-License-Identifier: MIT
//
// What g++ calls in code compiled with -fsanitize=thread and -fsanitize=bounds,alignment,.. : the functions of the
// sanitizers' interface, with the emulator's checks behind them instead of the sanitizers' libraries.

#include "block.h"
#include "check.h"
#include "report.h"
#include "status.h"

using namespace k3emu;

namespace {

void access(const void* p, size_t size, Access kind, uintptr_t pc) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    if (address & (size - 1)) {
        report("misaligned", {pc}, "thread %d accesses %zu bytes at @0 at the address 0x%zx",
               g_block.self ? g_block.self->id : -1, size, (size_t)address);
        if (g_block.self) stop_launch(kMisalignedAddress);
    }
    check_access(address, size, kind, pc);
}

void undefined(const char* what, uintptr_t pc) { report("undefined behaviour", {pc}, "%s at @0", what); }

}  // namespace

extern "C" {

#define K3EMU_ACCESS(SIZE)                                                                                         \
    void __tsan_read##SIZE(const void* p) { access(p, SIZE, Access::kRead, K3EMU_PC); }                            \
    void __tsan_write##SIZE(const void* p) { access(p, SIZE, Access::kWrite, K3EMU_PC); }                          \
    void __tsan_unaligned_read##SIZE(const void* p) { check_access((uintptr_t)p, SIZE, Access::kRead, K3EMU_PC); } \
    void __tsan_unaligned_write##SIZE(const void* p) { check_access((uintptr_t)p, SIZE, Access::kWrite, K3EMU_PC); }
K3EMU_ACCESS(1)
K3EMU_ACCESS(2)
K3EMU_ACCESS(4)
K3EMU_ACCESS(8)
K3EMU_ACCESS(16)
#undef K3EMU_ACCESS

void __tsan_read_range(const void* p, size_t n) { check_access((uintptr_t)p, n, Access::kRead, K3EMU_PC); }
void __tsan_write_range(const void* p, size_t n) { check_access((uintptr_t)p, n, Access::kWrite, K3EMU_PC); }
void __tsan_func_entry(const void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

void __ubsan_handle_out_of_bounds(const void*, const void* index) {
    const uintptr_t pc = K3EMU_PC;
    report("out of bounds", {pc}, "the index %ld at @0 is outside its array", (long)(intptr_t)index);
    stop_launch(kIllegalAddress);
}
void __ubsan_handle_type_mismatch_v1(const void*, const void* p) {
    const uintptr_t pc = K3EMU_PC;
    if (!p) bad_address(0, 1, "touches", pc);
    report("misaligned", {pc}, "the address 0x%zx at @0 does not suit the type that is read or written there",
           (size_t)(uintptr_t)p);
    stop_launch(kMisalignedAddress);
}
void __ubsan_handle_shift_out_of_bounds(const void*, const void*, const void*) {
    undefined("a shift by a negative number or by the width of the type", K3EMU_PC);
}
void __ubsan_handle_add_overflow(const void*, const void*, const void*) { undefined("an overflow of a sum", K3EMU_PC); }
void __ubsan_handle_sub_overflow(const void*, const void*, const void*) { undefined("an overflow of a difference", K3EMU_PC); }
void __ubsan_handle_mul_overflow(const void*, const void*, const void*) { undefined("an overflow of a product", K3EMU_PC); }
void __ubsan_handle_negate_overflow(const void*, const void*) { undefined("an overflow of a negation", K3EMU_PC); }
void __ubsan_handle_divrem_overflow(const void*, const void*, const void*) { undefined("a division by zero", K3EMU_PC); }

}  // extern "C"
