# SPDX-License-Identifier: MIT
"""Matrices: `linear` and `gate_up` in BF16, float32 and MXFP4, one row or a tile, one thread or more."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ops_tools import (
    Array,
    every_build,
    every_isa,
    make,
    mxfp4_values,
    normal,
    product,
    same_bits,
    situ_product,
    weight,
    within,
)

from k3session._core.arguments import Matrix
from k3session._core.ops import pool_workers
from k3session.errors import ConfigError, K3Error

COLUMNS = (1, 15, 16, 17, 31, 33, 63, 65, 127, 200)
GROUPED = (32, 64, 96, 224)
OUT = (1, 3, 5, 64, 65, 130)
ROWS = (1, 2, 3, 4, 5, 70)
KINDS = ("bf16", "f32", "mxfp4")


def columns_of(kind: str) -> tuple[int, ...]:
    return GROUPED if kind.startswith("mxfp4") else COLUMNS


@every_build
@pytest.mark.parametrize("kind", ["bf16", "f32", "mxfp4", "bf16-odd", "f32-odd", "mxfp4-odd"])
def test_linear(isa: str, threads: int, kind: str) -> None:
    rng = np.random.default_rng(3)
    for columns in columns_of(kind):
        k = make(isa, threads, rows=70, hidden_size=columns)
        x = normal(rng, 70, columns)
        for out in OUT:
            w = weight(rng, kind, out, columns)
            y = k.linear(x, w.matrix)[0]
            within(y, *product(x, w.values))
            for rows in ROWS:  # whatever the tile, a row has the bits that it has alone
                at = 70 - rows
                same_bits(k.linear(np.ascontiguousarray(x[at:]), w.matrix)[0], y[at:])


@every_build
@pytest.mark.parametrize("kind", KINDS)
def test_rows_longer_than_what_is_met_at_once(isa: str, threads: int, kind: str) -> None:
    """Sums are taken up again, beyond 512, 1,024 and 2,048 columns."""
    rng = np.random.default_rng(7)
    for columns in (544, 1056, 2080) if kind == "mxfp4" else (545, 1057, 2081):
        k = make(isa, threads, rows=70, hidden_size=columns)
        x, w = normal(rng, 70, columns), weight(rng, kind, 9, columns)
        y = k.linear(x, w.matrix)[0]
        within(y, *product(x, w.values))
        for rows in (*ROWS[:-1], 8, 31, 32):
            same_bits(k.linear(x[:rows], w.matrix)[0], y[:rows])


@every_build
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_matrix_on_several_threads(isa: str, threads: int, kind: str) -> None:
    rng = np.random.default_rng(4)
    w = weight(rng, kind, 1030, 512)
    x = normal(rng, 67, 512)
    k = make(isa, threads, rows=67, hidden_size=512)
    y = k.linear(x, w.matrix)[0]
    assert pool_workers() >= threads - 1
    within(y, *product(x, w.values))
    same_bits(y, make(isa, 1, rows=67, hidden_size=512).linear(x, w.matrix)[0])
    for i in (0, 1, 66):
        same_bits(k.linear(x[i : i + 1], w.matrix)[0][0], y[i])


@every_build
def test_several_matrices_in_one_dispatch(isa: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    kinds = [("bf16", 3), ("f32", 700), ("mxfp4", 65), ("bf16", 130), ("f32", 1)] * 3 + [("bf16", 900)]
    matrices = [weight(rng, kind, out, 192) for kind, out in kinds]
    k = make(isa, threads, rows=5, hidden_size=192)
    x = normal(rng, 5, 192)
    together = k.linear(x, *(w.matrix for w in matrices))
    for w, y in zip(matrices, together, strict=True):
        same_bits(y, k.linear(x, w.matrix)[0])
        within(y, *product(x, w.values))


@every_build
def test_inputs_of_their_own(isa: str, threads: int) -> None:
    rng = np.random.default_rng(6)
    k = make(isa, threads, rows=6, hidden_size=128)
    a, b = normal(rng, 6, 96), normal(rng, 6, 33)
    first, second, third = weight(rng, "bf16", 40, 96), weight(rng, "f32", 40, 33), weight(rng, "bf16", 7, 33)
    found = k.linear([a, b, b], first.matrix, second.matrix, third.matrix)
    for y, x, w in zip(found, (a, b, b), (first, second, third), strict=True):
        within(y, *product(x, w.values))


@every_isa
def test_a_row_that_is_not_finite_stays_alone(isa: str) -> None:
    rng = np.random.default_rng(7)
    k = make(isa, hidden_size=64)
    x = normal(rng, 9, 64)
    w = weight(rng, "bf16", 33, 64)
    clean = k.linear(x, w.matrix)[0]
    x[4, 10] = np.nan
    x[6, 63] = np.inf
    found = k.linear(x, w.matrix)[0]
    assert np.isnan(found[4]).all() and not np.isfinite(found[6]).any()
    kept = [0, 1, 2, 3, 5, 7, 8]
    same_bits(found[kept], clean[kept])


# MXFP4: the values of the format ----------------------------------------------------------------------------------


@every_build
def test_every_scale_code(isa: str, threads: int) -> None:
    """2^(code - 127): code 0 is an fp32 subnormal and not zero, code 255 is NaN and not infinity."""
    codes = np.arange(256, dtype=np.uint8)[:, None]
    packed = np.full((256, 16), 0x22, np.uint8)  # ones
    k = make(isa, threads, hidden_size=32)
    x = np.eye(32, dtype=np.float32)
    y = k.linear(x, Matrix(packed, codes))[0]
    expected = np.ldexp(1.0, codes[:255, 0].astype(int) - 127).astype(np.float32)
    assert expected[0] == 2.0**-127 and expected[0] > 0
    for row in y:
        same_bits(row[:255], expected)
        assert np.isnan(row[255])
    ones = k.linear(np.ones((1, 32), np.float32), Matrix(packed, codes))[0]
    assert np.isnan(ones[0, 255]), "an infinite scale would have shown as NaN only beside inputs of zero"
    assert k.finite(y[:1], np.zeros(1, np.int32), 1, sublayer=7) == [7]
    assert k.finite(np.ascontiguousarray(y[:1, :255]), np.zeros(1, np.int32), 1, sublayer=7) == [None]


@every_build
def test_the_smallest_scale_with_every_element(isa: str, threads: int) -> None:
    elements = np.arange(16, dtype=np.uint8)
    packed = np.repeat((elements | elements << 4)[:, None], 16, axis=1)
    codes = np.zeros((16, 1), np.uint8)
    x = np.zeros((1, 32), np.float32)
    x[0, 7] = 1.5
    y = make(isa, threads, hidden_size=32).linear(x, Matrix(packed, codes))[0][0]
    expected = (1.5 * mxfp4_values(packed, codes)[:, 7]).astype(np.float32)
    assert np.all((expected != 0) == (elements % 8 != 0))
    np.testing.assert_array_equal(y, expected)


@every_build
def test_every_packed_byte(isa: str, threads: int) -> None:
    """The low nibble is the even column; code 0 is zero and code 1 a half, with either sign."""
    packed = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    codes = np.full((256, 1), 127, np.uint8)
    y = make(isa, threads, hidden_size=32).linear(np.eye(32, dtype=np.float32), Matrix(packed, codes))[0]
    expected = mxfp4_values(packed, codes)
    np.testing.assert_array_equal(y.T, expected)
    swapped = mxfp4_values(packed >> 4 | packed << 4, codes)
    assert np.mean(swapped != y.T) > 0.9


# gate_up ----------------------------------------------------------------------------------------------------------


@every_build
@pytest.mark.parametrize("pair", ["bf16 bf16", "f32 f32", "mxfp4 mxfp4", "bf16 f32", "f32 mxfp4"])
def test_gate_up(isa: str, threads: int, pair: str) -> None:
    rng = np.random.default_rng(8)
    for columns in GROUPED if "mxfp4" in pair else (17, 64, 200):
        k = make(isa, threads, rows=40, hidden_size=columns)
        x = normal(rng, 40, columns)
        for inner in (1, 15, 31, 33, 65, 100):
            gate, up = (weight(rng, kind, inner, columns, scale=0.3) for kind in pair.split())
            h = k.gate_up(gate.matrix, up.matrix, x)
            within(h, *situ_product(x, gate.values, up.values))
            for rows in (1, 3, 33):
                same_bits(k.gate_up(gate.matrix, up.matrix, np.ascontiguousarray(x[:rows])), h[:rows])


@every_build
def test_gate_up_on_several_threads(isa: str, threads: int) -> None:
    rng = np.random.default_rng(9)
    gate, up = weight(rng, "bf16", 777, 256, scale=0.1), weight(rng, "bf16", 777, 256, scale=0.1)
    x = normal(rng, 35, 256)
    h = make(isa, threads, rows=35, hidden_size=256).gate_up(gate.matrix, up.matrix, x)
    within(h, *situ_product(x, gate.values, up.values))
    same_bits(h, make(isa, 1, rows=35, hidden_size=256).gate_up(gate.matrix, up.matrix, x))


@every_isa
def test_the_betas_are_the_models(isa: str) -> None:
    rng = np.random.default_rng(10)
    gate, up = weight(rng, "f32", 20, 32), weight(rng, "f32", 20, 32)
    x = normal(rng, 4, 32)
    k = make(isa, hidden_size=32, situ_beta=1.5, situ_linear_beta=3.0)
    within(k.gate_up(gate.matrix, up.matrix, x), *situ_product(x, gate.values, up.values, 1.5, 3.0))


# Misuse -----------------------------------------------------------------------------------------------------------


def x_of(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def test_wrong_arrays_are_refused() -> None:
    k = make("base", hidden_size=32, rows=4)
    w = Matrix(x_of(8, 32))
    for x in (x_of(2, 31), x_of(2, 64)[:, ::2], np.zeros((2, 32)), x_of(32), x_of(5, 32), x_of(0, 32), None):
        with pytest.raises(ConfigError, match=r"x: expected .* found"):
            k.linear(x, w)
    with pytest.raises(ConfigError, match="1 to 16 matrices"):
        k.linear(x_of(1, 32), *[w] * 17)
    for data, scale in (
        (np.zeros((2, 16), np.uint8), None),
        (np.zeros((2, 15), np.uint8), np.zeros((2, 1), np.uint8)),
        (np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8)),
        (x_of(2, 32), np.zeros((2, 1), np.uint8)),
        (np.zeros((2, 32), np.float16), None),
        (x_of(2, 32)[:, ::2], None),
        (x_of(32), None),
    ):
        with pytest.raises(ConfigError, match="expected"):
            Matrix(data, scale)
    with pytest.raises(ConfigError, match="instruction set 'sse9' is not available"):
        make("sse9")
    with pytest.raises(TypeError, match="unknown dimensions"):
        make("base", hidden=3)
    with pytest.raises(K3Error, match="work buffers are too small"):
        k.linear(x_of(4, 4096), Matrix(x_of(1, 4096)))


@every_isa
def test_callers_that_meet_at_the_pool_get_the_same_bits(isa: str) -> None:
    """The second caller finds the pool busy and runs alone."""
    rng = np.random.default_rng(11)
    w = weight(rng, "bf16", 1030, 512)
    x = normal(rng, 8, 512)
    expected = make(isa, 1, hidden_size=512).linear(x, w.matrix)[0]
    found: list[Array] = []

    def call() -> None:
        k = make(isa, 2, hidden_size=512)
        found.extend(k.linear(x, w.matrix)[0] for _ in range(30))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert len(found) == 120
    for y in found:
        same_bits(y, expected)
