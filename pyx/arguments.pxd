# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t

from k3session._core.c_ops cimport k3_matrix, k3_pass, k3_segment


cdef class Matrix:
    cdef k3_matrix m
    cdef readonly object data           # keeps the memory of `m` alive
    cdef readonly object scale
    cdef object keep                    # what else `m` refers to


cdef class Rows:
    cdef k3_pass job
    cdef k3_segment* segments           # [n_segments]
    cdef object owner                   # int32[rows]
    cdef object noted                   # int32[n_segments] lowest bad sub-layer
    cdef list page_arrays               # all pages, segment by segment
    cdef list first_page                # [n_segments] number of its first one
    cdef bint pages_written
    cdef void** pages                   # page tables of all segments, one after the other
    cdef list counts

    cdef int bind_pages(self, pages, int64_t layer, int64_t stride, bint written) except -1


cdef int check_array(str name, array, tuple shape, dtype) except -1
cdef void* address(array) except NULL
cdef int expect(Matrix w, str name, tuple shape) except -1
