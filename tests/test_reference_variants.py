# SPDX-License-Identifier: MIT
"""Members of the family that the golden data does not cover, each against something independent of it:
another spelling of the same model, or the formula written out once more over the values inside.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden_data import SPLIT, TINY, Tensor, altered, chunked, golden, relative, scale_bf16

from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.dtypes import bf16_to_f32, bf16_to_f64, f32_to_bf16, mxfp4_to_f64
from k3session.reference import Reference, State

EXACT = 1e-12
TOKENS: Tensor = golden("tiny_k3/golden")["tokens"]

Tensors = dict[str, Tensor]


def run(folder: Path) -> tuple[Tensor, State, Tensors]:
    """Logits, state and inner values; on the way, that the state crosses calls as it should."""
    taps: Tensors = {}
    with Checkpoint.open(folder) as checkpoint:
        model = Reference(checkpoint)
        state = model.new_state()
        logits = model.forward(TOKENS, state, taps=taps)
        assert np.isfinite(logits).all()
        assert relative(chunked(Reference(checkpoint, mla_absorbed=True), TOKENS, SPLIT), logits) < EXACT
    return logits, state, taps


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, State, Tensors]:
    return run(TINY)


def unpack_experts(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_packed")]:
            base = name.removesuffix("_packed")
            tensors[base] = convert(mxfp4_to_f64(tensors.pop(name), tensors.pop(f"{base}_scale")))

    return edit


def widen_trunk(tensors: Tensors) -> None:
    for name, array in tensors.items():
        if array.dtype == np.uint16:
            tensors[name] = bf16_to_f32(array)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(unpack_experts(f32_to_bf16), id="experts-bf16"),
        pytest.param(unpack_experts(lambda w: w.astype(np.float32)), id="experts-f32"),
        pytest.param(widen_trunk, id="trunk-f32"),
    ],
)
def test_storage_does_not_change_the_model(
    edit: Callable[[Tensors], None], tmp_path: Path, plain: tuple[Tensor, State, Tensors]
) -> None:
    assert np.array_equal(run(altered(tmp_path / "model", edit=edit))[0], plain[0])


def test_tied_embeddings(tmp_path: Path) -> None:
    def copy_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    def drop_head(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    untied = altered(tmp_path / "untied", edit=copy_head)
    tied = altered(tmp_path / "tied", edit=drop_head, config={"tie_word_embeddings": True})
    assert np.array_equal(run(tied)[0], run(untied)[0])


def test_mla_without_output_gate(tmp_path: Path) -> None:
    """The same as a gate that is one half everywhere, before an output projection twice as large."""

    def drop_gate(tensors: Tensors) -> None:
        for i in (3, 6, 7):
            del tensors[f"model.layers.{i}.self_attn.g_proj.weight"]

    def half_gate(tensors: Tensors) -> None:
        for i in (3, 6, 7):
            tensors[f"model.layers.{i}.self_attn.g_proj.weight"][:] = 0
            name = f"model.layers.{i}.self_attn.o_proj.weight"
            tensors[name] = scale_bf16(tensors[name], 1)

    without = altered(tmp_path / "without", edit=drop_gate, config={"mla_use_output_gate": False})
    half = altered(tmp_path / "half", edit=half_gate)
    assert relative(run(without)[0], run(half)[0]) < EXACT


def test_without_the_latent_norm(tmp_path: Path) -> None:
    def drop_norm(tensors: Tensors) -> None:
        for name in [name for name in tensors if "routed_expert_norm" in name]:
            del tensors[name]

    folder = altered(tmp_path / "model", edit=drop_norm, config={"latent_moe_use_norm": False})
    _, _, taps = run(folder)
    with Checkpoint.open(folder) as checkpoint:
        for j in range(7):
            name = f"model.layers.{j + 1}.block_sparse_moe.routed_expert_up_proj.weight"
            up = bf16_to_f64(checkpoint.tensor(name))
            assert relative(taps["moe_routed"][:, j], taps["moe_agg"][:, j] @ up.T) < EXACT


def test_without_renormalisation(tmp_path: Path, plain: tuple[Tensor, State, Tensors]) -> None:
    """Layer 1 has the same input as before: its weights are the scores, and no longer sum to 1."""
    folder = altered(tmp_path / "model", config={"moe_renormalize": False})
    found = run(folder)[2]["route_wts"][:, 1]
    with Checkpoint.open(folder) as checkpoint:
        gate = bf16_to_f64(checkpoint.tensor("model.layers.1.block_sparse_moe.gate.weight"))
    score = 1 / (1 + np.exp(-plain[2]["ffn_x"][:, 1] @ gate.T))
    chosen = np.take_along_axis(score, plain[2]["route_ids"][:, 1], -1)
    assert relative(found, chosen) < EXACT
    assert relative(chosen / chosen.sum(-1, keepdims=True), plain[2]["route_wts"][:, 1]) < EXACT


@pytest.mark.parametrize("bound", [None, -5.0, -0.5])
def test_decay(bound: float | None, tmp_path: Path) -> None:
    """The recurrence, written out per head over the values inside the first KDA layer."""
    folder = altered(tmp_path / "model", config={"linear_attn_config.gate_lower_bound": bound})
    _, state, taps = run(folder)
    with Checkpoint.open(folder) as checkpoint:
        a_log = np.float64(checkpoint.tensor("model.layers.0.self_attn.A_log")).ravel()
        bias = np.float64(checkpoint.tensor("model.layers.0.self_attn.dt_bias")).reshape(3, 32)
    for h in range(3):
        s = np.zeros((32, 32))
        for t in range(len(TOKENS)):
            q, k, v, z = (
                taps[f"kda_{kind}"][t, 0].reshape(3, 32)[h] for kind in ("q_conv", "k_conv", "v_conv", "graw")
            )
            q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(32)
            k = k / np.sqrt(k @ k + 1e-6)
            z = z + bias[h]
            if bound is None:
                g = -np.exp(a_log[h]) * np.log1p(np.exp(z))
            else:
                g = bound / (1 + np.exp(-np.exp(a_log[h]) * z))
            s = np.diag(np.exp(g)) @ s
            beta = 1 / (1 + np.exp(-taps["kda_braw"][t, 0, h]))
            s = s + beta * np.outer(k, v - s.T @ k)
            assert np.allclose(s.T @ q, taps["kda_o"][t, 0, h], rtol=1e-10, atol=1e-12)
        assert np.allclose(s, state.layers[0].state[h], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("theta", [None, 10000.0, 50.0])
def test_rotary_channels(theta: float | None, tmp_path: Path) -> None:
    """Attention of the first MLA layer written out, a pair of channels as one complex number."""
    config = {} if theta is None else {"mla_use_nope": False, "rope_theta": theta}
    folder = altered(tmp_path / "model", config=config)
    c = K3Config.from_dir(folder)
    _, state, taps = run(folder)
    n, half = len(TOKENS), c.qk_rope_head_dim // 2

    def turned(x: Tensor) -> Tensor:
        angle = np.arange(n)[:, None] * (0.0 if theta is None else theta ** -(np.arange(half) / half))
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    with Checkpoint.open(folder) as checkpoint:
        kv_b = bf16_to_f64(checkpoint.tensor("model.layers.3.self_attn.kv_b_proj.weight"))
        w_g = bf16_to_f64(checkpoint.tensor("model.layers.3.self_attn.g_proj.weight"))
    latent = taps["mla_latent"][:, 0]
    k_r = turned(taps["mla_kva"][:, 0, c.kv_lora_rank :])
    assert relative(state.layers[3].latent, np.concatenate([latent, k_r], -1)) < EXACT
    kv = (latent @ kv_b.T).reshape(n, c.num_attention_heads, -1)
    out = []
    for h in range(c.num_attention_heads):
        q = taps["mla_q"][:, 0].reshape(n, c.num_attention_heads, -1)[:, h]
        q = np.concatenate([q[:, : c.qk_nope_head_dim], turned(q[:, c.qk_nope_head_dim :])], -1)
        k = np.concatenate([kv[:, h, : c.qk_nope_head_dim], k_r], -1)
        p = np.tril(np.exp(q @ k.T / np.sqrt(q.shape[-1])))
        out.append(p / p.sum(-1, keepdims=True) @ kv[:, h, c.qk_nope_head_dim :])
    gate = 1 / (1 + np.exp(-taps["attn_x"][:, 3] @ w_g.T))
    assert relative(taps["mla_gated"][:, 0], np.concatenate(out, -1) * gate) < EXACT
