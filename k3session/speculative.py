# SPDX-License-Identifier: MIT
"""Speculation: a drafter guesses the next tokens, and the model looks at all of them in one pass.

What comes out is what `Session.generate` gives, token for token: a draw depends on the seed, the position and the
logits alone, so a guess is kept where it is the token that the model draws there, and its own draw takes the place of
the first that is not.  A drafter changes how long it takes, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3session.errors import ConfigError, InvalidTokenError, NonFiniteError
from k3session.generation import Generated, Generation
from k3session.inputs import token_id
from k3session.marks import Mark
from k3session.memory import CHUNK_ROWS
from k3session.sampling import Sampling
from k3session.session import Session
from k3session.session.drafts import Draft
from k3session.text import TokenizerLike

__all__ = ["Drafter", "NgramDrafter", "SessionDrafter", "Speculation", "speculate"]


class Drafter(Protocol):
    """Whatever guesses tokens.

    A drafter that has a method ``begin(sampling)`` is told, before its first draft, how tokens are chosen.
    """

    def draft(self, tokens: npt.NDArray[np.int32], n: int, /) -> Sequence[int] | npt.NDArray[Any]:
        """Return what may come after `tokens`, int32[position], at most `n` ids; none where there is no good guess."""
        ...


class Speculation(Iterator[Generated]):
    """A speculation under way, as `speculate` returns it: an iterator of `Generated` that counts."""

    def __init__(self, session: Session, generation: Generation, drafter: Drafter, draft: int) -> None:
        # The counts are a list that the loop knows: were it this object, the two would keep each other alive, and the
        # session would be busy generating until somebody collects garbage.
        self._counts = [0, 0, 0]
        self._records = _loop(session, generation, drafter, draft, self._counts)

    @property
    def passes(self) -> int:
        """Passes of the model."""
        return self._counts[0]

    @property
    def drafted(self) -> int:
        """Tokens that the drafter guessed and a pass looked at."""
        return self._counts[1]

    @property
    def accepted(self) -> int:
        """Those of them that became part of the session."""
        return self._counts[2]

    def __next__(self) -> Generated:
        return next(self._records)

    def close(self) -> None:
        """Stop; the session stands after the last token that was yielded."""
        self._records.close()


def speculate(
    session: Session,
    drafter: Drafter,
    max_tokens: int | None = None,
    *,
    sampling: Sampling | None = None,
    draft: int = 8,
    stop: str | Sequence[str] = (),
    tokenizer: TokenizerLike | None = None,
    logprobs: int = 0,
) -> Speculation:
    """Continue a session with tokens of its model's own, several of them from one pass where the drafter guesses well.

    The tokens are those of `Session.generate` with the same arguments, greedy and sampled.  Each is part of the
    session when it is yielded, and none after it is: breaking off, saving and going on loses nothing.

    Parameters
    ----------
    session
        Has its prompt.
    drafter
        `NgramDrafter`, `SessionDrafter`, or any object with ``draft(tokens, n)``; see `Drafter`.
    draft
        The most tokens that the drafter is asked for at once, from 1 to 127; what it gives beyond is left out.
    max_tokens, sampling, stop, tokenizer, logprobs
        As in `Session.generate`.

    Yields
    ------
    Generated
        token, position, text, logprob, finish_reason, seconds, top.

    Raises
    ------
    InvalidTokenError
        The drafter gave something that is no token of the vocabulary, or there is no prompt.
    ConfigError, PassCancelled, NonFiniteError, SessionBusyError, ClosedError

    Examples
    --------
    >>> import k3session as k3
    >>> from k3session.speculative import NgramDrafter, speculate
    >>> with k3.Model.open() as model, model.session() as s:
    ...     _ = s.prefill(model.tokenizer.encode("ROMEO.\\nO, O, O, O, "))
    ...     loop = speculate(s, NgramDrafter(), 12, sampling=k3.Sampling(temperature=0))
    ...     sum(1 for r in loop), loop.passes <= 12, loop.accepted <= loop.drafted
    (12, True, True)
    """
    if not isinstance(session, Session):
        raise ConfigError(f"session is {type(session).__name__}; expected k3session.Session")
    if not callable(getattr(drafter, "draft", None)):
        raise ConfigError(
            f"drafter is {type(drafter).__name__}; expected an object with a method draft(tokens, n)"
        )
    if isinstance(draft, bool) or not isinstance(draft, int) or not 1 <= draft < CHUNK_ROWS:
        raise ConfigError(f"draft is {draft!r}; expected a number of tokens from 1 to {CHUNK_ROWS - 1}")
    session._check_open()
    if isinstance(drafter, SessionDrafter) and drafter.session._vocab != session._vocab:
        raise ConfigError(
            f"the drafter's model has a vocabulary of {drafter.session._vocab} tokens, and the session's has "
            f"{session._vocab}; expected the same tokens in both"
        )
    generation = Generation(session, max_tokens, sampling, stop, tokenizer, logprobs)
    begin = getattr(drafter, "begin", None)
    if begin is not None:
        begin(generation.sampling)
    return Speculation(session, generation, drafter, draft)


def _loop(
    session: Session, generation: Generation, drafter: Drafter, draft: int, counts: list[int]
) -> Generator[Generated, None, None]:
    chosen: int | None = None
    with generation:
        while True:
            position, tokens = session.position, session.tokens
            if chosen is None:
                chosen = generation.choose(session.logits, position, tokens)
            generation.check_cancel(position)
            tokens = np.append(tokens, np.int32(chosen))
            guesses = _guesses(session, generation, drafter, draft, tokens)
            run = session._draft_of([chosen, *guesses])
            try:
                if guesses and _ran(run):
                    counts[1] += len(guesses)
                    if not session._hand_out(run):
                        chosen = None
                        continue
                else:
                    guesses = []
                    session.step(chosen)
                counts[0] += 1
                good = 0
                while True:
                    record = generation.record(chosen, position)
                    chosen = None
                    yield record
                    if record.finish_reason is not None:
                        return
                    if good == len(guesses) or session._draft is not run:
                        break  # all of it was good, or the caller has done something else with the session
                    position = run.position
                    chosen = generation.choose(run.logits[good], position, session.tokens)
                    if chosen != guesses[good]:
                        break
                    generation.check_cancel(position)
                    if not session._hand_out(run):
                        chosen = None
                        break
                    good += 1
                    counts[2] += 1
            finally:
                run.leave()


def _ran(run: Draft) -> bool:
    """Run a draft; False where a guess, which might never have been taken, gives something that is not finite."""
    try:
        run.__enter__()
    except NonFiniteError:
        return False
    return True


def _guesses(
    session: Session,
    generation: Generation,
    drafter: Drafter,
    draft: int,
    tokens: npt.NDArray[np.int32],
) -> list[int]:
    """What a drafter gives, checked; nothing where what it gives could not be used."""
    room = min(draft, session.capacity - tokens.size)
    if generation.left is not None:
        room = min(room, generation.left - 1)
    if room < 1 or int(tokens[-1]) in generation.stop_ids:
        return []
    given = drafter.draft(tokens, room)
    try:
        ids = [token_id(t, session._vocab) for t in itertools.islice(given, room)]
    except (TypeError, InvalidTokenError) as problem:
        raise InvalidTokenError(
            f"{type(drafter).__name__}.draft() must give token ids; what it gave cannot be used: {problem}"
        ) from None
    # After a stop token there is nothing.
    return ids[: next((i + 1 for i, t in enumerate(ids) if t in generation.stop_ids), room)]


class NgramDrafter:
    """Guesses that what came after the last few tokens when they were last there comes after them again.

    It costs next to nothing, and does well where a text quotes itself: code, lists, summaries, corrections.

    Parameters
    ----------
    longest
        How many of the last tokens are looked for at first; where they were not there before, one less, down to one.

    Examples
    --------
    >>> import numpy as np
    >>> NgramDrafter().draft(np.array([5, 6, 7, 8, 1, 5, 6], np.int32), 3)
    [7, 8, 1]
    """

    def __init__(self, longest: int = 4) -> None:
        if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
            raise ConfigError(f"longest is {longest!r}; expected a number of tokens of at least 1")
        self._longest = longest
        self._seen = np.empty(0, np.int32)
        self._after: dict[
            tuple[int, ...], int
        ] = {}  # some tokens in a row -> where the one after them was last

    def draft(self, tokens: npt.NDArray[np.int32], n: int, /) -> list[int]:
        """Return up to `n` ids that may come after `tokens`, int32[position]."""
        self._learn(tokens)
        size = tokens.size
        last = tuple(tokens[-self._longest :].tolist())
        for length in range(len(last), 0, -1):
            at = self._after.get(last[-length:])
            if at is not None:
                ids: list[int] = []
                for i in range(at, at + n):  # a guess may go on with what it has guessed itself
                    token = int(tokens[i]) if i < size else ids[i - size]
                    if token < 0:
                        break
                    ids.append(token)
                return ids
        return []

    def _learn(self, tokens: npt.NDArray[np.int32]) -> None:
        known = self._seen.size
        if known > tokens.size or not np.array_equal(tokens[:known], self._seen):
            self._after, known = {}, 0
        first = max(0, known - self._longest)
        ids = tokens[first:].tolist()
        for at in range(max(1, known) - first, len(ids)):
            for length in range(1, min(self._longest, at) + 1):
                if ids[at - length] < 0:
                    break  # a position without a token
                self._after[tuple(ids[at - length : at])] = at + first
        self._seen = tokens.copy()


class SessionDrafter:
    """Guesses with another session, of a smaller model with the same vocabulary.

    The session follows the one that is continued: it takes in what became part of that, and goes back behind guesses
    that did not.  It draws as the other one does, with the same seed, so that two models that agree draw alike.
    Where there are embeddings it cannot follow, and guesses nothing.

    Parameters
    ----------
    session
        May be empty, or hold any tokens; ``marks=False`` is enough for it.  It is the drafter's from now on, and the
        caller's to close.
    sampling
        How guesses are drawn; None is as the tokens are, without the processor, which is meant for those alone.
    """

    def __init__(self, session: Session, sampling: Sampling | None = None) -> None:
        if not isinstance(session, Session):
            raise ConfigError(f"session is {type(session).__name__}; expected k3session.Session")
        self.session = session
        self._given = sampling
        self._sampling = sampling if sampling is not None else Sampling(temperature=0)
        self._mark: Mark | None = None

    def begin(self, sampling: Sampling) -> None:
        """Be told how the tokens are chosen."""
        if self._given is None:
            self._sampling = replace(sampling, processor=None)

    def draft(self, tokens: npt.NDArray[np.int32], n: int, /) -> list[int]:
        """Return up to `n` ids that may come after `tokens`, int32[position]."""
        session, sampling = self.session, self._sampling
        n = min(n, session.capacity - tokens.size + 1)
        if n < 1 or (tokens < 0).any():
            return []
        session.set_tokens(
            tokens
        )  # from where it stands, where all guesses were right, or else from the mark
        if self._mark is not None:
            self._mark.close()
        self._mark = session.mark()
        ids: list[int] = []
        while True:
            position = session.position
            logits = session.logits
            if logits is None:
                return ids
            ids.append(sampling.choose(logits, position=position, tokens=session.tokens))
            if len(ids) == n:
                return ids
            session.step(ids[-1])
