# SPDX-License-Identifier: MIT
"""What a machine with a GPU has to show: `make gpu-check`.  No network, five minutes at most.

Parity of the ops and of whole models with the CPU and the golden data; the bits of every kernel without tensor cores
against those of the emulator; compute-sanitizer where it is on PATH; what a token asks the driver for; then times, of
single ops and of a whole token, against their floor: bytes over the measured bandwidth of a copy.  Results go to
benches/results/gpu.json.  Without a GPU it says so and exits with 2; with a failed check, with 1.

For a dry run without a GPU, name the emulator in K3_LIBCUDA: everything is then small and marked as emulated, goes to
build/gpu-emulated.json, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import k3session as k3
from k3session._core.driver import driver
from k3session._core.gpu import KERNELS, Arena, Device, usable
from k3session._core.kernels import Kernels
from k3session._core.stream import Stream
from k3session.synth import synth

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 290
STARTED = time.monotonic()
STEPS = 32
Result = dict[str, Any]


def left() -> float:
    """Seconds that this run still has."""
    return SECONDS - (time.monotonic() - STARTED)


def child(*command: str, most: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this checkout within its share of the time; 124 where it takes longer."""
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
    limit = max(1.0, min(most, left()))
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not done after {limit:.0f} s")


def itself(task: str, *arguments: object, most: float, **more: str) -> subprocess.CompletedProcess[str]:
    """One of the tasks below, in a process of its own: a process opens one driver."""
    return child(sys.executable, __file__, "--task", task, *map(str, arguments), most=most, **more)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


# ---------------------------------------------------------------- tasks, each in a process of its own


def cases(path: str, counted: str = "") -> None:
    """The results of every small shape, and where the emulator runs them which kernels they were."""
    from kernel_cases import GROUPS  # the tests' tools, which need pytest

    np.savez(path, **{name.replace("/", "|"): array for group in GROUPS for name, array in group()})
    launched = None
    if counted:
        from device_tools import emulator

        emu = emulator()
        launched = [name for name in KERNELS if emu.count(name)]
    print(json.dumps(launched))


def counters() -> None:
    """What the driver was asked for by one step: counted by the emulator, of the same code."""
    from device_tools import emulator

    names = ["copies_in", "copies_out", "graph_launches", "launches", "synchronisations", "allocations"]
    emu = emulator()
    with tempfile.TemporaryDirectory() as folder:
        path = synth(Path(folder) / "model", "micro")
        with k3.Model.open(path, device="cuda") as model, model.session(marks=False) as s:
            s.prefill([1, 2, 3])
            s.step(4)
            s.step(5)
            before = {name: emu.count(name) for name in names}
            s.step(6)
            print(json.dumps({name: emu.count(name) - before[name] for name in names}))


def short() -> None:
    """A little of everything, for compute-sanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = synth(Path(folder) / "model", "micro")
        for precision in ("exact", "bf16x2"):
            with (
                k3.Model.open(path, device="cuda", prefill_precision=precision) as model,
                model.session() as s,
            ):
                s.prefill(np.arange(20) % 32)
                s.step(1)
                s.step(2)
                s.snapshot()


TASKS: dict[str, Callable[..., None]] = {"cases": cases, "counters": counters, "short": short}


# ---------------------------------------------------------------- checks


def emulator_library() -> str:
    """The emulator that `make` built for the tests."""
    build = runpy.run_path(str(ROOT / "cuda" / "emulator" / "build.py"))["build"]
    return str(build())


def parity(emulated: bool) -> Result:
    """Each op and whole models, by their tests."""
    tests = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_ops_*.py"))
    what = ["tests/test_ops_rows.py"] if emulated else [*tests, "tests/test_cuda_model.py"]
    done = child(sys.executable, "-m", "pytest", "-q", "-x", *what, most=120, K3_TEST_DEVICE="gpu")
    said = last_line(done.stdout) or done.stderr
    return {"passed": done.returncode == 0, "files": what, "summary": said}


def bits() -> Result:
    """Every kernel without tensor cores, on the emulator and here: equal in each bit."""
    sys.path.append(str(ROOT / "tests"))
    from kernel_cases import TENSOR_CORES

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("emulator.npz", "here.npz")]
        there = itself("cases", paths[0], "counted", most=90, K3_LIBCUDA=emulator_library())
        here = itself("cases", paths[1], most=60)
        for run in (there, here):
            if run.returncode:
                return {"passed": False, "summary": last_line(run.stderr)}
        with np.load(paths[0]) as a, np.load(paths[1]) as b:
            names = [n for n in a.files if not n.startswith(TENSOR_CORES)]
            missing = sorted(set(a.files) ^ set(b.files))
            differ = [n for n in names if n in b.files and a[n].tobytes() != b[n].tobytes()]
            off = {
                n: float(np.max(np.abs(a[n] - b[n])) / np.max(np.abs(a[n])))
                for n in a.files
                if n.startswith(TENSOR_CORES) and n in b.files
            }
    launched = json.loads(last_line(there.stdout))
    never = sorted(set(KERNELS) - set(launched))
    return {
        "passed": not (differ or missing or never) and all(value < 1e-4 for value in off.values()),
        "compared": len(names),
        "differ": differ,
        "missing": missing,
        "kernels_never_launched": never,
        "tensor_cores_off_by": off,
        "summary": f"{len(names) - len(differ)} of {len(names)} results equal in every bit",
    }


def sanitizer() -> Result:
    """compute-sanitizer over a short run."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"passed": None, "summary": "compute-sanitizer is not on PATH"}
    found: Result = {"passed": True}
    for check in ("memcheck", "racecheck"):
        command = [
            tool,
            "--tool",
            check,
            "--error-exitcode",
            "9",
            sys.executable,
            __file__,
            "--task",
            "short",
        ]
        done = child(*command, most=45)
        found[check] = last_line(done.stdout) or last_line(done.stderr)
        found["passed"] = found["passed"] and done.returncode == 0
    found["summary"] = "; ".join(f"{check}: {found[check]}" for check in ("memcheck", "racecheck"))
    return found


def token_costs(emulated: bool) -> Result:
    """One of each by the emulator's count, and here no memory and no new recording over many steps."""
    counted = itself("counters", most=60, K3_LIBCUDA=emulator_library())
    if counted.returncode:
        return {"passed": False, "summary": last_line(counted.stderr)}
    asked = json.loads(last_line(counted.stdout))
    want = {"copies_in": 1, "copies_out": 1, "graph_launches": 1, "synchronisations": 1}
    with tempfile.TemporaryDirectory() as folder, Device() as device:
        path = synth(Path(folder) / "model", "micro")
        with k3.Model.open(path, device="cuda") as model, model.session(marks=False) as s:
            s.prefill([1, 2, 3])
            s.step(4)
            s.step(5)
            before, recorded = device.allocated, s._scratch.backend.recorded
            for t in range(8 if emulated else STEPS):
                s.step(t)
            grown, more = device.allocated - before, s._scratch.backend.recorded - recorded
    return {
        "passed": {n: k for n, k in asked.items() if k} == want and grown == more == 0,
        "counted_by_the_emulator": asked,
        "bytes_grown": grown,
        "recordings_added": more,
        "summary": "a step is one copy in, one graph, one copy out, one wait"
        if grown == 0
        else f"grew by {grown} bytes",
    }


# ---------------------------------------------------------------- times


def bandwidth(emulated: bool) -> float:
    """Bytes per second that a copy within the device moves, read and written."""
    nbytes = 1 << (16 if emulated else 30)
    times = 2 if emulated else 20
    with Device() as device:
        stream, arena = Stream(device), Arena(device)
        to, start = arena.alloc(nbytes), arena.alloc(nbytes, True)
        best = float("inf")
        for _ in range(3):
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(times):
                stream.copy(to, start, nbytes)
            stream.synchronize()
            best = min(best, (time.perf_counter() - began) / times)
        stream.close()
        arena.close()
    return 2 * nbytes / best


def torch_times(seconds: dict[str, float], rows: int) -> None:
    """PyTorch's time for the ops that it has as one call, where PyTorch is installed and sees the GPU."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    from bench_ops import C

    if not torch.cuda.is_available():
        return

    def timed(call: Callable[[], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        for times in (20, 200):
            began = time.perf_counter()
            for _ in range(times):
                graph.replay()
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / 200

    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, w = torch.randn(rows, C.hidden_size, **options), torch.randn(C.kda_dim, C.hidden_size, **options)
    seconds["linear_bf16"] = timed(lambda: torch.nn.functional.linear(x, w))
    y, norm = torch.randn(rows, C.hidden_size, device="cuda"), torch.randn(C.hidden_size, device="cuda")
    seconds["rms_norm"] = timed(lambda: torch.nn.functional.rms_norm(y, (C.hidden_size,), norm, 1e-5))


def kernels(rate: float, emulated: bool) -> list[Result]:
    """Each op in the shapes of the mid preset; weights that fit the cache may beat the floor."""
    if not hasattr(Kernels, "timed"):
        return []
    from bench_ops import DIMS, OPS

    found = []
    for rows in (1,) if emulated else (1, 64):
        theirs: dict[str, float] = {}
        if not emulated:
            torch_times(theirs, rows)
        for op in OPS[6:9] if emulated else OPS:
            if left() < 30:
                return found
            k = Kernels("cuda", rows=64, timed=2 if emulated else 200, **DIMS)
            call = op(k, rows)
            call.run()
            floor = call.nbytes / rate
            found.append(
                {
                    "op": op.__name__,
                    "rows": rows,
                    "microseconds": k.seconds * 1e6,
                    "floor": floor * 1e6,
                    "of_floor": floor / k.seconds,
                    "torch": theirs[op.__name__] * 1e6 if op.__name__ in theirs else None,
                }
            )
    return found


def bytes_of_a_token(model: k3.Model) -> int:
    """Weights that one token reads: of the experts those that it chooses, of the embedding one row."""
    checkpoint, c = model._checkpoint, model.config
    assert checkpoint is not None
    total = 0.0
    for name in checkpoint.names:
        nbytes = checkpoint.info(name).nbytes
        if ".experts." in name:
            total += nbytes * c.num_experts_per_token / c.num_experts
        elif not name.endswith("embed_tokens.weight") or c.tie_word_embeddings:
            total += nbytes
    return int(total)


def tokens(rate: float, emulated: bool) -> list[Result]:
    """Steps of whole models after a short prompt, and prefill."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, Path] = {}
        for name in ("micro",) if emulated else ("micro", "tiny"):
            models[name] = synth(Path(folder) / name, name)
        if not emulated:
            models["shakespeare"] = k3.model.DEFAULT_MODEL
            if os.environ.get("K3_BENCH_MID"):
                models["mid"] = Path(os.environ["K3_BENCH_MID"])
        for name, path in models.items():
            if left() < 20:
                break
            with k3.Model.open(path, device="cuda") as model, model.session(marks=False) as s:
                ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 128).astype(np.int32)
                ids = ids[: 4 if emulated else 128]
                s.prefill(ids)
                began = time.perf_counter()
                s.prefill(ids)
                prefill = len(ids) / (time.perf_counter() - began)
                out = np.empty(model.config.vocab_size, np.float32)
                times = []
                for i in range(4 if emulated else 200):
                    began = time.perf_counter()
                    s.step(int(ids[i % len(ids)]), out=out)
                    times.append(time.perf_counter() - began)
                step, nbytes = float(np.median(times[2:])), bytes_of_a_token(model)
            floor = nbytes / rate
            found.append(
                {
                    "model": name,
                    "microseconds": step * 1e6,
                    "p99": float(np.percentile(times[2:], 99)) * 1e6,
                    "bytes": nbytes,
                    "floor": floor * 1e6,
                    "of_floor": floor / step,
                    "prefill_tokens_per_second": prefill,
                }
            )
    return found


# ---------------------------------------------------------------- the whole


def guarded(check: Callable[..., Result], *arguments: Any) -> Result:
    """A check that breaks has failed; the others still run."""
    began = time.monotonic()
    if left() < 20:
        return {"passed": None, "summary": "no time was left"}
    try:
        result = check(*arguments)
    except Exception as error:  # noqa: BLE001  whatever it was, it is told
        result = {"passed": False, "summary": f"{type(error).__name__}: {error}"}
    return result | {"seconds": round(time.monotonic() - began, 1)}


def table(title: str, rows: list[Result], name: str) -> None:
    print(f"\n{title:28} {'us':>10} {'floor':>10} {'of floor':>9} {'torch':>9}")
    for row in rows:
        label = f"{row[name]} x {row['rows']}" if "rows" in row else row[name]
        torch = f"{row['torch']:9.1f}" if row.get("torch") else ""
        print(
            f"{label:28} {row['microseconds']:10.1f} {row['floor']:10.2f} {row['of_floor']:9.0%} {torch:>9}"
        )


def main() -> int:
    """Run all of it; 0 where nothing failed."""
    parser = argparse.ArgumentParser(description="Check and time the GPU kernels on this machine's GPU.")
    parser.add_argument("--task", choices=sorted(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        TASKS[given.task](*given.arguments)
        return 0
    problem = usable(0)
    if problem is not None:
        print(f"gpu-check: no GPU can be used here: {problem}.")
        return 2
    with Device() as device:
        emulated = device.name.startswith("k3emu")
        machine = {
            "gpu": device.name,
            "capability": ".".join(map(str, device.capability)),
            "multiprocessors": device.multiprocessors,
            "memory": device.total_memory,
            "cuda": driver()["cuda"],
            "python": platform.python_version(),
            "k3session": k3.__version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
    print(machine["gpu"] + (": emulated, a dry run" if emulated else ""))
    checks: dict[str, Result] = {}
    for name, check, arguments in (
        ("parity", parity, (emulated,)),
        ("bits", bits, ()),
        ("sanitizer", sanitizer, ()),
        ("a token", token_costs, (emulated,)),
    ):
        checks[name] = result = guarded(check, *arguments)
        verdict = {True: "passed", False: "FAILED", None: "not run"}[result["passed"]]
        print(f"{name:10} {verdict:8} {result['summary']}", flush=True)
    rate = bandwidth(emulated)
    found = {
        "emulated": emulated,
        "machine": machine,
        "checks": checks,
        "copy_bytes_per_second": rate,
        "kernels": kernels(rate, emulated),
        "tokens": tokens(rate, emulated),
        "seconds": round(time.monotonic() - STARTED, 1),
    }
    print(f"\na copy moves {rate / 1e9:.1f} GB/s, read and written")
    if found["kernels"]:
        table("op x rows", found["kernels"], "op")
    else:
        print("single ops were not timed: this build's Kernels has no timed=")
    table("a token of", found["tokens"], "model")
    to = ROOT / ("build/gpu-emulated.json" if emulated else "benches/results/gpu.json")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{to.relative_to(ROOT)}: {found['seconds']} s in all")
    return 1 if any(c["passed"] is False for c in checks.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
