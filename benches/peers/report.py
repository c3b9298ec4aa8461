# SPDX-License-Identifier: MIT
"""The tables, the CSV files and the plot of a run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from goals import Line
from samples import Figure, Samples

GOAL_COLUMNS = ("what", "goal", "reached", "spread", "verdict")
RATES = (
    "decode mid",
    "decode mid and mlx-lm",
    "prefill 128 mid",
    "prefill 512 mid",
    "decode tiny",
    "prefill 512 tiny",
)


def print_rates(samples: Samples) -> None:
    """Tokens per second of every way to run the models, with shares of the bandwidth where they were taken."""
    print(
        f"\n{'tokens per second':18} {'':18} {'threads':>7} {'median':>9} {'middle half':>17} {'of bandwidth':>13}"
    )
    for case, label, threads in samples.cases():
        figure = samples.figure(case, label, threads, "rate")
        if figure is None:
            continue
        share = samples.figure(case, label, threads, "share")
        kind = f"{share.median:.0%}" if share is not None else ""
        spread = f"{figure.low:.4g} to {figure.high:.4g}"
        print(f"{case:18} {label:18} {threads:7} {figure.median:9.4g} {spread:>17} {kind:>13}")


def print_rest(samples: Samples) -> None:
    """Times, sizes and errors: everything that is no rate."""
    print(f"\n{'times and sizes':18} {'':18} {'threads':>7}")
    shown = dict.fromkeys(
        (r["case"], r["label"], r["threads"], r["quantity"], r["unit"])
        for r in samples.rows
        if r["quantity"] not in ("rate", "bandwidth", "share") and r["case"] != "exactness"
    )
    for case, label, threads, quantity, unit in shown:
        figure = samples.figure(case, label, threads, quantity)
        assert figure is not None
        print(f"{case:18} {label:18} {threads:7}  {quantity:10} {figure.median:10.4g} {unit}")


def print_ratios(samples: Samples) -> None:
    """Every way of ours over every way of llama.cpp, round by round."""
    print(f"\n{'ratios':18} {'':40} {'threads':>7} {'median':>8} {'middle half':>15}")
    measured = list(samples.cases())
    for case in RATES:
        for threads in dict.fromkeys(t for c, _, t in measured if c == case):
            labels = [label for c, label, t in measured if (c, t) == (case, threads)]
            for ours in (x for x in labels if x.startswith("k3")):
                for theirs in (x for x in labels if not x.startswith("k3")):
                    figure = Figure.of(samples.ratio(case, ours, theirs, threads, "rate"))
                    if figure is not None:
                        print(f"{case:18} {ours + ' / ' + theirs:40} {threads:7} {figure.median:8.2f} "
                              f"{f'{figure.low:.2f} to {figure.high:.2f}':>15}")  # fmt: skip


def print_goals(lines: list[Line]) -> None:
    """The goals, what was reached, and by how much it varied."""
    width = max((len(line.what) for line in lines), default=0)
    print(f"\n{'':{width}} {'goal':>13} {'reached':>9}  {'middle half':25} ")
    for line in lines:
        print(f"{line.what:{width}} {line.goal:>13} {line.reached:>9}  {line.spread:25} {line.verdict}")


def write_goals(path: Path, lines: list[Line], machine: str, date: str) -> None:
    """The goals as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["machine", "date", *GOAL_COLUMNS])
        out.writerows([machine, date, *line.cells()] for line in lines)


def write_machine(path: Path, facts: dict[str, Any]) -> None:
    """What is known of the machine: name, value, unit."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["name", "value"])
        out.writerows(facts.items())


def plot(samples: Samples, path: Path, machine: str) -> str | None:
    """Bars of tokens per second, one panel for each case and number of threads; a sentence where that cannot be."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'k3session[plots]')"
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "k3session"
    import matplotlib.pyplot as plt

    measured = list(samples.cases())
    panels = [p for p in dict.fromkeys((c, t) for c, _, t in measured) if p[0] in RATES]
    if not panels:
        return "no plot: nothing was measured that it shows"
    columns = 2
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 2.3 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (case, threads) in zip(axes.flat, panels, strict=False):
        labels = [label for c, label, t in measured if (c, t) == (case, threads)]
        figures = [f for label in labels if (f := samples.figure(case, label, threads, "rate")) is not None]
        axis.barh(labels, [f.median for f in figures], height=0.6,
                  xerr=[[f.median - f.low for f in figures], [f.high - f.median for f in figures]],
                  color=["#3b6ea5" if label.startswith("k3") else "#b0b0b0" for label in labels])  # fmt: skip
        axis.set_title(f"{case}, {threads} thread{'s' * (threads > 1)}", loc="left", fontsize=9)
        axis.set_xlabel("token/s", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    figure.suptitle(machine, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return None
