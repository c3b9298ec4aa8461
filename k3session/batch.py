# SPDX-License-Identifier: MIT
"""Batches: one pass over the tokens of many sessions, so that each weight is read once for all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from k3session._core.decoder import Scratch
from k3session._core.state import Owner
from k3session.errors import (
    BatchError,
    ConfigError,
    K3Error,
    NonFiniteError,
    PassCancelled,
    SessionBusyError,
)
from k3session.inputs import prompt_rows, token_id
from k3session.memory import CHUNK_ROWS
from k3session.session.core import SessionCore
from k3session.trace import TracedTogether

if TYPE_CHECKING:
    from k3session.model import Model

__all__ = ["forward", "step"]

Row = npt.NDArray[np.float32]
#: Ids, -1 where an embedding is given, and the embeddings.
Given = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]


def step(model: Model, pairs: Iterable[tuple[Any, Any]]) -> list[Row]:
    """See `Model.step`."""

    def read(session: SessionCore, token: Any) -> Given:
        return np.array([token_id(token, session._vocab)], np.int32), None

    return _run(model, pairs, "token", read)


def forward(model: Model, pairs: Iterable[tuple[Any, Any]]) -> list[Row]:
    """See `Model.forward`."""

    def read(session: SessionCore, prompt: Any) -> Given:
        return prompt_rows(prompt, session._vocab, session.model.config.hidden_size)

    return _run(model, pairs, "ids", read)


class _Part:
    """What one session has in a batch."""

    __slots__ = ("done", "embeddings", "given", "ids", "result", "session")

    def __init__(self, session: SessionCore, given: Any) -> None:
        self.session = session
        self.given = given
        self.ids = np.empty(0, np.int32)
        self.embeddings: npt.NDArray[np.float32] | None = None
        self.done = 0
        self.result: Row | Exception | None = None

    @property
    def left(self) -> int:
        """Rows that are still to be run; none of a part that has failed."""
        return 0 if self.result is not None else self.ids.size - self.done

    def fail(self, error: Exception) -> None:
        """End with an error, whose message names the session."""
        name = self.session.name
        if name not in str(error):
            error.args = (f"{name}: {error}", *error.args[1:])
        # Without the stack, which would keep the batch alive as long as the error.
        error.__context__ = None
        self.result = error.with_traceback(None)

    def begin(self, read: Callable[[SessionCore, Any], Given], scratch: Scratch) -> None:
        """All that a session refuses, it refuses here; then it is told what comes."""
        session = self.session
        session._begin(cancellable=True)
        session._batch = scratch
        ids, self.embeddings = read(session, self.given)
        start = session._timeline.position
        if start + ids.size > session._capacity:
            raise session._full(ids.size)
        if start + ids.size > session._ids.size:
            session._grow_ids(start + ids.size)
        session._ids[start : start + ids.size] = ids
        if self.embeddings is not None:
            for i, row in enumerate(self.embeddings, start):
                session._digests[i] = xxhash.xxh3_128_hexdigest(row)
        self.ids = ids


def _run(
    model: Model,
    pairs: Iterable[tuple[Any, Any]],
    what: str,
    read: Callable[[SessionCore, Any], Given],
) -> list[Row]:
    model._check_open()
    parts = _parts(model, pairs, what)
    _together(model, parts, read)
    failed = [p.result for p in parts if isinstance(p.result, Exception)]
    if failed:
        said = "; ".join(map(str, failed[:3])) + ("" if len(failed) <= 3 else "; and others")
        raise BatchError(
            f"{len(failed)} of the {len(parts)} sessions of a batch failed, and the others have gone on: {said}",
            [p.result for p in parts],
        )
    return [p.result for p in parts if isinstance(p.result, np.ndarray)]


def _together(model: Model, parts: list[_Part], read: Callable[[SessionCore, Any], Given]) -> None:
    """Run the batch; then every part has its result."""
    owners: list[Owner] = []
    # Taking and giving back are one call each, in which no code in Python runs: Ctrl-C comes before it or after it.
    give_back: Callable[[], Any] = functools.partial(list, map(Owner.__exit__, owners))
    try:
        ready = _take(owners, parts)
        scratch = _borrow(model, min(len(ready), CHUNK_ROWS))
        try:
            for part in ready:
                try:
                    part.begin(read, scratch)
                except K3Error as error:
                    part.fail(error)
            _passes(model, scratch, ready)
        finally:
            _bring_back(model, scratch)
            for part in ready:
                part.session._active, part.session._batch = False, None
    finally:
        give_back()


def _parts(model: Model, pairs: Iterable[tuple[Any, Any]], what: str) -> list[_Part]:
    """The batch, checked as a whole; nothing has been done with any session."""
    parts: list[_Part] = []
    for pair in pairs:
        try:
            session, given = pair
        except (TypeError, ValueError):
            session, given = None, None
        if not isinstance(session, SessionCore):
            raise ConfigError(f"a batch is a list of (session, {what}) pairs; found {pair!r}"[:300])
        if session.model is not model:
            raise ConfigError(f"{session.name} is a session of another model; a batch has those of one model")
        parts.append(_Part(session, given))
    if not parts:
        raise ConfigError(f"the batch is empty; expected at least one (session, {what}) pair")
    seen: set[int] = set()
    for part in parts:
        if id(part.session) in seen:
            raise ConfigError(
                f"{part.session.name} is in the batch twice; a session can take part once, with all its tokens"
            )
        seen.add(id(part.session))
    return parts


def _take(owners: list[Owner], parts: list[_Part]) -> list[_Part]:
    """Own the sessions; those that somebody else owns have failed.  What was taken is in `owners` at every moment."""
    ready: list[_Part] = []
    left = parts
    while left:
        before = len(owners)
        try:
            owners.extend(map(Owner.__enter__, [p.session._owner for p in left]))
        except SessionBusyError as error:
            taken = len(owners) - before
            left[taken].fail(error)
            ready, left = ready + left[:taken], left[taken + 1 :]
        else:
            return ready + left
    return ready


def _borrow(model: Model, segments: int) -> Any:
    """The scratch of the model's batches, or another one where that is in use or too small."""
    with model._lock:
        scratch, model._batch_scratch = model._batch_scratch, None
    if scratch is None or scratch.segments_room < segments:
        scratch = model._open_decoder().scratch(CHUNK_ROWS, max(2, 1 << (segments - 1).bit_length()))
    scratch.clear_cancel()
    return scratch


def _bring_back(model: Model, scratch: Scratch) -> None:
    with model._lock:
        model._past.add_streamed(scratch.streamed(True))
        kept = model._batch_scratch
        if kept is None or kept.segments_room < scratch.segments_room:
            model._batch_scratch = scratch


def _passes(model: Model, scratch: Scratch, parts: list[_Part]) -> None:
    """As many passes as it takes; whoever has come to an end drops out."""
    buffer = np.empty((min(len(parts), CHUNK_ROWS), model.config.vocab_size), np.float32)
    while True:
        for part in parts:
            if part.left and part.session._cancelled():
                part.session._scratch.clear_cancel()
                at = part.session._timeline.position
                part.fail(
                    PassCancelled(
                        f"cancelled; {part.session.name} stands at position {at} and can go on from there", at
                    )
                )
        chosen = _shares([p for p in parts if p.left])
        if not chosen:
            return
        try:
            _one_pass(model, scratch, chosen, buffer)
        except PassCancelled:
            scratch.clear_cancel()  # for one of them; the others have their pass once more, without it
        except (K3Error, MemoryError) as error:
            if len(chosen) == 1:
                chosen[0][0].fail(error)
                continue
            # The pass did not come about, as where one of them finds no memory: each by itself, then.
            for part, rows in chosen:
                try:
                    _one_pass(model, scratch, [(part, rows)], buffer)
                except PassCancelled:
                    scratch.clear_cancel()
                except (K3Error, MemoryError) as its_own:
                    part.fail(its_own)


def _shares(parts: list[_Part]) -> list[tuple[_Part, int]]:
    """How many rows each has in the next pass: the same for all, and what is then free to those that have more."""
    parts = parts[:CHUNK_ROWS]
    if not parts:
        return []
    rows = [min(p.left, CHUNK_ROWS // len(parts)) for p in parts]
    room = CHUNK_ROWS - sum(rows)
    for i, part in enumerate(parts):
        more = min(room, part.left - rows[i])
        rows[i] += more
        room -= more
    return list(zip(parts, rows, strict=True))


def _one_pass(
    model: Model, scratch: Scratch, chosen: list[tuple[_Part, int]], buffer: npt.NDArray[np.float32]
) -> None:
    """One pass over some rows of several sessions; each is committed that came through."""
    counts = [rows for _, rows in chosen]
    total = sum(counts)
    ids = np.concatenate([p.ids[p.done : p.done + rows] for p, rows in chosen])
    embeddings = _embeddings(model, chosen, total)
    timelines = [p.session._timeline for p, _ in chosen]
    decoder = model._open_decoder()
    traces = {i: p.session._trace for i, (p, _) in enumerate(chosen) if p.session._trace is not None}
    ends = np.cumsum(counts)
    traced = TracedTogether(decoder.weights, traces, ends, buffer.shape[1]) if traces else None
    taps, every = (None, None) if traced is None else (traced.taps, traced.every)
    # Where a session's last row of logits is.
    logits, last = (buffer[: len(chosen)], range(len(chosen))) if every is None else (every, ends - 1)
    positions = [int(t.position) for t in timelines]
    # A session's row is where the pass writes it, from before the commit until it is copied to the session's own.
    own: list[tuple[SessionCore, int, npt.NDArray[np.float32]]] = []
    began = time.perf_counter()
    try:
        for i, (part, rows) in enumerate(chosen):
            session = part.session
            spare = 1 if session._rows_at[0] == positions[i] else 0
            own.append((session, spare, session._rows[spare]))
            session._own_row(spare, logits[last[i] : last[i] + 1])
            session._rows_at[spare] = positions[i] + rows
        bad = decoder.forward(scratch, timelines, counts, ids, embeddings, logits, every is not None, taps)
    finally:
        for i, (session, spare, row) in enumerate(own):
            row[0] = logits[last[i]]
            session._own_row(spare, row)
    seconds = time.perf_counter() - began
    with model._lock:
        model._past.passes[total] += 1
    for i, (part, rows) in enumerate(chosen):
        session = part.session
        if traced is not None:
            of_it = part.ids[part.done : part.done + rows]
            traced.took(i, positions[i], of_it, session._timeline, None if bad is None else bad[i])
        if bad is not None and bad[i] is not None:
            session._failure = NonFiniteError(
                f"{bad[i]} gave a value that is not finite, in the pass of {session.name} that began at position "
                f"{positions[i]}; look for NaN or infinite weights with 'k3session check --deep'",
                bad[i],
            )
            part.fail(session._failure)
            continue
        part.done += rows
        session._counts.seconds += seconds * rows / total
        if part.ids.size == 1:
            session._counts.stepped += 1
        else:
            session._counts.prefilled += rows
        if positions[i] + rows >= session._due:
            session._keep_point("every")
        if part.done == part.ids.size:
            if part.ids.size > 1 and session._policy.prefill:
                session._keep_point("prefill")
            part.result = logits[last[i]].copy()


def _embeddings(model: Model, chosen: list[tuple[_Part, int]], total: int) -> npt.NDArray[np.float32] | None:
    """The embeddings among the rows of a pass, at their places; None where there are none."""
    if all(p.embeddings is None for p, _ in chosen):
        return None
    every = np.zeros((total, model.config.hidden_size), np.float32)
    row = 0
    for part, rows in chosen:
        if part.embeddings is not None:
            every[row : row + rows] = part.embeddings[part.done : part.done + rows]
        row += rows
    return every
