# SPDX-License-Identifier: MIT
"""Whether a snapshot belongs to a session: facts, then shapes, then arrays, each before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3session.errors import SnapshotMismatchError
from k3session.snapshot import Snapshot, stated_size
from k3session.snapshot_file import SnapshotReader

__all__ = ["check_arrays", "check_facts", "check_size"]

#: Facts that must be equal; the others only decide whether a resume is exact.
_MUST_AGREE = ("num_hidden_layers", "layers", "latent", "weights")


def check_facts(
    facts: Mapping[str, Any],
    here: Mapping[str, Any],
    logits: npt.NDArray[Any] | None,
    vocab: int,
    name: str,
) -> None:
    """Raise unless a snapshot with `facts` is of the model and options of `here`; every difference is listed."""
    differences: dict[str, tuple[Any, Any]] = {
        n: (facts.get(n), here[n]) for n in _MUST_AGREE if facts.get(n) != here[n]
    }
    there, mine = facts.get("fingerprint"), here["fingerprint"]
    if not isinstance(there, dict) or there.get("digest") != mine["digest"]:
        there = there if isinstance(there, dict) else {}
        differences["fingerprint"] = (there.get("digest"), mine["digest"])
        for part in ("version", "config", "embedding", "layers", "head"):
            if there.get(part) != mine[part]:
                differences[f"fingerprint.{part}"] = (there.get(part), mine[part])
    if logits is not None and logits.shape != (vocab,):
        differences["vocab_size"] = (logits.shape, (vocab,))
    if differences:
        said = "; ".join(f"{n}: snapshot {_short(a)}, here {_short(b)}" for n, (a, b) in differences.items())
        raise SnapshotMismatchError(f"{name} belongs to another model or other options: {said}", differences)


def check_size(reader: SnapshotReader, layers: Sequence[Any]) -> None:
    """Compare the shapes and dtypes in a header with those of `layers`, before a byte of a tensor is read."""
    position, _ = stated_size(reader)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i, layer in enumerate(layers):
        for name, (shape, dtype) in layer.shapes(position).items():
            expected[f"layers.{i}.{name}"] = "BF16" if dtype == np.uint16 else "F32", shape
    found = {n: (t.dtype, t.shape) for n, t in reader.tensors.items() if n.startswith("layers.")}
    wrong = {
        n: (found.get(n), expected.get(n)) for n in {**found, **expected} if found.get(n) != expected.get(n)
    }
    if not wrong:
        return
    name, (a, b) = next(iter(wrong.items()))
    what, here = ("shape", 1) if a is None or b is None or a[1] != b[1] else ("dtype", 0)
    differences = {n: (a and a[here], b and b[here]) for n, (a, b) in wrong.items()}
    raise SnapshotMismatchError(
        f"{reader.name}: {name} has {what} {differences[name][0]}, expected {differences[name][1]}; "
        f"{len(wrong)} tensors differ",
        differences,
    )


def check_arrays(snapshot: Snapshot, layers: int, vocab: int, name: str) -> None:
    """Raise unless what belongs to no layer is what a session can hold; layers are looked at by their owner."""
    position, tokens, logits = snapshot.position, snapshot.tokens, snapshot.logits
    wrong: dict[str, tuple[Any, Any]] = {}
    if len(snapshot.layers) != layers:
        wrong["num_hidden_layers"] = (len(snapshot.layers), layers)
    expected = (("tokens", tokens, np.int32, (position,)), ("logits", logits, np.float32, (vocab,)))
    for part, array, dtype, shape in expected:
        if array is not None and (array.dtype != dtype or array.shape != shape):
            wrong[part] = (f"{array.dtype} {array.shape}", f"{np.dtype(dtype)} {shape}")
    if tokens is not None and tokens.size and not -1 <= tokens.min() <= tokens.max() < vocab:
        wrong["tokens"] = (f"{tokens.min()} to {tokens.max()}", f"-1 to {vocab - 1}")
    if wrong:
        said = "; ".join(f"{n}: snapshot {a}, expected {b}" for n, (a, b) in wrong.items())
        raise SnapshotMismatchError(f"{name} does not fit the model: {said}", wrong)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
