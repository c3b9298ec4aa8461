# SPDX-License-Identifier: MIT
from collections.abc import Callable
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from k3session.checkpoint import Checkpoint
from k3session.config import K3Config

def widen(array: NDArray[Any]) -> NDArray[np.float32]: ...

@final
class Weights:
    def __new__(
        cls, checkpoint: Checkpoint, progress: Callable[[str, int, int], object] | None = None
    ) -> Self: ...
    @property
    def config(self) -> K3Config: ...
    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...
    def spans(self) -> list[tuple[int, int]]: ...
    def step_bytes(self) -> dict[str, int]: ...
