# SPDX-License-Identifier: MIT
"""What the compiler and the linker made: instruction sets kept apart, nothing exported or linked without need."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from core_access import FULL

import k3session as k3
from k3session._core import ops

ROOT = Path(__file__).resolve().parent.parent
CORE = Path(ops.__file__).parent
MODULES = sorted(CORE.glob("*.so"))
X86 = platform.machine() in ("x86_64", "AMD64")
# In a mangled name a namespace follows the length of its name; the table of an instruction set has a plain name.
NAMES = {isa: rf"\d+k3_{isa}|^k3_{isa}_table$" for isa in ("base", "avx2", "avx512")}


def output(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def instructions(module: Path) -> Iterator[tuple[str, str]]:
    """(function, instruction) over the whole code of a module; names as the linker has them."""
    function = ""
    for line in output("objdump", "-d", "--no-show-raw-insn", module).splitlines():
        if line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]
        elif line.startswith(" ") and "\t" in line:
            yield function, line.split("\t", 1)[1]


def uses_avx(instruction: str) -> bool:
    """Whether a processor without AVX would refuse it: VEX and EVEX forms have names of their own."""
    return uses_avx512(instruction) or re.search(r"%ymm|^v[a-z0-9]+ .*%xmm", instruction) is not None


def uses_avx512(instruction: str) -> bool:
    return re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]\b", instruction) is not None


@pytest.mark.skipif(not X86, reason="instruction sets are chosen at run time on x86-64 only")
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name.split(".")[0])
def test_vector_instructions_stay_in_the_namespace_of_their_build(module: Path) -> None:
    """A function shared by two builds is merged by the linker: the baseline would then run AVX code and be killed."""
    functions = {"avx2": set(), "avx512": set()}
    for function, instruction in instructions(module):
        if not uses_avx(instruction):
            continue
        isa = "avx512" if re.search(NAMES["avx512"], function) else "avx2"
        assert re.search(NAMES[isa], function), f"{function}: {instruction}"
        assert isa == "avx512" or not uses_avx512(instruction), f"{function}: {instruction}"
        functions[isa].add(function)
    expected = module.name.startswith("ops.")
    assert (len(functions["avx2"]) > 20) == (len(functions["avx512"]) > 20) == expected


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name.split(".")[0])
def test_a_module_exports_its_init_function_only(module: Path) -> None:
    exported = {line.split()[-1] for line in output("nm", "-D", "--defined-only", module).splitlines()}
    assert exported == {f"PyInit_{module.name.split('.')[0]}"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name.split(".")[0])
def test_only_the_system_libraries_are_linked(module: Path) -> None:
    needed = re.findall(r"NEEDED.*\[(.+)\]", output("readelf", "-d", module))
    allowed = r"lib(stdc\+\+|m|gcc_s|c|pthread|dl)\.so\.\d+|ld-linux.*"
    assert needed and not [name for name in needed if not re.fullmatch(allowed, name)]


@pytest.mark.skipif(not X86, reason="instruction sets are built on x86-64 only")
def test_no_object_has_a_symbol_that_another_build_could_share(tmp_path: Path) -> None:
    """Without optimisation every inline function that is used is emitted, and shows whether it is shared."""
    flags = {"base": [], "avx2": ["-mavx2", "-mfma", "-DK3_ISA_AVX2"]}
    flags["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DK3_ISA_AVX512"]
    sources = [path for path in sorted((ROOT / "cuda" / "host").glob("*.cpp")) if "K3_NS" in path.read_text()]
    assert len(sources) >= 15
    if not FULL:  # these include every header between them
        sources = [path for path in sources if path.stem in ("experts", "mla_attend", "mla_append")]
    compiled = 0
    for source in sources:
        for isa, extra in flags.items():
            target = tmp_path / f"{isa}.{source.stem}.o"
            compiler = [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-O0", "-w"]
            output(*compiler, *extra, f"-DK3_NS=k3_{isa}", "-c", source, "-o", target)
            compiled += 1
            for line in output("nm", "--defined-only", target).splitlines():
                kind, name = line.split()[-2:]
                own = re.search(NAMES[isa], name) or name.startswith("DW.ref.")
                assert own or kind not in "TWVu", f"{source.name} for {isa}: {kind} {name}"
    assert compiled >= 9


def test_one_version_everywhere() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert k3.__version__ == version == metadata.version("k3session")
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[({re.escape(version)}|Unreleased)\]", changes, re.MULTILINE)


@pytest.mark.parametrize("where", ["darwin on arm64", "win32 on AMD64", "linux on riscv64"])
def test_elsewhere_the_build_stops_with_one_sentence(where: str) -> None:
    pytest.importorskip("setuptools")
    system, machine = where.split(" on ")
    program = f"""
import platform, runpy, setuptools.command.build_ext, sys
sys.platform, platform.machine = {system!r}, lambda: {machine!r}
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"k3session builds on Linux for x86-64 and aarch64; this is {where}.\n"
