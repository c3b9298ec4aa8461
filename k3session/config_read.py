# SPDX-License-Identifier: MIT
"""Reading ``config.json``: every field found, checked and compared with the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from k3session.config_rules import (
    FIELDS,
    FIXED,
    INERT,
    KNOWN,
    MXFP4_WEIGHTS,
    NESTED,
    QUANTIZATION_FORMAT,
    check_value,
    show,
)

__all__ = ["cross_problems", "read_values"]

log = logging.getLogger("k3session")


def read_values(d: Any) -> tuple[dict[str, Any], list[str]]:
    """Read a parsed ``config.json``; return the values of K3Config, and a sentence per problem.

    The values are complete and good when there is no problem.
    """
    if not isinstance(d, Mapping):
        return {}, [f"the top level is {show(d)}; expected a JSON object."]
    problems: list[str] = []
    text: Any = d.get("text_config", d)
    if not isinstance(text, Mapping):
        return {}, [f"text_config is {show(text)}; expected an object."]
    linear: Any = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        state = "is missing" if linear is None else f"is {show(linear)}"
        problems.append(f"linear_attn_config {state}; expected an object with heads and layer lists.")
        linear = {}

    def look(key: str) -> Any:
        section, _, name = key.rpartition(".")
        return (linear if section else text).get(name)

    values: dict[str, Any] = {}
    for name, field in FIELDS.items():
        found = look(field.key)
        if found is None and name == "tie_word_embeddings":
            found = d.get(name)
        if found is None and name in ("bos_token_id", "pad_token_id"):
            found = d.get(name)
        if found is None and name == "rope_theta":
            found = _rope_theta(text, problems)
        if found is None and not field.required:
            values[name] = field.default
            continue
        if found is None and field.key.startswith("linear_attn_config.") and not linear:
            continue
        value, problem = check_value(field, found)
        if problem:
            problems.append(problem)
        else:
            values[name] = value
    if text is not d and d.get("tie_word_embeddings", values.get("tie_word_embeddings")) != values.get(
        "tie_word_embeddings"
    ):
        problems.append(
            f"tie_word_embeddings is {show(d['tie_word_embeddings'])} at the top level and "
            f"{show(values['tie_word_embeddings'])} in text_config; expected the same in both."
        )
    for key in ("kda_layers", "full_attn_layers"):
        if linear:
            layers = _layer_list(f"linear_attn_config.{key}", linear.get(key), problems)
            values |= {key: layers} if layers is not None else {}
    values["eos_token_id"] = _eos(text.get("eos_token_id", d.get("eos_token_id")), problems)
    _fixed_problems(d, text, linear, values, problems)
    for where in [d] if text is d else [d, text]:
        _quantization_problems(where.get("quantization_config"), problems)
    _report_unknown(text, linear)
    problems += cross_problems(values)
    return values, list(dict.fromkeys(problems))


def _rope_theta(text: Mapping[str, Any], problems: list[str]) -> Any:
    """Find rope_theta where newer writers put it; required only when MLA rotates."""
    parameters = text.get("rope_parameters")
    found = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    if found is None and text.get("mla_use_nope") is False:
        problems.append("rope_theta is missing; expected a positive number, because mla_use_nope is false.")
    return found


def _layer_list(key: str, found: Any, problems: list[str]) -> tuple[int, ...] | None:
    if not isinstance(found, list | tuple) or any(type(i) is not int for i in found):
        state = "is missing" if found is None else f"is {show(found)}"
        problems.append(f"{key} {state}; expected a list of layer numbers that start at 1.")
        return None
    return tuple(sorted(i - 1 for i in found))


def _eos(found: Any, problems: list[str]) -> tuple[int, ...]:
    if found is None:
        return ()
    ids = list(found) if isinstance(found, list | tuple) else [found]
    if any(type(i) is not int or i < 0 for i in ids):
        problems.append(f"eos_token_id is {show(found)}; expected a token id or a list of token ids.")
        return ()
    return tuple(dict.fromkeys(ids))


def _fixed_problems(
    d: Mapping[str, Any],
    text: Mapping[str, Any],
    linear: Any,
    values: dict[str, Any],
    problems: list[str],
) -> None:
    """Refuse every known field whose value asks for something that this package does not compute."""
    if text is not d and d.get("model_type", "kimi_k3") != "kimi_k3":
        problems.append(f"model_type is {show(d['model_type'])}; expected 'kimi_k3'.")
    kind = text.get("model_type", "kimi_linear")
    if kind not in ("kimi_linear", "kimi_k3"):
        problems.append(f"model_type of the text model is {show(kind)}; expected 'kimi_linear'.")
    for key, (expected, required, meaning) in FIXED.items():
        section, _, name = key.rpartition(".")
        where = linear if section else text
        if section and not linear:
            continue
        found = where.get(name)
        if found is None and not required:
            continue
        if found is None or type(found) is not type(expected) or found != expected:
            state = "is missing" if found is None else f"is {show(found)}"
            problems.append(f"{key} {state}; expected {show(expected)}: {meaning}.")
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads is not None and (type(kv_heads) is not int or kv_heads != heads):
        problems.append(
            f"num_key_value_heads is {show(kv_heads)}; expected num_attention_heads, which is {show(heads)}: "
            "MLA has one latent for all heads, and grouped heads are not supported."
        )
    if values.get("mla_use_nope") is False:
        scaling = text.get("rope_scaling")
        parameters = text.get("rope_parameters")
        kind = parameters.get("rope_type", "default") if isinstance(parameters, Mapping) else "default"
        if scaling is not None or kind != "default":
            found = scaling if scaling is not None else kind
            problems.append(
                f"rope_scaling is {show(found)}; expected null: scaled rotation is not supported."
            )


def _quantization_problems(q: Any, problems: list[str]) -> None:
    """Refuse another packing; which tensors are packed is read from the tensors, never from here."""
    if q is None:
        return
    if not isinstance(q, Mapping):
        problems.append(f"quantization_config is {show(q)}; expected an object.")
        return

    def expect(key: str, found: Any, expected: Any) -> None:
        if found is not None and (type(found) is not type(expected) or found != expected):
            problems.append(f"quantization_config.{key} is {show(found)}; expected {show(expected)}.")

    expect("quant_method", q.get("quant_method"), "compressed-tensors")
    expect("format", q.get("format"), QUANTIZATION_FORMAT)
    expect("quantization_status", q.get("quantization_status"), "compressed")
    if q.get("kv_cache_scheme") is not None:
        problems.append("quantization_config.kv_cache_scheme is set; expected null.")
    groups = q.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        problems.append(f"quantization_config.config_groups is {show(groups)}; expected an object.")
        return
    for name, group in groups.items():
        at = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            problems.append(f"quantization_config.{at} is {show(group)}; expected an object.")
            continue
        expect(f"{at}.format", group.get("format"), QUANTIZATION_FORMAT)
        for key in ("input_activations", "output_activations"):
            if group.get(key) is not None:
                problems.append(f"quantization_config.{at}.{key} is set; expected null (weights only).")
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            problems.append(f"quantization_config.{at}.weights is {show(weights)}; expected an object.")
            continue
        for key, expected in MXFP4_WEIGHTS.items():
            expect(f"{at}.weights.{key}", weights.get(key), expected)


def _report_unknown(text: Mapping[str, Any], linear: Mapping[str, Any]) -> None:
    unknown = sorted(set(map(str, text)) - KNOWN - INERT)
    unknown += sorted(f"linear_attn_config.{k}" for k in set(map(str, linear)) - NESTED)
    if unknown:
        log.warning("config: ignored %d unknown keys: %s", len(unknown), ", ".join(unknown[:20]))


def cross_problems(values: Mapping[str, Any]) -> list[str]:
    """Problems that show only when several values are seen together; `values` holds the good ones."""
    problems: list[str] = []
    count = values.get("num_hidden_layers")
    kda, full = values.get("kda_layers"), values.get("full_attn_layers")
    if count is not None and kda is not None and full is not None:
        listed = Counter(kda + full)
        wrong = [
            (
                "in both lists or twice",
                sorted(i + 1 for i, n in listed.items() if n > 1),
            ),
            ("outside the model", sorted(i + 1 for i in listed if not 0 <= i < count)),
            ("in neither list", [i + 1 for i in range(count) if i not in listed]),
        ]
        detail = "; ".join(f"{what}: {show(layers)}" for what, layers in wrong if layers)
        if detail:
            problems.append(
                "linear_attn_config.kda_layers and full_attn_layers do not name each of the layers "
                f"1 to {count} once between them; {detail}."
            )
    for small, large in (
        ("num_experts_per_token", "num_experts"),
        ("first_k_dense_replace", "num_hidden_layers"),
    ):
        if small in values and large in values and values[small] > values[large]:
            problems.append(
                f"{small} is {values[small]}; expected at most {large}, which is {values[large]}."
            )
    if values.get("mla_use_nope") is False and values.get("qk_rope_head_dim", 0) % 2:
        problems.append(
            f"qk_rope_head_dim is {values['qk_rope_head_dim']}; expected an even number, because "
            "mla_use_nope is false and channels are rotated in pairs."
        )
    vocab = values.get("vocab_size")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = values.get(name)
        for i in found if isinstance(found, tuple) else (found,):
            if i is not None and vocab is not None and i >= vocab:
                problems.append(f"{name} is {i}; expected less than vocab_size, which is {vocab}.")
    return problems
