# SPDX-License-Identifier: MIT
"""Members of the family, storage formats and inputs at the edge, in the compiled graph.

The float64 reference is held against other evidence in ``test_reference_variants.py``; here the core is held
against the reference, and against spellings of the same model that must give the same bits.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_access import core, disagreements, inner_values
from device import EMULATED
from golden_data import TINY, Tensor, altered, golden, relative
from ops_tools import ISAS, every_isa, same_bits

import k3session as k3
from k3session.checkpoint import Checkpoint
from k3session.dtypes import bf16_to_f32, f32_to_bf16, mxfp4_to_f64, to_f64
from k3session.presets import PRESETS
from k3session.reference import LayerState, Reference, State
from k3session.synth import synth

TOKENS: Tensor = golden("tiny_k3/golden")["tokens"][: 6 if EMULATED else 24]
N = len(TOKENS)
MLA = (3, 6, 7)

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], None]


def logits(folder: Path, isa: str = ISAS[-1]) -> Tensor:
    with core(folder, isa=isa) as c:
        return c.run(TOKENS).logits


# ---------------------------------------------------------------- switches of the config


def drop(*parts: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if any(p in n for p in parts)]:
            del tensors[name]

    return edit


def drop_mla_gate(tensors: Tensors) -> None:
    for i in MLA:
        del tensors[f"model.layers.{i}.self_attn.g_proj.weight"]


def quiet(tensors: Tensors) -> None:
    """Expert sums near the root of the norm's eps, so that a common factor shows in the logits."""
    for name in tensors:
        if name.endswith(".w2.weight_scale"):
            tensors[name] -= np.uint8(12)


VARIANTS: dict[str, tuple[dict[str, Any], Edit | None]] = {
    "as it is": ({}, None),
    "softplus decay": ({"linear_attn_config.gate_lower_bound": None}, None),
    "another bound": ({"linear_attn_config.gate_lower_bound": -0.5}, None),
    "rotary": ({"mla_use_nope": False, "rope_theta": 10000.0}, None),
    "rotary, small theta": ({"mla_use_nope": False, "rope_theta": 50.0}, None),
    "no output gate": ({"mla_use_output_gate": False}, drop_mla_gate),
    "no latent norm": ({"latent_moe_use_norm": False}, drop("routed_expert_norm")),
    "no renormalisation": ({"moe_renormalize": False}, quiet),
    "scaled": ({"routed_scaling_factor": 2.5}, quiet),
    "tied": ({"tie_word_embeddings": True}, drop("lm_head")),
    "blocks of one layer": ({"attn_res_block_size": 1}, None),
    "one block": ({"attn_res_block_size": 8}, None),
    "a block longer than the model": ({"attn_res_block_size": 100}, None),
    "one expert": ({"num_experts_per_token": 1}, None),
    "all experts": ({"num_experts_per_token": 8}, None),
    "tight SiTU": ({"activation_situ_beta": 0.5, "activation_situ_linear_beta": 0.25}, None),
    "wide norm eps": ({"rms_norm_eps": 1e-2}, None),
    "another latent eps": ({"mla_latent_norm_eps": 1e-2}, None),
}


@cache
def plain(quietly: bool, isa: str) -> Tensor:
    """Logits without the switch."""
    with tempfile.TemporaryDirectory() as folder:
        return logits(altered(Path(folder) / "plain", edit=quiet if quietly else None), isa)


@every_isa
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, isa: str, tmp_path: Path) -> None:
    """It agrees with the reference, and it is not the model without the switch."""
    config, edit = VARIANTS[name]
    with core(altered(tmp_path / "model", config=config, edit=edit), isa=isa) as c:
        run = c.run(TOKENS, taps=True, poison=True)
        assert not disagreements(c, TOKENS, run)
        same_bits(c.run(TOKENS, [7, 1, 1, 15] if N == 24 else [4, 1, 1], poison=True).logits, run.logits)
    assert name == "as it is" or relative(run.logits, plain(edit is quiet, isa)) > 1e-4


# ---------------------------------------------------------------- storage


def unpack_experts(convert: Callable[[Tensor], Tensor]) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_packed")]:
            base = name.removesuffix("_packed")
            tensors[base] = convert(mxfp4_to_f64(tensors.pop(name), tensors.pop(f"{base}_scale")))

    return edit


def widen_trunk(tensors: Tensors) -> None:
    for name, array in tensors.items():
        if array.dtype == np.uint16:
            tensors[name] = bf16_to_f32(array)


def copy_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


@every_isa
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(unpack_experts(f32_to_bf16), id="experts-bf16"),
        pytest.param(unpack_experts(lambda w: w.astype(np.float32)), id="experts-f32"),
        pytest.param(widen_trunk, id="trunk-f32"),
    ],
)
def test_storage_is_another_order_of_summation_at_most(edit: Edit, isa: str, tmp_path: Path) -> None:
    """The same values stored otherwise: the same model, and each storage the same bits in every chunking."""
    with core(altered(tmp_path / "model", edit=edit), isa=isa) as c:
        run = c.run(TOKENS, taps=True)
        assert not disagreements(c, TOKENS, run)
        same_bits(c.run(TOKENS, [1] * N, poison=True).logits, run.logits)
    assert relative(run.logits, logits(TINY, isa)) < 2e-5


@every_isa
def test_tied_embeddings_are_a_head_with_the_same_values(isa: str, tmp_path: Path) -> None:
    untied = altered(tmp_path / "untied", edit=copy_head)
    tied = altered(tmp_path / "tied", edit=drop("lm_head"), config={"tie_word_embeddings": True})
    same_bits(logits(tied, isa), logits(untied, isa))


def test_values_behind_the_head_count_of_a_log_do_not_matter(tmp_path: Path) -> None:
    """Padded with zeros, as released, or not padded at all."""

    def cut(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("A_log"):
                tensors[name] = tensors[name].ravel()[:3].copy()

    same_bits(logits(altered(tmp_path / "model", edit=cut)), logits(TINY))


def test_experts_in_a_different_order_on_disk(tmp_path: Path) -> None:
    """Where a tensor lies in the file, aligned or not, changes nothing."""

    def reverse(tensors: Tensors) -> None:
        items = list(tensors.items())[::-1]
        tensors.clear()
        tensors.update(items)

    same_bits(logits(altered(tmp_path / "model", edit=reverse)), logits(TINY))


# ---------------------------------------------------------------- positions


@every_isa
@pytest.mark.parametrize("rotary", [False, True], ids=["nope", "rotary"])
def test_a_token_a_thousand_positions_later(rotary: bool, isa: str, tmp_path: Path) -> None:
    """The reference, told so, gives what the core gives where it is: unless the config asks for rotation."""
    config = {"mla_use_nope": not rotary, "rope_theta": 10000.0}
    with core(altered(tmp_path / "model", config=config), isa=isa) as c:
        before = c.run(TOKENS[:-1])
        empty = np.zeros(0)
        layers = [
            LayerState(
                **(
                    {"conv": empty, "state": empty, "latent": empty}
                    | {k: np.float64(v) for k, v in d.items()}
                )
            )
            for d in before.state
        ]
        found = c.run(TOKENS[-1:], timeline=before.timeline).logits
        here, later = (
            Reference(c.checkpoint).forward(TOKENS[-1:], State(N - 1 + shift, copy.deepcopy(layers)))
            for shift in (0, 1000)
        )
    assert relative(found, here) < 2e-5
    assert (relative(found, later) > 1e-3) if rotary else np.array_equal(later, here)


# ---------------------------------------------------------------- Attention Residuals

SOURCES = [
    # layers 0 to 4, block size 2: sources of the mix before the mixer, and before the FFN
    (1, 2),  # E | E, a0
    (2, 2),  # E, a0 + f0 | E, a0 + f0 + a1
    (2, 3),  # E, b0 | E, b0, a2
    (3, 3),  # E, b0, a2 + f2 | E, b0, a2 + f2 + a3
    (3, 4),  # E, b0, b1 | E, b0, b1, a4
]


@every_isa
def test_the_block_size_counts_layers(isa: str, tmp_path: Path) -> None:
    config = replace(
        PRESETS["nano"],
        num_hidden_layers=5,
        kda_layers=(0, 1, 2, 4),
        full_attn_layers=(3,),
        attn_res_block_size=2,
    )
    tokens = TOKENS % config.vocab_size
    with core(synth(tmp_path / "model", config), isa=isa) as c:
        run = c.run(tokens, taps=True)
        assert not disagreements(c, tokens, run)
        t = {k: np.float64(v) for k, v in inner_values(c, run).items()}
    for site, which in (("attn_weights", 0), ("ffn_weights", 1)):
        weights = run.taps[site]
        counted = (~np.isnan(weights)).sum(-1)
        assert (counted == [row[which] for row in SOURCES]).all()
        assert np.abs(np.nansum(weights, -1) - 1).max() < 1e-6
    # The eleventh mix is the head's, over E, b0, b1 and what runs since: by its values, above, and by hand here.
    bank = [
        t["embed"],
        *(t["attn_out"][:, i : i + 2].sum(1) + t["ffn_out"][:, i : i + 2].sum(1) for i in (0, 2)),
    ]
    last = t["attn_out"][:, 4] + t["ffn_out"][:, 4]
    basis = np.stack([*bank, last], 1)
    for row, mix in zip(basis, t["final_mix"], strict=True):
        share, *_ = np.linalg.lstsq(row.T, mix, rcond=None)
        assert np.abs(share @ row - mix).max() < 1e-5 and abs(share.sum() - 1) < 1e-5 and (share > 0).all()


# ---------------------------------------------------------------- decay


@pytest.mark.parametrize("shift", [-3.0, -1.0, 0.0, 1.0, 3.0])
def test_prefill_at_any_speed_of_decay(shift: float, tmp_path: Path) -> None:
    """From next to no decay to e^-5 a token: prefill and steps agree to the bit, and with the reference."""

    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("dt_bias"):
                tensors[name] += np.float32(shift)

    tokens = golden("tiny_k3/golden_long")["tokens"]
    most = 5 if EMULATED else 200
    tokens = np.concatenate([tokens, tokens[:50]])[:most]
    with core(altered(tmp_path / "model", edit=edit), rows=most) as c:
        steps = c.run(tokens, [1] * most)
        for n in [n for n in (1, 2, 15, 16, 17, 63, 64, 65, 200) if n < most] + [most]:
            same_bits(c.run(tokens[:n], poison=True).logits, steps.logits[:n])
        run = c.run(tokens, taps=True)
        for a, b in zip(run.state, steps.state, strict=True):
            for name in a:
                same_bits(a[name], b[name])
        assert not disagreements(c, tokens, run)
        decay = inner_values(c, run)["kda_decay"]
    assert np.median(decay) > 0.5 if shift < 0 else decay.min() < 0.1


# ---------------------------------------------------------------- router


@every_isa
def test_equal_scores_choose_the_lowest_ids(isa: str, tmp_path: Path) -> None:
    """The one rule for ties, for any number of rows."""

    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias")):
                tensors[name][:] = 0

    with core(altered(tmp_path / "model", edit=edit), isa=isa) as c:
        run = c.run(TOKENS, taps=True)
        assert (run.taps["route_ids"][:, 1:] == [0, 1]).all()
        assert (run.taps["route_wts"][:, 1:] == 0.5).all()
        for chunks in ([1] * N, [2] * (N // 2), [N // 4] * 3 + [N - N // 4 * 3]):
            same_bits(c.run(TOKENS, chunks).logits, run.logits)


# ---------------------------------------------------------------- values that are not finite


def nan_scale(layer: int) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if f"layers.{layer}." in name and name.endswith(".w1.weight_scale"):
                tensors[name][0, 0] = 255

    return edit


def nan_norm(name: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[name][3] = 0x7FC0

    return edit


@every_isa
@pytest.mark.parametrize(
    ("edit", "where"),
    [
        pytest.param(nan_scale(2), "model.layers.2.block_sparse_moe", id="scale code 255"),
        pytest.param(nan_norm("model.layers.3.input_layernorm.weight"), "model.layers.3.self_attn", id="mla"),
        pytest.param(nan_norm("model.layers.4.input_layernorm.weight"), "model.layers.4.self_attn", id="kda"),
        pytest.param(
            nan_norm("model.layers.0.post_attention_layernorm.weight"), "model.layers.0.mlp", id="dense"
        ),
        pytest.param(nan_norm("model.norm.weight"), "lm_head", id="head"),
    ],
)
def test_the_first_layer_that_is_not_finite_is_named(
    edit: Edit, where: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa != "cuda":  # which is found by itself
        monkeypatch.setenv("K3_ISA", isa)
    with k3.Model.open(altered(tmp_path / "model", edit=edit)) as model, model.session() as s:
        with pytest.raises(k3.NonFiniteError, match=where) as caught:
            s.prefill(TOKENS)
        assert caught.value.layer == where
        assert s.position == 0
        with pytest.raises(k3.NonFiniteError):
            s.snapshot()


@every_isa
def test_what_is_not_finite_stays_in_its_own_timeline(isa: str) -> None:
    """In one pass with others, which are committed with the bits that they would have had alone."""
    with core(TINY, isa=isa, segments=3) as c:
        alone = c.run(TOKENS)
        timelines = [c.run(TOKENS[:-4]).timeline for _ in range(3)]
        poisoned = timelines[1].layers[1].export()
        poisoned["state"][0, 0, 0] = np.nan
        arrays = [layer.export() for layer in timelines[1].layers]
        arrays[1] = poisoned
        timelines[1].replace(N - 4, arrays)
        rows = np.zeros((12, 256), np.float32)
        ids = np.tile(TOKENS[-4:], 3).astype(np.int32)
        bad = c.decoder.forward(c.scratch, timelines, [4, 4, 4], ids, None, rows, True)
        assert bad == [None, "model.layers.1.self_attn", None]
        assert [t.position for t in timelines] == [N, N - 4, N]
        for i in (0, 2):
            same_bits(rows[4 * i : 4 * i + 4], alone.logits[-4:])
            for a, b in zip(timelines[i].layers, alone.state, strict=True):
                for name, array in a.export().items():
                    same_bits(array, b[name])


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize("isa", ISAS)
def test_embeddings_in_place_of_tokens(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the table, given as embeddings, are the same tokens to the bit; alone or among tokens."""
    if isa != "cuda":  # which is found by itself
        monkeypatch.setenv("K3_ISA", isa)
    with Checkpoint.open(TINY) as checkpoint:
        rows = to_f64(checkpoint.tensor("model.embed_tokens.weight")[TOKENS]).astype(np.float32)
    with k3.Model.open(TINY) as model, model.session() as s, model.session() as t:
        expected = s.prefill(TOKENS)
        first, last = N // 4, N - 1
        t.prefill(TOKENS[:first])
        t.prefill(rows[first:last], chunk=4)
        same_bits(t.prefill(TOKENS[last:]), expected)
        assert t.tokens.tolist() == [*TOKENS[:first], *[-1] * (last - first), *TOKENS[last:]]
