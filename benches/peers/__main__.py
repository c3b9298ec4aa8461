# SPDX-License-Identifier: MIT
"""k3session beside the other runtimes that run K3, on this machine: `make bench-peers`, or ``python benches/peers``.

Makes the checkpoints, measures the machine, checks that every runtime computes the same model, then measures in turns
and prints what was reached of each goal.  A runtime that is not installed is skipped with a line that says so:

    pip install gguf mlx-lm
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python==0.3.36 --no-binary llama-cpp-python

About 15 minutes on two cores that do nothing else, 3 with ``--quick``.  Results go to benches/results/peers*.csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]  # the checkout, where it is not installed

import cases  # noqa: E402
import machine  # noqa: E402
import quality  # noqa: E402
import report  # noqa: E402
import roofline  # noqa: E402
from goals import lines  # noqa: E402
from lab import CASES, Lab  # noqa: E402
from machine_id import identity  # noqa: E402


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python benches/peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and short prompts: 3 minutes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", metavar="DIR",
                        help="where checkpoints and GGUF files are kept, 9 GB (default: build/peers)")  # fmt: skip
    parser.add_argument(
        "--mid", type=Path, metavar="DIR", help="a checkpoint of the mid preset that is there already"
    )
    parser.add_argument("--results", type=Path, metavar="DIR",
                        help="where the results go (default: benches/results; of a part, the folder)")  # fmt: skip
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        metavar="CASE",
        help=f"a part of it: some of {', '.join(CASES)}",
    )
    parser.add_argument("--only", choices=("tiny", "mid"), help="a part of it: one of the two models")
    return parser.parse_args()


def measure_machine(lab: Lab, model: Path | None) -> dict[str, object]:
    """What the machine is and can do."""
    facts: dict[str, object] = {**identity(), "python": sys.version.split()[0]}
    facts["load before"] = round(os.getloadavg()[0], 2)
    for package in ("k3session", "llama_cpp_python", "gguf", "mlx", "mlx-lm"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    lab.say(", ".join(f"{k} {v}" for k, v in facts.items()))
    if model is not None and lab.wants("machine"):
        shard = max(model.glob("*.safetensors"), key=lambda p: p.stat().st_size)
        for name, rate in machine.read_rates(shard, 3 if lab.quick else 7).items():
            facts[f"{name}, GB/s"] = round(rate["median"] / 1e9, 1)
    if lab.wants("machine", "ops"):
        facts |= {f"peak {name}, one core, G/s": round(rate / 1e9) for name, rate in machine.peaks().items()}
    if lab.wants("machine"):
        facts |= {f"{name}, GB/s": round(rate / 1e9, 2) for name, rate in machine.disk(lab.folder).items()}
    lab.say("the machine: " + "; ".join(f"{k}: {v}" for k, v in facts.items() if "/s" in k))
    return facts


def ways(lab: Lab) -> list[str]:
    """Who takes turns: ours alone where no peer is compared, nobody where nothing of this kind is measured."""
    peers = cases.LLAMA_WAYS if lab.wants("decode", "prefill", "busy", "memory") else []
    return [*cases.K3_WAYS, *peers] if peers or lab.wants("ops") else []


def measure_mid(lab: Lab) -> None:
    """Everything about `mid`."""
    quick = lab.quick
    for threads in dict.fromkeys((1, lab.all_threads)):
        every = threads == lab.all_threads
        with lab.workers(ways(lab), "mid", threads) as fast:
            cases.decode(
                lab, "mid", fast, threads, rounds=4 if quick else 11, seconds=15 if quick else 75, steps=3
            )
            two = {label: w for label, w in fast.items() if label in ("k3 stored", "llama.cpp BF16")}
            if every:
                cases.busy(lab, two, threads, rounds=3 if quick else 7, seconds=10 if quick else 40)
                cases.memory(lab, fast, threads)
            for label in cases.K3_WAYS if every or not quick else ():
                if label in fast:
                    cases.ops(lab, "mid", label, fast[label], threads, rounds=2 if quick else 5, seconds=15)
            if lab.wants("prefill") and (every or not quick):
                with lab.workers(["k3 bf16 prefill"], "mid", threads) as more:
                    most = {**fast, **more}
                    shown = most if every and not quick else {**two, **more}
                    cases.prefill(
                        lab, "mid", shown, threads, 128, rounds=2 if quick else 3, seconds=10 if quick else 60
                    )
                    if every and not quick:
                        cases.prefill(lab, "mid", {**two, **more}, threads, 512, rounds=3, seconds=120)
        if every and not quick and lab.wants("decode"):
            # It takes seconds for a token and has all weights in memory of its own: apart from the others.
            with lab.workers(["k3 stored", "mlx-lm"], "mid", threads) as slow:
                if "mlx-lm" in slow:
                    cases.decode(
                        lab,
                        "mid",
                        slow,
                        threads,
                        rounds=3,
                        seconds=20,
                        steps=2,
                        context=2,
                        beside=" and mlx-lm",
                    )
        if every and (lab.wants("snapshots", "context")):
            # Memory that a long context takes belongs to no other measurement: a process of its own.
            with lab.workers(["k3 stored"], "mid", threads) as alone:
                worker = alone["k3 stored"]
                cases.snapshots(lab, worker, threads, tokens=544, rounds=5 if quick else 11, seconds=20)
                cases.long_context(lab, worker, threads, tokens=32768, rounds=4 if quick else 9, seconds=30)
    labels = ["k3 stored"] if quick else [*cases.K3_WAYS, *cases.LLAMA_WAYS]
    cases.first_token(lab, labels, lab.all_threads, rounds=2 if quick else 5, seconds=10 if quick else 60)


def measure_tiny(lab: Lab) -> None:
    """Everything about `tiny`: the time per token beside the weights."""
    for threads in dict.fromkeys((1, lab.all_threads)):
        with lab.workers(ways(lab), "tiny", threads) as workers:
            cases.decode(lab, "tiny", workers, threads, rounds=5 if lab.quick else 11, seconds=20, steps=100)
            if "k3 stored" in workers:
                cases.ops(lab, "tiny", "k3 stored", workers["k3 stored"], threads, rounds=5, seconds=10)
            if not lab.quick:
                cases.prefill(lab, "tiny", workers, threads, 512, rounds=5, seconds=20)


def show_ops(
    lab: Lab, facts: dict[str, object], date: str
) -> list[tuple[dict[str, object], list[roofline.OpLine]]]:
    """Print the ops of a step of each way and number of threads against their limits."""
    peak = facts.get("peak f32, one core, G/s")
    tables = []
    for (model, label, threads), taken in lab.op_rounds.items():
        found = roofline.op_lines(taken, float(str(peak)) * 1e9 * threads if peak else None)
        token = statistics.median(t["seconds"] for t in taken)
        roofline.show(found, token, f"{model}, {label}, {threads} thread(s)")
        values = (facts["id"], date, model, threads, label.removeprefix("k3 "))
        tables.append((dict(zip(roofline.OF, values, strict=True)), found))
    return tables


def main() -> int:
    """Run all of it; 1 where the runtimes do not compute the same model."""
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    wanted = None if given.cases is None else frozenset(given.cases)
    lab = Lab(given.folder, {} if given.mid is None else {"mid": given.mid}, given.quick, wanted)
    mid = None if given.only == "tiny" else lab.model("mid")
    facts = measure_machine(lab, mid)
    same = cases.agreement(lab) if lab.wants("agreement") else None
    if same is False:
        lab.say("VOID: the runtimes do not compute the same model; what follows compares nothing")
    if given.only != "mid":
        measure_tiny(lab)
    if mid is not None:
        measure_mid(lab)
    if lab.wants("exactness"):
        quality.measure(lab)
    name = f"{facts['cpu']}, {facts['cores']} cores, {facts['isa']}, id {facts['id']}"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    whole = wanted is None and given.only is None
    reached = lines(lab.samples, lab.all_threads)
    void = "\nVOID: the runtimes do not compute the same model" if same is False else ""
    print(f"\n{name}, {date}{void}")
    report.print_rates(lab.samples)
    report.print_ratios(lab.samples)
    report.print_rest(lab.samples)
    quality.show(lab)
    tables = show_ops(lab, facts, date)
    report.print_goals([line for line in reached if whole or line.verdict != "not measured"])
    for label, why in lab.samples.skipped.items():
        print(f"skipped: {label}: {why}")
    to = given.results or (ROOT / "benches" / "results" if whole else given.folder)
    to.mkdir(parents=True, exist_ok=True)
    lab.samples.write(to / "peers.csv", str(facts["id"]), date)
    report.write_goals(to / "peers-goals.csv", reached, str(facts["id"]), date)
    roofline.write(to / "roofline.csv", tables)
    report.write_machine(
        to / "peers-machine.csv", facts | {"date": date, "quick": given.quick, "same model": same}
    )
    problem = report.plot(lab.samples, to / "peers.svg", name)
    if problem is not None:
        print(problem)
    lab.say(f"done; {to}/peers*.csv")
    return 1 if same is False else 0


if __name__ == "__main__":
    sys.exit(main())
