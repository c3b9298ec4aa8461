# SPDX-License-Identifier: MIT
"""The driver layer: every way in which CUDA can be unusable or fail, and that everything is given back.

Each program has a process of its own, since a process opens one driver, and none of the tests' own does.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from device_tools import library, run_emulated
from session_tools import run, start

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------
# drivers that cannot be used
# ---------------------------------------------------------------------------------------------

BROKEN = {
    "nothing": "int answer() { return 42; }",
    "old": "int cuInit(unsigned) { return 0; } int cuDriverGetVersion(int* v) { *v = 12080; return 0; }",
    "incomplete": "int cuInit(unsigned) { return 0; } int cuDriverGetVersion(int* v) { *v = 13000; return 0; }",
    "silent": "int cuInit(unsigned) { return 500; } int cuDriverGetVersion(int* v) { *v = 13000; return 0; }",
}
"""Libraries that are no driver, or one of another kind."""

REFUSALS = """
import json, os, sys
from device_tools import emulator
from k3session._core import gpu
from k3session._core.driver import driver
from k3session.errors import DeviceError

found = {}
def ask(name, number=0):
    found[name] = gpu.usable(number)
    try:
        gpu.Device(number).close()
    except DeviceError as error:
        assert str(error) == found[name], (name, error)
    else:
        assert found[name] is None, name

here = os.environ.pop("K3_LIBCUDA")
ask("no driver")
for path in sys.argv[1:]:
    os.environ["K3_LIBCUDA"] = path
    ask(os.path.basename(path))
os.environ["K3_LIBCUDA"] = here
emu = emulator()
for status in 3, 34, 100, 802, 803, 804, 999:
    emu.set(init=status)
    ask(f"status {status}")
emu.set(init=0, devices=0)
ask("no devices")
emu.set(devices=2, driver=12090)
ask("driver 12.9")
emu.set(driver=13000)
ask("number 2", 2)
ask("number -1", -1)
ask("number 1", 1)
emu.set(arch=75)
ask("arch 75")
emu.set(arch=90)
ask("good")
os.environ["K3_LIBCUDA"] = "/no/such/library"      # too late: one is open
ask("still good")
assert driver() == {"library": os.path.realpath(here), "cuda": 13000}, driver()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What is said of each driver; a driver that failed is tried again, so that one process can see them all."""
    folder = tmp_path_factory.mktemp("drivers")
    driver = library()
    paths = [folder / "garbage", folder / "absent"]
    paths[0].write_bytes(b"no library at all\n" * 10)
    for name, code in BROKEN.items():
        paths.append(folder / name)
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-o", str(paths[-1]), "-"]
        subprocess.run(command, input=f'extern "C" {{ {code} }}', text=True, check=True)
    found: dict[str, str | None] = json.loads(run(REFUSALS, *paths, K3_LIBCUDA=str(driver)))
    return found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no driver", "no NVIDIA driver here; libcuda.so.1; install driver 580"),
        ("garbage", "K3_LIBCUDA; garbage; cannot be loaded; unset it"),
        ("absent", "K3_LIBCUDA; absent; cannot be loaded; unset it"),
        ("nothing", "nothing is no CUDA driver; no cuInit; unset it"),
        ("old", "too old; supports CUDA 12.8; 13.0 is needed; version 580"),
        ("incomplete", "incomplete lacks cuGetErrorName; CUDA 13.0; install"),
        ("silent", "could not start; 500; nvidia-smi"),
        ("status 3", "forked; spawn"),
        ("status 34", "libcuda.so.1 is the stub; LD_LIBRARY_PATH; install the NVIDIA driver"),
        ("status 100", "finds no GPU; CUDA_VISIBLE_DEVICES; container"),
        ("status 802", "not ready; nvidia-fabricmanager"),
        ("status 803", "kernel module; different driver versions; restart"),
        ("status 804", "forward compatibility; LD_LIBRARY_PATH"),
        ("status 999", "could not start; 999; /dev/nvidia-uvm"),
        ("no devices", "finds no GPU"),
        ("driver 12.9", "too old; supports CUDA 12.9; 13.0 is needed; version 580"),
        ("number 2", "no GPU 2; there are 2, from 0 to 1; CUDA_VISIBLE_DEVICES"),
        ("number -1", "no GPU -1; there are 2"),
        ("arch 75", "GPU 0 (k3emu; compute capability 7.5; 8.0 or later; the CPU"),
    ],
)
def test_a_driver_that_cannot_be_used_is_told_in_a_sentence(
    case: str, words: str, refusals: dict[str, str | None]
) -> None:
    said = refusals[case]
    assert said is not None and "\n" not in said
    assert all(word in said for word in words.split("; ")), said


def test_a_driver_that_can_be_used_after_others_could_not(refusals: dict[str, str | None]) -> None:
    assert refusals["number 1"] is None and refusals["good"] is None and refusals["still good"] is None


def test_importing_opens_no_driver() -> None:
    code = "import pathlib, k3session._core.stream\nprint('libcuda' in pathlib.Path('/proc/self/maps').read_text())"
    assert run_emulated(code) == "False\n"


def test_a_driver_without_its_lookup_function() -> None:
    """Then the symbols are found by their own names, among them those with a suffix."""
    code = """
from k3session._core.gpu import Device
from device_tools import emulator
emu = emulator()
for n in range(1, 200):
    emu.fail("cuGetProcAddress_v2", n)
with Device() as device:
    print(device.name, emu.count("cuGetProcAddress_v2") > 40)
"""
    assert run_emulated(code) == "k3emu (runs on the host) True\n"


IMAGES = """
from device_tools import alive, emulator
from k3session._core.gpu import Device
from k3session.errors import DeviceError
emu = emulator()
for entry, status in (("cuLibraryLoadData", 209), ("cuLibraryLoadData", 222), ("cuLibraryLoadData", 200),
                      ("cuKernelGetFunction", 209), ("cuLibraryGetKernel", 500)):
    emu.fail(entry, 1, status)
    try:
        Device()
    except DeviceError as error:
        print(error)
    assert alive(emu) == {}
Device().close()
"""


def test_an_image_that_does_not_fit_is_told_with_the_gpu_and_what_there_is() -> None:
    lines = run_emulated(IMAGES).splitlines()
    for line, status in zip(lines, (209, 222, 200, 209), strict=False):
        assert "of compute capability 9.0, cannot run the kernels of this build" in line, line
        assert f", {status})" in line and "K3_CUDA_ARCHS=90" in line, line
    assert "loading the kernel" in lines[4] and "CUDA_ERROR_NOT_FOUND" in lines[4]


# ---------------------------------------------------------------------------------------------
# using a device
# ---------------------------------------------------------------------------------------------

WORK = """
import gc, json, sys
import numpy as np
from device_tools import alive, emulator, norm_arguments
from k3session._core.gpu import Arena, Device, DeviceBuffer, PinnedBuffer
from k3session._core.stream import Event, Stream, upload
from k3session.errors import ClosedError, DeviceError, DeviceMemoryError

X = np.arange(1, 9, dtype=np.float32)
ROWS = np.arange(35, dtype=np.uint8).reshape(5, 7)

def work(foreign=None):
    "Everything that the runtime does with a device; raises, or gives the right numbers."
    with Device() as device:
        stream = Stream(device, foreign)
        try:
            arena = Arena(device)
            x, y = arena.alloc(32), arena.alloc(32, True)
            norm = DeviceBuffer(device, 32)
            stream.write(x, X)
            stream.write(norm.pointer, np.ones(8, np.float32))
            def launch():
                stream.launch("k3_rms_norm", (1, 1, 1), 256, *norm_arguments(x, norm.pointer, y, 8))
            out = np.zeros(8, np.float32)
            stream.read(y, out)
            assert (out == 0).all()
            launch()
            stream.read(y, out)
            np.testing.assert_allclose(out, X / np.sqrt((X * X).mean() + 1e-5), rtol=1e-6)
            stream.begin_capture()
            try:
                launch()
                stream.copy(x, y, 32)
            except BaseException:
                stream.abandon_capture()
                raise
            graph = stream.end_capture()
            stream.fill(y, 0, 32)
            graph.launch(stream)
            graph.launch(stream)
            again = np.zeros(8, np.float32)
            stream.read(y, again)
            np.testing.assert_allclose(again, out, rtol=1e-3)
            copied = arena.alloc(5 * 16)
            upload(device, stream, [(ROWS.ctypes.data, 5, 7, copied, 16)])
            rows = np.full((5, 16), 255, np.uint8)
            stream.read(copied, rows)
            assert (rows[:, :7] == ROWS).all() and (rows[:, 7:] == 0).all()
            event, other = Event(device), Stream(device, stream)
            event.record(stream)
            other.wait_for(event)
            event.synchronize()
            stream.synchronize()
            assert device.free_memory > 0 and stream.is_idle
            arena.close()
        finally:
            stream.close()

emu = emulator()
"""


def test_device_memory_streams_graphs_and_uploads() -> None:
    assert run_emulated(WORK + "work()\nprint(alive(emu), emu.reports)") == "{} []\n"


FAULTS = """
import logging
logging.getLogger("k3session").setLevel(logging.ERROR)       # what was not given back is told, and expected here
names, i = [], 0
while (name := emu.lib.k3emu_entry(i)) is not None:
    names.append(name.decode())
    i += 1
work()
emu.lib.k3emu_clear_counts()
work()
count = {n: emu.count(n) for n in names if not n.startswith("cuGetError") and emu.count(n)}
tried, problems = 0, []
for name, calls in count.items():
    for nth in sorted({1, (calls + 1) // 2, calls}):
        for status in [0, 700] if name.startswith(("cuMem", "cuStream", "cuLaunch", "cuGraph")) else [0]:
            what = f"call {nth} of {calls} of {name} with status {status}"
            emu.fail(name, nth, status)
            said = None
            try:
                work()
            except DeviceError as error:
                said = str(error)
            except Exception as error:
                problems.append(f"{what}: {error!r}")
            quiet = ("Free", "Destroy", "Release", "Unload", "Exchange", "CtxSet", "CtxGet")
            if said is None and not any(word in name for word in quiet):
                problems.append(f"{what}: no error")
            if emu.lib.k3emu_failures_left():
                problems.append(f"{what}: was not reached")
            gc.collect()
            if left := alive(emu):
                problems.append(f"{what}: left {left} after {said}")
            emu.lib.k3emu_clear_failures()
            try:
                work()
            except Exception as error:
                problems.append(f"afterwards, {what}: {error!r}")
            tried += 1
print(json.dumps({"tried": tried, "entries": sorted(count), "problems": problems}))
"""


def test_every_call_that_fails_is_told_and_leaves_nothing_behind() -> None:
    """The first, a middle and the last call of every entry point, as a failure of its own and as a lost context."""
    found = json.loads(run_emulated(WORK + FAULTS))
    assert found["problems"] == []
    assert found["tried"] > 100
    table = set(re.findall(r"^ +X\((cu\w+), ", (ROOT / "pyx" / "driver.h").read_text(), re.MULTILINE))
    opening = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}
    assert table - opening - set(found["entries"]) == {"cuStreamIsCapturing"}  # with K3_CUDA_SYNC alone


LOST = """
device = Device()
stream, x, y = Stream(device), DeviceBuffer(device, 32), DeviceBuffer(device, 32)
stream.write(x.pointer, X)
emu.fail("kernel", 1, 716)
first = None
def attempt(use):
    global first
    try:
        use()
    except DeviceError as error:
        first = first or str(error)
        assert str(error) == first, error
    else:
        raise AssertionError("was accepted")
def launch():
    stream.launch("k3_rms_norm", (1, 1, 1), 256, *norm_arguments(x.pointer, x.pointer, y.pointer, 8))
    stream.synchronize()
for use in (launch, launch, stream.synchronize, lambda: stream.fill(x.pointer, 0, 32),
            lambda: DeviceBuffer(device, 8), lambda: PinnedBuffer(device, 8), lambda: Stream(device),
            lambda: Event(device), lambda: Arena(device).alloc(8), lambda: device.free_memory, Device,
            stream.begin_capture, stream.end_capture,
            lambda: upload(device, stream, [(X.ctypes.data, 1, 32, x.pointer, 32)])):
    attempt(use)
print(first)
from k3session._core.gpu import usable
assert usable(0) == first
for each in (stream, x, y, device):
    each.close()
assert alive(emu) == {}, alive(emu)
work()
print(usable(0))
"""


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ("0", "failed in cuStreamSynchronize: misaligned address; K3_CUDA_SYNC=1 finds the kernel"),
        ("1", "failed in the kernel k3_rms_norm: misaligned address; open the model again"),
    ],
)
def test_the_first_error_that_loses_the_context_is_the_one_that_is_told(sync: str, words: str) -> None:
    first, usable = run_emulated(WORK + LOST, K3_CUDA_SYNC=sync).splitlines()
    assert all(word in first for word in words.split("; ")) and "CUDA_ERROR_MISALIGNED_ADDRESS, 716" in first
    assert usable == "None"


def test_too_little_memory_is_told_with_sizes() -> None:
    code = """
emu.set(memory=1 << 30)
with Device() as device:
    arena = Arena(device)
    arena.alloc(256 << 20)
    try:
        arena.alloc(3 << 30)
    except MemoryError as error:
        print(type(error).__name__, error)
    print(device.allocated, arena.nbytes)
    arena.close()
    print(device.allocated, arena.nbytes, alive(emu)["device_memory"] if "device_memory" in alive(emu) else 0)
    for wrong in (lambda: DeviceBuffer(device, -1), lambda: PinnedBuffer(device, -1)):
        try:
            wrong()
        except ValueError as error:
            print(error)
"""
    said, held, after, *wrong = run_emulated(WORK + code).splitlines()
    assert said.startswith("DeviceMemoryError GPU 0 (k3emu")
    assert "3.00 GiB were asked for" in said and "768.00 MiB of 1.00 GiB are free" in said
    assert (held, after) == ("268435456 268435456", "0 0 0")
    assert wrong == ["nbytes is -1; expected at least 0"] * 2


CLOSED = """
first, device = Device(), Device()
first.close()                                                # one of two: the other goes on
stream, buffer, pinned, event = Stream(device), DeviceBuffer(device, 64), PinnedBuffer(device, 64), Event(device)
stream.begin_capture()
stream.fill(buffer.pointer, 1, 64)
graph = stream.end_capture()
device.close()
device.close()
stream.fill(buffer.pointer, 7, 64)                           # what is open keeps what it needs
out = np.zeros(64, np.uint8)
stream.read(buffer.pointer, out)
assert (out == 7).all()
def refused(use):
    try:
        use()
    except ClosedError:
        return
    raise AssertionError("was accepted")
for use in (lambda: device.name, lambda: device.free_memory, lambda: DeviceBuffer(device, 1), lambda: Stream(device),
            lambda: Arena(device).alloc(1)):
    refused(use)
other = Stream(Device())
for each in (buffer, pinned, event, stream):
    each.close()
    each.close()
    assert each.is_closed
for use in (stream.synchronize, stream.begin_capture, stream.end_capture, lambda: stream.fill(0, 0, 1),
            lambda: stream.is_idle, lambda: stream.write(0, X), lambda: graph.launch(stream),
            lambda: upload(Device(), stream, [(X.ctypes.data, 1, 32, 0, 32)])):
    refused(use)
stream.abandon_capture()
assert buffer.pointer == pinned.address == 0
graph.close()
refused(lambda: graph.launch(other))
del other
assert alive(emu) == {}, alive(emu)
# Never closed, and dropped in any order.
for order in range(6):
    d = Device()
    things = [d, Stream(d), DeviceBuffer(d, 8), Event(d), PinnedBuffer(d, 8), Arena(d)]
    things[5].alloc(8)
    del d
    while things:
        things.pop(order % len(things))
    assert alive(emu) == {}, (order, alive(emu))
print("done", emu.reports)
"""


def test_closing_in_any_order_and_use_afterwards() -> None:
    assert run_emulated(WORK + CLOSED) == "done []\n"


def test_garbage_in_the_middle_of_a_capture_does_not_disturb_it() -> None:
    code = """
with Device() as device:
    stream, buffer = Stream(device), DeviceBuffer(device, 64)
    other = [DeviceBuffer(device, 64), PinnedBuffer(device, 64), Event(device), Stream(device)]
    stream.begin_capture()
    stream.fill(buffer.pointer, 3, 64)
    other.clear()
    assert stream.is_capturing
    graph = stream.end_capture()
    graph.launch(stream)
    out = np.zeros(64, np.uint8)
    stream.read(buffer.pointer, out)
    assert (out == 3).all() and not stream.is_capturing
    stream.begin_capture()
    stream.close()                                           # in the middle of another
    del graph, buffer
print(alive(emu), emu.reports)
"""
    assert run_emulated(WORK + code) == "{} []\n"


def test_an_upload_in_many_pieces_is_padded_reports_and_can_be_interrupted() -> None:
    code = """
import signal
rng = np.random.default_rng(0)
shapes = [(70_001, 513, 528), (3, 40 << 20, 40 << 20), (1, 1, 16), (1000, 64, 64), (7, 5, 4096)]
matrices = [rng.integers(0, 256, (rows, row), dtype=np.uint8) for rows, row, _ in shapes]
with Device() as device:
    stream = Stream(device)
    buffers = [DeviceBuffer(device, rows * pitch) for rows, _, pitch in shapes]
    jobs = [(m.ctypes.data, *m.shape, b.pointer, s[2]) for m, b, s in zip(matrices, buffers, shapes)]
    seen = []
    upload(device, stream, jobs, lambda *report: seen.append(report))
    total = sum(rows * pitch for rows, _, pitch in shapes)
    assert [r[1] for r in seen] == sorted(r[1] for r in seen) and {r[2] for r in seen} == {total}
    assert [r[1] for r in seen].count(total) == 1 and len(seen) > 5 and {r[0] for r in seen} == {"upload"}
    for m, b, (rows, row, pitch) in zip(matrices, buffers, shapes):
        out = np.full((rows, pitch), 255, np.uint8)
        stream.read(b.pointer, out)
        assert (out[:, :row] == m).all() and (out[:, row:] == 0).all(), m.shape
    assert emu.count("pinned_allocations") == 2
    upload(device, stream, [], None)
    for progress in (lambda *r: 1 / 0, lambda *r: signal.raise_signal(signal.SIGINT)):
        try:
            upload(device, stream, jobs, progress)
        except (ZeroDivisionError, KeyboardInterrupt) as error:
            print(type(error).__name__)
        assert emu.live("pinned_memory") == 0
    try:
        upload(device, stream, [(matrices[0].ctypes.data, 2, 513, buffers[0].pointer, 512)])
    except ValueError as error:
        print(error)
    del b, buffers
    stream.close()
print(alive(emu), emu.reports)
"""
    out = run_emulated(WORK + code).splitlines()
    assert out[:2] == ["ZeroDivisionError", "KeyboardInterrupt"]
    assert out[2] == "the pitch is 512 bytes; expected at least 513, a row"
    assert out[3] == "{} []"


# ---------------------------------------------------------------------------------------------
# beside others
# ---------------------------------------------------------------------------------------------

OTHERS = """
def current():
    return emu.get("cuCtxGetCurrent")
Device().close()                                             # initialises the driver
assert current() == 0
work()
assert current() == 0
theirs = emu.get("cuCtxCreate_v2", 0, 0)
work()
assert current() == theirs                                   # that of another library, in the same thread
foreign_elsewhere = emu.stream()
emu.call("cuCtxSetCurrent", emu.get("cuDevicePrimaryCtxRetain", 0))
foreign = emu.stream()
work(foreign)
class Theirs:
    def __cuda_stream__(self):
        return (0, foreign)
work(Theirs())
assert emu.live("streams") == 2
device = Device()
ours = Stream(device)
assert Stream(device, ours).__cuda_stream__() == ours.__cuda_stream__()
try:
    Stream(device, foreign_elsewhere)
except DeviceError as error:
    print(error)
with Device() as device:
    legacy = Stream(device, 0)
    try:
        legacy.begin_capture()
    except DeviceError as error:
        print(error)
del legacy, ours, device
emu.call("cuStreamDestroy_v2", foreign)
emu.call("cuDevicePrimaryCtxRelease_v2", 0)
emu.call("cuCtxSetCurrent", theirs)
emu.call("cuStreamDestroy_v2", foreign_elsewhere)
emu.call("cuCtxDestroy_v2", theirs)
print(alive(emu), emu.reports)
"""


def test_other_users_of_the_driver_in_the_same_thread() -> None:
    """Their context stays current, their streams are used and not destroyed."""
    elsewhere, legacy, end = run_emulated(WORK + OTHERS).splitlines()
    assert "is not of GPU 0's primary context" in elsewhere
    assert "cuStreamBeginCapture failed on GPU 0" in legacy
    assert end == "{} []"


def test_threads_share_a_device() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda i: work(), range(40)))
print(alive(emu), emu.reports)
"""
    assert run_emulated(WORK + code) == "{} []\n"


FORK = """
import os
def child(use, expected):
    pid = os.fork()
    if pid == 0:
        try:
            use()
            said = "nothing"
        except DeviceError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        gc.collect()
        os._exit(0 if expected in said else (print(said, flush=True), 1)[1])
    assert os.waitpid(pid, 0)[1] == 0

child(work, "nothing")                                       # not opened before: the child has its own
device = Device()
stream, buffer = Stream(device), DeviceBuffer(device, 32)
def everything():
    global device, stream, buffer
    for use in (stream.synchronize, lambda: DeviceBuffer(device, 8), lambda: stream.fill(buffer.pointer, 0, 8), Device,
                lambda: Device(1), lambda: device.free_memory, stream.begin_capture, lambda: PinnedBuffer(device, 8)):
        try:
            use()
        except DeviceError as error:
            assert "does not survive" in str(error) and "spawn" in str(error), error
        else:
            raise AssertionError("was accepted")
    from k3session._core.gpu import usable
    assert "spawn" in usable(0)
    emu.lib.k3emu_clear_counts()
    for each in (buffer, stream, device):
        each.close()
    assert emu.count("cuMemFree_v2") == emu.count("cuDevicePrimaryCtxRelease_v2") == 0
    Device()
child(everything, "does not survive")
child(lambda: globals().update(device=None, stream=None, buffer=None), "nothing")
stream.fill(buffer.pointer, 5, 32)                           # the parent goes on
out = np.zeros(32, np.uint8)
stream.read(buffer.pointer, out)
assert (out == 5).all()
del stream, buffer
device.close()
print(alive(emu), emu.reports)
"""


def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent() -> None:
    assert run_emulated(WORK + FORK) == "{} []\n"


@pytest.mark.parametrize(
    "how", ["pass", "sys.exit(3)", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 15)"]
)
def test_the_end_of_the_interpreter_with_a_device_open_is_silent(how: str) -> None:
    code = (
        WORK
        + f"""
import atexit
device = Device()
stream, buffer = Stream(device), DeviceBuffer(device, 32)
cycle = [stream, Arena(device)]
cycle.append(cycle)
cycle[1].alloc(8)
stream.begin_capture()
atexit.register(lambda: (stream.abandon_capture(), stream.synchronize()))
{how}
"""
    )
    process = start(code, K3_LIBCUDA=str(library()))
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("", "")
    assert process.returncode == {"pass": 0, "import os; os.kill(os.getpid(), 15)": -15}.get(how, 3)


def test_what_could_not_be_given_back_is_logged_and_not_raised(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(format="%(name)s %(message)s", stream=sys.stdout)
with Device() as device:
    buffer = DeviceBuffer(device, 32)
    emu.fail("cuMemFree_v2", 1, 1)
    buffer.close()
    buffer = DeviceBuffer(device, 32)
    emu.fail("cuMemFree_v2", 1, 4)                           # the driver has gone already
    del buffer
"""
    assert (
        run_emulated(WORK + code)
        == "k3session DeviceBuffer of GPU 0 was not given back: invalid argument (1)\n"
    )
