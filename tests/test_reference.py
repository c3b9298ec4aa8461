# SPDX-License-Identifier: MIT
"""The float64 reference against the golden data, and against itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_data import SHAKESPEARE, SPLIT, TINY, Tensor, chunked, golden, relative

from k3session import reference
from k3session.checkpoint import Checkpoint
from k3session.errors import InvalidTokenError
from k3session.reference import Reference, State

# The golden is float32: at 150 tokens its logits are 2.4e-5 from exact, values inside it up to 5.4e-5.
LENGTHS = [
    pytest.param("golden", 1.5e-5, 1.5e-5, id="24"),
    pytest.param("golden_long", 3e-5, 6e-5, id="150"),
]
EXACT = 1e-12
SHIPPED = reference.__file__.replace("reference.py", "models/k3-shakespeare")


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(TINY) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return golden("tiny_k3/golden")["tokens"]


def run(model: Reference, tokens: Tensor, **options: Any) -> tuple[Tensor, State, dict[str, Tensor]]:
    taps: dict[str, Tensor] = {}
    state = model.new_state()
    return model.forward(tokens, state, taps=taps, **options), state, taps


# ---------------------------------------------------------------- against the golden


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize(("name", "bound", "inner"), LENGTHS)
def test_logits(checkpoint: Checkpoint, name: str, bound: float, inner: float, absorbed: bool) -> None:
    expected = golden(f"tiny_k3/{name}")
    logits, _, _ = run(Reference(checkpoint, mla_absorbed=absorbed), expected["tokens"])
    for key in ("logits", "logits_split"):
        assert relative(logits, expected[key]) < bound, key
        assert np.array_equal(logits.argmax(-1), expected[key].argmax(-1)), key


@pytest.mark.parametrize(("name", "bound", "inner"), LENGTHS)
def test_values_inside(checkpoint: Checkpoint, name: str, bound: float, inner: float) -> None:
    expected = golden(f"tiny_k3/{name}")
    _, _, taps = run(Reference(checkpoint), expected["tokens"])
    assert np.array_equal(taps["route_ids"], expected.pop("route_ids"))
    common = sorted(taps.keys() & expected.keys())
    assert {"attn_x", "attn_out", "ffn_x", "ffn_out", "layer_out", "mla_latent", "final_mix"} <= set(common)
    errors = {key: relative(taps[key], expected[key]) for key in common}
    assert not {key: error for key, error in errors.items() if error >= inner}
    assert name != "golden" or not set(taps) - set(common) - {"margin", "route_ids"}


@pytest.mark.parametrize("chunks", ["prefill", "steps"])
@pytest.mark.parametrize(("name", "bound", "inner"), LENGTHS)
def test_state_afterwards(checkpoint: Checkpoint, name: str, bound: float, inner: float, chunks: str) -> None:
    expected = golden(f"tiny_k3/{name}")
    model = Reference(checkpoint)
    state = model.new_state()
    for part in [expected["tokens"]] if chunks == "prefill" else expected["tokens"][:, None]:
        model.forward(part, state)
    assert state.position == len(expected["tokens"])
    kda = [state.layers[i] for i in expected["kda_layers"]]
    mla = [state.layers[i] for i in expected["mla_layers"]]
    # Stored [value, key]; four columns per channel, of which the oldest is dead.
    recurrent = np.swapaxes(expected["kda_state_vk"], -1, -2)
    conv = np.swapaxes(expected["kda_conv"][..., 1:], -1, -2)
    assert relative(np.stack([layer.state for layer in kda]), recurrent) < bound
    assert relative(np.stack([layer.conv for layer in kda]), conv) < bound
    rank = checkpoint.config.kv_lora_rank
    latent = np.concatenate([expected["mla_latent"], expected["mla_kva"][..., rank:]], -1)
    assert relative(np.stack([layer.latent for layer in mla], 1), latent) < inner


def test_cached_rows_hold_the_keys_and_values(checkpoint: Checkpoint, tokens: Tensor) -> None:
    expected = golden("tiny_k3/golden")
    c = checkpoint.config
    model = Reference(checkpoint)
    _, state, _ = run(model, tokens)
    for j, i in enumerate(expected["mla_layers"]):
        latent = state.layers[i].latent
        kv = model.linear(latent[:, : c.kv_lora_rank], f"model.layers.{i}.self_attn.kv_b_proj.weight")
        kv = np.swapaxes(kv.reshape(len(tokens), c.num_attention_heads, -1), 0, 1)
        shared = np.broadcast_to(latent[:, c.kv_lora_rank :], (*kv.shape[:2], c.qk_rope_head_dim))
        key = np.concatenate([kv[..., : c.qk_nope_head_dim], shared], -1)
        assert relative(key, expected["mla_key"][j]) < 1.5e-5
        assert relative(kv[..., c.qk_nope_head_dim :], expected["mla_value"][j]) < 1.5e-5


def test_the_model_that_ships() -> None:
    """Logits of an independent float32 implementation, and its greedy continuation."""
    expected = golden("shakespeare/golden")
    with Checkpoint.open(SHIPPED) as opened:
        model = Reference(opened)
        logits, _, _ = run(model, expected["tokens"])
        assert relative(logits, expected["logits"]) < 1e-6
        state = model.new_state()
        last = model.forward(expected["prompt"], state)[-1]
        for token in expected["greedy"]:
            assert last.argmax() == token
            last = model.forward([token], state)[-1]


def test_the_held_out_text_is_here() -> None:
    assert (SHAKESPEARE / "heldout_macbeth.txt").read_text(encoding="utf-8").startswith("MACBETH\n")


# ---------------------------------------------------------------- against itself


@pytest.mark.parametrize("chunks", [(1,) * 24, SPLIT, (3, 1, 20), (23, 1), (2, 2, 2, 2, 16)], ids=str)
@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
def test_chunks_do_not_matter(
    checkpoint: Checkpoint, tokens: Tensor, chunks: tuple[int, ...], absorbed: bool
) -> None:
    whole, _, _ = run(Reference(checkpoint), tokens)
    assert relative(chunked(Reference(checkpoint, mla_absorbed=absorbed), tokens, chunks), whole) < EXACT


def test_a_state_can_be_copied_and_continued(checkpoint: Checkpoint, tokens: Tensor) -> None:
    model = Reference(checkpoint)
    state = model.new_state()
    model.forward(tokens[:10], state)
    other = copy.deepcopy(state)
    first = model.forward(tokens[10:], state)
    assert np.array_equal(first, model.forward(tokens[10:], other))


def test_weights_need_not_be_kept(checkpoint: Checkpoint, tokens: Tensor) -> None:
    kept, _, _ = run(Reference(checkpoint), tokens[:3])
    assert np.array_equal(kept, run(Reference(checkpoint, keep_weights=False), tokens[:3])[0])


def test_embeddings_take_the_place_of_tokens(checkpoint: Checkpoint, tokens: Tensor) -> None:
    model = Reference(checkpoint)
    expected, _, taps = run(model, tokens)
    found = model.forward(None, model.new_state(), embeddings=taps["embed"].astype(np.float32))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("bad", [[], [-1], [256], [1.0], [[1]], None, "1"])
def test_what_is_no_token_is_refused(checkpoint: Checkpoint, bad: Any) -> None:
    model = Reference(checkpoint)
    state = model.new_state()
    with pytest.raises(InvalidTokenError, match="0 to 255"):
        model.forward(bad, state)
    assert state.position == 0


# ---------------------------------------------------------------- routes and margins


def test_margins_are_what_the_golden_was_made_with(checkpoint: Checkpoint) -> None:
    expected = golden("tiny_k3/golden_long")
    _, _, taps = run(Reference(checkpoint), expected["tokens"])
    assert taps["margin"].shape == (150, 8)
    assert np.isposinf(taps["margin"][:, 0]).all()  # layer 0 is dense
    assert 0.02 <= taps["margin"].min() < 0.03


def test_forcing_the_own_routes_changes_nothing(checkpoint: Checkpoint, tokens: Tensor) -> None:
    expected, _, taps = run(Reference(checkpoint), tokens)
    for routes in (taps["route_ids"], taps["route_ids"][..., ::-1]):
        found, _, again = run(Reference(checkpoint), tokens, routes=routes)
        assert np.array_equal(again["route_ids"], taps["route_ids"])
        assert relative(found, expected) < EXACT


def test_routes_can_be_forced(checkpoint: Checkpoint, tokens: Tensor) -> None:
    expected, _, taps = run(Reference(checkpoint), tokens)
    routes = taps["route_ids"].copy()
    routes[5, 4] = (routes[5, 4] + 1) % 8
    found, _, forced = run(Reference(checkpoint), tokens, routes=routes)
    assert np.array_equal(np.sort(forced["route_ids"], -1), np.sort(routes, -1))
    assert np.array_equal(forced["margin"][:, :5], taps["margin"][:, :5])  # the router's own
    assert relative(found[:5], expected[:5]) < EXACT
    assert relative(found[5:], expected[5:]) > 1e-3


# ---------------------------------------------------------------- the worked example of AttnRes

WORKED = {
    "model.layers.0.self_attention_res": "E",
    "model.layers.0.mlp_res": "E, a0",
    "model.layers.1.self_attention_res": "E, a0+f0",
    "model.layers.1.mlp_res": "E, a0+f0+a1",
    "model.layers.2.self_attention_res": "E, a0+f0+a1+f1",
    "model.layers.2.mlp_res": "E, a0+f0+a1+f1, a2",
    "model.layers.3.self_attention_res": "E, a0+f0+a1+f1, a2+f2",
    "model.layers.3.mlp_res": "E, a0+f0+a1+f1, a2+f2+a3",
    "model.layers.4.self_attention_res": "E, a0+f0+a1+f1, a2+f2+a3+f3",
    "model.layers.4.mlp_res": "E, a0+f0+a1+f1, a2+f2+a3+f3, a4",
    "model.layers.5.self_attention_res": "E, a0+f0+a1+f1, a2+f2+a3+f3, a4+f4",
    "model.layers.5.mlp_res": "E, a0+f0+a1+f1, a2+f2+a3+f3, a4+f4+a5",
    "model.output_attn_res": "E, a0+f0+a1+f1, a2+f2+a3+f3, a4+f4+a5+f5",
}
"""The sources of each mix with six layers and a block size of 2; E is the embedding row."""


class Mixes(Reference):
    """Writes down the sources of every mix."""

    sources: dict[str, list[Tensor]]

    def mix(self, bank: list[Tensor], s: Tensor, name: str) -> Tensor:
        self.sources[name] = [*bank, s]
        return super().mix(bank, s, name)


def test_sources_of_the_mixes(checkpoint: Checkpoint, tokens: Tensor) -> None:
    model = Mixes(checkpoint)
    model.config = replace(
        checkpoint.config,
        attn_res_block_size=2,
        num_hidden_layers=6,
        kda_layers=(0, 1, 2, 4, 5),
        full_attn_layers=(3,),
    )
    model.sources = {}
    _, _, taps = run(model, tokens[:4])
    values = {"E": taps["embed"]}
    for i in range(6):
        values |= {f"a{i}": taps["attn_out"][:, i], f"f{i}": taps["ffn_out"][:, i]}
    assert model.sources.keys() == WORKED.keys()
    for name, terms in WORKED.items():
        expected = [np.sum([values[term] for term in source.split("+")], 0) for source in terms.split(", ")]
        assert len(model.sources[name]) == len(expected), name
        assert relative(np.stack(model.sources[name]), np.stack(expected)) < EXACT, name
    assert len(taps["bank"][0]) == 3
