# SPDX-License-Identifier: MIT
"""Saves that are being written: in the caller's thread or in one of their own, those to one file in order."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from k3session.alive import Alive
from k3session.errors import K3Error, SnapshotError

__all__ = ["SaveJob"]

log = logging.getLogger("k3session")

_lock = threading.Lock()
_latest: dict[str, SaveJob] = {}
_alive: Alive[SaveJob] = Alive()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _latest.clear()
    for job in _alive:
        job._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


class SaveJob:
    """A save that goes on in the background: what `Session.save` returns with ``wait=False``.

    The file that it writes holds exactly the tokens that the session held when `Session.save` was called, whatever
    the session does meanwhile.  Saves to one file are written in the order of the calls, so that the last call wins.

    Attributes
    ----------
    path
        The file, as it was given.
    position
        How many tokens the file holds.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     _ = s.prefill([82, 79, 77])
    ...     job = s.save("play.k3s", wait=False)
    ...     _ = s.step(69)                       # the save goes on beside it
    ...     size = job.result()
    ...     k3.Session.load(model, "play.k3s").position
    3
    """

    def __init__(self, path: str | os.PathLike[str], position: int, write: Callable[[], int]) -> None:
        self.path: str = os.fspath(path)
        self.position = position
        self._write: Callable[[], int] | None = write
        self._size = 0
        self._error: BaseException | None = None
        self._asked = False
        self._done = threading.Event()
        self._previous: SaveJob | None = None
        self._inline = False
        self._writer: int | None = None
        self._key = os.path.realpath(self.path) if "\0" not in self.path else self.path
        _alive.add(self)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    @property
    def exception(self) -> BaseException | None:
        """What it ended with, a `SnapshotError` as a rule; None where it ended well or still goes on."""
        if not self.done:
            return None
        self._asked = True
        return self._error

    def result(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the size of the file in bytes.

        Parameters
        ----------
        timeout
            At most this many seconds; None waits as long as it takes.

        Raises
        ------
        TimeoutError
            It still goes on after that time.
        SnapshotError
            It could not be written; a file of that name is as it was.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.path}: the save still goes on after {timeout} seconds")
        self._asked = True
        if self._error is not None:
            raise self._error
        return self._size

    def __repr__(self) -> str:
        state = "goes on" if not self.done else "failed" if self._error is not None else "done"
        return f"<SaveJob {self.path}, position {self.position}: {state}>"

    # ------------------------------------------------------------------------------------------
    # what a session does with it
    # ------------------------------------------------------------------------------------------

    @property
    def failed_unseen(self) -> bool:
        """Whether it failed and nobody has asked."""
        return self.done and self._error is not None and not self._asked

    @property
    def nbytes(self) -> int:
        """The size of the file; 0 where there is none."""
        return self._size

    def run(self) -> int:
        """Write in this thread."""
        self._asked = self._inline = True
        try:
            self._queue()
            self._write_in_turn(self._take())
        finally:
            self._end(None)
        return self._size

    def start(self) -> None:
        """Write in a thread of its own, which the end of the interpreter waits for."""
        try:
            self._queue()
            threading.Thread(target=self._work, name="k3session-save").start()
        except BaseException as problem:
            if self._take() is not None:  # the thread did not come to it
                self._end(None)
            if isinstance(problem, RuntimeError):
                raise SnapshotError(f"{self.path}: no thread can be started to write it: {problem}") from None
            raise

    def settle(self) -> None:
        """Wait for the end; a failure that nobody has asked for is said in the log."""
        self._done.wait()
        if self.failed_unseen:
            self._asked = True
            log.error("a save in the background failed: %s", self._error)

    def _queue(self) -> None:
        with _lock:
            self._previous, _latest[self._key] = _latest.get(self._key), self

    def _take(self) -> Callable[[], int] | None:
        """What is to be done, once."""
        with _lock:
            write, self._write = self._write, None
        return write

    def _work(self) -> None:
        error: BaseException | None = None
        write = self._take()
        if write is None:
            return
        try:
            self._write_in_turn(write)
        except BaseException as problem:  # noqa: BLE001 - belongs to whoever asks for the result
            error = _bare(problem)
        del write  # lets go of the state before anybody is told
        self._end(error)

    def _write_in_turn(self, write: Callable[[], int] | None) -> None:
        self._writer = threading.get_ident()
        # One that was given up while it waited leaves those before it to us, hence the whole chain.
        at, passed_over = self._previous, None
        while at is not None:
            if at._writer == self._writer or (at._inline and self._inline):
                # Two callers who both wait for the disk, or one inside the other: whoever is done first is first.
                passed_over = passed_over or at
            else:
                at._done.wait()
            at = at._previous
        self._previous = passed_over
        if write is not None:
            self._size = write()

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        with _lock:
            if self._previous is None and _latest.get(self._key) is self:
                del _latest[self._key]
        self._done.set()

    def _forked(self) -> None:
        if not self._done.is_set():
            self._error = K3Error(
                f"{self.path}: is being written by the process that this one was forked from"
            )
            self._done = threading.Event()
            self._done.set()


def _bare(error: BaseException | None) -> BaseException | None:
    """The error and its causes without their frames, which would keep what was being written."""
    seen, at = set(), error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error
