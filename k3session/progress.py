# SPDX-License-Identifier: MIT
"""Progress of long work: silent, a bar on the terminal, or the caller's function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, TypeAlias

__all__ = ["Progress", "ProgressArgument"]

#: What a ``progress=`` argument takes: False, True, or a function of (event, current, total).
ProgressArgument: TypeAlias = "bool | Callable[[str, int, int], object] | Progress"

_INTERVAL = 0.1
_WIDTH = 30


class Progress:
    """Calls ``report(event, current, total)``; an exception of the caller's function propagates.

    Parameters
    ----------
    progress
        False reports nothing.  True draws a bar on stderr, and only where that is a terminal.  A
        function is called as ``progress(event, current, total)`` each time; `current` equals
        `total` exactly once per event, at its end.
    stream
        Where the bar goes, for tests.

    Raises
    ------
    TypeError
        `progress` is neither a bool nor callable.
    """

    __slots__ = ("_call", "_drawn", "_last", "_stream")

    def __init__(self, progress: ProgressArgument = False, *, stream: TextIO | None = None) -> None:
        self._call: Callable[[str, int, int], object] | None = None
        self._stream: TextIO | None = None
        self._drawn = ""
        self._last = 0.0
        if progress is True:
            out = sys.stderr if stream is None else stream
            # sys.stderr is None under pythonw and in some daemons.
            self._stream = out if out is not None and out.isatty() else None
        elif progress is False:
            pass
        elif callable(progress):
            self._call = progress
        else:
            raise TypeError(
                f"progress is {type(progress).__name__}; expected True, False or a function of "
                "(event, current, total)"
            )

    def __bool__(self) -> bool:
        """Whether anything is listening."""
        return self._call is not None or self._stream is not None

    def __call__(self, event: str, current: int, total: int) -> None:
        """Report that `current` of `total` units of `event` are done."""
        if self._call is not None:
            self._call(event, current, total)
        elif self._stream is not None:
            self._draw(self._stream, event, current, total)

    def _draw(self, stream: TextIO, event: str, current: int, total: int) -> None:
        now = time.monotonic()
        done = current >= total
        if not done and self._drawn and now - self._last < _INTERVAL:
            return
        self._last = now
        part = current / total if total else 1.0
        filled = round(_WIDTH * part)
        line = f"{event} [{'#' * filled}{'.' * (_WIDTH - filled)}] {part:4.0%}"
        pad = " " * max(0, len(self._drawn) - len(line))
        stream.write(f"\r{line}{pad}" + ("\n" if done else ""))
        stream.flush()
        self._drawn = "" if done else line

    def close(self) -> None:
        """End a line that stands half drawn."""
        if self._stream is not None and self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = ""
