# SPDX-License-Identifier: MIT
"""What the cases share: models in each runtime's format, workers that take turns, a clock, and the samples."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from runners import installed
from samples import Samples
from worker import Worker

from k3session.checkpoint import Checkpoint
from k3session.presets import PRESETS
from k3session.synth import synth

#: Every way to run a model: label -> what the worker opens.
WAYS: dict[str, dict[str, str]] = {
    "k3 stored": {"runtime": "k3session", "weights": "stored"},
    "k3 compact": {"runtime": "k3session", "weights": "compact"},
    "k3 q8": {"runtime": "k3session", "weights": "q8"},
    "k3 bf16 prefill": {"runtime": "k3session", "weights": "stored", "precision": "bf16"},
    "llama.cpp BF16": {"runtime": "llama.cpp", "trunk": "bf16"},
    "llama.cpp Q8_0": {"runtime": "llama.cpp", "trunk": "q8_0"},
    "llama.cpp F32": {"runtime": "llama.cpp", "trunk": "f32"},
    "mlx-lm": {"runtime": "mlx-lm"},
    "mlx-lm F32": {"runtime": "mlx-lm", "dtype": "float32"},
}


#: What can be measured by itself.
CASES = (
    "agreement", "busy", "context", "decode", "exactness", "load", "machine", "memory", "ops", "prefill", "snapshots",
)  # fmt: skip


class Lab:
    """One run: its folder of models, its samples, and how long it has been going."""

    def __init__(
        self, folder: Path, models: dict[str, Path], quick: bool, wanted: frozenset[str] | None = None
    ) -> None:
        self.folder, self.quick, self._wanted = folder, quick, wanted
        self._models = models
        self._sizes: dict[str, dict[str, int]] = {}
        self.samples = Samples()
        self.op_rounds: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        self.started = time.monotonic()
        self.all_threads = len(os.sched_getaffinity(0))

    def wants(self, *cases: str) -> bool:
        """Whether one of these cases is to be measured."""
        return self._wanted is None or not self._wanted.isdisjoint(cases)

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def skip(self, label: str, why: str) -> None:
        """Say once that a label takes no part, and why."""
        if label not in self.samples.skipped:
            self.say(f"skipped: {label}: {why}")
            self.samples.skipped[label] = why

    def rounds(self, most: int, seconds: float, what: str) -> Iterator[int]:
        """Numbers of rounds: up to `most`, and from the third on only while the case is within its seconds."""
        began = time.monotonic()
        for i in range(most):
            if i >= 2 and time.monotonic() - began > seconds:
                self.say(f"{what}: stopped after {i} of {most} rounds, {seconds:.0f} s being its share")
                return
            yield i
        self.say(f"{what}: {most} rounds")

    # models ----------------------------------------------------------------------------------

    def model(self, name: str) -> Path:
        """The checkpoint folder of a preset, made where there is none."""
        folder = self._models.get(name, self.folder / name)
        if not (folder / "config.json").exists():
            self.say(f"making the checkpoint {name} in {folder}")
            synth(folder, name)
        else:
            with Checkpoint.open(folder) as checkpoint:
                if checkpoint.config != PRESETS[name]:
                    raise SystemExit(
                        f"{folder} is no {name}: expected the checkpoint of that preset, or no folder"
                    )
        return folder

    def description(self, label: str, model: str) -> dict[str, Any] | None:
        """What a worker opens for this label; None where that cannot be, with a printed line that says why."""
        way = WAYS[label]
        runtime = way["runtime"]
        if not installed(runtime):
            self.skip(label, f"{runtime} is not installed")
            return None
        what: dict[str, Any] = {**way, "path": str(self.model(model))}
        if runtime == "k3session":
            return what
        stated = self._bytes(model)
        if runtime == "mlx-lm":
            sizes = stated
        else:
            try:
                import gguf_writer
            except ImportError:
                self.skip(label, "gguf, which writes the file, is not installed")
                return None
            path = self.folder / f"{model}-{way['trunk']}.gguf"
            if not path.exists():
                self.say(f"writing {path.name}")
            sizes = gguf_writer.write(self.model(model), path, way["trunk"])
            what["path"] = str(path)
        return what | {"sizes": {**sizes, "state": stated["state"]}}

    def _bytes(self, model: str) -> dict[str, int]:
        """Bytes that a token reads of the checkpoint as stored."""
        if model not in self._sizes:
            import k3session as k3

            with k3.Model.open(self.model(model), device="cpu", threads=1) as opened:
                self._sizes[model] = opened._weights.step_bytes()
        return self._sizes[model]

    # workers ---------------------------------------------------------------------------------

    @contextmanager
    def workers(self, labels: list[str], model: str, threads: int) -> Iterator[dict[str, Worker]]:
        """A worker for each label that can take part."""
        with ExitStack() as stack:
            open_now: dict[str, Worker] = {}
            for label in labels:
                what = self.description(label, model)
                if what is None:
                    continue
                worker = Worker(what, threads)
                if worker.refused is not None:
                    self.skip(label, worker.refused)
                    continue
                stack.callback(worker.close)
                open_now[label] = worker
            yield open_now

    def turns(self, workers: dict[str, Worker], number: int) -> list[tuple[str, Worker]]:
        """The workers in the order of a round: each round begins with another one."""
        items = list(workers.items())
        first = number % max(1, len(items))
        return items[first:] + items[:first]


@contextmanager
def a_busy_core() -> Iterator[None]:
    """One other process that computes without end, until the block is left."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()
