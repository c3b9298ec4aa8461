# SPDX-License-Identifier: MIT
"""What the benchmark suites share: the models they run on, and percentiles in the results.

`make bench` runs them and writes benches/results/.  ``K3_BENCH_MID`` names a folder with a checkpoint of the ``mid``
preset (``k3session synth DIR --preset mid``, 3 GB); without it the larger cases are not collected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from machine_id import identity

import k3session as k3
from k3session.synth import synth

#: Opens a model by name, for a number of threads.
Opener = Callable[[str, int], k3.Model]

MODELS = ["micro", "tiny", "shakespeare"] + (["mid"] if os.environ.get("K3_BENCH_MID") else [])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a model -> its folder."""
    root = tmp_path_factory.mktemp("models")
    made = {name: str(synth(root / name, name)) for name in ("micro", "tiny")}
    made["shakespeare"] = str(k3.model.DEFAULT_MODEL)
    if "mid" in MODELS:
        made["mid"] = os.environ["K3_BENCH_MID"]
    return made


@pytest.fixture(scope="session")
def open_model(folders: dict[str, str]) -> Iterator[Opener]:
    """Opens each model once per number of threads."""
    opened: dict[tuple[str, int], k3.Model] = {}

    def get(name: str, threads: int) -> k3.Model:
        if (name, threads) not in opened:
            opened[name, threads] = k3.Model.open(folders[name], threads=threads)
        return opened[name, threads]

    yield get
    for model in opened.values():
        model.close()


def tokens(model: k3.Model, n: int, seed: int = 0) -> np.ndarray:
    """Random ids of a model's vocabulary."""
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, n).astype(np.int32)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Which machine a saved run is from: runs of others are not compared."""
    machine_info["id"] = identity()["id"]


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def quartiles(name: str, values: list[float]) -> dict[str, float]:
    """The median and what half of the values lie between, as extra information of a result."""
    low, middle, high = (round(float(q), 2) for q in np.percentile(values, [25, 50, 75]))
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}


def percentiles(benchmark: Any, **extra: object) -> None:
    """Adds p50 and p99 in microseconds, and what else is given, to a result."""
    benchmark.extra_info.update(extra)
    if benchmark.stats is None:  # --benchmark-disable
        return
    data = np.array(benchmark.stats.stats.data) * 1e6
    benchmark.extra_info.update(
        p50_us=round(float(np.percentile(data, 50)), 2), p99_us=round(float(np.percentile(data, 99)), 2)
    )
