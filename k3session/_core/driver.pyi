# SPDX-License-Identifier: MIT
from typing import Any, Final

NEEDED: Final[int]

def driver() -> dict[str, Any]: ...
