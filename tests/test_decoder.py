# SPDX-License-Identifier: MIT
"""`Decoder.forward` refuses what would write outside its buffers, or commit what no pass has computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3session._core.decoder import Decoder, Scratch
from k3session._core.state import Timeline
from k3session._core.weights import Weights
from k3session.checkpoint import Checkpoint
from k3session.errors import K3Error

ROWS = 8


class Bench:
    """A model, scratch for two sessions, and the sessions."""

    def __init__(self, folder: Path) -> None:
        with Checkpoint.open(folder) as checkpoint:
            self.weights = Weights(checkpoint)
        self.decoder = Decoder(self.weights, 1, "base")
        self.scratch = Scratch(self.decoder, ROWS, segments=2)
        self.a, self.b = Timeline(self.weights), Timeline(self.weights)
        self.vocab = self.weights.config.vocab_size

    def run(self, timelines: list[Any], counts: list[int], tokens: list[int], **options: Any) -> None:
        self.decoder.forward(self.scratch, timelines, counts, np.array(tokens, np.int32), **options)


@pytest.fixture
def bench(nano: Path) -> Bench:
    return Bench(nano)


REFUSED: dict[str, tuple[str, Callable[[Bench], None]]] = {
    "no session": ("does not fit", lambda b: b.run([], [], [1])),
    "more rows than scratch": ("does not fit", lambda b: b.run([b.a], [ROWS + 1], [1] * (ROWS + 1))),
    "more sessions than scratch": ("does not fit", lambda b: b.run([b.a, b.b, b.a], [1, 1, 1], [1, 1, 1])),
    "a count too large": ("segment of 1000000 rows", lambda b: b.run([b.a], [10**6], [1])),
    "counts that cancel": ("segment of", lambda b: b.run([b.a, b.b], [2_000_000, -1_999_999], [1])),
    "an empty segment": ("segment of 0 rows", lambda b: b.run([b.a, b.b], [0, 2], [1, 2])),
    "counts short of the rows": ("segments have 1 rows", lambda b: b.run([b.a], [1], [1, 2])),
    "one session twice": ("once", lambda b: b.run([b.a, b.a], [1, 1], [1, 2])),
    "a token past the vocabulary": ("not in the vocabulary", lambda b: b.run([b.a], [1], [b.vocab])),
    "a row of embeddings without any": ("not in the vocabulary", lambda b: b.run([b.a], [1], [-1])),
    "logits too narrow": (
        "logits must be",
        lambda b: b.run([b.a], [1], [1], logits=np.empty((1, b.vocab - 1), "f4")),
    ),
    "logits too few": (
        "logits must be",
        lambda b: b.run([b.a, b.b], [1, 1], [1, 2], logits=np.empty((1, b.vocab), "f4")),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_and_nothing_changed(bench: Bench, what: str) -> None:
    bench.run([bench.a], [3], [1, 2, 3])
    before = [layer.export() for layer in bench.a.layers]
    message, attempt = REFUSED[what]
    with pytest.raises(K3Error, match=message):
        attempt(bench)
    assert bench.a.position == 3 and bench.b.position == 0
    for old, layer in zip(before, bench.a.layers, strict=True):
        assert all(np.array_equal(old[k], v) for k, v in layer.export().items())
    bench.run([bench.a, bench.b], [1, 1], [4, 4])
    assert bench.a.position == 4 and bench.b.position == 1


def test_sessions_of_a_pass_may_store_their_latent_rows_differently(bench: Bench) -> None:
    kinds = [(False, 64), (True, 64), (False, 3)]
    alone, together = ([Timeline(bench.weights, *kind) for kind in kinds] for _ in range(2))
    scratch = Scratch(bench.decoder, ROWS, segments=3)
    for step in range(5):
        tokens = np.array([step, step + 7, step + 9], np.int32)
        rows = np.empty((3, bench.vocab), np.float32)
        bench.decoder.forward(scratch, together, [1, 1, 1], tokens, logits=rows)
        for i, timeline in enumerate(alone):
            one = np.empty((1, bench.vocab), np.float32)
            bench.decoder.forward(bench.scratch, [timeline], [1], tokens[i : i + 1], logits=one)
            assert np.array_equal(one[0], rows[i])


def test_another_model_is_refused(bench: Bench, nano: Path) -> None:
    other = Bench(nano)
    with pytest.raises(K3Error, match="of its model"):
        bench.run([other.a], [1], [1])
