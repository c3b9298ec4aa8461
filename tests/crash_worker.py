# SPDX-License-Identifier: MIT
"""Kills processes in the middle of a save and tells, as JSON, what they left; run by test_snapshot_crash.py.

A process of its own, so that it has one thread and may fork as it likes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import k3session as k3
from k3session import snapshot_file

NAME = "chat.k3s"


class Calls:
    """Stands in the place of a module, and does something before each call of its functions."""

    def __init__(self, module: Any, before: Callable[[str], None]) -> None:
        self._module = module
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found) or name in ("fspath", "PathLike"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._before(name)
            return found(*args, **options)

        return call


def temporaries(folder: Path) -> list[str]:
    return sorted(n for n in os.listdir(folder) if n != NAME)


def child(work: Callable[[], object]) -> int:
    """Fork, and do some work in the child, which ends without ceremony."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a child must never return into the parent's code
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid


def at_every_call(folder: Path, old: k3.Session, new: k3.Session) -> list[dict[str, Any]]:
    """Kill a save before its first call of the operating system, before its second, and so on to its end."""
    states = {"old": old.snapshot().to_bytes(), "new": new.snapshot().to_bytes()}
    old.save(folder / NAME)
    found = []
    while True:
        n = len(found)
        reader, writer = os.pipe()

        def work(n: int = n, writer: int = writer) -> None:
            left = n

            def before(name: str) -> None:
                nonlocal left
                if left == 0:
                    os.write(writer, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

            snapshot_file.os = Calls(os, before)
            snapshot_file.fcntl = Calls(snapshot_file.fcntl, before)
            new.save(folder / NAME)

        pid = child(work)
        _, status = os.waitpid(pid, 0)
        os.close(writer)
        call = os.read(reader, 100).decode()
        os.close(reader)
        data = (folder / NAME).read_bytes()
        which = next((k for k, v in states.items() if v == data), "neither")
        left = temporaries(folder)
        old.save(folder / NAME)  # the next save is whole, and cleans up
        found.append(
            {
                "killed": os.WIFSIGNALED(status),
                "status": status,
                "before": call,
                "file": which,
                "left": left,
                "left_after_next": temporaries(folder),
            }
        )
        if not os.WIFSIGNALED(status):
            return found


def at_random_moments(folder: Path, sessions: list[k3.Session], count: int) -> dict[str, Any]:
    """Kill a process that saves two sessions over each other, at moments that nobody chose."""
    states = [s.snapshot().to_bytes() for s in sessions]
    rng = random.Random(1)
    seen = [0, 0, 0]
    most = 0
    sessions[0].save(folder / NAME)
    for _ in range(count):
        reader, writer = os.pipe()

        def work(writer: int = writer) -> None:
            os.write(writer, b"x")
            while True:
                for s in reversed(sessions):
                    s.save(folder / NAME)

        pid = child(work)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        time.sleep(rng.random() * 0.06)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        data = (folder / NAME).read_bytes()
        seen[states.index(data) if data in states else 2] += 1
        most = max(most, len(temporaries(folder)))
    sessions[0].save(folder / NAME)
    return {
        "first": seen[0],
        "second": seen[1],
        "neither": seen[2],
        "most_left": most,
        "left": temporaries(folder),
    }


def main(mode: str, model_folder: str, folder: str, count: str = "0") -> None:
    model = k3.Model.open(model_folder, threads=1)
    sessions = [model.session() for _ in range(2)]
    for n, session in enumerate(sessions, 1):
        session.prefill([7] * 60 * n)
    if mode == "calls":
        result: Any = at_every_call(Path(folder), *sessions)
    else:
        result = at_random_moments(Path(folder), sessions, int(count))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
