# SPDX-License-Identifier: MIT
"""The CUDA driver: found at the first use, never at import, and never linked with.

Each way in which it can be unusable has its sentence: what was expected, what was found, and what to do.  `check` is
the one place where a status becomes an exception, for the other modules too.
"""

import os
import threading

from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen
from posix.types cimport pid_t
from posix.unistd cimport getpid

from k3session._core.c_driver cimport (
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_ERROR_UNKNOWN, K3_CLOSED,
    K3_FORKED, cuDeviceGet, cuDeviceGetAttribute, cuDeviceGetCount, cuDeviceGetName, cuDeviceTotalMem, cuDriverGetVersion,
    cuInit, cuMemGetInfo, k3_call, k3_driver, k3_driver_find_all, k3_driver_find_first, k3_driver_path, k3_enter, k3_gpu,
    k3_is_sticky, k3_leave, k3_status_name, k3_status_text, k3_use,
)

from k3session import env, fatbin
from k3session.errors import ClosedError, DeviceError, DeviceMemoryError

NEEDED = 13000                          # the oldest CUDA that a driver has to support: that of release 580

cdef enum:                              # attributes of a device
    MULTIPROCESSOR_COUNT = 16
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97

cdef k3_driver entry_points             # those of all modules
cdef object lock = threading.RLock()    # a destructor may run while it is held
cdef bint initialised = False
cdef pid_t process = 0                  # that initialised it
cdef int supported = 0                  # version of CUDA, by the driver
k3_use(&entry_points)


cdef k3_driver* driver_table() noexcept nogil:
    return &entry_points


cdef object forked():
    return DeviceError(
        "CUDA was in use when this process was forked, and does not survive that; start worker processes with the method "
        "'spawn', or open the model in the child and not before"
    )


cdef str refused_to_start(int status, str path):
    """Why cuInit failed, and what to do."""
    if status == CUDA_ERROR_STUB_LIBRARY:
        return (f"{path} is the stub that the CUDA toolkit links with, and no driver; take its folder out of LD_LIBRARY_PATH, "
                "and install the NVIDIA driver if there is none")
    if status == CUDA_ERROR_NO_DEVICE:
        return ("the NVIDIA driver finds no GPU, where at least one is needed; look at nvidia-smi and CUDA_VISIBLE_DEVICES, and "
                "start a container with access to the GPU (--gpus all)")
    if status == CUDA_ERROR_SYSTEM_NOT_READY:
        return "the GPUs are not ready yet; start nvidia-fabricmanager, in the version of the driver, and try again"
    if status == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return (f"{path} and the loaded kernel module are of different driver versions, which happens after an update; restart "
                "the machine, or load the new kernel module")
    if status == CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
        return (f"{path} belongs to CUDA's forward compatibility package, which this GPU does not support; take its folder out "
                "of LD_LIBRARY_PATH, so that the driver's own library is found")
    if status == CUDA_ERROR_UNKNOWN:
        return ("the NVIDIA driver could not start, for a reason that it does not know (999); look whether nvidia-smi works and "
                "/dev/nvidia-uvm exists, and restart the machine if it was suspended")
    said = f"{k3_status_text(status).decode()} ({k3_status_name(status).decode()}, {status})"
    return f"the NVIDIA driver could not start: {said}; look whether nvidia-smi works"


cdef int load_driver() except -1:
    """Loads the driver's library and finds its entry points; what fails may be tried again."""
    global supported
    cdef const char* missing
    cdef int version = 0, status
    cdef str named = env.driver_library()
    cdef bytes path = os.fsencode(named or "libcuda.so.1")
    cdef const char* file = path
    cdef void* found
    with nogil:
        found = dlopen(file, RTLD_NOW | RTLD_LOCAL)
    if found == NULL:
        error = dlerror()
        because = error.decode(errors="replace") if error != NULL else "no reason was given"
        if named:
            raise DeviceError(f"K3_LIBCUDA is {named!r}, which cannot be loaded ({because}); name the driver's library, or "
                              "unset it")
        raise DeviceError(
            f"there is no NVIDIA driver here: libcuda.so.1 cannot be loaded ({because}); install driver 580 or later, and start "
            "a container with access to the GPU, or use the CPU"
        )
    # It stays loaded whatever comes next: a driver that was told to start must not be unloaded.
    if not k3_driver_find_first(found):
        raise DeviceError(f"{os.fsdecode(path)} is no CUDA driver: it has no cuInit; name the driver's library in K3_LIBCUDA, or "
                          "unset it")
    place = os.fsdecode(k3_driver_path())
    missing = k3_driver_find_all(found)
    with nogil:
        status = cuInit(0)
    if status == CUDA_ERROR_NOT_INITIALIZED:
        raise forked()                  # of a process in which another library had started it
    if status != 0:
        raise DeviceError(refused_to_start(status, place))
    status = cuDriverGetVersion(&version)
    if status != 0 or version < NEEDED:
        raise DeviceError(f"the NVIDIA driver is too old: it supports CUDA {fatbin.version(version)}, where "
                          f"{fatbin.version(NEEDED)} is needed; update it to version 580 or later")
    if missing != NULL:
        raise DeviceError(f"{place} lacks {missing.decode()}, which a driver for CUDA {fatbin.version(version)} has; install the "
                          "NVIDIA driver again")
    supported = version
    return 0


cdef int open_driver() except -1:
    """The driver, ready; DeviceError says why it cannot be used."""
    global initialised, process
    if initialised and process != getpid():
        raise forked()
    with lock:
        if not initialised:
            load_driver()
            process = getpid()
            initialised = True
    return 0


cdef int count_devices() except -1:
    cdef int count = 0
    open_driver()
    check(NULL, cuDeviceGetCount(&count), "cuDeviceGetCount")
    return count


cdef dict describe(int number):
    """What is known of a device without opening it; DeviceError where this code cannot run on it."""
    cdef int device = 0, multiprocessors = 0, major = 0, minor = 0, shared = 0, count = count_devices()
    cdef size_t total = 0
    cdef char name[256]
    cdef const char* attribute = "cuDeviceGetAttribute"
    if not 0 <= number < count:
        have = "there is one, with the number 0" if count == 1 else f"there are {count}, from 0 to {count - 1}"
        raise DeviceError(f"there is no GPU {number}: {have}; CUDA_VISIBLE_DEVICES says which ones a process sees")
    check(NULL, cuDeviceGet(&device, number), "cuDeviceGet")
    check(NULL, cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName")
    check(NULL, cuDeviceTotalMem(&total, device), "cuDeviceTotalMem")
    check(NULL, cuDeviceGetAttribute(&multiprocessors, MULTIPROCESSOR_COUNT, device), attribute)
    check(NULL, cuDeviceGetAttribute(&major, COMPUTE_CAPABILITY_MAJOR, device), attribute)
    check(NULL, cuDeviceGetAttribute(&minor, COMPUTE_CAPABILITY_MINOR, device), attribute)
    check(NULL, cuDeviceGetAttribute(&shared, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device), attribute)
    return {
        "number": number, "device": device, "name": (<bytes>name).decode(errors="replace"), "capability": (major, minor),
        "multiprocessors": multiprocessors, "total_memory": total, "max_shared": shared,
    }


def driver() -> dict:
    """The library and the CUDA version of the driver; DeviceError says why there is none that can be used."""
    open_driver()
    return {"library": os.fsdecode(k3_driver_path()), "cuda": supported}


# ---------------------------------------------------------------------------------------------
# statuses
# ---------------------------------------------------------------------------------------------


cdef int check(k3_gpu* gpu, int status, const char* what) except -1 nogil:
    if status == 0:
        return 0
    with gil:
        raise failure(gpu, status, what.decode())


cdef object failure(k3_gpu* gpu, int status, str what):
    """The exception for a status, and a record of the first one that the context does not survive."""
    if status == K3_CLOSED:
        return ClosedError("a GPU, or memory or a stream of it, was used after it had been closed; open the model again")
    if status == K3_FORKED:
        return forked()
    said = f"{k3_status_text(status).decode()} ({k3_status_name(status).decode()}, {status})"
    if gpu == NULL or gpu.owner == NULL:
        return DeviceError(f"{what} failed: {said}")
    owner = <object>gpu.owner
    if gpu.lost:
        return DeviceError(owner.lost)
    kernel = gpu.failed
    gpu.failed = NULL
    where = what if kernel == NULL else f"the kernel {kernel.decode()}"
    if k3_is_sticky(status):
        hint = "" if kernel != NULL else "; K3_CUDA_SYNC=1 finds the kernel that did it"
        owner.lost = (f"{owner.title} failed in {where}: {said}; all that is open on it is lost, so close it and open the "
                      f"model again{hint}")
        gpu.lost = status
        return DeviceError(owner.lost)
    if status == CUDA_ERROR_OUT_OF_MEMORY:
        return out_of_memory(gpu, f"{where} needs more than there is")
    return DeviceError(f"{where} failed on {owner.title}: {said}")


cdef object out_of_memory(k3_gpu* gpu, str wanted):
    """The exception for a want of memory, with what is free."""
    cdef size_t free = 0, total = 0
    owner = <object>gpu.owner
    room = f"it has {size(owner.total_memory)}"
    if k3_call(gpu, cuMemGetInfo, &free, &total) == 0:
        room = f"{size(free)} of {size(total)} are free"
    return DeviceMemoryError(
        f"{owner.title} has too little memory: {wanted}, and {room}; close other models and programs on it, or use a shorter "
        "context or fewer sessions"
    )


cdef str size(n):
    return f"{n / 2**30:.2f} GiB" if n >= 1 << 30 else f"{n / 2**20:.2f} MiB"


cdef int enter(k3_gpu* gpu, void** before) except -1 nogil:
    return check(gpu, k3_enter(gpu, before), "cuCtxSetCurrent")


cdef void leave(k3_gpu* gpu, void* before) noexcept nogil:
    k3_leave(gpu, before)
