# SPDX-License-Identifier: MIT
"""Snapshots in parts: each range of layers in a file, read as one, made one, and never a mixture of two saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_tools import contents, prompt, same, same_sessions
from test_stage import opened

import k3session as k3
from k3session.cli import main
from k3session.pipeline import PipelineModel, place, session
from k3session.snapshot import diff_files, inspect_file, verify_file
from k3session.snapshot_parts import merge


@pytest.fixture(scope="module")
def cut(nano: Path) -> Iterator[PipelineModel]:
    with opened(nano, [2, 5]) as model:
        yield model


def parts_of(head: Path) -> list[str]:
    return sorted(p.name for p in head.parent.iterdir() if p.name.endswith(".part"))


@pytest.mark.parametrize("cuts", [[1], [6], [2, 5], [1, 2, 3, 4, 5, 6]], ids=str)
@pytest.mark.parametrize(
    ("n", "latent", "tokens"), [(0, "fp32", True), (70, "bf16", True), (9, "fp32", False)]
)
def test_merged_it_is_the_file_that_one_save_writes(
    nano: Path, model: k3.Model, tmp_path: Path, cuts: list[int], n: int, latent: str, tokens: bool
) -> None:
    with (
        opened(nano, cuts) as cut,
        cut.session(latent=latent, marks=k3.Marks(every=20)) as s,
        model.session(latent=latent, marks=k3.Marks(every=20)) as one,
    ):
        for each in (s, one):
            for at in range(0, n, 10):
                each.prefill(prompt(n)[at : at + 10])
        how = {"meta": {"a": 1}, "include_tokens": tokens, "marks": True}
        size = s.save(tmp_path / "s.k3s", parts=True, **how)
        one.save(tmp_path / "one.k3s", **how)
    files = parts_of(tmp_path / "s.k3s")
    assert [f.split(".")[-2] for f in files] == [f"{a}-{b}" for a, b in cut.ranges]
    assert size == sum((tmp_path / f).stat().st_size for f in ["s.k3s", *files])
    assert merge(tmp_path / "s.k3s", tmp_path / "merged.k3s") == (tmp_path / "one.k3s").stat().st_size
    assert (tmp_path / "merged.k3s").read_bytes() == (tmp_path / "one.k3s").read_bytes()


def test_it_loads_in_any_other_cut(nano: Path, cut: PipelineModel, model: k3.Model, tmp_path: Path) -> None:
    with cut.session() as s:
        s.prefill(prompt(60))
        s.save(tmp_path / "s.k3s", parts=True, meta="here")
        with opened(nano, [3, 6]) as other:
            for where in (model, other, cut):
                with k3.Session.load(where, tmp_path / "s.k3s") as t:
                    assert (t.resume, t.meta) == ("exact", "here")
                    with s.fork() as u:
                        same({k: v for k, v in contents(t).items() if k != "facts"},
                             {k: v for k, v in contents(u).items() if k != "facts"})  # fmt: skip
                        assert np.array_equal(t.step(5), u.step(5))
        snap = k3.Snapshot.open(tmp_path / "s.k3s")
        assert snap.position == 60 and "parts" not in snap.facts
        s.step(1)
        s.restore(snap)
        assert s.position == 60


def test_what_looks_at_files_looks_at_parts(cut: PipelineModel, tmp_path: Path) -> None:
    head = tmp_path / "s.k3s"
    with cut.session() as s:
        s.prefill(prompt(12))
        s.save(head, parts=True)
        s.save(tmp_path / "one.k3s")
    whole = inspect_file(tmp_path / "one.k3s")
    found = inspect_file(head)
    assert found["tensors"] == whole["tensors"] and list(found["tensors"]) == list(whole["tensors"])
    assert verify_file(head)["tensors"] == len(whole["tensors"])
    assert diff_files(head, tmp_path / "one.k3s") == {}
    part = tmp_path / parts_of(head)[1]
    alone = inspect_file(part)
    assert (alone["layers"], alone["part_of"], alone["tokens"]) == ([2, 5], "s.k3s", None)
    assert {name.split(".")[1] for name in alone["tensors"]} == {"2", "3", "4"}
    assert verify_file(part)["ok"]


def test_damage_is_found(cut: PipelineModel, model: k3.Model, tmp_path: Path) -> None:
    head = tmp_path / "s.k3s"
    with cut.session() as s:
        s.prefill(prompt(12))
        s.save(head, parts=True)
        s.save(tmp_path / "other.k3s", parts=True)
        s.save(tmp_path / "one.k3s")
    mine, theirs = [], []
    for name in parts_of(head):
        (mine if name.startswith("s.k3s") else theirs).append(tmp_path / name)
    with pytest.raises(
        k3.SnapshotMismatchError, match=r"holds layers \[2, 5\] of the snapshot 's.k3s'; open"
    ):
        k3.Session.load(model, mine[1])
    with pytest.raises(k3.SnapshotError, match="is a snapshot in one file; expected no parts"):
        merge(tmp_path / "one.k3s", tmp_path / "out.k3s", mine)
    with pytest.raises(k3.SnapshotError, match=r"is no part of it; expected s\.k3s\."):
        merge(head, tmp_path / "out.k3s", theirs[:1])
    good = mine[2].read_bytes()
    mine[2].write_bytes(theirs[2].read_bytes())
    with pytest.raises(k3.SnapshotCorruptError, match="is not the part that was written with it"):
        k3.Session.load(model, head)
    mine[2].write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(k3.SnapshotCorruptError, match=r"does not match its digest"):
        k3.Session.load(model, head)
    with pytest.raises(k3.SnapshotCorruptError, match=r"altered: layers\.6"):
        verify_file(head)
    mine[2].write_bytes(good[:-100])
    with pytest.raises(k3.SnapshotCorruptError):
        k3.Session.load(model, head)
    mine[2].unlink()
    with pytest.raises(k3.SnapshotError, match=r"its part s\.k3s\..*, with layers 5 to 6, is not there"):
        k3.Session.load(model, head)
    assert not (tmp_path / "out.k3s").exists()


def test_a_save_that_fails_leaves_the_old_snapshot(
    cut: PipelineModel, model: k3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that a save in parts writes is the one that cannot be written, in turn."""
    head = tmp_path / "s.k3s"
    with cut.session() as s:
        s.prefill(prompt(20))
        s.save(head, parts=True)
        before = contents(s)
        old = parts_of(head)
        for fails in range(4):
            s.step(7)
            left = fails
            for module in (place, session):
                write = module.write_file

                def failing(*args: Any, write: Any = write) -> int:
                    nonlocal left
                    left -= 1
                    if left == -1:
                        raise k3.SnapshotError("no space is left")
                    return int(write(*args))

                monkeypatch.setattr(module, "write_file", failing)
            with pytest.raises(k3.SnapshotError, match="no space is left"):
                s.save(head, parts=True)
            monkeypatch.undo()
            assert parts_of(head) == old, fails
            with k3.Session.load(model, head) as t:
                assert np.array_equal(t.logits, before["logits"]) and t.position == 20
        s.save(head, parts=True)
        assert len(parts_of(head)) == 3 and not set(parts_of(head)) & set(old)
        with k3.Session.load(model, head) as t:
            assert t.position == 24


def test_a_save_in_the_background(cut: PipelineModel, model: k3.Model, tmp_path: Path) -> None:
    with cut.session() as s, model.session() as t:
        for each in (s, t):
            each.prefill(prompt(30))
        jobs = [s.save(tmp_path / "s.k3s", parts=parts, wait=False) for parts in (True, False, True)]
        for i in range(20):
            s.step(i)
        assert all(job.result() > 0 and job.position == 30 for job in jobs)
        with k3.Session.load(model, tmp_path / "s.k3s") as u:
            same_sessions(u, t)


def test_the_command(cut: PipelineModel, model: k3.Model, tmp_path: Path, capsys: Any) -> None:
    with cut.session() as s:
        s.prefill(prompt(12))
        s.save(tmp_path / "s.k3s", parts=True)
        expected = s.logits
    away = tmp_path / "away"
    away.mkdir()
    moved = [shutil.move(tmp_path / name, away / name) for name in parts_of(tmp_path / "s.k3s")]
    arguments = ["snapshot", "merge", str(tmp_path / "s.k3s")]
    assert main([*arguments, "-o", str(tmp_path / "whole.k3s")]) == 1
    assert "is not there" in capsys.readouterr().err
    assert main([*arguments, *map(str, moved), "-o", str(tmp_path / "whole.k3s"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": str(tmp_path / "whole.k3s"), "bytes": (tmp_path / "whole.k3s").stat().st_size}
    with k3.Session.load(model, tmp_path / "whole.k3s") as t:
        assert np.array_equal(t.logits, expected)
