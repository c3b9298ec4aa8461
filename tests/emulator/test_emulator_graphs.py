# SPDX-License-Identifier: MIT
"""Capture and replay of graphs, and the calls that a capture does not permit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
from emulated import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    Emulator,
)

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
BLOCKING = 0


class Work:
    """A stream, two arrays of 64 floats on the device and one in pinned memory."""

    def __init__(self, e: Emulator, flags: int = 1) -> None:
        self.e = e
        self.a, self.b = e.alloc(256), e.alloc(256)
        self.address, self.x = e.pinned(64)
        self.x[:] = 1
        self.s = e.stream(flags)

    def begin(self, mode: int = GLOBAL) -> None:
        self.e.call("cuStreamBeginCapture_v2", self.s, mode)

    def end(self) -> int:
        return self.e.get_after("cuStreamEndCapture", self.s)

    def fail_end(self) -> int:
        return self.e.raw("cuStreamEndCapture", self.s, ctypes.byref(ctypes.c_uint64()))

    def round(self, stream: int | None = None) -> None:
        """x = 2 x, through the device."""
        s = self.s if stream is None else stream
        self.e.call("cuMemcpyHtoDAsync_v2", self.a, self.address, 256, s)
        self.e.launch("good_warp_exchange", 1, 64, self.a, self.b, stream=s)
        self.e.call("cuMemcpyDtoHAsync_v2", self.address, self.b, 256, s)

    def instantiate(self, graph: int) -> int:
        exec_ = self.e.get("cuGraphInstantiateWithFlags", graph, 0)
        self.e.call("cuGraphDestroy", graph)
        return exec_

    def close(self, *execs: int) -> None:
        for exec_ in execs:
            self.e.call("cuGraphExecDestroy", exec_)
        self.e.call("cuStreamDestroy_v2", self.s)
        self.e.free(self.a, self.b)
        self.e.call("cuMemFreeHost", self.address)


def test_capture_and_replay(either: Emulator) -> None:
    w = Work(either)
    w.begin()
    w.round()
    graph = w.end()
    assert either.count("kernels") == either.count("launches") == 0, "a capture does nothing"
    nodes, count = (ctypes.c_uint64 * 8)(), ctypes.c_uint64(8)
    either.call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    kinds = []
    for i in range(count.value):
        kind = ctypes.c_int()
        either.call("cuGraphNodeGetType", nodes[i], ctypes.byref(kind))
        kinds.append(kind.value)
    assert kinds == [1, 0, 1]
    exec_ = w.instantiate(graph)
    for _ in range(3):
        either.call("cuGraphLaunch", exec_, w.s)
    assert (w.x == 1).all()
    either.call("cuStreamSynchronize", w.s)
    assert (w.x == 8).all()
    assert [either.count(n) for n in ("graph_launches", "kernels", "launches", "copies_in")] == [3, 3, 0, 0]
    w.close(exec_)


def test_parameters_are_those_of_the_capture(fast: Emulator) -> None:
    w = Work(fast)
    n = np.array([3], np.int32)
    w.begin()
    fast.launch("good_narrow", 1, 64, w.a, w.b, n[0], stream=w.s)
    exec_ = w.instantiate(w.end())
    n[0] = 64
    fast.call("cuGraphLaunch", exec_, w.s)
    fast.call("cuStreamSynchronize", w.s)
    assert fast.take(w.a, 4, np.uint8).tolist() == [0, 1, 2, 255]
    w.close(exec_)


ILLEGAL: dict[str, tuple[Callable[[Emulator, Work], int], int]] = {
    "waiting for the stream": (lambda e, w: e.raw("cuStreamSynchronize", w.s), CAPTURE_UNSUPPORTED),
    "asking the stream": (lambda e, w: e.raw("cuStreamQuery", w.s), CAPTURE_UNSUPPORTED),
    "waiting for everything": (lambda e, w: e.raw("cuCtxSynchronize"), CAPTURE_UNSUPPORTED),
    "allocating": (lambda e, w: e.raw("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 16), CAPTURE_UNSUPPORTED),
    "freeing": (lambda e, w: e.raw("cuMemFree_v2", w.a), CAPTURE_UNSUPPORTED),
    "pinning": (lambda e, w: e.raw("cuMemHostAlloc", ctypes.byref(ctypes.c_uint64()), 16, 0), CAPTURE_UNSUPPORTED),
    "a copy that waits": (lambda e, w: e.raw("cuMemcpyDtoH_v2", w.address, w.a, 4), CAPTURE_UNSUPPORTED),
    "loading": (
        lambda e, w: e.raw("cuLibraryLoadData", ctypes.byref(ctypes.c_uint64()), b"k3emu kernels", 0, 0, 0, 0, 0, 0),
        CAPTURE_UNSUPPORTED,
    ),
    "instantiating": (
        lambda e, w: e.raw("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), 0, 0), CAPTURE_UNSUPPORTED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ILLEGAL)
def test_a_call_that_is_illegal_during_capture_ends_it(fast: Emulator, what: str) -> None:
    w = Work(fast)
    w.begin()
    w.round()
    call, status = ILLEGAL[what]
    assert call(fast, w) == status
    assert fast.raw("cuMemsetD8Async", w.a, 0, 4, w.s) == CAPTURE_INVALIDATED
    assert w.fail_end() == CAPTURE_INVALIDATED
    w.round()  # the stream works again
    fast.call("cuStreamSynchronize", w.s)
    assert (w.x == 2).all()
    w.close()


ALWAYS_ILLEGAL = ["asking the stream", "waiting for everything", "waiting for the stream"]


@pytest.mark.parametrize("what", ALWAYS_ILLEGAL)
def test_a_relaxed_capture_cannot_be_waited_for(fast: Emulator, what: str) -> None:
    w = Work(fast)
    w.begin(RELAXED)
    assert ILLEGAL[what][0](fast, w) == CAPTURE_UNSUPPORTED
    assert w.fail_end() == CAPTURE_INVALIDATED
    w.close()


@pytest.mark.parametrize("what", sorted(set(ILLEGAL) - set(ALWAYS_ILLEGAL)))
def test_a_relaxed_capture_permits_what_does_not_touch_its_stream(fast: Emulator, what: str) -> None:
    if what in ("freeing", "instantiating"):
        return  # would free what the capture uses; has no graph
    w = Work(fast)
    w.begin(RELAXED)
    w.round()
    before = {kind: fast.live(kind) for kind in ("device_memory", "pinned_memory", "libraries")}
    assert ILLEGAL[what][0](fast, w) == 0
    made = sum(fast.live(kind) - n for kind, n in before.items())
    fast.call("cuGraphDestroy", w.end())
    w.close()
    if made:  # what the call has made is not known here
        fast.close()
        fast.lib.k3emu_clear_reports()
        fast.reset()
        fast.open()


def test_the_legacy_stream_beside_a_blocking_stream_that_captures(fast: Emulator) -> None:
    w = Work(fast, BLOCKING)
    calls = [
        lambda: fast.raw("cuMemcpyDtoH_v2", w.address, w.a, 4),
        lambda: fast.raw("cuStreamSynchronize", 0),
        lambda: fast.raw("cuMemsetD8Async", w.a, 0, 4, 0),
    ]
    for call in calls:
        w.begin(RELAXED)
        assert call() == CAPTURE_IMPLICIT
        assert w.fail_end() == CAPTURE_INVALIDATED
    assert fast.raw("cuStreamBeginCapture_v2", 0, GLOBAL) == CAPTURE_UNSUPPORTED
    w.close()


def test_capture_modes_and_threads(fast: Emulator) -> None:
    """Another thread may allocate beside a capture that is not global, or when it has said that it knows."""
    w = Work(fast)
    context = fast.get("cuCtxGetCurrent")

    def allocate(exchange: int | None, out: list[int]) -> None:
        fast.call("cuCtxSetCurrent", context)
        if exchange is not None:
            fast.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(exchange)))
        address = ctypes.c_uint64()
        out.append(fast.raw("cuMemAlloc_v2", ctypes.byref(address), 16))
        if out[-1] == 0:
            fast.free(address.value)

    for mode, exchange, expected in (
        (GLOBAL, None, CAPTURE_UNSUPPORTED),
        (GLOBAL, RELAXED, 0),
        (THREAD_LOCAL, None, 0),
        (RELAXED, None, 0),
    ):
        w.begin(mode)
        out: list[int] = []
        thread = threading.Thread(target=allocate, args=(exchange, out))
        thread.start()
        thread.join()
        assert out == [expected], (mode, exchange)
        if expected:
            assert w.fail_end() == CAPTURE_INVALIDATED
        else:
            fast.call("cuGraphDestroy", w.end())
    w.close()


def test_a_capture_forks_and_joins_through_events(fast: Emulator) -> None:
    w, side, fork, join = Work(fast), fast.stream(), fast.event(), fast.event()
    w.begin()
    fast.call("cuEventRecord", fork, w.s)
    fast.call("cuStreamWaitEvent", side, fork, 0)
    w.round(side)
    assert fast.raw("cuEventQuery", fork) in (CAPTURED_EVENT, CAPTURE_UNSUPPORTED)
    assert w.fail_end() == CAPTURE_INVALIDATED
    w.begin()
    fast.call("cuEventRecord", fork, w.s)
    fast.call("cuStreamWaitEvent", side, fork, 0)
    w.round(side)
    fast.call("cuEventRecord", join, side)
    fast.call("cuStreamWaitEvent", w.s, join, 0)
    w.round()
    graph = w.end()
    exec_ = w.instantiate(graph)
    for seed in range(4):
        fast.set(seed=seed)
        w.x[:] = 1
        fast.call("cuGraphLaunch", exec_, w.s)
        fast.call("cuStreamSynchronize", w.s)
        assert (w.x == 4).all()
    fast.call("cuStreamDestroy_v2", side)
    for event in (fork, join):
        fast.call("cuEventDestroy_v2", event)
    w.close(exec_)


def test_captures_that_end_badly(fast: Emulator) -> None:
    w, side, event = Work(fast), fast.stream(), fast.event()
    w.begin()
    fast.call("cuEventRecord", event, w.s)
    fast.call("cuStreamWaitEvent", side, event, 0)
    w.round(side)
    assert w.fail_end() == CAPTURE_UNJOINED

    w.begin()
    fast.call("cuEventRecord", event, w.s)
    fast.call("cuStreamWaitEvent", side, event, 0)
    assert fast.raw("cuStreamEndCapture", side, ctypes.byref(ctypes.c_uint64())) == CAPTURE_UNMATCHED
    assert w.fail_end() == CAPTURE_INVALIDATED

    fast.call("cuEventRecord", event, side)  # outside any capture
    w.begin()
    assert fast.raw("cuStreamWaitEvent", w.s, event, 0) == CAPTURE_ISOLATION
    assert w.fail_end() == CAPTURE_INVALIDATED
    assert w.fail_end() == 401  # none is under way

    fast.call("cuStreamDestroy_v2", side)
    fast.call("cuEventDestroy_v2", event)
    w.close()


def test_the_state_of_a_capture(fast: Emulator) -> None:
    w = Work(fast)

    def state() -> int:
        return fast.get_after("cuStreamIsCapturing", w.s)

    assert state() == 0
    w.begin()
    assert state() == 1
    info = (ctypes.c_uint64 * 6)()
    at = [ctypes.addressof(info) + 8 * i for i in range(6)]
    w.round()
    fast.call("cuStreamGetCaptureInfo_v3", w.s, *at)
    assert info[0] == 1
    assert info[5] == 1  # the next node would come after one
    fast.raw("cuCtxSynchronize")
    assert state() == 2
    assert w.fail_end() == CAPTURE_INVALIDATED
    assert state() == 0
    w.close()


def test_a_stream_that_is_destroyed_while_it_captures(fast: Emulator) -> None:
    w = Work(fast)
    w.begin()
    w.round()
    fast.call("cuStreamDestroy_v2", w.s)
    assert fast.count("kernels") == 0
    w.s = fast.stream()
    fast.free(fast.alloc(8))  # nothing captures now
    w.close()


def test_memory_that_a_graph_uses_and_that_is_gone(either: Emulator) -> None:
    w = Work(either)
    w.begin()
    w.round()
    exec_ = w.instantiate(w.end())
    either.free(w.b)
    either.call("cuGraphLaunch", exec_, w.s)
    assert either.raw("cuStreamSynchronize", w.s) == 700
    either.expect("use after free", "good_warp_exchange", "good.cu:")


def test_an_executable_graph_takes_new_parameters(fast: Emulator) -> None:
    w = Work(fast)
    graphs = []
    for n in (1, 2):
        w.begin()
        fast.launch("good_narrow", 1, 64, w.a, w.b, np.int32(n), stream=w.s)
        graphs.append(w.end())
    w.begin()
    w.round()
    other = w.end()
    exec_ = fast.get("cuGraphInstantiateWithFlags", graphs[0], 0)
    info = (ctypes.c_uint64 * 3)()
    fast.call("cuGraphExecUpdate_v2", exec_, graphs[1], info)
    fast.call("cuGraphLaunch", exec_, w.s)
    fast.call("cuStreamSynchronize", w.s)
    assert fast.take(w.a, 3, np.uint8).tolist() == [0, 1, 255]
    assert fast.raw("cuGraphExecUpdate_v2", exec_, other, info) == 910
    for graph in (*graphs, other):
        fast.call("cuGraphDestroy", graph)
    w.close(exec_)
