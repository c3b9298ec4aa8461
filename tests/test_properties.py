# SPDX-License-Identifier: MIT
"""Properties of the whole graph over random models of the family, random chunkings and random interleavings."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from core_access import FULL, NEAR_TIE, Core, core, counts, inner_expected, inner_values, judge, random_chunks
from golden_data import Tensor, relative
from hypothesis import given, note, settings
from hypothesis import strategies as st
from ops_tools import ISAS, same_bits

import k3session as k3
from k3session.config import K3Config
from k3session.synth import synth


@dataclass(frozen=True)
class Shape:
    """A random model of the family and how it is stored."""

    config: K3Config
    experts: str
    trunk: str
    seed: int

    def write(self, folder: Path) -> Path:
        return synth(folder / "model", self.config, seed=self.seed, experts=self.experts, trunk=self.trunk)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    def one_of(*values: object) -> object:
        return draw(st.sampled_from(values))

    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=7))  # True: MLA
    layers = len(kinds)
    experts = one_of("mxfp4", "bf16", "f32")
    width = st.sampled_from([32, 64, 96] if experts == "mxfp4" else [16, 20, 33, 64])
    rotary = draw(st.booleans())
    count = draw(st.integers(1, 9))
    config = K3Config(
        vocab_size=one_of(2, 31, 64, 97),
        hidden_size=one_of(16, 33, 48, 64, 70),
        num_hidden_layers=layers,
        num_attention_heads=one_of(1, 3, 4, 5, 9),
        q_lora_rank=one_of(8, 17, 32),
        kv_lora_rank=one_of(8, 16, 21, 40),
        qk_nope_head_dim=one_of(4, 8, 19),
        qk_rope_head_dim=one_of(2, 4, 6, 16) if rotary else one_of(1, 4, 7),
        v_head_dim=one_of(4, 16, 20, 35),
        mla_use_nope=not rotary,
        mla_use_output_gate=draw(st.booleans()),
        rope_theta=one_of(10001.0, 50.0),
        rms_norm_eps=one_of(1e-5, 1e-6),
        intermediate_size=one_of(16, 40, 97),
        first_k_dense_replace=draw(st.integers(0, min(2, layers))),
        moe_layer_freq=one_of(1, 2),
        num_experts=count,
        num_experts_per_token=draw(st.integers(1, count)),
        num_shared_experts=one_of(1, 2, 3),
        moe_intermediate_size=draw(width),
        routed_expert_hidden_size=draw(width),
        latent_moe_use_norm=draw(st.booleans()),
        moe_renormalize=draw(st.booleans()),
        routed_scaling_factor=one_of(1.0, 2.5, 0.3),
        attn_res_block_size=draw(st.integers(1, layers + 1)),
        activation_situ_beta=one_of(4.0, 1.5),
        activation_situ_linear_beta=one_of(25.0, 3.0),
        kda_num_heads=one_of(1, 2, 3, 5),
        kda_head_dim=one_of(16, 17, 32, 40, 80),
        short_conv_kernel_size=one_of(2, 3, 4, 5, 9),
        gate_lower_bound=one_of(-5.0, None, -0.5),
        kda_layers=tuple(i for i in range(layers) if not kinds[i]),
        full_attn_layers=tuple(i for i in range(layers) if kinds[i]),
        tie_word_embeddings=draw(st.booleans()),
        max_position_embeddings=4096,
    )
    return Shape(config, str(experts), str(one_of("bf16", "f32")), draw(st.integers(0, 2**32)))


def tokens_of(config: K3Config, rng: np.random.Generator, n: int) -> Tensor:
    return rng.integers(0, config.vocab_size, n, dtype=np.int32)
