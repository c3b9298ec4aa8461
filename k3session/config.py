# SPDX-License-Identifier: MIT
"""The configuration of a K3 model, read from ``config.json`` and checked field by field.

A value that this package does not compute with is refused by name; nothing is guessed.  The
released nesting (``text_config`` inside, ``quantization_config`` inside that) and a bare text
configuration are both read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from k3session.config_read import cross_problems, read_values
from k3session.config_rules import (
    FIELDS,
    FIXED,
    MXFP4_GROUP,
    MXFP4_WEIGHTS,
    QUANTIZATION_FORMAT,
    check_value,
    parse_json_file,
    show,
)
from k3session.errors import ConfigError

__all__ = [
    "L2_NORM_EPS",
    "MXFP4_GROUP",
    "ROUTER_EPS",
    "K3Config",
    "read_config",
    "read_config_file",
]

#: Added to the *sum* of squares when KDA normalises a query or key.
L2_NORM_EPS = 1e-6
#: Added to the sum of the chosen router scores before they are renormalised.
ROUTER_EPS = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class K3Config:
    """Every value of the configuration that the model computes with, under the checkpoint's own names.

    Layer numbers are 0-based here (1-based in the file).  Constructing one checks it, as reading
    one does.

    Raises
    ------
    ConfigError
        One sentence for each value that cannot be used.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    #: The eps of the two latent norms of MLA: a value of its own, not ``rms_norm_eps``.
    mla_latent_norm_eps: float = 1e-6
    intermediate_size: int
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    attn_res_block_size: int
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int = 4
    #: None selects the decay ``-exp(A_log) * softplus(z)``, a number the bounded ``bound * sigmoid(...)``.
    gate_lower_bound: float | None = -5.0
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, field in FIELDS.items():
            value, problem = check_value(field, values[name])
            if problem:
                problems.append(problem)
                values.pop(name)
            else:
                object.__setattr__(self, name, value)
        for name in ("kda_layers", "full_attn_layers", "eos_token_id"):
            found = values[name]
            if not isinstance(found, tuple) or any(type(i) is not int for i in found):
                problems.append(f"{name} is {show(found)}; expected a tuple of integers.")
            else:
                continue
            values.pop(name)
        problems += cross_problems(values)
        if problems:
            raise ConfigError(_message("K3Config", problems))

    # Derived sizes, so that no caller has to multiply by hand.

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Width of one cached MLA row: the normed latent, then the shared key channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mla_dim(self) -> int:
        """Width of the MLA heads' outputs together."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def kda_dim(self) -> int:
        """Width of the KDA heads together, and of q, k and v each."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts, which are stored as one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def q_scale(self) -> float:
        """Factor of the MLA scores."""
        return 1.0 / math.sqrt(self.qk_head_dim)

    @property
    def kda_q_scale(self) -> float:
        """Factor of the normalised KDA query."""
        return 1.0 / math.sqrt(self.kda_head_dim)

    @property
    def num_attn_res_blocks(self) -> int:
        """Rows of the AttnRes bank after the last layer."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based `layer` mixes with KDA (otherwise with MLA)."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts (otherwise a dense MLP)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, source: str = "config.json") -> K3Config:
        """Read the released nesting, or a bare text configuration.

        Raises
        ------
        ConfigError
            One sentence for every problem, all of them together.
        """
        config, problems = read_config(d)
        if config is None:
            raise ConfigError(_message(source, problems))
        return config

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> K3Config:
        """Read ``config.json`` of the folder `path`."""
        file = Path(path) / "config.json"
        config, problems = read_config_file(file)
        if config is None:
            raise ConfigError(_message(str(file), problems))
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as the released file nests it; `from_dict` of it equals this one."""
        text: dict[str, Any] = {
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
        }
        linear: dict[str, Any] = {}
        for name, field in FIELDS.items():
            value = getattr(self, name)
            needed = name == "rope_theta" and not self.mla_use_nope
            if value is None or (field.omit_default and value == field.default and not needed):
                continue
            section, _, key = field.key.rpartition(".")
            (linear if section else text)[key] = value
        linear["kda_layers"] = [i + 1 for i in self.kda_layers]
        linear["full_attn_layers"] = [i + 1 for i in self.full_attn_layers]
        linear["use_full_rank_gate"] = True
        text["linear_attn_config"] = linear
        text["num_key_value_heads"] = self.num_attention_heads
        text |= {key: rule[0] for key, rule in FIXED.items() if "." not in key and rule[0] is not False}
        text["use_grouped_topk"] = True
        top: dict[str, Any] = {
            "model_type": "kimi_k3",
            "architectures": ["KimiK3ForConditionalGeneration"],
        }
        eos: Any = self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id)
        ids = {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
        }
        for where in (top, text):
            where |= {key: value for key, value in ids.items() if value not in (None, [])}
            where["dtype"] = "bfloat16"
            where["tie_word_embeddings"] = self.tie_word_embeddings
        group = {
            "targets": ["Linear"],
            "format": QUANTIZATION_FORMAT,
            "weights": dict(MXFP4_WEIGHTS),
        }
        text["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": QUANTIZATION_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
        }
        return top | {"text_config": text}


def _message(source: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return "\n  - ".join([f"{source}: {len(problems)} problems:", *problems])


def read_config_file(file: Path) -> tuple[K3Config | None, list[str]]:
    """Read `file`; return the configuration, or None and one sentence for each problem."""
    value, problem = parse_json_file(file)
    if problem:
        return None, [problem]
    return read_config(value)


def read_config(d: Any) -> tuple[K3Config | None, list[str]]:
    """Read a parsed ``config.json``; return the configuration, or None and a sentence per problem."""
    values, problems = read_values(d)
    return (None, problems) if problems else (K3Config(**values), [])
