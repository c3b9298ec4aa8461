# SPDX-License-Identifier: MIT
"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import k3session as k3
from k3session.cli import main

PROMPT = "ROMEO.\n"


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k3session", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_generate_is_repeatable_and_goes_on_from_a_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", PROMPT, "--seed", "3", "--max-tokens", "24"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(PROMPT) and len(whole) > len(PROMPT) + 10
    file = str(tmp_path / "play.k3s")
    assert main(["generate", PROMPT, "--seed", "3", "--max-tokens", "10", "--session", file]) == 0
    first = capsys.readouterr().out
    assert main(["generate", "", "--max-tokens", "14", "--session", file]) == 0
    assert first.rstrip("\n") + capsys.readouterr().out == whole


def test_generate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--temperature", "0", "--max-tokens", "3", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["finish_reason"] for r in records] == [None, None, "length"]
    assert [set(r) for r in records] == [set(k3.Generated._fields)] * 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", "hi", "--model", "no/such/folder"], 1, "no/such/folder"),
        (["generate", ""], 2, "the prompt is empty"),
        (["generate", "hi", "--session", "no/such/folder/x.k3s"], 2, "the folder does not exist"),
        (["generate", "hi", "--temperature", "-1"], 1, "temperature is -1.0; expected"),
        (["info", "--threads", "0"], 1, "threads is 0; expected"),
        (["snapshot", "verify", "no-such-file.k3s"], 1, "no-such-file.k3s"),
        (["snapshot", "inspect", __file__], 1, "test_cli.py"),
    ],
)
def test_an_error_is_one_sentence_on_stderr(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and err.startswith("k3session: ")


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["generate"], ["snapshot"], ["bench", "--steps", "x"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def test_check(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(nano)]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["check", str(nano), "--deep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "problem: config.json" in out and "memory" not in out


def test_info_and_bench_and_synth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "model")
    assert main(["synth", folder, "--preset", "micro", "--seed", "5"]) == 0
    assert main(["info", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 2
    assert main(["bench", folder, "--steps", "2", "--repeats", "2", "--prompt-tokens", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["decode_tokens_per_second"]["n"] == 2 and report["step_seconds"]["n"] == 4
    assert main(["bench", folder, "--steps", "2", "--repeats", "2", "--prompt-tokens", "4"]) == 0
    assert "share of bandwidth" in capsys.readouterr().out


def test_snapshot_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(tmp_path / "a.k3s"), str(tmp_path / "b.k3s")
    with k3.Model.open() as model, model.session() as s:
        s.prefill([1, 2, 3])
        s.save(a, meta={"chat": 7})
        s.step(4)
        s.save(b)
    assert main(["snapshot", "verify", a]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["snapshot", "inspect", a, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["position"] == 3 and report["tokens"] == [1, 2, 3] and report["meta"] == {"chat": 7}
    assert main(["snapshot", "inspect", a]) == 0
    assert "layers.0.state" in capsys.readouterr().out
    assert main(["snapshot", "diff", a, a]) == 0
    assert capsys.readouterr().out == "the same\n"
    assert main(["snapshot", "diff", a, b]) == 1
    assert "position: 3 | 4" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"'{sys.executable}' -m k3session generate 'ROMEO.' --seed 1 --max-tokens 400 | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""


def test_ctrl_c_saves_the_session_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "play.k3s"
    command = [
        sys.executable,
        "-m",
        "k3session",
        "generate",
        PROMPT,
        "--max-tokens",
        "3900",
        "--temperature",
        "0",
        "--session",
        str(file),
    ]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    child.stdout.read(len(PROMPT) + 40)  # it is under way
    child.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err == "k3session: interrupted\n" and time.monotonic() - start < 30
    with k3.Model.open() as model, k3.Session.load(model, file) as s:
        assert s.position > 10
