# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t

from k3session._core.c_stream cimport k3_order, k3_stream, k3_streaming
from k3session._core.ops cimport CpuOps, Ops, PassShape
from k3session._core.weights cimport Weights


cdef class Streamer:
    cdef k3_stream* stream
    cdef readonly Weights weights
    cdef readonly int64_t widest        # the most gate rows in a block that is no whole matrix
    cdef readonly int64_t blocks        # blocks of the trunk
    cdef readonly int64_t head          # the first one of lm_head
    cdef tuple names                    # of the files
    cdef object locate


cdef class StreamOps(CpuOps):
    cdef k3_streaming streaming         # the table's ctx
    cdef readonly Streamer streamer
    cdef bint entered                   # a pass has its turn
    cdef int64_t end_at                 # the block after the pass's last one
    cdef int64_t buffers                # bytes beside those of CpuOps


cdef class OrderOps(Ops):
    cdef k3_order order
