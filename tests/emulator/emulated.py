# SPDX-License-Identifier: MIT
"""The driver's calls through ctypes, for the tests of the emulator: as any client would make them."""

from __future__ import annotations

import ctypes
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "cuda" / "emulator" / "build.py"

OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_VALUE, INVALID_IMAGE, INVALID_CONTEXT = 2, 3, 1, 200, 201
INVALID_HANDLE, NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT = 400, 500, 600, 700, 702
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNMATCHED, CAPTURE_UNJOINED = 900, 901, 903, 904
CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = 905, 906, 907


def build_module() -> SimpleNamespace:
    """What cuda/emulator/build.py defines: a file of no package, which leaves no compiled copy beside the sources."""
    return SimpleNamespace(**runpy.run_path(str(BUILD)))


class CudaError(Exception):
    """A call that did not return CUDA_SUCCESS."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} returned {status}")
        self.status = status


class Emulator:
    """One library, its current context, and the kernels of its image."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.lib = ctypes.CDLL(str(library))
        for name, result in {
            "k3emu_report": ctypes.c_char_p,
            "k3emu_entry": ctypes.c_char_p,
            "k3emu_kernel_name": ctypes.c_char_p,
            "k3emu_count": ctypes.c_uint64,
            "k3emu_live": ctypes.c_uint64,
            "k3emu_leaks": ctypes.c_uint64,
            "k3emu_report_count": ctypes.c_size_t,
            "k3emu_failures_left": ctypes.c_size_t,
        }.items():
            getattr(self.lib, name).restype = result
        self.library = 0

    # ---- the emulator itself ----

    def reset(self, **settings: int) -> None:
        """Starts anew, with these options."""
        self.lib.k3emu_reset()
        self.library = 0
        self.set(**settings)

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            assert self.lib.k3emu_set(name.encode(), ctypes.c_uint64(value)) == 0, name

    def fail(self, entry: str, nth: int = 1, status: int = 0) -> None:
        assert self.lib.k3emu_fail(entry.encode(), ctypes.c_uint64(nth), status) == 0, entry

    def count(self, name: str) -> int:
        return int(self.lib.k3emu_count(name.encode()))

    def live(self, kind: str) -> int:
        return int(self.lib.k3emu_live(kind.encode()))

    @property
    def reports(self) -> list[str]:
        return [
            self.lib.k3emu_report(ctypes.c_size_t(i)).decode() for i in range(self.lib.k3emu_report_count())
        ]

    def expect(self, kind: str, *words: str) -> str:
        """The one report that begins with this kind and has these words; all reports are then forgotten."""
        reports = self.reports
        self.lib.k3emu_clear_reports()
        found = [r for r in reports if r.startswith(kind + ":") and all(w in r for w in words)]
        assert found, f"no report of {kind} with {words}, but {reports}"
        return found[0]

    # ---- the driver ----

    def raw(self, call: str, *arguments: Any) -> int:
        """Calls an entry point: integers are passed as 64 bits, which the calling convention permits."""
        converted = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.lib, call)(*converted))

    def call(self, call: str, *arguments: Any) -> None:
        status = self.raw(call, *arguments)
        if status:
            raise CudaError(call, status)

    def get(self, call: str, *arguments: Any) -> int:
        """Calls an entry point whose first argument is where a handle, an address or a number goes."""
        out = ctypes.c_uint64(0)
        self.call(call, ctypes.byref(out), *arguments)
        return out.value

    def get_after(self, call: str, handle: int) -> int:
        """Calls an entry point whose second argument is where the result goes."""
        out = ctypes.c_uint64(0)
        self.call(call, handle, ctypes.byref(out))
        return out.value

    def open(self) -> int:
        """The primary context, current, and the image loaded."""
        self.call("cuInit", 0)
        context = self.get("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxSetCurrent", context)
        self.library = self.get("cuLibraryLoadData", b"k3emu kernels\n", 0, 0, 0, 0, 0, 0)
        return context

    def close(self) -> None:
        """Gives the image and the context back, whatever state they are in."""
        self.raw("cuLibraryUnload", self.library)
        self.raw("cuDevicePrimaryCtxRelease_v2", 0)

    def alloc(self, size: int) -> int:
        return self.get("cuMemAlloc_v2", size)

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.call("cuMemFree_v2", address)

    def put(self, array: NDArray[Any]) -> int:
        """A new allocation with these contents."""
        array = np.ascontiguousarray(array)
        address = self.alloc(array.nbytes)
        self.call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)
        return address

    def take(self, address: int, shape: int | tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """A copy of what is there; waits for the device."""
        out = np.empty(shape, dtype)
        self.call("cuMemcpyDtoH_v2", out.ctypes.data, address, out.nbytes)
        return out

    def kernel(self, name: str) -> int:
        return self.get("cuLibraryGetKernel", self.library, name.encode())

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: int | np.generic,
        shared: int = 0,
        stream: int = 0,
    ) -> None:
        """Launches a kernel: an int is a pointer, anything else a NumPy scalar of the parameter's type."""
        values = [np.uint64(a) if isinstance(a, int) else a for a in arguments]
        boxes = [np.array([v]) for v in values]
        pointers = (ctypes.c_void_p * max(1, len(boxes)))(*[b.ctypes.data for b in boxes])
        sizes = [*(triple(grid)), *(triple(block))]
        self.call("cuLaunchKernel", self.kernel(name), *sizes, shared, stream, pointers, 0)

    def synchronize(self) -> int:
        """Waits for everything; the status."""
        return self.raw("cuCtxSynchronize")

    def stream(self, flags: int = 1) -> int:
        """A new stream, which does not wait for the legacy stream."""
        return self.get("cuStreamCreate", flags)

    def event(self) -> int:
        return self.get("cuEventCreate", 0)

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> tuple[int, NDArray[Any]]:
        """New pinned memory: its address, and an array over it."""
        count = int(np.prod(shape))
        address = self.get("cuMemHostAlloc", count * np.dtype(dtype).itemsize, 0)
        bytes_ = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
        return address, np.frombuffer(bytes_, dtype).reshape(shape)


def triple(size: int | Sequence[int]) -> tuple[int, int, int]:
    given = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounded to BF16, to nearest, ties to even."""
    word = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
