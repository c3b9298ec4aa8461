# SPDX-License-Identifier: MIT
"""Builds the compiled core: the CPU ops once per instruction set, the Cython modules over them, the GPU kernels.

Whether and for which GPUs there are kernels is said by K3_CUDA and K3_CUDA_ARCHS: see build_cuda.py.  Everything else
of the package is declared in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

import build_cuda

ROOT = Path(__file__).resolve().parent
HOST = ROOT / "cuda" / "host"
MODULES = (
    "memory",
    "ops",
    "weights",
    "recode",
    "driver",
    "gpu",
    "stream",
    "cuda_ops",
    "state",
    "streaming",
    "gpu_streaming",
    "decoder",
    "op_clock",
    "arguments",
    "kernels",
)

# -ffp-contract=off: a fused multiply-add only where the source writes one (docs/numerics.md).
# -g0: Python's own flags ask for debug information, which would make the modules four times as large.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wall",
]
# Last on every compiler and linker line, so that `make sanitize` can instrument all of it.
LAST = os.environ.get("K3_BUILD_FLAGS", "").split()
# g++ 12 warns of its own AVX-512 header under these two names.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
ISAS: dict[str, list[str]] = {"base": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISAS["avx2"] = ["-mavx2", "-mfma", "-DK3_ISA_AVX2"]
    ISAS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DK3_ISA_AVX512"]
# The op sources that use more of an instruction set than it always has.
MORE = {
    ("dot_amx.cpp", "avx512"): ["-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    ("dot_packed.cpp", "avx512"): ["-mavx512bf16"],
}
# What a module is compiled again for, besides its own file and the headers of cuda/.
DEPENDS = {
    "ops": ["build/generated/k3_build.h"],
    "driver": ["pyx/driver.h"],
    "gpu": [
        "pyx/driver.h",
        "build/generated/k3_cuda_build.h",
        *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "cuda").glob("*.cu*")),
    ],
    "stream": ["pyx/driver.h"],
    "cuda_ops": ["pyx/driver.h"],
    "streaming": ["pyx/driver.h"],
    "gpu_streaming": ["pyx/driver.h"],
}
COMMON_SOURCES = ("pool.cpp", "dispatch.cpp", "probe.cpp", "recode.cpp")
# Compiled into a module of their own.
STREAMING_SOURCES = (
    "expert_cache.cpp",
    "gpu_stream.cpp",
    "stream.cpp",
    "stream_files.cpp",
    "stream_ops.cpp",
    "stream_order.cpp",
)
SOURCES = {
    "gpu": ["cuda/launch.cpp"],
    "streaming": [f"cuda/host/{name}" for name in STREAMING_SOURCES],
}


def require_supported_platform() -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64", "aarch64"):
        here = f"{sys.platform} on {platform.machine()}"
        raise SystemExit(f"k3session builds on Linux for x86-64 and aarch64; this is {here}.")


def cimport_root() -> str:
    """A folder in which pyx/ has the package's own name, so that the modules can cimport each other by it."""
    package = ROOT / "build" / "cimport" / "k3session"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.pxd").touch()
    link = package / "_core"
    if not link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(ROOT / "pyx", package), target_is_directory=True)
    return str(package.parent)


def headers() -> list[str]:
    return [str(p.relative_to(ROOT)) for folder in (ROOT / "cuda", HOST) for p in sorted(folder.glob("*.h"))]


def build_headers() -> str:
    """Writes k3_build.h: snapshots record which build made them, and resume exactly only under the same one.

    And k3_cuda_build.h, with the digest of what the GPU kernels must have been built from.
    """
    digest = hashlib.sha256(repr((FLAGS, LAST, ISAS, platform.machine())).encode())
    sources = [*(ROOT / "cuda").glob("*.*"), *HOST.glob("*.*"), *(ROOT / "pyx").glob("*.*")]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "k3_build.h": f'#define K3_BUILD "{digest.hexdigest()[:16]}, compiler " __VERSION__\n',
        "k3_cuda_build.h": f'#define K3_CUDA_SOURCES "{build_cuda.sources_digest()}"\n',
    }
    for name, text in texts.items():
        header = folder / name
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
    return str(folder)


class BuildExt(build_ext):
    """Compiles the CPU ops once per instruction set, each into a namespace of its own, and links them into `ops`.

    The GPU kernels come last: into the package that is built, or with --inplace into the source tree.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = len(os.sched_getaffinity(0))

    def run(self) -> None:
        super().run()
        package = ROOT / "k3session" if self.inplace else Path(self.build_lib) / "k3session"
        try:
            built, said = build_cuda.build(package / "_cuda", int(self.parallel or 1))
        except build_cuda.BuildError as error:
            raise SystemExit(f"k3session: {error}") from None
        self.announce(f"k3session: {said}", logging.INFO if built else logging.WARNING)

    def build_extension(self, ext: Extension) -> None:
        if ext.name.endswith(".ops"):
            ext.extra_objects = self.host_objects()
            ext.depends = [*ext.depends, *ext.extra_objects]  # else a changed op is compiled but not linked
        super().build_extension(ext)

    def host_objects(self) -> list[str]:
        jobs: list[tuple[str, str, list[str]]] = []
        for source in sorted(HOST.glob("*.cpp")):
            name = str(source.relative_to(ROOT))
            if source.name in STREAMING_SOURCES:
                continue
            if source.name in COMMON_SOURCES:
                jobs.append((name, "common", [*FLAGS, *QUIET, *LAST]))
            else:
                for isa, flags in ISAS.items():
                    more = MORE.get((source.name, isa), [])
                    jobs.append((name, isa, [*FLAGS, *QUIET, *flags, *more, f"-DK3_NS=k3_{isa}", *LAST]))
        newest_header = max(os.path.getmtime(ROOT / h) for h in [*headers(), "setup.py"])

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            source, isa, flags = job
            folder = os.path.join(self.build_temp, isa)
            target = os.path.join(folder, os.path.splitext(source)[0] + ".o")
            newest = max(newest_header, os.path.getmtime(ROOT / source))
            if not self.force and os.path.exists(target) and os.path.getmtime(target) > newest:
                return target
            compiled = self.compiler.compile([source], folder, include_dirs=["cuda"], extra_postargs=flags)
            return compiled[0]

        with ThreadPoolExecutor(max_workers=int(self.parallel or 1)) as pool:
            return list(pool.map(compile_one, jobs))


def extensions() -> list[Extension]:
    require_supported_platform()
    from Cython.Build import cythonize

    generated = build_headers()
    modules = [
        Extension(
            f"k3session._core.{name}",
            [f"pyx/{name}.pyx", *SOURCES.get(name, [])],
            include_dirs=[str(ROOT / "cuda"), str(ROOT / "pyx"), generated],
            language="c++",
            extra_compile_args=[*FLAGS, "-O2", *QUIET, "-Wno-unused-function", *LAST],
            extra_link_args=LAST,
            libraries=["dl"] if name == "driver" else [],
            depends=[*headers(), *DEPENDS.get(name, [])],
        )
        for name in MODULES
    ]
    return cythonize(
        modules,
        include_path=[cimport_root()],
        build_dir="build/cython",
        compiler_directives={
            "language_level": "3",
            "embedsignature": True,
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
        },
    )


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
