# SPDX-License-Identifier: MIT
"""Drafts: what was accepted is what stepping would have made it, and what was not has left no trace."""

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
from checkpoint_tools import Raw, Tensors, changed, floats
from core_access import counts
from session_tools import prompt, resident, same_sessions, step_all, unchanged

import k3session as k3
from k3session.memory import CHUNK_ROWS

CAPACITY = 40
BEFORE = 10


@pytest.fixture
def s(model: k3.Model) -> Iterator[k3.Session]:
    """A session of 10 tokens that may hold 40."""
    with model.session(capacity=CAPACITY) as session:
        session.prefill(prompt(BEFORE))
        yield session


def stepped(model: k3.Model, ids: Any, latent: str = "fp32") -> k3.Session:
    """A session that took in ten tokens at once, and these one by one."""
    session = model.session(capacity=CAPACITY, latent=latent)
    session.prefill(prompt(BEFORE))
    for token in ids:
        session.step(int(token))
    return session


# What is accepted.


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16])
def test_accepting_is_stepping(model: k3.Model, n: int, latent: str) -> None:
    ids = prompt(n, seed=3)
    for kept in range(n + 1):
        with model.session(capacity=CAPACITY, latent=latent) as session:
            session.prefill(prompt(BEFORE))
            with stepped(model, [], latent) as straight:
                rows = step_all(straight, ids)
            with session.verify(ids) as d:
                assert d.logits.dtype == np.float32 and np.array_equal(d.logits, rows)
                assert d.tokens.dtype == np.int32 and np.array_equal(d.tokens, ids)
                assert d.accepted is None
                row = d.accept(kept)
                assert d.accepted == kept and session.position == BEFORE + kept
                if kept:
                    assert row is not None and np.array_equal(row, rows[kept - 1])
                    row[:] = 0  # the caller's own
                else:
                    assert row is None
            with stepped(model, ids[:kept], latent) as straight:
                same_sessions(session, straight)
                assert np.array_equal(step_all(session, prompt(6, 4)), step_all(straight, prompt(6, 4)))
                same_sessions(session, straight)


def test_where_pages_and_conv_windows_end(model: k3.Model) -> None:
    # Latent pages hold 64 positions, windows three: drafts that begin and end beside both.
    for start in (1, 2, 3, 61, 62, 63, 64, 65, 127):
        ids = prompt(start + 8, seed=start)
        for kept in (0, 1, 2, 3, 5, 8):
            with model.session() as session, model.session() as straight:
                session.prefill(ids[:start])
                with session.verify(ids[start:]) as d:
                    d.accept(kept)
                straight.prefill(ids[: start + kept])
                same_sessions(session, straight)
                assert np.array_equal(session.step(1), straight.step(1))


def test_an_empty_session_and_the_longest_draft(model: k3.Model) -> None:
    ids = prompt(CHUNK_ROWS)
    with model.session() as session, model.session() as straight:
        with session.verify(ids) as d:
            d.accept(77)
        straight.prefill(ids[:77])
        same_sessions(session, straight)


def test_five_hundred_tokens_by_random_drafts(model: k3.Model, tmp_path: Path) -> None:
    """With other calls in between, which leave nothing behind in what the next draft works on."""
    rng = np.random.default_rng(11)
    ids = prompt(520)
    session, straight = model.session(), model.session()
    session.prefill(ids[:3])
    while session.position < 500:
        at, n = session.position, int(rng.integers(1, 9))
        with session.verify(np.concatenate([ids[at : at + n], rng.integers(0, 97, 2)])) as d:
            if rng.integers(0, 5):
                d.accept(int(rng.integers(0, n + 1)))
        at, kind = session.position, rng.integers(0, 8)
        if kind == 0:
            snap = session.snapshot()
            session.prefill(prompt(5))
            session.restore(snap)
        elif kind == 1:
            session.save(tmp_path / "a.k3s")
            session.close()
            session = k3.Session.load(model, tmp_path / "a.k3s")
        elif kind == 2:
            session.step(ids[at])
        elif kind == 3:
            session._scratch.poison()
    straight.prefill(session.tokens)
    assert np.array_equal(session.tokens, ids[: session.position])
    same_sessions(session, straight)
    session.close()
    straight.close()


def test_accepting_reads_no_weights(nano: Path) -> None:
    with k3.Model.open(nano, threads=1) as model, model.session() as session:
        session.prefill(prompt(5))
        calls: list[int] = []

        class Watched:
            def __init__(self, decoder: Any) -> None:
                self._decoder = decoder

            def forward(self, *a: Any) -> Any:
                calls.append(1)
                return self._decoder.forward(*a)

            def accept(self, *a: Any) -> Any:
                return self._decoder.accept(*a)

        session._decoder = Watched(session._decoder)
        with session.verify([1, 2, 3]) as d:
            d.accept(2)
        assert len(calls) == 1


def test_sampling_and_meta_stay(s: k3.Session) -> None:
    next(s.generate(1, sampling=k3.Sampling(seed=4)))
    sampling = s.sampling
    with s.verify([1, 2]) as d:
        d.accept(1)
    assert s.sampling is sampling


def test_logits_are_read_only_and_stay(s: k3.Session) -> None:
    with s.verify([1, 2, 3]) as d:
        rows = d.logits
        with pytest.raises(ValueError, match="read-only"):
            rows[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            d.tokens[0] = 1
        kept = rows.copy()
        d.accept(1)
        s.prefill(prompt(5))
    assert np.array_equal(rows, kept) and np.array_equal(d.logits, kept)


def test_marks_are_made_on_the_way(model: k3.Model) -> None:
    with model.session(marks=k3.Marks(every=4, prefill=False)) as session:
        for _ in range(3):
            with session.verify([1, 2, 3, 4, 5]) as d:
                d.accept(3)
        assert [p for p, kind in session.reachable() if kind == "every"] == [6]
        session.rewind(6, max_replay=0)
        with model.session() as straight:
            straight.prefill([1, 2, 3, 1, 2, 3])
            same_sessions(session, straight)


# What is not.


def test_leaving_commits_nothing(s: k3.Session) -> None:
    with unchanged(s), s.verify([1, 2, 3]):
        pass
    with unchanged(s), s.verify([1, 2, 3]) as d:
        assert d.accept(0) is None
    with unchanged(s), pytest.raises(ZeroDivisionError), s.verify([1, 2, 3]):
        raise ZeroDivisionError
    with unchanged(s):
        s.verify([1, 2, 3])  # not even run


def test_a_draft_is_read_while_it_is_open(s: k3.Session) -> None:
    with s.verify([1, 2, 3]) as d:
        assert s.position == BEFORE and s.tokens.size == BEFORE and s.logits is not None
        assert s.nbytes > 0 and s.layers[0].position == BEFORE and "position 10 of 40" in repr(s)
        assert repr(d) == f"<Draft of 3 tokens for {s.name}: open>"
        assert s.cancel() is False
    assert repr(d).endswith("not open>")


MEANWHILE: dict[str, Callable[[k3.Session], Any]] = {
    "step": lambda s: s.step(1),
    "prefill": lambda s: s.prefill([1]),
    "generate": lambda s: next(s.generate(1)),
    "verify": lambda s: s.verify([1]).__enter__(),
    "snapshot": lambda s: s.snapshot(),
    "save": lambda s: s.save("nowhere.k3s"),
    "fork": lambda s: s.fork(),
    "mark": lambda s: s.mark(),
    "rewind": lambda s: s.rewind(0),
    "set_tokens": lambda s: s.set_tokens([1]),
}


def test_any_other_call_meanwhile_is_refused(s: k3.Session) -> None:
    snap = s.snapshot()
    uses = MEANWHILE | {"restore": lambda s: s.restore(snap)}
    with s.verify([1, 2, 3]) as d:
        for use in uses.values():
            with pytest.raises(
                k3.SessionBusyError, match=rf"{s.name} has an open draft of 3 tokens: accept\(\) it, or leave"
            ):
                use(s)
        d.accept(2)
        s.step(1)  # the draft is over
    assert s.position == BEFORE + 3
    with s.verify([1]):
        pass
    for name in ("step", "prefill", "snapshot"):
        uses[name](s)


def test_close_ends_a_draft(model: k3.Model) -> None:
    session = model.session()
    with session.verify([1, 2]) as d:
        session.close()
        with pytest.raises(k3.ClosedError, match="has been closed"):
            d.accept(1)
    with pytest.raises(k3.ClosedError):
        session.verify([1])
    d = (again := model.session()).verify([1])
    again.close()
    with pytest.raises(k3.ClosedError), d:
        pass


def test_leaving_the_sessions_block_inside_a_draft(model: k3.Model) -> None:
    session = model.session()
    with session.verify([1, 2]):
        with session:
            pass
        assert session.is_closed
    assert session not in model.sessions


def test_once(s: k3.Session) -> None:
    with s.verify([1, 2, 3]) as d:
        d.accept(1)
        for n in (0, 1, 2):
            with pytest.raises(k3.ClosedError, match="not open any more: it was accepted, or its with block"):
                d.accept(n)
    with s.verify([1, 2, 3]) as d:
        pass
    with unchanged(s), pytest.raises(k3.ClosedError, match="not open any more"):
        d.accept(1)
    draft = s.verify([4])
    with pytest.raises(k3.ClosedError, match="not open"):
        draft.accept(1)
    with pytest.raises(k3.ConfigError, match="has not been run: its logits are there inside 'with"):
        draft.logits  # noqa: B018 - a property that raises
    with draft, pytest.raises(k3.SessionBusyError):
        draft.__enter__()
    with draft:  # and again, where the session stands now
        draft.accept(1)
    assert s.tokens[-1] == 4


@pytest.mark.parametrize("n", [-1, 4, True, 1.0, "1", None])
def test_numbers_that_cannot_be_accepted(s: k3.Session, n: Any) -> None:
    with s.verify([1, 2, 3]) as d:
        with pytest.raises(k3.ConfigError, match=r"expected a number of tokens from 0 to 3, the length"):
            d.accept(n)
        assert d.accept(np.int64(2)) is not None  # it stayed open
    assert s.position == BEFORE + 2


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([], k3.InvalidTokenError, "expected at least one token"),
        ([97], k3.InvalidTokenError, "token 97 at 0"),
        ([1, -1], k3.InvalidTokenError, "token -1 at 1"),
        ("AB", k3.InvalidTokenError, "not text"),
        ([1.5], k3.InvalidTokenError, "float64"),
        (np.zeros((2, 64), np.float32), k3.InvalidTokenError, "found embeddings"),
        (np.ones(CHUNK_ROWS + 1, int), k3.ConfigError, "the draft has 129 tokens; expected from 1 to 128"),
    ],
)
def test_what_is_no_draft(s: k3.Session, ids: Any, error: type[Exception], words: str) -> None:
    with unchanged(s), pytest.raises(error, match=words):
        s.verify(ids)


def test_capacity(s: k3.Session) -> None:
    with unchanged(s), pytest.raises(k3.CapacityError, match="holds 10 of 40 tokens and cannot take 31 more"):
        s.verify(prompt(31)).__enter__()
    with s.verify(prompt(30)) as d:
        d.accept(30)
    assert s.position == s.capacity
    with pytest.raises(k3.CapacityError):
        s.verify([1]).__enter__()


def poisoned(nano: Path, folder: Path, token: int) -> Path:
    """The nano checkpoint with NaN in the embedding of one token."""

    def edit(tensors: Tensors) -> None:
        raw = tensors["language_model.model.embed_tokens.weight"]
        values = floats(raw).copy()
        values[token] = np.nan
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors["language_model.model.embed_tokens.weight"] = Raw(raw.dtype, raw.shape, bits.tobytes())

    return changed(nano, folder, tensors=edit)


def test_a_value_that_is_not_finite_leaves_the_session_as_it_was(nano: Path, tmp_path: Path) -> None:
    with (
        k3.Model.open(poisoned(nano, tmp_path / "model", 13), threads=1) as model,
        model.session() as session,
    ):
        session.prefill([1, 2, 3])
        with (
            unchanged(session),
            pytest.raises(
                k3.NonFiniteError,
                match=rf"^model.embed_tokens gave .* in a draft of 3 tokens at position 3; .* {session.name} is as",
            ) as error,
        ):
            session.verify([4, 13, 5]).__enter__()
        assert error.value.layer == "model.embed_tokens"
        with session.verify([4, 5]) as d:
            d.accept(2)
        with pytest.raises(k3.NonFiniteError):
            session.step(13)
        with pytest.raises(k3.NonFiniteError, match="has failed and accepts only"):
            session.verify([4]).__enter__()


def test_ctrl_c_right_after_the_pass_leaves_no_draft(s: k3.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    run = s._run

    def interrupted(draft: k3.Draft) -> None:
        run(draft)
        raise KeyboardInterrupt

    monkeypatch.setattr(s, "_run", interrupted)
    with unchanged(s):
        with pytest.raises(KeyboardInterrupt):
            s.verify([1, 2]).__enter__()
        s.snapshot()  # no draft is open


def test_cancelling_a_draft(model: k3.Model) -> None:
    with model.session() as session, model.session() as straight:
        session.prefill(prompt(300))
        stopped, done = [0], threading.Event()

        def cancel() -> None:
            while not done.is_set():
                stopped[0] += session.cancel()
                time.sleep(0.0003)

        thread = threading.Thread(target=cancel)
        thread.start()
        raised = 0
        began = time.perf_counter()
        while not raised and time.perf_counter() - began < 20:
            try:
                with session.verify(prompt(128)):
                    pass
            except k3.PassCancelled as error:
                raised += error.position == 300 == session.position
        done.set()
        thread.join()
        assert raised and stopped[0]
        straight.prefill(prompt(300))
        same_sessions(session, straight)


def test_another_thread_meets_an_open_draft(s: k3.Session) -> None:
    found: list[Exception] = []

    def use() -> None:
        for call in MEANWHILE.values():
            try:
                call(s)
            except k3.SessionBusyError as error:
                found.append(error)

    with s.verify([1, 2]) as d:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        d.accept(1)
    assert len(found) == 4 * len(MEANWHILE) and s.position == BEFORE + 1


def test_threads_change_no_bit(nano: Path, model: k3.Model) -> None:
    with k3.Model.open(nano, threads=3) as wide, model.session() as one, wide.session() as three:
        for session in (one, three):
            session.prefill(prompt(50))
            with session.verify(prompt(20, 1)) as d:
                d.accept(11)
        same_sessions(one, three)


def test_memory_comes_back(model: k3.Model) -> None:
    def many(n: int) -> None:
        for i in range(n):
            with model.session() as session:
                session.prefill(prompt(20))
                with session.verify(prompt(8)) as d:
                    if i % 3:
                        d.accept(i % 9)

    many(50)
    before = resident()
    many(counts(300, 3000))
    assert resident() - before < 2 << 20


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)
def test_ctrl_c_at_any_moment(model: k3.Model) -> None:
    rng = np.random.default_rng(5)
    ids = prompt(3000)
    hit = 0
    for _ in range(counts(40, 1000)):
        with model.session() as session, model.session() as straight:
            timer = threading.Timer(rng.uniform(0.001, 0.01), lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while session.position < 2500:
                    at = session.position
                    with session.verify(ids[at : at + 6]) as d:
                        d.accept(at % 7)
                    session.step(ids[session.position])
                timer.join()
                time.sleep(0.02)
            except KeyboardInterrupt:
                hit += 1
            timer.join()
            assert np.array_equal(session.tokens, ids[: session.position])
            if session.position:
                straight.prefill(session.tokens)
            same_sessions(session, straight)
            assert np.array_equal(session.step(1), straight.step(1))  # no draft is left open
    assert hit > 20, hit
