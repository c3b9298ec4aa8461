# SPDX-License-Identifier: MIT
"""Sessions under asyncio: the same bits, the loop stays free, and a cancelled task leaves a session that can go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from session_tools import prompt, same_sessions

import k3session as k3
from k3session import aio

T = TypeVar("T")
GREEDY = k3.Sampling(temperature=0, stop_ids=())


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; no thread of ours may be left that works."""
    return asyncio.run(asyncio.wait_for(work, 120))


def test_the_same_calls_give_the_same_bits(nano: Path, model: k3.Model, tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            await aio.open_model(nano, device="cpu", threads=1) as opened,
            await opened.session(latent="bf16") as s,
        ):
            assert (await s.prefill(prompt(20), chunk=7)).tobytes() == plain.prefill(prompt(20)).tobytes()
            assert (await s.step(3)).tobytes() == plain.step(3).tobytes()
            text = prompt(9, seed=1)
            score = await s.score(text, top=2)
            assert score.logprobs.tobytes() == plain.score(text).logprobs.tobytes()
            assert (await s.prefill_scored(text)).logprobs.tobytes() == score.logprobs.tobytes()
            plain.prefill(text)
            made = [r.token async for r in s.generate(5, sampling=GREEDY)]
            assert made == [r.token for r in plain.generate(5, sampling=GREEDY)]
            assert s.position == plain.position and s.logits is not None
            mark = await s.mark("here")
            snap = await s.snapshot(meta=1)
            assert await s.save(tmp_path / "x.k3s") == plain.save(tmp_path / "y.k3s")
            await s.step(1)
            assert await s.rewind(mark) == 0
            kept = await s.set_tokens(plain.tokens[:4])
            assert kept.kept + kept.replayed == 4
            await s.restore(snap)
            async with await s.fork() as other:
                await other.step(5)
                assert other.position == s.position + 1
            async with await opened.load(tmp_path / "x.k3s") as loaded:
                assert loaded.position == s.position and loaded.stats.tokens == 0
            assert await s.run(lambda: threading.current_thread().name) != threading.current_thread().name
            assert "Async" in repr(s) and "Async" in repr(opened)
            snap_here = await s.snapshot()
            assert all(
                np.array_equal(a, b)
                for x, y in zip(snap_here.layers, plain.snapshot().layers, strict=True)
                for a, b in zip(x.arrays().values(), y.arrays().values(), strict=True)
            )

    with model.session(latent="bf16") as plain:
        finish(work())


def test_tasks_on_one_session_take_turns(model: k3.Model) -> None:
    async def work() -> None:
        async with aio.AsyncSession(model.session()) as s:
            await asyncio.gather(*(s.step(t) for t in range(40)))
            assert s.session.tokens.tolist() == list(range(40)), "in the order of the calls"

    finish(work())


def test_sessions_run_side_by_side_and_the_loop_stays_free(model: k3.Model) -> None:
    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(aio.AsyncSession(model.session())) for _ in range(4)]
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.001)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            await asyncio.gather(*(s.prefill(prompt(1500, seed=i)) for i, s in enumerate(sessions)))
            ticking.cancel()
            assert ticks > 5
            for i, s in enumerate(sessions):
                with model.session() as plain:
                    plain.prefill(prompt(1500, seed=i))
                    assert s.logits is not None and plain.logits is not None
                    assert s.logits.tobytes() == plain.logits.tobytes()

    finish(work())


def test_cancelling_a_task_cancels_its_pass(model: k3.Model) -> None:
    """At any moment: before its turn, before the pass, in its midst, and after it."""

    async def work() -> None:
        rng = np.random.default_rng(0)
        text = prompt(2000)
        stopped = 0
        async with aio.AsyncSession(model.session()) as s:
            for i in range(25):
                before = s.position
                task = asyncio.create_task(s.prefill(text, chunk=16))
                await asyncio.sleep(float(rng.uniform(0, 0.02)))
                began = time.perf_counter()
                task.cancel()
                if i % 3 == 0:
                    await asyncio.sleep(0.001)
                    task.cancel()  # by somebody who cannot wait
                try:
                    await task
                except asyncio.CancelledError:
                    stopped += 1
                assert time.perf_counter() - began < 5
                done = s.position - before
                assert done % 16 == 0 and (done < 2000 or not task.cancelled())
                with model.session() as plain:
                    await s.run(s.session.rewind, done % 32)
                    if done % 32:
                        plain.prefill(s.session.tokens)
                        assert s.logits is not None and plain.logits is not None
                        assert s.logits.tobytes() == plain.logits.tobytes()
            assert stopped > 10
            await s.step(1)

    finish(work())


def test_a_call_that_waits_for_its_turn_is_never_made_once_cancelled(model: k3.Model) -> None:
    async def work() -> None:
        async with aio.AsyncSession(model.session()) as s:
            hold = threading.Event()
            first = asyncio.create_task(s.run(hold.wait, 20))
            second = asyncio.create_task(s.step(1))
            third = asyncio.create_task(s.step(2))
            await asyncio.sleep(0.02)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            hold.set()
            await asyncio.gather(first, third)
            assert s.session.tokens.tolist() == [2]

    finish(work())


def test_a_timeout_stops_a_generation(model: k3.Model) -> None:
    async def work() -> None:
        async with aio.AsyncSession(model.session()) as s:
            await s.prefill([1])
            seen = []

            async def forever() -> None:
                async for r in s.generate(sampling=GREEDY):
                    seen.append(r.token)

            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(forever(), 0.1)
            assert 1 + len(seen) <= s.position <= 2 + len(seen)
            assert s.session.tokens[1 : 1 + len(seen)].tolist() == seen
            assert await s.run(lambda: s.session._generations) == 0
            with model.session() as plain:
                plain.prefill(s.session.tokens)
                await s.step(3)
                plain.step(3)
                assert s.logits is not None and s.logits.tobytes() == plain.logits.tobytes()  # type: ignore[union-attr]

    finish(work())


def test_a_loop_over_a_generation_can_be_left(model: k3.Model) -> None:
    async def work() -> None:
        async with aio.AsyncSession(model.session()) as s:
            await s.prefill([1])
            async with contextlib.aclosing(s.generate(20, sampling=GREEDY)) as records:
                async for r in records:
                    if r.position == 4:
                        break
            assert s.position == 5
            await s.step(1)
            assert s.session._generations == 0
            async for _ in s.generate(20, sampling=GREEDY):
                break  # left for the loop to collect
            await s.step(2)
            assert s.session.tokens.tolist()[-1] == 2

    finish(work())


def test_cancel_by_hand_is_an_error_and_no_cancelled_task(model: k3.Model) -> None:
    async def work() -> None:
        async with aio.AsyncSession(model.session()) as s:
            task = asyncio.create_task(s.prefill(prompt(3000), chunk=8))
            while not s.cancel():
                await asyncio.sleep(0)
            with pytest.raises(k3.PassCancelled):
                await task

    finish(work())


def test_errors_are_those_of_the_session(model: k3.Model) -> None:
    async def work() -> None:
        async with aio.AsyncSession(model.session(capacity=2)) as s:
            with pytest.raises(k3.InvalidTokenError):
                await s.step(97)
            with pytest.raises(k3.InvalidTokenError, match="nothing to continue from"):
                [r async for r in s.generate(1)]
            await s.prefill([1, 2])
            with pytest.raises(k3.CapacityError):
                await s.step(1)
            with pytest.raises(k3.SnapshotError):
                await s.save("no/such/folder/x.k3s")
            with pytest.raises(TypeError):
                await s.save("x.k3s", wait=True)
        for call in (s.step(1), s.prefill([1]), s.score([1]), s.run(len, "a")):
            with pytest.raises(k3.ClosedError, match="has been closed"):
                await call
        await s.close()

    finish(work())


def test_the_session_goes_on_while_a_file_is_written(model: k3.Model, tmp_path: Path) -> None:
    async def work() -> None:
        hold = threading.Event()
        async with aio.AsyncSession(model.session()) as s:
            await s.prefill([1, 2, 3])
            saving = asyncio.create_task(s.save(tmp_path / "x.k3s", progress=lambda *_: hold.wait(20)))
            await asyncio.sleep(0.05)
            await s.step(4)
            assert not saving.done()
            hold.set()
            await saving
            assert s.stats.last_save is not None and s.stats.last_save.position == 3

    finish(work())


def test_leaving_a_model_ends_its_sessions_after_their_calls(nano: Path) -> None:
    async def work() -> aio.AsyncSession:
        async with await aio.open_model(nano, device="cpu", threads=1) as opened:
            s = await opened.session()
            fork = await s.fork()
            last = asyncio.gather(s.prefill(prompt(500)), fork.prefill(prompt(300)))
            await asyncio.sleep(0)
        assert opened.model.is_closed and s.session.is_closed and fork.session.is_closed
        for row in await last:
            assert row.shape == (97,)
        return s

    s = finish(work())
    for thread in list(s._thread._threads):
        thread.join(20)
        assert not thread.is_alive()


def test_a_session_that_was_used_before(model: k3.Model) -> None:
    async def work(session: k3.Session) -> None:
        s = aio.AsyncSession(session)
        await s.step(2)
        assert s.session is session
        s._thread.shutdown()

    with model.session() as session, model.session() as plain:
        session.prefill([1])
        finish(work(session))
        plain.prefill([1, 2])
        same_sessions(session, plain)
