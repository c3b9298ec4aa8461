# SPDX-License-Identifier: MIT
"""The tensor table of a K3 checkpoint as code: which tensors a configuration asks for, and their shapes.

Names are the released ones without the leading ``language_model.``, for example
``model.layers.3.self_attn.q_a_proj.weight`` and ``lm_head.weight``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from k3session.config import MXFP4_GROUP, K3Config
from k3session.errors import ConfigError

__all__ = [
    "ACCEPTED_PREFIXES",
    "SKIPPED_PREFIXES",
    "Parameter",
    "canonicalise",
    "component",
    "layer_range",
    "parameters",
    "within",
]

#: Prefixes of the decoder's tensors in a file; ``lm_head.weight`` takes the first one or none.
ACCEPTED_PREFIXES = ("language_model.model.", "model.", "")
#: Tensors of the vision part: present in the released files, not needed for text.
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")

TRUNK = ("BF16", "F32")
PACKED = ("U8",)
_ROOTS = ("embed_tokens.", "layers.", "norm.", "output_attn_res_")


class Parameter(NamedTuple):
    """One tensor that the model needs.

    ``dims`` says in the configuration's names where ``shape`` comes from.  ``padded`` marks
    ``A_log``, which may be stored longer than ``shape`` when the rest is zero, and with extra
    axes of length 1.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    layer: int | None
    dims: str
    component: str
    padded: bool = False


def canonicalise(name: str) -> str | None:
    """Return the canonical name of a decoder tensor's name in a file, None for an unknown prefix."""
    name = name.removeprefix("language_model.")
    if name.startswith(("model.", "lm_head.")):
        return name
    return "model." + name if name.startswith(_ROOTS) else None


def layer_range(layers: Any, config: K3Config) -> tuple[int, int]:
    """Check ``layers=(first, end)``, from 0 and half open; None is all layers.

    Raises
    ------
    ConfigError
        No such range of this model's layers.
    """
    n = config.num_hidden_layers
    if layers is None:
        return 0, n
    pair = tuple(layers) if isinstance(layers, (tuple, list)) else ()
    if len(pair) != 2 or any(type(i) is not int for i in pair) or not 0 <= pair[0] < pair[1] <= n:
        raise ConfigError(
            f"layers is {layers!r}; expected None or (first, end) with 0 <= first < end <= {n}, the model's layers"
        )
    return pair


def within(layer: int | None, part: str, layers: tuple[int, int], config: K3Config) -> bool:
    """Whether a tensor of `layer` and component `part` belongs to a range of layers.

    The embedding goes with the first layer, the final norms and the head with the last one, and the embedding with
    that one too where the head is tied to it.
    """
    first, end = layers
    if layer is not None:
        return first <= layer < end
    last = end == config.num_hidden_layers
    return (first == 0 or (last and config.tie_word_embeddings)) if part == "embedding" else last


def component(name: str, config: K3Config) -> str:
    """Return the part of the model that the canonical `name` belongs to.

    One of ``embedding``, ``lm_head``, ``attn_res``, ``norms``, ``kda``, ``mla``, ``dense``,
    ``router``, ``latent``, ``shared`` and ``experts``.
    """
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if name.startswith("lm_head."):
        return "lm_head"
    if "_res_" in name:
        return "attn_res"
    if ".self_attn." in name:
        return "kda" if config.is_kda(int(name.split(".")[2])) else "mla"
    for part, key in (
        (".experts.", "experts"),
        (".shared_experts.", "shared"),
        (".gate.", "router"),
    ):
        if ".block_sparse_moe" + part in name:
            return key
    if ".routed_expert_" in name:
        return "latent"
    return "dense" if ".mlp." in name else "norms"


def parameters(
    config: K3Config,
    *,
    packed: bool | Callable[[int], bool] = True,
    head: bool | None = None,
) -> Iterator[Parameter]:
    """Yield every tensor that `config` asks for, layer by layer, the embedding first and the head last.

    Parameters
    ----------
    packed
        Whether a layer's routed experts are stored as MXFP4; a callable is asked layer by layer.
    head
        Whether ``lm_head.weight`` is wanted; by default unless the embeddings are tied.
    """
    c = config
    hidden = c.hidden_size

    def one(name: str, shape: tuple[int, ...], dims: str, layer: int | None, part: str) -> Parameter:
        return Parameter(name, shape, TRUNK, layer, dims, part)

    yield one(
        "model.embed_tokens.weight",
        (c.vocab_size, hidden),
        "vocab_size, hidden_size",
        None,
        "embedding",
    )
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield one(f"{at}{name}.weight", (hidden,), "hidden_size", i, "norms")
        for name in ("self_attention_res", "mlp_res"):
            yield one(f"{at}{name}_norm.weight", (hidden,), "hidden_size", i, "attn_res")
            yield one(f"{at}{name}_proj.weight", (1, hidden), "1, hidden_size", i, "attn_res")
        yield from _kda(c, i) if c.is_kda(i) else _mla(c, i)
        if c.is_moe(i):
            yield from _moe(c, i, packed(i) if callable(packed) else packed)
        else:
            yield from _mlp(c, f"{at}mlp.", c.intermediate_size, "intermediate_size", i, "dense")
    yield one("model.norm.weight", (hidden,), "hidden_size", None, "norms")
    yield one("model.output_attn_res_norm.weight", (hidden,), "hidden_size", None, "attn_res")
    yield one(
        "model.output_attn_res_proj.weight",
        (1, hidden),
        "1, hidden_size",
        None,
        "attn_res",
    )
    if (not c.tie_word_embeddings) if head is None else head:
        yield one(
            "lm_head.weight",
            (c.vocab_size, hidden),
            "vocab_size, hidden_size",
            None,
            "lm_head",
        )


def _kda(c: K3Config, i: int) -> Iterator[Parameter]:
    at = f"model.layers.{i}.self_attn."
    width, hidden, dim = c.kda_dim, c.hidden_size, c.kda_head_dim
    kda = "kda num_heads x head_dim"

    def one(name: str, shape: tuple[int, ...], dims: str, padded: bool = False) -> Parameter:
        return Parameter(at + name, shape, TRUNK, i, dims, "kda", padded)

    for name in "qkv":
        yield one(f"{name}_proj.weight", (width, hidden), f"{kda}, hidden_size")
    for name in "qkv":
        shape = (width, 1, c.short_conv_kernel_size)
        yield one(f"{name}_conv1d.weight", shape, f"{kda}, 1, short_conv_kernel_size")
    yield one("f_a_proj.weight", (dim, hidden), "kda head_dim, hidden_size")
    yield one("f_b_proj.weight", (width, dim), f"{kda}, kda head_dim")
    yield one("b_proj.weight", (c.kda_num_heads, hidden), "kda num_heads, hidden_size")
    yield one("A_log", (c.kda_num_heads,), "kda num_heads", True)
    yield one("dt_bias", (width,), kda)
    yield one("o_norm.weight", (dim,), "kda head_dim")
    yield one("g_proj.weight", (width, hidden), f"{kda}, hidden_size")
    yield one("o_proj.weight", (hidden, width), f"hidden_size, {kda}")


def _mla(c: K3Config, i: int) -> Iterator[Parameter]:
    at = f"model.layers.{i}.self_attn."
    heads, hidden = c.num_attention_heads, c.hidden_size
    out = "num_attention_heads x v_head_dim"

    def one(name: str, shape: tuple[int, ...], dims: str) -> Parameter:
        return Parameter(f"{at}{name}.weight", shape, TRUNK, i, dims, "mla")

    yield one("q_a_proj", (c.q_lora_rank, hidden), "q_lora_rank, hidden_size")
    yield one("q_a_layernorm", (c.q_lora_rank,), "q_lora_rank")
    query = "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
    yield one("q_b_proj", (heads * c.qk_head_dim, c.q_lora_rank), f"{query}, q_lora_rank")
    yield one(
        "kv_a_proj_with_mqa",
        (c.latent_width, hidden),
        "kv_lora_rank + qk_rope_head_dim, hidden_size",
    )
    yield one("kv_a_layernorm", (c.kv_lora_rank,), "kv_lora_rank")
    pair = "num_attention_heads x (qk_nope_head_dim + v_head_dim)"
    yield one(
        "kv_b_proj",
        (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        f"{pair}, kv_lora_rank",
    )
    if c.mla_use_output_gate:
        yield one("g_proj", (c.mla_dim, hidden), f"{out}, hidden_size")
    yield one("o_proj", (hidden, c.mla_dim), f"hidden_size, {out}")


def _mlp(c: K3Config, at: str, inner: int, inner_name: str, i: int, part: str) -> Iterator[Parameter]:
    for name in ("gate_proj", "up_proj"):
        shape = (inner, c.hidden_size)
        yield Parameter(f"{at}{name}.weight", shape, TRUNK, i, f"{inner_name}, hidden_size", part)
    shape = (c.hidden_size, inner)
    yield Parameter(f"{at}down_proj.weight", shape, TRUNK, i, f"hidden_size, {inner_name}", part)


def _moe(c: K3Config, i: int, packed: bool) -> Iterator[Parameter]:
    at = f"model.layers.{i}.block_sparse_moe."
    hidden, latent, inner = (
        c.hidden_size,
        c.routed_expert_hidden_size,
        c.moe_intermediate_size,
    )

    def one(name: str, shape: tuple[int, ...], dims: str, part: str) -> Parameter:
        return Parameter(at + name, shape, TRUNK, i, dims, part)

    yield one("gate.weight", (c.num_experts, hidden), "num_experts, hidden_size", "router")
    yield one("gate.e_score_correction_bias", (c.num_experts,), "num_experts", "router")
    narrow = "routed_expert_hidden_size"
    yield one(
        "routed_expert_down_proj.weight",
        (latent, hidden),
        f"{narrow}, hidden_size",
        "latent",
    )
    if c.latent_moe_use_norm:
        yield one("routed_expert_norm.weight", (latent,), narrow, "latent")
    yield one(
        "routed_expert_up_proj.weight",
        (hidden, latent),
        f"hidden_size, {narrow}",
        "latent",
    )
    width_name = "num_shared_experts x moe_intermediate_size"
    yield from _mlp(c, f"{at}shared_experts.", c.shared_intermediate_size, width_name, i, "shared")
    wide = "moe_intermediate_size"
    matrices = (
        ("w1", inner, latent, wide, narrow),
        ("w2", latent, inner, narrow, wide),
        ("w3", inner, latent, wide, narrow),
    )
    for e in range(c.num_experts):
        for w, rows, columns, rows_name, columns_name in matrices:
            name = f"{at}experts.{e}.{w}.weight"
            if not packed:
                yield Parameter(
                    name,
                    (rows, columns),
                    TRUNK,
                    i,
                    f"{rows_name}, {columns_name}",
                    "experts",
                )
                continue
            half, groups = -(-columns // 2), -(-columns // MXFP4_GROUP)
            dims = f"{rows_name}, {columns_name} / 2"
            yield Parameter(name + "_packed", (rows, half), PACKED, i, dims, "experts")
            dims = f"{rows_name}, {columns_name} / {MXFP4_GROUP}"
            yield Parameter(name + "_scale", (rows, groups), PACKED, i, dims, "experts")
