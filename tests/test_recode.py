# SPDX-License-Identifier: MIT
"""Weights recoded at load: the compact form gives the bits of BF16, and q8 those of the numbers that it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import Tensors, changed
from core_access import counts
from hypothesis import given
from hypothesis import strategies as st
from ops_tools import Array, every_isa, make, normal, product, same_bits, within
from session_tools import prompt, step_all

import k3session as k3
from k3session._core.arguments import Matrix
from k3session._core.recode import recoded
from k3session._core.weights import widen
from k3session.synth import synth

SHAPES = ((1, 1), (3, 31), (5, 32), (66, 33), (4, 64), (9, 95), (70, 96), (130, 200), (8, 257))
ROWS = (1, 2, 3, 7, 70)


def bf16(values: Array) -> Array:
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def agree(isa: str, w: Array, x: Array) -> Matrix:
    """The compact form of BF16 patterns gives their bits, for every number of rows."""
    k = make(isa, 1, rows=max(ROWS), hidden_size=w.shape[1])
    stored = Matrix(w)
    compact = recoded(stored, "compact")
    for rows in ROWS:
        same_bits(k.linear(x[:rows], compact)[0], k.linear(x[:rows], stored)[0])
    return compact


@every_isa
def test_compact_is_bf16_to_the_bit(isa: str) -> None:
    rng = np.random.default_rng(1)
    for out, columns in SHAPES:
        x = normal(rng, max(ROWS), columns)
        agree(isa, bf16(normal(rng, out, columns, scale=0.02)), x)


@every_isa
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 15), columns=st.integers(1, 140))
def test_compact_with_any_patterns(isa: str, seed: int, spread: int, columns: int) -> None:
    """All exponents but that of infinities, subnormals, both zeros: `spread` bits of the high byte are random."""
    rng = np.random.default_rng(seed)
    w = rng.integers(0, 2**16, (7, columns)).astype(np.uint16) & np.uint16(0x80FF | (1 << spread) - 1)
    w |= np.uint16(0x2000) * (rng.random(w.shape) < 0.5).astype(np.uint16)
    w = np.where((w & 0x7F80) == 0x7F80, np.uint16(0x8000), w)
    agree(isa, w, normal(rng, max(ROWS), columns))


def test_what_has_no_code_is_kept_beside() -> None:
    """A matrix of one magnitude has no exceptions, and a weight far from all others makes one group one."""
    rng = np.random.default_rng(2)
    w = bf16(np.sign(normal(rng, 12, 256)) * (1 + rng.random((12, 256)))).copy()
    assert recoded(Matrix(w), "compact").scale.size == 0
    for i in range(40):
        w[i % 12, (37 * i) % 256] = 0x0080 + 0x0100 * i  # 40 more high bytes
    compact = agree("avx2" if "avx2" in _isas() else "base", w, normal(rng, max(ROWS), 256))
    assert 0 < compact.scale.size // 68 <= 40 - 14 + 2, compact.scale.size


def _isas() -> tuple[str, ...]:
    from k3session._core.ops import best_isa

    return ("base", "avx2") if best_isa() != "base" else ("base",)


def test_twelve_bits_a_weight() -> None:
    """For normally distributed weights: 12 bits, and what is beside them."""
    w = Matrix(bf16(normal(np.random.default_rng(3), 512, 2048, scale=0.02)))
    bits = 8 * recoded(w, "compact").nbytes / (512 * 2048)
    assert 12 <= bits < 12.2, bits


@every_isa
def test_q8_is_what_its_bytes_say(isa: str) -> None:
    rng = np.random.default_rng(4)
    for out, columns in SHAPES:
        x = normal(rng, max(ROWS), columns)
        for stored in (bf16(normal(rng, out, columns)), normal(rng, out, columns)):
            q = recoded(Matrix(stored), "q8")
            groups = (columns + 31) // 32
            factors = widen(q.scale.reshape(out, groups))
            values = q.data.view(np.int8).astype(np.float64) * np.repeat(factors, 32, axis=1)
            exact = widen(stored).astype(np.float64)
            # Half a step of its group at most; a factor is at most 1/128 above what would do.
            step = np.repeat(
                np.abs(np.pad(exact, ((0, 0), (0, 32 * groups - columns)))).reshape(out, groups, 32).max(2),
                32,
                axis=1,
            )
            assert (
                np.abs(values[:, :columns] - exact) <= step[:, :columns] / 127 * (129 / 128) / 2 + 1e-30
            ).all()
            assert not values[:, columns:].any()
            k = make(isa, 1, rows=max(ROWS), hidden_size=columns)
            y = k.linear(x, q)[0]
            within(y, *product(x, values[:, :columns]))
            for rows in ROWS:
                same_bits(k.linear(x[:rows], q)[0], y[:rows])


@every_isa
def test_gate_up_of_mixed_forms(isa: str) -> None:
    """Two matrices that want their inputs in different orders."""
    rng = np.random.default_rng(5)
    gate, up = Matrix(bf16(normal(rng, 40, 96, scale=0.1))), Matrix(bf16(normal(rng, 40, 96, scale=0.1)))
    k = make(isa, 1, rows=9, hidden_size=96)
    x = normal(rng, 9, 96)
    expected = k.gate_up(gate, up, x)
    same_bits(k.gate_up(recoded(gate, "compact"), up, x), expected)
    same_bits(k.gate_up(gate, recoded(up, "compact"), x), expected)
    mixed = k.gate_up(recoded(gate, "q8"), up, x)
    assert 0 < np.abs(mixed - expected).max() < 0.05 * np.abs(expected).max()


def test_wrong_forms_are_refused() -> None:
    f32 = Matrix(np.ones((4, 32), np.float32))
    with pytest.raises(k3.ConfigError, match='expected a BF16 matrix for "compact"'):
        recoded(f32, "compact")
    with pytest.raises(k3.ConfigError, match="found 'q4'"):
        recoded(f32, "q4")


# Models.


@pytest.mark.parametrize("preset", ["micro", "nano"])
def test_a_compact_model_gives_the_bits_of_the_stored_one(tmp_path: Path, preset: str) -> None:
    path = synth(tmp_path / "model", preset)
    ids = prompt(40, vocab=32)
    with k3.Model.open(path, device="cpu") as stored, k3.Model.open(path, weights="compact") as compact:
        assert compact.weights == "compact" and stored.weights == "stored"
        with stored.session() as a, compact.session() as b:
            assert np.array_equal(a.prefill(ids[:30]), b.prefill(ids[:30]))
            assert np.array_equal(step_all(a, ids[30:]), step_all(b, ids[30:]))
            snap = a.snapshot()
            b.restore(snap)  # the same numbers: a snapshot goes from one to the other, exactly
            assert b.resume == "exact"


def test_the_model_that_ships_is_the_same_when_compact() -> None:
    ids = prompt(counts(60, 400), vocab=1280)
    with k3.Model.open(device="cpu") as stored, k3.Model.open(weights="compact") as compact:
        with stored.session() as a, compact.session() as b:
            assert np.array_equal(a.prefill(ids), b.prefill(ids))
            assert np.array_equal(a.step(3), b.step(3))
        info = compact.recoded
        assert info is not None and stored.recoded is None
        bits = 8 * info["bytes"] / info["weights"]
        assert 12 < bits < 13.5, info


def test_q8_is_close_and_says_so() -> None:
    ids = prompt(60, vocab=1280)
    stored, q8 = k3.Model.open(device="cpu"), k3.Model.open(weights="q8")
    with stored, q8, stored.session() as a, q8.session() as b:
        x, y = a.prefill(ids), b.prefill(ids)
        assert 0 < np.abs(x - y).max() < 0.05 * np.abs(x).max()
        with pytest.raises(k3.SnapshotMismatchError, match="weights: snapshot 'stored', here 'q8'"):
            b.restore(a.snapshot())


def test_a_weight_that_is_not_finite_is_found_at_load(tmp_path: Path) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.weight"

    def spoil(tensors: Tensors) -> None:
        raw = tensors[name]
        tensors[name] = replace(raw, data=raw.data[:10] + b"\x80\x7f" + raw.data[12:])

    path = changed(synth(tmp_path / "model", "micro"), tmp_path / "spoilt", tensors=spoil)
    with k3.Model.open(path, device="cpu"):
        pass
    for mode in ("compact", "q8"):
        with pytest.raises(k3.CheckpointError, match=r"q_proj.weight: element \[0, 5\] is not finite"):
            k3.Model.open(path, weights=mode)


def test_modes_that_do_not_exist_or_do_not_fit() -> None:
    with pytest.raises(k3.ConfigError, match='weights is \'q4\'; expected "stored", "compact" or "q8"'):
        k3.Model.open(weights="q4")
    with pytest.raises(k3.ConfigError, match='weights="q8" is for the CPU'):
        k3.Model.open(weights="q8", device="cuda")
