# SPDX-License-Identifier: MIT
"""The audit: a report that never raises, values that are not finite, and the memory estimate."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, as_f32, changed

from k3session import fingerprint
from k3session.audit import COMPONENTS, audit, memory_estimate
from k3session.checkpoint import Checkpoint
from k3session.presets import PRESETS
from k3session.synth import synth

GOLDEN = Path(__file__).parent / "golden" / "tiny_k3"
P = "language_model."
EXPERT = P + "model.layers.1.block_sparse_moe.experts.1."


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(tmp_path_factory.mktemp("audit") / "micro", "micro")


def test_a_good_folder() -> None:
    report = audit(GOLDEN)
    assert report["ok"] and not report["problems"] and not report["warnings"]
    assert json.loads(json.dumps(report)) == report
    assert (report["files"], report["tensors"], report["experts"]) == (1, 542, "MXFP4")
    assert report["skipped"] == {"count": 0, "names": []}
    assert sum(report["bytes"][part] for part in COMPONENTS) == report["bytes"]["total"]
    assert report["bytes"]["total"] == 1534832
    assert report["bytes"]["embedding"] == report["bytes"]["lm_head"] == 256 * 64 * 2
    assert report["bytes"]["experts"] == 7 * 8 * 3 * 96 * 32 * 17 // 32
    assert report["bytes"]["dense"] == 3 * 160 * 64 * 2
    assert report["config"]["text_config"]["hidden_size"] == 64
    with Checkpoint.open(GOLDEN) as c:
        assert report["fingerprint"] == c.fingerprint().to_dict()


def test_a_deep_audit_adds_a_digest_of_everything() -> None:
    seen: list[tuple[str, int, int]] = []
    report = audit(GOLDEN, deep=True, progress=lambda *event: seen.append(event))
    assert report["ok"] and report["deep_digest"]["deep"] is True
    assert seen[0] == ("open", 1, 1) and seen[-1][0] == "hash" and seen[-1][1] == seen[-1][2]
    with Checkpoint.open(GOLDEN) as c:
        assert report["deep_digest"] == c.deep_digest().to_dict()


def put(name: str, place: int, value: bytes) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        raw = tensors[name]
        at = place * len(value)
        return tensors | {
            name: Raw(raw.dtype, raw.shape, raw.data[:at] + value + raw.data[at + len(value) :])
        }

    return change


@pytest.mark.parametrize(
    ("name", "place", "value", "expected"),
    [
        (EXPERT + "w1.weight_scale", 7, b"\xff", "the scale byte 255, which is NaN, at [7, 0]"),
        (P + "model.layers.0.mlp.up_proj.weight", 70, b"\xc0\x7f", "a NaN or an infinity at [2, 6]"),
        (P + "lm_head.weight", 33, b"\x80\xff", "a NaN or an infinity at [1, 1]"),
        (
            P + "model.layers.0.self_attn.dt_bias",
            5,
            np.float32(np.nan).tobytes(),
            "a NaN or an infinity at [5]",
        ),
        (
            P + "model.layers.0.self_attn.A_log",
            0,
            np.float32(-np.inf).tobytes(),
            "a NaN or an infinity at [0]",
        ),
    ],
)
def test_a_value_that_is_not_finite_is_named_with_its_place(
    micro: Path, tmp_path: Path, name: str, place: int, value: bytes, expected: str
) -> None:
    folder = changed(micro, tmp_path / "c", tensors=put(name, place, value))
    assert audit(folder)["ok"]  # found only by reading everything
    report = audit(folder, deep=True)
    assert not report["ok"] and len(report["problems"]) == 1
    assert f".safetensors: {name} holds {expected}; expected finite values." in report["problems"][0]


def test_every_other_byte_of_a_packed_expert_is_a_value(micro: Path, tmp_path: Path) -> None:
    def fill(tensors: Tensors) -> Tensors:
        raw = tensors[EXPERT + "w1.weight_packed"]
        return tensors | {EXPERT + "w1.weight_packed": Raw("U8", raw.shape, b"\xff" * len(raw.data))}

    assert audit(changed(micro, tmp_path / "c", tensors=fill), deep=True)["ok"]
    codes = put(EXPERT + "w1.weight_scale", 0, b"\x00\xfe")
    assert audit(changed(micro, tmp_path / "d", tensors=codes), deep=True)["ok"]


def test_a_bad_value_past_the_first_block_has_the_right_place(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_BLOCK", 256)
    both = [put(P + "lm_head.weight", place, b"\x80\x7f") for place in (32 * 32 - 2, 32 * 20)]
    bad = changed(micro, tmp_path / "c", tensors=lambda t: both[1](both[0](t)))
    report = audit(bad, deep=True)
    assert len(report["problems"]) == 1 and "a NaN or an infinity at [20, 0]" in report["problems"][0]
    bad = changed(micro, tmp_path / "d", tensors=both[0])
    assert "at [31, 30]" in audit(bad, deep=True)["problems"][0]


def test_a_folder_full_of_bad_values_is_not_a_flood(tmp_path: Path) -> None:
    folder = synth(tmp_path / "a", "nano")

    def spoil(tensors: Tensors) -> Tensors:
        return {
            n: Raw(r.dtype, r.shape, b"\xff" * len(r.data))
            for n, r in tensors.items()
            if not n.endswith("A_log")
        } | {n: r for n, r in tensors.items() if n.endswith("A_log")}

    problems = audit(changed(folder, tmp_path / "b", tensors=spoil), deep=True)["problems"]
    assert len(problems) == 101 and problems[-1].endswith("more tensors hold values that are not finite.")


@pytest.mark.parametrize("value", ["nothing", "file", "empty", "cut", "config"])
def test_a_bad_folder_is_a_report_and_not_an_exception(micro: Path, tmp_path: Path, value: str) -> None:
    folder = tmp_path / "c"
    if value == "file":
        folder.write_text("")
    elif value == "empty":
        folder.mkdir()
    elif value != "nothing":
        changed(micro, folder)
        if value == "cut":
            os.truncate(next(folder.glob("*.safetensors")), 9999)
        else:
            (folder / "config.json").write_text("{}")
    report = audit(folder, deep=True)
    assert not report["ok"] and report["problems"] and report["fingerprint"] is None
    assert json.loads(json.dumps(report)) == report


def test_the_report_counts_what_is_skipped_and_how_experts_are_stored(tmp_path: Path) -> None:
    folder = synth(tmp_path / "a", "nano", experts="bf16")
    extra = {f"vision_tower.{i}": Raw("F32", (1,), bytes(4)) for i in range(7)}
    report = audit(changed(folder, tmp_path / "b", tensors=lambda t: t | extra))
    assert report["ok"] and report["skipped"]["count"] == 7 and len(report["skipped"]["names"]) == 5
    assert report["experts"] == "BF16" and report["tensors"] == 394
    first = "model.layers.1.block_sparse_moe.experts."

    def one_layer_wide(tensors: Tensors) -> Tensors:
        return {n: as_f32(r) if first in n else r for n, r in tensors.items()}

    assert audit(changed(folder, tmp_path / "c", tensors=one_layer_wide))["experts"] == "BF16 and F32"


def test_the_estimate_of_the_released_model() -> None:
    memory = memory_estimate(PRESETS["k3"], 1_559_965_606_912)
    recurrent, windows = 69 * 96 * 128 * 128 * 4, 69 * 3 * 3 * 12288 * 4
    assert memory["state_per_session"] == recurrent + windows == 434_110_464 + 30_523_392
    assert memory["latent_per_token_bf16"] == 27_648 and memory["latent_per_token_fp32"] == 2 * 27_648
    assert memory["weights_mapped"] == 1_559_965_606_912
    assert memory["scratch"] < 2**29
