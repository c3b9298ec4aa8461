# SPDX-License-Identifier: MIT
"""Snapshots: everything that a session is, as arrays in memory or as a file.

A snapshot belongs to one model, by fingerprint, and to nothing else: not to a device, a thread count or a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from k3session.errors import SnapshotCorruptError, SnapshotError, SnapshotMismatchError
from k3session.fingerprint import Fingerprint
from k3session.progress import Progress, ProgressArgument
from k3session.snapshot_file import FORMAT_VERSION, Part, SnapshotReader, serialize, write_file
from k3session.snapshot_parts import open_snapshot

__all__ = [
    "MARKS",
    "Head",
    "LayerSnapshot",
    "MarkSnapshot",
    "Snapshot",
    "diff_files",
    "inspect_file",
    "state_parts",
    "stated_marks",
    "verify_file",
]

_ARRAYS = ("conv", "state", "latent")
_FIXED = ("conv", "state")
MARKS = "x.marks."  # what an earlier reader passes over


def _same(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """One layer: a KDA layer has ``conv`` and ``state``, an MLA layer ``latent``; the others are None.

    ``conv`` is float32[3, K - 1, C]: the last raw projections for q, k and v, oldest first.  ``state`` is
    float32[head, key, value].  ``latent`` is [position, kv_lora + rope], float32, or uint16 that holds BF16.
    """

    conv: npt.NDArray[np.float32] | None = None
    state: npt.NDArray[np.float32] | None = None
    latent: npt.NDArray[Any] | None = None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Name -> array of those that this layer has."""
        return {n: getattr(self, n) for n in _ARRAYS if getattr(self, n) is not None}


@dataclass(frozen=True, slots=True)
class MarkSnapshot:
    """An automatic mark: the state of an earlier position of the session that a snapshot holds.

    Attributes
    ----------
    position
        Tokens that the session held there.
    kind
        Why it was kept, as in `Session.reachable`.
    logits
        float32[vocab], for the next token.
    layers
        One `LayerSnapshot` per layer, with ``conv`` and ``state`` of a KDA layer.  The latent rows of an MLA layer
        are the first `position` ones of the snapshot's own.
    """

    position: int
    kind: str
    logits: npt.NDArray[np.float32] | None
    layers: tuple[LayerSnapshot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for _, a in self.arrays())

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """The name in the file, and the array, of each tensor."""
        start = f"{MARKS}{self.position}."
        if self.logits is not None:
            yield f"{start}logits", self.logits
        for i, layer in enumerate(self.layers):
            for name, array in layer.arrays().items():
                yield f"{start}layers.{i}.{name}", array


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session at one position, independent of it from then on.

    Attributes
    ----------
    position
        Tokens that the session has taken in.
    tokens
        int32[position], -1 where embeddings were given; None when they were left out.
    logits
        float32[vocab], for the next token; None before the first one.
    layers
        One `LayerSnapshot` per layer.
    facts
        What else the file's header says: fingerprint, build, instruction set, device, dtypes, sampling, ``meta``.
    marks
        Automatic marks, in order of position, where they were asked for.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     _ = s.prefill([1, 2, 3])
    ...     snap = s.snapshot()
    ...     k3.Snapshot.from_bytes(snap.to_bytes()).position
    3
    """

    position: int
    tokens: npt.NDArray[np.int32] | None
    logits: npt.NDArray[np.float32] | None
    layers: tuple[LayerSnapshot, ...]
    facts: dict[str, Any] = field(repr=False)
    marks: tuple[MarkSnapshot, ...] = field(default=(), repr=False)

    @property
    def meta(self) -> Any:
        """What the caller gave as ``meta=``."""
        return self.facts.get("meta")

    @property
    def fingerprint(self) -> Fingerprint:
        """The model that the snapshot belongs to."""
        try:
            return Fingerprint.from_dict(self.facts["fingerprint"])
        except (KeyError, ValueError) as problem:
            raise SnapshotCorruptError(f"the snapshot names no model that can be read: {problem}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        own = sum(a.nbytes for layer in self.layers for a in layer.arrays().values())
        return own + sum(m.nbytes for m in self.marks)

    def parts(self) -> list[Part]:
        """The tensors of the file, in order."""
        parts = [
            Part(f"layers.{i}.{name}", "BF16" if a.dtype == np.uint16 else "F32", a.shape, partial(_same, a))
            for i, layer in enumerate(self.layers)
            for name, a in layer.arrays().items()
        ]
        marks = [Part(n, "F32", a.shape, partial(_same, a)) for m in self.marks for n, a in m.arrays()]
        return [*head_parts(self.tokens, self.logits), *parts, *marks]

    def to_bytes(self) -> bytes:
        """Return the bytes of the snapshot file."""
        return serialize(self.parts(), self.facts)

    def save(self, path: str | os.PathLike[str], *, progress: ProgressArgument = False) -> None:
        """Write the snapshot file; see `Session.save` for what is promised."""
        write_file(path, self.parts(), self.facts, Progress(progress))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Snapshot:
        """Read what `to_bytes` returned, or the bytes of a file; everything is checked against its digest."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"expected bytes, found {type(data).__name__}; for a file use Snapshot.open(path)"
            )
        with SnapshotReader(data) as reader:
            return cls.from_reader(reader)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a snapshot file, or the head of one in parts; no model is needed."""
        with open_snapshot(path) as reader:
            return cls.from_reader(reader)

    @classmethod
    def from_reader(
        cls, reader: SnapshotReader, marks: Collection[int] | None = None, *, states: bool = True
    ) -> Snapshot:
        """Read the tensors of an open file; of its marks all, or those at the positions given.

        Without `states` the layers stay empty: their arrays are read by who calls this.
        """
        position, count = stated_size(reader)
        stated = stated_marks(reader)
        layers: list[dict[str, Any]] = [{} for _ in range(count)]
        for name in reader.tensors:
            kind, _, rest = name.partition(".")
            number, _, part = rest.partition(".")
            if kind == "layers" and number.isdecimal() and int(number) < count and part in _ARRAYS:
                layers[int(number)][part] = reader.read(name) if states else None
            elif name not in ("tokens", "logits") and not name.startswith("x."):
                raise SnapshotCorruptError(
                    f"{reader.name}: the tensor {name!r} belongs to no part of a snapshot"
                )
        tokens = reader.read("tokens") if "tokens" in reader.tensors else None
        logits = reader.read("logits") if "logits" in reader.tensors else None
        if tokens is not None and tokens.shape != (position,):
            raise SnapshotCorruptError(f"{reader.name}: {tokens.shape} tokens for position {position}")
        held = tuple(LayerSnapshot(**d) for d in layers)
        fixed = [[n for n in _FIXED if n in d] for d in layers]
        read = tuple(
            MarkSnapshot(
                at,
                kind,
                reader.read(names["logits"]) if "logits" in names else None,
                tuple(
                    LayerSnapshot(**{n: reader.read(names[f"layers.{i}.{n}"]) for n in kept})
                    for i, kept in enumerate(fixed)
                ),
            )
            for at, (kind, names) in stated.items()
            if marks is None or at in marks
        )
        return cls(position, tokens, logits, held, reader.facts, read)


#: The tokens and the logits of a snapshot, where it has them.
Head = tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]


def head_parts(tokens: npt.NDArray[Any] | None, logits: npt.NDArray[Any] | None) -> list[Part]:
    """The parts that belong to no layer."""
    parts = []
    if tokens is not None:
        parts.append(Part("tokens", "I32", tokens.shape, lambda: tokens))
    if logits is not None:
        parts.append(Part("logits", "F32", logits.shape, lambda: logits))
    return parts


def state_parts(layers: Iterable[Any], position: int, start: str = "", *, fixed: bool = False) -> list[Part]:
    """The tensors of layers' states at a position, each copied out when it is written.

    So a save needs little memory beside the session's own.  With `fixed` those alone whose size does not grow with
    the position, which are what a mark keeps.
    """
    parts = []
    for layer in layers:
        for name, (shape, dtype) in layer.shapes(position).items():
            if not fixed or name in _FIXED:
                kind = "BF16" if dtype == np.uint16 else "F32"
                parts.append(
                    Part(f"{start}layers.{layer.layer}.{name}", kind, shape, partial(layer.array, name))
                )
    return parts


def stated_size(reader: SnapshotReader) -> tuple[int, int]:
    """Position and number of layers that the header states."""
    position, layers = reader.facts.get("position"), reader.facts.get("num_hidden_layers")
    for what, value in (("position", position), ("num_hidden_layers", layers)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
            raise SnapshotCorruptError(f"{reader.name}: {what} is {value!r}; expected a count")
    if layers > len(reader.tensors):  # type: ignore[operator]
        raise SnapshotCorruptError(
            f"{reader.name}: {layers} layers are stated, with {len(reader.tensors)} tensors"
        )
    return position, layers  # type: ignore[return-value]


def stated_marks(reader: SnapshotReader) -> dict[int, tuple[str, dict[str, str]]]:
    """Position -> (kind, {name of a part: name of its tensor}) of the marks that a header states, in order."""
    stated = reader.facts.get("marks") or []
    position, count = stated_size(reader)
    found: dict[int, tuple[str, dict[str, str]]] = {}
    try:
        for mark in stated:
            at, kind = mark["position"], mark["kind"]
            if type(at) is not int or not max(found, default=0) < at <= position or not isinstance(kind, str):
                raise ValueError(f"{mark} at its place in the list")
            found[at] = (kind, {})
    except (TypeError, KeyError, ValueError) as problem:
        raise SnapshotCorruptError(f"{reader.name}: the list of marks cannot be read: {problem}") from None
    if not found:
        return found
    for name in reader.tensors:
        number, _, part = name.removeprefix(MARKS).partition(".")
        if name.startswith(MARKS) and number.isdecimal() and int(number) in found:
            found[int(number)][1][part] = name
    fixed = [f"layers.{i}.{n}" for i in range(count) for n in _FIXED if f"layers.{i}.{n}" in reader.tensors]
    for at, (_, parts) in found.items():
        wrong = (set(parts) - {"logits"}) ^ set(fixed)
        if wrong:
            raise SnapshotCorruptError(
                f"{reader.name}: the mark at {at} does not have the tensors that it should: {min(wrong)}"
            )
    return found


def check_meta(meta: Any) -> Any:
    """What the caller wants kept, as JSON would give it back."""
    try:
        return json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as problem:
        raise SnapshotError(f"meta must be what JSON can hold: {problem}") from None


def _opened(path: str | os.PathLike[str]) -> Any:
    """A file, a head with its parts, or a part by itself."""
    try:
        return open_snapshot(path)
    except SnapshotMismatchError:
        reader = SnapshotReader(path)
        if "part_of" in reader.facts:
            return reader
        reader.close()
        raise


def inspect_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the header of a snapshot file says; reads no weights and no state, only the tokens."""
    with _opened(path) as reader:
        facts = dict(reader.facts)
        tensors = {
            n: {"dtype": i.dtype, "shape": list(i.shape), "xxh3_128": reader.digests[n]}
            for n, i in reader.tensors.items()
        }
        tokens = reader.read("tokens").tolist() if "tokens" in reader.tensors else None
        return {"path": os.fspath(path), "bytes": reader.size, "format_version": FORMAT_VERSION, **facts,
                "tokens": tokens, "tensors": tensors}  # fmt: skip


def verify_file(path: str | os.PathLike[str], *, progress: ProgressArgument = False) -> dict[str, Any]:
    """Compare every tensor with its digest; SnapshotCorruptError names those that differ."""
    report = Progress(progress)
    try:
        with _opened(path) as reader:
            bad = list(reader.altered(report))
            if bad:
                raise SnapshotCorruptError(f"{reader.name}: altered: {', '.join(bad)}")
            return {"path": os.fspath(path), "bytes": reader.size, "tensors": len(reader.tensors), "ok": True}
    finally:
        report.close()


def diff_files(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> dict[str, tuple[Any, Any]]:
    """Fields and tensors in which two snapshot files differ: name -> (in a, in b); tensors by digest."""
    with _opened(a) as left, _opened(b) as right:
        sides: list[Mapping[str, Any]] = [
            {**_flat(r.facts), **{f"tensor {n}": (r.digests[n], list(i.shape)) for n, i in r.tensors.items()}}
            for r in (left, right)
        ]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return {n: (sides[0].get(n), sides[1].get(n)) for n in names if sides[0].get(n) != sides[1].get(n)}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
