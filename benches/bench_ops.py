# SPDX-License-Identifier: MIT
"""Each op by itself, in the shapes of the `mid` preset: time, bytes and operations of one call.

A call may find its weights in the cache, where the call before has left them: the figures hold an op against
itself and do not say how a model runs.  `bench_session.py` and `k3session bench` say that.  The checks of a
call's arguments take 10 to 20 microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import percentiles
from numpy.typing import NDArray

from k3session._core.arguments import Matrix
from k3session._core.kernels import Kernels
from k3session._core.ops import best_isa
from k3session.presets import PRESETS

Array = NDArray[Any]

C = PRESETS["mid"]
EXPERTS = 16  # of 64: enough for every choice of top 8, and quick to draw
CONTEXT = 1024
THREADS = sorted({1, min(2, os.cpu_count() or 1)})
ROWS = (1, 64)
DIMS: dict[str, Any] = {
    "hidden_size": C.hidden_size,
    "kda_num_heads": C.kda_num_heads,
    "kda_head_k": C.kda_head_dim,
    "num_attention_heads": C.num_attention_heads,
    "q_lora_rank": C.q_lora_rank,
    "kv_lora_rank": C.kv_lora_rank,
    "qk_nope_head_dim": C.qk_nope_head_dim,
    "qk_rope_head_dim": C.qk_rope_head_dim,
    "v_head_dim": C.v_head_dim,
    "num_experts": EXPERTS,
    "num_experts_per_token": C.num_experts_per_token,
    "moe_intermediate_size": C.moe_intermediate_size,
    "routed_expert_hidden_size": C.routed_expert_hidden_size,
    "intermediate_size": C.intermediate_size,
    "shared_intermediate_size": C.num_shared_experts * C.moe_intermediate_size,
    "vocab_size": 1024,
}


@dataclass
class Call:
    """One op with its arguments, the bytes that it has to move and its multiplications and additions."""

    run: Callable[[], object]
    nbytes: int
    flops: int


def normal(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def bf16(out: int, columns: int) -> Matrix:
    return Matrix((normal(out, columns).view(np.uint32) >> 16).astype(np.uint16))


def mxfp4(out: int, columns: int) -> Matrix:
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (out, columns // 2), np.uint8)
    return Matrix(packed, np.full((out, columns // 32), 120, np.uint8))


def size(*arrays: Array) -> int:
    return sum(a.nbytes for a in arrays)


def matrices(k: Kernels, R: int, weights: list[Matrix], x: Array) -> Call:
    work = sum(w.shape[0] * w.shape[1] for w in weights)
    return Call(lambda: k.linear(x, *weights), sum(w.nbytes for w in weights) + x.nbytes, 2 * R * work)


def linear_bf16(k: Kernels, R: int) -> Call:
    return matrices(k, R, [bf16(C.kda_dim, C.hidden_size)], normal(R, C.hidden_size))


def linear_mxfp4(k: Kernels, R: int) -> Call:
    return matrices(k, R, [mxfp4(C.kda_dim, C.hidden_size)], normal(R, C.hidden_size))


def linear_f32(k: Kernels, R: int) -> Call:
    return matrices(k, R, [Matrix(normal(C.kda_dim, C.hidden_size))], normal(R, C.hidden_size))


def linear_six(k: Kernels, R: int) -> Call:
    """The projections of a KDA layer, in one dispatch."""
    outs = [C.kda_dim] * 4 + [C.kda_head_dim, C.kda_num_heads]
    return matrices(k, R, [bf16(n, C.hidden_size) for n in outs], normal(R, C.hidden_size))


def gate_up(k: Kernels, R: int) -> Call:
    gate, up = (bf16(DIMS["shared_intermediate_size"], C.hidden_size) for _ in range(2))
    x = normal(R, C.hidden_size)
    return Call(
        lambda: k.gate_up(gate, up, x), gate.nbytes + up.nbytes, 4 * R * gate.shape[0] * gate.shape[1]
    )


def embed(k: Kernels, R: int) -> Call:
    table, tokens = bf16(1024, C.hidden_size), np.arange(R, dtype=np.int32)
    return Call(lambda: k.embed(table, tokens), R * C.hidden_size * 6, 0)


def attn_res(k: Kernels, R: int) -> Call:
    bank, s, u, norm = (
        normal(4, R, C.hidden_size),
        normal(R, C.hidden_size),
        normal(C.hidden_size),
        normal(C.hidden_size),
    )
    return Call(lambda: k.attn_res(bank, s, u, norm), 2 * size(bank, s), 6 * (bank.size + s.size))


def rms_norm(k: Kernels, R: int) -> Call:
    x, norm = normal(R, C.hidden_size), normal(C.hidden_size)
    return Call(lambda: k.rms_norm(x, norm, 1e-5), 2 * x.nbytes, 4 * x.size)


def residual(k: Kernels, R: int) -> Call:
    s, a = normal(R, C.hidden_size), normal(R, C.hidden_size)
    return Call(lambda: k.residual(s, a), 3 * s.nbytes, 3 * s.size)


def kda_conv(k: Kernels, R: int) -> Call:
    raw, taps, windows = normal(3, R, C.kda_dim), normal(3, 4, C.kda_dim), normal(1, 3, 3, C.kda_dim)
    return Call(lambda: k.kda_conv(*raw, taps, windows), 2 * size(raw, windows) + taps.nbytes, 12 * raw.size)


def kda_gates(k: Kernels, R: int) -> Call:
    f, b, A, bias = (
        normal(R, C.kda_dim),
        normal(R, C.kda_num_heads),
        normal(C.kda_num_heads),
        normal(C.kda_dim),
    )
    return Call(lambda: k.kda_gates(f, b, A, bias), 2 * size(f, b), 30 * f.size)


def kda_recurrence(k: Kernels, R: int) -> Call:
    H, D = C.kda_num_heads, C.kda_head_dim
    q, kk, v = normal(3, R, H * D) / np.float32(D**0.5)
    alpha, beta, state = np.full_like(q, 0.99), np.full((R, H), 0.5, np.float32), normal(1, H, D, D)
    return Call(lambda: k.kda_recurrence(q, kk, v, alpha, beta, state), 2 * state.nbytes, 7 * R * state.size)


def kda_output(k: Kernels, R: int) -> Call:
    o, g, norm = normal(R, C.kda_dim), normal(R, C.kda_dim), normal(C.kda_head_dim)
    return Call(lambda: k.kda_output(o, g, norm), 3 * o.nbytes, 20 * o.size)


def kv_b() -> Matrix:
    return bf16(C.num_attention_heads * (C.qk_nope_head_dim + C.v_head_dim), C.kv_lora_rank)


def mla_absorb(k: Kernels, R: int) -> Call:
    w, q = kv_b(), normal(R, C.num_attention_heads * C.qk_head_dim)
    work = C.num_attention_heads * C.qk_nope_head_dim * C.kv_lora_rank
    return Call(lambda: k.mla_absorb(q, w), 2 * work, 2 * R * work)


def mla_unabsorb(k: Kernels, R: int) -> Call:
    w, oa = kv_b(), normal(R, C.num_attention_heads, C.kv_lora_rank)
    g = normal(R, C.num_attention_heads * C.v_head_dim)
    work = C.num_attention_heads * C.v_head_dim * C.kv_lora_rank
    return Call(lambda: k.mla_unabsorb(oa, w, g), 2 * work, 2 * R * work)


def mla_append(k: Kernels, R: int) -> Call:
    pages = [[np.zeros((1, 64, k.latent_stride), np.float32)]]
    kva, norm = normal(R, C.latent_width), normal(C.kv_lora_rank)
    return Call(lambda: k.mla_append(kva, norm, pages, [0]), 2 * kva.nbytes, 4 * kva.size)


def attend(k: Kernels, R: int, dtype: Any) -> Call:
    pages = [[np.zeros((1, 64, k.latent_stride), dtype) for _ in range(CONTEXT // 64 + 1)]]
    k.mla_append(normal(64, C.latent_width), normal(C.kv_lora_rank), pages, [0])
    qa = normal(R, C.num_attention_heads, k.latent_stride)
    seen = CONTEXT * k.latent_stride
    flops = 2 * R * C.num_attention_heads * CONTEXT * (k.latent_stride + C.kv_lora_rank)
    return Call(lambda: k.mla_attend(qa, pages, [CONTEXT - R]), seen * np.dtype(dtype).itemsize, flops)


def mla_attend(k: Kernels, R: int) -> Call:
    return attend(k, R, np.float32)


def mla_attend_bf16(k: Kernels, R: int) -> Call:
    return attend(k, R, np.uint16)


def route(k: Kernels, R: int) -> Call:
    logits, bias = normal(R, EXPERTS), normal(EXPERTS)
    return Call(lambda: k.route(logits, bias), logits.nbytes, 20 * logits.size)


def experts(k: Kernels, R: int) -> Call:
    T, latent, inner = C.num_experts_per_token, C.routed_expert_hidden_size, C.moe_intermediate_size
    sides = [[mxfp4(*s) for _ in range(EXPERTS)] for s in ((inner, latent), (latent, inner), (inner, latent))]
    rng = np.random.default_rng(3)
    ids = np.stack([np.sort(rng.permutation(EXPERTS)[:T]) for _ in range(R)]).astype(np.int32)
    z, weights = normal(R, latent), np.full((R, T), 1 / T, np.float32)
    one = sum(side[0].nbytes for side in sides)
    used = len(np.unique(ids))
    return Call(lambda: k.experts(z, ids, weights, *sides), used * one, 6 * R * T * latent * inner)


OPS = [
    linear_bf16, linear_mxfp4, linear_f32, linear_six, gate_up, embed, attn_res, rms_norm, residual,
    kda_conv, kda_gates, kda_recurrence, kda_output,
    mla_append, mla_absorb, mla_attend, mla_attend_bf16, mla_unabsorb, route, experts,
]  # fmt: skip


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_op(benchmark: Any, op: Callable[[Kernels, int], Call], rows: int, threads: int) -> None:
    """One call; gigabytes and gigaflops per second of its median are in the extra information."""
    k = Kernels(best_isa(), threads, 64, **DIMS)
    call = op(k, rows)
    benchmark.group = f"op {op.__name__}"
    benchmark.pedantic(call.run, rounds=20 if rows > 1 else 100, warmup_rounds=2)
    percentiles(benchmark, rows=rows, threads=threads, isa=k.isa, bytes=call.nbytes, flops=call.flops)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(
            gbytes_per_second=round(call.nbytes / seconds / 1e9, 2),
            gflops_per_second=round(call.flops / seconds / 1e9, 2),
        )
