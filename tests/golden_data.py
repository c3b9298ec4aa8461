# SPDX-License-Identifier: MIT
"""Golden data, altered checkpoints and the implementations that are held against them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from k3session.checkpoint import Checkpoint
from k3session.reference import Reference

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny_k3"
SHAKESPEARE = GOLDEN / "shakespeare"

SPLIT = (15, 1, 1, 7)
"""How the 24 golden tokens are fed where state must cross calls: prefills and single steps."""

Tensor = NDArray[Any]
Edit = Callable[[dict[str, Tensor]], None]


def golden(name: str) -> dict[str, Tensor]:
    """The arrays of ``tests/golden/NAME.npz``."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude that is expected."""
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    difference = np.max(np.abs(np.asarray(found, np.float64) - expected))
    return float(difference / np.max(np.abs(expected)))


class Implementation(Protocol):
    """Something that decodes a checkpoint and must agree with the golden and with the reference."""

    name: str
    golden_tolerance: float  # of the largest golden logit, 24 tokens
    reference_tolerance: float  # of the largest logit of the float64 reference

    def logits(self, folder: Path, tokens: Tensor, chunks: Sequence[int]) -> Tensor:
        """Logits of every position, [n, vocab], fed in chunks of these lengths."""
        ...


class ReferenceImplementation:
    """The float64 reference, or a subclass of it with a mistake."""

    golden_tolerance = 1.5e-5
    reference_tolerance = 1e-12

    def __init__(self, cls: type[Reference] = Reference, *, mla_absorbed: bool = False) -> None:
        self.cls = cls
        self.mla_absorbed = mla_absorbed
        self.name = cls.__name__ + ("-absorbed" if mla_absorbed else "")

    def logits(self, folder: Path, tokens: Tensor, chunks: Sequence[int]) -> Tensor:
        with Checkpoint.open(folder) as checkpoint:
            return chunked(self.cls(checkpoint, mla_absorbed=self.mla_absorbed), tokens, chunks)


def chunked(model: Reference, tokens: Tensor, chunks: Sequence[int]) -> Tensor:
    """Logits of `tokens`, fed in `chunks` over one state."""
    assert sum(chunks) == len(tokens)
    state = model.new_state()
    parts = np.split(tokens, np.cumsum(chunks)[:-1])
    return np.concatenate([model.forward(part, state) for part in parts])


def altered(
    target: Path, *, source: Path = TINY, edit: Edit | None = None, config: dict[str, Any] | None = None
) -> Path:
    """Write a checkpoint like `source` to `target`, with other tensors or config fields.

    Parameters
    ----------
    edit
        Changes the dictionary of stored tensors (BF16 as uint16) in place.
    config
        Dotted fields of ``text_config`` and the values they get, such as ``"rms_norm_eps"`` or
        ``"linear_attn_config.kda_layers"``.
    """
    fields = json.loads((source / "config.json").read_text())
    for path, value in (config or {}).items():
        *parents, last = path.split(".")
        inner = fields["text_config"]
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
        if path in fields:  # said a second time beside text_config
            fields[path] = value
    tensors = read_tensors(source / "model.safetensors")
    if edit is not None:
        edit(tensors)
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(fields, indent=2))
    write_tensors(target / "model.safetensors", tensors)
    return target


DTYPES: dict[str, Any] = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}
PREFIX = "language_model."


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Every tensor of a file as it is stored, by its name after ``language_model.``; all may be changed."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name.removeprefix(PREFIX)] = array.copy()
    return tensors


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file of BF16 (as uint16), F32 and U8 tensors."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        entry = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
        header[PREFIX + name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blob = b"".join(array.tobytes() for array in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + blob)


def scale_bf16(bits: Tensor, exponent: int) -> Tensor:
    """Multiply BF16 values by 2^exponent, exactly; the result must be a normal number."""
    old = (bits.astype(np.int32) >> 7) & 0xFF
    new = np.where(old == 0, 0, old + exponent)
    assert np.all((new < 255) & ((new > 0) | (old == 0)))
    return ((bits & 0x807F) | (new << 7)).astype(np.uint16)
