# SPDX-License-Identifier: MIT
from collections.abc import Sequence
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from k3session._core.arguments import Matrix
from k3session._core.arguments import describe as describe
from k3session._core.ops import ROUNDINGS as ROUNDINGS
from k3session._core.ops import best_isa as best_isa
from k3session._core.ops import roundings as roundings

_F32 = NDArray[np.float32]
_Counts = Sequence[int] | None
_Pages = Sequence[Sequence[NDArray[Any]]]

DIMS: Final[dict[str, int | float | bool | None]]
MAX_JOBS: Final[int]

@final
class Kernels:
    def __new__(
        cls,
        isa: str | None = None,
        threads: int = 1,
        rows: int = 64,
        poisoned: bool = False,
        rounding: str = "exact",
        **dims: float,
    ) -> Self: ...
    @property
    def isa(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def poisoned(self) -> bool: ...
    @property
    def latent_stride(self) -> int: ...
    def embed(self, table: Matrix, tokens: NDArray[np.int32], embeddings: _F32 | None = None) -> _F32: ...
    def attn_res(
        self, bank: _F32, s: _F32, u: _F32, norm: _F32, take: NDArray[np.int32] | None = None
    ) -> tuple[_F32, _F32, _F32]: ...
    def linear(self, x: _F32, *matrices: Matrix) -> list[_F32]: ...
    def gate_up(self, gate: Matrix, up: Matrix, x: _F32) -> _F32: ...
    def rms_norm(self, x: _F32, norm: _F32, eps: float) -> _F32: ...
    def kda_conv(
        self, q: _F32, k: _F32, v: _F32, conv1d: _F32, windows: _F32, counts: _Counts = None
    ) -> tuple[_F32, _F32, _F32, _F32]: ...
    def kda_gates(self, f: _F32, b: _F32, A: _F32, dt_bias: _F32) -> tuple[_F32, _F32]: ...
    def kda_recurrence(
        self, q: _F32, k: _F32, v: _F32, alpha: _F32, beta: _F32, state: _F32, counts: _Counts = None
    ) -> tuple[_F32, _F32]: ...
    def kda_output(self, o: _F32, g: _F32, o_norm: _F32) -> _F32: ...
    def mla_rope(
        self, q: _F32, kva: _F32, positions: Sequence[int], counts: _Counts = None
    ) -> tuple[_F32, _F32]: ...
    def mla_append(
        self,
        kva: _F32,
        norm: _F32,
        pages: _Pages,
        positions: Sequence[int],
        counts: _Counts = None,
        layer: int = 0,
    ) -> None: ...
    def mla_absorb(self, q: _F32, kv_b: Matrix) -> _F32: ...
    def mla_attend(
        self, qa: _F32, pages: _Pages, positions: Sequence[int], counts: _Counts = None, layer: int = 0
    ) -> _F32: ...
    def mla_unabsorb(self, oa: _F32, kv_b: Matrix, g: _F32 | None = None) -> _F32: ...
    def route(self, logits: _F32, bias: _F32) -> tuple[NDArray[np.int32], _F32]: ...
    def experts(
        self,
        z: _F32,
        ids: NDArray[np.int32],
        weights: _F32,
        w1: Sequence[Matrix],
        w2: Sequence[Matrix],
        w3: Sequence[Matrix],
        cuts: Sequence[int] = (),
    ) -> _F32: ...
    def residual(
        self,
        s: _F32,
        a: _F32,
        b: _F32 | None = None,
        restart: bool = False,
        sublayer: int = 0,
        counts: _Counts = None,
    ) -> tuple[_F32, list[int | None]]: ...
    def finite(
        self, x: _F32, owner: NDArray[np.int32], segments: int, sublayer: int = 0
    ) -> list[int | None]: ...
    def top_k(self, logits: _F32, k: int) -> tuple[NDArray[np.int32], _F32, _F32]: ...
