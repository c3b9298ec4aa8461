# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t

from k3session._core.c_ops cimport k3_kda_state, k3_matrix, k3_pass, k3_segment


cdef class Matrix:
    cdef k3_matrix m
    cdef readonly object data           # keeps the memory of `m` alive
    cdef readonly object scale


cdef class Rows:
    cdef k3_pass job
    cdef k3_segment* segments           # [n_segments]
    cdef k3_kda_state* now              # [n_segments] for the caller to fill
    cdef k3_kda_state* next             # [n_segments]
    cdef void** pages                   # page tables of all segments, one after the other
    cdef list counts

    cdef int bind_pages(self, pages, int64_t layer, int64_t stride, bint written) except -1


cdef int check_array(str name, array, tuple shape, dtype) except -1
cdef float* at(array) except? NULL
cdef float* floats(str name, array, tuple shape) except? NULL
cdef int expect(Matrix w, str name, tuple shape) except -1
