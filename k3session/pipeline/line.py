# SPDX-License-Identifier: MIT
"""The stages of a model in order, as seen from the first one: what `k3session.pipeline.chain` gives its orders to."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from k3session.errors import K3Error
from k3session.pipeline.place import Place
from k3session.stage import Boundary, Stage

__all__ = ["Line", "LocalLine"]


class Line(Protocol):
    """Stages in order.  Orders reach every stage in the order in which they were given."""

    #: Held for as long as orders must not come between each other.
    lock: threading.RLock
    #: The layers of each stage, half open.
    ranges: list[tuple[int, int]]

    def start(self, boundary: Boundary) -> None:
        """Send a pass on its way."""
        ...

    def finish(self, number: int) -> Boundary:
        """Wait until a pass is through; raises what a stage has raised, and then no stage has committed anything."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every stage; the results in order, or the first error after all have answered."""
        ...

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of its own for each stage."""
        ...

    def call_at(self, stage: int, method: str, *args: Any) -> Any:
        """Call a method of one stage."""
        ...

    def committing(self, number: int, chosen: Sequence[bool] | None) -> list[Callable[[], Any]]:
        """What commits a pass on all stages: compiled calls that do not fail."""
        ...

    def abort(self, numbers: Iterable[int]) -> None:
        """Have all stages forget these passes, which were not committed."""
        ...

    def settled(self, numbers: Iterable[int]) -> None:
        """After their commit: take away what is left of these passes."""
        ...

    def cancel(self, numbers: Iterable[int]) -> None:
        """Ask for these passes to be broken off, from any thread."""
        ...

    def drop(self, name: int) -> None:
        """Let go of a session some time soon; may be called by a destructor."""
        ...

    def close(self) -> None:
        """Let go of the stages; a second time is fine."""
        ...


class LocalLine:
    """Stages of one process, which run one after the other.

    Of no use to be fast, but the whole of a pipeline without messages.

    Parameters
    ----------
    stages
        The stages; their ranges follow each other and are the whole model.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self._places = [Place.of_stage(stage) for stage in stages]
        self.ranges = [stage.layers for stage in stages]
        self.lock = threading.RLock()
        self._results: dict[int, Boundary | BaseException] = {}
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self, boundary: Boundary) -> None:
        """Run a pass."""
        with self.lock:
            self._sweep()
            at = boundary
            try:
                for stage in self.stages:
                    at = stage.forward(at)
            except (K3Error, MemoryError) as error:
                self._results[boundary.number] = error
            else:
                self._results[boundary.number] = at

    def finish(self, number: int) -> Boundary:
        """The result of a pass."""
        found = self._results.pop(number)
        if isinstance(found, BaseException):
            raise found
        return found

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every stage."""
        return self.call_each(method, [args] * len(self.stages))

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every stage, each with arguments of its own."""
        with self.lock:
            self._sweep()
            return in_turn([(place, method, a) for place, a in zip(self._places, args, strict=True)])

    def call_at(self, stage: int, method: str, *args: Any) -> Any:
        """Call a method of one stage."""
        with self.lock:
            self._sweep()
            return self._places[stage].order(method, args)

    def committing(self, number: int, chosen: Sequence[bool] | None) -> list[Callable[[], Any]]:
        """What commits a pass on all stages."""
        return [stage.committing(number, chosen) for stage in self.stages]

    def abort(self, numbers: Iterable[int]) -> None:
        """Have all stages forget these passes."""
        with self.lock:
            for number, stage in itertools.product(numbers, self.stages):
                stage.abort(number)

    def settled(self, numbers: Iterable[int]) -> None:
        """Take away what is left of passes."""
        self.abort(numbers)

    def cancel(self, numbers: Iterable[int]) -> None:
        """Break these passes off."""
        for number, stage in itertools.product(numbers, self.stages):
            stage.cancel(number)

    def drop(self, name: int) -> None:
        """Let go of a session at the next order."""
        self._dropped.put(name)

    def close(self) -> None:
        """Let go of the stages."""
        self.stages, self._places = [], []

    def _sweep(self) -> None:
        names = gathered(self._dropped)
        for stage in self.stages:
            stage.drop(*names)


def gathered(names: queue.SimpleQueue[int]) -> list[int]:
    """What has come into a queue so far."""
    found: list[int] = []
    with suppress(queue.Empty):
        while True:
            found.append(names.get_nowait())
    return found


def in_turn(calls: Iterable[tuple[Place, str, tuple[Any, ...]]]) -> list[Any]:
    """The results of calls that are all made; then the first error is raised."""
    results: list[Any] = []
    first: BaseException | None = None
    for target, method, args in calls:
        try:
            results.append(target.order(method, args))
        except (K3Error, MemoryError, ValueError, OSError) as error:
            first = first or error
            results.append(None)
    if first is not None:
        raise first
    return results
