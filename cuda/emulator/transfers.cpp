// SPDX-License-Identifier: MIT
//
// Copies and fills.  A copy from or to pinned memory happens when its stream gets there; one from pageable memory takes
// the bytes at once, one to pageable memory is finished when the call returns.

#include <string.h>

#include "check.h"
#include "driver.h"
#include "host_memory.h"
#include "memory.h"

using namespace k3emu;

namespace {

struct Copy {
    uintptr_t to, from;
    size_t bytes;
};

bool is_device(uintptr_t a) {
    const Allocation* allocation = find_allocation(a);
    return allocation && allocation->space == Space::kDevice;
}
bool is_pinned(uintptr_t a, size_t size) {
    const Allocation* allocation = find_allocation(a);
    return (allocation && allocation->space == Space::kPinned) || find_registered(a, size);
}

// A range is good when it lies in one live allocation, or is host memory that the emulator knows nothing of.
bool good_range(uintptr_t a, size_t size, bool must_be_device, const char* what) {
    if (find_live(a, size) && (!must_be_device || in_arena(a))) return true;
    if (!in_arena(a) && !must_be_device && a != 0) return true;
    const Allocation* allocation = find_allocation(a);
    report(allocation && !allocation->live ? "use after free" : "out of bounds", {}, "%s of %zu bytes at 0x%zx is not inside %s",
           what, size, (size_t)a, allocation ? describe(allocation) : "any allocation");
    return false;
}

Status carry_out(const Copy& c, const unsigned char* staged) {
    const char* what = "a copy, when its stream came to it,";
    if (!good_range(c.to, c.bytes, false, what)) return kIllegalAddress;
    if (!staged && !good_range(c.from, c.bytes, false, what)) return kIllegalAddress;
    memmove(reinterpret_cast<void*>(c.to), staged ? staged : reinterpret_cast<const void*>(c.from), c.bytes);
    copy_written(c.to, staged ? 0 : c.from, c.bytes);
    return kSuccess;
}

void count_copy(const Stream* s, const Copy& c) {
    if (s->capture) return;
    const bool to = is_device(c.to), from = is_device(c.from);
    ++counter(to && from ? "copies_within" : to ? "copies_in" : from ? "copies_out" : "copies_on_host");
    counter(to && from ? "bytes_within" : to ? "bytes_in" : from ? "bytes_out" : "bytes_on_host") += c.bytes;
}

enum Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice, kAny };

Status check_copy(const Copy& c, Direction direction) {
    const bool to_device = direction == kHostToDevice || direction == kDeviceToDevice;
    const bool from_device = direction == kDeviceToHost || direction == kDeviceToDevice;
    const bool good = good_range(c.to, c.bytes, to_device, "the destination of a copy") &&
                      good_range(c.from, c.bytes, from_device, "the source of a copy");
    return good ? kSuccess : kInvalidValue;
}

Status copy_now(Context_* context, const Copy& c, Direction direction) {
    Stream* legacy = &context->legacy_stream;
    Status status = check_legacy(legacy);
    if (status == kSuccess) status = check_unsafe();
    if (status == kSuccess && c.bytes) status = check_copy(c, direction);
    if (status != kSuccess || c.bytes == 0) return status;
    count_copy(legacy, c);
    Operation operation;
    operation.type = NodeType::kCopy;
    operation.run = [c] { return carry_out(c, nullptr); };
    status = enqueue(legacy, operation);
    return status == kSuccess ? finish_stream(legacy) : status;
}

Status copy_later(Context_* context, const void* handle, const Copy& c, Direction direction) {
    auto stream = find_stream(context, handle);
    if (!stream) return kInvalidHandle;
    if (c.bytes == 0) return kSuccess;
    Status status = check_copy(c, direction);
    if (status != kSuccess) return status;
    count_copy(stream.get(), c);
    Operation operation;
    operation.type = NodeType::kCopy;
    if (stream->capture || in_arena(c.from) || is_pinned(c.from, c.bytes)) {
        operation.run = [c] { return carry_out(c, nullptr); };
    } else {
        const unsigned char* from = reinterpret_cast<const unsigned char*>(c.from);
        auto staged = std::make_shared<std::vector<unsigned char>>(from, from + c.bytes);
        operation.run = [c, staged] { return carry_out(c, staged->data()); };
    }
    const bool wait = !stream->capture && !in_arena(c.to) && !is_pinned(c.to, c.bytes);
    status = enqueue(stream.get(), operation);
    return status == kSuccess && wait ? finish_stream(stream.get()) : status;
}

Status fill_range(uintptr_t at, uint32_t value, size_t width, size_t count) {
    if (!good_range(at, width * count, true, "a fill, when its stream came to it,")) return kIllegalAddress;
    for (size_t i = 0; i < count; ++i) memcpy(reinterpret_cast<char*>(at) + width * i, &value, width);
    mark_written(at, width * count);
    return kSuccess;
}

Status fill(Context_* context, const void* handle, uintptr_t at, uint32_t value, size_t width, size_t count, bool wait) {
    auto stream = find_stream(context, handle);
    if (!stream) return kInvalidHandle;
    if (count == 0) return kSuccess;
    if (at % width || !good_range(at, width * count, true, "a fill")) return kInvalidValue;
    if (!stream->capture) ++counter("fills");
    Operation operation;
    operation.type = NodeType::kFill;
    operation.run = [=] { return fill_range(at, value, width, count); };
    const Status status = enqueue(stream.get(), operation);
    return status == kSuccess && wait ? finish_stream(stream.get()) : status;
}

}  // namespace

K3EMU_API int cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
    K3EMU_CALL(0);
    return copy_now(call.context(), Copy{to, (uintptr_t)from, bytes}, kHostToDevice);
}
K3EMU_API int cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
    K3EMU_CALL(0);
    return copy_now(call.context(), Copy{(uintptr_t)to, from, bytes}, kDeviceToHost);
}
K3EMU_API int cuMemcpyDtoD_v2(uintptr_t to, uintptr_t from, size_t bytes) {
    K3EMU_CALL(0);
    return copy_now(call.context(), Copy{to, from, bytes}, kDeviceToDevice);
}
K3EMU_API int cuMemcpy(uintptr_t to, uintptr_t from, size_t bytes) {
    K3EMU_CALL(0);
    return copy_now(call.context(), Copy{to, from, bytes}, kAny);
}
K3EMU_API int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
    K3EMU_CALL(0);
    return copy_later(call.context(), stream, Copy{to, (uintptr_t)from, bytes}, kHostToDevice);
}
K3EMU_API int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
    K3EMU_CALL(0);
    return copy_later(call.context(), stream, Copy{(uintptr_t)to, from, bytes}, kDeviceToHost);
}
K3EMU_API int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
    K3EMU_CALL(0);
    return copy_later(call.context(), stream, Copy{to, from, bytes}, kDeviceToDevice);
}
K3EMU_API int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
    K3EMU_CALL(0);
    return copy_later(call.context(), stream, Copy{to, from, bytes}, kAny);
}

K3EMU_API int cuMemsetD8_v2(uintptr_t at, unsigned char value, size_t count) {
    K3EMU_CALL(0);
    return fill(call.context(), nullptr, at, value, 1, count, true);
}
K3EMU_API int cuMemsetD16_v2(uintptr_t at, unsigned short value, size_t count) {
    K3EMU_CALL(0);
    return fill(call.context(), nullptr, at, value, 2, count, true);
}
K3EMU_API int cuMemsetD32_v2(uintptr_t at, unsigned value, size_t count) {
    K3EMU_CALL(0);
    return fill(call.context(), nullptr, at, value, 4, count, true);
}
K3EMU_API int cuMemsetD8Async(uintptr_t at, unsigned char value, size_t count, void* stream) {
    K3EMU_CALL(0);
    return fill(call.context(), stream, at, value, 1, count, false);
}
K3EMU_API int cuMemsetD16Async(uintptr_t at, unsigned short value, size_t count, void* stream) {
    K3EMU_CALL(0);
    return fill(call.context(), stream, at, value, 2, count, false);
}
K3EMU_API int cuMemsetD32Async(uintptr_t at, unsigned value, size_t count, void* stream) {
    K3EMU_CALL(0);
    return fill(call.context(), stream, at, value, 4, count, false);
}
