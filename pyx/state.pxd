# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t

from k3session._core.c_ops cimport k3_kda_state
from k3session._core.weights cimport Weights


cdef struct Slab:                       # a run of latent pages that were allocated together
    int64_t pages                       # live references to its pages, over all timelines
    char* data


cdef class Timeline:
    cdef readonly Weights weights
    cdef k3_kda_state* now              # [n_kda] conv windows and recurrent matrices; a commit swaps the pointers
    cdef int64_t* seen                  # [num_hidden_layers] tokens that each layer has taken in
    cdef void** pages                   # [n_pages] latent pages, in order of position
    cdef Slab** slabs                   # [n_pages] the slab that each page belongs to
    cdef int64_t n_pages, page_room
    cdef readonly int64_t page_rows     # positions in a page
    cdef readonly int32_t latent_dtype  # K3_F32 or K3_BF16
    cdef readonly int64_t position      # tokens committed

    cdef int64_t conv_bytes(self) noexcept nogil
    cdef int64_t state_bytes(self) noexcept nogil
    cdef int64_t row_bytes(self) noexcept nogil
    cdef int reserve(self, int64_t positions) except -1
    cdef int check(self, int64_t position) noexcept nogil
    cdef void commit(self, k3_kda_state* next, int64_t rows) noexcept nogil
    cdef char* latent(self, int64_t mla_index, int64_t position) noexcept nogil
    cdef int drop_pages(self, int64_t keep) noexcept


cdef class K3CpuFallbackState:
    cdef Timeline timeline
    cdef readonly int layer             # 0-based layer number
    cdef readonly bint is_kda
    cdef int32_t mixer_index


cdef class Owner:
    cdef str name
    cdef bint busy


cdef k3_kda_state* allocate_kda(Weights weights) except? NULL
cdef void free_kda(k3_kda_state* states) noexcept
