# SPDX-License-Identifier: MIT
"""The machine: what it is, and the limits that everything else is held against."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from k3session._core import ops

HERE = Path(__file__).resolve().parent
_MIB = 1 << 20


def thread_counts() -> list[int]:
    """One, all, and what lies between in powers of two."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, cores, *(n for n in (2, 4, 8, 16, 32, 64) if n < cores)})


def _rate(address: int, nbytes: int, threads: int, rounds: int) -> dict[str, float]:
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        ops.read_memory(address, nbytes, threads)
        rates.append(nbytes / (time.perf_counter() - start))
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def read_rates(file: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Bytes per second of reading mapped pages of a file, and memory in huge pages, with 1 to N threads."""
    found = {}
    size = min(512 * _MIB, file.stat().st_size)
    with open(file, "rb") as f:
        mapped = np.frombuffer(mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ), np.uint8)
    own = mmap.mmap(-1, 512 * _MIB)
    own.madvise(mmap.MADV_HUGEPAGE)
    anonymous = np.frombuffer(own, np.uint8)
    anonymous.fill(1)
    cached = anonymous[: 8 * _MIB]
    for threads in thread_counts():
        for name, array in (("file", mapped), ("huge pages", anonymous), ("8 MiB, cached", cached)):
            ops.read_memory(int(array.ctypes.data), array.nbytes, threads)  # page tables
            found[f"read {name}, {threads} thread{'s' * (threads > 1)}"] = _rate(
                int(array.ctypes.data), array.nbytes, threads, rounds
            )
    return found


def peaks() -> dict[str, float]:
    """Operations per second of one core in dot products, where a C++ compiler is at hand: float32, BF16, bytes."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peaks.so"
        command = [
            compiler,
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            str(HERE / "peaks.cpp"),
            "-o",
            str(library),
        ]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return {}
        run = ctypes.CDLL(str(library))
        found = {}
        for name in ("f32", "bf16", "int8"):
            function = getattr(run, f"peak_{name}")
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
            if function(1000) == 0:  # this processor has no such instruction
                continue
            best = 0.0
            for _ in range(3):
                start = time.perf_counter()
                done = function(20_000_000)
                best = max(best, done / (time.perf_counter() - start))
            found[name] = best
        return found


def disk(folder: Path, nbytes: int = 256 * _MIB) -> dict[str, float]:
    """Bytes per second of writing a file and waiting for it, and of reading it past the page cache."""
    path = folder / "disk-probe"
    block = mmap.mmap(-1, 8 * _MIB)
    block.write(os.urandom(8 * _MIB))
    found = {}
    try:
        start = time.perf_counter()
        with open(path, "wb") as out:
            out.writelines(block for _ in range(nbytes // len(block)))
            out.flush()
            os.fsync(out.fileno())
        found["disk, write"] = nbytes / (time.perf_counter() - start)
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            start = time.perf_counter()
            for at in range(0, nbytes, len(block)):
                os.preadv(handle, [block], at)
            found["disk, read direct"] = nbytes / (time.perf_counter() - start)
        finally:
            os.close(handle)
    except OSError as problem:
        print(f"  the disk was not measured: {problem}")
    finally:
        path.unlink(missing_ok=True)
    return found
