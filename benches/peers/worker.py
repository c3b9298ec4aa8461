# SPDX-License-Identifier: MIT
"""A process that holds one model of one runtime and measures what it is asked for: one JSON object a line, each way.

A sample of decode is taken between two probes of the read bandwidth, by the same number of threads over the same
pages, so that its share of the limit does not depend on what else the machine does from minute to minute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


# ---------------------------------------------------------------- on the side of the caller


class Worker:
    """A worker process; `ask` sends it a request and waits for the answer."""

    def __init__(self, what: dict[str, Any], threads: int) -> None:
        paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until close
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), json.dumps(what), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        self.refused: str | None = None
        self.opened = self._answer()
        if "error" in self.opened:
            self.refused = self.opened["error"]
            self.close()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Ask for a measurement; RuntimeError where the worker could not make it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._process.wait()
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        return {
            "error": f"the process ended with {self._process.returncode}: {said[-1] if said else 'it said nothing'}"
        }

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()


# ---------------------------------------------------------------- on its own side


class Probe:
    """Reads ranges of a model's weights in turn, from where it left off before: the bandwidth of the moment."""

    def __init__(self, spans: list[tuple[int, int]], threads: int, piece: int = 1 << 25) -> None:
        self.threads = threads
        self._pieces = [(a + i, min(piece, n - i)) for a, n in spans for i in range(0, n, piece)]
        self._at = 0

    def __call__(self, seconds: float = 0.06) -> float:
        """Bytes per second, over some time at least."""
        from k3session._core import ops

        total, start = 0, time.perf_counter()
        while True:
            address, nbytes = self._pieces[self._at]
            self._at = (self._at + 1) % len(self._pieces)
            total += ops.read_memory(address, nbytes, self.threads)
            took = time.perf_counter() - start
            if took >= seconds:
                return total / took


def random_ids(vocab: int, n: int, seed: int = 0) -> Any:
    """Token ids, the same for every runtime."""
    return np.random.default_rng(seed).integers(0, vocab, n).astype(np.int32)


def in_memory() -> dict[str, int]:
    """What the kernel says of this process, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}


class Bench:
    """The measurements of one opened model."""

    def __init__(self, runner: Any, what: dict[str, Any], threads: int, before: int) -> None:
        self.runner, self.what, self.threads, self.before = runner, what, threads, before
        self.probe = Probe(runner.spans, threads)
        self._at = 0
        self._ids = random_ids(runner.vocab, 4096).tolist()

    def decode(self, steps: int, context: int = 32, fresh: bool = False) -> dict[str, Any]:
        """Seconds of a step, the median of a few, and the bandwidth before and after them."""
        if fresh or self._at == 0 or self._at + steps > 960:
            self.runner.reset()
            self.runner.prefill(random_ids(self.runner.vocab, context))
            self.runner.step(self._ids[0])
            self._at = context + 1
        before = self.probe()
        times = []
        for token in self._ids[self._at : self._at + steps]:
            start = time.perf_counter()
            self.runner.step(token)
            times.append(time.perf_counter() - start)
        self._at += steps
        return {
            "seconds": statistics.median(times),
            "bandwidth": (before + self.probe()) / 2,
            "bytes": self.runner.bytes_per_token,
        }

    def prefill(self, n: int) -> dict[str, Any]:
        """Seconds of taking in n tokens from position 0."""
        self.runner.reset()
        self._at = 0
        ids = random_ids(self.runner.vocab, n)
        start = time.perf_counter()
        self.runner.prefill(ids)
        return {"seconds": time.perf_counter() - start, "tokens": n}

    def logits(self, ids: list[int], to: str) -> dict[str, Any]:
        """The logits after each of some tokens taken one by one, to a file."""
        self.runner.reset()
        self._at = 0
        rows = [np.array(self.runner.step(t), np.float32) for t in ids]
        np.save(to, np.stack(rows))
        return {"rows": len(rows)}

    def memory(self) -> dict[str, Any]:
        """Bytes that are resident, and of those the process's own that were not there before the model was opened."""
        found = in_memory()
        return {"resident": found["Rss"], "own": found["Anonymous"] - self.before}


def main() -> None:
    """Answer requests until there are no more."""
    started = time.perf_counter()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")  # what a runtime prints does not come between
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    from runners import Refused, opened

    what, threads = json.loads(sys.argv[1]), int(sys.argv[2])
    from k3session._core import ops

    ops.hold_pool()  # the probe's threads
    held = in_memory()["Anonymous"]
    before = time.perf_counter()
    try:
        runner = opened(what, threads)
    except Refused as problem:
        say(error=str(problem))
        return
    if what["runtime"] == "k3session":
        from k3_measures import K3Bench

        bench: Bench = K3Bench(runner, what, threads, held)
    else:
        bench = Bench(runner, what, threads, held)
    say(open_seconds=time.perf_counter() - before, start_seconds=before - started)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            say(**getattr(bench, do)(**request))
        except Exception as problem:  # noqa: BLE001 - it is told, and the next request is answered
            say(error=f"{type(problem).__name__}: {problem}")
    runner.close()


if __name__ == "__main__":
    main()
