# SPDX-License-Identifier: MIT
from collections.abc import Callable
from typing import Any

from k3session._core.arguments import Matrix
from k3session._core.weights import Weights

MODES: tuple[str, str, str]

def recode(
    weights: Weights, mode: str, threads: int, progress: Callable[[str, int, int], object] | None = None
) -> dict[str, Any]: ...
def recoded(matrix: Matrix, mode: str, threads: int = 1) -> Matrix: ...
