# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t, uint64_t

from k3session._core.c_driver cimport k3_gpu
from k3session._core.c_ops cimport k3_cuda, k3_dims, k3_ops


cdef class Context:
    """A device in use, shared by all who opened it; released with the last object that refers to it."""
    cdef k3_gpu gpu
    cdef readonly int number
    cdef readonly str title                   # for messages
    cdef readonly str name
    cdef readonly tuple capability
    cdef readonly int multiprocessors
    cdef readonly int64_t total_memory
    cdef readonly int max_shared              # bytes of shared memory that a block may ask for
    cdef public str lost                      # the sentence of every call after gpu.lost was set

    cdef int load(self, image) except -1
    cdef object unfit(self, int status, image)


cdef class Device:
    cdef Context context                      # None once closed

    cdef Context get(self)                    # ClosedError after close()


cdef class Resource:
    cdef Context context
    cdef k3_gpu* gpu                          # of the context; NULL once closed, which every call refuses
    cdef void* handle                         # the driver's, or the address of memory

    cdef int attach(self, Device device) except -1
    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil
    cdef void drop(self) noexcept


cdef class DeviceBuffer(Resource):
    cdef readonly uint64_t pointer            # 0 once closed
    cdef readonly int64_t nbytes


cdef class PinnedBuffer(Resource):
    cdef readonly int64_t nbytes


cdef class Arena:
    cdef Device device
    cdef list buffers
    cdef readonly int64_t nbytes              # of device memory
    cdef readonly int64_t pinned_bytes

    cdef void _drop(self) noexcept
    cdef uint64_t take(self, int64_t nbytes, bint zeroed=*) except 0
    cdef void* pin(self, int64_t nbytes) except NULL


# The launch functions of cuda/, which are linked into this module.
cdef void cuda_ops(k3_ops* table) noexcept nogil
cdef int64_t cuda_work_bytes(const k3_dims* dims, int64_t rows) noexcept nogil
cdef int cuda_top_k(k3_cuda* ctx, const float* logits, int64_t rows, int64_t n, int64_t k, int32_t* ids, float* values,
                    float* log_sum) noexcept nogil
