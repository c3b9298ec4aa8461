# SPDX-License-Identifier: MIT
"""Restores and loads: a session writes over memory that it alone holds; a failure changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_tools import contents, prompt, same, same_sessions, unchanged

import k3session as k3
from k3session import snapshot_file
from k3session.presets import PRESETS
from k3session.snapshot_file import SnapshotReader, read_all, serialize
from k3session.synth import synth

PAGE = 4
"""Rows of a page, so that short sessions have several."""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[k3.Model]:
    """A checkpoint whose latent rows have no gaps, on the processor: state can be written in place."""
    folder = tmp_path_factory.mktemp("even") / "model"
    nano = PRESETS["nano"]
    synth(folder, replace(nano, kv_lora_rank=-(-nano.latent_width // 16) * 16 - nano.qk_rope_head_dim))
    with k3.Model.open(folder, device="cpu", threads=2) as opened:
        yield opened


def opened(model: k3.Model, n: int, seed: int = 0, *, rows: int = PAGE, latent: str = "fp32") -> k3.Session:
    """A session without marks that took in n tokens, with latent pages of some rows."""
    session = model.session(latent=latent, marks=False)
    session._timeline = session._decoder.timeline(latent == "bf16", rows)
    if n:
        session.prefill(prompt(n, seed))
    return session


def states(timeline: Any) -> list[dict[str, Any]]:
    """The arrays of all layers, copied."""
    return [layer.export() for layer in timeline.layers]


def same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for a, b in zip(found, expected, strict=True):
        same(a, b)


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize(("before", "after"), [(0, 9), (9, 0), (9, 9), (3, 30), (30, 3), (8, 4)])
def test_what_was_there_before_leaves_no_trace(cpu: k3.Model, before: int, after: int, latent: str) -> None:
    with opened(cpu, after, 1, latent=latent) as other, opened(cpu, before, 2, latent=latent) as s:
        snapshot = other.snapshot()
        s.restore(snapshot)
        same_sessions(s, other)
        for token in prompt(9, 3):  # beyond the page that was written over in part
            np.testing.assert_array_equal(s.step(int(token)), other.step(int(token)))
        same_sessions(s, other)
        s.restore(snapshot)
        assert s.position == after and s.nbytes == s._timeline.own_bytes


@pytest.mark.parametrize("restored", ["parent", "fork"])
def test_a_fork_is_not_written_over(cpu: k3.Model, restored: str) -> None:
    with opened(cpu, 11) as s, opened(cpu, 14, 5) as other, s.fork() as t:
        goes, stays = (s, t) if restored == "parent" else (t, s)
        goes.step(7)  # one of the pages is its own now, the others are shared
        with unchanged(stays):
            goes.restore(other.snapshot())
        same_sessions(goes, other)
        with unchanged(stays):
            goes.prefill(prompt(6, 8))
        with unchanged(goes):
            stays.prefill(prompt(6, 9))


def test_what_a_save_still_writes_is_not_written_over(cpu: k3.Model) -> None:
    with opened(cpu, 11) as s, opened(cpu, 11, 5) as other:
        held, before = s._timeline.share(), states(s._timeline)  # as a save in the background does
        s.restore(other.snapshot())
        same_states(states(held), before)
        same_states(states(s._timeline), states(other._timeline))


def test_a_snapshot_that_does_not_fit_changes_nothing(cpu: k3.Model) -> None:
    with opened(cpu, 11) as s, opened(cpu, 11, 5) as other:
        arrays = states(other._timeline)
        name = next(iter(arrays[-1]))
        arrays[-1] = {name: arrays[-1][name][1:]}  # the last one to be looked at
        with unchanged(s), pytest.raises(k3.SnapshotMismatchError):
            s._timeline.replace(11, arrays)


def test_without_memory_nothing_changes(cpu: k3.Model) -> None:
    with cpu.session(marks=False) as s, opened(cpu, 5, 5) as other:
        s._timeline = s._decoder.timeline(False, 1 << 50)  # no machine has a page of so many rows
        start = [
            {n: np.full(shape, 3, dtype) for n, (shape, dtype) in layer.shapes(0).items()}
            for layer in s._timeline.layers
        ]
        s._timeline.replace(0, start)
        for _ in range(2):
            with pytest.raises(MemoryError):
                s.restore(other.snapshot())
            assert s.position == 0 and s._timeline.own_bytes == s._timeline.nbytes
            same_states(states(s._timeline), start)


def test_pages_in_memory_of_their_own(cpu: k3.Model) -> None:
    """Large blocks come from the kernel and not from malloc; all that is done with them gives the same bits."""
    rows = 1 << 16
    with opened(cpu, 9) as small, opened(cpu, 9, rows=rows) as large:
        assert large.nbytes - small.nbytes > 8 << 20
        same_sessions(large, small)
        with large.fork() as fork:
            fork.restore(opened(cpu, 20, 5).snapshot())
            large.prefill(prompt(5, 6))
            small.prefill(prompt(5, 6))
            same_sessions(large, small)
        large.restore(small.snapshot())
        same_sessions(large, small)


def test_large_blocks_go_back(cpu: k3.Model) -> None:
    def mapped() -> int:
        found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        assert found is not None
        return int(found[1]) * 1024

    def once() -> None:
        with opened(cpu, 3, rows=1 << 16) as s:
            s.restore(s.snapshot())
            assert s.nbytes > 8 << 20

    once()
    before = mapped()
    for _ in range(20):
        once()
    assert mapped() - before < 8 << 20  # less than one of them


# ---------------------------------------------------------------- loads


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short files are read by several threads and in small blocks, as long ones are."""
    monkeypatch.setattr(snapshot_file, "_WORTH_THREADS", 0)
    monkeypatch.setattr(snapshot_file, "_NEAR", 100)


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [0, 1, 64, 70])
def test_a_load_by_threads_is_the_session(cpu: k3.Model, tmp_path: Path, n: int, latent: str) -> None:
    with opened(cpu, n, rows=64, latent=latent) as s:
        s.save(tmp_path / "a.k3s")
        with k3.Session.load(cpu, tmp_path / "a.k3s") as t:
            assert t._timeline.fills
            same(contents(t), contents(s))
            same_sessions(t, s)
            np.testing.assert_array_equal(t.step(5), s.step(5))


@pytest.mark.usefixtures("threaded")
def test_each_altered_tensor_is_found_by_threads(cpu: k3.Model, tmp_path: Path) -> None:
    file = tmp_path / "a.k3s"
    with opened(cpu, 9) as s:
        s.save(file)
    good = file.read_bytes()
    with SnapshotReader(file) as reader:
        ends = {name: len(good) - reader.size + reader._start + t.end for name, t in reader.tensors.items()}
    open_before = len(cpu.sessions)
    for name, end in ends.items():
        file.write_bytes(good[: end - 1] + bytes([good[end - 1] ^ 1]) + good[end:])
        with pytest.raises(k3.SnapshotCorruptError, match=f"{re.escape(name)} does not match its digest"):
            k3.Session.load(cpu, file)
    assert len(cpu.sessions) == open_before


@pytest.mark.usefixtures("threaded")
def test_a_file_that_is_cut_while_it_is_read(cpu: k3.Model, tmp_path: Path) -> None:
    file = tmp_path / "a.k3s"
    with opened(cpu, 9) as s:
        s.save(file)
    with SnapshotReader(file) as reader:
        file.write_bytes(file.read_bytes()[: reader._start + 10])
        wanted = [(n, [bytearray(t.nbytes)]) for n, t in reader.tensors.items()]
        with pytest.raises(k3.SnapshotCorruptError, match="the file became shorter"):
            read_all(reader, wanted, 4)


def test_buffers_of_another_size_are_refused(cpu: k3.Model) -> None:
    with opened(cpu, 3) as s, SnapshotReader(s.snapshot().to_bytes()) as reader:
        name, info = next(iter(reader.tensors.items()))
        with pytest.raises(k3.SnapshotError, match="expected the buffers' size"):
            reader.read_into(name, [bytearray(info.nbytes - 1)])


def test_a_tensor_of_another_dtype_is_refused(cpu: k3.Model, tmp_path: Path) -> None:
    with opened(cpu, 3) as s:
        snapshot = s.snapshot()
        parts = snapshot.parts()
        at = next(i for i, p in enumerate(parts) if p.name.endswith("latent"))
        shape = parts[at].shape
        parts[at] = type(parts[at])(parts[at].name, "BF16", shape, lambda: np.zeros(shape, np.uint16))
        (tmp_path / "a.k3s").write_bytes(serialize(parts, snapshot.facts))
        with pytest.raises(k3.SnapshotMismatchError) as raised:
            k3.Session.load(cpu, tmp_path / "a.k3s")
    assert raised.value.differences == {parts[at].name: ("BF16", "F32")}
