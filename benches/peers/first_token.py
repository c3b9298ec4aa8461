# SPDX-License-Identifier: MIT
"""From nothing to the first token with a warm page cache, against reading the touched bytes once: a process of its own.

``python first_token.py DESCRIPTION THREADS ORDER``; ORDER says which of the two is timed first.  Imports do not count.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from typing import Any

import numpy as np
from runners import Refused, opened

from k3session._core import ops
from k3session.checkpoint import Checkpoint


def touched(folder: str) -> list[tuple[str, int, int]]:
    """(file, offset, bytes) of what one token reads: all but the embedding, and of the experts the first ones."""
    found = []
    with Checkpoint.open(folder) as checkpoint:
        T = checkpoint.config.num_experts_per_token
        for name in checkpoint.names:
            if name.startswith("model.embed_tokens"):
                continue
            _, _, rest = name.partition(".experts.")
            if rest and int(rest.split(".")[0]) >= T:
                continue
            info = checkpoint.info(name)
            found.append((str(checkpoint.path / info.file), info.offset, info.nbytes))
    return found


def read(ranges: list[tuple[str, int, int]], threads: int) -> float:
    """Seconds of mapping the files and reading these ranges, as the model reads them: by all threads."""
    start = time.perf_counter()
    maps: dict[str, Any] = {}
    for path, offset, nbytes in ranges:
        if path not in maps:
            with open(path, "rb") as file:
                maps[path] = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        ops.read_memory(int(maps[path].ctypes.data) + offset, nbytes, threads)
    return time.perf_counter() - start


def main() -> None:
    """Print both as JSON."""
    what, threads, order = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ranges = touched(what["path"]) if what["runtime"] == "k3session" else []
    ops.hold_pool()
    found: dict[str, Any] = {"bytes": sum(n for _, _, n in ranges)}

    def first() -> None:
        start = time.perf_counter()
        runner = opened(what, threads)
        opened_at = time.perf_counter()
        runner.step(1)
        found["open"], found["seconds"] = opened_at - start, time.perf_counter() - start

    def once() -> None:
        if ranges:
            found["read"] = read(ranges, threads)

    try:
        for do in (first, once) if order == "first" else (once, first):
            do()
    except Refused as problem:
        found["error"] = str(problem)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
