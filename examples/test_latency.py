# SPDX-License-Identifier: MIT
"""Latency of a model in your own pytest-benchmark suite.

    pip install pytest-benchmark
    pytest examples/test_latency.py --benchmark-autosave             # keep this run
    pytest examples/test_latency.py --benchmark-compare              # hold the next one against it
    pytest examples/test_latency.py --benchmark-compare --benchmark-compare-fail=median:10%

Put your model's folder into `Model.open()`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import k3session as k3

PROMPT = list(range(65, 91)) * 5  # 130 tokens: what is in them does not matter for time
TOKEN = 70


@pytest.fixture(scope="module")
def model() -> Iterator[k3.Model]:
    with k3.Model.open() as opened:
        yield opened


@pytest.fixture
def session(model: k3.Model) -> Iterator[k3.Session]:
    with model.session() as s:
        s.prefill(PROMPT)
        yield s


def test_step(benchmark: BenchmarkFixture, session: k3.Session) -> None:
    """One token.  Each round begins from the same snapshot, so that every round has the same context."""
    start = session.snapshot()

    def setup() -> tuple[tuple[int], dict[str, object]]:
        session.restore(start)
        return (TOKEN,), {}

    benchmark.pedantic(session.step, setup=setup, rounds=200, warmup_rounds=5)


def test_prefill(benchmark: BenchmarkFixture, model: k3.Model) -> None:
    """Time to the first token's logits."""

    def first() -> None:
        with model.session() as s:
            s.prefill(PROMPT)

    benchmark.pedantic(first, rounds=10, warmup_rounds=1)


def test_save(benchmark: BenchmarkFixture, session: k3.Session, tmp_path: Path) -> None:
    """A snapshot on the disk, flushed and renamed."""
    benchmark.pedantic(session.save, args=(tmp_path / "latency.k3s",), rounds=10, warmup_rounds=1)


def test_load(benchmark: BenchmarkFixture, model: k3.Model, session: k3.Session, tmp_path: Path) -> None:
    """The way back, digests included."""
    path = tmp_path / "latency.k3s"
    session.save(path)
    benchmark.pedantic(lambda: k3.Session.load(model, path).close(), rounds=10, warmup_rounds=1)
