# SPDX-License-Identifier: MIT
"""Every trap of the architecture that can show on a small model: the mistake must be noticed.

Two kinds of check.  The golden logits reject each mistake, so the golden is worth comparing with; and
whatever implementation is under test differs from each mistake by much more than the tolerance that it
is granted, so its agreement with the golden cannot hide one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from core_access import CoreImplementation, core, inner_values
from golden_data import (
    SPLIT,
    TINY,
    Implementation,
    ReferenceImplementation,
    Tensor,
    altered,
    chunked,
    golden,
    relative,
    scale_bf16,
)
from mistakes import (
    MISTAKES,
    Mistake,
    RouterWeightsNotRenormalised,
    RouterWeightsNotScaled,
    ScaledAfterUpProjection,
)
from ops_tools import ISAS, every_isa

from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.errors import CheckpointError, ConfigError
from k3session.reference import Reference

CLEARLY = 20
"""A mistake must move the logits by this many tolerances."""

IMPLEMENTATIONS: list[Implementation] = [
    ReferenceImplementation(),
    ReferenceImplementation(mla_absorbed=True),
    *map(CoreImplementation, ISAS),
]


# ---------------------------------------------------------------- checkpoints on which mistakes show


def raised_bias(target: Path) -> Path:
    """All router biases raised by 8: the same choices, but BF16 cannot tell the biases apart."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] += 8

    return altered(target, edit=edit)


def smallest_scales(target: Path) -> Path:
    """Scale code 0 in w1 and w3, whose input is raised by almost as much: the weights are subnormal.

    Raised by four powers of two less, so that no float32 sum can overflow; w2 makes up for it.
    """

    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in range(1, 8):
            moe = f"model.layers.{layer}.block_sparse_moe"
            scales = [n for n in tensors if n.startswith(f"{moe}.experts.") and n.endswith("_scale")]
            inner = [n for n in scales if ".w2." not in n]
            least = min(int(tensors[n].min()) for n in inner)
            for n in scales:
                tensors[n] = tensors[n] - np.uint8(least) if n in inner else tensors[n] + np.uint8(6)
            down = f"{moe}.routed_expert_down_proj.weight"
            tensors[down] = scale_bf16(tensors[down], least - 4)

    return altered(target, edit=edit)


def quiet_experts(target: Path) -> Path:
    """Expert sums near the root of the norm's eps, so that the norm does not cancel a common factor."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(".w2.weight_scale"):
                tensors[name] -= np.uint8(12)

    return altered(target, edit=edit, config={"routed_scaling_factor": 2.5})


def ignore_list_is_empty(target: Path) -> Path:
    """Trap 16: the list does not decide what is packed, the stored tensors do."""
    return altered(target, config={"quantization_config.ignore": []})


SCENARIOS: dict[str, Callable[[Path], Path]] = {
    "golden": lambda target: TINY,
    "raised_bias": raised_bias,
    "smallest_scales": smallest_scales,
    "quiet_experts": quiet_experts,
    "ignore_list_is_empty": ignore_list_is_empty,
}
SAME_AS_GOLDEN = ("golden", "raised_bias", "ignore_list_is_empty")

Logits = Callable[[Implementation, str], Tensor]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Logits:
    """`logits(implementation, scenario)`, each computed once, fed as SPLIT says."""
    root = tmp_path_factory.mktemp("traps")
    tokens = golden("tiny_k3/golden")["tokens"]

    @cache
    def folder(scenario: str) -> Path:
        return SCENARIOS[scenario](root / scenario)

    done: dict[tuple[Implementation, str], Tensor] = {}

    def compute(implementation: Implementation, scenario: str) -> Tensor:
        key = implementation, scenario
        if key not in done:
            done[key] = implementation.logits(folder(scenario), tokens, SPLIT)
        return done[key]

    return compute


@cache
def mistaken(mistake: Mistake) -> Implementation:
    return ReferenceImplementation(mistake.cls)


implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
mistakes = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.id)


# ---------------------------------------------------------------- right passes, wrong does not


@implementations
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_right_model_agrees(implementation: Implementation, scenario: str, logits: Logits) -> None:
    found = logits(implementation, scenario)
    exact = logits(IMPLEMENTATIONS[0], scenario)
    assert relative(found, exact) < implementation.reference_tolerance
    if scenario in SAME_AS_GOLDEN:
        expected = golden("tiny_k3/golden")["logits_split"]
        assert relative(found, expected) < implementation.golden_tolerance
        assert np.array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.scenario in SAME_AS_GOLDEN], ids=lambda m: m.id)
def test_the_golden_rejects_the_mistake(mistake: Mistake, logits: Logits) -> None:
    found = logits(mistaken(mistake), mistake.scenario)
    expected = golden("tiny_k3/golden")["logits_split"]
    assert relative(found, expected) > CLEARLY * ReferenceImplementation.golden_tolerance


@implementations
@mistakes
def test_the_implementation_does_not_make_the_mistake(
    implementation: Implementation, mistake: Mistake, logits: Logits
) -> None:
    found = logits(mistaken(mistake), mistake.scenario)
    expected = logits(implementation, mistake.scenario)
    granted = max(implementation.golden_tolerance, implementation.reference_tolerance)
    assert relative(found, expected) > CLEARLY * granted


# ---------------------------------------------------------------- what logits cannot show


def weighted_sums(cls: type[Reference], folder: Path) -> Tensor:
    """The sums of the experts before the latent norm, [n, MoE layers, latent]."""
    taps: dict[str, Tensor] = {}
    with Checkpoint.open(folder) as checkpoint:
        model = cls(checkpoint)
        model.forward(golden("tiny_k3/golden")["tokens"], model.new_state(), taps=taps)
    return taps["moe_agg"]


def test_the_latent_norm_hides_a_missing_renormalisation(logits: Logits) -> None:
    """So the weighted sums are compared, below."""
    wrong = ReferenceImplementation(RouterWeightsNotRenormalised)
    assert relative(logits(wrong, "golden"), golden("tiny_k3/golden")["logits_split"]) < 2e-5


@pytest.mark.parametrize(
    ("cls", "factor", "right"),
    [
        (Reference, 1.0, True),
        (Reference, 2.5, True),
        (RouterWeightsNotRenormalised, 1.0, False),
        (RouterWeightsNotScaled, 2.5, False),
        (ScaledAfterUpProjection, 2.5, False),
    ],
)
def test_weighted_sum_of_the_experts(
    cls: type[Reference], factor: float, right: bool, tmp_path: Path
) -> None:
    """Trap 11: the golden sums, times the scaling factor."""
    folder = altered(tmp_path / "model", config={"routed_scaling_factor": factor})
    error = relative(weighted_sums(cls, folder), factor * golden("tiny_k3/golden")["moe_agg"])
    assert (error < 1.5e-5) if right else (error > 0.1)


@every_isa
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_weighted_sum_of_the_experts_in_the_core(isa: str, factor: float, tmp_path: Path) -> None:
    """The same for the compiled graph: it would be off by as much as those mistakes are."""
    expected = golden("tiny_k3/golden")
    with core(altered(tmp_path / "model", config={"routed_scaling_factor": factor}), isa=isa) as c:
        sums = inner_values(c, c.run(expected["tokens"], taps=True))["moe_agg"]
    assert relative(sums, factor * expected["moe_agg"]) < CoreImplementation.golden_tolerance


# ---------------------------------------------------------------- mistakes in reading the files


LINEAR = "linear_attn_config."


@pytest.mark.parametrize(
    ("kda", "mla"),
    [
        pytest.param([2, 3, 4, 6, 7], [5, 8, 9], id="15-lists-one-too-high"),
        pytest.param([0, 1, 2, 4, 5], [3, 6, 7], id="15-lists-0-based"),
        pytest.param([1, 2, 3, 5, 6, 7], [4, 8], id="15-every-fourth-layer"),
    ],
)
def test_wrong_layer_lists_are_refused(kda: list[int], mla: list[int], tmp_path: Path) -> None:
    """Trap 15: a checkpoint read with such a mistake could not be filled, so this is what shows it."""
    lists = {LINEAR + "kda_layers": kda, LINEAR + "full_attn_layers": mla}
    with pytest.raises((ConfigError, CheckpointError), match=r"layers|self_attn"):
        Checkpoint.open(altered(tmp_path / "model", config=lists))


def test_layer_lists_are_one_based() -> None:
    """Trap 15: layers 6 and 7 are both MLA, as the last two of K3 are."""
    config = K3Config.from_dir(TINY)
    expected = golden("tiny_k3/golden")
    assert config.kda_layers == tuple(expected["kda_layers"])
    assert config.full_attn_layers == tuple(expected["mla_layers"]) == (3, 6, 7)


def test_padding_of_a_log_must_be_zero(tmp_path: Path) -> None:
    """Trap 3: values beyond the head count would mean that the layout is another one."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.A_log"][-1] = 1e-3

    with pytest.raises(CheckpointError, match="A_log"):
        Checkpoint.open(altered(tmp_path / "model", edit=edit))


def test_a_turn_ends_with_the_token_of_the_config() -> None:
    """Trap 18: the id that the config names, not the tokenizer's own end of document."""
    assert 2 in K3Config.from_dir(TINY).eos_token_id


def test_scale_code_255_is_not_a_number(tmp_path: Path) -> None:
    """Trap 14: such a weight must not pass for a large finite one."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(".w1.weight_scale"):
                tensors[name][0, 0] = 255

    with Checkpoint.open(altered(tmp_path / "model", edit=edit)) as checkpoint:
        assert np.isnan(chunked(Reference(checkpoint), np.array([1]), (1,))).all()
