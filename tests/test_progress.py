# SPDX-License-Identifier: MIT
"""The progress argument: silent, a bar on a terminal only, or a function."""

from __future__ import annotations

import io
import sys

import pytest

from k3session.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_false_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(False)
    progress("open", 1, 1)
    progress.close()
    assert not progress and capsys.readouterr() == ("", "")


def test_true_draws_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(True)
    progress("open", 1, 2)
    progress.close()
    assert not progress and capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)
    assert not Progress(True)


def test_a_bar_ends_its_line() -> None:
    out = Terminal()
    progress = Progress(True, stream=out)
    for i in range(11):
        progress("save", i, 10)
    text = out.getvalue()
    assert progress and text.startswith("\rsave [") and text.endswith("100%\n") and text.count("\n") == 1
    progress("load", 1, 10)
    assert "load [###" in out.getvalue() and not out.getvalue().endswith("\n")
    progress.close()
    progress.close()
    assert out.getvalue().endswith(" 10%\n")


def test_a_bar_is_drawn_a_few_times_a_second_at_most() -> None:
    out = Terminal()
    progress = Progress(True, stream=out)
    for i in range(10_000):
        progress("save", i, 10_001)
    assert out.getvalue().count("\r") < 50


def test_nothing_to_do_is_done() -> None:
    out = Terminal()
    Progress(True, stream=out)("save", 0, 0)
    assert out.getvalue().endswith("100%\n")


def test_a_function_gets_every_call_and_its_error_propagates() -> None:
    seen: list[tuple[str, int, int]] = []
    progress = Progress(lambda *event: seen.append(event))
    for i in range(5):
        progress("prefill", i, 4)
    assert seen == [("prefill", i, 4) for i in range(5)]

    def fail(event: str, current: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Progress(fail)("prefill", 1, 4)
    outer = Progress(progress)
    outer("open", 1, 1)
    assert seen[-1] == ("open", 1, 1)


@pytest.mark.parametrize("value", [None, 1, 0, "yes"])
def test_anything_else_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=r"expected True, False or a function of \(event, current, total\)"):
        Progress(value)  # type: ignore[arg-type]
