# SPDX-License-Identifier: MIT
"""Opening a model within a budget of GPU memory: what stays there, and what is brought while a pass runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from k3session import budget
from k3session._core.cuda_ops import DeviceTables
from k3session._core.decoder import Decoder
from k3session._core.gpu_streaming import GpuStreamer, block_bytes, expert_bytes, pass_bytes
from k3session._core.streaming import Streamer
from k3session._core.weights import Weights
from k3session.budget import MemoryPlan, Need, Step
from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.errors import ConfigError
from k3session.memory import activations, memory_estimate
from k3session.placement import PARTS, Placement
from k3session.streaming import CONTEXT, chunk_rows, locate

__all__ = ["open_gpu_streamer", "plan_gpu"]

log = logging.getLogger("k3session")

#: Blocks that the reader has in pinned memory: some are read while others are copied.
_READ_AHEAD = 4


def _session_bytes(weights: Weights, tables: DeviceTables, memory: int) -> int:
    """Bytes of one session on the device: its state twice, what its passes work in, and `CONTEXT` tokens."""
    config: K3Config = weights.config
    rows = chunk_rows(config, memory)
    sizes = memory_estimate(config, 0, rows, (weights.first, weights.end))
    latent = sizes["latent_per_token_fp32"] * min(CONTEXT, config.max_position_embeddings)
    state = sizes["state_per_session"] + sizes["state_alternate"]
    widest = max(config.intermediate_size, config.shared_intermediate_size)
    beside = pass_bytes(weights, rows, widest) + 4 * rows * config.vocab_size
    return state + 4 * activations(config, rows) + tables.work_bytes(rows) + latent + beside


def plan_gpu(
    checkpoint: Checkpoint, weights: Weights, tables: DeviceTables, placement: Placement, memory: int
) -> tuple[list[tuple[int, int, bool, int, int]], Need, MemoryPlan]:
    """Divide `memory` bytes of a device: the matrices of its trunk in their order, what they need, and the plan.

    ``tables`` has been loaded with ``streamed=True``.

    Raises
    ------
    ConfigError
        The budget is too small; the message has the smallest that works.
    """
    config = checkpoint.config
    order = Decoder(weights, 1, "base", tables).reading_order(True)
    steps = [
        Step(rows, -(-block_bytes(one, other, rows) // rows), 2 if other else 1, whole)
        for one, other, whole, rows, _ in order
    ]
    moe = sum(config.is_moe(i) for i in range(*checkpoint.layers))
    expert = expert_bytes(weights) if moe and "experts" in placement.parts else 0
    total = sum(step.nbytes for step in steps) + expert * config.num_experts * moe
    if "trunk" in placement.parts and checkpoint.layers[0] == 0 and not config.tie_word_embeddings:
        total += checkpoint.info("model.embed_tokens.weight").nbytes
    need = Need(steps, total, expert, config.num_experts, moe, config.num_experts_per_token)
    session = _session_bytes(weights, tables, memory)
    return order, need, budget.divide(memory, tables.nbytes, session, need, budget.LIMITS, "gpu_memory")


def _plan_host(
    checkpoint: Checkpoint, steps: list[Step], need: Need, plan: MemoryPlan, memory: int
) -> MemoryPlan:
    """Divide what the host may keep of all that is not on the device, in the blocks that go there."""
    config = checkpoint.config
    expert = 0
    if need.expert:
        at = next(i for i in range(*checkpoint.layers) if config.is_moe(i))
        start = f"model.layers.{at}.block_sparse_moe.experts.0."
        expert = sum(checkpoint.info(name).nbytes for name in checkpoint.names if name.startswith(start))
    weights = sum(step.nbytes for step in steps) + expert * need.experts * need.moe_layers
    rows = chunk_rows(config, plan.budget)
    pinned = 4 * rows * (config.vocab_size + config.hidden_size) + 12 * config.vocab_size
    host = Need(steps, weights, expert, need.experts, need.moe_layers, need.chosen)
    return budget.divide(memory, budget.process_bytes(), pinned, host, budget.LIMITS)


def open_gpu_streamer(
    checkpoint: Checkpoint,
    weights: Weights,
    tables: DeviceTables,
    placement: Placement,
    memory: int,
    host_memory: int | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> tuple[GpuStreamer | None, MemoryPlan, MemoryPlan | None]:
    """Divide `memory` bytes of a device and make what streams within them; None where everything fits.

    The third is how `host_memory` was divided, the budget for what the host keeps of the rest; without one that is
    left to the page cache.

    Raises
    ------
    ConfigError
        A budget is too small, or there are two and a part of the model runs on the CPU.
    CheckpointError
        What stays in the host's memory could not be read.
    DeviceMemoryError
        The device has less.
    """
    order, need, plan = plan_gpu(checkpoint, weights, tables, placement, memory)
    if plan.mapped:
        return None, plan, None
    if host_memory is not None and placement.parts != frozenset(PARTS):
        raise ConfigError(
            "memory and gpu_memory were both given, and the model does not fit on the GPU; expected one of them, or "
            "every part of the model there"
        )
    headed = "trunk" in placement.parts and checkpoint.layers[1] == checkpoint.config.num_hidden_layers
    blocks: list[tuple[int, int, int, int]] = []
    on_host: list[int] = []
    wide: list[Step] = []
    head = -1
    for i, ((one, other, _, _, width), step) in enumerate(zip(order, need.steps, strict=True)):
        if i == len(order) - 1 and headed:
            head = len(blocks)
        for first, rows in budget.cut(step, plan.block):
            blocks.append((one, other, first, rows))
            on_host.append(budget.room(rows * width, step.parts))
            wide.append(Step(rows, width, step.parts, whole=True))
    head = len(blocks) if head < 0 else head
    rooms = [block_bytes(one, other, rows) for one, other, _, rows in blocks]
    stays = budget.spread(rooms, sum(rooms) if plan.streamed == 0 else plan.resident)
    streamed = [i for i, stay in enumerate(stays) if not stay]
    places = max(2, plan.ring // max((rooms[i] for i in streamed), default=1)) if streamed else 0
    limits = budget.LIMITS
    files = checkpoint.mappings()
    host_plan = None
    if host_memory is not None:
        host_plan = _plan_host(checkpoint, [wide[i] for i in streamed], need, plan, host_memory)
    kept = np.zeros(len(streamed), np.uint8)
    ring = _READ_AHEAD * max((on_host[i] for i in streamed), default=0)
    slots = min(plan.slots, max(2, 2 * need.chosen))
    cached = host_plan is None or host_plan.mapped
    if host_plan is not None and not host_plan.mapped:
        rooms = [on_host[i] for i in streamed]
        keep = sum(rooms) if host_plan.streamed == 0 else host_plan.resident
        kept = np.array(budget.spread(rooms, keep), np.uint8)
        ring, slots = host_plan.ring, host_plan.slots
    reader = Streamer(
        weights,
        files,
        [blocks[i] for i in streamed],
        kept,
        sum(1 for i in streamed if i < head),
        ring,
        slots,
        limits.chunk,
        limits.threads,
        limits.half_life,
        limits.direct and not cached,
        locate(checkpoint, [str(path) for path, _, _ in files]),
        tables.memory.device,
        cached,
    )
    reader.load(progress)
    made = GpuStreamer(
        tables, reader, blocks, np.array(stays, np.uint8), head, places, plan.slots, limits.half_life
    )
    try:
        made.load(progress)
    except BaseException:
        made.close()
        raise
    log.info("GPU memory budget: %s", plan.to_dict())
    return made, plan, host_plan
