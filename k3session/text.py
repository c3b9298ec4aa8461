# SPDX-License-Identifier: MIT
"""Text in and out: the tokenizer, decoding while tokens arrive, and stop strings.

:class:`Tokenizer` needs the extra ``k3session[text]``.  The rest takes any object with ``encode``
and ``decode`` (:class:`TokenizerLike`) in its place.  The chat format is in :mod:`k3session.chat`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from k3session.errors import ConfigError
from k3session.tokenizer import MissingExtraError, Tokenizer, as_id

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["IncrementalDecoder", "MissingExtraError", "StopMatcher", "Tokenizer", "TokenizerLike"]


@runtime_checkable
class TokenizerLike(Protocol):
    """What may stand in the place of :class:`Tokenizer`: text to ids and back."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the ids of ``text``."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ``ids``, with U+FFFD for bytes that are not UTF-8."""
        ...


class IncrementalDecoder:
    """Turns tokens into text as they arrive, never half a character.

    A token may end inside a character.  Its first bytes are held back until the rest is there, or
    until they can no longer become a character: then U+FFFD takes their place at once.  All that
    :meth:`feed` returned, and :meth:`flush` at the end, is what ``decode`` gives for all ids.

    Parameters
    ----------
    tokenizer
        A :class:`Tokenizer`, or any object with ``encode`` and ``decode``.
    skip_special
        Whether special tokens give no text (:class:`Tokenizer` only).
    context
        The ids before the first one fed.  Their text is not returned; a character that they leave
        unfinished is, whole, as soon as it is complete.  Ids below 0 (positions without a token)
        are allowed here.

    Examples
    --------
    >>> decoder = IncrementalDecoder(Tokenizer({bytes([i]): i for i in range(256)}))
    >>> [decoder.feed(byte) for byte in "né".encode()], decoder.flush()
    (['n', '', 'é'], '')
    """

    # One token is at least one byte, or none when it is skipped: enough to find the start of a character.
    _CONTEXT = 8

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        skip_special: bool = False,
        context: Sequence[int] | npt.NDArray[np.integer[Any]] = (),
    ) -> None:
        self._by_bytes = tokenizer if isinstance(tokenizer, Tokenizer) else None
        if skip_special and self._by_bytes is None:
            raise ConfigError(
                "skip_special=True needs a k3session.text.Tokenizer; this object only has decode()"
            )
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that have been returned
        for token in context[-self._CONTEXT :]:
            if token < 0:
                self.flush()
            else:
                self.feed(token)

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, possibly none."""
        if self._by_bytes is None:
            return self._feed_by_text(as_id(token))
        if self._skip_special and self._by_bytes.is_special(token):
            return ""
        text = self._utf8.decode(self._by_bytes.token_bytes(token))
        held = self._utf8.getstate()[0]
        if held[:1] == b"\xed" and held[1:2] >= b"\xa0":
            # Half of a surrogate pair: Python waits for its third byte, but it can be no character.
            text += self.flush()
        return text

    def flush(self) -> str:
        """Return U+FFFD for a character that was left unfinished, and start afresh."""
        if self._by_bytes is not None:
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return text
        text = self._tokenizer.decode(self._window)[self._shown :] if self._window else ""
        self._window, self._shown = [], 0
        return text

    def _feed_by_text(self, token: int) -> str:
        # decode() gives no bytes: a text that ends in up to three U+FFFD (one for each byte, or
        # one for all) may still become a character, so these wait for the next token.
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        stable = len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))
        new = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if len(self._window) > 4 * self._CONTEXT:
            # Some decoders treat the first token apart (a leading space), so a few always stay.
            held = len(text) - self._shown
            self._window = self._window[-self._CONTEXT :]
            self._shown = max(0, len(self._tokenizer.decode(self._window)) - held)
        return new


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    What :meth:`feed` returns never contains a stop string, nor the beginning of one that the next
    piece could complete.  Of several stop strings the one that is complete first counts (of those,
    the longest), so that the result does not depend on how the text was cut.

    Parameters
    ----------
    stop
        One stop string or several; none at all lets everything pass.

    Examples
    --------
    >>> matcher = StopMatcher(["END"])
    >>> matcher.feed("the E"), matcher.feed("NDs")
    (('the ', None), ('', 'END'))
    """

    def __init__(self, stop: str | Iterable[str] = ()) -> None:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        for s in stops:
            if not isinstance(s, str) or not s:
                raise ConfigError(f"a stop string must be a str of one character or more, found {s!r}")
        self._stops = stops
        self._longest = max(map(len, stops), default=1)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown and the stop string that was found, if any.

        The stop string and what follows it are dropped, and so is all that is fed afterwards.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        keep = min(self._longest - 1, len(text))
        while keep and not any(s.startswith(text[-keep:]) for s in self._stops):
            keep -= 1
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the text that was held back; call it when no more will come."""
        held, self._held = self._held, ""
        return held
