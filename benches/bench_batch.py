# SPDX-License-Identifier: MIT
"""Many sessions in one pass, drafts, and speculation, each against the same tokens stepped."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Opener, percentiles, quartiles, seconds, tokens

import k3session as k3
from k3session.speculative import NgramDrafter, speculate

THREADS = sorted({1, min(2, os.cpu_count() or 1)})
NAMES = [n for n in MODELS if n != "micro"]
CONTEXT = 16


def rounds(name: str) -> int:
    """How often to time: the large model takes most of a second for a pass of many rows."""
    return 7 if name == "mid" else 60


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", NAMES)
def test_batch(benchmark: Any, open_model: Opener, name: str, n: int, threads: int) -> None:
    """One token in each of n sessions: tokens per second of all together."""
    model = open_model(name, threads)
    with ExitStack() as stack:
        sessions = [stack.enter_context(model.session(marks=False)) for _ in range(n)]
        for i, session in enumerate(sessions):
            session.prefill(tokens(model, CONTEXT, seed=i))
        pairs = list(zip(sessions, tokens(model, n).tolist(), strict=True))
        benchmark.group = f"batch {name}"
        benchmark.pedantic(model.step, args=(pairs,), rounds=rounds(name), warmup_rounds=2)
        if benchmark.stats is not None and n > 1:
            # Against one of them alone, in turns: a machine is not the same from minute to minute.
            gains = []
            for _ in range(2 * rounds(name)):
                alone = seconds(lambda: model.step(pairs[:1]))
                gains.append(n * alone / seconds(lambda: model.step(pairs)))
            benchmark.extra_info |= quartiles("times_one", gains)
    percentiles(benchmark, model=name, sessions=n, threads=threads)
    if benchmark.stats is not None:
        benchmark.extra_info["tokens_per_second"] = round(n / benchmark.stats.stats.median, 1)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("name", NAMES)
def test_verify(benchmark: Any, open_model: Opener, name: str, n: int) -> None:
    """A draft of n tokens of which half are accepted; beside it, in the extra information, that half stepped."""
    model = open_model(name, THREADS[-1])
    ids = tokens(model, n)
    half = (n + 1) // 2
    with model.session(marks=False) as s:
        s.prefill(tokens(model, CONTEXT))

        def verify() -> None:
            with s.verify(ids) as d:
                d.accept(half)

        benchmark.group = f"verify {name}"
        benchmark.pedantic(verify, rounds=rounds(name), warmup_rounds=2)
        took = []
        for _ in range(rounds(name) if benchmark.stats is not None else 1):
            took.append(seconds(lambda: [s.step(token) for token in ids[:half]]))
    percentiles(benchmark, model=name, tokens=n, accepted=half, threads=THREADS[-1])
    benchmark.extra_info["stepped_us"] = round(statistics.median(took) * 1e6, 2)


@pytest.mark.parametrize("how", ["generate", "ngrams"])
def test_speculation(benchmark: Any, open_model: Opener, how: str) -> None:
    """64 greedy tokens of the shipped model, after a text that repeats itself."""
    model = open_model("shakespeare", THREADS[-1])
    prompt = np.tile(tokens(model, 20), 6)
    sampling = k3.Sampling(temperature=0, stop_ids=())
    with model.session() as s:
        s.prefill(prompt)
        start = s.mark()

        def run() -> tuple[int, int]:
            s.rewind(start)
            if how == "generate":
                return len(list(s.generate(64, sampling=sampling))), 0
            loop = speculate(s, NgramDrafter(), 64, sampling=sampling)
            return len(list(loop)), loop.accepted

        benchmark.group = "speculation shakespeare"
        count, accepted = benchmark.pedantic(run, rounds=10, warmup_rounds=1)
    percentiles(benchmark, model="shakespeare", tokens=count, accepted=accepted, threads=THREADS[-1])
