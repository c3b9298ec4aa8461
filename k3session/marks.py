# SPDX-License-Identifier: MIT
"""Points of a session's past that are kept: those a caller marks, and those that a session keeps by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from k3session.errors import ClosedError, ConfigError

__all__ = ["NO_POINTS", "Kept", "Mark", "Marks", "Origin", "Point", "Points", "fitting", "next_serial"]

#: Tokens that the session is thought to go on before somebody goes back.
_AHEAD = 256
_NEVER = 2**62
_serials = itertools.count(1)


def next_serial() -> int:
    """A number that is larger than all before it."""
    return next(_serials)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """When a session marks its position by itself, and how much memory such marks may take.

    Automatic marks make `Session.rewind` and `Session.set_tokens` fast: both go on from the nearest mark instead of
    from the first token.  They are made every `every` tokens, at the end of each prefill, where a snapshot was loaded
    or restored, and where a rewind had to compute tokens again.

    A mark counts with the bytes that nothing else keeps once the session has gone on another way: its recurrent
    state, its row of logits, and its last page of latent rows unless that is full.  Latent rows before are shared.
    The sum never exceeds `budget`.  Where it would, marks are dropped, the least useful first: the one that saves the
    fewest tokens of replay on average.  The average is over two kinds of going back, equally likely: by any number d
    of tokens, with a probability in proportion to 1 / d, and to the end of the k-th last prefill, half as often for
    each further one.  So gaps grow with the distance from the present.  The mark of the last prefill is dropped last.

    Parameters
    ----------
    every
        Tokens from one mark to the next, counted at the ends of passes; 0 makes none for that reason.
    prefill
        Whether the end of a prefill is marked.
    budget
        Bytes that all automatic marks of a session may keep; a mark that is larger than that is not made.

    Raises
    ------
    ConfigError
        A value that is not of its kind.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session(marks=k3.Marks(every=100, budget=64 << 20)) as s:
    ...     _ = s.prefill([1, 2, 3])
    ...     s.reachable()
    [(0, 'start'), (3, 'prefill')]
    """

    every: int = 256
    prefill: bool = True
    budget: int = 1 << 30

    def __post_init__(self) -> None:
        for name, what in (("every", "tokens"), ("budget", "bytes")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}; expected a number of {what} of at least 0")
        if not isinstance(self.prefill, bool):
            raise ConfigError(f"prefill is {self.prefill!r}; expected True or False")

    @classmethod
    def read(cls, marks: Marks | bool | None) -> Marks:
        """The policy that a ``marks=`` argument stands for: None is the default one, False none at all."""
        if marks is None:
            return cls()
        if marks is False:
            return cls(every=0, prefill=False, budget=0)
        if not isinstance(marks, Marks):
            raise ConfigError(f"marks is {marks!r}; expected None, False or k3session.Marks")
        return marks

    @property
    def is_on(self) -> bool:
        """Whether any mark is made."""
        return self.every > 0 or self.prefill

    def due(self, position: int) -> int:
        """Where the mark after one at `position` is due."""
        return position + self.every if self.every else _NEVER


class Kept(NamedTuple):
    """What `Session.set_tokens` found and did; the three add up to the number of tokens.

    ``kept`` tokens at the front were not computed again.  ``replayed`` tokens after them were there as well, and were
    computed again from the nearest mark.  ``computed`` tokens are new.
    """

    kept: int
    replayed: int
    computed: int


class Origin:
    """Where state came in from outside that tokens do not give again to the bit; equal to nothing but itself.

    Up to `position` a session's state is that of a snapshot of another build, or of tokens that are not known.
    """

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A point of a session's past; immutable, and shared by sessions that have that past in common.

    Attributes
    ----------
    kind
        Why it was kept: "every", "prefill", "load", "rewind" or "mark"; "start" and "now" are made on the way.
    timeline
        The state, shared with whoever stands or stood there; None is the empty state of position 0.
    row
        float32[vocab], the logits for the next token; None before the first one.
    ids, digests
        The session's buffers: what belongs to positions before this one does not change any more.
    nbytes
        Bytes that it counts with; see `Marks`.
    home, serial
        The session that it was made by, and its number among all points.
    """

    position: int
    kind: str
    timeline: Any = field(repr=False)
    row: npt.NDArray[np.float32] | None = field(repr=False)
    ids: npt.NDArray[np.int32] = field(repr=False)
    digests: Mapping[int, str] = field(repr=False)
    origin: Origin | None
    nbytes: int
    home: str
    serial: int = field(default_factory=next_serial)

    def lies_in(
        self, ids: npt.NDArray[np.int32], digests: Mapping[int, str], origin: Origin | None, position: int
    ) -> bool:
        """Whether a history of `position` tokens passes through this point."""
        p = self.position
        if p > position or self.origin is not origin:
            return False
        if digests is self.digests:  # the dict of a branch goes with the branch
            return True
        if not np.array_equal(self.ids[:p], ids[:p]):
            return False
        unknown = 0 if origin is None else origin.position  # up to there the same origin is proof enough
        for k in np.flatnonzero(ids[:p] < 0).tolist():
            digest = digests.get(k)
            if digest != self.digests.get(k) or (digest is None and k >= unknown):
                return False
        return True


class _Measured(Protocol):
    """What the choice of marks looks at."""

    @property
    def position(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=_Measured)


def _least_useful(points: Sequence[_Measured], present: int) -> int:
    """Index of the point to drop first; `Marks` states the rule."""
    present += _AHEAD
    whole = math.log(present + 1)
    found, least = 0, math.inf
    turn = 1.0
    behind = 0.0  # logarithm of the distance to the point behind this one
    for i in range(len(points) - 1, -1, -1):
        point = points[i]
        at = point.position
        ahead = math.log(present - at + 1)
        chance = (ahead - behind) / whole
        behind = ahead
        if point.kind != "every":
            last, turn = turn == 1.0, turn / 2
            if last and len(points) > 1:
                continue
            chance += turn
        saved = (at - (points[i - 1].position if i else 0)) * chance
        if saved <= least:
            found, least = i, saved
    return found


def fitting(points: Iterable[P], present: int, budget: int) -> tuple[P, ...]:
    """Those of `points`, in order of position, that are kept within a budget of bytes."""
    kept = [p for p in points if p.nbytes <= budget]
    total = sum(p.nbytes for p in kept)
    while total > budget:
        total -= kept.pop(_least_useful(kept, present)).nbytes
    return tuple(kept)


class Points:
    """The automatic marks of a session at one moment, in order of position; immutable."""

    __slots__ = ("nbytes", "points")

    def __init__(self, points: tuple[Point, ...] = ()) -> None:
        self.points = points
        self.nbytes = sum(p.nbytes for p in points)

    def with_point(self, point: Point, budget: int) -> Points:
        """These and one more at or after the last one, within the budget."""
        points = self.points
        if points and points[-1].position == point.position:
            if point.kind == "every":
                return self
            points = points[:-1]
        return Points(fitting((*points, point), point.position, budget))

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


NO_POINTS = Points()


class Mark:
    """A point of a session's past, kept in memory; made by `Session.mark`, and a place for `Session.rewind` to go.

    A mark is kept as long as the caller holds it, and until it or its session is closed; using it after that raises
    `ClosedError`.  It stays valid when the session goes back behind it and on another way.  Sessions of the same model
    can go to it too, forks above all.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     _ = s.prefill([82, 79, 77])
    ...     m = s.mark("before the name")
    ...     _ = s.prefill([69, 79])
    ...     _ = s.rewind(m)
    ...     m.position, m.label, s.position
    (3, 'before the name', 3)
    """

    __slots__ = ("__weakref__", "_ended", "_label", "_point", "_position")

    def __init__(self, point: Point, label: str | None) -> None:
        self._point: Point | None = point
        self._position = point.position
        self._label = label
        self._ended = ""

    @property
    def position(self) -> int:
        """Tokens that the session held."""
        return self._position

    @property
    def label(self) -> str | None:
        """What the caller called it."""
        return self._label

    @property
    def nbytes(self) -> int:
        """Bytes of state and logits that go when this mark is closed; what others share does not count."""
        point = self._point
        if point is None:
            return 0
        return int(point.timeline.own_bytes) + (0 if point.row is None else point.row.nbytes)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, by itself or with its session."""
        return self._point is None

    def close(self) -> None:
        """Free what only this mark keeps.  Closing twice is fine."""
        self._end("the mark has been closed")

    def _end(self, why: str) -> None:
        if self._point is not None:
            self._ended, self._point = why, None

    def _open(self) -> Point:
        point = self._point
        if point is None:
            raise ClosedError(f"{self._ended}: the mark at position {self._position} is gone")
        return point

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Mark is a handle to memory of this process and cannot be pickled; save() the session"
        )

    def __repr__(self) -> str:
        label = "" if self._label is None else f" {self._label!r}"
        return f"<Mark{label} at {self._position}{': closed' if self._point is None else ''}>"
