# SPDX-License-Identifier: MIT
"""The loop around `Session.step`: choose, step, yield."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from k3session.errors import ConfigError, InvalidTokenError, PassCancelled
from k3session.sampling import Sampling
from k3session.score import check_top, logprobs, most_probable
from k3session.text import IncrementalDecoder, StopMatcher, TokenizerLike

if TYPE_CHECKING:
    from k3session.session.core import SessionCore

__all__ = ["Generated", "Generation", "generate"]


class Generated(NamedTuple):
    """One token of a generation, already part of the session.

    ``text`` is what can be shown now: half a character, or what may become a stop string, is held back.
    ``logprob`` is the natural logarithm of the token's probability under the model's own logits.
    ``finish_reason`` is None but for the last: "stop", "length" or "capacity".  ``seconds`` is the time since the
    token before it.  ``top`` has (id, logprob) of the most probable tokens at its place, as many as were asked for.
    """

    token: int
    position: int
    text: str
    logprob: float
    finish_reason: str | None
    seconds: float
    top: tuple[tuple[int, float], ...] = ()


class Generation:
    """What was asked of a generation, checked, and what there is to say of each token that joins the session.

    How the tokens get into the session is the business of the loop: `generate`, or `k3session.speculative`.
    """

    def __init__(
        self,
        session: SessionCore,
        max_tokens: int | None,
        sampling: Sampling | None,
        stop: str | Sequence[str],
        tokenizer: TokenizerLike | None,
        logprobs: int = 0,
    ) -> None:
        if max_tokens is not None and (
            isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1
        ):
            raise ConfigError(f"max_tokens is {max_tokens!r}; expected None or a number of at least 1")
        if sampling is None:
            sampling = session.sampling or session.model.default_sampling
        elif not isinstance(sampling, Sampling):
            raise ConfigError(f"sampling is {type(sampling).__name__}; expected k3session.Sampling")
        if sampling.seed is None and sampling.temperature > 0:
            sampling = sampling.with_seed(secrets.randbits(63))
        stop_ids = session.model.default_sampling.stop_ids if sampling.stop_ids is None else sampling.stop_ids
        if tokenizer is None:
            tokenizer = session.model.tokenizer_or_none()
        if stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, and the model's folder has none: pass tokenizer=, "
                "or use Sampling(stop_ids=...)"
            )
        self._top = check_top(logprobs, session.model.config.vocab_size, "logprobs")
        self.session = session
        self.sampling = sampling
        self.stop_ids = frozenset(stop_ids or ())
        self.left = max_tokens
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._decoder: IncrementalDecoder | None = None
        self._found: list[tuple[int, float]] = []
        self._before = 0.0

    def __enter__(self) -> Self:
        session = self.session
        if session.logits is None:
            raise _nothing()
        if self._tokenizer is not None:
            self._decoder = IncrementalDecoder(self._tokenizer, context=session.tokens[-16:].tolist())
        self._before = time.perf_counter()
        session._generating(True)
        return self

    def __exit__(self, *_: object) -> None:
        self.session._generating(False)

    def choose(
        self, logits: npt.NDArray[np.float32] | None, position: int, tokens: npt.NDArray[np.int32]
    ) -> int:
        """The token for a position, after these; `record` is the next to be called."""
        if logits is None:  # the caller has gone back to the beginning
            raise _nothing()
        token = self.sampling.choose(logits, position=position, tokens=tokens)
        ids = np.append(np.int32(token), most_probable(logits, self._top))
        self._found = list(zip(ids.tolist(), logprobs(logits, ids).tolist(), strict=True))
        return token

    def check_cancel(self, position: int) -> None:
        """Raise PassCancelled where the session was told to stop."""
        if self.session._cancelled():
            raise PassCancelled(
                f"generation was cancelled at position {position}; the session can go on from there",
                position,
            )

    def record(self, token: int, position: int) -> Generated:
        """The record of the token that was chosen last, and is now part of the session."""
        self.session.sampling = self.sampling  # what a save from here on goes on with
        matcher, decoder = self._matcher, self._decoder
        if self.left is not None:
            self.left -= 1
        text, reason = "", None
        if decoder is not None:
            # A stop token ends the text; it is not part of it.
            text = "" if token in self.stop_ids else decoder.feed(token)
            if matcher is not None:
                text, matched = matcher.feed(text)
                reason = "stop" if matched is not None else None
        if token in self.stop_ids:
            reason = "stop"
        elif reason is None and self.left == 0:
            reason = "length"
        elif reason is None and position + 1 >= self.session.capacity:
            reason = "capacity"
        if reason is not None and decoder is not None and not (matcher is not None and matcher.matched):
            rest = decoder.flush()
            text += rest if matcher is None else matcher.feed(rest)[0] + matcher.flush()
        before, self._before = self._before, time.perf_counter()
        (_, chance), *top = self._found
        return Generated(token, position, text, chance, reason, self._before - before, tuple(top))


def _nothing() -> InvalidTokenError:
    return InvalidTokenError(
        "there is nothing to continue from: call prefill() or step() with a prompt first"
    )


def generate(
    session: SessionCore,
    max_tokens: int | None,
    sampling: Sampling | None,
    stop: str | Sequence[str],
    tokenizer: TokenizerLike | None,
    logprobs: int = 0,
) -> Iterator[Generated]:
    """See `Session.generate`."""
    return _loop(Generation(session, max_tokens, sampling, stop, tokenizer, logprobs))


def _loop(generation: Generation) -> Iterator[Generated]:
    session = generation.session
    with generation:
        while True:
            position = session.position
            token = generation.choose(session.logits, position, session.tokens)
            generation.check_cancel(position)
            session.step(token)
            record = generation.record(token, position)
            yield record
            if record.finish_reason is not None:
                return
