# SPDX-License-Identifier: MIT
"""Random checkpoints: the released layout, determinism, bounded memory, and nothing left after a failure."""

from __future__ import annotations

import json
import re
import resource
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import floats, load

from k3session.checkpoint import Checkpoint
from k3session.errors import CheckpointError, ConfigError
from k3session.presets import PRESETS
from k3session.synth import synth

GOLDEN = Path(__file__).parent / "golden" / "tiny_k3"
P = "language_model."


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(tmp_path_factory.mktemp("synth") / "nano", "nano")


@pytest.mark.parametrize("preset", ["micro", "nano", "tiny"])
def test_a_preset_opens_with_its_own_configuration(tmp_path: Path, preset: str) -> None:
    with Checkpoint.open(synth(tmp_path / "c", preset)) as c:
        assert c.config == PRESETS[preset]


def test_presets_have_the_published_dimensions() -> None:
    def numbers(name: str) -> list[int]:
        c = PRESETS[name]
        mla = [c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim]
        moe = [c.num_experts, c.num_experts_per_token, c.num_shared_experts]
        moe += [c.routed_expert_hidden_size, c.moe_intermediate_size, c.intermediate_size, c.vocab_size]
        return [
            c.hidden_size,
            c.num_hidden_layers,
            c.attn_res_block_size,
            c.kda_num_heads,
            c.kda_head_dim,
            *mla,
            *moe,
        ]

    assert numbers("tiny") == [256, 8, 4, 2, 128, 64, 128, 64, 32, 64, 16, 4, 2, 128, 128, 512, 1024]
    assert numbers("mid") == [2048, 16, 4, 16, 128, 512, 512, 128, 64, 128, 64, 8, 2, 1024, 1024, 8192, 32768]
    k3 = [7168, 93, 12, 96, 128, 1536, 512, 128, 64, 128, 896, 16, 2, 3584, 3072, 33792, 163840]
    assert numbers("k3") == k3
    assert numbers("k3-slice") == [7168, 3, *k3[2:10], 48, 16, 2, 3584, 3072, 33792, 8192]
    assert PRESETS["k3-slice"].full_attn_layers == (2,)
    assert PRESETS["k3"].full_attn_layers == (*range(3, 92, 4), 92)
    assert PRESETS["mid"].full_attn_layers == (3, 7, 11, 15)
    assert PRESETS["nano"].full_attn_layers == (3, 5, 6)


def test_names_and_dtypes_are_those_of_the_released_layout(nano: Path) -> None:
    def kinds(folder: Path) -> dict[str, str]:
        return {re.sub(r"\.\d+", ".#", name): raw.dtype for name, raw in load(folder).items()}

    assert kinds(nano) == kinds(GOLDEN)
    a_log = load(nano)[P + "model.layers.0.self_attn.A_log"]
    assert a_log.shape == (16,) and not any(floats(a_log)[3:]) and all(floats(a_log)[:3] > 0)


def test_the_index_and_the_generation_defaults_belong_to_it(nano: Path) -> None:
    index = json.loads((nano / "model.safetensors.index.json").read_text())
    held = load(nano)
    assert index["weight_map"] == dict.fromkeys(held, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(len(raw.data) for raw in held.values())
    assert json.loads((nano / "generation_config.json").read_text())["eos_token_id"] == [1]


def test_the_same_seed_gives_the_same_bytes(nano: Path, tmp_path: Path) -> None:
    assert contents(synth(tmp_path / "same", "nano")) == contents(nano)
    other = load(synth(tmp_path / "other", "nano", seed=1235))
    fixed = {n for n, raw in load(nano).items() if other[n].data == raw.data}
    assert not fixed


def test_a_tensor_depends_on_neither_files_nor_neighbours(nano: Path, tmp_path: Path) -> None:
    base = load(nano)
    assert load(synth(tmp_path / "shards", "nano", shard_bytes=100_000)) == base
    more = load(synth(tmp_path / "more", replace(PRESETS["nano"], num_experts=13)))
    gates = [n for n in base if ".gate." in n]
    assert all(more[n] == base[n] for n in base if n not in gates)
    names = sorted(file.name for file in (tmp_path / "shards").glob("*.safetensors"))
    count = len(names)
    assert count > 5 and names[0] == f"model-00001-of-{count:06d}.safetensors"


def test_no_two_tensors_are_alike(nano: Path) -> None:
    drawn = [raw.data for raw in load(nano).values() if len(raw.data) >= 32]
    assert len(set(drawn)) == len(drawn)


def test_scales_keep_activations_near_one(nano: Path) -> None:
    held = load(nano)
    for name, raw in held.items():
        if name.endswith("_proj.weight"):
            assert floats(raw).std() * raw.shape[-1] ** 0.5 == pytest.approx(1, abs=0.35), name
    bias = [floats(held[f"{P}model.layers.{i}.self_attn.dt_bias"]).mean() for i in (0, 1, 2, 4)]
    assert bias[0] > 0 and all(value < -2 for value in bias[1:])
    packed = np.frombuffer(
        held[P + "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"].data, np.uint8
    )
    scale = np.frombuffer(
        held[P + "model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"].data, np.uint8
    )
    assert len(np.unique(packed & 15)) == 16 and len(np.unique(packed >> 4)) == 16
    assert set(np.unique(scale)) == {122, 123, 124}


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    config = replace(PRESETS["micro"], vocab_size=400_000, tie_word_embeddings=True)
    tracemalloc.start()
    try:
        synth(tmp_path / "c", config, trunk="f32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "c" / "model.safetensors").stat().st_size > 50_000_000
    assert peak < 10_000_000


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    synth(tmp_path / "c", "micro", progress=lambda *event: seen.append(event))
    total = sum(len(raw.data) for raw in load(tmp_path / "c").values())
    assert {(event, of) for event, _, of in seen} == {("synth", total)}
    counts = [current for _, current, _ in seen]
    assert counts == sorted(set(counts)) and counts[-1] == total


@pytest.mark.parametrize("problem", [RuntimeError("mine"), OSError("mine"), KeyboardInterrupt()])
def test_a_failure_leaves_no_files_and_is_not_disguised(tmp_path: Path, problem: BaseException) -> None:
    def fail(event: str, current: int, total: int) -> None:
        if current > total // 2:
            raise problem

    with pytest.raises(type(problem)) as error:
        synth(tmp_path / "c", "nano", shard_bytes=100_000, progress=fail)
    assert error.value is problem
    assert list((tmp_path / "c").iterdir()) == []


def test_a_file_that_cannot_be_written_whole(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            synth(tmp_path / "c", "nano")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "c").iterdir()) == []


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="1000 bytes are free; expected "):
        synth(tmp_path / "c", "nano")


def test_an_existing_checkpoint_is_not_touched(tmp_path: Path) -> None:
    synth(tmp_path / "c", "micro")
    before = contents(tmp_path / "c")
    with pytest.raises(CheckpointError, match="already holds"):
        synth(tmp_path / "c", "nano")
    assert contents(tmp_path / "c") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        synth(tmp_path / "file", "micro")


def test_wrong_options_name_what_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset is 'huge'; expected one of micro, nano"):
        synth(tmp_path, "huge")
    with pytest.raises(ConfigError, match="experts is 'int4'"):
        synth(tmp_path, "micro", experts="int4")
    with pytest.raises(ConfigError, match="trunk is 'f16'"):
        synth(tmp_path, "micro", trunk="f16")
    with pytest.raises(ConfigError, match="seed is -1"):
        synth(tmp_path, "micro", seed=-1)
    with pytest.raises(ConfigError, match="shard_bytes is 0"):
        synth(tmp_path, "micro", shard_bytes=0)
    odd = replace(PRESETS["micro"], moe_intermediate_size=40)
    with pytest.raises(ConfigError, match="moe_intermediate_size is 40; expected a multiple of 32"):
        synth(tmp_path, odd)
    assert list(tmp_path.iterdir()) == []
    Checkpoint.open(synth(tmp_path / "odd", odd, experts="bf16")).close()
