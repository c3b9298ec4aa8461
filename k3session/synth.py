# SPDX-License-Identifier: MIT
"""Random checkpoints of any K3 shape in the released layout, the same for the same seed.

Each tensor is drawn from a generator of its own, keyed by the seed and the tensor's name, and written
block by block: memory does not grow with the model, and a tensor does not depend on its neighbours.
Scales are chosen so that activations stay near 1 through the layers and so that the layers decay at
the speeds of a trained model: the first KDA layer fast, the others slowly.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from k3session.config import K3Config
from k3session.config_rules import MXFP4_GROUP
from k3session.errors import CheckpointError, ConfigError
from k3session.fileset import INDEX
from k3session.layout import Parameter, parameters
from k3session.presets import PRESETS
from k3session.progress import Progress, ProgressArgument
from k3session.safetensors_io import plan

__all__ = ["synth"]

_BLOCK = 1 << 18
_WRITE = 4 << 20
_SHARD_BYTES = 1_500_000_000
#: Root mean square of the 16 values of an MXFP4 element.
_E2M1_RMS = 2.926
#: Small vectors that the release keeps in F32 beside a BF16 trunk.
_ALWAYS_F32 = (
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "o_norm.weight",
    "e_score_correction_bias",
)
_FAST_DECAY, _SLOW_DECAY = 0.5, -3.0


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written; ``used`` entries are drawn, the others are zero (a padded A_log)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameter: Parameter
    used: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"U8": 1, "BF16": 2, "F32": 4}[self.dtype]


def synth(
    path: str | os.PathLike[str],
    preset: str | K3Config,
    *,
    seed: int = 1234,
    experts: str = "mxfp4",
    trunk: str = "bf16",
    shard_bytes: int = _SHARD_BYTES,
    a_log_pad: bool = True,
    prefix: str = "language_model.",
    progress: ProgressArgument = False,
) -> Path:
    """Write a random checkpoint.

    Parameters
    ----------
    path
        A folder without a checkpoint; it is made when it does not exist.
    preset
        A name of :data:`k3session.presets.PRESETS`, or a configuration.
    seed
        The same seed and configuration give the same bytes.
    experts
        ``"mxfp4"``, or plain ``"bf16"`` or ``"f32"``.
    trunk
        ``"bf16"`` with the small vectors of the release in F32, or ``"f32"`` for everything.
    shard_bytes
        A new file begins when the tensors of one would pass this size.
    a_log_pad
        Store ``A_log`` as long as a KDA head is wide, with zeros past the heads, as the release does.
    prefix
        What stands before the canonical names.
    progress
        Reports ``("synth", bytes written, bytes)``.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ConfigError
        An unknown preset or option.
    CheckpointError
        The folder already holds a checkpoint, or cannot be written.  Files begun here are removed.
    """
    config = _config(preset)
    _check_options(config, seed, experts, trunk, shard_bytes)
    folder = Path(path)
    tensors = list(_tensors(config, experts, trunk, a_log_pad))
    shards = _cut(tensors, shard_bytes)
    total = sum(t.nbytes for t in tensors)
    report = Progress(progress)
    begun: list[Path] = []
    try:
        with _as_checkpoint_error(folder):
            _prepare(folder, total)
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        done = 0
        for name, shard in zip(names, shards, strict=True):
            part, file = folder / (name + ".part"), folder / name
            begun += [part, file]
            for written in _write_shard(part, shard, config, seed, prefix):
                done += written
                report("synth", done, total)
            with _as_checkpoint_error(folder):
                os.replace(part, file)
        weight_map = {prefix + t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        # config.json last: a folder without it is no checkpoint.
        values = {
            INDEX: index,
            "generation_config.json": _generation(config),
            "config.json": config.to_dict(),
        }
        for name, value in values.items():
            begun.append(folder / name)
            with _as_checkpoint_error(folder):
                begun[-1].write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except BaseException:
        for file in begun:
            file.unlink(missing_ok=True)
        raise
    finally:
        report.close()
    return folder


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """A file that cannot be written is the folder's problem; what the caller's progress raises is not."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}.") from error


def _generation(config: K3Config) -> dict[str, Any]:
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    return {k: v for k, v in ids.items() if v is not None} | {"eos_token_id": list(config.eos_token_id)}


def _config(preset: str | K3Config) -> K3Config:
    if isinstance(preset, K3Config):
        return preset
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}; expected one of {', '.join(PRESETS)}, or a K3Config.")
    return PRESETS[preset]


def _check_options(config: K3Config, seed: int, experts: str, trunk: str, shard_bytes: int) -> None:
    if experts not in ("mxfp4", "bf16", "f32"):
        raise ConfigError(f"experts is {experts!r}; expected 'mxfp4', 'bf16' or 'f32'.")
    if trunk not in ("bf16", "f32"):
        raise ConfigError(f"trunk is {trunk!r}; expected 'bf16' or 'f32'.")
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ConfigError(f"seed is {seed!r}; expected an integer from 0 to 2**64 - 1.")
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes!r}; expected a positive integer.")
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if experts == "mxfp4" and getattr(config, name) % MXFP4_GROUP:
            raise ConfigError(
                f"{name} is {getattr(config, name)}; expected a multiple of {MXFP4_GROUP} to pack the experts "
                "as MXFP4 (or pass experts='bf16')."
            )


def _prepare(folder: Path, total: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held = [
        p.name for p in folder.iterdir() if p.suffix == ".safetensors" or p.name in ("config.json", INDEX)
    ]
    if held:
        raise CheckpointError(f"{folder}: already holds {held[0]}; expected a folder without a checkpoint.")
    free = shutil.disk_usage(folder).free
    if free < total:
        raise CheckpointError(f"{folder}: {free} bytes are free; expected {total} for this checkpoint.")


def _tensors(config: K3Config, experts: str, trunk: str, a_log_pad: bool) -> Iterator[_Tensor]:
    for p in parameters(config, packed=experts == "mxfp4"):
        dtype = "F32" if trunk == "f32" or p.name.endswith(_ALWAYS_F32) else "BF16"
        if p.component == "experts":
            dtype = {"mxfp4": "U8", "bf16": "BF16", "f32": "F32"}[experts]
        shape = p.shape
        if p.padded and a_log_pad:
            shape = (max(p.shape[0], config.kda_head_dim),)
        yield _Tensor(p.name, dtype, shape, p, math.prod(p.shape))


def _cut(tensors: list[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shard(file: Path, shard: list[_Tensor], config: K3Config, seed: int, prefix: str) -> Iterator[int]:
    """Write one file, yielding the bytes of each block as it is written."""
    # Weights begin where a line of the cache does: a load of 32 bytes then never touches two.
    laid_out = plan(((prefix + t.name, t.dtype, t.shape) for t in shard), {"format": "pt"}, align=64)
    with _as_checkpoint_error(file.parent):
        # Long writes: the page cache then has the file in large pages, which are read faster when they are mapped.
        out = open(file, "wb", buffering=_WRITE)  # noqa: SIM115  (closed below, where a failure counts as well)
    try:
        with _as_checkpoint_error(file.parent):
            out.write(laid_out.header)
        for tensor in shard:
            for block in _blocks(tensor, config, seed):
                with _as_checkpoint_error(file.parent):
                    out.write(block.data)
                yield block.nbytes
    finally:
        with _as_checkpoint_error(file.parent):
            out.close()


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(
        np.random.Philox(key=np.array([seed, xxhash.xxh3_64_intdigest(name.encode())], np.uint64))
    )


def _blocks(tensor: _Tensor, config: K3Config, seed: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the values of one tensor in its stored format, a bounded piece at a time."""
    rng = _generator(seed, tensor.name)
    left = tensor.used
    while left:
        count = min(left, _BLOCK)
        left -= count
        if tensor.name.endswith("_packed"):
            yield rng.integers(0, 256, count, dtype=np.uint8)
        elif tensor.name.endswith("_scale"):
            columns = tensor.shape[1] * MXFP4_GROUP
            middle = round(127 - math.log2(math.sqrt(columns) * _E2M1_RMS))
            yield rng.integers(middle - 1, middle + 2, count, dtype=np.uint8)
        else:
            yield _stored(_values(rng, count, tensor, config), tensor.dtype)
    rest = math.prod(tensor.shape) - tensor.used
    if rest:
        yield _stored(np.zeros(rest, np.float32), tensor.dtype)


def _stored(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype != "BF16":
        return values.astype("<f4", copy=False)
    # To nearest, ties to even; nothing drawn here is a NaN or near an overflow.
    bits = values.view(np.uint32)
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype("<u2")


def _values(
    rng: np.random.Generator, count: int, tensor: _Tensor, config: K3Config
) -> npt.NDArray[np.float32]:
    name = tensor.name
    if name.endswith("A_log"):
        return np.log(rng.uniform(1.0, 16.0, count)).astype(np.float32)
    mean, std = 0.0, 1.0
    if name.endswith("dt_bias"):
        first = config.kda_layers and tensor.parameter.layer == config.kda_layers[0]
        mean = _FAST_DECAY if first else _SLOW_DECAY
    elif name.endswith("e_score_correction_bias"):
        std = 0.01
    elif "norm" in name:
        mean, std = 1.0, 0.02
    elif name.endswith("conv1d.weight"):
        std = 1.0 / math.sqrt(config.short_conv_kernel_size)
    elif not name.endswith("embed_tokens.weight"):
        std = 1.0 / math.sqrt(tensor.shape[-1])
    values = rng.standard_normal(count, dtype=np.float32)
    values *= np.float32(std)
    values += np.float32(mean)
    return values
