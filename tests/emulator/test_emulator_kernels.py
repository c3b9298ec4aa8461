# SPDX-License-Identifier: MIT
"""Kernels on the emulator: correct ones are right and not reported, wrong ones are found, with file and line."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import HERE, LAUNCH_TIMEOUT, CudaError, Emulator, bf16
from numpy.typing import NDArray
from ops_tools import ISAS, make

Array = NDArray[Any]


class Good:
    """What each kernel of good.cu is run on, and what it must give."""

    def __init__(self, emulator: Emulator) -> None:
        self.e = emulator
        self.random = np.random.default_rng(5)

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def run(self, name: str, grid: int, block: int, *arguments: Any, shared: int = 0) -> list[Array]:
        """Launches it: an array is copied in, and what it holds afterwards is returned; scalars are passed on."""
        held = [self.e.put(a) if isinstance(a, np.ndarray) else a for a in arguments]
        self.e.launch(name, grid, block, *held, shared=shared)
        arrays = [(h, a) for h, a in zip(held, arguments, strict=True) if isinstance(a, np.ndarray)]
        out = [self.e.take(h, a.shape, a.dtype) for h, a in arrays]
        self.e.free(*[h for h, _ in arrays])
        return out

    def rms_norm(self) -> tuple[Array, Array]:
        x, norm = self.normal(5, 700), self.normal(700)
        y = self.run(
            "good_rms_norm", 5, 256, x, norm, 0 * x, np.int32(700), np.float32(1e-6), shared=700 * 4
        )[2]
        return y, x * norm / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)

    def gemv(self) -> tuple[Array, Array]:
        w, x = bf16(self.normal(21, 150)), self.normal(150)
        y = self.run("good_gemv", 6, 128, w, x, np.zeros(21, np.float32), np.int32(21), np.int32(150))[2]
        return y, (w.astype(np.uint32) << 16).view(np.float32).astype(np.float64) @ x

    def pipeline(self) -> tuple[Array, Array]:
        x = self.normal(3, 5, 128)
        sums = self.run("good_pipeline", 3, 64, x, np.zeros(3, np.float32), np.int32(5))[1]
        return sums, x.astype(np.float64).sum((1, 2))

    def histogram(self) -> tuple[Array, Array]:
        x = self.random.integers(0, 256, 999).astype(np.uint8)
        bins = self.run("good_histogram", 3, 96, x, np.zeros(16, np.uint32), np.int32(999))[1]
        return bins, np.bincount(x & 15, minlength=16)

    def narrow(self) -> tuple[Array, Array]:
        n = 300
        out = self.run("good_narrow", 3, 128, np.zeros(n, np.uint8), np.zeros(n, np.uint16), np.int32(n))
        halves = (out[1].astype(np.uint32) << 16).view(np.float32)
        return np.stack([out[0], halves]), np.stack([np.arange(n) % 256, halves.round()])

    def warp_exchange(self) -> tuple[Array, Array]:
        x = self.normal(2, 8, 32)
        y = self.run("good_warp_exchange", 2, 256, x, 0 * x)[1]
        return y, 2 * x[:, :, (np.arange(32) ^ 31) ^ 1]

    def half_warp_broadcast(self) -> tuple[Array, Array]:
        x = self.normal(2, 8, 16)
        y = self.run("good_half_warp_broadcast", 2, 128, x, 0 * x)[1]
        return y, x[:, :, ::4].sum(2, keepdims=True).repeat(16, 2)

    def half_warps(self) -> tuple[Array, Array]:
        x = self.random.integers(-3, 9, (2, 2, 16)).astype(np.int32)
        v = np.stack([x[:, 0].sum(1), x[:, 1].max(1)], 1)
        votes = (x & 1).sum((1, 2)) + np.where((v < 0).any(1), 1000, 0) + np.where((v > -5).all(1), 0, 2000)
        y = self.run("good_half_warps", 2, 32, x, 0 * x)[1]
        return y, (v + votes[:, None])[:, :, None].repeat(16, 2)

    def last_block(self) -> tuple[Array, Array]:
        x = self.normal(6, 64)
        zeros = np.zeros(6, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
        return self.run("good_last_block", 6, 64, x, *zeros)[3], x.astype(np.float64).sum(
            keepdims=True
        ).reshape(1)

    def mma(self) -> tuple[Array, Array]:
        a, b = self.normal(16, 16).round(1), self.normal(8, 16).round(1)
        wide = [(bf16(m).astype(np.uint32) << 16).view(np.float32).astype(np.float64) for m in (a, b)]
        return self.run("good_mma", 1, 32, bf16(a), bf16(b), np.zeros((16, 8), np.float32))[2], wide[
            0
        ] @ wide[1].T

    def loads(self) -> tuple[Array, Array]:
        x = self.normal(64, 4)
        y = self.run("good_loads", 1, 64, x, np.zeros((5, 64), np.float32))[1]
        t = np.arange(64)
        word = np.ascontiguousarray(x[:, 3]).view(np.uint32)
        halves = [(word << 16).view(np.float32), (word & 0xFFFF0000).view(np.float32)]
        largest = np.where(t % 3 == 0, -np.inf, x[:, 0]).reshape(2, 32).max(1).repeat(32)
        copied = np.where(np.arange(4) < (t % 5)[:, None], x, 0).sum(1)
        single = np.where(t % 2, 0, x.reshape(-1)[:64])
        rows = [
            x[:, 0] + x[:, 1] + x[:, 2] + halves[0] + halves[1],
            largest,
            copied[::-1],
            single[::-1],
            x[:, 3],
        ]
        usual = np.isfinite(rows[0]) & (np.abs(rows[0]) < 1e6)  # the low half of a float is any number
        return np.where(usual, y, 0), np.where(usual, np.stack(rows), 0)

    def shared_of_functions(self) -> tuple[Array, Array]:
        x = self.normal(64)
        y = self.run("good_shared_of_functions", 1, 64, x, 0 * x)[1]
        return y, sum(np.concatenate([np.zeros(by, np.float32), x[: 64 - by]]) for by in (1, 5, 8))

    def math(self) -> tuple[Array, Array]:
        x = np.linspace(-30, 30, 500, dtype=np.float32)
        out = self.run("good_math", 4, 128, x, np.zeros((6, 500), np.float32), np.int32(500))[1]
        wide = x.astype(np.float64)
        sigmoid = 1 / (1 + np.exp(-wide))
        situ = 4 * np.tanh(wide / 4) * sigmoid * 6 * np.tanh(wide / 12)
        code = np.arange(500)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        packed = values[code & 15] * 2.0 ** ((120 + (code >> 4)) - 127.0)
        rounded = (bf16(x).astype(np.uint32) << 16).view(np.float32)
        return out / np.maximum(np.abs(out), 1e-20), np.stack(
            [
                v / np.maximum(np.abs(o), 1e-20)
                for v, o in zip(
                    [np.exp(wide), sigmoid, np.tanh(wide), situ, rounded, packed],
                    out.astype(np.float64),
                    strict=True,
                )
            ]
        )

    def spin(self) -> tuple[Array, Array]:
        out = self.run("good_spin", 1, 32, np.zeros(1, np.uint32), np.zeros(1, np.int32))[1]
        return out, np.array([31])


GOOD = sorted(name for name in vars(Good) if not name.startswith("_") and name not in ("normal", "run"))


@pytest.mark.parametrize("name", GOOD)
def test_a_correct_kernel_is_right_and_not_reported_under_any_schedule(either: Emulator, name: str) -> None:
    bits = set()
    for seed, preempt in ((0, 0), (1, 0), (2, 7), (3, 50)):
        either.set(seed=seed, preempt=preempt)
        found, expected = getattr(Good(either), name)()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        bits.add(found.tobytes())
    assert len(bits) == 1, "the order of threads and blocks changes the bits"


def test_both_builds_give_the_same_bits(libraries: dict[str, Emulator]) -> None:
    results: list[list[bytes]] = []
    for emulator in libraries.values():
        emulator.reset()
        emulator.open()
        results.append([getattr(Good(emulator), name)()[0].tobytes() for name in GOOD])
        emulator.close()
    assert results[0] == results[1]


def test_the_shared_functions_give_the_bits_of_the_cpu(either: Emulator) -> None:
    if "avx2" not in ISAS:
        pytest.skip("the processor has no fused multiply-add, which the portable build does without")
    x = np.concatenate([np.linspace(-110, 110, 2000), [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38]]).astype(
        np.float32
    )
    n = len(x)
    found = Good(either).run("good_math", 16, 128, x, np.zeros((6, n), np.float32), np.int32(n))[1][1]
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    expected = make("avx2", kda_num_heads=n, kda_head_k=1).kda_gates(zeros[None], x[None], ones, zeros)[1][0]
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


# ---------------------------------------------------------------------------------------------
# wrong kernels
# ---------------------------------------------------------------------------------------------


def marks() -> dict[str, list[tuple[str, int]]]:
    """By kernel of bad.cu: what must be reported, and at which line."""
    out: dict[str, list[tuple[str, int]]] = {}
    name = ""
    for number, line in enumerate((HERE / "bad.cu").read_text().splitlines(), 1):
        if start := re.match(r"BAD\((\w+)\) {", line):
            name = start[1]
            out[name] = []
        if mark := re.search(r"// <- (.+)$", line):
            out[name].append((mark[1], number))
    return out


MARKS = marks()
FOUND_BY_THE_FAST_BUILD = [
    "global_overrun", "stack_overflow", "null_pointer", "use_after_free", "division_by_zero",
    "barrier_in_branch", "barrier_against_shuffle", "barrier_after_exit",
    "shuffle_without_me", "shuffle_from_absent_lane", "shuffle_against_vote", "wait_for_another_block",
    "async_misaligned", "async_past_the_end", "async_abandoned",
]  # fmt: skip
"""Guard pages, the hardware's own faults, and what needs no look at memory."""


def run_bad(e: Emulator, name: str) -> tuple[int, Array]:
    """Two blocks of 256 threads; the status of the device afterwards, and y."""
    e.set(watchdog_ms=200)
    host = np.zeros(64, np.float32)
    x, y = e.put(np.ones(256, np.float32)), e.put(np.zeros(256, np.float32))
    memory = e.alloc(32) if name == "uninitialised_global" else e.put(np.zeros(8, np.float32))
    other = {"host_pointer": host.ctypes.data, "null_pointer": 0}.get(name, memory)
    if name == "use_after_free":
        e.free(memory)
    e.launch(f"bad_{name}", 2, 256, x, y, np.int32(256), other, shared=1000)
    status = e.synchronize()
    values = np.empty(0, np.float32)
    if status == 0:
        values = e.take(y, 256)
        e.free(x, y, memory)
    return status, values


@pytest.mark.parametrize("name", MARKS)
def test_a_wrong_kernel_is_reported_with_file_and_line(checking: Emulator, name: str) -> None:
    run_bad(checking, name)
    reports = checking.reports
    checking.lib.k3emu_clear_reports()
    places = [(kind, f"tests/emulator/bad.cu:{line}") for kind, line in MARKS[name]]
    assert places
    for kind, place in places:
        if any(r.startswith(f"{kind}: in bad_{name}, ") and re.search(rf" {place}\b", r) for r in reports):
            return
    pytest.fail(f"expected one of {places}, found {reports}")


@pytest.mark.parametrize("name", FOUND_BY_THE_FAST_BUILD)
def test_the_fast_build_finds_what_needs_no_instrumentation(fast: Emulator, name: str) -> None:
    run_bad(fast, name)
    reports = fast.reports
    fast.lib.k3emu_clear_reports()
    assert any(f"tests/emulator/bad.cu:{line}" in r for r in reports for _, line in MARKS[name]), reports


def test_poison_shows_in_the_fast_build(fast: Emulator) -> None:
    """What was not written, and what a copy has not brought yet, reads as NaN."""
    assert np.isnan(run_bad(fast, "uninitialised_global")[1][:8]).all()
    assert np.isnan(run_bad(fast, "uninitialised_shared")[1][200:]).all()
    assert np.isnan(run_bad(fast, "async_without_wait")[1]).any()
    fast.expect("async copy", "copies in flight")


def test_a_write_just_past_the_end_is_noticed_without_instrumentation(fast: Emulator) -> None:
    """Inside the last 256 bytes nothing traps, but the bytes have changed."""
    bytes_, halves = fast.alloc(50), fast.alloc(200)
    fast.launch("good_narrow", 1, 100, bytes_, halves, np.int32(60))
    assert fast.synchronize() == 0
    fast.expect(
        "out of bounds", "good_narrow", "bytes after the end of allocation", "(50 bytes of device memory)"
    )
    fast.free(bytes_, halves)


def test_a_kernel_that_waits_for_another_block_is_stopped(either: Emulator) -> None:
    assert run_bad(either, "wait_for_another_block")[0] == LAUNCH_TIMEOUT
    either.expect("timeout", "does it wait for another block?")


def test_block_order_follows_the_seed(fast: Emulator) -> None:
    """The block that writes last is another one under some seed, and always the same under one."""
    last = {}
    for seed in (0, 1, 2, 3, 4, 5, 1, 2):
        fast.reset(seed=seed)
        fast.open()
        value = int(run_bad(fast, "race_between_blocks")[1][0])
        assert last.setdefault(seed, value) == value
        fast.close()
    fast.open()
    assert set(last.values()) == {1, 2}


# ---------------------------------------------------------------------------------------------
# launches
# ---------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Emulator], None]] = {
    "no blocks": lambda e: e.launch("good_spin", 0, 32, 0, 0),
    "no threads": lambda e: e.launch("good_spin", 1, 0, 0, 0),
    "too many threads": lambda e: e.launch("good_spin", 1, 1025, 0, 0),
    "too deep a block": lambda e: e.launch("good_spin", 1, (1, 1, 65), 0, 0),
    "too high a grid": lambda e: e.launch("good_spin", (1, 65536), 32, 0, 0),
    "more dynamic memory than asked for": lambda e: e.launch("good_spin", 1, 32, 0, 0, shared=49153),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_launch_that_the_driver_refuses(fast: Emulator, why: str) -> None:
    with pytest.raises(CudaError) as error:
        REFUSED[why](fast)
    assert error.value.status == 1
    assert fast.count("kernels") == 0


def test_launch_bounds_hold(fast: Emulator) -> None:
    with pytest.raises(CudaError) as error:
        fast.launch("good_rms_norm", 1, 512, 0, 0, 0, np.int32(0), np.float32(0))
    assert error.value.status == 701
    fast.expect("launch", "blocks of at most 256 threads")


def test_dynamic_memory_can_be_asked_for(fast: Emulator) -> None:
    kernel = fast.kernel("good_rms_norm")
    fast.call("cuKernelSetAttribute", 8, 100_000, kernel, 0)
    assert fast.get("cuKernelGetAttribute", 8, kernel, 0) == 100_000
    assert fast.raw("cuKernelSetAttribute", 8, 232_449, kernel, 0) == 1
    x = np.ones((1, 20_000), np.float32)
    y = Good(fast).run(
        "good_rms_norm", 1, 256, x, x[0], 0 * x, np.int32(20_000), np.float32(0), shared=80_000
    )[2]
    np.testing.assert_array_equal(y, x)


def test_parameters_are_where_a_kernel_expects_them(fast: Emulator) -> None:
    kernel = fast.kernel("good_rms_norm")
    info = np.zeros(2, np.uint64)
    where = info.ctypes.data, info.ctypes.data + 8
    places = []
    for i in range(5):
        fast.call("cuKernelGetParamInfo", kernel, i, *where)
        places.append(tuple(info.tolist()))
    assert places == [(0, 8), (8, 8), (16, 8), (24, 4), (28, 4)]
    assert fast.raw("cuKernelGetParamInfo", kernel, 5, *where) == 1


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def test_other_ways_to_launch(fast: Emulator) -> None:
    """A module and its function; arguments in one buffer; a configuration with attributes."""
    module = fast.get("cuModuleLoadData", b"k3emu kernels")
    function = fast.get("cuModuleGetFunction", module, b"good_narrow")
    a, b = fast.alloc(8), fast.alloc(16)

    packed = np.zeros(20, np.uint8)
    packed[:16].view(np.uint64)[:] = a, b
    packed[16:].view(np.int32)[:] = 3
    size = ctypes.c_size_t(20)
    extra = (ctypes.c_void_p * 5)(1, packed.ctypes.data, 2, ctypes.addressof(size), None)
    fast.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, 0, extra)
    assert fast.take(a, 8, np.uint8).tolist() == [0, 1, 2, 255, 255, 255, 255, 255]
    size.value = 19
    assert fast.raw("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, 0, extra) == 1
    assert fast.raw("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0) == 1

    values = np.array([a, b, 5], np.uint64)
    pointers = (ctypes.c_void_p * 3)(*[values.ctypes.data + 8 * i for i in range(3)])
    attribute = np.zeros(18, np.uint32)  # an id, and at 8 bytes the value
    config = Config((1, 1, 1, 32, 1, 1), 0, None, attribute.ctypes.data, 1)
    for kind, value, status in ((6, 1, 0), (4, 1, 0), (4, 2, 801), (2, 1, 801)):
        attribute[0], attribute[2:5] = kind, (value, 1, 1)
        assert fast.raw("cuLaunchKernelEx", ctypes.byref(config), function, pointers, 0) == status
    assert fast.take(a, 8, np.uint8).tolist() == [0, 1, 2, 3, 4, 255, 255, 255]
    fast.free(a, b)
    fast.call("cuModuleUnload", module)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
@pytest.mark.parametrize("name", ["good", "bad"])
def test_nvcc_compiles_the_same_source(build: SimpleNamespace, name: str, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++17", "-fmad=false", "-arch=sm_80", "-cubin", "-Icuda"]
    source = f"tests/emulator/{name}.cu"
    plain = {
        k: v for k, v in os.environ.items() if k != "LD_PRELOAD"
    }  # a sanitizer's, which nvcc does not survive
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.cubin"), source],
        cwd=build.ROOT, env=plain, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
