# SPDX-License-Identifier: MIT
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from k3session._core.arguments import Matrix

_F: TypeAlias = NDArray[np.float32]
_I32: TypeAlias = NDArray[np.int32]
_I64: TypeAlias = NDArray[np.int64]
_Pages: TypeAlias = Sequence[Sequence[NDArray[Any]]]
_Ints: TypeAlias = Sequence[int]

DIMS: dict[str, Any]
MAX_JOBS: int

class Kernels:
    isa: str
    rows: int
    poisoned: bool
    def __init__(
        self, isa: str | None = None, threads: int = 1, rows: int = 64, poisoned: bool = False, **dims: Any
    ) -> None: ...
    @property
    def latent_stride(self) -> int: ...
    def embed(self, table: Matrix, tokens: _I32, embeddings: _F | None = None) -> _F: ...
    def attn_res(self, bank: _F, s: _F, u: _F, norm: _F, take: _I64 | None = None) -> tuple[_F, _F, _F]: ...
    def linear(self, x: _F | Sequence[_F], *matrices: Matrix) -> list[_F]: ...
    def gate_up(self, gate: Matrix, up: Matrix, x: _F) -> _F: ...
    def rms_norm(self, x: _F, norm: _F, eps: float) -> _F: ...
    def kda_conv(
        self, q: _F, k: _F, v: _F, conv1d: _F, windows: _F, counts: _Ints | None = None
    ) -> tuple[_F, _F, _F, _F]: ...
    def kda_gates(self, f: _F, b: _F, A: _F, dt_bias: _F) -> tuple[_F, _F]: ...
    def kda_recurrence(
        self, q: _F, k: _F, v: _F, alpha: _F, beta: _F, state: _F, counts: _Ints | None = None
    ) -> tuple[_F, _F]: ...
    def kda_output(self, o: _F, g: _F, o_norm: _F) -> _F: ...
    def mla_rope(self, q: _F, kva: _F, positions: _Ints, counts: _Ints | None = None) -> tuple[_F, _F]: ...
    def mla_append(
        self,
        kva: _F,
        norm: _F,
        pages: _Pages,
        positions: _Ints,
        counts: _Ints | None = None,
        layer: int = 0,
    ) -> None: ...
    def mla_absorb(self, q: _F, kv_b: Matrix) -> _F: ...
    def mla_attend(
        self, qa: _F, pages: _Pages, positions: _Ints, counts: _Ints | None = None, layer: int = 0
    ) -> _F: ...
    def mla_unabsorb(self, oa: _F, kv_b: Matrix, g: _F | None = None) -> _F: ...
    def route(self, logits: _F, bias: _F) -> tuple[_I32, _F]: ...
    def experts(
        self,
        z: _F,
        ids: _I32,
        weights: _F,
        w1: Sequence[Matrix],
        w2: Sequence[Matrix],
        w3: Sequence[Matrix],
    ) -> _F: ...
    def residual(
        self,
        s: _F,
        a: _F,
        b: _F | None = None,
        restart: bool = False,
        sublayer: int = 0,
        counts: _Ints | None = None,
    ) -> tuple[_F, list[int | None]]: ...
    def finite(self, x: _F, owner: _I64, segments: int, sublayer: int = 0) -> list[int | None]: ...
