# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t

from k3session._core.c_ops cimport k3_kda_state, k3_segment
from k3session._core.memory cimport Memory
from k3session._core.weights cimport Weights


cdef struct Block:                      # conv windows and recurrent matrices of all KDA layers; never changed while shared
    int64_t holders
    int64_t counted                     # 0 but inside own_bytes_of
    k3_kda_state at


cdef struct Slab:                       # a run of latent pages that were allocated together
    int64_t pages                       # those of them that are in use
    char* data


cdef struct Page:                       # latent rows of page_rows positions, of all MLA layers
    int64_t holders                     # timelines that have it in their table
    int64_t counted                     # 0 but inside own_bytes_of
    int64_t filled                      # rows that somebody may have written: rows from there on are free to take
    Slab* slab
    char* data


cdef class Timeline:
    cdef readonly Weights weights
    cdef readonly Memory kda_memory, mla_memory
    cdef Block* now
    cdef int64_t* seen                  # [num_hidden_layers] tokens that each layer has taken in
    cdef Page** pages                   # [n_pages] in order of position
    cdef void** addresses               # [n_pages] their data: the page table of ops on the host
    cdef int64_t n_pages, page_room
    cdef void* table                    # the same table in mla_memory, where that is not the host's
    cdef int64_t table_pages, table_room  # entries that are up to date there, and room for how many
    cdef readonly int64_t page_rows     # positions in a page
    cdef readonly int32_t latent_dtype  # K3_F32 or K3_BF16
    cdef readonly int64_t position      # tokens committed

    cdef int64_t row_bytes(self) noexcept nogil
    cdef int64_t block_bytes(self) noexcept nogil
    cdef int64_t page_bytes(self) noexcept nogil
    cdef int reserve(self, int64_t positions) except -1
    cdef int own_page(self, int64_t number) except -1
    cdef int add_pages(self, int64_t count, bint zeroed=*) except -1
    cdef int room_for_pages(self, int64_t count) except -1
    cdef int upload_table(self) except -1
    cdef int check(self, int64_t position) noexcept nogil
    cdef void lay_out(self, k3_segment* segment) noexcept
    cdef Block* commit(self, Block* next, int64_t rows) noexcept
    cdef int read_rows(self, int64_t mla_index, char* host, int64_t positions, int64_t width) except -1
    cdef int write_rows(self, int64_t mla_index, const char* host, int64_t positions, int64_t width) except -1
    cdef void drop_pages(self, int64_t keep) noexcept
    cdef void let_go(self) noexcept
    cdef Timeline empty(self)
    cdef void stand_at(self, int64_t position) noexcept
    cdef Timeline room(self, int64_t position, bint over)


cdef class K3CpuFallbackState:
    cdef Timeline timeline
    cdef readonly int layer             # 0-based layer number
    cdef readonly bint is_kda
    cdef int32_t mixer_index

    cdef float* recurrent(self, str name) noexcept
    cdef int put(self, str name, int64_t position, const char* host, int64_t nbytes) except -1
    cdef list pieces(self, str name, int64_t position)


cdef class Window:
    cdef K3CpuFallbackState layer
    cdef char* start
    cdef Py_ssize_t nbytes


cdef class Owner:
    cdef str name
    cdef bint busy


cdef Block* new_block(Weights weights, Memory memory, bint zeroed=*) except NULL
cdef void drop_block(Block* block, Memory memory) noexcept
