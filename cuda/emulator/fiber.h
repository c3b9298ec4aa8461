// SPDX-License-Identifier: MIT
//
// A thread of a kernel is a fiber: a stack of its own, and a switch that saves the registers which a function call
// preserves.  On x86-64 the switch is a dozen instructions; elsewhere it is swapcontext, ten times as slow.

#ifndef K3EMU_FIBER_H
#define K3EMU_FIBER_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__) || defined(K3EMU_UCONTEXT)
#include <ucontext.h>
#endif

namespace k3emu {

struct Context {
#if defined(__x86_64__) && !defined(K3EMU_UCONTEXT)
    void* sp = nullptr;
#else
    ucontext_t state;
#endif
};

enum : size_t { kStack = 64 * 1024, kMaxThreads = 1024 };

// The stacks of all fibers: one range, with a page without access below each.
extern uintptr_t g_stacks;
bool make_stacks();
inline bool in_stacks(uintptr_t a) { return a - g_stacks < kMaxThreads * kStack; }
inline size_t stack_of(uintptr_t a) { return (a - g_stacks) / kStack; }

void start_context(Context* context, size_t stack, void (*entry)());   // entry must not return
void switch_context(Context* from, Context* to);

}  // namespace k3emu
#endif
