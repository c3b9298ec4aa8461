# SPDX-License-Identifier: MIT
"""Opening small models as if memory were short: how much stays and how blocks are cut is given, not computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_tools import contents, prompt, same, step_all

import k3session as k3
from k3session import budget


def dividing(
    *,
    share: float = 0.0,
    block: int = 3000,
    slots: int = 2,
    ring_blocks: float = 3,
    to_gpu: bool = False,
    on_host: float | None = None,
) -> Callable[..., budget.MemoryPlan]:
    """What takes the place of `budget.divide`, whatever the budget is; see `opened`."""

    def divide(
        total: int, process: int, session: int, need: budget.Need, given: budget.Limits, name: str = "memory"
    ) -> budget.MemoryPlan:
        stays = on_host if on_host is not None and name == "memory" else share
        rooms = [
            budget.room(rows * step.row_bytes, step.parts)
            for step in need.steps
            for _, rows in budget.cut(step, block)
        ]
        resident = int(need.trunk * stays)
        blocks = sum(len(budget.cut(step, block)) for step in need.steps)
        # On a GPU blocks take no whole pages.
        pages = 0 if to_gpu and stays < 1 else 2 * budget.PAGE * blocks
        slot = budget.room(need.expert, 6)
        return budget.MemoryPlan(
            budget=total, mapped=False, process=process, session=session, block=block,
            ring=0 if stays >= 1 else int(ring_blocks * max(rooms, default=0)),
            slots=slots if need.expert else 0, slot=slot,
            resident=int((need.trunk + pages) * stays), streamed=need.trunk - resident, smallest=0,
        )  # fmt: skip

    return divide


@contextmanager
def opened(
    path: Path,
    *,
    chunk: int = 4096,
    threads: int = 1,
    readers: int | None = None,
    memory: str = "2MiB",
    placement: dict[str, str] | None = None,
    layers: tuple[int, int] | None = None,
    to_gpu: bool = False,
    on_host: float | None = None,
    options: dict[str, Any] | None = None,
    direct: bool = True,
    **division: Any,
) -> Iterator[k3.Model]:
    """A model that streams: `share` of the trunk stays, in blocks of `block` bytes; `slots` experts have room.

    `readers` threads read, or where it is 0 whoever waits.  On `memory`, which is not kept, depends how many rows a
    chunk has.  With `to_gpu` it is the budget of a GPU, and with `on_host` there is one of the host as well, in which
    that share stays of what is not on the GPU.
    """
    limits: dict[str, Any] = {"chunk": chunk, "direct": direct}
    if readers is not None:
        limits["threads"] = readers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "divide", dividing(to_gpu=to_gpu, on_host=on_host, **division))
        patch.setattr(budget, "LIMITS", replace(budget.LIMITS, **limits))
        where: dict[str, Any] = {"layers": layers, **(placement or {"device": "cuda" if to_gpu else "cpu"})}
        where |= {"gpu_memory" if to_gpu else "memory": memory, **(options or {})}
        where |= {} if on_host is None else {"memory": memory}
        model = k3.Model.open(path, threads=threads, **where)
    with model:
        yield model


def play(model: k3.Model, rows: int = 70) -> dict[str, Any]:
    """One of every kind of pass, the longest of some `rows` rows; everything that it left."""
    vocab = model.config.vocab_size
    found: dict[str, Any] = {}
    with model.session() as s, model.session(latent="bf16") as other:
        found["prefill"] = s.prefill(prompt(rows, vocab=vocab), chunk=rows // 2 - 2)
        found["steps"] = step_all(s, prompt(3, vocab=vocab))
        mark = s.mark()
        with s.verify(prompt(6, seed=1, vocab=vocab)) as draft:
            found["draft"] = draft.logits.copy()
            draft.accept(4)
        found["after the draft"] = contents(s)
        other.prefill(prompt(9, seed=2, vocab=vocab))
        twin = s.fork()
        ids = [int(t) for t in prompt(3, seed=3, vocab=vocab)]
        found["batch"] = np.stack(model.step([(s, ids[0]), (other, ids[1]), (twin, ids[2])]))
        found["scores"] = s.score(prompt(rows // 2 + 5, seed=4, vocab=vocab)).logprobs
        s.rewind(mark)
        found["rewound"] = s.step(ids[0])
        found["s"], found["other"], found["twin"] = contents(s), contents(other), contents(twin)
        twin.close()
        mark.close()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict):
            same(found[name], value)
        else:
            assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name
