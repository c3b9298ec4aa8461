// SPDX-License-Identifier: MIT
//
// Initialisation, devices and contexts.

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "memory.h"

using namespace k3emu;

namespace {

std::vector<Context_*>& stack() {                            // below the current context, of the calling thread
    static thread_local std::vector<Context_*> contexts;
    return contexts;
}

Context_* make_context(int device, unsigned flags, bool primary) {
    auto context = std::make_shared<Context_>();
    context->device = device;
    context->flags = flags;
    context->primary = primary;
    context->number = ++driver().numbers;
    context->legacy_stream.legacy = true;
    context->streams.insert(&context->legacy_stream);
    add_object(context);
    return context.get();
}

Context_*& primary_of(int device) { return driver().primaries[(size_t)device]; }

int attribute_of(int attribute) {
    switch (attribute) {
        case 1: return 1024;                                 // threads of a block
        case 2: return 1024;                                 // block x
        case 3: return 1024;                                 // block y
        case 4: return 64;                                   // block z
        case 5: return 0x7fffffff;                           // grid x
        case 6: return 65535;                                // grid y
        case 7: return 65535;                                // grid z
        case 8: return kDefaultDynamic;                      // shared memory of a block without asking
        case 9: return 65536;                                // constant memory
        case 10: return 32;                                  // warp
        case 11: return 0x7fffffff;                          // pitch
        case 12: return 65536;                               // registers of a block
        case 82: return 65536;                               // and of a multiprocessor
        case 13: return 1500000;                             // clock, kHz
        case 14: return 512;                                 // texture alignment
        case 16: return 4;                                   // multiprocessors
        case 19: return 1;                                   // maps host memory
        case 31: return 1;                                   // concurrent kernels
        case 36: return 2600000;                             // memory clock, kHz
        case 37: return 5120;                                // bus width
        case 38: return 50 << 20;                            // second-level cache
        case 39: return 2048;                                // threads of a multiprocessor
        case 40: return 2;                                   // copy engines
        case 41: return 1;                                   // one address space
        case 75: return (int)(options().arch / 10);
        case 76: return (int)(options().arch % 10);
        case 78: return 1;                                   // stream priorities
        case 81: return 233472;                              // shared memory of a multiprocessor
        case 90: return 1;                                   // preemption
        case 91: return 1;                                   // registered host memory has one address
        case 97: return kMaxDynamic;                         // shared memory of a block, at most
        case 99: return 1;                                   // host memory can be registered
        case 106: return 32;                                 // blocks of a multiprocessor
        case 111: return 1024;                               // shared memory that the system takes per block
        case 115: return 1;                                  // memory pools
        default: return 0;
    }
}

}  // namespace

namespace k3emu {

Status require_device(int device) {
    return device >= 0 && (size_t)device < driver().primaries.size() ? kSuccess : kInvalidDevice;
}

void destroy_context(Context_* context) {
    if (context->sticky == kSuccess) finish_context(context);
    drop_work(context);
    abandon_captures(context);
    std::vector<std::shared_ptr<Object>> own;
    for (const auto& object : all_objects()) {
        if (object->context == context && object.get() != context) own.push_back(object);
    }
    size_t streams = 0, events = 0, graphs = 0;
    for (const auto& object : own) {
        streams += dynamic_cast<Stream*>(object.get()) != nullptr;
        events += dynamic_cast<Event*>(object.get()) != nullptr;
        graphs += dynamic_cast<Graph*>(object.get()) || dynamic_cast<GraphExec*>(object.get());
        remove_object(object.get());
    }
    if (context->sticky == kSuccess && streams + events + graphs > 0) {
        report("leak", {}, "a context was destroyed with %zu streams, %zu events and %zu graphs", streams, events, graphs);
    }
    free_context_memory(context, context->sticky == kSuccess);
    if (context->primary) primary_of(context->device) = nullptr;
    if (current_context() == context) current_context() = nullptr;
    remove_object(context);
}

void forget_contexts() {
    for (const auto& object : all_objects()) {
        if (auto* context = dynamic_cast<Context_*>(object.get())) {
            drop_work(context);
            abandon_captures(context);
            free_context_memory(context, false);
        }
    }
    current_context() = nullptr;
    capture_mode() = 0;
    stack().clear();
    driver() = Driver();
}

}  // namespace k3emu

// ---------------------------------------------------------------------------------------------
// initialisation and errors
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuInit(unsigned flags) {
    K3EMU_CALL(kAnyTime);
    Driver& d = driver();
    if (flags != 0) return kInvalidValue;
    if (options().init != 0) return (int)options().init;
    if (d.initialised && d.process != getpid()) return kNotInitialized;
    if (d.initialised) return kSuccess;
    if (options().devices == 0) return kNoDevice;
    d.primaries.assign(options().devices, nullptr);
    d.primary_flags.assign(options().devices, 0);
    d.process = getpid();
    d.initialised = true;
    return kSuccess;
}

K3EMU_API int cuDriverGetVersion(int* version) {
    K3EMU_CALL(kAnyTime);
    if (!version) return kInvalidValue;
    *version = (int)options().driver;
    return kSuccess;
}

K3EMU_API int cuGetErrorName(int status, const char** text) {
    K3EMU_CALL(kAnyTime);
    if (!text) return kInvalidValue;
    *text = status_name(status);
    return *text ? kSuccess : kInvalidValue;
}

K3EMU_API int cuGetErrorString(int status, const char** text) {
    K3EMU_CALL(kAnyTime);
    if (!text) return kInvalidValue;
    *text = status_text(status);
    return *text ? kSuccess : kInvalidValue;
}

const char* k3emu::status_name(int status) {
    switch (status) {
#define X(NAME, NUMBER, TEXT, ...) \
    case NUMBER: return TEXT;
#include "statuses.inc"
#undef X
        default: return nullptr;
    }
}

const char* k3emu::status_text(int status) {
    switch (status) {
#define X(NAME, NUMBER, TEXT, SENTENCE) \
    case NUMBER: return SENTENCE;
#include "statuses.inc"
#undef X
        default: return nullptr;
    }
}

// ---------------------------------------------------------------------------------------------
// devices
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuDeviceGetCount(int* count) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!count) return kInvalidValue;
    *count = (int)driver().primaries.size();
    return kSuccess;
}

K3EMU_API int cuDeviceGet(int* device, int ordinal) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!device) return kInvalidValue;
    if (require_device(ordinal) != kSuccess) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}

K3EMU_API int cuDeviceGetName(char* name, int size, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!name || size <= 0) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    snprintf(name, (size_t)size, "k3emu (runs on the host)");
    return kSuccess;
}

K3EMU_API int cuDeviceGetUuid_v2(char* uuid, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!uuid) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    memcpy(uuid, "k3emu device 000", 16);
    uuid[15] = (char)('0' + device);
    return kSuccess;
}

K3EMU_API int cuDeviceGetPCIBusId(char* text, int size, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!text || size < 13) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    snprintf(text, (size_t)size, "0000:%02x:00.0", (unsigned)device);
    return kSuccess;
}

K3EMU_API int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!bytes) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    *bytes = options().memory;
    return kSuccess;
}

K3EMU_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!value || attribute <= 0) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    *value = attribute_of(attribute);
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------
// primary contexts
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuDevicePrimaryCtxRetain(Context_** out, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!out) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    if (!primary_of(device)) primary_of(device) = make_context(device, driver().primary_flags[(size_t)device], true);
    if (primary_of(device)->sticky != kSuccess) return primary_of(device)->sticky;
    ++primary_of(device)->primary_users;
    *out = primary_of(device);
    return kSuccess;
}

K3EMU_API int cuDevicePrimaryCtxRelease_v2(int device) {
    K3EMU_CALL(kNoContext | kQuiet | kReleases);
    if (require_device(device) != kSuccess) return kInvalidDevice;
    Context_* context = primary_of(device);
    if (!context) return kInvalidContext;
    if (--context->primary_users == 0) destroy_context(context);
    return call.finish(kSuccess);
}

K3EMU_API int cuDevicePrimaryCtxReset_v2(int device) {
    K3EMU_CALL(kNoContext | kQuiet | kReleases);
    if (require_device(device) != kSuccess) return kInvalidDevice;
    if (primary_of(device)) destroy_context(primary_of(device));
    return call.finish(kSuccess);
}

K3EMU_API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (require_device(device) != kSuccess) return kInvalidDevice;
    driver().primary_flags[(size_t)device] = flags;
    if (primary_of(device)) primary_of(device)->flags = flags;
    return kSuccess;
}

K3EMU_API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!flags || !active) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    *flags = driver().primary_flags[(size_t)device];
    *active = primary_of(device) != nullptr;
    return kSuccess;
}

// ---------------------------------------------------------------------------------------------
// contexts
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuCtxCreate_v4(Context_** out, void*, unsigned flags, int device) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!out) return kInvalidValue;
    if (require_device(device) != kSuccess) return kInvalidDevice;
    *out = make_context(device, flags, false);
    if (current_context()) stack().push_back(current_context());
    current_context() = *out;
    return kSuccess;
}

K3EMU_API int cuCtxCreate_v2(Context_** out, unsigned flags, int device) { return cuCtxCreate_v4(out, nullptr, flags, device); }

K3EMU_API int cuCtxDestroy_v2(Context_* context) {
    K3EMU_CALL(kNoContext | kQuiet | kReleases);
    if (!is_live(context)) return kInvalidContext;
    if (context->primary) return kInvalidContext;
    destroy_context(context);
    if (!current_context() && !stack().empty()) {
        current_context() = stack().back();
        stack().pop_back();
    }
    return call.finish(kSuccess);
}

K3EMU_API int cuCtxSetCurrent(Context_* context) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (context && !is_live(context)) return kInvalidContext;
    current_context() = context;
    return kSuccess;
}

K3EMU_API int cuCtxGetCurrent(Context_** out) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!out) return kInvalidValue;
    *out = current_context();
    return kSuccess;
}

K3EMU_API int cuCtxPushCurrent_v2(Context_* context) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!is_live(context)) return kInvalidContext;
    stack().push_back(current_context());
    current_context() = context;
    return kSuccess;
}

K3EMU_API int cuCtxPopCurrent_v2(Context_** out) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!current_context()) return kInvalidContext;
    if (out) *out = current_context();
    current_context() = stack().empty() ? nullptr : stack().back();
    if (!stack().empty()) stack().pop_back();
    return kSuccess;
}

K3EMU_API int cuCtxGetDevice(int* device) {
    K3EMU_CALL(kQuiet);
    if (!device) return kInvalidValue;
    *device = call.context()->device;
    return kSuccess;
}

K3EMU_API int cuCtxGetFlags(unsigned* flags) {
    K3EMU_CALL(kQuiet);
    if (!flags) return kInvalidValue;
    *flags = call.context()->flags;
    return kSuccess;
}

K3EMU_API int cuCtxGetId(Context_* context, unsigned long long* id) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!id) return kInvalidValue;
    if (!context) context = call.context();
    if (!is_live(context)) return kInvalidContext;
    *id = context->number;
    return kSuccess;
}

K3EMU_API int cuCtxGetApiVersion(Context_*, unsigned* version) {
    K3EMU_CALL(kNoContext | kQuiet);
    if (!version) return kInvalidValue;
    *version = 3020;
    return kSuccess;
}

K3EMU_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    K3EMU_CALL(kQuiet);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kSuccess;
}

K3EMU_API int cuCtxGetLimit(size_t* value, int limit) {
    K3EMU_CALL(kQuiet);
    if (!value || limit < 0 || limit > 6) return kInvalidValue;
    *value = limit == 0 ? 1024 : limit == 1 ? 1 << 20 : limit == 2 ? 8 << 20 : 0;
    return kSuccess;
}

K3EMU_API int cuCtxSynchronize() {
    K3EMU_CALL(0);
    const Status status = check_capturing(call.context());
    if (status != kSuccess) return status;
    ++counter("synchronisations");
    return finish_context(call.context());
}
