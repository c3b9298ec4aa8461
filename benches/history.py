# SPDX-License-Identifier: MIT
"""The history of `make bench`: what has become slower on this machine by more than it varies.

pytest-benchmark saves every run; ``python benches/history.py before`` prints the option that has it compare with the
last one of this machine, and ``check`` compares the newest run with the five before it.  A benchmark has moved where
the middle half of its times lies outside of the middle halves of all of those, and its median by 5% outside of their
medians.
Runs of other machines are never compared; that they are there is said.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORAGE = Path(__file__).resolve().parent.parent / ".benchmarks"
EARLIER = 5
LEAST = 0.05


@dataclass(frozen=True)
class Run:
    """One saved run: its number, its machine, and name -> statistics of its benchmarks."""

    number: str
    machine: str | None
    stats: dict[str, dict[str, float]]


def runs(storage: Path = STORAGE) -> list[Run]:
    """All saved runs, the oldest first."""
    found = []
    for path in sorted(storage.glob("*/[0-9][0-9][0-9][0-9]_*.json"), key=lambda p: p.name):
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stats = {b["fullname"]: b["stats"] for b in data["benchmarks"]}
        found.append(Run(path.name[:4], data["machine_info"].get("id"), stats))
    return found


def moved(new: Run, earlier: list[Run]) -> dict[str, float]:
    """Name -> how many times as long as before, of what is outside of the spread of the earlier runs."""
    found = {}
    for name, now in new.stats.items():
        before = [run.stats[name] for run in earlier if name in run.stats]
        if not before:
            continue
        low, high = (pick(s["median"] for s in before) for pick in (min, max))
        if now["q1"] > max(s["q3"] for s in before) and now["median"] > high * (1 + LEAST):
            found[name] = now["median"] / high
        elif now["q3"] < min(s["q1"] for s in before) and now["median"] < low / (1 + LEAST):
            found[name] = now["median"] / low
    return found


def same_machine(every: list[Run], machine: str) -> tuple[list[Run], str]:
    """The runs of a machine, and a sentence about the others, or none."""
    mine = [run for run in every if run.machine == machine]
    others = len(every) - len(mine)
    said = f"{others} saved runs of other machines: no comparison with those" if others else ""
    return mine, said


def before(machine: str, storage: Path = STORAGE) -> str:
    """The option for pytest-benchmark, or nothing where this machine has no run yet."""
    mine, said = same_machine(runs(storage), machine)
    if said:
        print(said, file=sys.stderr)
    if not mine:
        print(f"no earlier run on this machine ({machine}): nothing to compare with", file=sys.stderr)
        return ""
    return f"--benchmark-compare={mine[-1].number}"


def check(machine: str, storage: Path = STORAGE) -> int:
    """1 where something of the newest run has become slower."""
    mine, said = same_machine(runs(storage), machine)
    if said:
        print(said)
    if len(mine) < 2:
        print(f"no earlier run on this machine ({machine}): nothing to compare with")
        return 0
    *earlier, new = mine[-1 - EARLIER :]
    found = moved(new, earlier)
    for name, times in sorted(found.items(), key=lambda item: -item[1]):
        print(
            f"{'slower' if times > 1 else 'faster'}: {name}: {times:.2f} times as long as the nearest of {len(earlier)}"
        )
    slower = sum(times > 1 for times in found.values())
    print(f"{len(new.stats)} benchmarks against {len(earlier)} earlier runs of this machine: {slower} slower, "
          f"{len(found) - slower} faster, by more than they vary")  # fmt: skip
    return 1 if slower else 0


def main(command: str) -> int:
    """``before`` or ``check``."""
    from machine_id import identity

    if command == "before":
        print(before(identity()["id"]))
        return 0
    return check(identity()["id"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
