# SPDX-License-Identifier: MIT
"""Which layers each process of a pipeline takes: so that the slowest one has as little to read as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from k3session.config import K3Config
from k3session.errors import ConfigError
from k3session.layout import parameters

__all__ = ["check_ranges", "choose", "costs"]

_BYTES = {"BF16": 2, "U8": 1}


def costs(config: K3Config, packed: Callable[[int], bool]) -> tuple[list[float], float]:
    """Bytes that a token reads in each layer, and in the head.

    Of the routed experts those count that a token chooses; matrices count as BF16, packed ones as they are.  The KDA
    state is read and written.
    """
    c = config
    share = c.num_experts_per_token / max(1, c.num_experts)
    layers = [0.0] * c.num_hidden_layers
    head = 0.0
    for p in parameters(c, packed=packed):
        nbytes = prod(p.shape) * _BYTES[p.dtypes[0]]
        if p.layer is not None:
            layers[p.layer] += nbytes * share if p.component == "experts" else nbytes
        elif p.component == "lm_head" or (p.component == "embedding" and c.tie_word_embeddings):
            head += nbytes
    state = 8.0 * c.kda_num_heads * c.kda_head_dim * c.kda_head_dim
    for i in c.kda_layers:
        layers[i] += state
    return layers, head


def choose(layers: Sequence[float], head: float, speeds: Sequence[float]) -> list[tuple[int, int]]:
    """Ranges of layers, half open, for processes that read so many bytes per second each.

    The slowest process gets the least time that any cut gives it; among such cuts the first ones come early.

    Raises
    ------
    ConfigError
        More processes than layers.
    """
    n, count = len(layers), len(speeds)
    if count > n:
        raise ConfigError(
            f"the pipeline has {count} processes and the model {n} layers; expected at most one for each layer"
        )
    before = [0.0]
    for cost in layers:
        before.append(before[-1] + cost)
    # best[i]: the least time of the slowest, where the processes so far have the first i layers; and its last cut
    best: list[float] = [0.0] + [float("inf")] * n
    cuts: list[list[int]] = []
    for k, speed in enumerate(speeds):
        last = k == count - 1
        new, at = [float("inf")] * (n + 1), [0] * (n + 1)
        for end in range(k + 1, n + 1):
            if last and end < n:
                continue
            for first in range(k, end):
                time = (before[end] - before[first] + (head if last else 0.0)) / speed
                found = max(best[first], time)
                if found < new[end]:
                    new[end], at[end] = found, first
        best = new
        cuts.append(at)
    ranges: list[tuple[int, int]] = []
    end = n
    for at in reversed(cuts):
        ranges.append((at[end], end))
        end = at[end]
    return ranges[::-1]


def check_ranges(given: Any, config: K3Config, count: int) -> list[tuple[int, int]]:
    """Check ranges that a caller gives: one for each process, one after the other, all layers.

    Raises
    ------
    ConfigError
        They are not that.
    """
    n = config.num_hidden_layers
    try:
        ranges = [(first, end) for first, end in given]
    except (TypeError, ValueError):
        ranges = []
    good = all(type(i) is int for pair in ranges for i in pair) and len(ranges) == count
    at = 0
    for first, end in ranges if good else ():
        good = good and first == at and end > first
        at = end
    if not good or at != n:
        raise ConfigError(
            f"layers is {given!r}; expected {count} ranges (first, end), one for each process, that follow each other "
            f"from 0 to {n}"
        )
    return ranges
