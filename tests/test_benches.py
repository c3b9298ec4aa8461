# SPDX-License-Identifier: MIT
"""What the benchmarks rest on: which change counts, weights in another runtime's file, and what is printed."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ROOT / "benches"
if not BENCHES.is_dir():
    pytest.skip("the benches are not part of a wheel's tests", allow_module_level=True)
sys.path += [str(BENCHES), str(BENCHES / "peers")]

import blocks  # noqa: E402
import first_token  # noqa: E402
import goals  # noqa: E402
import history  # noqa: E402
import roofline  # noqa: E402
from machine_id import identity  # noqa: E402
from samples import Figure, Samples  # noqa: E402
from worker import Worker  # noqa: E402

import k3session as k3  # noqa: E402

# ---------------------------------------------------------------- the history of `make bench`


def save(storage: Path, number: int, machine: str, **medians: float) -> None:
    """A run as pytest-benchmark saves it, each benchmark with 10% of its median between the quartiles."""
    stats = [
        {"fullname": name, "stats": {"median": m, "q1": 0.95 * m, "q3": 1.05 * m}}
        for name, m in medians.items()
    ]
    folder = storage / "Linux-CPython-3.13-64bit"
    folder.mkdir(exist_ok=True)
    (folder / f"{number:04}_run.json").write_text(
        json.dumps({"machine_info": {"id": machine}, "benchmarks": stats}), encoding="utf-8"
    )


def test_what_moves_within_the_spread_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, step in enumerate((1.0, 1.08, 1.02, 1.09)):
        save(tmp_path, i, "here", step=step)
    assert history.check("here", tmp_path) == 0
    assert "0 slower, 0 faster" in capsys.readouterr().out


def test_what_became_slower_by_more_than_the_spread_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, "here", step=1.0, save=2.0, gone=1.0)
    save(tmp_path, 2, "here", step=1.1, save=2.0)
    save(tmp_path, 3, "here", step=1.4, save=1.2, new=9.0)
    assert history.check("here", tmp_path) == 1
    out = capsys.readouterr().out
    assert "slower: step: 1.27 times" in out and "faster: save: 0.60 times" in out
    assert "new" not in out and "gone" not in out


def test_other_machines_are_not_compared_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, "there", step=1.0)
    assert history.before("here", tmp_path) == ""
    assert "no earlier run on this machine (here)" in capsys.readouterr().err
    save(tmp_path, 2, "here", step=9.0)
    assert history.check("here", tmp_path) == 0
    out = capsys.readouterr().out
    assert "1 saved runs of other machines: no comparison" in out and "nothing to compare with" in out
    assert history.before("here", tmp_path) == "--benchmark-compare=0002"


def test_only_the_last_runs_count(tmp_path: Path) -> None:
    """Something that was slow long ago does not hide that it is slow again."""
    save(tmp_path, 0, "here", step=3.0)
    for i in range(1, 1 + history.EARLIER):
        save(tmp_path, i, "here", step=1.0)
    save(tmp_path, 1 + history.EARLIER, "here", step=2.0)
    assert history.check("here", tmp_path) == 1


def test_a_machine_has_one_id() -> None:
    assert identity() == identity()
    assert len(identity()["id"]) == 12


# ---------------------------------------------------------------- weights for another runtime


@given(st.integers(0, 2**32 - 1))
def test_mxfp4_blocks_hold_the_same_weights(seed: int) -> None:
    """Taken apart as ggml does: byte j of a block has element j in its low nibble and j + 16 in its high one."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (3, 32), np.uint8)
    scale = rng.integers(1, 253, (3, 2), np.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = np.empty((3, 64))
    for r in range(3):
        for c in range(64):
            code = int(packed[r, c // 2]) >> (4 * (c % 2)) & 15
            expected[r, c] = values[code] * 2.0 ** (int(scale[r, c // 32]) - 127)
    stored = blocks.mxfp4_blocks(packed, scale).reshape(3, 2, 17)
    found = np.empty((3, 64))
    for r in range(3):
        for g in range(2):
            for j in range(16):
                for half in range(2):
                    code = int(stored[r, g, 1 + j]) >> (4 * half) & 15
                    weight = values[code] * 2.0 ** (int(stored[r, g, 0]) - 127)
                    found[r, 32 * g + 16 * half + j] = weight
    assert np.array_equal(found, expected)
    assert np.array_equal(blocks.mxfp4_values(packed, scale), expected)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 1.0, 1e3]))
def test_q8_0_is_within_half_a_step(seed: int, size: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((5, 64)) * size).astype(np.float32)
    stored = blocks.q8_0(x).reshape(5, 2, 34)
    scale = stored[..., :2].copy().view(np.float16).astype(np.float64)
    found = (scale * stored[..., 2:].view(np.int8)).reshape(5, 64)
    step = np.repeat(np.abs(x.reshape(5, 2, 32)).max(-1) / 127, 32, axis=1)
    assert (np.abs(found - x) <= step * (0.5 + 127 * 2**-11)).all(), "the scale is rounded to 11 bits"


def test_q8_0_of_zeros_is_zero() -> None:
    assert not blocks.q8_0(np.zeros((1, 32), np.float32)).any()


# ---------------------------------------------------------------- figures


def test_a_figure_is_the_median_and_the_middle_half() -> None:
    assert Figure.of([]) is None
    assert Figure.of([3.0, 1.0]) == Figure(2.0, 1.0, 3.0, 2)
    assert Figure.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Figure(3.0, 2.0, 4.0, 5)


def taken() -> Samples:
    """Decode in two rounds, in which the machine was twice as slow the second time."""
    samples = Samples()
    for i, slow in enumerate((1.0, 2.0)):
        samples.add(
            "decode mid", "k3 stored", 1, i, rate=(12 / slow, "token/s"), share=(0.96, "of bandwidth")
        )
        samples.add("decode mid", "llama.cpp BF16", 1, i, rate=(10 / slow, "token/s"))
    return samples


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    samples = taken()
    assert samples.ratio("decode mid", "k3 stored", "llama.cpp BF16", 1, "rate") == [1.2, 1.2]
    samples.write(tmp_path / "x.csv", "id", "2026-01-01")
    assert Samples.read(tmp_path / "x.csv").rows == samples.rows


def test_every_goal_has_a_line(tmp_path: Path) -> None:
    lines = {line.what: line for line in goals.lines(taken(), 2)}
    assert len(lines) == len(list(goals.goals(2)))
    share = lines["decode, as stored, 1 thread: share of the read bandwidth"]
    assert share.cells()[1:] == ("95%", "96%", "96% to 96%, n 2", "reached")
    against = lines["decode, as stored, 1 thread: against llama.cpp BF16"]
    assert (against.reached, against.verdict) == ("1.20x", "reached")
    assert lines["decode, compact, 1 thread: against llama.cpp BF16"].verdict == "not measured"


def test_goals_that_are_upper_bounds() -> None:
    samples = Samples()
    samples.add("first token mid", "k3 stored", 2, 0, ratio=(1.6, "of reading once"))
    lines = {line.what: line.verdict for line in goals.lines(samples, 2)}
    assert lines["load to the first token: time of reading the bytes once"] == "missed"


def test_a_limit_is_the_slower_of_bytes_and_operations() -> None:
    def of(weights: float, mults: float) -> dict[str, Any]:
        return {"bandwidth": 1e9, "rows": [["kda", "linear", "q_proj", 3.0, 4e-3, weights, 0.0, mults]]}

    memory = roofline.op_lines([of(2e6, 1e3)], flops=1e9)[0]
    assert (memory.bound, memory.limit) == ("bytes", pytest.approx(2e-3))
    compute = roofline.op_lines([of(2e6, 1.5e6)], flops=1e9)[0]
    assert (compute.bound, compute.limit) == ("operations", pytest.approx(3e-3))
    assert roofline.op_lines([of(2e6, 1.5e6)], flops=None)[0].bound == "bytes"


def test_a_roofline_file_has_a_row_for_each_op(tmp_path: Path) -> None:
    line = roofline.OpLine("kda", "linear", "q_proj", 3, 4e-3, 2e6, 1e6, 2e-3, "bytes")
    what = dict(zip(roofline.OF, ("id", "2026-01-01", "mid", 1, "stored"), strict=True))
    roofline.write(tmp_path / "r.csv", [(what, [line])])
    with (tmp_path / "r.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["op"], row["us"], row["gbytes_per_second"], row["of_limit"]) == (
        "linear",
        "4000.0",
        "0.5",
        "0.5",
    )


# ---------------------------------------------------------------- the measurements themselves, on a small model


@pytest.fixture(scope="module")
def small_worker(nano: Path) -> Iterator[Worker]:
    worker = Worker({"runtime": "k3session", "path": str(nano)}, 1)
    assert worker.refused is None
    yield worker
    worker.close()


def test_every_measurement_of_a_model_runs(small_worker: Worker) -> None:
    """What a worker is asked for in a long run, here in a second: each answers, with numbers that can be."""
    found = small_worker.ask("decode", steps=2)
    assert found["seconds"] > 0 and found["bandwidth"] > 0 and found["bytes"] > 0
    assert small_worker.ask("prefill", n=20)["tokens"] == 20
    found = small_worker.ask("context", tokens=500, steps=1)
    latent = small_worker.ask("describe")["latent_per_token"]
    assert found["bytes"] == (500 - 32) * latent and found["far"] > 0
    found = small_worker.ask("snapshots", tokens=100)
    assert all(found[n] > 0 < found[f"{n}_copy"] for n in ("snapshot", "restore", "save", "load"))
    assert small_worker.ask("memory")["resident"] > 0
    found = small_worker.ask("ops", steps=2)
    components = {row[0] for row in found["rows"]}
    assert components == {"attn_res", "kda", "mla", "dense", "experts", "lm_head"}
    assert sum(row[4] for row in found["rows"]) < found["seconds"], (
        "ops take no longer than the step they are in"
    )


def test_logits_of_a_worker_are_those_of_the_model(small_worker: Worker, nano: Path, tmp_path: Path) -> None:
    small_worker.ask("logits", ids=[3, 1, 4], to=str(tmp_path / "logits.npy"))
    with k3.Model.open(nano, device="cpu", threads=1) as model, model.session() as s:
        expected = np.stack([s.step(t) for t in (3, 1, 4)])
    assert np.array_equal(np.load(tmp_path / "logits.npy"), expected)


def test_a_measurement_that_fails_is_told_and_the_next_one_is_made(small_worker: Worker) -> None:
    with pytest.raises(RuntimeError, match="InvalidTokenError"):
        small_worker.ask("logits", ids=[100_000], to="nowhere")
    assert small_worker.ask("prefill", n=4)["seconds"] > 0


def test_what_a_build_does_not_have_is_a_sentence(nano: Path, tmp_path: Path) -> None:
    refused = Worker({"runtime": "k3session", "path": str(nano), "weights": "nonsense"}, 1).refused
    assert refused is not None and "weights" in refused and "nonsense" in refused
    refused = Worker({"runtime": "k3session", "path": str(tmp_path / "nothing")}, 1).refused
    assert refused is not None and "CheckpointError" in refused


def test_a_first_token_is_held_against_reading_the_same_bytes(nano: Path) -> None:
    ranges = first_token.touched(str(nano))
    with k3.Model.open(nano, device="cpu", threads=1) as model:
        stated = model._weights.step_bytes()
    matrices = sum(n for _, _, n in ranges)
    assert stated["trunk"] + stated["experts"] <= matrices < 1.2 * (stated["trunk"] + stated["experts"])
    assert first_token.read(ranges, 1) > 0
