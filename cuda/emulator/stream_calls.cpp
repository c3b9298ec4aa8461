// SPDX-License-Identifier: MIT
//
// The calls on streams and events.

#include "driver.h"

using namespace k3emu;

namespace {

// A call that waits for, or asks about, the stream itself, which is not permitted while it captures.
Status refuse_capturing(Stream* s) {
    if (s->capture) {
        invalidate(s->capture.get());
        return kCaptureUnsupported;
    }
    return check_legacy(s);
}

Status create(Context_* context, Stream** out, unsigned flags, int priority) {
    if (!out || flags > 1) return kInvalidValue;
    auto stream = make_object<Stream>(context);
    stream->flags = flags;
    stream->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority;
    stream->number = ++driver().numbers;
    context->streams.insert(stream.get());
    *out = stream.get();
    return kSuccess;
}

Status record(Context_* context, Event* handle, void* stream_handle) {
    auto event = find<Event>(handle);
    auto stream = find_stream(context, stream_handle);
    if (!event || !stream || event->context != stream->context) return kInvalidHandle;
    if (stream->capture) return capture_record(stream.get(), event);
    const Status status = check_legacy(stream.get());
    if (status != kSuccess) return status;
    Operation operation;
    operation.record = event;
    operation.ticket = ++driver().numbers;
    event->capture = nullptr;
    event->recorded = operation.ticket;
    event->stream = stream.get();
    return enqueue(stream.get(), operation);
}

typedef void (*HostFunction)(void*);

}  // namespace

// ---------------------------------------------------------------------------------------------
// streams
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuStreamCreateWithPriority(Stream** out, unsigned flags, int priority) {
    K3EMU_CALL(0);
    return create(call.context(), out, flags, priority);
}

K3EMU_API int cuStreamCreate(Stream** out, unsigned flags) {
    K3EMU_CALL(0);
    return create(call.context(), out, flags, 0);
}

K3EMU_API int cuStreamDestroy_v2(void* handle) {
    K3EMU_CALL(kReleases);
    if ((uintptr_t)handle <= 2) return kInvalidHandle;
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    leave_capture(stream.get());
    // The device would go on with the work; here it is done now, while the stream exists.
    const Status status = finish_stream(stream.get());
    stream->context->streams.erase(stream.get());
    remove_object(stream.get());
    return call.finish(status);
}

K3EMU_API int cuStreamSynchronize(void* handle) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    Status status = refuse_capturing(stream.get());
    if (status == kSuccess) status = check_unsafe();
    if (status != kSuccess) return status;
    ++counter("synchronisations");
    return finish_stream(stream.get());
}

K3EMU_API int cuStreamQuery(void* handle) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    Status status = refuse_capturing(stream.get());
    if (status == kSuccess) status = check_unsafe();
    if (status != kSuccess) return status;
    if (stream->queue.empty()) return kSuccess;
    try_stream(stream.get());                                // so that asking again and again comes to an end
    return stream->context->sticky != kSuccess ? stream->context->sticky : kNotReady;
}

K3EMU_API int cuStreamWaitEvent(void* handle, Event* event_handle, unsigned) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    auto event = find<Event>(event_handle);
    if (!stream || !event) return kInvalidHandle;
    if (stream->capture || event->capture) return capture_wait(stream.get(), event);
    if (event->recorded == 0 || event->done >= event->recorded) return kSuccess;
    Operation operation;
    operation.wait = event;
    operation.ticket = event->recorded;
    return enqueue(stream.get(), operation);
}

K3EMU_API int cuStreamGetFlags(void* handle, unsigned* flags) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!flags) return kInvalidValue;
    *flags = stream->flags;
    return kSuccess;
}

K3EMU_API int cuStreamGetPriority(void* handle, int* priority) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!priority) return kInvalidValue;
    *priority = stream->priority;
    return kSuccess;
}

K3EMU_API int cuStreamGetId(void* handle, unsigned long long* id) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!id) return kInvalidValue;
    *id = stream->legacy ? (unsigned long long)call.context()->number : stream->number;
    return kSuccess;
}

K3EMU_API int cuStreamGetCtx(void* handle, Context_** context) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!context) return kInvalidValue;
    *context = stream->context;
    return kSuccess;
}

K3EMU_API int cuStreamGetCtx_v2(void* handle, Context_** context, void** green) {
    if (green) *green = nullptr;
    return cuStreamGetCtx(handle, context);
}

K3EMU_API int cuStreamGetDevice(void* handle, int* device) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!device) return kInvalidValue;
    *device = stream->context->device;
    return kSuccess;
}

K3EMU_API int cuLaunchHostFunc(void* handle, HostFunction function, void* data) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!function) return kInvalidValue;
    Operation operation;
    operation.type = NodeType::kHost;
    operation.is_host = true;
    operation.run = [function, data] {
        function(data);
        return kSuccess;
    };
    return enqueue(stream.get(), operation);
}

// ---------------------------------------------------------------------------------------------
// events
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuEventCreate(Event** out, unsigned flags) {
    K3EMU_CALL(0);
    if (!out || flags > 7) return kInvalidValue;
    auto event = make_object<Event>(call.context());
    event->flags = flags;
    *out = event.get();
    return kSuccess;
}

K3EMU_API int cuEventDestroy_v2(Event* handle) {
    K3EMU_CALL(kReleases);
    auto event = find<Event>(handle);
    if (!event) return kInvalidHandle;
    remove_object(event.get());
    return call.finish(kSuccess);
}

K3EMU_API int cuEventRecordWithFlags(Event* event, void* stream, unsigned flags) {
    K3EMU_CALL(0);
    return flags > 1 ? kInvalidValue : record(call.context(), event, stream);
}

K3EMU_API int cuEventRecord(Event* event, void* stream) {
    K3EMU_CALL(0);
    return record(call.context(), event, stream);
}

K3EMU_API int cuEventQuery(Event* handle) {
    K3EMU_CALL(kUnsafe);
    auto event = find<Event>(handle);
    if (!event) return kInvalidHandle;
    if (event->capture) return kCapturedEvent;
    if (event->done >= event->recorded) return kSuccess;
    try_stream(event->stream);
    return call.context()->sticky != kSuccess ? call.context()->sticky : kNotReady;
}

K3EMU_API int cuEventSynchronize(Event* handle) {
    K3EMU_CALL(kUnsafe);
    auto event = find<Event>(handle);
    if (!event) return kInvalidHandle;
    if (event->capture) return kCapturedEvent;
    ++counter("synchronisations");
    return finish_event(event.get());
}

K3EMU_API int cuEventElapsedTime(float* milliseconds, Event* start_handle, Event* end_handle) {
    K3EMU_CALL(0);
    auto start = find<Event>(start_handle), end = find<Event>(end_handle);
    if (!start || !end) return kInvalidHandle;
    if (!milliseconds) return kInvalidValue;
    if (start->recorded == 0 || end->recorded == 0 || (start->flags | end->flags) & 2) return kInvalidHandle;
    if (start->done < start->recorded || end->done < end->recorded) return kNotReady;
    *milliseconds = (float)(end->milliseconds - start->milliseconds);
    return kSuccess;
}

K3EMU_API int cuEventElapsedTime_v2(float* milliseconds, Event* start, Event* end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
