# SPDX-License-Identifier: MIT
"""Programs that test_pipeline.py runs in the first process of a pipeline, the others being in `serve`.

Each prints one line of JSON; what it says of bits is compared there with a model in one process.
"""

from __future__ import annotations

import ast
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import k3session as k3
from k3session.pipeline import PipelineModel, PipelineSession


def ids(n: int, seed: int) -> Any:
    return np.random.default_rng([n, seed]).integers(0, 97, n).astype(np.int32)


def digest(*values: Any) -> str:
    """What was computed, to the bit."""
    state = xxhash.xxh3_128()
    for value in values:
        state.update(np.ascontiguousarray(value).tobytes())
    return state.hexdigest()


def session_digest(session: k3.Session) -> str:
    snap = session.snapshot()
    arrays = [array for layer in snap.layers for array in layer.arrays().values()]
    return digest(session.tokens, session.logits, *arrays)


def everything(model: k3.Model, folder: Path) -> list[Any]:
    """200 tokens, through all that a session can do; the same on any model, however its layers are cut."""
    seen: list[Any] = []
    with model.session() as s, model.session(latent="bf16") as u:
        seen.append(digest(s.prefill(ids(90, 1), chunk=32)))
        u.prefill(ids(30, 2))
        seen += [digest(s.step(int(t))) for t in ids(40, 3)]
        with s.fork(seed=3) as t:
            seen += [digest(row) for row in model.step([(s, 5), (t, 6), (u, 7)])]
            rows = model.forward([(s, ids(20, 4)), (t, ids(64, 5)), (u, ids(3, 6))])
            seen += [digest(row) for row in rows]
            seen += [session_digest(t), session_digest(u)]
        mark = s.mark()
        with s.verify(ids(12, 7)) as d:
            seen.append(digest(d.logits))
            d.accept(5)
        seen.append([r.token for r in s.generate(30, sampling=k3.Sampling(temperature=1.0, seed=9))])
        seen.append(s.rewind(mark))
        seen.append(s.rewind(s.position - 30))
        seen += [digest(s.step(int(t))) for t in ids(40, 8)]
        seen += [s.position, session_digest(s)]
        s.save(folder / "whole.k3s", marks=True)
    with k3.Session.load(model, folder / "whole.k3s") as s:
        seen += [s.resume, s.rewind(100), digest(s.step(3)), session_digest(s)]
    return seen


def bits(model: PipelineModel, folder: Path) -> Any:
    return {"seen": everything(model, folder), "ranges": model.ranges}


def goes_on(model: PipelineModel, folder: Path) -> Any:
    """Take up what another cut has saved, step, and save it again, each process its layers."""
    with PipelineSession.load(model, folder / "saved.k3s") as s:
        seen = [s.resume, s.position, *(digest(s.step(int(t))) for t in ids(20, 11))]
        s.save(folder / "saved.k3s", parts=True, marks=True)
    return seen


def many_threads(model: PipelineModel, folder: Path) -> Any:
    found: dict[int, str] = {}

    def work(i: int) -> None:
        with model.session() as s:
            s.prefill(ids(20, i))
            found[i] = digest(*(s.step(int(t)) for t in ids(25, 50 + i)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(4)]


def small_error(model: PipelineModel, folder: Path) -> Any:
    """An error of one order, in the last stage: told, and nothing else happens."""
    with model.session() as s:
        s.prefill(ids(5, 1))
        snap = s.snapshot()
        snap.layers[-1].latent[:] = np.nan
        said = []
        s.restore(snap)
        try:
            s.step(1)
        except k3.NonFiniteError as error:
            said.append(error.layer)
        s.rewind(0)
        s.prefill(ids(5, 1))
        try:
            model._line.call_at(model._line.size - 1, "array", 987654, 6, "latent")
        except k3.ClosedError as error:
            said.append(str(error))
        bad = k3.Boundary.begin([k3.Segment(s._timeline.name, 5, 1)], [3])
        object.__setattr__(bad, "segments", (k3.Segment(987654, 5, 1),))
        model._line.start(bad)
        try:
            model._line.finish(bad.number)
        except k3.ClosedError as error:
            said.append(str(error))
        for options in ({}, {"memoory": 1}):
            try:
                PipelineModel.open(folder, **options)
            except (k3.ConfigError, TypeError) as error:
                said.append(str(error))
        return [*said, s.position, digest(s.step(4))]


def large_error(model: PipelineModel, folder: Path) -> Any:
    """An order that breaks the last process: a method that fails with what is no error of this package."""
    with model.session() as s:
        s.prefill(ids(5, 1))
        s.save(folder / "last.k3s")
        try:
            model._line.call_at(model._line.size - 1, "position", ["no name at all"])
        except k3.pipeline.PipelineError as error:
            print(json.dumps({"told": str(error)}), flush=True)
            time.sleep(30)
    return "it went on"


def uncaught(model: PipelineModel, folder: Path) -> Any:
    raise ZeroDivisionError("in the program of the first process")


def endless(model: PipelineModel, folder: Path) -> Any:
    """Step and save until somebody ends it; a file of one's own says who the processes are."""
    pids = [p["pid"] for p in model._line.call("probe", 1)]
    path = folder / "last.k3s"
    s = PipelineSession.load(model, path) if path.exists() else model.session()
    temporary = folder / "pids.tmp"
    temporary.write_text(json.dumps(pids))
    temporary.rename(folder / "pids")
    rng = random.Random(1)
    while True:
        for _ in range(3):
            s.step(rng.randrange(97))
        s.save(path, parts=rng.random() < 0.5)


def main(what: str, model_folder: str, folder: str, layers: str = "None", micro_rows: str = "16") -> None:
    options = {"layers": ast.literal_eval(layers), "micro_rows": int(micro_rows)}
    with PipelineModel.open(model_folder, threads=1, **options) as model:
        print(json.dumps(globals()[what](model, Path(folder))), flush=True)


if __name__ == "__main__":
    os.environ.pop("K3_NUM_THREADS", None)
    main(*sys.argv[1:])
