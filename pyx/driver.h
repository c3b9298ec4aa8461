// SPDX-License-Identifier: MIT
//
// The CUDA driver, opened while the program runs: no header and no library of CUDA is needed to build or to import.
//
// An entry point has one line in K3_DRIVER: the name, the suffix of its symbol, the version of CUDA from which the name
// means this symbol, and its parameters.  The plain symbol of a name with a suffix is an older function with other
// parameters (cuMemAlloc has 32-bit sizes), so neither way of asking may leave the suffix or the version out.
//
// Below it is what every call needs: the context of a device, made current for the time of the call.

#ifndef K3_DRIVER_H
#define K3_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include <atomic>

// Handles of the driver are pointers, device addresses are integers.
typedef uint64_t k3_address;

#define K3_DRIVER(X)                                                                                                            \
    X(cuInit, , 2000, (unsigned flags))                                                                                         \
    X(cuDriverGetVersion, , 2020, (int* version))                                                                               \
    X(cuGetErrorName, , 6000, (int status, const char** name))                                                                  \
    X(cuGetErrorString, , 6000, (int status, const char** text))                                                                \
    X(cuDeviceGetCount, , 2000, (int* count))                                                                                   \
    X(cuDeviceGet, , 2000, (int* device, int number))                                                                           \
    X(cuDeviceGetName, , 2000, (char* name, int size, int device))                                                              \
    X(cuDeviceGetAttribute, , 2000, (int* value, int attribute, int device))                                                    \
    X(cuDeviceTotalMem, _v2, 3020, (size_t* bytes, int device))                                                                 \
    X(cuDevicePrimaryCtxRetain, , 7000, (void** context, int device))                                                           \
    X(cuDevicePrimaryCtxRelease, _v2, 11000, (int device))                                                                      \
    X(cuCtxGetCurrent, , 4000, (void** context))                                                                                \
    X(cuCtxSetCurrent, , 4000, (void* context))                                                                                 \
    X(cuLibraryLoadData, , 12000,                                                                                               \
      (void** library, const void* image, int* jit, void** jit_values, unsigned n_jit, int* options, void** values,             \
       unsigned n_options))                                                                                                     \
    X(cuLibraryUnload, , 12000, (void* library))                                                                                \
    X(cuLibraryGetKernel, , 12000, (void** kernel, void* library, const char* name))                                            \
    X(cuKernelGetFunction, , 12000, (void** function, void* kernel))                                                            \
    X(cuFuncLoad, , 12040, (void* function))                                                                                    \
    X(cuFuncGetAttribute, , 2020, (int* value, int attribute, void* function))                                                  \
    X(cuFuncSetAttribute, , 9000, (void* function, int attribute, int value))                                                   \
    X(cuLaunchKernel, , 4000,                                                                                                   \
      (void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, \
       unsigned shared, void* stream, void** args, void** extra))                                                               \
    X(cuMemGetInfo, _v2, 3020, (size_t* free, size_t* total))                                                                   \
    X(cuMemAlloc, _v2, 3020, (k3_address * address, size_t bytes))                                                              \
    X(cuMemFree, _v2, 3020, (k3_address address))                                                                               \
    X(cuMemHostAlloc, , 2020, (void** host, size_t bytes, unsigned flags))                                                      \
    X(cuMemFreeHost, , 2000, (void* host))                                                                                      \
    X(cuMemcpyHtoDAsync, _v2, 3020, (k3_address to, const void* from, size_t bytes, void* stream))                              \
    X(cuMemcpyDtoHAsync, _v2, 3020, (void* to, k3_address from, size_t bytes, void* stream))                                    \
    X(cuMemcpyDtoDAsync, _v2, 3020, (k3_address to, k3_address from, size_t bytes, void* stream))                               \
    X(cuMemsetD8Async, , 3020, (k3_address address, unsigned char value, size_t bytes, void* stream))                           \
    X(cuStreamCreate, , 2000, (void** stream, unsigned flags))                                                                  \
    X(cuStreamDestroy, _v2, 4000, (void* stream))                                                                               \
    X(cuStreamGetCtx, , 9020, (void* stream, void** context))                                                                   \
    X(cuStreamSynchronize, , 2000, (void* stream))                                                                              \
    X(cuStreamQuery, , 2000, (void* stream))                                                                                    \
    X(cuStreamWaitEvent, , 3020, (void* stream, void* event, unsigned flags))                                                   \
    X(cuStreamBeginCapture, _v2, 10010, (void* stream, int mode))                                                               \
    X(cuStreamEndCapture, , 10000, (void* stream, void** graph))                                                                \
    X(cuStreamIsCapturing, , 10000, (void* stream, int* state))                                                                 \
    X(cuThreadExchangeStreamCaptureMode, , 10010, (int* mode))                                                                  \
    X(cuEventCreate, , 2000, (void** event, unsigned flags))                                                                    \
    X(cuEventDestroy, _v2, 4000, (void* event))                                                                                 \
    X(cuEventRecord, , 2000, (void* event, void* stream))                                                                       \
    X(cuEventSynchronize, , 2000, (void* event))                                                                                \
    X(cuGraphInstantiateWithFlags, , 11040, (void** exec, void* graph, unsigned long long flags))                               \
    X(cuGraphUpload, , 11010, (void* exec, void* stream))                                                                       \
    X(cuGraphLaunch, , 10000, (void* exec, void* stream))                                                                       \
    X(cuGraphExecDestroy, , 10000, (void* exec))                                                                                \
    X(cuGraphDestroy, , 10000, (void* graph))

struct k3_driver {
#define X(NAME, SUFFIX, VERSION, PARAMETERS) int(*NAME) PARAMETERS;
    K3_DRIVER(X)
#undef X
};
// Set by each module that includes this: the table is a variable of driver.pyx.
static k3_driver* k3_cu;
static inline void k3_use(k3_driver* table) { k3_cu = table; }

// Statuses that are told apart here, by the driver's names.  The negative ones are our own.
enum {
    K3_FORKED = -1,                                  // the process is a fork of the one that opened the device
    K3_CLOSED = -2,
    CUDA_SUCCESS = 0,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_STUB_LIBRARY = 34,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_ASSERT = 710,
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
    CUDA_ERROR_LAUNCH_FAILED = 719,                  // 714 to 719: what a kernel did wrong
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    CUDA_ERROR_UNKNOWN = 999
};

// Whether a status means that the context can do nothing any more.
inline bool k3_is_sticky(int status) {
    return status == CUDA_ERROR_ILLEGAL_ADDRESS || status == CUDA_ERROR_LAUNCH_TIMEOUT || status == CUDA_ERROR_ASSERT ||
           status == CUDA_ERROR_CONTEXT_IS_DESTROYED || status == CUDA_ERROR_ECC_UNCORRECTABLE ||
           status == CUDA_ERROR_NVLINK_UNCORRECTABLE ||
           (status >= CUDA_ERROR_HARDWARE_STACK_ERROR && status <= CUDA_ERROR_LAUNCH_FAILED);
}

// ---------------------------------------------------------------------------------------------
// the library
// ---------------------------------------------------------------------------------------------

// Finds cuInit and cuDriverGetVersion, which every driver has; false where one is missing.
static inline bool k3_driver_find_first(void* library) {
    *k3_cu = k3_driver();
    k3_cu->cuInit = (decltype(k3_cu->cuInit))dlsym(library, "cuInit");
    k3_cu->cuDriverGetVersion = (decltype(k3_cu->cuDriverGetVersion))dlsym(library, "cuDriverGetVersion");
    return k3_cu->cuInit && k3_cu->cuDriverGetVersion;
}

// Fills the table; the name of the first entry point that is missing, or NULL.
static inline const char* k3_driver_find_all(void* library) {
    typedef int (*GetProcAddress)(const char*, void**, int, unsigned long long, int*);
    const GetProcAddress get = (GetProcAddress)dlsym(library, "cuGetProcAddress_v2");
    void* found;
    int how;
#define X(NAME, SUFFIX, VERSION, PARAMETERS)                                        \
    found = NULL;                                                                   \
    if (!get || get(#NAME, &found, VERSION, 0, &how) != CUDA_SUCCESS) found = NULL; \
    if (!found) found = dlsym(library, #NAME #SUFFIX);                              \
    if (!found) return #NAME;                                                       \
    k3_cu->NAME = (decltype(k3_cu->NAME))found;
    K3_DRIVER(X)
#undef X
    return NULL;
}

// The file that the driver was found in.
static inline const char* k3_driver_path() {
    Dl_info info;
    return dladdr((void*)k3_cu->cuInit, &info) && info.dli_fname ? info.dli_fname : "";
}

static inline const char* k3_status_name(int status) {
    const char* name = NULL;
    return k3_cu->cuGetErrorName && k3_cu->cuGetErrorName(status, &name) == CUDA_SUCCESS && name ? name : "an unknown status";
}

static inline const char* k3_status_text(int status) {
    const char* text = NULL;
    return k3_cu->cuGetErrorString && k3_cu->cuGetErrorString(status, &text) == CUDA_SUCCESS && text ? text : "no description";
}

// ---------------------------------------------------------------------------------------------
// a device in use
// ---------------------------------------------------------------------------------------------

enum { K3_MAX_IMAGES = 128, K3_MAX_FUNCTIONS = 128 };

struct k3_gpu {
    void* context = NULL;                            // the primary context, retained; NULL once released
    void* stream = NULL;                             // for what belongs to no other stream
    void* library[K3_MAX_IMAGES] = {};
    void* function[K3_MAX_FUNCTIONS] = {};           // by the number of the kernel
    const char* name[K3_MAX_FUNCTIONS] = {};
    int n_libraries = 0;
    int device = 0;
    pid_t process = 0;                               // that opened the device
    bool waits = false;                              // after each launch, to tell which kernel failed
    std::atomic<int> lost{0};                        // the first status that left the context unusable
    std::atomic<const char*> failed{NULL};           // the kernel whose launch failed last
    std::atomic<int64_t> allocated{0};               // bytes of device memory
    void* owner = NULL;                              // the Python object, with a title, and a sentence once it is lost
};

// Makes the device's context current in this thread; `before` is what k3_leave puts back.
static inline int k3_enter(k3_gpu* gpu, void** before) {
    *before = NULL;
    if (!gpu || !gpu->context) return K3_CLOSED;
    if (gpu->process != getpid()) return K3_FORKED;
    if (gpu->lost) return gpu->lost;
    const int status = k3_cu->cuCtxGetCurrent(before);
    return status == CUDA_SUCCESS && *before != gpu->context ? k3_cu->cuCtxSetCurrent(gpu->context) : status;
}

static inline void k3_leave(k3_gpu* gpu, void* before) {
    if (before != gpu->context) k3_cu->cuCtxSetCurrent(before);
}

// One call of an entry point, in the device's context.
template <class... P, class... A> static int k3_call(k3_gpu* gpu, int (*entry)(P...), A... a) {
    void* before;
    int status = k3_enter(gpu, &before);
    if (status == CUDA_SUCCESS) {
        status = entry((P)a...);
        k3_leave(gpu, before);
    }
    return status;
}

// A call that gives something back.  It happens at any time, be it by the garbage collector: in the middle of a capture,
// which it must not invalidate; after an error, when there is nothing to add to it; in a forked child, which owns nothing.
template <class... P, class... A> static int k3_release(k3_gpu* gpu, int (*entry)(P...), A... a) {
    if (!gpu->context || gpu->process != getpid()) return CUDA_SUCCESS;
    void* before = NULL;
    k3_cu->cuCtxGetCurrent(&before);
    if (before != gpu->context) k3_cu->cuCtxSetCurrent(gpu->context);
    int mode = 2;                                    // CU_STREAM_CAPTURE_MODE_RELAXED
    k3_cu->cuThreadExchangeStreamCaptureMode(&mode);
    const int status = entry((P)a...);
    k3_cu->cuThreadExchangeStreamCaptureMode(&mode);
    k3_leave(gpu, before);
    return gpu->lost || k3_is_sticky(status) || status == CUDA_ERROR_DEINITIALIZED ? CUDA_SUCCESS : status;
}

// A launch of a kernel by its number, in a thread that has entered.
static inline int k3_launch(k3_gpu* gpu, void* stream, int kernel, unsigned x, unsigned y, unsigned z, unsigned threads,
                            size_t shared, void** args) {
    int status = k3_cu->cuLaunchKernel(gpu->function[kernel], x, y, z, threads, 1, 1, (unsigned)shared, stream, args, NULL);
    if (status == CUDA_SUCCESS && gpu->waits) {
        int capturing = 0;
        status = k3_cu->cuStreamIsCapturing(stream, &capturing);
        if (status == CUDA_SUCCESS && !capturing) status = k3_cu->cuStreamSynchronize(stream);
    }
    if (status != CUDA_SUCCESS) gpu->failed = gpu->name[kernel];
    return status;
}

#endif
