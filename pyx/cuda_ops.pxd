# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t, uint64_t

from k3session._core.c_driver cimport k3_gpu
from k3session._core.c_ops cimport k3_cuda, k3_dims, k3_matrix
from k3session._core.gpu cimport Device, DeviceBuffer, PinnedBuffer
from k3session._core.memory cimport Memory
from k3session._core.ops cimport Ops, PassShape
from k3session._core.stream cimport Stream
from k3session._core.weights cimport Tables, Weights


cdef class DeviceMemory(Memory):
    cdef readonly Device device
    cdef Stream stream
    cdef dict buffers                   # address -> DeviceBuffer


cdef class DeviceTables:
    cdef Weights weights
    cdef Tables tables
    cdef readonly DeviceMemory memory
    cdef readonly frozenset parts       # what is there
    cdef readonly int64_t nbytes        # of weights on the device
    cdef bint streamed                  # matrices stay where they are
    cdef DeviceBuffer buffer
    cdef uint64_t base                  # where the next thing goes is base + used
    cdef list jobs                      # what `upload` copies
    cdef list keep                      # host arrays that it copies from

    cdef uint64_t put(self, const void* host, int64_t rows, int64_t row_bytes, int64_t pitch) except? 0
    cdef const float* vector(self, const float* host, int64_t n) except? NULL
    cdef k3_matrix matrix(self, k3_matrix m) except *
    cdef int fill(self, Weights weights, frozenset parts) except -1
    cdef int fill_layer(self, Weights weights, frozenset parts, int64_t i, k3_matrix* experts) except -1


cdef struct Recording:                  # what the launches of a pass of one shape became
    PassShape shape
    void** graphs                       # [n] one for each run of launches between two seams, or NULL where there was none
    int64_t n
    int64_t room
    uint64_t used                       # when it was last replayed


cdef struct Recorder:                   # the ctx of the device's op table
    k3_cuda cuda                        # first: launch functions know this part
    k3_gpu* gpu
    void* stream
    void* before                        # the context that was current in the thread
    int mode
    bint capturing
    Recording* recording
    int64_t next                        # graph to replay
    int status                          # the first that was not 0, what was asked for, and the kernel
    const char* what
    int kernel


cdef class CudaOps(Ops):
    cdef readonly Device device
    cdef Stream stream
    cdef Recorder recorder
    cdef Recording* recordings
    cdef int64_t n_recordings
    cdef uint64_t clock
    cdef bint split_activations         # in passes of one session
    cdef bint eager                     # nothing is recorded
    cdef PinnedBuffer mail_host
    cdef DeviceBuffer mail_here, work
    cdef char* pinned
    cdef uint64_t device_mail

    cdef int prepare(self, const k3_dims* dims) except -1
    cdef Recording* find(self, PassShape shape) noexcept nogil
    cdef void forget(self, Recording* recording) noexcept nogil
