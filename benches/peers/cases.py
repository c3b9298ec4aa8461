# SPDX-License-Identifier: MIT
"""What is measured, in turns: decode, prefill, a busy core, a long context, snapshots, loading, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
from lab import Lab, a_busy_core
from worker import HERE, ROOT, Worker, random_ids

K3_WAYS = ["k3 stored", "k3 compact", "k3 q8"]
LLAMA_WAYS = ["llama.cpp BF16", "llama.cpp Q8_0"]
Workers = dict[str, Worker]
#: Of the largest logit, between float32 runtimes; measured: 4e-6 (mlx-lm), 2e-4 (llama.cpp, F16 cache).
F32_BOUND = 2e-3


def take(lab: Lab, case: str, label: str, threads: int, number: int, worker: Worker, **how: Any) -> None:
    """One sample of decode."""
    found = worker.ask("decode", **how)
    share = found["bytes"] / found["seconds"] / found["bandwidth"]
    lab.samples.add(
        case, label, threads, number,
        rate=(1 / found["seconds"], "token/s"), bandwidth=(found["bandwidth"] / 1e9, "GB/s"),
        share=(share, "of bandwidth"),
    )  # fmt: skip


def decode(
    lab: Lab,
    model: str,
    workers: Workers,
    threads: int,
    *,
    rounds: int,
    seconds: float,
    steps: int,
    context: int = 32,
    beside: str = "",
) -> None:
    """Single tokens at a short context; `beside` tells a second comparison of the same model apart."""
    if not lab.wants("decode"):
        return
    case = f"decode {model}{beside}"
    for worker in workers.values():
        worker.ask("decode", steps=1, context=context, fresh=True)  # weights in memory, page tables filled
    for i in lab.rounds(rounds, seconds, f"{case}, {threads} thread(s)"):
        for label, worker in lab.turns(workers, i):
            take(lab, case, label, threads, i, worker, steps=steps)


def prefill(
    lab: Lab, model: str, workers: Workers, threads: int, n: int, *, rounds: int, seconds: float
) -> None:
    """A prompt of n tokens."""
    if not lab.wants("prefill"):
        return
    case = f"prefill {n} {model}"
    for i in lab.rounds(rounds, seconds, f"{case}, {threads} thread(s)"):
        for label, worker in lab.turns(workers, i):
            took = worker.ask("prefill", n=n)["seconds"]
            lab.samples.add(case, label, threads, i, rate=(n / took, "token/s"))


def busy(lab: Lab, workers: Workers, threads: int, *, rounds: int, seconds: float) -> None:
    """Decode while one core does something else, each time after the same undisturbed."""
    if not lab.wants("busy"):
        return
    for i in lab.rounds(rounds, seconds, f"decode with a busy core, {threads} thread(s)"):
        for label, worker in lab.turns(workers, i):
            alone = 1 / worker.ask("decode", steps=3)["seconds"]
            with a_busy_core():
                disturbed = 1 / worker.ask("decode", steps=3)["seconds"]
            lab.samples.add("busy core mid", label, threads, i, rate=(disturbed, "token/s"),
                            share=(disturbed / alone, "of undisturbed"))  # fmt: skip


def long_context(lab: Lab, worker: Worker, threads: int, *, tokens: int, rounds: int, seconds: float) -> None:
    """A step at a long context against one at a short one: what it may cost is reading the latent cache once."""
    if not lab.wants("context"):
        return
    for i in lab.rounds(rounds, seconds, f"decode at {tokens} tokens of context"):
        found = worker.ask("context", tokens=tokens, steps=2)
        more, explained = found["far"] - found["near"], found["bytes"] / found["bandwidth"]
        lab.samples.add(
            "long context mid", "k3 stored", threads, i,
            near=(1 / found["near"], "token/s"), far=(1 / found["far"], "token/s"), more=(more * 1e3, "ms"),
            explained=(explained * 1e3, "ms"), share=(explained / more if more > 0 else 10.0, "of what bytes explain"),
        )  # fmt: skip


def snapshots(lab: Lab, worker: Worker, threads: int, *, tokens: int, rounds: int, seconds: float) -> None:
    """Snapshots in memory and on disk against plain copies of the same bytes."""
    if not lab.wants("snapshots"):
        return
    for i in lab.rounds(rounds, seconds, f"snapshots at {tokens} tokens"):
        found = worker.ask("snapshots", tokens=tokens)
        for name in ("snapshot", "restore", "save", "load"):
            lab.samples.add(
                f"{name} mid", "k3 stored", threads, i,
                time=(found[name] * 1e3, "ms"), copy=(found[f"{name}_copy"] * 1e3, "ms"),
                share=(found[f"{name}_copy"] / found[name], "of a copy's rate"),
            )  # fmt: skip


def ops(
    lab: Lab, model: str, label: str, worker: Worker, threads: int, *, rounds: int, seconds: float
) -> None:
    """Every op of a decode step, for the roofline."""
    if not lab.wants("ops"):
        return
    taken = []
    for _ in lab.rounds(rounds, seconds, f"ops of a step of {model}, {label}, {threads} thread(s)"):
        taken.append(worker.ask("ops", steps=100 if model == "tiny" else 4))
    lab.op_rounds[model, label, threads] = taken


def memory(lab: Lab, workers: Workers, threads: int) -> None:
    """What the processes hold, after the work above."""
    if not lab.wants("memory"):
        return
    for label, worker in workers.items():
        found = worker.ask("memory")
        lab.samples.add("memory mid", label, threads, 0, resident=(found["resident"] / 1e6, "MB"),
                        own=(found["own"] / 1e6, "MB"))  # fmt: skip
        if label.startswith("k3"):
            facts = worker.ask("describe")
            kept = found["own"] - 2 * facts["state"]
            lab.samples.add(
                "memory mid", label, threads, 0,
                file=(facts["file"] / 1e6, "MB"), trunk=(facts["bytes"]["trunk"] / 1e6, "MB"),
                private=(kept / facts["file"], "of the checkpoint"),
            )  # fmt: skip


def first_token(lab: Lab, labels: list[str], threads: int, *, rounds: int, seconds: float) -> None:
    """From an interpreter with everything imported to the logits of one token, all files in the page cache."""
    if not lab.wants("load"):
        return
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    found = {label: lab.description(label, "mid") for label in labels if label not in lab.samples.skipped}
    wanted = {label: what for label, what in found.items() if what is not None}
    for i in lab.rounds(rounds, seconds, "load to the first token"):
        for label, what in wanted.items():
            command = [sys.executable, str(HERE / "first_token.py"), json.dumps(what), str(threads),
                       "first" if i % 2 else "last"]  # fmt: skip
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            took = json.loads(lines[-1]) if lines else {"error": done.stderr[-300:]}
            if "error" in took:
                lab.skip(label, took["error"])
                continue
            lab.samples.add(
                "first token mid", label, threads, i, time=(took["seconds"], "s"), open=(took["open"], "s")
            )
            if "read" in took:
                lab.samples.add("first token mid", label, threads, i, read=(took["read"], "s"),
                                ratio=(took["seconds"] / took["read"], "of reading once"))  # fmt: skip


# ---------------------------------------------------------------- whether it is the same model at all


def agreement(lab: Lab) -> bool:
    """Compare the logits of each runtime with ours on `tiny`; False where a comparison of speed would be void.

    With float32 weights the runtimes must agree up to rounding and a latent cache of 16 bits: it is the same model.
    How far BF16 activations and 8-bit weights move the logits is stated beside it: on a random model they choose other
    experts now and then, so that the median says more than the worst row.
    """
    steps, good = 24, True
    rows = {}
    for label in [*K3_WAYS, "llama.cpp F32", *LLAMA_WAYS, "mlx-lm F32", "mlx-lm"]:
        with lab.workers([label], "tiny", 1) as workers:
            for worker in workers.values():
                file = lab.folder / "logits.npy"
                try:
                    worker.ask("logits", ids=random_ids(1024, steps).tolist(), to=str(file))
                except RuntimeError as problem:
                    lab.skip(label, str(problem))
                    continue
                rows[label] = np.load(file).astype(np.float64)
                file.unlink()
    ours = rows.pop("k3 stored")
    for label, theirs in rows.items():
        error = float(np.abs(theirs - ours).max() / np.abs(ours).max())
        cosines = (theirs * ours).sum(1) / np.linalg.norm(theirs, axis=1) / np.linalg.norm(ours, axis=1)
        cosine, same = float(np.median(cosines)), float((theirs.argmax(1) == ours.argmax(1)).mean())
        lab.samples.add("agreement tiny", label, 1, 0, error=(error, "of the largest logit"),
                        cosine=(cosine, "median"), argmax=(same, "of the rows"))  # fmt: skip
        if label == "k3 compact":
            fine, bound = bool((theirs == ours).all()), "the same bits"
        elif label.endswith("F32"):
            fine, bound = error < F32_BOUND, f"an error below {F32_BOUND}"
        else:  # activations or weights of fewer bits: its own precision, which is stated and no reason to stop
            fine, bound = True, ""
        good &= fine
        lab.say(f"logits against k3session: {label}: largest error {error:.1e}, median cosine {cosine:.5f}, the same "
                f"token in {same:.0%}: {'as expected' if fine else f'VOID, expected {bound}'}")  # fmt: skip
    return good
