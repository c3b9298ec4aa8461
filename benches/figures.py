# SPDX-License-Identifier: MIT
"""Prints the table of figures in the README from benches/results/: ``python benches/figures.py``."""

from __future__ import annotations

import csv
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def _row(what: str, value: str, spread: str, source: str) -> str:
    return f"| {what} | {value} | {spread} | `benches/results/{source}` |"


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| | median | range | from |", "|---|---|---|---|"]
    source = "mid-1-thread.json"
    mid = json.loads((RESULTS / source).read_text(encoding="utf-8"))
    for what, key, scale, form in (
        ("`mid`, one thread: share of the read bandwidth", "share_of_bandwidth", 100, "{:.0f}%"),
        ("`mid`, one thread: decode", "decode_tokens_per_second", 1, "{:.2f} token/s"),
        ("the read bandwidth of that run", "read_bytes_per_second", 1e-9, "{:.1f} GB/s"),
    ):
        median, low, high = (form.format(mid[key][k] * scale) for k in ("median", "min", "max"))
        lines.append(_row(what, median, f"{low} to {high}", source))
    source = "bench.csv"
    with (RESULTS / source).open(encoding="utf-8") as file:
        rows = {r["name"]: r for r in csv.DictReader(file)}
    for what, name in (
        ("the shipped model: a step at 16 tokens, one thread", "test_step[shakespeare-16-1]"),
        ("the smallest model: a step", "test_python_overhead[step]"),
        ("of which in the compiled pass", "test_python_overhead[pass]"),
        ("the shipped model: save 512 tokens to disk", "test_snapshot[shakespeare-save]"),
        ("the shipped model: load them", "test_snapshot[shakespeare-load]"),
    ):
        r = rows[name]
        value, iqr = float(r["median_us"]), float(r["iqr_us"])
        lines.append(_row(what, f"{value:.0f} µs", f"interquartile {iqr:.0f} µs", source))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
