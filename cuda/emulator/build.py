# SPDX-License-Identifier: MIT
"""Builds the emulator: its runtime and the kernels of some .cu files, as one libcuda.so.1.

    python cuda/emulator/build.py [--check] [FILE.cu ...]

builds it for these files (all of cuda/ by default) and says where it is. Tests call `build`. Everything is kept by a
hash of what it was made from, so that a second call with the same sources takes no time.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("k3emu.build")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build" / "emulator"

IMAGE = b"k3emu kernels\n\0"
"""A module image that the emulator accepts, for a machine without nvcc."""

COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
]
RUNTIME = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
]
# As nvcc compiles them: no contraction, subnormals kept. -fno-threadsafe-statics: a static shared variable needs no
# guard. -fno-optimize-sibling-calls: a barrier at the end of a kernel stays a call, with a line of its own.
# -fstack-clash-protection: a frame that is larger than the stack meets the guard page, not the next stack.
KERNELS = [
    *COMMON,
    "-g1",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-threadsafe-statics",
    "-fno-optimize-sibling-calls",
    "-fstack-clash-protection",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-parameter",
]
FAST = ["-O2"]
# The sanitizers' instrumentation without their libraries: hooks.cpp has the functions that it calls.
CHECK = [
    "-O1",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fsanitize=bounds,alignment,shift,signed-integer-overflow,integer-divide-by-zero",
]
LINK = [
    "-shared",
    "-Wl,-soname,libcuda.so.1",
    f"-Wl,--version-script,{HERE / 'exports.map'}",
    "-Wl,-Bsymbolic,-z,defs",
    "-lpthread",
    "-ldl",
    "-lrt",
]

REDZONE = 32
"""Bytes between two static shared arrays in the checking build."""


class BuildError(Exception):
    """The compiler's own words, or a kernel that the emulator cannot take."""


@functools.cache
def compiler() -> tuple[list[str], str]:
    """The compiler with the flags that this machine adds, and its version."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    if platform.machine() == "x86_64" and " fma " in Path("/proc/cpuinfo").read_text():
        command.append("-mfma")  # else a fused multiply-add is a call, as exact and slower
    return command, version


def run(arguments: Sequence[str], text: str | None = None) -> str:
    """Runs the compiler from the root of the repository, so that messages and reports name files from there."""
    done = subprocess.run(
        [*compiler()[0], *arguments], cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{' '.join(arguments)}\n{done.stderr}")
    if done.stderr:
        log.warning("%s", done.stderr)
    return done.stdout


def digest(*parts: str | bytes) -> str:
    """A name for what was made from these parts."""
    whole = hashlib.sha256()
    for part in (repr(compiler()), *parts):
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()[:20]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two builds at once would compile everything twice."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def relative(path: Path) -> str:
    """The path as messages show it."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# ---------------------------------------------------------------------------------------------
# kernels
# ---------------------------------------------------------------------------------------------

KERNEL = re.compile(r"__k3emu_kernel__")
BOUNDS = re.compile(r"\s*__k3emu_bounds__\s*")
NAME = re.compile(r"\s*(\w+)\s*\(")


def closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise BuildError("a parenthesis is not closed")


def find_kernels(text: str, source: str) -> dict[str, str]:
    """The kernels in preprocessed text, each with the arguments of its __launch_bounds__, or "0"."""
    kernels: dict[str, str] = {}
    for match in KERNEL.finditer(text):
        at, bounds = match.end(), "0"
        for _ in range(2):  # the bounds come before `void` or after it
            if found := BOUNDS.match(text, at):
                at = closing(text, found.end())
                bounds = text[found.end() + 1 : at - 1]
            if found := re.compile(r"\s*void\b").match(text, at):
                at = found.end()
        name = NAME.match(text, at)
        if not name or not re.search(r'extern\s+"C"\s+$', text[: match.start()]):
            line = text[match.start() : match.start() + 80].split("\n")[0]
            raise BuildError(f'{source}: expected `extern "C" __global__ void name(`, found `{line}`')
        kernels[name[1]] = bounds
    return kernels


def strip_markers(text: str) -> str:
    """The text as g++ can read it: without the words that device.h left for find_kernels."""
    text = KERNEL.sub("__attribute__((noinline, used))", text)
    while found := BOUNDS.search(text):
        text = text[: found.start()] + " " + text[closing(text, found.end()) :]
    return text


SECTION = re.compile(r"\s*\.(section|text|data|bss)\b")
IN_TEMPLATE = re.compile(r"\s*\.section\s+\.bss\._ZZ")
COMMON_IN_TEMPLATE = re.compile(r"\s*\.comm\s+(_ZZ\w+),(\d+),(\d+)")


def place_shared(assembly: str, redzone: int) -> str:
    """Puts static shared arrays where they belong, each with space after it that belongs to none.

    g++ forgets the section of a static variable of a template. A variable of a function that is neither constant nor
    in a section of its own can be nothing but such a one, since a kernel has no other static variables.
    """
    out, inside = [], False
    for line in assembly.splitlines():
        if SECTION.match(line):
            inside = "k3emu_shared" in line
        if IN_TEMPLATE.match(line):
            inside = True
            line = '\t.section\tk3emu_shared,"aw"'
        elif common := COMMON_IN_TEMPLATE.match(line):
            name, size, align = common.groups()
            line = (
                f'\t.pushsection\tk3emu_shared,"aw"\n\t.balign\t{max(16, int(align))}\n\t.type\t{name}, @object\n'
                f"\t.size\t{name}, {size}\n{name}:\n\t.zero\t{int(size) + redzone}\n\t.popsection"
            )
        out.append(line.replace("@gnu_unique_object", "@object"))
        if inside and redzone and re.match(r"\s*\.zero\s+\d+", line):
            out.append(f"\t.zero\t{redzone}")
    return "\n".join(out) + "\n"


def compile_kernels(source: Path, checking: bool, objects: Path) -> Path:
    """Preprocesses a .cu file, adds the registration of its kernels, and compiles the result."""
    name = relative(source)
    flags = [*KERNELS, *(CHECK if checking else FAST)]
    headers = ["-I", relative(ROOT / "cuda"), "-include", relative(HERE / "device.h")]
    text = run([*flags, *headers, "-E", "-x", "c++", name])
    kernels = find_kernels(text, name)
    text = strip_markers(text)
    text += '# 1 "registration of the kernels"\n'
    for kernel, bounds in kernels.items():
        text += f'static k3emu_registration<&{kernel}> k3emu_of_{kernel}("{kernel}", {bounds});\n'
    target = objects / f"{source.stem}-{digest(text, repr(flags))}.o"
    if kept(target):
        return target
    # The compiler sees the folder of the checkout as ".", so that an object serves any checkout.
    assembly = run(
        [*flags, f"-fdebug-prefix-map={ROOT}=.", "-x", "c++-cpp-output", "-S", "-o", "-", "-"], text
    )
    assembly = place_shared(assembly, REDZONE if checking else 0)
    return write_object(["-x", "assembler", "-"], assembly, target)


def kept(target: Path) -> bool:
    """Whether an object is there already, which counts as a use of it."""
    if target.exists():
        os.utime(target)
        return True
    return False


def write_object(arguments: Sequence[str], text: str | None, target: Path) -> Path:
    """Compiles to a file that appears when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".part", delete=False) as part:
        pass
    try:
        run(["-c", "-o", part.name, *arguments], text)
        os.replace(part.name, target)
    finally:
        Path(part.name).unlink(missing_ok=True)
    return target


# ---------------------------------------------------------------------------------------------
# the library
# ---------------------------------------------------------------------------------------------


# The files of the emulator in two translation units: the C++ library's headers take longer to read than the files.
DRIVER = {
    "call", "contexts", "control", "entries", "graph_calls", "graphs", "launch_calls", "memory_calls", "modules",
    "objects", "stream_calls", "streams", "transfers",
}  # fmt: skip


def compile_runtime(sources: Sequence[Path], objects: Path, headers: bytes) -> Path:
    """Files of the emulator itself, which depend neither on the kernels nor on the variant."""
    text = "".join(f'#include "{p.name}"\n' for p in sources)
    target = objects / f"runtime-{digest(text, *(p.read_bytes() for p in sources), headers, repr(RUNTIME))}.o"
    if kept(target):
        return target
    where = ["-I", relative(HERE), f"-fdebug-prefix-map={ROOT}=."]
    return write_object([*RUNTIME, *where, "-x", "c++", "-"], text, target)


def compile_variant(checking: bool, objects: Path) -> Path:
    """What says which build it is, and the end of static shared memory: linked last, no kernel's own."""
    text = f"namespace k3emu {{ extern const bool g_checking = {str(checking).lower()}; }}\n"
    attributes = 'section("k3emu_shared"), aligned(16), visibility("hidden")'
    text += f'extern "C" {{ __attribute__(({attributes})) unsigned char k3emu_shared_tail[4096]; }}\n'
    target = objects / f"variant-{digest(text)}.o"
    return target if kept(target) else write_object([*COMMON, "-x", "c++", "-"], text, target)


def included(sources: Sequence[Path]) -> list[Path]:
    """Every file that the kernels could include: the headers beside them and in cuda/."""
    folders = {ROOT / "cuda", HERE, *(source.parent for source in sources)}
    return sorted(p for folder in folders for pattern in ("*.h", "*.cuh") for p in folder.glob(pattern))


def build(sources: Sequence[Path] | None = None, *, checking: bool = False, out: Path = OUT) -> Path:
    """Builds the emulator with the kernels of these files.

    Parameters
    ----------
    sources
        The .cu files; by default all of cuda/.
    checking
        Whether the kernels check every access; else they are some five times as fast.
    out
        Where objects and libraries are kept.

    Returns
    -------
    Path
        The library, whose name is libcuda.so.1. Name it in K3_LIBCUDA, or put its folder first in LD_LIBRARY_PATH.

    Raises
    ------
    BuildError
        A source does not compile, or warns, or has a kernel that is not `extern "C"`.
    """
    kernels = sorted(
        {p.resolve() for p in (ROOT / "cuda").glob("*.cu")}
        if sources is None
        else {Path(p).resolve() for p in sources}
    )
    runtime = sorted(HERE.glob("*.cpp"))
    headers = b"".join(p.read_bytes() for p in sorted([*HERE.glob("*.h"), *HERE.glob("*.inc")]))
    everything = [*kernels, *runtime, *included(kernels), HERE / "exports.map", Path(__file__)]
    key = digest(
        str(checking), headers, *(part for p in everything for part in (relative(p), p.read_bytes()))
    )
    folder = out / f"{'check' if checking else 'fast'}-{key}"
    library = folder / "libcuda.so.1"
    if library.exists():
        os.utime(folder)
        return library
    objects = out / "objects"
    with locked(out), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(compile_kernels, p, checking, objects) for p in kernels]
        for part in (True, False):
            files = [p for p in runtime if (p.stem in DRIVER) is part]
            jobs.append(pool.submit(compile_runtime, files, objects, headers))
        jobs.append(pool.submit(compile_variant, checking, objects))
        parts = [str(job.result()) for job in jobs]
        remove_unused(out)
        return link(parts, library)


def remove_unused(out: Path) -> None:
    """Libraries and objects that no build has asked for in two weeks."""
    oldest = time.time() - 14 * 24 * 3600
    for path in [*out.glob("*-*"), *(out / "objects").glob("*.o")]:
        if path.stat().st_mtime < oldest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def link(parts: Sequence[str], library: Path) -> Path:
    """Links; the library appears when it is complete."""
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(".part")
    run(["-o", str(part), *parts, *LINK])
    os.replace(part, library)
    return library


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the CUDA emulator and say where it is.")
    parser.add_argument("sources", nargs="*", type=Path, help="the .cu files; by default all of cuda/")
    parser.add_argument("--check", action="store_true", help="build the checking variant")
    parser.add_argument("--out", type=Path, default=OUT, help="where to keep what is built (build/emulator)")
    arguments = parser.parse_args()
    library = build(arguments.sources or None, checking=arguments.check, out=arguments.out.resolve())
    sys.stdout.write(f"{library}\n")


if __name__ == "__main__":
    main()
