# SPDX-License-Identifier: MIT
"""The emulator with the kernels of good.cu and bad.cu, fast and checking, fresh for every test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from emulated import BUILD, HERE, Emulator, build_module


@pytest.fixture(scope="session")
def build() -> SimpleNamespace:
    """cuda/emulator/build.py."""
    if not BUILD.exists():
        pytest.skip("cuda/emulator is not here: these are the tests of a wheel")
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return build_module()


@pytest.fixture(scope="session")
def libraries(build: SimpleNamespace) -> dict[str, Emulator]:
    """Both builds, by name."""
    sources = [HERE / "good.cu", HERE / "bad.cu"]
    return {
        name: Emulator(build.build(sources, checking=checking))
        for name, checking in (("fast", False), ("check", True))
    }


def fresh(emulator: Emulator) -> Iterator[Emulator]:
    """Open for a test, which must leave no report and nothing alive behind."""
    emulator.reset()
    emulator.open()
    yield emulator
    emulator.close()
    assert emulator.reports == []
    assert emulator.lib.k3emu_leaks() == 0, emulator.reports


@pytest.fixture
def fast(libraries: dict[str, Emulator]) -> Iterator[Emulator]:
    """The fast build."""
    yield from fresh(libraries["fast"])


@pytest.fixture
def checking(libraries: dict[str, Emulator]) -> Iterator[Emulator]:
    """The checking build."""
    yield from fresh(libraries["check"])


@pytest.fixture(params=["fast", "check"])
def either(request: pytest.FixtureRequest, libraries: dict[str, Emulator]) -> Iterator[Emulator]:
    """One build after the other."""
    yield from fresh(libraries[request.param])
