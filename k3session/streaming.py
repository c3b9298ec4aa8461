# SPDX-License-Identifier: MIT
"""Opening a model within a memory budget: what is read when, and into how much memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from k3session import budget
from k3session._core.decoder import Decoder
from k3session._core.streaming import Streamer
from k3session._core.weights import Weights
from k3session.budget import MemoryPlan, Need, Step
from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.memory import CHUNK_ROWS, memory_estimate
from k3session.placement import Placement

__all__ = ["CONTEXT", "MOST_ROWS", "chunk_rows", "locate", "open_streamer", "session_bytes"]

log = logging.getLogger("k3session")
#: Tokens of context that a budget has room for in its one session.
CONTEXT = 4096
MOST_ROWS = 512


def chunk_rows(config: K3Config, memory: int) -> int:
    """Rows in a chunk of a prefill within a budget: each chunk reads what is streamed once, so more than without."""
    rows = CHUNK_ROWS
    while rows < MOST_ROWS and memory_estimate(config, 0, 2 * rows)["scratch"] <= memory // 16:
        rows *= 2
    return rows


def session_bytes(config: K3Config, memory: int, layers: tuple[int, int] | None = None) -> int:
    """Bytes of one session within a budget: its state twice, its scratch, and `CONTEXT` tokens."""
    sizes = memory_estimate(config, 0, chunk_rows(config, memory), layers)
    latent = sizes["latent_per_token_fp32"] * min(CONTEXT, config.max_position_embeddings)
    state = sizes["state_per_session"] + sizes["state_alternate"]
    return state + sizes["scratch"] + latent + 12 * config.vocab_size


def _need(checkpoint: Checkpoint, steps: list[tuple[int, int, bool, int, int]], placement: Placement) -> Need:
    config = checkpoint.config
    moe = [i for i in range(*checkpoint.layers) if config.is_moe(i)]
    expert = 0
    if moe and "experts" not in placement.parts:
        at = f"model.layers.{moe[0]}.block_sparse_moe.experts.0."
        expert = sum(checkpoint.info(name).nbytes for name in checkpoint.names if name.startswith(at))
    trunk = [Step(rows, width, 2 if other else 1, whole) for _, other, whole, rows, width in steps]
    weights = sum(step.nbytes for step in trunk) + expert * config.num_experts * len(moe)
    if "trunk" not in placement.parts and checkpoint.layers[0] == 0:
        weights += checkpoint.info("model.embed_tokens.weight").nbytes
    return Need(trunk, weights, expert, config.num_experts, len(moe), config.num_experts_per_token)


def locate(checkpoint: Checkpoint, files: list[str]) -> Callable[[int, int], str]:
    """Return what names the tensor at a byte of a file, by the file's number."""

    def name(file: int, byte: int) -> str:
        there = [
            t
            for t in map(checkpoint.info, checkpoint.names)
            if str(t.file) == files[file] and t.offset + t.nbytes > byte
        ]
        return min(there, key=lambda t: t.offset).stored_name if there else "its last tensor"

    return name


def open_streamer(
    checkpoint: Checkpoint,
    weights: Weights,
    decoder: Decoder,
    placement: Placement,
    memory: int,
    progress: Callable[[str, int, int], object] | None = None,
) -> tuple[Streamer | None, MemoryPlan]:
    """Divide `memory` bytes and make what streams within them; None where everything fits.

    Raises
    ------
    ConfigError
        The budget is too small.
    CheckpointError
        What stays in memory could not be read.
    """
    limits = budget.LIMITS
    steps = decoder.reading_order()
    need = _need(checkpoint, steps, placement)
    session = session_bytes(checkpoint.config, memory, checkpoint.layers)
    plan = budget.divide(memory, budget.process_bytes(), session, need, limits)
    if plan.mapped:
        return None, plan
    blocks: list[tuple[int, int, int, int]] = []
    rooms: list[int] = []
    head = -1
    headed = "trunk" not in placement.parts and checkpoint.layers[1] == checkpoint.config.num_hidden_layers
    for i, ((one, other, _, _, width), step) in enumerate(zip(steps, need.steps, strict=True)):
        if i == len(steps) - 1 and headed:
            head = len(blocks)
        for first, rows in budget.cut(step, plan.block):
            blocks.append((one, other, first, rows))
            rooms.append(budget.room(rows * width, step.parts))
    keep = sum(rooms) if plan.streamed == 0 else plan.resident
    resident = np.array(budget.spread(rooms, keep), np.uint8)
    files = checkpoint.mappings()
    streamer = Streamer(
        weights,
        files,
        blocks,
        resident,
        len(blocks) if head < 0 else head,
        plan.ring,
        plan.slots,
        limits.chunk,
        limits.threads,
        limits.half_life,
        limits.direct,
        locate(checkpoint, [str(path) for path, _, _ in files]),
    )
    streamer.load(progress)
    log.info("memory budget: %s", plan.to_dict())
    return streamer, plan
