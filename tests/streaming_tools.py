# SPDX-License-Identifier: MIT
"""Opening small models as if memory were short: how much stays and how blocks are cut is given, not computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import k3session as k3
from k3session import budget


@contextmanager
def opened(
    path: Path,
    *,
    share: float = 0.0,
    block: int = 3000,
    slots: int = 2,
    ring_blocks: float = 3,
    chunk: int = 4096,
    threads: int = 1,
    memory: str = "2MiB",
    placement: dict[str, str] | None = None,
    layers: tuple[int, int] | None = None,
    **limits: Any,
) -> Iterator[k3.Model]:
    """A model that streams: `share` of the trunk stays, in blocks of `block` bytes; `slots` experts have room.

    On `memory`, which is not kept, depends how many rows a chunk has.
    """

    def divide(
        total: int, process: int, session: int, need: budget.Need, given: budget.Limits
    ) -> budget.MemoryPlan:
        rooms = [
            budget.room(rows * step.row_bytes, step.parts)
            for step in need.steps
            for _, rows in budget.cut(step, block)
        ]
        resident = int(need.trunk * share)
        blocks = sum(len(budget.cut(step, block)) for step in need.steps)
        keep = int((need.trunk + 2 * budget.PAGE * blocks) * share)
        slot = budget.room(need.expert, 6)
        return budget.MemoryPlan(
            budget=total, mapped=False, process=process, session=session, block=block,
            ring=0 if share >= 1 else int(ring_blocks * max(rooms, default=0)),
            slots=slots if need.expert else 0, slot=slot,
            resident=keep, streamed=need.trunk - resident, smallest=0,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "divide", divide)
        patch.setattr(budget, "LIMITS", replace(budget.LIMITS, chunk=chunk, **limits))
        where: dict[str, Any] = {"layers": layers, **(placement or {"device": "cpu"})}
        model = k3.Model.open(path, memory=memory, threads=threads, **where)
    with model:
        yield model
