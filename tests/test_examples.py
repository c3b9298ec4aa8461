# SPDX-License-Identifier: MIT
"""Every example runs as a user would run it: in a process of its own, somewhere else, and shows what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import k3session

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not part of a wheel's tests")

#: What an example prints, beside its text: a pattern for each, so that an empty run does not pass.
SHOWN = {
    "streaming.py": r"ROMEO\.\n[^\[]{10,}\n\[stop at position \d+\]\n\nJULIET\.\n[^\[]{10,}\n\[stop at position \d+\]",
    "logits_hook.py": r"\[\d{2,} characters, 0 times the letter e\]",
    "asyncio_server.py": r"ROMEO\. .{10,} \[to the end\]\nJULIET\. .{10,} \[to the end\]\nNURSE\. .+ \[no more .+\]",
    "ray_actors.py": r"ada: host-\d -> host-\d: '.{10,}\nbob: .+\ncy: .+\nhost-\d was killed; every text is that",
    "resume_after_kill.py": r"resume is exact\n.+ \|\| .+\nThe same \d+ tokens as without the kill\.",
}


def run(arguments: list[str], folder: Path) -> str:
    paths = [str(Path(k3session.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_example(name: str, tmp_path: Path) -> None:
    if name == "ray_actors.py" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    out = run([str(EXAMPLES / name)], tmp_path)
    assert re.search(SHOWN[name], out, re.DOTALL), out
    assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"


def test_latency_suite(tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--benchmark-disable-gc", "--rootdir", str(tmp_path)]
    out = run(["-m", "pytest", str(EXAMPLES / "test_latency.py"), *options], tmp_path)
    for name in ("test_step", "test_prefill", "test_save", "test_load"):
        assert re.search(rf"^{name} +[\d,.]+", out, re.MULTILINE), out
    assert "4 passed" in out


def test_every_example_is_run_here_and_listed() -> None:
    files = {p.name for p in EXAMPLES.glob("*.py")}
    assert files == {*SHOWN, "test_latency.py"}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == files
