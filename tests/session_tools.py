# SPDX-License-Identifier: MIT
"""What the tests of sessions share: prompts, comparing sessions to the bit, and programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import k3session as k3

TESTS = Path(__file__).parent
ROOT = Path(k3.__file__).parent.parent


def prompt(n: int, seed: int = 0, vocab: int = 97) -> NDArray[np.int32]:
    """`n` random ids."""
    return np.random.default_rng([n, seed]).integers(0, vocab, n).astype(np.int32)


def contents(session: k3.Session) -> dict[str, Any]:
    """Everything that a session is, copied."""
    snap = session.snapshot()
    held: dict[str, Any] = {
        "position": session.position,
        "tokens": session.tokens,
        "logits": None if session.logits is None else session.logits.copy(),
        "facts": snap.facts,
    }
    for i, layer in enumerate(snap.layers):
        held |= {f"layers.{i}.{name}": array for name, array in layer.arrays().items()}
    return held


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal in every field and every bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            assert found[name].tobytes() == value.tobytes(), name
        else:
            assert found[name] == value, name


def same_sessions(found: k3.Session, expected: k3.Session) -> None:
    """Two sessions that nothing can tell apart."""
    same(contents(found), contents(expected))


@contextmanager
def unchanged(session: k3.Session) -> Iterator[None]:
    """The session is the same to the bit after the block, also where the block raised."""
    before = contents(session)
    try:
        yield
    finally:
        same(contents(session), before)


def step_all(session: k3.Session, tokens: Any) -> NDArray[np.float32]:
    """Feed tokens one by one; the logits of each."""
    return np.stack([session.step(int(t)) for t in tokens])


def resident() -> int:
    """Bytes of memory that this process has in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def threads() -> set[str]:
    """The threads of this process, as the kernel numbers them."""
    return set(os.listdir("/proc/self/task"))


def threads_beside(before: set[str]) -> set[str]:
    """The threads that are not among `before`: a thread that was joined stays in /proc until the kernel has
    buried it, so this waits for them to go, for two seconds at most."""
    for _ in range(200):
        if not threads() - before:
            break
        time.sleep(0.01)
    return threads() - before


class Peak:
    """The most memory that this process had since `start`, in bytes above what it had then."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew from what is resident now
        self._before = self._peak()

    def growth(self) -> int:
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


def environment(**more: str) -> dict[str, str]:
    """What a child process needs to import this package and these tools, with all warnings as errors."""
    paths = [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if k not in ("K3_ISA", "K3_NUM_THREADS")}
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONWARNINGS": "error"} | more


def start(code: str, *arguments: object, **more: str) -> subprocess.Popen[str]:
    """Begin a program in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(code: str, *arguments: object, timeout: float = 120, **more: str) -> str:
    """What a program prints that runs in a process of its own, and must end well and silently."""
    process = start(code, *arguments, **more)
    out, err = process.communicate(timeout=timeout)
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}\n{out}\n{err}"
    return out
