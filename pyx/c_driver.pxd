# SPDX-License-Identifier: MIT
"""The C side of the driver layer, driver.h and cuda/k3_launch.h: declarations only.

A module that calls these sets the table of entry points with k3_use(driver_table()), which driver.pxd has.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from posix.types cimport pid_t

from k3session._core.c_ops cimport k3_cuda, k3_dims, k3_ops


cdef extern from "driver.h" nogil:
    ctypedef uint64_t k3_address

    enum:
        K3_FORKED
        K3_CLOSED
        K3_MAX_FUNCTIONS
        K3_MAX_IMAGES
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_STUB_LIBRARY
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_IMAGE
        CUDA_ERROR_NO_BINARY_FOR_GPU
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_SYSTEM_NOT_READY
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        CUDA_ERROR_UNKNOWN

    # k3_call takes the entry point and its arguments, whose types the compiler checks.
    int cuInit "k3_cu->cuInit" (unsigned) noexcept
    int cuDriverGetVersion "k3_cu->cuDriverGetVersion" (int*) noexcept
    int cuDeviceGetCount "k3_cu->cuDeviceGetCount" (int*) noexcept
    int cuDeviceGet "k3_cu->cuDeviceGet" (int*, int) noexcept
    int cuDeviceGetName "k3_cu->cuDeviceGetName" (char*, int, int) noexcept
    int cuDeviceGetAttribute "k3_cu->cuDeviceGetAttribute" (int*, int, int) noexcept
    int cuDeviceTotalMem "k3_cu->cuDeviceTotalMem" (size_t*, int) noexcept
    int cuDevicePrimaryCtxRetain "k3_cu->cuDevicePrimaryCtxRetain" (void**, int) noexcept
    int cuDevicePrimaryCtxRelease "k3_cu->cuDevicePrimaryCtxRelease" (int) noexcept
    int cuLibraryLoadData "k3_cu->cuLibraryLoadData" (
        void**, const void*, int*, void**, unsigned, int*, void**, unsigned) noexcept
    int cuLibraryUnload "k3_cu->cuLibraryUnload" (void*) noexcept
    int cuLibraryGetKernel "k3_cu->cuLibraryGetKernel" (void**, void*, const char*) noexcept
    int cuKernelGetFunction "k3_cu->cuKernelGetFunction" (void**, void*) noexcept
    int cuFuncLoad "k3_cu->cuFuncLoad" (void*) noexcept
    int cuFuncGetAttribute "k3_cu->cuFuncGetAttribute" (int*, int, void*) noexcept
    int cuFuncSetAttribute "k3_cu->cuFuncSetAttribute" (void*, int, int) noexcept
    int cuMemGetInfo "k3_cu->cuMemGetInfo" (size_t*, size_t*) noexcept
    int cuMemAlloc "k3_cu->cuMemAlloc" (k3_address*, size_t) noexcept
    int cuMemFree "k3_cu->cuMemFree" (k3_address) noexcept
    int cuMemHostAlloc "k3_cu->cuMemHostAlloc" (void**, size_t, unsigned) noexcept
    int cuMemFreeHost "k3_cu->cuMemFreeHost" (void*) noexcept
    int cuMemcpyHtoDAsync "k3_cu->cuMemcpyHtoDAsync" (k3_address, const void*, size_t, void*) noexcept
    int cuMemcpyDtoHAsync "k3_cu->cuMemcpyDtoHAsync" (void*, k3_address, size_t, void*) noexcept
    int cuMemcpyDtoDAsync "k3_cu->cuMemcpyDtoDAsync" (k3_address, k3_address, size_t, void*) noexcept
    int cuMemsetD8Async "k3_cu->cuMemsetD8Async" (k3_address, unsigned char, size_t, void*) noexcept
    int cuStreamCreate "k3_cu->cuStreamCreate" (void**, unsigned) noexcept
    int cuStreamDestroy "k3_cu->cuStreamDestroy" (void*) noexcept
    int cuStreamGetCtx "k3_cu->cuStreamGetCtx" (void*, void**) noexcept
    int cuStreamSynchronize "k3_cu->cuStreamSynchronize" (void*) noexcept
    int cuStreamQuery "k3_cu->cuStreamQuery" (void*) noexcept
    int cuStreamWaitEvent "k3_cu->cuStreamWaitEvent" (void*, void*, unsigned) noexcept
    int cuStreamBeginCapture "k3_cu->cuStreamBeginCapture" (void*, int) noexcept
    int cuStreamEndCapture "k3_cu->cuStreamEndCapture" (void*, void**) noexcept
    int cuEventCreate "k3_cu->cuEventCreate" (void**, unsigned) noexcept
    int cuEventDestroy "k3_cu->cuEventDestroy" (void*) noexcept
    int cuEventRecord "k3_cu->cuEventRecord" (void*, void*) noexcept
    int cuEventSynchronize "k3_cu->cuEventSynchronize" (void*) noexcept
    int cuGraphInstantiate "k3_cu->cuGraphInstantiateWithFlags" (void**, void*, unsigned long long) noexcept
    int cuGraphUpload "k3_cu->cuGraphUpload" (void*, void*) noexcept
    int cuGraphLaunch "k3_cu->cuGraphLaunch" (void*, void*) noexcept
    int cuGraphExecDestroy "k3_cu->cuGraphExecDestroy" (void*) noexcept
    int cuGraphDestroy "k3_cu->cuGraphDestroy" (void*) noexcept

    bint k3_is_sticky(int) noexcept
    bint k3_driver_find_first(void*) noexcept
    const char* k3_driver_find_all(void*) noexcept
    const char* k3_driver_path() noexcept
    const char* k3_status_name(int) noexcept
    const char* k3_status_text(int) noexcept

    cdef cppclass k3_driver:
        pass

    void k3_use(k3_driver*) noexcept

    cdef cppclass k3_gpu:
        void* context
        void* stream
        void** library
        void** function
        const char** name
        int n_libraries
        int device
        pid_t process
        bint waits
        int lost
        const char* failed
        int64_t allocated
        void* owner

    int k3_enter(k3_gpu*, void**) noexcept
    void k3_leave(k3_gpu*, void*) noexcept
    int k3_call(k3_gpu*, ...) noexcept
    int k3_release(k3_gpu*, ...) noexcept
    int k3_launch(k3_gpu*, void*, int, unsigned, unsigned, unsigned, unsigned, size_t, void**) noexcept


cdef extern from "k3_launch.h" nogil:
    void k3_cuda_ops(k3_ops*) noexcept
    int64_t k3_cuda_work_bytes(const k3_dims*, int64_t) noexcept
    int k3_cuda_top_k(k3_cuda*, const float*, int64_t, int64_t, int64_t, int32_t*, float*, float*) noexcept
    const char* k3_cuda_kernel(int) noexcept
