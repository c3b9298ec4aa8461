# SPDX-License-Identifier: MIT
"""What this machine does in a second: bytes from its disk, from its memory, and through its cores."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3session import budget
from k3session._core import ops
from k3session._core.arguments import Matrix
from k3session._core.kernels import Kernels
from k3session.errors import CheckpointError

__all__ = ["ASSUMED", "Rates", "disk_rate", "measure"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second: read from the checkpoint's disk, read from memory, and multiplied by the cores."""

    disk: float
    memory: float
    cores: float
    measured: bool = False


#: What is taken where nothing was measured or given: a plain NVMe disk and a small machine.
ASSUMED = Rates(1e9, 20e9, 20e9)
_LARGE_PAGE = 1 << 21


def disk_rate(
    files: Sequence[Path], seconds: float = 1.0, threads: int | None = None, chunk: int | None = None
) -> float:
    """Bytes a second of reads from these files, past the page cache where that can be, several at a time.

    Raises
    ------
    CheckpointError
        A file cannot be read.
    """
    threads = threads or budget.LIMITS.threads
    chunk = chunk or budget.LIMITS.chunk
    places = [
        (file, at)
        for file in files
        for at in range(0, max(1, os.stat(file).st_size - chunk) // budget.PAGE * budget.PAGE + 1, chunk)
    ]
    # From another place each time: what was read last may lie in a cache of the disk or of a host below.
    lock, done = threading.Lock(), [time.monotonic_ns() // 1000 % len(places), 0]
    problems: list[CheckpointError] = []
    handles: dict[Path, int] = {}
    try:
        for file in files:
            try:
                handles[file] = os.open(file, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                handles[file] = os.open(file, os.O_RDONLY)
        # As streaming has it: large pages, which a direct read hands to the disk in fewer pieces.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no large pages
        memory = mmap.mmap(-1, threads * chunk + _LARGE_PAGE, flags=private)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        whole = whole[-whole.ctypes.data % _LARGE_PAGE :]
        whole[: threads * chunk] = 1
        began = time.perf_counter()

        def read(number: int) -> None:
            buffer = memoryview(whole[number * chunk : (number + 1) * chunk])
            while time.perf_counter() - began < seconds and not problems:
                with lock:
                    file, at = places[done[0] % len(places)]
                    done[0] += 1
                try:
                    n = os.preadv(handles[file], [buffer], at)
                except OSError as error:
                    problems.append(CheckpointError(f"{file.name}: cannot be read: {error.strerror}."))
                    return
                with lock:
                    done[1] += n

        workers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        if problems:
            raise problems[0]
        return done[1] / (time.perf_counter() - began)
    finally:
        for handle in handles.values():
            os.close(handle)


def _memory_rate(threads: int) -> float:
    data = np.ones(1 << 28, np.uint8)
    found = []
    for _ in range(4):
        began = time.perf_counter()
        ops.read_memory(data.ctypes.data, data.nbytes, threads)
        found.append(data.nbytes / (time.perf_counter() - began))
    return max(found)


def _core_rate(threads: int, isa: str) -> float:
    """Bytes of BF16 weights that the products take in a second when the weights are in the cores' caches."""
    rows = cols = 512
    kernels = Kernels(isa, 1, 1, hidden_size=cols)
    w = Matrix(np.ones((rows, cols), np.uint16))
    x = np.ones((1, cols), np.float32)
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            kernels.linear(x, w)
        found.append(200 * rows * cols * 2 / (time.perf_counter() - began))
    return statistics.median(found) * threads


def measure(files: Sequence[Path], threads: int, isa: str) -> Rates:
    """Measure all three; takes some two seconds, and reads up to a few gigabytes of the files."""
    ops.hold_pool()
    try:
        return Rates(disk_rate(files), _memory_rate(threads), _core_rate(threads, isa), True)
    finally:
        ops.release_pool()
