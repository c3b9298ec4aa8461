# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t, uint64_t

from k3session._core.c_ops cimport k3_dims, k3_kda, k3_ops, k3_pass, k3_segment
from k3session._core.cuda_ops cimport DeviceTables
from k3session._core.gpu_streaming cimport GpuStreamer
from k3session._core.memory cimport Memory
from k3session._core.ops cimport Ops
from k3session._core.state cimport Block, Timeline
from k3session._core.streaming cimport Streamer
from k3session._core.weights cimport Tables, Weights


cdef struct Work:                       # one pass on one side, the host's or a device's, as ops see it
    k3_ops* ops
    const k3_dims* dims
    const Tables* tables
    bint mapped                         # whether this side's memory is the host's
    int64_t room                        # the largest pass
    Work* kda                           # the side that each component runs on: this one, or the other
    Work* mla
    Work* dense
    Work* experts

    # the pass: R = rows, d = hidden_size
    k3_pass job
    int32_t* tokens                     # [R]
    int32_t* take                       # [R] rows that want logits
    int32_t* take_owner                 # [R] their segments
    const float* embeddings             # [R, d] or NULL
    float* logits                       # [taken rows, vocab]
    float* s                            # [R, d] running sum
    float* bank                         # [blocks, room, d] banked rows
    float* h                            # [R, d] mixed input of a sub-layer, before its norm
    float* x                            # [R, d] the same after the norm
    float* a                            # [R, d] output of a sub-layer
    float* b                            # [R, d] second part of a MoE output: the shared experts
    float* mix                          # AttnRes weights when they are traced: [R, blocks + 1]
    # KDA
    float* raw[3]                       # [R, C] projections of q, k, v
    float* qkv[3]                       # [R, C] after convolution, SiLU and norm
    float* f_a                          # [R, D]
    float* f                            # [R, C] decay
    float* beta                         # [R, H]
    float* g                            # [R, C] output gate
    float* o                            # [R, C] mixer output before o_proj
    float* tape                         # where a pass that is committed later keeps raw, f and beta of every layer
    int64_t tape_rows                   # rows that the tape is laid out for
    # MLA (shares memory with KDA)
    float* c_q                          # [R, q_lora]
    float* q                            # [R, H * (nope + rope)]
    float* kva                          # [R, kv_lora + rope]
    float* q_abs                        # [R, H, latent_stride]
    float* o_abs                        # [R, H, kv_lora]
    float* mla_g                        # [R, H * v]
    float* mla_o                        # [R, H * v]
    # FFN
    float* hidden                       # [R, intermediate]
    float* router                       # [R, E]
    int32_t* route_ids                  # [R, T]
    float* route_weights                # [R, T]
    float* z                            # [R, latent]
    float* u                            # [R, latent]

    # a cut between layers, of which only some are here: R = handed_rows
    float* handed_in                    # [1 + bank, R, d] running sum and bank from the layers before, or NULL
    float* handed_out                   # the same for the layers behind, or NULL
    int64_t handed_rows

    int cancelled                       # set by another thread, read between sub-layers


cdef struct Desk:                       # the mail of a side as the host sees it
    int32_t* tokens
    int32_t* owner
    int32_t* take
    int32_t* take_owner
    k3_segment* segments
    int32_t* bad
    float* logits


cdef class Side:
    cdef readonly Ops backend
    cdef Work work
    cdef Desk desk
    cdef char* memory                   # one block for all activations
    cdef readonly int64_t nbytes
    cdef int64_t bad_at, logits_at      # places in the mail

    cdef char* lay_out(self, char* base, int64_t kind) noexcept
    cdef int lay_out_mail(self, int64_t segments) except -1
    cdef void fill(self, list timelines, list counts, const int32_t[::1] tokens, int64_t n_take, bint every_row,
                   Block** spare) except *


cdef class Scratch:
    cdef readonly Decoder decoder
    cdef readonly int64_t rows          # the largest pass
    cdef readonly int64_t segments_room
    cdef Side main                      # where embedding, AttnRes, norms, router and head run
    cdef Side other                     # where a component runs that was placed elsewhere, or None
    cdef readonly Memory kda_memory, mla_memory
    cdef Block** spare                  # [segments_room] alternate state: written by a pass, exchanged at its commit

    cdef float* tape                    # what a pass that is kept leaves for its commit, [n_kda, tape_rows, tape_width]
    cdef int64_t tape_rows
    cdef uint64_t tape_number           # which tape it is: recorded passes know its address
    cdef Timeline kept                  # of that pass, or None
    cdef int64_t kept_rows
    cdef list held, held_counts         # timelines of a pass that waits for its commit, and their rows, or None

    cdef Side kda_side(self)
    cdef int open_tape(self) except -1
    cdef void close_tape(self) noexcept
    cdef Side side(self, bint on_device)
    cdef Work* work_of(self, str part) except NULL
    cdef int lay_out(self, list timelines, list counts, const int32_t[::1] tokens, int64_t n_take,
                     bint every_row) except -1


cdef class Taps:
    cdef readonly dict arrays
    cdef float* site[32]                # NULL where a site is not traced
    cdef int64_t layers[32]             # rows of the arrays: [rows, layers, width]
    cdef int64_t width[32]
    cdef int64_t rows                   # rows of the pass that is traced
    cdef float* line                    # a row on its way
    cdef void put(self, Work* z, int site, int64_t layer, const float* source, int64_t rows, int64_t width) noexcept nogil
    cdef void add(self, Work* z, int site, int64_t layer, const float* source, int64_t rows, int64_t width) noexcept nogil


cdef class Decoder:
    cdef readonly Weights weights
    cdef readonly int threads
    cdef readonly str isa
    cdef readonly DeviceTables device
    cdef readonly bint split_activations
    cdef readonly bint round_inputs
    cdef readonly Streamer streamer     # where weights of the host are read while a pass runs, else None
    cdef readonly GpuStreamer gpu_streamer      # where weights go to the device while a pass runs, else None

    cdef bint on_device(self, str part)
    cdef Memory memory_of(self, str part)
    cdef int check_pass(self, Scratch z, list timelines, list counts, const int32_t[::1] tokens, bint embedded) except -1
    cdef int check_hands(self, Scratch z, int64_t rows, const float[:, :, ::1] handed_in,
                         float[:, :, ::1] handed_out) except -1
    cdef int hand(self, Work* z, float* host, int64_t banked, bint out) noexcept nogil
    cdef int replay(self, Scratch z, int64_t rows) except -1
    cdef int go(self, Scratch z, int64_t rows, int64_t n_take, const float* embeddings, float* logits, Taps taps) except -1
    cdef int run(self, Work* z, int64_t n_take, Taps taps) except -1 nogil
    cdef int kda(self, Work* main, Work* z, int64_t i, Taps taps) noexcept nogil
    cdef int advance(self, Work* z, int64_t i) noexcept nogil
    cdef int mla(self, Work* main, Work* z, int64_t i, Taps taps) noexcept nogil
    cdef int mlp(self, Work* main, Work* z, int64_t i, float* out) noexcept nogil
    cdef int moe(self, Work* z, int64_t i, Taps taps) noexcept nogil
