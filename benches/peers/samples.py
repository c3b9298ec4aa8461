# SPDX-License-Identifier: MIT
"""What was measured: one row for each sample, and medians, spreads and ratios over them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = ("case", "label", "threads", "round", "quantity", "value", "unit")


@dataclass(frozen=True)
class Figure:
    """The median of some values and where the middle half of them lies (all of them, where they are fewer than 5)."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure | None:
        """None where there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        if len(ordered) < 5:
            return cls(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))
        low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(middle, low, high, len(ordered))


@dataclass
class Samples:
    """All samples of a run.  ``skipped`` has a sentence for each label that could not take part."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, case: str, label: str, threads: int, number: int, **quantities: tuple[float, str]) -> None:
        """Add the quantities of one sample, each with its unit."""
        for quantity, (value, unit) in quantities.items():
            row = (case, label, threads, number, quantity, value, unit)
            self.rows.append(dict(zip(COLUMNS, row, strict=True)))

    def of(self, case: str, label: str, threads: int, quantity: str) -> dict[int, float]:
        """Round -> value."""
        wanted = (case, label, threads, quantity)
        return {
            r["round"]: r["value"]
            for r in self.rows
            if (r["case"], r["label"], r["threads"], r["quantity"]) == wanted
        }

    def figure(self, case: str, label: str, threads: int, quantity: str) -> Figure | None:
        """Median and spread of a quantity."""
        return Figure.of(self.of(case, label, threads, quantity).values())

    def ratio(self, case: str, above: str, below: str, threads: int, quantity: str) -> list[float]:
        """A quantity of one label over that of another, round by round: the two were taken one after the other."""
        a, b = (self.of(case, label, threads, quantity) for label in (above, below))
        return [a[i] / b[i] for i in sorted(a.keys() & b.keys())]

    def cases(self) -> Iterator[tuple[str, str, int]]:
        """(case, label, threads) in the order in which they were measured."""
        yield from dict.fromkeys((r["case"], r["label"], r["threads"]) for r in self.rows)

    def write(self, path: Path, machine: str, date: str) -> None:
        """All samples as CSV."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(["machine", "date", *COLUMNS])
            for row in self.rows:
                value = row["value"]
                shown = f"{value:.6g}" if isinstance(value, float) else value
                out.writerow([machine, date, *(shown if c == "value" else row[c] for c in COLUMNS)])

    @classmethod
    def read(cls, path: Path) -> Samples:
        """Read what `write` wrote."""
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                {c: r[c] for c in COLUMNS}
                | {"threads": int(r["threads"]), "round": int(r["round"]), "value": float(r["value"])}
                for r in csv.DictReader(file)
            ]
        return cls(rows)
