# SPDX-License-Identifier: MIT
"""One process of a pipeline: it takes orders from the process before it, carries them out and passes them on.

Every order comes down the line from the first process, so all of them see the same orders in the same order.  Answers
go straight to the first one.  A pass comes with what the stage before handed over; where a stage could not run it, its
error goes on in its place, so that the first process hears of every pass.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np

from k3session import env
from k3session._core import ops
from k3session.errors import K3Error
from k3session.pipeline.post import Post, world
from k3session.progress import Progress
from k3session.snapshot import MARKS, state_parts
from k3session.snapshot_file import SnapshotReader, write_file
from k3session.snapshot_parts import part_name, remove_parts
from k3session.stage import Boundary, Stage

__all__ = ["Place", "Remote", "packed", "serve", "unpacked"]

log = logging.getLogger("k3session")

#: What an order may name, beside the methods of a stage.
_OWN = ("probe", "open", "save_part", "remove_parts")
_STAGE = (
    "session",
    "share",
    "earlier",
    "load",
    "nbytes",
    "own_bytes",
    "array",
    "prepare",
    "step_bytes",
    "position",
)
#: Errors that leave a stage as it was; any other one ends the job.
_HARMLESS = (K3Error, MemoryError)
_PROBE_BYTES = 64 << 20
#: Seconds that the others have, once they were told of a failure, before the job ends.
_GRACE = 2.0


class Remote:
    """An error on its way: classes whose constructors take more than a message do not pickle by themselves."""

    __slots__ = ("fields", "kind", "message", "rank")

    def __init__(self, error: BaseException, rank: int) -> None:
        self.kind = type(error)
        self.message = str(error)
        self.fields = {k: v for k, v in vars(error).items() if not k.startswith("__")}
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.kind, self.message, self.fields, self.rank)

    def error(self) -> BaseException:
        """The exception again."""
        made = self.kind.__new__(self.kind)
        made.args = (self.message,)
        vars(made).update(self.fields)
        return made


def _remade(kind: type[BaseException], message: str, fields: dict[str, Any], rank: int) -> Remote:
    made = Remote.__new__(Remote)
    made.kind, made.message, made.fields, made.rank = kind, message, fields, rank
    return made


def packed(error: BaseException, rank: int) -> Remote:
    """An error that can be sent."""
    return Remote(error, rank)


def unpacked(value: Any) -> BaseException:
    """The error that was sent."""
    found: BaseException = value.error()
    return found


class Place:
    """What one process holds: a model with a range of layers, and its stage.

    Parameters
    ----------
    rank, size
        Which process it is, and of how many.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.stage: Stage | None = None
        self.model: Any = None

    @classmethod
    def of_stage(cls, stage: Stage) -> Place:
        """A place for a stage that is open already, and stays so."""
        made = cls(0, 1)
        made.stage = stage
        return made

    # ------------------------------------------------------------------------------------------
    # orders
    # ------------------------------------------------------------------------------------------

    def order(self, method: str, args: tuple[Any, ...]) -> Any:
        """Carry out an order by its name."""
        if method in _OWN:
            return getattr(self, method)(*args)
        if method in _STAGE:
            return getattr(self._open_stage(), method)(*args)
        raise K3Error(f"there is no order {method!r}; expected one of {', '.join(_OWN + _STAGE)}")

    def probe(self, threads: int | None) -> dict[str, Any]:
        """What this process could do: bytes per second that it reads from memory, and its instruction sets."""
        count = env.default_threads() if threads is None else threads
        block = np.ones(_PROBE_BYTES // 8, np.float64)  # written: pages that never were are one and the same
        at = block.__array_interface__["data"][0]
        best = 0.0
        for _ in range(3):
            began = time.perf_counter()
            ops.read_memory(at, block.nbytes, count)
            best = max(best, block.nbytes / (time.perf_counter() - began))
        return {
            "speed": best,
            "isa": env.instruction_set(ops.best_isa(), ops.ISAS),
            "build": ops.BUILD,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def open(self, path: str, layers: list[tuple[int, int]], options: dict[str, Any]) -> dict[str, Any]:
        """Open this process's range of layers; the fingerprint of what is in it."""
        from k3session.model import Model

        self.model = Model.open(path, layers=layers[self.rank], **options)
        self.stage = Stage(self.model)
        return {
            "fingerprint": self.model.fingerprint,
            "device": self.model.device,
            "label": self.model.placement_label,
            "threads": self.model.threads,
        }

    def save_part(
        self, path: str, number: str, name: int, marks: list[tuple[int, int]], facts: dict[str, Any]
    ) -> dict[str, Any]:
        """Write this process's layers of a session, and of its marks, beside the head `path`."""
        stage = self._open_stage()
        target = part_name(path, number, stage.layers)
        parts = state_parts(stage.states(name), stage.position(name))
        for position, mark in marks:
            parts += state_parts(stage.states(mark), position, f"{MARKS}{position}.", fixed=True)
        kept = ("k3session", "build", "fingerprint", "num_hidden_layers", "position", "latent", "weights")
        said = {key: facts[key] for key in kept} | {
            "layers": list(stage.layers),
            "part_of": os.path.basename(path),
        }
        nbytes = write_file(target, parts, said, Progress())
        with SnapshotReader(target) as reader:
            digest = reader.header_digest
        return {"file": target.name, "layers": list(stage.layers), "header_digest": digest, "bytes": nbytes}

    def remove_parts(self, path: str, keep: list[str], only: list[str]) -> None:
        """Remove parts of other saves of the head `path` from this machine."""
        remove_parts(path, keep=keep, only=only)

    def _open_stage(self) -> Stage:
        if self.stage is None:
            raise K3Error("this process of the pipeline has no model open")
        return self.stage

    # ------------------------------------------------------------------------------------------
    # passes
    # ------------------------------------------------------------------------------------------

    def forward(self, boundary: Boundary, error: Remote | None) -> tuple[Boundary, Remote | None]:
        """Run a pass, unless a stage before could not."""
        if error is None:
            try:
                return self._open_stage().forward(boundary), None
            except _HARMLESS as problem:
                error = packed(problem, self.rank)
        return replace(boundary, handed=None, embeddings=None, logits=None), error

    def commit(self, number: int, chosen: Any) -> None:
        """Commit a pass."""
        self._open_stage().commit(number, chosen)

    def abort(self, numbers: list[int]) -> None:
        """Forget passes."""
        for number in numbers:
            self._open_stage().abort(number)

    def drop(self, names: list[int]) -> None:
        """Let go of sessions."""
        self._open_stage().drop(*names)

    def cancel(self, numbers: list[int]) -> None:
        """From the thread of the post: break off passes."""
        stage = self.stage
        for number in numbers if stage is not None else ():
            stage.cancel(number)  # type: ignore[union-attr]

    def close(self) -> None:
        """Let go of the model."""
        self.stage = None
        model, self.model = self.model, None
        if model is not None:
            model.close()


def serve(comm: Any = None) -> bool:
    """Be a stage of a pipeline, in every process but the first one.

    Returns when the first process closes its `PipelineModel`, or ends.

    Parameters
    ----------
    comm
        The communicator; None is that of all processes of the job.

    Returns
    -------
    bool
        False at once in the first process, whose program goes on; True in the others, when there is no more to do.

    Examples
    --------
    A program that is started with ``mpiexec -n 4 python program.py``:

    >>> import k3session as k3
    >>> from k3session import pipeline
    >>> if not pipeline.serve():                                              # doctest: +SKIP
    ...     with pipeline.PipelineModel.open("Kimi-K3/") as model, model.session() as s:
    ...         logits = s.prefill([1, 2, 3])
    """
    comm = world() if comm is None else comm
    rank = comm.Get_rank()
    if rank == 0:
        return False
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    place = Place(rank, comm.Get_size())

    def deliver(source: int, message: Any) -> None:
        if message[0] == "cancel":
            place.cancel(message[1])
        else:
            inbox.put(message)

    post = Post(comm, deliver, lambda problem: inbox.put(("broken", problem)))
    try:
        _work(place, post, inbox)
    except BaseException as problem:  # noqa: BLE001 - told to all, and then the job ends
        _give_up(post, problem)
    place.close()
    post.close()
    return True


def _work(place: Place, post: Post, inbox: queue.SimpleQueue[Any]) -> None:
    """Carry out orders until the last one."""
    behind = place.rank + 1 if place.rank + 1 < place.size else 0
    while True:
        message = inbox.get()
        kind = message[0]
        if kind == "pass":
            boundary, error = place.forward(message[1], message[2])
            post.send(behind, ("pass" if behind else "result", boundary, error))
            continue
        if kind == "broken":
            raise message[1]
        if kind == "lost":
            log.error("%s", message[1])
            continue
        mine = message
        if kind == "call" and message[2] is None:  # what is for this process alone goes no further
            mine = (*message[:4], message[4][place.rank])
            message[4][place.rank] = None
        if behind:
            post.send(behind, message)
        if kind == "end":
            return
        if kind == "call":
            _, number, to, method, args = mine
            if to is None or to == place.rank:
                post.send(0, ("reply", number, *_answer(place, method, args)))
        else:
            getattr(place, kind)(*message[1:])


def _answer(place: Place, method: str, args: tuple[Any, ...]) -> tuple[int, bool, Any]:
    try:
        return place.rank, True, place.order(method, args)
    except (*_HARMLESS, ValueError, OSError) as problem:
        return place.rank, False, packed(problem, place.rank)


def _give_up(post: Post, problem: BaseException) -> None:
    """Say to all what has happened, and end the job."""
    where = f"rank {post.rank} (process {os.getpid()} on {socket.gethostname()})"
    text = f"{where} failed: {''.join(traceback.format_exception(problem)).rstrip()}"
    for rank in range(post.size):
        if rank != post.rank:
            post.send(rank, ("lost", text))
    sys.stderr.write(f"k3session.pipeline: {text}\n")
    sys.stderr.flush()
    post.close()
    time.sleep(_GRACE)
    post.abort(1)
