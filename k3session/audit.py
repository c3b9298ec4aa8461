# SPDX-License-Identifier: MIT
"""The audit of a checkpoint folder: what is in it, what is wrong with it, what memory it will take."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from k3session.accounting import Inspection, inspect
from k3session.checkpoint import Checkpoint
from k3session.memory import memory_estimate
from k3session.progress import Progress, ProgressArgument
from k3session.shards import StoredTensor

__all__ = ["COMPONENTS", "audit"]

#: The parts of a model that bytes are counted for.
COMPONENTS = (
    "embedding", "kda", "mla", "dense", "experts", "shared", "router", "latent", "attn_res", "norms", "lm_head",
)  # fmt: skip
_SHOWN = 100


def audit(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    progress: ProgressArgument = False,
) -> dict[str, Any]:
    """Check a checkpoint folder and estimate the memory of running it.

    What the folder holds never makes this raise; it is in ``problems``.

    Parameters
    ----------
    path
        The folder.
    deep
        Also read every byte: values that are not finite, scale bytes of 255 (NaN), and a digest of
        everything.
    progress
        Reports ``("open", files, files)`` and, when deep, ``("hash", bytes, bytes)``.

    Returns
    -------
    dict
        Fit for JSON: ``ok``, ``problems``, ``warnings``, ``path``, ``files``, ``tensors``, ``skipped``
        (count, bytes are not counted), ``bytes`` by component with ``total``, ``experts`` (how the
        routed experts are stored), ``config``, ``memory`` (`memory_estimate`), ``fingerprint`` and,
        when deep, ``deep_digest``.
    """
    report = Progress(progress)
    try:
        found = inspect(path, report)
        result = _report(found)
        if not found.problems:
            _open_and_read(found, result, deep, report)
        found.shards.close()
    finally:
        report.close()
    result["ok"] = not result["problems"]
    return result


def _report(found: Inspection) -> dict[str, Any]:
    by_part = dict.fromkeys(COMPONENTS, 0)
    for tensor in found.tensors.values():
        by_part[tensor.component] += tensor.stored_nbytes
    config = found.config
    return {
        "ok": False,
        "path": os.fspath(found.path),
        "problems": list(found.problems),
        "warnings": list(found.warnings),
        "files": len({tensor.file for tensor in found.tensors.values()}),
        "tensors": len(found.tensors),
        "skipped": {"count": len(found.skipped), "names": found.skipped[:5]},
        "bytes": by_part | {"total": found.total_bytes},
        "experts": _storage(found),
        "config": None if config is None else config.to_dict(),
        "memory": None if config is None else memory_estimate(config, found.total_bytes),
        "fingerprint": None,
    }


def _storage(found: Inspection) -> str | None:
    kinds = {
        "MXFP4" if t.dtype == "U8" else t.dtype for t in found.tensors.values() if t.component == "experts"
    }
    return " and ".join(sorted(kinds)) or None


def _open_and_read(found: Inspection, result: dict[str, Any], deep: bool, report: Progress) -> None:
    with Checkpoint.from_inspection(found) as checkpoint:
        result["fingerprint"] = checkpoint.fingerprint().to_dict()
        if not deep:
            return
        problems: list[str] = result["problems"]
        bad: dict[str, int] = {}

        def visit(tensor: StoredTensor, block: memoryview, start: int) -> None:
            index, what = _first_bad(tensor, block)
            if index < 0:
                return
            bad[tensor.name] = bad.get(tensor.name, 0) + 1
            if bad[tensor.name] == 1 and len(bad) <= _SHOWN:
                width = {"BF16": 2, "F32": 4, "U8": 1}[tensor.dtype]
                place = [int(i) for i in np.unravel_index(start // width + index, tensor.shape)]
                problems.append(
                    f"{tensor.file.name}: {tensor.stored_name} holds {what} at {place}; expected finite values."
                )

        result["deep_digest"] = checkpoint.deep_digest(report, visit=visit).to_dict()
        if len(bad) > _SHOWN:
            problems.append(f"{len(bad) - _SHOWN} more tensors hold values that are not finite.")


def _first_bad(tensor: StoredTensor, block: memoryview) -> tuple[int, str]:
    """Return the index of the block's first value that is not finite and what it is, or -1."""
    if tensor.dtype == "U8":
        if not tensor.name.endswith("_scale"):
            return -1, ""
        wrong = np.frombuffer(block, "u1") == 255
        what = "the scale byte 255, which is NaN,"
    else:
        kind, exponent = ("<u2", 0x7F80) if tensor.dtype == "BF16" else ("<u4", 0x7F800000)
        bits = np.frombuffer(block, kind)
        wrong = (bits & exponent) == exponent
        what = "a NaN or an infinity"
    return (int(np.argmax(wrong)), what) if wrong.any() else (-1, "")
