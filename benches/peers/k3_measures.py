# SPDX-License-Identifier: MIT
"""What is measured of k3session alone: a long context, snapshots against plain copies, memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from worker import Bench, random_ids

import k3session as k3


def timed(what: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def stretched(snapshot: k3.Snapshot, position: int) -> k3.Snapshot:
    """The same snapshot as if it stood further on: latent rows and tokens repeated, so that no prefill is needed."""

    def rows(latent: Any) -> Any:
        return (
            None if latent is None else np.ascontiguousarray(np.resize(latent, (position, latent.shape[1])))
        )

    layers = tuple(replace(layer, latent=rows(layer.latent)) for layer in snapshot.layers)
    tokens = None if snapshot.tokens is None else np.resize(snapshot.tokens, position).astype(np.int32)
    return replace(snapshot, position=position, layers=layers, tokens=tokens)


class K3Bench(Bench):
    """The measurements of one opened model of k3session."""

    def _short(self) -> k3.Snapshot:
        """A session after a short prompt."""
        self.runner.reset()
        self._at = 0
        self.runner.prefill(random_ids(self.runner.vocab, 32))
        return self.runner.session.snapshot()  # type: ignore[no-any-return]

    def describe(self) -> dict[str, Any]:
        """What the model is and reads."""
        model = self.runner.model
        c = model.config
        return {
            "isa": model.isa,
            "bytes": self.runner.step_bytes,
            "file": sum(p.stat().st_size for p in model.path.glob("*.safetensors")),
            "state": self.runner.session.nbytes,
            "latent_per_token": len(c.full_attn_layers) * (c.kv_lora_rank + c.qk_rope_head_dim) * 4,
        }

    def context(self, tokens: int, steps: int) -> dict[str, Any]:
        """A step after few tokens and after many, one after the other, and the bandwidth between them."""
        if not hasattr(self, "_far"):
            short = self._short()
            self._near, self._far = (self.runner.model.session(marks=False) for _ in range(2))
            self._near.restore(short)
            self._far.restore(stretched(short, tokens))
        found = []
        for session in (self._near, self._far):
            session.step(self._ids[0])
            found.append(min(timed(lambda s=session: s.step(self._ids[1])) for _ in range(steps)))
        model = self.runner.model
        return {
            "near": found[0],
            "far": found[1],
            "bandwidth": self.probe(),
            "bytes": (self._far.position - self._near.position) * model.bytes_per_token,
        }

    def snapshots(self, tokens: int) -> dict[str, Any]:
        """Seconds of snapshot, restore, save and load, and of copying the same bytes to and from the same places."""
        if not hasattr(self, "_held"):
            self._held = stretched(self._short(), tokens)
            self.runner.session.restore(self._held)
            self._folder = tempfile.TemporaryDirectory(dir=Path(self.runner.model.path).parent)
        session, held = self.runner.session, self._held
        arrays = [a for layer in held.layers for a in layer.arrays().values()]
        places = [np.empty_like(a) for a in arrays]
        for place in places:
            place.fill(0)
        file, plain = (Path(self._folder.name) / n for n in ("s.k3s", "plain"))
        session.save(file)
        data = file.read_bytes()

        def write() -> None:
            part = plain.with_suffix(".part")
            with open(part, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(part, plain)
            folder = os.open(plain.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

        def read_fresh() -> None:
            # A loaded session is in memory that the process did not have before: so is this copy.
            with (
                open(plain, "rb", buffering=0) as source,
                mmap.mmap(-1, len(data), mmap.MAP_PRIVATE) as place,
            ):
                place.madvise(mmap.MADV_HUGEPAGE)
                source.readinto(place)  # type: ignore[attr-defined]

        def load() -> None:
            k3.Session.load(self.runner.model, file).close()

        pairs = {
            "snapshot": (session.snapshot, lambda: [a.copy() for a in arrays]),
            "restore": (
                lambda: session.restore(held),
                lambda: [np.copyto(p, a) for p, a in zip(places, arrays, strict=True)],
            ),
            "save": (lambda: session.save(file), write),
            "load": (load, read_fresh),
        }  # fmt: skip
        write()
        found: dict[str, Any] = {"bytes": held.nbytes}
        for name, (ours, copy) in pairs.items():
            took = [(timed(ours), timed(copy)) for _ in range(3)]
            found[name], found[f"{name}_copy"] = (min(t) for t in zip(*took, strict=True))
        return found

    def ops(self, steps: int) -> dict[str, Any]:
        """Where the time of a step goes: seconds, bytes and multiplications of each op, over all layers, a step."""
        self._short()
        session = self.runner.session
        session.step(self._ids[0])
        before = self.probe()
        with session.timed() as times:
            took = timed(lambda: [session.step(t) for t in self._ids[1 : steps + 1]]) / steps
        rate = (before + self.probe()) / 2
        rows: dict[tuple[str, str, str], list[float]] = {}
        for op in times.ops:
            row = rows.setdefault((op.component, op.op, op.matrix), [0.0] * 5)
            for i, value in enumerate(
                (op.calls, op.seconds, op.weight_bytes, op.value_bytes, op.multiplications)
            ):
                row[i] += value / steps
        return {"seconds": took, "bandwidth": rate, "rows": [[*key, *row] for key, row in rows.items()]}
