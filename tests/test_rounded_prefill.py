# SPDX-License-Identifier: MIT
"""prefill_precision="bf16": what BF16 matrices multiply is rounded, in passes of one session with more than 8 rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as product_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_data import GOLDEN, relative
from ops_tools import (
    Array,
    Layer,
    bf16_values,
    choices,
    every_build,
    make,
    normal,
    product,
    same_bits,
    situ,
    weight,
    within,
)
from session_tools import prompt, step_all
from streaming_tools import opened

import k3session as k3
from k3session._core.ops import ROUNDINGS, roundings
from k3session.placement import precision_label

ROWS = (1, 2, 3, 4, 5, 33, 70, 150)
IDS = prompt(21)


def rounded(x: Array) -> Array:
    """To BF16 to nearest, ties to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    words = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return bf16_values(words).astype(np.float32)


@every_build
def test_products_are_those_of_rounded_inputs(isa: str, threads: int) -> None:
    if isa == "cuda":
        pytest.skip("an option of the CPU")
    rng = np.random.default_rng(5)
    for columns, rounding in product_of((1, 31, 33, 64, 200, 2080), roundings(isa)):
        k = make(isa, threads, rows=max(ROWS), hidden_size=columns, rounding=rounding)
        exact = make(isa, threads, rows=max(ROWS), hidden_size=columns)
        x = normal(rng, max(ROWS), columns)
        w, plain = weight(rng, "bf16", 66, columns), weight(rng, "f32", 9, columns)
        y, z = k.linear(x, w.matrix, plain.matrix)
        within(y, *product(rounded(x), w.values))
        same_bits(z, exact.linear(x, plain.matrix)[0])
        for rows in ROWS:
            same_bits(k.linear(x[:rows], w.matrix)[0], y[:rows])
        if rounding == "bf16":
            same_bits(y, exact.linear(rounded(x), w.matrix)[0])


@every_build
def test_gate_and_up_are_rounded_each_as_it_is_stored(isa: str, threads: int) -> None:
    if isa == "cuda":
        pytest.skip("an option of the CPU")
    rng = np.random.default_rng(6)
    x = normal(rng, 9, 96)
    for rounding, kinds in product_of(roundings(isa), (("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16"))):
        k = make(isa, threads, rows=9, hidden_size=96, intermediate_size=70, rounding=rounding)
        gate, up = (weight(rng, kind, 70, 96, 0.1) for kind in kinds)
        xs = [rounded(x) if kind == "bf16" else x for kind in kinds]
        (g, dg), (u, du) = product(xs[0], gate.values), product(xs[1], up.values)
        h = situ(g, u)
        # The slopes of SiTU are those of ops_tools.situ_product, whose two products have one input.
        within(
            k.gate_up(gate.matrix, up.matrix, x),
            h,
            1.2 * dg * np.abs(u) + du * np.abs(g) + dg * du + 1e-6 * np.abs(h),
        )


@every_build
@pytest.mark.parametrize(
    ("kind", "E", "T"), [("mxfp4", 5, 3), ("mxfp4", 40, 8), ("bf16", 7, 2), ("f32", 7, 2)]
)
def test_experts_round_their_inputs_and_their_hidden_values(
    isa: str, threads: int, kind: str, E: int, T: int
) -> None:
    """Of 40 experts few rows each: their blocks have not all room at a time."""
    if isa == "cuda":
        pytest.skip("an option of the CPU")
    rng = np.random.default_rng(7)
    layer = Layer(rng, kind, E, T, 96, 160)
    z, (ids, weights) = normal(rng, 70, 96), choices(rng, 70, E, T)
    exact = layer.run(make(isa, threads, rows=70, **layer.dims), z, ids, weights)
    for rounding in roundings(isa):
        k = make(isa, threads, rows=70, rounding=rounding, **layer.dims)
        u = layer.run(k, z, ids, weights)
        if kind == "f32":
            same_bits(u, exact)
            continue
        want, bound = layer.expected(rounded(z[:9]), ids[:9], weights[:9], hidden=2.0**-9)
        unrounded = layer.expected(z[:9], ids[:9], weights[:9])[0]
        assert np.all(np.abs(u[:9] - want) <= bound)
        assert np.mean(np.abs(u[:9] - want)) < np.mean(np.abs(u[:9] - unrounded))
        for rows in (1, 2, 17, 33):
            same_bits(layer.run(k, *(np.ascontiguousarray(a[-rows:]) for a in (z, ids, weights))), u[-rows:])
        sides = [[w.matrix for w in side] for side in (layer.w1, layer.w2, layer.w3)]
        same_bits(k.experts(z, ids, weights, *sides, cuts=(1, E // 2)), u)


@pytest.fixture(scope="module")
def exact(nano: Path) -> Iterator[k3.Model]:
    with k3.Model.open(nano, device="cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def model(nano: Path) -> Iterator[k3.Model]:
    with k3.Model.open(nano, device="cpu", threads=1, prefill_precision="bf16") as model:
        yield model


def test_long_passes_of_one_session_alone(exact: k3.Model, model: k3.Model) -> None:
    with exact.session() as a, model.session() as b:
        assert not np.array_equal(b.prefill(IDS), a.prefill(IDS))
    with exact.session() as a, model.session() as b:
        same_bits(b.prefill(IDS[:8]), a.prefill(IDS[:8]))
        same_bits(step_all(b, IDS[8:11]), step_all(a, IDS[8:11]))
    with exact.session() as a, exact.session() as b, model.session() as c, model.session() as d:
        want = exact.forward([(a, IDS), (b, IDS[:9])])
        for found, row in zip(model.forward([(c, IDS), (d, IDS[:9])]), want, strict=True):
            same_bits(found, row)


def test_chunks_of_many_rows_give_the_same_bits(model: k3.Model) -> None:
    """Where the matrix unit makes chunks long, as many rows go through it at a time as nowhere else."""
    assert model.chunk_rows == (512 if roundings(model.isa)[-1] == "bf16amx" else 128)
    ids = prompt(600)
    with model.session() as s:
        want = s.prefill(ids)
    for chunk in (100, 128):  # no chunk has 8 rows or fewer, which would not be rounded
        with model.session() as s:
            same_bits(s.prefill(ids, chunk=chunk), want)


def test_a_trained_model_stays_near() -> None:
    """Measured over 16 prompts: half of them within 1.7e-3 of the largest logit; at a near-tie between experts 8e-2."""
    text = (GOLDEN / "shakespeare" / "heldout_macbeth.txt").read_text(encoding="utf-8")
    with (
        k3.Model.open(device="cpu") as exact,
        k3.Model.open(device="cpu", prefill_precision="bf16") as model,
    ):
        ids = exact.tokenizer.encode(text[:8000])
        errors = []
        for start in range(0, 1600, 100):
            with exact.session() as a, model.session() as b:
                x, y = (s.prefill(ids[start : start + 100]) for s in (a, b))
                errors.append(relative(y, x))
    assert min(errors) > 0 and np.median(errors) < 5e-3, errors


def test_the_same_bits_however_the_weights_come(nano: Path, model: k3.Model) -> None:
    precision: dict[str, Any] = {"prefill_precision": "bf16"}
    with model.session() as s:
        want = s.prefill(IDS)
    with (
        k3.Model.open(nano, device="cpu", threads=2, **precision) as threads,
        k3.Model.open(nano, device="cpu", weights="compact", **precision) as compact,
        opened(nano, memory="1GiB", options=precision) as streamed,
    ):
        for other in (threads, compact, streamed):
            with other.session() as s:
                same_bits(s.prefill(IDS), want)


def test_snapshots_tell_how_the_prefill_was(exact: k3.Model, model: k3.Model) -> None:
    with model.session() as a, model.session() as b, exact.session() as c:
        a.prefill(IDS)
        kept = a.snapshot()
        b.restore(kept)
        assert b.resume == "exact"
        c.restore(kept)
        assert c.resume == "tolerance"
        same_bits(c.step(3), b.step(3))


def test_what_a_snapshot_calls_it() -> None:
    for isa in ("base", "avx2"):
        assert precision_label("bf16", isa) == "bf16"
    assert precision_label("exact", "avx512") == "exact"
    assert precision_label("bf16", "avx512") == roundings("avx512")[-1]
    assert set(roundings("avx512")) <= set(ROUNDINGS)


def test_refused_beside_a_gpu(nano: Path) -> None:
    for options in ({"device": "cuda"}, {"experts": "cuda"}):
        with pytest.raises(k3.ConfigError, match='"bf16x2" where a part is on a GPU'):
            k3.Model.open(nano, prefill_precision="bf16", **options)  # type: ignore[arg-type]
