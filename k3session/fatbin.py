# SPDX-License-Identifier: MIT
"""The GPU kernels of this build: the file that nvcc made, and the manifest that says for what.

``build_cuda.py`` writes both.  kernels.fatbin is one fat binary for each source file, one after the other; kernels.json
has the place of each, the architectures, and the digest of the sources, which the compiled core knows too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3session import env
from k3session.errors import DeviceError

__all__ = ["Fatbin", "read"]

EMULATOR = b"k3emu kernels\n\0"
"""The image that the emulator takes where there is no nvcc: its kernels are in its library."""


@dataclass(frozen=True)
class Fatbin:
    """The images, in order, each with the names of its kernels; without a manifest, for the emulator."""

    data: bytes
    images: tuple[tuple[int, tuple[str, ...]], ...]
    manifest: dict[str, Any] = field(default_factory=dict)

    def refusal(self, capability: tuple[int, int], driver: int) -> str | None:
        """Why no image runs on a device of this compute capability, under a driver of this version."""
        if not self.manifest:
            return None
        names: list[str] = self.manifest["architectures"]
        code, ptx = ([_capability(n) for n in names if n.startswith(kind)] for kind in ("sm_", "compute_"))
        if any(major == capability[0] and minor <= capability[1] for major, minor in code):
            return None
        found = f"the kernels of this build are for {', '.join(names)}"
        if not any(virtual <= capability for virtual in ptx):
            arch = f"{capability[0]}{capability[1]}"
            return f"{found}, and none of these runs there; build k3session with K3_CUDA_ARCHS={arch}"
        toolkit: int = self.manifest["toolkit"]
        if toolkit > driver:
            return (
                f"{found}; the last can be compiled there, but by a driver for CUDA {version(toolkit)} or later, "
                f"and this one is for {version(driver)}; update the driver"
            )
        return None


def read(sources: str) -> Fatbin:
    """Return the kernels of this build.

    Parameters
    ----------
    sources
        The digest of the sources that the compiled core was built with.

    Raises
    ------
    DeviceError
        There are none, or they were built from other sources.
    """
    folder = Path(__file__).parent / "_cuda"
    try:
        manifest = json.loads((folder / "kernels.json").read_text())
        data = (folder / "kernels.fatbin").read_bytes()
    except FileNotFoundError:
        if env.driver_library():
            return Fatbin(EMULATOR, ((0, ()),))
        raise DeviceError(
            "this build of k3session has no GPU kernels, since it was made without nvcc; install a wheel that "
            "has them, or build with K3_CUDA=pip, which fetches nvcc"
        ) from None
    except (OSError, ValueError) as error:
        raise DeviceError(f"the GPU kernels cannot be read ({error}); install k3session again") from None
    if manifest.get("sources") != sources or manifest.get("bytes") != len(data):
        raise DeviceError(
            f"the GPU kernels in {folder} were built from other sources than this code (digest "
            f"{manifest.get('sources')}, expected {sources}); build or install k3session again"
        )
    images = tuple((image["offset"], tuple(image["kernels"])) for image in manifest["images"])
    return Fatbin(data, images, manifest)


def version(number: int) -> str:
    """A version of CUDA as the driver gives it: 13000 is "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _capability(name: str) -> tuple[int, int]:
    """The compute capability of an architecture: (9, 0) for sm_90."""
    digits = "".join(c for c in name if c.isdigit())
    return int(digits[:-1]), int(digits[-1])
