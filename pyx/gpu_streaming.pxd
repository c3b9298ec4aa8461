# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t

from k3session._core.c_stream cimport k3_gpu_stream, k3_gpu_streaming
from k3session._core.cuda_ops cimport CudaOps, DeviceTables
from k3session._core.gpu cimport DeviceBuffer, PinnedBuffer
from k3session._core.stream cimport Event, Stream
from k3session._core.streaming cimport Streamer


cdef class GpuStreamer:
    cdef k3_gpu_stream stream
    cdef readonly Streamer reader       # the first half of the way
    cdef readonly DeviceTables tables
    cdef readonly int64_t widest        # the most gate rows in a block that is no whole matrix
    cdef readonly int64_t resident_bytes, nbytes
    cdef Stream copies
    cdef DeviceBuffer memory            # what stays, the ring, and the slots
    cdef list events
    cdef list jobs                      # what `load` copies

    cdef void* event(self) except NULL
    cdef int plan_upload(self, int64_t i) except -1


cdef class GpuStreamOps(CudaOps):
    cdef k3_gpu_streaming streaming
    cdef readonly GpuStreamer streamer
    cdef bint entered                   # a pass has its turn
    cdef int64_t end_at                 # the block after the pass's last one
    cdef DeviceBuffer here              # rows of the embedding, a table of experts, and gate rows of a block
    cdef PinnedBuffer there
    cdef Event arrived
