# SPDX-License-Identifier: MIT
"""The router and the routed experts."""

from __future__ import annotations

import numpy as np
import pytest
from device import EMULATED
from ops_tools import (
    Array,
    Layer,
    Weight,
    choices,
    every_build,
    every_isa,
    make,
    mxfp4_values,
    normal,
    product,
    same_bits,
    sigmoid,
    situ,
    situ_product,
    weight,
)

from k3session._core.arguments import Matrix
from k3session.errors import ConfigError

# Router -----------------------------------------------------------------------------------------------------------


def chosen(scores: Array, T: int) -> Array:
    """Ids of the T largest, the lowest id among equals, ascending."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :T], axis=-1)


@every_isa
@pytest.mark.parametrize(
    ("E", "T"), [(1, 1), (2, 1), (8, 2), (12, 3), (15, 15), (17, 5), (33, 33), (896, 16)]
)
@pytest.mark.parametrize(("renormalise", "factor"), [(True, 1.0), (False, 1.0), (True, 2.5)])
def test_route(isa: str, E: int, T: int, renormalise: bool, factor: float) -> None:
    """The bias takes part in the choice and not in the weights."""
    rng = np.random.default_rng(60)
    k = make(
        isa, num_experts=E, num_experts_per_token=T, moe_renormalize=renormalise, routed_scaling_factor=factor
    )
    logits, bias = normal(rng, 40, E, scale=2), normal(rng, E, scale=0.3)
    ids, weights = k.route(logits, bias)
    s = sigmoid(logits)
    np.testing.assert_array_equal(ids, chosen(s + bias, T))
    if 1 < T < E:
        assert np.any(ids != chosen(s, T))
    w = np.take_along_axis(s, ids, axis=-1)
    if renormalise:
        w /= w.sum(axis=-1, keepdims=True) + 1e-20
    np.testing.assert_allclose(weights, w * factor, rtol=2e-6)
    for rows in (1, 2, 7):
        for some, everything in zip(k.route(logits[:rows].copy(), bias), (ids, weights), strict=True):
            same_bits(some, everything[:rows])


@every_isa
def test_the_lowest_id_wins_among_equals(isa: str) -> None:
    k = make(isa, num_experts=896, num_experts_per_token=16)
    for rows in (1, 2, 7, 64):
        ids, weights = k.route(np.zeros((rows, 896), np.float32), np.zeros(896, np.float32))
        np.testing.assert_array_equal(ids, np.tile(np.arange(16), (rows, 1)))
        assert np.all(weights == 1 / 16)
    rng = np.random.default_rng(61)
    for E, T, levels in ((896, 16, 5), (40, 8, 9), (17, 5, 4), (9, 8, 3), (3, 2, 2)):  # ties cross the cut
        k = make(isa, num_experts=E, num_experts_per_token=T)
        logits = rng.integers(-levels, 1, (64, E)).astype(np.float32)
        np.testing.assert_array_equal(k.route(logits, np.zeros(E, np.float32))[0], chosen(logits, T))


@every_build
def test_a_thousand_hidden_rows_choose_as_in_float64(isa: str, threads: int) -> None:
    rng = np.random.default_rng(62)
    d = 256
    k = make(isa, threads, rows=64, hidden_size=d, num_experts=896, num_experts_per_token=16)
    gate = weight(rng, "bf16", 896, d, scale=d**-0.5)
    x, bias = normal(rng, 1000, d), normal(rng, 896, scale=0.02)
    s = sigmoid(product(x, gate.values)[0]) + bias
    want, ranked = chosen(s, 16), np.sort(s, axis=-1)
    clear = ranked[:, -16] - ranked[:, -17] > 1e-6
    assert clear.mean() > 0.99
    for batch in (1, 2, 7, 64):
        most = 64 if EMULATED else 1000
        rows = range(0, most if batch > 2 else most // 5, batch)
        ids = [k.route(k.linear(x[i : i + batch].copy(), gate.matrix)[0], bias)[0] for i in rows]
        found = np.concatenate(ids)
        same = (found == want[: len(found)]).all(axis=-1)
        assert np.all(same | ~clear[: len(found)])
    narrow = (product(x, gate.values)[0].astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.mean((chosen(sigmoid(narrow) + bias, 16) != want).any(axis=-1)) > 0.01, (
        "BF16 logits change the choice"
    )


@every_isa
def test_logits_that_are_not_finite(isa: str) -> None:
    """A NaN makes the weights NaN, so that the next residual sees it; ids stay ids, other rows stay as they are."""
    rng = np.random.default_rng(63)
    k = make(isa, num_experts=40, num_experts_per_token=4)
    bias = np.zeros(40, np.float32)
    logits = normal(rng, 5, 40)
    clean = k.route(logits, bias)
    for where in ([0], [39], [5, 6], list(range(40))):
        logits2 = logits.copy()
        logits2[2, where] = np.nan
        ids, weights = k.route(logits2, bias)
        assert np.isnan(weights[2]).all() and np.all((ids >= 0) & (ids < 40))
        kept = [0, 1, 3, 4]
        same_bits(ids[kept], clean[0][kept])
        same_bits(weights[kept], clean[1][kept])
    logits[0, 7], logits[0, :7] = np.inf, -np.inf
    ids, weights = k.route(logits, bias)
    assert 7 in ids[0] and np.isfinite(weights).all()


@every_isa
def test_weights_of_scores_that_all_vanish(isa: str) -> None:
    """1e-20 in the denominator keeps 0 / 0 away."""
    k = make(isa, num_experts=4, num_experts_per_token=2)
    weights = k.route(np.full((1, 4), -1e4, np.float32), np.zeros(4, np.float32))[1]
    assert weights.tolist() == [[0, 0]]


# Experts ----------------------------------------------------------------------------------------------------------


@every_build
@pytest.mark.parametrize(
    ("kind", "E", "T", "latent", "inner"),
    [
        ("mxfp4", 1, 1, 32, 96),
        ("mxfp4", 12, 3, 64, 32),
        ("mxfp4", 5, 5, 96, 64),
        ("bf16", 7, 2, 50, 33),
        ("f32", 7, 2, 17, 100),
        ("bf16-odd", 3, 3, 130, 40),
        ("mxfp4-odd", 40, 8, 128, 160),
    ],
)
def test_experts(isa: str, threads: int, kind: str, E: int, T: int, latent: int, inner: int) -> None:
    rng = np.random.default_rng(64)
    layer = Layer(rng, kind, E, T, latent, inner)
    k = make(isa, threads, rows=70, **layer.dims)
    z, (ids, weights) = normal(rng, 70, latent), choices(rng, 70, E, T)
    u = layer.run(k, z, ids, weights)
    want, bound = layer.expected(z[:12], ids[:12], weights[:12])
    assert np.all(np.abs(u[:12] - want) <= bound)
    assert np.median(bound / np.abs(want)) < 1e-3, "the bound is sharp enough to see a mistake"
    for rows in (1, 2, 5, 33):  # 70 rows of one expert are three tiles
        at = 70 - rows
        same_bits(layer.run(k, *(np.ascontiguousarray(a[at:]) for a in (z, ids, weights))), u[at:])


@pytest.mark.parametrize("kind", ["mxfp4", "f32"])
@pytest.mark.parametrize("cuts", [(1,), (4, 9), tuple(range(1, 17)), (0, 0), (17,)])
@every_build
def test_experts_in_several_calls(isa: str, threads: int, cuts: tuple[int, ...], kind: str) -> None:
    """Who has not all experts at a time calls for one range after the other: the same bits."""
    rng = np.random.default_rng(66)
    layer = Layer(rng, kind, 17, 5, 96, 64)
    k = make(isa, threads, rows=40, **layer.dims)
    z, (ids, weights) = normal(rng, 40, 96), choices(rng, 40, 17, 5)
    sides = [[w.matrix for w in side] for side in (layer.w1, layer.w2, layer.w3)]
    same_bits(k.experts(z, ids, weights, *sides, cuts=cuts), layer.run(k, z, ids, weights))


@every_build
def test_experts_are_summed_in_ascending_order(isa: str, threads: int) -> None:
    """Weights that are powers of two: then each step of the sum is a plain float32 addition."""
    rng = np.random.default_rng(65)
    E, latent = 6, 64
    layer = Layer(rng, "mxfp4", E, E, latent, 64)
    z = normal(rng, 3, latent)
    weights = np.tile(np.float32([1, 0.5, 2, 0.25, 1, 4]), (3, 1))
    ids = np.tile(np.arange(E, dtype=np.int32), (3, 1))
    u = layer.run(make(isa, threads, **layer.dims), z, ids, weights)
    one = make(isa, threads, **(layer.dims | {"num_experts_per_token": 1}))
    parts = [
        layer.run(one, z, np.full((3, 1), e, np.int32), np.full((3, 1), weights[0, e], np.float32))
        for e in range(E)
    ]
    ascending, descending = np.zeros_like(u), np.zeros_like(u)
    for e in range(E):
        ascending += parts[e]
        descending += parts[E - 1 - e]
    same_bits(u, ascending)
    assert np.any(u != descending)


@every_isa
def test_gate_up_and_down_are_w1_w3_and_w2(isa: str) -> None:
    """Bytes as a file has them, low nibble first: every packed byte and scale reaches the right product."""
    rng = np.random.default_rng(66)
    packed = rng.permutation(np.arange(1024) % 256).astype(np.uint8).reshape(64, 16)
    codes = np.full((64, 1), 125, np.uint8)
    first, second = (
        Weight(Matrix(half, codes[:32]), mxfp4_values(half, codes[:32]))
        for half in (packed[:32].copy(), packed[32:].copy())
    )
    eye = np.zeros((32, 16), np.uint8)
    eye[np.arange(32), np.arange(32) // 2] = np.where(np.arange(32) % 2, 0x20, 0x02)
    down = Matrix(eye, np.full((32, 1), 127, np.uint8))
    k = make(
        isa, num_experts=1, num_experts_per_token=1, routed_expert_hidden_size=32, moe_intermediate_size=32
    )
    z, one = normal(rng, 4, 32), np.ones((4, 1), np.float32)
    u = k.experts(z, np.zeros((4, 1), np.int32), one, [first.matrix], [down], [second.matrix])
    want, bound = situ_product(z, first.values, second.values)
    assert np.all(np.abs(u - want) <= bound + 1e-6)
    exchanged = situ_product(z, second.values, first.values)[0]
    swapped = [mxfp4_values(p >> 4 | p << 4, codes[:32]) for p in (packed[:32], packed[32:])]
    for wrong in (exchanged, situ_product(z, *swapped)[0]):
        assert np.max(np.abs(wrong - want)) > 0.5
    g, up = z.astype(np.float64) @ first.values.T, z.astype(np.float64) @ second.values.T
    assert np.max(np.abs(g * sigmoid(g) * up - situ(g, up))) > 0.5, "SiLU must not pass for SiTU"


@every_isa
def test_a_scale_of_255_reaches_the_finite_check(isa: str) -> None:
    rng = np.random.default_rng(67)
    layer = Layer(rng, "mxfp4", 4, 2, 32, 32)
    bad = layer.w2[3].matrix
    codes = np.array(bad.scale)
    codes[9] = 255
    layer.w2[3] = layer.w2[3]._replace(matrix=Matrix(bad.data, codes))
    k = make(isa, **layer.dims)
    ids = np.array([[0, 1], [2, 3], [0, 2]], np.int32)
    u = layer.run(k, normal(rng, 3, 32), ids, np.ones((3, 2), np.float32))
    assert np.isnan(u[1, 9]) and np.isnan(u).sum() == 1
    assert k.residual(u, u, None, True, 4, counts=[1, 1, 1])[1] == [None, 4, None]


@every_isa
def test_a_row_that_is_not_finite_spoils_no_companion(isa: str) -> None:
    rng = np.random.default_rng(68)
    layer = Layer(rng, "mxfp4", 4, 2, 32, 64)
    k = make(isa, **layer.dims)
    z, (ids, weights) = normal(rng, 9, 32), choices(rng, 9, 4, 2)
    clean = layer.run(k, z, ids, weights)
    z[4, 3], weights[6, 1] = np.inf, np.nan
    found = layer.run(k, z, ids, weights)
    assert not np.isfinite(found[[4, 6]]).any()
    kept = [0, 1, 2, 3, 5, 7, 8]
    same_bits(found[kept], clean[kept])


def test_experts_are_checked() -> None:
    rng = np.random.default_rng(69)
    layer = Layer(rng, "mxfp4", 2, 1, 32, 32)
    k = make("base", **layer.dims)
    z, one = normal(rng, 1, 32), np.ones((1, 1), np.float32)
    with pytest.raises(ConfigError, match="ids: expected 0 to 1; found 2 to 2"):
        layer.run(k, z, np.array([[2]], np.int32), one)
    layer.w1[1] = weight(rng, "bf16", 32, 32)
    with pytest.raises(ConfigError, match="expected one dtype for all experts"):
        layer.run(k, z, np.array([[1]], np.int32), one)
