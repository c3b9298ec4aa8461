# SPDX-License-Identifier: MIT
from collections.abc import Iterable
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

def describe(array: object) -> str: ...

@final
class Matrix:
    def __new__(cls, data: NDArray[Any], scale: NDArray[np.uint8] | None = None) -> Self: ...
    @property
    def data(self) -> NDArray[Any]: ...
    @property
    def scale(self) -> NDArray[np.uint8] | None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...

@final
class Rows:
    def __new__(
        cls, rows: int, counts: Iterable[int] | None, positions: Iterable[int] | None = None
    ) -> Self: ...
    def bad(self) -> list[int | None]: ...
