# SPDX-License-Identifier: MIT
"""Builds the GPU kernels: cuda/*.cu by nvcc into kernels.fatbin, with a manifest.

What is built is chosen by two variables of the environment:

================  ==================================================================================================
``K3_CUDA``       unset: kernels where nvcc is found, else for the CPU only; ``off``: none; ``require``: an error
                  without nvcc; ``pip``: as ``require``, and pip fetches nvcc for the build (build_backend.py)
``K3_CUDA_ARCHS`` compute capabilities to build machine code for, as in "90" or "80,90"; default: all of ARCHS.  PTX
                  for 8.0 is always there, which a driver compiles for any later one
================  ==================================================================================================

nvcc is looked for in PATH, CUDA_HOME, /usr/local/cuda, and among the packages of this Python.  Each source file is one
fat binary, kept in build/cuda/ by a digest of what it was made from; kernels.fatbin has them one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent
CUDA = ROOT / "cuda"
CACHE = Path(os.environ.get("K3_CUDA_CACHE") or ROOT / "build" / "cuda")
FATBIN, MANIFEST = "kernels.fatbin", "kernels.json"

ARCHS = ("80", "86", "89", "90", "100", "103", "110", "120", "121")
PTX = "80"
# -fmad=false: a fused multiply-add only where the source writes one (docs/numerics.md).  Subnormals are kept, division
# and square root are exact: these are nvcc's defaults without -use_fast_math.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xptxas",
    "-v",
    "-Xfatbin",
    "-compress-all",
    "-allow-unsupported-compiler",  # no host code is compiled
)
OLDEST = (13, 0)
"""The release of nvcc that the list of architectures needs, and the driver that is asked for."""

MODES = ("", "off", "require", "pip")

Kernels: TypeAlias = "dict[str, dict[str, Any]]"


class BuildError(Exception):
    """nvcc is missing where it is required, or refused a source."""


# ---------------------------------------------------------------------------------------------
# sources
# ---------------------------------------------------------------------------------------------


def headers(cuda: Path) -> list[Path]:
    """What the kernels include."""
    return [*sorted(cuda.glob("*.cuh")), cuda / "k3_math.h", cuda / "ops.h"]


def digest(paths: Iterable[Path], *parts: str) -> str:
    """A name for these files and parts."""
    whole = hashlib.sha256(repr(parts).encode())
    for path in paths:
        data = path.read_bytes()
        whole.update(f"{path.name} {len(data)}\n".encode() + data)
    return whole.hexdigest()[:24]


def sources_digest(cuda: Path | None = None) -> str:
    """What a fatbin must have been built from: the compiled core knows it, and refuses another."""
    cuda = cuda or CUDA
    return digest([*sorted(cuda.glob("*.cu")), *headers(cuda)], *FLAGS)


def architectures() -> tuple[str, ...]:
    """The compute capabilities that machine code is asked for."""
    wanted = os.environ.get("K3_CUDA_ARCHS", "").replace(",", " ").split()
    for arch in wanted:
        if not re.fullmatch(r"[1-9]\d{1,2}[af]?", arch) or int(arch.rstrip("af")) < int(PTX):
            raise BuildError(
                f'K3_CUDA_ARCHS has {arch!r}; expected compute capabilities from {PTX} on, as in "80,90"'
            )
    return tuple(dict.fromkeys(wanted)) or ARCHS


# ---------------------------------------------------------------------------------------------
# nvcc
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    """The compiler: where it is, and its release."""

    path: str
    version: str

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def candidates() -> Iterator[str]:
    """Where nvcc may be, the nearest first."""
    found = shutil.which("nvcc")
    if found:
        yield found
    for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if folder:
            yield os.path.join(folder, "bin", "nvcc")
    for folder in sys.path:
        for path in sorted(Path(folder or ".").glob("nvidia/cu1*/bin/nvcc")):
            yield str(path)


def find_nvcc() -> tuple[Nvcc | None, str]:
    """The first nvcc that is new enough; else why there is none."""
    reason = "nvcc was not found in PATH, CUDA_HOME, /usr/local/cuda or this Python's packages"
    for path in candidates():
        if not os.access(path, os.X_OK):
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"\bV(\d+\.\d+\.\d+)", said)
        if not version:
            reason = f"{path} does not say its version"
            continue
        nvcc = Nvcc(path, version[1])
        if nvcc.release >= OLDEST:
            return nvcc, ""
        reason = f"{path} is of CUDA {nvcc.version}, where {OLDEST[0]}.{OLDEST[1]} or later is needed"
    return None, reason


# ---------------------------------------------------------------------------------------------
# one source file
# ---------------------------------------------------------------------------------------------


def command(nvcc: Nvcc, source: Path, archs: Iterable[str], target: Path, threads: int) -> list[str]:
    """Compiles a file for all architectures, so many at a time."""
    line = [nvcc.path, *FLAGS, "-t", str(threads), "-fatbin", "-o", str(target), "-I", str(source.parent)]
    for arch in archs:
        line += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    return [*line, "-gencode", f"arch=compute_{PTX},code=compute_{PTX}", str(source)]


def compile_source(
    nvcc: Nvcc, source: Path, archs: tuple[str, ...], cache: Path, threads: int = 1
) -> tuple[Path, Kernels]:
    """The fat binary of a file, and its kernels; compiled where that has not been done already."""
    key = digest([source, *headers(source.parent)], nvcc.version, *FLAGS, *archs)
    target, log = cache / f"{source.stem}-{key}.fatbin", cache / f"{source.stem}-{key}.log"
    if not (target.exists() and log.exists()):
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{source.stem}-{'?' * len(key)}.*"):
            old.unlink()
        part = target.with_suffix(".part")
        done = subprocess.run(
            command(nvcc, source, archs, part, threads), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            part.unlink(missing_ok=True)
            raise BuildError(
                f"nvcc refused {source.name} (K3_CUDA=off builds without the kernels):\n{done.stdout}{done.stderr}"
            )
        log.write_text(done.stderr + done.stdout)
        os.replace(part, target)
    return target, read_log(log.read_text())


def read_log(text: str) -> Kernels:
    """What ptxas says of each kernel: the bytes of its parameters, and for each architecture what it uses."""
    kernels: Kernels = {}
    for piece in re.split(r"(?=Compiling entry function)", text)[1:]:
        entry = re.match(r"Compiling entry function '(\w+)' for '(sm_\w+)'", piece)
        registers = re.search(r"Used (\d+) registers", piece)
        if not entry or not registers:
            raise BuildError(f"ptxas says of a kernel what this build does not understand:\n{piece}")
        shared = re.search(r"(\d+) bytes smem", piece)
        constants = re.search(r"(\d+) bytes cmem\[0\]", piece)
        kernel = kernels.setdefault(entry[1], {"parameters": None})
        kernel[entry[2]] = {
            "registers": int(registers[1]),
            "shared": int(shared[1]) if shared else 0,
            "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", piece)),
        }
        if constants and entry[2].startswith("sm_8"):  # there they begin at byte 352 of bank 0
            kernel["parameters"] = int(constants[1]) - 352
    return kernels


# ---------------------------------------------------------------------------------------------
# all of them
# ---------------------------------------------------------------------------------------------


def remove(folder: Path) -> None:
    """Takes kernels of an earlier build away, so that none is packed that does not belong to this one."""
    for name in (FATBIN, MANIFEST):
        (folder / name).unlink(missing_ok=True)


def is_current(folder: Path) -> bool:
    """Whether the kernels that are in a folder were built from the sources as they are."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(
            manifest["sources"] == sources_digest() and manifest["bytes"] == (folder / FATBIN).stat().st_size
        )
    except (OSError, ValueError, LookupError):
        return False


def pack(nvcc: Nvcc, folder: Path, cuda: Path, cache: Path, jobs: int = 2) -> None:
    """Compiles what has changed, and writes the kernels and their manifest."""
    archs = architectures()
    sources = sorted(cuda.glob("*.cu"))
    threads = min(jobs, 4)  # a file takes long for many architectures: both ways of working in parallel
    with ThreadPoolExecutor(max(1, jobs // threads)) as pool:
        parts = list(pool.map(lambda source: compile_source(nvcc, source, archs, cache, threads), sources))
    data, images, kernels = b"", [], {}
    for source, (path, found) in zip(sources, parts, strict=True):
        image = path.read_bytes()
        images.append(
            {"source": source.name, "offset": len(data), "bytes": len(image), "kernels": sorted(found)}
        )
        data += image + bytes(-len(image) % 16)
        kernels.update(found)
    major, minor = nvcc.release
    manifest = {
        "sources": sources_digest(cuda),
        "bytes": len(data),
        "nvcc": nvcc.version,
        "toolkit": 1000 * major + 10 * minor,
        "flags": list(FLAGS),
        "architectures": [*(f"sm_{arch}" for arch in archs), f"compute_{PTX}"],
        "images": images,
        "kernels": kernels,
    }
    folder.mkdir(parents=True, exist_ok=True)
    remove(folder)
    (folder / FATBIN).write_bytes(data)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def build(folder: Path, jobs: int = 2) -> tuple[bool, str]:
    """Puts the kernels into a folder, or takes them out of it, as K3_CUDA says.

    Parameters
    ----------
    folder
        k3session/_cuda of the source tree or of what is packed.
    jobs
        Compilers at a time.

    Returns
    -------
    tuple[bool, str]
        Whether the folder has the kernels now, and a line that says so.

    Raises
    ------
    BuildError
        nvcc is missing where it is required, or refused a source.
    """
    mode = os.environ.get("K3_CUDA", "")
    if mode not in MODES:
        raise BuildError(f"K3_CUDA is {mode!r}; expected off, require or pip, or unset")
    if mode == "off":
        remove(folder)
        return False, "K3_CUDA=off: built for the CPU only"
    nvcc, reason = find_nvcc()
    if nvcc is None and mode:
        raise BuildError(f"K3_CUDA={mode}, but {reason}")
    if nvcc is None and is_current(folder):
        return True, f"{reason}; the GPU kernels that are there already are of these sources, and stay"
    if nvcc is None:
        remove(folder)
        return False, f"{reason}: built for the CPU only (K3_CUDA=pip fetches it for the build)"
    try:
        pack(nvcc, folder, CUDA, CACHE, jobs)
    except BaseException:
        remove(folder)
        raise
    return True, f"GPU kernels built with nvcc {nvcc.version} for {', '.join(architectures())}"
