# SPDX-License-Identifier: MIT
"""Batches: each session's bits are those it has alone, whatever its companions; one that fails fails alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, changed, floats
from core_access import counts
from hypothesis import given
from session_tools import contents, prompt, resident, same, same_sessions, unchanged

import k3session as k3
from k3session.batch import _take
from k3session.memory import CHUNK_ROWS


@contextmanager
def crowd(model: k3.Model, n: int, **options: Any) -> Iterator[list[k3.Session]]:
    """Sessions at different positions, every third with a BF16 latent cache, every fourth one still empty."""
    with ExitStack() as stack:
        sessions = []
        for i in range(n):
            latent = "bf16" if i % 3 == 2 else "fp32"
            session = stack.enter_context(model.session(latent=latent, **options))
            if i % 4 != 3:
                session.prefill(prompt(3 + 7 * (i % 12), seed=i))
            sessions.append(session)
        yield sessions


@contextmanager
def twins(sessions: Sequence[k3.Session]) -> Iterator[list[k3.Session]]:
    """A copy of each session, which shares nothing with it."""
    with ExitStack() as stack:
        copies = []
        for session in sessions:
            copy = stack.enter_context(
                session.model.session(latent=session.latent, capacity=session.capacity)
            )
            copy.restore(session.snapshot())
            copies.append(copy)
        yield copies


# The same bits.


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 33])
def test_steps_are_those_of_each_alone(model: k3.Model, n: int) -> None:
    with crowd(model, n) as sessions, twins(sessions) as alone:
        for i in range(4):
            tokens = prompt(n, seed=i)
            rows = model.step(list(zip(sessions, tokens, strict=True)))
            assert len(rows) == n
            for row, session, token in zip(rows, alone, tokens, strict=True):
                assert row.dtype == np.float32 and row.shape == (97,)
                assert np.array_equal(row, session.step(token))
        for session, single in zip(sessions, alone, strict=True):
            same_sessions(session, single)


def test_the_order_and_the_companions_do_not_matter(model: k3.Model) -> None:
    rng = np.random.default_rng(2)
    with crowd(model, 9) as sessions:
        snaps = [s.snapshot() for s in sessions]
        expected: dict[int, Any] = {}
        for _ in range(12):
            chosen = rng.permutation(9)[: rng.integers(1, 10)].tolist()
            for i in chosen:
                sessions[i].restore(snaps[i])
            rows = model.step((sessions[i], 10 + i) for i in chosen)
            for i, row in zip(chosen, rows, strict=True):
                found = (row.tobytes(), contents(sessions[i]))
                first = expected.setdefault(i, found)
                assert found[0] == first[0]
                same(found[1], first[1])
        assert len(expected) == 9


SIZES = {
    "one": (1,),
    "three": (5, 1, 9),
    "full": (128, 1),
    "mixed": (200, 3, 1, 40, 130),
    "more than a pass has rows": (1,) * 140,
    "long": (300,) * 3,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_prompts_of_any_lengths(model: k3.Model, sizes: tuple[int, ...]) -> None:
    with crowd(model, len(sizes)) as sessions, twins(sessions) as alone:
        prompts = [prompt(n, seed=i) for i, n in enumerate(sizes)]
        rows = model.forward(list(zip(sessions, prompts, strict=True)))
        for row, session, single, ids in zip(rows, sessions, alone, prompts, strict=True):
            assert np.array_equal(row, single.prefill(ids))
            same_sessions(session, single)
        rows = model.step([(s, 3) for s in sessions])
        for row, single in zip(rows, alone, strict=True):
            assert np.array_equal(row, single.step(3))


@given(data=st.data())
def test_random_mixes(model: k3.Model, data: st.DataObject) -> None:
    """Steps and prompts of some sessions together, steps and prompts of each alone, in any order."""
    number = data.draw(st.integers(1, 5))
    with crowd(model, number) as sessions, twins(sessions) as alone:
        for _ in range(data.draw(st.integers(1, 6))):
            chosen = data.draw(st.permutations(range(number)))[: data.draw(st.integers(1, number))]
            if data.draw(st.booleans()):
                prompts = [prompt(data.draw(st.integers(1, 70)), seed=i) for i in chosen]
                rows = model.forward([(sessions[i], p) for i, p in zip(chosen, prompts, strict=True)])
                expected = [alone[i].prefill(p) for i, p in zip(chosen, prompts, strict=True)]
            else:
                tokens = [data.draw(st.integers(0, 96)) for _ in chosen]
                rows = model.step([(sessions[i], t) for i, t in zip(chosen, tokens, strict=True)])
                expected = [alone[i].step(t) for i, t in zip(chosen, tokens, strict=True)]
            assert [r.tobytes() for r in rows] == [r.tobytes() for r in expected]
            if data.draw(st.booleans()):
                assert sessions[0].step(7).tobytes() == alone[0].step(7).tobytes()
        for session, single in zip(sessions, alone, strict=True):
            same_sessions(session, single)


def test_forks_of_one_prefix(model: k3.Model) -> None:
    for start in (1, 63, 64, 70):
        with ExitStack() as stack:
            parent = stack.enter_context(model.session())
            parent.prefill(prompt(start))
            forks = [stack.enter_context(parent.fork()) for _ in range(6)]
            everyone = [*forks[:3], parent, *forks[3:]]
            for i in range(3):
                rows = model.step([(s, 10 * i + j) for j, s in enumerate(everyone)])
                assert len({r.tobytes() for r in rows}) == len(everyone)
            model.forward([(s, prompt(j + 1, seed=j)) for j, s in enumerate(everyone)])
            for j, session in enumerate(everyone):
                with model.session() as straight:
                    straight.prefill(
                        [*prompt(start), *(10 * i + j for i in range(3)), *prompt(j + 1, seed=j)]
                    )
                    same_sessions(session, straight)


def test_embeddings_beside_ids(model: k3.Model) -> None:
    rows = np.random.default_rng(1).normal(size=(150, 64)).astype(np.float32)
    with crowd(model, 4) as sessions, twins(sessions) as alone:
        given: list[Any] = [rows, prompt(140), rows[:3], [5]]
        found = model.forward(list(zip(sessions, given, strict=True)))
        for row, session, single, ids in zip(found, sessions, alone, given, strict=True):
            assert np.array_equal(row, single.prefill(ids))
            same_sessions(session, single)
        assert len(sessions[0].snapshot().facts["embeddings"]) == 150


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_of_a_pass_change_no_bit(nano: Path, model: k3.Model, threads: int) -> None:
    with k3.Model.open(nano, threads=threads) as wide, crowd(model, 8) as one, crowd(wide, 8) as many:
        for i in range(3):
            a = model.step([(s, 5 + i) for s in one])
            b = wide.step([(s, 5 + i) for s in many])
            assert [r.tobytes() for r in a] == [r.tobytes() for r in b]
        model.forward([(s, prompt(30)) for s in one])
        wide.forward([(s, prompt(30)) for s in many])
        for x, y in zip(one, many, strict=True):
            same_sessions(x, y)


def test_rows_are_the_callers_own(model: k3.Model) -> None:
    with crowd(model, 3) as sessions, twins(sessions) as alone:
        rows = model.step([(s, 5) for s in sessions])
        assert all(r.flags.owndata and r.flags.writeable for r in rows)
        kept = [r.copy() for r in rows]
        for row in rows:
            row[:] = np.nan
        for session, single, row in zip(sessions, alone, kept, strict=True):
            single.step(5)
            assert session.logits is not None and np.array_equal(session.logits, row)
            assert all(r.base is None for r in session._rows)  # nothing of a batch stays with a session
            same_sessions(session, single)


def test_right_after_the_commit_everything_is_in_place(model: k3.Model) -> None:
    """What another thread sees then, and what Ctrl-C leaves that comes then."""
    real = model._decoder
    seen: list[Any] = []

    class Decoder:
        def forward(self, *a: Any) -> Any:
            real.forward(*a)
            seen.extend((s.position, s.tokens[-1], s.logits) for s in sessions)
            raise KeyboardInterrupt

    with crowd(model, 3) as sessions, twins(sessions) as alone:
        model._decoder = Decoder()
        try:
            with pytest.raises(KeyboardInterrupt):
                model.step([(s, 5) for s in sessions])
        finally:
            model._decoder = real
        for session, single, (position, token, logits) in zip(sessions, alone, seen, strict=True):
            row = single.step(5)
            assert (position, token) == (single.position, 5) and np.array_equal(logits, row)
            same_sessions(session, single)


def test_a_step_of_the_next_batch_goes_on_from_the_one_before(model: k3.Model) -> None:
    """What is chosen from the rows of a batch, as a loop over many conversations does it."""
    with crowd(model, 6) as sessions, twins(sessions) as alone:
        rows = model.forward([(s, [1, 2]) for s in sessions])
        for _ in range(20):
            rows = model.step([(s, int(r.argmax())) for s, r in zip(sessions, rows, strict=True)])
        for session, single in zip(sessions, alone, strict=True):
            single.prefill([1, 2])
            for _ in single.generate(20, sampling=k3.Sampling(temperature=0, stop_ids=())):
                pass
            single.sampling = session.sampling
            same_sessions(session, single)


def test_marks_are_made_as_by_a_session_alone(model: k3.Model) -> None:
    policy = k3.Marks(every=5)
    with (
        model.session(marks=policy) as a,
        model.session(marks=policy) as b,
        model.session(marks=policy) as alone,
    ):
        model.forward([(a, prompt(7)), (b, prompt(3))])
        alone.prefill(prompt(7))
        for i in range(9):
            model.step([(b, i), (a, i)])
            alone.step(i)
        assert a.reachable() == alone.reachable() and len(a.reachable()) > 3
        a.rewind(9)
        alone.rewind(9)
        same_sessions(a, alone)


def test_what_was_done_is_counted(model: k3.Model) -> None:
    with model.session() as a, model.session() as b:
        model.forward([(a, prompt(7)), (b, prompt(3))])
        model.step([(a, 1), (b, 1)])
        assert (a.stats.prefilled, a.stats.stepped) == (7, 1)
        assert (b.stats.prefilled, b.stats.stepped) == (3, 1)
        assert a.stats.seconds > 0


# What is refused as a whole.


def test_nothing_runs_where_the_batch_itself_is_wrong(model: k3.Model, nano: Path) -> None:
    with (
        k3.Model.open(nano, threads=1) as other,
        other.session() as stranger,
        model.session() as a,
        model.session() as b,
    ):
        a.prefill([1])
        b.prefill([2])
        wrong: list[tuple[Any, str]] = [
            ([], r"the batch is empty; expected at least one \(session, token\) pair"),
            ([(a, 1), (b, 1), (a, 2)], f"{a.name} is in the batch twice"),
            ([(a, 1), (stranger, 1)], f"{stranger.name} is a session of another model"),
            ([(a, 1), b], r"a batch is a list of \(session, token\) pairs; found <Session"),
            ([(a, 1), (b, 1, 2)], "pairs; found"),
            ([(a, 1), (1, b)], "pairs; found"),
            ([(a, 1), None], "pairs; found None"),
        ]
        for pairs, words in wrong:
            with unchanged(a), unchanged(b), pytest.raises(k3.ConfigError, match=words):
                model.step(pairs)
        with pytest.raises(k3.ConfigError, match=r"\(session, ids\) pair"):
            model.forward([])
    with pytest.raises(k3.ClosedError):
        other.step([(stranger, 1)])


# Who fails fails alone.


def failure(model: k3.Model, run: Callable[[Any], Any], pairs: Any) -> k3.BatchError:
    with pytest.raises(k3.BatchError) as error:
        run(pairs)
    for (session, _), result in zip(pairs, error.value.results, strict=True):
        if isinstance(result, Exception):
            assert session.name in str(result)
    return error.value


def test_a_session_fails_alone(model: k3.Model) -> None:
    with crowd(model, 9, capacity=64) as sessions, twins(sessions) as alone:
        closed, full, draft, busy = sessions[1:5]
        closed.close()
        full.prefill(prompt(64 - full.position))
        alone[2].prefill(prompt(64 - alone[2].position))
        tokens: list[Any] = [10, 11, 12, 13, 14, 97, 1.5, 17, 18]
        with draft.verify([1, 2]), busy._owner:
            before = [s.position for s in sessions if not s.is_closed]
            error = failure(model, model.step, list(zip(sessions, tokens, strict=True)))
        kinds = [type(r).__name__ for r in error.results]
        assert kinds == [
            "ndarray", "ClosedError", "CapacityError", "SessionBusyError", "SessionBusyError", "InvalidTokenError",
            "InvalidTokenError", "ndarray", "ndarray",
        ]  # fmt: skip
        assert "6 of the 9 sessions of a batch failed, and the others have gone on" in str(error)
        assert "has an open draft" in str(error.results[3]) and "in use by another" in str(error.results[4])
        assert "token 97 is not in the vocabulary" in str(error.results[5])
        after = [s.position for s in sessions if not s.is_closed]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 0, 0, 0, 0, 1, 1]
        for i in (0, 7, 8):
            assert np.array_equal(error.results[i], alone[i].step(tokens[i]))
        for i in (0, 2, 3, 4, 5, 6, 7, 8):
            same_sessions(sessions[i], alone[i])
        model.step([(s, 1) for s in sessions if s is not closed and s is not full])


def test_all_may_fail(model: k3.Model) -> None:
    with crowd(model, 3) as sessions:
        for session in sessions:
            session.close()
        error = failure(model, model.step, [(s, 1) for s in sessions])
        assert all(isinstance(r, k3.ClosedError) for r in error.results)


def test_a_value_that_is_not_finite_stops_one(nano: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        raw = tensors["language_model.model.embed_tokens.weight"]
        values = floats(raw).copy()
        values[13] = np.nan
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors["language_model.model.embed_tokens.weight"] = Raw(raw.dtype, raw.shape, bits.tobytes())

    folder = changed(nano, tmp_path / "model", tensors=edit)
    ids = [t for t in prompt(400).tolist() if t != 13]
    with k3.Model.open(folder, threads=1) as model, ExitStack() as stack:
        a, b, c, alone = (stack.enter_context(model.session()) for _ in range(4))
        error = failure(model, model.step, [(a, 5), (b, 13), (c, 7)])
        assert isinstance(error.results[1], k3.NonFiniteError)
        assert error.results[1].layer == "model.embed_tokens"
        assert (a.position, b.position, c.position) == (1, 0, 1)
        for session, token, row in ((a, 5, error.results[0]), (c, 7, error.results[2])):
            with model.session() as single:
                assert np.array_equal(single.step(token), row)
                same_sessions(session, single)
        error = failure(model, model.step, [(a, 5), (b, 5)])
        assert "has failed and accepts only" in str(error.results[1])
        b.rewind(0)
        # In a prompt: the session stands where the pass before left it, and its companions go on to their end.
        before = a.position
        error = failure(
            model, model.forward, [(a, ids[:300]), (b, [*ids[:200], 13, *ids[:50]]), (c, ids[:9])]
        )
        assert isinstance(error.results[1], k3.NonFiniteError) and 0 < b.position < 200
        assert a.position == before + 300
        b.rewind(b.position)
        alone.prefill(ids[: b.position])
        same_sessions(b, alone)


def test_a_pass_that_does_not_come_about_is_tried_by_each_alone(model: k3.Model) -> None:
    """As where the device has memory for all sessions but one."""
    with crowd(model, 4) as sessions, twins(sessions) as alone:
        real = model._decoder
        poor = sessions[2]._timeline

        class Decoder:
            def forward(self, scratch: Any, timelines: list[Any], *rest: Any) -> Any:
                if poor in timelines:
                    raise MemoryError("no pages left")
                return real.forward(scratch, timelines, *rest)

        model.step([(s, 4) for s in sessions])  # the scratch is there
        model._decoder = Decoder()
        try:
            error = failure(model, model.step, [(s, 5) for s in sessions])
        finally:
            model._decoder = real
        assert [type(r).__name__ for r in error.results] == ["ndarray", "ndarray", "MemoryError", "ndarray"]
        assert str(error.results[2]) == f"{sessions[2].name}: no pages left"
        for i, single in enumerate(alone):
            single.step(4)
            if i != 2:
                single.step(5)
            same_sessions(sessions[i], single)


def test_a_failure_keeps_nothing_alive(model: k3.Model) -> None:
    session = model.session()
    session.close()
    with pytest.raises(k3.BatchError) as error:
        model.step([(session, 1)])
    assert error.value.results[0].__traceback__ is None


# Cancel, Ctrl-C, threads.


def test_one_session_is_cancelled(model: k3.Model) -> None:
    with crowd(model, 3) as sessions, twins(sessions) as alone:
        ids = prompt(1200)
        results: list[Any] = []

        def run() -> None:
            try:
                results.extend(model.forward([(s, ids) for s in sessions]))
            except k3.BatchError as error:
                results.extend(error.results)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.02)
        began = time.perf_counter()
        while not sessions[1].cancel():
            time.sleep(0.001)
            assert time.perf_counter() - began < 20
        thread.join()
        assert isinstance(results[1], k3.PassCancelled) and results[1].position == sessions[1].position
        assert 0 <= sessions[1].position - alone[1].position < 1200 - CHUNK_ROWS // 3
        done = sessions[1].position - alone[1].position
        if done:
            alone[1].prefill(ids[:done])
        for i in (0, 2):
            assert np.array_equal(results[i], alone[i].prefill(ids))
        for session, single in zip(sessions, alone, strict=True):
            same_sessions(session, single)
            assert session.cancel() is False
        model.step([(s, 1) for s in sessions])


def test_a_stray_cancel_changes_nothing(model: k3.Model) -> None:
    with crowd(model, 3) as sessions, twins(sessions) as alone:
        model.step([(s, 1) for s in sessions])
        scratch = model._batch_scratch

        def cancel() -> None:
            for _ in range(10):
                scratch.cancel()  # as one that comes late, meant for a batch before
                time.sleep(0.003)

        thread = threading.Thread(target=cancel)
        thread.start()
        model.forward([(s, prompt(200)) for s in sessions])
        thread.join()
        for session, single in zip(sessions, alone, strict=True):
            single.step(1)
            single.prefill(prompt(200))
            same_sessions(session, single)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)
def test_ctrl_c_at_any_moment(model: k3.Model) -> None:
    rng = np.random.default_rng(3)
    ids = prompt(3000)
    hit = 0
    for trial in range(counts(40, 1000)):
        with ExitStack() as stack:
            sessions = [stack.enter_context(model.session()) for _ in range(3)]
            straight = stack.enter_context(model.session())
            timer = threading.Timer(rng.uniform(0.001, 0.01), lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while sessions[0].position < 2500:
                    if trial % 2:
                        model.step([(s, ids[s.position]) for s in sessions])
                    else:
                        model.forward([(s, ids[s.position :][: 50 * i + 1]) for i, s in enumerate(sessions)])
                timer.join()
                time.sleep(0.02)
            except KeyboardInterrupt:
                hit += 1
            timer.join()
            for session in sessions:
                assert np.array_equal(session.tokens, ids[: session.position])
                straight.rewind(0)
                if session.position:
                    straight.prefill(session.tokens)
                same_sessions(session, straight)
            model.step([(s, 1) for s in sessions])  # nobody is still owned
            assert not any(s._active or s._batch for s in sessions)
    assert hit > 20, hit


def test_owners_that_are_taken_are_known(model: k3.Model) -> None:
    """An owner in the middle that is busy: those before it and behind it are taken, and listed."""
    from k3session.batch import _Part

    with crowd(model, 6) as sessions:
        owners: list[Any] = []
        with sessions[2]._owner, sessions[5]._owner:
            ready = _take(owners, [_Part(s, 1) for s in sessions])
        assert [p.session for p in ready] == [sessions[i] for i in (0, 1, 3, 4)]
        assert owners == [sessions[i]._owner for i in (0, 1, 3, 4)]
        for i in (0, 1, 3, 4):
            with pytest.raises(k3.SessionBusyError):
                sessions[i].step(1)
        for owner in owners:
            owner.__exit__(None, None, None)
        model.step([(s, 1) for s in sessions])


def test_two_batches_at_once_beside_single_steps(nano: Path) -> None:
    with k3.Model.open(nano, threads=2) as model, crowd(model, 9) as sessions, twins(sessions) as alone:
        errors: list[BaseException] = []

        def together(mine: list[k3.Session]) -> None:
            try:
                for i in range(counts(15, 300)):
                    model.step([(s, i % 97) for s in mine])
                    model.forward([(s, [i % 97, 3]) for s in mine])
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        def single(session: k3.Session) -> None:
            try:
                for i in range(counts(15, 300)):
                    session.step(i % 97)
                    session.prefill([i % 97, 3])
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        threads = [threading.Thread(target=together, args=(sessions[i : i + 3],)) for i in (0, 3)]
        threads += [threading.Thread(target=single, args=(s,)) for s in sessions[6:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not errors, errors
        for session, copy in zip(sessions, alone, strict=True):
            single(copy)
            same_sessions(session, copy)


def test_one_session_in_two_batches(model: k3.Model) -> None:
    """Whoever comes second is refused for that session, and steps the others."""
    with crowd(model, 3) as sessions:
        done = {"rows": 0, "busy": 0}
        lock = threading.Lock()

        def work(other: k3.Session) -> None:
            for _ in range(counts(100, 2000)):
                try:
                    rows: Sequence[Any] = model.step([(sessions[0], 1), (other, 2)])
                except k3.BatchError as error:
                    rows = error.results
                with lock:
                    done["rows"] += sum(isinstance(r, np.ndarray) for r in rows)
                    done["busy"] += sum(isinstance(r, k3.SessionBusyError) for r in rows)

        start = sum(s.position for s in sessions)
        threads = [threading.Thread(target=work, args=(s,)) for s in sessions[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(s.position for s in sessions) == start + done["rows"]
        assert done["rows"] + done["busy"] == 4 * counts(100, 2000)


# What it takes.


def test_scratch_is_kept_and_goes_with_the_model(nano: Path) -> None:
    with k3.Model.open(nano, threads=1) as model, crowd(model, 5) as sessions:
        assert model._batch_scratch is None
        model.step([(s, 1) for s in sessions[:2]])
        small = model._batch_scratch
        model.step([(s, 1) for s in sessions[:1]])
        assert model._batch_scratch is small
        model.step([(s, 1) for s in sessions])
        large = model._batch_scratch
        assert large is not small and large.segments_room == 8
        model.step([(s, 1) for s in sessions[:3]])
        assert model._batch_scratch is large
    assert model._batch_scratch is None


def test_scratch_is_written_before_it_is_read(model: k3.Model) -> None:
    with crowd(model, 5) as sessions, twins(sessions) as alone:
        for i, n in enumerate((1, 30, 1, 3)):
            model.forward([(s, prompt(n, seed=i)) for s in sessions])
            model._batch_scratch.poison()
            for single in alone:
                single.prefill(prompt(n, seed=i))
        for session, single in zip(sessions, alone, strict=True):
            same_sessions(session, single)


def test_memory_comes_back(model: k3.Model) -> None:
    def many(n: int) -> None:
        for _ in range(n):
            with crowd(model, 6) as sessions:
                model.forward([(s, prompt(20)) for s in sessions])
                model.step([(s, 1) for s in sessions])

    many(20)
    before = resident()
    many(counts(60, 1000))
    assert resident() - before < 2 << 20


def test_passes_are_full(model: k3.Model) -> None:
    """Weights are read once for 128 rows, whoever they belong to."""
    rows: list[tuple[int, ...]] = []
    real = model._decoder

    class Decoder:
        def forward(self, scratch: Any, timelines: Any, counts: list[int], *rest: Any) -> Any:
            rows.append(tuple(counts))
            return real.forward(scratch, timelines, counts, *rest)

    with crowd(model, 3) as sessions:
        model._decoder = Decoder()
        try:
            model.forward([(sessions[0], prompt(300)), (sessions[1], prompt(2)), (sessions[2], prompt(60))])
        finally:
            model._decoder = real
    assert [sum(r) for r in rows] == [CHUNK_ROWS, CHUNK_ROWS, 300 + 2 + 60 - 2 * CHUNK_ROWS]
    assert rows[0] == (84, 2, 42)
