# SPDX-License-Identifier: MIT
"""Every op of the table by itself, on NumPy arrays: for tests, benches, and whoever looks into a number.

Arguments are checked for type, shape and contiguity; they are never written to.  Results are new arrays, filled with
NaN beforehand, so that an element that an op forgets is seen.
"""

import numpy as np

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from k3session._core.arguments cimport Matrix, Rows, address, check_array, expect
from k3session._core.c_ops cimport (
    K3_MXFP4,
    k3_cpu,
    k3_cuda,
    k3_dims,
    k3_kda,
    k3_linear_job,
    k3_matrix,
    k3_mla,
    k3_moe,
    k3_ops,
    k3_pass,
    k3_segment,
)
from k3session._core.cuda_ops cimport CudaOps, DeviceMemory
from k3session._core.gpu cimport Device, cuda_top_k
from k3session._core.memory cimport aligned
from k3session._core.ops cimport (
    PassShape,
    buffer_sizes,
    float_mode_enter,
    float_mode_leave,
    op_table,
    pool_hold,
    pool_release,
)

from k3session._core.arguments import describe
from k3session._core.ops import ROUNDINGS, best_isa, roundings
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


cdef class Kernels:
    """The ops of one instruction set.

    Parameters
    ----------
    isa : str, optional
        "base", "avx2" or "avx512", or "cuda" for the first GPU; the processor's best one by default.
    threads : int
        Threads that a call may use.
    rows : int
        The most rows in a call; with the dimensions it fixes the size of the work buffers, as for a model.
    poisoned : bool
        Fill the work buffers with NaN before each call.
    rounding : str
        "exact", or one of `ops.roundings(isa)`: what BF16 and MXFP4 matrices multiply in `linear`, `gate_up` and `experts` is
        rounded to BF16, on the host.
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
    cdef CudaOps gpu                    # the ops of a GPU, or None
    cdef list lent                      # on the device for the call: (address, array to fill afterwards or None)
    cdef k3_dims d
    cdef readonly str isa
    cdef readonly int64_t rows
    cdef readonly bint poisoned
    cdef object frequencies             # float64[rope / 2]
    cdef bint holding                   # of the thread pool

    def __cinit__(self, isa=None, int threads=1, int64_t rows=64, bint poisoned=False, str rounding="exact", **dims):
        unknown = set(dims) - set(DIMS)
        if unknown:
            raise TypeError(f"unknown dimensions {sorted(unknown)}: expected some of {list(DIMS)}")
        if threads < 1 or rows < 1:
            raise ConfigError(f"threads and rows: expected at least 1; found {threads} and {rows}")
        self.isa = best_isa() if isa is None else isa
        self.lent = []
        self.rows = rows
        self.poisoned = poisoned
        v = DIMS | dims
        sizes = {n: x for n, x in v.items() if isinstance(DIMS[n], int) and not isinstance(DIMS[n], bool)}
        wrong = sorted(n for n, x in sizes.items() if x < (0 if n in ("qk_rope_head_dim", "shared_intermediate_size") else 1))
        if wrong or v["num_experts_per_token"] > v["num_experts"]:
            raise ConfigError(f"expected positive sizes, and no more experts per token than experts; found {v}")
        self._set_dims(v)
        if self.isa == "cuda":
            self.gpu = CudaOps(DeviceMemory(Device(0)), rows)
            self.gpu.prepare(&self.d)
            self.table = self.gpu.table
            return
        op_table(self.isa, &self.table)
        self.table.ctx = &self.cpu
        self.cpu.threads = threads
        if rounding != "exact" and rounding not in roundings(self.isa):
            raise ConfigError(f"rounding: expected exact or one of {roundings(self.isa)}; found {rounding!r}")
        self.cpu.inputs = 0 if rounding == "exact" else 1 + ROUNDINGS.index(rounding)
        buffer_sizes(&self.d, rows, &self.cpu.x_floats, &self.cpu.work_floats, &self.cpu.list_items)
        self.cpu.x = <float*>aligned(self.cpu.x_floats * 4)
        self.cpu.work = <float*>aligned(self.cpu.work_floats * 4)
        self.cpu.list = <int64_t*>aligned(self.cpu.list_items * 8)
        pool_hold()
        self.holding = True

    def __dealloc__(self):
        free(self.cpu.list)
        free(self.cpu.work)
        free(self.cpu.x)
        if self.holding:
            with nogil:
                pool_release()

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
        d.rotary, d.n_kda, d.n_mla = True, 1, 1
        C = d.kda_num_heads * d.kda_head_k
        d.conv_stride, d.state_stride = 3 * (d.conv_kernel - 1) * C, C * d.kda_head_v
        pairs = np.arange(d.qk_rope_head_dim // 2, dtype=np.float64)
        self.frequencies = np.float64(v["rope_theta"]) ** (-2.0 * pairs / max(1, d.qk_rope_head_dim))

    @property
    def latent_stride(self) -> int:
        """Elements from one latent row of a page to the next: kv_lora_rank + qk_rope_head_dim, rounded up to 16."""
        return self.d.latent_stride

    cdef unsigned int begin(self) except? 0:
        """As the decoder does before a pass; `end` undoes it."""
        cdef PassShape shape
        if self.gpu is not None:
            memset(&shape, 0, sizeof(shape))
            shape.traced = True         # nothing is recorded
            if self.poisoned:
                self.gpu.poison()
            if self.gpu.begin(shape, 0) != 0:
                self.gpu.end(False, 0, 0)
                raise self.gpu.failure()
        elif self.poisoned:
            memset(self.cpu.x, 0xff, self.cpu.x_floats * 4)
            memset(self.cpu.work, 0xff, self.cpu.work_floats * 4)
            memset(self.cpu.list, 0xff, self.cpu.list_items * 8)
        return float_mode_enter()

    cdef int end(self, unsigned int mode, int status) except -1:
        float_mode_leave(mode)
        if self.gpu is not None:
            self.gpu.end(status == 0, 0, 0)
            problem = self.gpu.failure()
            lent, self.lent = self.lent, []
            for at, array in lent:
                if array is not None and problem is None:
                    self.gpu.memory.read(address(array), <void*><uintptr_t>at, array.nbytes)
                self.gpu.memory.release(<void*><uintptr_t>at)
            if problem is not None:
                raise problem
        if status:
            raise K3Error("the work buffers are too small for this call: make Kernels with its dimensions and rows")
        return 0

    cdef void* lend(self, array, bint back) except NULL:
        """Where the ops find an array: on a device, a copy of it, which comes back at the end if it is written."""
        cdef void* here
        if self.gpu is None:
            return address(array)
        here = self.gpu.memory.allocate(array.nbytes, False)
        self.lent.append((<uintptr_t>here, array if back else None))
        if array.nbytes:
            self.gpu.memory.write(here, address(array), array.nbytes)
        return here

    cdef void* given(self, array) except NULL:
        return self.lend(array, False)

    cdef float* made(self, array) except NULL:
        return <float*>self.lend(array, True)

    cdef float* values(self, str name, array, tuple shape) except NULL:
        """An input, checked."""
        check_array(name, array, shape, np.float32)
        return <float*>self.given(array)

    cdef k3_matrix matrix(self, Matrix w) except *:
        """A matrix as the ops take it: on a device, its rows at multiples of 16 bytes."""
        cdef k3_matrix m = w.m
        if self.gpu is not None:
            m.pitch = (w.m.pitch + 15) // 16 * 16
            rows = np.zeros((m.rows, m.pitch), np.uint8)
            rows[:, : w.m.pitch] = w.data.view(np.uint8).reshape(m.rows, w.m.pitch)
            m.data = self.given(rows)
            if w.scale is not None:
                m.scale = <const uint8_t*>self.given(w.scale)
        return m

    cdef const k3_pass* laid_out(self, Rows p) except NULL:
        """The segments of a call, where the ops find them."""
        cdef int64_t i
        if self.gpu is None:
            return &p.job
        if p.page_arrays:
            each = {id(page): page for page in p.page_arrays}      # a page can be in many places
            placed = {key: <uintptr_t>self.lend(page, p.pages_written) for key, page in each.items()}
            addresses = np.array([placed[id(page)] for page in p.page_arrays], np.uint64)
            pages = <uintptr_t>self.given(addresses)
            for i in range(p.job.n_segments):
                p.segments[i].pages = <void* const*><uintptr_t>(pages + p.first_page[i] * sizeof(void*))
        segments = np.frombuffer((<char*>p.segments)[:p.job.n_segments * sizeof(k3_segment)], np.uint8)
        p.job.segments = <const k3_segment*>self.given(segments)
        p.job.owner = <const int32_t*>self.given(p.owner)
        p.job.bad_sublayer = <int32_t*>self.made(p.noted)
        return &p.job

    cdef int64_t count(self, str name, array) except -1:
        """Rows of an activation array, which must fit."""
        if not isinstance(array, np.ndarray) or array.ndim < 1 or not 1 <= array.shape[0] <= self.rows:
            raise ConfigError(f"{name}: expected an array of 1 to {self.rows} rows; found {describe(array)}")
        return array.shape[0]

    def embed(self, Matrix table not None, tokens, embeddings=None) -> np.ndarray:
        """Rows of ``table`` for tokens int32[R]; -1 takes the row of ``embeddings`` float32[R, d]."""
        cdef int64_t R = self.count("tokens", tokens)
        expect(table, "table", (self.d.vocab_size, self.d.hidden_size))
        if table.m.dtype == K3_MXFP4:
            raise ConfigError("table: expected float32 or BF16; found MXFP4")
        check_array("tokens", tokens, (R,), np.int32)
        low = 0 if embeddings is None else -1
        if not (low <= tokens.min() and tokens.max() < self.d.vocab_size):
            raise ConfigError(f"tokens: expected {low} to {self.d.vocab_size - 1}; found {tokens.min()} to {tokens.max()}")
        m = self.matrix(table)
        s = _out((R, self.d.hidden_size))
        e = self.values("embeddings", embeddings, (R, self.d.hidden_size)) if embeddings is not None else NULL
        mode = self.begin()
        status = self.table.embed(self.table.ctx, &self.d, &m, <const int32_t*>self.given(tokens), e, self.made(s), R)
        self.end(mode, status)
        return s

    def attn_res(self, bank, s, u, norm, take=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mix of bank float32[n, R, d] and s float32[R, d], its norm, and the weights; rows ``take`` int32[r] of it."""
        cdef int64_t R = self.count("s", s), d = self.d.hidden_size, n = len(bank), rows = R
        cdef const int32_t* which = NULL
        check_array("bank", bank, (n, R, d), np.float32)
        if take is not None:
            rows = self.count("take", take)
            check_array("take", take, (rows,), np.int32)
            if not (0 <= take.min() and take.max() < R):
                raise ConfigError(f"take: expected rows 0 to {R - 1}; found {take.min()} to {take.max()}")
            which = <const int32_t*>self.given(take)
        h, x, weights = _out((rows, d)), _out((rows, d)), _out((rows, n + 1))
        p_s, p_u, p_norm = self.values("s", s, (R, d)), self.values("u", u, (d,)), self.values("norm", norm, (d,))
        mode = self.begin()
        status = self.table.attn_res(self.table.ctx, &self.d, <const float*>self.given(bank), n, R, p_s, p_u, p_norm,
                                     which, NULL, self.made(h), self.made(x), self.made(weights), rows)
        self.end(mode, status)
        return h, x, weights

    def linear(self, x, *matrices) -> list[np.ndarray]:
        """y = x W^T for each matrix, in one dispatch; ``x`` is float32[R, in], or a list with one input per matrix.

        The only op here that lets go of the GIL, so that a test can have two callers meet at the pool.
        """
        cdef k3_linear_job jobs[16]
        cdef k3_matrix stored[16]
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
            stored[i] = self.matrix(w)
            jobs[i].w = &stored[i]
            jobs[i].x = self.values("x", inputs[i], (R, w.m.cols))
            jobs[i].y = self.made(y)
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
        expect(up, "up", gate.shape)
        p_x = self.values("x", x, (R, gate.m.cols))
        cdef k3_matrix m_gate = self.matrix(gate), m_up = self.matrix(up)
        h = _out((R, gate.m.rows))
        mode = self.begin()
        status = self.table.gate_up(self.table.ctx, &self.d, &m_gate, &m_up, p_x, self.made(h), R)
        self.end(mode, status)
        return h

    def rms_norm(self, x, norm, float eps) -> np.ndarray:
        """x * norm / sqrt(mean(x^2) + eps), row by row."""
        cdef int64_t R = self.count("x", x), n = norm.shape[0]
        p_x, p_norm = self.values("x", x, (R, n)), self.values("norm", norm, (n,))
        y = _out((R, n))
        mode = self.begin()
        status = self.table.rms_norm(self.table.ctx, p_x, n, p_norm, eps, self.made(y), n, R, n)
        self.end(mode, status)
        return y

    def kda_conv(self, q, k, v, conv1d, windows, counts=None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v after convolution, SiLU and norm, and the new windows; ``windows`` is float32[segments, 3, K - 1, C]."""
        cdef int64_t R = self.count("q", q), K = self.d.conv_kernel, C = self.d.kda_num_heads * self.d.kda_head_k, i
        cdef k3_kda w
        cdef Rows p = Rows(R, counts)
        memset(&w, 0, sizeof(w))
        w.conv1d = self.values("conv1d", conv1d, (3, K, C))
        p_q, p_k, p_v = self.values("q", q, (R, C)), self.values("k", k, (R, C)), self.values("v", v, (R, C))
        check_array("windows", windows, (p.job.n_segments, 3, K - 1, C), np.float32)
        y = [_out((R, C)), _out((R, C)), _out((R, C)), _out(windows.shape)]
        before, after = <float*>self.given(windows), self.made(y[3])
        for i in range(p.job.n_segments):
            p.segments[i].now.conv = before + i * 3 * (K - 1) * C
            p.segments[i].next.conv = after + i * 3 * (K - 1) * C
        mode = self.begin()
        status = self.table.kda_conv(self.table.ctx, &self.d, &w, self.laid_out(p), 0, p_q, p_k, p_v,
                                     self.made(y[0]), self.made(y[1]), self.made(y[2]))
        self.end(mode, status)
        return tuple(y)

    def kda_gates(self, f, b, A, dt_bias) -> tuple[np.ndarray, np.ndarray]:
        """The decay factor of each key channel from f [R, H * K], and sigmoid(b), b [R, H]; ``A`` is exp(A_log) [H]."""
        cdef int64_t R = self.count("f", f), H = self.d.kda_num_heads, C = H * self.d.kda_head_k
        cdef k3_kda w
        memset(&w, 0, sizeof(w))
        w.A, w.dt_bias = self.values("A", A, (H,)), self.values("dt_bias", dt_bias, (C,))
        check_array("f", f, (R, C), np.float32)
        check_array("b", b, (R, H), np.float32)
        alpha, beta = f.copy(), b.copy()
        mode = self.begin()
        status = self.table.kda_gates(self.table.ctx, &self.d, &w, self.made(alpha), self.made(beta), R)
        self.end(mode, status)
        return alpha, beta

    def kda_recurrence(self, q, k, v, alpha, beta, state, counts=None) -> tuple[np.ndarray, np.ndarray]:
        """o [R, H * V] and the new state, of q, k, alpha [R, H * K], v [R, H * V], beta [R, H]; ``state`` [segments, H, K, V]."""
        cdef int64_t R = self.count("q", q), H = self.d.kda_num_heads, K = self.d.kda_head_k, V = self.d.kda_head_v, i
        cdef Rows p = Rows(R, counts)
        p_q, p_k, p_a = self.values("q", q, (R, H * K)), self.values("k", k, (R, H * K)), self.values("alpha", alpha, (R, H * K))
        p_v, p_b = self.values("v", v, (R, H * V)), self.values("beta", beta, (R, H))
        check_array("state", state, (p.job.n_segments, H, K, V), np.float32)
        o, new = _out((R, H * V)), _aligned(state.shape)
        before, after = <float*>self.given(state), self.made(new)
        for i in range(p.job.n_segments):
            p.segments[i].now.state = before + i * H * K * V
            p.segments[i].next.state = after + i * H * K * V
        mode = self.begin()
        status = self.table.kda_recurrence(self.table.ctx, &self.d, self.laid_out(p), 0, p_q, p_k, p_v, p_a, p_b, self.made(o))
        self.end(mode, status)
        return o, new

    def kda_output(self, o, g, o_norm) -> np.ndarray:
        """rms(o per head; o_norm [V]) * sigmoid(g), o and g [R, H * V]."""
        cdef int64_t R = self.count("o", o), V = self.d.kda_head_v, W = self.d.kda_num_heads * V
        cdef k3_kda w
        memset(&w, 0, sizeof(w))
        w.o_norm = self.values("o_norm", o_norm, (V,))
        p_g = self.values("g", g, (R, W))
        check_array("o", o, (R, W), np.float32)
        y = o.copy()
        mode = self.begin()
        status = self.table.kda_output(self.table.ctx, &self.d, &w, self.made(y), p_g, R)
        self.end(mode, status)
        return y

    def mla_rope(self, q, kva, positions, counts=None) -> tuple[np.ndarray, np.ndarray]:
        """q [R, H * (nope + rope)] and kva [R, kv_lora + rope] with their rope channels rotated."""
        cdef int64_t R = self.count("q", q), rope = self.d.qk_rope_head_dim
        cdef Rows p = Rows(R, counts, positions)
        check_array("q", q, (R, self.d.num_attention_heads * (self.d.qk_nope_head_dim + rope)), np.float32)
        check_array("kva", kva, (R, self.d.kv_lora_rank + rope), np.float32)
        y, z = q.copy(), kva.copy()
        mode = self.begin()
        status = self.table.mla_rope(self.table.ctx, &self.d, self.laid_out(p), <const double*>self.given(self.frequencies),
                                     self.made(y), self.made(z))
        self.end(mode, status)
        return y, z

    def mla_append(self, kva, norm, pages, positions, counts=None, int64_t layer=0) -> None:
        """Writes rms(kva; norm [kv_lora]) and the rope channels to ``pages``: a list of pages for each segment."""
        cdef int64_t R = self.count("kva", kva)
        cdef k3_mla w
        cdef Rows p = Rows(R, counts, positions)
        memset(&w, 0, sizeof(w))
        w.kv_a_layernorm = self.values("norm", norm, (self.d.kv_lora_rank,))
        p_kva = self.values("kva", kva, (R, self.d.kv_lora_rank + self.d.qk_rope_head_dim))
        p.bind_pages(pages, layer, self.d.latent_stride, True)
        mode = self.begin()
        status = self.table.mla_append(self.table.ctx, &self.d, &w, self.laid_out(p), layer, p_kva)
        self.end(mode, status)

    def mla_absorb(self, q, Matrix kv_b not None) -> np.ndarray:
        """[Wk_h^T q_nope | q_rope | zeros], float32[R, H, latent_stride]."""
        cdef int64_t R = self.count("q", q), H = self.d.num_attention_heads
        cdef k3_mla w
        memset(&w, 0, sizeof(w))
        w.kv_b_proj = self._kv_b(kv_b)
        p_q = self.values("q", q, (R, H * (self.d.qk_nope_head_dim + self.d.qk_rope_head_dim)))
        qa = _out((R, H, self.d.latent_stride))
        mode = self.begin()
        status = self.table.mla_absorb(self.table.ctx, &self.d, &w, p_q, self.made(qa), R)
        self.end(mode, status)
        return qa

    def mla_attend(self, qa, pages, positions, counts=None, int64_t layer=0) -> np.ndarray:
        """Attention of qa [R, H, latent_stride] over the pages up to each row's own position: [R, H, kv_lora]."""
        cdef int64_t R = self.count("qa", qa), H = self.d.num_attention_heads
        cdef Rows p = Rows(R, counts, positions)
        p_qa = self.values("qa", qa, (R, H, self.d.latent_stride))
        p.bind_pages(pages, layer, self.d.latent_stride, False)
        oa = _out((R, H, self.d.kv_lora_rank))
        mode = self.begin()
        status = self.table.mla_attend(self.table.ctx, &self.d, self.laid_out(p), layer, p_qa, self.made(oa))
        self.end(mode, status)
        return oa

    def mla_unabsorb(self, oa, Matrix kv_b not None, g=None) -> np.ndarray:
        """Wv_h oa[h], times sigmoid(g) where there is a gate [R, H * v]: [R, H * v]."""
        cdef int64_t R = self.count("oa", oa), H = self.d.num_attention_heads
        cdef k3_mla w
        memset(&w, 0, sizeof(w))
        w.kv_b_proj = self._kv_b(kv_b)
        p_oa = self.values("oa", oa, (R, H, self.d.kv_lora_rank))
        p_g = self.values("g", g, (R, H * self.d.v_head_dim)) if g is not None else NULL
        o = _out((R, H * self.d.v_head_dim))
        mode = self.begin()
        status = self.table.mla_unabsorb(self.table.ctx, &self.d, &w, p_oa, p_g, self.made(o), R)
        self.end(mode, status)
        return o

    cdef k3_matrix _kv_b(self, Matrix w) except *:
        expect(w, "kv_b", (self.d.num_attention_heads * (self.d.qk_nope_head_dim + self.d.v_head_dim), self.d.kv_lora_rank))
        if w.m.dtype == K3_MXFP4:
            raise ConfigError("kv_b: expected float32 or BF16; found MXFP4")
        return self.matrix(w)

    def route(self, logits, bias) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32[R, T], ascending, and weights [R, T] of the chosen experts; logits [R, E], bias [E]."""
        cdef int64_t R = self.count("logits", logits), E = self.d.num_experts
        p_logits, p_bias = self.values("logits", logits, (R, E)), self.values("bias", bias, (E,))
        ids = np.full((R, self.d.num_experts_per_token), -1, np.int32)
        weights = _out(ids.shape)
        mode = self.begin()
        status = self.table.route(self.table.ctx, &self.d, p_logits, p_bias, <int32_t*>self.made(ids), self.made(weights), R)
        self.end(mode, status)
        return ids, weights

    def experts(self, z, ids, weights, w1, w2, w3, cuts=()) -> np.ndarray:
        """The weighted sum of the chosen experts, [R, latent]; w1, w2, w3 are lists of E matrices: gate, down, up.

        With ``cuts``, ascending ids, the op is called for the experts up to each and then for the rest.
        """
        cdef int64_t R = self.count("z", z), E = self.d.num_experts, T = self.d.num_experts_per_token, e, which
        cdef int64_t latent = self.d.routed_expert_hidden_size, inner = self.d.moe_intermediate_size
        cdef k3_moe w
        cdef Rows p = Rows(R, None)
        cdef Matrix one
        cdef k3_matrix* all_of_them
        cdef int64_t first, end
        cdef int status
        memset(&w, 0, sizeof(w))
        p_z, p_weights = self.values("z", z, (R, latent)), self.values("weights", weights, (R, T))
        check_array("ids", ids, (R, T), np.int32)
        if not (0 <= ids.min() and ids.max() < E):
            raise ConfigError(f"ids: expected 0 to {E - 1}; found {ids.min()} to {ids.max()}")
        if not len(w1) == len(w2) == len(w3) == E:
            raise ConfigError(f"experts: expected {E} matrices of each kind; found {len(w1)}, {len(w2)} and {len(w3)}")
        for e in range(E):
            for name, one in (("w1", w1[e]), ("w2", w2[e]), ("w3", w3[e])):
                expect(one, name, (latent, inner) if name == "w2" else (inner, latent))
                if one.m.dtype != (<Matrix>w1[0]).m.dtype:
                    raise ConfigError(f"experts: expected one dtype for all experts of a layer; found another at {name} of {e}")
        u = _out((R, latent))
        table = np.zeros(3 * E * sizeof(k3_matrix), np.uint8)
        all_of_them = <k3_matrix*>address(table)
        for which, each in enumerate((w1, w2, w3)):
            for e in range(E):
                all_of_them[which * E + e] = self.matrix(<Matrix>each[e])
        all_of_them = <k3_matrix*>self.given(table)
        w.w1, w.w2, w.w3 = all_of_them, all_of_them + E, all_of_them + 2 * E
        mode = self.begin()
        p_ids, p_u, p_pass, status, first = <const int32_t*>self.given(ids), self.made(u), self.laid_out(p), 0, 0
        for end in (*cuts, E):
            status |= self.table.experts(self.table.ctx, &self.d, &w, p_pass, p_z, p_ids, p_weights, p_u, first, end)
            first = end
        self.end(mode, status)
        return u

    def residual(self, s, a, b=None, bint restart=False, int32_t sublayer=0, counts=None) -> tuple[np.ndarray, list[int | None]]:
        """s + (a + b), or a + b with ``restart``; and for each segment ``sublayer`` where that is not finite, else None."""
        cdef int64_t R = self.count("s", s), d = s.shape[1] if s.ndim == 2 else 0
        cdef Rows p = Rows(R, counts)
        p_a = self.values("a", a, (R, d))
        p_b = self.values("b", b, (R, d)) if b is not None else NULL
        check_array("s", s, (R, d), np.float32)
        y = s.copy()
        mode = self.begin()
        status = self.table.residual(self.table.ctx, self.laid_out(p), self.made(y), p_a, p_b, restart, sublayer, d)
        self.end(mode, status)
        return y, p.bad()

    def finite(self, x, owner, int64_t segments, int32_t sublayer=0) -> list[int | None]:
        """For each segment ``sublayer`` where one of its rows of x [R, n] is not finite, else None; owner int32[R]."""
        cdef int64_t R = self.count("x", x), n = x.shape[1] if x.ndim == 2 else 0
        cdef Rows p = Rows(segments, [1] * segments)
        p_x = self.values("x", x, (R, n))
        check_array("owner", owner, (R,), np.int32)
        if not (0 <= owner.min() and owner.max() < segments):
            raise ConfigError(f"owner: expected 0 to {segments - 1}; found {owner.min()} to {owner.max()}")
        mode = self.begin()
        status = self.table.finite(self.table.ctx, self.laid_out(p), p_x, <const int32_t*>self.given(owner), sublayer, R, n)
        self.end(mode, status)
        return p.bad()

    def top_k(self, logits, int64_t k) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each row [R, n] the k largest: ids int32[R, k], values [R, k], and log sum exp [R]; on a GPU only.

        The largest first, of equals the lowest id; k from 1 to 64.
        """
        cdef int64_t R = self.count("logits", logits), n = self.d.vocab_size
        if self.gpu is None or not 1 <= k <= min(n, 64):
            raise ConfigError(f"top_k: expected a GPU and k from 1 to {min(n, 64)}; found {self.isa} and {k}")
        p = self.values("logits", logits, (R, n))
        ids, values, total = np.full((R, k), -1, np.int32), _out((R, k)), _out(R)
        mode = self.begin()
        status = cuda_top_k(<k3_cuda*>self.table.ctx, p, R, n, k, <int32_t*>self.made(ids), self.made(values), self.made(total))
        self.end(mode, status)
        return ids, values, total


def _out(shape) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def _aligned(shape):
    """The same at a multiple of 64 bytes, as state lies in a timeline."""
    room = _out((int(np.prod(shape)) + 16,))
    first = -room.__array_interface__["data"][0] % 64 // 4
    return room[first : first + room.size - 16].reshape(shape)
