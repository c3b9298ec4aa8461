# SPDX-License-Identifier: MIT
from collections.abc import Iterable
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from k3session._core.ops import CpuOps
from k3session._core.state import Timeline
from k3session._core.weights import Weights

SITES: Final[tuple[str, ...]]

def sublayer_name(weights: Weights, code: int) -> str: ...

@final
class Decoder:
    def __new__(cls, weights: Weights) -> Self: ...
    @property
    def weights(self) -> Weights: ...
    def forward(
        self,
        z: Scratch,
        timelines: list[Timeline],
        counts: list[int],
        tokens: NDArray[np.int32],
        embeddings: NDArray[np.float32] | None = None,
        logits: NDArray[np.float32] | None = None,
        every_row: bool = False,
        taps: Taps | None = None,
    ) -> list[str | None] | None: ...

@final
class Scratch:
    def __new__(cls, weights: Weights, rows: int, threads: int, isa: str, segments: int = 1) -> Self: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def backend(self) -> CpuOps: ...
    @property
    def rows(self) -> int: ...
    @property
    def segments_room(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_cancelled(self) -> bool: ...
    def poison(self) -> None: ...
    def cancel(self) -> None: ...
    def clear_cancel(self) -> None: ...

@final
class Taps:
    def __new__(cls, weights: Weights, rows: int, names: Iterable[str] = ...) -> Self: ...
    @property
    def arrays(self) -> dict[str, NDArray[Any]]: ...
