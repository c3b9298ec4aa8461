# SPDX-License-Identifier: MIT
"""The bytes of a checkpoint's tensors, mapped read-only from their files."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3session.errors import CheckpointError

__all__ = ["ARRAY_TYPES", "Shards", "StoredTensor"]

#: How a stored dtype looks to NumPy, which has no BF16.
ARRAY_TYPES: dict[str, Any] = {
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
}


class StoredTensor(NamedTuple):
    """Where a tensor is and what it is.

    ``stored_name``, ``stored_shape`` and ``stored_nbytes`` are the file's own; ``shape`` and ``nbytes`` are what the
    model uses, shorter for a padded ``A_log``.  ``offset`` counts from the start of the file.
    """

    name: str
    stored_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    offset: int
    nbytes: int
    stored_nbytes: int
    layer: int | None
    component: str


class Unread:
    """The bytes of a tensor that are read when a part of them is asked for: ``data[start:end]``."""

    def __init__(self, shards: Shards, tensor: StoredTensor) -> None:
        self._shards, self._tensor = shards, tensor

    def __len__(self) -> int:
        return self._tensor.nbytes

    def __getitem__(self, part: slice) -> memoryview:
        start, end, _ = part.indices(self._tensor.nbytes)
        count = max(0, end - start)
        return memoryview(self._shards.read(self._tensor.file, self._tensor.offset + start, count))


class Shards:
    """Read-only mappings, one per file, made when first asked for.

    With `touched` false no byte is looked at through them: values are read by calls, which can fail, and take no memory
    of the process beside their own.
    """

    def __init__(self, sizes: dict[Path, int]) -> None:
        self._sizes = sizes
        self._maps: dict[Path, mmap.mmap] = {}
        self._handles: dict[Path, int] = {}
        self._whole: dict[Path, tuple[npt.NDArray[np.uint8], int]] = {}
        self.touched = True

    def leave_untouched(self) -> None:
        """Look at no mapping from here on; files that are mapped stay open for reads by calls.

        Raises
        ------
        CheckpointError
            A file cannot be opened any more.
        """
        self.touched = False
        for file in self._maps:
            try:
                self._handles[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{file.name}: cannot be opened: {error.strerror or error}.") from error

    def map(self, file: Path) -> mmap.mmap:
        """Return the mapping of `file`, whose size is to be what it was when its header was read.

        Raises
        ------
        CheckpointError
            The file cannot be opened any more, or has another size.
        """
        found = self._maps.get(file)
        if found is not None:
            return found
        try:
            with open(file, "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                if size != self._sizes[file]:
                    raise CheckpointError(
                        f"{file.name}: the file has {size} bytes now and had {self._sizes[file]} when its header "
                        "was read; expected a file that nobody writes to."
                    )
                made = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{file.name}: cannot be mapped: {error.strerror or error}.") from error
        return self._maps.setdefault(file, made)

    def read(self, file: Path, start: int, count: int) -> bytes:
        """Read some bytes without mapping `file`.

        Raises
        ------
        CheckpointError
            They cannot be read.
        """
        try:
            if file in self._handles:
                data = os.pread(self._handles[file], count, start)
            else:
                with open(file, "rb") as handle:
                    handle.seek(start)
                    data = handle.read(count)
        except OSError as error:
            raise CheckpointError(f"{file.name}: cannot be read: {error.strerror or error}.") from error
        if len(data) != count:
            raise CheckpointError(f"{file.name}: only {len(data)} of {count} bytes could be read at {start}.")
        return data

    def array(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """Return `tensor` as a read-only view of its file; unaligned where the file is."""
        kind = ARRAY_TYPES[tensor.dtype]
        count = tensor.nbytes // kind.itemsize
        return np.frombuffer(self.map(tensor.file), kind, count, tensor.offset).reshape(tensor.shape)

    def address(self, tensor: StoredTensor) -> int:
        """Return where `tensor` lies in memory, for as long as `held` or another array keeps its file mapped."""
        found = self._whole.get(tensor.file)
        if found is None:
            array = np.frombuffer(self.map(tensor.file), np.uint8)
            found = self._whole[tensor.file] = array, int(array.__array_interface__["data"][0])
        return found[1] + tensor.offset

    def held(self) -> list[npt.NDArray[np.uint8]]:
        """Return an array over each file that `address` has looked into."""
        return [array for array, _ in self._whole.values()]

    def read_in_large_pages(self, spans: Sequence[tuple[int, int]]) -> None:
        """Have what is read from the disk for these (address, bytes) come in pages of the largest size.

        Large pages need few faults, and are read faster from then on.  What the page cache has already stays as it is.
        """
        for file, (array, base) in self._whole.items():
            inside = sorted((a - base, a - base + n) for a, n in spans if 0 <= a - base < array.size)
            merged: list[list[int]] = []
            for start, end in inside:
                start -= start % mmap.PAGESIZE
                if merged and start <= merged[-1][1]:
                    merged[-1][1] = max(end, merged[-1][1])
                else:
                    merged.append([start, end])
            for start, end in merged:
                with contextlib.suppress(OSError):  # a kernel without them
                    self._maps[file].madvise(mmap.MADV_HUGEPAGE, start, end - start)

    def values(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """Return `tensor` to be read now: as `array`, or a copy where mappings are not to be touched."""
        if self.touched:
            return self.array(tensor)
        data = self.read(tensor.file, tensor.offset, tensor.nbytes)
        return np.frombuffer(data, ARRAY_TYPES[tensor.dtype]).reshape(tensor.shape)

    def mappings(self) -> list[tuple[Path, int, int]]:
        """Path, address and size of each mapped file."""
        found = []
        for file, made in self._maps.items():
            at = np.frombuffer(made, np.uint8).__array_interface__["data"][0] if len(made) else 0
            found.append((file, int(at), len(made)))
        return found

    def bytes(self, tensor: StoredTensor) -> memoryview | Unread:
        """Return the bytes of `tensor` as the file holds them."""
        if not self.touched:
            return Unread(self, tensor)
        return memoryview(self.map(tensor.file))[tensor.offset : tensor.offset + tensor.nbytes]

    def advise(self, how: int) -> None:
        """Give the kernel one of the ``mmap.MADV_`` hints for all mapped files."""
        for mapped in self._maps.values():
            mapped.madvise(how)

    def close(self) -> None:
        """Let go of the mappings; those that arrays still look into go when the arrays do."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)
        maps, self._maps = self._maps, {}
        self._whole = {}
        for made in maps.values():
            try:
                made.close()
            except BufferError:
                # An array of the caller still uses it: the last such array unmaps the file.
                continue
