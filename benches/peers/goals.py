# SPDX-License-Identifier: MIT
"""What decoding at the speed of memory asks for, and what a run has reached: one line for each goal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from samples import Figure, Samples

Values = Callable[[Samples], list[float]]


@dataclass(frozen=True)
class Goal:
    """A goal: what is held against what, the least (or the most) that it should be, and where the values come from."""

    what: str
    goal: str
    bound: float
    values: Values
    form: str = "{:.2f}x"
    at_most: bool = False

    def met(self, reached: float) -> bool:
        """Whether the median is within the goal."""
        return reached <= self.bound if self.at_most else reached >= self.bound


@dataclass(frozen=True)
class Line:
    """A goal with what was reached, as it is printed and written."""

    what: str
    goal: str
    reached: str
    spread: str
    verdict: str

    def cells(self) -> tuple[str, ...]:
        """The columns."""
        return (self.what, self.goal, self.reached, self.spread, self.verdict)


def _all(case: str, label: str, threads: int, quantity: str) -> Values:
    return lambda s: list(s.of(case, label, threads, quantity).values())


def _ratio(case: str, ours: str, theirs: str, threads: int) -> Values:
    return lambda s: s.ratio(case, ours, theirs, threads, "rate")


def goals(threads: int) -> Iterator[Goal]:
    """All of them; `threads` is the number of all threads."""
    percent = "{:.0%}"
    llama, q8_0 = "llama.cpp BF16", "llama.cpp Q8_0"
    for n in dict.fromkeys((1, threads)):
        t = f"{n} thread{'s' * (n > 1)}"
        yield Goal(f"decode, as stored, {t}: share of the read bandwidth", "95%", 0.95,
                   _all("decode mid", "k3 stored", n, "share"), percent)  # fmt: skip
        yield Goal(
            f"decode, as stored, {t}: against {llama}",
            "1.07x",
            1.07,
            _ratio("decode mid", "k3 stored", llama, n),
        )
        yield Goal(
            f"decode, compact, {t}: against {llama}",
            "1.3x",
            1.3,
            _ratio("decode mid", "k3 compact", llama, n),
        )
        least = 1.3 if n == 1 else 1.2
        yield Goal(
            f"decode, q8, {t}: against {q8_0}", f"{least}x", least, _ratio("decode mid", "k3 q8", q8_0, n)
        )
    t = f"{threads} thread{'s' * (threads > 1)}"
    yield Goal(f"decode, {t}, one core busy: share of undisturbed", "60%", 0.6,
               _all("busy core mid", "k3 stored", threads, "share"), percent)  # fmt: skip
    yield Goal(f"prefill of 512, exact, {t}: against {llama}", "1.3x", 1.3,
               _ratio("prefill 512 mid", "k3 stored", llama, threads))  # fmt: skip
    yield Goal(f"prefill of 512, bf16, {t}: against {llama}", "2x", 2.0,
               _ratio("prefill 512 mid", "k3 bf16 prefill", llama, threads))  # fmt: skip
    yield Goal(
        f"decode of tiny, 1 thread: against {llama}",
        "1.5x",
        1.5,
        _ratio("decode tiny", "k3 stored", llama, 1),
    )
    yield Goal("a long context: what reading the latent cache explains of the time it adds", "100%", 1.0,
               _all("long context mid", "k3 stored", threads, "share"), percent)  # fmt: skip
    for name, text in (("snapshot", "snapshot in memory"), ("restore", "restore from memory"),
                       ("save", "save to a file"), ("load", "load from a file")):  # fmt: skip
        yield Goal(
            f"{text}: rate against a plain copy",
            "80%",
            0.8,
            _all(f"{name} mid", "k3 stored", threads, "share"),
            percent,
        )
    yield Goal("load to the first token: time of reading the bytes once", "at most 1.5x", 1.5,
               _all("first token mid", "k3 stored", threads, "ratio"), at_most=True)  # fmt: skip
    yield Goal("private memory beside states, as stored: share of the checkpoint", "at most 2%", 0.02,
               _all("memory mid", "k3 stored", threads, "private"), "{:.2%}", at_most=True)  # fmt: skip


def lines(samples: Samples, threads: int) -> list[Line]:
    """Each goal with what was reached; a goal without values says so."""
    found = []
    for goal in goals(threads):
        figure = Figure.of(goal.values(samples))
        if figure is None:
            found.append(Line(goal.what, goal.goal, "-", "-", "not measured"))
            continue
        shown = [goal.form.format(v) for v in (figure.median, figure.low, figure.high)]
        verdict = "reached" if goal.met(figure.median) else "missed"
        found.append(Line(goal.what, goal.goal, shown[0], f"{shown[1]} to {shown[2]}, n {figure.n}", verdict))
    return found
