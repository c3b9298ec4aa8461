# SPDX-License-Identifier: MIT
"""What a recoded trunk, or a rounded prefill, costs in exactness: bits per byte of held-out text, and logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from lab import WAYS, Lab
from runners import K3, Refused

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "tiny_k3"
TEXT = ROOT / "tests" / "golden" / "shakespeare" / "heldout_macbeth.txt"
BYTES = 8_000
CASE = "exactness"


def bits_per_byte(runner: Any) -> float:
    """Of the held-out text, by the shipped model."""
    text = TEXT.read_text(encoding="utf-8")[:BYTES]
    ids = runner.model.tokenizer.encode(text)
    score = runner.session.score(ids).logprobs
    return -float(np.nansum(score)) / math.log(2) / len(text.encode())


def measure(lab: Lab) -> None:
    """Of every way of ours, on the shipped model and on the golden checkpoint."""
    import k3session as k3

    golden: dict[str, Any] = {}
    ids = np.array(json.loads((GOLDEN / "tokens.json").read_text(encoding="utf-8"))["tokens"], np.int32)
    for label in ("k3 stored", "k3 compact", "k3 q8", "k3 bf16 prefill"):
        way = WAYS[label]
        try:
            runner = K3(str(GOLDEN), 1, way["weights"], way.get("precision", "exact"))
        except Refused as problem:
            lab.skip(label, str(problem))
            continue
        golden[label] = np.array(runner.prefill(ids), np.float64)
        runner.close()
        error = float(np.abs(golden[label] - golden["k3 stored"]).max() / np.abs(golden["k3 stored"]).max())
        lab.samples.add(CASE, label, 1, 0, error=(error, "of the largest logit, golden"))
        runner = K3(
            str(k3.model.DEFAULT_MODEL), lab.all_threads, way["weights"], way.get("precision", "exact")
        )
        try:
            if runner.model.tokenizer_or_none() is not None:
                lab.samples.add(
                    CASE, label, 1, 0, bits=(bits_per_byte(runner), "bits per byte, shipped model")
                )
        except ImportError:
            lab.skip("bits per byte", "tiktoken is not installed")
        finally:
            runner.close()


def show(lab: Lab) -> None:
    """Print what was measured."""
    print(f"\n{'exactness':18} {'bits per byte':>14} {'largest error of a logit, golden':>34}")
    for case, label, threads in lab.samples.cases():
        if case == CASE:
            bits = lab.samples.figure(case, label, threads, "bits")
            error = lab.samples.figure(case, label, threads, "error")
            print(
                f"{label:18} {f'{bits.median:.5f}' if bits else '-':>14} {f'{error.median:.1e}' if error else '-':>34}"
            )
