# SPDX-License-Identifier: MIT
"""The fingerprint: what it tells apart and what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, changed

from k3session.checkpoint import Checkpoint
from k3session.fingerprint import Fingerprint
from k3session.synth import synth

P = "language_model."
# Exactly 16 KiB.
LARGE = P + "model.layers.2.block_sparse_moe.shared_experts.up_proj.weight"


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(tmp_path_factory.mktemp("fingerprint") / "nano", "nano")


@pytest.fixture(scope="module")
def base(nano: Path) -> Fingerprint:
    return fingerprint(nano)


def fingerprint(folder: Path, *, deep: bool = False) -> Fingerprint:
    with Checkpoint.open(folder) as c:
        assert c.fingerprint() is c.fingerprint()
        return c.deep_digest() if deep else c.fingerprint()


def flip(name: str, place: int) -> Callable[[Tensors], Tensors]:
    """Change the lowest bit of one byte."""

    def change(tensors: Tensors) -> Tensors:
        raw = tensors[name]
        data = bytearray(raw.data)
        data[place] ^= 1
        return tensors | {name: Raw(raw.dtype, raw.shape, bytes(data))}

    return change


def test_it_does_not_depend_on_files_prefix_order_or_padding(
    nano: Path, tmp_path: Path, base: Fingerprint
) -> None:
    def unpad(tensors: Tensors) -> Tensors:
        return {n: Raw(r.dtype, (3,), r.data[:12]) if n.endswith("A_log") else r for n, r in tensors.items()}

    def reverse(tensors: Tensors) -> Tensors:
        return {n.removeprefix(P): tensors[n] for n in reversed(list(tensors))}

    assert fingerprint(changed(nano, tmp_path / "a", shards=5)) == base
    assert fingerprint(changed(nano, tmp_path / "b", tensors=unpad)) == base
    assert fingerprint(changed(nano, tmp_path / "c", tensors=reverse)) == base


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "head"),
        ("model.output_attn_res_proj.weight", "head"),
        ("model.layers.0.self_attn.A_log", "layers[0]"),
        ("model.layers.3.block_sparse_moe.experts.11.w2.weight_scale", "layers[3]"),
        ("model.layers.6.mlp_res_norm.weight", "layers[6]"),
    ],
)
def test_one_bit_shows_in_its_part_only(
    nano: Path, tmp_path: Path, base: Fingerprint, name: str, part: str
) -> None:
    other = fingerprint(changed(nano, tmp_path / "c", tensors=flip(P + name, 3)))
    assert list(base.differences(other)) == [part]
    assert other.digest != base.digest and str(other) == other.digest


def test_the_configuration_counts_where_logits_depend_on_it(
    nano: Path, tmp_path: Path, base: Fingerprint
) -> None:
    def with_text(**values: Any) -> Fingerprint:
        name = "-".join(values)
        return fingerprint(changed(nano, tmp_path / name, config=lambda d: d["text_config"].update(values)))

    assert list(base.differences(with_text(rms_norm_eps=1e-6))) == ["config"]
    assert list(base.differences(with_text(routed_scaling_factor=2.0))) == ["config"]
    assert list(base.differences(with_text(attn_res_block_size=2))) == ["config"]
    assert with_text(max_position_embeddings=99) == base
    assert with_text(eos_token_id=[5, 6]) == base


def test_dtype_counts_although_the_values_are_equal(nano: Path, tmp_path: Path, base: Fingerprint) -> None:
    def widen(tensors: Tensors) -> Tensors:
        name = P + "model.norm.weight"
        bits = np.frombuffer(tensors[name].data, "<u2").astype("<u4") << 16
        return tensors | {name: Raw("F32", tensors[name].shape, bits.tobytes())}

    assert list(base.differences(fingerprint(changed(nano, tmp_path / "c", tensors=widen)))) == ["head"]


def test_the_digests_of_a_known_checkpoint_stay_what_they_are() -> None:
    # Snapshots carry these: a change here makes every older snapshot another model's.
    golden = Path(__file__).parent / "golden" / "tiny_k3"
    assert fingerprint(golden).digest == "0466784d4716f1f227690b9422a72dce"
    assert fingerprint(golden, deep=True).digest == "b9b0aa858b7ef028f73f2d8504d93dec"


def test_a_large_tensor_is_sampled_and_only_the_deep_digest_sees_the_rest(tmp_path: Path) -> None:
    # The MLP of the tiny preset is 256 KiB: windows of 512 at 0, in the middle and at the end.
    folder = synth(tmp_path / "tiny", "tiny")
    name = P + "model.layers.0.mlp.gate_proj.weight"
    size = 512 * 256 * 2
    base, deep = fingerprint(folder), fingerprint(folder, deep=True)
    for i, place in enumerate((0, 511, size // 2, size - 1)):
        other = fingerprint(changed(folder, tmp_path / str(i), tensors=flip(name, place)))
        assert list(base.differences(other)) == ["layers[0]"], place
    between = changed(folder, tmp_path / "between", tensors=flip(name, 600))
    assert fingerprint(between) == base
    assert list(deep.differences(fingerprint(between, deep=True))) == ["layers[0]"]


def test_tensors_up_to_16_kib_are_read_whole(nano: Path, tmp_path: Path, base: Fingerprint) -> None:
    assert list(base.differences(fingerprint(changed(nano, tmp_path / "c", tensors=flip(LARGE, 5000))))) == [
        "layers[2]"
    ]


def test_a_dict_of_it_comes_back_equal_and_is_checked(base: Fingerprint) -> None:
    stored = json.loads(json.dumps(base.to_dict()))
    assert Fingerprint.from_dict(stored) == base
    for change in (
        {"version": 2},
        {"layers": stored["layers"][:-1]},
        {"head": stored["config"]},
        {"config": 5},
        {"layers": None},
        {"deep": "no"},
        {"digest": "0"},
    ):
        with pytest.raises(ValueError, match="fingerprint"):
            Fingerprint.from_dict(stored | change)
    with pytest.raises(ValueError, match="fingerprint"):
        Fingerprint.from_dict([])  # type: ignore[arg-type]


def test_differences_show_both_sides_and_missing_layers(base: Fingerprint) -> None:
    short = Fingerprint(base.config, base.embedding, base.layers[:-1], base.head)
    assert base.differences(short) == {"layers[6]": (base.layers[6], None)}
    assert short.differences(base) == {"layers[6]": (None, base.layers[6])}
    assert base.differences(base) == {}
