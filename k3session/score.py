# SPDX-License-Identifier: MIT
"""Log-probabilities: of one row of logits, and of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from k3session.errors import ConfigError

__all__ = ["Score", "check_top", "logprobs", "most_probable"]


def logprobs(
    logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int32] | Sequence[int]
) -> npt.NDArray[np.float64]:
    """log softmax(logits)[ids] of a row, float64[n]: in double precision where it matters."""
    top = float(logits.max())
    rest = float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    found: npt.NDArray[np.float64] = logits[ids].astype(np.float64) - top - rest
    return found


def most_probable(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int32]:
    """The ids of the `k` largest logits, int32[k], largest first; among equals the lowest id first."""
    if k == 0:
        return np.empty(0, np.int32)
    least = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > least)
    ids = np.concatenate((above, np.flatnonzero(logits == least)[: k - above.size]))
    return ids[np.lexsort((ids, -logits[ids]))].astype(np.int32)


def check_top(top: Any, vocab: int, name: str = "top") -> int:
    """Return how many tokens are asked for, or raise ConfigError."""
    if isinstance(top, bool) or not isinstance(top, (int, np.integer)) or not 0 <= top <= vocab:
        raise ConfigError(f"{name} is {top!r}; expected a number of tokens from 0 to {vocab}")
    return int(top)


@dataclass(frozen=True, slots=True)
class Score:
    """How probable the tokens of a text are.

    Entry i of each array belongs to token i: it says what the model gave for token i, knowing all before it.

    Attributes
    ----------
    tokens
        int32[n], the text.
    logprobs
        float64[n], the natural logarithm of each token's probability; NaN where nothing came before it.
    top_tokens, top_logprobs
        int32[n, top] and float64[n, top]: the most probable tokens at each place, the most probable first, among
        equals the lowest id first; -1 and NaN where nothing came before.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     _ = s.prefill(model.tokenizer.encode("ROMEO.\\n"))
    ...     good, bad = (s.score(model.tokenizer.encode(text)) for text in ("What is", "xq zz"))
    >>> good.perplexity < bad.perplexity
    True
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]
    top_tokens: npt.NDArray[np.int32] = field(repr=False)
    top_logprobs: npt.NDArray[np.float64] = field(repr=False)

    @property
    def counted(self) -> int:
        """How many tokens have a probability: all, but for a first one that nothing comes before."""
        return int(np.count_nonzero(~np.isnan(self.logprobs)))

    @property
    def total(self) -> float:
        """The log-likelihood of the text: the sum over the tokens that have a probability."""
        return float(np.nansum(self.logprobs))

    @property
    def perplexity(self) -> float:
        """exp(-total / counted); NaN where no token has a probability."""
        return math.exp(-self.total / self.counted) if self.counted else math.nan

    @property
    def bits_per_token(self) -> float:
        """-total / counted in bits; NaN where no token has a probability."""
        return -self.total / self.counted / math.log(2) if self.counted else math.nan

    def top(self, i: int) -> tuple[tuple[int, float], ...]:
        """(id, logprob) of the most probable tokens at the place of token `i`."""
        pairs = zip(self.top_tokens[i].tolist(), self.top_logprobs[i].tolist(), strict=True)
        return tuple((t, p) for t, p in pairs if t >= 0)


class ScoreSheet:
    """A `Score` in the making: rows of logits come in, in order."""

    def __init__(self, ids: npt.NDArray[np.int32], top: int) -> None:
        n = ids.size
        self._ids, self._top = ids, top
        self._logprobs = np.full(n, np.nan)
        self._top_tokens = np.full((n, top), -1, np.int32)
        self._top_logprobs = np.full((n, top), np.nan)

    def row(self, i: int, logits: npt.NDArray[np.float32]) -> None:
        """Take in the row of logits that token `i` was chosen from."""
        best = most_probable(logits, self._top)
        found = logprobs(logits, np.append(self._ids[i], best))
        self._logprobs[i] = found[0]
        self._top_tokens[i], self._top_logprobs[i] = best, found[1:]

    def result(self) -> Score:
        """The score."""
        return Score(self._ids, self._logprobs, self._top_tokens, self._top_logprobs)
