# SPDX-License-Identifier: MIT
"""Every error that k3session raises on purpose.

All derive from :class:`K3Error` and, so that ordinary ``except`` clauses work, from the
builtin that fits.  A message says what was expected, what was found and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "BatchError",
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "DeviceMemoryError",
    "InvalidTokenError",
    "K3Error",
    "NonFiniteError",
    "PassCancelled",
    "RewindError",
    "SessionBusyError",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotMismatchError",
]


class K3Error(Exception):
    """Base class of every error of this package."""


class ConfigError(K3Error, ValueError):
    """A configuration value, an option or a combination of options that cannot be used."""


class CheckpointError(K3Error, ValueError):
    """A checkpoint folder that cannot be used.

    ``problems`` lists every problem that was found, each one a sentence.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class SnapshotError(K3Error, OSError):
    """A snapshot could not be written, read or used."""


class SnapshotCorruptError(SnapshotError):
    """The bytes of a snapshot are not what was written: truncated, altered, or not a snapshot."""


class SnapshotMismatchError(SnapshotError, ValueError):
    """A whole snapshot that belongs to something else: another model, other weights or options.

    ``differences`` maps the name of each field that differs to ``(in the snapshot, here)``.
    """

    def __init__(self, message: str, differences: dict[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(message)
        self.differences: dict[str, tuple[Any, Any]] = dict(differences or {})


class CapacityError(K3Error, IndexError):
    """The session holds as many tokens as its capacity allows; nothing was changed."""


class RewindError(K3Error, ValueError):
    """A position that cannot be reached again, or not with as few tokens of replay as the caller allows.

    ``nearest`` is the closest position at or before it that the same call would reach; ``cost`` is the number of
    tokens that would have to be computed again to reach the one asked for, or None where no number is enough.
    """

    def __init__(self, message: str, nearest: int | None = None, cost: int | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.cost = cost


class SessionBusyError(K3Error, RuntimeError):
    """The session is in use by another thread, or inside a call of its own."""


class ClosedError(K3Error, ValueError):
    """A model or session was used after it had been closed."""


class NonFiniteError(K3Error, ArithmeticError):
    """A NaN or an infinity appeared; ``layer`` names the first sub-layer that produced one."""

    def __init__(self, message: str, layer: str = "") -> None:
        super().__init__(message)
        self.layer = layer


class DeviceError(K3Error, RuntimeError):
    """The device that was asked for cannot be used, or failed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has too little memory."""


class PassCancelled(K3Error):
    """A pass was cancelled; the session stands at ``position`` and can go on from there."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class BatchError(K3Error, RuntimeError):
    """Some sessions of a batch failed; ``results`` holds a row or an exception for each, in order."""

    def __init__(self, message: str, results: Sequence[Any]) -> None:
        super().__init__(message)
        self.results: list[Any] = list(results)


class InvalidTokenError(K3Error, ValueError):
    """A token id outside the vocabulary, or something that is no token id."""
