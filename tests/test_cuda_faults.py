# SPDX-License-Identifier: MIT
"""A GPU that fails: every call of the driver that a model and its sessions make, and kernels that lose the context.

Each program has a process of its own, with the emulator in the driver's place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device import EMULATED
from device_tools import run_emulated

from k3session.synth import synth

if not EMULATED:
    pytest.skip("fails calls on command, which the emulator does: see device.py", allow_module_level=True)

LIFE = """
import gc, json, logging, sys
import numpy as np
from device_tools import alive, emulator
import k3session as k3

logging.getLogger("k3session").setLevel(logging.ERROR)       # what was not given back is told, and expected here
from dataclasses import replace
from k3session import budget
from streaming_tools import dividing
path, placement = sys.argv[1], json.loads(sys.argv[2])
if "gpu_memory" in placement:                                # readers of their own would make another order each time
    budget.divide = dividing(share=0.3, slots=3, to_gpu=True)
    budget.LIMITS = replace(budget.LIMITS, threads=0)
emu, wrong = emulator(), []
said = []                                                    # what failed in a life
got_over = ""                                                # in which act a failure was met that no error told of

def life(expected=None):
    "All that two sessions do.  An act that fails is done once more: then it succeeds, or the first error is raised."
    global got_over
    said.clear()
    got_over = ""
    with k3.Model.open(path, threads=1, **placement) as model:
        s, t = model.session(), model.session()
        snaps = []
        def batch():
            "A step of both; of the one that is behind, where the other has gone on already."
            model.step([(x, 7) for x in (s, t) if x.position == 6])
        acts = {
            "prefill": (3, lambda: s.prefill([1, 2, 3])),
            "first step": (1, lambda: s.step(4)),
            "second step": (1, lambda: s.step(5)),
            "snapshot": (0, lambda: snaps.append(s.snapshot())),
            "restore": (0, lambda: t.restore(snaps[0])),
            "third steps": (1, lambda: [x.step(6) for x in (s, t) if x.position == 5]),
            "batch": (1, batch),
            "fork": (0, lambda: s.fork().close()),
        }
        try:
            left = emu.lib.k3emu_failures_left()
            for act, (tokens, use) in acts.items():
                before = s.position
                try:
                    use()
                except k3.K3Error as error:
                    said.append(str(error))
                    if act not in ("third steps", "batch") and s.position != before:
                        wrong.append(f"{act}: position {s.position}, was {before}, after {error}")
                    try:
                        use()
                    except k3.K3Error:
                        raise error from None                # the session has failed, or the context is lost
                else:
                    if left and not emu.lib.k3emu_failures_left():
                        got_over = act
                left = emu.lib.k3emu_failures_left()
                if s.position != before + tokens:
                    wrong.append(f"{act}: position {s.position} after {tokens} tokens at {before}")
            if expected is not None and not np.array_equal(np.stack([s.logits, t.logits]), expected):
                wrong.append("other logits")
            return np.stack([s.logits, t.logits])
        finally:
            t.close()
            s.close()
"""

FAULTS = """
names, i = [], 0
while (name := emu.lib.k3emu_entry(i)) is not None:
    names.append(name.decode())
    i += 1
expected = life()
emu.lib.k3emu_clear_counts()
life(expected)
count = {n: emu.count(n) for n in names if not n.startswith("cuGetError") and emu.count(n)}
quiet = ("Free", "Destroy", "Release", "Unload", "Exchange", "CtxSet", "CtxGet")
tried = raised = went_on = recovered = 0
for name, calls in {**count, "kernel": emu.count("kernels")}.items():
    for nth in sorted({1, (calls + 1) // 2, calls}):
        for status in (0, 700) if name.startswith(("cuMemcpy", "cuStreamSync", "cuGraphLaunch")) else (0,):
            what = f"call {nth} of {calls} of {name} with status {status}"
            before = len(wrong)
            emu.fail(name, nth, status)
            try:
                life(expected)
                # A batch that fails is run session by session; marks are given up where memory is short.
                if said:
                    went_on += 1
                elif got_over == "batch" or (name == "cuMemAlloc" and got_over):
                    recovered += 1
                elif not any(word in name for word in quiet):
                    wrong.append("no error")
            except k3.K3Error as error:
                raised += 1
                said.append(str(error))
            except Exception as error:
                wrong.append(repr(error))
            if emu.lib.k3emu_failures_left():
                wrong.append("was not reached")
            gc.collect()
            if left := alive(emu):
                wrong.append(f"left {left} after {said[:1]}")
            emu.lib.k3emu_clear_failures()
            tried += 1
            if tried % 4 == 0:
                life(expected)                               # a fresh model, as if nothing had been
            wrong[before:] = [f"{what}: {w}" for w in wrong[before:]]
life(expected)
if emu.lib.k3emu_leaks():
    wrong.append("leaks")
numbers = {"tried": tried, "raised": raised, "went on": went_on, "recovered": recovered}
print(json.dumps({**numbers, "entries": sorted(count), "wrong": wrong}))
"""


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(tmp_path_factory.mktemp("micro") / "model", "micro")


@pytest.mark.parametrize(
    "placement",
    [{"device": "cuda"}, {"device": "cuda", "experts": "cpu"}, {"device": "cuda", "gpu_memory": "2MiB"}],
    ids=["all", "experts-cpu", "streamed"],
)
def test_every_call_that_fails_is_told_and_leaves_nothing_behind(
    micro: Path, placement: dict[str, Any]
) -> None:
    """The first, a middle and the last of each.  Then the sessions go on from where they stood, to the same logits, or
    have failed."""
    # Memory that was never written holds a pattern: whatever reads it is seen here, and not once in a hundred runs.
    dirty = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}
    found = json.loads(run_emulated(LIFE + FAULTS, micro, json.dumps(placement), timeout=300, **dirty))
    assert found["wrong"] == []
    assert found["tried"] > 100 and found["raised"] > 30 and found["went on"] > 10 and found["recovered"] < 12
    recorded = ("cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphLaunch")
    streamed = ("cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize")
    for entry in (
        "cuLibraryLoadData",
        "cuMemcpyHtoDAsync",
        *(streamed if "gpu_memory" in placement else recorded),
    ):
        assert any(name.startswith(entry) for name in found["entries"]), entry


LOST = """
with k3.Model.open(path, threads=1, **placement) as model:
    with model.session() as s, model.session() as t:
        s.prefill([1, 2, 3])
        t.prefill([1, 2])
        snap = s.snapshot()
        emu.fail("kernel", 5, 700)
        errors = []
        uses = (lambda: s.step(4), lambda: s.step(4), lambda: t.step(4), lambda: s.prefill([1, 2]),
                lambda: s.snapshot(), lambda: t.restore(snap), lambda: model.session(),
                lambda: t.verify([1, 2]).__enter__(), lambda: model.step([(s, 1), (t, 1)]))
        for use in uses:
            try:
                use()
            except k3.DeviceError as error:
                errors.append(str(error))
assert len(errors) == len(uses) and all(errors[0] in text for text in errors), errors
gc.collect()
assert alive(emu) == {}, alive(emu)
life()
print(errors[0])
"""


@pytest.mark.parametrize(
    ("sync", "words"),
    [("0", "failed in waiting for the device"), ("1", "failed in the kernel k3_")],
    ids=["recorded", "waited-for"],
)
def test_a_kernel_that_loses_the_context_is_what_every_later_call_names(
    micro: Path, sync: str, words: str
) -> None:
    """And a model that is opened afterwards works."""
    said = run_emulated(LIFE + LOST, micro, json.dumps({"device": "cuda"}), K3_CUDA_SYNC=sync)
    assert words in said and "CUDA_ERROR_ILLEGAL_ADDRESS, 700" in said and "open the model again" in said
