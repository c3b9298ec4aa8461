# SPDX-License-Identifier: MIT
"""The build of the GPU kernels: what K3_CUDA does, what is compiled again, what is packed, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3session import fatbin
from k3session._core import gpu
from k3session.errors import DeviceError

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    """A file at the root of the source tree."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    if spec is None or spec.loader is None or not (ROOT / f"{name}.py").exists():
        pytest.skip(f"{name}.py is not here: these are the tests of a wheel")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build() -> ModuleType:
    return load("build_cuda")


NVCC = """#!/usr/bin/env python3
import os, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release @RELEASE@\\nBuild")
    sys.exit()
out, source = sys.argv[sys.argv.index("-o") + 1], sys.argv[-1]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(os.path.basename(source) + " " + " ".join(sys.argv[1:]) + "\\n")
text = open(source).read()
if "wrong" in text:
    open(out, "w").write("half of it")
    sys.exit("wrong.cu(1): error: it is wrong")
open(out, "w").write("fat binary of " + text)
for name in text.split():
    for arch in ("80", "90"):
        constants = ", 380 bytes cmem[0]" if arch == "80" else ""
        sys.stderr.write(
            "ptxas info    : Compiling entry function '%s' for 'sm_%s'\\n"
            "ptxas info    : Function properties for %s\\n"
            "    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\\n"
            "ptxas info    : Used %s registers, used 1 barriers, 512 bytes smem%s\\n"
            % (name, arch, name, arch, constants))
"""


class Tree:
    """A source tree with two files of kernels, and an nvcc that only says what it would do."""

    def __init__(self, folder: Path, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.build, self.cuda, self.into = build, folder / "cuda", folder / "package" / "_cuda"
        self.log, self.bin = folder / "log", folder / "bin"
        self.cuda.mkdir()
        self.bin.mkdir()
        for name, text in {
            "one.cu": "k3_a k3_b",
            "two.cu": "k3_c",
            "k3_prim.cuh": "p",
            "k3_math.h": "m",
            "ops.h": "o",
        }.items():
            (self.cuda / name).write_text(text)
        monkeypatch.setattr(build, "CUDA", self.cuda)
        monkeypatch.setattr(build, "CACHE", folder / "cache")
        monkeypatch.setattr(build, "candidates", lambda: iter([str(self.bin / "nvcc")]))
        monkeypatch.setenv("FAKE_LOG", str(self.log))
        monkeypatch.delenv("K3_CUDA", raising=False)
        monkeypatch.setenv("K3_CUDA_ARCHS", "80,90")

    def nvcc(self, release: str = "13.0, V13.0.88") -> None:
        path = self.bin / "nvcc"
        path.write_text(NVCC.replace("@RELEASE@", release))
        path.chmod(0o755)

    def run(self) -> tuple[bool, str, list[str]]:
        """What is said, and which files were compiled."""
        self.log.write_text("")
        built, said = self.build.build(self.into, 2)
        return built, said, sorted(line.split()[0] for line in self.log.read_text().splitlines())

    @property
    def manifest(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.into / "kernels.json").read_text())
        return loaded

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.into.glob("*")}


@pytest.fixture
def tree(tmp_path: Path, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, build, monkeypatch)


BOTH = {"kernels.fatbin", "kernels.json"}


def test_what_is_packed(tree: Tree) -> None:
    tree.nvcc()
    built, said, compiled = tree.run()
    assert built and "nvcc 13.0.88 for 80, 90" in said
    assert compiled == ["one.cu", "two.cu"] and tree.there == BOTH
    line = tree.log.read_text()
    for flag in (
        "-fmad=false",
        "code=sm_80 ",
        "arch=compute_90,code=sm_90",
        "code=compute_80",
        "-compress-all",
    ):
        assert line.count(flag) == 2, flag
    assert "ftz" not in line and "fast_math" not in line
    manifest, data = tree.manifest, (tree.into / "kernels.fatbin").read_bytes()
    assert manifest["bytes"] == len(data) and manifest["sources"] == tree.build.sources_digest()
    assert (manifest["nvcc"], manifest["toolkit"]) == ("13.0.88", 13000)
    assert manifest["architectures"] == ["sm_80", "sm_90", "compute_80"]
    assert [(i["source"], i["kernels"]) for i in manifest["images"]] == [
        ("one.cu", ["k3_a", "k3_b"]),
        ("two.cu", ["k3_c"]),
    ]
    for image in manifest["images"]:
        assert image["offset"] % 16 == 0
        text = (tree.cuda / image["source"]).read_text()
        assert data[image["offset"] :][: image["bytes"]] == b"fat binary of " + text.encode()
    assert manifest["kernels"]["k3_b"] == {
        "parameters": 28,
        "sm_80": {"registers": 80, "shared": 512, "spills": 12},
        "sm_90": {"registers": 90, "shared": 512, "spills": 12},
    }


def test_only_what_changed_is_compiled_again(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.nvcc()
    tree.run()
    assert tree.run()[2] == []
    (tree.cuda / "two.cu").write_text("k3_c k3_d")
    assert tree.run()[2] == ["two.cu"]
    assert tree.manifest["images"][1]["kernels"] == ["k3_c", "k3_d"]
    for changed in ("k3_prim.cuh", "k3_math.h", "ops.h"):
        (tree.cuda / changed).write_text("another")
        assert tree.run()[2] == ["one.cu", "two.cu"], changed
    (tree.cuda / "k3_launch.h").write_text("no kernel includes this")
    assert tree.run()[2] == []
    monkeypatch.setenv("K3_CUDA_ARCHS", "90")
    assert tree.run()[2] == ["one.cu", "two.cu"]
    tree.nvcc("13.1, V13.1.5")
    assert tree.run()[2] == ["one.cu", "two.cu"]
    (tree.cuda / "one.cu").unlink()
    tree.run()
    assert set(tree.manifest["kernels"]) == {"k3_c", "k3_d"}
    assert len(list(tree.build.CACHE.glob("two-*.fatbin"))) == 1


@pytest.mark.parametrize("mode", ["", "off"])
def test_kernels_of_other_sources_are_never_packed(
    mode: str, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.nvcc()
    tree.run()
    (tree.bin / "nvcc").unlink()
    monkeypatch.setenv("K3_CUDA", mode)
    built, said, _ = tree.run()
    if mode == "off":
        assert not built and tree.there == set() and "K3_CUDA=off" in said
        return
    assert built and tree.there == BOTH and "stay" in said  # those of these very sources
    (tree.cuda / "one.cu").write_text("k3_a")
    built, said, _ = tree.run()
    assert not built and tree.there == set()
    assert "nvcc was not found" in said and "CPU only" in said and "K3_CUDA=pip" in said


def test_a_source_that_nvcc_refuses(tree: Tree) -> None:
    tree.nvcc()
    tree.run()
    (tree.cuda / "two.cu").write_text("wrong")
    with pytest.raises(tree.build.BuildError, match=r"nvcc refused two\.cu .*K3_CUDA=off[^$]*it is wrong"):
        tree.run()
    assert tree.there == set() and not list(tree.build.CACHE.glob("*.part"))
    (tree.cuda / "two.cu").write_text("k3_c")
    assert tree.run()[0] and tree.there == BOTH


@pytest.mark.parametrize("mode", ["require", "pip", "yes"])
def test_without_nvcc_where_it_is_required(mode: str, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_CUDA", mode)
    expected = "expected off, require or pip" if mode == "yes" else f"K3_CUDA={mode}, but nvcc was not found"
    with pytest.raises(tree.build.BuildError, match=expected):
        tree.run()


def test_an_nvcc_that_is_too_old_is_passed_over(tree: Tree, tmp_path: Path) -> None:
    tree.nvcc("12.9, V12.9.86")
    built, said, _ = tree.run()
    assert not built and "nvcc is of CUDA 12.9.86, where 13.0 or later is needed" in said
    newer = tmp_path / "newer"
    newer.write_text(NVCC.replace("@RELEASE@", "13.0, V13.0.88"))
    newer.chmod(0o755)
    tree.build.candidates = lambda: iter([str(tree.bin / "nvcc"), str(tmp_path / "absent"), str(newer)])
    assert tree.run()[0]


@pytest.mark.parametrize("wanted", ["75", "9.0", "sm_90", "90 x"])
def test_architectures_that_cannot_be_meant(wanted: str, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.nvcc()
    monkeypatch.setenv("K3_CUDA_ARCHS", wanted)
    with pytest.raises(tree.build.BuildError, match=r"K3_CUDA_ARCHS has .* expected compute capabilities"):
        tree.run()


def test_where_nvcc_is_looked_for(tmp_path: Path, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, home = tmp_path / "packages", tmp_path / "home"
    for folder in (packages / "nvidia" / "cu13" / "bin", home / "bin"):
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text("")
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", os.devnull)
    found = list(build.candidates())
    assert found[0] == str(home / "bin" / "nvcc") and "/usr/local/cuda/bin/nvcc" in found
    assert found[-1] == str(packages / "nvidia" / "cu13" / "bin" / "nvcc")


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_pip_is_asked_for_nvcc_where_that_is_wanted(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    backend = load("build_backend")
    monkeypatch.setattr(
        backend, "build_meta", type("Fake", (), {hook: staticmethod(lambda settings: ["wheel"])})
    )
    for mode, expected in {"pip": 1, "off": 0, "require": 0, "": 0}.items():
        monkeypatch.setenv("K3_CUDA", mode)
        wanted = getattr(backend, hook)()
        assert wanted[0] == "wheel" and len(wanted) == 1 + expected, mode
    monkeypatch.setenv("K3_CUDA", "pip")
    assert getattr(backend, hook)()[1] == "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"


SOURCE = """
extern "C" __global__ void k3_small(const float* x, float* y, float a, int n) {
    static __shared__ float row[32];
    const int i = blockIdx.x * 32 + threadIdx.x;
    row[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) y[i] = row[31 - threadIdx.x] * a + 1.0f;
}
"""


def test_the_real_nvcc(tmp_path: Path, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, reason = build.find_nvcc()
    if nvcc is None:
        pytest.skip(reason)
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    for name, text in {"small.cu": SOURCE, "k3_math.h": "", "ops.h": ""}.items():
        (cuda / name).write_text(text)
    monkeypatch.setenv("K3_CUDA_ARCHS", "80,90")
    build.pack(nvcc, tmp_path / "into", cuda, tmp_path / "cache")
    manifest = json.loads((tmp_path / "into" / "kernels.json").read_text())
    data = (tmp_path / "into" / "kernels.fatbin").read_bytes()
    assert data[:4] == bytes.fromhex("50ed55ba") and str(tmp_path).encode() not in data
    kernel = manifest["kernels"]["k3_small"]
    assert kernel["parameters"] == 24
    for arch in ("sm_80", "sm_90"):
        assert 4 < kernel[arch]["registers"] < 64 and (kernel[arch]["shared"], kernel[arch]["spills"]) == (
            128,
            0,
        )


def test_the_kernels_of_this_build() -> None:
    """Those of the launch functions, all of them, none of which spills or needs more than a device has."""
    folder = Path(fatbin.__file__).parent / "_cuda"
    if not folder.is_dir():
        pytest.skip("this build has no GPU kernels")
    image = fatbin.read(gpu.SOURCES)
    kernels = image.manifest["kernels"]
    assert set(kernels) >= set(gpu.KERNELS) and len(gpu.KERNELS) == len(set(gpu.KERNELS)) > 15
    for name, kernel in kernels.items():
        assert (kernel["parameters"] or 0) <= 4096, name
        for arch in kernel.keys() - {"parameters"}:
            assert kernel[arch]["shared"] <= 48 << 10 and kernel[arch]["registers"] <= 255, (name, arch)
        assert {kernel[arch]["spills"] for arch in kernel.keys() & {"sm_80", "sm_90"}} <= {0}, name
    for offset, names in image.images:
        assert image.data[offset:][:4] == bytes.fromhex("50ed55ba") and names
    assert image.refusal((8, 0), 13000) is image.refusal((12, 1), 13000) is None


# ---------------------------------------------------------------------------------------------
# read by the package
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with kernels of the sources "abc"."""
    (tmp_path / "_cuda").mkdir()
    manifest = {"sources": "abc", "bytes": 5, "toolkit": 13000, "architectures": ["sm_90", "compute_80"]}
    manifest["images"] = [{"offset": 0, "kernels": ["k3_a"]}]
    (tmp_path / "_cuda" / "kernels.json").write_text(json.dumps(manifest))
    (tmp_path / "_cuda" / "kernels.fatbin").write_bytes(b"12345")
    monkeypatch.setattr(fatbin, "__file__", str(tmp_path / "fatbin.py"))
    monkeypatch.delenv("K3_LIBCUDA", raising=False)
    return tmp_path / "_cuda"


def test_kernels_of_this_code_are_read(package: Path) -> None:
    image = fatbin.read("abc")
    assert (image.data, image.images) == (b"12345", ((0, ("k3_a",)),))


def test_kernels_of_another_code_are_refused(package: Path) -> None:
    with pytest.raises(DeviceError, match=r"other sources .*digest abc, expected xyz.*build or install"):
        fatbin.read("xyz")
    (package / "kernels.fatbin").write_bytes(b"1234")
    with pytest.raises(DeviceError, match="other sources"):
        fatbin.read("abc")
    (package / "kernels.json").write_text("{")
    with pytest.raises(DeviceError, match=r"cannot be read .*; install k3session again"):
        fatbin.read("abc")


def test_a_build_without_kernels(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, but for the emulator, which has the kernels in its library."""
    (package / "kernels.fatbin").unlink()
    with pytest.raises(DeviceError, match=r"no GPU kernels, .* without nvcc; .* K3_CUDA=pip"):
        fatbin.read("abc")
    monkeypatch.setenv("K3_LIBCUDA", "somewhere")
    assert fatbin.read("abc") == fatbin.Fatbin(b"k3emu kernels\n\0", ((0, ()),))


@pytest.mark.parametrize(
    ("architectures", "capability", "driver", "refused"),
    [
        (["sm_90", "compute_80"], (9, 0), 13000, None),
        (["sm_80"], (8, 6), 13000, None),  # machine code serves later ones of the same major number
        (["sm_86"], (8, 0), 13000, "K3_CUDA_ARCHS=80"),
        (["sm_90"], (10, 0), 13000, "K3_CUDA_ARCHS=100"),
        (["sm_100", "sm_103"], (12, 1), 13000, "K3_CUDA_ARCHS=121"),
        (["sm_90", "compute_80"], (12, 0), 13000, None),
        (["sm_90", "compute_90"], (8, 9), 13000, "K3_CUDA_ARCHS=89"),
    ],
)
def test_which_devices_the_kernels_run_on(
    architectures: list[str], capability: tuple[int, int], driver: int, refused: str | None
) -> None:
    image = fatbin.Fatbin(b"", (), {"architectures": architectures, "toolkit": 13000})
    said = image.refusal(capability, driver)
    assert (said is None) == (refused is None)
    assert refused is None or (said is not None and refused in said and ", ".join(architectures) in said)


def test_ptx_of_a_newer_compiler_than_the_driver() -> None:
    image = fatbin.Fatbin(b"", (), {"architectures": ["sm_90", "compute_80"], "toolkit": 13050})
    assert image.refusal((9, 0), 13000) is None
    said = image.refusal((12, 0), 13000)
    assert said is not None and "for CUDA 13.5 or later, and this one is for 13.0; update the driver" in said
    assert image.refusal((12, 0), 13050) is None
