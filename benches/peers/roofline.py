# SPDX-License-Identifier: MIT
"""Every op of a decode step against its limit: its bytes over the bandwidth, or its operations over the peak."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What a table is of, and what it says of each op.
OF = ("machine", "date", "model", "threads", "weights")
COLUMNS = (
    "component", "op", "matrix", "calls", "us", "bytes", "gbytes_per_second", "gflops_per_second", "limit_us",
    "of_limit", "bound",
)  # fmt: skip


@dataclass(frozen=True)
class OpLine:
    """One op at all of its places, per token: medians over the rounds."""

    component: str
    op: str
    matrix: str
    calls: float
    seconds: float
    nbytes: float
    multiplications: float
    limit: float
    bound: str

    @property
    def gbytes(self) -> float:
        """Achieved, in GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def gflops(self) -> float:
        """Achieved, multiplications and additions, in GFLOP/s."""
        return 2 * self.multiplications / self.seconds / 1e9

    def row(self) -> list[Any]:
        """What the CSV has of it."""
        return [
            self.component, self.op, self.matrix, round(self.calls), round(self.seconds * 1e6, 2), round(self.nbytes),
            round(self.gbytes, 2), round(self.gflops, 2), round(self.limit * 1e6, 2),
            round(self.limit / self.seconds, 3), self.bound,
        ]  # fmt: skip


def op_lines(rounds: list[dict[str, Any]], flops: float | None) -> list[OpLine]:
    """The lines of several rounds; `flops` is what all threads can do in a second, None where that is not known."""
    found: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
    for taken in rounds:
        for component, op, matrix, calls, seconds, weights, values, mults in taken["rows"]:
            memory = (weights + values) / taken["bandwidth"]
            compute = 2 * mults / flops if flops else 0.0
            row = (calls, seconds, weights + values, mults, max(memory, compute), memory)
            found.setdefault((component, op, matrix), []).append(row)
    lines = []
    for key, rows in found.items():
        *middle, limit, memory = (statistics.median(column) for column in zip(*rows, strict=True))
        lines.append(OpLine(*key, *middle, limit, "bytes" if memory >= limit else "operations"))
    return lines


def show(lines: Sequence[OpLine], token: float, what: str) -> None:
    """Print the table; `token` is the seconds of a whole step."""
    heads = ("calls", "us", "of token", "MB", "GB/s", "GFLOP/s", "limit us", "reached")
    print(f"\n{what:42}" + "".join(f"{h:>10}" for h in heads))
    for line in lines:
        cells = (
            f"{line.calls:.0f}", f"{line.seconds * 1e6:.1f}", f"{line.seconds / token:.1%}", f"{line.nbytes / 1e6:.3f}",
            f"{line.gbytes:.2f}", f"{line.gflops:.2f}", f"{line.limit * 1e6:.1f}", f"{line.limit / line.seconds:.0%}",
        )  # fmt: skip
        print(f"{f'{line.op} {line.matrix}'.strip()[:42]:42}" + "".join(f"{c:>10}" for c in cells))
    inside, limit = sum(x.seconds for x in lines), sum(x.limit for x in lines)
    cells = (
        "",
        f"{inside * 1e6:.1f}",
        f"{inside / token:.1%}",
        "",
        "",
        "",
        f"{limit * 1e6:.1f}",
        f"{limit / inside:.0%}",
    )
    print(f"{'all ops':42}" + "".join(f"{c:>10}" for c in cells))
    print(f"{'a step, with what Python adds':42}{'':10}{token * 1e6:10.1f}")


def write(path: Path, tables: Sequence[tuple[dict[str, Any], Sequence[OpLine]]]) -> None:
    """All tables as one CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow([*OF, *COLUMNS])
        for what, lines in tables:
            out.writerows([*(what[c] for c in OF), *line.row()] for line in lines)
