# SPDX-License-Identifier: MIT
"""Where state and scratch live: the host's memory here, a device's in pyx/cuda_ops.pyx, under one interface."""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap
from posix.stdlib cimport posix_memalign
from posix.unistd cimport _SC_PAGESIZE, sysconf

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void* start, size_t nbytes, int advice)
    int MADV_HUGEPAGE

cdef enum:
    FRONT = 64                          # bytes before what `allocate` gives: a cache line, which keeps the alignment
cdef int64_t HUGE_PAGE = 2 << 20
cdef int64_t LARGE = 8 << 20            # more than that has pages of its own: not each slab, a process may have 65530 mappings


cdef void* aligned(int64_t nbytes) except NULL:
    """Host memory aligned to a cache line; MemoryError says how much was asked for."""
    cdef void* p = NULL
    if nbytes < 0 or posix_memalign(&p, 64, <size_t>(nbytes if nbytes > 0 else 64)) != 0:
        raise MemoryError(f"could not allocate {nbytes / 2**20:.1f} MiB of host memory")
    return p


cdef char* mapped(int64_t nbytes) except NULL:
    """Pages of their own, zero, and huge ones where the kernel has them: few faults, and what is not touched is not there."""
    cdef char* start = <char*>mmap(NULL, nbytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef int64_t before
    if <void*>start == MAP_FAILED:
        raise MemoryError(f"could not allocate {nbytes / 2**20:.1f} MiB of host memory")
    before = -<int64_t><uintptr_t>start & (HUGE_PAGE - 1)
    if before > 0:
        munmap(start, before)
    munmap(start + before + nbytes, HUGE_PAGE - before)
    madvise(start + before, nbytes, MADV_HUGEPAGE)
    return start + before


cdef class Memory:
    """A kind of memory.  Every call is complete when it returns."""

    cdef void* allocate(self, int64_t nbytes, bint zeroed=True) except NULL:
        """That many bytes, aligned to 64 at least; MemoryError where there is no room."""
        raise NotImplementedError

    cdef void release(self, void* start) noexcept:
        """Frees what `allocate` gave, NULL included."""

    cdef int read(self, void* host, const void* here, int64_t nbytes) except -1:
        """Copies to the host."""
        raise NotImplementedError

    cdef int write(self, void* here, const void* host, int64_t nbytes) except -1:
        """Copies from the host."""
        raise NotImplementedError

    cdef int copy(self, void* to, const void* start, int64_t nbytes, int64_t pitch, int64_t count) except -1:
        """Copies inside this memory: ``count`` pieces of ``nbytes``, one every ``pitch`` bytes on both sides."""
        raise NotImplementedError

    cdef int fill(self, void* here, int value, int64_t nbytes) except -1:
        """Sets every byte."""
        raise NotImplementedError


cdef class HostMemory(Memory):
    """The memory of the process."""

    def __cinit__(self):
        self.mapped = True

    cdef void* allocate(self, int64_t nbytes, bint zeroed=True) except NULL:
        cdef int64_t page = sysconf(_SC_PAGESIZE), total
        cdef char* front
        if nbytes < 0:
            raise MemoryError(f"could not allocate {nbytes} bytes")
        total = nbytes + FRONT
        if nbytes <= LARGE:
            front = <char*>aligned(total)
            (<int64_t*>front)[0] = 0
            if zeroed:
                memset(front + FRONT, 0, nbytes)
        else:
            total = (total + page - 1) // page * page
            front = mapped(total)
            (<int64_t*>front)[0] = total
        return front + FRONT

    cdef void release(self, void* start) noexcept:
        cdef char* front = <char*>start - FRONT
        if start == NULL:
            return
        if (<int64_t*>front)[0] == 0:
            free(front)
        else:
            munmap(front, (<int64_t*>front)[0])

    cdef int read(self, void* host, const void* here, int64_t nbytes) except -1:
        memcpy(host, here, nbytes)
        return 0

    cdef int write(self, void* here, const void* host, int64_t nbytes) except -1:
        memcpy(here, host, nbytes)
        return 0

    cdef int copy(self, void* to, const void* start, int64_t nbytes, int64_t pitch, int64_t count) except -1:
        cdef int64_t i
        for i in range(count):
            memcpy(<char*>to + i * pitch, <const char*>start + i * pitch, nbytes)
        return 0

    cdef int fill(self, void* here, int value, int64_t nbytes) except -1:
        memset(here, value, nbytes)
        return 0


HOST = HostMemory()
