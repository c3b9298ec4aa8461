# SPDX-License-Identifier: MIT
"""Opening a checkpoint: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import logging
import os
import pickle
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, as_f32, changed, floats, load, save, write_file

from k3session.accounting import inspect
from k3session.checkpoint import Checkpoint
from k3session.errors import CheckpointError, ClosedError
from k3session.layout import canonicalise, parameters
from k3session.presets import PRESETS
from k3session.synth import synth

GOLDEN = Path(__file__).parent / "golden" / "tiny_k3"
P = "language_model."
A_LOG = P + "model.layers.0.self_attn.A_log"
HEAD = P + "lm_head.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KDA and one MLA layer, 62 tensors, in the released layout."""
    return synth(tmp_path_factory.mktemp("checkpoint") / "micro", "micro")


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers in several shards."""
    return synth(tmp_path_factory.mktemp("checkpoint") / "nano", "nano", shard_bytes=250_000)


def refusal(folder: Path) -> tuple[str, ...]:
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    assert time.perf_counter() - start < 2
    assert str(error.value).startswith(f"{folder}: ")
    assert all(problem in str(error.value) for problem in error.value.problems[:40])
    return error.value.problems


def only(folder: Path) -> str:
    problems = refusal(folder)
    assert len(problems) == 1, problems
    return problems[0]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: raw for name, raw in tensors.items() if name not in names}


# What is accepted.


def test_the_golden_checkpoint_opens_and_maps_without_copying() -> None:
    start = time.perf_counter()
    with Checkpoint.open(GOLDEN) as c:
        assert time.perf_counter() - start < 1
        raw = load(GOLDEN)
        assert len(c.names) == len(raw) == 542 and not c.skipped
        assert list(c.names) == [p.name for p in parameters(c.config)]
        assert c.total_bytes == sum(len(r.data) for r in raw.values()) == 1534832
        for name in c.names:
            array, info = c.tensor(name), c.info(name)
            stored = raw[info.stored_name]
            assert array.tobytes() == stored.data[: array.nbytes] and array.nbytes == info.nbytes
            assert array.dtype == {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}[info.dtype]
            assert not array.flags.writeable and not array.flags.owndata
        assert c.tensor("model.layers.0.self_attn.A_log").shape == (3,)
        assert c.info("model.layers.0.self_attn.A_log").stored_shape == (32,)
        assert c.info("lm_head.weight").file == GOLDEN / "model.safetensors"
        assert [c.packed_experts(i) for i in range(8)] == [False] + [True] * 7
        with pytest.raises(ValueError, match="read-only"):
            c.tensor("model.norm.weight")[0] = 0


@pytest.mark.parametrize("preset", ["k3", "nano"])
def test_the_table_of_the_released_model(preset: str) -> None:
    table = list(parameters(PRESETS[preset]))
    names = [p.name for p in table]
    assert len(names) == len(set(names)) == {"k3": 497220 - 168, "nano": 610}[preset]
    assert all(canonicalise(P + name) == name for name in names)
    if preset == "k3":
        shapes = {p.name: p.shape for p in table}
        assert shapes["model.layers.3.self_attn.kv_b_proj.weight"] == (24576, 512)
        assert shapes["model.layers.92.self_attn.q_b_proj.weight"] == (18432, 1536)
        assert shapes["model.layers.91.block_sparse_moe.experts.895.w2.weight_scale"] == (3584, 96)
        assert "model.layers.91.self_attn.q_a_proj.weight" in shapes  # the last two layers are both MLA


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.", ""])
def test_every_accepted_prefix_gives_the_same_model(micro: Path, tmp_path: Path, spelling: str) -> None:
    def respell(tensors: Tensors) -> Tensors:
        made = {}
        for name, raw in tensors.items():
            bare = name.removeprefix(P)
            if spelling != "language_model.model.":
                name = bare if bare.startswith("lm_head") else spelling + bare.removeprefix("model.")
            made[name] = raw
        return made

    with Checkpoint.open(micro) as a, Checkpoint.open(changed(micro, tmp_path / "c", tensors=respell)) as b:
        assert a.names == b.names
        assert all(np.array_equal(a.tensor(n), b.tensor(n)) for n in a.names)
        assert a.fingerprint() == b.fingerprint()


def test_one_file_without_an_index(micro: Path, tmp_path: Path) -> None:
    folder = changed(micro, tmp_path / "c")
    (folder / INDEX).unlink()
    Checkpoint.open(folder).close()


def test_vision_tensors_are_skipped_and_named(micro: Path, tmp_path: Path) -> None:
    extra = {
        "vision_tower.a.weight": Raw("F16", (2,), bytes(4)),
        "mm_projector.b": Raw("BF16", (3,), bytes(6)),
    }
    with Checkpoint.open(changed(micro, tmp_path / "c", tensors=lambda t: t | extra, shards=3)) as c:
        assert sorted(c.skipped) == ["mm_projector.b", "vision_tower.a.weight"]
        assert len(c.names) == 62


def test_data_need_not_be_aligned(micro: Path, tmp_path: Path) -> None:
    folder = changed(micro, tmp_path / "c")
    file = next(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    file.write_bytes(struct.pack("<Q", length + 1) + whole[8 : 8 + length] + b" " + whole[8 + length :])
    with Checkpoint.open(folder) as c, Checkpoint.open(micro) as plain:
        assert not c.tensor("lm_head.weight").flags.aligned
        assert all(np.array_equal(c.tensor(n), plain.tensor(n)) for n in c.names)


@pytest.mark.parametrize(("experts", "trunk"), [("bf16", "bf16"), ("f32", "f32"), ("mxfp4", "f32")])
def test_unpacked_experts_and_f32_trunks(tmp_path: Path, experts: str, trunk: str) -> None:
    with Checkpoint.open(synth(tmp_path / "c", "micro", experts=experts, trunk=trunk)) as c:
        kind = {"bf16": np.uint16, "f32": np.float32, "mxfp4": np.uint8}[experts]
        leaf = "weight_packed" if experts == "mxfp4" else "weight"
        assert c.tensor(f"model.layers.1.block_sparse_moe.experts.1.w2.{leaf}").dtype == kind
        assert c.packed_experts(1) == (experts == "mxfp4")
        assert (c.info("lm_head.weight").dtype == "F32") == (trunk == "f32")


def test_bf16_and_f32_may_be_mixed_in_a_trunk(micro: Path, tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> Tensors:
        odd = [n for n, raw in tensors.items() if raw.dtype == "BF16"][::2]
        return tensors | {name: as_f32(tensors[name]) for name in odd}

    with Checkpoint.open(changed(micro, tmp_path / "c", tensors=widen)) as c:
        assert {c.info(n).dtype for n in c.names} == {"BF16", "F32", "U8"}


def test_small_vectors_may_be_bf16(micro: Path, tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> Tensors:
        def cut(raw: Raw) -> Raw:
            return Raw("BF16", raw.shape, (floats(raw).view(np.uint32) >> 16).astype("<u2").tobytes())

        return {name: cut(raw) if raw.dtype == "F32" else raw for name, raw in tensors.items()}

    with Checkpoint.open(changed(micro, tmp_path / "c", tensors=narrow)) as c:
        assert c.tensor("model.layers.0.self_attn.A_log").dtype == np.uint16


def test_packing_is_read_from_the_tensors_and_not_from_the_ignore_list(micro: Path, tmp_path: Path) -> None:
    def ignore_all(d: dict[str, Any]) -> None:
        d["text_config"]["quantization_config"]["ignore"] = ["re:.*", "Linear"]

    def no_packing(d: dict[str, Any]) -> None:
        del d["text_config"]["quantization_config"]

    for i, change in enumerate((ignore_all, no_packing)):
        with Checkpoint.open(changed(micro, tmp_path / str(i), config=change)) as c:
            assert c.packed_experts(1)


def test_layers_without_experts_gate_or_latent_norm(tmp_path: Path) -> None:
    base = PRESETS["micro"]
    for i, values in enumerate(
        [
            {"first_k_dense_replace": 2},
            {"mla_use_output_gate": False},
            {"latent_moe_use_norm": False},
            {"kda_layers": (0, 1), "full_attn_layers": ()},
            {"kda_layers": (), "full_attn_layers": (0, 1)},
            {"moe_layer_freq": 2, "first_k_dense_replace": 0},
        ]
    ):
        config = replace(base, **values)  # type: ignore[arg-type]
        with Checkpoint.open(synth(tmp_path / str(i), config)) as c:
            assert c.config == config
            assert list(c.names) == [p.name for p in parameters(config)]


# A_log.


def a_log(values: list[float], shape: tuple[int, ...] | None = None) -> Callable[[Tensors], Tensors]:
    raw = Raw("F32", shape or (len(values),), np.array(values, "<f4").tobytes())
    return lambda tensors: tensors | {A_LOG: raw}


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([0.5], None),
        ([0.5, 0.0, 0.0], None),
        ([0.5, -0.0], None),
        ([0.5], (1, 1, 1, 1)),
        ([0.5, 0.0], (1, 1, 2, 1)),
    ],
)
def test_a_log_padded_with_zeros(micro: Path, tmp_path: Path, values: list[float], shape: Any) -> None:
    with Checkpoint.open(changed(micro, tmp_path / "c", tensors=a_log(values, shape))) as c:
        assert c.tensor("model.layers.0.self_attn.A_log").tolist() == [0.5]


@pytest.mark.parametrize("tail", [[0.0, 1e-30], [float("nan")], [float("inf"), 0.0]])
def test_a_log_padded_with_anything_else_is_refused(micro: Path, tmp_path: Path, tail: list[float]) -> None:
    problem = only(changed(micro, tmp_path / "c", tensors=a_log([0.5, *tail])))
    assert A_LOG in problem and "is not zero; expected zeros past the heads" in problem
    assert f"entry {1 + tail.index(next(t for t in tail if t != 0))}" in problem


@pytest.mark.parametrize(("tail", "good"), [(b"\x00\x00\x00\x80", True), (b"\x00\x00\x01\x00", False)])
def test_a_log_in_bf16_is_padded_with_zeros_too(micro: Path, tmp_path: Path, tail: bytes, good: bool) -> None:
    raw = Raw("BF16", (3,), b"\x00\x3f" + tail)
    folder = changed(micro, tmp_path / "c", tensors=lambda t: t | {A_LOG: raw})
    if good:
        with Checkpoint.open(folder) as c:
            assert c.tensor("model.layers.0.self_attn.A_log").tolist() == [0x3F00]
    else:
        assert "entry 2 is not zero" in only(folder)


@pytest.mark.parametrize(
    ("values", "shape"), [([0.5, 0.5], (2, 1)), ([0.5, 0.0], (1, 2)), ([0.5, 0.0], (2, 1, 1, 1)), ([], (0,))]
)
def test_a_log_of_another_shape_is_refused(
    micro: Path, tmp_path: Path, values: list[float], shape: Any
) -> None:
    problem = only(changed(micro, tmp_path / "c", tensors=a_log(values, shape)))
    assert f"{A_LOG} has shape {list(shape)}; expected [1] (kda num_heads), or longer with zeros" in problem


def test_a_log_shorter_than_the_heads_is_refused(nano: Path, tmp_path: Path) -> None:
    assert "has shape [2]; expected [3]" in only(changed(nano, tmp_path / "c", tensors=a_log([1.0, 1.0])))


# The head.


def tie(d: dict[str, Any]) -> None:
    d["tie_word_embeddings"] = d["text_config"]["tie_word_embeddings"] = True


def test_a_tied_head_is_the_embedding(micro: Path, tmp_path: Path) -> None:
    with Checkpoint.open(changed(micro, tmp_path / "c", config=tie, tensors=without(HEAD))) as c:
        assert "lm_head.weight" not in c.names
        assert np.shares_memory(c.tensor("lm_head.weight"), c.tensor("model.embed_tokens.weight"))


def test_a_repeated_tied_head_is_skipped_and_another_refused(micro: Path, tmp_path: Path) -> None:
    def repeat(tensors: Tensors) -> Tensors:
        return tensors | {HEAD: tensors[P + "model.embed_tokens.weight"]}

    with Checkpoint.open(changed(micro, tmp_path / "same", config=tie, tensors=repeat)) as c:
        assert c.skipped == (HEAD,)
    assert f"{HEAD} differs from the embedding" in only(changed(micro, tmp_path / "other", config=tie))


def test_a_missing_head_is_not_tied_by_guess(micro: Path, tmp_path: Path) -> None:
    problem = only(changed(micro, tmp_path / "c", tensors=without(HEAD)))
    assert problem.startswith("lm_head.weight is missing") and "tie_word_embeddings is false" in problem


def test_a_packed_head_is_refused(micro: Path, tmp_path: Path) -> None:
    def pack(tensors: Tensors) -> Tensors:
        made = without(HEAD)(tensors)
        made[P + "lm_head.weight_packed"] = Raw("U8", (32, 16), bytes(512))
        made[P + "lm_head.weight_scale"] = Raw("U8", (32, 1), bytes(32))
        return made

    problems = refusal(changed(micro, tmp_path / "c", tensors=pack))
    assert any(
        "lm_head.weight_packed is not part" in p and "Only routed experts may be packed" in p
        for p in problems
    )
    assert any(p.startswith("lm_head.weight is missing") for p in problems)


# Every tensor consumed, every parameter filled.


def test_each_tensor_is_missed_when_it_is_gone(micro: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((micro / "config.json").read_text()), load(micro)
    for name in tensors:
        # Without one packed half the experts are still packed, so the other half stays wanted.
        problem = only(save(tmp_path / "c", config, without(name)(tensors)))
        assert problem.startswith(f"{name.removeprefix(P)} is missing; expected "), problem


def test_each_tensor_of_another_shape_is_refused(micro: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((micro / "config.json").read_text()), load(micro)
    for name, raw in tensors.items():
        rows = raw.shape[0] - 1 if name == A_LOG else raw.shape[0] + 1
        size = len(raw.data) // raw.shape[0] * rows
        wrong = Raw(raw.dtype, (rows, *raw.shape[1:]), (raw.data * 2)[:size])
        if name == A_LOG:
            wrong = Raw(raw.dtype, (1, *raw.shape), raw.data)
        problem = only(save(tmp_path / "c", config, tensors | {name: wrong}))
        assert f".safetensors: {name} has shape {list(wrong.shape)}; expected [" in problem, problem


def test_each_tensor_of_another_dtype_is_refused(micro: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((micro / "config.json").read_text()), load(micro)
    for name, raw in tensors.items():
        kind = {"BF16": "F16", "F32": "I32", "U8": "I8"}[raw.dtype]
        problem = only(save(tmp_path / "c", config, tensors | {name: Raw(kind, raw.shape, raw.data)}))
        expected = "U8" if raw.dtype == "U8" else "BF16 or F32"
        assert f".safetensors: {name} is {kind}; expected {expected}." in problem


def test_a_tensor_too_many_is_refused(micro: Path, tmp_path: Path) -> None:
    extra = P + "model.layers.1.self_attn.q_proj.bias"
    problem = only(changed(micro, tmp_path / "c", tensors=lambda t: t | {extra: Raw("BF16", (2,), bytes(4))}))
    assert f"{extra} is not part of this model" in problem


def test_a_renamed_tensor_is_both_missing_and_unexpected(micro: Path, tmp_path: Path) -> None:
    old = P + "model.layers.1.block_sparse_moe.experts.1.w3.weight_packed"
    new = old.replace("w3", "up_proj")
    problems = refusal(changed(micro, tmp_path / "c", tensors=lambda t: without(old)(t) | {new: t[old]}))
    assert problems[0].startswith(f"{old.removeprefix(P)} is missing") and f"{new} is not part" in problems[1]


def test_an_unknown_prefix_shows_names_and_what_is_accepted(micro: Path, tmp_path: Path) -> None:
    folder = changed(micro, tmp_path / "c", tensors=lambda t: {"net." + n: r for n, r in t.items()})
    problem = only(folder)
    assert problem.startswith("62 tensors have names that start with no accepted prefix, for example net.")
    assert problem.count("net.") == 3 and "'language_model.model.', 'model.', ''" in problem


def test_one_tensor_under_two_names_is_refused(micro: Path, tmp_path: Path) -> None:
    problem = only(changed(micro, tmp_path / "c", tensors=lambda t: t | {"lm_head.weight": t[HEAD]}))
    assert "are the same tensor lm_head.weight; expected it once" in problem


def test_experts_of_one_layer_are_packed_or_plain_and_of_one_dtype(tmp_path: Path) -> None:
    packed, plain = synth(tmp_path / "a", "micro"), load(synth(tmp_path / "b", "micro", experts="bf16"))
    first = P + "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    problems = refusal(changed(packed, tmp_path / "c", tensors=lambda t: t | {first: plain[first]}))
    assert f"{first} is not part" in problems[0] and "all packed or all plain" in problems[0]
    folder = changed(tmp_path / "b", tmp_path / "d", tensors=lambda t: t | {first: as_f32(t[first])})
    assert only(folder) == "layer 1: the experts are BF16 and F32; expected one of them."


# The configuration against the tensors.


def test_a_configuration_of_another_width_names_where_the_shape_comes_from(
    micro: Path, tmp_path: Path
) -> None:
    folder = changed(micro, tmp_path / "c", config=lambda d: d["text_config"].update(kv_lora_rank=16))
    problems = refusal(folder)
    name = P + "model.layers.1.self_attn.kv_b_proj.weight"
    assert any(f"{name} has shape [16, 8]; expected [16, 16] (num_attention_heads x" in p for p in problems)
    assert len(problems) == 3


def test_switches_are_checked_against_the_tensors(micro: Path, tmp_path: Path) -> None:
    def set_text(**values: Any) -> Path:
        name = "-".join(map(str, values.items()))
        return changed(micro, tmp_path / name, config=lambda d: d["text_config"].update(values))

    assert "mla_use_output_gate is false" in only(set_text(mla_use_output_gate=False))
    assert "latent_moe_use_norm is false" in only(set_text(latent_moe_use_norm=False))
    assert any("layer 0 has experts" in p for p in refusal(set_text(first_k_dense_replace=0)))
    assert any("num_experts is 1" in p for p in refusal(set_text(num_experts=1)))
    assert any("experts.2.w1" in p and "is missing" in p for p in refusal(set_text(num_experts=3)))


def test_the_kind_of_a_layer_is_checked_against_its_tensors(micro: Path, tmp_path: Path) -> None:
    def swap(d: dict[str, Any]) -> None:
        d["text_config"]["linear_attn_config"] |= {"kda_layers": [2], "full_attn_layers": [1]}

    problems = refusal(changed(micro, tmp_path / "c", config=swap))
    assert any("A_log is not part of this model. (full_attn_layers names layer 1" in p for p in problems)


def test_too_few_layers_in_the_configuration(nano: Path, tmp_path: Path) -> None:
    def fewer(d: dict[str, Any]) -> None:
        d["text_config"]["num_hidden_layers"] = 6
        d["text_config"]["linear_attn_config"]["full_attn_layers"] = [4, 6]

    problem = only(changed(nano, tmp_path / "c", config=fewer))
    assert "tensors belong to layers past the last one" in problem and "num_hidden_layers is 6" in problem


@pytest.mark.parametrize("experts", [2**31 - 1, 500])
def test_a_configuration_of_a_huge_model_is_refused_at_once(
    micro: Path, tmp_path: Path, experts: int
) -> None:
    problems = refusal(
        changed(micro, tmp_path / "c", config=lambda d: d["text_config"].update(num_experts=experts))
    )
    assert len(problems) < 10


def test_packed_experts_need_whole_groups(micro: Path, tmp_path: Path) -> None:
    folder = changed(
        micro, tmp_path / "c", config=lambda d: d["text_config"].update(moe_intermediate_size=40)
    )
    assert "moe_intermediate_size is 40; expected a multiple of 32" in refusal(folder)[0]


# Files.


def copy_shards(source: Path, target: Path) -> list[Path]:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return sorted(target.glob("*.safetensors"))


def test_missing_shards_are_all_named_in_one_line(nano: Path, tmp_path: Path) -> None:
    shards = copy_shards(nano, tmp_path / "c")
    assert len(shards) >= 4
    for file in (shards[1], shards[3]):
        file.unlink()
    assert only(tmp_path / "c") == (
        f"{INDEX}: 2 of {len(shards)} files are missing: {shards[1].name}, {shards[3].name}; fetch them again."
    )


@pytest.mark.parametrize("cut", [1, 100, 10**5, "header", "length", "all"])
def test_a_truncated_shard_is_named_with_both_sizes(nano: Path, tmp_path: Path, cut: Any) -> None:
    file = copy_shards(nano, tmp_path / "c")[1]
    size = file.stat().st_size
    left = {"header": 100, "length": 5, "all": 0}[cut] if isinstance(cut, str) else size - cut
    os.truncate(file, left)
    problem = only(tmp_path / "c")
    assert problem.startswith(f"{file.name}: ") and "truncated" in problem and str(left) in problem


def test_a_folder_at_any_truncation_is_refused(micro: Path, tmp_path: Path) -> None:
    file = copy_shards(micro, tmp_path / "c")[0]
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 397), len(whole) - 1]:
        file.write_bytes(whole[:size])
        assert "truncated" in only(tmp_path / "c")


def rewritten_index(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    copy_shards(source, target)
    index = json.loads((target / INDEX).read_text())
    made = change(index)
    (target / INDEX).write_text(json.dumps(index if made is None else made))
    return target


def test_an_index_that_disagrees_with_the_files(nano: Path, tmp_path: Path) -> None:
    norm = P + "model.norm.weight"

    def move(index: dict[str, Any]) -> None:
        index["weight_map"][norm] = index["weight_map"][P + "model.embed_tokens.weight"]

    def drop(index: dict[str, Any]) -> None:
        del index["weight_map"][norm]

    def invent(index: dict[str, Any]) -> None:
        index["weight_map"]["language_model.ghost"] = index["weight_map"][norm]

    assert f"{norm} is placed in " in only(rewritten_index(nano, tmp_path / "a", move))
    assert f"{norm} of " in only(rewritten_index(nano, tmp_path / "b", drop))
    assert "language_model.ghost is placed in" in only(rewritten_index(nano, tmp_path / "c", invent))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", 5])
def test_an_index_reaches_only_into_its_own_folder(micro: Path, tmp_path: Path, name: Any) -> None:
    def point(index: dict[str, Any]) -> None:
        index["weight_map"][HEAD] = name

    assert "expected the name of a file in the same folder" in only(
        rewritten_index(micro, tmp_path / "c", point)
    )


@pytest.mark.parametrize("value", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_of_another_form(micro: Path, tmp_path: Path, value: Any) -> None:
    assert "weight_map is" in only(rewritten_index(micro, tmp_path / "c", lambda _: value))


def test_a_tensor_in_two_shards_is_refused(nano: Path, tmp_path: Path) -> None:
    shards = copy_shards(nano, tmp_path / "c")
    first, second = load_file(shards[0]), load_file(shards[1])
    name = next(iter(first))
    write_file(shards[1], {name: first[name]} | second)
    assert (
        only(tmp_path / "c")
        == f"{name} stands in {shards[0].name} and in {shards[1].name}; expected it once."
    )


def load_file(file: Path) -> Tensors:
    folder = file.parent / ("only-" + file.stem)
    folder.mkdir()
    (folder / file.name).write_bytes(file.read_bytes())
    return load(folder)


def test_several_files_need_an_index(nano: Path, tmp_path: Path) -> None:
    shards = copy_shards(nano, tmp_path / "c")
    (tmp_path / "c" / INDEX).unlink()
    assert f"found {len(shards)} safetensors files and no {INDEX}" in only(tmp_path / "c")


def test_a_stray_file_is_ignored_with_a_warning(
    micro: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy_shards(micro, tmp_path / "c")
    (tmp_path / "c" / "old.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="k3session"):
        Checkpoint.open(tmp_path / "c").close()
    assert "does not name old.safetensors; ignored" in caplog.text


def test_what_is_no_checkpoint_folder(tmp_path: Path) -> None:
    assert "does not exist" in only(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "is a file; expected a folder" in only(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    problems = refusal(tmp_path / "empty")
    assert problems[0] == "config.json: the file is missing." and "found no safetensors file" in problems[1]


def test_a_file_without_tensors_misses_all_of_them(micro: Path, tmp_path: Path) -> None:
    problems = refusal(
        changed(micro, tmp_path / "c", tensors=lambda t: {"vision_tower.a": Raw("U8", (1,), b"0")})
    )
    assert problems[0].startswith("model.embed_tokens.weight is missing")


def test_all_problems_of_a_folder_are_reported_together(nano: Path, tmp_path: Path) -> None:
    shards = copy_shards(nano, tmp_path / "c")
    shards[0].unlink()
    os.truncate(shards[1], 1000)
    held = load_file(shards[2])
    name = next(n for n, raw in held.items() if raw.dtype == "BF16")
    held[name] = Raw("F16", held[name].shape, held[name].data)
    write_file(shards[2], held)
    (tmp_path / "c" / f"only-{shards[2].stem}" / shards[2].name).unlink()
    problems = refusal(tmp_path / "c")
    assert len(problems) == 3
    assert f"1 of {len(shards)} files are missing" in problems[0] and "truncated" in problems[1]
    assert f"{name} is F16" in problems[2]
    config = tmp_path / "c" / "config.json"
    config.write_text(config.read_text().replace('"situ"', '"silu"'))
    problems = refusal(tmp_path / "c")
    assert problems[0].startswith("config.json: hidden_act is 'silu'") and len(problems) == 3


def test_the_same_problem_in_many_layers_is_counted(nano: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> Tensors:
        return {n: r for n, r in tensors.items() if not n.endswith("w2.weight_scale")}

    problem = only(changed(nano, tmp_path / "c", tensors=drop))
    assert problem.startswith("model.layers.1.block_sparse_moe.experts.0.w2.weight_scale is missing")
    assert problem.endswith("(71 more like it.)")


def test_a_file_that_changes_after_it_was_checked(micro: Path, tmp_path: Path) -> None:
    file = copy_shards(micro, tmp_path / "c")[0]
    found = inspect(tmp_path / "c")
    os.truncate(file, 5000)
    with pytest.raises(CheckpointError, match="the file has 5000 bytes now"):
        Checkpoint.from_inspection(found)


# The handle.


def test_progress_is_reported_per_file_and_its_errors_propagate(nano: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    Checkpoint.open(nano, progress=lambda *event: seen.append(event)).close()
    count = len(list(nano.glob("*.safetensors")))
    assert seen == [("open", i + 1, count) for i in range(count)]

    def fail(event: str, current: int, total: int) -> None:
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        Checkpoint.open(nano, progress=fail)


def mapped(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


def test_close_is_final_idempotent_and_unmaps(micro: Path, tmp_path: Path) -> None:
    folder = changed(micro, tmp_path / "c")
    c = Checkpoint.open(folder)
    assert mapped(folder) == 1
    view = c.tensor("model.norm.weight")
    expected = view.copy()
    c.close()
    c.close()
    assert c.is_closed and "closed" in repr(c)
    assert np.array_equal(view, expected) and mapped(folder) == 1
    del view
    assert mapped(folder) == 0
    for use in (lambda: c.tensor("model.norm.weight"), c.fingerprint, c.deep_digest):
        with pytest.raises(ClosedError, match="has been closed"):
            use()


def test_a_with_block_closes_and_lets_the_error_through(micro: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpoint.open(micro) as c:
        raise ZeroDivisionError
    assert c.is_closed


def test_an_unknown_tensor_and_a_pickle(micro: Path) -> None:
    with Checkpoint.open(micro) as c:
        with pytest.raises(KeyError, match=r"model\.nothing is not a tensor of"):
            c.tensor("model.nothing")
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(c)


def test_failed_opens_leave_nothing_behind(micro: Path, tmp_path: Path) -> None:
    folder = changed(micro, tmp_path / "c", tensors=a_log([1.0, 2.0]))

    def handles() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), mapped(folder)

    before = handles()
    for _ in range(20):
        with pytest.raises(CheckpointError):
            Checkpoint.open(folder)
    assert handles() == before
