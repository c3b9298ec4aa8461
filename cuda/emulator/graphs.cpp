// SPDX-License-Identifier: MIT
//
// Captures: what a capturing stream does instead of working, and which calls end a capture badly.

#include <algorithm>

#include "driver.h"

namespace k3emu {

namespace {

// Whether the work of `nodes` comes before what the stream would capture next.
bool reaches(const Graph& graph, const std::vector<size_t>& from, size_t node) {
    std::vector<size_t> left = from;
    std::set<size_t> seen;
    while (!left.empty()) {
        const size_t n = left.back();
        left.pop_back();
        if (n == node) return true;
        if (!seen.insert(n).second) continue;
        const std::vector<size_t>& after = graph.nodes[n]->after;
        left.insert(left.end(), after.begin(), after.end());
    }
    return false;
}

void merge(std::vector<size_t>* into, const std::vector<size_t>& more) {
    for (size_t n : more) {
        if (std::find(into->begin(), into->end(), n) == into->end()) into->push_back(n);
    }
}

}  // namespace

void invalidate(Capture* capture) { capture->invalid = true; }

Status check_unsafe() {
    const int mode = capture_mode();
    if (mode == 2) return kSuccess;
    Status status = kSuccess;
    for (Capture* capture : driver().captures) {
        const bool own = pthread_equal(capture->thread, pthread_self());
        const bool forbidden = own ? capture->mode != 2 : mode == 0 && capture->mode == 0;
        if (!forbidden) continue;
        invalidate(capture);
        status = kCaptureUnsupported;
    }
    return status;
}

Status check_capturing(Context_* context) {
    Status status = check_unsafe();
    for (Capture* capture : driver().captures) {
        if (capture->origin->context != context) continue;
        invalidate(capture);
        status = kCaptureUnsupported;
    }
    return status;
}

Status check_legacy(Stream* stream) {
    if (!stream->legacy) return kSuccess;
    for (Capture* capture : driver().captures) {
        if (capture->origin->context != stream->context) continue;
        for (Stream* s : capture->streams) {
            if (!s->blocking()) continue;
            invalidate(capture);
            return kCaptureImplicit;
        }
    }
    return kSuccess;
}

Status capture_operation(Stream* stream, Operation operation) {
    Capture* capture = stream->capture.get();
    if (capture->invalid) return kCaptureInvalidated;
    auto node = std::make_unique<Node>();
    node->operation = std::move(operation);
    node->after = stream->tail;
    node->graph = capture->graph.get();
    stream->tail = {capture->graph->nodes.size()};
    capture->graph->nodes.push_back(std::move(node));
    return kSuccess;
}

Status capture_record(Stream* stream, const std::shared_ptr<Event>& event) {
    if (stream->capture->invalid) return kCaptureInvalidated;
    event->capture = stream->capture;
    event->nodes = stream->tail;
    return kSuccess;
}

Status capture_wait(Stream* stream, const std::shared_ptr<Event>& event) {
    if (stream->capture && stream->capture->invalid) return kCaptureInvalidated;
    if (!event->capture || event->capture->over) {
        // Work outside cannot be waited for inside.
        if (!stream->capture) return kCapturedEvent;
        invalidate(stream->capture.get());
        return kCaptureIsolation;
    }
    if (stream->legacy) {
        invalidate(event->capture.get());
        return kCaptureImplicit;
    }
    if (stream->capture && stream->capture != event->capture) {
        invalidate(stream->capture.get());
        invalidate(event->capture.get());
        return kCaptureMerge;
    }
    if (!stream->capture) {                                  // the stream joins
        stream->capture = event->capture;
        stream->capture->streams.insert(stream);
        stream->tail.clear();
    }
    merge(&stream->tail, event->nodes);
    return kSuccess;
}

namespace {
void abandon(Capture* capture) {
    capture->over = true;
    driver().captures.erase(capture);
    const Streams streams = capture->streams;
    for (Stream* s : streams) s->capture = nullptr;          // the last of them may free the capture
}
}  // namespace

void leave_capture(Stream* stream) {
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return;
    if (capture->origin == stream) return abandon(capture.get());
    invalidate(capture.get());
    capture->streams.erase(stream);
    stream->capture = nullptr;
}

void abandon_captures(Context_* context) {
    const std::set<Capture*> captures = driver().captures;
    for (Capture* capture : captures) {
        if (capture->origin->context == context) abandon(capture);
    }
}

}  // namespace k3emu

using namespace k3emu;

K3EMU_API int cuStreamBeginCapture_v2(void* handle, int mode) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (mode < 0 || mode > 2) return kInvalidValue;
    if (stream->legacy) return kCaptureUnsupported;
    if (stream->capture) return kIllegalState;
    auto capture = std::make_shared<Capture>();
    capture->origin = stream.get();
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->number = ++driver().numbers;
    capture->graph = std::make_shared<Graph>(call.context());
    capture->streams.insert(stream.get());
    driver().captures.insert(capture.get());
    stream->capture = capture;
    stream->tail.clear();
    return kSuccess;
}

K3EMU_API int cuStreamEndCapture(void* handle, Graph** out) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!out) return kInvalidValue;
    if (!stream->capture) return kIllegalState;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture->origin != stream.get()) {
        invalidate(capture.get());
        return kCaptureUnmatched;
    }
    if (capture->mode != 2 && !pthread_equal(capture->thread, pthread_self())) return kCaptureWrongThread;
    Status status = capture->invalid ? kCaptureInvalidated : kSuccess;
    for (Stream* s : capture->streams) {
        for (size_t n : s->tail) {
            if (status == kSuccess && !reaches(*capture->graph, stream->tail, n)) status = kCaptureUnjoined;
        }
    }
    capture->over = true;
    driver().captures.erase(capture.get());
    for (Stream* s : capture->streams) s->capture = nullptr;
    capture->streams.clear();
    *out = nullptr;
    if (status != kSuccess) return status;
    *out = capture->graph.get();
    add_object(capture->graph);
    return kSuccess;
}

K3EMU_API int cuStreamIsCapturing(void* handle, int* state) {
    K3EMU_CALL(0);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!state) return kInvalidValue;
    const Status status = check_legacy(stream.get());
    if (status != kSuccess) return status;
    *state = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return kSuccess;
}

K3EMU_API int cuStreamGetCaptureInfo_v3(void* handle, int* state, uint64_t* id, Graph** graph, Node*** nodes, void** edges,
                                        size_t* count) {
    K3EMU_CALL(0);
    static thread_local std::vector<Node*> tail;             // lives until the next call
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    if (!state) return kInvalidValue;
    const Status status = check_legacy(stream.get());
    if (status != kSuccess) return status;
    *state = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    if (*state != 1) return kSuccess;
    tail.clear();
    for (size_t n : stream->tail) tail.push_back(stream->capture->graph->nodes[n].get());
    if (id) *id = stream->capture->number;
    if (graph) *graph = stream->capture->graph.get();
    if (nodes) *nodes = tail.data();
    if (edges) *edges = nullptr;
    if (count) *count = tail.size();
    return kSuccess;
}

K3EMU_API int cuStreamGetCaptureInfo_v2(void* handle, int* state, uint64_t* id, Graph** graph, Node*** nodes, size_t* count) {
    return cuStreamGetCaptureInfo_v3(handle, state, id, graph, nodes, nullptr, count);
}

K3EMU_API int cuThreadExchangeStreamCaptureMode(int* mode) {
    K3EMU_CALL(kNoContext);
    if (!mode || *mode < 0 || *mode > 2) return kInvalidValue;
    std::swap(*mode, capture_mode());
    return kSuccess;
}
