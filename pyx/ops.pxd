# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t

from k3session._core.c_ops cimport k3_cpu, k3_dims, k3_ops


cdef class CpuOps:
    cdef k3_ops table             # what the decoder calls; table.ctx is &self.cpu
    cdef k3_cpu cpu               # threads and work buffers of one pass in flight
    cdef bint holds_pool
    cdef readonly str isa         # "base", "avx2" or "avx512"
    cdef readonly int64_t rows    # the largest pass that the buffers hold

cdef void* aligned(int64_t nbytes) except NULL
cdef int op_table(str isa, k3_ops* table) except -1
cdef void buffer_sizes(const k3_dims* dims, int64_t rows, int64_t* x, int64_t* work, int64_t* items) noexcept nogil
cdef void pool_hold() noexcept nogil
cdef void pool_release() noexcept nogil
cdef unsigned int float_mode_enter() noexcept nogil
cdef void float_mode_leave(unsigned int before) noexcept nogil
