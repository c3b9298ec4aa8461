# SPDX-License-Identifier: MIT
"""The loop around `Session.step`: choose, step, yield."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from k3session.errors import ConfigError, InvalidTokenError, PassCancelled
from k3session.sampling import Sampling
from k3session.text import IncrementalDecoder, StopMatcher, TokenizerLike

if TYPE_CHECKING:
    from k3session.session import Session

__all__ = ["Generated", "generate"]


class Generated(NamedTuple):
    """One token of a generation, already part of the session.

    ``text`` is what can be shown now: half a character, or what may become a stop string, is held back.
    ``logprob`` is the natural logarithm of the token's probability under the model's own logits.
    ``finish_reason`` is None but for the last: "stop", "length" or "capacity".  ``seconds`` is the time since the
    token before it.
    """

    token: int
    position: int
    text: str
    logprob: float
    finish_reason: str | None
    seconds: float


def logprob(logits: np.ndarray, token: int) -> float:
    """log softmax(logits)[token], in double precision where it matters."""
    top = float(logits.max())
    return float(logits[token]) - top - float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))


def generate(
    session: Session,
    max_tokens: int | None,
    sampling: Sampling | None,
    stop: str | Sequence[str],
    tokenizer: TokenizerLike | None,
) -> Iterator[Generated]:
    """See `Session.generate`."""
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
    matcher = StopMatcher(stop) if stop else None
    return _loop(session, max_tokens, sampling, frozenset(stop_ids or ()), tokenizer, matcher)


def _loop(
    session: Session,
    max_tokens: int | None,
    sampling: Sampling,
    stop_ids: frozenset[int],
    tokenizer: TokenizerLike | None,
    matcher: StopMatcher | None,
) -> Iterator[Generated]:
    if session.logits is None:
        raise InvalidTokenError(
            "there is nothing to continue from: call prefill() or step() with a prompt first"
        )
    decoder = (
        None if tokenizer is None else IncrementalDecoder(tokenizer, context=session.tokens[-16:].tolist())
    )
    session._generating(True)
    try:
        before = time.perf_counter()
        count = 0
        while True:
            logits = session.logits
            position = session.position
            token = sampling.choose(logits, position=position, tokens=session.tokens)
            chance = logprob(logits, token)
            if session._cancelled():
                raise PassCancelled(
                    f"generation was cancelled at position {position}; the session can go on from there",
                    position,
                )
            session.step(token)
            session.sampling = sampling  # what a save from here on goes on with
            count += 1
            text, reason = "", None
            if decoder is not None:
                # A stop token ends the text; it is not part of it.
                text = "" if token in stop_ids else decoder.feed(token)
                if matcher is not None:
                    text, matched = matcher.feed(text)
                    reason = "stop" if matched is not None else None
            if token in stop_ids:
                reason = "stop"
            elif reason is None and max_tokens is not None and count >= max_tokens:
                reason = "length"
            elif reason is None and session.position >= session.capacity:
                reason = "capacity"
            if reason is not None and decoder is not None and not (matcher is not None and matcher.matched):
                rest = decoder.flush()
                text += rest if matcher is None else matcher.feed(rest)[0] + matcher.flush()
            now = time.perf_counter()
            yield Generated(token, position, text, chance, reason, now - before)
            before = now
            if reason is not None:
                return
    finally:
        session._generating(False)
