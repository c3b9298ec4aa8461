# SPDX-License-Identifier: MIT
"""Every op of the table by itself, on NumPy arrays: for tests, benches, and whoever looks into a number.

Arguments are checked for type, shape and contiguity; they are never written to.  Results are new arrays, filled with
NaN beforehand, so that an element that an op forgets is seen.
"""

import numpy as np

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from k3session._core.c_ops cimport (
    K3_BF16,
    K3_F32,
    K3_MXFP4,
    K3_NO_BAD_SUBLAYER,
    k3_cpu,
    k3_dims,
    k3_kda,
    k3_kda_state,
    k3_linear_job,
    k3_matrix,
    k3_mla,
    k3_moe,
    k3_ops,
    k3_pass,
    k3_segment,
)
from k3session._core.ops cimport aligned, buffer_sizes, float_mode_enter, float_mode_leave, op_table

from k3session._core.ops import best_isa, hold_pool, release_pool
from k3session.errors import ConfigError, K3Error

DIMS = {
    "vocab_size": 1, "hidden_size": 16, "num_hidden_layers": 1, "attn_res_block_size": 1,
    "kda_num_heads": 1, "kda_head_k": 16, "kda_head_v": None, "conv_kernel": 4,
    "num_attention_heads": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "num_experts": 1, "num_experts_per_token": 1,
    "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "shared_intermediate_size": 32,
    "intermediate_size": 32, "rms_norm_eps": 1e-5, "mla_latent_norm_eps": 1e-6, "situ_beta": 4.0,
    "situ_linear_beta": 25.0, "gate_lower_bound": -5.0, "routed_scaling_factor": 1.0,
    "attention_scale": None, "moe_renormalize": True, "rope_theta": 10000.0,
}
MAX_JOBS = 16                           # matrices in one dispatch of `linear`


cdef class Matrix:
    """One weight matrix [out, in] where it lies: uint16 (BF16), float32, or uint8 (packed MXFP4) with its scales.

    The array may begin at any address, as a tensor in a file may.
    """

    cdef k3_matrix m
    cdef readonly object data
    cdef readonly object scale

    def __cinit__(self, data not None, scale=None):
        wanted = "uint16[out, in], float32[out, in], or uint8[out, in / 2] with scales uint8[out, in / 32]"
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.dtype not in (np.uint16, np.float32, np.uint8):
            raise ConfigError(f"matrix: expected {wanted}; found {_describe(data)}")
        if not data.flags.c_contiguous:
            raise ConfigError("matrix: expected a C-contiguous array; pass np.ascontiguousarray(...)")
        packed = data.dtype == np.uint8
        if packed != (scale is not None):
            raise ConfigError(f"matrix: expected {wanted}; found {_describe(data)} with scales {_describe(scale)}")
        if packed:
            groups = data.shape[1] // 16
            if data.shape[1] % 16:
                raise ConfigError(f"matrix: expected packed rows of whole groups of 16 bytes; found {_describe(data)}")
            _array("scale", scale, (data.shape[0], groups), np.uint8)
            self.m.scale = <const uint8_t*><uintptr_t>scale.__array_interface__["data"][0]
        self.m.dtype = K3_MXFP4 if packed else K3_BF16 if data.dtype == np.uint16 else K3_F32
        self.m.rows = data.shape[0]
        self.m.cols = data.shape[1] * 2 if packed else data.shape[1]
        self.m.data = <const void*><uintptr_t>data.__array_interface__["data"][0]
        self.data, self.scale = data, scale

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.m.rows, self.m.cols

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


cdef class _Pass:
    """Rows laid out in segments, and the tables that the ops look them up in; alive for one call."""

    cdef k3_pass job
    cdef k3_segment* segments
    cdef k3_kda_state* now
    cdef k3_kda_state* next
    cdef void** pages
    cdef list counts

    def __cinit__(self, int64_t rows, counts, positions=None):
        cdef int64_t i, row = 0
        self.counts = [rows] if counts is None else [int(c) for c in counts]
        starts = [0] * len(self.counts) if positions is None else [int(p) for p in positions]
        if min(self.counts, default=0) < 1 or sum(self.counts) != rows:
            raise ConfigError(f"counts: expected positive numbers that add up to {rows} rows; found {self.counts}")
        if len(starts) != len(self.counts) or min(starts) < 0:
            raise ConfigError(f"positions: expected {len(self.counts)} numbers of at least 0; found {starts}")
        n = len(self.counts)
        self.segments = <k3_segment*>calloc(n, sizeof(k3_segment))
        self.now = <k3_kda_state*>calloc(n, sizeof(k3_kda_state))
        self.next = <k3_kda_state*>calloc(n, sizeof(k3_kda_state))
        if self.segments == NULL or self.now == NULL or self.next == NULL:
            raise MemoryError("could not allocate the segments of a call")
        for i in range(n):
            self.segments[i].row = row
            self.segments[i].rows = self.counts[i]
            self.segments[i].position = starts[i]
            self.segments[i].now = self.now + i
            self.segments[i].next = self.next + i
            self.segments[i].bad_sublayer = K3_NO_BAD_SUBLAYER
            row += self.segments[i].rows
        self.job.rows = rows
        self.job.n_segments = n
        self.job.segments = self.segments
        self.job.page_rows = 1

    def __dealloc__(self):
        free(self.pages)
        free(self.next)
        free(self.now)
        free(self.segments)

    cdef int bind_pages(self, pages, int64_t layer, int64_t stride, bint written) except -1:
        """Takes each segment's list of pages, arrays [layers, page_rows, stride], float32 or BF16 as uint16."""
        cdef int64_t i, at = 0
        if len(pages) != self.job.n_segments or not all(len(p) for p in pages):
            raise ConfigError(f"pages: expected a list of pages for each of {self.job.n_segments} segments")
        first = pages[0][0]
        if not isinstance(first, np.ndarray) or first.ndim != 3 or first.dtype not in (np.float32, np.uint16):
            raise ConfigError(f"pages: expected float32 or uint16[layers, rows, {stride}]; found {_describe(first)}")
        if not 0 <= layer < first.shape[0]:
            raise ConfigError(f"layer: expected 0 to {first.shape[0] - 1}; found {layer}")
        self.job.page_rows = first.shape[1]
        self.job.latent_dtype = K3_BF16 if first.dtype == np.uint16 else K3_F32
        self.pages = <void**>calloc(sum(len(p) for p in pages), sizeof(void*))
        if self.pages == NULL:
            raise MemoryError("could not allocate the page tables of a call")
        for i in range(self.job.n_segments):
            self.segments[i].pages = self.pages + at
            end = self.segments[i].position + self.segments[i].rows
            if end > len(pages[i]) * first.shape[1]:
                raise ConfigError(f"pages: segment {i} needs room for {end} positions; found {len(pages[i]) * first.shape[1]}")
            for page in pages[i]:
                _array("page", page, (first.shape[0], first.shape[1], stride), first.dtype)
                if written and not page.flags.writeable:
                    raise ConfigError("page: expected an array that can be written")
                self.pages[at] = <void*><uintptr_t>page.ctypes.data
                at += 1
        return 0

    def bad(self) -> list[int | None]:
        """The sub-layer noted for each segment, or None."""
        return [None if self.segments[i].bad_sublayer == K3_NO_BAD_SUBLAYER else self.segments[i].bad_sublayer
                for i in range(self.job.n_segments)]


cdef class Kernels:
    """The ops of one instruction set.

    Parameters
    ----------
    isa : str, optional
        "base", "avx2" or "avx512"; the best one here by default.
    threads : int
        Threads that a call may use.
    rows : int
        The most rows in a call; with the dimensions it fixes the size of the work buffers, as for a model.
    poisoned : bool
        Fill the work buffers with NaN before each call.
    **dims
        Names of `DIMS`, which are those of ``k3_dims`` in cuda/ops.h, and their values.

    Examples
    --------
    >>> import numpy as np
    >>> k = Kernels(hidden_size=2)
    >>> k.linear(np.ones((1, 2), np.float32), Matrix(np.eye(2, dtype=np.float32)))[0]
    array([[1., 1.]], dtype=float32)
    """

    cdef k3_ops table
    cdef k3_cpu cpu
    cdef k3_dims d
    cdef readonly str isa
    cdef readonly int64_t rows
    cdef readonly bint poisoned
    cdef bint holding

    def __cinit__(self, isa=None, int threads=1, int64_t rows=64, bint poisoned=False, **dims):
        unknown = set(dims) - set(DIMS)
        if unknown:
            raise TypeError(f"unknown dimensions {sorted(unknown)}: expected some of {list(DIMS)}")
        if threads < 1 or rows < 1:
            raise ConfigError(f"threads and rows: expected at least 1; found {threads} and {rows}")
        self.isa = best_isa() if isa is None else isa
        op_table(self.isa, &self.table)
        self.rows = rows
        self.poisoned = poisoned
        v = DIMS | dims
        sizes = {n: x for n, x in v.items() if isinstance(DIMS[n], int) and not isinstance(DIMS[n], bool)}
        wrong = sorted(n for n, x in sizes.items() if x < (0 if n in ("qk_rope_head_dim", "shared_intermediate_size") else 1))
        if wrong or v["num_experts_per_token"] > v["num_experts"]:
            raise ConfigError(f"expected positive sizes, and no more experts per token than experts; found {v}")
        self._set_dims(v)
        self.table.ctx = &self.cpu
        self.cpu.threads = threads
        buffer_sizes(&self.d, rows, &self.cpu.x_floats, &self.cpu.work_floats, &self.cpu.list_items)
        self.cpu.x = <float*>aligned(self.cpu.x_floats * 4)
        self.cpu.work = <float*>aligned(self.cpu.work_floats * 4)
        self.cpu.list = <int64_t*>aligned(self.cpu.list_items * 8)
        hold_pool()
        self.holding = True

    def __dealloc__(self):
        free(self.cpu.list)
        free(self.cpu.work)
        free(self.cpu.x)
        if self.holding:
            release_pool()

    def _set_dims(self, v):
        d = &self.d
        d.vocab_size, d.hidden_size, d.num_hidden_layers = v["vocab_size"], v["hidden_size"], v["num_hidden_layers"]
        d.attn_res_block_size, d.conv_kernel = v["attn_res_block_size"], v["conv_kernel"]
        d.kda_num_heads, d.kda_head_k = v["kda_num_heads"], v["kda_head_k"]
        d.kda_head_v = v["kda_head_k"] if v["kda_head_v"] is None else v["kda_head_v"]
        d.num_attention_heads, d.q_lora_rank, d.kv_lora_rank = v["num_attention_heads"], v["q_lora_rank"], v["kv_lora_rank"]
        d.qk_nope_head_dim, d.qk_rope_head_dim, d.v_head_dim = v["qk_nope_head_dim"], v["qk_rope_head_dim"], v["v_head_dim"]
        d.latent_stride = (v["kv_lora_rank"] + v["qk_rope_head_dim"] + 15) // 16 * 16
        d.num_experts, d.num_experts_per_token = v["num_experts"], v["num_experts_per_token"]
        d.moe_intermediate_size, d.routed_expert_hidden_size = v["moe_intermediate_size"], v["routed_expert_hidden_size"]
        d.shared_intermediate_size, d.intermediate_size = v["shared_intermediate_size"], v["intermediate_size"]
        d.rms_norm_eps, d.mla_latent_norm_eps = v["rms_norm_eps"], v["mla_latent_norm_eps"]
        d.situ_beta, d.situ_linear_beta, d.gate_lower_bound = v["situ_beta"], v["situ_linear_beta"], v["gate_lower_bound"]
        d.routed_scaling_factor, d.moe_renormalize = v["routed_scaling_factor"], v["moe_renormalize"]
        width = v["qk_nope_head_dim"] + v["qk_rope_head_dim"]
        d.attention_scale = <float>(1.0 / sqrt(width)) if v["attention_scale"] is None else v["attention_scale"]
        d.rotary, d.rope_theta = True, v["rope_theta"]

    @property
    def latent_stride(self) -> int:
        """Elements from one latent row of a page to the next: kv_lora_rank + qk_rope_head_dim, rounded up to 16."""
        return self.d.latent_stride

    cdef unsigned int begin(self) noexcept:
        """As the decoder does before a pass; `end` undoes it."""
        if self.poisoned:
            memset(self.cpu.x, 0xff, self.cpu.x_floats * 4)
            memset(self.cpu.work, 0xff, self.cpu.work_floats * 4)
            memset(self.cpu.list, 0xff, self.cpu.list_items * 8)
        return float_mode_enter()

    cdef int end(self, unsigned int mode, int status) except -1:
        float_mode_leave(mode)
        if status:
            raise K3Error("the work buffers are too small for this call: make Kernels with its dimensions and rows")
        return 0

    cdef int64_t count(self, str name, array) except -1:
        """Rows of an activation array, which must fit."""
        if not isinstance(array, np.ndarray) or array.ndim < 1 or not 1 <= array.shape[0] <= self.rows:
            raise ConfigError(f"{name}: expected an array of 1 to {self.rows} rows; found {_describe(array)}")
        return array.shape[0]

    def embed(self, Matrix table not None, tokens, embeddings=None) -> np.ndarray:
        """Rows of ``table`` for tokens int32[R]; -1 takes the row of ``embeddings`` float32[R, d]."""
        cdef int64_t R = self.count("tokens", tokens)
        _expect(table, "table", (self.d.vocab_size, self.d.hidden_size))
        if table.m.dtype == K3_MXFP4:
            raise ConfigError("table: expected float32 or BF16; found MXFP4")
        _array("tokens", tokens, (R,), np.int32)
        low = 0 if embeddings is None else -1
        if not (low <= tokens.min() and tokens.max() < self.d.vocab_size):
            raise ConfigError(f"tokens: expected {low} to {self.d.vocab_size - 1}; found {tokens.min()} to {tokens.max()}")
        s = _out((R, self.d.hidden_size))
        e = _floats("embeddings", embeddings, (R, self.d.hidden_size)) if embeddings is not None else NULL
        mode = self.begin()
        status = self.table.embed(self.table.ctx, &self.d, &table.m, <const int32_t*>_at(tokens), e, _at(s), R)
        self.end(mode, status)
        return s

    def attn_res(self, bank, s, u, norm, take=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mix of bank float32[n, R, d] and s float32[R, d], its norm, and the weights; rows ``take`` int64[r] of it."""
        cdef int64_t R = self.count("s", s), d = self.d.hidden_size, n = len(bank), rows = R
        cdef const int64_t* which = NULL
        _array("bank", bank, (n, R, d), np.float32)
        if take is not None:
            rows = self.count("take", take)
            _array("take", take, (rows,), np.int64)
            if not (0 <= take.min() and take.max() < R):
                raise ConfigError(f"take: expected rows 0 to {R - 1}; found {take.min()} to {take.max()}")
            which = <const int64_t*>_at(take)
        h, x, weights = _out((rows, d)), _out((rows, d)), _out((rows, n + 1))
        p_s, p_u, p_norm = _floats("s", s, (R, d)), _floats("u", u, (d,)), _floats("norm", norm, (d,))
        mode = self.begin()
        status = self.table.attn_res(self.table.ctx, &self.d, _at(bank), n, R, p_s, p_u, p_norm, which,
                                     _at(h), _at(x), _at(weights), rows)
        self.end(mode, status)
        return h, x, weights

    def linear(self, x, *matrices) -> list[np.ndarray]:
        """y = x W^T for each matrix, in one dispatch; ``x`` is float32[R, in], or a list with one input per matrix.

        The only op here that lets go of the GIL, so that a test can have two callers meet at the pool.
        """
        cdef k3_linear_job jobs[16]
        cdef int64_t n = len(matrices), i, R
        cdef int status
        cdef Matrix w
        inputs = list(x) if isinstance(x, (list, tuple)) else [x] * n
        if not 1 <= n <= MAX_JOBS or len(inputs) != n:
            raise ConfigError(f"linear: expected 1 to {MAX_JOBS} matrices and an input for each; found {n} and {len(inputs)}")
        R = self.count("x", inputs[0])
        results = []
        for i in range(n):
            w = matrices[i]
            y = _out((R, w.m.rows))
            results.append(y)
            jobs[i].w = &w.m
            jobs[i].x = _floats("x", inputs[i], (R, w.m.cols))
            jobs[i].y = _at(y)
            jobs[i].ldx = w.m.cols
            jobs[i].ldy = w.m.rows
        mode = self.begin()
        with nogil:
            status = self.table.linear(self.table.ctx, jobs, n, R)
        self.end(mode, status)
        return results

    def gate_up(self, Matrix gate not None, Matrix up not None, x) -> np.ndarray:
        """SiTU(x gate^T, x up^T)."""
        cdef int64_t R = self.count("x", x)
        _expect(up, "up", gate.shape)
        p_x = _floats("x", x, (R, gate.m.cols))
        h = _out((R, gate.m.rows))
        mode = self.begin()
        status = self.table.gate_up(self.table.ctx, &self.d, &gate.m, &up.m, p_x, _at(h), R)
        self.end(mode, status)
        return h

    def rms_norm(self, x, norm, float eps) -> np.ndarray:
        """x * norm / sqrt(mean(x^2) + eps), row by row."""
        cdef int64_t R = self.count("x", x), n = norm.shape[0]
        p_x, p_norm = _floats("x", x, (R, n)), _floats("norm", norm, (n,))
        y = _out((R, n))
        mode = self.begin()
        status = self.table.rms_norm(self.table.ctx, p_x, n, p_norm, eps, _at(y), n, R, n)
        self.end(mode, status)
        return y

    def kda_conv(self, q, k, v, conv1d, windows, counts=None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v after convolution, SiLU and norm, and the new windows; ``windows`` is float32[segments, 3, K - 1, C]."""
        cdef int64_t R = self.count("q", q), K = self.d.conv_kernel, C = self.d.kda_num_heads * self.d.kda_head_k, i
        cdef k3_kda w
        cdef _Pass p = _Pass(R, counts)
        memset(&w, 0, sizeof(w))
        w.conv1d = _floats("conv1d", conv1d, (3, K, C))
        p_q, p_k, p_v = _floats("q", q, (R, C)), _floats("k", k, (R, C)), _floats("v", v, (R, C))
        _array("windows", windows, (p.job.n_segments, 3, K - 1, C), np.float32)
        y = [_out((R, C)), _out((R, C)), _out((R, C)), _out(windows.shape)]
        for i in range(p.job.n_segments):
            p.now[i].conv = _at(windows) + i * 3 * (K - 1) * C
            p.next[i].conv = _at(y[3]) + i * 3 * (K - 1) * C
        mode = self.begin()
        status = self.table.kda_conv(self.table.ctx, &self.d, &w, &p.job, 0, p_q, p_k, p_v, _at(y[0]), _at(y[1]), _at(y[2]))
        self.end(mode, status)
        return tuple(y)

    def kda_gates(self, f, b, A, dt_bias) -> tuple[np.ndarray, np.ndarray]:
        """The decay factor of each key channel from f [R, H * K], and sigmoid(b), b [R, H]; ``A`` is exp(A_log) [H]."""
        cdef int64_t R = self.count("f", f), H = self.d.kda_num_heads, C = H * self.d.kda_head_k
        cdef k3_kda w
        memset(&w, 0, sizeof(w))
        w.A, w.dt_bias = _floats("A", A, (H,)), _floats("dt_bias", dt_bias, (C,))
        _array("f", f, (R, C), np.float32)
        _array("b", b, (R, H), np.float32)
        alpha, beta = f.copy(), b.copy()
        mode = self.begin()
        status = self.table.kda_gates(self.table.ctx, &self.d, &w, _at(alpha), _at(beta), R)
        self.end(mode, status)
        return alpha, beta

    def kda_recurrence(self, q, k, v, alpha, beta, state, counts=None) -> tuple[np.ndarray, np.ndarray]:
        """o [R, H * V] and the new state, of q, k, alpha [R, H * K], v [R, H * V], beta [R, H]; ``state`` [segments, H, K, V]."""
        cdef int64_t R = self.count("q", q), H = self.d.kda_num_heads, K = self.d.kda_head_k, V = self.d.kda_head_v, i
        cdef _Pass p = _Pass(R, counts)
        p_q, p_k, p_a = _floats("q", q, (R, H * K)), _floats("k", k, (R, H * K)), _floats("alpha", alpha, (R, H * K))
        p_v, p_b = _floats("v", v, (R, H * V)), _floats("beta", beta, (R, H))
        _array("state", state, (p.job.n_segments, H, K, V), np.float32)
        o, after = _out((R, H * V)), _out(state.shape)
        for i in range(p.job.n_segments):
            p.now[i].state = _at(state) + i * H * K * V
            p.next[i].state = _at(after) + i * H * K * V
        mode = self.begin()
        status = self.table.kda_recurrence(self.table.ctx, &self.d, &p.job, 0, p_q, p_k, p_v, p_a, p_b, _at(o))
        self.end(mode, status)
        return o, after

    def kda_output(self, o, g, o_norm) -> np.ndarray:
        """rms(o per head; o_norm [V]) * sigmoid(g), o and g [R, H * V]."""
        cdef int64_t R = self.count("o", o), V = self.d.kda_head_v, W = self.d.kda_num_heads * V
        cdef k3_kda w
        memset(&w, 0, sizeof(w))
        w.o_norm = _floats("o_norm", o_norm, (V,))
        p_g = _floats("g", g, (R, W))
        _array("o", o, (R, W), np.float32)
        y = o.copy()
        mode = self.begin()
        status = self.table.kda_output(self.table.ctx, &self.d, &w, _at(y), p_g, R)
        self.end(mode, status)
        return y

    def mla_rope(self, q, kva, positions, counts=None) -> tuple[np.ndarray, np.ndarray]:
        """q [R, H * (nope + rope)] and kva [R, kv_lora + rope] with their rope channels rotated."""
        cdef int64_t R = self.count("q", q), rope = self.d.qk_rope_head_dim
        cdef _Pass p = _Pass(R, counts, positions)
        _array("q", q, (R, self.d.num_attention_heads * (self.d.qk_nope_head_dim + rope)), np.float32)
        _array("kva", kva, (R, self.d.kv_lora_rank + rope), np.float32)
        y, z = q.copy(), kva.copy()
        mode = self.begin()
        status = self.table.mla_rope(self.table.ctx, &self.d, &p.job, _at(y), _at(z))
        self.end(mode, status)
        return y, z

    def mla_append(self, kva, norm, pages, positions, counts=None, int64_t layer=0) -> None:
        """Writes rms(kva; norm [kv_lora]) and the rope channels to ``pages``: a list of pages for each segment."""
        cdef int64_t R = self.count("kva", kva)
        cdef k3_mla w
        cdef _Pass p = _Pass(R, counts, positions)
        memset(&w, 0, sizeof(w))
        w.kv_a_layernorm = _floats("norm", norm, (self.d.kv_lora_rank,))
        p_kva = _floats("kva", kva, (R, self.d.kv_lora_rank + self.d.qk_rope_head_dim))
        p.bind_pages(pages, layer, self.d.latent_stride, True)
        mode = self.begin()
        status = self.table.mla_append(self.table.ctx, &self.d, &w, &p.job, layer, p_kva)
        self.end(mode, status)

    def mla_absorb(self, q, Matrix kv_b not None) -> np.ndarray:
        """[Wk_h^T q_nope | q_rope | zeros], float32[R, H, latent_stride]."""
        cdef int64_t R = self.count("q", q), H = self.d.num_attention_heads
        cdef k3_mla w
        memset(&w, 0, sizeof(w))
        w.kv_b_proj = self._kv_b(kv_b)
        p_q = _floats("q", q, (R, H * (self.d.qk_nope_head_dim + self.d.qk_rope_head_dim)))
        qa = _out((R, H, self.d.latent_stride))
        mode = self.begin()
        status = self.table.mla_absorb(self.table.ctx, &self.d, &w, p_q, _at(qa), R)
        self.end(mode, status)
        return qa

    def mla_attend(self, qa, pages, positions, counts=None, int64_t layer=0) -> np.ndarray:
        """Attention of qa [R, H, latent_stride] over the pages up to each row's own position: [R, H, kv_lora]."""
        cdef int64_t R = self.count("qa", qa), H = self.d.num_attention_heads
        cdef _Pass p = _Pass(R, counts, positions)
        p_qa = _floats("qa", qa, (R, H, self.d.latent_stride))
        p.bind_pages(pages, layer, self.d.latent_stride, False)
        oa = _out((R, H, self.d.kv_lora_rank))
        mode = self.begin()
        status = self.table.mla_attend(self.table.ctx, &self.d, &p.job, layer, p_qa, _at(oa))
        self.end(mode, status)
        return oa

    def mla_unabsorb(self, oa, Matrix kv_b not None, g=None) -> np.ndarray:
        """Wv_h oa[h], times sigmoid(g) where there is a gate [R, H * v]: [R, H * v]."""
        cdef int64_t R = self.count("oa", oa), H = self.d.num_attention_heads
        cdef k3_mla w
        memset(&w, 0, sizeof(w))
        w.kv_b_proj = self._kv_b(kv_b)
        p_oa = _floats("oa", oa, (R, H, self.d.kv_lora_rank))
        p_g = _floats("g", g, (R, H * self.d.v_head_dim)) if g is not None else NULL
        o = _out((R, H * self.d.v_head_dim))
        mode = self.begin()
        status = self.table.mla_unabsorb(self.table.ctx, &self.d, &w, p_oa, p_g, _at(o), R)
        self.end(mode, status)
        return o

    cdef k3_matrix _kv_b(self, Matrix w) except *:
        _expect(w, "kv_b", (self.d.num_attention_heads * (self.d.qk_nope_head_dim + self.d.v_head_dim), self.d.kv_lora_rank))
        if w.m.dtype == K3_MXFP4:
            raise ConfigError("kv_b: expected float32 or BF16; found MXFP4")
        return w.m

    def route(self, logits, bias) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32[R, T], ascending, and weights [R, T] of the chosen experts; logits [R, E], bias [E]."""
        cdef int64_t R = self.count("logits", logits), E = self.d.num_experts
        p_logits, p_bias = _floats("logits", logits, (R, E)), _floats("bias", bias, (E,))
        ids = np.full((R, self.d.num_experts_per_token), -1, np.int32)
        weights = _out(ids.shape)
        mode = self.begin()
        status = self.table.route(self.table.ctx, &self.d, p_logits, p_bias, <int32_t*>_at(ids), _at(weights), R)
        self.end(mode, status)
        return ids, weights

    def experts(self, z, ids, weights, w1, w2, w3) -> np.ndarray:
        """The weighted sum of the chosen experts, [R, latent]; w1, w2, w3 are lists of E matrices: gate, down, up."""
        cdef int64_t R = self.count("z", z), E = self.d.num_experts, T = self.d.num_experts_per_token, e, which
        cdef int64_t latent = self.d.routed_expert_hidden_size, inner = self.d.moe_intermediate_size
        cdef k3_moe w
        cdef Matrix one
        cdef k3_matrix* all_of_them
        memset(&w, 0, sizeof(w))
        p_z, p_weights = _floats("z", z, (R, latent)), _floats("weights", weights, (R, T))
        _array("ids", ids, (R, T), np.int32)
        if not (0 <= ids.min() and ids.max() < E):
            raise ConfigError(f"ids: expected 0 to {E - 1}; found {ids.min()} to {ids.max()}")
        if not len(w1) == len(w2) == len(w3) == E:
            raise ConfigError(f"experts: expected {E} matrices of each kind; found {len(w1)}, {len(w2)} and {len(w3)}")
        for e in range(E):
            for name, one in (("w1", w1[e]), ("w2", w2[e]), ("w3", w3[e])):
                _expect(one, name, (latent, inner) if name == "w2" else (inner, latent))
                if one.m.dtype != (<Matrix>w1[0]).m.dtype:
                    raise ConfigError(f"experts: expected one dtype for all experts of a layer; found another at {name} of {e}")
        u = _out((R, latent))
        all_of_them = <k3_matrix*>calloc(3 * E, sizeof(k3_matrix))
        if all_of_them == NULL:
            raise MemoryError("could not allocate the table of experts")
        for which, each in enumerate((w1, w2, w3)):
            for e in range(E):
                all_of_them[which * E + e] = (<Matrix>each[e]).m
        w.w1, w.w2, w.w3 = all_of_them, all_of_them + E, all_of_them + 2 * E
        mode = self.begin()
        status = self.table.experts(self.table.ctx, &self.d, &w, p_z, <const int32_t*>_at(ids), p_weights, _at(u), R)
        free(all_of_them)
        self.end(mode, status)
        return u

    def residual(self, s, a, b=None, bint restart=False, int32_t sublayer=0, counts=None) -> tuple[np.ndarray, list[int | None]]:
        """s + (a + b), or a + b with ``restart``; and for each segment ``sublayer`` where that is not finite, else None."""
        cdef int64_t R = self.count("s", s), d = s.shape[1] if s.ndim == 2 else 0
        cdef _Pass p = _Pass(R, counts)
        p_a = _floats("a", a, (R, d))
        p_b = _floats("b", b, (R, d)) if b is not None else NULL
        _array("s", s, (R, d), np.float32)
        y = s.copy()
        mode = self.begin()
        status = self.table.residual(self.table.ctx, &p.job, _at(y), p_a, p_b, restart, sublayer, d)
        self.end(mode, status)
        return y, p.bad()

    def finite(self, x, owner, int64_t segments, int32_t sublayer=0) -> list[int | None]:
        """For each segment ``sublayer`` where one of its rows of x [R, n] is not finite, else None; owner int64[R]."""
        cdef int64_t R = self.count("x", x), n = x.shape[1] if x.ndim == 2 else 0
        cdef _Pass p = _Pass(segments, [1] * segments)
        p_x = _floats("x", x, (R, n))
        _array("owner", owner, (R,), np.int64)
        if not (0 <= owner.min() and owner.max() < segments):
            raise ConfigError(f"owner: expected 0 to {segments - 1}; found {owner.min()} to {owner.max()}")
        mode = self.begin()
        status = self.table.finite(self.table.ctx, &p.job, p_x, <const int64_t*>_at(owner), sublayer, R, n)
        self.end(mode, status)
        return p.bad()


def _describe(array) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype}{list(array.shape)}" + ("" if array.flags.c_contiguous else ", not C-contiguous")
    return type(array).__name__


cdef int _array(str name, array, tuple shape, dtype) except -1:
    """ConfigError unless the array has that shape and dtype, and lies in one aligned piece."""
    good = isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape
    if not good or not array.flags.c_contiguous or not array.flags.aligned:
        raise ConfigError(f"{name}: expected a C-contiguous {np.dtype(dtype)}{list(shape)}; found {_describe(array)}")
    return 0


cdef float* _at(array) except? NULL:
    return <float*><uintptr_t>array.__array_interface__["data"][0]


cdef float* _floats(str name, array, tuple shape) except? NULL:
    _array(name, array, shape, np.float32)
    return _at(array)


cdef int _expect(Matrix w, str name, tuple shape) except -1:
    if w.shape != shape:
        raise ConfigError(f"{name}: expected a matrix [out, in] of {list(shape)}; found {list(w.shape)}")
    return 0


def _out(shape) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)
