// SPDX-License-Identifier: MIT
//
// The calls that launch a kernel: what is refused at once, and what waits in the stream.

#include <string.h>

#include "check.h"
#include "driver.h"

using namespace k3emu;

namespace {

struct Config {                                              // CUlaunchConfig
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, dynamic_bytes;
    void* stream;
    const unsigned char* attributes;                         // of 72 bytes each: an id, and at 8 the value
    unsigned attribute_count;
};

Status check_geometry(const Function& f, const Config& c) {
    if (c.grid_x == 0 || c.grid_y == 0 || c.grid_z == 0) return kInvalidValue;
    if (c.block_x == 0 || c.block_y == 0 || c.block_z == 0) return kInvalidValue;
    if (c.grid_x > 0x7fffffffu || c.grid_y > 65535 || c.grid_z > 65535) return kInvalidValue;
    if (c.block_x > 1024 || c.block_y > 1024 || c.block_z > 64) return kInvalidValue;
    const uint64_t threads = (uint64_t)c.block_x * c.block_y * c.block_z;
    if (threads > 1024) return kInvalidValue;
    if (f.kernel->max_threads && threads > (uint64_t)f.kernel->max_threads) {
        report("launch", {}, "%s was compiled for blocks of at most %d threads and is launched with %llu", f.kernel->name,
               f.kernel->max_threads, (unsigned long long)threads);
        return kLaunchOutOfResources;
    }
    if (c.dynamic_bytes > (unsigned)f.max_dynamic) return kInvalidValue;
    if (c.dynamic_bytes + (unsigned)shared_static_bytes(f.kernel->name) > kMaxDynamic) return kInvalidValue;
    return kSuccess;
}

Status check_attributes(const Config& c) {
    for (unsigned i = 0; i < c.attribute_count; ++i) {
        const unsigned char* attribute = c.attributes + 72 * i;
        unsigned id, value[3];
        memcpy(&id, attribute, sizeof id);
        memcpy(value, attribute + 8, sizeof value);
        if (id == 2 && value[0] != 0) return kNotSupported;                              // a cooperative launch
        if (id == 4 && value[0] * value[1] * value[2] > 1) return kNotSupported;         // a cluster
    }
    return kSuccess;
}

// From an array of pointers, or from one packed buffer as `extra` describes it.
Status gather(const k3emu_kernel* kernel, void* const* parameters, void* const* extra, std::vector<unsigned char>* out) {
    out->assign(parameter_bytes(kernel), 0);
    if (kernel->parameters == 0) return kSuccess;
    if (parameters) {
        for (int i = 0; i < kernel->parameters; ++i) {
            if (!parameters[i]) return kInvalidValue;
            memcpy(out->data() + parameter_offset(kernel, i), parameters[i], kernel->sizes[i]);
        }
        return kSuccess;
    }
    const void* buffer = nullptr;
    size_t size = 0;
    for (size_t i = 0; extra && extra[i]; i += 2) {
        if ((uintptr_t)extra[i] == 1) buffer = extra[i + 1];
        if ((uintptr_t)extra[i] == 2) size = *static_cast<const size_t*>(extra[i + 1]);
    }
    if (!buffer || size < out->size()) return kInvalidValue;
    memcpy(out->data(), buffer, out->size());
    return kSuccess;
}

Status launch(Context_* context, const Config& c, const void* handle, void* const* parameters, void* const* extra) {
    auto f = find<Function>(handle);
    auto stream = find_stream(context, c.stream);
    if (!f || !stream) return kInvalidHandle;
    if (stream->context != context) return kInvalidHandle;
    Status status = check_geometry(*f, c);
    if (status == kSuccess) status = check_attributes(c);
    auto work = std::make_shared<Launch>();
    if (status == kSuccess) status = gather(f->kernel, parameters, extra, &work->arguments);
    if (status != kSuccess) return status;
    work->kernel = f->kernel;
    work->grid = dim3(c.grid_x, c.grid_y, c.grid_z);
    work->block = dim3(c.block_x, c.block_y, c.block_z);
    work->dynamic_bytes = c.dynamic_bytes;
    f->loaded = true;
    if (!stream->capture) ++counter("launches");
    Operation operation;
    operation.type = NodeType::kKernel;
    operation.run = [work] {
        const Status injected = count_kernel(work->kernel->name);
        return injected != kSuccess ? injected : run_launch(*work);
    };
    return enqueue(stream.get(), operation);
}

}  // namespace

K3EMU_API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned dynamic_bytes, void* stream, void** parameters,
                             void** extra) {
    K3EMU_CALL(0);
    const Config c = {grid_x, grid_y, grid_z, block_x, block_y, block_z, dynamic_bytes, stream, nullptr, 0};
    return launch(call.context(), c, function, parameters, extra);
}

K3EMU_API int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    K3EMU_CALL(0);
    return config ? launch(call.context(), *config, function, parameters, extra) : kInvalidValue;
}

K3EMU_API int cuLaunchCooperativeKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                                        void**) {
    K3EMU_CALL(0);
    return kNotSupported;                                    // blocks run one after another
}
