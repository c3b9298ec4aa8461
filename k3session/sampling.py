# SPDX-License-Identifier: MIT
"""Choosing the next token from a row of logits.

A draw depends on the seed, the position and the logits, and on nothing else: there is no generator whose state
would have to be saved, and a session that is restored, rewound or run in a batch draws what it would have drawn.
"""

from __future__ import annotations

import json
import math
import numbers
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from k3session.errors import CheckpointError, ConfigError

__all__ = ["Processor", "Sampling", "read_generation_config"]

#: Called with the ids so far and the logits (its own copy); returns the logits to sample from.
Processor = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose a token.  The steps run in the order of the fields.

    Parameters
    ----------
    logit_bias
        Added to the logits of these ids; ``-inf`` forbids one.
    repetition_penalty
        Logits of ids that the session holds already are divided by it where positive, multiplied where negative;
        1 is off.
    processor
        ``(ids, logits) -> logits``, before temperature.  It gets a copy and may change it.  It is not saved in a
        snapshot.
    temperature
        Logits are divided by it; 0 takes the largest logit, the lowest id among equals.
    top_k
        Keep the k largest; 0 is off.
    top_p
        Keep the most probable until their sum reaches p; 1 is off.
    min_p
        Keep those at least this fraction as probable as the best; 0 is off.
    seed
        An integer below 2^64; None draws one when generation starts, which is then recorded with the session.
    stop_ids
        Ids after which generation ends; None means those of the model.

    Examples
    --------
    >>> import numpy as np
    >>> Sampling(temperature=0).choose(np.array([0.5, 2.0, 1.0], np.float32), position=7)
    1
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    processor: Processor | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check(
            "temperature",
            self.temperature,
            "a finite number of at least 0",
            _real(self.temperature) and self.temperature >= 0,
        )
        _check("top_k", self.top_k, "an integer of at least 0", _integer(self.top_k) and self.top_k >= 0)
        _check(
            "top_p", self.top_p, "a number above 0 and at most 1", _real(self.top_p) and 0 < self.top_p <= 1
        )
        _check("min_p", self.min_p, "a number from 0 to 1", _real(self.min_p) and 0 <= self.min_p <= 1)
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, "a finite number above 0", _real(penalty) and penalty > 0)
        seed = self.seed
        _check(
            "seed",
            seed,
            "None or an integer from 0 to 2^64 - 1",
            seed is None or (_integer(seed) and 0 <= seed < 2**64),
        )
        _check(
            "processor",
            self.processor,
            "a function of (ids, logits)",
            self.processor is None or callable(self.processor),
        )
        stop_ids = self.stop_ids
        if stop_ids is not None:
            stop_ids = tuple(stop_ids) if isinstance(stop_ids, Sequence) else (stop_ids,)
            _check("stop_ids", stop_ids, "token ids", all(_integer(i) and i >= 0 for i in stop_ids))
            object.__setattr__(self, "stop_ids", tuple(int(i) for i in stop_ids))
        bias = self.logit_bias
        sound = isinstance(bias, Mapping) and all(
            _integer(k) and isinstance(v, numbers.Real) and not math.isnan(v) and v != math.inf
            for k, v in bias.items()
        )
        _check("logit_bias", bias, "a mapping of token ids to numbers below infinity", sound)
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in bias.items()})

    def choose(
        self,
        logits: npt.NDArray[np.float32],
        *,
        position: int,
        tokens: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Return the id of the next token.

        Parameters
        ----------
        logits
            float32[vocab], not changed.
        position
            The position that the token will have.
        tokens
            int32[n], the ids so far; -1 where a position has no token.

        Raises
        ------
        ConfigError
            The bias or the processor leaves no token, or gives something that is no row of logits.
        """
        tokens = np.empty(0, np.int32) if tokens is None else tokens
        scores = self._scores(logits, tokens)
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            raise ConfigError("no token is left to choose from; look at logit_bias and at the processor")
        if self.temperature == 0:
            return best
        kept, p = self._distribution(scores)
        if kept.size == 1:
            return int(kept[0])
        total = np.cumsum(p)
        at = np.searchsorted(total, uniform(self.seed or 0, position) * total[-1], side="right")
        return int(kept[min(int(at), kept.size - 1)])

    def _scores(
        self, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        if not self.logit_bias and self.repetition_penalty == 1.0 and self.processor is None:
            return logits
        scores = np.array(logits, np.float32)
        for token, bias in self.logit_bias.items():
            if token >= scores.size:
                raise ConfigError(f"logit_bias names token {token}, but the vocabulary has {scores.size}")
            scores[token] += np.float32(bias)
        if self.repetition_penalty != 1.0:
            seen = np.unique(tokens[tokens >= 0])
            factor = np.float32(self.repetition_penalty)
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        if self.processor is not None:
            given = np.asarray(self.processor(tokens, scores), dtype=np.float32)
            if given.shape != logits.shape or np.isnan(given).any() or np.isposinf(given).any():
                raise ConfigError(
                    f"the logits processor returned shape {given.shape}; expected {logits.shape}, "
                    "with finite numbers or -inf"
                )
            scores = given
        return scores

    def _distribution(
        self, scores: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Ids that may be chosen, ascending, with their weights."""
        # Less the largest first: what is divided by a tiny temperature may overflow to -inf, never to inf.
        z = scores.astype(np.float64)
        with np.errstate(over="ignore"):
            z = (z - z.max()) / self.temperature
        kept = np.arange(z.size)
        if 0 < self.top_k < z.size:
            # A stable sort makes the lowest id win among equals, as everywhere.
            kept = np.sort(np.argsort(-z, kind="stable")[: self.top_k])
        p = np.exp(z[kept])
        if self.top_p < 1.0:
            order = np.argsort(-p, kind="stable")
            reached = np.cumsum(p[order]) / p.sum()
            count = int(np.searchsorted(reached, self.top_p)) + 1
            chosen = np.sort(order[:count])
            kept, p = kept[chosen], p[chosen]
        if self.min_p > 0.0:
            strong = p >= self.min_p * p.max()
            kept, p = kept[strong], p[strong]
        possible = p > 0
        return kept[possible], p[possible]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can hold; without the processor, which is code."""
        d = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "processor"}
        d["logit_bias"] = {str(k): v if v > -math.inf else "-inf" for k, v in self.logit_bias.items()}
        d["stop_ids"] = list(self.stop_ids) if self.stop_ids is not None else None
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Sampling:
        """Read what `to_dict` returned."""
        known = {f.name for f in fields(cls)} - {"processor"}
        values = {k: v for k, v in d.items() if k in known}
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = {int(k): float(v) for k, v in values["logit_bias"].items()}
        return cls(**values)

    def with_seed(self, seed: int) -> Sampling:
        """Return the same with this seed."""
        return replace(self, seed=seed)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a seed and a position: the upper 53 bits of an XXH3 hash of the two."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position)) >> 11) * 2.0**-53


def read_generation_config(folder: Path, eos_ids: tuple[int, ...]) -> Sampling:
    """The defaults of a checkpoint: ``generation_config.json`` where it exists, and the stop ids of both files."""
    path = folder / "generation_config.json"
    try:
        d = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Sampling(stop_ids=eos_ids)
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"generation_config.json: cannot be read: {problem}") from problem
    if not isinstance(d, dict):
        raise CheckpointError("generation_config.json: expected an object with named values")
    names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    values = {k: v for k, v in d.items() if k in names and v is not None}
    if d.get("do_sample") is False:
        values["temperature"] = 0.0
    eos = d.get("eos_token_id")
    listed = [] if eos is None else [eos] if isinstance(eos, int) else eos
    try:
        return Sampling(stop_ids=tuple(dict.fromkeys([*listed, *eos_ids])), **values)
    except ConfigError as problem:
        raise CheckpointError(f"generation_config.json: {problem}") from problem


def _check(name: str, value: Any, expected: str, sound: bool) -> None:
    if not sound:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def _integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
