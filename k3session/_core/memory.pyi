# SPDX-License-Identifier: MIT
from typing import final

from typing_extensions import disjoint_base

@disjoint_base
class Memory:
    @property
    def mapped(self) -> bool: ...

@final
class HostMemory(Memory): ...
