# SPDX-License-Identifier: MIT
"""Threads, cancel and Ctrl-C: sessions side by side give their own bits, and one that is stopped can go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_access import counts
from session_tools import prompt, same_sessions, step_all

import k3session as k3
from k3session._core.ops import pool_workers


@pytest.fixture(scope="module")
def wide(nano: Path) -> Iterator[k3.Model]:
    """The nano checkpoint with three threads to a pass."""
    with k3.Model.open(nano, threads=3) as model:
        yield model


class Crowd:
    """Threads that begin together; what they return or raise is kept in order."""

    def __init__(self, *work: Callable[[], Any]) -> None:
        self._gate = threading.Barrier(len(work) + 1)
        self.results: list[Any] = [None] * len(work)
        self._threads = [threading.Thread(target=self._run, args=item) for item in enumerate(work)]
        for thread in self._threads:
            thread.start()
        self._gate.wait()

    def _run(self, i: int, work: Callable[[], Any]) -> None:
        self._gate.wait()
        try:
            self.results[i] = work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.results[i] = error

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive(), "a thread hangs"
        return self.results


# One session and several threads.


def test_a_session_that_is_used_by_many_threads(wide: k3.Model) -> None:
    with wide.session() as session:
        session.prefill(prompt(5))

        def work(seed: int) -> dict[str, int]:
            rng = np.random.default_rng(seed)
            done = {"tokens": 0, "busy": 0}
            for _ in range(counts(80, 1000)):
                kind = rng.integers(0, 8)
                try:
                    if kind < 4:
                        session.step(int(rng.integers(0, 97)))
                        done["tokens"] += 1
                    elif kind == 4:
                        session.prefill([1, 2, 3])
                        done["tokens"] += 3
                    elif kind == 5:
                        session.snapshot()
                    elif kind == 6:
                        assert session.tokens.size >= 5 <= session.position
                        assert session.logits is None or session.logits.shape == (97,)
                    else:
                        session.cancel()
                except k3.SessionBusyError:
                    done["busy"] += 1
                except k3.PassCancelled:
                    pass
            return done

        results = Crowd(*(lambda seed=seed: work(seed) for seed in range(8))).join()
        assert all(isinstance(r, dict) for r in results), results
        assert sum(r["busy"] for r in results) > 0, "nobody was ever in the way"
        # What was taken in, in whatever order, is one timeline. A cancelled prefill of three takes in nothing.
        assert session.position == 5 + sum(r["tokens"] for r in results)
        tokens = session.tokens
        with wide.session() as straight:
            straight.prefill(tokens)
            assert straight.logits is not None and session.logits is not None
            assert np.array_equal(straight.logits, session.logits)
            assert np.array_equal(straight.step(3), session.step(3))


def test_a_second_user_is_refused_at_once_and_told_why(model: k3.Model) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        inside.set()
        leave.wait(20)

    with model.session() as session:
        crowd = Crowd(lambda: session.prefill(prompt(3), progress=hold))
        inside.wait(20)
        began = time.perf_counter()
        for use in (lambda: session.step(1), lambda: session.save("x.k3s"), session.snapshot, session.close):
            with pytest.raises(k3.SessionBusyError, match=f"{session.name} is in use by another call"):
                use()
        with pytest.raises(RuntimeError):
            session.step(1)
        assert time.perf_counter() - began < 1
        leave.set()
        crowd.join()
        session.step(1)
        assert session.position == 4


# Many sessions, each in a thread of its own.


@pytest.mark.parametrize("threads", [1, 3])
def test_sessions_side_by_side_give_the_bits_that_they_give_alone(
    model: k3.Model, wide: k3.Model, threads: int
) -> None:
    shared = model if threads == 1 else wide

    def work(seed: int) -> bytes:
        with shared.session(latent="bf16" if seed % 2 else "fp32") as session:
            found = [session.prefill(prompt(40 + 13 * seed, seed))]
            found += list(step_all(session, prompt(counts(20, 300), seed)))
            drawn = [r.token for r in session.generate(5, sampling=k3.Sampling(seed=seed, stop_ids=()))]
            return np.concatenate(found).tobytes() + bytes(drawn)

    alone = [work(seed) for seed in range(8)]
    assert Crowd(*(lambda seed=seed: work(seed) for seed in range(8))).join() == alone


def test_two_models_side_by_side(nano: Path, wide: k3.Model) -> None:
    def work(model: k3.Model) -> bytes:
        with model.session() as session:
            session.prefill(prompt(100))
            return step_all(session, prompt(30)).tobytes()

    with k3.Model.open(nano, threads=2) as other, k3.Model.open(threads=2) as shipped:
        expected = [work(wide), work(other), work(shipped)]
        assert expected[0] == expected[1] != expected[2]
        for _ in range(3):
            found = Crowd(lambda: work(wide), lambda: work(other), lambda: work(shipped)).join()
            assert found == expected
    assert pool_workers() > 0  # one of the models is still open
    assert work(wide) == expected[0]


def test_opening_and_closing_beside_running_sessions(nano: Path, wide: k3.Model) -> None:
    with wide.session() as session:
        session.prefill(prompt(10))
        expected = step_all(session, prompt(40)).tobytes()

    def decode() -> list[bytes]:
        found = []
        for _ in range(counts(6, 60)):
            with wide.session() as session:
                session.prefill(prompt(10))
                found.append(step_all(session, prompt(40)).tobytes())
        return found

    def open_and_close() -> None:
        for _ in range(counts(6, 60)):
            with k3.Model.open(nano, threads=4) as model, model.session() as session:
                session.prefill(prompt(20))

    *runs, opened = Crowd(decode, decode, open_and_close).join()
    assert opened is None and all(found == [expected] * len(found) for found in runs)


def test_the_number_of_threads_changes_no_bit(nano: Path, model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(200))
        for threads in (2, 3, 5, 16):
            with k3.Model.open(nano, threads=threads) as other, other.session() as found:
                found.prefill(prompt(200))
                same_sessions(found, session)


def test_a_caller_that_finds_the_pool_busy_runs_alone_with_the_same_bits(wide: k3.Model) -> None:
    # While four sessions compete for one pool, most passes are run by their caller alone.
    def work(seed: int) -> bytes:
        with wide.session() as session:
            return session.prefill(prompt(300, seed), chunk=17).tobytes()

    alone = [work(seed) for seed in range(4)]
    for _ in range(counts(3, 50)):
        assert Crowd(*(lambda seed=seed: work(seed) for seed in range(4))).join() == alone


# The interpreter goes on.


def test_other_threads_of_python_run_during_a_pass(model: k3.Model) -> None:
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    with model.session() as session:
        session.prefill(prompt(2000))
        thread = threading.Thread(target=count)
        thread.start()
        time.sleep(0.05)
        before, began = counted, time.perf_counter()
        session.prefill(prompt(128), chunk=128)  # one pass
        during, seconds = counted - before, time.perf_counter() - began
        stop.set()
        thread.join()
        assert during >= 2 and seconds > 0.005, (during, seconds)


# Cancel from another thread.


def long_prompt(model: k3.Model, seconds: float = 1.5) -> np.ndarray[Any, Any]:
    """A prompt whose prefill takes some seconds."""
    with model.session() as session:
        began = time.perf_counter()
        session.prefill(prompt(512))
        each = (time.perf_counter() - began) / 512
    return np.resize(prompt(512), min(4000, int(seconds / each)))


def test_cancel_from_another_thread(model: k3.Model) -> None:
    ids = long_prompt(model)
    with model.session() as session, model.session() as straight:
        for delay in (0.05, 0.13, 0.0):
            crowd = Crowd(lambda: session.prefill(ids[session.position :]))
            time.sleep(delay)
            while not session.cancel():
                time.sleep(0.0005)
            began = time.perf_counter()
            (error,) = crowd.join()
            assert time.perf_counter() - began < 1
            assert isinstance(error, k3.PassCancelled), error
            assert error.position == session.position < len(ids) and session.position % 128 == 0
        rest = ids[session.position :][:300]
        session.prefill(rest)
        straight.prefill(ids[: session.position])
        same_sessions(session, straight)


def test_a_step_may_be_cancelled_and_done_again(wide: k3.Model) -> None:
    with wide.session() as session, wide.session() as straight:
        stop = threading.Event()

        def cancel() -> None:
            while not stop.is_set():
                session.cancel()

        crowd = Crowd(cancel)
        ids = prompt(4000)
        positions: list[tuple[int, int]] = []
        while session.position < 40 or (not positions and session.position < 4000):
            try:
                session.step(ids[session.position])
            except k3.PassCancelled as error:
                positions.append((error.position, session.position))
                if len(positions) > 30:
                    stop.set()
        stop.set()
        crowd.join()
        straight.prefill(ids[: session.position])
        same_sessions(session, straight)
        assert positions, "no cancel ever hit a step"
        assert all(said == found for said, found in positions)


def test_cancelling_a_generation_from_another_thread(model: k3.Model) -> None:
    with model.session() as session, model.session() as straight:
        session.prefill(prompt(5))
        straight.prefill(prompt(5))
        tokens: list[int] = []

        def generate() -> None:
            for r in session.generate(sampling=k3.Sampling(seed=4, stop_ids=())):
                tokens.append(r.token)

        crowd = Crowd(generate)
        time.sleep(0.05)
        while not session.cancel():
            time.sleep(0.001)
        (error,) = crowd.join()
        assert isinstance(error, k3.PassCancelled) and error.position == session.position == 5 + len(tokens)
        expected = straight.generate(len(tokens) + 5, sampling=k3.Sampling(seed=4, stop_ids=()))
        tokens += [r.token for r in session.generate(5)]
        assert tokens == [r.token for r in expected]
        same_sessions(session, straight)


# Ctrl-C.  Python handles signals in its main thread, which is the one that tests run in.


class Interrupts:
    """Sends SIGINT to this process after a while, once."""

    def __init__(self, seconds: float) -> None:
        self.at = 0.0
        self._thread = threading.Timer(seconds, self._fire)

    def _fire(self) -> None:
        self.at = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def interrupted(use: Callable[[], Any], seconds: float) -> float:
    """Seconds that `use` went on after Ctrl-C; a use that was over before is begun again."""
    sent = Interrupts(seconds)
    try:
        with sent:
            while True:
                use()
    except KeyboardInterrupt:
        return time.perf_counter() - sent.at


needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)


@needs_main_thread
def test_ctrl_c_in_a_prefill(model: k3.Model) -> None:
    ids = long_prompt(model)
    with model.session() as session, model.session() as straight:

        def use() -> None:
            if session.position + 1 < len(ids):
                session.prefill(ids[session.position : -1])

        assert interrupted(use, 0.1) < 1
        assert 0 < session.position < len(ids) - 1 and session.position % 128 == 0
        straight.prefill(ids[: session.position])
        same_sessions(session, straight)
        session.step(1)
        straight.step(1)
        same_sessions(session, straight)


@needs_main_thread
def test_ctrl_c_at_any_moment_leaves_a_session_that_can_go_on(model: k3.Model) -> None:
    # What is asked for may come at any instruction of Python: just before a pass, or just after it has committed.
    rng = np.random.default_rng(7)
    verbs: dict[str, int] = {}
    for trial in range(counts(40, 1000)):
        ids = rng.integers(0, 97, 3000).astype(np.int32)
        session = model.session()
        other = model.session()
        other.prefill(prompt(30))
        elsewhere = other.snapshot()
        snap = session.snapshot()
        running = ["step", "prefill", "generate", "restore", "snapshot"][trial % 5]
        going: Any = None
        fed = np.empty(0, np.int32)
        try:
            with Interrupts(rng.uniform(0.001, 0.01)):
                while session.position < 2500:
                    at = session.position
                    if running == "step":
                        session.step(ids[at])
                    elif running == "prefill":
                        session.prefill(ids[at : at + 7], chunk=3)
                    elif running == "generate":
                        if going is None:
                            session.prefill(ids[:3])
                            going = session.generate(sampling=k3.Sampling(seed=trial, stop_ids=()))
                        next(going)
                    elif running == "restore":
                        session.restore(elsewhere if at == 0 else snap)
                    else:
                        session.step(ids[at])
                        session.snapshot()
            time.sleep(0.02)
        except KeyboardInterrupt:
            verbs[running] = verbs.get(running, 0) + 1
        del going
        tokens = session.tokens
        fed = prompt(30) if running == "restore" else ids
        if running != "generate":
            assert np.array_equal(tokens, fed[: tokens.size]), running
        with model.session() as straight:
            if tokens.size:
                straight.prefill(tokens)
            session.sampling = None
            same_sessions(session, straight)
            assert np.array_equal(session.step(1), straight.step(1))
        session.close()
        other.close()
    assert len(verbs) == 5, verbs


@needs_main_thread
def test_ctrl_c_in_a_save_leaves_the_old_file(model: k3.Model, tmp_path: Path) -> None:
    with model.session() as session:
        session.prefill(prompt(500))
        states = []
        for i in range(counts(8, 100)):
            states.append(session.snapshot().to_bytes())
            interrupted(lambda: session.save(tmp_path / "a.k3s"), 0.002 + 0.005 * (i % 8))
            session.step(i % 97)
            if (tmp_path / "a.k3s").exists():
                assert (tmp_path / "a.k3s").read_bytes() in states
        session.save(tmp_path / "a.k3s")
        assert os.listdir(tmp_path) == ["a.k3s"]
        assert (tmp_path / "a.k3s").read_bytes() == session.snapshot().to_bytes()


@needs_main_thread
def test_another_handler_decides_what_ctrl_c_does(model: k3.Model) -> None:
    class Stop(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        ids = long_prompt(model)
        with model.session() as session:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Stop):
                session.prefill(ids)
            assert session.position % 128 == 0
            session.step(1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@needs_main_thread
def test_a_pass_in_another_thread_does_not_take_the_signal(model: k3.Model) -> None:
    ids = long_prompt(model, 0.4)
    with model.session() as session:
        crowd = Crowd(lambda: session.prefill(ids))
        with pytest.raises(KeyboardInterrupt), Interrupts(0.05):
            time.sleep(5)
        (row,) = crowd.join()
        assert isinstance(row, np.ndarray) and session.position == len(ids)


def test_forks_of_one_past_in_many_threads(nano: Path) -> None:
    """Forks share pages and states; each thread goes its own way, forks on, goes back and closes, beside the others."""
    past = prompt(70)

    with k3.Model.open(nano, device="cpu", threads=1) as model:

        def alone(ids: list[int]) -> Any:
            with model.session() as s:
                return s.prefill(ids)

        def work(root: k3.Session, seed: int) -> int:
            rng = np.random.default_rng(seed)
            ids, checked = list(past), 0
            session = root
            for _ in range(counts(12, 200)):
                new = rng.integers(0, 97, int(rng.integers(1, 5))).tolist()
                kind = rng.integers(0, 4)
                if kind == 0:
                    child = session.fork()
                    session.close()
                    session = child
                elif kind == 1:
                    mark = session.mark()
                    session.prefill(new)
                    session.rewind(mark)
                elif kind == 2 and len(ids) > 70:
                    back = int(rng.integers(60, len(ids)))
                    session.rewind(back)
                    ids = ids[:back]
                session.prefill(new)
                ids += new
                checked += 1
                assert np.array_equal(session.logits, alone(ids))
            session.close()
            return checked

        with model.session() as origin:
            origin.prefill(past)
            roots = [origin.fork() for _ in range(4)]
            results = Crowd(*(lambda r=r, i=i: work(r, i) for i, r in enumerate(roots))).join()
            assert results == [counts(12, 200)] * 4, results
            assert np.array_equal(origin.logits, alone(past))
