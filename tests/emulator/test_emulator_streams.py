# SPDX-License-Identifier: MIT
"""Streams and events: work waits until something waits for it, in the order that CUDA promises and no other."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from emulated import ILLEGAL_ADDRESS, INVALID_HANDLE, NOT_READY, Emulator
from numpy.typing import NDArray

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
BLOCKING, NON_BLOCKING = 0, 1


class Pair:
    """Two device arrays of 64 floats, and pinned memory beside them."""

    def __init__(self, e: Emulator) -> None:
        self.e = e
        self.a, self.b = e.alloc(256), e.alloc(256)
        self.address, self.x = e.pinned(64)
        self.x[:] = 1

    def up(self, to: int, stream: int, source: int | None = None) -> None:
        self.e.call("cuMemcpyHtoDAsync_v2", to, self.address if source is None else source, 256, stream)

    def down(self, source: int, stream: int) -> None:
        self.e.call("cuMemcpyDtoHAsync_v2", self.address, source, 256, stream)

    def exchange(self, source: int, to: int, stream: int) -> None:
        """to[i] = 2 source[i ^ 30]."""
        self.e.launch("good_warp_exchange", 1, 64, source, to, stream=stream)

    def close(self) -> None:
        self.e.free(self.a, self.b)
        self.e.call("cuMemFreeHost", self.address)


def values(e: Emulator, address: int) -> NDArray[Any]:
    return e.take(address, 64)


def done(e: Emulator, *streams: int) -> None:
    for stream in streams:
        e.call("cuStreamDestroy_v2", stream)


def test_nothing_runs_until_something_waits(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    p.up(p.a, s)
    p.exchange(p.a, p.b, s)
    p.down(p.b, s)
    assert fast.count("kernels") == 0
    assert (p.x == 1).all()
    fast.call("cuStreamSynchronize", s)
    assert fast.count("kernels") == 1
    assert (p.x == 2).all()
    done(fast, s)
    p.close()


def test_work_runs_at_once_when_asked(fast: Emulator) -> None:
    fast.set(deferred=0)
    p, s = Pair(fast), fast.stream()
    p.up(p.a, s)
    p.exchange(p.a, p.b, s)
    assert fast.count("kernels") == 1
    done(fast, s)
    p.close()


def test_pinned_memory_is_read_when_the_stream_comes_to_it(fast: Emulator) -> None:
    """A client that changes it too early would see its mistake."""
    p, s = Pair(fast), fast.stream()
    p.up(p.a, s)
    p.x[:] = 5
    fast.call("cuStreamSynchronize", s)
    assert (values(fast, p.a) == 5).all()
    done(fast, s)
    p.close()


def test_pageable_memory_is_read_at_once_and_written_before_the_call_returns(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    host = np.full(64, 3, np.float32)
    p.up(p.a, s, host.ctypes.data)
    host[:] = 4
    back = np.zeros(64, np.float32)
    fast.call("cuMemcpyDtoHAsync_v2", back.ctypes.data, p.a, 256, s)
    assert (back == 3).all()
    done(fast, s)
    p.close()


def test_an_event_orders_two_streams(fast: Emulator) -> None:
    for seed in range(6):
        fast.set(seed=seed)
        p, s, t, event = Pair(fast), fast.stream(), fast.stream(), fast.event()
        fast.call("cuEventSynchronize", event)  # never recorded: nothing to wait for
        p.up(p.a, s)
        p.exchange(p.a, p.b, s)
        fast.call("cuEventRecord", event, s)
        fast.call("cuStreamWaitEvent", t, event, 0)
        p.exchange(p.b, p.a, t)
        p.down(p.a, t)
        fast.call("cuStreamSynchronize", t)
        assert (p.x == 4).all()
        done(fast, s, t)
        fast.call("cuEventDestroy_v2", event)
        p.close()


def test_without_an_event_some_seed_shows_the_mistake(fast: Emulator) -> None:
    results = set()
    for seed in range(20):
        fast.set(seed=seed)
        p, s, t = Pair(fast), fast.stream(), fast.stream()
        fast.call("cuMemsetD32_v2", p.b, 0, 64)
        p.up(p.a, s)
        p.exchange(p.a, p.b, s)
        p.down(p.b, t)  # should wait for s
        fast.call("cuStreamSynchronize", t)
        results.add(float(p.x[0]))
        done(fast, s, t)
        p.close()
    assert results == {0.0, 2.0}


def test_the_legacy_stream_waits_for_blocking_streams_only(fast: Emulator) -> None:
    for flags, waits in ((BLOCKING, True), (NON_BLOCKING, False)):
        fast.lib.k3emu_clear_counts()
        p, s = Pair(fast), fast.stream(flags)
        p.up(p.a, s)
        p.exchange(p.a, p.b, s)
        fast.call("cuMemcpyHtoD_v2", p.a, p.address, 4)
        assert fast.count("kernels") == int(waits)
        done(fast, s)
        p.close()


def test_a_blocking_stream_waits_for_the_legacy_stream(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream(BLOCKING)
    p.up(p.a, 0)
    p.exchange(p.a, p.b, 0)
    p.down(p.b, s)
    fast.call("cuStreamSynchronize", s)
    assert (p.x == 2).all()
    done(fast, s)
    p.close()


def test_asking_again_and_again_comes_to_an_end(fast: Emulator) -> None:
    p, s, event = Pair(fast), fast.stream(), fast.event()
    for _ in range(3):
        p.up(p.a, s)
    fast.call("cuEventRecord", event, s)
    answers = [fast.raw("cuStreamQuery", s) for _ in range(2)] + [
        fast.raw("cuEventQuery", event) for _ in range(3)
    ]
    assert answers == [NOT_READY] * 4 + [0]
    assert fast.raw("cuStreamQuery", s) == 0
    done(fast, s)
    fast.call("cuEventDestroy_v2", event)
    p.close()


def test_events_measure_time(fast: Emulator) -> None:
    p, s, start, end = Pair(fast), fast.stream(), fast.event(), fast.event()
    fast.call("cuEventRecord", start, s)
    p.exchange(p.address, p.b, s)
    fast.call("cuEventRecord", end, s)
    ms = ctypes.c_float()
    assert fast.raw("cuEventElapsedTime", ctypes.byref(ms), start, end) == NOT_READY
    fast.call("cuEventSynchronize", end)
    fast.call("cuEventElapsedTime", ctypes.byref(ms), start, end)
    assert ms.value > 0
    never = fast.event()
    assert fast.raw("cuEventElapsedTime", ctypes.byref(ms), start, never) == INVALID_HANDLE
    for event in (start, end, never):
        fast.call("cuEventDestroy_v2", event)
    done(fast, s)
    p.close()


def test_host_functions_run_in_order_and_may_not_call(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    seen: list[Any] = []

    @HOST_FUNCTION
    def look(_: int) -> None:
        seen.append((float(p.x[0]), fast.raw("cuCtxSynchronize")))

    p.up(p.a, s)
    p.exchange(p.a, p.b, s)
    p.down(p.b, s)
    fast.call("cuLaunchHostFunc", s, look, 0)
    fast.call("cuStreamSynchronize", s)
    assert seen == [(2.0, 800)]
    fast.expect("host function", "calls cuCtxSynchronize")
    done(fast, s)
    p.close()


def test_an_error_of_a_kernel_comes_up_at_the_wait_and_stays(either: Emulator) -> None:
    p, s = Pair(either), either.stream()
    p.exchange(4096, p.b, s)  # no device address
    p.down(p.b, s)
    assert (p.x == 1).all()
    assert either.raw("cuStreamSynchronize", s) == ILLEGAL_ADDRESS
    assert either.raw("cuStreamSynchronize", s) == ILLEGAL_ADDRESS
    assert either.raw("cuStreamQuery", 0) == ILLEGAL_ADDRESS
    assert (p.x == 1).all(), "work after the error must not run"
    either.expect("null pointer", "good_warp_exchange", "good.cu:")
    assert either.raw("cuMemFreeHost", p.address) == ILLEGAL_ADDRESS


def test_freeing_pinned_memory_under_a_copy_is_found(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    p.up(p.a, s)
    fast.call("cuMemFreeHost", p.address)
    assert fast.raw("cuStreamSynchronize", s) == ILLEGAL_ADDRESS
    fast.expect("use after free", "a copy, when its stream came to it")


def test_memory_that_is_freed_in_a_stream(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    c = fast.get("cuMemAllocAsync", 256, s)
    p.up(c, s)
    p.exchange(c, p.b, s)
    fast.call("cuMemFreeAsync", c, s)
    assert fast.live("device_memory") == 3
    fast.call("cuStreamSynchronize", s)
    assert fast.live("device_memory") == 2
    assert (values(fast, p.b) == 2).all()
    done(fast, s)
    p.close()


def test_cumemfree_waits_for_the_work_that_uses_the_memory(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    c = fast.alloc(256)
    p.up(c, s)
    p.exchange(c, p.b, s)
    fast.free(c)
    assert (values(fast, p.b) == 2).all()
    done(fast, s)
    p.close()


def test_threads_share_the_driver(either: Emulator) -> None:
    """Each with a stream and memory of its own, all at once."""
    context = either.get("cuCtxGetCurrent")
    results: list[bool] = []

    def work(value: float) -> None:
        either.call("cuCtxSetCurrent", context)
        p, s = Pair(either), either.stream()
        good = True
        for i in range(20):
            p.x[:] = value + i
            p.up(p.a, s)
            p.exchange(p.a, p.b, s)
            p.down(p.b, s)
            either.call("cuStreamSynchronize", s)
            good = good and bool((p.x == 2 * (value + i)).all())
        done(either, s)
        p.close()
        results.append(good)

    threads = [threading.Thread(target=work, args=(100.0 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert either.count("kernels") == 80


def test_a_host_function_does_not_stop_other_threads(fast: Emulator) -> None:
    """It runs without the driver's lock: another thread makes calls while it waits, and the stream goes on after it."""
    context = fast.get("cuCtxGetCurrent")
    p, s = Pair(fast), fast.stream()
    entered, leave = threading.Event(), threading.Event()

    @HOST_FUNCTION
    def wait(_: int) -> None:
        entered.set()
        assert leave.wait(10)

    def other() -> None:
        fast.call("cuCtxSetCurrent", context)
        assert entered.wait(10)
        fast.call("cuEventDestroy_v2", fast.event())
        leave.set()

    fast.call("cuLaunchHostFunc", s, wait, 0)
    p.up(p.a, s)
    thread = threading.Thread(target=other)
    thread.start()
    fast.call("cuStreamSynchronize", s)
    thread.join()
    assert (values(fast, p.a) == 1).all()
    done(fast, s)
    p.close()


def test_a_stream_that_is_destroyed_finishes_its_work(fast: Emulator) -> None:
    p, s = Pair(fast), fast.stream()
    p.up(p.a, s)
    p.down(p.a, s)
    done(fast, s)
    assert fast.raw("cuStreamSynchronize", s) == INVALID_HANDLE
    fast.expect("stale handle")
    p.close()
