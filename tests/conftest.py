# SPDX-License-Identifier: MIT
"""What tests share: a small checkpoint, a model over it, and how often a property is tried."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import device
import hypothesis
import pytest
from core_access import FULL

import k3session as k3
from k3session.pipeline import PipelineModel
from k3session.presets import PRESETS
from k3session.synth import synth

device.prepare()  # before anything opens a driver

# The same examples every time where a change is judged; new ones, and many more, where time is no matter (K3_SOAK=1).
# Explaining a failure would take far longer than finding it.
PHASES = [p for p in hypothesis.Phase if p is not hypothesis.Phase.explain]
hypothesis.settings.register_profile(
    "ci", max_examples=15, derandomize=True, database=None, deadline=None, phases=PHASES, print_blob=True
)
hypothesis.settings.register_profile("soak", max_examples=1000, deadline=None, phases=PHASES, print_blob=True)
hypothesis.settings.load_profile("soak" if FULL else "ci")

# A run in the background (`make test &`) starts with Ctrl-C ignored, and so would every program that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=device.EMULATED)
def _no_reports() -> Iterator[None]:
    yield from device.watched()


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with every kind of layer, two MLA layers in a row and a block that is cut short."""
    return synth(tmp_path_factory.mktemp("nano") / "model", "nano", shard_bytes=200_000)


@pytest.fixture(scope="module")
def model(nano: Path) -> Iterator[k3.Model]:
    """The nano checkpoint, open on one thread; sessions that a test leaves open are closed with it.

    K3_TEST_STAGES=2,5 cuts it there into stages, to try tests of sessions over a pipeline.
    """
    cuts = [int(i) for i in os.environ.get("K3_TEST_STAGES", "").split(",") if i]
    if not cuts:
        with k3.Model.open(nano, threads=1) as opened:
            yield opened
        return
    with contextlib.ExitStack() as stack:
        bounds = [0, *cuts, PRESETS["nano"].num_hidden_layers]
        parts = [
            stack.enter_context(k3.Model.open(nano, threads=1, layers=pair)) for pair in pairwise(bounds)
        ]
        yield stack.enter_context(PipelineModel.of_stages(parts, micro_rows=1))
