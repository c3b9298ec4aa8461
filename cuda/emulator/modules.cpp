// SPDX-License-Identifier: MIT
//
// Libraries, modules and their kernels.  The kernels are those that build.py has compiled into this library; an image
// that is loaded only has to look like one (a fatbin, a cubin, PTX, or the text "k3emu kernels"), and gives access to all
// of them by name.

#include <string.h>

#include <algorithm>

#include "check.h"
#include "driver.h"

using namespace k3emu;

namespace {

Status check_image(const void* code) {
    if (!code) return kInvalidValue;
    uint32_t magic;
    memcpy(&magic, code, 4);
    const char* text = static_cast<const char*>(code);
    const bool binary = magic == 0xba55ed50u || magic == 0x466243b1u || memcmp(code, "\177ELF", 4) == 0;
    const bool ptx = magic == 0x2f2f0a0au || strncmp(text, "//", 2) == 0 || strncmp(text, ".version", 8) == 0;
    if (!binary && !ptx && strncmp(text, "k3emu kernels", 13) != 0) return kInvalidImage;
    return options().arch < 80 ? kNoBinaryForGpu : kSuccess;     // what the project's images are built for
}

Status check_file(const char* path) {
    char start[16] = {};
    FILE* file = path ? fopen(path, "rb") : nullptr;
    if (!file) return path ? kFileNotFound : kInvalidValue;
    const size_t n = fread(start, 1, sizeof start, file);
    fclose(file);
    return n < 4 ? kInvalidImage : check_image(start);
}

Status load(Context_* context, Library** out, Status image) {
    if (!out) return kInvalidValue;
    if (image != kSuccess) return image;
    auto library = make_object<Library>(context);
    library->module = context != nullptr;
    *out = library.get();
    return kSuccess;
}

Status unload(Library* handle) {
    auto library = find<Library>(handle);
    if (!library) return kInvalidHandle;
    for (Function* f : library->functions) remove_object(f);
    remove_object(library.get());
    return kSuccess;
}

Function* function_of(Library* library, const k3emu_kernel* kernel) {
    for (Function* f : library->functions) {
        if (f->kernel == kernel) return f;
    }
    auto f = make_object<Function>(library->context);
    f->kernel = kernel;
    f->library = library;
    library->functions.insert(f.get());
    return f.get();
}

Status get_function(Function** out, Library* handle, const char* name) {
    auto library = find<Library>(handle);
    if (!library) return kInvalidHandle;
    if (!out || !name) return kInvalidValue;
    const k3emu_kernel* kernel = find_kernel(name);
    if (!kernel) return kNotFound;
    *out = function_of(library.get(), kernel);
    return kSuccess;
}

Status enumerate(Function** out, unsigned count, Library* handle) {
    auto library = find<Library>(handle);
    if (!library) return kInvalidHandle;
    const auto& all = all_kernels();
    for (unsigned i = 0; i < count && i < all.size(); ++i) out[i] = function_of(library.get(), all[i]);
    return kSuccess;
}

Status get_attribute(int* value, int attribute, const void* handle) {
    auto f = find<Function>(handle);
    if (!f) return kInvalidHandle;
    if (!value) return kInvalidValue;
    switch (attribute) {
        case 0: *value = f->kernel->max_threads ? f->kernel->max_threads : 1024; break;
        case 1: *value = shared_static_bytes(f->kernel->name); break;
        case 4: *value = 32; break;                          // registers: nothing is known of them here
        case 5:
        case 6: *value = (int)options().arch; break;
        case 8: *value = f->max_dynamic; break;
        case 9: *value = f->carveout; break;
        default: *value = 0;
    }
    return attribute < 0 || attribute > 15 ? kInvalidValue : kSuccess;
}

Status set_attribute(int attribute, int value, const void* handle) {
    auto f = find<Function>(handle);
    if (!f) return kInvalidHandle;
    if (attribute == 8) {
        if (value < 0 || value + shared_static_bytes(f->kernel->name) > (int)kMaxDynamic) return kInvalidValue;
        f->max_dynamic = value;
    } else if (attribute == 9) {
        if (value < -1 || value > 100) return kInvalidValue;
        f->carveout = value;
    } else {
        return kInvalidValue;
    }
    return kSuccess;
}

Status parameter_info(const void* handle, size_t i, size_t* offset, size_t* size) {
    auto f = find<Function>(handle);
    if (!f) return kInvalidHandle;
    if (!offset || i >= (size_t)f->kernel->parameters) return kInvalidValue;
    *offset = parameter_offset(f->kernel, (int)i);
    if (size) *size = f->kernel->sizes[i];
    return kSuccess;
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// libraries and kernels
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuLibraryLoadData(Library** out, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
    K3EMU_CALL(kNoContext | kUnsafe);
    return load(nullptr, out, check_image(code));
}
K3EMU_API int cuLibraryLoadFromFile(Library** out, const char* path, void*, void*, unsigned, void*, void*, unsigned) {
    K3EMU_CALL(kNoContext | kUnsafe);
    return load(nullptr, out, check_file(path));
}
K3EMU_API int cuLibraryUnload(Library* library) {
    K3EMU_CALL(kNoContext | kReleases | kUnsafe);
    return call.finish(unload(library));
}
K3EMU_API int cuLibraryGetKernel(Function** out, Library* library, const char* name) {
    K3EMU_CALL(kNoContext);
    return get_function(out, library, name);
}
K3EMU_API int cuLibraryGetKernelCount(unsigned* count, Library* library) {
    K3EMU_CALL(kNoContext);
    if (!find<Library>(library)) return kInvalidHandle;
    if (!count) return kInvalidValue;
    *count = (unsigned)all_kernels().size();
    return kSuccess;
}
K3EMU_API int cuLibraryEnumerateKernels(Function** out, unsigned count, Library* library) {
    K3EMU_CALL(kNoContext);
    return out ? enumerate(out, count, library) : kInvalidValue;
}
K3EMU_API int cuLibraryGetModule(Library** out, Library* library) {
    K3EMU_CALL(0);
    if (!find<Library>(library)) return kInvalidHandle;
    if (!out) return kInvalidValue;
    *out = library;
    return kSuccess;
}
K3EMU_API int cuLibraryGetGlobal(uintptr_t*, size_t*, Library* library, const char*) {
    K3EMU_CALL(0);
    return find<Library>(library) ? kNotFound : kInvalidHandle;      // the project has no device globals
}
K3EMU_API int cuKernelGetFunction(Function** out, Function* kernel) {
    K3EMU_CALL(0);
    auto f = find<Function>(kernel);
    if (!f) return kInvalidHandle;
    if (!out) return kInvalidValue;
    f->loaded = true;
    *out = f.get();
    return kSuccess;
}
K3EMU_API int cuKernelGetLibrary(Library** out, Function* kernel) {
    K3EMU_CALL(kNoContext);
    auto f = find<Function>(kernel);
    if (!f) return kInvalidHandle;
    if (!out) return kInvalidValue;
    *out = f->library;
    return kSuccess;
}
K3EMU_API int cuKernelGetName(const char** out, Function* kernel) {
    K3EMU_CALL(kNoContext);
    auto f = find<Function>(kernel);
    if (!f) return kInvalidHandle;
    if (!out) return kInvalidValue;
    *out = f->kernel->name;
    return kSuccess;
}
K3EMU_API int cuKernelGetAttribute(int* value, int attribute, Function* kernel, int device) {
    K3EMU_CALL(kNoContext);
    return require_device(device) == kSuccess ? get_attribute(value, attribute, kernel) : kInvalidDevice;
}
K3EMU_API int cuKernelSetAttribute(int attribute, int value, Function* kernel, int device) {
    K3EMU_CALL(kNoContext);
    return require_device(device) == kSuccess ? set_attribute(attribute, value, kernel) : kInvalidDevice;
}
K3EMU_API int cuKernelGetParamInfo(Function* kernel, size_t i, size_t* offset, size_t* size) {
    K3EMU_CALL(kNoContext);
    return parameter_info(kernel, i, offset, size);
}

// ---------------------------------------------------------------------------------------------
// modules and functions
// ---------------------------------------------------------------------------------------------

K3EMU_API int cuModuleLoadData(Library** out, const void* code) {
    K3EMU_CALL(kUnsafe);
    return load(call.context(), out, check_image(code));
}
K3EMU_API int cuModuleLoadDataEx(Library** out, const void* code, unsigned, void*, void**) {
    K3EMU_CALL(kUnsafe);
    return load(call.context(), out, check_image(code));
}
K3EMU_API int cuModuleLoadFatBinary(Library** out, const void* code) {
    K3EMU_CALL(kUnsafe);
    return load(call.context(), out, check_image(code));
}
K3EMU_API int cuModuleLoad(Library** out, const char* path) {
    K3EMU_CALL(kUnsafe);
    return load(call.context(), out, check_file(path));
}
K3EMU_API int cuModuleUnload(Library* module) {
    K3EMU_CALL(kReleases | kUnsafe);
    return call.finish(unload(module));
}
K3EMU_API int cuModuleGetFunction(Function** out, Library* module, const char* name) {
    K3EMU_CALL(0);
    return get_function(out, module, name);
}
K3EMU_API int cuModuleGetFunctionCount(unsigned* count, Library* module) {
    K3EMU_CALL(0);
    if (!find<Library>(module)) return kInvalidHandle;
    if (!count) return kInvalidValue;
    *count = (unsigned)all_kernels().size();
    return kSuccess;
}
K3EMU_API int cuModuleEnumerateFunctions(Function** out, unsigned count, Library* module) {
    K3EMU_CALL(0);
    return out ? enumerate(out, count, module) : kInvalidValue;
}
K3EMU_API int cuModuleGetGlobal_v2(uintptr_t*, size_t*, Library* module, const char*) {
    K3EMU_CALL(0);
    return find<Library>(module) ? kNotFound : kInvalidHandle;
}
K3EMU_API int cuModuleGetLoadingMode(int* mode) {
    K3EMU_CALL(kNoContext);
    if (!mode) return kInvalidValue;
    *mode = 2;                                               // lazy
    return kSuccess;
}
K3EMU_API int cuFuncGetModule(Library** out, Function* function) {
    K3EMU_CALL(0);
    auto f = find<Function>(function);
    if (!f) return kInvalidHandle;
    if (!out) return kInvalidValue;
    *out = f->library;
    return kSuccess;
}
K3EMU_API int cuFuncGetName(const char** out, Function* function) {
    K3EMU_CALL(0);
    auto f = find<Function>(function);
    if (!f) return kInvalidHandle;
    if (!out) return kInvalidValue;
    *out = f->kernel->name;
    return kSuccess;
}
K3EMU_API int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    K3EMU_CALL(0);
    return get_attribute(value, attribute, function);
}
K3EMU_API int cuFuncSetAttribute(Function* function, int attribute, int value) {
    K3EMU_CALL(0);
    return set_attribute(attribute, value, function);
}
K3EMU_API int cuFuncGetParamInfo(Function* function, size_t i, size_t* offset, size_t* size) {
    K3EMU_CALL(0);
    return parameter_info(function, i, offset, size);
}
K3EMU_API int cuFuncLoad(Function* function) {
    K3EMU_CALL(0);
    auto f = find<Function>(function);
    if (!f) return kInvalidHandle;
    f->loaded = true;
    return kSuccess;
}
K3EMU_API int cuFuncIsLoaded(int* state, Function* function) {
    K3EMU_CALL(0);
    auto f = find<Function>(function);
    if (!f) return kInvalidHandle;
    if (!state) return kInvalidValue;
    *state = f->loaded;
    return kSuccess;
}
K3EMU_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t dynamic_bytes) {
    K3EMU_CALL(0);
    auto f = find<Function>(function);
    if (!f) return kInvalidHandle;
    if (!blocks || threads <= 0) return kInvalidValue;
    const size_t shared = dynamic_bytes + (size_t)shared_static_bytes(f->kernel->name) + 1024;
    *blocks = (int)std::min<size_t>({32, 2048 / (size_t)threads, 233472 / shared});
    return kSuccess;
}
