# SPDX-License-Identifier: MIT
"""`k3session doctor`: what can be used here, and for what cannot the same reason that opening it would give."""

from __future__ import annotations

import json

from device_tools import library
from session_tools import run, start

PROGRAM = """
import sys
from k3session.cli import main
sys.exit(main(sys.argv[1:]))
"""


def doctor(**more: str) -> dict[str, object]:
    report: dict[str, object] = json.loads(run(PROGRAM, "doctor", "--json", **more))
    return report


def test_with_a_device() -> None:
    report = doctor(K3_LIBCUDA=str(library()), K3_NUM_THREADS="1")
    assert report["ok"] is True
    assert report["driver"] == {
        "refusal": None,
        "cuda": "13.0",
        "library": str(library()),
        "kernel_module": report["driver"]["kernel_module"],  # type: ignore[index]
    }
    (device,) = report["devices"]  # type: ignore[misc]
    assert device["refusal"] is None and device["capability"] == "9.0"
    assert 0 < device["free_memory"] <= device["total_memory"]
    assert report["cpu"]["threads"] == 1 and report["cpu"]["refusal"] is None  # type: ignore[index]
    assert report["settings"]["K3_NUM_THREADS"] == "1"  # type: ignore[index]
    text = run(PROGRAM, "doctor", K3_LIBCUDA=str(library()))
    for line in (
        "cpu          works",
        "gpu kernels  for ",
        "driver       for CUDA 13.0",
        "gpu 0        works",
    ):
        assert f"\n{line}" in text, text


def test_every_device_has_a_reason_of_its_own() -> None:
    report = doctor(K3_LIBCUDA=str(library()), K3EMU_DEVICES="2", K3EMU_FAIL="cuDevicePrimaryCtxRetain:2:2")
    first, second = report["devices"]  # type: ignore[misc]
    assert first["refusal"] is None
    assert "GPU 1" in second["refusal"] and "too little memory" in second["refusal"]
    old = doctor(K3_LIBCUDA=str(library()), K3EMU_ARCH="75")
    assert "8.0 or later is needed" in old["devices"][0]["refusal"]  # type: ignore[index]


def test_with_a_driver_that_cannot_start() -> None:
    report = doctor(K3_LIBCUDA=str(library()), K3EMU_INIT="804")
    assert report["ok"] is True and report["devices"] == []
    assert "forward compatibility" in report["driver"]["refusal"]  # type: ignore[index]
    text = run(PROGRAM, "doctor", K3_LIBCUDA=str(library()), K3EMU_INIT="804")
    assert "\ndriver       no: " in text and "\ngpu " not in text.replace("gpu kernels", "")


def test_where_nothing_runs_the_exit_code_says_so() -> None:
    nothing = {"K3_ISA": "nonsense", "K3_LIBCUDA": "/no/such/library"}
    process = start(PROGRAM, "doctor", "--json", **nothing)
    report = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 1
    assert "K3_ISA is 'nonsense'" in report["cpu"]["refusal"]
    assert "/no/such/library" in report["driver"]["refusal"]
    process = start(PROGRAM, "doctor", **nothing)
    assert "cpu          no: K3_ISA" in process.communicate(timeout=60)[0]
    assert process.returncode == 1
