# SPDX-License-Identifier: MIT
"""Where each component of a model runs: on the host's processor, or on a GPU.

The trunk (embedding, AttnRes, norms, router, latent projections and head) follows ``device=``.  ``kda``, ``mla``,
``dense`` (the dense MLP and the shared experts) and ``experts`` can each live elsewhere: an argument of `Model.open`
wins over the variable ``K3_CUDA_KDA``, ``K3_CUDA_MLA``, ``K3_CUDA_DENSE`` or ``K3_CUDA_EXPERTS`` (0 the CPU, 1 the
GPU), which wins over ``device``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from k3session import env
from k3session._core.ops import roundings
from k3session.errors import ConfigError

__all__ = [
    "COMPONENTS",
    "PARTS",
    "PREFILL_PRECISIONS",
    "WEIGHTS",
    "Placement",
    "Wanted",
    "precision_label",
    "suggestion",
]

#: What can be placed apart from the trunk.
COMPONENTS = ("kda", "mla", "dense", "experts")
PARTS = ("trunk", *COMPONENTS)
PREFILL_PRECISIONS = ("exact", "bf16", "bf16x2")
#: The weights as the checkpoint has them, or the trunk recoded at load: see `k3session.Model.open`.
WEIGHTS = ("stored", "compact", "q8")


@dataclass(frozen=True)
class Placement:
    """Parts of the model that run on a GPU, and its number; without parts no GPU is used."""

    number: int = 0
    parts: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        """Where the trunk is, as `Model.device` has it."""
        return f"cuda:{self.number}" if "trunk" in self.parts else "cpu"

    @property
    def label(self) -> str:
        """What snapshots record of it: results are the same to the bit only where this is."""
        if len(self.parts) in (0, len(PARTS)):
            return "cuda" if self.parts else "cpu"
        return "cuda: " + ", ".join(part for part in PARTS if part in self.parts)

    def to_dict(self) -> dict[str, str]:
        """Component -> "cuda:N" or "cpu"."""
        return {part: f"cuda:{self.number}" if part in self.parts else "cpu" for part in PARTS}


@dataclass(frozen=True)
class Wanted:
    """What the arguments of `Model.open` and the environment ask for, checked."""

    kind: str = "cpu"  #: "auto", "cpu" or "cuda"
    number: int = 0
    apart: dict[str, bool] = field(default_factory=dict)  #: component -> whether it goes to the GPU
    prefill_precision: str = "exact"
    weights: str = "stored"

    @classmethod
    def read(
        cls,
        device: str,
        kda: str | None,
        mla: str | None,
        dense: str | None,
        experts: str | None,
        prefill_precision: str,
        weights: str,
    ) -> Self:
        """Check the arguments, and fill in from the environment."""
        kind, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
        if kind not in ("auto", "cpu", "cuda") or (colon and (kind != "cuda" or not number.isdecimal())):
            raise ConfigError(f"device is {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if prefill_precision not in PREFILL_PRECISIONS:
            expected = " or ".join(map(repr, PREFILL_PRECISIONS))
            raise ConfigError(f"prefill_precision is {prefill_precision!r}; expected {expected}")
        if weights not in WEIGHTS:
            raise ConfigError(f'weights is {weights!r}; expected "stored", "compact" or "q8"')
        apart: dict[str, bool] = {}
        for name, value in zip(COMPONENTS, (kda, mla, dense, experts), strict=True):
            if value not in (None, "cpu", "cuda"):
                raise ConfigError(f"{name} is {value!r}; expected 'cpu', 'cuda' or None")
            choice = env.component_on_gpu(name) if value is None else value == "cuda"
            if choice is not None:
                apart[name] = choice
        if prefill_precision == "bf16":
            if kind == "cuda" or any(apart.values()):
                raise ConfigError(
                    'prefill_precision="bf16" is for the CPU; expected "bf16x2" where a part is on a GPU'
                )
            kind = "cpu"
        if weights != "stored":
            if kind == "cuda" or any(apart.values()):
                raise ConfigError(
                    f'weights="{weights}" is for the CPU; expected device="cpu", and no part on a GPU'
                )
            kind = "cpu"
        return cls(kind, int(number or 0), apart, prefill_precision, weights)

    def on(self, gpu: bool) -> Placement:
        """Return the placement with the trunk on the GPU or on the CPU."""
        parts = {c for c in COMPONENTS if self.apart.get(c, gpu)} | ({"trunk"} if gpu else set())
        return Placement(self.number, frozenset(parts))


def precision_label(prefill_precision: str, isa: str) -> str:
    """What snapshots record of it: "bf16dp" or "bf16amx" where the processor multiplies BF16 numbers."""
    return roundings(isa)[-1] if prefill_precision == "bf16" else prefill_precision


def suggestion(sizes: dict[str, int], room: int, parts: frozenset[str]) -> str:
    """Return in words which of these parts would fit: the largest component stays on the CPU first."""
    left, moved = set(parts), []
    for component in sorted(left & set(COMPONENTS), key=lambda c: -sizes[c]):
        left.discard(component)
        moved.append(f"{component}='cpu'")
        if sum(sizes[c] for c in left) <= room:
            return "it fits with " + ", ".join(moved)
    return "use device='cpu'"
