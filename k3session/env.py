# SPDX-License-Identifier: MIT
"""The environment variables of k3session, read here and nowhere else, once per opened model.

========================  ==========================================================================
``K3_NUM_THREADS``        threads of a pass, where ``threads=`` is not given
``K3_ISA``                ``base``, ``avx2`` or ``avx512``: a lower instruction set than the best one
``K3_CUDA_KDA``           0 or 1: whether KDA layers run on the GPU; so ``_MLA``, ``_DENSE``, ``_EXPERTS``
``K3_LIBCUDA``            the CUDA driver's library, instead of ``libcuda.so.1``; read when it is first opened
``K3_CUDA_SYNC``          1: wait after each kernel, so that an error names the kernel that made it
========================  ==========================================================================
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from k3session.errors import ConfigError

__all__ = [
    "component_on_gpu",
    "default_threads",
    "driver_library",
    "instruction_set",
    "settings",
    "waits_after_launches",
]


def instruction_set(best: str, known: tuple[str, ...]) -> str:
    """Return what ``K3_ISA`` asks for, or `best`."""
    wanted = os.environ.get("K3_ISA")
    if not wanted:
        return best
    if wanted not in known:
        raise ConfigError(f"K3_ISA is {wanted!r}; expected one of {', '.join(known)}, or unset")
    if known.index(wanted) > known.index(best):
        raise ConfigError(f"K3_ISA is {wanted!r}, but this processor and build offer at most {best!r}")
    return wanted


def default_threads() -> int:
    """Threads for this process: ``K3_NUM_THREADS``, else the cores it may use, within its cgroup's quota."""
    wanted = os.environ.get("K3_NUM_THREADS")
    if wanted:
        try:
            threads = int(wanted)
        except ValueError:
            threads = 0
        if not 1 <= threads <= 256:
            raise ConfigError(f"K3_NUM_THREADS is {wanted!r}; expected a number from 1 to 256")
        return threads
    cores = _physical(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    return max(1, min(cores, 256, math.ceil(quota) if quota else cores))


def component_on_gpu(component: str) -> bool | None:
    """Return what ``K3_CUDA_...`` says of a component, or None where it is not set."""
    name = f"K3_CUDA_{component.upper()}"
    wanted = os.environ.get(name)
    if not wanted:
        return None
    if wanted not in ("0", "1"):
        raise ConfigError(f"{name} is {wanted!r}; expected 0 for the CPU or 1 for the GPU, or unset")
    return wanted == "1"


def driver_library() -> str:
    """Return what ``K3_LIBCUDA`` names, or "" for the driver of this machine."""
    return os.environ.get("K3_LIBCUDA", "")


def waits_after_launches() -> bool:
    """Return whether ``K3_CUDA_SYNC`` asks for it."""
    wanted = os.environ.get("K3_CUDA_SYNC", "")
    if wanted not in ("", "0", "1"):
        raise ConfigError(f"K3_CUDA_SYNC is {wanted!r}; expected 0 or 1, or unset")
    return wanted == "1"


def settings() -> dict[str, str]:
    """Return the variables of k3session, and those that choose among GPUs, as far as they are set."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("K3_") or name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    }


def _physical(allowed: set[int]) -> int:
    """Cores among the allowed processors: two threads of one core share what a pass is short of."""
    seen = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            seen.add(siblings.read_text().strip())
        except OSError:
            seen.add(str(cpu))
    return len(seen)


def _cgroup_cores() -> float | None:
    """The CPU quota of this process's cgroup and of those above it, in cores."""
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    quotas = []
    for _, controllers, place in entries:
        if controllers == "":
            folder = Path("/sys/fs/cgroup") / place.lstrip("/")
            quotas += [_quota(p / "cpu.max") for p in (folder, *folder.parents)]
        elif "cpu" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/cpu") / place.lstrip("/")
            quotas += [
                _quota(p / "cpu.cfs_quota_us", p / "cpu.cfs_period_us") for p in (folder, *folder.parents)
            ]
    return min((q for q in quotas if q), default=None)


def _quota(*files: Path) -> float | None:
    try:
        values = " ".join(f.read_text() for f in files).split()
        quota, period = (float(v) for v in values[:2])
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None
