# SPDX-License-Identifier: MIT
"""Saving through kills, full disks and failing devices: the file is the old one or the new one, whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_access import counts
from crash_worker import NAME, Calls
from session_tools import TESTS, environment, prompt, run, same_sessions, unchanged

import k3session as k3
from k3session import snapshot_file
from k3session.snapshot import verify_file


@pytest.fixture
def session(model: k3.Model) -> Iterator[k3.Session]:
    with model.session() as opened:
        opened.prefill(prompt(60))
        yield opened


@pytest.fixture
def old(model: k3.Model, tmp_path: Path) -> bytes:
    """The bytes of a snapshot that lies at the place to be saved to."""
    with model.session() as first:
        first.prefill(prompt(20))
        first.save(tmp_path / NAME)
    return (tmp_path / NAME).read_bytes()


def worker(*arguments: object) -> Any:
    command = [sys.executable, str(TESTS / "crash_worker.py"), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


# Kills.


def test_killed_before_every_call_of_the_operating_system(nano: Path, tmp_path: Path) -> None:
    found = worker("calls", nano, tmp_path)
    assert not found[-1]["killed"] and found[-1]["status"] == 0 and found[-1]["file"] == "new"
    killed = found[:-1]
    assert all(f["killed"] for f in killed)
    calls = [f["before"] for f in killed]
    # All that matters was among them: of a save of this size there are some 20 writes.
    assert calls.count("write") > 10 and calls.count("fsync") == 2 and calls.count("rename") == 1
    renamed = calls.index("rename")
    assert [f["file"] for f in killed] == ["old"] * (renamed + 1) + ["new"] * (len(killed) - renamed - 1)
    created = calls.index("flock")  # the first thing done with the new file
    assert [len(f["left"]) for f in killed[:created]] == [0] * created
    assert [len(f["left"]) for f in killed[created : renamed + 1]] == [1] * (renamed + 1 - created)
    assert all(f["left"] == [] for f in killed[renamed + 1 :])
    assert all(f["left_after_next"] == [] for f in found)


def test_killed_at_random_moments(nano: Path, tmp_path: Path) -> None:
    count = counts(30, 200)
    found = worker("moments", nano, tmp_path, count)
    assert found["neither"] == 0 and found["first"] + found["second"] == count
    assert found["first"] and found["second"], "the kills came too early to tell anything"
    assert found["most_left"] <= 1 and found["left"] == []


# The order of things.


def test_the_order_of_calls(
    session: k3.Session, old: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(snapshot_file, "os", Calls(os, calls.append))
    session.save(tmp_path / NAME)
    kept = [c for c in calls if c in ("write", "fsync", "rename", "unlink")]
    assert kept == ["write"] * kept.count("write") + ["fsync", "rename", "fsync"]
    assert kept.count("write") == 14  # the header, and one for each of 13 tensors


TRACED = """
import sys
import k3session as k3
with k3.Model.open(sys.argv[1], threads=1) as model, model.session() as session:
    session.prefill([1, 2, 3])
    session.save(sys.argv[2])
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_order_of_system_calls(nano: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / NAME).write_text("old")
    log = tmp_path / "trace"
    wanted = "openat,open,creat,write,pwrite64,writev,ftruncate,fsync,fdatasync,"
    wanted += "rename,renameat,renameat2,unlink,unlinkat"
    command = ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={wanted}"]
    command += [sys.executable, "-c", TRACED, str(nano), str(folder / NAME)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    if "ptrace" in done.stderr or "PTRACE" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in log.read_text().splitlines() if str(folder) in line]
    temporary = rf"{re.escape(str(folder))}/\.{re.escape(NAME)}\.[0-9a-f]{{8}}\.k3tmp"
    steps = []
    for line in lines:
        call = re.search(r"\b(\w+)\(", line)
        assert call and not re.search(r"= -1 \w+", line), line
        if re.search(rf'"{temporary}", O_WRONLY\|O_CREAT\|O_EXCL\|O_NOFOLLOW\|O_CLOEXEC, 0600', line):
            steps.append("create")
        elif re.search(rf"write\(\d+<{temporary}>", line):
            steps.append("write")
        elif re.search(rf"fsync\(\d+<{temporary}>\)", line):
            steps.append("fsync file")
        elif re.search(rf'rename\w*\(.*"{temporary}",.* "{re.escape(str(folder / NAME))}"', line):
            steps.append("rename")
        elif re.search(rf"fsync\(\d+<{re.escape(str(folder))}>\)", line):
            steps.append("fsync folder")
        else:
            assert "O_DIRECTORY" in line or "O_RDONLY" in line, f"an unexpected call: {line}"
    count = steps.count("write")
    assert count > 10 and steps == ["create", *["write"] * count, "fsync file", "rename", "fsync folder"]


# Disks that are full or fail.


class Failing(Calls):
    """`os`, of which one call fails: the n-th of its name."""

    def __init__(self, name: str, n: int, code: int) -> None:
        self.left = n
        super().__init__(os, lambda called: self._count(called, name, code))

    def _count(self, called: str, name: str, code: int) -> None:
        if called == name:
            self.left -= 1
            if self.left == 0:
                raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("n", [1, 2, 7, 14])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails(
    session: k3.Session, old: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, code: int
) -> None:
    words = f"{re.escape(os.strerror(code))}.*; a file of that name is as it was"
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_file, "os", Failing("write", n, code))
        with unchanged(session), pytest.raises(k3.SnapshotError, match=words) as error:
            session.save(tmp_path / NAME)
        assert str(tmp_path / NAME) in str(error.value) and isinstance(error.value, OSError)
        assert ("no space is left" in str(error.value)) == (code != errno.EIO)
    assert (tmp_path / NAME).read_bytes() == old and os.listdir(tmp_path) == [NAME]
    session.save(tmp_path / NAME)
    assert verify_file(tmp_path / NAME)["ok"] and os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("call", "n"), [("open", 1), ("open", 2), ("fstat", 1), ("fsync", 1), ("rename", 1)], ids=str
)
def test_other_calls_that_fail(
    session: k3.Session, old: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, n: int
) -> None:
    monkeypatch.setattr(snapshot_file, "os", Failing(call, n, errno.EIO))
    with pytest.raises(k3.SnapshotError, match="a file of that name is as it was"):
        session.save(tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == old and os.listdir(tmp_path) == [NAME]


def test_a_folder_that_cannot_be_flushed(
    session: k3.Session, old: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_file, "os", Failing("fsync", 2, errno.EIO))
    with pytest.raises(
        k3.SnapshotError, match="the snapshot is in place, but the folder could not be flushed"
    ):
        session.save(tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == session.snapshot().to_bytes() and os.listdir(tmp_path) == [NAME]


def test_short_writes_are_continued(
    session: k3.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        def __getattr__(self, name: str) -> Any:
            return (lambda fd, data: os.write(fd, data[:1000])) if name == "write" else getattr(os, name)

    monkeypatch.setattr(snapshot_file, "os", Short())
    session.save(tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == session.snapshot().to_bytes()


LIMITED = """
import os, resource, sys
from pathlib import Path
import k3session as k3
file = Path(sys.argv[2]) / "a.k3s"
with k3.Model.open(sys.argv[1], threads=1) as model, model.session() as session:
    session.prefill([1, 2, 3])
    session.save(file)
    old = file.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) - 1, limit[1]))
    try:
        session.save(file)
    except k3.SnapshotError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert file.read_bytes() == old and os.listdir(sys.argv[2]) == ["a.k3s"]
    session.save(file)
"""


def test_the_kernel_refuses_a_write(nano: Path, tmp_path: Path) -> None:
    said = run(LIMITED, nano, tmp_path)
    assert "could not be written: File too large; a file of that name is as it was" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk(session: k3.Session, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        session.save(disk / NAME)
        before = (disk / NAME).read_bytes()
        assert len(before) < 80 * 1024 < 2 * len(before)
        session.step(1)
        with (
            unchanged(session),
            pytest.raises(k3.SnapshotError, match=r"no space is left .*; a file of that name is as it was"),
        ):
            session.save(disk / NAME)
        assert (disk / NAME).read_bytes() == before and os.listdir(disk) == [NAME]
        os.unlink(disk / NAME)
        session.save(disk / NAME)
        assert verify_file(disk / NAME)["ok"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Places.


def test_places_that_are_refused(session: k3.Session, old: bytes, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    cases = {
        "nothing/a.k3s": "could not be written: the folder does not exist",
        f"{NAME}/a.k3s": "could not be written: the folder does not exist",
        "x" * 250: "File name too long",
        "pipe": "is no ordinary file; expected the name of a snapshot file",
        "folder": "is a folder; expected the name of a snapshot file",
        ".": "is a folder",
    }
    for name, words in cases.items():
        with pytest.raises(k3.SnapshotError, match=words):
            session.save(tmp_path / name)
    with pytest.raises(k3.SnapshotError, match="not a path: embedded null"):
        session.save("a\0b")
    with pytest.raises(TypeError):
        session.save(None)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == [NAME, "folder", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / NAME).read_bytes() == old


def test_a_link_stays_a_link(session: k3.Session, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.k3s").symlink_to("real/a.k3s")
    for _ in range(2):
        session.save(tmp_path / "link.k3s")
        assert (tmp_path / "link.k3s").is_symlink() and os.listdir(tmp_path / "real") == ["a.k3s"]
        assert (tmp_path / "real" / "a.k3s").read_bytes() == session.snapshot().to_bytes()


def test_a_snapshot_is_its_owners_alone(session: k3.Session, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / NAME).touch(mode=0o666)
        session.save(tmp_path / NAME)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def test_a_path_in_the_current_folder(
    session: k3.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session.save("a.k3s")
    assert k3.Snapshot.open("a.k3s").position == 60


def test_only_what_an_earlier_save_left_is_removed(session: k3.Session, tmp_path: Path) -> None:
    left = f".{NAME}.0123abcd.k3tmp"
    other = [
        f".{NAME}.0123abcd.k3tmp.bak",
        f".{NAME}.k3tmp",
        ".other.k3s.0123abcd.k3tmp",
        f".{NAME}.tmp",
        f"{NAME}.x",
    ]
    for name in [left, *other]:
        (tmp_path / name).write_text("x")
    session.save(tmp_path / NAME)
    assert sorted(os.listdir(tmp_path)) == sorted([NAME, *other])


# Several at once.


def test_saves_to_one_place_from_several_threads(model: k3.Model, tmp_path: Path) -> None:
    states, problems = [], []
    sessions = [model.session() for _ in range(4)]
    for i, s in enumerate(sessions):
        s.prefill(prompt(5 + i))
        states.append(s.snapshot().to_bytes())
    running = threading.Event()

    def save(s: k3.Session) -> None:
        try:
            for _ in range(counts(15, 200)):
                s.save(tmp_path / NAME)
        except Exception as error:  # noqa: BLE001 - told by the test
            problems.append(error)

    def load() -> None:
        try:
            while not running.is_set():
                with k3.Session.load(model, tmp_path / NAME) as loaded:
                    # What was there at one moment, whole, while it is replaced all the time.
                    assert loaded.snapshot().to_bytes() in states
        except Exception as error:  # noqa: BLE001 - told by the test
            problems.append(error)

    sessions[0].save(tmp_path / NAME)
    reader = threading.Thread(target=load)
    writers = [threading.Thread(target=save, args=(s,)) for s in sessions]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    running.set()
    reader.join()
    assert not problems, problems
    assert (tmp_path / NAME).read_bytes() in states and os.listdir(tmp_path) == [NAME]
    for s in sessions:
        s.close()


def test_a_save_in_progress_is_not_taken_for_a_leftover(
    session: k3.Session, model: k3.Model, tmp_path: Path
) -> None:
    with model.session() as other:
        other.prefill(prompt(7))
        inner: list[int] = []

        def during(event: str, done: int, total: int) -> None:
            if not inner:
                inner.append(other.save(tmp_path / NAME))  # another session, to the same place
                assert len(os.listdir(tmp_path)) == 2

        session.save(tmp_path / NAME, progress=during)
        assert inner and os.listdir(tmp_path) == [NAME]
        with k3.Session.load(model, tmp_path / NAME) as loaded:
            same_sessions(loaded, session)
