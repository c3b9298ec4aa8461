# SPDX-License-Identifier: MIT
"""The compiled graph below Session: any checkpoint, instruction set, thread count and chunking, with inner values."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from golden_data import Tensor, relative
from ops_tools import ISAS

from k3session._core.cuda_ops import DeviceMemory, DeviceTables
from k3session._core.decoder import Decoder, Scratch, Taps
from k3session._core.gpu import Device
from k3session._core.ops import hold_pool, release_pool
from k3session._core.weights import Weights
from k3session.checkpoint import Checkpoint
from k3session.placement import PARTS
from k3session.reference import Array, Ints, Reference, State

FULL = os.environ.get("K3_SOAK") == "1"
"""Whether full counts are asked for."""

BEST = ISAS[-1]
ROWS = 128
"""Rows of the largest pass, as in a session."""

NEAR_TIE = 1e-4
"""Where router scores of the last expert chosen and the first one left out are closer, either choice is right."""


def counts(reduced: int, full: int) -> int:
    """How often to try: the second number when full counts are asked for."""
    return full if FULL else reduced


@dataclass
class Run:
    """What came out: logits of every row, inner values by name, state by layer."""

    logits: Tensor
    taps: dict[str, Tensor]
    timeline: Any

    @property
    def state(self) -> list[dict[str, Tensor]]:
        """Arrays of each layer: conv and state, or latent."""
        return [layer.export() for layer in self.timeline.layers]


class Core:
    """An open checkpoint with one scratch; make one with `core`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        isa: str,
        threads: int,
        rows: int,
        segments: int,
        parts: Collection[str] = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.weights = Weights(checkpoint)
        self.tables = DeviceTables(self.weights) if parts or isa == "cuda" else None
        if self.tables is not None:
            self.tables.load(DeviceMemory(Device(0)), frozenset(parts or PARTS))
        self.decoder = Decoder(self.weights, threads, "base" if isa == "cuda" else isa, self.tables)
        self.scratch = Scratch(self.decoder, rows, segments)
        self.rows = rows

    def timeline(self, *, bf16: bool = False, page_rows: int = 64) -> Any:
        """A new timeline at position 0."""
        return self.decoder.timeline(bf16, page_rows)

    def run(
        self,
        tokens: Tensor | Sequence[int],
        chunks: Iterable[int] | None = None,
        *,
        taps: bool = False,
        bf16: bool = False,
        page_rows: int = 64,
        poison: bool = False,
        timeline: Any = None,
    ) -> Run:
        """Feed `tokens` in passes of these lengths; by default in the largest that fit.

        Parameters
        ----------
        taps
            Collect inner values.
        bf16
            Keep the latent cache in BF16.
        poison
            Fill the scratch with NaN before every pass.
        timeline
            Continue this one instead of a new one.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        timeline = self.timeline(bf16=bf16, page_rows=page_rows) if timeline is None else timeline
        logits = np.full((len(ids), self.config.vocab_size), np.nan, np.float32)
        traces: list[dict[str, Tensor]] = []
        start = 0
        for n in passes(len(ids), self.rows) if chunks is None else chunks:
            trace = Taps(self.weights, n) if taps else None
            if poison:
                self.scratch.poison()
            end = start + n
            bad = self.decoder.forward(
                self.scratch, [timeline], [n], ids[start:end], None, logits[start:end], True, trace
            )
            assert bad is None
            if trace is not None:
                traces.append(trace.arrays)
            start = end
        assert start == len(ids) == timeline.position or timeline.position > start
        inner = {k: np.concatenate([t[k] for t in traces]) for k in traces[0]} if traces else {}
        return Run(logits, inner, timeline)

    def batch(self, timelines: Sequence[Any], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """One pass over some tokens for each of several timelines; the logits of all rows, by timeline."""
        takes = [len(t) for t in tokens]
        ids = np.concatenate([np.asarray(t, np.int32) for t in tokens])
        logits = np.full((len(ids), self.config.vocab_size), np.nan, np.float32)
        bad = self.decoder.forward(self.scratch, list(timelines), takes, ids, None, logits, True)
        assert bad is None
        return np.split(logits, np.cumsum(takes)[:-1])


@contextmanager
def core(
    folder: Path,
    *,
    isa: str = BEST,
    threads: int = 1,
    rows: int = ROWS,
    segments: int = 1,
    parts: Collection[str] = (),
) -> Iterator[Core]:
    """Open `folder` for the compiled graph: on the GPU where `isa` is "cuda", or `parts` of it."""
    hold_pool()
    try:
        with Checkpoint.open(folder) as checkpoint:
            yield Core(checkpoint, isa, threads, rows, segments, parts)
    finally:
        release_pool()


def passes(n: int, rows: int) -> list[int]:
    """Lengths of the fewest passes over n tokens."""
    return [rows] * (n // rows) + ([n % rows] if n % rows else [])


def random_chunks(rng: np.random.Generator, n: int, largest: int = ROWS) -> list[int]:
    """A random way to feed n tokens, short passes as likely as long ones."""
    chunks: list[int] = []
    left = n
    while left:
        take = int(min(left, np.exp(rng.uniform(0, np.log(largest + 1)))))
        chunks.append(max(1, take))
        left -= chunks[-1]
    return chunks


# ---------------------------------------------------------------- against the reference


class Judge(Reference):
    """Takes the routes that it is given and notes where its own clear choice is another one."""

    def __init__(self, checkpoint: Checkpoint, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self.disputed: list[str] = []
        self.ties = 0

    def route(self, name: str, x: Array, routes: Ints | None) -> tuple[Ints, Array]:
        assert routes is not None
        top = self.config.num_experts_per_token
        biased = self.router_score(name, x) + self.router_bias(name)
        order = np.argsort(-biased, axis=-1, kind="stable")
        ranked = np.take_along_axis(biased, order, -1)
        clear = np.ones(len(x), bool)
        if top < ranked.shape[1]:
            clear = ranked[:, top - 1] - ranked[:, top] >= NEAR_TIE
        self.ties += int((~clear).sum())
        wrong = (np.sort(order[:, :top], -1) != np.sort(routes, -1)).any(-1) & clear
        self.disputed += [f"{name}, row {r}" for r in np.flatnonzero(wrong)]
        return super().route(name, x, routes)


class Shaken(Judge):
    """The same, off by the rounding of a float32 sum after every matrix, norm and convolution: how well conditioned
    a model is.  What float32 cannot hold, such as a query that is all but orthogonal to its key, moves here as well.
    """

    def __init__(self, checkpoint: Checkpoint, seed: int = 0) -> None:
        super().__init__(checkpoint)
        self.rng = np.random.default_rng(seed)

    def shake(self, x: Array) -> Array:
        size = np.maximum(np.abs(x), np.sqrt(np.mean(x * x, -1, keepdims=True)))
        return x + size * self.rng.uniform(-(2.0**-22), 2.0**-22, x.shape)

    def linear(self, x: Array, name: str) -> Array:
        return self.shake(super().linear(x, name))

    def norm(self, x: Array, name: str) -> Array:
        return self.shake(super().norm(x, name))

    def short_conv(self, name: str, raw: Array, window: Array) -> Array:
        return self.shake(super().short_conv(name, raw, window))


@dataclass
class Judgement:
    """The reference over the routes of the core."""

    logits: Tensor
    taps: dict[str, Tensor]
    state: State
    ties: int


def judge(
    checkpoint: Checkpoint,
    tokens: Tensor | Sequence[int],
    run: Run,
    *,
    chunk: int = 512,
    cls: type[Judge] = Judge,
) -> Judgement:
    """Run the reference over the experts that the core has chosen; every clear choice must be its own as well."""
    model = cls(checkpoint)
    state = model.new_state()
    logits, traces = [], []
    for i in range(0, len(tokens), chunk):
        part = slice(i, i + chunk)
        taps: dict[str, Tensor] = {}
        ids = run.taps["route_ids"][part]
        logits.append(model.forward(np.asarray(tokens[part]), state, taps=taps, routes=ids))
        traces.append(taps)
    assert cls is not Judge or not model.disputed
    inner = {k: np.concatenate([t[k] for t in traces]) for k in traces[0]}
    return Judgement(np.concatenate(logits), inner, state, model.ties)


def disagreements(
    c: Core, tokens: Tensor | Sequence[int], run: Run, tolerance: float = 2e-5
) -> dict[str, str]:
    """What of a run with taps is not within the tolerance of the reference: logits, inner values, state.

    Where a model is so badly conditioned that float32 rounding moves a value by more, ten times that is granted.
    """
    found = _everything(c, inner_values(c, run), run.logits, run.state)
    expected = _judged(c, judge(c.checkpoint, tokens, run))
    errors = {k: relative(found[k], expected[k]) for k in found.keys() & expected.keys()}
    assert "logits" in errors and len(errors) > c.config.num_hidden_layers
    errors = {k: e for k, e in errors.items() if not e < tolerance}
    if errors:
        shaken = _judged(c, judge(c.checkpoint, tokens, run, cls=Shaken))
        noise = {k: relative(shaken[k], expected[k]) for k in errors}
        return {k: f"{e:.2e}, {noise[k]:.2e} by rounding" for k, e in errors.items() if not e < 10 * noise[k]}
    return {}


def _judged(c: Core, judgement: Judgement) -> dict[str, Tensor]:
    states = [
        {k: getattr(layer, k) for k in (("conv", "state") if c.config.is_kda(i) else ("latent",))}
        for i, layer in enumerate(judgement.state.layers)
    ]
    return _everything(c, inner_expected(c.checkpoint, judgement.taps), judgement.logits, states)


def _everything(
    c: Core, inner: dict[str, Tensor], logits: Tensor, states: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    arrays = {f"layers.{i}.{k}": a for i, layer in enumerate(states) for k, a in layer.items()}
    return inner | arrays | {"logits": logits}


def inner_values(c: Core, run: Run) -> dict[str, Tensor]:
    """The inner values of the core under the names, shapes and order of the reference's taps.

    The core normalises q and k in the op that convolves them, and hands out the decay itself, so these have
    other names: ``kda_q``, ``kda_k``, ``kda_decay`` and ``kda_beta``.
    """
    config, t = c.config, run.taps
    n = len(run.logits)
    kda = [i for i in range(config.num_hidden_layers) if config.is_kda(i)]
    mla = [i for i in range(config.num_hidden_layers) if not config.is_kda(i)]
    moe = [i for i in range(config.num_hidden_layers) if config.is_moe(i)]
    values: dict[str, Tensor] = {}
    for name, array in t.items():
        if name.startswith("kda_"):
            array = array[:, kda]
        elif name.startswith("mla_"):
            array = array[:, mla]
        elif name.startswith("moe_"):
            array = array[:, moe]
        elif name in ("embed", "final_mix", "final_normed"):
            array = array[:, 0]
        if array.shape[1]:
            values[name] = array
    if "ffn_out" in values and "moe_shared" in values:
        # In MoE layers that site is the routed part; the running sum takes up both parts.
        values["ffn_out"] = values["ffn_out"].copy()
        values["ffn_out"][:, moe] = values["moe_routed"] + values["moe_shared"]
    heads = (n, len(kda), config.kda_num_heads, config.kda_head_dim)
    for name in ("kda_o", "kda_on"):
        if name in values:
            values[name] = values[name].reshape(heads)
    for name in ("kda_q", "kda_k"):
        if name + "_conv" in values:
            values[name] = values.pop(name + "_conv")
    return values


def inner_expected(checkpoint: Checkpoint, taps: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference's taps (or the golden arrays, which have the same names) under the names of `inner_values`."""
    model = Reference(checkpoint)
    config = checkpoint.config
    # Where channels are rotated, the core's query and row have been already.
    left_out = {"route_ids", "route_wts", "margin", *([] if config.mla_use_nope else ["mla_q", "mla_kva"])}
    values = {k: np.asarray(v) for k, v in taps.items() if k not in left_out}
    if "kda_q_conv" in values:
        shape = (*values["kda_q_conv"].shape[:2], config.kda_num_heads, config.kda_head_dim)
        flat = values["kda_q_conv"].shape
        q, k = (np.float64(values.pop(f"kda_{x}_conv")).reshape(shape) for x in "qk")
        values["kda_q"], values["kda_k"] = model.kda_query(q).reshape(flat), model.l2norm(k).reshape(flat)
    if "kda_graw" in values:
        raw, decay = np.float64(values.pop("kda_graw")), []
        for j, i in enumerate(config.kda_layers):
            at = f"model.layers.{i}.self_attn"
            z = raw[:, j] + model.weight(f"{at}.dt_bias")
            decay.append(np.exp(model.decay_form(z, np.exp(model.a_log(at)))))
        values["kda_decay"] = np.stack(decay, 1)
        values["kda_beta"] = 1 / (1 + np.exp(-np.float64(values.pop("kda_braw"))))
    return values


def sorted_routes(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Expert ids ascending, with their weights; rows of dense layers as -1 and 0."""
    order = np.argsort(ids, -1, kind="stable")
    ids, weights = np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)
    return ids, np.where(ids < 0, 0, weights)


# ---------------------------------------------------------------- under the tests of deliberate mistakes


class CoreImplementation:
    """The compiled graph, as `golden_data.Implementation`."""

    golden_tolerance = 3e-5
    reference_tolerance = 2e-5

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self.name = f"core-{isa}"

    def logits(self, folder: Path, tokens: Tensor, chunks: Sequence[int]) -> Tensor:
        """Logits of every position, fed in chunks of these lengths."""
        with core(folder, isa=self.isa, threads=2) as c:
            return c.run(tokens, chunks, poison=True).logits
