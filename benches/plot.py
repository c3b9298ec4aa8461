# SPDX-License-Identifier: MIT
"""Draws a results file: ``python benches/plot.py benches/results/bench.csv benches/results/bench.svg``.

One panel per group; a bar is the median, its whisker the interquartile range.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict


def main(source: str, target: str) -> int:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print(
            "plots need matplotlib, which is not installed: pip install 'k3session[plots]'", file=sys.stderr
        )
        return 1
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with open(source, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row["group"]].append(row)
    machine = next(iter(groups.values()))[0]["machine"]
    height = sum(0.6 + 0.28 * len(rows) for rows in groups.values())
    figure, panels = plt.subplots(
        len(groups), 1, figsize=(9, height), squeeze=False,
        gridspec_kw={"height_ratios": [0.6 + 0.28 * len(rows) for rows in groups.values()]},
    )  # fmt: skip
    for panel, (group, rows) in zip(panels[:, 0], groups.items(), strict=True):
        medians = [float(r["median_us"]) for r in rows]
        panel.barh(
            [r["name"] for r in rows],
            medians,
            xerr=[float(r["iqr_us"]) / 2 for r in rows],
            color="#3b6ea5",
            height=0.6,
        )
        panel.set_title(
            group if panel is not panels[0, 0] else f"{machine}\n\n{group}", loc="left", fontsize=9
        )
        panel.set_xlabel("microseconds", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
