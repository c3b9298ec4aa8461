# SPDX-License-Identifier: MIT
"""Ops on rows of the residual stream: embed, rms_norm, attn_res, residual and the finite check."""

from __future__ import annotations

import numpy as np
import pytest
from device import ON_GPU
from ops_tools import (
    Array,
    bf16_values,
    every_build,
    every_isa,
    make,
    moved,
    near,
    normal,
    rms,
    same_bits,
    weight,
)

from k3session._core.arguments import Matrix
from k3session.errors import ConfigError

WIDTHS = (1, 15, 16, 17, 33, 64, 200)


@every_isa
@pytest.mark.parametrize("kind", ["bf16", "f32", "bf16-odd", "f32-odd"])
def test_embed(isa: str, kind: str) -> None:
    rng = np.random.default_rng(20)
    for d in WIDTHS:
        table = weight(rng, kind, 11, d)
        k = make(isa, vocab_size=11, hidden_size=d)
        tokens = np.array([0, 10, -1, 3, 10, -1], np.int32)
        own = normal(rng, 6, d)
        s = k.embed(table.matrix, tokens, own)
        expected = np.where(tokens[:, None] < 0, own, table.values[np.maximum(tokens, 0)])
        np.testing.assert_array_equal(s, expected)


def test_embed_refuses_what_is_no_row() -> None:
    k = make("base", vocab_size=4, hidden_size=2)
    table = Matrix(np.zeros((4, 2), np.float32))
    for tokens in ([4], [-1], [-2]):
        with pytest.raises(ConfigError, match="tokens: expected 0 to 3"):
            k.embed(table, np.array(tokens, np.int32))
    with pytest.raises(ConfigError, match="tokens: expected -1 to 3"):
        k.embed(table, np.array([-2], np.int32), np.zeros((1, 2), np.float32))


@every_isa
def test_rms_norm(isa: str) -> None:
    rng = np.random.default_rng(21)
    k = make(isa, rows=5)
    for n in (*WIDTHS, 1536):
        for scale in (1e-4, 3e-3, 1.0, 1e4):
            x, w = normal(rng, 5, n, scale=scale), normal(rng, n)
            x[3] = 0
            for eps in (1e-5, 1e-6):
                y = k.rms_norm(x, w, eps)
                near(y, rms(x, w, eps), 1e-6)
                assert not y[3].any()
                same_bits(k.rms_norm(x[2:3].copy(), w, eps)[0], y[2])
            if scale == 3e-3 and n >= 64:  # where the latent's own eps matters
                assert np.max(np.abs(rms(x, w, 1e-5) - rms(x, w, 1e-6))) > 0.1 * np.max(np.abs(y))


def mix(bank: Array, s: Array, u: Array, norm: Array, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """AttnRes of all rows: normalised rows score, raw rows are summed."""
    x = np.concatenate([bank, s[None]]).astype(np.float64)
    score = (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)) @ u.astype(np.float64)
    p = np.exp(score - score.max(axis=0))
    p /= p.sum(axis=0)
    h = np.einsum("jr,jrd->rd", p, x)
    return h, rms(h, norm, eps), p.T


@every_build
@pytest.mark.parametrize("banked", [0, 1, 2, 8])
def test_attn_res(isa: str, threads: int, banked: int) -> None:
    rng = np.random.default_rng(22)
    for d in (*WIDTHS, 2048):
        k = make(isa, threads, rows=33, hidden_size=d)
        # Sources of different sizes, as the residual stream has them: the embedding is small, late sums are large.
        bank = (
            normal(rng, banked, 33, d)
            * np.geomspace(0.01, 30, banked or 1).astype(np.float32)[:banked, None, None]
        )
        s, u, norm = normal(rng, 33, d), normal(rng, d, scale=2 / np.sqrt(d)), normal(rng, d)
        h, x, p = k.attn_res(bank, s, u, norm)
        for found, expected in zip((h, x, p), mix(bank, s, u, norm), strict=True):
            near(found, expected, 6e-6)
        if not banked:
            same_bits(h, s)
        take = np.array([32, 0, 32, 7], np.int32)
        for some, everything in zip(k.attn_res(bank, s, u, norm, take), (h, x, p), strict=True):
            same_bits(some, everything[take])
        alone = k.attn_res(np.ascontiguousarray(bank[:, 5:6]), s[5:6].copy(), u, norm)
        for one, everything in zip(alone, (h, x, p), strict=True):
            same_bits(one[0], everything[5])


@every_isa
def test_attn_res_of_extreme_scores(isa: str) -> None:
    """A score of +-100 takes all the weight, or none; equal rows share it."""
    d = 32
    k = make(isa, hidden_size=d)
    row = np.ones((1, d), np.float32)
    for size in (100.0, -100.0):
        u = np.full(d, size / d, np.float32)
        p = k.attn_res(-row[None], row, u, np.ones(d, np.float32))[2][0]
        np.testing.assert_allclose(p, [size < 0, size > 0], atol=1e-30)
    p = k.attn_res(np.stack([row, row]), row, np.full(d, 3, np.float32), np.ones(d, np.float32))[2]
    np.testing.assert_allclose(p, 1 / 3, rtol=1e-6)


@every_isa
def test_residual(isa: str) -> None:
    rng = np.random.default_rng(23)
    k = make(isa, rows=7)
    for d in WIDTHS:
        s, a, b = (normal(rng, 7, d) for _ in range(3))
        for restart in (False, True):
            for second in (None, b):
                y, bad = k.residual(s, a, second, restart, 3, counts=[2, 4, 1])
                both = a if second is None else a + second  # the two parts of a MoE output meet first
                same_bits(y, both if restart else s + both)
                assert bad == [None, None, None]


@every_isa
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_noted_for_its_segment_only(isa: str, value: float) -> None:
    rng = np.random.default_rng(24)
    k = make(isa, rows=6)
    for d in WIDTHS:
        for row, owner in ((0, 0), (1, 1), (3, 1), (4, 2), (5, 2)):
            for column in {0, d // 2, d - 1}:
                s, a = normal(rng, 6, d), normal(rng, 6, d)
                a[row, column] = value
                noted = [None] * 3
                noted[owner] = 9
                assert k.residual(s, a, None, False, 9, counts=[1, 3, 2])[1] == noted
                assert k.residual(s, s, a, True, 9, counts=[1, 3, 2])[1] == noted
                assert k.finite(a, np.array([0, 1, 1, 1, 2, 2], np.int32), 3, 9) == noted


@every_isa
def test_an_overflow_of_the_sum_is_noted(isa: str) -> None:
    big = np.full((1, 17), 3e38, np.float32)
    k = make(isa)
    assert k.residual(big, big, None, False, 2)[1] == [2]
    assert k.residual(big, big, None, True, 2)[1] == [None]
    assert k.residual(big, big, -big, False, 2)[1] == [None]


def test_bf16_rounding_of_the_test_weights() -> None:
    """The exact values that all other tests here believe."""
    bits = np.array([[0x3F80, 0xC049, 0x0001, 0x7F7F]], np.uint16)
    np.testing.assert_array_equal(bf16_values(bits)[0], [1, -3.140625, 2.0**-133, (2 - 2.0**-7) * 2.0**127])
    assert moved(bits, 1).__array_interface__["data"][0] % 2 == 1


@pytest.mark.skipif(not ON_GPU, reason="an op of the GPU alone")
@pytest.mark.parametrize(("n", "k"), [(1, 1), (97, 5), (5000, 64)])
def test_top_k(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    logits = normal(rng, 3, n)
    logits[1] = np.round(logits[1])  # ties: the lowest id wins
    op = make("cuda", vocab_size=n)
    ids, values, total = op.top_k(logits, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, order)
    assert np.array_equal(values, np.take_along_axis(logits, order, 1))
    exact = np.log(np.exp(logits.astype(np.float64)).sum(1))
    assert np.abs(total - exact).max() < 1e-5 * max(1.0, np.abs(exact).max())
    for r in range(3):
        alone = op.top_k(logits[r : r + 1], k)
        assert np.array_equal(alone[2][0], total[r])
