# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t

from k3session._core.c_ops cimport k3_kda, k3_kda_state, k3_layer, k3_mla, k3_moe, k3_ops, k3_pass, k3_segment
from k3session._core.ops cimport CpuOps
from k3session._core.weights cimport Weights


cdef class Scratch:
    cdef readonly Weights weights
    cdef readonly CpuOps backend
    cdef k3_ops* ops
    cdef readonly int64_t rows          # the largest pass
    cdef readonly int64_t segments_room
    cdef char* memory                   # one block; the pointers below lie in it
    cdef readonly int64_t nbytes

    # rows of the pass: R = rows, d = hidden_size
    cdef int32_t* tokens                # [R]
    cdef int64_t* take                  # [R] rows that want logits
    cdef int64_t* owner                 # [R] their segments
    cdef float* s                       # [R, d] running sum
    cdef float* bank                    # [blocks, R, d] banked rows
    cdef float* h                       # [R, d] mixed input of a sub-layer, before its norm
    cdef float* x                       # [R, d] the same after the norm
    cdef float* a                       # [R, d] output of a sub-layer
    cdef float* b                       # [R, d] second part of a MoE output: the shared experts
    cdef float* mix                     # AttnRes weights when they are traced: [R, blocks + 1]
    # KDA
    cdef float* raw[3]                  # [R, C] projections of q, k, v
    cdef float* qkv[3]                  # [R, C] after convolution, SiLU and norm
    cdef float* f_a                     # [R, D]
    cdef float* f                       # [R, C] decay
    cdef float* beta                    # [R, H]
    cdef float* g                       # [R, C] or [R, H * v] output gate
    cdef float* o                       # [R, C] or [R, H * v] mixer output before o_proj
    # MLA (shares memory with KDA)
    cdef float* c_q                     # [R, q_lora]
    cdef float* q                       # [R, H * (nope + rope)]
    cdef float* kva                     # [R, kv_lora + rope]
    cdef float* q_abs                   # [R, H, latent_stride]
    cdef float* o_abs                   # [R, H, kv_lora]
    cdef float* mla_g
    cdef float* mla_o
    # FFN
    cdef float* hidden                  # [R, intermediate]
    cdef float* router                  # [R, E]
    cdef int32_t* route_ids             # [R, T]
    cdef float* route_weights           # [R, T]
    cdef float* z                       # [R, latent]
    cdef float* u                       # [R, latent]

    cdef k3_pass job
    cdef k3_segment* segments           # [segments_room]
    cdef k3_kda_state** spare           # [segments_room] alternate buffers: written by a pass, swapped at its commit
    cdef int cancelled                  # set by another thread, read between layers

    cdef char* lay_out(self, char* base, int64_t kind) noexcept


cdef class Taps:
    cdef readonly dict arrays
    cdef float* site[32]                # NULL where a site is not traced
    cdef int64_t layers[32]             # rows of the arrays: [rows, layers, width]
    cdef int64_t width[32]
    cdef int64_t rows                   # rows of the pass that is traced
    cdef void put(self, int site, int64_t layer, const float* source, int64_t rows, int64_t width) noexcept nogil
    cdef void put_ids(self, int64_t layer, const int32_t* source, int64_t rows, int64_t width) noexcept nogil


cdef class Decoder:
    cdef readonly Weights weights

    cdef int check_pass(self, Scratch z, list timelines, list counts, const int32_t[::1] tokens, bint embedded) except -1
    cdef int run(self, Scratch z, const float* embeddings, int64_t n_take, float* logits, Taps taps) except -1 nogil
    cdef int kda(self, Scratch z, k3_layer* L, Taps taps, int64_t i) noexcept nogil
    cdef int mla(self, Scratch z, k3_layer* L, Taps taps, int64_t i) noexcept nogil
    cdef int dense(self, Scratch z, k3_layer* L) noexcept nogil
    cdef int moe(self, Scratch z, k3_layer* L, Taps taps, int64_t i) noexcept nogil
