# SPDX-License-Identifier: MIT
"""One run of every op, compared bit by bit: over threads, repeats, memory contents, float modes and builds."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_data import altered
from ops_tools import ISAS, Array, every_isa, near, normal, same_bits, weight

from k3session._core.decoder import Decoder, Scratch
from k3session._core.kernels import Kernels
from k3session._core.state import Timeline
from k3session._core.weights import Weights
from k3session.checkpoint import Checkpoint

R, H, D, L, ROPE, NOPE, V = 20, 5, 48, 72, 10, 40, 24
DIMS: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 320, "kda_num_heads": H, "kda_head_k": D, "kda_head_v": 72,
    "num_attention_heads": H, "kv_lora_rank": L, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
    "v_head_dim": V, "num_experts": 30, "num_experts_per_token": 4, "moe_intermediate_size": 160,
    "routed_expert_hidden_size": 96, "intermediate_size": 700,
}  # fmt: skip
COUNTS, POSITIONS = [1, 17, 2], [300, 0, 5000]


class Everything:
    """Fixed inputs for all ops, some at the edge of the subnormals, all large enough for several threads."""

    def __init__(self) -> None:
        rng = np.random.default_rng(70)
        d = DIMS["hidden_size"]
        self.table = weight(rng, "bf16", 50, d).matrix
        self.tokens = rng.integers(0, 50, R).astype(np.int32)
        self.x, self.s = normal(rng, R, d), normal(rng, R, d)
        self.tiny = normal(rng, R, d, scale=1e-38)
        self.bank, self.u, self.norm = normal(rng, 3, R, d), normal(rng, d, scale=0.1), normal(rng, d)
        outs = {"bf16": 500, "f32": 260, "mxfp4": 700}
        self.matrices = [weight(rng, kind, out, d).matrix for kind, out in outs.items()]
        self.gate, self.up = (weight(rng, "bf16", 700, d, scale=0.1).matrix for _ in range(2))
        self.raw, self.taps = normal(rng, 3, R, H * D), normal(rng, 3, 4, H * D)
        self.windows = normal(rng, 3, 3, 3, H * D)
        self.f, self.b = normal(rng, R, H * D, scale=4), normal(rng, R, H, scale=4)
        self.A, self.bias = np.exp(normal(rng, H)), normal(rng, H * D)
        self.v, self.state = normal(rng, R, H * 72), normal(rng, 3, H, D, 72)
        self.o_norm = normal(rng, 72)
        self.kva, self.latent_norm = normal(rng, R, L + ROPE), normal(rng, L)
        self.past = normal(rng, 5056, 96)
        self.past[:, L + ROPE :] = 0
        self.q, self.g = normal(rng, R, H * (NOPE + ROPE)), normal(rng, R, H * V)
        self.kv_b = weight(rng, "bf16", H * (NOPE + V), L).matrix
        self.logits, self.router_bias = normal(rng, R, 30), normal(rng, 30, scale=0.1)
        self.z = normal(rng, R, 96)
        self.experts = [
            [weight(rng, "mxfp4", *shape).matrix for _ in range(30)]
            for shape in ((160, 96), (96, 160), (160, 96))
        ]

    def run(self, k: Kernels) -> dict[str, Array]:
        """Every op once; name -> result."""
        out: dict[str, Any] = {"embed": k.embed(self.table, self.tokens)}
        out["h"], out["mixed"], out["weights"] = k.attn_res(self.bank, self.s, self.u, self.norm)
        for i, y in enumerate(k.linear(self.x, *self.matrices)):
            out[f"linear{i}"] = y
        out["linear_of_subnormals"] = k.linear(self.tiny, *self.matrices)[0]
        out["gate_up"] = k.gate_up(self.gate, self.up, self.x)
        out["rms_norm"] = k.rms_norm(self.x, self.norm, 2.0**-20)
        q, kk, v, out["windows"] = k.kda_conv(*self.raw, self.taps, self.windows, COUNTS)
        out["alpha"], out["beta"] = k.kda_gates(self.f, self.b, self.A, self.bias)
        o, out["state"] = k.kda_recurrence(q, kk, self.v, out["alpha"], out["beta"], self.state, COUNTS)
        out |= {"q": q, "k": kk, "v": v, "o": o, "kda_output": k.kda_output(o, self.v, self.o_norm)}
        rotated, kva = k.mla_rope(self.q, self.kva, POSITIONS, COUNTS)
        table = [self.past[i : i + 64][None].copy() for i in range(0, 5056, 64)]
        pages = [table] * 3
        k.mla_append(kva, self.latent_norm, pages, POSITIONS, COUNTS)
        out["appended"] = np.concatenate([pages[0][4][0, 44:45], pages[0][0][0, :17], pages[0][78][0, 8:10]])
        qa = k.mla_absorb(rotated, self.kv_b)
        oa = k.mla_attend(qa, pages, POSITIONS, COUNTS)
        out |= {"rotated": rotated, "qa": qa, "oa": oa, "mla": k.mla_unabsorb(oa, self.kv_b, self.g)}
        out["long"] = k.mla_attend(qa[18:19].copy(), pages[2:], [5000])  # one row: its pieces run apart
        out["ids"], out["route"] = k.route(self.logits, self.router_bias)
        out["experts"] = k.experts(self.z, out["ids"], out["route"], *self.experts)
        out["residual"] = k.residual(self.s, self.x, self.tiny)[0]
        return out


@pytest.fixture(scope="module")
def everything() -> Everything:
    return Everything()


def equal(a: dict[str, Array], b: dict[str, Array]) -> None:
    for name in a:
        assert np.isfinite(a[name]).all(), name
        try:
            same_bits(a[name], b[name])
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None


@every_isa
def test_threads_repeats_and_poison_change_nothing(isa: str, everything: Everything) -> None:
    """50 runs on several threads, over work buffers that hold NaN or what the last call left."""
    want = everything.run(Kernels(isa, 1, R, poisoned=True, **DIMS))
    clean, poisoned = (Kernels(isa, 3, R, poisoned=p, **DIMS) for p in (False, True))
    for i in range(50):
        equal(everything.run(poisoned if i % 2 else clean), want)


@pytest.mark.skipif("avx512" not in ISAS, reason="this processor has no AVX-512")
def test_avx2_and_avx512_give_the_same_bits(everything: Everything) -> None:
    equal(everything.run(Kernels("avx2", 1, R, **DIMS)), everything.run(Kernels("avx512", 1, R, **DIMS)))


@pytest.mark.skipif(len(ISAS) == 1, reason="this processor has the portable build only")
def test_the_portable_build_is_near(everything: Everything) -> None:
    base, best = (everything.run(Kernels(isa, 1, R, **DIMS)) for isa in (ISAS[0], ISAS[-1]))
    differing = 0
    for name, found in base.items():
        if name == "ids":
            same_bits(found, best[name])
        else:
            near(found, best[name].astype(np.float64), 1e-4)
            differing += not np.array_equal(found, best[name])
    assert differing > 5, "a build that is another's copy would prove nothing"


# Float modes ------------------------------------------------------------------------------------------------------

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the float mode is x86's MXCSR")
FLUSH_AND_ROUND_UP = 0x1F80 | 0x8000 | 0x0040 | 0x4000


@contextmanager
def float_mode(mode: int) -> Iterator[None]:
    """Sets MXCSR in this thread, as a library that flushes subnormals does."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\xae\x17\xc3")  # ldmxcsr [rdi]; ret
    entry = ctypes.addressof(ctypes.c_char.from_buffer(code))
    load = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)
    word, normal_mode = ctypes.c_uint32(mode), ctypes.c_uint32(0x1F80)
    load(ctypes.addressof(word))
    try:
        yield
    finally:
        load(ctypes.addressof(normal_mode))


@on_x86
@every_isa
def test_ops_ignore_the_process_float_mode(isa: str, everything: Everything) -> None:
    one, several = (Kernels(isa, threads, R, **DIMS) for threads in (1, 3))
    want = everything.run(one)
    assert np.any(np.abs(want["linear_of_subnormals"]) < 1.17e-38), "subnormals are at stake"
    with float_mode(FLUSH_AND_ROUND_UP):
        assert np.float32(1e-38) * np.float32(0.1) == 0, "the mode is in force"
        found = everything.run(several)
    equal(found, want)


@on_x86
@every_isa
def test_a_pass_ignores_the_process_float_mode(isa: str, tmp_path: Path) -> None:
    """Projections of subnormal weights end in the convolution window: subnormal, and not zero."""

    def subnormal(tensors: dict[str, Array]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"] &= np.uint16(0x807F)

    folder = altered(tmp_path / "model", edit=subnormal)
    tokens = np.array([3, 1, 4, 1, 5], np.int32)

    with Checkpoint.open(folder) as checkpoint:
        weights = Weights(checkpoint)

    def run() -> tuple[Array, Array]:
        timeline = Timeline(weights)
        logits = np.empty((5, weights.config.vocab_size), np.float32)
        decoder = Decoder(weights, 2, isa)
        decoder.forward(Scratch(decoder, 8), [timeline], [5], tokens, logits=logits, every_row=True)
        return logits, timeline.layers[0].export()["conv"][2]

    logits, window = run()
    assert np.all(np.abs(window) < 1e-35) and np.mean(window != 0) > 0.9
    with float_mode(FLUSH_AND_ROUND_UP):
        logits2, window2 = run()
    same_bits(logits2, logits)
    same_bits(window2, window)
