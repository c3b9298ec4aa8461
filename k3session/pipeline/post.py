# SPDX-License-Identifier: MIT
"""The messages of one process of a pipeline: one thread of its own talks to MPI, and so nobody else ever waits in it.

MPI libraries wait by turning in a loop, which takes a whole core from those who compute on the same machine.  This
thread asks whether a message has come and sleeps in between: some microseconds while there is traffic, up to a
millisecond when there has been none for a while.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Post", "world"]

_TAG = 3
_SHORT, _LONG, _SLOWER = 20e-6, 1e-3, 1.15
#: Seconds that a process waits for its last messages to go out.
_FLUSH = 5.0


def world() -> Any:
    """The communicator of all processes of the job.

    Raises
    ------
    ImportError
        mpi4py or an MPI library is not installed; the message says how to install them.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:  # RuntimeError: mpi4py without an MPI library
        raise ImportError(
            f"a pipeline needs mpi4py and an MPI library ({problem}): pip install 'k3session[mpi]' mpich, or use the "
            "MPI of the machine"
        ) from problem
    return MPI.COMM_WORLD


class Post:
    """Sends and receives, in order, between any two processes of a communicator.

    Parameters
    ----------
    comm
        The communicator; a duplicate of it is used, so all its processes have to make a `Post`.
    deliver
        Called with (rank, message) for each message that has come, in the thread of the post.
    failed
        Called with the exception when messages cannot be sent or received any more.
    """

    def __init__(
        self, comm: Any, deliver: Callable[[int, Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._comm = comm.Dup()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._deliver = deliver
        self._failed = failed
        self._out: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stop = False
        # A daemon, since it is to go on until everything else has come to its end; `close` joins it.
        self._thread = threading.Thread(target=self._work, name="k3session-post", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Any) -> None:
        """Send what pickle can take; returns at once."""
        self._out.put((rank, message))
        self._wake.set()

    def later(self, rank: int, message: Any) -> Callable[[], Any]:
        """`send` as one compiled call; the thread finds the message within a millisecond."""
        return functools.partial(self._out.put, (rank, message))

    def close(self) -> None:
        """Send what is still to be sent, for some seconds at most, and stop."""
        self._stop = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_FLUSH + 1.0)

    def abort(self, code: int = 1) -> None:
        """End all processes of the job."""
        self._comm.Abort(code)

    # ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._turn()
        except BaseException as problem:  # noqa: BLE001 - whoever waits for a message has to hear of it
            self._failed(problem)

    def _turn(self) -> None:
        from mpi4py import MPI

        sending: list[Any] = []
        pause = _SHORT
        until = float("inf")
        status = MPI.Status()
        while True:
            busy = False
            if self._stop and until == float("inf"):
                until = time.monotonic() + _FLUSH
            while not self._out.empty():
                rank, message = self._out.get()
                sending.append(self._comm.isend(message, rank, _TAG))
                busy = True
            sending = [request for request in sending if not request.Test()]
            found = self._comm.improbe(MPI.ANY_SOURCE, _TAG, status)
            if found is not None:
                source = status.Get_source()
                self._deliver(source, found.recv())
                busy = True
            if self._stop and ((not sending and self._out.empty()) or time.monotonic() > until):
                return
            pause = _SHORT if busy else min(pause * _SLOWER, _LONG)
            if not busy and self._wake.wait(pause):
                self._wake.clear()
                pause = _SHORT
