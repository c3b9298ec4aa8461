# SPDX-License-Identifier: MIT
from typing import Any

from numpy.typing import NDArray

class Matrix:
    data: NDArray[Any]
    scale: NDArray[Any] | None
    def __init__(self, data: NDArray[Any], scale: NDArray[Any] | None = None) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...

def describe(array: object) -> str: ...
