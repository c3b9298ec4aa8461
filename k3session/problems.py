# SPDX-License-Identifier: MIT
"""The sentences of a checkpoint's problems: grouped, counted, and with the reason in the configuration."""

from __future__ import annotations

import re
from pathlib import Path

from k3session.config import K3Config
from k3session.errors import CheckpointError
from k3session.layout import Parameter

__all__ = ["Grouped", "folder_error", "kinds", "layer_of", "shape_of", "why_missing", "why_unexpected"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SHOWN = 40
_HEAD = "lm_head.weight"


def folder_error(path: Path, problems: list[str]) -> CheckpointError:
    """Make the error that reports all of `problems` together."""
    if len(problems) == 1:
        return CheckpointError(f"{path}: {problems[0]}", problems)
    shown = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        shown = [*shown, f"and {len(problems) - _SHOWN} more."]
    return CheckpointError("\n  - ".join([f"{path}: {len(problems)} problems:", *shown]), problems)


class Grouped:
    """Problems of one kind in many layers or experts are one sentence that counts them."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], str] = {}
        self._count: dict[tuple[str, str], int] = {}

    def add(self, name: str, before: str, after: str) -> None:
        """Add the sentence ``before + name + after``; the same one but for numbers in `name` is counted."""
        key = (re.sub(r"\.\d+", ".#", name), after)
        self._first.setdefault(key, f"{before}{name}{after}")
        self._count[key] = self._count.get(key, 0) + 1

    def sentences(self) -> list[str]:
        """Return one sentence per kind."""
        made = []
        for key, text in self._first.items():
            more = self._count[key] - 1
            made.append(f"{text} ({more} more like it.)" if more else text)
        return made


def kinds(parameter: Parameter) -> str:
    """Return the dtypes that `parameter` may have."""
    return " or ".join(parameter.dtypes)


def shape_of(parameter: Parameter) -> str:
    """Return the shape of `parameter` and where it comes from."""
    return f"{list(parameter.shape)} ({parameter.dims})"


def why_missing(parameter: Parameter, c: K3Config) -> str:
    """Return the configuration value that asks for `parameter`, if one does."""
    if parameter.name == _HEAD:
        return " (tie_word_embeddings is false.)"
    if parameter.component == "mla" and parameter.name.endswith("g_proj.weight"):
        return " (mla_use_output_gate is true.)"
    if parameter.name.endswith("routed_expert_norm.weight"):
        return " (latent_moe_use_norm is true.)"
    return ""


def why_unexpected(name: str, c: K3Config) -> str:
    """Return the configuration value that leaves no place for the tensor `name`, if one does."""
    layer = layer_of(name)
    if ".self_attn." in name:
        kind = "kda_layers" if c.is_kda(layer) else "full_attn_layers"
        if name.endswith("g_proj.weight") and not c.mla_use_output_gate:
            return " (mla_use_output_gate is false.)"
        return f" ({kind} names layer {layer + 1}, counted from 1.)"
    if name.endswith("routed_expert_norm.weight"):
        return " (latent_moe_use_norm is false.)"
    if ".experts." in name:
        return f" (num_experts is {c.num_experts}; a layer's experts are all packed or all plain.)"
    if name.endswith(("weight_packed", "weight_scale")):
        return " (Only routed experts may be packed.)"
    if layer >= 0 and (".mlp." in name or ".block_sparse_moe." in name):
        kind = "experts" if c.is_moe(layer) else "a dense MLP"
        return f" (By first_k_dense_replace and moe_layer_freq layer {layer} has {kind}.)"
    return ""


def layer_of(name: str) -> int:
    """Return the layer in a canonical name, -1 for a tensor of no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1
