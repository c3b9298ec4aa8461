// SPDX-License-Identifier: MIT
//
// What every entry point does first: it takes the lock, counts, fails if it was told to, and refuses what the driver
// would refuse whatever the arguments are.

#include <unistd.h>

#include "driver.h"

namespace k3emu {

Context_*& current_context() {
    static thread_local Context_* context = nullptr;
    return context;
}

int& capture_mode() {
    static thread_local int mode = 0;
    return mode;
}

bool& in_host_function() {
    static thread_local bool inside = false;
    return inside;
}

bool is_live(const Context_* context) { return context && find<Context_>(context) != nullptr; }

Call::Call(const char* entry, unsigned flags) {
    lock_driver();
    const Status injected = count_call(entry);
    Driver& d = driver();
    if (injected != kSuccess) {
        if (flags & kReleases) {
            put_off_ = injected;
        } else {
            refused_ = injected;
            return;
        }
    }
    if (flags & kAnyTime) return;
    // A forked child has inherited the handles, but not the device behind them.
    if (!d.initialised || d.process != getpid()) {
        refused_ = kNotInitialized;
        return;
    }
    if (in_host_function()) {
        report("host function", {}, "a host function of a stream calls %s", entry);
        refused_ = kNotPermitted;
        return;
    }
    context_ = current_context();
    if (context_ && !is_live(context_)) {
        context_ = nullptr;
        if (!(flags & kNoContext)) {
            refused_ = kContextIsDestroyed;
            return;
        }
    }
    if (!context_ && !(flags & kNoContext)) {
        refused_ = kInvalidContext;
        return;
    }
    if (context_ && context_->sticky != kSuccess && !(flags & kQuiet)) {
        if (!(flags & kReleases)) {
            refused_ = context_->sticky;
            return;
        }
        if (put_off_ == kSuccess) put_off_ = context_->sticky;
    }
    if (flags & kUnsafe) refused_ = check_unsafe();
}

Call::~Call() { unlock_driver(); }

}  // namespace k3emu
