# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t


cdef class Memory:
    cdef readonly bint mapped           # whether host code may read and write it in place

    cdef void* allocate(self, int64_t nbytes, bint zeroed=*) except NULL
    cdef void release(self, void* start) noexcept
    cdef int read(self, void* host, const void* here, int64_t nbytes) except -1
    cdef int write(self, void* here, const void* host, int64_t nbytes) except -1
    cdef int copy(self, void* to, const void* start, int64_t nbytes, int64_t pitch, int64_t count) except -1
    cdef int fill(self, void* here, int value, int64_t nbytes) except -1


cdef class HostMemory(Memory):
    pass


cdef HostMemory HOST

cdef void* aligned(int64_t nbytes) except NULL
