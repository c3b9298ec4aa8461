# SPDX-License-Identifier: MIT
"""What the tests of single ops share: the builds to run, weights with their exact values, and comparisons."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from device import ON_GPU
from numpy.typing import NDArray

from k3session._core.arguments import Matrix
from k3session._core.kernels import Kernels
from k3session._core.ops import ISAS as EVERY_ISA
from k3session._core.ops import best_isa

Array = NDArray[Any]

#: The sets of ops that are tested: those of this processor, or the GPU's.
ISAS = ("cuda",) if ON_GPU else EVERY_ISA[: EVERY_ISA.index(best_isa()) + 1]
BUILDS = [(isa, threads) for isa in ISAS for threads in ((1,) if ON_GPU else (1, 2))]

every_build = pytest.mark.parametrize(("isa", "threads"), BUILDS, ids=[f"{i}-{t}" for i, t in BUILDS])
every_isa = pytest.mark.parametrize("isa", ISAS)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
ROUNDING = 2.0**-24


class Weight(NamedTuple):
    """A matrix as the ops take it, and its exact values."""

    matrix: Matrix
    values: Array  # float64[out, in]


def make(isa: str, threads: int = 1, rows: int = 64, **dims: Any) -> Kernels:
    """Kernels whose work buffers hold NaN before each call."""
    return Kernels(isa, threads, rows, poisoned=True, **dims)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """Normal float32 values."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def weight(rng: np.random.Generator, kind: str, out: int, columns: int, scale: float = 1.0) -> Weight:
    """A random matrix: "bf16", "f32" or "mxfp4", or these at an odd address with "-odd" behind."""
    kind, _, place = kind.partition("-")
    at = 1 if place else 0
    if kind == "mxfp4":
        packed = rng.integers(0, 256, (out, columns // 2), np.uint8)
        middle = 126 + round(np.log2(scale))
        codes = rng.integers(middle - 3, middle + 2, (out, columns // 32), np.uint8)
        return Weight(Matrix(moved(packed, at), codes), mxfp4_values(packed, codes))
    values = normal(rng, out, columns, scale=scale)
    if kind == "f32":
        return Weight(Matrix(moved(values, at)), values.astype(np.float64))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Weight(Matrix(moved(bits, at)), bf16_values(bits))


def moved(array: Array, at: int) -> Array:
    """The same array, `at` bytes past an aligned address."""
    memory = np.zeros(array.nbytes + at, np.uint8)
    memory[at:] = array.reshape(-1).view(np.uint8)
    return np.frombuffer(memory.data, array.dtype, array.size, at).reshape(array.shape)


def bf16_values(bits: Array) -> Array:
    """Exact values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mxfp4_values(packed: Array, codes: Array) -> Array:
    """Exact values of an MXFP4 matrix: low nibble first, 32 columns to a scale 2^(code - 127)."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return E2M1[nibbles] * np.repeat(np.ldexp(1.0, codes.astype(int) - 127), 32, axis=1)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) in float64."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def silu(x: Array) -> Array:
    """x sigmoid(x) in float64."""
    return x * sigmoid(x)


def rms(x: Array, w: Array, eps: float) -> Array:
    """w x / sqrt(mean(x^2) + eps) over the last axis, in float64."""
    x = np.asarray(x, np.float64)
    return w * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def situ(g: Array, u: Array, beta: float = 4.0, linear_beta: float = 25.0) -> Array:
    """SiTU-GLU in float64."""
    return beta * np.tanh(g / beta) * sigmoid(g) * linear_beta * np.tanh(u / linear_beta)


def product(x: Array, w: Array) -> tuple[Array, Array]:
    """x W^T in float64, and the largest error that float32 sums in 16 lanes may have."""
    x = np.asarray(x, np.float64)
    # Each lane adds columns / 16 products, two roundings each where there is no fused multiply-add.
    return x @ w.T, ROUNDING * (2 * (w.shape[1] // 16 + 2) + 6) * (np.abs(x) @ np.abs(w).T)


def situ_product(
    x: Array, gate: Array, up: Array, beta: float = 4.0, linear_beta: float = 25.0
) -> tuple[Array, Array]:
    """SiTU(x gate^T, x up^T) in float64, and the largest error that follows from those of the two products."""
    (g, dg), (u, du) = product(x, gate), product(x, up)
    h = situ(g, u, beta, linear_beta)
    # No slope of beta tanh(g / beta) sigmoid(g) exceeds 1.2, none of linear_beta tanh(u / linear_beta) exceeds 1.
    return h, 1.2 * dg * np.abs(u) + du * np.abs(g) + dg * du + 1e-6 * np.abs(h)


class Layer:
    """The routed experts of one layer, with exact values beside them."""

    def __init__(self, rng: np.random.Generator, kind: str, E: int, T: int, latent: int, inner: int) -> None:
        scale = 0.5 * latent**-0.5
        self.w1 = [weight(rng, kind, inner, latent, scale) for _ in range(E)]
        self.w2 = [weight(rng, kind, latent, inner, scale) for _ in range(E)]
        self.w3 = [weight(rng, kind, inner, latent, scale) for _ in range(E)]
        self.dims = {
            "num_experts": E,
            "num_experts_per_token": T,
            "routed_expert_hidden_size": latent,
            "moe_intermediate_size": inner,
        }

    def run(self, k: Kernels, z: Array, ids: Array, weights: Array) -> Array:
        return k.experts(z, ids, weights, *([w.matrix for w in side] for side in (self.w1, self.w2, self.w3)))

    def expected(self, z: Array, ids: Array, weights: Array, hidden: float = 0.0) -> tuple[Array, Array]:
        """The sum in float64, and the largest error of float32, beside a relative one of each hidden value."""
        u, bound = np.zeros(z.shape), np.zeros(z.shape)
        for r in range(len(z)):
            for e, w in zip(ids[r], weights[r].astype(np.float64), strict=True):
                h, dh = situ_product(z[r], self.w1[e].values, self.w3[e].values)
                y, dy = product(h, self.w2[e].values)
                u[r] += w * y
                bound[r] += w * (
                    dy + np.abs(self.w2[e].values) @ (dh + hidden * np.abs(h)) + 1e-6 * np.abs(y)
                )
        return u, bound + 1e-6 * np.abs(u)


def choices(rng: np.random.Generator, rows: int, E: int, T: int) -> tuple[Array, Array]:
    ids = np.stack([np.sort(rng.permutation(E)[:T]) for _ in range(rows)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1, (rows, T)).astype(np.float32)


def within(found: Array, expected: Array, bound: Array | float) -> None:
    """Every element within its bound; NaN is never within."""
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    excess = np.abs(found.astype(np.float64) - expected) - (np.asarray(bound) + 1e-37)
    at = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
    good = excess[at] <= 0
    assert good, (
        f"at {tuple(map(int, at))}: {found[at]!r}, expected {expected[at]!r}, off by {excess[at]} too much"
    )


def near(found: Array, expected: Array, tolerance: float) -> None:
    """Every element within `tolerance` of the largest one expected in its row."""
    within(found, expected, tolerance * np.max(np.abs(expected), axis=-1, keepdims=True))


def same_bits(a: Array, b: Array) -> None:
    """Equal in every bit; NaN equals NaN of the same bits."""
    assert a.shape == b.shape and a.dtype == b.dtype
    unequal = np.flatnonzero(a.reshape(-1).view(f"u{a.itemsize}") != b.reshape(-1).view(f"u{b.itemsize}"))
    assert not unequal.size, f"{unequal.size} of {a.size} elements differ, the first at {unequal[0]}"
