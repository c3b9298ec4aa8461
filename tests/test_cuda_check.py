# SPDX-License-Identifier: MIT
"""Every kernel on the checking emulator: small odd shapes in several schedules, with no report and no leak."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from device import CHECKING
from device_tools import alive, emulator
from kernel_cases import GROUPS
from ops_tools import Array, same_bits

from k3session._core.gpu import KERNELS

if not CHECKING:
    pytest.skip("for the checking emulator: K3_TEST_DEVICE=emulator-check", allow_module_level=True)

EMULATOR = emulator()
#: Of the last one, now and then a thread is left in the middle of a stretch.
SCHEDULES = ({"seed": 0}, {"seed": 1}, {"seed": 2, "preempt": 97})

seen: dict[str, Array] = {}
"""What each case gave in the first schedule."""


@pytest.fixture(autouse=True)
def _program_order_afterwards() -> Iterator[None]:
    yield
    EMULATOR.set(seed=0, preempt=0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=[f"seed-{s['seed']}" for s in SCHEDULES])
def test_every_kernel_in_any_schedule(schedule: dict[str, int]) -> None:
    """The same bits in each; reports are looked at after every test (device.py)."""
    gc.collect()
    before = alive(EMULATOR)
    runs = {name: EMULATOR.count(name) for name in KERNELS}
    EMULATOR.set(**schedule)
    for group in GROUPS:
        for name, found in group():
            assert not np.isnan(found).any(), name
            try:
                same_bits(seen.setdefault(name, found), found)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            assert not EMULATOR.reports, f"{name}: {EMULATOR.reports[0]}"
    gc.collect()
    assert alive(EMULATOR) == before
    assert [name for name in KERNELS if EMULATOR.count(name) == runs[name]] == [], "never launched"
