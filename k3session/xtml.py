# SPDX-License-Identifier: MIT
"""XTML, the markup of K3's chat format: control tokens and elements, as segments of a prompt.

An element is ``<|open|>tag key="value"<|sep|>`` body ``<|close|>tag<|sep|>``, and a message element
is followed by ``<|end_of_msg|>``.  Each segment is encoded on its own: byte pairs never merge across
two, and only the four control tokens may be special.  What a user or a tool writes can therefore
never be a control token, whatever it looks like.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from k3session.errors import ConfigError

__all__ = ["Prompt", "Segment", "json_text", "json_type"]

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt, encoded on its own; ``allow_special`` where it is a control token."""

    text: str
    allow_special: bool = False


class Prompt:
    """The segments written so far, and how an element is written."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def control(self, token: str) -> None:
        self.segments.append(Segment(token, allow_special=True))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text))

    def open(self, tag: str, *attributes: tuple[str, str]) -> None:
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    @contextmanager
    def element(self, tag: str, *attributes: tuple[str, str]) -> Iterator[None]:
        self.open(tag, *attributes)
        yield
        self.close(tag)

    @contextmanager
    def message(self, role: str, *attributes: tuple[str, str]) -> Iterator[None]:
        with self.element("message", ("role", role), *attributes):
            yield
        self.control(END_OF_MSG)

    def system(self, kind: str, body: str) -> None:
        with self.message("system", ("type", kind)):
            self.text(body)


def json_text(value: Any, where: str, *, compact: bool = False) -> str:
    """Write JSON as the format has it: compact with sorted keys in declarations, spaced in arguments."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=compact)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected values that JSON can hold, but {error}") from None


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, types in _JSON_TYPES:
        if isinstance(value, types):
            return kind
    return "array"


# A bool is an int to Python, so it comes first.
_JSON_TYPES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("boolean", bool),
    ("number", (int, float)),
    ("string", str),
    ("object", dict),
)
