# SPDX-License-Identifier: MIT
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from k3session._core.gpu import Device
from k3session._core.ops import CpuOps, Ops
from k3session._core.weights import Weights

@final
class OrderOps(Ops):
    def __new__(cls, weights: Weights, silent: bool) -> Self: ...
    def steps(self) -> list[tuple[int, int, bool, int, int]]: ...

@final
class Streamer:
    def __new__(
        cls,
        weights: Weights,
        files: list[tuple[Path, int, int]],
        blocks: list[tuple[int, int, int, int]],
        resident: NDArray[np.uint8],
        head: int,
        ring: int,
        slots: int,
        chunk: int,
        threads: int,
        half_life: float,
        direct: bool,
        locate: Callable[[int, int], str],
        device: Device | None = None,
        cached: bool = False,
    ) -> Self: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def widest(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    def load(self, progress: Callable[[str, int, int], object] | None = None) -> None: ...
    def fail_after(self, reads: int, error: int = 0) -> None: ...
    def failure(self) -> Exception | None: ...

@disjoint_base
class StreamOps(CpuOps):
    def __new__(
        cls,
        weights: Weights,
        rows: int,
        threads: int,
        isa: str,
        streamer: Any = None,
        round_inputs: bool = False,
    ) -> Self: ...
    @property
    def streamer(self) -> Streamer: ...
    def counts(self, clear: bool = False) -> tuple[int, int, int, int, int]: ...
