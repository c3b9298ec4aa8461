# SPDX-License-Identifier: MIT
"""Turns pytest-benchmark's JSON into CSV: ``python benches/to_csv.py run.json results.csv``."""

from __future__ import annotations

import csv
import json
import platform
import sys


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        run = json.load(file)
    cpu = run["machine_info"].get("cpu", {})
    machine = f"{cpu.get('brand_raw', platform.processor())}, {cpu.get('count')} cores"
    keys = sorted({k for b in run["benchmarks"] for k in b["extra_info"]})
    with open(target, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(
            ["machine", "date", "group", "name", "median_us", "iqr_us", "min_us", "max_us", "rounds", *keys]
        )
        for b in run["benchmarks"]:
            s = b["stats"]
            times = [round(s[k] * 1e6, 3) for k in ("median", "iqr", "min", "max")]
            extra = [b["extra_info"].get(k, "") for k in keys]
            out.writerow([machine, run["datetime"][:10], b["group"], b["name"], *times, s["rounds"], *extra])


if __name__ == "__main__":
    main(*sys.argv[1:3])
