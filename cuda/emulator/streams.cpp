// SPDX-License-Identifier: MIT
//
// How work in streams is carried out.  An operation that was asked for waits in its stream's queue until something
// waits for it; then what must come before it runs, and with a seed other streams may go ahead as well.  A stream is a
// queue in order; besides that, an operation waits for an event, for the legacy stream, or in it for all others.

#include <time.h>

#include "driver.h"

namespace k3emu {

namespace {

double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

bool satisfied(const Operation& o) { return !o.wait || o.wait->done >= o.ticket; }

// The stream that must move before this one can: the one itself when its first operation can run.
Stream* blocker(Stream* s, std::set<Stream*>* seen) {
    while (seen->insert(s).second) {
        if (s->busy || s->queue.empty()) return s;
        const Operation& first = s->queue.front();
        Stream* next = s;
        if (!satisfied(first)) {
            next = first.wait->stream;
        } else if (s->legacy) {
            for (Stream* other : s->context->streams) {
                if (other != s && other->blocking() && !other->queue.empty() && other->queue.front().sequence < first.sequence) {
                    next = other;
                }
            }
        } else if (s->blocking()) {
            Stream* legacy = &s->context->legacy_stream;
            if (!legacy->queue.empty() && legacy->queue.front().sequence < first.sequence) next = legacy;
        }
        if (next == s) return s;
        s = next;
    }
    return nullptr;                                          // they wait for each other
}

Stream* runnable(Stream* s) {
    std::set<Stream*> seen;
    Stream* first = blocker(s, &seen);
    return first && !first->busy && !first->queue.empty() ? first : nullptr;
}

Stream* any_runnable(Context_* context) {                    // what a seed decides by
    std::vector<Stream*> all;
    for (Stream* s : context->streams) {
        if (runnable(s) == s) all.push_back(s);
    }
    return all.empty() ? nullptr : all[schedule().below(all.size())];
}

Status run_first(Stream* s) {
    Operation operation = s->queue.front();
    s->busy = true;
    const Status status = run_operation(operation);
    s->busy = false;
    if (!s->queue.empty()) s->queue.pop_front();
    if (operation.record) {
        operation.record->done = std::max(operation.record->done, operation.ticket);
        operation.record->milliseconds = now_ms();
    }
    if (status != kSuccess && s->context->sticky == kSuccess) {
        s->context->sticky = status;
        drop_work(s->context);
    }
    wake_driver();
    return status;
}

// Runs until `finished`, for which `target` has to move.
Status run_until(Stream* target, const std::function<bool()>& finished) {
    Context_* context = target->context;
    while (!finished()) {
        if (context->sticky != kSuccess) return context->sticky;
        Stream* next = options().seed ? any_runnable(context) : nullptr;
        if (!next) next = runnable(target);
        if (next) {
            run_first(next);
        } else {
            wait_driver();                                   // another thread runs the operation that is needed
        }
    }
    return context->sticky;
}

}  // namespace

Status run_operation(const Operation& operation) {
    if (!operation.run) return kSuccess;
    if (!operation.is_host) return operation.run();
    unlock_driver();
    in_host_function() = true;
    const Status status = operation.run();
    in_host_function() = false;
    lock_driver();
    return status;
}

std::shared_ptr<Stream> find_stream(Context_* context, const void* handle) {
    if ((uintptr_t)handle <= 1) return std::shared_ptr<Stream>(find_object(context), &context->legacy_stream);
    std::shared_ptr<Stream> stream = find<Stream>(handle);
    if (!stream && (uintptr_t)handle > 2) report("stale handle", {}, "a call names a stream that is not there");
    return stream;
}

Status enqueue(Stream* s, Operation operation) {
    if (s->capture) return capture_operation(s, std::move(operation));
    const Status status = check_legacy(s);
    if (status != kSuccess) return status;
    operation.sequence = ++driver().numbers;
    s->queue.push_back(std::move(operation));
    if (!options().deferred) finish_stream(s);               // errors come up at the next call, as on the device
    return kSuccess;
}

Status finish_stream(Stream* s) {
    if (s->queue.empty()) return s->context->sticky;
    const uint64_t last = s->queue.back().sequence;
    return run_until(s, [s, last] { return s->queue.empty() || s->queue.front().sequence > last; });
}

Status finish_context(Context_* context) {
    const Streams streams = context->streams;
    for (Stream* s : streams) {
        const Status status = finish_stream(s);
        if (status != kSuccess) return status;
    }
    return context->sticky;
}

Status finish_event(Event* event) {
    const uint64_t ticket = event->recorded;
    if (event->done >= ticket) return event->context->sticky;
    return run_until(event->stream, [event, ticket] { return event->done >= ticket; });
}

bool try_stream(Stream* s) {
    if (Stream* next = runnable(s)) run_first(next);
    return s->queue.empty();
}

void drop_work(Context_* context) {
    for (Stream* s : context->streams) {
        for (Operation& operation : s->queue) {
            if (operation.record) operation.record->done = std::max(operation.record->done, operation.ticket);
        }
        s->queue.clear();
    }
}

}  // namespace k3emu
