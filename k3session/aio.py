# SPDX-License-Identifier: MIT
"""Sessions for asyncio: the same calls, awaitable.

Each session has one private thread, which its passes run in; passes run without the GIL, so that the event loop and
other sessions go on meanwhile.  Calls of several tasks on one session run one after the other, in the order in which
they were made.

>>> import asyncio
>>> from k3session import aio
>>> async def main():
...     async with await aio.open_model() as model, await model.session() as s:
...         await s.prefill([82, 79, 77])
...         return [r.position async for r in s.generate(3)]
>>> asyncio.run(main())
[3, 4, 5]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from k3session.alive import Alive
from k3session.errors import ClosedError
from k3session.generation import Generated
from k3session.marks import Kept, Mark
from k3session.model import Model
from k3session.score import Score
from k3session.session import Session
from k3session.snapshot import Snapshot
from k3session.stats import Stats

__all__ = ["AsyncModel", "AsyncSession", "open_model"]

P = ParamSpec("P")
T = TypeVar("T")
_AGAIN = 0.01  # seconds between tries to cancel what has not begun to listen yet


class AsyncSession:
    """A `Session` whose calls are awaited; made by `AsyncModel.session`, or from a session that exists.

    The methods are those of `Session`, with the same arguments, results and errors; `run` takes any other call.
    Cancelling a task that waits for a pass cancels the pass, at the next layer: the task ends with
    `asyncio.CancelledError` when the pass has, and the session stands at the end of the last finished pass and can go
    on.  A call that waits for its turn is then never made.

    Parameters
    ----------
    session
        The session; from now on it is only used through this object.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._group: Alive[AsyncSession] = Alive()  # what is closed with the model
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"k3session-{session.name}")

    @property
    def session(self) -> Session:
        """The session itself."""
        return self._session

    @property
    def position(self) -> int:
        """Tokens that the session holds."""
        return self._session.position

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """The logits for the next token, float32[vocab], read-only; None before the first token."""
        return self._session.logits

    @property
    def stats(self) -> Stats:
        """What the session has done and holds."""
        return self._session.stats

    async def run(self, call: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
        """Make any call in the session's thread, such as ``await s.run(s.session.mark)``.

        Raises
        ------
        ClosedError
            The session has been closed.
        asyncio.CancelledError
            The task was cancelled, and the call has ended.
        """
        try:
            future = self._thread.submit(call, *args, **options)
        except RuntimeError:
            raise ClosedError(f"{self._session.name} has been closed; open another one") from None
        ended = asyncio.wrap_future(future)
        try:
            await asyncio.wait((ended,))
        except asyncio.CancelledError:
            await self._stop(future, ended)
            raise
        return ended.result()

    async def step(self, token: int) -> npt.NDArray[np.float32]:
        """See `Session.step`."""
        return await self.run(self._session.step, token)

    async def prefill(
        self, prompt: Sequence[int] | npt.NDArray[Any], **options: Any
    ) -> npt.NDArray[np.float32]:
        """See `Session.prefill`; a function given as ``progress=`` is called in the session's thread."""
        return await self.run(self._session.prefill, prompt, **options)

    async def prefill_scored(self, prompt: Sequence[int] | npt.NDArray[Any], **options: Any) -> Score:
        """See `Session.prefill_scored`."""
        return await self.run(self._session.prefill_scored, prompt, **options)

    async def score(self, tokens: Sequence[int] | npt.NDArray[Any], *, top: int = 0) -> Score:
        """See `Session.score`."""
        return await self.run(self._session.score, tokens, top=top)

    async def generate(self, max_tokens: int | None = None, **options: Any) -> AsyncIterator[Generated]:
        """See `Session.generate`.

        Leaving the loop early is fine; `contextlib.aclosing` ends the generation at that moment, and not only when
        the event loop comes to it.
        """
        records = await self.run(lambda: iter(self._session.generate(max_tokens, **options)))
        try:
            while (record := await self.run(next, records, None)) is not None:
                yield record
        finally:
            # Awaits nothing, since the loop may be ending: in its turn, and before the session's own close.
            with contextlib.suppress(RuntimeError):
                self._thread.submit(records.close)  # type: ignore[attr-defined]

    async def fork(self, **options: Any) -> AsyncSession:
        """See `Session.fork`; the fork has a thread of its own."""
        other = AsyncSession(await self.run(self._session.fork, **options))
        other._group = self._group
        self._group.add(other)
        return other

    async def mark(self, label: str | None = None) -> Mark:
        """See `Session.mark`."""
        return await self.run(self._session.mark, label)

    async def rewind(self, to: Mark | int, **options: Any) -> int:
        """See `Session.rewind`."""
        return await self.run(self._session.rewind, to, **options)

    async def set_tokens(self, ids: Sequence[int] | npt.NDArray[Any], **options: Any) -> Kept:
        """See `Session.set_tokens`."""
        return await self.run(self._session.set_tokens, ids, **options)

    async def save(self, path: str | os.PathLike[str], **options: Any) -> int:
        """See `Session.save`; the session can be used while the file is written.

        The file holds the tokens up to the position when the call had its turn.  A task that is cancelled does not
        stop the writing.
        """
        job = await self.run(lambda: self._session.save(path, wait=False, **options))
        return await asyncio.to_thread(job.result)

    async def snapshot(self, **options: Any) -> Snapshot:
        """See `Session.snapshot`."""
        return await self.run(self._session.snapshot, **options)

    async def restore(self, snapshot: Snapshot) -> None:
        """See `Session.restore`."""
        await self.run(self._session.restore, snapshot)

    def cancel(self) -> bool:
        """See `Session.cancel`: the call that runs ends with `PassCancelled`."""
        return self._session.cancel()

    async def close(self) -> None:
        """See `Session.close`; calls that were made before end first.  Closing twice is fine."""
        with contextlib.suppress(ClosedError):
            await self.run(self._session.close)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._session)[1:]}"

    async def _stop(self, future: Future[Any], ended: asyncio.Future[Any]) -> None:
        """Cancel a call: before its turn it is never made, else its pass is stopped; returns when it has ended."""
        if future.cancel():
            return
        while not ended.done():
            # A pass that has not begun yet forgets a cancel, so it is said until the call has ended.
            self._session.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((ended,), timeout=_AGAIN)
        if not ended.cancelled():
            ended.exception()  # looked at, so that nobody says that it was not


class AsyncModel:
    """A `Model` with sessions for asyncio; made by `open_model`, or from a model that is open.

    Leaving ``async with`` closes its sessions, after the calls that they still have to make.

    Parameters
    ----------
    model
        The model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._group: Alive[AsyncSession] = Alive()

    @property
    def model(self) -> Model:
        """The model itself."""
        return self._model

    async def session(self, **options: Any) -> AsyncSession:
        """Return a new session; the options are those of `Model.session`."""
        return self._join(await asyncio.to_thread(self._model.session, **options))

    async def load(self, path: str | os.PathLike[str], **options: Any) -> AsyncSession:
        """Return a session that goes on where the file was saved; see `Session.load`."""
        return self._join(await asyncio.to_thread(Session.load, self._model, path, **options))

    async def close(self) -> None:
        """See `Model.close`."""
        await asyncio.to_thread(self._model.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._group:
            await session.close()
        await asyncio.to_thread(self._model.__exit__, kind, error, trace)

    def _join(self, session: Session) -> AsyncSession:
        other = AsyncSession(session)
        other._group = self._group
        self._group.add(other)
        return other

    def __repr__(self) -> str:
        return f"<Async{repr(self._model)[1:]}"


async def open_model(*path: str | os.PathLike[str], **options: Any) -> AsyncModel:
    """Open a model; the arguments are those of `Model.open`, without a path the model that ships."""
    return AsyncModel(await asyncio.to_thread(lambda: Model.open(*path, **options)))
