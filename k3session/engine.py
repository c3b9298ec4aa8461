# SPDX-License-Identifier: MIT
"""What a model computes with: the decoder, and on a GPU the parts of the weights that were placed there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from k3session._core.cuda_ops import DeviceMemory, DeviceTables
from k3session._core.decoder import Decoder
from k3session._core.gpu import Device
from k3session._core.recode import recode
from k3session._core.weights import Weights
from k3session.budget import MemoryPlan, read_memory
from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.errors import DeviceError, DeviceMemoryError
from k3session.gpu_streaming import open_gpu_streamer
from k3session.memory import CHUNK_ROWS, memory_estimate
from k3session.placement import PARTS, Placement, Wanted, suggestion
from k3session.streaming import open_streamer

__all__ = ["Engine"]

log = logging.getLogger("k3session")


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.1f} MiB"


class Engine:
    """The decoder of one model, and what it holds on a device until `close`.

    Attributes
    ----------
    decoder
        The compiled graph, shared by all sessions.
    placement
        What runs where.
    plan
        How the memory budget was divided; None without one.
    streamer
        What reads weights while passes run; None where they are mapped.
    gpu_plan, gpu_streamer
        The same for a budget of a GPU's memory, and what brings weights there while passes run.
    """

    def __init__(
        self,
        weights: Weights,
        wanted: Wanted,
        threads: int,
        isa: str,
        progress: Callable[[str, int, int], object] | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        memory: int | None = None,
        gpu_memory: int | str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._gpu_memory = gpu_memory
        self._host_memory = memory
        self.plan: MemoryPlan | None = None
        self.streamer: Any = None
        self.gpu_plan: MemoryPlan | None = None
        self.gpu_streamer: Any = None
        self._untouched = checkpoint if memory is not None else None
        self._weights: Any = weights
        self._device: Device | None = None
        self._memory: DeviceMemory | None = None
        self._tables: DeviceTables | None = None
        self.placement = wanted.on(gpu=wanted.kind == "cuda")
        if wanted.kind == "auto":
            self.placement = self._automatic(wanted, progress)
        elif self.placement.parts:
            self._load(self.placement, progress)
        #: What recoding the trunk gave, or None: see `Model.recoded`.
        self.recoded: dict[str, Any] | None = None
        if wanted.weights != "stored":
            self.recoded = recode(weights, wanted.weights, threads, progress)
        split, rounded = wanted.prefill_precision == "bf16x2", wanted.prefill_precision == "bf16"
        self.decoder: Any = Decoder(
            weights, threads, isa, self._tables, split, None, rounded, self.gpu_streamer
        )
        if memory is not None and checkpoint is not None and self.gpu_streamer is None:
            try:
                self.streamer, self.plan = open_streamer(
                    checkpoint, weights, self.decoder, self.placement, memory, progress
                )
            except BaseException:
                self.close()
                raise
            if self.streamer is not None:
                self.decoder = Decoder(weights, threads, isa, self._tables, split, self.streamer, rounded)

    def _automatic(self, wanted: Wanted, progress: Callable[[str, int, int], object] | None) -> Placement:
        """Everything on the GPU where that can be, else what was asked for by name."""
        placement = wanted.on(gpu=True)
        try:
            if placement.parts:
                self._load(placement, progress)
            return placement
        except DeviceError as problem:
            if any(wanted.apart.values()):
                raise  # a component was asked for by name
            log.info("device 'auto': using the CPU: %s", problem)
            return wanted.on(gpu=False)

    def _load(self, placement: Placement, progress: Callable[[str, int, int], object] | None) -> None:
        """Copy the parts to the device; DeviceMemoryError with the sizes before anything is copied."""
        try:
            self._device = Device(placement.number)
            self._memory = DeviceMemory(self._device)
            if self._stream(placement, progress):
                return
            tables = DeviceTables(self._weights)
            sizes = {part: tables.count(frozenset({part})) for part in PARTS}
            need, scratch = sum(sizes[p] for p in placement.parts), self._session_bytes(tables)
            free = self._device.free_memory
            if need + scratch > free:
                parts = ", ".join(f"{p} {_gib(sizes[p])}" for p in PARTS if p in placement.parts)
                raise DeviceMemoryError(
                    f"the model needs {_gib(need)} on GPU {placement.number} ({parts}) and {_gib(scratch)} for a "
                    f"session, where {_gib(free)} are free: "
                    f"{suggestion(sizes, free - scratch, placement.parts)}"
                )
            self._tables = tables
            tables.load(self._memory, placement.parts, self._reporting(progress))
        except BaseException:
            self._free()
            self.gpu_plan = self.plan = None
            raise

    def _stream(self, placement: Placement, progress: Callable[[str, int, int], object] | None) -> bool:
        """Within a budget that not everything fits in: copy what stays, and make what brings the rest; else False."""
        device, memory, checkpoint = self._device, self._memory, self._checkpoint
        if self._gpu_memory is None or device is None or memory is None or checkpoint is None:
            return False
        free = device.free_memory
        total = read_memory(self._gpu_memory, "gpu_memory", lambda: free * 9 // 10) or 0
        if total > free:
            raise DeviceMemoryError(
                f"gpu_memory is {_gib(total)}, where {_gib(free)} are free on GPU {placement.number}; expected no "
                "more than is free, or 'auto'"
            )
        tables = self._tables = DeviceTables(self._weights)
        tables.load(memory, placement.parts, None, streamed=True)
        self.gpu_streamer, self.gpu_plan, self.plan = open_gpu_streamer(
            checkpoint, self._weights, tables, placement, total, self._host_memory, self._reporting(progress)
        )
        if self.gpu_streamer is None:
            tables.close()
            self._tables = None
        return self.gpu_streamer is not None

    def _session_bytes(self, tables: DeviceTables) -> int:
        """What one session takes on the device: its state twice, and what its passes work in, logits included."""
        config: K3Config = self._weights.config
        sizes = memory_estimate(config, 0, CHUNK_ROWS, (self._weights.first, self._weights.end))
        state = sizes["state_per_session"] + sizes["state_alternate"]
        return state + sizes["scratch"] + tables.work_bytes(CHUNK_ROWS) + 4 * CHUNK_ROWS * config.vocab_size

    def _reporting(
        self, progress: Callable[[str, int, int], object] | None
    ) -> Callable[[str, int, int], object] | None:
        """Within a budget, what was copied to a device does not stay in the host's memory meanwhile."""
        checkpoint = self._untouched
        if checkpoint is None:
            return progress

        def report(event: str, current: int, total: int) -> None:
            checkpoint.forget_pages()
            if progress is not None:
                progress(event, current, total)

        return report

    def close(self) -> None:
        """Let go of the weights, and free the device's memory."""
        self.decoder = self._weights = self.streamer = self._untouched = self._checkpoint = None
        self._free()

    def _free(self) -> None:
        streamer, self.gpu_streamer = self.gpu_streamer, None
        tables, self._tables = self._tables, None
        memory, self._memory = self._memory, None
        device, self._device = self._device, None
        for held in (streamer, tables, memory, device):
            if held is not None:
                held.close()
