# SPDX-License-Identifier: MIT
"""A K3 checkpoint as a GGUF file for llama.cpp, with the same weights: needs the package ``gguf``.

The trunk is stored as BF16 (the checkpoint's own bits), as Q8_0 (its nearest values), or as F32 for a comparison of
logits alone; routed experts keep their MXFP4 values, in GGML's order of nibbles.  Tensors go to the file one by one, so
that memory does not grow with the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from blocks import mxfp4_blocks, mxfp4_values, q8_0, widened

from k3session.checkpoint import Checkpoint
from k3session.config import K3Config

Array = npt.NDArray[Any]
ARCHITECTURE = "kimi-k3"
TRUNKS = ("bf16", "q8_0", "f32")
_TYPES = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: its shape as NumPy has it, how it is stored, and what makes its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    make: Callable[[], Array]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape of the stored bytes."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // block * size)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.byte_shape, dtype=np.int64))


class Converter:
    """The tensors of one checkpoint as llama.cpp's graph of K3 names and shapes them."""

    def __init__(self, checkpoint: Checkpoint, trunk: str) -> None:
        if trunk not in TRUNKS:
            raise ValueError(f"trunk is {trunk!r}; expected one of {TRUNKS}")
        if not checkpoint.config.mla_use_nope:
            raise ValueError("llama.cpp's graph of K3 rotates nothing; expected mla_use_nope")
        self.checkpoint, self.trunk, self.config = checkpoint, trunk, checkpoint.config

    # how a tensor is stored ------------------------------------------------------------------

    def _matrix(
        self, name: str, source: str, shape: tuple[int, ...], turn: Callable[[Array], Array]
    ) -> Tensor:
        narrow = self.checkpoint.tensor(source).dtype == np.uint16
        kind = _TYPES.BF16 if self.trunk == "bf16" and narrow else _TYPES.F32
        if self.trunk == "q8_0" and shape[-1] % 32 == 0:
            kind = _TYPES.Q8_0

        def make() -> Array:
            stored = np.ascontiguousarray(turn(self.checkpoint.tensor(source)))
            if kind == _TYPES.Q8_0:
                return q8_0(widened(stored))
            return (stored if kind == _TYPES.BF16 else widened(stored)).view(np.uint8)

        return Tensor(name, shape, kind, make)

    def matrix(self, name: str, source: str) -> Tensor:
        """A matrix as it is."""
        return self._matrix(name, source, self.checkpoint.tensor(source).shape, lambda a: a)

    def vector(self, name: str, values: Array, shape: tuple[int, ...] | None = None) -> Tensor:
        """Something small, as float32."""
        flat = np.ascontiguousarray(values, np.float32).reshape(shape or (-1,))
        return Tensor(name, flat.shape, _TYPES.F32, lambda: flat.view(np.uint8))

    def stored_vector(self, name: str, source: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A vector of the checkpoint, as float32."""
        return self.vector(name, widened(self.checkpoint.tensor(source)), shape)

    def mix(self, name: str, source: str) -> Tensor:
        """The vector of an AttnRes site: its norm times its projection."""
        norm, proj = (widened(self.checkpoint.tensor(f"{source}_{part}.weight")) for part in ("norm", "proj"))
        return self.vector(name, norm.reshape(-1) * proj.reshape(-1))

    # the graph -------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        c = self.config
        yield self.matrix("token_embd.weight", "model.embed_tokens.weight")
        for i in range(c.num_hidden_layers):
            to, at = f"blk.{i}.", f"model.layers.{i}."
            yield self.stored_vector(to + "attn_norm.weight", at + "input_layernorm.weight")
            yield self.stored_vector(to + "ffn_norm.weight", at + "post_attention_layernorm.weight")
            yield self.mix(to + "attn_res_score.weight", at + "self_attention_res")
            yield self.mix(to + "ffn_res_score.weight", at + "mlp_res")
            yield from (self.kda if c.is_kda(i) else self.mla)(to, at + "self_attn.")
            yield from (self.moe if c.is_moe(i) else self.dense)(to, at)
        yield self.stored_vector("output_norm.weight", "model.norm.weight")
        yield self.mix("output_res_score.weight", "model.output_attn_res")
        yield self.matrix(
            "output.weight", "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        )

    def kda(self, to: str, at: str) -> Iterator[Tensor]:
        """A KDA layer's attention."""
        c = self.config
        for n in "qkv":
            yield self.matrix(f"{to}attn_{n}.weight", f"{at}{n}_proj.weight")
            conv = self.checkpoint.tensor(f"{at}{n}_conv1d.weight")
            yield self.stored_vector(
                f"{to}ssm_conv1d_{n}.weight", f"{at}{n}_conv1d.weight", (1, conv.shape[0], 1, conv.shape[-1])
            )
        for name, source in (("ssm_f_a", "f_a_proj"), ("ssm_f_b", "f_b_proj"), ("ssm_beta", "b_proj"),
                             ("ssm_g", "g_proj"), ("attn_output", "o_proj")):  # fmt: skip
            yield self.matrix(f"{to}{name}.weight", f"{at}{source}.weight")
        A_log = widened(self.checkpoint.tensor(at + "A_log")).reshape(-1)[: c.kda_num_heads]
        yield self.vector(to + "ssm_a", -np.exp(A_log.astype(np.float64)))
        yield self.stored_vector(to + "ssm_dt.bias", at + "dt_bias")
        yield self.stored_vector(to + "ssm_norm.weight", at + "o_norm.weight")

    def mla(self, to: str, at: str) -> Iterator[Tensor]:
        """An MLA layer's attention: both halves of kv_b_proj apart, the one for keys turned over."""
        c = self.config
        heads, nope, v = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
        yield self.stored_vector(to + "attn_q_a_norm.weight", at + "q_a_layernorm.weight")
        yield self.stored_vector(to + "attn_kv_a_norm.weight", at + "kv_a_layernorm.weight")
        for name, source in (("attn_q_a", "q_a_proj"), ("attn_q_b", "q_b_proj"),
                             ("attn_kv_a_mqa", "kv_a_proj_with_mqa"), ("attn_output", "o_proj")):  # fmt: skip
            yield self.matrix(f"{to}{name}.weight", f"{at}{source}.weight")
        if c.mla_use_output_gate:
            yield self.matrix(to + "attn_gate.weight", at + "g_proj.weight")

        def halves(a: Array) -> Array:
            return a.reshape(heads, nope + v, c.kv_lora_rank)

        source = at + "kv_b_proj.weight"
        yield self._matrix(to + "attn_k_b.weight", source, (heads, c.kv_lora_rank, nope),
                           lambda a: halves(a)[:, :nope].transpose(0, 2, 1))  # fmt: skip
        yield self._matrix(
            to + "attn_v_b.weight", source, (heads, v, c.kv_lora_rank), lambda a: halves(a)[:, nope:]
        )

    def dense(self, to: str, at: str) -> Iterator[Tensor]:
        """A dense MLP."""
        for name in ("gate", "up", "down"):
            yield self.matrix(f"{to}ffn_{name}.weight", f"{at}mlp.{name}_proj.weight")

    def moe(self, to: str, at: str) -> Iterator[Tensor]:
        """Router, latent projections, shared and routed experts."""
        c = self.config
        moe = at + "block_sparse_moe."
        yield self.router(to + "ffn_gate_inp.weight", moe + "gate.weight")
        yield self.stored_vector(to + "exp_probs_b.bias", moe + "gate.e_score_correction_bias")
        yield self.matrix(to + "ffn_routed_down.weight", moe + "routed_expert_down_proj.weight")
        yield self.matrix(to + "ffn_routed_up.weight", moe + "routed_expert_up_proj.weight")
        if c.latent_moe_use_norm:
            yield self.stored_vector(to + "ffn_routed_norm.weight", moe + "routed_expert_norm.weight")
        for name in ("gate", "up", "down") if c.num_shared_experts else ():
            yield self.matrix(f"{to}ffn_{name}_shexp.weight", f"{moe}shared_experts.{name}_proj.weight")
        latent, inner = c.routed_expert_hidden_size, c.moe_intermediate_size
        for name, w, shape in (("gate", "w1", (inner, latent)), ("down", "w2", (latent, inner)),
                               ("up", "w3", (inner, latent))):  # fmt: skip
            yield self.experts(f"{to}ffn_{name}_exps.weight", moe, w, shape)

    def router(self, name: str, source: str) -> Tensor:
        """The router: float32, as llama.cpp's converter stores it, so that the same experts are chosen."""
        stored = self.checkpoint.tensor(source)
        return Tensor(name, stored.shape, _TYPES.F32, lambda: widened(stored).view(np.uint8))

    def experts(self, name: str, moe: str, w: str, shape: tuple[int, int]) -> Tensor:
        """All experts of a layer in one tensor."""
        E = self.config.num_experts
        first = f"{moe}experts.0.{w}.weight"
        packed = first + "_packed" in self.checkpoint.names
        exact = self.trunk == "f32"

        def make() -> Array:
            rows = []
            for e in range(E):
                at = f"{moe}experts.{e}.{w}.weight"
                if packed:
                    parts = self.checkpoint.tensor(at + "_packed"), self.checkpoint.tensor(at + "_scale")
                    rows.append(mxfp4_values(*parts).view(np.uint8) if exact else mxfp4_blocks(*parts))
                else:
                    stored = np.ascontiguousarray(self.checkpoint.tensor(at))
                    rows.append((widened(stored) if exact else stored).view(np.uint8))
            return np.stack(rows)

        if packed:
            kind = _TYPES.F32 if exact else _TYPES.MXFP4
        else:
            kind = (
                _TYPES.BF16 if self.checkpoint.tensor(first).dtype == np.uint16 and not exact else _TYPES.F32
            )
        return Tensor(name, (E, *shape), kind, make)


def describe(writer: gguf.GGUFWriter, c: K3Config) -> None:
    """The hyperparameters, under the keys that llama.cpp reads."""
    kv = [0 if c.is_kda(i) else 1 for i in range(c.num_hidden_layers)]
    whole = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "rope.dimension_count": c.qk_rope_head_dim,
        "ssm.conv_kernel": c.short_conv_kernel_size,
        "kda.head_dim": c.kda_head_dim,
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_token,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_count": c.num_shared_experts,
        "leading_dense_block_count": sum(not c.is_moe(i) for i in range(c.num_hidden_layers)),
        "expert_gating_func": 2,  # sigmoid
        "expert_latent_length": c.routed_expert_hidden_size,
        "attn_res.block_size": c.attn_res_block_size,
    }
    real = {
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "kda.gate_lower_bound": c.gate_lower_bound,
        "expert_weights_scale": c.routed_scaling_factor,
        "activation.situ_beta": c.activation_situ_beta,
        "activation.situ_linear_beta": c.activation_situ_linear_beta,
    }
    for key, value in whole.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
    for key, number in real.items():
        if number is not None:
            writer.add_float32(f"{ARCHITECTURE}.{key}", number)
    writer.add_bool(f"{ARCHITECTURE}.expert_weights_norm", c.moe_renormalize)
    writer.add_array(f"{ARCHITECTURE}.attention.head_count_kv", kv)
    writer.add_string("tokenizer.ggml.model", "none")  # token ids go in and logits come out


def in_large_pieces(source: Path, target: Path) -> None:
    """Copy a file so that the page cache has it in large pages, as it has what `synth` writes: they are read faster."""
    with open(source, "rb") as reading, open(target, "wb") as writing:
        while piece := reading.read(32 << 20):
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())


def write(folder: str | os.PathLike[str], path: Path, trunk: str) -> dict[str, int]:
    """Write a checkpoint folder as one GGUF file, once; returns the bytes of its parts.

    The parts are ``trunk`` (what every token reads), ``experts`` (what a token reads of them) and ``file``.
    """
    note = path.with_suffix(".json")
    if path.exists() and note.exists():
        return dict(json.loads(note.read_text(encoding="utf-8")))
    part = path.with_suffix(".part")
    with Checkpoint.open(folder) as checkpoint:
        converter = Converter(checkpoint, trunk)
        tensors = list(converter.tensors())
        writer = gguf.GGUFWriter(part, ARCHITECTURE)
        describe(writer, checkpoint.config)
        for t in tensors:
            writer.add_tensor_info(t.name, t.byte_shape, np.dtype(np.uint8), t.nbytes, raw_dtype=t.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for t in tensors:
            writer.write_tensor_data(t.make())
        writer.close()
        E, T = checkpoint.config.num_experts, checkpoint.config.num_experts_per_token
    experts = sum(t.nbytes for t in tensors if "_exps." in t.name)
    skipped = sum(t.nbytes for t in tensors if t.name.startswith("token_embd"))
    whole = sum(t.nbytes for t in tensors)
    sizes = {"trunk": whole - experts - skipped, "experts": experts * T // E, "file": part.stat().st_size}
    in_large_pieces(part, path)
    part.unlink()
    note.write_text(json.dumps(sizes) + "\n", encoding="utf-8")
    return sizes
