# SPDX-License-Identifier: MIT
"""Reading and checking config.json."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3session.config import L2_NORM_EPS, ROUTER_EPS, K3Config
from k3session.errors import ConfigError, K3Error
from k3session.presets import PRESETS

GOLDEN = Path(__file__).parent / "golden" / "tiny_k3"
Text = dict[str, Any]


@pytest.fixture
def released() -> dict[str, Any]:
    """A config.json in the released nesting, with the released keys."""
    found: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text())
    return found


def refusal(d: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        K3Config.from_dict(d)
    return str(error.value)


def test_released_nesting_is_read_with_zero_based_layers(released: dict[str, Any]) -> None:
    c = K3Config.from_dict(released)
    assert (c.hidden_size, c.num_hidden_layers, c.kda_num_heads, c.kda_head_dim) == (64, 8, 3, 32)
    assert c.kda_layers == (0, 1, 2, 4, 5)
    assert c.full_attn_layers == (3, 6, 7)
    assert [c.is_kda(i) for i in range(8)] == [True, True, True, False, True, True, False, False]
    assert [c.is_moe(i) for i in range(8)] == [False] + [True] * 7
    assert (c.eos_token_id, c.bos_token_id, c.pad_token_id) == ((2,), 1, 0)
    assert c.gate_lower_bound == -5.0 and c.short_conv_kernel_size == 4
    assert c == K3Config.from_dir(GOLDEN)


def test_derived_sizes(released: dict[str, Any]) -> None:
    c = K3Config.from_dict(released)
    assert (c.qk_head_dim, c.latent_width, c.kda_dim, c.mla_dim) == (48, 48, 96, 96)
    assert c.shared_intermediate_size == 192 and c.num_attn_res_blocks == 3
    assert c.q_scale == pytest.approx(48**-0.5) and c.kda_q_scale == pytest.approx(32**-0.5)


def test_bare_text_config_reads_the_same(released: dict[str, Any]) -> None:
    assert K3Config.from_dict(released["text_config"]) == K3Config.from_dict(released)


@pytest.mark.parametrize("name", PRESETS)
def test_written_nesting_reads_back_equal(name: str) -> None:
    c = PRESETS[name]
    d = c.to_dict()
    assert K3Config.from_dict(d) == c
    assert K3Config.from_dict(json.loads(json.dumps(d))) == c
    assert d["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert 0 not in d["text_config"]["linear_attn_config"]["kda_layers"]


def test_variants_survive_a_round_trip() -> None:
    c = dataclasses.replace(
        PRESETS["nano"],
        gate_lower_bound=None,
        mla_use_nope=False,
        rope_theta=50000.0,
        mla_use_output_gate=False,
        tie_word_embeddings=True,
        moe_renormalize=False,
        routed_scaling_factor=2.5,
        latent_moe_use_norm=False,
        mla_latent_norm_eps=1e-5,
        moe_layer_freq=2,
        eos_token_id=(1, 5),
        bos_token_id=None,
        pad_token_id=None,
    )
    assert K3Config.from_dict(c.to_dict()) == c


def test_the_latent_norm_eps_is_a_value_of_its_own(released: dict[str, Any]) -> None:
    released["text_config"]["rms_norm_eps"] = 1e-3
    c = K3Config.from_dict(released)
    assert (c.rms_norm_eps, c.mla_latent_norm_eps) == (1e-3, 1e-6)
    assert (L2_NORM_EPS, ROUTER_EPS) == (1e-6, 1e-20)


def test_an_absent_or_null_lower_bound_selects_the_softplus_decay(released: dict[str, Any]) -> None:
    released["text_config"]["linear_attn_config"]["gate_lower_bound"] = None
    assert K3Config.from_dict(released).gate_lower_bound is None
    del released["text_config"]["linear_attn_config"]["gate_lower_bound"]
    assert K3Config.from_dict(released).gate_lower_bound is None


def test_rotation_needs_a_theta(released: dict[str, Any]) -> None:
    text = released["text_config"]
    text["mla_use_nope"] = False
    assert "rope_theta is missing" in refusal(released)
    text["rope_theta"] = 1000
    assert K3Config.from_dict(released).rope_theta == 1000.0
    del text["rope_theta"]
    text["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
    assert K3Config.from_dict(released).rope_theta == 500.0
    text["rope_parameters"]["rope_type"] = "yarn"
    assert "rope_scaling is 'yarn'" in refusal(released)
    text["rope_parameters"] = None
    text |= {"rope_theta": 1000.0, "qk_rope_head_dim": 15}
    assert "qk_rope_head_dim is 15; expected an even number" in refusal(released)


def test_rotation_keys_mean_nothing_without_rotation(released: dict[str, Any]) -> None:
    released["text_config"] |= {"rope_scaling": {"type": "yarn"}, "head_dim": 74, "rope_theta": 10000.0}
    K3Config.from_dict(released)


def test_the_top_level_may_hold_what_the_text_config_lacks(released: dict[str, Any]) -> None:
    for key in ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings"):
        del released["text_config"][key]
    released |= {"eos_token_id": [2, 3], "tie_word_embeddings": True}
    c = K3Config.from_dict(released)
    assert c.eos_token_id == (2, 3) and c.bos_token_id == 1 and c.tie_word_embeddings


def _text(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["text_config"].update(values)


def _linear(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["text_config"]["linear_attn_config"].update(values)


def _packing(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"].update(
        values
    )


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "activation": (_text(hidden_act="silu"), "hidden_act is 'silu'; expected 'situ'"),
    "no activation": (_text(hidden_act=None), "hidden_act is missing; expected 'situ'"),
    "router": (_text(moe_router_activation_func="softmax"), "moe_router_activation_func is 'softmax'"),
    "expert groups": (_text(num_expert_group=8), "num_expert_group is 8; expected 1"),
    "top-k groups": (_text(topk_group=4), "topk_group is 4; expected 1"),
    "true is not one": (_text(topk_group=True), "topk_group is true; expected 1"),
    "selection": (_text(topk_method="greedy"), "topk_method is 'greedy'"),
    "low-rank gate": (_linear(use_full_rank_gate=False), "use_full_rank_gate is false; expected true"),
    "gate unsaid": (_linear(use_full_rank_gate=None), "use_full_rank_gate is missing; expected true"),
    "no q_lora": (_text(q_lora_rank=None), "q_lora_rank is missing or null"),
    "no latent": (_text(routed_expert_hidden_size=None), "routed_expert_hidden_size is missing or null"),
    "grouped heads": (_text(num_key_value_heads=1), "num_key_value_heads is 1; expected num_attention_heads"),
    "MTP": (_text(num_nextn_predict_layers=1), "num_nextn_predict_layers is 1; expected 0"),
    "bias": (_text(attention_bias=True), "attention_bias is true; expected false"),
    "model type": (_text(model_type="deepseek_v3"), "model_type of the text model is 'deepseek_v3'"),
    "outer type": (lambda d: d.update(model_type="llava"), "model_type is 'llava'; expected 'kimi_k3'"),
    "bool as int": (_text(hidden_size=True), "hidden_size is true; expected an integer"),
    "float as int": (_text(hidden_size=64.0), "hidden_size is 64.0; expected an integer"),
    "text as int": (_text(hidden_size="64"), "hidden_size is '64'; expected an integer"),
    "zero": (_text(v_head_dim=0), "v_head_dim is 0; expected an integer from 1"),
    "negative": (_text(vocab_size=-5), "vocab_size is -5"),
    "past 32 bits": (_text(vocab_size=2**31), "vocab_size is 2147483648"),
    "int as bool": (_text(mla_use_nope=1), "mla_use_nope is 1; expected true or false"),
    "text as bool": (_text(moe_renormalize="true"), "moe_renormalize is 'true'; expected true or false"),
    "bool as float": (_text(rms_norm_eps=True), "rms_norm_eps is true; expected a positive number"),
    "nan": (_text(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "inf": (_text(routed_scaling_factor=float("inf")), "routed_scaling_factor is inf"),
    "huge int as float": (_text(routed_scaling_factor=10**400), "routed_scaling_factor is 1000"),
    "eps 0": (_text(rms_norm_eps=0.0), "rms_norm_eps is 0.0; expected a positive number"),
    "beta": (_text(activation_situ_beta=0), "activation_situ_beta is 0; expected a positive number"),
    "bound above 0": (_linear(gate_lower_bound=5.0), "gate_lower_bound is 5.0; expected a negative number"),
    "bound nan": (_linear(gate_lower_bound=float("nan")), "gate_lower_bound is nan"),
    "conv": (_linear(short_conv_kernel_size=1), "short_conv_kernel_size is 1; expected an integer from 2"),
    "top-k of too few": (
        _text(num_experts_per_token=9),
        "num_experts_per_token is 9; expected at most num_experts",
    ),
    "dense past end": (_text(first_k_dense_replace=9), "first_k_dense_replace is 9; expected at most"),
    "frequency": (_text(moe_layer_freq=0), "moe_layer_freq is 0"),
    "no shared": (_text(num_shared_experts=0), "num_shared_experts is 0; expected an integer from 1"),
    "eos": (_text(eos_token_id=256), "eos_token_id is 256; expected less than vocab_size"),
    "eos type": (_text(eos_token_id="<eos>"), "eos_token_id is '<eos>'"),
    "layer 0": (_linear(kda_layers=[0, 1, 2, 4, 5]), "outside the model: [0]; in neither list: [3, 6]"),
    "layer twice": (_linear(kda_layers=[1, 2, 3, 4, 5, 6]), "in both lists or twice: [4]"),
    "layer missing": (_linear(full_attn_layers=[4, 7]), "in neither list: [8]"),
    "layer list type": (_linear(kda_layers="all"), "kda_layers is 'all'; expected a list"),
    "layer list bool": (_linear(kda_layers=[True, 2, 3, 5, 6]), "kda_layers is [True, 2, 3, 5, 6]"),
    "no layer list": (_linear(kda_layers=None), "kda_layers is missing; expected a list"),
    "no linear": (_text(linear_attn_config=None), "linear_attn_config is missing"),
    "text not object": (lambda d: d.update(text_config=[]), "text_config is []; expected an object"),
    "tied twice": (
        lambda d: d.update(tie_word_embeddings=True),
        "tie_word_embeddings is true at the top level",
    ),
    "format": (
        lambda d: d["text_config"]["quantization_config"].update(format="nvfp4-pack-quantized"),
        "quantization_config.format is 'nvfp4-pack-quantized'; expected 'mxfp4-pack-quantized'",
    ),
    "method": (
        lambda d: d.update(quantization_config={"quant_method": "fp8"}),
        "quantization_config.quant_method is 'fp8'; expected 'compressed-tensors'",
    ),
    "group size": (_packing(group_size=16), "weights.group_size is 16; expected 32"),
    "bits": (_packing(num_bits=8), "weights.num_bits is 8; expected 4"),
    "int weights": (_packing(type="int"), "weights.type is 'int'; expected 'float'"),
    "activations": (
        lambda d: d["text_config"]["quantization_config"]["config_groups"]["group_0"].update(
            input_activations={}
        ),
        "input_activations is set; expected null",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_is_not_computed_with_is_refused_by_name(released: dict[str, Any], case: str) -> None:
    change, expected = REFUSED[case]
    change(released)
    assert expected in refusal(released)


REQUIRED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "mla_use_output_gate", "rms_norm_eps",
    "intermediate_size", "first_k_dense_replace", "num_experts", "num_experts_per_token", "num_shared_experts",
    "moe_intermediate_size", "routed_expert_hidden_size", "latent_moe_use_norm", "moe_renormalize",
    "routed_scaling_factor", "attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta",
    "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_what_logits_depend_on_has_no_default(released: dict[str, Any], name: str) -> None:
    del released["text_config"][name]
    assert f"{name} is missing" in refusal(released)


def test_all_problems_are_reported_together(released: dict[str, Any]) -> None:
    for name in ("activation", "expert groups", "bool as int", "layer twice", "group size"):
        REFUSED[name][0](released)
    message = refusal(released)
    assert message.startswith("config.json: 5 problems:")
    assert all(
        REFUSED[name][1] in message for name in ("activation", "bool as int", "layer twice", "group size")
    )
    assert len(message.splitlines()) == 6


def test_unknown_keys_are_named_once_and_inert_ones_not(
    released: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    released["text_config"] |= {"temperature": 1.0, "top_k": 50, "id2label": {}, "flux": 1, "warp": 2}
    released["text_config"]["linear_attn_config"]["spin"] = 3
    with caplog.at_level(logging.WARNING, logger="k3session"):
        K3Config.from_dict(released)
    assert [r.getMessage() for r in caplog.records] == [
        "config: ignored 3 unknown keys: flux, warp, linear_attn_config.spin"
    ]


def test_the_released_keys_are_all_known(released: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    K3Config.from_dict(released)
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not usable JSON"),
        (b"[1, 2]", "the top level is [1, 2]; expected a JSON object"),
        (b'{"a": 1', "is not usable JSON"),
        (b'{"a": "\xff"}', "is not usable JSON"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "the key 'vocab_size' stands twice"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        K3Config.from_dir(tmp_path)
    assert expected in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: the file is missing"):
        K3Config.from_dir(tmp_path)


def test_constructing_checks_like_reading() -> None:
    with pytest.raises(ConfigError, match=r"v_head_dim is 0.*") as error:
        dataclasses.replace(PRESETS["nano"], v_head_dim=0, kda_layers=(0,))
    assert "in neither list: [2, 3, 5]" in str(error.value)
    with pytest.raises(ConfigError, match="a tuple of integers"):
        dataclasses.replace(PRESETS["nano"], kda_layers=[0, 1, 2, 4])  # type: ignore[arg-type]
    assert isinstance(error.value, K3Error) and isinstance(error.value, ValueError)
    assert isinstance(
        dataclasses.replace(PRESETS["nano"], routed_scaling_factor=2).routed_scaling_factor, float
    )


def test_a_configuration_is_immutable_and_hashable(released: dict[str, Any]) -> None:
    before = copy.deepcopy(released)
    c = K3Config.from_dict(released)
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.hidden_size = 1  # type: ignore[misc]
    assert hash(c) == hash(K3Config.from_dict(released)) and released == before
