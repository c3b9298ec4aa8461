# SPDX-License-Identifier: MIT
"""Weights: the checkpoint's tensors as the ops see them.

Matrices stay where the checkpoint has them, in its mapped files.  Vectors are widened to float32, which is exact
and small; three small things are folded: AttnRes norm * proj (in float32), exp(A_log), and the convolution taps
laid out tap by tap.
"""

import numpy as np

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free

from k3session._core.c_ops cimport K3_BF16, K3_F32, K3_MXFP4, k3_layer, k3_matrix

from k3session.errors import CheckpointError


def widen(array) -> np.ndarray:
    """A BF16 (uint16) or F32 array as contiguous float32: exact."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, dtype=np.float32)


cdef class Weights:
    """The weights of one model, or of the layers of it that ``checkpoint`` was opened for; immutable.

    ``checkpoint`` is a `k3session.checkpoint.Checkpoint`.  Layers keep their numbers: those outside the range have no
    weights.  The embedding belongs to the first layer, the final norms and the head to the last one.
    """

    def __cinit__(self, checkpoint not None, progress=None):
        cdef int i
        cdef int32_t n_kda = 0, n_mla = 0
        cdef int64_t n_moe = 0
        config = checkpoint.config
        self.config = config
        self.first, self.end = checkpoint.layers
        self._keep = []
        self._set_dims(config)
        moe_layers = sum(1 for j in range(self.first, self.end) if config.is_moe(j))
        self.tables.layers = <k3_layer*>calloc(config.num_hidden_layers, sizeof(k3_layer))
        self.tables.experts = <k3_matrix*>calloc(max(1, moe_layers * 3 * config.num_experts), sizeof(k3_matrix))
        if self.tables.layers == NULL or self.tables.experts == NULL:
            raise MemoryError("could not allocate the tables of the model's layers")
        last = self.end == config.num_hidden_layers
        if self.first == 0:
            self.tables.embed_tokens = self._matrix(
                checkpoint, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if last:
            head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            if config.tie_word_embeddings and self.first == 0:
                self.tables.lm_head = self.tables.embed_tokens
            else:
                self.tables.lm_head = self._matrix(checkpoint, head, config.vocab_size, config.hidden_size)
            self.tables.norm = self._vector(checkpoint.values("model.norm.weight"))
            self.tables.output_attn_res = self._vector(_res(checkpoint, "model.output_attn_res"))
        if self.dims.rotary:
            pairs = np.arange(config.qk_rope_head_dim // 2, dtype=np.float64)
            frequencies = np.float64(config.rope_theta) ** (-2.0 * pairs / config.qk_rope_head_dim)
            self._keep.append(frequencies)
            self.tables.frequencies = <const double*><uintptr_t>frequencies.__array_interface__["data"][0]
        for i in range(self.first, self.end):
            self._bind_layer(checkpoint, i, n_kda if config.is_kda(i) else n_mla, n_moe)
            if config.is_kda(i):
                n_kda += 1
            else:
                n_mla += 1
            if config.is_moe(i):
                n_moe += 1
            if progress is not None:
                progress("open", i + 1 - self.first, self.end - self.first)
        self._keep += checkpoint.held()

    def __dealloc__(self):
        free(self.tables.experts)
        free(self.tables.layers)

    def spans(self) -> list:
        """(address, bytes) of every matrix that a decode step reads whole: all but the embedding and the experts."""
        cdef int i
        cdef k3_layer* L
        found = []
        for i in range(self.first, self.end):
            L = &self.tables.layers[i]
            if L.is_kda:
                found += [_span(L.kda.q_proj), _span(L.kda.k_proj), _span(L.kda.v_proj), _span(L.kda.f_a_proj),
                          _span(L.kda.f_b_proj), _span(L.kda.b_proj), _span(L.kda.g_proj), _span(L.kda.o_proj)]
            else:
                found += [_span(L.mla.q_a_proj), _span(L.mla.q_b_proj), _span(L.mla.kv_a_proj_with_mqa),
                          _span(L.mla.kv_b_proj), _span(L.mla.g_proj), _span(L.mla.o_proj)]
            if L.is_moe:
                found += [_span(L.moe.gate), _span(L.moe.routed_expert_down_proj), _span(L.moe.routed_expert_up_proj)]
            found += [_span(L.mlp.gate_proj), _span(L.mlp.up_proj), _span(L.mlp.down_proj)]
        found.append(_span(self.tables.lm_head))
        return [span for span in found if span[1] > 0]

    def step_bytes(self) -> dict:
        """Bytes that a decode step reads: the trunk, the chosen experts, and the state that it reads and writes."""
        d = self.dims
        trunk = sum(n for _, n in self.spans()) + self.beside
        one = 0
        moe = sum(1 for i in range(self.first, self.end) if self.tables.layers[i].is_moe)
        if moe:
            one = 3 * d.moe_intermediate_size * d.routed_expert_hidden_size
            kind = self.tables.experts[0].dtype
            one = one // 2 + one // 32 if kind == K3_MXFP4 else one * (2 if kind == K3_BF16 else 4)
        state = d.n_kda * d.kda_num_heads * d.kda_head_k * d.kda_head_v * 4
        return {"trunk": trunk, "experts": moe * d.num_experts_per_token * one, "state": 2 * state}

    def _set_dims(self, config):
        d = &self.dims
        d.vocab_size = config.vocab_size
        d.hidden_size = config.hidden_size
        d.num_hidden_layers = config.num_hidden_layers
        d.attn_res_block_size = config.attn_res_block_size
        d.kda_num_heads = config.kda_num_heads
        d.kda_head_k = config.kda_head_dim
        d.kda_head_v = config.kda_head_dim
        d.conv_kernel = config.short_conv_kernel_size
        d.num_attention_heads = config.num_attention_heads
        d.q_lora_rank = config.q_lora_rank
        d.kv_lora_rank = config.kv_lora_rank
        d.qk_nope_head_dim = config.qk_nope_head_dim
        d.qk_rope_head_dim = config.qk_rope_head_dim
        d.v_head_dim = config.v_head_dim
        d.latent_stride = (config.kv_lora_rank + config.qk_rope_head_dim + 15) // 16 * 16
        d.num_experts = config.num_experts
        d.num_experts_per_token = config.num_experts_per_token
        d.moe_intermediate_size = config.moe_intermediate_size
        d.routed_expert_hidden_size = config.routed_expert_hidden_size
        d.shared_intermediate_size = config.num_shared_experts * config.moe_intermediate_size
        d.intermediate_size = config.intermediate_size
        d.n_kda = sum(1 for i in config.kda_layers if self.first <= i < self.end)
        d.n_mla = sum(1 for i in config.full_attn_layers if self.first <= i < self.end)
        d.rms_norm_eps = config.rms_norm_eps
        d.mla_latent_norm_eps = config.mla_latent_norm_eps
        d.situ_beta = config.activation_situ_beta
        d.situ_linear_beta = config.activation_situ_linear_beta
        d.gate_lower_bound = 0.0 if config.gate_lower_bound is None else config.gate_lower_bound
        d.routed_scaling_factor = config.routed_scaling_factor
        d.attention_scale = <float>(1.0 / sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim))
        d.moe_renormalize = config.moe_renormalize
        d.rotary = not config.mla_use_nope and config.qk_rope_head_dim > 0
        C = config.kda_num_heads * config.kda_head_dim
        d.conv_stride = (3 * (config.short_conv_kernel_size - 1) * C + 15) // 16 * 16
        d.state_stride = (C * config.kda_head_dim + 15) // 16 * 16

    cdef const float* _vector(self, array) except NULL:
        flat = np.ascontiguousarray(widen(array).reshape(-1))
        self._keep.append(flat)
        return <const float*><uintptr_t>flat.__array_interface__["data"][0]

    cdef k3_matrix _matrix(self, checkpoint, str name, rows, cols, bint packed=False) except *:
        cdef k3_matrix m
        cdef tuple shape
        # By address: half a million arrays, one for each matrix of an expert, would take longer than all else.
        m.scale = NULL
        m.rows = rows
        m.cols = cols
        if not packed:
            stored, at = checkpoint.located(name)
            m.dtype = K3_BF16 if stored.dtype == "BF16" else K3_F32
        else:
            stored, at = checkpoint.located(name + "_packed")
            scale, scale_at = checkpoint.located(name + "_scale")
            if scale.shape != (rows, cols // 32):
                raise CheckpointError(f"{name}_scale: expected shape {(rows, cols // 32)}, found {scale.shape}")
            m.dtype = K3_MXFP4
            m.scale = <const void*><uintptr_t>scale_at
        shape = stored.shape
        expected = (rows, cols // 2 if m.dtype == K3_MXFP4 else cols)
        if shape != expected:
            raise CheckpointError(f"{name}: expected shape {expected}, found {shape}")
        m.pitch = <int64_t>shape[1] * (1 if m.dtype == K3_MXFP4 else 2 if m.dtype == K3_BF16 else 4)
        m.data = <const void*><uintptr_t>at
        return m

    cdef int _bind_layer(self, checkpoint, int i, int32_t mixer_index, int64_t moe_index) except -1:
        cdef k3_layer* L = &self.tables.layers[i]
        cdef k3_matrix* w
        cdef int64_t e, E
        c = self.config
        d, H, D, C = c.hidden_size, c.kda_num_heads, c.kda_head_dim, c.kda_num_heads * c.kda_head_dim
        prefix = f"model.layers.{i}."
        L.is_kda = c.is_kda(i)
        L.is_moe = c.is_moe(i)
        L.mixer_index = mixer_index
        L.input_layernorm = self._vector(checkpoint.values(prefix + "input_layernorm.weight"))
        L.post_attention_layernorm = self._vector(checkpoint.values(prefix + "post_attention_layernorm.weight"))
        L.self_attention_res = self._vector(_res(checkpoint, prefix + "self_attention_res"))
        L.mlp_res = self._vector(_res(checkpoint, prefix + "mlp_res"))

        attn = prefix + "self_attn."
        if L.is_kda:
            L.kda.q_proj = self._matrix(checkpoint, attn + "q_proj.weight", C, d)
            L.kda.k_proj = self._matrix(checkpoint, attn + "k_proj.weight", C, d)
            L.kda.v_proj = self._matrix(checkpoint, attn + "v_proj.weight", C, d)
            L.kda.f_a_proj = self._matrix(checkpoint, attn + "f_a_proj.weight", D, d)
            L.kda.f_b_proj = self._matrix(checkpoint, attn + "f_b_proj.weight", C, D)
            L.kda.b_proj = self._matrix(checkpoint, attn + "b_proj.weight", H, d)
            L.kda.g_proj = self._matrix(checkpoint, attn + "g_proj.weight", C, d)
            L.kda.o_proj = self._matrix(checkpoint, attn + "o_proj.weight", d, C)
            taps = [widen(checkpoint.values(f"{attn}{n}_conv1d.weight")).reshape(C, -1).T for n in "qkv"]
            L.kda.conv1d = self._vector(np.stack(taps))
            A_log = widen(checkpoint.values(attn + "A_log")).reshape(-1)[:H]
            L.kda.A = self._vector(np.exp(A_log.astype(np.float64)).astype(np.float32))
            L.kda.dt_bias = self._vector(checkpoint.values(attn + "dt_bias"))
            L.kda.o_norm = self._vector(checkpoint.values(attn + "o_norm.weight"))
        else:
            Hm, nope, rope, v = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
            L.mla.q_a_proj = self._matrix(checkpoint, attn + "q_a_proj.weight", c.q_lora_rank, d)
            L.mla.q_b_proj = self._matrix(checkpoint, attn + "q_b_proj.weight", Hm * (nope + rope), c.q_lora_rank)
            L.mla.kv_a_proj_with_mqa = self._matrix(
                checkpoint, attn + "kv_a_proj_with_mqa.weight", c.kv_lora_rank + rope, d)
            L.mla.kv_b_proj = self._matrix(checkpoint, attn + "kv_b_proj.weight", Hm * (nope + v), c.kv_lora_rank)
            if c.mla_use_output_gate:
                L.mla.g_proj = self._matrix(checkpoint, attn + "g_proj.weight", Hm * v, d)
            L.mla.o_proj = self._matrix(checkpoint, attn + "o_proj.weight", d, Hm * v)
            L.mla.q_a_layernorm = self._vector(checkpoint.values(attn + "q_a_layernorm.weight"))
            L.mla.kv_a_layernorm = self._vector(checkpoint.values(attn + "kv_a_layernorm.weight"))

        if not L.is_moe:
            mlp = prefix + "mlp."
            inner = c.intermediate_size
        else:
            moe = prefix + "block_sparse_moe."
            E = c.num_experts
            latent, inner = c.routed_expert_hidden_size, c.moe_intermediate_size
            L.moe.gate = self._matrix(checkpoint, moe + "gate.weight", E, d)
            L.moe.gate.exact = 1
            L.moe.e_score_correction_bias = self._vector(checkpoint.values(moe + "gate.e_score_correction_bias"))
            L.moe.routed_expert_down_proj = self._matrix(checkpoint, moe + "routed_expert_down_proj.weight", latent, d)
            L.moe.routed_expert_up_proj = self._matrix(checkpoint, moe + "routed_expert_up_proj.weight", d, latent)
            if c.latent_moe_use_norm:
                L.moe.routed_expert_norm = self._vector(checkpoint.values(moe + "routed_expert_norm.weight"))
            packed = checkpoint.packed_experts(i)
            w = self.tables.experts + moe_index * 3 * E
            L.moe.w1, L.moe.w2, L.moe.w3 = w, w + E, w + 2 * E
            for e in range(E):
                w[e] = self._matrix(checkpoint, f"{moe}experts.{e}.w1.weight", inner, latent, packed)
                w[E + e] = self._matrix(checkpoint, f"{moe}experts.{e}.w2.weight", latent, inner, packed)
                w[2 * E + e] = self._matrix(checkpoint, f"{moe}experts.{e}.w3.weight", inner, latent, packed)
            mlp = moe + "shared_experts."
            inner = c.num_shared_experts * c.moe_intermediate_size
            for e in range(3 * E):
                if w[e].dtype != w[0].dtype:
                    raise CheckpointError(f"{moe}experts: all experts of a layer are stored alike; found two ways")
        if inner > 0:
            L.mlp.gate_proj = self._matrix(checkpoint, mlp + "gate_proj.weight", inner, d)
            L.mlp.up_proj = self._matrix(checkpoint, mlp + "up_proj.weight", inner, d)
            L.mlp.down_proj = self._matrix(checkpoint, mlp + "down_proj.weight", d, inner)
        return 0


cdef tuple _span(k3_matrix m):
    return (<uintptr_t>m.data, 0 if m.data == NULL else m.rows * m.pitch)


def _res(checkpoint, str name):
    """norm.weight * proj.weight of an AttnRes site, multiplied in float32."""
    norm, proj = (widen(checkpoint.values(f"{name}_{part}.weight")).reshape(-1) for part in ("norm", "proj"))
    return norm * proj
