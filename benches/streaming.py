# SPDX-License-Identifier: MIT
"""A model within several memory budgets: the same bits, the peak of memory, and how much of the disk is used.

    python benches/streaming.py DIR --budgets 1400MiB 3GiB 6GiB --csv benches/results/streaming.csv

Each budget is a process of its own, whose peak is read from outside (VmHWM).  Direct reads of the same files are
measured in turns with the steps of the same process, so that the share of the disk is that of the moment.  ``mapped``
is the model without a budget.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import k3session as k3
from k3session.rates import disk_rate

PROMPT = 8


def child(folder: str, budget: str, rounds: int, steps: int, probe: float) -> dict[str, Any]:
    """Run one budget; what it found, before the process is measured from outside."""
    files = sorted(Path(folder).glob("*.safetensors"))
    began = time.perf_counter()
    model = k3.Model.open(folder, device="cpu", memory=None if budget == "mapped" else budget)
    opened = time.perf_counter() - began
    rng = np.random.default_rng(1)
    ids = rng.integers(0, model.config.vocab_size, PROMPT + rounds * steps).astype(np.int32)
    digest, seconds, disk, waits, reads, shares = hashlib.sha256(), [], [], [], [], []
    session = model.session(marks=False)
    digest.update(session.prefill(ids[:PROMPT]).tobytes())
    streamer = model._engine.streamer
    after_prefill = session.stats
    disk.append(disk_rate(files, probe) if streamer else 0.0)
    for i in range(rounds):
        before, waited = (streamer.bytes_read if streamer else 0), session.stats.disk_seconds
        began = time.perf_counter()
        for token in ids[PROMPT + i * steps : PROMPT + (i + 1) * steps].tolist():
            digest.update(session.step(token).tobytes())
        taken = time.perf_counter() - began
        seconds.append(taken / steps)
        waits.append((session.stats.disk_seconds - waited) / taken)
        if streamer:
            reads.append((streamer.bytes_read - before) / taken)
            disk.append(disk_rate(files, probe))
            shares.append(2 * reads[-1] / (disk[-2] + disk[-1]))
    stats = session.stats
    size = sum(f.stat().st_size for f in files)
    plan = model.memory
    return {
        "budget": budget,
        "budget_bytes": plan.budget if plan else 0,
        "checkpoint_bytes": size,
        "isa": model.isa,
        "threads": model.threads,
        "resident_bytes": plan.resident if plan else 0,
        "slots": plan.slots if plan else 0,
        "block_bytes": plan.block if plan else 0,
        "ring_bytes": plan.ring if plan else 0,
        "open_seconds": round(opened, 2),
        "seconds_per_token": round(statistics.median(seconds), 4),
        "fastest": round(min(seconds), 4),
        "slowest": round(max(seconds), 4),
        "disk_bytes_per_token": int((stats.disk_bytes - after_prefill.disk_bytes) / (rounds * steps)),
        "expert_hit_rate": "" if stats.expert_hit_rate is None else round(stats.expert_hit_rate, 3),
        "waited_share": round(statistics.median(waits), 3),
        "stream_bytes_per_second": int(statistics.median(reads)) if reads else 0,
        "direct_bytes_per_second": int(statistics.median(disk)),
        "disk_share": round(statistics.median(shares), 3) if shares else "",
        "disk_share_low": round(min(shares), 3) if shares else "",
        "disk_share_high": round(max(shares), 3) if shares else "",
        "logits_sha256": digest.hexdigest()[:16],
    }


def run(folder: str, budget: str, args: argparse.Namespace) -> dict[str, Any]:
    """One budget in a process of its own, and the peak of its memory as the kernel counted it."""
    command = [sys.executable, __file__, folder, "--child", budget, "--rounds", str(args.rounds)]
    command += ["--steps", str(args.steps), "--probe", str(args.probe)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{budget}: the process ended with {process.wait()}")
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
    peak = next(int(s.split()[1]) * 1024 for s in status.splitlines() if s.startswith("VmHWM"))
    found: dict[str, Any] = json.loads(line)
    found["peak_bytes"] = peak
    found["peak_over_budget"] = round(peak / found["budget_bytes"], 4) if found["budget_bytes"] else ""
    return found


def table(path: str | Path) -> str:
    """Return the results of a CSV as the table of docs/memory.md."""
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = (
        "budget", "of the checkpoint", "peak", "s a token (range)", "read a token", "experts found",
        "share of the disk (range)",
    )  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for r in rows:
        seconds = (
            f"{float(r['seconds_per_token']):.2f} ({float(r['fastest']):.2f} to {float(r['slowest']):.2f})"
        )
        if r["budget"] == "mapped":
            peak = f"{int(r['peak_bytes']) / 2**30:.2f} GiB"
            lines.append(f"| none: mapped, all of it in memory | | {peak} | {seconds} | | | |")
            continue
        part = int(r["budget_bytes"]) / int(r["checkpoint_bytes"])
        hits = f"{float(r['expert_hit_rate']):.0%}" if r["expert_hit_rate"] else ""
        share, low, high = (float(r[k]) for k in ("disk_share", "disk_share_low", "disk_share_high"))
        lines.append(
            f"| {r['budget']} | {part:.0%} | {float(r['peak_over_budget']):.0%} of the budget | {seconds} "
            f"| {int(r['disk_bytes_per_token']) / 1e9:.2f} GB | {hits} | {share:.0%} ({low:.0%} to {high:.0%}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all budgets, print them, and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder")
    parser.add_argument("--budgets", nargs="+", default=["mapped", "1400MiB", "3GiB", "6GiB"])
    parser.add_argument(
        "--rounds", type=int, default=9, help="steps between two probes of the disk, so often"
    )
    parser.add_argument("--steps", type=int, default=1, help="in a round")
    parser.add_argument("--probe", type=float, default=0.5, help="seconds of direct reads in a probe")
    parser.add_argument("--csv")
    parser.add_argument("--table", action="store_true", help="print the table of a CSV, given as DIR")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.table:
        print(table(args.folder))
        return
    if args.child:
        print(json.dumps(child(args.folder, args.child, args.rounds, args.steps, args.probe)), flush=True)
        sys.stdin.read()
        os._exit(0)
    rows = []
    for budget in args.budgets:
        rows.append(
            {"machine": platform.machine(), "cores": os.cpu_count(), **run(args.folder, budget, args)}
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if len({r["logits_sha256"] for r in rows}) != 1:
        raise SystemExit("the logits differ between budgets")


if __name__ == "__main__":
    main()
