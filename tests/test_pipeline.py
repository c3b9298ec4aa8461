# SPDX-License-Identifier: MIT
"""Pipelines over a real MPI, with processes of one machine: the bits of one process, and an end in every case."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipeline_worker
import pytest
from core_access import counts
from pipeline_worker import digest, ids
from session_tools import TESTS, environment

import k3session as k3

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
#: CI says `require`, so that nothing is passed over in silence where MPI is to be there.
HERE = MPIEXEC is not None and importlib.util.find_spec("mpi4py") is not None
pytestmark = pytest.mark.skipif(
    not HERE and os.environ.get("K3_TEST_MPI") != "require", reason="mpi4py and an MPI are not installed"
)

#: How many processes, where the layers are cut, and how batches are: inside a block, between the last two MLA layers,
#: at a block's start, and as the pipeline chooses.
CUTS: list[tuple[int, Any, int]] = [
    (1, None, 16),
    (2, [(0, 5), (5, 7)], 1),
    (3, [(0, 3), (3, 6), (6, 7)], 16),
    (4, [(0, 1), (1, 4), (4, 6), (6, 7)], 1),
    (4, None, 16),
]


def command(n: int, *arguments: object) -> list[str]:
    return [str(MPIEXEC), "-n", str(n), sys.executable, "-m", "k3session.pipeline", *map(str, arguments)]


def start(n: int, what: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(n, "run", TESTS / "pipeline_worker.py", what, *arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str], timeout: float = 100) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def run(n: int, what: str, *arguments: object) -> Any:
    """What a program prints that runs over `n` processes, and must end well and silently."""
    code, out, err = finished(start(n, what, *arguments))
    assert (code, err) == (0, ""), f"exit code {code}\n{out}\n{err}"
    return json.loads(out)


@pytest.fixture(scope="module")
def expected(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with k3.Model.open(nano, threads=1) as whole:
        return pipeline_worker.everything(whole, tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize(("n", "layers", "micro_rows"), CUTS, ids=lambda v: str(v))
def test_the_bits_of_one_process(
    nano: Path, tmp_path: Path, expected: list[Any], n: int, layers: Any, micro_rows: int
) -> None:
    found = run(n, "bits", nano, tmp_path, layers, micro_rows)
    assert found["seen"] == expected
    ranges = found["ranges"]
    assert len(ranges) == n and ranges[0][0] == 0 and ranges[-1][1] == 7
    if layers is not None:
        assert ranges == [list(pair) for pair in layers]
    # And the file that it wrote is that of one process.
    with k3.Model.open(nano, threads=1) as whole, k3.Session.load(whole, tmp_path / "whole.k3s") as s:
        assert s.resume == "exact"
        s.rewind(100)
        assert digest(s.step(3)) == expected[-2]


def test_a_session_moves_from_cut_to_cut(nano: Path, tmp_path: Path) -> None:
    with k3.Model.open(nano, threads=1) as whole, whole.session() as s:
        s.prefill(ids(30, 10))
        s.save(tmp_path / "saved.k3s")
        for i, (n, layers) in enumerate([(2, [(0, 6), (6, 7)]), (3, None), (2, [(0, 1), (1, 7)])]):
            steps = [digest(s.step(int(t))) for t in ids(20, 11)]
            assert run(n, "goes_on", nano, tmp_path, layers) == ["exact", 30 + 20 * i, *steps]
        with k3.Session.load(whole, tmp_path / "saved.k3s") as back:
            assert back.tokens.tolist() == s.tokens.tolist() and (back.logits == s.logits).all()


def test_threads_of_the_first_process(nano: Path, tmp_path: Path) -> None:
    with k3.Model.open(nano, threads=1) as whole:
        alone = []
        for i in range(4):
            with whole.session() as s:
                s.prefill(ids(20, i))
                alone.append(digest(*(s.step(int(t)) for t in ids(25, 50 + i))))
    assert run(3, "many_threads", nano, tmp_path) == alone


def test_an_error_of_one_order_is_raised_and_the_rest_goes_on(nano: Path, tmp_path: Path) -> None:
    said = run(3, "small_error", nano, tmp_path)
    assert said[0] == "model.layers.6.self_attn"
    assert "there is no session 987654 in layers" in said[1] and "there is no session 987654" in said[2]
    with k3.Model.open(nano, threads=1) as whole, whole.session() as s:
        s.prefill(ids(5, 1))
        assert said[3].startswith("a pipeline is open in this process already")
        assert said[4].startswith("PipelineModel.open has no option memoory; ")
        assert said[5:] == [5, digest(s.step(4))]


# The end.


def ended(process: subprocess.Popen[str], timeout: float = 20) -> tuple[str, str, float]:
    """The output of a job that has to end by itself, with a code that is not 0; and what of it is left: nothing."""
    began = time.monotonic()
    code, out, err = finished(process, timeout)
    assert code != 0, f"{out}\n{err}"
    assert not left_of(process.pid), "processes of the job are left"
    return out, err, time.monotonic() - began


def left_of(session: int) -> list[str]:
    """Processes that were started in a session, once those that end have had a moment to."""
    for _ in range(50):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    if (
                        b"k3session.pipeline" in (entry / "cmdline").read_bytes()
                        and int(fields[3]) == session
                    ):
                        found.append(entry.name)
                except OSError:
                    continue
        if not found:
            return []
        time.sleep(0.1)
    return found


def test_what_breaks_one_process_is_told_to_all_and_ends_the_job(nano: Path, tmp_path: Path) -> None:
    out, err, seconds = ended(start(3, "large_error", nano, tmp_path))
    told = json.loads(out.splitlines()[0])["told"]
    assert told.startswith("rank 2 (process ") and "TypeError" in told and "Traceback" in told
    assert "k3session.pipeline: rank 2 (process " in err and "TypeError" in err
    assert seconds < 15
    with k3.Model.open(nano, threads=1) as whole, k3.Session.load(whole, tmp_path / "last.k3s") as s:
        assert s.position == 5


def test_an_error_of_the_program_ends_the_job(nano: Path, tmp_path: Path) -> None:
    _, err, _ = ended(start(3, "uncaught", nano, tmp_path))
    assert "ZeroDivisionError: in the program of the first process" in err


def test_a_folder_that_is_none_is_refused_with_one_sentence(tmp_path: Path) -> None:
    process = subprocess.run(
        command(3, "generate", tmp_path / "none", "x"), env=environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == 1
    assert process.stderr.startswith("k3session: ") and "the path does not exist" in process.stderr


def test_wrong_usage(nano: Path) -> None:
    for arguments in ([], ["serve", "x"], ["generate"]):
        done = subprocess.run(
            [sys.executable, "-m", "k3session.pipeline", *arguments],
            env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.startswith("usage: mpiexec")
    done = subprocess.run(
        command(2, "generate", nano, "x", "--layers", "0:3,3:6"),
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "expected 2 ranges (first, end)" in done.stderr


def test_generate_gives_the_text_of_one_process() -> None:
    options = ["ROMEO:", "--max-tokens", "20", "--seed", "1", "--threads", "1"]
    folder = Path(k3.__file__).parent / "models" / "k3-shakespeare"
    one = subprocess.run(
        [sys.executable, "-m", "k3session", "generate", *options],
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    several = subprocess.run(
        command(2, "generate", folder, *options, "--layers", "0:3,3:8"),
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert several.stdout == one.stdout and len(one.stdout) > 20
    assert several.stderr == ""


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise TimeoutError(path)


@pytest.fixture
def deaths(nano: Path, tmp_path: Path) -> Callable[[], None]:
    """Kills a process of a running pipeline after some seconds, and looks at what is left."""
    rng = random.Random(7)

    def die(n: int, rank: int, after: float) -> None:
        process = start(n, "endless", nano, tmp_path)
        wait_for(tmp_path / "pids", process)
        pids = json.loads((tmp_path / "pids").read_text())
        (tmp_path / "pids").unlink()
        time.sleep(after)
        os.kill(pids[rank], signal.SIGKILL)
        _, err, seconds = ended(process)
        assert f"k3session.pipeline: rank {rank} of {n} (process {pids[rank]} on " in err, err
        assert "was ended by SIGKILL" in err
        assert seconds < 10
        with k3.Model.open(nano, threads=1) as whole:
            if (tmp_path / "last.k3s").exists():
                with k3.Session.load(whole, tmp_path / "last.k3s") as s, whole.session() as again:
                    assert s.position > 0 and s.resume == "exact"
                    assert (again.prefill(s.tokens) == s.logits).all()

    def any_of_them() -> None:
        n = rng.randint(2, 4)
        die(n, rng.randrange(n), rng.random())

    return any_of_them


def test_a_stage_that_is_killed_ends_the_job_and_the_last_snapshot_goes_on(deaths: Any) -> None:
    for _ in range(counts(2, 50)):
        deaths()
