# SPDX-License-Identifier: MIT
"""Kimi Delta Attention, op by op: convolution, gates, recurrence, output; and the chain of them over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from device import EMULATED
from ops_tools import Array, every_build, every_isa, make, near, normal, rms, same_bits, sigmoid, silu

from k3session._core.kernels import Kernels

HEADS = [(1, 16), (3, 5), (5, 17), (3, 32), (2, 100), (1, 256)]
"""Heads, and channels of each."""


def conv(raw: Array, taps: Array, window: Array) -> tuple[Array, Array]:
    """SiLU of the short convolution of [T, C]; the window is the last K - 1 raw rows."""
    rows = np.concatenate([window, raw]).astype(np.float64)
    out = sum(taps[j].astype(np.float64) * rows[j : j + len(raw)] for j in range(len(taps)))
    return silu(out), rows[len(raw) :]


def unit(y: Array, heads: int, eps: float = 1e-6) -> Array:
    """Unit length per head, eps added to the sum of squares."""
    per_head = y.reshape(len(y), heads, -1)
    return (per_head / np.sqrt(np.sum(per_head**2, axis=-1, keepdims=True) + eps)).reshape(y.shape)


def delta_rule(q: Array, k: Array, v: Array, alpha: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The recurrence over [T, H, K], v [T, H, V], beta [T, H], with the state [H, K, V], in float64."""
    q, k, v, alpha, beta, S = (np.asarray(a, np.float64) for a in (q, k, v, alpha, beta, state))
    S, o = S.copy(), np.empty(v.shape)
    for t in range(len(q)):
        S *= alpha[t][:, :, None]
        r = v[t] - np.einsum("hkv,hk->hv", S, k[t])
        S += (beta[t][:, None] * k[t])[:, :, None] * r[:, None, :]
        o[t] = np.einsum("hkv,hk->hv", S, q[t])
    return o, S


# Convolution ------------------------------------------------------------------------------------------------------


@every_build
@pytest.mark.parametrize("kernel", [1, 2, 4, 5])
def test_conv(isa: str, threads: int, kernel: int) -> None:
    rng = np.random.default_rng(30)
    for heads, dim in HEADS:
        C, counts = heads * dim, [1, 2, 3, 7]
        k = make(isa, threads, kda_num_heads=heads, kda_head_k=dim, conv_kernel=kernel)
        raw = [normal(rng, sum(counts), C) for _ in range(3)]
        taps, windows = normal(rng, 3, kernel, C), normal(rng, len(counts), 3, kernel - 1, C)
        *found, after = k.kda_conv(*raw, taps, windows, counts)
        ends = np.cumsum([0, *counts])
        for n, (a, b) in enumerate(pairwise(ends)):
            for which in range(3):
                y, window = conv(raw[which][a:b], taps[which], windows[n, which])
                if which < 2:
                    y = unit(y, heads) * (dim**-0.5 if which == 0 else 1)
                near(found[which][a:b], y, 2e-6)
                np.testing.assert_array_equal(after[n, which], window)  # raw rows, before the convolution


@every_build
def test_conv_of_a_long_segment_on_several_threads(isa: str, threads: int) -> None:
    rng = np.random.default_rng(31)
    k = make(isa, threads, rows=130, kda_num_heads=5, kda_head_k=48)
    raw, taps, windows = normal(rng, 3, 130, 240), normal(rng, 3, 4, 240), normal(rng, 1, 3, 3, 240)
    *found, after = k.kda_conv(*raw, taps, windows)
    steps = windows
    for t in range(130):
        *one, steps = k.kda_conv(*raw[:, t : t + 1].copy(), taps, steps)
        for a, b in zip(one, found, strict=True):
            same_bits(a[0], b[t])
    same_bits(steps, after)


@every_isa
@pytest.mark.parametrize("size", [1, 1e-1, 1e-2, 1e-3, 1e-4])
def test_length_of_small_vectors(isa: str, size: float) -> None:
    """eps 1e-6 is added to the sum of squares; on the mean it would be 128 times too large."""
    rng = np.random.default_rng(32)
    k = make(isa, rows=4, kda_num_heads=3, kda_head_k=128)
    raw = normal(rng, 3, 4, 384, scale=size)
    taps, windows = np.zeros((3, 4, 384), np.float32), np.zeros((1, 3, 3, 384), np.float32)
    taps[:, -1] = 1  # the last tap is the current token
    q, kk, v, _ = k.kda_conv(*raw, taps, windows)
    near(v, silu(raw[2].astype(np.float64)), 1e-6)
    for found, which, scale in ((q, 0, 128**-0.5), (kk, 1, 1)):
        y = silu(raw[which].astype(np.float64))
        near(found, unit(y, 3) * scale, 1e-6)
        if size <= 1e-3:
            wrong = unit(y, 3, 128e-6) * scale
            assert np.max(np.abs(wrong - found)) > 0.3 * np.max(np.abs(found))


# Gates ------------------------------------------------------------------------------------------------------------


def gates(k: Kernels, z: Array, A_log: float, bias: float) -> Array:
    n = len(z)
    A = np.full(n, np.exp(A_log), np.float32)
    return k.kda_gates(z[None], np.zeros((1, n), np.float32), A, np.full(n, bias, np.float32))[0][0]


@every_isa
def test_decay_is_a_bounded_sigmoid(isa: str) -> None:
    """Log decay -5 sigmoid(e^A z), which is no clamp of the softplus form."""
    z = np.linspace(-20, 20, 161, dtype=np.float32)
    k = make(isa, kda_num_heads=161, kda_head_k=1)
    apart = 0.0
    for A_log in (-2.0, 0.0, 2.0):
        for bias in (-1.0, 0.0, 1.0):
            g = np.log(gates(k, z, A_log, bias).astype(np.float64))
            x = np.float64(np.float32(np.exp(A_log))) * (z.astype(np.float64) + bias)
            # Relative to the bound; e^A z is rounded once, which the slope of the sigmoid makes 2e-7 at most.
            assert np.max(np.abs(g + 5 * sigmoid(x))) < 1e-6
            clamped = np.maximum(-np.exp(A_log) * np.logaddexp(0, z + bias), -5)
            apart = max(apart, float(np.max(np.abs(g - clamped))))
    assert apart > 1


@every_isa
def test_softplus_decay(isa: str) -> None:
    z = np.linspace(-20, 20, 161, dtype=np.float32)
    k = make(isa, kda_num_heads=161, kda_head_k=1, gate_lower_bound=0.0)
    for A_log in (-2.0, 0.0, 2.0):
        for bias in (-1.0, 0.0, 1.0):
            g = -np.float64(np.float32(np.exp(A_log))) * np.logaddexp(0, z.astype(np.float64) + bias)
            alpha = gates(k, z, A_log, bias)
            normal_range = g > -80
            assert (
                np.max(np.abs(alpha / np.exp(g) - 1)[normal_range]) < 1e-5
            )  # g itself is known to 80 * 2^-24
            assert np.max(np.abs(alpha - np.exp(g))) < 5e-7


@every_isa
def test_gates_by_head_and_channel(isa: str) -> None:
    rng = np.random.default_rng(33)
    for heads, dim in HEADS:
        k = make(isa, rows=5, kda_num_heads=heads, kda_head_k=dim)
        f, bias = normal(rng, 5, heads * dim), normal(rng, heads * dim)
        b, A = normal(rng, 5, heads), np.exp(normal(rng, heads))
        alpha, beta = k.kda_gates(f, b, A, bias)
        x = (f.astype(np.float64) + bias).reshape(5, heads, dim) * A[:, None].astype(np.float64)
        near(alpha, np.exp(-5 * sigmoid(x)).reshape(5, -1), 1e-6)
        near(beta, sigmoid(b), 3e-7)  # one number to a head, not doubled


# Recurrence -------------------------------------------------------------------------------------------------------


def parts(rng: np.random.Generator, T: int, H: int, K: int, V: int, slow: float = 0.6) -> dict[str, Array]:
    return {
        "q": unit(normal(rng, T, H * K), H).astype(np.float32) / np.float32(K**0.5),
        "k": unit(normal(rng, T, H * K), H).astype(np.float32),
        "v": normal(rng, T, H * V),
        "alpha": rng.uniform(slow, 1, (T, H * K)).astype(np.float32),
        "beta": rng.uniform(0, 1, (T, H)).astype(np.float32),
    }


def expected(p: dict[str, Array], state: Array) -> tuple[Array, Array]:
    H, K, V = state.shape
    q, k, a = (p[n].reshape(-1, H, K) for n in ("q", "k", "alpha"))
    o, S = delta_rule(q, k, p["v"].reshape(-1, H, V), a, p["beta"], state)
    return o.reshape(-1, H * V), S


@every_build
@pytest.mark.parametrize(
    ("keys", "values"), [(16, 16), (32, 48), (48, 32), (17, 5), (5, 65), (128, 130), (16, 256)]
)
def test_recurrence(isa: str, threads: int, keys: int, values: int) -> None:
    """Keys and values of different number, and a state that is not symmetric: a transpose cannot hide."""
    rng = np.random.default_rng(34)
    k = make(isa, threads, rows=65, kda_num_heads=3, kda_head_k=keys, kda_head_v=values)
    counts = [1, 3, 61]
    p, state = parts(rng, 65, 3, keys, values), normal(rng, 3, 3, keys, values)
    o, after = k.kda_recurrence(*p.values(), state, counts)
    for n, (a, b) in enumerate(pairwise([0, 1, 4, 65])):
        one = {name: x[a:b].copy() for name, x in p.items()}
        want, S = expected(one, state[n])
        near(o[a:b], want, 3e-6)
        near(after[n], S, 3e-6)
        alone = k.kda_recurrence(*one.values(), state[n : n + 1])
        same_bits(alone[0], o[a:b])
        same_bits(alone[1][0], after[n])


@every_build
def test_states_that_no_cache_keeps(isa: str, threads: int) -> None:
    """16 MB and more of old and new state: one row's goes past the caches, and every head has the bits it has alone."""
    rng = np.random.default_rng(35)
    heads, size = 128, 128
    p, state = parts(rng, 3, heads, size, size), normal(rng, 2, heads, size, size)
    k = make(isa, threads, rows=3, kda_num_heads=heads, kda_head_k=size)
    few = make(isa, threads, rows=3, kda_num_heads=2, kda_head_k=size)
    o, after = k.kda_recurrence(*p.values(), state, [1, 2])
    for head in (0, 77, 126):
        some = {
            name: x.reshape(3, heads, -1)[:, head : head + 2].reshape(3, -1).copy() for name, x in p.items()
        }
        alone = few.kda_recurrence(*some.values(), state[:, head : head + 2].copy(), [1, 2])
        same_bits(alone[0], o.reshape(3, heads, -1)[:, head : head + 2].reshape(3, -1).copy())
        same_bits(alone[1], after[:, head : head + 2].copy())


@every_build
def test_state_survives_every_cut(isa: str, threads: int) -> None:
    """200 tokens as one piece, four, or 200."""
    rng = np.random.default_rng(35)
    k = make(isa, threads, rows=200, kda_num_heads=3, kda_head_k=32, kda_head_v=48)
    p, start = parts(rng, 200, 3, 32, 48, slow=0.9), normal(rng, 1, 3, 32, 48)
    whole, after = k.kda_recurrence(*p.values(), start)
    for length in (50, 1):
        state, out = start, []
        for t in range(0, 200, length):
            o, state = k.kda_recurrence(*(x[t : t + length].copy() for x in p.values()), state)
            out.append(o)
        same_bits(np.concatenate(out), whole)
        same_bits(state, after)
    want, S = expected(p, start[0])
    near(whole, want, 1e-5)
    near(after[0], S, 1e-5)


@every_isa
def test_order_of_the_steps(isa: str) -> None:
    """Decay comes before the read of r, the output reads the updated state, and beta scales the write only."""
    k = make(isa, kda_num_heads=1, kda_head_k=1, kda_head_v=1)
    one = np.ones((1, 1), np.float32)
    state = np.full((1, 1, 1, 1), 8, np.float32)
    o, after = k.kda_recurrence(one * 2, one, one * 5, one * 0.5, one * 0.25, state)
    # S = 4; r = 5 - 4 = 1; S = 4 + 0.25; o = 2 S
    assert (after.item(), o.item()) == (4.25, 8.5)


@every_isa
def test_ten_thousand_steps_of_slow_decay(isa: str) -> None:
    rng = np.random.default_rng(36)
    T, K = 500 if EMULATED else 10_000, 16
    k = make(isa, rows=T, kda_num_heads=1, kda_head_k=K)
    p = parts(rng, T, 1, K, K)
    p["alpha"][:] = np.float32(0.9999)
    p["beta"] *= np.float32(0.1)
    start = np.zeros((1, 1, K, K), np.float32)
    after = k.kda_recurrence(*p.values(), start)[1]
    want = expected(p, start[0])[1]
    assert np.max(np.abs(after[0] - want)) / np.max(np.abs(want)) < 1e-5  # the public bound is 1e-3
    # Rounded to BF16 after each token, the state drifts beyond the bound.
    rounded, n = start, 100 if EMULATED else 300
    for t in range(n):
        rounded = k.kda_recurrence(*(x[t : t + 1].copy() for x in p.values()), rounded)[1]
        rounded = ((rounded.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    short = expected({name: x[:n] for name, x in p.items()}, start[0])[1]
    assert np.max(np.abs(rounded[0] - short)) / np.max(np.abs(short)) > 1e-3


# The chain --------------------------------------------------------------------------------------------------------


class Layer:
    """Convolution, gates and recurrence of one KDA layer with its state, fed in pieces."""

    def __init__(self, k: Kernels, rng: np.random.Generator, H: int, D: int, shift: float) -> None:
        self.k, self.C = k, H * D
        self.taps = normal(rng, 3, 4, self.C, scale=0.5)
        self.A = np.exp(normal(rng, H, scale=0.3))
        self.bias = normal(rng, self.C, scale=0.2) + np.float32(shift)
        self.windows = np.zeros((1, 3, 3, self.C), np.float32)
        self.state = np.zeros((1, H, D, D), np.float32)

    def __call__(self, raw: Array, f: Array, b: Array) -> Array:
        q, k, v, self.windows = self.k.kda_conv(*raw, self.taps, self.windows)
        o, self.state = self.k.kda_recurrence(q, k, v, *self.k.kda_gates(f, b, self.A, self.bias), self.state)
        return o


@every_isa
@pytest.mark.parametrize("shift", [-8, -3, -1, 0, 1, 3])
def test_prefill_is_stepping_at_every_decay(isa: str, shift: float) -> None:
    """From a decay of 0.998 a token, as in most real layers, to e^-5."""
    H, D = 3, 32
    for T in (1, 15, 16, 17) if EMULATED else (1, 15, 16, 17, 63, 64, 65, 200):
        rng = np.random.default_rng(37)
        k = make(isa, rows=200, kda_num_heads=H, kda_head_k=D)
        whole, steps = (Layer(k, np.random.default_rng(38), H, D, shift) for _ in range(2))
        raw, f, b = normal(rng, 3, T, H * D), normal(rng, T, H * D, scale=0.5), normal(rng, T, H)
        o = whole(raw, f, b)
        for t in range(T):
            same_bits(steps(raw[:, t : t + 1].copy(), f[t : t + 1], b[t : t + 1])[0], o[t])
        for name in ("windows", "state"):
            same_bits(getattr(steps, name), getattr(whole, name))
        y = [conv(raw[i], whole.taps[i], np.zeros((3, H * D)))[0] for i in range(3)]
        q, kk = unit(y[0], H) * D**-0.5, unit(y[1], H)
        x = whole.A[:, None].astype(np.float64) * (f.astype(np.float64) + whole.bias).reshape(T, H, D)
        per_head = [a.reshape(T, H, D) for a in (q, kk, y[2])]
        want, S = delta_rule(*per_head, np.exp(-5 * sigmoid(x)), sigmoid(b), np.zeros((H, D, D)))
        assert np.max(np.abs(o - want.reshape(T, -1))) / np.max(np.abs(want)) < 5e-6
        assert np.max(np.abs(whole.state[0] - S)) / np.max(np.abs(S)) < 5e-6


# Output -----------------------------------------------------------------------------------------------------------


@every_build
def test_output(isa: str, threads: int) -> None:
    rng = np.random.default_rng(39)
    for heads, dim in HEADS:
        sizes: dict[str, Any] = {"kda_num_heads": heads, "kda_head_k": 8, "kda_head_v": dim}
        k = make(isa, threads, rows=9, **sizes)
        # Small outputs, where eps 1e-5 matters: the scale of q cannot be left out because a norm follows.
        o, g, w = (
            normal(rng, 9, heads * dim, scale=3e-3),
            normal(rng, 9, heads * dim, scale=3),
            normal(rng, dim),
        )
        y = k.kda_output(o, g, w)
        want = rms(o.reshape(9, heads, dim), w, 1e-5).reshape(9, -1) * sigmoid(g)
        near(y, want, 1e-6)
        for rows in (1, 3):
            same_bits(k.kda_output(o[:rows].copy(), g[:rows].copy(), w), y[:rows])
        assert np.max(np.abs(want - rms(o.reshape(9, heads, dim), w, 1e-5).reshape(9, -1) * silu(g))) > 0.1
