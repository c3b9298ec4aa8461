# SPDX-License-Identifier: MIT
"""Small odd shapes that between them launch every kernel, for the checking emulator and for a real GPU against it.

Widths fit no vector and no tile, rows no tile, and matrices with few outputs and many take every tile that there is.
The same inputs every time: what a kernel gives can be compared over schedules, builds and devices, bit by bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from core_access import core
from ops_tools import Array, make, normal, weight

from k3session._core.decoder import Decoder, Scratch
from k3session.presets import PRESETS
from k3session.synth import synth

#: How results begin that tensor cores made: they add in an order of their own, and not to the emulator's bits.
TENSOR_CORES = "tensor cores"

RNG = np.random.default_rng


def rows_of_the_stream() -> Iterator[tuple[str, Array]]:
    """embed, attn_res, rms_norm, residual, finite, top_k."""
    rng = RNG(1)
    for d in (1, 33, 200):
        k = make("cuda", rows=5, vocab_size=7, hidden_size=d)
        for kind in ("bf16", "f32"):
            table = weight(rng, kind, 7, d).matrix
            tokens = np.array([0, 6, -1, 3, 6], np.int32)
            yield f"embed {kind} {d}", k.embed(table, tokens, normal(rng, 5, d))
        bank, s, u = normal(rng, 2, 5, d), normal(rng, 5, d), normal(rng, d, scale=0.2)
        for name, found in zip("hxp", k.attn_res(bank, s, u, normal(rng, d)), strict=True):
            yield f"attn_res {name} {d}", found
        yield f"rms_norm {d}", k.rms_norm(s, normal(rng, d), 1e-5)
        yield f"residual {d}", k.residual(s, normal(rng, 5, d), normal(rng, 5, d), counts=[2, 3])[0]
        bad = k.finite(np.where(np.arange(5)[:, None] == 3, np.nan, s), np.zeros(5, np.int32), 1, 8)
        yield f"finite {d}", np.array([-1 if b is None else b for b in bad])
    for n, count in ((3, 2), (4500, 9)):
        k = make("cuda", rows=2, vocab_size=n)
        for name, found in zip(("ids", "values", "total"), k.top_k(normal(rng, 2, n), count), strict=True):
            yield f"top_k {name} {n}", found


#: Outputs for which a matrix gets each tile, by its rows: see k3_choose_tile in cuda/k3_dot.cuh.
TILES = (
    (33, 1),
    (4300, 1),
    (8500, 1),
    (33, 3),
    (4300, 3),
    (8500, 3),
    (33, 7),
    (8500, 7),
    (33, 17),
    (4300, 17),
    (8500, 17),
)


def matrices() -> Iterator[tuple[str, Array]]:
    """linear and gate_up in every tile and storage."""
    rng = RNG(2)
    k = make("cuda", rows=17, hidden_size=19)
    for outs, rows in TILES:
        x = normal(rng, rows, 19)
        for kind in ("bf16", "f32") if outs == 33 else ("bf16",):
            w, up = (weight(rng, kind, outs, 19).matrix for _ in range(2))
            yield f"linear {kind} {outs} x {rows}", k.linear(x, w)[0]
            yield f"gate_up {kind} {outs} x {rows}", k.gate_up(w, up, x)
    k = make("cuda", rows=9, hidden_size=32)
    for rows in (1, 9):
        w, up = (weight(rng, "mxfp4", 35, 32).matrix for _ in range(2))
        yield f"gate_up mxfp4 {rows}", k.gate_up(w, up, normal(rng, rows, 32))
        yield f"linear mxfp4 {rows}", k.linear(normal(rng, rows, 32), w)[0]
        mixed = [weight(rng, kind, 5, 32).matrix for kind in ("mxfp4", "bf16", "f32")]
        for i, y in enumerate(k.linear(normal(rng, rows, 32), *mixed)):
            yield f"linear mixed {i} {rows}", y


def delta_attention() -> Iterator[tuple[str, Array]]:
    """The ops of KDA, in heads of every size class."""
    rng = RNG(3)
    for heads, keys, values in ((3, 5, 5), (1, 50, 7), (1, 100, 9), (1, 200, 3)):
        C, counts = heads * keys, [1, 3]
        k = make("cuda", rows=4, kda_num_heads=heads, kda_head_k=keys, kda_head_v=values)
        raw, taps, windows = normal(rng, 3, 4, C), normal(rng, 3, 4, C), normal(rng, 2, 3, 3, C)
        q, kk, v, after = k.kda_conv(*raw, taps, windows, counts)
        alpha, beta = k.kda_gates(
            normal(rng, 4, C), normal(rng, 4, heads), np.ones(heads, np.float32), normal(rng, C)
        )
        state = normal(rng, 2, heads, keys, values)
        o, new = k.kda_recurrence(q, kk, normal(rng, 4, heads * values), alpha, beta, state, counts)
        y = k.kda_output(o, normal(rng, 4, heads * values), normal(rng, values))
        found = {
            "q": q,
            "k": kk,
            "v": v,
            "window": after,
            "alpha": alpha,
            "beta": beta,
            "o": o,
            "state": new,
            "y": y,
        }
        yield from ((f"kda {name} {keys}", array) for name, array in found.items())


def latent_attention() -> Iterator[tuple[str, Array]]:
    """The ops of MLA: one piece of a short past, many of a longer one, and a latent too wide for 16 heads at once."""
    rng = RNG(4)
    shapes = (
        (3, 5, 6, 7, 20, 90, np.float32),
        (1, 4, 2, 3, 520, 5, np.float32),
        (17, 3, 2, 5, 12, 70, np.uint16),
    )
    for heads, nope, rope, v, lora, past, dtype in shapes:
        k = make("cuda", rows=3, num_attention_heads=heads, qk_nope_head_dim=nope, qk_rope_head_dim=rope,
                 v_head_dim=v, kv_lora_rank=lora)  # fmt: skip
        positions, counts = [past, 0], [1, 2]
        q, kva = k.mla_rope(
            normal(rng, 3, heads * (nope + rope)), normal(rng, 3, lora + rope), positions, counts
        )
        pages = [[normal(rng, 1, 16, k.latent_stride) for _ in range(past // 16 + 1)] for _ in counts]
        if dtype == np.uint16:
            pages = [[(p.view(np.uint32) >> 16).astype(np.uint16) for p in table] for table in pages]
        k.mla_append(kva, normal(rng, lora), pages, positions, counts)
        w = weight(rng, "bf16", heads * (nope + v), lora).matrix
        qa = k.mla_absorb(q, w)
        oa = k.mla_attend(qa, pages, positions, counts)
        y = k.mla_unabsorb(oa, w, normal(rng, 3, heads * v))
        found = {"q": q, "kva": kva, "qa": qa, "oa": oa, "y": y, "row": pages[0][-1][0, past % 16].copy()}
        yield from ((f"mla {name} {lora}", array) for name, array in found.items())
    # Enough rows that each block goes over its whole context.
    k = make("cuda", rows=260, kv_lora_rank=4, qk_rope_head_dim=2, qk_nope_head_dim=2, v_head_dim=2)
    page = normal(rng, 1, 260, k.latent_stride)
    yield (
        "mla many rows",
        k.mla_attend(normal(rng, 260, 1, k.latent_stride), [[page]] * 65, [0] * 65, [4] * 65),
    )


def experts() -> Iterator[tuple[str, Array]]:
    """The router, and experts with 1, 2, 4 and 8 rows to a tile."""
    rng = RNG(5)
    for E, T, rows, kind in (
        (1, 1, 1, "mxfp4"),
        (7, 3, 1, "bf16"),
        (9, 1, 3, "f32"),
        (5, 1, 3, "mxfp4"),
        (5, 2, 4, "mxfp4"),
        (3, 2, 7, "mxfp4"),
    ):
        latent, inner = (32, 64) if kind == "mxfp4" else (17, 35)
        k = make("cuda", rows=7, num_experts=E, num_experts_per_token=T, routed_expert_hidden_size=latent,
                 moe_intermediate_size=inner)  # fmt: skip
        ids, weights = k.route(normal(rng, rows, E), normal(rng, E, scale=0.1))
        sides = [
            [weight(rng, kind, *shape, 0.2).matrix for _ in range(E)]
            for shape in ((inner, latent), (latent, inner), (inner, latent))
        ]
        yield f"route {E} {rows}", ids
        yield f"route weights {E} {rows}", weights
        z = normal(rng, rows, latent)
        yield f"experts {E} {rows}", k.experts(z, ids, weights, *sides)
        if E > 1:
            yield f"experts {E} {rows} in three calls", k.experts(z, ids, weights, *sides, cuts=(1, E - 1))


def whole_models() -> Iterator[tuple[str, Array]]:
    """Passes with rows that only fill them, several sessions, ends of pages, and a prefill on tensor cores."""
    ids = RNG(6).integers(0, 32, 65).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        path = synth(Path(folder) / "model", replace(PRESETS["micro"], mla_use_nope=False))
        with core(path, isa="cuda", rows=65, segments=3) as c:
            run = c.run(ids[:7], [5, 1, 1], page_rows=3, poison=True)
            yield "model", run.logits
            yield from ((f"model {i} {name}", a) for i, d in enumerate(run.state) for name, a in d.items())
            c.scratch.poison()
            batch = c.batch([run.timeline, c.timeline(bf16=True), c.timeline()], [ids[7:8], ids[:3], ids[:1]])
            yield "model batch", np.concatenate(batch)
            c.decoder = Decoder(c.weights, 1, "base", c.tables, True)
            c.scratch = Scratch(c.decoder, 65, 1)
            for n in (16, 33, 65):
                yield f"{TENSOR_CORES} {n}", c.run(ids[:n], poison=True).logits


GROUPS: tuple[Callable[[], Iterator[tuple[str, Array]]], ...] = (
    rows_of_the_stream,
    matrices,
    delta_attention,
    latent_attention,
    experts,
    whole_models,
)
