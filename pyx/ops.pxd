# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from k3session._core.c_ops cimport k3_cpu, k3_dims, k3_exception, k3_matrix, k3_ops, k3_place
from k3session._core.memory cimport Memory


cdef struct PassShape:            # what the launches of a pass depend on
    int64_t rows
    int64_t segments
    int64_t take
    int64_t kind                  # flags that change what is launched
    uint64_t tape                 # where it keeps what a later commit needs, or 0
    bint traced                   # inner values are read between the ops


cdef class Ops:
    cdef k3_ops table             # what the decoder calls
    cdef readonly Memory memory   # where the ops' arguments lie
    cdef readonly int64_t rows    # the largest pass that the buffers hold
    cdef char* mail

    cdef int64_t padded(self, int64_t rows) noexcept nogil
    cdef int open_mail(self, int64_t nbytes, char** host, char** here) except -1
    cdef bint ready(self) noexcept nogil
    cdef int begin(self, PassShape shape, int64_t mail_bytes) noexcept nogil
    cdef int end(self, bint complete, int64_t offset, int64_t nbytes) noexcept nogil


cdef class CpuOps(Ops):
    cdef k3_cpu cpu               # threads and work buffers of one pass in flight; the table's ctx
    cdef bint holds_pool
    cdef int rounded              # what cpu.inputs is in passes that round
    cdef readonly str isa         # "base", "avx2" or "avx512"

cdef int op_table(str isa, k3_ops* table) except -1
cdef void buffer_sizes(const k3_dims* dims, int64_t rows, int64_t* x, int64_t* work, int64_t* items) noexcept nogil
cdef void pool_hold() noexcept nogil
cdef void pool_release() noexcept nogil
cdef unsigned int float_mode_enter() noexcept nogil
cdef void float_mode_leave(unsigned int before) noexcept nogil
cdef k3_place compact_plan(int threads, const k3_matrix* w, uint8_t* high, uint32_t* first) noexcept nogil
cdef void compact_fill(int threads, const k3_matrix* w, const k3_matrix* to, k3_exception* list) noexcept nogil
cdef k3_place q8_fill(int threads, const k3_matrix* w, const k3_matrix* to) noexcept nogil
