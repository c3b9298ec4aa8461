# SPDX-License-Identifier: MIT
from libc.stdint cimport uint64_t

from k3session._core.c_driver cimport k3_gpu
from k3session._core.gpu cimport Resource


# Methods without the GIL: all return at once but wait(), and only what they do in order is done in order.
cdef class Event(Resource):
    cdef int mark(self, Stream stream) except -1 nogil
    cdef int wait(self) except -1 nogil       # the host waits


cdef class Stream(Resource):
    cdef bint owned                           # not another library's
    cdef bint capturing

    cdef int wait(self) except -1 nogil
    cdef int after(self, Event event) except -1 nogil
    cdef int to_device(self, uint64_t to, const void* host, size_t nbytes) except -1 nogil
    cdef int to_host(self, void* host, uint64_t address, size_t nbytes) except -1 nogil
    cdef int within(self, uint64_t to, uint64_t address, size_t nbytes) except -1 nogil
    cdef int set_bytes(self, uint64_t to, unsigned char value, size_t nbytes) except -1 nogil
    cdef int begin(self) except -1 nogil
    cdef Graph end(self)
    cdef void abandon(self) noexcept nogil
    cdef void _end_capture(self, k3_gpu* gpu, void* handle) noexcept nogil


cdef class Graph(Resource):
    cdef int replay(self, Stream stream) except -1 nogil
