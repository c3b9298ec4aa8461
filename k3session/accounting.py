# SPDX-License-Identifier: MIT
"""The strict account of a checkpoint folder: what is there against what the configuration asks for."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from k3session.config import MXFP4_GROUP, K3Config, read_config_file
from k3session.errors import CheckpointError
from k3session.fileset import FileSet, read_files
from k3session.layout import (
    ACCEPTED_PREFIXES,
    SKIPPED_PREFIXES,
    Parameter,
    canonicalise,
    component,
    layer_range,
    parameters,
    within,
)
from k3session.problems import Grouped, kinds, layer_of, shape_of, why_missing, why_unexpected
from k3session.progress import Progress
from k3session.safetensors_io import TensorInfo
from k3session.shards import ARRAY_TYPES, Shards, StoredTensor

__all__ = ["Inspection", "inspect"]

_PACKED = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\..*weight_packed")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_BLOCK = 1 << 24


@dataclass(slots=True)
class Inspection:
    """What was found in a folder.  It can be used when ``problems`` is empty.

    ``layers`` are those that it was looked at for, half open; ``tensors`` are theirs.
    """

    path: Path
    config: K3Config | None = None
    layers: tuple[int, int] = (0, 0)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    packed_layers: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shards: Shards = field(default_factory=lambda: Shards({}))
    total_bytes: int = 0


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold off the garbage collector, which would walk half a million lasting entries again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def inspect(
    path: str | os.PathLike[str], progress: Progress | None = None, layers: tuple[int, int] | None = None
) -> Inspection:
    """Look at everything in a folder except the values of its tensors.

    Never raises for what the folder holds: all of it is in ``problems``.  With `layers`, half open, the tensors of
    other layers may be missing; those that are there are looked at all the same.

    Raises
    ------
    ConfigError
        `layers` is no range of the model's layers.
    """
    folder = Path(path)
    result = Inspection(folder)
    if not os.path.isdir(folder):
        state = "is a file" if os.path.exists(folder) else "does not exist"
        result.problems.append(f"the path {state}; expected a folder with config.json and safetensors files.")
        return result
    with _no_collection():
        result.config, problems = read_config_file(folder / "config.json")
        result.problems += [f"config.json: {problem}" for problem in problems]
        config = result.config
        needed = None
        if config is not None:
            result.layers = layer_range(layers, config)
            if layers is not None:
                needed = partial(_needed, config=config, layers=result.layers)
        files = read_files(folder, progress or Progress(), needed)
        result.problems += files.problems
        result.warnings += files.warnings
        result.shards = Shards({folder / name: header.file_size for name, header in files.headers.items()})
        named = _canonical(files, result)
        # With nothing to compare, a list of all that is missing would bury the problem.
        if result.config is not None and (named or not result.problems):
            try:
                _match(result, result.config, files, named)
            except CheckpointError as error:
                result.problems.append(str(error))
    result.total_bytes = sum(tensor.stored_nbytes for tensor in result.tensors.values())
    return result


def _needed(stored: str, config: K3Config, layers: tuple[int, int]) -> bool:
    """Whether a tensor, by its name in the index, belongs to a range of layers."""
    name = canonicalise(stored)
    if name is None or stored.startswith(SKIPPED_PREFIXES):
        return False
    layer = layer_of(name)
    if layer >= config.num_hidden_layers:
        return False
    return within(layer if layer >= 0 else None, component(name, config), layers, config)


def _canonical(files: FileSet, result: Inspection) -> dict[str, str]:
    """Map canonical names to the files' spellings; note what is skipped, unknown or there twice."""
    named: dict[str, str] = {}
    unknown: list[str] = []
    for stored in files.where:
        if stored.startswith(SKIPPED_PREFIXES):
            result.skipped.append(stored)
            continue
        name = canonicalise(stored)
        if name is None:
            unknown.append(stored)
        elif named.setdefault(name, stored) != stored:
            result.problems.append(
                f"{stored} and {named[name]} are the same tensor {name}; expected it once."
            )
    if unknown:
        accepted = ", ".join(repr(p) for p in ACCEPTED_PREFIXES)
        result.problems.append(
            f"{len(unknown)} tensors have names that start with no accepted prefix, for example "
            f"{', '.join(unknown[:3])}; accepted prefixes are {accepted}; "
            f"{' and '.join(SKIPPED_PREFIXES)} are skipped."
        )
    # A layer whose files are missing in part is packed if its index says so.
    for name in [*named, *(canonicalise(stored) or "" for stored in files.lost)]:
        found = _PACKED.fullmatch(name) if name.endswith("_packed") else None
        if found:
            result.packed_layers.add(int(found[1]))
    return named


def _match(result: Inspection, c: K3Config, files: FileSet, named: dict[str, str]) -> None:
    """Compare the table of the configuration with the tensors, both ways."""
    lost = {canonicalise(stored) for stored in files.lost}
    groups = Grouped()
    _packing_problems(result, c)
    first, end = result.layers
    moe_layers = sum(c.is_moe(i) for i in range(first, end))
    wanted = moe_layers * c.num_experts * 3 + c.num_hidden_layers
    if wanted > 2 * (len(named) + len(lost)) + 100_000:
        result.problems.append(
            f"config.json asks for more than {wanted} tensors, the files hold {len(named)}; "
            "expected num_hidden_layers and num_experts to belong to these files."
        )
        return
    rest, everything = dict(named), result.layers == (0, c.num_hidden_layers)
    padded: list[StoredTensor] = []
    paths = {file: result.path / file for file in files.headers}
    for parameter in parameters(c, packed=result.packed_layers.__contains__):
        stored = rest.pop(parameter.name, None)
        inside = everything or within(parameter.layer, parameter.component, result.layers, c)
        if stored is None:
            if inside and parameter.name not in lost:
                text = f" is missing; expected {kinds(parameter)} {shape_of(parameter)}.{why_missing(parameter, c)}"
                groups.add(parameter.name, "", text)
            continue
        file = files.where[stored]
        header = files.headers[file]
        info = header.tensors[stored]
        good = info.dtype in parameter.dtypes and info.shape == parameter.shape
        good = good or _compare(parameter, info, stored, file, groups)
        if not inside:
            continue
        begin, nbytes = info.begin, info.nbytes
        tensor = StoredTensor(
            parameter.name,
            stored,
            paths[file],
            info.dtype,
            parameter.shape,
            info.shape,
            header.data_start + begin,
            nbytes if info.shape == parameter.shape else _used(info, parameter),
            nbytes,
            parameter.layer,
            parameter.component,
        )
        result.tensors[parameter.name] = tensor
        if good and tensor.nbytes < tensor.stored_nbytes:
            padded.append(tensor)
    _check_tied_head(result, c, files, rest)
    outside = [name for name in rest if layer_of(name) >= c.num_hidden_layers]
    if outside:
        name = rest[outside[0]]
        result.problems.append(
            f"{len(outside)} tensors belong to layers past the last one, for example {name} in {files.where[name]}; "
            f"expected none, because num_hidden_layers is {c.num_hidden_layers}."
        )
    for name, stored in rest.items():
        if layer_of(name) < c.num_hidden_layers:
            groups.add(
                stored,
                f"{files.where[stored]}: ",
                f" is not part of this model.{why_unexpected(name, c)}",
            )
    result.problems += groups.sentences()
    for tensor in padded:
        _check_padding(result, tensor)
    _check_expert_dtypes(result)


def _used(info: TensorInfo, parameter: Parameter) -> int:
    """Bytes of a padded tensor that the model uses."""
    return info.nbytes // max(1, prod(info.shape)) * prod(parameter.shape)


def _compare(parameter: Parameter, info: TensorInfo, stored: str, file: str, groups: Grouped) -> bool:
    if info.dtype not in parameter.dtypes:
        groups.add(stored, f"{file}: ", f" is {info.dtype}; expected {kinds(parameter)}.")
    fits = info.shape == parameter.shape
    if parameter.padded and prod(info.shape) >= parameter.shape[0]:
        # Kimi Linear stores A_log as [1, 1, heads, 1].
        fits = len(info.shape) == 1 or (len(info.shape) == 4 and info.shape[2] == prod(info.shape))
    if not fits:
        longer = ", or longer with zeros at the end," if parameter.padded else ""
        expected = f"expected {shape_of(parameter)}{longer} from config.json."
        groups.add(stored, f"{file}: ", f" has shape {list(info.shape)}; {expected}")
    return fits and info.dtype in parameter.dtypes


def _packing_problems(result: Inspection, c: K3Config) -> None:
    if result.packed_layers:
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if getattr(c, name) % MXFP4_GROUP:
                result.problems.append(
                    f"config.json: {name} is {getattr(c, name)}; expected a multiple of {MXFP4_GROUP}, because the "
                    "experts are packed in groups of that many."
                )


def _check_tied_head(result: Inspection, c: K3Config, files: FileSet, rest: dict[str, str]) -> None:
    """A head that is stored although it is tied is skipped when it repeats the embedding, else refused."""
    embedding = result.tensors.get(_EMBEDDING)
    if not c.tie_word_embeddings or _HEAD not in rest:
        return
    if embedding is None:
        if result.layers != (0, c.num_hidden_layers):  # of no use to these layers
            result.skipped.append(rest.pop(_HEAD))
        return
    stored = rest.pop(_HEAD)
    header = files.headers[files.where[stored]]
    info = header.tensors[stored]
    same = info.dtype == embedding.dtype and info.shape == embedding.shape
    other = result.path / files.where[stored]
    for start in range(0, info.nbytes if same else 0, _BLOCK):
        count = min(_BLOCK, info.nbytes - start)
        same = same and result.shards.read(
            embedding.file, embedding.offset + start, count
        ) == result.shards.read(other, header.data_start + info.begin + start, count)
    if same:
        result.skipped.append(stored)
    else:
        result.problems.append(
            f"{files.where[stored]}: {stored} differs from the embedding, and tie_word_embeddings is true; "
            "expected no head, or the same values."
        )


def _check_padding(result: Inspection, tensor: StoredTensor) -> None:
    """What follows the heads in a padded A_log: the one place where shapes vouch for nothing."""
    start, count = tensor.offset + tensor.nbytes, tensor.stored_nbytes - tensor.nbytes
    tail = np.frombuffer(result.shards.read(tensor.file, start, count), ARRAY_TYPES[tensor.dtype])
    # For BF16 the sign bit alone is -0.0, which is zero too.
    bad = np.flatnonzero(tail & 0x7FFF if tensor.dtype == "BF16" else tail)
    if bad.size:
        heads, stored = prod(tensor.shape), prod(tensor.stored_shape)
        result.problems.append(
            f"{tensor.file.name}: {tensor.stored_name} has {heads} heads and {stored} entries, and entry "
            f"{heads + int(bad[0])} is not zero; expected zeros past the heads."
        )


def _check_expert_dtypes(result: Inspection) -> None:
    dtypes: dict[int, set[str]] = {}
    for tensor in result.tensors.values():
        if tensor.component == "experts" and tensor.dtype != "U8" and tensor.layer is not None:
            dtypes.setdefault(tensor.layer, set()).add(tensor.dtype)
    for layer, found in dtypes.items():
        if found == {"BF16", "F32"}:
            result.problems.append(f"layer {layer}: the experts are BF16 and F32; expected one of them.")
