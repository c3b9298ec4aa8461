# SPDX-License-Identifier: MIT
"""Forks, marks, going back, and what automatic marks cost while decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Opener, percentiles, quartiles, seconds, tokens

import k3session as k3

LARGE = [n for n in MODELS if n != "micro"]
CONTEXTS = (0, 32768)


def at(model: k3.Model, n: int, **options: Any) -> k3.Session:
    """A session that holds `n` tokens; long ones get latent rows of a short one, over and over."""
    session = model.session(capacity=n + 4096, **options)
    if n == 0:
        return session
    session.prefill(tokens(model, min(n, 128)))
    if n > 128:
        short = session.snapshot()
        layers = tuple(
            k3.LayerSnapshot(y.conv, y.state, None if y.latent is None else np.tile(y.latent, (n // 128, 1)))
            for y in short.layers
        )
        session.restore(dataclasses.replace(short, position=n, tokens=tokens(model, n), layers=layers))
    return session


@pytest.fixture
def closing() -> Iterator[Callable[[k3.Session], k3.Session]]:
    """Keeps sessions to the end of a round, so that closing them is not timed."""
    kept: list[k3.Session] = []

    def keep(session: k3.Session) -> k3.Session:
        kept.append(session)
        return session

    yield keep
    for session in kept:
        session.close()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_fork(
    benchmark: Any, open_model: Opener, closing: Callable[[k3.Session], k3.Session], name: str, context: int
) -> None:
    """A second session at the same point: nothing of what depends on the context is copied but the ids."""
    model = open_model(name, 1)
    with at(model, context) as s:
        benchmark.group = f"fork {name}"
        benchmark.pedantic(lambda: closing(s.fork()), rounds=50, warmup_rounds=3)
        percentiles(benchmark, model=name, context=context, state_bytes=s.nbytes)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", LARGE)
def test_first_step_of_a_fork(
    benchmark: Any, open_model: Opener, closing: Callable[[k3.Session], k3.Session], name: str, context: int
) -> None:
    """The step that takes a recurrent state of its own, and a copy of the last page where both go on in it."""
    model = open_model(name, 1)
    with at(model, context) as s:
        s.step(1)

        def fresh() -> tuple[tuple[k3.Session], dict[str, Any]]:
            return (closing(s.fork()),), {}

        benchmark.group = f"step {name} after a fork"
        benchmark.pedantic(lambda t: t.step(1), setup=fresh, rounds=20, warmup_rounds=2)
        percentiles(benchmark, model=name, context=context)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_mark(benchmark: Any, open_model: Opener, name: str, context: int) -> None:
    """A point that is kept."""
    model = open_model(name, 1)
    with at(model, context) as s:
        kept: list[k3.Mark] = []
        benchmark.group = f"mark {name}"
        benchmark.pedantic(lambda: kept.append(s.mark()), rounds=100, warmup_rounds=3)
        percentiles(benchmark, model=name, context=context)


@pytest.mark.parametrize("replay", [0, 16, 128])
@pytest.mark.parametrize("name", LARGE)
def test_rewind(benchmark: Any, open_model: Opener, name: str, replay: int) -> None:
    """Back by 64 tokens to a point that lies so many tokens behind the nearest mark."""
    model = open_model(name, 1)
    ids = tokens(model, 512)
    with model.session(marks=False) as s:
        s.prefill(ids[: 400 - replay])
        mark = s.mark()

        def gone_on() -> None:
            s.rewind(mark)
            s.prefill(ids[400 - replay : 464])

        benchmark.group = f"rewind {name}"
        benchmark.pedantic(lambda: s.rewind(400), setup=gone_on, rounds=10, warmup_rounds=1)
        percentiles(benchmark, model=name, replay=replay)


@pytest.mark.parametrize("name", LARGE)
def test_set_tokens_of_a_chat(benchmark: Any, open_model: Opener, name: str) -> None:
    """A history of 512 tokens again with another answer of 16: a mark is there, the answer is computed."""
    model = open_model(name, 1)
    ids = tokens(model, 528)
    others = [np.concatenate([ids[:512], tokens(model, 16, seed=i)]) for i in (1, 2)]
    with model.session() as s:
        s.prefill(ids[:512])
        s.prefill(ids[512:])
        number = 0

        def turn() -> None:
            nonlocal number
            number += 1
            s.set_tokens(others[number % 2])

        benchmark.group = f"set_tokens {name}"
        benchmark.pedantic(turn, rounds=10, warmup_rounds=1)
        percentiles(benchmark, model=name)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "mid"])
def test_decode_with_automatic_marks(benchmark: Any, open_model: Opener, name: str) -> None:
    """512 steps with the two marks that the default keeps on the way, in turns with as many without."""
    model = open_model(name, 1)
    with model.session() as marked, model.session(marks=False) as plain:
        out = np.empty(model.config.vocab_size, np.float32)
        starts = {}
        for s in (marked, plain):
            s.prefill(tokens(model, 16))
            starts[s] = s.mark()

        def decode(s: k3.Session) -> None:
            for _ in range(512):
                s.step(1, out=out)

        benchmark.group = f"512 steps {name}"
        benchmark.pedantic(
            lambda: decode(marked),
            setup=lambda: marked.rewind(starts[marked]) and None,
            rounds=5,
            warmup_rounds=1,
        )
        if benchmark.stats is not None:
            costs = []
            for turn in range(30):
                took = {}
                for s in (marked, plain) if turn % 2 else (plain, marked):
                    s.rewind(starts[s])
                    took[s] = seconds(partial(decode, s))
                costs.append(100 * (took[marked] / took[plain] - 1))
            benchmark.extra_info |= quartiles("marks_cost_percent", costs)
        percentiles(benchmark, model=name)
