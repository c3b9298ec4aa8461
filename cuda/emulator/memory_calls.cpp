// SPDX-License-Identifier: MIT
//
// The calls that allocate, free and describe memory.

#include "check.h"
#include "driver.h"
#include "host_memory.h"
#include "memory.h"

using namespace k3emu;

namespace {

Status allocate_device(Context_* context, uintptr_t* out, size_t bytes) {
    if (!out || bytes == 0) return kInvalidValue;
    if (bytes > options().memory - live_bytes(Space::kDevice)) return kOutOfMemory;
    const Allocation* a = allocate(Space::kDevice, bytes, context);
    if (!a) return kOutOfMemory;
    ++counter("allocations");
    *out = a->start;
    return kSuccess;
}

Status allocate_pinned(Context_* context, void** out, size_t bytes) {
    if (!out || bytes == 0) return kInvalidValue;
    const Allocation* a = allocate(Space::kPinned, bytes, context);
    if (!a) return kOutOfMemory;
    ++counter("pinned_allocations");
    *out = reinterpret_cast<void*>(a->start);
    return kSuccess;
}

Allocation* to_free(uintptr_t address, Space space) {
    Allocation* a = find_allocation(address);
    if (a && a->live && a->start == address && a->space == space) return a;
    report("bad free", {}, "0x%zx is not the start of a live allocation of %s memory, but of %s", (size_t)address,
           space == Space::kDevice ? "device" : "pinned host", describe(a));
    return nullptr;
}

Status allocate_in_stream(Context_* context, uintptr_t* out, size_t bytes, void* handle) {
    auto stream = find_stream(context, handle);
    if (!stream) return kInvalidHandle;
    if (stream->capture) return kNotSupported;               // a node that allocates
    const Status status = check_legacy(stream.get());
    return status == kSuccess ? allocate_device(context, out, bytes) : status;
}

std::shared_ptr<Pool> default_pool(int device) {
    static std::vector<std::shared_ptr<Pool>> pools;
    if (pools.size() <= (size_t)device) pools.resize((size_t)device + 1);
    auto& pool = pools[(size_t)device];
    if (!pool) {
        pool = std::make_shared<Pool>(nullptr);
        pool->is_default = true;
    }
    if (!find<Pool>(pool.get())) add_object(pool);
    return pool;
}

}  // namespace

namespace k3emu {

void free_context_memory(Context_* context, bool report_leaks) {
    Allocation* a = next_live(0);
    while (a) {
        Allocation* next = next_live(a->serial);
        if (a->context == context) {
            if (report_leaks) report("leak", {}, "a context was destroyed with %s", describe(a));
            release(a);
        }
        a = next;
    }
}

}  // namespace k3emu

// ---------------------------------------------------------------------------------------------
// device memory
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuMemAlloc_v2(uintptr_t* out, size_t bytes) {
    K3EMU_CALL(kUnsafe);
    return allocate_device(call.context(), out, bytes);
}

K3EMU_API int cuMemFree_v2(uintptr_t address) {
    K3EMU_CALL(kUnsafe | kReleases);
    if (address == 0) return call.finish(kSuccess);
    Allocation* a = to_free(address, Space::kDevice);
    if (!a) return kInvalidValue;
    finish_context(call.context());                          // cuMemFree waits for what may use the memory
    release(a);
    ++counter("frees");
    return call.finish(call.context()->sticky);
}

K3EMU_API int cuMemAllocAsync(uintptr_t* out, size_t bytes, void* stream) {
    K3EMU_CALL(0);
    return allocate_in_stream(call.context(), out, bytes, stream);
}

K3EMU_API int cuMemAllocFromPoolAsync(uintptr_t* out, size_t bytes, Pool* pool, void* stream) {
    K3EMU_CALL(0);
    if (!find<Pool>(pool)) return kInvalidHandle;
    return allocate_in_stream(call.context(), out, bytes, stream);
}

K3EMU_API int cuMemFreeAsync(uintptr_t address, void* handle) {
    K3EMU_CALL(kReleases);
    auto stream = find_stream(call.context(), handle);
    if (!stream) return kInvalidHandle;
    Allocation* a = to_free(address, Space::kDevice);
    if (!a) return kInvalidValue;
    if (stream->capture) return kNotSupported;
    ++counter("frees");
    if (call.context()->sticky != kSuccess) {
        release(a);
        return call.finish(kSuccess);
    }
    Operation operation;
    operation.run = [a] {
        if (a->live) release(a);
        return kSuccess;
    };
    return call.finish(enqueue(stream.get(), operation));
}

K3EMU_API int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    K3EMU_CALL(0);
    if (free_bytes) *free_bytes = options().memory - live_bytes(Space::kDevice);
    if (total) *total = options().memory;
    return kSuccess;
}

K3EMU_API int cuMemGetAddressRange_v2(uintptr_t* start, size_t* size, uintptr_t address) {
    K3EMU_CALL(0);
    const Allocation* a = find_live(address, 1);
    if (!a) return kNotFound;
    if (start) *start = a->start;
    if (size) *size = a->size;
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------
// pools: names only, since memory is never reused
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuDeviceGetDefaultMemPool(Pool** out, int device) {
    K3EMU_CALL(kNoContext);
    if (!out) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    *out = default_pool(device).get();
    return kSuccess;
}

K3EMU_API int cuDeviceGetMemPool(Pool** out, int device) {
    K3EMU_CALL(kNoContext);
    if (!out) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    *out = default_pool(device).get();
    return kSuccess;
}

K3EMU_API int cuMemPoolCreate(Pool** out, const void* properties) {
    K3EMU_CALL(kNoContext);
    if (!out || !properties) return kInvalidValue;
    *out = make_object<Pool>(nullptr).get();
    return kSuccess;
}

K3EMU_API int cuMemPoolDestroy(Pool* handle) {
    K3EMU_CALL(kNoContext | kReleases);
    auto pool = find<Pool>(handle);
    if (!pool || pool->is_default) return kInvalidValue;
    remove_object(pool.get());
    return call.finish(kSuccess);
}

K3EMU_API int cuMemPoolSetAttribute(Pool* handle, int attribute, const void* value) {
    K3EMU_CALL(kNoContext);
    auto pool = find<Pool>(handle);
    if (!pool || !value || attribute < 1 || attribute > 8) return kInvalidValue;
    if (attribute == 4) pool->threshold = *static_cast<const uint64_t*>(value);
    return kSuccess;
}

K3EMU_API int cuMemPoolGetAttribute(Pool* handle, int attribute, void* value) {
    K3EMU_CALL(kNoContext);
    auto pool = find<Pool>(handle);
    if (!pool || !value || attribute < 1 || attribute > 8) return kInvalidValue;
    if (attribute <= 3) {
        *static_cast<int*>(value) = 1;
    } else {
        *static_cast<uint64_t*>(value) = attribute == 4 ? pool->threshold : live_bytes(Space::kDevice);
    }
    return kSuccess;
}

K3EMU_API int cuMemPoolTrimTo(Pool* pool, size_t) {
    K3EMU_CALL(kNoContext);
    return find<Pool>(pool) ? kSuccess : kInvalidValue;
}

// ---------------------------------------------------------------------------------------------
// host memory
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    K3EMU_CALL(kUnsafe);
    return allocate_pinned(call.context(), out, bytes);
}

K3EMU_API int cuMemAllocHost_v2(void** out, size_t bytes) {
    K3EMU_CALL(kUnsafe);
    return allocate_pinned(call.context(), out, bytes);
}

// Does not wait: a copy that is still to come finds the memory gone.
K3EMU_API int cuMemFreeHost(void* address) {
    K3EMU_CALL(kUnsafe | kReleases);
    Allocation* a = to_free((uintptr_t)address, Space::kPinned);
    if (!a) return kInvalidValue;
    release(a);
    return call.finish(kSuccess);
}

K3EMU_API int cuMemHostGetDevicePointer_v2(uintptr_t* out, void* address, unsigned flags) {
    K3EMU_CALL(0);
    if (!out || flags != 0) return kInvalidValue;
    const Allocation* a = find_live((uintptr_t)address, 1);
    if (!(a && a->space == Space::kPinned) && !find_registered((uintptr_t)address, 1)) return kInvalidValue;
    *out = (uintptr_t)address;
    return kSuccess;
}

K3EMU_API int cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
    K3EMU_CALL(kUnsafe);
    if (!address || bytes == 0) return kInvalidValue;
    return register_host((uintptr_t)address, bytes) ? kSuccess : kAlreadyRegistered;
}

K3EMU_API int cuMemHostUnregister(void* address) {
    K3EMU_CALL(kUnsafe | kReleases);
    return unregister_host((uintptr_t)address) ? call.finish(kSuccess) : kNotRegistered;
}

K3EMU_API int cuPointerGetAttribute(void* out, int attribute, uintptr_t address) {
    K3EMU_CALL(kNoContext);
    if (!out) return kInvalidValue;
    const Allocation* a = find_live(address, 1);
    if (!a && !find_registered(address, 1)) return kInvalidValue;
    const bool device = a && a->space == Space::kDevice;
    switch (attribute) {
        case 1: *static_cast<void**>(out) = a ? a->context : call.context(); break;
        case 2: *static_cast<unsigned*>(out) = device ? 2 : 1; break;
        case 3: *static_cast<uintptr_t*>(out) = address; break;
        case 4:
            if (device) return kInvalidValue;
            *static_cast<uintptr_t*>(out) = address;
            break;
        case 7: *static_cast<uint64_t*>(out) = a ? a->serial : 0; break;
        case 8: *static_cast<unsigned char*>(out) = 0; break;
        case 9: *static_cast<int*>(out) = a && a->context ? static_cast<Context_*>(a->context)->device : 0; break;
        case 11: *static_cast<uintptr_t*>(out) = a ? a->start : address; break;
        case 12: *static_cast<size_t*>(out) = a ? a->size : 1; break;
        case 13: *static_cast<unsigned char*>(out) = 1; break;
        default: return kInvalidValue;
    }
    return kSuccess;
}
