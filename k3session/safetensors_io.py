# SPDX-License-Identifier: MIT
"""Headers of safetensors files: reading them strictly, and planning new ones.

A header is untrusted input.  Everything that it claims is compared with the file before a byte
of a tensor is used, with a sentence for each way in which it can be wrong.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from k3session.config_rules import show, unique_keys
from k3session.errors import CheckpointError

__all__ = [
    "DTYPE_BITS",
    "HEADER_LIMIT",
    "Header",
    "Plan",
    "TensorInfo",
    "plan",
    "read_header",
]

#: A header larger than this is refused unread, as the safetensors library does.
HEADER_LIMIT = 100_000_000
_MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
_UNIQUE = json.JSONDecoder(object_pairs_hook=unique_keys)

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """One entry of a header; ``begin`` and ``end`` count from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A header that agrees with its file; ``data_start`` is where the data begin in the file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_size: int


class _Problem(Exception):
    """What is wrong with one file, in words; turned into the caller's error class."""


def read_header(
    path: str | os.PathLike[str], error: type[Exception] = CheckpointError, *, name: str | None = None
) -> Header:
    """Read and check the header of a safetensors file.

    Parameters
    ----------
    path
        The file.
    error
        The exception class for a file that is not whole and well formed.
    name
        What messages call the file, where that is not the end of its path.

    Returns
    -------
    Header
        All tensors, in the order of the header, with the metadata.

    Raises
    ------
    CheckpointError
        Or `error`: the message names the file, what was expected and what was found.
    """
    name = Path(path).name if name is None else name
    try:
        header = _read(path)
        # Our checks give the better sentence; the library that everyone else uses has the last word.
        with safetensors.safe_open(os.fspath(path), framework="numpy"):
            pass
        return header
    except _Problem as problem:
        raise error(f"{name}: {problem}") from None
    except OSError as problem:
        raise error(f"{name}: cannot be read: {problem.strerror or problem}.") from problem
    except safetensors.SafetensorError as problem:
        raise error(f"{name}: the safetensors library refuses the file: {problem}.") from problem


def _read(path: str | os.PathLike[str]) -> Header:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise _Problem(f"the file has {size} bytes; expected at least 8, so it is truncated.")
        if start == b"version ":
            raise _Problem("this is a Git LFS pointer, not the file; fetch it with 'git lfs pull'.")
        (length,) = struct.unpack("<Q", start)
        if length > HEADER_LIMIT:
            raise _Problem(
                f"the header claims {length} bytes; expected at most {HEADER_LIMIT}, so this is not a whole "
                "safetensors file."
            )
        if 8 + length > size:
            raise _Problem(
                f"the header ends at byte {8 + length}, the file at {size}; the file is truncated, fetch it again."
            )
        raw = file.read(length)
    if len(raw) != length:
        raise _Problem(f"only {len(raw)} of {length} header bytes could be read.")
    if not raw.startswith(b"{"):
        raise _Problem(f"the header starts with {raw[:8]!r}; expected '{{'.")
    try:
        entries = _entries(raw)
    except RecursionError:
        raise _Problem("the header is nested too deeply.") from None
    except ValueError as problem:
        raise _Problem(f"the header is not usable JSON: {problem}.") from None
    if not isinstance(entries, dict):
        raise _Problem("the header is not a JSON object.")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Problem("__metadata__ is not an object of strings.")
    data_start = 8 + length
    tensors = {name: _entry(name, entry) for name, entry in entries.items()}
    _check_extents(tensors, size - data_start, size)
    return Header(tensors, metadata, data_start, size)


def _entries(raw: bytes) -> Any:
    """The JSON of a header, in which no key may stand twice.

    Of many tensors that is told by counting, without a call for each of them: where every entry has the same three
    keys, each of these stands as often as there are entries, or something stands twice.
    """
    text = raw.decode("utf-8")
    entries = json.loads(text) if b"\\" not in raw else None  # which could spell a key another way
    if isinstance(entries, dict):
        n = len(entries) - (_METADATA in entries)
        once = all(raw.count(key) == n for key in (b'"dtype"', b'"shape"', b'"data_offsets"'))
        once = once and all(type(e) is dict and (len(e) == 3 or k == _METADATA) for k, e in entries.items())
        if once and _metadata_is_plain(text, entries):
            return entries
    return json.loads(text, object_pairs_hook=unique_keys)


def _metadata_is_plain(text: str, entries: dict[str, Any]) -> bool:
    """Whether there are no metadata, or they stand once and without a key twice; false also where that is not seen."""
    found, key = text.count(f'"{_METADATA}"'), f'"{_METADATA}":'
    if found == 0:
        return _METADATA not in entries
    if found > 1 or key not in text:
        return False
    try:
        return bool(_UNIQUE.raw_decode(text, text.index(key) + len(key))[0] == entries.get(_METADATA))
    except ValueError:
        return False


def _entry(name: str, entry: Any) -> TensorInfo:
    if type(entry) is not dict:
        raise _Problem(f"tensor {show(name)}: the entry is {show(entry)}; expected an object.")
    dtype, shape, offsets = (
        entry.get("dtype"),
        entry.get("shape"),
        entry.get("data_offsets"),
    )
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None or dtype is None:
        raise _Problem(
            f"tensor {show(name)}: dtype is {show(dtype)}; expected one of {', '.join(DTYPE_BITS)}."
        )
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise _Problem(f"tensor {show(name)}: shape is {show(shape)}; expected a list of sizes.")
    need = bits // 8
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**63:
            raise _Problem(f"tensor {show(name)}: shape is {show(shape)}; expected a list of sizes.")
        need *= size
    if (
        type(offsets) is not list
        or len(offsets) != 2
        or type(begin := offsets[0]) is not int
        or type(end := offsets[1]) is not int
        or not 0 <= begin < 2**63
        or not 0 <= end < 2**63
    ):
        raise _Problem(f"tensor {show(name)}: data_offsets is {show(offsets)}; expected [begin, end].")
    if end - begin != need:
        raise _Problem(
            f"tensor {show(name)}: {dtype} of shape {shape} takes {need} bytes, data_offsets {offsets} "
            f"span {end - begin}."
        )
    return TensorInfo(dtype, tuple(shape), begin, end)


def _check_extents(tensors: Mapping[str, TensorInfo], available: int, size: int) -> None:
    """The tensors are to cover the data exactly: no overlap, no gap, nothing missing, nothing more."""
    position = 0
    for begin, end, name in sorted((info.begin, info.end, name) for name, info in tensors.items()):
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise _Problem(f"tensor {show(name)} {what}: it begins at {begin}, expected {position}.")
        position = end
    if position > available:
        raise _Problem(
            f"the header declares {size - available + position} bytes in all, the file has {size}; "
            f"it is truncated by {position - available} bytes, fetch it again."
        )
    if position < available:
        raise _Problem(
            f"the header declares {size - available + position} bytes in all, the file has {size}; "
            f"{available - position} bytes at the end belong to no tensor."
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A file to be written: ``header`` (with its length in front), then each tensor at its offset.

    ``offsets`` maps a name to the place of its first byte in the file; ``total`` is the size of the
    whole file.
    """

    header: bytes
    offsets: dict[str, int]
    total: int


def plan(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
) -> Plan:
    """Lay out a safetensors file from (name, dtype, shape), in the order given.

    Data start at a multiple of `align`, itself one of 8.  Put the tensors with the largest elements
    first to have all of them aligned.
    """
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(metadata)
    position = 0
    places: dict[str, int] = {}
    for name, dtype, shape in tensors:
        if name in places or name == "__metadata__":
            raise ValueError(f"tensor {show(name)} is planned twice")
        nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        places[name] = position
        position += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % align)
    start = 8 + len(text)
    header = struct.pack("<Q", len(text)) + text
    return Plan(
        header,
        {name: start + place for name, place in places.items()},
        start + position,
    )
