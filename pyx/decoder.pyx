# SPDX-License-Identifier: MIT
"""K3: the graph of the whole model, once, for every kind of pass and every device.

A pass takes rows, grouped in segments; a segment is consecutive tokens of one session.  Embedding, AttnRes, norms,
matrices, router and experts see rows; only the two mixers look at segments.  The code calls an op table (cuda/ops.h)
and knows neither sessions nor devices.  Names are the checkpoint's own; docs/architecture.md explains the model.
"""

cimport cython

import numpy as np

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from k3session._core.c_ops cimport K3_NO_BAD_SUBLAYER, k3_dims, k3_layer, k3_linear_job, k3_matrix, k3_segment
from k3session._core.cuda_ops cimport CudaOps, DeviceTables
from k3session._core.gpu_streaming cimport GpuStreamer, GpuStreamOps
from k3session._core.memory cimport HOST, Memory, aligned
from k3session._core.ops cimport CpuOps, Ops, PassShape, float_mode_enter, float_mode_leave
from k3session._core.state cimport Block, Timeline, drop_block, new_block
from k3session._core.streaming cimport OrderOps, Streamer, StreamOps
from k3session._core.weights cimport Weights

from k3session._core.state import own_bytes_of
from k3session.errors import K3Error, PassCancelled

# One thread sets the flag of a pass that another thread is running.
cdef extern from * nogil:
    """
    static inline int k3_flag(const int* flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
    static inline void k3_set_flag(int* flag, int value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }
    """
    int k3_flag(const int* flag) noexcept
    void k3_set_flag(int* flag, int value) noexcept

cdef enum:
    DONE = 0
    CANCELLED = 1
    FAILED = 2

cdef enum:                              # kinds of passes, which are recorded apart
    PLAIN = 0
    EMBEDDED = 1
    REPLAYED = 2

cdef double SIGNAL_SECONDS = 0.1        # between looks at Python's signals in a long pass

# What can be traced: name, and the width of a row in terms of the dimensions.
cdef enum Site:
    EMBED, ATTN_WEIGHTS, ATTN_IN, ATTN_X, ATTN_OUT, FFN_WEIGHTS, FFN_IN, FFN_X, FFN_OUT, LAYER_OUT
    KDA_Q_CONV, KDA_K_CONV, KDA_V_CONV, KDA_DECAY, KDA_BETA, KDA_O, KDA_ON
    MLA_Q, MLA_KVA, MLA_GATED
    ROUTE_IDS, ROUTE_WTS, MOE_LATENT_IN, MOE_AGG, MOE_ROUTED, MOE_SHARED
    FINAL_MIX, FINAL_NORMED
    N_SITES

SITES = ("embed", "attn_weights", "attn_in", "attn_x", "attn_out", "ffn_weights", "ffn_in", "ffn_x", "ffn_out", "layer_out",
         "kda_q_conv", "kda_k_conv", "kda_v_conv", "kda_decay", "kda_beta", "kda_o", "kda_on",
         "mla_q", "mla_kva", "mla_gated",
         "route_ids", "route_wts", "moe_latent_in", "moe_agg", "moe_routed", "moe_shared",
         "final_mix", "final_normed")


def sublayer_name(Weights weights, int code) -> str:
    """The name, as in the checkpoint, of the sub-layer that a residual op was numbered with."""
    layers = weights.dims.num_hidden_layers
    if code == 0:
        return "model.embed_tokens"
    if code > 2 * layers:
        return "lm_head"
    i = (code - 1) // 2
    part = "self_attn" if code % 2 else "block_sparse_moe" if weights.tables.layers[i].is_moe else "mlp"
    return f"model.layers.{i}.{part}"


cdef double monotonic() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef int check_signals() except -1 with gil:
    """Runs Python's signal handlers; Ctrl-C raises KeyboardInterrupt here."""
    return PyErr_CheckSignals()


cdef int interrupted(Work* z, double* checked) except -1 nogil:
    """Between sub-layers: whether the pass was cancelled, and now and then whether Python has a signal to handle."""
    cdef double now = monotonic()
    if now - checked[0] > SIGNAL_SECONDS:
        checked[0] = now
        check_signals()
    return k3_flag(&z.cancelled)


cdef class Decoder:
    """The graph over one set of weights; immutable and shared by all sessions of a model.

    Parameters
    ----------
    weights : Weights
        The model's.
    threads : int
        Threads of a pass on the host.
    isa : str
        Instruction set of the ops on the host.
    device : DeviceTables, optional
        The parts of the weights that are on a device, and so the components that run there: "trunk" is the main side,
        "kda", "mla", "dense" and "experts" the others.
    split_activations : bool
        Prefill on the device's tensor cores.
    streamer : Streamer, optional
        Reads the host's part of the weights while passes run.
    round_inputs : bool
        Prefill on the host with the inputs of BF16 matrices rounded to BF16.
    gpu_streamer : GpuStreamer, optional
        Brings the device's part of the weights there while passes run.
    """

    def __cinit__(self, Weights weights not None, int threads, str isa, DeviceTables device=None,
                  bint split_activations=False, Streamer streamer=None, bint round_inputs=False,
                  GpuStreamer gpu_streamer=None):
        self.weights = weights
        self.streamer = streamer
        self.gpu_streamer = gpu_streamer
        self.threads = threads
        self.isa = isa
        self.device = device
        self.split_activations = split_activations
        self.round_inputs = round_inputs

    cdef bint on_device(self, str part):
        """Whether a part of the model runs on the device."""
        return self.device is not None and part in self.device.parts

    cdef Memory memory_of(self, str part):
        return self.device.memory if self.on_device(part) else HOST

    def reading_order(self, bint on_device=False) -> list:
        """The matrices that a pass needs on the host, or on the device, in this order: what `OrderOps.steps` returns."""
        cdef Side main = Side(self, OrderOps(self.weights, self.on_device("trunk") != on_device), 1, 1)
        cdef Side other = Side(self, OrderOps(self.weights, self.on_device("trunk") == on_device), 1, 1)
        cdef Work* work = &main.work
        cdef bint trunk = self.on_device("trunk")
        cdef Taps taps = None
        cdef int status
        work.kda = work if self.on_device("kda") == trunk else &other.work
        work.mla = work if self.on_device("mla") == trunk else &other.work
        work.dense = work if self.on_device("dense") == trunk else &other.work
        work.experts = work if self.on_device("experts") == trunk else &other.work
        work.job.rows = other.work.job.rows = 1
        with nogil:
            status = self.run(work, 1, taps)
        if status != DONE:
            raise K3Error("the order of the matrices could not be found")
        return (main if trunk == on_device else other).backend.steps()

    def timeline(self, bint bf16_latent=False, int64_t page_rows=64) -> Timeline:
        """A new timeline at position 0, whose state lives where the layers run."""
        return Timeline(self.weights, bf16_latent, page_rows, self.memory_of("kda"), self.memory_of("mla"))

    cdef int run(self, Work* z, int64_t n_take, Taps taps) except -1 nogil:
        """One pass over the rows that are laid out in ``z``.  Writes alternate state only: nothing is committed.

        It begins with the embedding, or where the layers before are elsewhere with the running sum and the bank that
        they gave; it ends with the head, or with the two that the layers behind go on with.
        """
        cdef const k3_dims* dims = z.dims
        cdef int64_t R = z.job.rows, d = dims.hidden_size, i, banked = blocks_before(dims, self.weights.first)
        cdef k3_layer* L
        cdef float* kept
        cdef int bad = 0
        cdef float* h = z.h if taps is not None else NULL
        cdef float* mix = z.mix if taps is not None else NULL
        cdef double checked = monotonic()

        if self.weights.first == 0:
            bad |= z.ops.embed(z.ops.ctx, dims, &z.tables.embed_tokens, z.tokens, z.embeddings, z.s, R)
            bad |= z.ops.finite(z.ops.ctx, &z.job, z.s, z.job.owner, 0, R, d)
            if taps is not None:
                taps.put(z, EMBED, 0, z.s, R, d)
        else:
            bad |= self.hand(z, z.handed_in, banked, False)

        for i in range(self.weights.first, self.weights.end):
            if interrupted(z, &checked):
                return CANCELLED
            L = &z.tables.layers[i]

            # x <- rms(MIX(bank, s)).  At a block's start the raw running sum is banked, after it was mixed, and restarts.
            kept = z.bank + banked * z.room * d if i % dims.attn_res_block_size == 0 else NULL
            bad |= z.ops.attn_res(z.ops.ctx, dims, z.bank, banked, z.room, z.s, L.self_attention_res, L.input_layernorm,
                                  NULL, kept, h, z.x, mix, R)
            if taps is not None:
                taps.put(z, ATTN_WEIGHTS, i, mix, R, banked + 1)
                taps.put(z, ATTN_IN, i, h, R, d)
                taps.put(z, ATTN_X, i, z.x, R, d)
            if kept != NULL:
                banked += 1

            bad |= self.kda(z, z.kda, i, taps) if L.is_kda else self.mla(z, z.mla, i, taps)
            bad |= z.ops.residual(z.ops.ctx, &z.job, z.s, z.a, NULL, kept != NULL, <int32_t>(1 + 2 * i), d)
            if taps is not None:
                taps.put(z, ATTN_OUT, i, z.a, R, d)

            if interrupted(z, &checked):
                return CANCELLED
            bad |= z.ops.attn_res(z.ops.ctx, dims, z.bank, banked, z.room, z.s, L.mlp_res, L.post_attention_layernorm,
                                  NULL, NULL, h, z.x, mix, R)
            if taps is not None:
                taps.put(z, FFN_WEIGHTS, i, mix, R, banked + 1)
                taps.put(z, FFN_IN, i, h, R, d)
                taps.put(z, FFN_X, i, z.x, R, d)
            bad |= self.moe(z, i, taps) if L.is_moe else self.mlp(z, z.dense, i, z.a)
            bad |= z.ops.residual(z.ops.ctx, &z.job, z.s, z.a, z.b if has_shared(z, i) else NULL, False, <int32_t>(2 + 2 * i), d)
            if taps is not None:
                taps.put(z, FFN_OUT, i, z.a, R, d)
                if has_shared(z, i):
                    taps.add(z, FFN_OUT, i, z.b, R, d)
                taps.put(z, LAYER_OUT, i, z.s, R, d)
            if bad:
                return FAILED

        if self.weights.end < dims.num_hidden_layers:
            bad |= self.hand(z, z.handed_out, banked, True)
        elif n_take > 0:
            bad |= z.ops.attn_res(z.ops.ctx, dims, z.bank, banked, z.room, z.s, z.tables.output_attn_res, z.tables.norm,
                                  z.take, NULL, h, z.x, mix, n_take)
            if taps is not None:
                taps.put(z, FINAL_MIX, 0, h, n_take, d)
                taps.put(z, FINAL_NORMED, 0, z.x, n_take, d)
            bad |= project(z, &z.tables.lm_head, z.x, z.logits, n_take)
            bad |= z.ops.finite(z.ops.ctx, &z.job, z.logits, z.take_owner, <int32_t>(1 + 2 * dims.num_hidden_layers),
                                n_take, dims.vocab_size)
        return FAILED if bad else DONE

    cdef int hand(self, Work* z, float* host, int64_t banked, bint out) noexcept nogil:
        """Copies what crosses a cut between layers, the running sum and then each row of the bank, out or in."""
        cdef int64_t n = z.handed_rows * z.dims.hidden_size, j
        cdef float* here
        cdef int bad = 0
        for j in range(banked + 1):
            here = z.s if j == 0 else z.bank + (j - 1) * z.room * z.dims.hidden_size
            if out:
                bad |= z.ops.read(z.ops.ctx, host + j * n, here, n * sizeof(float))
            else:
                bad |= z.ops.write(z.ops.ctx, here, host + j * n, n * sizeof(float))
        return bad

    cdef int kda(self, Work* main, Work* z, int64_t i, Taps taps) noexcept nogil:
        """Kimi Delta Attention: a <- o_proj(norm(recurrence(conv(q, k, v))) * sigmoid(g))."""
        cdef const k3_dims* dims = z.dims
        cdef int64_t R = z.job.rows, C = dims.kda_num_heads * dims.kda_head_k, H = dims.kda_num_heads
        cdef const k3_layer* L = &z.tables.layers[i]
        cdef Raw raw = raw_of(z, L.mixer_index)
        cdef k3_linear_job jobs[6]
        cdef int bad = carry(main, z, z.x, main.x, dims.hidden_size)
        jobs[0] = job(&L.kda.q_proj, z.x, raw.q)
        jobs[1] = job(&L.kda.k_proj, z.x, raw.k)
        jobs[2] = job(&L.kda.v_proj, z.x, raw.v)
        jobs[3] = job(&L.kda.g_proj, z.x, z.g)
        jobs[4] = job(&L.kda.f_a_proj, z.x, z.f_a)
        jobs[5] = job(&L.kda.b_proj, z.x, raw.beta)
        bad |= z.ops.linear(z.ops.ctx, jobs, 6, R)
        bad |= project(z, &L.kda.f_b_proj, z.f_a, raw.f, R)
        bad |= z.ops.kda_gates(z.ops.ctx, dims, &L.kda, raw.f, raw.beta, R)
        bad |= self.advance(z, i)
        if taps is not None:
            taps.put(z, KDA_Q_CONV, i, z.qkv[0], R, C)
            taps.put(z, KDA_K_CONV, i, z.qkv[1], R, C)
            taps.put(z, KDA_V_CONV, i, z.qkv[2], R, C)
            taps.put(z, KDA_DECAY, i, raw.f, R, C)
            taps.put(z, KDA_BETA, i, raw.beta, R, H)
            taps.put(z, KDA_O, i, z.o, R, C)
        bad |= z.ops.kda_output(z.ops.ctx, dims, &L.kda, z.o, z.g, R)
        if taps is not None:
            taps.put(z, KDA_ON, i, z.o, R, C)
        bad |= project(z, &L.kda.o_proj, z.o, z.a, R)
        return bad | carry(z, main, main.a, z.a, dims.hidden_size)

    cdef int advance(self, Work* z, int64_t i) noexcept nogil:
        """What of a KDA layer depends on earlier tokens: convolution and recurrence, from its projections and gates."""
        cdef const k3_layer* L = &z.tables.layers[i]
        cdef Raw raw = raw_of(z, L.mixer_index)
        cdef int bad = z.ops.kda_conv(z.ops.ctx, z.dims, &L.kda, &z.job, L.mixer_index, raw.q, raw.k, raw.v,
                                      z.qkv[0], z.qkv[1], z.qkv[2])
        return bad | z.ops.kda_recurrence(z.ops.ctx, z.dims, &z.job, L.mixer_index, z.qkv[0], z.qkv[1], z.qkv[2],
                                          raw.f, raw.beta, z.o)

    cdef int mla(self, Work* main, Work* z, int64_t i, Taps taps) noexcept nogil:
        """Multi-head Latent Attention, absorbed: a <- o_proj(Wv attend(Wk^T q, latent) * sigmoid(g))."""
        cdef const k3_dims* dims = z.dims
        cdef int64_t R = z.job.rows, H = dims.num_attention_heads
        cdef const k3_layer* L = &z.tables.layers[i]
        cdef bint gated = L.mla.g_proj.data != NULL
        cdef k3_linear_job jobs[3]
        cdef int bad = carry(main, z, z.x, main.x, dims.hidden_size)
        jobs[0] = job(&L.mla.q_a_proj, z.x, z.c_q)
        jobs[1] = job(&L.mla.kv_a_proj_with_mqa, z.x, z.kva)
        jobs[2] = job(&L.mla.g_proj, z.x, z.mla_g)
        bad |= z.ops.linear(z.ops.ctx, jobs, 3 if gated else 2, R)
        bad |= z.ops.rms_norm(z.ops.ctx, z.c_q, dims.q_lora_rank, L.mla.q_a_layernorm, dims.mla_latent_norm_eps,
                              z.c_q, dims.q_lora_rank, R, dims.q_lora_rank)
        bad |= project(z, &L.mla.q_b_proj, z.c_q, z.q, R)
        if dims.rotary:
            bad |= z.ops.mla_rope(z.ops.ctx, dims, &z.job, z.tables.frequencies, z.q, z.kva)
        bad |= z.ops.mla_append(z.ops.ctx, dims, &L.mla, &z.job, L.mixer_index, z.kva)
        bad |= z.ops.mla_absorb(z.ops.ctx, dims, &L.mla, z.q, z.q_abs, R)
        bad |= z.ops.mla_attend(z.ops.ctx, dims, &z.job, L.mixer_index, z.q_abs, z.o_abs)
        bad |= z.ops.mla_unabsorb(z.ops.ctx, dims, &L.mla, z.o_abs, z.mla_g if gated else NULL, z.mla_o, R)
        if taps is not None:
            taps.put(z, MLA_Q, i, z.q, R, H * (dims.qk_nope_head_dim + dims.qk_rope_head_dim))
            taps.put(z, MLA_KVA, i, z.kva, R, dims.kv_lora_rank + dims.qk_rope_head_dim)
            taps.put(z, MLA_GATED, i, z.mla_o, R, H * dims.v_head_dim)
        bad |= project(z, &L.mla.o_proj, z.mla_o, z.a, R)
        return bad | carry(z, main, main.a, z.a, dims.hidden_size)

    cdef int mlp(self, Work* main, Work* z, int64_t i, float* out) noexcept nogil:
        """A SiTU-GLU MLP, the dense one or the shared experts: out <- down_proj(SiTU(gate_proj x, up_proj x))."""
        cdef const k3_layer* L = &z.tables.layers[i]
        cdef float* y = out if z is main else z.a
        cdef int bad = carry(main, z, z.x, main.x, z.dims.hidden_size)
        bad |= z.ops.gate_up(z.ops.ctx, z.dims, &L.mlp.gate_proj, &L.mlp.up_proj, z.x, z.hidden, z.job.rows)
        bad |= project(z, &L.mlp.down_proj, z.hidden, y, z.job.rows)
        return bad | carry(z, main, out, y, z.dims.hidden_size)

    cdef int moe(self, Work* z, int64_t i, Taps taps) noexcept nogil:
        """Stable LatentMoE: a <- up(rms(sum of experts in the latent)), b <- shared experts on the full width."""
        cdef const k3_dims* dims = z.dims
        cdef int64_t R = z.job.rows, T = dims.num_experts_per_token, latent = dims.routed_expert_hidden_size
        cdef const k3_layer* L = &z.tables.layers[i]
        cdef Work* e = z.experts
        cdef k3_linear_job jobs[2]
        cdef int bad = 0
        jobs[0] = job(&L.moe.gate, z.x, z.router)
        jobs[1] = job(&L.moe.routed_expert_down_proj, z.x, z.z)
        bad |= z.ops.linear(z.ops.ctx, jobs, 2, R)
        bad |= z.ops.route(z.ops.ctx, dims, z.router, L.moe.e_score_correction_bias, z.route_ids, z.route_weights, R)
        bad |= carry(z, e, e.z, z.z, latent)
        bad |= carry(z, e, e.route_ids, z.route_ids, T)
        bad |= carry(z, e, e.route_weights, z.route_weights, T)
        # The shared experts come first, so that they run beside experts that are elsewhere.
        if has_shared(z, i):
            bad |= self.mlp(z, z.dense, i, z.b)
        if e is not z:
            bad |= z.ops.submit(z.ops.ctx)
        # Numbers of experts that never arrived would address anything.
        if bad == 0:
            bad = e.ops.experts(e.ops.ctx, dims, &e.tables.layers[i].moe, &e.job, e.z, e.route_ids, e.route_weights, e.u,
                                0, dims.num_experts)
        bad |= carry(e, z, z.u, e.u, latent)
        if taps is not None:
            taps.put(z, ROUTE_IDS, i, <float*>z.route_ids, R, T)
            taps.put(z, ROUTE_WTS, i, z.route_weights, R, T)
            taps.put(z, MOE_LATENT_IN, i, z.z, R, latent)
            taps.put(z, MOE_AGG, i, z.u, R, latent)
        # The norm is on the weighted sum, before the way up.
        if L.moe.routed_expert_norm != NULL:
            bad |= z.ops.rms_norm(z.ops.ctx, z.u, latent, L.moe.routed_expert_norm, dims.rms_norm_eps, z.u, latent, R, latent)
        bad |= project(z, &L.moe.routed_expert_up_proj, z.u, z.a, R)
        if taps is not None:
            taps.put(z, MOE_ROUTED, i, z.a, R, dims.hidden_size)
            if has_shared(z, i):
                taps.put(z, MOE_SHARED, i, z.b, R, dims.hidden_size)
        return bad

    cdef int check_pass(self, Scratch z, list timelines, list counts, const int32_t[::1] tokens, bint embedded) except -1:
        """Refuses a pass that its scratch, its sessions or this model could not take; nothing has been written."""
        cdef int64_t n = len(timelines), i, total = 0, count
        cdef Timeline t
        if n == 0 or n != len(counts) or n > z.segments_room or tokens.shape[0] > z.rows:
            raise K3Error(
                f"a pass of {tokens.shape[0]} rows in {n} segments does not fit scratch for {z.rows} in {z.segments_room}")
        if n > 1 and len(set(map(id, timelines))) != n:
            raise K3Error("a session can be in a pass once")
        for i in range(n):
            t = timelines[i]
            count = counts[i]
            if count < 1 or count > tokens.shape[0]:
                raise K3Error(f"a segment of {count} rows: expected at least 1, and no more than the pass has")
            total += count
            if t.weights is not self.weights or z.decoder is not self:
                raise K3Error("sessions and scratch of a pass must be of its model")
            if t.kda_memory is not z.kda_memory or t.mla_memory is not z.mla_memory:
                raise K3Error("the state of a session must live where the layers of the pass run")
        if total != tokens.shape[0]:
            raise K3Error(f"the segments have {total} rows and the pass {tokens.shape[0]}")
        for i in range(tokens.shape[0]):
            if not (0 <= tokens[i] < self.weights.dims.vocab_size or (tokens[i] == -1 and (embedded or self.weights.first > 0))):
                raise K3Error(f"token {tokens[i]} in row {i} is not in the vocabulary")
        return 0

    def forward(self, Scratch z not None, list timelines not None, list counts not None, const int32_t[::1] tokens,
                embeddings=None, float[:, ::1] logits=None, bint every_row=False, Taps taps=None, bint keep=False,
                const float[:, :, ::1] handed_in=None, float[:, :, ::1] handed_out=None, bint hold=False):
        """One pass over ``counts[i]`` tokens of ``timelines[i]``; commits each timeline that came through.

        Parameters
        ----------
        tokens : int32[R]
            The rows of all segments, one after the other; -1 takes the row of ``embeddings``, float32[R, hidden].
        logits : float32[n, vocab], optional
            Filled for the last row of each segment, or for all rows with ``every_row``; without it the head is not run.
        keep : bool
            Commit nothing: the pass, of one timeline, is kept for `accept`, and forgotten at the next one.
        handed_in, handed_out : float32[1 + banked, R, hidden]
            At a cut between layers: the running sum and the bank, as the layers before gave them, and for the layers
            behind.  Where a model begins with its first layer and ends with its last, there are none.
        hold : bool
            Commit nothing: the pass waits for `commit`, and is forgotten at the next one.

        Returns
        -------
        None, or a list with the name of the first sub-layer that was not finite, or None, for each timeline.

        Raises
        ------
        PassCancelled, MemoryError, KeyboardInterrupt : nothing has been committed.
        """
        cdef int64_t n = len(timelines), i, n_take = 0
        cdef Timeline t
        cdef const float[:, ::1] rows
        self.check_pass(z, timelines, counts, tokens, embeddings is not None)
        self.check_hands(z, tokens.shape[0], handed_in, handed_out)
        if embeddings is not None:
            rows = embeddings
            if rows.shape[0] != tokens.shape[0] or rows.shape[1] != self.weights.dims.hidden_size:
                raise K3Error("embeddings must be float32[rows, hidden_size]")
        if logits is not None:
            n_take = tokens.shape[0] if every_row else n
            if logits.shape[0] != n_take or logits.shape[1] != self.weights.dims.vocab_size:
                raise K3Error(f"logits must be float32[{n_take}, {self.weights.dims.vocab_size}]")
        if keep and n != 1:
            raise K3Error(f"a pass that is committed later has one session; found {n}")
        z.lay_out(timelines, counts, tokens, n_take, every_row)
        if keep:
            z.open_tape()
        if self.go(z, tokens.shape[0], n_take, &rows[0, 0] if embeddings is not None else NULL,
                   &logits[0, 0] if n_take > 0 else NULL, taps) == CANCELLED:
            t = timelines[0]
            raise PassCancelled("the pass was cancelled", t.position)
        bad = None
        for i in range(n):
            t = timelines[i]
            if z.main.desk.bad[i] == K3_NO_BAD_SUBLAYER:
                if keep:
                    z.kept, z.kept_rows = t, counts[i]
                    continue
                if hold:
                    continue
                z.spare[i] = t.commit(z.spare[i], counts[i])
            else:
                bad = bad or [None] * n
                bad[i] = sublayer_name(self.weights, z.main.desk.bad[i])
        if hold and not keep:
            z.held, z.held_counts = list(timelines), list(counts)
        return bad

    cdef int check_hands(self, Scratch z, int64_t rows, const float[:, :, ::1] handed_in,
                         float[:, :, ::1] handed_out) except -1:
        """Notes where the values at the cuts are; refuses those that do not fit the layers that are here."""
        cdef Work* work = &z.main.work
        cdef const k3_dims* dims = work.dims
        cdef int64_t before = 1 + blocks_before(dims, self.weights.first), behind = 1 + blocks_before(dims, self.weights.end)
        cdef bint last = self.weights.end == dims.num_hidden_layers
        work.handed_in = work.handed_out = NULL
        work.handed_rows = rows
        if (handed_in is not None) != (self.weights.first > 0) or (handed_out is not None) == last:
            raise K3Error(f"layers {self.weights.first} to {self.weights.end - 1} take what the layers before them hand over, "
                          "and give what those behind them take: exactly where there are such layers")
        if handed_in is not None:
            if (handed_in.shape[0], handed_in.shape[1], handed_in.shape[2]) != (before, rows, dims.hidden_size):
                raise K3Error(f"handed_in must be float32[{before}, {rows}, {dims.hidden_size}]")
            work.handed_in = <float*>&handed_in[0, 0, 0]
        if handed_out is not None:
            if (handed_out.shape[0], handed_out.shape[1], handed_out.shape[2]) != (behind, rows, dims.hidden_size):
                raise K3Error(f"handed_out must be float32[{behind}, {rows}, {dims.hidden_size}]")
            work.handed_out = &handed_out[0, 0, 0]
        return 0

    def commit(self, Scratch z not None, list chosen not None) -> None:
        """Commits those timelines of the pass that was held last for which ``chosen`` is true, and forgets it."""
        cdef Timeline t
        cdef int64_t i
        if z.held is None or len(chosen) != len(z.held):
            raise K3Error(f"no pass of {len(chosen)} sessions is held that could be committed")
        for i in range(len(chosen)):
            if chosen[i]:
                t = z.held[i]
                z.spare[i] = t.commit(z.spare[i], z.held_counts[i])
        z.held = z.held_counts = None

    def accept(self, Scratch z not None, int64_t rows) -> None:
        """Commits the first ``rows`` tokens of the pass that was kept last, and forgets it.

        No weight is read again: where it is not all of them, the layers' recurrences are run over what the pass kept.
        """
        self.prepare(z, rows)
        self.commit_kept(z)

    def prepare(self, Scratch z not None, int64_t rows) -> None:
        """The part of `accept` that computes: the first ``rows`` tokens of the kept pass are what will be committed."""
        if z.kept is None or not 0 <= rows <= z.kept_rows:
            raise K3Error(f"no pass is kept of which {rows} rows could be committed")
        if 0 < rows < z.kept_rows:
            self.replay(z, rows)
        z.kept_rows = rows

    def commit_kept(self, Scratch z not None) -> None:
        """The part of `accept` that commits, after `prepare`; it computes nothing and does not fail."""
        cdef Timeline t = z.kept
        cdef int64_t rows = z.kept_rows
        if t is None:
            raise K3Error("no pass is kept that could be committed")
        z.close_tape()
        if rows > 0:
            z.spare[0] = t.commit(z.spare[0], rows)

    def own_bytes(self, list timelines not None) -> int:
        """Bytes of state that no timeline but these holds."""
        return own_bytes_of(timelines)

    def scratch(self, int64_t rows, int64_t segments=1) -> Scratch:
        """What passes of up to ``rows`` rows in up to ``segments`` segments work in."""
        return Scratch(self, rows, segments)

    cdef int replay(self, Scratch z, int64_t rows) except -1:
        """The part over time of every KDA layer once more, over the first rows of the pass that was kept."""
        cdef Side side = z.kda_side()
        cdef Work* work = &side.work
        cdef Ops ops = side.backend
        cdef PassShape shape
        cdef unsigned int mode
        cdef int64_t i
        cdef int status = 0
        side.desk.segments[0].rows = rows
        for i in range(rows, work.job.rows):
            side.desk.owner[i] = -1
        shape.rows, shape.segments, shape.take = work.job.rows, work.job.n_segments, 0
        shape.kind, shape.tape, shape.traced = REPLAYED, z.tape_number, False
        with nogil:
            mode = float_mode_enter()
            status = ops.begin(shape, side.bad_at)
            for i in range(self.weights.first, self.weights.end):
                if status == 0 and work.tables.layers[i].is_kda:
                    status |= self.advance(work, i)
            if ops.end(status == 0, 0, 0):
                status = FAILED
            float_mode_leave(mode)
        if status != 0:
            raise z.failure()
        return 0

    cdef int go(self, Scratch z, int64_t rows, int64_t n_take, const float* embeddings, float* logits, Taps taps) except -1:
        """Runs the pass that has been laid out, on all sides that take part, without the GIL; DONE or CANCELLED."""
        cdef Work* work = &z.main.work
        cdef Ops main = z.main.backend
        cdef Ops other = main if z.other is None else z.other.backend
        cdef int64_t row_bytes = self.weights.dims.vocab_size * sizeof(float)
        cdef unsigned int mode
        cdef int status = DONE
        cdef bint complete = False
        cdef double checked = monotonic()
        cdef PassShape shape
        shape.rows, shape.segments, shape.take = work.job.rows, work.job.n_segments, main.padded(n_take)
        shape.kind = EMBEDDED if embeddings != NULL else PLAIN
        shape.tape = z.tape_number if z.kda_side().work.tape != NULL else 0
        shape.traced = taps is not None
        work.embeddings = embeddings
        if work.mapped:
            work.logits = logits
        with nogil:
            while not main.ready() or not other.ready():
                if interrupted(work, &checked):
                    return CANCELLED
            mode = float_mode_enter()
            try:
                status = main.begin(shape, z.main.bad_at + shape.segments * sizeof(int32_t))
                if other is not main:
                    status |= other.begin(other_shape(z.other, shape), z.other.bad_at)
                if embeddings != NULL and not work.mapped:
                    # The caller's rows arrive in x, which is free until the first norm.
                    status |= work.ops.write(work.ops.ctx, work.x, embeddings, rows * work.dims.hidden_size * sizeof(float))
                    work.embeddings = work.x
                status = FAILED if status else self.run(work, shape.take, taps)
                complete = status == DONE
            finally:
                # Whatever happened, nothing is left behind in a stream.
                if other is not main and other.end(complete, 0, 0):
                    status = FAILED
                if main.end(complete, z.main.bad_at, z.main.logits_at - z.main.bad_at + n_take * row_bytes):
                    status = FAILED
                float_mode_leave(mode)
            if status == DONE and n_take > 0 and not work.mapped:
                memcpy(logits, z.main.desk.logits, n_take * row_bytes)
        if status == FAILED:
            raise z.failure()
        return status


cdef PassShape other_shape(Side side, PassShape shape) noexcept nogil:
    shape.rows, shape.segments, shape.take = side.work.job.rows, side.work.job.n_segments, 0
    return shape


cdef int64_t blocks_before(const k3_dims* dims, int64_t i) noexcept nogil:
    """Rows in the bank when layer i begins: one for each block that has begun before it."""
    return (i + dims.attn_res_block_size - 1) // dims.attn_res_block_size


cdef bint has_shared(const Work* z, int64_t i) noexcept nogil:
    """Whether a layer has shared experts beside the routed ones."""
    return z.tables.layers[i].is_moe and z.dims.shared_intermediate_size > 0


cdef int carry(Work* a, Work* b, void* to, const void* start, int64_t width) noexcept nogil:
    """Brings rows of 4-byte values from one side to the other; nothing where both are one."""
    cdef int64_t nbytes = min(a.job.rows, b.job.rows) * width * 4
    if a is b:
        return 0
    return a.ops.read(a.ops.ctx, to, start, nbytes) if b.mapped else b.ops.write(b.ops.ctx, to, start, nbytes)


cdef struct Raw:                        # what a KDA layer's part over time works on
    float* q
    float* k
    float* v
    float* f
    float* beta


cdef Raw raw_of(const Work* z, int64_t mixer_index) noexcept nogil:
    """The buffers of every layer, or of one on the tape of a pass that is committed later."""
    cdef Raw r
    cdef int64_t C = z.dims.kda_num_heads * z.dims.kda_head_k
    cdef float* at
    r.q, r.k, r.v, r.f, r.beta = z.raw[0], z.raw[1], z.raw[2], z.f, z.beta
    if z.tape != NULL:
        at = z.tape + mixer_index * z.tape_rows * tape_width(z.dims)
        r.q, r.k, r.v, r.f = at, at + z.tape_rows * C, at + 2 * z.tape_rows * C, at + 3 * z.tape_rows * C
        r.beta = at + 4 * z.tape_rows * C
    return r


cdef int64_t tape_width(const k3_dims* dims) noexcept nogil:
    """Floats that one row of one KDA layer takes on the tape: a multiple of 16, so that every part is aligned."""
    return (4 * dims.kda_num_heads * dims.kda_head_k + dims.kda_num_heads + 63) // 64 * 64


cdef k3_linear_job job(const k3_matrix* w, const float* x, float* y) noexcept nogil:
    cdef k3_linear_job j
    j.w = w
    j.x = x
    j.y = y
    j.ldx = w.cols
    j.ldy = w.rows
    return j


cdef int project(Work* z, const k3_matrix* w, const float* x, float* y, int64_t rows) noexcept nogil:
    cdef k3_linear_job one = job(w, x, y)
    return z.ops.linear(z.ops.ctx, &one, 1, rows)


@cython.no_gc_clear
cdef class Side:
    """One pass in flight on one side: AttnRes streams and activations, in one block, freed with the object."""

    def __cinit__(self, Decoder decoder not None, Ops backend not None, int64_t rows, int64_t segments):
        cdef char* end
        self.backend = backend
        self.work.ops = &backend.table
        self.work.dims = &decoder.weights.dims
        self.work.mapped = backend.memory.mapped
        self.work.tables = &decoder.weights.tables if self.work.mapped else &decoder.device.tables
        self.work.room = backend.padded(rows)
        segments = backend.padded(segments)
        end = self.lay_out(NULL, 0)
        if self.lay_out(NULL, 1) > end:
            end = self.lay_out(NULL, 1)
        self.nbytes = end - <char*>NULL
        # What a pass does not touch takes no memory on the host; a device's rows that only fill a pass must hold something.
        if self.work.mapped:
            self.memory = <char*>aligned(self.nbytes)  # in small pages: one row touches a little of each buffer
        else:
            self.memory = <char*>backend.memory.allocate(self.nbytes)
        self.lay_out(self.memory, 0)
        self.lay_out(self.memory, 1)
        self.lay_out_mail(segments)

    def __dealloc__(self):
        if self.work.mapped:
            free(self.memory)
        elif self.backend is not None:
            self.backend.memory.release(self.memory)

    cdef char* lay_out(self, char* base, int64_t kind) noexcept:
        """Places every buffer from ``base`` on and returns the end; kind 0 lays out KDA, 1 MLA, which share memory."""
        cdef Work* z = &self.work
        cdef const k3_dims* d = z.dims
        cdef int64_t R = z.room, C = d.kda_num_heads * d.kda_head_k, H = d.num_attention_heads
        cdef int64_t blocks = (d.num_hidden_layers + d.attn_res_block_size - 1) // d.attn_res_block_size
        cdef int64_t inner = max(d.intermediate_size, d.shared_intermediate_size), i
        cdef char* at = base
        z.s = place(&at, R * d.hidden_size)
        z.bank = place(&at, blocks * R * d.hidden_size)
        z.h = place(&at, R * d.hidden_size)
        z.x = place(&at, R * d.hidden_size)
        z.a = place(&at, R * d.hidden_size)
        z.b = place(&at, R * d.hidden_size)
        z.mix = place(&at, R * (blocks + 1))
        z.hidden = place(&at, R * inner)
        z.router = place(&at, R * d.num_experts)
        z.route_ids = <int32_t*>place(&at, R * d.num_experts_per_token)
        z.route_weights = place(&at, R * d.num_experts_per_token)
        z.z = place(&at, R * d.routed_expert_hidden_size)
        z.u = place(&at, R * d.routed_expert_hidden_size)
        if kind == 0:
            for i in range(3):
                z.raw[i] = place(&at, R * C)
                z.qkv[i] = place(&at, R * C)
            z.f_a = place(&at, R * d.kda_head_k)
            z.f = place(&at, R * C)
            z.beta = place(&at, R * d.kda_num_heads)
            z.g = place(&at, R * C)
            z.o = place(&at, R * C)
        else:
            z.c_q = place(&at, R * d.q_lora_rank)
            z.q = place(&at, R * H * (d.qk_nope_head_dim + d.qk_rope_head_dim))
            z.kva = place(&at, R * (d.kv_lora_rank + d.qk_rope_head_dim))
            z.q_abs = place(&at, R * H * d.latent_stride)
            z.o_abs = place(&at, R * H * d.kv_lora_rank)
            z.mla_g = place(&at, R * H * d.v_head_dim)
            z.mla_o = place(&at, R * H * d.v_head_dim)
        return at

    cdef int lay_out_mail(self, int64_t segments) except -1:
        """What differs from pass to pass, in the order in which it goes in; bad sub-layers and logits come back."""
        cdef Work* z = &self.work
        cdef Desk* desk = &self.desk
        cdef int64_t R = z.room
        cdef char* host
        cdef char* here
        cdef char* at = NULL
        cdef int64_t tokens = <char*>place(&at, R) - <char*>NULL
        cdef int64_t owner = <char*>place(&at, R) - <char*>NULL
        cdef int64_t take = <char*>place(&at, R) - <char*>NULL
        cdef int64_t take_owner = <char*>place(&at, R) - <char*>NULL
        cdef int64_t table = <char*>place(&at, segments * sizeof(k3_segment) // 4) - <char*>NULL
        self.bad_at = <char*>place(&at, segments) - <char*>NULL
        self.logits_at = at - <char*>NULL
        if not z.mapped:
            place(&at, R * z.dims.vocab_size)
        self.backend.open_mail(at - <char*>NULL, &host, &here)
        desk.tokens, z.tokens = <int32_t*>(host + tokens), <int32_t*>(here + tokens)
        desk.owner, z.job.owner = <int32_t*>(host + owner), <int32_t*>(here + owner)
        desk.take, z.take = <int32_t*>(host + take), <int32_t*>(here + take)
        desk.take_owner, z.take_owner = <int32_t*>(host + take_owner), <int32_t*>(here + take_owner)
        desk.segments, z.job.segments = <k3_segment*>(host + table), <k3_segment*>(here + table)
        desk.bad, z.job.bad_sublayer = <int32_t*>(host + self.bad_at), <int32_t*>(here + self.bad_at)
        desk.logits, z.logits = <float*>(host + self.logits_at), <float*>(here + self.logits_at)
        return 0

    cdef void fill(self, list timelines, list counts, const int32_t[::1] tokens, int64_t n_take, bint every_row,
                   Block** spare) except *:
        """Writes a pass to the mail; what only fills it up to a size that is recorded has no owner."""
        cdef Desk* desk = &self.desk
        cdef k3_segment* seg
        cdef Timeline t
        cdef int64_t n = len(timelines), i, j, row = 0, taken = 0
        self.work.job.rows = self.backend.padded(tokens.shape[0])
        self.work.job.n_segments = self.backend.padded(n)
        for i in range(n):
            t = timelines[i]
            seg = &desk.segments[i]
            t.lay_out(seg)
            seg.row = row
            seg.rows = counts[i]
            seg.next = spare[i].at
            desk.bad[i] = K3_NO_BAD_SUBLAYER
            for j in range(seg.rows):
                desk.owner[row + j] = <int32_t>i
                if n_take > 0 and (every_row or j == seg.rows - 1):
                    desk.take[taken] = <int32_t>(row + j)
                    desk.take_owner[taken] = <int32_t>i
                    taken += 1
            row += seg.rows
        memcpy(desk.tokens, &tokens[0], row * sizeof(int32_t))
        for i in range(row, self.work.job.rows):
            desk.tokens[i] = desk.owner[i] = -1
        for i in range(taken, self.backend.padded(taken)):
            desk.take[i] = 0
            desk.take_owner[i] = -1
        for i in range(n, self.work.job.n_segments):
            memset(&desk.segments[i], 0, sizeof(k3_segment))
            desk.segments[i].row = row
            desk.bad[i] = K3_NO_BAD_SUBLAYER


@cython.no_gc_clear
cdef class Scratch:
    """What passes of up to ``rows`` rows in up to ``segments`` segments work in; one pass at a time."""

    def __cinit__(self, Decoder decoder not None, int64_t rows, int64_t segments=1):
        self.decoder = decoder
        self.rows = rows
        self.segments_room = segments
        self.kda_memory, self.mla_memory = decoder.memory_of("kda"), decoder.memory_of("mla")
        self.main = self.side(decoder.on_device("trunk"))
        for part in ("kda", "mla", "dense", "experts"):
            if decoder.on_device(part) != decoder.on_device("trunk") and self.other is None:
                self.other = self.side(decoder.on_device(part))
        self.main.work.kda = self.work_of("kda")
        self.main.work.mla = self.work_of("mla")
        self.main.work.dense = self.work_of("dense")
        self.main.work.experts = self.work_of("experts")
        self.spare = <Block**>calloc(segments, sizeof(void*))
        if self.spare == NULL:
            raise MemoryError("could not allocate the segments of a pass")
        if segments == 1:               # of many, each is made when a pass first has so many
            self.spare[0] = new_block(decoder.weights, self.kda_memory, False)

    cdef Side side(self, bint on_device):
        cdef Decoder d = self.decoder
        cdef CudaOps gpu
        if not on_device:
            kind = CpuOps if d.streamer is None else StreamOps
            ops = kind(d.weights, self.rows, d.threads, d.isa, d.streamer, d.round_inputs)
            return Side(d, ops, self.rows, self.segments_room)
        which = CudaOps if d.gpu_streamer is None else GpuStreamOps
        gpu = which(d.device.memory, self.rows, d.split_activations, d.gpu_streamer)
        gpu.prepare(&d.weights.dims)
        return Side(d, gpu, self.rows, self.segments_room)

    cdef Work* work_of(self, str part) except NULL:
        same = self.decoder.on_device(part) == self.decoder.on_device("trunk")
        return &self.main.work if same else &self.other.work

    def __dealloc__(self):
        cdef int64_t i
        if self.spare != NULL:
            for i in range(self.segments_room):
                drop_block(self.spare[i], self.kda_memory)
        free(self.spare)
        if self.tape != NULL:
            self.kda_memory.release(self.tape)

    cdef int lay_out(self, list timelines, list counts, const int32_t[::1] tokens, int64_t n_take, bint every_row) except -1:
        """Reserves what the pass will write, and writes it to the mail of each side."""
        cdef Timeline t
        cdef int64_t i, j
        self.close_tape()
        for i in range(len(timelines)):
            t = timelines[i]
            j = t.check(t.position)
            if j >= 0:
                raise K3Error(f"layer {j} has taken in {t.seen[j]} tokens where the session stands at {t.position}")
            t.reserve(t.position + <int64_t>counts[i])
            if self.spare[i] == NULL:
                self.spare[i] = new_block(self.decoder.weights, self.kda_memory, False)
        self.main.fill(timelines, counts, tokens, n_take, every_row, self.spare)
        if self.other is not None:
            self.other.fill(timelines, counts, tokens, 0, False, self.spare)
        return 0

    cdef Side kda_side(self):
        """Where the KDA layers run."""
        return self.main if self.main.work.kda == &self.main.work else self.other

    cdef int open_tape(self) except -1:
        """Makes room for what a pass keeps, until `close_tape`."""
        cdef Side side = self.kda_side()
        cdef Work* work = &side.work
        cdef int64_t layers = max(1, work.dims.n_kda)
        if work.job.rows > self.tape_rows:
            if self.tape != NULL:
                self.kda_memory.release(self.tape)
            self.tape = NULL
            self.tape_rows = 0
            self.tape = <float*>self.kda_memory.allocate(layers * work.job.rows * tape_width(work.dims) * sizeof(float))
            self.tape_rows = work.job.rows
            self.tape_number += 1
        work.tape, work.tape_rows = self.tape, self.tape_rows
        return 0

    cdef void close_tape(self) noexcept:
        self.kept = None
        self.held = self.held_counts = None
        self.kda_side().work.tape = NULL

    def failure(self) -> Exception:
        """Why an op of the last pass did not do its work."""
        found = self.main.backend.failure()
        if found is None and self.other is not None:
            found = self.other.backend.failure()
        return found or K3Error("an op cannot take these shapes, or found its buffers too small; please report this with the "
                                "model's config.json")

    def streamed(self, bint clear=False) -> tuple[int, int, int, int, int] | None:
        """`StreamOps.counts` of the passes so far; None where no weights are streamed."""
        for side in (self.main, self.other):
            if side is not None and isinstance((<Side>side).backend, (StreamOps, GpuStreamOps)):
                return (<Side>side).backend.counts(clear)
        return None

    @property
    def weights(self) -> Weights:
        """The weights of the model that this is for."""
        return self.decoder.weights

    @property
    def backend(self) -> Ops:
        """The ops of the main side."""
        return self.main.backend

    @property
    def nbytes(self) -> int:
        """Bytes of activations."""
        return self.main.nbytes + (0 if self.other is None else self.other.nbytes)

    def poison(self) -> None:
        """Fills everything with NaN, so that a test sees whatever is read before it is written."""
        self.main.backend.memory.fill(self.main.memory, 0xff, self.main.nbytes)
        self.main.backend.poison()
        if self.other is not None:
            self.other.backend.memory.fill(self.other.memory, 0xff, self.other.nbytes)
            self.other.backend.poison()

    def cancel(self) -> None:
        """Asks the pass in flight to stop at the next sub-layer."""
        k3_set_flag(&self.main.work.cancelled, 1)

    def clear_cancel(self) -> None:
        """Forgets an earlier cancel()."""
        k3_set_flag(&self.main.work.cancelled, 0)

    @property
    def is_cancelled(self) -> bool:
        """Whether cancel() was called since the last clear_cancel()."""
        return k3_flag(&self.main.work.cancelled) != 0


cdef float* place(char** at, int64_t values) noexcept:
    """The next buffer of 4-byte values, at a multiple of 256 bytes as GPUs like it."""
    cdef char* here = at[0]
    at[0] += (values * 4 + 255) // 256 * 256
    return <float*>here


cdef class Taps:
    """Inner values of one pass, copied out as float32 arrays [rows, layers, width], named as in SITES.

    Layers that have no such value keep NaN (-1 in ``route_ids``).
    """

    def __cinit__(self, Weights weights not None, int64_t rows, names=SITES):
        cdef int i
        d = weights.dims
        blocks = (d.num_hidden_layers + d.attn_res_block_size - 1) // d.attn_res_block_size
        C, H = d.kda_num_heads * d.kda_head_k, d.num_attention_heads
        widths = {"attn_weights": blocks + 1, "ffn_weights": blocks + 1, "kda_beta": d.kda_num_heads,
                  "mla_q": H * (d.qk_nope_head_dim + d.qk_rope_head_dim), "mla_kva": d.kv_lora_rank + d.qk_rope_head_dim,
                  "mla_gated": H * d.v_head_dim, "route_ids": d.num_experts_per_token, "route_wts": d.num_experts_per_token,
                  "moe_latent_in": d.routed_expert_hidden_size, "moe_agg": d.routed_expert_hidden_size}
        widths.update({n: C for n in SITES if n.startswith("kda_") and n != "kda_beta"})
        unknown = set(names) - set(SITES)
        if unknown:
            raise ValueError(f"unknown trace sites {sorted(unknown)}: expected some of {SITES}")
        self.arrays = {}
        self.rows = rows
        for i, name in enumerate(SITES):
            if name not in names:
                continue
            layers = 1 if name in ("embed", "final_mix", "final_normed") else d.num_hidden_layers
            shape = (rows, layers, widths.get(name, d.hidden_size))
            array = np.full(shape, -1, np.int32) if name == "route_ids" else np.full(shape, np.nan, np.float32)
            self.arrays[name] = array
            self.site[i] = <float*><uintptr_t>array.ctypes.data
            self.layers[i], self.width[i] = shape[1:]
        self.line = <float*>aligned(max([a.shape[2] for a in self.arrays.values()], default=1) * sizeof(float))

    def __dealloc__(self):
        free(self.line)

    cdef void put(self, Work* z, int site, int64_t layer, const float* source, int64_t rows, int64_t width) noexcept nogil:
        """Copies a value of each row from where the ops have it."""
        cdef int64_t r
        if self.site[site] == NULL:
            return
        for r in range(min(rows, self.rows)):
            z.ops.read(z.ops.ctx, self.site[site] + (r * self.layers[site] + layer) * self.width[site], source + r * width,
                       width * sizeof(float))

    cdef void add(self, Work* z, int site, int64_t layer, const float* source, int64_t rows, int64_t width) noexcept nogil:
        """Adds to what was put: the residual op sums the two parts of a MoE output itself."""
        cdef int64_t r, i
        cdef float* to
        if self.site[site] == NULL:
            return
        for r in range(min(rows, self.rows)):
            to = self.site[site] + (r * self.layers[site] + layer) * self.width[site]
            z.ops.read(z.ops.ctx, self.line, source + r * width, width * sizeof(float))
            for i in range(width):
                to[i] += self.line[i]
