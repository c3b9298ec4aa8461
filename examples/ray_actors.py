# SPDX-License-Identifier: MIT
"""Many sessions on many machines: Ray actors with one model each, and snapshot files as what moves between them.

Each actor opens the model once.  A session has a name, and a name has a place: an actor, chosen by the name itself.
After each turn the session is saved; the file is all that it takes to go on, with another actor, when machines come or
go, or when one dies.  With several machines the folder of the files is one that all of them see.

Needs Ray: pip install ray
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import k3session as k3

try:
    import ray
    from ray.exceptions import RayActorError
except ImportError:
    sys.exit("this example needs Ray: pip install ray")

TURNS = {"ada": ["ROMEO.\n", "JULIET.\n"], "bob": ["NURSE.\n", "ROMEO.\n"], "cy": ["KING.\n", "QUEEN.\n"]}


class Host:
    """One model, and the sessions that are here just now."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.model = k3.Model.open(threads=1)
        self.sessions: dict[str, k3.Session] = {}

    def turn(self, name: str, number: int, text: str, tokens: int) -> str:
        """Take in a text, answer, and save: what the caller has been told is in the file.

        A turn that is in the file already was taken by a host that died before it could tell; its answer is there too.
        """
        session = self._session(name)
        if session.meta is not None and session.meta["turn"] == number:
            return str(session.meta["answer"])
        session.prefill(self.model.tokenizer.encode(text))
        sampling = k3.Sampling(temperature=0.7, seed=1)
        answer = "".join(r.text for r in session.generate(tokens, sampling=sampling))
        session.save(self.folder / f"{name}.k3s", meta={"turn": number, "answer": answer})
        return answer

    def let_go(self, name: str) -> None:
        """Give a session up; whoever is asked for it next reads the file."""
        session = self.sessions.pop(name, None)
        if session is not None:
            session.close()

    def _session(self, name: str) -> k3.Session:
        if name not in self.sessions:
            file = self.folder / f"{name}.k3s"
            self.sessions[name] = k3.Session.load(self.model, file) if file.exists() else self.model.session()
        return self.sessions[name]


class Router:
    """Which actor has which session.  Where one is added or lost, only its own sessions move."""

    def __init__(self, folder: str, count: int) -> None:
        self.folder = folder
        self.hosts: dict[str, Any] = {f"host-{i}": self._start() for i in range(count)}
        self.at: dict[str, str] = {}

    def _start(self) -> Any:
        return ray.remote(num_cpus=0.5)(Host).remote(self.folder)

    def place(self, name: str) -> str:
        """The host with the largest digest of host and name."""
        return max(self.hosts, key=lambda host: hashlib.sha256(f"{host}/{name}".encode()).digest())

    def turn(self, name: str, number: int, text: str, tokens: int) -> str:
        """Ask where the session is, or from now on is to be; where that one is gone, ask the next."""
        while True:
            place = self.place(name)
            before = self.at.get(name)
            try:
                asked = before
                if before is not None and before != place and before in self.hosts:
                    ray.get(self.hosts[before].let_go.remote(name))
                asked = self.at[name] = place
                return ray.get(self.hosts[place].turn.remote(name, number, text, tokens))
            except RayActorError:
                del self.hosts[asked]  # its sessions go on from their files

    def kill(self, place: str) -> None:
        """What a machine does that loses its power."""
        ray.kill(self.hosts[place], no_restart=True)


def undisturbed() -> dict[str, list[str]]:
    """The same turns in one process."""
    with tempfile.TemporaryDirectory() as folder:
        host = Host(folder)
        told = {
            name: [host.turn(name, i, text, 30) for i, text in enumerate(texts)]
            for name, texts in TURNS.items()
        }
        with host.model:
            return told


def main() -> None:
    expected = undisturbed()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        router = Router(folder, 2)
        told = {name: [router.turn(name, 0, texts[0], 30)] for name, texts in TURNS.items()}
        lost = router.at["ada"]
        router.kill(lost)
        router.hosts["host-2"] = router._start()  # another machine joins
        for name, texts in TURNS.items():
            before = router.at[name]
            told[name].append(router.turn(name, 1, texts[1], 30))
            print(f"{name}: {before} -> {router.at[name]}: {told[name][1]!r}")
    ray.shutdown()
    if told != expected or lost in router.hosts:
        sys.exit("the sessions did not go on as they would have in one process")
    print(f"{lost} was killed; every text is that of one process.")


if __name__ == "__main__":
    main()
