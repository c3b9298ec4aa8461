# SPDX-License-Identifier: MIT
"""Where the tests run: ``K3_TEST_DEVICE`` is unset for the CPU, ``emulator`` or ``emulator-check`` for the GPU's
kernels on the emulator of cuda/emulator, and ``gpu`` for a real one.

On the emulator every test must leave no report and no leak; see `watched`, which conftest.py uses for all tests.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

DEVICE = os.environ.get("K3_TEST_DEVICE", "")
ON_GPU = DEVICE != ""
EMULATED = DEVICE.startswith("emulator")
CHECKING = DEVICE == "emulator-check"

_library: ctypes.CDLL | None = None


def prepare() -> None:
    """Build the emulator and name it as the driver; to be called before anything opens one."""
    global _library
    if DEVICE not in ("", "emulator", "emulator-check", "gpu"):
        raise ValueError(f"K3_TEST_DEVICE is {DEVICE!r}; expected emulator, emulator-check or gpu")
    if EMULATED:
        build = Path(__file__).parents[1] / "cuda" / "emulator" / "build.py"
        path = runpy.run_path(str(build))["build"](checking=CHECKING)
        os.environ["K3_LIBCUDA"] = str(path)
        _library = ctypes.CDLL(str(path))
        _library.k3emu_report.restype = ctypes.c_char_p
        _library.k3emu_report_count.restype = ctypes.c_size_t


def reports() -> list[str]:
    """What the emulator has to complain about so far."""
    if _library is None:
        return []
    count = _library.k3emu_report_count()
    return [_library.k3emu_report(ctypes.c_size_t(i)).decode() for i in range(count)]


def watched() -> Iterator[None]:
    """Around a test: it must make no report."""
    yield
    if _library is not None:
        gc.collect()
        found = reports()
        _library.k3emu_clear_reports()
        assert not found, "\n".join(found[:5])
