# SPDX-License-Identifier: MIT
"""Objects that are known as long as somebody else holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Alive"]

T = TypeVar("T")
_FEW = 64


class Alive(Generic[T]):
    """A set that does not keep its members.

    Unlike `weakref.WeakSet` it runs no code when a member goes: Ctrl-C that is raised inside such code is lost, since
    nobody is there to catch it.  Members that have gone are swept out when others come.
    """

    __slots__ = ("_refs", "_sweep_at")

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}
        self._sweep_at = _FEW

    def add(self, member: T) -> None:
        """Add an object that can be referred to weakly."""
        if len(self._refs) >= self._sweep_at:
            self._refs = {k: ref for k, ref in self._refs.items() if ref() is not None}
            self._sweep_at = max(_FEW, 2 * len(self._refs))
        self._refs[id(member)] = weakref.ref(member)

    def discard(self, member: T) -> None:
        """Forget an object."""
        self._refs.pop(id(member), None)

    def __iter__(self) -> Iterator[T]:
        members = [ref() for ref in list(self._refs.values())]
        return iter([m for m in members if m is not None])
