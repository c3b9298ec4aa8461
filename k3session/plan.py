# SPDX-License-Identifier: MIT
"""What a memory budget would mean for a checkpoint on this machine, from its headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3session import budget, env
from k3session._core import ops
from k3session.accounting import Inspection, inspect
from k3session.budget import Need, Step
from k3session.config import K3Config
from k3session.errors import ConfigError
from k3session.memory import memory_estimate
from k3session.problems import folder_error
from k3session.progress import Progress, ProgressArgument
from k3session.rates import ASSUMED, Rates, measure
from k3session.shards import StoredTensor
from k3session.streaming import session_bytes

__all__ = ["Survey", "plan", "survey"]

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_MATRICES = ("kda", "mla", "dense", "router", "latent", "shared", "lm_head")
#: Bytes of tables and views that an open model has for each tensor and each layer, beside its vectors.
_PER_TENSOR, _PER_LAYER = 300, 4096


def _is_matrix(t: StoredTensor) -> bool:
    return t.component in _MATRICES and len(t.shape) == 2 and t.shape[0] > 1 and "conv1d" not in t.name


def _steps(found: Inspection, config: K3Config) -> list[Step]:
    """The trunk as `Decoder.reading_order` has it, but for the order."""
    steps = []
    for t in found.tensors.values():
        if not _is_matrix(t) or t.name.endswith((".mlp.up_proj.weight", ".shared_experts.up_proj.weight")):
            continue  # it goes with its gate
        pair = 2 if t.component in ("dense", "shared") and t.name.endswith("gate_proj.weight") else 1
        width = t.nbytes // t.shape[0] * pair
        steps.append(Step(t.shape[0], width, pair, t.name.endswith("kv_b_proj.weight")))
    if config.tie_word_embeddings:
        t = found.tensors[_EMBEDDING]
        steps.append(Step(t.shape[0], t.nbytes // t.shape[0]))
    return steps


def _need(found: Inspection, config: K3Config) -> Need:
    steps = _steps(found, config)
    moe = [i for i in range(config.num_hidden_layers) if config.is_moe(i)]
    experts = sum(t.nbytes for t in found.tensors.values() if t.component == "experts")
    count = config.num_experts * len(moe)
    weights = sum(s.nbytes for s in steps) + experts + found.tensors[_EMBEDDING].nbytes
    return Need(
        steps,
        weights,
        experts // count if count else 0,
        config.num_experts,
        len(moe),
        config.num_experts_per_token,
    )


def _open_bytes(tensors: Iterable[StoredTensor], layers: int) -> int:
    """What an open model takes beside what is planned: its tables, and its vectors as float32."""
    n, vectors = 0, 0
    for t in tensors:
        n += 1
        if t.component != "experts" and not _is_matrix(t) and t.name != _EMBEDDING:
            vectors += t.nbytes * (2 if t.dtype == "BF16" else 1)
    return n * _PER_TENSOR + layers * _PER_LAYER + vectors


@dataclass(frozen=True, slots=True)
class Survey:
    """What the headers of a checkpoint say: its configuration, what it asks for, and what it takes to hold it open."""

    path: Path
    files: tuple[Path, ...]
    config: K3Config
    need: Need
    open_bytes: int


def survey(path: str | os.PathLike[str], progress: ProgressArgument = False) -> Survey:
    """Read the headers of a checkpoint, and nothing else of it: a folder of sparse files will do.

    Raises
    ------
    CheckpointError
        The folder cannot be used.
    """
    report = Progress(progress)
    try:
        found = inspect(path, report)
    finally:
        report.close()
    config = found.config
    found.shards.close()
    if found.problems or config is None:
        raise folder_error(found.path, found.problems)
    files = tuple(sorted({t.file for t in found.tensors.values()}))
    held = _open_bytes(found.tensors.values(), config.num_hidden_layers)
    return Survey(found.path, files, config, _need(found, config), held)


def plan(
    path: str | os.PathLike[str] | Survey,
    memory: int | str,
    *,
    threads: int | None = None,
    rates: Rates | None = None,
    measured: bool = False,
    progress: ProgressArgument = False,
) -> dict[str, Any]:
    """Predict how a checkpoint runs within a budget.

    Parameters
    ----------
    path
        The folder, or what `survey` returned for it.
    memory
        As for `Model.open`.
    threads
        Threads of a pass; None is what `Model.open` would take.
    rates
        What the machine does in a second; None is `k3session.rates.ASSUMED`.
    measured
        Measure them, in some two seconds, with direct reads from the folder's own files.

    Returns
    -------
    dict
        ``memory`` (`MemoryPlan`), ``per_token`` (bytes from disk, from memory and through the cores), ``rates``,
        ``seconds`` (what each of the three takes, ``token``, their maximum, and ``without_overlap``, their sum),
        ``limit`` and ``advice``, a sentence.

    Raises
    ------
    CheckpointError, ConfigError
        The folder cannot be used, or the budget is too small.

    Examples
    --------
    >>> from k3session.model import DEFAULT_MODEL
    >>> from k3session.plan import plan
    >>> plan(DEFAULT_MODEL, "1GiB")["memory"]["mapped"]
    True
    """
    total = budget.read_memory(memory)
    if total is None:
        raise ConfigError("memory is None; expected a budget to plan for")
    found = path if isinstance(path, Survey) else survey(path, progress)
    config, need = found.config, found.need
    divided = budget.divide(
        total, budget.process_bytes() + found.open_bytes, session_bytes(config, total), need
    )
    threads = env.default_threads() if threads is None else threads
    if measured:
        rates = measure(found.files, threads, env.instruction_set(ops.best_isa(), ops.ISAS))
    rates = rates or ASSUMED
    all_slots = need.experts * need.moe_layers
    # Of experts that are chosen evenly; a model that prefers some finds them more often.
    hits = min(1.0, divided.slots / all_slots) if all_slots else 0.0
    chosen = need.expert * need.chosen * need.moe_layers
    disk = 0 if divided.mapped else divided.streamed + int(chosen * (1 - hits))
    state = 2 * memory_estimate(config, 0)["state_per_session"]
    weights = need.trunk + chosen
    seconds = {
        "disk": disk / rates.disk,
        "memory": (weights + state + disk) / rates.memory,
        "cores": weights / rates.cores,
    }
    limit = max(seconds, key=seconds.__getitem__)
    return {
        "path": os.fspath(found.path),
        "threads": threads,
        "memory": divided.to_dict(),
        "resident_bytes": need.weights if divided.mapped else divided.resident + divided.slots * divided.slot,
        "per_token": {"disk": disk, "memory": weights + state + disk, "cores": weights},
        "expert_hit_rate": None if divided.mapped or not all_slots else hits,
        "rates": {
            "disk": rates.disk,
            "memory": rates.memory,
            "cores": rates.cores,
            "measured": rates.measured,
        },
        "seconds": seconds | {"token": seconds[limit], "without_overlap": sum(seconds.values())},
        "limit": limit,
        "advice": _advice(limit, seconds, divided, disk),
    }


def _advice(limit: str, seconds: dict[str, float], divided: budget.MemoryPlan, disk: int) -> str:
    gib = float(1 << 30)
    other = max(v for k, v in seconds.items() if k != limit)
    if limit == "disk":
        # Bytes that would have to stay for the disk to be no slower than the rest; more than the trunk is of less use.
        rate = disk / seconds["disk"]
        more = min((seconds["disk"] - other) * rate, divided.streamed)
        if more < gib / 8:
            return (
                f"The disk is the limit, with experts that are read when they are chosen: a faster disk helps most, "
                f"up to {seconds['disk'] / max(other, 1e-9):.1f} times."
            )
        saved = more / rate
        faster = min(seconds["disk"] / 2, seconds["disk"] - other)
        return (
            f"The disk is the limit: {more / gib:.1f} GiB more memory would save {saved:.2g} s of "
            f"{seconds['disk']:.2g} a token, and a disk twice as fast {faster:.2g} s."
        )
    if limit == "memory":
        return "Memory bandwidth is the limit: no faster disk and no larger budget helps; more memory channels do."
    return "The cores are the limit: more threads help most, up to the memory's bandwidth."
