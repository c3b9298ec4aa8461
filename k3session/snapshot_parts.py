# SPDX-License-Identifier: MIT
"""A snapshot in parts: a head with what belongs to no layer, and a file for each range of layers.

Every process of a pipeline writes the layers that it has.  The head is written last, and names the parts by their
digests: it is what makes them a snapshot, so that a crash leaves the old head with its parts, or the new one with its.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from k3session.errors import SnapshotCorruptError, SnapshotError, SnapshotMismatchError
from k3session.progress import Progress
from k3session.snapshot_file import Part, SnapshotReader, write_file

__all__ = ["PartsReader", "merge", "open_snapshot", "part_name", "remove_parts"]

_MARKS = "x.marks."


def part_name(path: str | os.PathLike[str], number: str, layers: tuple[int, int]) -> Path:
    """The file of a range of layers, beside the head `path`; `number` is that of the save, 8 hexadecimal digits."""
    target = Path(os.path.realpath(os.fspath(path)))
    return target.with_name(f"{target.name}.{number}.{layers[0]}-{layers[1]}.part")


def remove_parts(path: str | os.PathLike[str], *, keep: Iterable[str] = (), only: Iterable[str] = ()) -> None:
    """Remove the parts of other saves of a head: of all but `keep`, or of `only` those, by the numbers of the saves."""
    target = Path(os.path.realpath(os.fspath(path)))
    kept, wanted = set(keep), set(only)
    pattern = re.compile(re.escape(target.name) + r"\.([0-9a-f]{8})\.\d+-\d+\.part")
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            found = pattern.fullmatch(name)
            if found and (found[1] in wanted if wanted else found[1] not in kept):
                with contextlib.suppress(OSError):
                    os.unlink(target.parent / name)


def open_snapshot(path: str | os.PathLike[str], parts: Sequence[str | os.PathLike[str]] = ()) -> Any:
    """Open a snapshot file, or the head of one in parts with all of them, as `SnapshotReader` does.

    Parameters
    ----------
    path
        The file, or the head.
    parts
        Where parts are that do not lie beside the head.

    Raises
    ------
    SnapshotError, SnapshotCorruptError, SnapshotMismatchError
    """
    reader = SnapshotReader(path)
    try:
        whole = reader.facts.get("part_of")
        if whole is not None:
            raise SnapshotMismatchError(
                f"{reader.name}: holds layers {reader.facts.get('layers')} of the snapshot {whole!r}; open that one",
                {"layers": (reader.facts.get("layers"), None)},
            )
        if "parts" not in reader.facts:
            if parts:
                raise SnapshotError(f"{reader.name}: is a snapshot in one file; expected no parts beside it")
            return reader
        return PartsReader(reader, Path(path), parts)
    except BaseException:
        reader.close()
        raise


class PartsReader:
    """A head and its parts, read as if they were one file.

    Parameters
    ----------
    head
        Its reader, which becomes this one's own.
    path
        The head; parts are looked for beside it.
    parts
        Paths of parts that lie elsewhere.

    Raises
    ------
    SnapshotError
        A part is missing.
    SnapshotCorruptError
        A part is not the one that was written with this head.
    """

    def __init__(
        self, head: SnapshotReader, path: Path, parts: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        self.name = head.name
        self._readers = [head]
        elsewhere = {Path(p).name: Path(p) for p in parts}
        try:
            stated = self._stated(head)
            for file, layers, digest in stated:
                where = elsewhere.pop(file, Path(os.path.realpath(path)).with_name(file))
                try:
                    reader = SnapshotReader(where)
                except SnapshotCorruptError:
                    raise
                except SnapshotError as problem:
                    raise SnapshotError(
                        f"{self.name}: its part {file}, with layers {layers[0]} to {layers[1] - 1}, is not there: "
                        f"{problem}"
                    ) from None
                self._readers.append(reader)
                if reader.header_digest != digest:
                    raise SnapshotCorruptError(
                        f"{self.name}: {file} is not the part that was written with it: its digest differs"
                    )
            if elsewhere:
                raise SnapshotError(
                    f"{self.name}: {', '.join(elsewhere)} is no part of it; expected "
                    f"{', '.join(s[0] for s in stated)}"
                )
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, Any] = {k: v for k, v in head.facts.items() if k != "parts"}
        self._of = {name: r for r in self._readers for name in r.tensors}
        names = [n for n in self._of if not n.startswith(_MARKS)]
        for mark in self.facts.get("marks") or ():
            start = f"{_MARKS}{mark.get('position') if isinstance(mark, dict) else None}."
            names += [n for n in self._of if n.startswith(start)]
        names += [n for n in self._of if n not in set(names)]
        self.tensors = {name: self._of[name].tensors[name] for name in names}
        self.digests = {name: self._of[name].digests[name] for name in names}
        self.size = sum(r.size for r in self._readers)

    def _stated(self, head: SnapshotReader) -> list[tuple[str, tuple[int, int], str]]:
        found: list[tuple[str, tuple[int, int], str]] = []
        try:
            for part in head.facts["parts"]:
                file, (first, end), digest = part["file"], part["layers"], part["header_digest"]
                if Path(file).name != file or not isinstance(digest, str):
                    raise ValueError(f"{part}")
                found.append((file, (int(first), int(end)), digest))
        except (TypeError, KeyError, ValueError) as problem:
            raise SnapshotCorruptError(f"{self.name}: its list of parts cannot be read: {problem}") from None
        return found

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor, copied out and compared with its digest."""
        return self._of[name].read(name)

    def read_into(self, name: str, pieces: Iterable[Any]) -> None:
        """Read a tensor into buffers, and compare it with its digest."""
        self._of[name].read_into(name, pieces)

    def altered(self, progress: Progress) -> Iterator[str]:
        """Yield the name of each tensor that does not match its digest."""
        for reader in self._readers:
            yield from reader.altered(progress)

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> PartsReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def merge(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] = (),
    *,
    progress: Progress | None = None,
) -> int:
    """Write a snapshot that is in parts as one file, the same as if it had been saved so, and return its size.

    Parameters
    ----------
    path
        The head.
    out
        The file to write; `Session.save` says what is promised.
    parts
        Where parts are that do not lie beside the head.

    Raises
    ------
    SnapshotError, SnapshotCorruptError, SnapshotMismatchError
        A part is missing, altered or of another snapshot, or the file cannot be written.
    """
    with open_snapshot(path, parts) as reader:
        held = [
            Part(name, info.dtype, info.shape, partial(reader.read, name))
            for name, info in reader.tensors.items()
        ]
        return write_file(out, held, reader.facts, progress or Progress())
