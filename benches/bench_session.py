# SPDX-License-Identifier: MIT
"""Latency of a session: step, prefill, snapshot, save and load, and what Python adds to a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Opener, percentiles, tokens

import k3session as k3

THREADS = sorted({1, min(2, os.cpu_count() or 1)})
CONTEXTS = {"micro": (16,), "tiny": (16, 1024), "shakespeare": (16, 1024), "mid": (16, 512)}


def rounds(name: str) -> int:
    """Steps to time: the large model takes tens of milliseconds for one."""
    return 40 if name == "mid" else 400


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("name", "context"), [(n, c) for n in MODELS for c in CONTEXTS[n]])
def test_step(benchmark: Any, open_model: Opener, name: str, context: int, threads: int) -> None:
    """One token at a context length: p50 and p99 are in the extra information."""
    model = open_model(name, threads)
    with model.session() as s:
        s.prefill(tokens(model, context))
        out = np.empty(model.config.vocab_size, np.float32)
        benchmark.group = f"step {name}"
        benchmark.pedantic(s.step, args=(1,), kwargs={"out": out}, rounds=rounds(name), warmup_rounds=3)
        percentiles(benchmark, model=name, context=context, threads=threads)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("n", [128, 512])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "micro"])
def test_prefill(benchmark: Any, open_model: Opener, name: str, n: int, threads: int) -> None:
    """A prompt of n tokens into an empty session."""
    model = open_model(name, threads)
    ids = tokens(model, n)
    sessions: list[k3.Session] = []

    def fresh() -> tuple[tuple[k3.Session], dict[str, Any]]:
        while sessions:
            sessions.pop().close()
        sessions.append(model.session())
        return (sessions[0],), {}

    benchmark.group = f"prefill {name}"
    benchmark.pedantic(
        lambda s: s.prefill(ids), setup=fresh, rounds=3 if name == "mid" else 10, warmup_rounds=1
    )
    sessions.pop().close()
    percentiles(benchmark, model=name, tokens=n, threads=threads)
    if benchmark.stats is not None:
        benchmark.extra_info["tokens_per_second"] = round(n / benchmark.stats.stats.median, 1)


@pytest.mark.parametrize("action", ["snapshot", "restore", "save", "load", "to_bytes", "from_bytes"])
@pytest.mark.parametrize("name", MODELS)
def test_snapshot(benchmark: Any, open_model: Opener, tmp_path: Path, name: str, action: str) -> None:
    """State to memory and to disk, and back, after 512 tokens."""
    model = open_model(name, THREADS[-1])
    path = tmp_path / "s.k3s"
    with model.session() as s:
        s.prefill(tokens(model, 512))
        snap, size = s.snapshot(), s.save(path)
        data = snap.to_bytes()
        actions = {
            "snapshot": s.snapshot,
            "restore": lambda: s.restore(snap),
            "save": lambda: s.save(path),
            "load": lambda: k3.Session.load(model, path).close(),
            "to_bytes": snap.to_bytes,
            "from_bytes": lambda: k3.Snapshot.from_bytes(data),
        }
        benchmark.group = f"snapshot {name}"
        benchmark.pedantic(actions[action], rounds=20, warmup_rounds=2)
        percentiles(benchmark, model=name, bytes=size)


@pytest.mark.parametrize("part", ["step", "pass"])
def test_python_overhead(benchmark: Any, open_model: Opener, part: str) -> None:
    """A step of the smallest model there is, and the compiled pass inside it: the difference is what Python adds."""
    model = open_model("micro", 1)
    with model.session() as s:
        s.prefill([1, 2, 3])
        out = np.empty(model.config.vocab_size, np.float32)
        ids, row = np.ones(1, np.int32), np.empty((1, out.size), np.float32)
        step = lambda: s.step(1, out=out)  # noqa: E731
        inner = lambda: s._decoder.forward(s._scratch, [s._timeline], [1], ids, None, row)  # noqa: E731
        benchmark.group = "python overhead"
        # Ten in a row, as a loop would: a single call between two readings of the clock finds cold caches.
        benchmark.pedantic(step if part == "step" else inner, rounds=100, iterations=10, warmup_rounds=2)
        percentiles(benchmark, model="micro")
