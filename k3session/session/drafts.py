# SPDX-License-Identifier: MIT
"""Drafts: tokens that are run as one pass and committed as far as the caller wants."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from k3session.errors import (
    ClosedError,
    ConfigError,
    InvalidTokenError,
    K3Error,
    NonFiniteError,
    PassCancelled,
    SessionBusyError,
)
from k3session.inputs import prompt_rows
from k3session.memory import CHUNK_ROWS
from k3session.session.branches import Branches

__all__ = ["Draft", "Drafts"]


class Draft:
    """Tokens that were run after those of a session, and are not part of it yet.

    Made by `Session.verify`, and run where its ``with`` block begins.  Until it is accepted or left, every other call
    of the session but `close` raises `SessionBusyError`; what the session is can be read.

    Attributes
    ----------
    tokens
        int32[n], read-only: the ids.
    accepted
        How many of them have become part of the session; None as long as it is open, or when none were asked for.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     _ = s.prefill([82, 79, 77])
    ...     with s.verify([69, 79, 46]) as d:
    ...         logits = d.accept(2)
    ...     s.position, d.logits.shape == (3, logits.size), bool((d.logits[1] == logits).all())
    (5, True, True)
    """

    __slots__ = ("_handed", "_rows", "_session", "_start", "accepted", "tokens")

    def __init__(self, session: Drafts, tokens: npt.NDArray[np.int32]) -> None:
        self._session = session
        self._start = 0
        # Tokens that a loop has handed to its caller one by one.  For everybody who looks they are part of the
        # session, and they are committed, all at once, before anything else is done with it.
        self._handed = 0
        self._rows: npt.NDArray[np.float32] | None = None
        self.tokens = tokens
        self.accepted: int | None = None

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """float32[n, vocab], read-only: row i is what follows token i.

        Raises
        ------
        ConfigError
            The ``with`` block has not begun.
        """
        if self._rows is None:
            raise ConfigError(
                "the draft has not been run: its logits are there inside 'with s.verify(ids) as d:'"
            )
        rows = self._rows.view()
        rows.flags.writeable = False
        return rows

    @property
    def position(self) -> int:
        """The position of the session, as long as the draft is open."""
        return self._start + self._handed

    def accept(self, n: int) -> npt.NDArray[np.float32] | None:
        """Make the first `n` tokens part of the session, and end the draft; the others leave no trace.

        The session is then what stepping these tokens would have made it, to the bit.  No weights are read: where it
        is not all of the draft, the layers' recurrences alone are run again.

        Parameters
        ----------
        n
            How many, from 0 to the length of the draft.

        Returns
        -------
        float32[vocab]
            The session's new logits, the caller's own; None where `n` is 0.

        Raises
        ------
        ConfigError
            No such number; the draft stays open.
        ClosedError
            The draft was accepted or left before, or the session is closed.
        SessionBusyError
        """
        session = self._session
        with session._owner:
            session._check_open()
            if session._draft is not self or self._handed:
                raise ClosedError(
                    f"this draft of {session.name} is not open any more: it was accepted, or its with block was left"
                )
            try:
                count = operator.index(n)
            except TypeError:
                count = -1
            if isinstance(n, bool) or not 0 <= count <= self.tokens.size:
                raise ConfigError(
                    f"n is {n!r}; expected a number of tokens from 0 to {self.tokens.size}, the length of the draft"
                )
            if count:
                session._note(self, count)
            session._commit(self, count)
            return self.logits[count - 1].copy() if count else None

    def __enter__(self) -> Self:
        try:
            self._session._run(self)
        except BaseException:  # Ctrl-C, right after the pass
            self._session._forget_draft(self)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __repr__(self) -> str:
        state = "open" if self._session._draft is self else "not open"
        return f"<Draft of {self.tokens.size} tokens for {self._session.name}: {state}>"

    # ------------------------------------------------------------------------------------------
    # for the session, which is owned by a call
    # ------------------------------------------------------------------------------------------

    def give_way(self) -> None:
        """Let another call of the session go on, with the tokens that were handed out committed."""
        if not self._handed:
            raise SessionBusyError(
                f"{self._session.name} has an open draft of {self.tokens.size} tokens: accept() it, "
                "or leave its with block first"
            )
        self._session._commit(self, self._handed)

    def leave(self) -> None:
        """End it: with the tokens that were handed out committed, without any otherwise."""
        self._session._forget_draft(self)
        with contextlib.suppress(SessionBusyError):  # whoever is in there has begun by committing them
            self.settle()

    def settle(self) -> None:
        """Commit the tokens that were handed out, for somebody who looks at the state itself."""
        if self._handed:
            with self._session._owner:
                if self._session._draft is self:
                    self.give_way()


class Drafts(Branches):
    """Verification of drafts.  See `k3session.Session`."""

    def verify(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Draft:
        """Run tokens as one pass that is not committed, to see what the model says of each of them.

        Any drafter will do; `k3session.speculative` is a whole loop around this method.

        Parameters
        ----------
        tokens
            The ids, from 1 to 128.

        Returns
        -------
        Draft
            For a ``with`` block, which runs the pass: ``d.logits`` is float32[n, vocab], row i what follows token i,
            and ``d.accept(n)`` makes the first n tokens part of the session.  Leaving the block without it changes
            nothing.

        Raises
        ------
        NonFiniteError
            Somewhere in the draft a value is not finite.  The session is as it was, and can go on.
        InvalidTokenError, CapacityError, ConfigError, PassCancelled, SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     logits = s.prefill([82, 79, 77])
        ...     draft = [int(logits.argmax()), 79, 46]
        ...     with s.verify(draft) as d:
        ...         following = d.logits.argmax(1)      # what the model itself would have taken
        ...         good = 1
        ...         while good < len(draft) and following[good - 1] == draft[good]:
        ...             good += 1
        ...         _ = d.accept(good)
        ...     s.position == 3 + good
        True
        """
        self._check_open()
        return self._draft_of(tokens)

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _draft_of(self, tokens: Any) -> Draft:
        ids, embeddings = prompt_rows(tokens, self._vocab, self._model.config.hidden_size)
        if embeddings is not None:
            raise InvalidTokenError("a draft is token ids [n]; found embeddings")
        if ids.size > CHUNK_ROWS:
            raise ConfigError(
                f"the draft has {ids.size} tokens; expected from 1 to {CHUNK_ROWS}, the rows of one pass"
            )
        ids = ids.copy()
        ids.flags.writeable = False
        return Draft(self, ids)

    def _run(self, draft: Draft) -> None:
        """The pass of a draft, which is open from then on."""
        with self._owner:
            try:
                self._begin(cancellable=True)
                ids, position = draft.tokens, self._timeline.position
                if position + ids.size > self._capacity:
                    raise self._full(ids.size)
                rows = np.empty((ids.size, self._vocab), np.float32)
                trace = self._trace
                taps = None if trace is None else trace.taps(self._decoder.weights, ids.size)
                began = time.perf_counter()
                try:
                    bad = self._decoder.forward(
                        self._scratch, [self._timeline], [ids.size], ids, None, rows, True, taps, True
                    )
                except PassCancelled:
                    self._scratch.clear_cancel()
                    raise PassCancelled(
                        f"cancelled; {self.name} stands at position {position} and can go on from there",
                        position,
                    ) from None
                if trace is not None:
                    failure = None if bad is None else str(bad[0])
                    trace.took(position, ids, taps, rows, self._timeline, failure, committed=False)
                if bad is not None:
                    raise NonFiniteError(
                        f"{bad[0]} gave a value that is not finite, in a draft of {ids.size} tokens at position "
                        f"{position}; nothing of it was committed, and {self.name} is as it was",
                        bad[0],
                    )
                self._counts.passed(ids.size, time.perf_counter() - began, aside=True)
                draft._start, draft._handed, draft._rows, draft.accepted = position, 0, rows, None
                self._draft = draft
            finally:
                self._active = False

    def _note(self, draft: Draft, n: int) -> None:
        """Write down what belongs to the first n tokens of a draft, before they count."""
        start, rows = draft._start, draft.logits
        if start + n > self._ids.size:
            self._grow_ids(start + n)
        self._ids[start : start + n] = draft.tokens[:n]
        spare = 1 if self._rows_at[0] == self._here() else 0
        self._rows_at[spare] = start + n
        self._rows[spare][0] = rows[n - 1]

    def _hand_out(self, draft: Draft) -> bool:
        """Make the next token of a draft part of what everybody sees; False where the session has gone its own way."""
        with self._owner:
            self._check_open()
            if self._draft is not draft:
                return False
            self._note(draft, draft._handed + 1)
            draft._handed += 1
            return True

    def _commit(self, draft: Draft, n: int) -> None:
        """End a draft of which the first n tokens have been written down."""
        try:
            self._decoder.accept(self._scratch, n)
        except (K3Error, MemoryError) as problem:
            if draft._handed:  # the caller has seen them
                self._failure = K3Error(f"tokens of a draft could not be committed: {problem}")
            raise
        finally:
            self._draft = None
        draft.accepted = n
        counts = self._counts
        counts.aside -= n
        if draft.tokens.size == 1:
            counts.stepped += n
        else:
            counts.prefilled += n
        if n and self._timeline.position >= self._due:
            self._keep_point("every")

    def _forget_draft(self, draft: Draft) -> None:
        """End a draft without a commit; the next pass forgets what it has kept."""
        if self._draft is draft and not draft._handed:
            self._draft = None
