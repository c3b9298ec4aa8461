# SPDX-License-Identifier: MIT
"""Which experts to keep: replays recorded routes through caches of several sizes and policies.

    python benches/expert_cache.py --csv benches/results/expert_cache.csv

Routes are recorded from the model that ships, while it writes; and drawn, with many experts, whose popularity falls as
a power of their rank and of which some are preferred for a stretch of tokens.  The drawn ones are a guess at large
models, and say how the policies rank, not what the hit rate will be.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import k3session as k3

Routes = npt.NDArray[np.int64]  # [tokens, layers, chosen]
SHARES = (0.05, 0.1, 0.25, 0.5)
HALF_LIVES = (2, 4, 8, 16, 32, 128)


def recorded(tokens: int) -> tuple[Routes, int]:
    """Routes of the shipped model over text of its own; and how many experts a layer has."""
    with k3.Model.open(device="cpu", threads=1) as model, model.session(marks=False) as s:
        s.prefill(model.tokenizer.encode("ROMEO.\n"))
        with s.trace(what="route_ids") as trace:
            while s.position < tokens:  # a text that ends is followed by another one
                for _ in s.generate(tokens - s.position, sampling=k3.Sampling(temperature=1.0, seed=1)):
                    pass
        ids = trace["route_ids"]
        moe = [i for i in range(model.config.num_hidden_layers) if model.config.is_moe(i)]
        return ids[:, moe].astype(np.int64), model.config.num_experts


def drawn(tokens: int, layers: int, experts: int, chosen: int, power: float) -> tuple[Routes, int]:
    """Routes of a made-up model: popularity by rank to `power`, and preferences that change every 64 tokens or so."""
    rng = np.random.default_rng([experts, int(10 * power)])
    routes = np.empty((tokens, layers, chosen), np.int64)
    for layer in range(layers):
        popular = -power * np.log(rng.permutation(experts) + 1.0)
        liked = rng.normal(0, 1.5, experts)
        for t in range(tokens):
            if rng.random() < 1 / 64:
                liked = rng.normal(0, 1.5, experts)
            # The largest of scores with Gumbel noise are a draw without replacement.
            scores = popular + liked + rng.gumbel(size=experts)
            routes[t, layer] = np.sort(np.argpartition(-scores, chosen)[:chosen])
    return routes, experts


def hit_rate(routes: Routes, experts: int, room: int, policy: str, half_life: float = 0.0) -> float:
    """The share of uses that find their expert in memory, after the first quarter of the tokens."""
    tokens, layers, _ = routes.shape
    n = layers * experts
    owner = np.full(room, -1)  # the expert in each slot, and what it is worth: the least goes first
    key = np.full(room, -np.inf)
    place = np.full(n, -1)
    worth = np.full(n, -np.inf)
    share = room // layers
    if policy == "static":
        flat = (routes + experts * np.arange(layers)[None, :, None]).ravel()
        best = np.argsort(-np.bincount(flat, minlength=n), kind="stable")[:room]
        place[best] = 0
    hits = uses = clock = 0
    for t in range(tokens):
        for layer in range(layers):
            ids = layer * experts + routes[t, layer]
            found = place[ids] >= 0
            if t >= tokens // 4:
                hits += int(found.sum())
                uses += ids.size
            if policy == "static":
                continue
            clock += 1
            if policy.startswith("lru"):
                worth[ids] = clock
            elif policy == "lfu":
                worth[ids] = np.maximum(worth[ids], 0) + 1
            else:
                worth[ids] = t / half_life + np.log2(1 + np.exp2(worth[ids] - t / half_life))
            key[place[ids[found]]] = np.inf  # in use
            low, high = (
                (layer * share, (layer + 1) * share) if policy.endswith("in each layer") else (0, room)
            )
            for e in ids[~found].tolist():
                if low == high:
                    break
                at = low + int(key[low:high].argmin())
                if key[at] == np.inf:
                    break
                if owner[at] >= 0:
                    place[owner[at]] = -1
                owner[at], place[e], key[at] = e, at, np.inf
            held = ids[place[ids] >= 0]
            key[place[held]] = worth[held]
    return hits / uses


def main() -> None:
    """Replay all of it, print a table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=1000, help="of the shipped model")
    parser.add_argument("--drawn", type=int, default=250, help="tokens of each drawn one")
    parser.add_argument("--csv")
    args = parser.parse_args()
    sources: dict[str, Callable[[], tuple[Routes, int]]] = {
        "k3-shakespeare": lambda: recorded(args.tokens),
        "drawn, power 0.5": lambda: drawn(args.drawn, 12, 224, 8, 0.5),
        "drawn, power 1.0": lambda: drawn(args.drawn, 12, 224, 8, 1.0),
    }
    rows: list[dict[str, Any]] = []
    for source, make in sources.items():
        routes, experts = make()
        tokens, layers, chosen = routes.shape
        for share in SHARES:
            room = max(2 * chosen, int(share * layers * experts))
            aged = [f"aged {h}{where}" for h in HALF_LIVES for where in ("", " in each layer")]
            for policy in ("lru", "lru in each layer", "lfu", "static", *aged):
                half = float(policy.split()[1]) if policy.startswith("aged") else 0.0
                rate = hit_rate(routes, experts, room, policy, half)
                rows.append({
                    "source": source, "tokens": tokens, "layers": layers, "experts": experts, "chosen": chosen,
                    "room": room, "share": round(room / (layers * experts), 3), "policy": policy,
                    "hit_rate": round(rate, 4),
                })  # fmt: skip
                print(f"{source:18} {share:5.2f} {policy:18} {rate:.3f}", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
