# SPDX-License-Identifier: MIT
"""Which layers each process of a pipeline takes: the best cut there is, by trying all of them."""

from __future__ import annotations

import itertools
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import k3session as k3
from k3session.pipeline.ranges import check_ranges, choose, costs
from k3session.presets import PRESETS

K3 = PRESETS["k3"]


def slowest(layers: list[float], head: float, speeds: list[float], ranges: list[tuple[int, int]]) -> float:
    last = len(ranges) - 1
    return max(
        (sum(layers[a:b]) + (head if i == last else 0.0)) / speed
        for i, ((a, b), speed) in enumerate(zip(ranges, speeds, strict=True))
    )


def test_no_cut_is_better() -> None:
    rng = random.Random(1)
    for _ in range(200):
        n, count = rng.randint(1, 8), rng.randint(1, 5)
        if count > n:
            continue
        layers = [rng.choice([1.0, 2.0, 5.0, rng.random() * 10]) for _ in range(n)]
        head, speeds = rng.random() * 8, [rng.choice([1.0, 0.5, 3.0]) for _ in range(count)]
        ranges = choose(layers, head, speeds)
        assert check_ranges(ranges, PRESETS["nano"], count) == ranges if n == 7 else True
        assert ranges[0][0] == 0 and ranges[-1][1] == n and all(a[1] == b[0] for a, b in pairwise(ranges))
        best = min(
            slowest(layers, head, speeds, list(pairwise([0, *cuts, n])))
            for cuts in itertools.combinations(range(1, n), count - 1)
        )
        assert slowest(layers, head, speeds, ranges) == pytest.approx(best, rel=1e-12)


def test_a_slow_process_takes_less() -> None:
    assert choose([1.0] * 12, 0.0, [1.0, 2.0, 3.0]) == [(0, 2), (2, 6), (6, 12)]
    assert choose([1.0] * 12, 4.0, [1.0, 1.0]) == [(0, 8), (8, 12)]
    with pytest.raises(k3.ConfigError, match="the pipeline has 3 processes and the model 2 layers"):
        choose([1.0, 1.0], 0.0, [1.0] * 3)


def test_bytes_of_the_released_model() -> None:
    """Against the published sizes: 111.16 GB of trunk with the head, 25.83 GB of experts, 0.87 GB of state a token."""
    layers, head = costs(K3, lambda layer: True)
    assert head == 163840 * 7168 * 2
    assert sum(layers) + head == pytest.approx(111.16e9 + 25.83e9 + 0.868e9, rel=1e-3)
    # A KDA and an MLA layer with experts: 1.267 and 0.844 GB of trunk, 0.281 of experts; the one has a state.
    assert layers[1] == pytest.approx(1.267e9 + 0.281e9 + 0.0126e9, rel=1e-3)
    assert layers[3] == layers[92] == pytest.approx(0.844e9 + 0.281e9, rel=1e-3)


@pytest.mark.parametrize(
    "given", [None, [(0, 7)], [(0, 3), (4, 7)], [(0, 3), (3, 6)], [(0, 3), (3, 3), (3, 7)], [(0, 0), (0, 7)],
              [(0, 3.0), (3, 7)], "01", [(3, 7), (0, 3)]], ids=str,
)  # fmt: skip
def test_ranges_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(k3.ConfigError, match="expected 2 ranges"):
        check_ranges(given, PRESETS["nano"], 2)


def test_the_cuts_of_the_documentation() -> None:
    page = Path(k3.__file__).parents[1] / "docs" / "scale.md"
    if not page.is_file():
        pytest.skip("the documentation is not part of a wheel's tests")
    text = page.read_text(encoding="utf-8")
    layers, head = costs(K3, lambda layer: True)
    for count in (1, 4, 16):
        ranges = choose(layers, head, [1.0] * count)
        row = re.search(rf"^\| {count} \| (0:.*?) \| ([\d.]+) GB", text, re.MULTILINE)
        assert row is not None
        named = [tuple(map(int, r.split(":"))) for r in row[1].split(", ") if r != "..."]
        assert [r for r in ranges if r in named] == named and len(named) >= min(count, 5)
        most = slowest(layers, head, [1.0] * count, ranges) / 1e9
        assert f"{most:.1f}" == row[2], most
