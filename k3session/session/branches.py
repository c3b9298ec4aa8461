# SPDX-License-Identifier: MIT
"""Other ways to go on from a point of the past: forks, marks, going back, and other tokens instead of these."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from k3session.errors import (
    CapacityError,
    ConfigError,
    InvalidTokenError,
    NonFiniteError,
    PassCancelled,
    RewindError,
)
from k3session.inputs import prompt_rows
from k3session.marks import NO_POINTS, Kept, Mark, Point, Points
from k3session.memory import CHUNK_ROWS
from k3session.progress import Progress, ProgressArgument
from k3session.session.core import LATENTS
from k3session.session.snapshots import Snapshots

__all__ = ["Branches"]

_NO_IDS = np.empty(0, np.int32)


class Branches(Snapshots):
    """Forks, marks and going back.  See `k3session.Session`."""

    def fork(self, *, seed: int | None = None, capacity: int | None = None) -> Self:
        """Return a second session that stands at the same point; from there each goes its own way.

        Nothing is copied but the ids and the row of logits: pages of the latent cache and the recurrent state are
        shared until one of the two goes on.  The sampling, ``meta`` and the automatic marks go along.  Either may be
        closed first, and forks may be forked.

        Parameters
        ----------
        seed
            The seed of the new session's sampling.  None keeps the one of this session, with which both draw the same
            tokens from the same logits.
        capacity
            The most tokens that the new session may hold; None is the capacity of this one.

        Raises
        ------
        CapacityError
            The capacity is smaller than the position.
        ConfigError, NonFiniteError, SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     _ = s.prefill([82, 79, 77])
        ...     with s.fork(seed=7) as t:
        ...         _ = t.step(69)
        ...         s.position, t.position
        (3, 4)
        """
        with self._owner:
            self._begin()
            position = self._timeline.position
            sampling = self.sampling
            if seed is not None:
                sampling = (sampling or self._model.default_sampling).with_seed(seed)
            row = self._logits()
            digests = dict(self._digests)
            new = type(self).__new__(type(self))
            new._open(
                self._model,
                self._capacity if capacity is None else capacity,
                self._latent,
                self._policy,
                self._timeline.share(),
            )
            try:
                new._check_room(position, self.name)
                new._fixed_bytes = self._fixed_bytes
                new._ids = self._ids_of(self._ids[:position])
                new._digests = digests
                if row is not None:
                    new._rows[0][0] = row
                    new._rows_at = [position, -1]
                new.sampling, new._resume, new._meta = sampling, self._resume, self._meta
                new._points, new._due, new._origin = self._points, self._due, self._origin
            except BaseException:
                new.close()
                raise
            return new

    def mark(self, label: str | None = None) -> Mark:
        """Keep the point where the session stands, and return it for `rewind`.

        Nothing is copied but the row of logits.  Once the session has gone on, the mark keeps a recurrent state of
        its own in memory; see `Mark.nbytes`.

        Parameters
        ----------
        label
            What `reachable` shows.

        Raises
        ------
        ConfigError, NonFiniteError, SessionBusyError, ClosedError
        """
        if label is not None and not isinstance(label, str):
            raise ConfigError(f"label is {label!r}; expected None or a string")
        with self._owner:
            self._begin()
            mark = Mark(self._point("mark"), label)
            self._marks.add(mark)
            return mark

    def reachable(self) -> list[tuple[int, str]]:
        """Return the positions that `rewind` reaches without computing a token, in order.

        Each comes with the label of the caller's mark there, or with what keeps it: "start", "every", "prefill",
        "load" or "rewind" for automatic marks, "mark" for one without a label, and "now" where the session stands.

        Raises
        ------
        SessionBusyError, ClosedError
        """
        with self._owner:
            self._begin(failed_is_fine=True)
            found = {0: "start"}
            if self._is_intact():
                found.setdefault(self._timeline.position, "now")
                found |= {p.position: p.kind for p in self._points}
            for mark, point in self._own_marks():
                if mark.label is not None:
                    found[point.position] = mark.label
                elif found.get(point.position, "now") == "now":
                    found[point.position] = "mark"
            return sorted(found.items())

    def rewind(self, to: Mark | SupportsIndex, *, max_replay: int | None = None) -> int:
        """Go back to a mark or a position; the session is then one that never went further, bit for bit.

        The state is taken from the nearest mark at or before the position, automatic or the caller's, or from
        position 0, and the tokens between are computed again.  Position 0 can always be reached, and a mark always
        takes the session to where it was, also to a branch that was left.  Ctrl-C, a cancel or an error leaves the
        session as it was.  A session that has failed goes on after a rewind.

        Parameters
        ----------
        to
            A mark, or a position from 0 to the present one.
        max_replay
            The most tokens that may be computed again; None sets no limit.

        Returns
        -------
        int
            Tokens that were computed again.

        Raises
        ------
        RewindError
            Embeddings, or ids that a snapshot left out, lie between the nearest mark and the position; or more than
            `max_replay` tokens do.  ``nearest`` is what can be reached, ``cost`` the tokens that it would take.
        CapacityError
            A mark of another session that holds more tokens than this one may.
        ConfigError, PassCancelled, KeyboardInterrupt, SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     _ = s.prefill([82, 79, 77, 69, 79])
        ...     s.rewind(2)
        ...     s.tokens.tolist()
        2
        [82, 79]
        """
        if max_replay is not None and (
            isinstance(max_replay, bool) or not isinstance(max_replay, int) or max_replay < 0
        ):
            raise ConfigError(
                f"max_replay is {max_replay!r}; expected None or a number of tokens of at least 0"
            )
        with self._owner:
            try:
                self._begin(failed_is_fine=True, cancellable=True)
                if isinstance(to, Mark):
                    start = self._point_of(to)
                    self._go(start, start.ids[: start.position], "rewind")
                    return 0
                position = self._position_back(to)
                start = self._nearest(position)
                self._check_replay(start, position, max_replay)
                if start.kind == "now":
                    self._failure = None
                    return 0
                return self._go(start, self._ids[:position], "rewind")
            finally:
                self._active = False

    def set_tokens(
        self, ids: Sequence[int] | npt.NDArray[Any], *, progress: ProgressArgument = False
    ) -> Kept:
        """Make the session hold exactly these tokens, with as little work as there can be, and say what was kept.

        For a chat that sends its whole history each time, for "regenerate", for a prompt that was edited.  The session
        keeps what it has in common with `ids`, goes back where it has to, and computes the rest.  All or nothing:
        Ctrl-C, a cancel or an error leaves the session as it was.  Sampling and ``meta`` stay.

        Parameters
        ----------
        ids
            Token ids [n]; none at all empties the session.
        progress
            True, or a function called as ``progress("set_tokens", tokens done, tokens)``.

        Returns
        -------
        Kept
            How many tokens were kept, computed again, and computed.

        Raises
        ------
        InvalidTokenError, CapacityError, PassCancelled, KeyboardInterrupt, NonFiniteError, SessionBusyError,
        ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     _ = s.prefill([82, 79, 77, 69, 79])
        ...     s.set_tokens([82, 79, 77, 69, 79, 58])
        ...     s.set_tokens([82, 79, 66])
        Kept(kept=5, replayed=0, computed=1)
        Kept(kept=0, replayed=2, computed=1)
        """
        report = Progress(progress)
        with self._owner:
            try:
                self._begin(cancellable=True)
                wanted = self._ids_given(ids)
                n = wanted.size
                if n > self._capacity:
                    raise CapacityError(
                        f"{n} tokens do not fit {self.name}, which may hold {self._capacity}: "
                        "give a session a larger capacity"
                    )
                common = _common(self._ids[: self._timeline.position], wanted)
                start = self._best(wanted, common)
                if start.kind != "now" or start.position < n:
                    self._go(start, wanted, "prefill", report)
                kept = start.position
                return Kept(kept, max(0, common - kept), n - max(common, kept))
            finally:
                self._active = False
                report.close()

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _is_intact(self) -> bool:
        """Whether the timeline stands where the ids say: a restore that was broken off leaves that open."""
        return self._failure is None or isinstance(self._failure, NonFiniteError)

    def _own_marks(self) -> Iterator[tuple[Mark, Point]]:
        """The caller's marks that this session passed on its way here."""
        position = self._timeline.position if self._is_intact() else 0
        for mark in self._marks:
            point = mark._point
            if point is not None and point.lies_in(self._ids, self._digests, self._origin, position):
                yield mark, point

    def _start(self) -> Point:
        return Point(0, "start", None, None, _NO_IDS, {}, None, 0, self.name)

    def _point_of(self, mark: Mark) -> Point:
        """The point of a mark that this session can go to."""
        point = mark._open()
        state, own = point.timeline, self._timeline
        if state.weights is not own.weights or state.latent_dtype != own.latent_dtype:
            raise ConfigError(
                f"{mark!r} belongs to {point.home}, a session of another model or with another latent cache"
            )
        self._check_room(point.position, f"the mark of {point.home}")
        return point

    def _position_back(self, to: Any) -> int:
        if isinstance(to, bool) or not hasattr(type(to), "__index__"):
            raise ConfigError(f"to is {to!r}; expected a Mark, or a position as an integer")
        position = operator.index(to)
        here = self._timeline.position if self._is_intact() else 0
        if not 0 <= position <= here:
            raise RewindError(
                f"position {position} cannot be reached: {self.name} has been at 0 to {here}; "
                f"the nearest is {min(max(position, 0), here)}",
                min(max(position, 0), here),
            )
        return position

    def _nearest(self, position: int) -> Point:
        """The last point at or before `position` on the way here; one at it needs its row of logits."""
        if position == self._timeline.position and self._is_intact():
            return self._point("now")
        best = self._start()
        for point in (*self._points, *(p for _, p in self._own_marks())):
            usable = point.row is not None or point.position < position
            if best.position < point.position <= position and usable:
                best = point
        return best

    def _best(self, wanted: npt.NDArray[np.int32], common: int) -> Point:
        """The point with the longest history that begins `wanted`; one that is all of it needs its logits."""
        n = wanted.size
        best = self._start()
        points = [p for p in self._points if p.position <= common]
        if common == self._timeline.position:
            points.append(self._point("now"))
        for mark in self._marks:
            point = mark._point
            if point is None or point.position > n:
                continue
            if np.array_equal(point.ids[: point.position], wanted[: point.position]):
                points.append(point)
        for point in points:
            if point.position > best.position and (point.row is not None or point.position < n):
                best = point
        return best

    def _check_replay(self, start: Point, position: int, max_replay: int | None) -> None:
        """RewindError unless the tokens from `start` to `position` can be computed again, and may be."""
        begin, cost = start.position, position - start.position
        end, why, origin = position, "", self._origin
        unknown = np.flatnonzero(self._ids[begin:position] < 0)
        if cost and origin is not None and begin < origin.position:
            end, why = (
                begin,
                f"the state up to {origin.position} came with a snapshot and is not computed again here",
            )
        elif unknown.size:
            end = begin + int(unknown[0])
            why = f"embeddings, or ids that a snapshot left out, lie at {end}"
        nearest = end if max_replay is None else min(end, begin + max_replay)
        if nearest >= position:
            return
        to = f"the nearest position before it that can be reached is {nearest}"
        if end < position:
            raise RewindError(
                f"position {position} of {self.name} cannot be reached: {why}, and no mark lies between; {to}",
                nearest,
            )
        raise RewindError(
            f"position {position} of {self.name} takes {cost} tokens of replay from {begin} on, and max_replay is "
            f"{max_replay}; {to}",
            nearest,
            cost,
        )

    def _ids_given(self, ids: Any) -> npt.NDArray[np.int32]:
        if isinstance(ids, str):
            raise InvalidTokenError("set_tokens takes token ids, not text: use model.tokenizer.encode(text)")
        if isinstance(ids, (Sequence, np.ndarray)) and len(ids) == 0:
            return _NO_IDS
        wanted, embeddings = prompt_rows(ids, self._vocab, self._model.config.hidden_size)
        if embeddings is not None:
            raise InvalidTokenError("set_tokens takes token ids; embeddings go in with prefill")
        return wanted

    def _ids_of(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """A buffer of its own that begins with these, with room to go on."""
        buffer = np.empty(ids.size + 64, np.int32)
        buffer[: ids.size] = ids
        return buffer

    def _behind(self, start: Point) -> Points:
        """The automatic marks that stay when the session goes to `start`: those on the way there.

        They are those that were there before it was made, by this session or by the one that this is a fork of.
        """
        if start.kind == "start" or (start.home != self.name and start.serial > self._birth):
            return NO_POINTS
        return Points(
            tuple(p for p in self._points if p.position <= start.position and p.serial <= start.serial)
        )

    def _go(self, start: Point, ids: npt.NDArray[np.int32], kind: str, report: Progress | None = None) -> int:
        """Hold exactly ``ids``, going on from ``start``; all or nothing.  Returns the tokens that were computed.

        Where ``kind`` of mark is due at the end, it is made.
        """
        n, begin = ids.size, start.position
        ids = self._ids_of(ids)
        digests = {k: v for k, v in start.digests.items() if k < begin and ids[k] < 0}
        history: dict[str, Any] = {"ids": ids, "digests": digests, "origin": start.origin}
        policy, points = self._policy, self._behind(start)
        due = policy.due(points.points[-1].position if points else 0)
        if start.timeline is None:
            work = self._decoder.timeline(LATENTS[self._latent], self._timeline.page_rows)
        else:
            work = start.timeline.share()
        row = start.row
        for at in range(begin, n, CHUNK_ROWS):
            end = min(n, at + CHUNK_ROWS)
            row = self._pass_aside(work, ids[at:end])
            last = end == n and (policy.prefill if kind == "prefill" else policy.is_on)
            if last or end >= due:
                point = self._point_at(work, row, kind if last else "every", **history)
                points = points.with_point(point, policy.budget)
                due = policy.due(end)
            if report is not None:
                report("set_tokens", end - begin, n - begin)
        spare = 1 if self._rows_at[0] == self._timeline.position else 0
        rows_at = [-1, -1]
        if row is not None:
            self._rows_at[spare] = -1
            self._rows[spare][0] = row
            rows_at[spare] = n
        self._together(
            self._timeline.becoming(work),
            "going back",
            _ids=ids,
            _rows_at=rows_at,
            _digests=digests,
            _failure=None,
            _points=points,
            _due=due,
            _origin=start.origin,
        )
        return n - begin

    def _pass_aside(self, work: Any, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """A pass on another timeline than the session's; returns its row of logits."""
        at, trace, taps, every = work.position, self._trace, None, None
        if trace is not None:
            taps = trace.taps(self._decoder.weights, ids.size)
            every = trace.rows_of_logits(ids.size, self._vocab)
        rows = np.empty((1, self._vocab), np.float32) if every is None else every
        began = time.perf_counter()
        try:
            bad = self._pass([work], [ids.size], ids, None, rows, every is not None, taps)
        except PassCancelled:
            self._scratch.clear_cancel()
            position = self._timeline.position
            raise PassCancelled(
                f"cancelled; {self.name} stands at position {position}, as before", position
            ) from None
        if trace is not None:
            trace.took(at, ids, taps, every, work, None if bad is None else str(bad[0]))
        if bad is not None:
            raise NonFiniteError(
                f"{bad[0]} gave a value that is not finite, in a pass over tokens from position {work.position} on; "
                f"{self.name} is as it was",
                bad[0] or "",
            )
        self._counts.passed(ids.size, time.perf_counter() - began)
        last: npt.NDArray[np.float32] = rows[-1].copy()
        return last


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the longest common beginning."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
