# SPDX-License-Identifier: MIT
"""A device and its memory.

Every call makes the device's context current in its thread and puts back what was current before, so that other libraries
of the process are not disturbed.  Everything gives back what it holds at close(), with its last reference, and when its
constructor fails half way; a device is released with the last object that refers to it.
"""

import logging
import threading

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from posix.unistd cimport getpid

from k3session._core.c_driver cimport (
    CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    K3_CLOSED, K3_MAX_FUNCTIONS, K3_MAX_IMAGES, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRetain, cuFuncGetAttribute,
    cuFuncLoad, cuFuncSetAttribute, cuKernelGetFunction, cuLibraryGetKernel, cuLibraryLoadData, cuLibraryUnload, cuMemAlloc,
    cuMemFree, cuMemFreeHost, cuMemGetInfo, cuMemHostAlloc, cuMemsetD8Async, cuStreamCreate, cuStreamDestroy,
    cuStreamSynchronize, k3_call, k3_cuda_kernel, k3_cuda_ops, k3_cuda_top_k, k3_cuda_work_bytes, k3_gpu, k3_release,
    k3_status_name, k3_status_text, k3_use,
)
from k3session._core.c_ops cimport k3_cuda, k3_dims, k3_ops
from k3session._core.driver cimport check, count_devices, describe, driver_table, open_driver, out_of_memory, size

from k3session import env, fatbin
from k3session._core.driver import driver
from k3session.errors import DeviceError, DeviceMemoryError

cdef extern from "k3_cuda_build.h":
    const char* K3_CUDA_SOURCES


def _kernel_names():
    cdef int i = 0
    while k3_cuda_kernel(i) != NULL:
        yield k3_cuda_kernel(i).decode()
        i += 1


SOURCES = K3_CUDA_SOURCES.decode()      # digest of the kernels' sources and flags, which the manifest has as well
KERNELS = tuple(_kernel_names())         # the names of the kernels, by number

cdef enum:
    FUNC_SHARED_SIZE_BYTES = 1          # attributes of a function
    FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    NON_BLOCKING = 1                    # a stream that does not wait for the legacy stream

cdef object log = logging.getLogger("k3session")
cdef object lock = threading.RLock()    # opens devices; a destructor may run while it is held
cdef dict contexts = {}                 # of the devices in use, as addresses: a context takes itself out before it goes
k3_use(driver_table())


cdef object fitting(dict device):
    """The kernels of this build; DeviceError where they do not run on that device."""
    title = f"GPU {device['number']} ({device['name']})"
    major, minor = device["capability"]
    if device["capability"] < (8, 0):
        raise DeviceError(f"{title} has compute capability {major}.{minor}, where 8.0 or later is needed; use another GPU or "
                          "the CPU")
    image = fatbin.read(SOURCES)
    refusal = image.refusal(device["capability"], driver()["cuda"])
    if refusal is not None:
        raise DeviceError(f"{title} has compute capability {major}.{minor}, but {refusal}")
    return image


def devices() -> list:
    """What is known of each device without opening it, with the reason why it cannot be used, or None."""
    return [describe(i) | {"refusal": usable(i)} for i in range(count_devices())]


def usable(int number) -> str | None:
    """Why a device cannot be used, or None; never raises.  To open it may still fail: it may have no memory left."""
    try:
        fitting(describe(number))
        context = find_context(number)
    except DeviceError as error:
        return str(error)
    return None if context is None else (<Context>context).lost


# ---------------------------------------------------------------------------------------------
# a device
# ---------------------------------------------------------------------------------------------


cdef int find_function(k3_gpu* gpu, int number, void* lib, const char* name, int max_shared) noexcept nogil:
    """A kernel by its name: loaded now, since nothing may be loaded during a capture, and free to use all shared memory."""
    cdef void* kernel = NULL
    cdef int shared = 0
    cdef int status = k3_call(gpu, cuLibraryGetKernel, &kernel, lib, name)
    if status == 0:
        status = k3_call(gpu, cuKernelGetFunction, &gpu.function[number], kernel)
    if status == 0:
        status = k3_call(gpu, cuFuncLoad, gpu.function[number])
    if status == 0:
        status = k3_call(gpu, cuFuncGetAttribute, &shared, <int>FUNC_SHARED_SIZE_BYTES, gpu.function[number])
    if status == 0:
        status = k3_call(gpu, cuFuncSetAttribute, gpu.function[number], <int>FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                         max_shared - shared)
    return status


@cython.no_gc
cdef class Context:
    def __cinit__(self, int number):
        cdef int status
        cdef k3_gpu* gpu = &self.gpu
        found = describe(number)
        image = fitting(found)
        self.number = number
        self.title = f"GPU {number} ({found['name']})"
        self.name = found["name"]
        self.capability = found["capability"]
        self.multiprocessors = found["multiprocessors"]
        self.total_memory = found["total_memory"]
        self.max_shared = found["max_shared"]
        gpu.owner = <void*>self
        gpu.device = found["device"]
        gpu.process = getpid()
        gpu.waits = env.waits_after_launches()
        with nogil:
            status = cuDevicePrimaryCtxRetain(&gpu.context, gpu.device)
        check(gpu, status, "cuDevicePrimaryCtxRetain")
        with nogil:
            status = k3_call(gpu, cuStreamCreate, &gpu.stream, <unsigned int>NON_BLOCKING)
        check(gpu, status, "cuStreamCreate")
        self.load(image)
        contexts[number] = <uintptr_t><PyObject*>self

    def __dealloc__(self):
        cdef k3_gpu* gpu = &self.gpu
        cdef int i
        if contexts.get(self.number) == <uintptr_t><PyObject*>self:
            del contexts[self.number]
        if gpu.context == NULL:
            return
        with nogil:
            if gpu.stream != NULL:
                k3_release(gpu, cuStreamDestroy, gpu.stream)
            for i in range(gpu.n_libraries):
                k3_release(gpu, cuLibraryUnload, gpu.library[i])
            k3_release(gpu, cuDevicePrimaryCtxRelease, gpu.device)

    cdef int load(self, image) except -1:
        """Loads the images, and finds every kernel that a launch function uses."""
        cdef k3_gpu* gpu = &self.gpu
        cdef const char* data = image.data
        cdef const char* name
        cdef int i, status
        cdef int64_t offset
        place = {}
        if len(image.images) > K3_MAX_IMAGES or len(KERNELS) > K3_MAX_FUNCTIONS:
            raise DeviceError(f"this build has {len(image.images)} images and {len(KERNELS)} kernels; driver.h has room for "
                              f"{K3_MAX_IMAGES} and {K3_MAX_FUNCTIONS}")
        for i, (offset, names) in enumerate(image.images):
            with nogil:
                status = k3_call(gpu, cuLibraryLoadData, &gpu.library[i], data + offset, NULL, NULL, 0, NULL, NULL, 0)
            if status in (CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_UNSUPPORTED_PTX_VERSION):
                raise self.unfit(status, image)
            check(gpu, status, "cuLibraryLoadData")
            gpu.n_libraries = i + 1
            place.update(dict.fromkeys(names, i))
        for i, wanted in enumerate(KERNELS):
            if image.manifest and wanted not in place:
                raise DeviceError(f"the GPU kernels of this build lack {wanted}; build or install k3session again")
            name = gpu.name[i] = k3_cuda_kernel(i)
            offset = place.get(wanted, 0)
            with nogil:
                status = find_function(gpu, i, gpu.library[offset], name, self.max_shared)
            if status in (CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_UNSUPPORTED_PTX_VERSION):
                raise self.unfit(status, image)
            what = b"loading the kernel " + name
            check(gpu, status, what)
        return 0

    cdef object unfit(self, int status, image):
        """The exception for an image that the driver refuses."""
        major, minor = self.capability
        have = ", ".join(image.manifest.get("architectures", ["the emulator"]))
        return DeviceError(
            f"{self.title}, of compute capability {major}.{minor}, cannot run the kernels of this build, which are for {have}: "
            f"{k3_status_text(status).decode()} ({k3_status_name(status).decode()}, {status}); update the driver, or build "
            f"k3session with K3_CUDA_ARCHS={major}{minor}"
        )


cdef Context find_context(int number):
    """The context of a device in use, or None."""
    cdef uintptr_t address = contexts.get(number, 0)
    return <Context><PyObject*>address if address else None


cdef class Device:
    """A GPU.  All who open the same one share its context, which goes when nothing refers to it any more.

    Parameters
    ----------
    number : int
        As nvidia-smi counts, among those that CUDA_VISIBLE_DEVICES leaves.
    """

    def __cinit__(self, int number=0):
        open_driver()
        with lock:
            self.context = find_context(number)
            if self.context is None:
                self.context = Context.__new__(Context, number)
        if self.context.gpu.lost:
            raise DeviceError(self.context.lost)

    cdef Context get(self):
        if self.context is None:
            check(NULL, K3_CLOSED, "")
        return self.context

    def close(self) -> None:
        """Lets go of the device; memory and streams that are open keep what they need of it."""
        self.context = None

    def __enter__(self):
        return self

    def __exit__(self, *args) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self.context is None

    @property
    def number(self) -> int:
        return self.get().number

    @property
    def name(self) -> str:
        return self.get().name

    @property
    def capability(self) -> tuple:
        """The compute capability, as (major, minor)."""
        return self.get().capability

    @property
    def multiprocessors(self) -> int:
        return self.get().multiprocessors

    @property
    def total_memory(self) -> int:
        return self.get().total_memory

    @property
    def free_memory(self) -> int:
        """Bytes that are free now, whoever has the others."""
        cdef size_t free = 0, total = 0
        cdef k3_gpu* gpu = &self.get().gpu
        check(gpu, k3_call(gpu, cuMemGetInfo, &free, &total), "cuMemGetInfo")
        return free

    @property
    def allocated(self) -> int:
        """Bytes of device memory that this process holds through this module."""
        return self.get().gpu.allocated


# ---------------------------------------------------------------------------------------------
# what lives in a device
# ---------------------------------------------------------------------------------------------


# None of these can be part of a cycle.  Without the collector's tp_clear, the destructor still has the context.
@cython.no_gc
cdef class Resource:
    cdef int attach(self, Device device) except -1:
        self.context = device.get()
        self.gpu = &self.context.gpu
        return 0

    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil:
        return 0

    cdef void drop(self) noexcept:
        cdef k3_gpu* gpu = self.gpu
        cdef void* handle = self.handle
        cdef int status = 0
        self.gpu = NULL
        self.handle = NULL
        if gpu != NULL and handle != NULL:
            with nogil:
                status = self.release(gpu, handle)
            if status != 0:
                log.warning("%s of GPU %d was not given back: %s (%d)", type(self).__name__, self.context.number,
                            k3_status_text(status).decode(), status)
        self.context = None

    def __dealloc__(self):
        self.drop()

    def close(self) -> None:
        """Gives it back now."""
        self.drop()

    @property
    def is_closed(self) -> bool:
        return self.gpu == NULL


@cython.no_gc
cdef class DeviceBuffer(Resource):
    """Memory of the device; aligned to 256 bytes, and zero where that is asked for."""

    def __cinit__(self, Device device not None, int64_t nbytes, bint zeroed=False):
        cdef int status
        cdef k3_gpu* gpu
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; expected at least 0")
        self.attach(device)
        gpu = self.gpu
        with nogil:
            status = k3_call(gpu, cuMemAlloc, &self.pointer, <size_t>(nbytes if nbytes else 16))
        if status == CUDA_ERROR_OUT_OF_MEMORY:
            raise out_of_memory(gpu, f"{size(nbytes)} were asked for")
        check(gpu, status, "cuMemAlloc")
        self.handle = <void*><uintptr_t>self.pointer
        self.nbytes = nbytes
        gpu.allocated += nbytes
        if zeroed and nbytes:
            with nogil:
                status = k3_call(gpu, cuMemsetD8Async, self.pointer, <unsigned char>0, <size_t>nbytes, gpu.stream)
                if status == 0:
                    status = k3_call(gpu, cuStreamSynchronize, gpu.stream)
            check(gpu, status, "cuMemsetD8Async")

    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil:
        self.pointer = 0
        gpu.allocated -= self.nbytes
        return k3_release(gpu, cuMemFree, <uintptr_t>handle)


@cython.no_gc
cdef class PinnedBuffer(Resource):
    """Host memory that copies to and from the device read and write without a detour."""

    def __cinit__(self, Device device not None, int64_t nbytes):
        cdef int status
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; expected at least 0")
        self.attach(device)
        with nogil:
            status = k3_call(self.gpu, cuMemHostAlloc, &self.handle, <size_t>(nbytes if nbytes else 16), <unsigned int>0)
        if status == CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceMemoryError(f"{size(nbytes)} of host memory could not be pinned for GPU {self.context.number}; free host "
                                    "memory, or allow this process to lock more")
        check(self.gpu, status, "cuMemHostAlloc")
        self.nbytes = nbytes

    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil:
        return k3_release(gpu, cuMemFreeHost, handle)

    @property
    def address(self) -> int:
        return <uintptr_t>self.handle


cdef class Arena:
    """Owns buffers, and gives them back in the opposite order, on every way out."""

    def __cinit__(self, Device device not None):
        self.device = device
        self.buffers = []

    def __dealloc__(self):
        self._drop()

    cdef uint64_t take(self, int64_t nbytes, bint zeroed=False) except 0:
        buffer = DeviceBuffer.__new__(DeviceBuffer, self.device, nbytes, zeroed)
        self.buffers.append(buffer)
        self.nbytes += nbytes
        return (<DeviceBuffer>buffer).pointer

    cdef void* pin(self, int64_t nbytes) except NULL:
        buffer = PinnedBuffer.__new__(PinnedBuffer, self.device, nbytes)
        self.buffers.append(buffer)
        self.pinned_bytes += nbytes
        return (<PinnedBuffer>buffer).handle

    def alloc(self, int64_t nbytes, bint zeroed=False) -> int:
        """New device memory; the address."""
        return self.take(nbytes, zeroed)

    def close(self) -> None:
        self._drop()

    cdef void _drop(self) noexcept:
        while self.buffers:
            (<Resource>self.buffers.pop()).drop()
        self.nbytes = self.pinned_bytes = 0


# ---------------------------------------------------------------------------------------------
# for other modules
# ---------------------------------------------------------------------------------------------


cdef void cuda_ops(k3_ops* table) noexcept nogil:
    k3_cuda_ops(table)


cdef int64_t cuda_work_bytes(const k3_dims* dims, int64_t rows) noexcept nogil:
    return k3_cuda_work_bytes(dims, rows)


cdef int cuda_top_k(k3_cuda* ctx, const float* logits, int64_t rows, int64_t n, int64_t k, int32_t* ids, float* values,
                    float* log_sum) noexcept nogil:
    return k3_cuda_top_k(ctx, logits, rows, n, k, ids, values, log_sum)
