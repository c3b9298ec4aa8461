# SPDX-License-Identifier: MIT
"""Configurations of K3's architecture in several sizes, by name, for ``synth``, tests and measurements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k3session.config import K3Config

__all__ = ["PRESETS"]


def _layers(count: int, full: Iterable[int]) -> dict[str, Any]:
    """Layer numbers of a model, from the 1-based numbers of its MLA layers as the file has them."""
    mla = sorted(i - 1 for i in full)
    return {
        "num_hidden_layers": count,
        "full_attn_layers": tuple(mla),
        "kda_layers": tuple(i for i in range(count) if i not in mla),
    }


def _every_fourth(count: int) -> set[int]:
    """The released pattern: every fourth layer and the last one."""
    return {*range(4, count + 1, 4), count}


_SMALL_IDS: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": (1,),
    "pad_token_id": 2,
}

#: The released model.
_K3: dict[str, Any] = {
    **_layers(93, _every_fourth(93)),
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 33792,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "attn_res_block_size": 12,
    "kda_num_heads": 96,
    "kda_head_dim": 128,
    "bos_token_id": 163584,
    "eos_token_id": (163586,),
    "pad_token_id": 163839,
}

PRESETS: dict[str, K3Config] = {
    # Overhead of a step: no kernel has work worth measuring.
    "micro": K3Config(
        **_layers(2, [2]),
        vocab_size=32,
        hidden_size=32,
        num_attention_heads=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        intermediate_size=32,
        num_experts=2,
        num_experts_per_token=1,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        attn_res_block_size=2,
        kda_num_heads=1,
        kda_head_dim=8,
        max_position_embeddings=4096,
        **_SMALL_IDS,
    ),
    # Tests: two MLA layers in a row, a block size that does not divide the depth, odd and unequal widths.
    "nano": K3Config(
        **_layers(7, [4, 6, 7]),
        vocab_size=97,
        hidden_size=64,
        num_attention_heads=3,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
        intermediate_size=96,
        num_experts=12,
        num_experts_per_token=3,
        num_shared_experts=2,
        moe_intermediate_size=64,
        routed_expert_hidden_size=32,
        attn_res_block_size=3,
        kda_num_heads=3,
        kda_head_dim=16,
        max_position_embeddings=4096,
        **_SMALL_IDS,
    ),
    "tiny": K3Config(
        **_layers(8, _every_fourth(8)),
        vocab_size=1024,
        hidden_size=256,
        num_attention_heads=2,
        q_lora_rank=64,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=512,
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=128,
        routed_expert_hidden_size=128,
        attn_res_block_size=4,
        kda_num_heads=2,
        kda_head_dim=128,
        max_position_embeddings=131072,
        **_SMALL_IDS,
    ),
    "mid": K3Config(
        **_layers(16, _every_fourth(16)),
        vocab_size=32768,
        hidden_size=2048,
        num_attention_heads=16,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=8192,
        num_experts=64,
        num_experts_per_token=8,
        num_shared_experts=2,
        moe_intermediate_size=1024,
        routed_expert_hidden_size=1024,
        attn_res_block_size=4,
        kda_num_heads=16,
        kda_head_dim=128,
        max_position_embeddings=131072,
        **_SMALL_IDS,
    ),
    # K3's own widths: a dense KDA layer, a KDA and an MLA layer with few experts, a small vocabulary.
    "k3-slice": K3Config(
        **(_K3 | _layers(3, [3]) | _SMALL_IDS | {"vocab_size": 8192, "num_experts": 48}),
    ),
    "k3": K3Config(**_K3, max_position_embeddings=1048576),
}
