# SPDX-License-Identifier: MIT
"""The driver's calls: what they refuse, faults on command, counters, leaks, and the states a driver can be found in."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from emulated import (
    HERE,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    NOT_FOUND,
    NOT_INITIALIZED,
    OUT_OF_MEMORY,
    CudaError,
    Emulator,
)


def ones(e: Emulator, n: int = 8) -> int:
    return e.put(np.ones(n, np.float32))


# ---------------------------------------------------------------------------------------------
# initialisation and contexts
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def closed(libraries: dict[str, Emulator]) -> Iterator[Emulator]:
    """A library on which nothing has been called."""
    emulator = libraries["fast"]
    emulator.reset()
    yield emulator
    emulator.reset()


def test_nothing_works_before_cuinit(closed: Emulator) -> None:
    assert closed.raw("cuMemFree_v2", 4096) == NOT_INITIALIZED
    assert closed.raw("cuDevicePrimaryCtxRetain", 0, 0) == NOT_INITIALIZED
    assert closed.get("cuDriverGetVersion") == 13000


@pytest.mark.parametrize("status", [34, 100, 803, 804, 999])
def test_a_driver_that_does_not_start(closed: Emulator, status: int) -> None:
    closed.set(init=status)
    assert closed.raw("cuInit", 0) == status


def test_a_machine_without_devices(closed: Emulator) -> None:
    closed.set(devices=0)
    assert closed.raw("cuInit", 0) == 100


def test_an_old_driver_and_an_old_device(closed: Emulator) -> None:
    closed.set(driver=12080, arch=75)
    assert closed.get("cuDriverGetVersion") == 12080
    with pytest.raises(CudaError) as error:
        closed.open()
    assert error.value.status == 209  # no kernels for it
    assert closed.get("cuDeviceGetAttribute", 75, 0) == 7


def test_a_thread_without_a_context(fast: Emulator) -> None:
    fast.call("cuCtxSetCurrent", 0)
    address = ctypes.c_uint64()
    assert fast.raw("cuMemAlloc_v2", ctypes.byref(address), 16) == INVALID_CONTEXT
    assert fast.raw("cuStreamSynchronize", 0) == INVALID_CONTEXT
    assert fast.raw("cuCtxSetCurrent", 12345) == INVALID_CONTEXT
    fast.call("cuCtxSetCurrent", fast.get("cuDevicePrimaryCtxRetain", 0))
    fast.call("cuDevicePrimaryCtxRelease_v2", 0)
    fast.free(ones(fast))


def test_the_primary_context_lives_as_long_as_it_has_users(fast: Emulator) -> None:
    context = fast.get("cuDevicePrimaryCtxRetain", 0)
    assert context == fast.get("cuCtxGetCurrent")
    fast.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert fast.live("contexts") == 1
    fast.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert fast.live("contexts") == 0
    assert fast.raw("cuDevicePrimaryCtxRelease_v2", 0) == INVALID_CONTEXT
    assert fast.raw("cuCtxSynchronize") == INVALID_CONTEXT


def test_handles_of_another_context_are_refused(fast: Emulator) -> None:
    stream, first = fast.stream(), fast.get("cuCtxGetCurrent")
    second = fast.get("cuCtxCreate_v4", 0, 0, 0)
    assert second != first
    with pytest.raises(CudaError) as error:
        fast.launch("good_spin", 1, 32, 0, 0, stream=stream)
    assert error.value.status == INVALID_HANDLE
    fast.call("cuCtxDestroy_v2", second)
    assert fast.get("cuCtxGetCurrent") == first
    assert fast.raw("cuCtxSetCurrent", second) == INVALID_CONTEXT
    fast.call("cuStreamDestroy_v2", stream)


@pytest.mark.parametrize(
    "call", ["cuStreamDestroy_v2", "cuEventDestroy_v2", "cuGraphExecDestroy", "cuLibraryUnload"]
)
def test_a_handle_that_is_gone_is_noticed(fast: Emulator, call: str) -> None:
    handle = {"cuStreamDestroy_v2": fast.stream, "cuEventDestroy_v2": fast.event}.get(call, lambda: 4096)()
    if handle != 4096:
        fast.call(call, handle)
    assert fast.raw(call, handle) in (INVALID_HANDLE, INVALID_VALUE)
    fast.lib.k3emu_clear_reports()


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
from emulated import Emulator
e = Emulator(sys.argv[2])
e.open()
address = e.alloc(16)
pid = os.fork()
if pid == 0:
    os._exit(e.raw("cuMemFree_v2", address) * 10 + e.raw("cuInit", 0))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), e.raw("cuMemFree_v2", address))
"""


def test_a_forked_child_has_no_driver(fast: Emulator) -> None:
    command = [sys.executable, "-c", CHILD, str(HERE), str(fast.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["33", "0"]


# ---------------------------------------------------------------------------------------------
# memory
# ---------------------------------------------------------------------------------------------


def test_memory_is_poison_aligned_and_never_given_out_again(fast: Emulator) -> None:
    a = fast.alloc(100)
    assert a % 256 == 0
    assert (fast.take(a, 100, np.uint8) == 0xFF).all()
    fast.free(a)
    b = fast.alloc(100)
    assert b != a
    fast.free(b)


def test_out_of_memory(fast: Emulator) -> None:
    fast.set(memory=10_000)
    a = fast.alloc(6000)
    assert fast.raw("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 6000) == OUT_OF_MEMORY
    total = ctypes.c_uint64()
    assert fast.get("cuMemGetInfo_v2", ctypes.byref(total)) == 4000
    assert total.value == 10_000
    fast.free(a)
    fast.free(fast.alloc(6000))
    assert fast.raw("cuMemAlloc_v2", ctypes.byref(total), 0) == INVALID_VALUE


def test_bad_frees(fast: Emulator) -> None:
    a = fast.alloc(1000)
    assert fast.raw("cuMemFree_v2", a + 256) == INVALID_VALUE
    fast.expect("bad free", "is not the start")
    fast.free(a)
    assert fast.raw("cuMemFree_v2", a) == INVALID_VALUE
    fast.expect("bad free", "freed")
    assert fast.raw("cuMemFree_v2", 4096) == INVALID_VALUE
    fast.expect("bad free", "no allocation")
    address, _ = fast.pinned(4)
    assert fast.raw("cuMemFree_v2", address) == INVALID_VALUE
    fast.expect("bad free", "pinned host")
    fast.call("cuMemFreeHost", address)
    fast.call("cuMemFree_v2", 0)


def test_copies_must_stay_inside(fast: Emulator) -> None:
    a, host = fast.alloc(64), np.zeros(100, np.uint8)
    for call, to, source, size in [
        ("cuMemcpyHtoD_v2", a, host.ctypes.data, 65),
        ("cuMemcpyDtoH_v2", host.ctypes.data, a + 60, 5),
        ("cuMemcpyDtoD_v2", a, a + 1, 64),
        ("cuMemcpyHtoD_v2", host.ctypes.data, host.ctypes.data, 4),
        ("cuMemcpyHtoD_v2", a, 0, 4),
    ]:
        assert fast.raw(call, to, source, size) == INVALID_VALUE
        fast.expect("out of bounds")
    fast.free(a)
    assert fast.raw("cuMemcpyDtoH_v2", host.ctypes.data, a, 4) == INVALID_VALUE
    fast.expect("use after free")


def test_fills_and_copies_within(fast: Emulator) -> None:
    a, b = fast.alloc(64), fast.alloc(64)
    fast.call("cuMemsetD8_v2", a, 3, 64)
    fast.call("cuMemsetD16_v2", a + 2, 0x0102, 1)
    fast.call("cuMemsetD32_v2", a + 8, 7, 2)
    fast.call("cuMemcpyDtoD_v2", b, a, 64)
    expected = np.full(64, 3, np.uint8)
    expected[2:4] = 2, 1
    expected[8:16] = 7, 0, 0, 0, 7, 0, 0, 0
    np.testing.assert_array_equal(fast.take(b, 64, np.uint8), expected)
    assert fast.raw("cuMemsetD32_v2", a + 2, 0, 1) == INVALID_VALUE  # misaligned
    fast.free(a, b)


def test_the_checking_build_knows_what_was_copied(checking: Emulator) -> None:
    """Bytes that a copy, a fill or a kernel has written count as written; those copied from unwritten ones do not."""
    source, target, y = checking.alloc(32), checking.alloc(32), checking.put(np.zeros(256, np.float32))
    checking.call("cuMemsetD32_v2", source, 0, 7)  # all but the last
    checking.call("cuMemcpyDtoD_v2", target, source, 32)
    checking.launch("bad_uninitialised_global", 1, 7, y, y, np.int32(7), target)
    assert checking.synchronize() == 0
    assert checking.reports == []
    checking.launch("bad_uninitialised_global", 1, 8, y, y, np.int32(8), target)
    assert checking.synchronize() == 0
    checking.expect("uninitialised read", "thread 7")
    checking.free(source, target, y)


def test_kernels_use_pinned_and_registered_memory(either: Emulator) -> None:
    address, x = either.pinned(256)
    x[:] = 3
    registered = np.full(256, 4, np.float32)
    either.call("cuMemHostRegister_v2", registered.ctypes.data, registered.nbytes, 0)
    assert either.raw("cuMemHostRegister_v2", registered.ctypes.data, 4, 0) == 712
    assert either.get("cuMemHostGetDevicePointer_v2", registered.ctypes.data, 0) == registered.ctypes.data
    y = either.put(np.zeros(256, np.float32))
    for source in (address, registered.ctypes.data):
        either.launch("bad_host_pointer", 1, 256, y, y, np.int32(256), source)
        assert either.synchronize() == 0
    assert (either.take(y, 256) == 4).all()
    either.call("cuMemHostUnregister", registered.ctypes.data)
    assert either.raw("cuMemHostUnregister", registered.ctypes.data) == 713
    either.call("cuMemFreeHost", address)
    either.free(y)


TOUCH = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from emulated import Emulator
e = Emulator(sys.argv[2])
e.open()
address, pinned = e.alloc(16), e.pinned(4)[0]
ctypes.string_at(pinned, 16)
e.take(address, 4)
print("so far", flush=True)
ctypes.string_at(address, 16)
print("no fault")
"""


def test_host_code_that_touches_device_memory_faults(fast: Emulator) -> None:
    if not fast.lib.k3emu_guards_host():
        pytest.skip("this processor has no protection keys")
    command = [sys.executable, "-c", TOUCH, str(HERE), str(fast.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "so far\n"
    assert done.returncode == -signal.SIGSEGV
    assert "host code touches device memory" in done.stderr


# ---------------------------------------------------------------------------------------------
# images and entry points
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "image",
    [b"\x50\xed\x55\xba" + bytes(12), b"\x7fELF" + bytes(12), b".version 9.0\n", b"k3emu kernels"],
    ids=["fatbin", "cubin", "ptx", "text"],
)
def test_images_that_load(fast: Emulator, image: bytes) -> None:
    library = fast.get("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0)
    kernel = fast.get("cuLibraryGetKernel", library, b"good_spin")
    assert ctypes.string_at(fast.get("cuKernelGetName", kernel)) == b"good_spin"
    assert (
        fast.raw("cuLibraryGetKernel", ctypes.byref(ctypes.c_uint64()), library, b"no_such_kernel")
        == NOT_FOUND
    )
    fast.call("cuLibraryUnload", library)
    assert fast.raw("cuKernelGetFunction", ctypes.byref(ctypes.c_uint64()), kernel) == INVALID_HANDLE


def test_an_image_that_is_none(fast: Emulator) -> None:
    out = ctypes.c_uint64()
    assert (
        fast.raw("cuLibraryLoadData", ctypes.byref(out), b"something else\0", 0, 0, 0, 0, 0, 0)
        == INVALID_IMAGE
    )
    assert fast.raw("cuModuleLoad", ctypes.byref(out), b"/no/such/file") == 301


def test_entry_points_by_name_and_version(fast: Emulator) -> None:
    found = ctypes.c_int()

    def look(name: str, version: int) -> tuple[int, int]:
        out = ctypes.c_uint64()
        where = ctypes.byref(out), version, 0, ctypes.byref(found)
        return fast.raw("cuGetProcAddress_v2", name.encode(), *where), out.value

    address = ctypes.cast(fast.lib.cuMemAlloc_v2, ctypes.c_void_p).value
    assert look("cuMemAlloc", 3020) == (0, address)
    assert look("cuMemAlloc", 13000) == (0, address)
    assert look("cuMemAlloc", 2000) == (NOT_FOUND, 0)  # where sizes had 32 bits
    assert found.value == 2
    assert look("cuMemAllocEverything", 13000) == (NOT_FOUND, 0)
    assert found.value == 1
    assert look("cuCtxCreate", 12000)[1] != look("cuCtxCreate", 13000)[1]
    assert not hasattr(fast.lib, "cuMemAlloc")  # dlsym would have found the old meaning


# ---------------------------------------------------------------------------------------------
# faults on command, counters, leaks
# ---------------------------------------------------------------------------------------------


def entries(e: Emulator) -> list[str]:
    names = []
    while name := e.lib.k3emu_entry(ctypes.c_size_t(len(names))):
        names.append(name.decode())
    return names


def symbol(e: Emulator, name: str) -> str:
    return next(
        f"{name}{suffix}" for suffix in ("_v4", "_v3", "_v2", "") if hasattr(e.lib, f"{name}{suffix}")
    )


def test_every_entry_point_fails_on_command(fast: Emulator) -> None:
    names = entries(fast)
    assert len(names) > 100
    for name in names:
        if name.startswith("cuDevicePrimaryCtxRe"):
            continue  # gives the context back although it fails; see below
        fast.fail(name, 1, 888)
        status = fast.raw(symbol(fast, name), *([0] * 11))
        # A call that frees looks at its handle first, and there is none.
        assert status in (888, INVALID_VALUE, INVALID_HANDLE, INVALID_CONTEXT, 713), name
        assert fast.lib.k3emu_failures_left() == 0, name
    fast.lib.k3emu_clear_reports()
    assert fast.live("device_memory") + fast.live("streams") + fast.live("graphs") == 0


def test_the_nth_call_fails_and_no_other(fast: Emulator) -> None:
    fast.fail("cuMemAlloc_v2", 3)
    a, b = fast.alloc(8), fast.alloc(8)
    with pytest.raises(CudaError) as error:
        fast.alloc(8)
    assert error.value.status == OUT_OF_MEMORY
    fast.free(a, b, fast.alloc(8))
    assert fast.lib.k3emu_fail(b"cuNoSuchCall", ctypes.c_uint64(1), 0) == -1


def test_what_frees_frees_even_when_it_fails(fast: Emulator) -> None:
    """As on the device, where such a call reports an error of earlier work: so a client's leaks are its own."""
    a, stream = fast.alloc(8), fast.stream()
    fast.fail("cuMemFree", 1, 999)
    fast.fail("cuStreamDestroy", 1, 999)
    assert fast.raw("cuMemFree_v2", a) == 999
    assert fast.raw("cuStreamDestroy_v2", stream) == 999
    assert fast.live("device_memory") == fast.live("streams") == 0


def test_a_kernel_that_faults_on_command(fast: Emulator) -> None:
    """The launch succeeds, the wait does not, and the context is lost until it is made anew."""
    bytes_, halves = fast.alloc(4), fast.alloc(8)
    fast.fail("kernel", 2)
    for _ in range(2):
        fast.launch("good_narrow", 1, 4, bytes_, halves, np.int32(4))
    assert fast.synchronize() == ILLEGAL_ADDRESS
    assert fast.raw("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 8) == ILLEGAL_ADDRESS
    assert fast.raw("cuMemFree_v2", bytes_) == ILLEGAL_ADDRESS
    assert fast.live("device_memory") == 1  # freed all the same
    fast.close()
    assert fast.live("device_memory") == 0
    fast.open()
    fast.free(fast.alloc(8))


def test_failures_from_the_environment(fast: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3EMU_FAIL", "cuMemAlloc:2:77,cuStreamCreate")
    monkeypatch.setenv("K3EMU_MEMORY", "0x1000")
    fast.close()
    fast.reset()
    fast.open()
    fast.free(fast.alloc(8))
    with pytest.raises(CudaError) as error:
        fast.alloc(8)
    assert error.value.status == 77
    with pytest.raises(CudaError) as error:
        fast.stream()
    assert error.value.status == OUT_OF_MEMORY
    with pytest.raises(CudaError):
        fast.alloc(0x1001)


def test_counters(fast: Emulator) -> None:
    fast.lib.k3emu_clear_counts()
    a, b = ones(fast), ones(fast)
    fast.call("cuMemcpyDtoD_v2", a, b, 16)
    fast.launch("good_narrow", 1, 8, a, b, np.int32(4))
    assert fast.count("launches") == 1
    assert fast.count("kernels") == 0  # the stream has not come to it
    fast.take(a, 2)
    names = (
        "kernels",
        "allocations",
        "copies_in",
        "copies_out",
        "copies_within",
        "bytes_in",
        "bytes_out",
        "frees",
    )
    assert [fast.count(n) for n in names] == [1, 2, 2, 1, 1, 64, 8, 0]
    assert fast.count("cuMemAlloc_v2") == fast.count("cuMemAlloc") == 2
    assert fast.count("synchronisations") == 0
    fast.synchronize()
    assert fast.count("synchronisations") == 1
    fast.free(a, b)
    assert fast.count("frees") == 2


def test_leaks_are_counted_and_named(fast: Emulator) -> None:
    a, stream, event = fast.alloc(40), fast.stream(), fast.event()
    address, _ = fast.pinned(2)
    assert fast.live("device_bytes") == 40
    assert fast.lib.k3emu_leaks() == 6  # the context and the library too
    reports = fast.reports
    fast.lib.k3emu_clear_reports()
    assert any("(40 bytes of device memory) was not freed" in r for r in reports)
    assert "leak: 1 of streams are alive" in reports
    fast.free(a)
    fast.call("cuMemFreeHost", address)
    fast.call("cuStreamDestroy_v2", stream)
    fast.call("cuEventDestroy_v2", event)


def test_a_context_that_is_destroyed_with_things_in_it(fast: Emulator) -> None:
    fast.alloc(40)
    fast.stream()
    fast.close()
    reports = fast.reports
    fast.lib.k3emu_clear_reports()
    assert any("destroyed with allocation" in r for r in reports)
    assert any("destroyed with 1 streams" in r for r in reports)
    assert fast.live("device_memory") == 0
    fast.open()


LOG = """
import os, sys
sys.path.insert(0, sys.argv[1])
from emulated import Emulator
e = Emulator(sys.argv[2])
e.open()
e.raw("cuMemFree_v2", 4096)
"""


def test_reports_go_to_stderr_when_asked(fast: Emulator) -> None:
    for log, lines in (("0", 0), ("1", 1)):
        done = subprocess.run(
            [sys.executable, "-c", LOG, str(HERE), str(fast.path)],
            env={**os.environ, "K3EMU_LOG": log}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr.count("k3emu: bad free: ") == lines
        assert done.stdout == ""


def test_errors_have_names(fast: Emulator) -> None:
    text = ctypes.c_char_p()
    fast.call("cuGetErrorName", 700, ctypes.byref(text))
    assert text.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    fast.call("cuGetErrorString", 2, ctypes.byref(text))
    assert text.value == b"out of memory"
    assert fast.raw("cuGetErrorName", 123456, ctypes.byref(text)) == INVALID_VALUE
