# SPDX-License-Identifier: MIT
"""What this machine is, and a short id that machines of one kind share: figures of others are not compared."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from k3session._core.ops import best_isa

#: Flags of a processor that change what its kernels can do.
_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni")


def identity() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, instruction sets, and the id made of them."""
    model, flags = platform.processor() or platform.machine(), ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = value
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "sets": " ".join(s for s in _SETS if s in flags.split()),
    }
    text = "|".join(map(str, facts.values()))
    return facts | {"isa": best_isa(), "id": hashlib.sha256(text.encode()).hexdigest()[:12]}
