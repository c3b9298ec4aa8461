# SPDX-License-Identifier: MIT
"""Snapshots of a session: in memory, to files, and back."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

from k3session import __version__
from k3session._core.ops import BUILD
from k3session.errors import CapacityError, ConfigError, K3Error, SnapshotError, SnapshotMismatchError
from k3session.identity import check_arrays, check_facts, check_size
from k3session.marks import NO_POINTS, Marks, Origin, Point, Points, fitting
from k3session.placement import precision_label
from k3session.progress import Progress, ProgressArgument
from k3session.sampling import Sampling
from k3session.saving import SaveJob
from k3session.session.core import LATENTS, SessionCore
from k3session.snapshot import (
    MARKS,
    Head,
    LayerSnapshot,
    MarkSnapshot,
    Snapshot,
    check_meta,
    head_parts,
    state_parts,
    stated_marks,
    stated_size,
)
from k3session.snapshot_file import Part, SnapshotReader, read_all, write_file
from k3session.snapshot_parts import open_snapshot

if TYPE_CHECKING:
    from k3session.model import Model

__all__ = ["Snapshots"]


def _write(path: str | os.PathLike[str], parts: list[Part], facts: dict[str, Any], report: Progress) -> int:
    try:
        return write_file(path, parts, facts, report)
    finally:
        report.close()


def _whole(
    path: str | os.PathLike[str],
    held: Any,
    points: Sequence[Point],
    head: Head,
    facts: dict[str, Any],
    report: Progress,
) -> Callable[[], int]:
    """What writes one file with the state of a timeline, which is the caller's to keep as it is until then."""
    parts = head_parts(*head) + state_parts(held.layers, held.position) + mark_parts(points)
    return functools.partial(_write, path, parts, facts, report)


class Snapshots(SessionCore):
    """Saving and loading.  See `k3session.Session`."""

    def snapshot(self, *, meta: Any = None, include_tokens: bool = True, marks: bool = False) -> Snapshot:
        """Return everything that the session is, copied.

        Parameters
        ----------
        meta
            Anything that JSON can hold, kept with the snapshot.
        include_tokens
            Whether the ids are kept; without them the conversation cannot be read from the snapshot.
        marks
            Whether the automatic marks go with it, so that a session that takes it can be rewound without replay.
        """
        with self._owner:
            self._begin()
            layers = tuple(LayerSnapshot(**layer.export()) for layer in self._timeline.layers)
            tokens, logits = self._head(include_tokens)
            points = self._points_before() if marks else ()
            facts = self._facts(meta, include_tokens, points)
            kept = tuple(_mark_of(point) for point in points)
            return Snapshot(self._timeline.position, tokens, logits, layers, facts, kept)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot says.  A snapshot that is refused changes nothing.

        State that the session shares with no fork, mark or save in the background is written over, and takes no new
        memory.

        Raises
        ------
        SnapshotMismatchError
            Another model, other weights or options: ``differences`` lists every field that differs.
        CapacityError
            The snapshot holds more tokens than this session may.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(
                f"expected a k3session.Snapshot, found {type(snapshot).__name__}; for a file use Session.load"
            )
        with self._owner:
            self._begin(failed_is_fine=True)
            layers = self._model.config.num_hidden_layers
            check_facts(
                snapshot.facts, self._facts(None, False), snapshot.logits, self._vocab, "the snapshot"
            )
            check_arrays(snapshot, layers, self._vocab, "the snapshot")
            self._check_room(snapshot.position)
            self._take(snapshot)

    @overload
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Any = None,
        include_tokens: bool = True,
        marks: bool = False,
        wait: Literal[True] = True,
        progress: ProgressArgument = False,
    ) -> int: ...

    @overload
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Any = None,
        include_tokens: bool = True,
        marks: bool = False,
        wait: Literal[False],
        progress: ProgressArgument = False,
    ) -> SaveJob: ...

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Any = None,
        include_tokens: bool = True,
        marks: bool = False,
        wait: bool = True,
        progress: ProgressArgument = False,
    ) -> int | SaveJob:
        """Write a snapshot file, and return its size in bytes.

        Crash-safe: at every moment `path` is the old file, whole, or the new one, whole.  On an error the old one is
        there, and the session is as it was.

        Parameters
        ----------
        path
            The file.
        meta
            Anything that JSON can hold, kept with the snapshot.
        include_tokens
            Whether the ids are kept; without them the conversation cannot be read from the file.
        marks
            Whether the automatic marks go with it.  Each adds the size of the recurrent state to the file.
        wait
            False returns a `SaveJob` at once, and a thread of its own writes the file while the session goes on.  The
            file holds exactly the tokens up to the position at this call, ``job.position``.  Until it is written this
            takes memory for the recurrent state once more; latent pages are shared.  `close` waits for it.
        progress
            True, or a function called as ``progress("save", bytes done, bytes)`` by the thread that writes.

        Raises
        ------
        SnapshotError
            No space, no folder, no permission: the message says which.
        """
        return self._save(path, meta, include_tokens, marks, wait, Progress(progress), None)

    def _save(
        self,
        path: str | os.PathLike[str],
        meta: Any,
        include_tokens: bool,
        marks: bool,
        wait: bool,
        report: Progress,
        writer: Callable[..., Callable[[], int]] | None,
    ) -> int | SaveJob:
        """Save as `writer` does, which is called as `_whole` is; None is that one."""
        with self._owner:
            try:
                self._begin()
                held = self._timeline if wait else self._timeline.share()
                points = self._points_before() if marks else ()
                head, facts = self._head(include_tokens), self._facts(meta, include_tokens, points)
                work = (writer or _whole)(path, held, points, head, facts, report)
                job = SaveJob(path, held.position, work)
                self._jobs = [
                    j for j in self._jobs if not j.done or j.failed_unseen or j is self._last_saved()
                ]
                self._jobs.append(job)
                if wait:
                    return job.run()
                job.start()
                return job
            finally:
                if wait:
                    report.close()

    @classmethod
    def load(
        cls,
        model: Model,
        path: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        marks: Marks | bool | None = None,
    ) -> Self:
        """Return a session that goes on where the file was saved.

        The latent cache keeps the file's dtype.  Facts are compared and every tensor is checked against its digest
        before there is a session.  Marks in the file are read as far as the budget of ``marks`` has room for them.

        Raises
        ------
        SnapshotError, SnapshotCorruptError, SnapshotMismatchError, CapacityError
        """
        with open_snapshot(path) as reader:
            position, _ = stated_size(reader)
            latent = reader.facts.get("latent")
            known = isinstance(latent, str) and latent in LATENTS
            session = cls(model, capacity=capacity, latent=str(latent) if known else "fp32", marks=marks)
            try:
                check_facts(reader.facts, session._facts(None, False), None, session._vocab, reader.name)
                check_size(reader, session._timeline.layers)
                session._check_room(position, reader.name)
                marked, whole = session._marks_to_read(reader, position), None
                if session._timeline.fills:
                    read = functools.partial(_read_states, reader, model.threads)
                    whole = session._timeline.filled(position, read)
                snapshot = Snapshot.from_reader(reader, marked, states=whole is None)
                check_arrays(snapshot, model.config.num_hidden_layers, session._vocab, reader.name)
                session._take(snapshot, reader.name, whole)
            except BaseException:
                session.close()
                raise
        return session

    def close(self) -> None:
        """Free the session's memory; further use raises `ClosedError`.  Closing twice is fine.

        Waits for saves that go on in the background; of one that failed, and whose result nobody has asked for, the
        log of ``k3session`` tells.
        """
        if not self.is_closed:
            with self._owner:
                for job in self._jobs:
                    job.settle()
        super().close()

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _last_saved(self) -> SaveJob | None:
        """The last save that ended well."""
        return next((job for job in reversed(self._jobs) if job.done and job.nbytes > 0), None)

    def _head(
        self, include_tokens: bool
    ) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
        tokens = self._ids[: self._timeline.position].copy() if include_tokens else None
        row = self._logits()
        return tokens, None if row is None else row.copy()

    def _facts(self, meta: Any, include_tokens: bool, points: Sequence[Point] = ()) -> dict[str, Any]:
        """What the header says beside the tensors."""
        model = self._model
        position = int(self._timeline.position)
        digests = {str(k): v for k, v in self._digests.items() if k < position and self._ids[k] == -1}
        more: dict[str, Any] = {}
        if points:
            more["marks"] = [{"position": p.position, "kind": p.kind} for p in points]
        if self._origin is not None and self._origin.position <= position:
            more["origin"] = self._origin.position
        return more | {
            "k3session": __version__,
            "build": BUILD,
            "isa": model.isa,
            "device": model.placement_label,
            "fingerprint": model.fingerprint.to_dict(),
            "num_hidden_layers": model.config.num_hidden_layers,
            "layers": [0, model.config.num_hidden_layers],
            "position": position,
            "latent": self._latent,
            # Compact weights are the stored ones to the bit.
            "weights": "q8" if model.weights == "q8" else "stored",
            "prefill_precision": precision_label(model.prefill_precision, model.isa),
            "sampling": self.sampling.to_dict() if self.sampling is not None else None,
            "embeddings": digests if include_tokens else {},
            "meta": check_meta(meta),
        }

    def _check_room(self, position: int, name: str = "the snapshot") -> None:
        if position > self._capacity:
            raise CapacityError(
                f"{name} holds {position} tokens; this session may hold {self._capacity}: give it a larger capacity"
            )

    def _take(self, snapshot: Snapshot, name: str = "the snapshot", whole: Any = None) -> None:
        """Become the snapshot, whose facts and arrays have been compared; `whole` has its state where that is read."""
        here = self._facts(None, False)
        facts = {"prefill_precision": "exact"} | snapshot.facts  # files from before there was a choice
        exact = all(facts.get(n) == here[n] for n in ("build", "isa", "device", "prefill_precision"))
        sampling = snapshot.facts.get("sampling")
        position, tokens, logits = snapshot.position, snapshot.tokens, snapshot.logits
        try:
            chosen = Sampling.from_dict(sampling) if sampling is not None else None
            digests = {int(k): str(v) for k, v in (snapshot.facts.get("embeddings") or {}).items()}
        except (ConfigError, TypeError, ValueError, AttributeError) as problem:
            raise SnapshotError(f"{name}: its sampling or embeddings cannot be read: {problem}") from None
        ids = np.full(max(64, position), -1, np.int32)
        if tokens is not None:
            ids[:position] = tokens
        spare = 1 if self._rows_at[0] == self._timeline.position else 0
        rows_at = [-1, -1]
        if logits is not None:
            self._rows[spare][0] = logits
            rows_at[spare] = position
        origin = _origin(snapshot, digests, exact)
        timeline, points = self._timeline, NO_POINTS
        arrays = [layer.arrays() for layer in snapshot.layers]
        marked = snapshot.marks and self._policy.is_on
        if marked and whole is None:
            # The marks share the latent rows of the session that they belong to, so that is made first.
            whole = self._decoder.timeline(LATENTS[self._latent], timeline.page_rows)
            whole.replace(position, arrays)
        move = timeline.replacing(position, arrays) if whole is None else timeline.becoming(whole)
        if marked:
            points = self._points_of(snapshot, name, whole, ids=ids, digests=digests, origin=origin)
        self._together(
            move,
            "a restore",
            _ids=ids,
            _rows_at=rows_at,
            _digests=digests,
            sampling=chosen,
            _meta=snapshot.facts.get("meta"),
            _failure=None,
            _resume="exact" if exact else "tolerance",
            _points=points,
            _due=self._policy.due(position),
            _origin=origin,
        )
        if self._policy.is_on and position > 0:
            self._keep_point("load")

    def _together(self, move: Callable[[], Any], what: str, **fields: Any) -> None:
        """Move the timeline and set these fields, both or neither."""
        become: Callable[[], Any] = functools.partial(self.__dict__.update, fields)
        # Ctrl-C acts after a call: as one call, the two are done together, or neither is where the first one fails.
        # In the midst of it the session is failed, which is what the child of a fork finds that comes just then.
        both = map(operator.call, (move, become))
        before, broken = self._failure, K3Error(f"{what} was broken off in the middle")
        try:
            self._failure = broken
            list(both)
        except (K3Error, MemoryError):  # raised before anything was changed
            self._failure = before
            raise

    # ------------------------------------------------------------------------------------------
    # marks
    # ------------------------------------------------------------------------------------------

    def _points_before(self) -> tuple[Point, ...]:
        """The automatic marks that a snapshot takes along: where the session stands there is the snapshot itself."""
        return tuple(p for p in self._points if p.position < self._timeline.position)

    def _marks_to_read(self, reader: SnapshotReader, position: int) -> tuple[int, ...]:
        """The positions of those marks of a file that there is room for; their shapes have been compared."""
        if not self._policy.is_on:
            return ()
        least = self._fixed_bytes + 4 * self._vocab
        stated = stated_marks(reader)
        marks = [_Stated(at, kind, least) for at, (kind, _) in stated.items()]
        chosen = tuple(m.position for m in fitting(marks, position, self._policy.budget))
        wrong: dict[str, tuple[Any, Any]] = {}
        for at in chosen:
            parts = stated[at][1]
            expected: dict[str, tuple[int, ...]] = {"logits": (self._vocab,)} if "logits" in parts else {}
            for i, layer in enumerate(self._timeline.layers):
                if layer.is_kda:
                    expected |= {f"layers.{i}.{n}": shape for n, (shape, _) in layer.shapes(at).items()}
            found = {part: reader.tensors[name].shape for part, name in parts.items()}
            both = [(f"x.marks.{at}.{n}", found.get(n), expected.get(n)) for n in {**found, **expected}]
            wrong |= {n: (a, b) for n, a, b in both if a != b}
        if wrong:
            name, (a, b) = next(iter(wrong.items()))
            raise SnapshotMismatchError(f"{reader.name}: {name} has shape {a}, expected {b}", wrong)
        return chosen

    def _points_of(self, snapshot: Snapshot, name: str, whole: Any, **history: Any) -> Points:
        """The marks of a snapshot as points on the way to ``whole``, as many as there is room for."""
        points: list[Point] = []
        before = 0
        origin = history["origin"]
        for mark in fitting(snapshot.marks, snapshot.position, self._policy.budget):
            at, row = mark.position, mark.logits
            fits = before < at <= snapshot.position and len(mark.layers) == len(snapshot.layers)
            if not fits or (row is not None and (row.shape != (self._vocab,) or row.dtype != np.float32)):
                raise SnapshotMismatchError(
                    f"{name}: its mark at {at} does not fit the session", {"marks": (at, None)}
                )
            state = whole.earlier(at, [layer.arrays() for layer in mark.layers])
            within = origin is not None and at < origin.position
            history["origin"] = Origin(at) if within else origin
            points.append(self._point_at(state, None if row is None else row.copy(), mark.kind, **history))
            before = at
        return Points(fitting(points, snapshot.position, self._policy.budget))


class _Stated(NamedTuple):
    """A mark of a file that has not been read."""

    position: int
    kind: str
    nbytes: int


def _mark_of(point: Point) -> MarkSnapshot:
    """A point's state, copied out."""
    layers = [layer.export() if layer.is_kda else {} for layer in point.timeline.layers]
    row = None if point.row is None else point.row.copy()
    return MarkSnapshot(point.position, point.kind, row, tuple(LayerSnapshot(**d) for d in layers))


def _read_states(
    reader: SnapshotReader, threads: int, wanted: Sequence[tuple[int, str, Sequence[Any]]]
) -> None:
    """Read the arrays of layers, whose shapes and dtypes have been compared, into a session's own memory."""
    read_all(reader, [(f"layers.{i}.{name}", pieces) for i, name, pieces in wanted], threads)


def mark_parts(points: Sequence[Point]) -> list[Part]:
    """The tensors of marks, each copied out when it is written."""
    parts = []
    for point in points:
        start = f"{MARKS}{point.position}."
        row = point.row
        if row is not None:
            parts.append(Part(f"{start}logits", "F32", row.shape, functools.partial(np.asarray, row)))
        parts += state_parts(point.timeline.layers, point.position, start, fixed=True)
    return parts


def _origin(snapshot: Snapshot, digests: Mapping[int, str], exact: bool) -> Origin | None:
    """Up to where the tokens of a snapshot do not give its state again to the bit."""
    stated = snapshot.facts.get("origin")
    position = stated if isinstance(stated, int) and 0 < stated <= snapshot.position else 0
    if not exact or snapshot.tokens is None:
        position = snapshot.position
    else:
        unknown = [k for k in np.flatnonzero(snapshot.tokens < 0).tolist() if k not in digests]
        position = max([position, *(k + 1 for k in unknown)])
    return Origin(position) if position else None
