# SPDX-License-Identifier: MIT
"""exp, tanh, sigmoid, SiTU, softplus, sin and cos, seen through ops that hand their results out plainly."""

from __future__ import annotations

import numpy as np
import pytest
from ops_tools import Array, every_isa, make, same_bits, sigmoid, situ

from k3session._core.arguments import Matrix
from k3session._core.kernels import Kernels

EXACT = 3e-7
"""Relative: a handful of roundings.  No function here is allowed to be worse."""

LARGEST = float(np.finfo(np.float32).max)


def grid(low: float, high: float, n: int) -> Array:
    rng = np.random.default_rng(1)
    return np.sort(rng.uniform(low, high, n)).astype(np.float32)


def relative(found: Array, expected: Array) -> float:
    return float(np.max(np.abs(found.astype(np.float64) - expected) / np.abs(expected)))


def sigmoid_vector(isa: str, x: Array) -> Array:
    """sigmoid as 16 lanes see it: the KDA output gate on rows of ones, whose norm is exactly one."""
    k = make(isa, kda_num_heads=1, kda_head_k=len(x), rms_norm_eps=0.0)
    return k.kda_output(np.ones((1, len(x)), np.float32), x[None], np.ones(len(x), np.float32))[0]


def sigmoid_scalar(isa: str, x: Array) -> Array:
    """sigmoid of one number at a time: the write strength."""
    k = make(isa, kda_num_heads=len(x), kda_head_k=1)
    zeros, ones = np.zeros(len(x), np.float32), np.ones(len(x), np.float32)
    return k.kda_gates(zeros[None], x[None], ones, zeros)[1][0]


def exp_negative(isa: str, x: Array) -> Array:
    """e^x for x <= 0: an AttnRes weight beside a source that scores exactly zero."""
    k = make(isa, hidden_size=1, rms_norm_eps=3.0)  # a one divided by sqrt(1 + 3) is a half
    zero, one, norm = np.zeros((1, 1, 1), np.float32), np.ones((1, 1), np.float32), np.ones(1, np.float32)
    p = np.array([k.attn_res(zero, one, np.array([2 * v]), norm)[2][0] for v in x])
    return p[:, 1] / p[:, 0]


@every_isa
def test_sigmoid(isa: str) -> None:
    x = grid(-87, 40, 4000)
    assert relative(sigmoid_vector(isa, x), sigmoid(x)) < EXACT


@every_isa
def test_scalar_and_vector_forms_give_the_same_bits(isa: str) -> None:
    x = np.concatenate(
        [grid(-110, 110, 3000), np.array([0, -0.0, 1e-40, -1e-40, LARGEST, -LARGEST], np.float32)]
    )
    same_bits(sigmoid_vector(isa, x), sigmoid_scalar(isa, x))


@every_isa
def test_exp_below_zero_down_to_the_subnormals(isa: str) -> None:
    x = grid(-87, 0, 1000)
    assert relative(exp_negative(isa, x), np.exp(x.astype(np.float64))) < EXACT
    x = np.array([-88, -95, -100, -103], np.float32)  # subnormal results: half a unit of the last place
    assert np.max(np.abs(exp_negative(isa, x) - np.exp(x.astype(np.float64)))) < 2**-149
    assert np.all(exp_negative(isa, x) > 0)
    assert np.all(exp_negative(isa, np.array([-104.5, -1000, -LARGEST / 4], np.float32)) == 0)


@every_isa
def test_sigmoid_at_the_ends(isa: str) -> None:
    x = np.array([-LARGEST, -1e4, -104, 104, 1e4, LARGEST, -np.inf, np.inf], np.float32)
    for found in (sigmoid_vector(isa, x), sigmoid_scalar(isa, x)):
        assert found.tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    nan = np.array([np.nan], np.float32)
    assert np.isnan(sigmoid_vector(isa, nan)[0]) and np.isnan(sigmoid_scalar(isa, nan)[0])


@every_isa
def test_silu_falls_to_zero_on_the_left(isa: str) -> None:
    x = np.array([-LARGEST, -1e4, -200, -90, 90, 1e4], np.float32)
    k = make(isa, kda_num_heads=len(x), kda_head_k=1, conv_kernel=1)
    conv1d, windows = np.ones((3, 1, len(x)), np.float32), np.zeros((1, 3, 0, len(x)), np.float32)
    v = k.kda_conv(x[None], x[None], x[None], conv1d, windows)[2][0]
    assert np.all(np.abs(v[:4]) < 1e-36) and v[4:].tolist() == [90, 1e4]


class Activation:
    """SiTU of given pairs: identity weights hand g to the gate and u to the other half."""

    def __init__(self, isa: str, n: int = 128) -> None:
        eye, zero = np.eye(n, dtype=np.float32), np.zeros((n, n), np.float32)
        self.gate, self.up = Matrix(np.hstack([eye, zero])), Matrix(np.hstack([zero, eye]))
        self.kernels: Kernels = make(isa, hidden_size=2 * n)
        self.n = n

    def __call__(self, g: Array, u: Array) -> Array:
        x = np.concatenate([g.reshape(-1, self.n), u.reshape(-1, self.n)], axis=1)
        return self.kernels.gate_up(self.gate, self.up, x).reshape(-1)


@every_isa
@pytest.mark.parametrize("sigma", [0.01, 1, 3, 10, 30])
def test_situ(isa: str, sigma: float) -> None:
    """The public bound is 1e-4; an approximation of tanh in half precision has 2e-2."""
    rng = np.random.default_rng(2)
    g, u = (rng.standard_normal((2, 128 * 64)) * sigma).astype(np.float32)
    g = np.maximum(g, -80)  # further left the result is subnormal
    expected = situ(g.astype(np.float64), u.astype(np.float64))
    assert relative(Activation(isa)(g, u), expected) < 6e-7
    coarse = 25 * (np.tanh(u / np.float32(25)).view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert relative(situ(g.astype(np.float64), u) / (25 * np.tanh(u / 25)) * coarse, expected) > 1e-4
    if sigma >= 1:
        assert relative(g * sigmoid(g) * u, expected) > 0.1, "SiLU must not pass for SiTU"


@every_isa
def test_tanh_where_the_two_formulas_meet(isa: str) -> None:
    x = np.concatenate([grid(0.55, 0.7, 1000), grid(1e-6, 1e-2, 1048)]).astype(np.float32)
    g = np.full_like(x, 60.0)  # 4 tanh(15) sigmoid(60) is 4 to the last bit
    found = Activation(isa)(g, x * np.float32(25)) / 100.0
    assert relative(found, np.tanh((x * np.float32(25)).astype(np.float64) / 25)) < EXACT
    same_bits(Activation(isa)(g, -x), -Activation(isa)(g, x))


@every_isa
def test_situ_is_bounded_for_any_input(isa: str) -> None:
    ends = np.array([0, 1e-30, 1, 88, 104, 1e4, 1e30, LARGEST], np.float32)
    ends = np.concatenate([ends, -ends])
    g, u = (a.reshape(-1) for a in np.meshgrid(ends, ends))
    found = Activation(isa)(g, u)
    assert np.all(np.abs(found) <= 100)
    expected = situ(g.astype(np.float64), u.astype(np.float64))
    assert np.max(np.abs(found - expected)) < 1e-4
    assert (
        abs(float(Activation(isa)(np.full(128, 1e4, np.float32), np.full(128, -1e4, np.float32))[0]) + 100)
        < 1e-5
    )


@every_isa
def test_softplus(isa: str) -> None:
    """log(1 + e^z) from the softplus decay, e^(-A softplus(z)), with A such that the exponent is about -1."""
    z = np.concatenate([grid(-60, 60, 1500), np.array([0, -1e-3, 1e-3, 0.3465736, -17, 17], np.float32)])
    expected = np.logaddexp(0, z.astype(np.float64))
    A = (1 / expected).astype(np.float32)
    k = make(isa, kda_num_heads=len(z), kda_head_k=1, gate_lower_bound=0.0)
    alpha = k.kda_gates(z[None], z[None], A, np.zeros(len(z), np.float32))[0][0]
    found = -np.log(alpha.astype(np.float64)) / A
    assert relative(found, expected) < 5e-7
    ends = np.array([-LARGEST, -1e4, 1e4, LARGEST, np.nan], np.float32)
    k = make(isa, kda_num_heads=5, kda_head_k=1, gate_lower_bound=0.0)
    alpha = k.kda_gates(ends[None], ends[None], np.ones(5, np.float32), np.zeros(5, np.float32))[0][0]
    assert alpha[:4].tolist() == [1, 1, 0, 0] and np.isnan(alpha[4])


@every_isa
@pytest.mark.parametrize("position", [0, 1, 2, 1000, 131_071, 1_048_575, 2**31 - 1])
def test_cos_and_sin(isa: str, position: int) -> None:
    """Positions are multiplied in double: a float32 angle is a tenth of a radian off at a million."""
    rope, theta = 64, 10000.0
    k = make(isa, qk_nope_head_dim=1, qk_rope_head_dim=rope, rope_theta=theta)
    q = np.concatenate([[0], np.ones(rope // 2), np.zeros(rope // 2)]).astype(np.float32)[None]
    turned = k.mla_rope(q, np.zeros((1, 16 + rope), np.float32), [position])[0][0, 1:]
    angle = np.longdouble(position) * np.longdouble(theta) ** (
        -2 * np.arange(rope // 2, dtype=np.longdouble) / rope
    )
    # Half a unit of the last place, and what a double frequency is off after so many positions.
    bound = 2**-25 + position * 2.0**-52
    assert np.max(np.abs(turned[: rope // 2] - np.cos(angle))) < bound
    assert np.max(np.abs(turned[rope // 2 :] - np.sin(angle))) < bound
    if position == 1_048_575:
        coarse = np.float32(position) * (theta ** (-2 * np.arange(rope // 2) / rope)).astype(np.float32)
        assert np.max(np.abs(np.cos(coarse) - np.cos(angle))) > 1e-3
