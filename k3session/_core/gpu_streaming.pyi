# SPDX-License-Identifier: MIT
from collections.abc import Callable
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from k3session._core.cuda_ops import CudaOps, DeviceMemory, DeviceTables
from k3session._core.streaming import Streamer
from k3session._core.weights import Weights

def block_bytes(one: int, other: int, rows: int) -> int: ...
def expert_bytes(weights: Weights) -> int: ...
def pass_bytes(weights: Weights, rows: int, widest: int) -> int: ...

@final
class GpuStreamer:
    def __new__(
        cls,
        tables: DeviceTables,
        reader: Streamer,
        blocks: list[tuple[int, int, int, int]],
        resident: NDArray[np.uint8],
        head: int,
        places: int,
        slots: int,
        half_life: float,
    ) -> Self: ...
    @property
    def reader(self) -> Streamer: ...
    @property
    def tables(self) -> DeviceTables: ...
    @property
    def widest(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def load(self, progress: Callable[[str, int, int], object] | None = None) -> None: ...
    def close(self) -> None: ...

@final
class GpuStreamOps(CudaOps):
    def __new__(
        cls, memory: DeviceMemory, rows: int, split_activations: bool = False, streamer: Any = None
    ) -> Self: ...
    @property
    def streamer(self) -> GpuStreamer: ...
    def counts(self, clear: bool = False) -> tuple[int, int, int, int, int]: ...
