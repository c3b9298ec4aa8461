# SPDX-License-Identifier: MIT
"""The GPU path without a GPU: programs in processes of their own, with the emulator in the driver's place."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from session_tools import TESTS, run

sys.path.insert(0, str(TESTS / "emulator"))

from emulated import BUILD, Emulator, build_module

KINDS = (
    "contexts", "device_memory", "events", "graph_execs", "graphs", "libraries", "pinned_memory",
    "registered_memory", "streams",
)  # fmt: skip


@functools.cache
def library(*, checking: bool = False) -> Path:
    """The emulator with the project's kernels."""
    if not BUILD.exists():
        pytest.skip("cuda/emulator is not here: these are the tests of a wheel")
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    built: Path = build_module().build(checking=checking)
    return built


def run_emulated(code: str, *arguments: object, checking: bool = False, **more: str) -> str:
    """What a program prints that runs with the emulator, and must end well and silently."""
    return run(code, *arguments, K3_LIBCUDA=str(library(checking=checking)), **more)


def emulator() -> Emulator:
    """Inside such a program: the emulator's own functions."""
    return Emulator(Path(os.environ["K3_LIBCUDA"]))


def alive(emu: Emulator) -> dict[str, int]:
    """What is there now of each kind of which there is any."""
    return {kind: n for kind in KINDS if (n := emu.live(kind))}


def norm_arguments(x: int, norm: int, y: int, n: int) -> list[np.generic]:
    """Arguments of k3_rms_norm for one row of n elements."""
    return [
        np.uint64(x), np.int64(n), np.uint64(norm), np.float32(1e-5), np.uint64(y), np.int64(n), np.int32(n),
    ]  # fmt: skip
