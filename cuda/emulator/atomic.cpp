// SPDX-License-Identifier: MIT
//
// Atomic operations.  Fibers switch at calls only, so an operation is a plain read and write; what is left to do is to
// check the address, to tell the race check, and to let other threads run now and then, for those that spin.

#include <string.h>

#include "block.h"
#include "check.h"
#include "report.h"
#include "status.h"

using namespace k3emu;

namespace {

template <class T> T as(uint64_t bits) {
    T v;
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <class T> uint64_t bits_of(T v) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return bits;
}

template <class T> T arithmetic(int op, T old, T value) {
    switch (op) {
        case K3EMU_ADD: return old + value;
        case K3EMU_MIN: return value < old ? value : old;
        case K3EMU_MAX: return old < value ? value : old;
        default: return value;                               // exchange
    }
}

template <class T> uint64_t apply(int op, void* target, uint64_t value, uint64_t compare) {
    T old, now;
    memcpy(&old, target, sizeof old);
    const uint64_t bits = bits_of(old);
    switch (op) {
        case K3EMU_AND: now = as<T>(bits & value); break;
        case K3EMU_OR: now = as<T>(bits | value); break;
        case K3EMU_XOR: now = as<T>(bits ^ value); break;
        case K3EMU_SWAP_IF: now = bits == compare ? as<T>(value) : old; break;
        default: now = arithmetic(op, old, as<T>(value));
    }
    memcpy(target, &now, sizeof now);
    return bits;
}

uint64_t add_i32(void* target, uint64_t value) {             // wraps around, as on the device
    uint32_t old;
    memcpy(&old, target, 4);
    const uint32_t now = old + (uint32_t)value;
    memcpy(target, &now, 4);
    return old;
}

}  // namespace

extern "C" {

uint64_t k3emu_atomic(int op, int type, void* target, uint64_t value, uint64_t compare) {
    const uintptr_t pc = K3EMU_PC, address = (uintptr_t)target;
    const size_t size = type == K3EMU_U64 || type == K3EMU_F64 ? 8 : 4;
    g_block.self->pc = pc;
    if (address % size) {
        report("misaligned", {pc}, "an atomic operation on %zu bytes at @0 has the address 0x%zx", size, address);
        stop_launch(kMisalignedAddress);
    }
    require_address(address, size, pc);
    static unsigned calls = 0;
    if (++calls % 64 == 0) yield_thread();
    check_access(address, size, Access::kAtomic, pc);
    uint64_t old;
    switch (type) {
        case K3EMU_I32: old = op == K3EMU_ADD ? add_i32(target, value) : apply<int32_t>(op, target, value, compare); break;
        case K3EMU_U32: old = apply<uint32_t>(op, target, value, compare); break;
        case K3EMU_U64: old = apply<uint64_t>(op, target, value, compare); break;
        case K3EMU_F32: old = apply<float>(op, target, value, compare); break;
        default: old = apply<double>(op, target, value, compare);
    }
    note_atomic(address);
    return old;
}

void k3emu_fence() { note_fence(); }

}  // extern "C"
