# SPDX-License-Identifier: MIT
from k3session._core.c_driver cimport k3_driver, k3_gpu

# The funnel: a status becomes the exception that fits, and the first error that a context does not survive is kept.
cdef int check(k3_gpu* gpu, int status, const char* what) except -1 nogil
# For those who call many things in a row: between enter and leave the device's context is current in this thread.
cdef int enter(k3_gpu* gpu, void** before) except -1 nogil
cdef void leave(k3_gpu* gpu, void* before) noexcept nogil

cdef k3_driver* driver_table() noexcept nogil
cdef int open_driver() except -1
cdef int count_devices() except -1
cdef dict describe(int number)
cdef object out_of_memory(k3_gpu* gpu, str wanted)
cdef str size(n)
