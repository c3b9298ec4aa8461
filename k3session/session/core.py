# SPDX-License-Identifier: MIT
"""The core of a session: its passes, what they need, and its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import numpy as np
import numpy.typing as npt
import xxhash

from k3session._core.state import Owner
from k3session.alive import Alive
from k3session.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    K3Error,
    NonFiniteError,
    PassCancelled,
    SessionBusyError,
)
from k3session.generation import Generated, generate
from k3session.inputs import out_row, prompt_rows, token_id
from k3session.marks import NO_POINTS, Mark, Marks, Origin, Point, Points, next_serial
from k3session.progress import Progress, ProgressArgument
from k3session.sampling import Sampling
from k3session.saving import SaveJob
from k3session.stats import Counts
from k3session.text import TokenizerLike
from k3session.times import Times
from k3session.trace import Trace

if TYPE_CHECKING:
    from k3session.model import Model
    from k3session.session import Session
    from k3session.session.drafts import Draft

__all__ = ["SessionCore"]

LATENTS = {"fp32": False, "bf16": True}
_NO_IDS = np.empty(0, np.int32)
_NO_ROW = np.empty((1, 0), np.float32)
_numbers = itertools.count(1)
_alive: Alive[SessionCore] = Alive()


def _after_fork_in_child() -> None:
    for session in _alive:
        session._owner.disown()


os.register_at_fork(after_in_child=_after_fork_in_child)


class SessionCore:
    """The passes of a session, what they need, and its end.  See `k3session.Session`."""

    _page_rows = 64  # positions in a latent page; no result depends on it

    def __init__(
        self,
        model: Model,
        *,
        capacity: int | None = None,
        latent: str = "fp32",
        marks: Marks | bool | None = None,
    ) -> None:
        if latent not in LATENTS:
            raise ConfigError(f"latent is {latent!r}; expected 'fp32' or 'bf16'")
        self._open(model, capacity, latent, Marks.read(marks), None)

    def _open(
        self, model: Model, capacity: int | None, latent: str, policy: Marks, timeline: Any | None
    ) -> None:
        """A session at position 0, or where `timeline` stands, which becomes its own."""
        if capacity is None:
            capacity = model.config.max_position_embeddings
        elif isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"capacity is {capacity!r}; expected None or a number of tokens of at least 1")
        self._closed = True
        self.name = f"session-{next(_numbers)}"
        self._owner = Owner(self.name)
        self._model = model
        self._capacity = capacity
        self._latent = latent
        self._decoder: Any = model._open_decoder()
        self._timeline: Any = (
            self._decoder.timeline(LATENTS[latent], self._page_rows) if timeline is None else timeline
        )
        self._fixed_bytes = int(self._timeline.nbytes)  # without latent rows; a fork takes that of its parent
        self._scratch: Any = self._decoder.scratch(model.chunk_rows)
        vocab = model.config.vocab_size
        self._vocab = vocab
        # A pass commits inside one call, and Ctrl-C may come right after it.  So what belongs to a position is
        # written before its pass, and counts from the moment that the timeline stands there: ids and digests past
        # the position are none yet, and of two rows of logits the one made for the position is the session's.
        self._ids = np.empty(64, np.int32)
        self._one = np.empty(1, np.int32)
        self._rows = (np.empty((1, vocab), np.float32), np.empty((1, vocab), np.float32))
        self._rows_at = [-1, -1]
        self._digests: dict[int, str] = {}
        self._active = False
        self._generations = 0
        self._draft: Draft | None = None
        self._batch: Any = None  # the scratch of the batch that the session is part of just now
        self._failure: K3Error | None = None
        self._resume: str | None = None
        self._meta: Any = None
        self._trace: Trace | None = None
        self._times: Times | None = None
        self._counts = Counts()
        self._jobs: list[SaveJob] = []
        self.sampling: Sampling | None = None
        self._policy = policy
        self._points: Points = NO_POINTS
        self._due = policy.due(0)  # the position from which on an automatic mark is made
        self._marks: Alive[Mark] = Alive()
        self._origin: Origin | None = None
        self._birth = next_serial()
        model._register(cast("Session", self))
        _alive.add(self)
        self._closed = False

    # ------------------------------------------------------------------------------------------
    # what it is
    # ------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model."""
        return self._model

    @property
    def position(self) -> int:
        """Tokens that the session holds; the next one gets this position."""
        self._check_open()
        return self._here()

    @property
    def capacity(self) -> int:
        """The most tokens that the session may hold."""
        return self._capacity

    @property
    def latent(self) -> str:
        """How the latent cache is stored: "fp32" or "bf16"."""
        return self._latent

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A copy of the ids so far, int32[position]; -1 where embeddings were given or a snapshot left ids out."""
        self._check_open()
        return self._ids[: self._here()].copy()

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """The logits for the next token, float32[vocab], read-only; None before the first token."""
        self._check_open()
        row = self._logits()
        if row is not None:
            row = row.copy()
            row.flags.writeable = False
        return row

    @property
    def layers(self) -> list[Any]:
        """One ``K3CpuFallbackState`` per layer: the state that it carries from token to token."""
        self._check_open()
        if self._draft is not None:
            self._draft.settle()
        return self._timeline.layers  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of state: recurrent matrices, conv windows and latent pages."""
        self._check_open()
        return int(self._timeline.nbytes)

    @property
    def resume(self) -> str | None:
        """After a load or restore: "exact" where build, instruction set and device agree, else "tolerance"."""
        return self._resume

    @property
    def meta(self) -> Any:
        """The ``meta`` of the snapshot that the session was loaded from."""
        return self._meta

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # ------------------------------------------------------------------------------------------
    # passes
    # ------------------------------------------------------------------------------------------

    def step(self, token: int, *, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Take in one token.

        Parameters
        ----------
        token
            Its id.
        out
            float32[vocab] to fill instead of a new array.

        Returns
        -------
        float32[vocab]
            The logits for the token after it; the caller's own.

        Raises
        ------
        InvalidTokenError, CapacityError, PassCancelled, NonFiniteError, SessionBusyError, ClosedError
        """
        with self._owner:
            try:
                self._begin(cancellable=True)
                self._one[0] = token_id(token, self._vocab)
                if out is not None:
                    out_row(out, self._vocab)
                position = self._timeline.position
                if position >= self._capacity:
                    raise self._full(1)
                if position == self._ids.size:
                    self._grow_ids(position + 1)
                self._ids[position] = self._one[0]
                row = self._forward(self._one)
                if out is None:
                    return row.copy()
                out[:] = row
                return out
            finally:
                self._active = False

    def prefill(
        self,
        prompt: Sequence[int] | npt.NDArray[Any],
        *,
        chunk: int | None = None,
        progress: ProgressArgument = False,
    ) -> npt.NDArray[np.float32]:
        """Take in a prompt, in chunks.  The result is the same to the bit as that of single steps.

        Parameters
        ----------
        prompt
            Token ids [n], or embeddings float32[n, hidden_size] in their place.
        chunk
            Rows of one pass, from 1 to `Model.chunk_rows`, which is the default; no result depends on it.
        progress
            True, or a function called as ``progress("prefill", tokens done, tokens)`` after each chunk.

        Returns
        -------
        float32[vocab]
            The logits for the token after the prompt.

        Raises
        ------
        PassCancelled, KeyboardInterrupt
            The session stands at the end of the last finished chunk and can go on.
        InvalidTokenError, CapacityError, NonFiniteError, SessionBusyError, ClosedError
        """
        report = Progress(progress)
        with self._owner:
            try:
                self._begin(cancellable=True)
                ids, embeddings = prompt_rows(prompt, self._vocab, self._model.config.hidden_size)
                most = self._model.chunk_rows
                if chunk is None:
                    chunk = most
                elif isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= most:
                    raise ConfigError(f"chunk is {chunk!r}; expected a number of rows from 1 to {most}")
                n, start = ids.size, self._timeline.position
                if start + n > self._capacity:
                    raise self._full(n)
                if start + n > self._ids.size:
                    self._grow_ids(start + n)
                self._ids[start : start + n] = ids
                for i in range(0, n, chunk):
                    part = ids[i : i + chunk]
                    rows = None if embeddings is None else embeddings[i : i + chunk]
                    if rows is not None:
                        for j, row in enumerate(rows, start + i):
                            self._digests[j] = xxhash.xxh3_128_hexdigest(row)
                    last = self._forward(part, rows)
                    report("prefill", i + part.size, n)
                if self._policy.prefill:
                    self._keep_point("prefill")
                return last.copy()
            finally:
                self._active = False
                report.close()

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        tokenizer: TokenizerLike | None = None,
        logprobs: int = 0,
    ) -> Iterator[Generated]:
        """Continue with tokens of the model's own.

        A token is chosen, stepped, then yielded, stop tokens too: breaking off, saving, loading and generating again
        repeats nothing and loses nothing.

        Parameters
        ----------
        max_tokens
            None goes on until a stop or the capacity.
        sampling
            None takes that of the last generation or snapshot, else the checkpoint's ``generation_config.json``.
        stop
            Strings that end the text; they are not part of it.
        tokenizer
            An object with ``encode`` and ``decode``, in place of the checkpoint's own.
        logprobs
            How many of the most probable tokens are told with each: ``Generated.top``.

        Yields
        ------
        Generated
            token, position, text, logprob, finish_reason, seconds, top.

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     _ = s.prefill(model.tokenizer.encode("ROMEO.\\n"))
        ...     sum(1 for r in s.generate(8, sampling=k3.Sampling(seed=1)))
        8
        """
        self._check_open()
        return generate(self, max_tokens, sampling, stop, tokenizer, logprobs)

    def cancel(self) -> bool:
        """Stop the step, prefill or generation that is running in another thread, at the next layer.

        Returns whether there was one; it then ends with `PassCancelled`, and the session stands at the end of the
        last finished pass.
        """
        scratch = self._scratch
        if scratch is not None and (self._active or self._generations):
            scratch.cancel()
            batch = self._batch
            if batch is not None:
                batch.cancel()
            return True
        return False

    # ------------------------------------------------------------------------------------------
    # the end
    # ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the session's memory; further use raises `ClosedError`.  Closing twice is fine."""
        if self._closed:
            return
        with self._owner:
            self._draft = None
            for mark in self._marks:
                mark._end(f"{self.name} has been closed")
            self._points = NO_POINTS
            self._model._forget(cast("Session", self))
            self._closed = True
            self._timeline = self._scratch = self._decoder = None
            self._ids = self._one = _NO_IDS
            self._rows = (_NO_ROW, _NO_ROW)
            self._digests = {}

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(SessionBusyError):  # the exception on its way matters more than this one
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session is a handle to memory of this process and cannot be pickled; save() it and load() it there"
        )

    def __repr__(self) -> str:
        if self._closed:
            return f"<Session {self.name}: closed>"
        return f"<Session {self.name}: position {self._here()} of {self._capacity}, latent {self._latent}>"

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} has been closed; open another with model.session()")

    def _begin(self, *, failed_is_fine: bool = False, cancellable: bool = False) -> None:
        self._check_open()
        if self._draft is not None:
            self._draft.give_way()
        if self._failure is not None and not failed_is_fine:
            raise self._failed()
        if not self._generations:
            self._scratch.clear_cancel()
        self._active = cancellable

    def _generating(self, on: bool) -> None:
        if on:
            self._scratch.clear_cancel()
        self._generations += 1 if on else -1

    def _cancelled(self) -> bool:
        return bool(self._scratch.is_cancelled)

    def _failed(self) -> K3Error:
        first = self._failure
        said = f"{self.name} has failed and accepts only restore(), rewind() and close(): {first}"
        return NonFiniteError(said, first.layer) if isinstance(first, NonFiniteError) else K3Error(said)

    def _here(self) -> int:
        """The position that the caller sees: where a draft has handed out tokens, that after the last of them."""
        draft = self._draft
        return int(self._timeline.position if draft is None else draft.position)

    def _logits(self) -> npt.NDArray[np.float32] | None:
        """The row of logits that belongs to the position."""
        position = self._here()
        return next(
            (row[0] for row, at in zip(self._rows, self._rows_at, strict=True) if at == position), None
        )

    def _forward(
        self,
        ids: npt.NDArray[np.int32],
        embeddings: npt.NDArray[np.float32] | None = None,
        every: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """One pass, committed at its end; returns its row of logits, the session's own.

        ``every``, float32[rows, vocab], takes the logits of every row.
        """
        position, rows, trace = self._timeline.position, ids.size, self._trace
        taps = None
        if trace is not None:
            taps = trace.taps(self._decoder.weights, rows)
            every = trace.rows_of_logits(rows, self._vocab) if every is None else every
        spare = 1 if self._rows_at[0] == position else 0
        if every is not None:
            # From the commit on the last of them is the session's row, until it is copied.
            self._own_row(spare, every[-1:])
        self._rows_at[spare] = position + rows
        logits = self._rows[spare] if every is None else every
        began = time.perf_counter()
        try:
            bad = self._pass([self._timeline], [rows], ids, embeddings, logits, every is not None, taps)
        except PassCancelled:
            self._scratch.clear_cancel()
            raise PassCancelled(
                f"cancelled; {self.name} stands at position {position} and can go on from there", position
            ) from None
        if bad is not None:
            where = str(bad[0])
            self._failure = NonFiniteError(
                f"{where} gave a value that is not finite, in the pass that began at position "
                f"{self._timeline.position}; look for NaN or infinite weights with 'k3session check --deep'",
                where,
            )
            if trace is not None:
                trace.took(position, ids, taps, every, self._timeline, where)
            raise self._failure
        self._counts.passed(rows, time.perf_counter() - began)
        if every is not None:
            self._own_row(spare, every[-1:].copy())
        if trace is not None:
            trace.took(position, ids, taps, every, self._timeline)
        if position + rows >= self._due:
            self._keep_point("every")
        last: npt.NDArray[np.float32] = self._rows[spare][0]
        return last

    def _keep_point(self, kind: str) -> None:
        """An automatic mark at the position, where the budget has room for one."""
        self._due = self._policy.due(self._timeline.position)
        with contextlib.suppress(MemoryError):
            self._points = self._points.with_point(self._point(kind), self._policy.budget)

    def _point(self, kind: str) -> Point:
        """The point where the session stands."""
        row = self._logits()
        return self._point_at(
            self._timeline,
            None if row is None else row.copy(),
            kind,
            ids=self._ids,
            digests=self._digests,
            origin=self._origin,
        )

    def _point_at(
        self, timeline: Any, row: npt.NDArray[np.float32] | None, kind: str, **history: Any
    ) -> Point:
        """The point where a timeline stands, with its own row; what the last page takes counts unless it is full."""
        state = timeline.share()
        position, page = state.position, state.page_rows
        fixed = self._fixed_bytes
        last = (state.nbytes - fixed) // -(-position // page) if position % page else 0
        return Point(
            position,
            kind,
            state,
            row,
            nbytes=fixed + last + (0 if row is None else row.nbytes),
            home=self.name,
            **history,
        )

    def _pass(self, *what: Any) -> list[str | None] | None:
        """A pass in the session's scratch; automatic marks are never the reason that it finds no memory."""
        try:
            return self._decoder.forward(self._scratch, *what)  # type: ignore[no-any-return]
        except MemoryError:
            if not self._points:
                raise
            self._points = NO_POINTS
        return self._decoder.forward(self._scratch, *what)  # type: ignore[no-any-return]

    def _own_row(self, number: int, row: npt.NDArray[np.float32]) -> None:
        self._rows = (row, self._rows[1]) if number == 0 else (self._rows[0], row)

    def _full(self, n: int) -> CapacityError:
        return CapacityError(
            f"{self.name} holds {self._timeline.position} of {self._capacity} tokens and cannot take {n} more; "
            "save() it and load() it with a larger capacity"
        )

    def _grow_ids(self, need: int) -> None:
        grown = np.empty(max(need, 2 * self._ids.size), np.int32)
        grown[: self._ids.size] = self._ids
        self._ids = grown
