# SPDX-License-Identifier: MIT
"""The C contract of cuda/host/stream.h, expert_cache.h and gpu_stream.h: declarations only."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from k3session._core.c_driver cimport k3_address, k3_driver, k3_gpu
from k3session._core.c_ops cimport k3_cpu, k3_layer, k3_matrix, k3_ops


cdef extern from "host/stream.h" nogil:
    enum:
        K3_PAGE
        K3_DISK_THREADS
        K3_OK
        K3_READ
        K3_SHORT
        K3_CHANGED
        K3_ORDER

    ctypedef struct k3_file:
        const char* start
        int64_t size
        int fd
        int direct
        int cached

    ctypedef struct k3_failure:
        int32_t kind
        int32_t error
        int32_t file
        int64_t at
        int64_t expected, found

    ctypedef struct k3_block:
        const k3_matrix* matrix[2]
        int64_t first, rows
        int64_t room

    ctypedef struct k3_step:
        const k3_matrix* matrix[2]
        int32_t whole

    ctypedef struct k3_order:
        k3_step* steps
        int64_t n, room
        int32_t silent

    ctypedef struct k3_stream:
        pass

    ctypedef struct k3_stream_setup:
        const k3_layer* layers
        int64_t n_layers, experts
        k3_file* files
        int64_t n_files
        k3_block* blocks
        int64_t n_blocks
        const uint8_t* resident
        int64_t head
        int64_t ring_bytes, n_slots
        int64_t chunk_bytes
        int64_t threads
        double half_life
        char* stays
        char* ring
        char* slot_memory

    ctypedef struct k3_streaming:
        k3_cpu cpu
        k3_ops inner
        k3_stream* stream
        float* hidden
        char* row
        k3_matrix* table
        int32_t* active
        int64_t at
        int64_t moe
        int64_t bytes, wait_ns
        int64_t uses, misses

    int64_t k3_block_room(const k3_file*, int64_t, const k3_block*) noexcept
    int64_t k3_slot_room(const k3_file*, int64_t, const k3_layer*, int64_t, int64_t) noexcept
    k3_stream* k3_stream_open(const k3_stream_setup*) noexcept
    void k3_stream_close(k3_stream*) noexcept
    int64_t k3_stream_resident(const k3_stream*) noexcept
    int k3_stream_load(k3_stream*, int64_t, int64_t) noexcept
    k3_failure k3_stream_failure(k3_stream*) noexcept
    int k3_stream_enter(k3_stream*) noexcept
    int k3_stream_begin(k3_stream*, int) noexcept
    int k3_stream_end(k3_stream*, int) noexcept
    void k3_stream_order(k3_stream*) noexcept
    void k3_stream_fail_after(k3_stream*, int64_t, int) noexcept
    int64_t k3_stream_total(k3_stream*) noexcept
    void k3_streaming_table(k3_streaming*, k3_ops*) noexcept
    void k3_order_table(k3_order*, k3_ops*) noexcept


cdef extern from "host/expert_cache.h" nogil:
    ctypedef struct k3_cache:
        int64_t n_slots

    bint k3_cache_open(k3_cache*, int64_t, int64_t, int64_t, int64_t, double) noexcept
    void k3_cache_close(k3_cache*) noexcept


cdef extern from "host/gpu_stream.h" nogil:
    ctypedef struct k3_gpu_block:
        const k3_matrix* matrix[2]
        int64_t first, rows
        k3_address at
        int64_t number

    ctypedef struct k3_gpu_stream:
        k3_gpu* gpu
        void* copies
        k3_stream* host
        const k3_layer* layers
        const k3_layer* host_layers
        int64_t n_layers, experts
        k3_gpu_block* blocks
        int64_t n_blocks, head
        k3_address ring
        int64_t ring_room, n_ring
        void** copied
        void** used
        k3_address slots
        int64_t slot_room
        k3_cache cache
        int64_t* launched
        void* experts_copied[2]
        void* experts_used[2]

    ctypedef struct k3_gpu_streaming:
        k3_gpu_stream* stream
        k3_ops inner
        void* launches
        const char* mail_host
        const char* mail_here
        int32_t* ids
        void* arrived
        k3_matrix* table
        k3_address table_here
        k3_matrix* found
        int32_t* active
        char* rows
        int64_t rows_room
        k3_address rows_here
        char* row
        float* hidden
        int64_t at
        int64_t bytes, wait_ns
        int64_t uses, misses
        int64_t copied
        int status
        const char* what

    void k3_gpu_stream_use(k3_driver*) noexcept
    int64_t k3_gpu_block_room(const k3_matrix*, const k3_matrix*, int64_t) noexcept
    int64_t k3_gpu_slot_room(const k3_layer*, int64_t, int64_t) noexcept
    void k3_gpu_streaming_table(k3_gpu_streaming*, k3_ops*) noexcept
    int k3_gpu_stream_begin(k3_gpu_streaming*, int) noexcept
    int k3_gpu_stream_end(k3_gpu_streaming*, int) noexcept
