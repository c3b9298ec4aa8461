// SPDX-License-Identifier: MIT
//
// The stacks and the switch.

#include "fiber.h"

#include <string.h>
#include <sys/mman.h>

namespace k3emu {

uintptr_t g_stacks = 0;

namespace {
constexpr size_t kGuard = 4096;

// Stacks that all ended at the same offset of a page would share a few sets of the cache.
size_t colour(size_t stack) { return stack % 32 * 128; }
}  // namespace

bool make_stacks() {
    if (g_stacks) return true;
    void* p = mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    for (size_t i = 0; i < kMaxThreads; ++i) mprotect(static_cast<char*>(p) + i * kStack, kGuard, PROT_NONE);
    g_stacks = reinterpret_cast<uintptr_t>(p);
    return true;
}

#if defined(__x86_64__) && !defined(K3EMU_UCONTEXT)

extern "C" __attribute__((visibility("hidden"))) void k3emu_switch(void** from, void* to);

asm(".text\n"
    ".p2align 4\n"
    ".globl k3emu_switch\n"
    ".hidden k3emu_switch\n"
    ".type k3emu_switch, @function\n"
    "k3emu_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size k3emu_switch, . - k3emu_switch\n");

void start_context(Context* context, size_t stack, void (*entry)()) {
    uintptr_t top = g_stacks + (stack + 1) * kStack - colour(stack);
    // As if entry had been called: a return address of zero at the top, where a debugger stops, below it the address
    // that the switch returns to, below that six registers.
    void** frame = reinterpret_cast<void**>(top) - 8;
    memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(entry);
    context->sp = frame;
}

void switch_context(Context* from, Context* to) { k3emu_switch(&from->sp, to->sp); }

#else

void start_context(Context* context, size_t stack, void (*entry)()) {
    getcontext(&context->state);
    context->state.uc_stack.ss_sp = reinterpret_cast<void*>(g_stacks + stack * kStack + kGuard);
    context->state.uc_stack.ss_size = kStack - kGuard - colour(stack);
    context->state.uc_link = nullptr;
    makecontext(&context->state, entry, 0);
}

void switch_context(Context* from, Context* to) { swapcontext(&from->state, &to->state); }

#endif

}  // namespace k3emu
