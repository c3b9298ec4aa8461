# SPDX-License-Identifier: MIT
"""Taking a checkpoint apart and putting it together differently, so that tests can damage it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3session.safetensors_io import plan, read_header


@dataclass
class Raw:
    """One tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Raw]


def load(folder: Path) -> Tensors:
    """Read every tensor of every file of `folder`, by its stored name."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        header = read_header(file)
        content = file.read_bytes()
        for name, info in header.tensors.items():
            start = header.data_start + info.begin
            tensors[name] = Raw(info.dtype, info.shape, content[start : start + info.nbytes])
    return tensors


def write_file(file: Path, tensors: Tensors) -> None:
    """Write one safetensors file."""
    laid_out = plan((name, raw.dtype, raw.shape) for name, raw in tensors.items())
    file.write_bytes(laid_out.header + b"".join(raw.data for raw in tensors.values()))


def save(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Write a checkpoint folder with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def changed(
    source: Path,
    target: Path,
    *,
    config: Callable[[dict[str, Any]], None] | None = None,
    tensors: Callable[[Tensors], Tensors | None] | None = None,
    shards: int = 1,
) -> Path:
    """Copy the checkpoint `source` to `target` with changes made to its configuration or tensors."""
    values = json.loads((source / "config.json").read_text())
    held = load(source)
    if config is not None:
        config(values)
    if tensors is not None:
        held = tensors(held) or held
    return save(target, values, held, shards)


def floats(raw: Raw) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Widen a BF16 or F32 tensor to float32."""
    if raw.dtype == "F32":
        return np.frombuffer(raw.data, "<f4").reshape(raw.shape)
    bits = np.frombuffer(raw.data, "<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(raw.shape)


def as_f32(raw: Raw) -> Raw:
    """The same values stored as F32."""
    return Raw("F32", raw.shape, floats(raw).tobytes())
