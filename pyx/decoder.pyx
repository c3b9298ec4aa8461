# SPDX-License-Identifier: MIT
"""K3: the graph of the whole model, once, for every kind of pass and every device.

A pass takes rows, grouped in segments; a segment is consecutive tokens of one session.  Embedding, AttnRes, norms,
matrices, router and experts see rows; only the two mixers look at segments.  The code calls an op table (cuda/ops.h)
and knows neither sessions nor devices.  Names are the checkpoint's own; docs/architecture.md explains the model.
"""

import numpy as np

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from k3session._core.c_ops cimport (
    K3_NO_BAD_SUBLAYER,
    k3_dims,
    k3_kda_state,
    k3_layer,
    k3_linear_job,
    k3_matrix,
    k3_segment,
)
from k3session._core.ops cimport CpuOps, aligned, float_mode_enter, float_mode_leave
from k3session._core.state cimport Timeline, allocate_kda, free_kda
from k3session._core.weights cimport Weights

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
    part = "self_attn" if code % 2 else "block_sparse_moe" if weights.layers[i].is_moe else "mlp"
    return f"model.layers.{i}.{part}"


cdef double monotonic() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef int check_signals() except -1 with gil:
    """Runs Python's signal handlers; Ctrl-C raises KeyboardInterrupt here."""
    return PyErr_CheckSignals()


cdef int interrupted(Scratch z, double* checked) except -1 nogil:
    """Between sub-layers: whether the pass was cancelled, and now and then whether Python has a signal to handle."""
    cdef double now = monotonic()
    if now - checked[0] > SIGNAL_SECONDS:
        checked[0] = now
        check_signals()
    return k3_flag(&z.cancelled)


cdef class Decoder:
    """The graph over one set of weights; immutable and shared by all sessions of a model."""

    def __cinit__(self, Weights weights not None):
        self.weights = weights

    cdef int run(self, Scratch z, const float* embeddings, int64_t n_take, float* logits, Taps taps) except -1 nogil:
        """One pass over the rows that are laid out in ``z``.  Writes alternate state only: nothing is committed."""
        cdef k3_dims* dims = &self.weights.dims
        cdef int64_t R = z.job.rows, d = dims.hidden_size, i, banked = 0
        cdef k3_layer* L
        cdef bint block_start
        cdef int bad = 0
        cdef float* h = z.h if taps is not None else NULL
        cdef float* mix = z.mix if taps is not None else NULL
        cdef double checked = monotonic()

        bad |= z.ops.embed(z.ops.ctx, dims, &self.weights.embed_tokens, z.tokens, embeddings, z.s, R)
        bad |= z.ops.finite(z.ops.ctx, &z.job, z.s, z.owner, 0, R, d)
        if taps is not None:
            taps.put(EMBED, 0, z.s, R, d)

        for i in range(dims.num_hidden_layers):
            if interrupted(z, &checked):
                return CANCELLED
            L = &self.weights.layers[i]

            # x <- rms(MIX(bank, s)).  At a block's start the raw running sum is banked, after it was mixed, and restarts.
            bad |= z.ops.attn_res(z.ops.ctx, dims, z.bank, banked, z.rows, z.s, L.self_attention_res, L.input_layernorm,
                                  NULL, h, z.x, mix, R)
            if taps is not None:
                taps.put(ATTN_WEIGHTS, i, mix, R, banked + 1)
                taps.put(ATTN_IN, i, h, R, d)
                taps.put(ATTN_X, i, z.x, R, d)
            block_start = i % dims.attn_res_block_size == 0
            if block_start:
                memcpy(z.bank + banked * z.rows * d, z.s, R * d * sizeof(float))
                banked += 1

            bad |= self.kda(z, L, taps, i) if L.is_kda else self.mla(z, L, taps, i)
            bad |= z.ops.residual(z.ops.ctx, &z.job, z.s, z.a, NULL, block_start, <int32_t>(1 + 2 * i), d)
            if taps is not None:
                taps.put(ATTN_OUT, i, z.a, R, d)

            if interrupted(z, &checked):
                return CANCELLED
            bad |= z.ops.attn_res(z.ops.ctx, dims, z.bank, banked, z.rows, z.s, L.mlp_res, L.post_attention_layernorm,
                                  NULL, h, z.x, mix, R)
            if taps is not None:
                taps.put(FFN_WEIGHTS, i, mix, R, banked + 1)
                taps.put(FFN_IN, i, h, R, d)
                taps.put(FFN_X, i, z.x, R, d)
            if L.is_moe:
                bad |= self.moe(z, L, taps, i)
                bad |= z.ops.residual(z.ops.ctx, &z.job, z.s, z.a, z.b if L.mlp.down_proj.data != NULL else NULL,
                                      False, <int32_t>(2 + 2 * i), d)
            else:
                bad |= self.dense(z, L)
                bad |= z.ops.residual(z.ops.ctx, &z.job, z.s, z.a, NULL, False, <int32_t>(2 + 2 * i), d)
            if taps is not None:
                if L.is_moe and L.mlp.down_proj.data != NULL:
                    add(z.a, z.b, R * d)
                taps.put(FFN_OUT, i, z.a, R, d)
                taps.put(LAYER_OUT, i, z.s, R, d)
            if bad:
                return FAILED

        if n_take > 0:
            bad |= z.ops.attn_res(z.ops.ctx, dims, z.bank, banked, z.rows, z.s, self.weights.output_attn_res,
                                  self.weights.norm, z.take, h, z.x, mix, n_take)
            if taps is not None:
                taps.put(FINAL_MIX, 0, h, n_take, d)
                taps.put(FINAL_NORMED, 0, z.x, n_take, d)
            bad |= project(z, &self.weights.lm_head, z.x, logits, n_take)
            for i in range(n_take):
                z.take[i] = z.owner[z.take[i]]
            bad |= z.ops.finite(z.ops.ctx, &z.job, logits, z.take, <int32_t>(1 + 2 * dims.num_hidden_layers),
                                n_take, dims.vocab_size)
        return FAILED if bad else DONE

    cdef int kda(self, Scratch z, k3_layer* L, Taps taps, int64_t i) noexcept nogil:
        """Kimi Delta Attention: a <- o_proj(norm(recurrence(conv(q, k, v))) * sigmoid(g))."""
        cdef k3_dims* dims = &self.weights.dims
        cdef int64_t R = z.job.rows, C = dims.kda_num_heads * dims.kda_head_k, H = dims.kda_num_heads
        cdef k3_linear_job jobs[6]
        cdef int bad = 0
        jobs[0] = job(&L.kda.q_proj, z.x, z.raw[0])
        jobs[1] = job(&L.kda.k_proj, z.x, z.raw[1])
        jobs[2] = job(&L.kda.v_proj, z.x, z.raw[2])
        jobs[3] = job(&L.kda.g_proj, z.x, z.g)
        jobs[4] = job(&L.kda.f_a_proj, z.x, z.f_a)
        jobs[5] = job(&L.kda.b_proj, z.x, z.beta)
        bad |= z.ops.linear(z.ops.ctx, jobs, 6, R)
        bad |= project(z, &L.kda.f_b_proj, z.f_a, z.f, R)
        bad |= z.ops.kda_conv(z.ops.ctx, dims, &L.kda, &z.job, L.mixer_index, z.raw[0], z.raw[1], z.raw[2],
                              z.qkv[0], z.qkv[1], z.qkv[2])
        bad |= z.ops.kda_gates(z.ops.ctx, dims, &L.kda, z.f, z.beta, R)
        bad |= z.ops.kda_recurrence(z.ops.ctx, dims, &z.job, L.mixer_index, z.qkv[0], z.qkv[1], z.qkv[2], z.f, z.beta, z.o)
        if taps is not None:
            taps.put(KDA_Q_CONV, i, z.qkv[0], R, C)
            taps.put(KDA_K_CONV, i, z.qkv[1], R, C)
            taps.put(KDA_V_CONV, i, z.qkv[2], R, C)
            taps.put(KDA_DECAY, i, z.f, R, C)
            taps.put(KDA_BETA, i, z.beta, R, H)
            taps.put(KDA_O, i, z.o, R, C)
        bad |= z.ops.kda_output(z.ops.ctx, dims, &L.kda, z.o, z.g, R)
        if taps is not None:
            taps.put(KDA_ON, i, z.o, R, C)
        return bad | project(z, &L.kda.o_proj, z.o, z.a, R)

    cdef int mla(self, Scratch z, k3_layer* L, Taps taps, int64_t i) noexcept nogil:
        """Multi-head Latent Attention, absorbed: a <- o_proj(Wv attend(Wk^T q, latent) * sigmoid(g))."""
        cdef k3_dims* dims = &self.weights.dims
        cdef int64_t R = z.job.rows, H = dims.num_attention_heads
        cdef bint gated = L.mla.g_proj.data != NULL
        cdef k3_linear_job jobs[3]
        cdef int bad = 0
        jobs[0] = job(&L.mla.q_a_proj, z.x, z.c_q)
        jobs[1] = job(&L.mla.kv_a_proj_with_mqa, z.x, z.kva)
        jobs[2] = job(&L.mla.g_proj, z.x, z.mla_g)
        bad |= z.ops.linear(z.ops.ctx, jobs, 3 if gated else 2, R)
        bad |= z.ops.rms_norm(z.ops.ctx, z.c_q, dims.q_lora_rank, L.mla.q_a_layernorm, dims.mla_latent_norm_eps,
                              z.c_q, dims.q_lora_rank, R, dims.q_lora_rank)
        bad |= project(z, &L.mla.q_b_proj, z.c_q, z.q, R)
        if dims.rotary:
            bad |= z.ops.mla_rope(z.ops.ctx, dims, &z.job, z.q, z.kva)
        bad |= z.ops.mla_append(z.ops.ctx, dims, &L.mla, &z.job, L.mixer_index, z.kva)
        bad |= z.ops.mla_absorb(z.ops.ctx, dims, &L.mla, z.q, z.q_abs, R)
        bad |= z.ops.mla_attend(z.ops.ctx, dims, &z.job, L.mixer_index, z.q_abs, z.o_abs)
        bad |= z.ops.mla_unabsorb(z.ops.ctx, dims, &L.mla, z.o_abs, z.mla_g if gated else NULL, z.mla_o, R)
        if taps is not None:
            taps.put(MLA_Q, i, z.q, R, H * (dims.qk_nope_head_dim + dims.qk_rope_head_dim))
            taps.put(MLA_KVA, i, z.kva, R, dims.kv_lora_rank + dims.qk_rope_head_dim)
            taps.put(MLA_GATED, i, z.mla_o, R, H * dims.v_head_dim)
        return bad | project(z, &L.mla.o_proj, z.mla_o, z.a, R)

    cdef int dense(self, Scratch z, k3_layer* L) noexcept nogil:
        """The dense SiTU-GLU MLP: a <- down_proj(SiTU(gate_proj x, up_proj x))."""
        cdef int bad = z.ops.gate_up(z.ops.ctx, &self.weights.dims, &L.mlp.gate_proj, &L.mlp.up_proj, z.x, z.hidden, z.job.rows)
        return bad | project(z, &L.mlp.down_proj, z.hidden, z.a, z.job.rows)

    cdef int moe(self, Scratch z, k3_layer* L, Taps taps, int64_t i) noexcept nogil:
        """Stable LatentMoE: a <- up(rms(sum of experts in the latent)), b <- shared experts on the full width."""
        cdef k3_dims* dims = &self.weights.dims
        cdef int64_t R = z.job.rows, T = dims.num_experts_per_token, latent = dims.routed_expert_hidden_size
        cdef k3_linear_job jobs[2]
        cdef int bad = 0
        jobs[0] = job(&L.moe.gate, z.x, z.router)
        jobs[1] = job(&L.moe.routed_expert_down_proj, z.x, z.z)
        bad |= z.ops.linear(z.ops.ctx, jobs, 2, R)
        bad |= z.ops.route(z.ops.ctx, dims, z.router, L.moe.e_score_correction_bias, z.route_ids, z.route_weights, R)
        bad |= z.ops.experts(z.ops.ctx, dims, &L.moe, z.z, z.route_ids, z.route_weights, z.u, R)
        if taps is not None:
            taps.put_ids(i, z.route_ids, R, T)
            taps.put(ROUTE_WTS, i, z.route_weights, R, T)
            taps.put(MOE_LATENT_IN, i, z.z, R, latent)
            taps.put(MOE_AGG, i, z.u, R, latent)
        # The norm is on the weighted sum, before the way up.
        if L.moe.routed_expert_norm != NULL:
            bad |= z.ops.rms_norm(z.ops.ctx, z.u, latent, L.moe.routed_expert_norm, dims.rms_norm_eps, z.u, latent, R, latent)
        bad |= project(z, &L.moe.routed_expert_up_proj, z.u, z.a, R)
        if L.mlp.down_proj.data != NULL:
            bad |= z.ops.gate_up(z.ops.ctx, dims, &L.mlp.gate_proj, &L.mlp.up_proj, z.x, z.hidden, R)
            bad |= project(z, &L.mlp.down_proj, z.hidden, z.b, R)
        if taps is not None:
            taps.put(MOE_ROUTED, i, z.a, R, dims.hidden_size)
            if L.mlp.down_proj.data != NULL:
                taps.put(MOE_SHARED, i, z.b, R, dims.hidden_size)
        return bad

    cdef int check_pass(self, Scratch z, list timelines, list counts, const int32_t[::1] tokens, bint embedded) except -1:
        """Refuses a pass that its scratch, its sessions or this model could not take; nothing has been written."""
        cdef int64_t n = len(timelines), i, total = 0, count
        cdef Timeline t
        cdef Timeline first
        if n == 0 or n != len(counts) or n > z.segments_room or tokens.shape[0] > z.rows:
            raise K3Error(
                f"a pass of {tokens.shape[0]} rows in {n} segments does not fit scratch for {z.rows} in {z.segments_room}")
        first = timelines[0]
        if n > 1 and len(set(map(id, timelines))) != n:
            raise K3Error("a session can be in a pass once")
        for i in range(n):
            t = timelines[i]
            count = counts[i]
            if count < 1 or count > tokens.shape[0]:
                raise K3Error(f"a segment of {count} rows: expected at least 1, and no more than the pass has")
            total += count
            if t.weights is not self.weights or z.weights is not self.weights:
                raise K3Error("sessions and scratch of a pass must be of its model")
            if t.page_rows != first.page_rows or t.latent_dtype != first.latent_dtype:
                raise K3Error("sessions of one pass must store their latent rows alike")
        if total != tokens.shape[0]:
            raise K3Error(f"the segments have {total} rows and the pass {tokens.shape[0]}")
        for i in range(tokens.shape[0]):
            if not (0 <= tokens[i] < self.weights.dims.vocab_size or (tokens[i] == -1 and embedded)):
                raise K3Error(f"token {tokens[i]} in row {i} is not in the vocabulary")
        return 0

    def forward(self, Scratch z not None, list timelines not None, list counts not None, const int32_t[::1] tokens,
                embeddings=None, float[:, ::1] logits=None, bint every_row=False, Taps taps=None):
        """One pass over ``counts[i]`` tokens of ``timelines[i]``; commits each timeline that came through.

        Parameters
        ----------
        tokens : int32[R]
            The rows of all segments, one after the other; -1 takes the row of ``embeddings``, float32[R, hidden].
        logits : float32[n, vocab], optional
            Filled for the last row of each segment, or for all rows with ``every_row``; without it the head is not run.

        Returns
        -------
        None, or a list with the name of the first sub-layer that was not finite, or None, for each timeline.

        Raises
        ------
        PassCancelled, MemoryError, KeyboardInterrupt : nothing has been committed.
        """
        cdef int64_t n = len(timelines), i, j, row = 0, n_take = 0
        cdef Timeline t
        cdef k3_segment* seg
        cdef const float* embedded = NULL
        cdef float* out = NULL
        cdef const float[:, ::1] rows
        cdef unsigned int mode
        cdef int status
        self.check_pass(z, timelines, counts, tokens, embeddings is not None)
        if embeddings is not None:
            rows = embeddings
            if rows.shape[0] != tokens.shape[0] or rows.shape[1] != self.weights.dims.hidden_size:
                raise K3Error("embeddings must be float32[rows, hidden_size]")
            embedded = &rows[0, 0]
        for i in range(n):
            t = timelines[i]
            t.reserve(t.position + <int64_t>counts[i])
        t = timelines[0]
        z.job.page_rows = t.page_rows
        z.job.latent_dtype = t.latent_dtype
        for i in range(n):
            t = timelines[i]
            j = t.check(t.position)
            if j >= 0:
                raise K3Error(f"layer {j} has taken in {t.seen[j]} tokens where the session stands at {t.position}")
            seg = &z.segments[i]
            seg.row = row
            seg.rows = counts[i]
            seg.position = t.position
            seg.now = t.now
            seg.next = z.spare[i]
            seg.pages = t.pages
            seg.bad_sublayer = K3_NO_BAD_SUBLAYER
            for j in range(seg.rows):
                z.owner[row + j] = i
                if logits is not None and (every_row or j == seg.rows - 1):
                    z.take[n_take] = row + j
                    n_take += 1
            row += seg.rows
        if logits is not None and (logits.shape[0] != n_take or logits.shape[1] != self.weights.dims.vocab_size):
            raise K3Error(f"logits must be float32[{n_take}, {self.weights.dims.vocab_size}]")
        memcpy(z.tokens, &tokens[0], row * sizeof(int32_t))
        if n_take > 0:
            out = &logits[0, 0]
        z.job.rows = row
        z.job.n_segments = n
        z.job.segments = z.segments
        with nogil:
            mode = float_mode_enter()
            try:
                status = self.run(z, embedded, n_take, out, taps)
            finally:
                float_mode_leave(mode)
        if status == CANCELLED:
            raise PassCancelled("the pass was cancelled", t.position)
        if status == FAILED:
            raise K3Error("an op found its buffers too small; please report this with the model's config.json")
        bad = None
        for i in range(n):
            t = timelines[i]
            seg = &z.segments[i]
            if seg.bad_sublayer == K3_NO_BAD_SUBLAYER:
                t.commit(z.spare[i], seg.rows)
            else:
                bad = bad or [None] * n
                bad[i] = sublayer_name(self.weights, seg.bad_sublayer)
        return bad


cdef k3_linear_job job(const k3_matrix* w, const float* x, float* y) noexcept nogil:
    cdef k3_linear_job j
    j.w = w
    j.x = x
    j.y = y
    j.ldx = w.cols
    j.ldy = w.rows
    return j


cdef int project(Scratch z, const k3_matrix* w, const float* x, float* y, int64_t rows) noexcept nogil:
    cdef k3_linear_job one = job(w, x, y)
    return z.ops.linear(z.ops.ctx, &one, 1, rows)


cdef void add(float* a, const float* b, int64_t n) noexcept nogil:
    """The whole output of a MoE, for a trace: the residual op sums its two parts itself."""
    cdef int64_t i
    for i in range(n):
        a[i] += b[i]


cdef class Scratch:
    """The memory of one pass in flight: AttnRes streams, activations, and the alternate state buffers.

    Sized once for ``rows`` rows in up to ``segments`` segments and reused; one block, freed with the object.
    """

    def __cinit__(self, Weights weights not None, int64_t rows, int threads, str isa, int64_t segments=1):
        cdef int64_t i
        cdef char* end
        self.weights = weights
        self.rows = rows
        self.segments_room = segments
        self.backend = CpuOps(weights, rows, threads, isa)
        self.ops = &self.backend.table
        end = self.lay_out(NULL, 0)
        if self.lay_out(NULL, 1) > end:
            end = self.lay_out(NULL, 1)
        self.nbytes = end - <char*>NULL
        self.memory = <char*>aligned(self.nbytes)
        self.lay_out(self.memory, 0)
        self.lay_out(self.memory, 1)
        self.segments = <k3_segment*>calloc(segments, sizeof(k3_segment))
        self.spare = <k3_kda_state**>calloc(segments, sizeof(void*))
        if self.segments == NULL or self.spare == NULL:
            raise MemoryError("could not allocate the segments of a pass")
        for i in range(segments):
            self.spare[i] = allocate_kda(weights)

    def __dealloc__(self):
        cdef int64_t i
        if self.spare != NULL:
            for i in range(self.segments_room):
                free_kda(self.spare[i])
        free(self.spare)
        free(self.segments)
        free(self.memory)

    cdef char* lay_out(self, char* base, int64_t kind) noexcept:
        """Places every buffer from ``base`` on and returns the end; kind 0 lays out KDA, 1 MLA, which share memory."""
        d = &self.weights.dims
        cdef int64_t R = self.rows, C = d.kda_num_heads * d.kda_head_k, H = d.num_attention_heads
        cdef int64_t blocks = (d.num_hidden_layers + d.attn_res_block_size - 1) // d.attn_res_block_size
        cdef int64_t inner = max(d.intermediate_size, d.shared_intermediate_size), i
        cdef char* at = base
        self.tokens = <int32_t*>place(&at, R)
        self.take = <int64_t*>place(&at, 2 * R)
        self.owner = <int64_t*>place(&at, 2 * R)
        self.s = place(&at, R * d.hidden_size)
        self.bank = place(&at, blocks * R * d.hidden_size)
        self.h = place(&at, R * d.hidden_size)
        self.x = place(&at, R * d.hidden_size)
        self.a = place(&at, R * d.hidden_size)
        self.b = place(&at, R * d.hidden_size)
        self.mix = place(&at, R * (blocks + 1))
        self.hidden = place(&at, R * inner)
        self.router = place(&at, R * d.num_experts)
        self.route_ids = <int32_t*>place(&at, R * d.num_experts_per_token)
        self.route_weights = place(&at, R * d.num_experts_per_token)
        self.z = place(&at, R * d.routed_expert_hidden_size)
        self.u = place(&at, R * d.routed_expert_hidden_size)
        if kind == 0:
            for i in range(3):
                self.raw[i] = place(&at, R * C)
                self.qkv[i] = place(&at, R * C)
            self.f_a = place(&at, R * d.kda_head_k)
            self.f = place(&at, R * C)
            self.beta = place(&at, R * d.kda_num_heads)
            self.g = place(&at, R * C)
            self.o = place(&at, R * C)
        else:
            self.c_q = place(&at, R * d.q_lora_rank)
            self.q = place(&at, R * H * (d.qk_nope_head_dim + d.qk_rope_head_dim))
            self.kva = place(&at, R * (d.kv_lora_rank + d.qk_rope_head_dim))
            self.q_abs = place(&at, R * H * d.latent_stride)
            self.o_abs = place(&at, R * H * d.kv_lora_rank)
            self.mla_g = place(&at, R * H * d.v_head_dim)
            self.mla_o = place(&at, R * H * d.v_head_dim)
        return at

    def poison(self) -> None:
        """Fills everything with NaN, so that a test sees whatever is read before it is written."""
        memset(self.memory, 0xff, self.nbytes)
        self.backend.poison()

    def cancel(self) -> None:
        """Asks the pass in flight to stop at the next layer."""
        k3_set_flag(&self.cancelled, 1)

    def clear_cancel(self) -> None:
        """Forgets an earlier cancel()."""
        k3_set_flag(&self.cancelled, 0)

    @property
    def is_cancelled(self) -> bool:
        """Whether cancel() was called since the last clear_cancel()."""
        return k3_flag(&self.cancelled) != 0


cdef float* place(char** at, int64_t floats) noexcept:
    """The next buffer, on a cache line of its own."""
    cdef char* here = at[0]
    at[0] += (floats * 4 + 63) // 64 * 64
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

    cdef void put(self, int site, int64_t layer, const float* source, int64_t rows, int64_t width) noexcept nogil:
        cdef int64_t r
        if self.site[site] == NULL:
            return
        for r in range(min(rows, self.rows)):
            memcpy(self.site[site] + (r * self.layers[site] + layer) * self.width[site], source + r * width,
                   width * sizeof(float))

    cdef void put_ids(self, int64_t layer, const int32_t* source, int64_t rows, int64_t width) noexcept nogil:
        self.put(ROUTE_IDS, layer, <const float*>source, rows, width)
