# SPDX-License-Identifier: MIT
"""What runs here and what does not, with the reason: for ``k3session doctor`` and for reports of problems."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from k3session import __version__, env, fatbin
from k3session._core import driver, gpu
from k3session._core.ops import BUILD, ISAS, best_isa
from k3session.errors import K3Error

__all__ = ["examine", "lines"]


def examine() -> dict[str, Any]:
    """Look at the processor, the GPU kernels of this build, the driver and the devices, and try each.

    Returns
    -------
    dict
        ``ok`` says whether a model runs, be it on the CPU alone; a ``refusal`` says why something cannot be used,
        and is None where it can.
    """
    cpu = _cpu()
    return {
        "ok": cpu["refusal"] is None,
        "k3session": __version__,
        "build": BUILD,
        "python": platform.python_version(),
        "system": platform.platform(),
        "settings": env.settings(),
        "cpu": cpu,
        "gpu_kernels": _kernels(),
        "driver": _driver(),
        "devices": _devices(),
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""

    def state(part: dict[str, Any], works: str) -> str:
        return works if part["refusal"] is None else f"no: {part['refusal']}"

    cpu, kernels, found = report["cpu"], report["gpu_kernels"], report["driver"]
    text = [
        f"k3session    {report['k3session']}, build {report['build']}",
        f"python       {report['python']} on {report['system']}",
        f"settings     {', '.join(f'{k}={v}' for k, v in report['settings'].items()) or 'none'}",
        f"cpu          {state(cpu, 'works')}",
        f"             {cpu['isa']} of {cpu['best_isa']}, {cpu['threads']} threads",
        f"gpu kernels  {state(kernels, 'for ' + ', '.join(kernels['architectures']))}",
        f"driver       {state(found, 'for CUDA ' + str(found['cuda']))}",
    ]
    if found["library"]:
        text.append(f"             {found['library']}, kernel module {found['kernel_module'] or 'unknown'}")
    for device in report["devices"]:
        gib = device["total_memory"] / 2**30
        text.append(f"gpu {device['number']:<9}{state(device, 'works')}")
        text.append(
            f"             {device['name']}, compute capability {device['capability']}, {gib:.1f} GiB"
        )
    return text


def _cpu() -> dict[str, Any]:
    """The instruction set and the threads, and whether a token of the model that ships comes out."""
    from k3session.model import Model

    report: dict[str, Any] = {
        "best_isa": best_isa(),
        "isa": best_isa(),
        "threads": None,
        "refusal": None,
    }
    try:
        report["isa"] = env.instruction_set(best_isa(), ISAS)
        report["threads"] = env.default_threads()
        with Model.open(device="cpu") as model, model.session() as session:
            session.step(0)
    except (K3Error, MemoryError, OSError) as error:
        report["refusal"] = str(error)
    return report


def _kernels() -> dict[str, Any]:
    try:
        manifest = fatbin.read(gpu.SOURCES).manifest
    except K3Error as error:
        return {"refusal": str(error), "architectures": [], "nvcc": None, "sources": gpu.SOURCES}
    return {
        "refusal": None,
        "architectures": manifest.get("architectures", ["the emulator"]),
        "nvcc": manifest.get("nvcc"),
        "sources": gpu.SOURCES,
    }


def _driver() -> dict[str, Any]:
    report: dict[str, Any] = {
        "refusal": None,
        "cuda": None,
        "library": None,
        "kernel_module": _kernel_module(),
    }
    try:
        found = driver.driver()
    except K3Error as error:
        report["refusal"] = str(error)
    else:
        report["cuda"] = fatbin.version(found["cuda"])
        report["library"] = found["library"]
    return report


def _kernel_module() -> str | None:
    """The version of the NVIDIA driver's kernel module."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), first)


def _devices() -> list[dict[str, Any]]:
    """Every GPU, opened for a moment."""
    try:
        found = gpu.devices()
    except K3Error:
        return []
    for device in found:
        major, minor = device["capability"]
        device["capability"] = f"{major}.{minor}"
        device["free_memory"] = None
        if device["refusal"] is None:
            try:
                with gpu.Device(device["number"]) as opened:
                    device["free_memory"] = opened.free_memory
            except K3Error as error:
                device["refusal"] = str(error)
    return found
