# SPDX-License-Identifier: MIT
"""What a hand-off between two processes of a pipeline takes: ``mpiexec -n 2 python benches/pipeline_hops.py [CSV]``.

A message of the size that the released model hands over goes one way and an empty one comes back, as often as it takes
for a median; the stages compute nothing.  Sizes: rows x (running sum + bank) x 7,168 float32.
"""

from __future__ import annotations

import csv
import queue
import statistics
import sys
import time
from typing import Any

import numpy as np

from k3session.pipeline.post import Post, world

HIDDEN = 7168
CASES = [(1, 3), (1, 9), (8, 9), (128, 9)]  # rows of the pass, rows of the boundary for each


def main(out: str | None) -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    post = Post(world(), lambda rank, message: inbox.put(message), inbox.put)
    rows = []
    for n, each in CASES:
        payload = np.ones((each, n, HIDDEN), np.float32)
        seconds = []
        for _ in range(40):
            began = time.perf_counter()
            if post.rank == 0:
                post.send(1, payload)
                inbox.get()
            elif post.rank == 1:
                inbox.get()
                post.send(0, None)
            seconds.append(time.perf_counter() - began)
        seconds = sorted(seconds[5:])
        rows.append(
            {
                "rows": n,
                "boundary_rows": each,
                "bytes": payload.nbytes,
                "median_us": round(statistics.median(seconds) * 1e6),
                "min_us": round(seconds[0] * 1e6),
                "max_us": round(seconds[-1] * 1e6),
                "n": len(seconds),
            }
        )
    post.close()
    if post.rank == 0:
        for row in rows:
            print(row)
        if out is not None:
            with open(out, "w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
