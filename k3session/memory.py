# SPDX-License-Identifier: MIT
"""What a model and its sessions take, from the configuration alone."""

from __future__ import annotations

from k3session.config import K3Config

__all__ = ["CHUNK_ROWS", "activations", "memory_estimate"]

#: Rows in a chunk of a prefill: enough to use each weight many times, few enough to cancel soon.
CHUNK_ROWS = 128
#: Most pieces that attention over the context is cut into (cuda/host/host.h).
_PIECES = 64


def _up(n: int, to: int) -> int:
    return (n + to - 1) // to * to


def memory_estimate(
    config: K3Config, weight_bytes: int, rows: int = CHUNK_ROWS, layers: tuple[int, int] | None = None
) -> dict[str, int]:
    """Return the memory of a model and its sessions, in bytes; of some of its layers with ``layers=(first, end)``.

    ``weights_mapped`` is mapped from the files and shared by all sessions.  ``state_per_session`` is the KDA state of
    one session (recurrent matrices and conv windows, float32) and the pass's alternate copy of it is
    ``state_alternate``.  ``latent_per_token_fp32`` and ``latent_per_token_bf16`` are what each token of context adds.
    ``scratch`` is what a session's passes of up to `rows` rows work in; what a shorter pass does not touch takes no
    memory.
    """
    c = config
    recurrent = c.kda_num_heads * c.kda_head_dim * c.kda_head_dim
    windows = 3 * c.kda_dim * (c.short_conv_kernel_size - 1)
    first, end = layers or (0, c.num_hidden_layers)
    state = 4 * sum(first <= i < end for i in c.kda_layers) * (recurrent + windows)
    latent = sum(first <= i < end for i in c.full_attn_layers) * c.latent_width
    return {
        "weights_mapped": weight_bytes,
        "state_per_session": state,
        "state_alternate": state,
        "latent_per_token_fp32": 4 * latent,
        "latent_per_token_bf16": 2 * latent,
        "latent_at_max_position_fp32": 4 * latent * c.max_position_embeddings,
        "scratch": 4 * (activations(c, rows) + _work(c, rows)),
    }


def activations(c: K3Config, rows: int) -> int:
    """Return the floats of the buffers that pyx/decoder.pyx lays out for passes of up to `rows` rows."""
    H = c.num_attention_heads
    streams = (c.num_attn_res_blocks + 5) * c.hidden_size + c.num_attn_res_blocks + 1
    kda = 9 * c.kda_dim + c.kda_head_dim + c.kda_num_heads
    mla = (
        c.q_lora_rank
        + H * (c.qk_head_dim + _up(c.latent_width, 16) + c.kv_lora_rank + 2 * c.v_head_dim)
        + c.latent_width
    )
    ffn = max(c.intermediate_size, c.shared_intermediate_size) + c.num_experts
    ffn += 2 * (c.num_experts_per_token + c.routed_expert_hidden_size)
    return rows * (streams + ffn + max(kda, mla))


def _work(c: K3Config, rows: int) -> int:
    """Floats of the buffers that cuda/host/dispatch.cpp sizes."""
    H, L = c.num_attention_heads, c.kv_lora_rank
    inputs = (c.hidden_size, c.kda_dim, c.q_lora_rank, c.mla_dim, c.intermediate_size, c.shared_intermediate_size,
              c.routed_expert_hidden_size)  # fmt: skip
    least = max(rows, 8)
    prepared = least * max(2 * _up(max(inputs), 32), H * _up(L, 32))
    hidden = least * c.num_experts_per_token * _up(c.moe_intermediate_size, 32)
    lists = 2 * (3 * (c.num_experts + 1) + 2 * rows * c.num_experts_per_token)
    return prepared + max(hidden, H * _PIECES * (L + 2)) + lists
