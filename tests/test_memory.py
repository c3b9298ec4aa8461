# SPDX-License-Identifier: MIT
"""The memory estimate is what sessions really allocate."""

from __future__ import annotations

from pathlib import Path

import pytest

import k3session as k3
from k3session.memory import memory_estimate
from k3session.presets import PRESETS
from k3session.synth import synth


@pytest.mark.parametrize("preset", ["micro", "nano", "tiny"])
def test_estimate_is_what_is_allocated(tmp_path: Path, preset: str) -> None:
    with k3.Model.open(synth(tmp_path, preset)) as model, model.session() as s:
        estimate = memory_estimate(model.config, model._checkpoint.total_bytes)
        assert estimate["scratch"] == s._scratch.nbytes + s._scratch.backend.nbytes
        assert estimate["state_per_session"] == s.nbytes
        assert estimate["latent_per_token_fp32"] == model.bytes_per_token
        assert estimate["weights_mapped"] == model._checkpoint.total_bytes


def test_released_model() -> None:
    """Figures of the released model that follow from its shapes: 414 MiB of recurrence, 27 KiB a token in BF16."""
    estimate = memory_estimate(PRESETS["k3"], 1_559_965_606_912)
    assert estimate["state_per_session"] == 69 * 4 * (96 * 128 * 128 + 3 * 3 * 12288)
    assert estimate["latent_per_token_bf16"] == 24 * 576 * 2
