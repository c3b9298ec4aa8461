# SPDX-License-Identifier: MIT
from libc.stdint cimport int64_t

from k3session._core.c_ops cimport k3_layer, k3_matrix, k3_ops
from k3session._core.c_stream cimport k3_cache, k3_gpu_streaming, k3_order, k3_stream, k3_streaming
from k3session._core.gpu cimport PinnedBuffer
from k3session._core.ops cimport CpuOps, Ops, PassShape
from k3session._core.weights cimport Weights


cdef class Streamer:
    cdef k3_stream* stream
    cdef readonly Weights weights
    cdef readonly int64_t widest        # the most gate rows in a block that is no whole matrix
    cdef readonly int64_t blocks        # blocks of the trunk
    cdef readonly int64_t head          # the first one of lm_head
    cdef tuple names                    # of the files
    cdef PinnedBuffer pinned            # what is read for a GPU, or None: memory of the stream's own
    cdef object locate


cdef class StreamOps(CpuOps):
    cdef k3_streaming streaming         # the table's ctx
    cdef readonly Streamer streamer
    cdef bint entered                   # a pass has its turn
    cdef int64_t end_at                 # the block after the pass's last one
    cdef int64_t buffers                # bytes beside those of CpuOps


cdef class OrderOps(Ops):
    cdef k3_order order


# For gpu_streaming, among it what is linked into this module.
cdef void* paged(int64_t nbytes) except NULL
cdef bint stream_enter(k3_stream* stream) noexcept nogil
cdef void stream_order(k3_stream* stream) noexcept nogil
cdef int64_t gpu_block_room(const k3_matrix* one, const k3_matrix* other, int64_t rows) noexcept nogil
cdef int64_t gpu_slot_room(const k3_layer* layers, int64_t n_layers, int64_t experts) noexcept nogil
cdef bint cache_open(k3_cache* cache, int64_t slots, int64_t layers, int64_t experts, int64_t moe,
                     double half_life) noexcept nogil
cdef void cache_close(k3_cache* cache) noexcept nogil
cdef void gpu_streaming_table(k3_gpu_streaming* x, k3_ops* table) noexcept nogil
cdef int gpu_stream_begin(k3_gpu_streaming* x, bint with_head) noexcept nogil
cdef int gpu_stream_end(k3_gpu_streaming* x, bint complete) noexcept nogil
