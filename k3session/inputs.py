# SPDX-License-Identifier: MIT
"""What a caller hands to a session, checked before anything is done with it."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from k3session.errors import ConfigError, InvalidTokenError

__all__ = ["out_row", "prompt_rows", "token_id"]


def token_id(token: Any, vocab: int) -> int:
    """Return a token as an int, or raise InvalidTokenError."""
    try:
        value = operator.index(token)
    except TypeError:
        raise InvalidTokenError(
            f"a token is an integer below {vocab}; found {type(token).__name__}"
        ) from None
    if not 0 <= value < vocab or token is True or token is False:
        raise InvalidTokenError(
            f"token {token!r} is not in the vocabulary; expected an integer from 0 to {vocab - 1}"
        )
    return value


def prompt_rows(
    prompt: Any, vocab: int, hidden: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
    """Return the ids of a prompt, -1 for embeddings, and the embeddings where that is what it is."""
    if isinstance(prompt, str):
        raise InvalidTokenError("prefill takes token ids, not text: use model.tokenizer.encode(text)")
    try:
        array = np.asarray(prompt)
    except ValueError as problem:
        raise InvalidTokenError(f"a prompt is a sequence of token ids: {problem}") from None
    if array.size == 0:
        raise InvalidTokenError("the prompt is empty; expected at least one token")
    if array.ndim == 2 and array.dtype.kind == "f":
        rows = _embeddings(array, hidden)
        return np.full(rows.shape[0], -1, np.int32), rows
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidTokenError(
            f"a prompt is token ids [n] or embeddings float32[n, {hidden}]; "
            f"found {array.dtype} of shape {array.shape}"
        )
    outside = np.flatnonzero((array < 0) | (array >= vocab))
    if outside.size:
        at = int(outside[0])
        raise InvalidTokenError(
            f"token {int(array[at])} at {at} is not in the vocabulary; expected 0 to {vocab - 1}"
        )
    return np.ascontiguousarray(array, np.int32), None


def _embeddings(array: npt.NDArray[Any], hidden: int) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what overflows is found below
        rows = np.ascontiguousarray(array, np.float32)
    if rows.shape[1] != hidden:
        raise InvalidTokenError(f"embeddings have width {rows.shape[1]}; expected hidden_size, {hidden}")
    if not np.isfinite(rows).all():
        bad = int(np.argwhere(~np.isfinite(rows))[0][0])
        raise InvalidTokenError(f"embedding row {bad} has a value that is not finite")
    return rows


def out_row(out: Any, vocab: int) -> None:
    """Raise ConfigError unless `out` can take a row of logits."""
    if (
        not isinstance(out, np.ndarray)
        or out.dtype != np.float32
        or out.shape != (vocab,)
        or not out.flags.writeable
    ):
        found = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise ConfigError(f"out must be a writable float32 array of shape ({vocab},); found {found}")
