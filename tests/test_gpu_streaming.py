# SPDX-License-Identifier: MIT
"""Models within a budget of a GPU's memory: the bits of a model that is all there, no more memory than given."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import EMULATED, ON_GPU
from device_tools import alive, emulator
from golden_data import relative
from session_tools import contents, prompt, same, step_all, threads, threads_beside, unchanged
from streaming_tools import compare, opened, play

import k3session as k3
from k3session import budget
from k3session.pipeline import PipelineModel
from k3session.presets import PRESETS
from k3session.synth import synth

if not ON_GPU:
    pytest.skip("for a GPU or the emulator: see device.py", allow_module_level=True)

emulated = pytest.mark.skipif(
    not EMULATED, reason="counts and fails calls of the driver, which the emulator does"
)

# What stays, how the rest is cut, and how many experts have room.  Without ring_blocks the ring has two places.
BUDGETS: dict[str, dict[str, Any]] = {
    "nothing stays": {"share": 0.0, "slots": 2, "block": 700, "ring_blocks": 0},
    "nobody reads ahead": {"share": 0.2, "slots": 3, "block": 3000, "readers": 0, "ring_blocks": 0},
    "half": {"share": 0.5, "slots": 7, "block": 2000},
    "whole matrices": {"share": 0.4, "slots": 16, "block": 1 << 30, "ring_blocks": 0},
    "the trunk stays": {"share": 1.0, "slots": 5},
    "the host keeps a part": {"share": 0.2, "slots": 6, "block": 3000, "on_host": 0.4, "ring_blocks": 2},
    "the host keeps all of it": {"share": 0.2, "slots": 3, "block": 1 << 30, "on_host": 1.0, "readers": 0},
    "all experts stay": {"share": 0.0, "slots": 1000, "block": 3000},
}
OFTEN = ("nobody reads ahead", "half", "the host keeps a part")
"""Of all checkpoints; the others of the smallest one, and of the rest in `make soak`."""
ROWS = 12


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> dict[str, Path]:
    """Also one with experts in BF16 and a trunk in F32, and one, tied, whose rows are no multiples of 16 bytes."""
    folder = tmp_path_factory.mktemp("streaming")
    odd = replace(PRESETS["micro"], hidden_size=36, intermediate_size=50, tie_word_embeddings=True)
    return {
        "nano": nano,
        "micro": synth(folder / "micro", "micro"),
        "unpacked": synth(folder / "unpacked", "micro", experts="bf16", trunk="f32"),
        "odd": synth(folder / "odd", odd),
    }


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, path in checkpoints.items():
        with k3.Model.open(path, device="cuda", threads=1) as model:
            found[name] = play(model, ROWS)
    return found


# ---------------------------------------------------------------- the bits


@pytest.mark.parametrize(
    ("name", "budget"),
    [("micro", budget) for budget in BUDGETS]
    + [(name, budget) for name in ("unpacked", "odd", "nano") for budget in OFTEN]
    + [
        pytest.param(name, budget, marks=pytest.mark.soak)
        for name in ("unpacked", "odd")
        for budget in BUDGETS
        if budget not in OFTEN
    ],
)
def test_the_bits_are_the_same_at_every_budget(
    name: str, budget: str, checkpoints: dict[str, Path], expected: dict[str, dict[str, Any]]
) -> None:
    """Steps, prefill, drafts, batch, fork and rewind: a block or an expert in the wrong place changes a logit."""
    with opened(checkpoints[name], to_gpu=True, **BUDGETS[budget]) as model:
        compare(play(model, ROWS), expected[name])
        assert model.gpu_memory is not None and not model.gpu_memory.mapped
        assert model.stats.gpu_bytes > 0


@emulated
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_schedule_of_the_device_changes_a_bit(nano: Path, seed: int) -> None:
    """Streams that run in another order, as far as events let them: an event too few is seen here."""
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        wanted = [s.prefill(prompt(ROWS)), *step_all(s, prompt(3))]
    emulator().set(seed=seed)
    try:
        with opened(nano, to_gpu=True, share=0.3, slots=4, block=3000) as model, model.session() as s:
            found = [s.prefill(prompt(ROWS)), *step_all(s, prompt(3))]
    finally:
        emulator().set(seed=0)
    assert np.stack(found).tobytes() == np.stack(wanted).tobytes()


def test_more_experts_than_one_launch_takes(tmp_path: Path) -> None:
    """All are there the second time, so that no copy holds the host back between one launch and the next."""
    config = replace(PRESETS["micro"], num_experts=200, num_experts_per_token=60)
    folder = synth(tmp_path / "model", config)
    ids = prompt(20, vocab=config.vocab_size)
    with k3.Model.open(folder, device="cuda", threads=1) as model, model.session() as s:
        wanted = [s.prefill(ids), s.prefill(ids)]
    with opened(folder, to_gpu=True, share=1.0, slots=1000) as model, model.session() as s:
        found = [s.prefill(ids)]
        missed, used = s.stats.experts_missed, s.stats.experts_used
        assert missed > 3 * 32, "three launches and more"
        found.append(s.prefill(ids))
        assert s.stats.experts_missed - missed < (s.stats.experts_used - used) // 4
    assert np.stack(found).tobytes() == np.stack(wanted).tobytes()


@pytest.mark.parametrize(
    "placement",
    [{"experts": "cpu"}, {"mla": "cpu", "dense": "cpu"}, {"device": "cpu", "kda": "cuda", "experts": "cuda"}],
    ids=str,
)
def test_what_is_on_the_gpu_streams_wherever_the_rest_is(nano: Path, placement: dict[str, str]) -> None:
    placement = {"device": "cuda"} | placement

    def use(model: k3.Model) -> dict[str, Any]:
        with model.session() as s:
            s.prefill(prompt(9))
            step_all(s, prompt(2))
            with s.verify(prompt(3, seed=1)) as draft:
                draft.accept(2)
            return contents(s)

    with k3.Model.open(nano, threads=1, **placement) as model:
        wanted = use(model)
    with opened(nano, to_gpu=True, share=0.3, slots=2, placement=placement) as model:
        same(use(model), wanted)
        assert model.stats.gpu_bytes > 0


def test_embeddings_traces_and_tensor_cores(nano: Path) -> None:
    """What takes another way through a pass: rows without a token, inner values, many rows in BF16 parts."""
    rows = np.random.default_rng(5).normal(0, 1, (5, PRESETS["nano"].hidden_size)).astype(np.float32)
    split = {"prefill_precision": "bf16x2"}

    def use(model: k3.Model) -> dict[str, Any]:
        with model.session() as s:
            found = {"prefill": s.prefill(prompt(20)), "embedded": s.prefill(rows)}
            with s.trace() as trace:
                s.step(3)
            return found | {"trace": trace["ffn_out"], "ids": trace["route_ids"], "s": contents(s)}

    with k3.Model.open(nano, device="cuda", threads=1, **split) as model:
        wanted = use(model)
    with opened(nano, to_gpu=True, share=0.3, slots=4, options=split) as model:
        compare(use(model), wanted)
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        assert 0 < relative(s.prefill(prompt(20)), wanted["prefill"]) < 1e-4


def test_some_layers_of_a_model(nano: Path) -> None:
    """A model in three parts, of which the one in the middle has neither an embedding nor a head."""
    n = PRESETS["nano"].num_hidden_layers
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        wanted = [s.prefill(prompt(6)), s.step(1)]
    with contextlib.ExitStack() as stack:
        parts = [
            stack.enter_context(opened(nano, to_gpu=True, layers=layers, share=0.2, slots=3))
            for layers in ((0, 2), (2, 5), (5, n))
        ]
        whole = stack.enter_context(PipelineModel.of_stages(parts, micro_rows=4))
        s = stack.enter_context(whole.session())
        assert np.stack([s.prefill(prompt(6)), s.step(1)]).tobytes() == np.stack(wanted).tobytes()


def test_sessions_in_several_threads_take_turns(nano: Path) -> None:
    ids = prompt(6)
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        step_all(s, ids)
        wanted = contents(s)
    found: list[dict[str, Any]] = []
    with opened(nano, to_gpu=True, share=0.3, slots=3) as model:

        def run() -> None:
            with model.session() as s:
                step_all(s, ids)
                found.append(contents(s))

        workers = [threading.Thread(target=run) for _ in range(3)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
    assert len(found) == 3
    for one in found:
        same(one, wanted)


def test_a_cancelled_pass_leaves_the_next_one_right(nano: Path) -> None:
    ids = prompt(5)
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        wanted = step_all(s, ids)
    with opened(nano, to_gpu=True, slots=2) as model, model.session() as s:
        found = []
        for t in ids.tolist():
            with unchanged(s):
                s._scratch.cancel()
                with pytest.raises(k3.PassCancelled):
                    s._forward(np.array([t], np.int32))
            found.append(s.step(t))
        assert np.stack(found).tobytes() == wanted.tobytes()


def test_what_is_not_finite_stays_in_its_own_session(nano: Path) -> None:
    """The router's choice of such a row is brought like any other, and harms nobody."""
    with opened(nano, to_gpu=True, share=0.3, slots=4) as model, model.session() as a, model.session() as b:
        a.prefill(prompt(5))
        b.prefill(prompt(5))
        good = b.snapshot()
        state = good.layers[1].state
        assert state is not None
        state[0, 0, 0] = np.nan
        b.restore(good)
        with pytest.raises(k3.BatchError) as caught:
            model.step([(a, 7), (b, 7)])
        row, failed = caught.value.results
        assert isinstance(failed, k3.NonFiniteError) and failed.layer == "model.layers.1.self_attn"
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        s.prefill(prompt(5))
        assert s.step(7).tobytes() == row.tobytes()


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize("error", [errno.EIO, 0], ids=["an error", "short"])
def test_a_read_that_fails_fails_the_pass_and_nothing_else(nano: Path, error: int) -> None:
    """Reads of a pass, one after the other: the message names it, the session is as it was, then the pass succeeds."""
    ids = prompt(3)
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        wanted = step_all(s, ids)
    with opened(nano, to_gpu=True, slots=4, block=40_000, chunk=1 << 20) as model, model.session() as s:
        streamer = model._engine.gpu_streamer
        s.step(int(ids[0]))
        failed = 0
        for after in range(0, 60, 3):
            streamer.reader.fail_after(after, error)
            with unchanged(s):
                try:
                    with s.fork() as twin:
                        twin.step(int(ids[1]))
                except k3.CheckpointError as problem:
                    failed += 1
                    text = str(problem)
                    assert re.search(r"model-0000\d-of.*: .*(layers\.\d|embed_tokens|lm_head)", text), text
                    assert (os.strerror(errno.EIO) in text) == bool(error)
        streamer.reader.fail_after(-1)
        assert failed > 10
        assert step_all(s, ids[1:]).tobytes() == wanted[1:].tobytes()


def test_a_file_that_is_cut_while_it_is_open(nano: Path, tmp_path: Path) -> None:
    ids = prompt(5)
    folder = Path(shutil.copytree(nano, tmp_path / "copy"))
    file = sorted(folder.glob("*.safetensors"))[1]
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        wanted = step_all(s, ids)
    with opened(folder, to_gpu=True, slots=2) as model, model.session() as s:
        found = step_all(s, ids[:2])
        whole, times = file.read_bytes(), os.stat(file)
        contents(s)  # the fingerprint of the model is taken while the files are whole
        with open(file, "r+b") as out:
            out.truncate(len(whole) // 2)
        words = rf"{file.name}.*{len(whole)}.*found {len(whole) // 2}"
        for _ in range(2):
            with unchanged(s), pytest.raises(k3.CheckpointError, match=words):
                s.step(int(ids[2]))
        with open(file, "r+b") as out:
            out.write(whole)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert np.concatenate([found, step_all(s, ids[2:])]).tobytes() == wanted.tobytes()


@emulated
@pytest.mark.parametrize(
    "call",
    ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"],
)
def test_a_call_of_the_driver_that_fails_fails_the_pass_and_nothing_else(nano: Path, call: str) -> None:
    ids = prompt(3)
    with k3.Model.open(nano, device="cuda", threads=1) as model, model.session() as s:
        wanted = step_all(s, ids)
    with opened(nano, to_gpu=True, slots=3, block=40_000, readers=0) as model, model.session() as s:
        s.step(int(ids[0]))
        failed = 0
        for nth in (1, 2, 3, 5, 8, 13, 21, 34, 55):
            twin = s.fork()  # a copy of state waits for the next pass
            with unchanged(s):
                emulator().fail(call, nth)
                try:
                    twin.step(int(ids[1]))
                except k3.DeviceError:
                    failed += 1
                emulator().lib.k3emu_clear_failures()
                twin.close()
        assert failed > 2
        assert step_all(s, ids[1:]).tobytes() == wanted[1:].tobytes()


# ---------------------------------------------------------------- the budget


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some kilobytes, for a model of less than a megabyte."""
    small = replace(budget.LIMITS, block=20_000, least_block=4096, spare=0)
    monkeypatch.setattr(budget, "LIMITS", small)


def smallest(path: Path, **options: Any) -> int:
    with pytest.raises(
        k3.ConfigError, match=r"gpu_memory is .*the smallest that works here is \d+ "
    ) as problem:
        k3.Model.open(path, device="cuda", gpu_memory=1000, threads=1, **options)
    found = re.search(r"works here is (\d+) ", str(problem.value))
    assert found
    return int(found[1])


@emulated
def test_a_budget_is_kept_and_one_that_is_too_small_is_refused(tight: None, tmp_path: Path) -> None:
    """As the emulator counts the device's memory, with a session that has room for 4,096 tokens."""
    config = replace(PRESETS["nano"], num_experts=64, intermediate_size=2048, vocab_size=2048)
    folder = synth(tmp_path / "model", config)
    ids = prompt(20, vocab=config.vocab_size)
    with (
        k3.Model.open(folder, device="cuda", threads=1) as model,
        model.session(marks=False, capacity=4096) as s,
    ):
        s.prefill(ids)
        everything, spans = emulator().live("device_bytes"), model._weights.spans()
        wanted = s.step(5)
    gc.collect()
    assert alive(emulator()) == {}
    least = smallest(folder)
    assert alive(emulator()) == {}
    found, held = [], []
    for total in (least, least + 400_000):
        with k3.Model.open(folder, device="cuda", gpu_memory=total, threads=1) as model:
            plan = model.gpu_memory
            assert plan is not None and plan.budget == total and plan.streamed > 0
            with model.session(marks=False, capacity=4096) as s:
                s.prefill(ids)
                assert s.step(5).tobytes() == wanted.tobytes()
                held.append(emulator().live("device_bytes"))
                assert held[-1] <= total
                found.append(s.stats.gpu_bytes)
        gc.collect()
        assert alive(emulator()) == {}
    assert found[1] < found[0] - 100_000
    weights = sum(n for _, n in spans)
    assert held[0] < everything - weights // 2, (
        "the budget is one in which the model would not have been there"
    )


def test_where_everything_fits_nothing_streams(nano: Path) -> None:
    """Passes are recorded then, as without a budget."""
    for total in ("1GiB", "auto"):
        with k3.Model.open(nano, device="cuda", gpu_memory=total, threads=1) as model:
            assert model.gpu_memory is not None and model.gpu_memory.mapped
            assert model._engine.gpu_streamer is None
            with model.session() as s:
                s.step(1)
                assert s._scratch.backend.recorded == 1
                assert (s.stats.gpu_bytes, s.stats.expert_hit_rate) == (0, None)
    with k3.Model.open(nano, device="cuda", threads=1) as model:
        assert model.gpu_memory is None


def test_a_budget_that_makes_no_sense_is_refused(nano: Path) -> None:
    for wrong in (0, -1, "much", 1.5, True):
        with pytest.raises(k3.ConfigError, match=r"gpu_memory is .*expected bytes, a size"):
            k3.Model.open(nano, device="cuda", gpu_memory=wrong)  # type: ignore[arg-type]
    with pytest.raises(k3.ConfigError, match="no part of the model is placed on a GPU"):
        k3.Model.open(nano, device="cpu", gpu_memory="1GiB")
    with (
        pytest.raises(k3.ConfigError, match="memory and gpu_memory were both given"),
        opened(nano, to_gpu=True, on_host=0.5, placement={"device": "cuda", "mla": "cpu"}),
    ):
        pass
    with pytest.raises(k3.DeviceMemoryError, match=r"gpu_memory is 102400\.00 GiB, where .* free on GPU 0"):
        k3.Model.open(nano, device="cuda", gpu_memory="100TiB")


def test_stats_count_what_went_to_the_gpu(nano: Path) -> None:
    """Of a step: every block that does not stay, a row of the embedding, and the experts that were not there."""
    with opened(nano, to_gpu=True, share=0.0, slots=1000) as model, model.session() as s:
        trunk = model._weights.step_bytes()["trunk"]
        ids = prompt(8).tolist()
        for i, t in enumerate(ids):
            s.step(t)
            assert s.stats.experts_used == (i + 1) * 3 * 6
        stats = s.stats
        assert trunk * len(ids) < stats.gpu_bytes < 1.5 * trunk * len(ids)
        assert stats.experts_missed <= 6 * 12 and stats.expert_hit_rate is not None
        assert 0.1 < stats.expert_hit_rate < 1
        assert stats.disk_bytes >= trunk * len(ids) and stats.disk_seconds >= 0
        assert stats.to_dict()["gpu_bytes"] == stats.gpu_bytes
    with opened(nano, to_gpu=True, share=1.0, slots=1000) as model, model.session() as s:
        s.prefill(prompt(16))
        before = s.stats
        for t in ids:
            s.step(t)
        after = s.stats
        missed = after.experts_missed - before.experts_missed
        expert, row = model._weights.step_bytes()["experts"] // (3 * 6), 2 * model.config.hidden_size
        # With each row of the embedding goes the number of its place.
        assert after.gpu_bytes - before.gpu_bytes == len(ids) * (row + 4) + missed * expert
        assert missed < 3 * 6 * len(ids) // 2


def test_a_prefill_brings_each_block_once_per_chunk(nano: Path) -> None:
    """And each expert once, though more are chosen than have room."""
    with opened(nano, to_gpu=True, share=0.0, slots=2, ring_blocks=0) as model, model.session() as s:
        trunk = model._weights.step_bytes()["trunk"]
        s.prefill(prompt(30))
        stats = s.stats
        each = model._weights.step_bytes()["experts"] // (6 * 3)
        assert stats.experts_missed == stats.experts_used <= 6 * 12
        assert stats.gpu_bytes < 1.1 * trunk + stats.experts_missed * each + 30 * 1000


@pytest.fixture
def left_nothing() -> Iterator[None]:
    before, files = threads(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert not threads_beside(before) and len(os.listdir("/proc/self/fd")) == files
    if EMULATED:
        assert alive(emulator()) == {}


def test_nothing_is_left_after_close(nano: Path, left_nothing: None) -> None:
    with opened(nano, to_gpu=True, share=0.5, slots=3) as model:
        assert model._engine.gpu_streamer.reader.pinned_bytes > 0
        with model.session() as s, model.session() as t:
            model.step([(s, 1), (t, 2)])
            json.dumps(model.gpu_memory.to_dict() if model.gpu_memory else None)


@pytest.mark.skipif(not EMULATED, reason="a process that has used a real driver is not forked here")
def test_the_child_of_a_fork_is_told_so(nano: Path) -> None:
    """And takes nothing from the parent, which goes on."""
    with opened(nano, to_gpu=True, share=0.3, slots=3) as model, model.session() as s:
        s.step(1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                s.step(2)
            except k3.DeviceError as problem:
                os.write(write, str(problem).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            said = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        assert "CUDA was in use when this process was forked" in said
        assert np.isfinite(s.step(2)).all()


@emulated
@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"])
def test_nothing_is_left_of_a_model_that_could_not_be_opened(
    nano: Path, left_nothing: None, call: str
) -> None:
    failed = 0
    for nth in (1, 2, 3, 4, 6, 10):
        emulator().fail(call, nth)
        try:
            with opened(nano, to_gpu=True, share=0.5, slots=3):
                pass
        except k3.DeviceError:
            failed += 1
        emulator().lib.k3emu_clear_failures()
        gc.collect()
        assert alive(emulator()) == {}
    assert failed >= 2
