# SPDX-License-Identifier: MIT
"""A measurement of one model on this machine: decode against the read bandwidth of the moment.

Decode reads every active weight once, so the limit is the bandwidth over the bytes.  Both are taken in turn in one run,
by the same threads over the same mapping, since either alone means little on a machine that does other things too.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from k3session._core import ops
from k3session.model import Model
from k3session.progress import Progress, ProgressArgument

__all__ = ["measure"]


def read_bandwidth(model: Model, at_least: float = 0.05) -> float:
    """Bytes per second of reading the model's trunk once or more, with the model's threads."""
    spans = model._weights.spans()
    total, start = 0, time.perf_counter()
    while True:
        for address, nbytes in spans:
            total += ops.read_memory(address, nbytes, model.threads)
        seconds = time.perf_counter() - start
        if seconds >= at_least:
            return total / seconds


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


def measure(
    model: Model,
    *,
    prompt: int = 128,
    steps: int = 32,
    repeats: int = 7,
    progress: ProgressArgument = False,
) -> dict[str, Any]:
    """Return prefill and decode figures: seconds, tokens per second, and the share of the read bandwidth.

    Each repeat takes `prompt` tokens in one prefill, then `steps` single tokens, with a probe of the bandwidth before
    and after; the share is that of the repeat, and the medians are over the repeats.
    """
    report = Progress(progress)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, prompt + steps).astype(np.int32)
    bytes_read = model._weights.step_bytes()
    per_token = sum(bytes_read.values())
    prefills, decodes, all_steps, bandwidths, shares = [], [], [], [], []
    with model.session(capacity=prompt + steps) as warm:
        warm.prefill(ids[:prompt])
        warm.step(int(ids[-1]))
    for i in range(repeats):
        with model.session(capacity=prompt + steps) as s:
            start = time.perf_counter()
            s.prefill(ids[:prompt])
            prefills.append(prompt / (time.perf_counter() - start))
            before = read_bandwidth(model)
            times = []
            for token in ids[prompt:].tolist():
                start = time.perf_counter()
                s.step(token)
                times.append(time.perf_counter() - start)
            bandwidth = (before + read_bandwidth(model)) / 2
        step = statistics.median(times)
        all_steps += times
        decodes.append(1 / step)
        bandwidths.append(bandwidth)
        shares.append(per_token / step / bandwidth)
        report("bench", i + 1, repeats)
    report.close()
    return {
        "model": model.path.name,
        "device": model.device,
        "isa": model.isa,
        "threads": model.threads,
        "prompt": prompt,
        "steps": steps,
        "bytes_per_token": bytes_read,
        "prefill_tokens_per_second": _summary(prefills),
        "decode_tokens_per_second": _summary(decodes),
        "step_seconds": _summary(all_steps),
        "read_bytes_per_second": _summary(bandwidths),
        "share_of_bandwidth": _summary(shares),
    }
