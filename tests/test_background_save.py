# SPDX-License-Identifier: MIT
"""Saving in the background: the file holds the moment of the call, in order, and nothing is lost or left behind."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_tools import run_emulated
from session_tools import prompt, resident, run, same_sessions

import k3session as k3
from k3session import saving


class Gate:
    """A ``progress=`` that holds a save at its first report until it is let go."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._open.wait(30)

    def wait(self) -> None:
        assert self.reached.wait(30)

    def open(self) -> None:
        self._open.set()


def busy(session: k3.Session) -> None:
    """Everything that could spoil a state that is only shared."""
    session.step(1)
    session.prefill(prompt(150, seed=3))
    session.score(prompt(40))
    session.rewind(4)
    session.prefill(prompt(70, seed=4))
    session.restore(session.snapshot())
    session.step(2)


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_the_file_holds_the_tokens_of_the_call(model: k3.Model, tmp_path: Path, latent: str, n: int) -> None:
    text = prompt(n)
    with model.session(latent=latent) as session, model.session(latent=latent) as plain:
        session.prefill(text)
        plain.prefill(text)
        gate = Gate()
        job = session.save(tmp_path / "b.k3s", wait=False, meta={"a": 1}, progress=gate)
        assert (job.position, job.done, job.exception) == (n, False, None)
        gate.wait()
        busy(session)
        gate.open()
        size = job.result(30)
        assert size == (tmp_path / "b.k3s").stat().st_size == plain.save(tmp_path / "p.k3s", meta={"a": 1})
        assert (tmp_path / "b.k3s").read_bytes() == (tmp_path / "p.k3s").read_bytes()
        assert job.done and job.exception is None
        with k3.Session.load(model, tmp_path / "b.k3s") as loaded:
            loaded.step(5)
            plain.step(5)
            assert loaded.logits is not None and (loaded.logits == plain.logits).all()


def test_going_on_is_not_disturbed(model: k3.Model, tmp_path: Path) -> None:
    with model.session() as session, model.session() as plain:
        for s in (session, plain):
            s.prefill(prompt(70))
        jobs = []
        for i in range(12):
            jobs.append(session.save(tmp_path / f"{i % 3}.k3s", wait=False))
            for s in (session, plain):
                s.step(i)
        same_sessions(session, plain)
        assert [j.position for j in jobs] == list(range(70, 82))
        for job in jobs:
            job.result(30)
        for i in range(3):
            with k3.Session.load(model, tmp_path / f"{i}.k3s") as loaded:
                assert loaded.position == 79 + i


def test_saves_to_one_file_are_in_the_order_of_the_calls(model: k3.Model, tmp_path: Path) -> None:
    """Also where another session, a save that waits, or a link to the same file is in between."""
    path, link = tmp_path / "x.k3s", tmp_path / "link.k3s"
    link.symlink_to(path)
    with model.session() as one, model.session() as two:
        one.prefill(prompt(3))
        two.prefill(prompt(5))
        first = Gate()
        jobs = [one.save(path, wait=False, progress=first)]
        first.wait()
        jobs.append(two.save(link, wait=False))
        one.step(1)
        jobs.append(one.save(path, wait=False))
        waiting = threading.Thread(target=two.save, args=(path,))
        waiting.start()
        time.sleep(0.05)
        assert not any(j.done for j in jobs) and not path.exists() and waiting.is_alive()
        another = one.save(tmp_path / "y.k3s", wait=False)
        assert another.result(30) > 0, "another file waits for nobody"
        first.open()
        waiting.join(30)
        assert all(j.done for j in jobs)
        with k3.Session.load(model, path) as loaded:
            assert loaded.position == 5, "the last call wins"
    assert saving._latest == {}


def test_a_save_inside_a_save_waits_for_nobody_and_keeps_the_order(model: k3.Model, tmp_path: Path) -> None:
    """From a ``progress=`` function; a save in the background that begins there still comes after the outer one."""
    path = tmp_path / "x.k3s"
    jobs: list[k3.SaveJob] = []
    with model.session() as outer, model.session() as inner:
        outer.prefill(prompt(3))
        inner.prefill(prompt(5))

        def during(*_: object) -> None:
            if not jobs:
                inner.save(path)
                jobs.append(inner.save(path, wait=False))
                time.sleep(0.05)
                assert not jobs[0].done

        outer.save(path, progress=during)
        jobs[0].result(30)
        with k3.Session.load(model, path) as loaded:
            assert loaded.position == 5
        inside = inner.save(path, wait=False, progress=lambda *_: outer.save(path))
        assert inside.result(30) > 0, "the thread that writes does not wait for itself"


def test_errors_surface_when_the_result_is_asked_for(model: k3.Model, tmp_path: Path) -> None:
    with model.session() as session:
        session.prefill(prompt(3))
        job = session.save(tmp_path / "no" / "x.k3s", wait=False)
        for _ in range(2):
            with pytest.raises(k3.SnapshotError, match="the folder does not exist"):
                job.result(30)
        assert isinstance(job.exception, k3.SnapshotError) and "failed" in repr(job)
        session.step(1)
        (tmp_path / "x.k3s").write_bytes(b"old")

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        job = session.save(tmp_path / "x.k3s", wait=False, progress=broken)
        with pytest.raises(ZeroDivisionError):
            job.result(30)
        assert (tmp_path / "x.k3s").read_bytes() == b"old" and os.listdir(tmp_path) == ["x.k3s"]
        with pytest.raises(k3.SnapshotError, match="meta must be what JSON can hold"):
            session.save(tmp_path / "x.k3s", wait=False, meta=object())


def test_errors_that_nobody_asked_for_are_in_the_log(
    model: k3.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "k3session"):
        with model.session() as session:
            session.prefill(prompt(3))
            session.save(tmp_path / "unseen" / "x.k3s", wait=False)
            seen = session.save(tmp_path / "seen" / "x.k3s", wait=False)
            with pytest.raises(k3.SnapshotError):
                seen.result(30)
            for _ in range(5):
                session.save(tmp_path / "good.k3s", wait=False)
        (record,) = caplog.records
        assert "a save in the background failed" in record.message and "unseen" in record.message


def test_close_waits_and_others_are_refused_meanwhile(model: k3.Model, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(prompt(3))
    gate = Gate()
    job = session.save(tmp_path / "x.k3s", wait=False, progress=gate)
    gate.wait()
    closing = threading.Thread(target=session.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive() and not session.is_closed
    with pytest.raises(k3.SessionBusyError):
        session.step(1)
    gate.open()
    closing.join(30)
    assert session.is_closed and job.done and job.result() > 0


def test_leaving_the_blocks_leaves_a_whole_file(nano: Path, tmp_path: Path) -> None:
    with k3.Model.open(nano, threads=1) as own:
        with own.session() as session:
            session.prefill(prompt(40))
            session.save(tmp_path / "x.k3s", wait=False)
        with k3.Session.load(own, tmp_path / "x.k3s") as loaded:
            assert loaded.position == 40
        session = own.session()
        session.prefill(prompt(50))
        session.save(tmp_path / "x.k3s", wait=False)
    assert k3.Snapshot.open(tmp_path / "x.k3s").position == 50


def test_result_within_a_time(model: k3.Model, tmp_path: Path) -> None:
    with model.session() as session:
        session.prefill(prompt(3))
        gate = Gate()
        job = session.save(tmp_path / "x.k3s", wait=False, progress=gate)
        with pytest.raises(TimeoutError, match=r"still goes on after 0\.01 seconds"):
            job.result(0.01)
        assert "goes on" in repr(job)
        gate.open()
        job.result(30)
        assert "done" in repr(job)


def held_by(call: Callable[[], Any]) -> int:
    gc.collect()
    before = resident()
    call()
    gc.collect()
    return resident() - before


def test_nothing_is_kept_after_the_end(model: k3.Model, tmp_path: Path) -> None:
    """Neither by a job that ended well nor by one that failed, as long as the caller may hold it."""
    with model.session(marks=False) as session:
        session.prefill(prompt(70))
        own = session._timeline.own_bytes
        for path in (tmp_path / "x.k3s", tmp_path / "no" / "x.k3s"):
            gate = Gate()
            job = session.save(path, wait=False, progress=gate)
            if path.parent.exists():
                gate.wait()
                assert session._timeline.own_bytes < own, "shared as long as the save goes on"
            gate.open()
            job._done.wait(30)
            assert session._timeline.own_bytes == own, path
    other = model.session()
    other.prefill(prompt(3))
    job = other.save(tmp_path / "x.k3s", wait=False)
    alive = weakref.ref(other)
    other.close()
    del other
    assert job.done and alive() is None


def test_memory_of_many_saves_comes_back(model: k3.Model, tmp_path: Path) -> None:
    with model.session() as session:
        session.prefill(prompt(70))

        def many() -> None:
            for i in range(150):
                session.save(tmp_path / "x.k3s", wait=False)
                session.step(i % 97)
            session.save(tmp_path / "x.k3s")

        many()
        assert held_by(many) < 4 << 20
        session.save(tmp_path / "x.k3s")
        assert len(session._jobs) < 3
    assert not any(t.name == "k3session-save" for t in threading.enumerate())


def test_the_end_of_the_interpreter_waits(nano: Path, tmp_path: Path) -> None:
    code = """
import sys
import k3session as k3
model = k3.Model.open(sys.argv[1], threads=1)
session = model.session()
session.prefill(list(range(90)))
session.save(sys.argv[2], wait=False, progress=lambda *_: __import__("time").sleep(0.002))
session.step(1)
"""
    run(code, nano, tmp_path / "x.k3s")
    assert k3.Snapshot.open(tmp_path / "x.k3s").position == 90


def test_fork_of_the_process_while_a_save_goes_on(nano: Path, tmp_path: Path) -> None:
    """The child has no such thread: it is told so instead of waiting for ever, and can save on its own."""
    code = """
import os, sys, threading
import k3session as k3
path = sys.argv[2]
go, reached = threading.Event(), threading.Event()
def hold(*_):
    reached.set()
    go.wait(30)
with k3.Model.open(sys.argv[1], threads=1) as model, model.session() as session:
    session.prefill([1, 2, 3])
    job = session.save(path, wait=False, progress=hold)
    reached.wait(30)
    pid = os.fork()
    if pid == 0:
        try:
            job.result()
        except k3.K3Error as error:
            assert "forked" in str(error), error
        session.step(4)
        session.save(path + ".child")
        session.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    go.set()
    job.result()
print(k3.Snapshot.open(path).position, k3.Snapshot.open(path + ".child").position)
"""
    assert run(code, nano, tmp_path / "x.k3s") == "3 4\n"


def test_ctrl_c_while_a_save_waits_for_another_one(nano: Path, tmp_path: Path) -> None:
    """The one that waited is given up, and the next one still comes after the first."""
    code = """
import os, signal, sys, threading, time
import k3session as k3
path = sys.argv[2]
go, reached = threading.Event(), threading.Event()
def hold(*_):
    reached.set()
    go.wait(30)
with k3.Model.open(sys.argv[1], threads=1) as model, model.session() as session:
    session.prefill([1, 2, 3])
    job = session.save(path, wait=False, progress=hold)
    reached.wait(30)
    session.step(4)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        session.save(path)
    except KeyboardInterrupt:
        print("interrupted")
    session.step(5)
    last = session.save(path, wait=False)
    time.sleep(0.1)
    assert not last.done
    go.set()
    job.result(), last.result()
print(k3.Snapshot.open(path).position)
"""
    assert run(code, nano, tmp_path / "x.k3s") == "interrupted\n5\n"


def test_a_save_in_the_background_on_a_gpu(nano: Path, tmp_path: Path) -> None:
    """State that lives on a device is read by the thread that writes, while passes run."""
    code = """
import pathlib, sys
import k3session as k3
with k3.Model.open(sys.argv[1], device="cuda") as model, model.session() as a, model.session() as b:
    for s in (a, b):
        s.prefill([1, 2, 3])
    job = a.save(sys.argv[2], wait=False)
    for i in range(4):
        a.step(i)
    job.result()
    b.save(sys.argv[2] + ".b")
files = [pathlib.Path(sys.argv[2] + end).read_bytes() for end in ("", ".b")]
print(files[0] == files[1])
"""
    assert run_emulated(code, nano, tmp_path / "x.k3s") == "True\n"
