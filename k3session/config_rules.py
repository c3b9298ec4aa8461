# SPDX-License-Identifier: MIT
"""What each key of ``config.json`` may hold: the tables behind :mod:`k3session.config`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INT_MAX = 2**31 - 1
_JSON_LIMIT = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Field:
    """One key: its place in the file, the type and range of its value, and what its absence means."""

    key: str
    kind: str
    low: float = -math.inf
    high: float = math.inf
    required: bool = True
    default: Any = None
    omit_default: bool = False


def _size(key: str, low: int = 1, high: int = _INT_MAX, **more: Any) -> Field:
    return Field(key, "integer", low, high, **more)


def _positive(key: str, **more: Any) -> Field:
    return Field(key, "number", math.ulp(0.0), 1e30, **more)


def _switch(key: str, **more: Any) -> Field:
    return Field(key, "boolean", **more)


_EPS = (1e-30, 1.0)
#: Widths of which a kernel keeps a few rows on its stack; the released model has 512, 64 and 16.
_WIDE = 16_384
_KDA = "linear_attn_config."

FIELDS: dict[str, Field] = {
    "vocab_size": _size("vocab_size"),
    "hidden_size": _size("hidden_size"),
    "num_hidden_layers": _size("num_hidden_layers", high=10_000),
    "num_attention_heads": _size("num_attention_heads"),
    "q_lora_rank": _size("q_lora_rank"),
    "kv_lora_rank": _size("kv_lora_rank", high=_WIDE),
    "qk_nope_head_dim": _size("qk_nope_head_dim"),
    "qk_rope_head_dim": _size("qk_rope_head_dim", high=_WIDE),
    "v_head_dim": _size("v_head_dim"),
    "mla_use_nope": _switch("mla_use_nope"),
    "mla_use_output_gate": _switch("mla_use_output_gate"),
    "rope_theta": _positive("rope_theta", required=False, default=10000.0, omit_default=True),
    "rms_norm_eps": Field("rms_norm_eps", "number", *_EPS),
    "mla_latent_norm_eps": Field(
        "mla_latent_norm_eps",
        "number",
        *_EPS,
        required=False,
        default=1e-6,
        omit_default=True,
    ),
    "intermediate_size": _size("intermediate_size"),
    "first_k_dense_replace": _size("first_k_dense_replace", low=0),
    "moe_layer_freq": _size("moe_layer_freq", required=False, default=1),
    "num_experts": _size("num_experts"),
    "num_experts_per_token": _size("num_experts_per_token", high=_WIDE),
    "num_shared_experts": _size("num_shared_experts"),
    "moe_intermediate_size": _size("moe_intermediate_size"),
    "routed_expert_hidden_size": _size("routed_expert_hidden_size"),
    "latent_moe_use_norm": _switch("latent_moe_use_norm"),
    "moe_renormalize": _switch("moe_renormalize"),
    "routed_scaling_factor": _positive("routed_scaling_factor"),
    "attn_res_block_size": _size("attn_res_block_size"),
    "activation_situ_beta": _positive("activation_situ_beta"),
    "activation_situ_linear_beta": _positive("activation_situ_linear_beta"),
    "kda_num_heads": _size(_KDA + "num_heads"),
    "kda_head_dim": _size(_KDA + "head_dim"),
    "short_conv_kernel_size": _size(_KDA + "short_conv_kernel_size", low=2, high=16),
    "gate_lower_bound": Field(_KDA + "gate_lower_bound", "number", -1e30, -1e-30, required=False),
    "tie_word_embeddings": _switch("tie_word_embeddings", required=False, default=False),
    "max_position_embeddings": _size("max_position_embeddings"),
    "bos_token_id": _size("bos_token_id", low=0, required=False),
    "pad_token_id": _size("pad_token_id", low=0, required=False),
}

#: Known keys with the one value that this package computes: (expected, must be present, why).
FIXED: dict[str, tuple[Any, bool, str]] = {
    "hidden_act": ("situ", True, "no other activation is supported"),
    "moe_router_activation_func": (
        "sigmoid",
        True,
        "no other router activation is supported",
    ),
    "topk_method": ("noaux_tc", False, "no other expert selection is supported"),
    "num_expert_group": (1, False, "experts in groups are not supported"),
    "topk_group": (1, False, "experts in groups are not supported"),
    "num_nextn_predict_layers": (
        0,
        False,
        "layers for multi-token prediction are not supported",
    ),
    _KDA + "use_full_rank_gate": (
        True,
        True,
        "the low-rank output gate is not supported",
    ),
    "attention_bias": (False, False, "linear layers with a bias are not supported"),
    "mlp_bias": (False, False, "linear layers with a bias are not supported"),
}

QUANTIZATION_FORMAT = "mxfp4-pack-quantized"
#: Weights that share one scale byte.
MXFP4_GROUP = 32
MXFP4_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": MXFP4_GROUP,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}

NESTED = {f.key.rpartition(".")[2] for f in FIELDS.values() if "." in f.key}
NESTED |= {"kda_layers", "full_attn_layers", "use_full_rank_gate"}
KNOWN = {f.key for f in FIELDS.values()} | set(FIXED) | {
    "architectures", "auto_map", "dtype", "eos_token_id", "head_dim", "ignore_index", "image_placeholder",
    "initializer_range", "linear_attn_config", "media_placeholder_token_id", "model_type",
    "num_key_value_heads", "quantization_config", "rope_parameters", "rope_scaling", "text_config",
    "torch_dtype", "transformers_version", "use_cache", "use_grouped_topk", "vision_config", "_name_or_path",
}  # fmt: skip
#: Generation defaults that every Hugging Face configuration may carry; they mean nothing here.
INERT = {
    "add_cross_attention", "attention_dropout", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class",
    "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16",
}  # fmt: skip


def show(value: Any) -> str:
    """Write a found value for a message, short whatever it is."""
    text = json.dumps(value) if isinstance(value, bool) or value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_value(field: Field, found: Any) -> tuple[Any, str]:
    """Return the value and no problem, or the value and a sentence that says what is wrong with it.

    A boolean is not a number here although Python says so, and a number is finite.
    """
    if found is None and not field.required:
        return None, ""
    if field.kind == "boolean":
        good = isinstance(found, bool)
        wanted = "true or false"
    elif field.kind == "integer":
        good = type(found) is int and field.low <= found <= field.high
        wanted = f"an integer from {field.low} to {field.high}"
    else:
        good = type(found) in (int, float) and field.low <= found <= field.high
        wanted = "a negative number" if field.high < 0 else "a positive number"
        if field.high == 1.0:
            wanted += " of at most 1"
        found = float(found) if good else found
    if good:
        return found, ""
    if found is None:
        return None, f"{field.key} is missing or null; expected {wanted}."
    return found, f"{field.key} is {show(found)}; expected {wanted}."


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the dict of a JSON object; a key that stands twice is an error, not the last one's win."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {show(twice)} stands twice in one object")
    return made


def parse_json_file(file: Path) -> tuple[Any, str]:
    """Read a JSON file; return its value and no problem, or None and a sentence."""
    try:
        if not file.is_file():
            return (
                None,
                "the file is missing." if not file.exists() else "is not a regular file.",
            )
        size = file.stat().st_size
        if size > _JSON_LIMIT:
            return None, f"the file has {size} bytes; expected at most {_JSON_LIMIT}."
        return json.loads(file.read_bytes().decode("utf-8"), object_pairs_hook=unique_keys), ""
    except OSError as error:
        return None, f"the file cannot be read: {error.strerror or error}."
    except RecursionError:
        return None, "is not usable JSON: it is nested too deeply."
    except ValueError as error:
        return None, f"is not usable JSON: {error}."
