# SPDX-License-Identifier: MIT
"""How the emulator is built: which kernels it finds in a file, what it refuses, and that nothing is compiled twice."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from emulated import HERE, Emulator

KERNELS = """
#define BOTH(NAME, T) extern "C" __global__ void __launch_bounds__(8 * (4 + 4)) NAME(T* x) { *x = T(1); }
static __device__ float one() { return 1.0f; }
extern "C" __global__ void first(float* x) { *x = one(); }
extern "C" __global__ __launch_bounds__(128, 2) void
second(float* x, int n) { x[n] = one(); }
BOTH(third, float)
BOTH(fourth, int)
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "some.cu"
    source.write_text(text)
    return source


def names(emulator: Emulator) -> list[str]:
    out: list[str] = []
    while name := emulator.lib.k3emu_kernel_name(ctypes.c_size_t(len(out))):
        out.append(name.decode())
    return out


def test_kernels_are_found_behind_macros_and_bounds(build: SimpleNamespace) -> None:
    e = Emulator(
        build.build([write(build.OUT / "source", KERNELS)])
    )  # the same path, so that it is built once
    assert names(e) == ["first", "second", "third", "fourth"]
    e.open()
    bounds = [e.get("cuKernelGetAttribute", 0, e.kernel(name), 0) for name in names(e)]
    assert bounds == [1024, 128, 64, 64]
    e.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("__global__ void f(float* x) { *x = 1; }", 'expected `extern "C" __global__ void name(`'),
        (
            "template <class T> __global__ void f(T* x) { *x = 1; }",
            'expected `extern "C" __global__ void name(`',
        ),
        ('extern "C" __global__ void f(float* x) { __shared__ float t[4]; *x = t[0]; }', "section"),
        ('extern "C" __global__ void f(unsigned* x) { *x = __activemask(); }', "__activemask"),
        ('extern "C" __global__ void f(float* x) { *x = __expf(*x); }', "__expf"),
        ('extern "C" __global__ void f(float* x) { *x = expf(*x); }', 'poisoned "expf"'),
    ],
)
def test_what_a_kernel_file_may_not_have(
    build: SimpleNamespace, tmp_path: Path, source: str, words: str
) -> None:
    with pytest.raises(build.BuildError, match=re.escape(words)):
        build.build([write(tmp_path, source)])


def test_a_second_build_compiles_nothing(
    build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Emulator]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the compiler was called")

    build.compiler()
    monkeypatch.setattr(subprocess, "run", refuse)
    assert build.build([HERE / "bad.cu", HERE / "good.cu"]) == libraries["fast"].path


def test_the_library_shows_nothing_but_entry_points(libraries: dict[str, Emulator]) -> None:
    for emulator in libraries.values():
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", str(emulator.path)], capture_output=True, text=True, check=True
        ).stdout
        symbols = {line.split()[-1] for line in listing.splitlines()}
        assert {s for s in symbols if not s.startswith(("cu", "k3emu_"))} == set()
        assert "cuMemAlloc_v2" in symbols


def test_the_readme_names_every_option_and_function(build: SimpleNamespace) -> None:
    folder = build.HERE
    text = (folder / "README.md").read_text()
    options = set(re.findall(r"// (K3EMU_\w+):", (folder / "options.h").read_text()))
    functions = set(re.findall(r"\b(k3emu_\w+)\(", (folder / "k3emu.h").read_text()))
    assert len(options) > 8
    assert len(functions) > 10
    missing = {name for name in options | functions if f"`{name}" not in text}
    assert missing == set()
