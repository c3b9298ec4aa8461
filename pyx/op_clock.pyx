# SPDX-License-Identifier: MIT
"""A clock in front of a session's ops: how often each was called, how long it took, and what it had to move.

While it is attached, every entry of the op table is one that notes the time and calls the op itself.  The decoder does
not know, and without a clock nothing is different.  On the host an op is done when it returns, so that its time is its own;
on a GPU it is not, and a clock is refused.
"""

cimport cython

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from k3session._core.c_ops cimport (
    K3_COMPACT,
    K3_F32,
    K3_MXFP4,
    K3_Q8,
    k3_dims,
    k3_exception,
    k3_exceptions,
    k3_kda,
    k3_layer,
    k3_linear_job,
    k3_matrix,
    k3_mla,
    k3_moe,
    k3_ops,
    k3_pass,
)
from k3session._core.decoder cimport Scratch
from k3session._core.ops cimport Ops
from k3session._core.weights cimport Weights

from k3session.errors import K3Error

cdef enum Op:
    EMBED, ATTN_RES, LINEAR, GATE_UP, RMS_NORM, KDA_CONV, KDA_GATES, KDA_RECURRENCE, KDA_OUTPUT
    MLA_ROPE, MLA_APPEND, MLA_ABSORB, MLA_ATTEND, MLA_UNABSORB, ROUTE, EXPERTS, RESIDUAL, FINITE

OPS = ("embed", "attn_res", "linear", "gate_up", "rms_norm", "kda_conv", "kda_gates", "kda_recurrence", "kda_output",
       "mla_rope", "mla_append", "mla_absorb", "mla_attend", "mla_unabsorb", "route", "experts", "residual", "finite")

#: What the time of a pass is divided into.
COMPONENTS = ("attn_res", "kda", "mla", "dense", "experts", "lm_head")

cdef struct Entry:                      # one op at one place of the graph
    int64_t key                         # the address or number that tells the place; with `op` it is unique
    int64_t op
    int64_t calls
    int64_t rows
    int64_t ns
    int64_t weights                     # bytes of matrices
    int64_t values                      # bytes of state and latent rows
    int64_t mults                       # multiplications, each with an addition

cdef struct Clock:                      # ctx of the table that notes times
    k3_ops inner
    const k3_dims* dims
    Entry* entries                      # [ROOM], by hash of op and key
    unsigned char* seen                 # [experts] of the call that is counted
    int64_t expert_reads
    int64_t lost                        # calls for which there was no room

cdef enum:
    ROOM = 16384                        # the released model has 1,900 places


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec * <int64_t>1000000000 + t.tv_nsec


cdef Entry* note(Clock* c, int64_t op, int64_t key, int64_t rows, int64_t began) noexcept nogil:
    """The entry of a place, its time and count added; the caller adds bytes and operations."""
    cdef int64_t took = now() - began
    cdef uint64_t h = (<uint64_t>key * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>op * <uint64_t>0xC2B2AE3D27D4EB4F) >> 40
    cdef int64_t i
    cdef Entry* e
    for i in range(ROOM):
        e = &c.entries[(h + i) % ROOM]
        if e.calls == 0:
            e.key, e.op = key, op
        if e.key == key and e.op == op:
            e.calls += 1
            e.rows += rows
            e.ns += took
            return e
    c.lost += 1
    return &c.entries[ROOM]             # one more than there are places


cdef int64_t nbytes(const k3_matrix* w) noexcept nogil:
    """Bytes of a matrix, its scales or exceptions included."""
    cdef int64_t groups = (w.cols + 31) // 32, beside = 0
    cdef const k3_exceptions* others
    if w.scale != NULL and w.dtype == K3_MXFP4:
        beside = w.rows * groups
    elif w.scale != NULL and w.dtype == K3_Q8:
        beside = w.rows * groups * 2
    elif w.scale != NULL and w.dtype == K3_COMPACT:
        others = <const k3_exceptions*>w.scale
        beside = (w.rows + 1) * sizeof(uint32_t) + others.first[w.rows] * <int64_t>sizeof(k3_exception)
    return w.rows * w.pitch + beside


cdef void matrix(Entry* e, const k3_matrix* w, int64_t rows) noexcept nogil:
    """Adds one matrix that was read once, for so many rows."""
    e.weights += nbytes(w)
    e.mults += w.rows * w.cols * rows


cdef int embed(void* ctx, const k3_dims* d, const k3_matrix* table, const int32_t* tokens, const float* given, float* s,
               int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.embed(c.inner.ctx, d, table, tokens, given, s, rows)
    note(c, EMBED, 0, rows, began).weights += rows * table.pitch
    return status


cdef int attn_res(void* ctx, const k3_dims* d, const float* bank, int64_t n, int64_t bank_rows, const float* s, const float* u,
                  const float* norm, const int32_t* take, float* keep, float* h, float* x, float* weights,
                  int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.attn_res(c.inner.ctx, d, bank, n, bank_rows, s, u, norm, take, keep, h, x, weights, rows)
    e = note(c, ATTN_RES, <int64_t>u, rows, began)
    e.values += (n + 2 + (keep != NULL)) * rows * d.hidden_size * 4
    e.mults += (3 * (n + 1) + 2) * rows * d.hidden_size
    return status


cdef int linear(void* ctx, const k3_linear_job* jobs, int64_t n, int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t i, began = now()
    cdef int status = c.inner.linear(c.inner.ctx, jobs, n, rows)
    e = note(c, LINEAR, <int64_t>jobs[0].w, rows, began)
    for i in range(n):
        matrix(e, jobs[i].w, rows)
    return status


cdef int gate_up(void* ctx, const k3_dims* d, const k3_matrix* gate, const k3_matrix* up, const float* x, float* h,
                 int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.gate_up(c.inner.ctx, d, gate, up, x, h, rows)
    e = note(c, GATE_UP, <int64_t>gate, rows, began)
    matrix(e, gate, rows)
    matrix(e, up, rows)
    return status


cdef int rms_norm(void* ctx, const float* x, int64_t ldx, const float* norm, float eps, float* y, int64_t ldy, int64_t rows,
                  int64_t n) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.rms_norm(c.inner.ctx, x, ldx, norm, eps, y, ldy, rows, n)
    e = note(c, RMS_NORM, <int64_t>norm, rows, began)
    e.values += 2 * rows * n * 4
    e.mults += 3 * rows * n
    return status


cdef int kda_conv(void* ctx, const k3_dims* d, const k3_kda* w, const k3_pass* p, int64_t layer, const float* q_raw,
                  const float* k_raw, const float* v_raw, float* q, float* k, float* v) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.kda_conv(c.inner.ctx, d, w, p, layer, q_raw, k_raw, v_raw, q, k, v)
    e = note(c, KDA_CONV, layer, p.rows, began)
    e.values += 2 * p.n_segments * d.conv_stride * 4 + 6 * p.rows * d.kda_num_heads * d.kda_head_k * 4
    e.mults += 3 * p.rows * d.conv_kernel * d.kda_num_heads * d.kda_head_k
    return status


cdef int kda_gates(void* ctx, const k3_dims* d, const k3_kda* w, float* f, float* b, int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.kda_gates(c.inner.ctx, d, w, f, b, rows)
    note(c, KDA_GATES, <int64_t>w, rows, began).values += 2 * rows * d.kda_num_heads * (d.kda_head_k + 1) * 4
    return status


cdef int kda_recurrence(void* ctx, const k3_dims* d, const k3_pass* p, int64_t layer, const float* q, const float* k,
                        const float* v, const float* alpha, const float* beta, float* o) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.kda_recurrence(c.inner.ctx, d, p, layer, q, k, v, alpha, beta, o)
    e = note(c, KDA_RECURRENCE, layer, p.rows, began)
    e.values += 2 * p.n_segments * d.kda_num_heads * d.kda_head_k * d.kda_head_v * 4
    e.mults += 4 * p.rows * d.kda_num_heads * d.kda_head_k * d.kda_head_v
    return status


cdef int kda_output(void* ctx, const k3_dims* d, const k3_kda* w, float* o, const float* g, int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.kda_output(c.inner.ctx, d, w, o, g, rows)
    note(c, KDA_OUTPUT, <int64_t>w, rows, began).values += 3 * rows * d.kda_num_heads * d.kda_head_v * 4
    return status


cdef int mla_rope(void* ctx, const k3_dims* d, const k3_pass* p, const double* frequencies, float* q, float* kva) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.mla_rope(c.inner.ctx, d, p, frequencies, q, kva)
    note(c, MLA_ROPE, 0, p.rows, began)
    return status


cdef int mla_append(void* ctx, const k3_dims* d, const k3_mla* w, const k3_pass* p, int64_t layer,
                    const float* kva) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.mla_append(c.inner.ctx, d, w, p, layer, kva)
    note(c, MLA_APPEND, <int64_t>w, p.rows, began).values += 2 * p.rows * d.latent_stride * 4
    return status


cdef int mla_absorb(void* ctx, const k3_dims* d, const k3_mla* w, const float* q, float* qa, int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.mla_absorb(c.inner.ctx, d, w, q, qa, rows)
    e = note(c, MLA_ABSORB, <int64_t>w, rows, began)
    e.weights += nbytes(&w.kv_b_proj) * d.qk_nope_head_dim // (d.qk_nope_head_dim + d.v_head_dim)
    e.mults += rows * d.num_attention_heads * d.qk_nope_head_dim * d.kv_lora_rank
    return status


cdef int mla_attend(void* ctx, const k3_dims* d, const k3_pass* p, int64_t layer, const float* qa, float* oa) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t i, seen, width, began = now()
    cdef int status = c.inner.mla_attend(c.inner.ctx, d, p, layer, qa, oa)
    e = note(c, MLA_ATTEND, layer, p.rows, began)
    for i in range(p.n_segments):
        seen = p.segments[i].position + p.segments[i].rows
        width = 4 if p.segments[i].latent_dtype == K3_F32 else 2
        e.values += seen * d.latent_stride * width
        e.mults += (p.segments[i].rows * (2 * p.segments[i].position + p.segments[i].rows + 1) // 2
                    * d.num_attention_heads * (d.latent_stride + d.kv_lora_rank))
    return status


cdef int mla_unabsorb(void* ctx, const k3_dims* d, const k3_mla* w, const float* oa, const float* g, float* o,
                      int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t began = now()
    cdef int status = c.inner.mla_unabsorb(c.inner.ctx, d, w, oa, g, o, rows)
    e = note(c, MLA_UNABSORB, <int64_t>w, rows, began)
    e.weights += nbytes(&w.kv_b_proj) * d.v_head_dim // (d.qk_nope_head_dim + d.v_head_dim)
    e.mults += rows * d.num_attention_heads * d.v_head_dim * d.kv_lora_rank
    return status


cdef int route(void* ctx, const k3_dims* d, const float* logits, const float* bias, int32_t* ids, float* weights,
               int64_t rows) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.route(c.inner.ctx, d, logits, bias, ids, weights, rows)
    note(c, ROUTE, <int64_t>bias, rows, began).values += rows * d.num_experts * 4
    return status


cdef int experts(void* ctx, const k3_dims* d, const k3_moe* w, const k3_pass* p, const float* z, const int32_t* ids,
                 const float* weights, float* u, int64_t first, int64_t end) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef Entry* e
    cdef int64_t r, t, id, read = 0, chosen = 0, began = now()
    cdef int status = c.inner.experts(c.inner.ctx, d, w, p, z, ids, weights, u, first, end)
    e = note(c, EXPERTS, <int64_t>w, p.rows, began)
    memset(c.seen, 0, d.num_experts)
    for r in range(p.rows):
        if p.owner[r] < 0:
            continue
        for t in range(d.num_experts_per_token):
            id = ids[r * d.num_experts_per_token + t]
            if not (first <= id < end and 0 <= id < d.num_experts):
                continue
            chosen += 1
            if not c.seen[id]:
                c.seen[id] = 1
                read += 1
    c.expert_reads += read
    e.weights += read * (nbytes(&w.w1[0]) + nbytes(&w.w2[0]) + nbytes(&w.w3[0]))
    e.mults += chosen * 3 * d.moe_intermediate_size * d.routed_expert_hidden_size
    return status


cdef int residual(void* ctx, const k3_pass* p, float* s, const float* a, const float* b, int32_t restart, int32_t sublayer,
                  int64_t d) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.residual(c.inner.ctx, p, s, a, b, restart, sublayer, d)
    note(c, RESIDUAL, sublayer, p.rows, began).values += (3 + (b != NULL)) * p.rows * d * 4
    return status


cdef int finite(void* ctx, const k3_pass* p, const float* x, const int32_t* owner, int32_t sublayer, int64_t rows,
                int64_t n) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    cdef int64_t began = now()
    cdef int status = c.inner.finite(c.inner.ctx, p, x, owner, sublayer, rows, n)
    note(c, FINITE, sublayer, rows, began).values += rows * n * 4
    return status


cdef int read(void* ctx, void* host, const void* here, int64_t count) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    return c.inner.read(c.inner.ctx, host, here, count)


cdef int write(void* ctx, void* here, const void* host, int64_t count) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    return c.inner.write(c.inner.ctx, here, host, count)


cdef int submit(void* ctx) noexcept nogil:
    cdef Clock* c = <Clock*>ctx
    return c.inner.submit(c.inner.ctx)


@cython.no_gc_clear
cdef class OpClock:
    """Times the ops of one session's passes from `attach` to `detach`.

    Parameters
    ----------
    scratch : Scratch
        What the session's passes work in.

    Raises
    ------
    K3Error
        A part of the model runs on a GPU, where an op is not done when its call returns.
    """

    cdef Clock clock
    cdef Scratch scratch
    cdef Ops backend
    cdef bint attached

    def __cinit__(self, Scratch scratch not None):
        if scratch.other is not None or not scratch.main.work.mapped:
            raise K3Error("ops can be timed on the CPU only; this model runs on a GPU, all of it or in part")
        self.scratch = scratch
        self.backend = scratch.main.backend
        self.clock.dims = &scratch.decoder.weights.dims
        self.clock.entries = <Entry*>calloc(ROOM + 1, sizeof(Entry))
        self.clock.seen = <unsigned char*>calloc(max(1, self.clock.dims.num_experts), 1)
        if self.clock.entries == NULL or self.clock.seen == NULL:
            raise MemoryError("could not allocate the table of times")

    def __dealloc__(self):
        if self.attached:
            self.backend.table = self.clock.inner
        free(self.clock.entries)
        free(self.clock.seen)

    def attach(self) -> None:
        """From the next pass on, every op is timed."""
        cdef k3_ops* t = &self.backend.table
        if self.attached:
            return
        self.clock.inner = t[0]
        t.ctx = &self.clock
        t.embed, t.attn_res, t.linear, t.gate_up, t.rms_norm = embed, attn_res, linear, gate_up, rms_norm
        t.kda_conv, t.kda_gates, t.kda_recurrence, t.kda_output = kda_conv, kda_gates, kda_recurrence, kda_output
        t.mla_rope, t.mla_append, t.mla_absorb = mla_rope, mla_append, mla_absorb
        t.mla_attend, t.mla_unabsorb = mla_attend, mla_unabsorb
        t.route, t.experts, t.residual, t.finite = route, experts, residual, finite
        t.read, t.write, t.submit = read, write, submit
        self.attached = True

    def detach(self) -> None:
        """Put the op table back as it was."""
        if self.attached:
            self.backend.table = self.clock.inner
            self.attached = False

    @property
    def is_attached(self) -> bool:
        """Whether ops are timed now."""
        return self.attached

    @property
    def expert_reads(self) -> int:
        """Experts that were read: in each MoE layer of each pass the different ones that its rows have chosen."""
        return self.clock.expert_reads

    def rows(self) -> list:
        """One tuple for each op at each place of the graph that was called, in the order of the graph.

        (component, op, name of its first matrix, layer or -1, calls, rows, seconds, bytes of weights, bytes of values,
        multiplications).  Components are those of `COMPONENTS`.
        """
        cdef Entry* e
        cdef int64_t i
        places = _places(self.scratch.decoder.weights)
        found = []
        for i in range(ROOM + (1 if self.clock.lost else 0)):
            e = &self.clock.entries[i]
            if e.calls == 0:
                continue
            order, component, name, layer = places.get((e.op, e.key), (1 << 30, "attn_res", "", -1))
            found.append((order, (component, OPS[e.op], name, layer, e.calls, e.rows, e.ns * 1e-9, e.weights, e.values, e.mults)))
        return [row for _, row in sorted(found)]


def _places(Weights weights not None) -> dict:
    """(op, key) -> (number in the order of the graph, component, name of its first matrix, layer)."""
    cdef k3_layer* L
    cdef int i, j
    found = {}

    def put(op, key, component, name, layer):
        found[op, key] = (len(found), component, name, layer)

    put(EMBED, 0, "attn_res", "embed_tokens", -1)
    put(FINITE, 0, "attn_res", "embed_tokens", -1)
    put(MLA_ROPE, 0, "mla", "", -1)
    for i in range(weights.first, weights.end):
        L = &weights.tables.layers[i]
        j = L.mixer_index
        put(ATTN_RES, <int64_t>L.self_attention_res, "attn_res", "self_attention_res", i)
        if L.is_kda:
            put(LINEAR, <int64_t>&L.kda.q_proj, "kda", "q_proj", i)
            put(LINEAR, <int64_t>&L.kda.f_b_proj, "kda", "f_b_proj", i)
            put(KDA_GATES, <int64_t>&L.kda, "kda", "dt_bias", i)
            put(KDA_CONV, j, "kda", "q_conv1d", i)
            put(KDA_RECURRENCE, j, "kda", "", i)
            put(KDA_OUTPUT, <int64_t>&L.kda, "kda", "o_norm", i)
            put(LINEAR, <int64_t>&L.kda.o_proj, "kda", "o_proj", i)
        else:
            put(LINEAR, <int64_t>&L.mla.q_a_proj, "mla", "q_a_proj", i)
            put(RMS_NORM, <int64_t>L.mla.q_a_layernorm, "mla", "q_a_layernorm", i)
            put(LINEAR, <int64_t>&L.mla.q_b_proj, "mla", "q_b_proj", i)
            put(MLA_APPEND, <int64_t>&L.mla, "mla", "kv_a_layernorm", i)
            put(MLA_ABSORB, <int64_t>&L.mla, "mla", "kv_b_proj", i)
            put(MLA_ATTEND, j, "mla", "", i)
            put(MLA_UNABSORB, <int64_t>&L.mla, "mla", "kv_b_proj", i)
            put(LINEAR, <int64_t>&L.mla.o_proj, "mla", "o_proj", i)
        put(RESIDUAL, 1 + 2 * i, "attn_res", "", i)
        put(ATTN_RES, <int64_t>L.mlp_res, "attn_res", "mlp_res", i)
        if L.is_moe:
            put(LINEAR, <int64_t>&L.moe.gate, "experts", "gate", i)
            put(ROUTE, <int64_t>L.moe.e_score_correction_bias, "experts", "e_score_correction_bias", i)
        part = "shared_experts." if L.is_moe else "mlp."
        put(GATE_UP, <int64_t>&L.mlp.gate_proj, "dense", part + "gate_proj", i)
        put(LINEAR, <int64_t>&L.mlp.down_proj, "dense", part + "down_proj", i)
        if L.is_moe:
            put(EXPERTS, <int64_t>&L.moe, "experts", "experts", i)
            put(RMS_NORM, <int64_t>L.moe.routed_expert_norm, "experts", "routed_expert_norm", i)
            put(LINEAR, <int64_t>&L.moe.routed_expert_up_proj, "experts", "routed_expert_up_proj", i)
        put(RESIDUAL, 2 + 2 * i, "attn_res", "", i)
    put(ATTN_RES, <int64_t>weights.tables.output_attn_res, "attn_res", "output_attn_res", -1)
    put(LINEAR, <int64_t>&weights.tables.lm_head, "lm_head", "lm_head", -1)
    put(FINITE, 1 + 2 * weights.dims.num_hidden_layers, "lm_head", "", -1)
    return found
