# SPDX-License-Identifier: MIT
"""The tables of README.md and docs/performance.md, from the committed results; a test holds the pages to them.

``python benches/figures.py`` prints them; with ``--write`` it puts them into the pages, between the lines
``<!-- figures: NAME -->`` and ``<!-- end of figures -->``.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"
Rows = list[dict[str, str]]

#: What is in a row of the table of rates: the case, and how it is called.
CASES = {
    "decode mid": "`mid`: decode",
    "decode mid and mlx-lm": "`mid`: decode, beside mlx-lm",
    "prefill 128 mid": "`mid`: prefill of 128",
    "prefill 512 mid": "`mid`: prefill of 512",
    "decode tiny": "`tiny`: decode",
    "prefill 512 tiny": "`tiny`: prefill of 512",
}
LABELS = ("k3 stored", "k3 compact", "k3 q8", "k3 bf16 prefill", "llama.cpp BF16", "llama.cpp Q8_0", "mlx-lm")


def _read(name: str) -> Rows:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine(folder: str = "") -> str:
    """One sentence about the machine of the results."""
    facts = {r["name"]: r["value"] for r in _read(f"{folder}peers-machine.csv")}
    sets = facts["sets"] or "no AVX"
    reads = {n: v for n, v in facts.items() if n.startswith("read file")}
    spans = ", ".join(f"{v} GB/s with {n.split(', ')[1]}" for n, v in reads.items())
    kind = "A quick run" if facts["quick"] == "True" else "A run"
    load = float(facts["load before"])
    other = f" beside other work (a load of {load:.1f})" if load > 0.5 else ""
    said = (
        f"{kind} of {facts['date']}{other} on {facts['cores']} cores of {facts['cpu']} ({sets}), "
        f"where reading the mapped weights gives {spans}."
    )
    if other:
        said += " With all threads the ratios say little then: a runtime whose threads wait for each other loses most."
    return said


def rates() -> str:
    """Tokens per second of every runtime: medians."""
    rows = [r for r in _read("peers.csv") if r["quantity"] == "rate" and r["case"] in CASES]
    found = []
    labels = [x for x in LABELS if any(r["label"] == x for r in rows)]
    for case, name in CASES.items():
        for threads in sorted({int(r["threads"]) for r in rows if r["case"] == case}):
            cells = [f"{name}, {threads} thread{'s' * (threads > 1)}"]
            for label in labels:
                values = [
                    float(r["value"])
                    for r in rows
                    if (r["case"], r["label"], int(r["threads"])) == (case, label, threads)
                ]
                cells.append(f"{statistics.median(values):.3g}" if values else "")
            found.append(cells)
    return _markdown(["tokens per second", *labels], found)


def reached(folder: str = "") -> str:
    """Each goal with what was reached, losses included."""
    columns = ("what", "goal", "reached", "spread", "verdict")
    rows = [[r[c] for c in columns] for r in _read(f"{folder}peers-goals.csv")]
    return _markdown(["`mid` unless said", "goal", "reached", "middle half", ""], rows)


def exactness() -> str:
    """What the forms of the weights do to results."""
    found: dict[str, dict[str, str]] = {}
    for r in _read("peers.csv"):
        if r["case"] == "exactness" and r["label"].startswith("k3 "):
            found.setdefault(r["label"].removeprefix("k3 "), {})[r["unit"]] = r["value"]
    units = list(dict.fromkeys(unit for values in found.values() for unit in values))
    return _markdown(["weights", *units], [[n, *(v.get(u, "") for u in units)] for n, v in found.items()])


def latencies() -> str:
    """Latencies of `make bench`."""
    rows = {r["name"]: r for r in _read("bench.csv")}
    found = []
    for what, name in (
        ("the shipped model: a step at 16 tokens, one thread", "test_step[shakespeare-16-1]"),
        ("the smallest model: a step", "test_python_overhead[step]"),
        ("of which in the compiled pass", "test_python_overhead[pass]"),
        ("the shipped model: save 512 tokens to disk", "test_snapshot[shakespeare-save]"),
        ("the shipped model: load them", "test_snapshot[shakespeare-load]"),
    ):
        r = rows[name]
        value, iqr = float(r["median_us"]), float(r["iqr_us"])
        found.append([what, f"{value:.0f} µs", f"{iqr:.0f} µs"])
    return _markdown(["", "median", "interquartile range"], found)


def roofline(weights: str = "stored") -> str:
    """Every op of a step of `mid` against its limit, with one thread and with all."""
    rows = [r for r in _read("roofline.csv") if (r["model"], r["weights"]) == ("mid", weights)]
    threads = sorted({int(r["threads"]) for r in rows})
    at = {(r["component"], r["op"], r["matrix"], int(r["threads"])): r for r in rows}
    heads = ["component", "op", "first tensor", "calls", "MB"]
    for n in threads:
        t = f"{n} thread{'s' * (n > 1)}"
        heads += [f"{t}: µs", "of the token", "GB/s", "of the limit"]
    whole = {n: sum(float(r["us"]) for r in rows if int(r["threads"]) == n) for n in threads}
    found = []
    for key in dict.fromkeys((r["component"], r["op"], r["matrix"]) for r in rows):
        of = [at.get((*key, n)) for n in threads]
        first = next(r for r in of if r is not None)
        tensor = f"`{key[2]}`" if key[2] else ""
        cells = [key[0], f"`{key[1]}`", tensor, first["calls"], f"{int(first['bytes']) / 1e6:.2f}"]
        for n, r in zip(threads, of, strict=True):
            if r is None:
                cells += [""] * 4
                continue
            us, mark = float(r["us"]), "" if r["bound"] == "bytes" else " (operations)"
            cells += [
                f"{us:.0f}",
                f"{us / whole[n]:.1%}",
                r["gbytes_per_second"],
                f"{float(r['of_limit']):.0%}{mark}",
            ]
        found.append(cells)
    size = sum(int(r["bytes"]) for r in rows if int(r["threads"]) == threads[0])
    total = ["", "all of them", "", "", f"{size / 1e6:.2f}"]
    for n in threads:
        limit = sum(float(r["limit_us"]) for r in rows if int(r["threads"]) == n)
        total += [f"{whole[n]:.0f}", "", "", f"{limit / whole[n]:.0%}"]
    return _markdown(heads, [*found, total])


#: Page -> name -> what makes the table.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"machine": machine, "rates": rates, "reached": reached, "latencies": latencies},
    "docs/performance.md": {
        "roofline": roofline,
        "exactness": exactness,
        # An earlier run, on a processor without AVX-512.
        "machine_avx2": lambda: machine("avx2/"),
        "reached_avx2": lambda: reached("avx2/"),
    },
}


def block(name: str, text: str) -> str:
    """A table as it stands in a page."""
    return f"<!-- figures: {name} -->\n\n{text}\n\n<!-- end of figures -->"


def rewrite() -> None:
    """Put every table into its page."""
    for page, tables in PAGES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        for name, make in tables.items():
            pattern = rf"<!-- figures: {name} -->.*?<!-- end of figures -->"
            new = block(name, make())
            text, count = re.subn(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
            if count != 1:
                raise SystemExit(f"{page} has {count} places for the figures {name!r}; expected one")
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Print the tables, or write them into the pages."""
    if "--write" in sys.argv[1:]:
        rewrite()
        return 0
    for tables in PAGES.values():
        for name, make in tables.items():
            print(block(name, make()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
