# SPDX-License-Identifier: MIT
"""The bytes of a snapshot: one safetensors file, written so that a crash leaves the old one or the new one.

docs/snapshot_format.md describes the format byte by byte.  Nothing here knows a model or a session: names, arrays
and a dict of facts go in, and come out checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from k3session.errors import SnapshotCorruptError, SnapshotError, SnapshotMismatchError
from k3session.progress import Progress
from k3session.safetensors_io import HEADER_LIMIT, Header, plan, read_header

__all__ = ["FORMAT", "FORMAT_VERSION", "Part", "SnapshotReader", "read_all", "serialize", "write_file"]

FORMAT = "k3session-snapshot"
FORMAT_VERSION = 1
_BLOCK = 8 << 20
_NEAR = 512 << 10  # about what a core's own cache holds
_WORTH_THREADS = 4 << 20
_ZEROS = "0" * 32
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to be written: its name, its dtype in the file, its shape, and how to get it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    get: Callable[[], npt.NDArray[Any]]


def _bytes(part: Part) -> memoryview:
    array = np.ascontiguousarray(part.get(), dtype=_NUMPY[part.dtype])
    if array.shape != part.shape:
        raise SnapshotError(f"{part.name}: expected shape {part.shape} while writing, found {array.shape}")
    return memoryview(array.reshape(-1).view(np.uint8))


def _header(parts: list[Part], facts: Mapping[str, Any]) -> tuple[bytes, int]:
    """The header with its digests, and the size of the whole file."""
    digests = {}
    for part in parts:
        digests[part.name] = xxhash.xxh3_128_hexdigest(_bytes(part))
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "facts": json.dumps(facts, sort_keys=True),
        "digests": json.dumps(digests, sort_keys=True),
        "header_digest": _ZEROS,
    }
    planned = plan(((p.name, p.dtype, p.shape) for p in parts), metadata)
    if len(planned.header) - 8 > HEADER_LIMIT:
        raise SnapshotError(
            f"meta is too large: the header would have {len(planned.header)} bytes; expected at most {HEADER_LIMIT}"
        )
    return _sealed(planned.header), planned.total


def _sealed(header: bytes) -> bytes:
    """Puts in the digest over the header itself, taken with zeros in its own place."""
    mark = b'"header_digest":"'
    at = header.rindex(mark) + len(mark)
    digest = xxhash.xxh3_128_hexdigest(header).encode()
    return header[:at] + digest + header[at + 32 :]


def serialize(parts: list[Part], facts: Mapping[str, Any]) -> bytes:
    """Return the whole file as bytes."""
    header, total = _header(parts, facts)
    out = io.BytesIO()
    out.write(header)
    for part in parts:
        out.write(_bytes(part))
    if out.tell() != total:
        raise SnapshotError(f"the snapshot came to {out.tell()} bytes; {total} were planned")
    return out.getvalue()


def write_file(
    path: str | os.PathLike[str], parts: list[Part], facts: Mapping[str, Any], progress: Progress
) -> int:
    """Write the file `path`, and return its size.

    The bytes go to a temporary file in the same folder (mode 0600), which is flushed to the disk and then renamed
    over `path`; then the folder is flushed.  Until the rename the old file is untouched.
    """
    try:
        target = Path(os.path.realpath(os.fspath(path)))
    except ValueError as problem:  # a NUL in it
        raise SnapshotError(f"{path!r}: not a path: {problem}") from None
    renamed = False
    try:
        # Opened before anything is written: a folder that cannot be flushed is found while the old file is untouched.
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_replaceable(target)
            header, total = _header(parts, facts)
            _remove_stale(target)
            temporary, fd = _temporary(target)
            try:
                done = _write(fd, memoryview(header), 0, total, progress)
                for part in parts:
                    done = _write(fd, _bytes(part), done, total, progress)
                if done != total:
                    raise SnapshotError(f"the snapshot came to {done} bytes; {total} were planned")
                os.fsync(fd)
                os.rename(temporary, target)
                renamed = True
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(fd)
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as problem:
        if isinstance(problem, SnapshotError):
            raise
        if renamed:
            raise SnapshotError(
                f"{target}: the snapshot is in place, but the folder could not be flushed to the disk: "
                f"{_reason(problem)}; a loss of power could bring back the file that was there before"
            ) from problem
        raise SnapshotError(
            f"{target}: the snapshot could not be written: {_reason(problem)}; a file of that name is as it was"
        ) from problem
    return total


def _check_replaceable(target: Path) -> None:
    """A rename would put a file in the place of a device or a pipe as well."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise SnapshotError(
            f"{target}: is {what}; expected the name of a snapshot file, new or to be replaced"
        )


def _temporary(target: Path) -> tuple[Path, int]:
    """A new file beside `target`, locked for as long as it is open: one like it without a lock is left from a crash."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.k3tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink > 0:
                return temporary, fd
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            os.close(fd)
            raise
        os.close(fd)  # another save took it for stale before it was locked


def _reason(problem: OSError) -> str:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left ({problem.strerror})"
    if problem.errno in (errno.ENOENT, errno.ENOTDIR):
        return "the folder does not exist"
    return problem.strerror or str(problem)


def _write(fd: int, data: memoryview, done: int, total: int, progress: Progress) -> int:
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        while block:
            n = os.write(fd, block)
            block = block[n:]
            done += n
        progress("save", done, total)
    return done


def _remove_stale(target: Path) -> None:
    """Removes what a killed process left of earlier saves to the same file."""
    prefix, suffix = f".{target.name}.", ".k3tmp"
    try:
        names = [n for n in os.listdir(target.parent) if n.startswith(prefix) and n.endswith(suffix)]
    except OSError:
        return
    for name in names:
        if len(name) != len(prefix) + 8 + len(suffix):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(target.parent / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(target.parent / name)
            finally:
                os.close(fd)


class SnapshotReader:
    """A snapshot opened for reading: its header is checked, its tensors not yet.

    Parameters
    ----------
    source
        A path, or the bytes of a file.

    Raises
    ------
    SnapshotCorruptError
        Not a snapshot, truncated, or altered.
    SnapshotMismatchError
        A whole snapshot of a newer format.
    """

    def __init__(self, source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> None:
        self._data: memoryview | None = None
        self._file: BinaryIO | None = None
        if isinstance(source, (bytes, bytearray, memoryview)):
            self.name = "snapshot"
            self._data = memoryview(source).cast("B")
            # read_header takes a file, and only needs the header and the size: a sparse one in memory has both.
            with os.fdopen(os.memfd_create(self.name), "w+b") as file:
                length = int.from_bytes(self._data[:8], "little")
                file.write(self._data[: min(8 + length, len(self._data))])
                file.truncate(len(self._data))
                file.flush()
                self._check(self._header_of(file))
            return
        self.name = Path(source).name
        try:
            if not stat.S_ISREG(os.stat(source).st_mode):
                raise SnapshotCorruptError(f"{os.fspath(source)}: is no ordinary file; expected a snapshot")
            self._file = open(source, "rb")  # noqa: SIM115 - closed by close()
        except SnapshotError:
            raise
        except (OSError, ValueError) as problem:
            said = getattr(problem, "strerror", None) or problem
            raise SnapshotError(f"{os.fspath(source)}: cannot be opened: {said}") from problem
        try:
            self._check(self._header_of(self._file))
        except BaseException:
            self.close()
            raise

    def _header_of(self, file: BinaryIO) -> Header:
        # By descriptor: by its path a file that a save is just replacing would be opened a second time, as another one.
        return read_header(f"/proc/self/fd/{file.fileno()}", SnapshotCorruptError, name=self.name)

    def _check(self, header: Header) -> None:
        self.tensors = header.tensors
        self.header_digest = header.metadata.get("header_digest", "")
        self.size = header.file_size
        self._start = header.data_start
        metadata = header.metadata
        if metadata.get("format") != FORMAT:
            raise SnapshotCorruptError(
                f"{self.name}: not a k3session snapshot: its metadata give the format "
                f"{metadata.get('format')!r}, expected {FORMAT!r}"
            )
        version = metadata.get("format_version", "")
        if version.isascii() and version.isdecimal() and len(version) < 10 and int(version) > FORMAT_VERSION:
            raise SnapshotMismatchError(
                f"{self.name}: written in snapshot format {version}; this k3session reads up to "
                f"{FORMAT_VERSION}: update k3session to read it",
                {"format_version": (int(version), FORMAT_VERSION)},
            )
        if version != str(FORMAT_VERSION):
            raise SnapshotCorruptError(
                f"{self.name}: the format version is {version!r}; expected {FORMAT_VERSION}"
            )
        raw = self._raw(0, self._start)
        stated = metadata.get("header_digest", "").encode()
        mark = b'"header_digest":"' + stated
        at = raw.rfind(mark) if len(stated) == 32 else -1
        if at < 0:
            raise SnapshotCorruptError(f"{self.name}: the digest of the header is missing")
        at += len(mark) - 32
        if xxhash.xxh3_128_hexdigest(raw[:at] + _ZEROS.encode() + raw[at + 32 :]).encode() != stated:
            raise SnapshotCorruptError(
                f"{self.name}: the header does not match its digest; the file has been altered"
            )
        try:
            self.facts: dict[str, Any] = json.loads(metadata["facts"])
            self.digests: dict[str, str] = json.loads(metadata["digests"])
        except (KeyError, ValueError, RecursionError) as problem:
            raise SnapshotCorruptError(
                f"{self.name}: the facts in the header cannot be read: {problem}"
            ) from None
        if not isinstance(self.facts, dict) or not isinstance(self.digests, dict):
            raise SnapshotCorruptError(f"{self.name}: the facts in the header are no named values")
        if set(self.digests) != set(self.tensors):
            raise SnapshotCorruptError(f"{self.name}: the digests in the header do not cover its tensors")
        strange = sorted(i.dtype for i in self.tensors.values() if i.dtype not in _NUMPY)
        if strange:
            raise SnapshotCorruptError(f"{self.name}: a snapshot has no tensors of dtype {strange[0]}")

    def _raw(self, begin: int, end: int) -> bytes:
        if self._data is not None:
            return bytes(self._data[begin:end])
        if self._file is None:
            raise SnapshotError(f"{self.name}: has been closed")
        self._file.seek(begin)
        return self._file.read(end - begin)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor, copied out and compared with its digest."""
        info = self.tensors[name]
        out = np.empty(info.nbytes, np.uint8)
        self.read_into(name, [out])
        return out.view(_NUMPY[info.dtype]).reshape(info.shape)

    def read_into(self, name: str, pieces: Iterable[Any]) -> None:
        """Read a tensor into buffers, one after the other as long as it is, and compare it with its digest.

        Threads may read several at once.  Each block is digested while it is in the cache.
        """
        info, state = self.tensors[name], xxhash.xxh3_128()
        at = self._start + info.begin
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for begin in range(0, len(view), _NEAR):
                block = view[begin : begin + _NEAR]
                self._fill(block, at, name)
                state.update(block)
                at += len(block)
        if at != self._start + info.end:
            raise SnapshotError(f"{self.name}: {name} has {info.nbytes} bytes; expected the buffers' size")
        if state.hexdigest() != self.digests[name]:
            raise SnapshotCorruptError(
                f"{self.name}: {name} does not match its digest; the file has been altered"
            )

    def _fill(self, block: memoryview, at: int, name: str) -> None:
        """Put the bytes from `at` on into a block."""
        if self._data is not None:
            block[:] = self._data[at : at + len(block)]
            return
        if self._file is None:
            raise SnapshotError(f"{self.name}: has been closed")
        while block:
            got = os.preadv(self._file.fileno(), [block], at)
            if got == 0:
                raise SnapshotCorruptError(f"{self.name}: the file became shorter while {name} was read")
            block, at = block[got:], at + got

    def altered(self, progress: Progress) -> Iterator[str]:
        """Yield the name of each tensor that does not match its digest, reading in blocks."""
        done = 0
        for name, info in self.tensors.items():
            state = xxhash.xxh3_128()
            for at in range(info.begin, info.end, _BLOCK):
                block = self._raw(self._start + at, self._start + min(at + _BLOCK, info.end))
                state.update(block)
                done += len(block)
                progress("verify", done, self.size - self._start)
            if state.hexdigest() != self.digests[name]:
                yield name

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_all(reader: Any, wanted: Sequence[tuple[str, Sequence[Any]]], threads: int) -> None:
    """Read tensors into buffers, as `SnapshotReader.read_into` does, by several threads where there is much to read.

    Parameters
    ----------
    reader
        A `SnapshotReader`, or what reads several files as one.
    wanted
        Name and buffers of each tensor.
    threads
        How many at most.

    Raises
    ------
    SnapshotCorruptError
        A tensor does not match its digest; the first one of the list that was found so.
    """
    todo = list(enumerate(wanted))[::-1]
    failed: dict[int, BaseException] = {}

    def work() -> None:
        while not failed:
            try:
                i, (name, pieces) = todo.pop()  # one call: no two threads get the same
            except IndexError:
                return
            try:
                reader.read_into(name, pieces)
            except BaseException as problem:  # noqa: BLE001 - raised below, in the thread that asked
                failed[i] = problem

    total = sum(reader.tensors[name].nbytes for name, _ in wanted)
    helpers = [
        threading.Thread(target=work, name="k3session-load", daemon=True)
        for _ in range(min(threads, len(todo)) - 1 if total >= _WORTH_THREADS else 0)
    ]
    started = []
    with contextlib.suppress(RuntimeError):  # no thread can be started: there are fewer then
        for helper in helpers:
            helper.start()
            started.append(helper)
    try:
        work()
    finally:
        todo.clear()
        for helper in started:
            helper.join()
    if failed:
        raise failed[min(failed)]
