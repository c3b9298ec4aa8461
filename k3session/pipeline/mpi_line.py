# SPDX-License-Identifier: MIT
"""The stages of a pipeline over MPI, as its first process sees them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from k3session.errors import ClosedError, K3Error
from k3session.pipeline.line import gathered
from k3session.pipeline.place import Place, packed, unpacked
from k3session.pipeline.post import Post
from k3session.stage import Boundary

__all__ = ["MpiLine", "PipelineError"]


class PipelineError(K3Error, RuntimeError):
    """A process of a pipeline has failed; the message names its rank.  The job is about to end."""


class MpiLine:
    """Orders to a `Place` in each process; the one of the first process is called here, the others get messages.

    Any thread may give orders.  Those of one order come together everywhere: see `Line`.
    """

    #: Whether there is one in this process; another would wait for processes that serve this one.
    opened = False

    def __init__(self, comm: Any) -> None:
        self.lock = threading.RLock()
        self.ranges: list[tuple[int, int]] = []
        self._place = Place(0, comm.Get_size())
        self._waiting: dict[int, Future[Any]] = {}  # passes by their number
        self._calls: dict[int, tuple[Future[Any], dict[int, tuple[bool, Any]], int]] = {}
        self._next = 0
        self._lost: PipelineError | None = None
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._closed = False
        self._post = Post(comm, self._deliver, self._broken)
        self.size = self._post.size
        MpiLine.opened = True

    # ------------------------------------------------------------------------------------------
    # orders
    # ------------------------------------------------------------------------------------------

    def start(self, boundary: Boundary) -> None:
        """Run a pass in the first stage and send it on."""
        with self.lock:
            self._check()
            self._sweep()
            future: Future[Any] = Future()
            self._waiting[boundary.number] = future
            if self.size == 1:
                self._deliver(0, ("result", *self._place.forward(boundary, None)))
                return
            try:
                after, error = self._place.forward(boundary, None)
            except BaseException as problem:  # Ctrl-C: the others have not heard of the pass, and need not
                self._waiting.pop(boundary.number, None)
                raise problem
            self._post.send(1, ("pass", after, error))

    def finish(self, number: int) -> Boundary:
        """Wait for the result of a pass."""
        future = self._waiting[number]
        try:
            boundary, error = future.result()
        finally:
            self._waiting.pop(number, None)
        if error is not None:
            raise unpacked(error)
        found: Boundary = boundary
        return found

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every place or stage."""
        return self.call_each(method, [args] * self.size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every place or stage, each with arguments of its own."""
        return self._ask(None, method, list(args))

    def call_at(self, stage: int, method: str, *args: Any) -> Any:
        """Call a method of one stage."""
        if stage == 0:
            with self.lock:
                self._check()
                return self._place.order(method, args)
        return self._ask(stage, method, args)[0]

    def committing(self, number: int, chosen: Sequence[bool] | None) -> list[Callable[[], Any]]:
        """What commits a pass on all stages."""
        stage = self._place.stage
        if stage is None:
            raise ClosedError("the pipeline has been closed")
        calls: list[Callable[[], Any]] = [stage.committing(number, chosen)]
        if self.size > 1:
            calls.append(self._post.later(1, ("commit", number, chosen)))
        return calls

    def abort(self, numbers: Iterable[int]) -> None:
        """Have all stages forget these passes; results of theirs that are still to come belong to nobody."""
        gone = list(numbers)
        with self.lock:
            for number in gone:
                self._waiting.pop(number, None)
            if self._lost is not None or self._closed:
                return
            self._place.abort(gone)
            self._tell("abort", gone)

    def settled(self, numbers: Iterable[int]) -> None:
        """Take away what is left of passes here; the others did that with their commit."""
        with self.lock:
            self._place.abort(list(numbers))

    def cancel(self, numbers: Iterable[int]) -> None:
        """Break passes off: straight to every process, past what it has been sent."""
        gone = list(numbers)
        self._place.cancel(gone)
        for rank in range(1, self.size):
            self._post.send(rank, ("cancel", gone))

    def drop(self, name: int) -> None:
        """Let go of a session at the next order."""
        self._dropped.put(name)

    def close(self) -> None:
        """Send the last order, and let go of what this process has."""
        if self._closed or os.getpid() != self._pid:
            return
        with self.lock:
            self._closed = True
            MpiLine.opened = False
            if self._lost is None:
                self._tell("end")
            self._place.close()
        self._post.close()

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise K3Error("a pipeline belongs to the process that opened it; this is a child of that one")
        if self._lost is not None:
            raise self._lost
        if self._closed:
            raise ClosedError("the pipeline has been closed")

    def _tell(self, *message: Any) -> None:
        if self.size > 1:
            self._post.send(1, message)

    def _sweep(self) -> None:
        names = gathered(self._dropped)
        if names and self._place.stage is not None:
            self._place.drop(names)
            self._tell("drop", names)

    def _ask(self, to: int | None, method: str, args: Any) -> list[Any]:
        future: Future[Any] = Future()
        with self.lock:
            self._check()
            self._sweep()
            self._next += 1
            number = self._next
            wanted = self.size if to is None else 1
            replies: dict[int, tuple[bool, Any]] = {}
            self._calls[number] = future, replies, wanted
            self._tell("call", number, to, method, args if to is not None else [None, *args[1:]])
            if to is None:
                # The others work at it at the same time, as when each opens its part of the model.
                try:
                    mine = True, self._place.order(method, args[0])
                except (K3Error, MemoryError, ValueError, OSError) as problem:
                    mine = False, packed(problem, 0)
                self._deliver(0, ("reply", number, 0, *mine))
        try:
            future.result()
        finally:
            self._calls.pop(number, None)
        found = [replies[rank] for rank in sorted(replies)]
        for good, value in found:
            if not good:
                raise unpacked(value)
        return [value for _, value in found]

    def _deliver(self, source: int, message: Any) -> None:
        """In the thread of the post: what has come."""
        kind = message[0]
        if kind == "result":
            future = self._waiting.get(message[1].number)
            if future is not None:  # else somebody has given it up
                with suppress(Exception):
                    future.set_result(message[1:])
        elif kind == "reply":
            _, number, rank, good, value = message
            entry = self._calls.get(number)
            if entry is not None:
                future, replies, wanted = entry
                replies[rank] = good, value
                if len(replies) == wanted:
                    with suppress(Exception):
                        future.set_result(None)
        elif kind == "lost":
            self._lose(PipelineError(message[1]))

    def _broken(self, problem: BaseException) -> None:
        self._lose(PipelineError(f"rank 0 cannot send or receive messages any more: {problem!r}"))

    def _lose(self, error: PipelineError) -> None:
        """Everybody who waits for something hears that it does not come."""
        self._lost = error
        for future in [*self._waiting.values(), *(entry[0] for entry in self._calls.values())]:
            with suppress(Exception):  # it has its result already
                future.set_exception(error)
