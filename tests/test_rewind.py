# SPDX-License-Identifier: MIT
"""Going back: marks, automatic marks within a budget, replay, other tokens, and marks inside snapshots; all exact."""

from __future__ import annotations

import gc
import json
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, changed
from core_access import counts
from golden_data import GOLDEN, TINY
from session_tools import contents, prompt, same, same_sessions, step_all, unchanged

import k3session as k3
from k3session.marks import Point, fitting
from k3session.snapshot_file import SnapshotReader, serialize
from k3session.synth import synth

PAGE = 4
"""Rows of a page where a test wants small ones."""
IDS = prompt(60)
FIXED = 4 * (3 * 3 * 48 + 3 * 16 * 16) * 4
"""Bytes of a recurrent state: conv windows and matrices of four KDA layers."""
ROW = 97 * 4
NONE = k3.Marks(every=0, prefill=False)


def page_bytes(rows: int = 64, latent: str = "fp32") -> int:
    return 3 * rows * 48 * (4 if latent == "fp32" else 2)


def opened(model: k3.Model, *, pages: int = PAGE, **options: Any) -> k3.Session:
    """A session with latent pages of a size of its own."""
    session = model.session(**options)
    session._timeline = session._decoder.timeline(session.latent == "bf16", pages)
    return session


def straight(model: k3.Model, ids: Any, **options: Any) -> dict[str, Any]:
    """What a session is that took in these tokens and did nothing else."""
    with model.session(marks=False, **options) as session:
        if len(ids):
            session.prefill(ids)
        return contents(session)


def only_marks_keep(session: k3.Session) -> int:
    """Bytes that would be free without the automatic marks, found by letting them go one by one."""
    points = list(session._points)
    timelines = [p.timeline for p in points]
    total = sum(p.row.nbytes for p in points if p.row is not None)
    session._points = type(session._points)()
    del points
    while timelines:
        total += timelines[-1].own_bytes
        timelines.pop()
    return total


@pytest.fixture
def s(model: k3.Model) -> Iterator[k3.Session]:
    """A session of 60 tokens in pages of four, marked at 16, 32, 48 and 60."""
    with opened(model, marks=k3.Marks(every=16), capacity=200) as session:
        session.prefill(IDS, chunk=4)
        assert [p for p, _ in session.reachable()] == [0, 16, 32, 48, 60]
        yield session


# To a position.


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize("every", [0, 1, 5, 7])
def test_every_position_is_as_if_nothing_had_followed(model: k3.Model, latent: str, every: int) -> None:
    rest = prompt(9, seed=3)
    with opened(model, latent=latent, marks=k3.Marks(every=every, prefill=False)) as session:
        step_all(session, IDS[:30])
        for position in range(31):
            with session.fork() as fork:
                replayed = fork.rewind(position)
                assert replayed == (0 if position == 30 else position % every if every else position)
                same(contents(fork), straight(model, IDS[:position], latent=latent))
                fork.prefill(rest, chunk=4)
                same(contents(fork), straight(model, [*IDS[:position], *rest], latent=latent))
                fork.rewind(position)
                same(contents(fork), straight(model, IDS[:position], latent=latent))


@pytest.mark.parametrize("pages", [1, 3, 64])
def test_back_and_forth_across_pages(model: k3.Model, pages: int) -> None:
    rng = np.random.default_rng(pages)
    with opened(model, pages=pages, marks=k3.Marks(every=8)) as session:
        ids: list[int] = []
        for _ in range(counts(40, 1000)):
            more = prompt(int(rng.integers(1, 12)), seed=int(rng.integers(1 << 30))).tolist()
            session.prefill(more)
            ids += more
            at = int(rng.integers(max(0, len(ids) - 20), len(ids) + 1))
            session.rewind(at)
            ids = ids[:at]
            same(contents(session), straight(model, ids))


def test_a_zero_state_is_not_an_earlier_state(s: k3.Session, model: k3.Model) -> None:
    """What peers do on a trim; this is what the comparisons above must be able to find."""
    s.rewind(32)
    kept = contents(s)
    empty = [layer.export() for layer in model.session()._timeline.layers]
    arrays = [
        {n: zero[n] if n != "latent" else a for n, a in layer.export().items()}
        for layer, zero in zip(s._timeline.layers, empty, strict=True)
    ]
    s._timeline.replace(32, arrays)
    with pytest.raises(AssertionError):
        same(contents(s), kept)


def test_a_second_time_costs_nothing(s: k3.Session) -> None:
    assert s.rewind(45) == 13
    assert s.reachable() == [(0, "start"), (16, "every"), (32, "every"), (45, "rewind")]
    for _ in range(3):
        s.prefill(prompt(5, seed=1))
        assert s.rewind(45) == 0 and s.position == 45


def test_to_where_it_stands(s: k3.Session) -> None:
    with unchanged(s):
        assert s.rewind(60) == 0 and s.rewind(np.int64(60)) == 0
    assert [p for p, _ in s.reachable()] == [0, 16, 32, 48, 60]


def test_back_to_nothing(s: k3.Session, model: k3.Model) -> None:
    assert s.rewind(0) == 0 and s.position == 0 and s.logits is None and s.tokens.size == 0
    assert s.reachable() == [(0, "start")]
    s.prefill(IDS)
    same(contents(s), straight(model, IDS))


def test_sampling_goes_its_way_again(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(IDS)
        texts = []
        for _ in range(2):
            texts.append([r.token for r in session.generate(12, sampling=k3.Sampling(seed=4, stop_ids=()))])
            assert session.rewind(60) == 0
        assert texts[0] == texts[1]
        assert session.sampling is not None and session.sampling.seed == 4


# To a mark.


def test_a_mark_is_a_point_to_go_to(s: k3.Session, model: k3.Model) -> None:
    s.rewind(20)
    mark = s.mark("here")
    assert (mark.position, mark.label, mark.is_closed) == (20, "here", False)
    assert repr(mark) == "<Mark 'here' at 20>" and (20, "here") in s.reachable()
    for seed in range(5):
        s.prefill(prompt(30, seed=seed))
        assert s.rewind(mark) == 0
        same(contents(s), straight(model, IDS[:20]))


def test_a_mark_on_another_way_is_still_there(s: k3.Session, model: k3.Model) -> None:
    ways = [prompt(13, seed=i) for i in range(4)]
    marks = []
    for way in ways:
        s.rewind(22)
        s.prefill(way)
        marks.append(s.mark())
    for number in (2, 0, 3, 1, 1):
        s.rewind(marks[number])
        same(contents(s), straight(model, [*IDS[:22], *ways[number]]))
        assert {16, 22, 35} <= {p for p, _ in s.reachable()}
        s.step(number)
        same(contents(s), straight(model, [*IDS[:22], *ways[number], number]))
        s.rewind(35)  # automatic marks of the other ways are none of this one
        same(contents(s), straight(model, [*IDS[:22], *ways[number]]))
    s.rewind(0)
    s.rewind(marks[3])
    same(contents(s), straight(model, [*IDS[:22], *ways[3]]))


def test_a_mark_serves_positions_behind_it(s: k3.Session, model: k3.Model) -> None:
    s.rewind(20)
    mark = s.mark()
    s.prefill(IDS[20:], chunk=4)
    s._points = type(s._points)()
    assert s.reachable() == [(0, "start"), (20, "mark"), (60, "now")]
    assert s.rewind(23) == 3
    same(contents(s), straight(model, IDS[:23]))
    s.rewind(5)
    assert s.reachable() == [(0, "start"), (5, "rewind")]
    s.prefill(IDS[5:40])  # the same tokens again: the mark lies on the way again
    assert (20, "mark") in s.reachable()
    s._points = type(s._points)()
    assert s.rewind(21) == 1
    same(contents(s), straight(model, IDS[:21]))
    s.rewind(5)
    s.prefill(prompt(30, seed=9))  # other ones: it does not
    assert (20, "mark") not in s.reachable()
    mark.close()
    assert mark.nbytes == 0 and repr(mark) == "<Mark at 20: closed>"


def test_a_mark_costs_what_it_alone_keeps(s: k3.Session) -> None:
    mark = s.mark()
    assert mark.nbytes == ROW  # the rest is the session's too
    s.step(1)
    assert mark.nbytes == ROW  # and here that of an automatic mark
    s._points = type(s._points)()
    assert mark.nbytes == ROW + FIXED
    again = s.mark()
    s.step(2)
    s.rewind(mark)
    assert again.nbytes == ROW + FIXED + page_bytes(PAGE)
    s.prefill([1, 2])
    again.close()
    again.close()
    assert again.is_closed and mark.nbytes == ROW + FIXED


def test_the_end_of_a_mark(model: k3.Model) -> None:
    session, other = model.session(), model.session()
    session.prefill(IDS[:10])
    other.prefill(IDS[:5])
    mark, closed = session.mark("a"), session.mark()
    closed.close()
    with unchanged(session), pytest.raises(k3.ClosedError, match="has been closed: the mark at position 10"):
        session.rewind(closed)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(mark)
    other.rewind(mark)
    same_sessions(other, session)
    session.close()
    assert mark.is_closed and mark.nbytes == 0 and mark.position == 10
    with unchanged(other), pytest.raises(k3.ClosedError, match=f"{session.name} has been closed: the mark"):
        other.rewind(mark)
    other.close()


def test_marks_go_with_those_who_hold_them(model: k3.Model) -> None:
    with model.session(marks=False) as session:
        session.prefill(IDS)
        before = session._timeline.own_bytes
        for _ in range(200):
            session.mark()
        gc.collect()
        assert session._timeline.own_bytes == before
        assert len(list(session._marks)) == 0 and len(session._marks._refs) <= 64


def test_marks_of_something_else(model: k3.Model, tmp_path: Path) -> None:
    with (
        k3.Model.open(synth(tmp_path / "other", "nano", seed=5), threads=1) as other_model,
        other_model.session() as other,
        model.session(latent="bf16") as half,
        model.session(capacity=10) as session,
        model.session() as longer,
    ):
        for foreign in (other, half):
            foreign.prefill(IDS[:5])
            with unchanged(session), pytest.raises(k3.ConfigError, match="another model or with another lat"):
                session.rewind(foreign.mark())
        longer.prefill(IDS[:11])
        with pytest.raises(k3.CapacityError, match="holds 11 tokens; this session may hold 10"):
            session.rewind(longer.mark())


# What is refused.


@pytest.mark.parametrize(
    ("to", "options", "error", "words"),
    [
        (-1, {}, k3.RewindError, "position -1 cannot be reached: .* has been at 0 to 60; the nearest is 0"),
        (61, {}, k3.RewindError, "the nearest is 60"),
        (True, {}, k3.ConfigError, "to is True; expected a Mark, or a position as an integer"),
        (1.0, {}, k3.ConfigError, "to is 1.0"),
        ("here", {}, k3.ConfigError, "to is 'here'"),
        (None, {}, k3.ConfigError, "to is None"),
        (3, {"max_replay": -1}, k3.ConfigError, "max_replay is -1; expected None or"),
        (3, {"max_replay": True}, k3.ConfigError, "max_replay is True"),
        (3, {"max_replay": 2.5}, k3.ConfigError, "max_replay is 2.5"),
    ],
)
def test_rewind_refuses(
    s: k3.Session, to: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with unchanged(s), pytest.raises(error, match=words) as found:
        s.rewind(to, **options)
    if isinstance(found.value, k3.RewindError):
        assert found.value.nearest == min(max(to, 0), 60) and found.value.cost is None
        assert isinstance(found.value, ValueError)


def test_a_limit_on_replay(s: k3.Session, model: k3.Model) -> None:
    for position in range(61):
        needed = position % 16 if position < 60 else 0
        for limit in (0, 3, 15):
            with s.fork() as t:
                if needed <= limit:
                    assert t.rewind(position, max_replay=limit) == needed
                    continue
                words = (
                    f"takes {needed} tokens of replay from {position - needed} on, and max_replay is {limit}"
                )
                with unchanged(t), pytest.raises(k3.RewindError, match=words) as error:
                    t.rewind(position, max_replay=limit)
                assert error.value.cost == needed
                nearest = error.value.nearest
                assert nearest == position - needed + limit and f"reached is {nearest}" in str(error.value)
                assert t.rewind(nearest, max_replay=limit) == limit
                same(contents(t), straight(model, IDS[:nearest]))


def embedded(session: k3.Session) -> None:
    """10 tokens, 8 embeddings, 12 tokens."""
    session.prefill(IDS[:10])
    session.prefill(np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32))
    session.prefill(IDS[:12])


def test_across_embeddings_there_is_no_way(model: k3.Model) -> None:
    with opened(model, marks=k3.Marks(every=0)) as session, model.session() as plain:
        embedded(session)
        assert session.reachable() == [(0, "start"), (10, "prefill"), (18, "prefill"), (30, "prefill")]
        for position in (29, 19):
            with session.fork() as fork:
                assert fork.rewind(position) == position - 18
        for position in (11, 17):
            words = r"embeddings, or ids that a snapshot left out, lie at 10, and no mark .* is 10"
            with unchanged(session), pytest.raises(k3.RewindError, match=words) as error:
                session.rewind(position)
            assert (error.value.nearest, error.value.cost) == (10, None)
        session.rewind(18)
        plain.prefill(IDS[:10])
        plain.prefill(np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32))
        same_sessions(session, plain)
        assert session.rewind(10) == 0
        same(contents(session), straight(model, IDS[:10]))

    with opened(model, marks=False) as session:
        embedded(session)
        mark = session.mark()
        for position in (29, 18, 11):
            with pytest.raises(k3.RewindError) as error:
                session.rewind(position)
            assert error.value.nearest == 10
            with pytest.raises(k3.RewindError, match="cannot be reached") as error:
                session.rewind(position, max_replay=4)
            assert error.value.nearest == 4
        assert session.rewind(7) == 7  # and before them there is
        session.prefill(np.random.default_rng(2).normal(size=(20, 64)).astype(np.float32))
        session.rewind(mark)
        with opened(model, marks=False) as other:
            embedded(other)
            same_sessions(session, other)


def test_marks_behind_other_embeddings_are_not_on_the_way(model: k3.Model) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 6, 64)).astype(np.float32)
    with opened(model, marks=False) as session:
        marks: list[k3.Mark] = []
        for part in (rows[0], rows[1], rows[0]):
            session.rewind(0)
            session.prefill(part)
            session.prefill(IDS[:3])
            marks.append(session.mark(f"at {len(marks)}"))
            session.prefill(IDS[3:6])
        assert [p for p, _ in session.reachable()] == [0, 9, 12]
        marks[2].close()
        assert session.rewind(9) == 0  # by the first one, which has the same rows
        session.rewind(marks[1])
        marks[1].close()
        session.prefill(IDS[3:6])
        with pytest.raises(k3.RewindError):
            session.rewind(9)


def test_ids_that_were_left_out(s: k3.Session, model: k3.Model) -> None:
    snapshot = s.snapshot(include_tokens=False)
    with opened(model) as session:
        session.restore(snapshot)
        session.prefill(IDS[:10])
        mark = session.mark("late")
        session.prefill(prompt(100))  # the buffer of ids grows
        assert [p for p, _ in session.reachable()] == [0, 60, 70, 170]
        assert session.rewind(65) == 5
        assert session.rewind(60) == 0
        with pytest.raises(k3.RewindError, match="up to 60 came with a snapshot") as error:
            session.rewind(59)
        assert error.value.nearest == 0
        with session.fork() as fork, pytest.raises(k3.RewindError):
            fork.rewind(59)
        session.rewind(mark)
        assert (70, "late") in session.reachable()
        session.rewind(0)


# A session that has failed.


def nan_row(token: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = "language_model.model.embed_tokens.weight"
        raw = tensors[name]
        values = np.frombuffer(raw.data, np.uint16).copy().reshape(raw.shape)
        values[token] = 0x7FC0
        tensors[name] = Raw(raw.dtype, raw.shape, values.tobytes())

    return edit


def test_a_failed_session_goes_on_after_a_rewind(nano: Path, tmp_path: Path) -> None:
    ids = [t for t in IDS.tolist() if t != 13]
    with k3.Model.open(changed(nano, tmp_path / "m", tensors=nan_row(13)), threads=1) as model:
        expected = straight(model, ids[:20])
        for back in (lambda s, m: s.rewind(20), lambda s, m: s.rewind(m), lambda s, m: s.rewind(30)):
            with model.session(marks=k3.Marks(every=4)) as session:
                session.prefill(ids[:20])
                mark = session.mark()
                session.prefill(ids[20:30])
                with pytest.raises(k3.NonFiniteError):
                    session.step(13)
                for use in (
                    session.fork,
                    session.mark,
                    lambda: session.set_tokens([1]),
                    lambda: session.step(1),
                ):
                    with pytest.raises(
                        k3.NonFiniteError, match=r"accepts only restore\(\), rewind\(\) and clo"
                    ):
                        use()
                assert (30, "prefill") in session.reachable()
                with pytest.raises(k3.RewindError):
                    session.rewind(31)
                with pytest.raises(k3.NonFiniteError, match="accepts only"):
                    session.step(1)
                back(session, mark)
                session.mark().close()  # which a failed session refuses
                session.rewind(20)
                same(contents(session), expected)
                with pytest.raises(k3.NonFiniteError, match="as it was"):
                    session.set_tokens([*ids[:25], 13])
                same(contents(session), expected)
                session.step(1)


# Breaking off.


def test_an_interrupt_leaves_everything(s: k3.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    left, passes = 0, s._pass

    def breaking(*what: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return passes(*what)

    monkeypatch.setattr("k3session.session.branches.CHUNK_ROWS", 4)
    monkeypatch.setattr(s, "_pass", breaking)
    for use in (lambda: s.rewind(47), lambda: s.set_tokens([*IDS[:31], *IDS])):
        before = s.reachable()
        for done in range(3):
            left = done
            with unchanged(s), pytest.raises(KeyboardInterrupt):
                use()
            assert s.reachable() == before
        left = 100
        use()


def test_ctrl_c_at_any_time(model: k3.Model) -> None:
    ids = prompt(700)
    ends = [straight(model, ids), straight(model, ids[:430])]
    rng = np.random.default_rng(0)

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, ring)
    try:
        with model.session(marks=False) as session:
            session.prefill(ids)
            began = time.perf_counter()
            session.rewind(430)
            took = time.perf_counter() - began
            broken = 0
            for _ in range(counts(25, 500)):
                session.set_tokens(ids)
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.05, 1.2)) * took)
                    session.rewind(430)
                except KeyboardInterrupt:
                    broken += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                same(contents(session), ends[session.position == 430])
            assert broken > 3
    finally:
        signal.signal(signal.SIGALRM, old)


def test_a_cancel_leaves_everything(s: k3.Session) -> None:
    more = [*IDS[:40], *prompt(150, seed=1)]
    with unchanged(s), pytest.raises(k3.PassCancelled, match="stands at position 60, as before") as error:
        s.set_tokens(more, progress=lambda *_: s.cancel())
    assert error.value.position == 60
    assert s.set_tokens(more) == (32, 8, 150)


def test_an_error_of_the_progress_function_leaves_everything(s: k3.Session) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with unchanged(s), pytest.raises(ZeroDivisionError):
        s.set_tokens([1, 2, 3], progress=fail)


# Other tokens.


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (IDS, (60, 0, 0)),
        ([*IDS, 5, 6], (60, 0, 2)),
        (IDS[:48], (48, 0, 0)),
        (IDS[:50], (48, 2, 0)),
        ([*IDS[:50], 96, 1], (48, 2, 2)),
        ([*IDS[:16], *IDS[:9]], (16, 0, 9)),
        (IDS[:3], (0, 3, 0)),
        (IDS[1:], (0, 0, 59)),
        ([], (0, 0, 0)),
    ],
    ids=range(9),
)
def test_set_tokens_does_the_least(s: k3.Session, model: k3.Model, ids: Any, kept: tuple[int, ...]) -> None:
    before = s._counts.stepped + s._counts.prefilled
    found = s.set_tokens(ids)
    assert found == kept and sum(found) == len(ids)
    assert s._counts.stepped + s._counts.prefilled - before == found.replayed + found.computed
    same(contents(s), straight(model, ids))
    assert s.set_tokens(list(ids)) == (len(ids), 0, 0)


def test_a_chat_that_sends_everything_each_time(model: k3.Model) -> None:
    history: list[int] = []
    with opened(model) as session:
        for turn in range(6):
            history += prompt(11, seed=turn).tolist()
            kept = session.set_tokens(history)
            assert kept == (len(history) - 11, 0, 11)
            rows = list(session.generate(5, sampling=k3.Sampling(seed=turn, stop_ids=())))
            first = [r.token for r in rows]
            assert session.set_tokens(history) == (len(history), 0, 0)  # "regenerate"
            again = list(session.generate(5, sampling=k3.Sampling(seed=turn, stop_ids=())))
            assert [r.token for r in again] == first
            history += first
        same(contents(session) | {"facts": None}, straight(model, history) | {"facts": None})


def test_set_tokens_finds_marks_of_another_way(s: k3.Session, model: k3.Model) -> None:
    left = s.mark()
    s.rewind(10)
    s.prefill(prompt(9, seed=1))
    assert s.set_tokens([*IDS, 4]) == (60, 0, 1)
    same(contents(s), straight(model, [*IDS, 4]))
    left.close()


def test_set_tokens_and_embeddings(model: k3.Model) -> None:
    with opened(model) as session:
        embedded(session)
        tokens = session.tokens
        assert np.array_equal(tokens[:12], [*IDS[:10], -1, -1])
        assert session.set_tokens(IDS[:20]) == (10, 0, 10)
        same(contents(session), straight(model, IDS[:20]))


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([97], k3.InvalidTokenError, "token 97 at 0"),
        ([-1], k3.InvalidTokenError, "token -1 at 0"),
        ("text", k3.InvalidTokenError, "set_tokens takes token ids, not text"),
        ("", k3.InvalidTokenError, "not text"),
        (None, k3.InvalidTokenError, "token ids"),
        ([[1], [2, 3]], k3.InvalidTokenError, "a sequence of token ids"),
        (np.zeros((2, 64), np.float32), k3.InvalidTokenError, "embeddings go in with prefill"),
        (prompt(201), k3.CapacityError, "201 tokens do not fit .*, which may hold 200"),
    ],
)
def test_set_tokens_refuses(s: k3.Session, ids: Any, error: type[Exception], words: str) -> None:
    with unchanged(s), pytest.raises(error, match=words):
        s.set_tokens(ids)


def test_progress_of_set_tokens(s: k3.Session) -> None:
    seen: list[tuple[Any, ...]] = []
    s.set_tokens([*IDS[:50], *prompt(140, seed=1)], progress=lambda *event: seen.append(event))
    assert seen == [("set_tokens", 128, 142), ("set_tokens", 142, 142)]


# Automatic marks.


def test_when_marks_are_made(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(300))
        step_all(session, prompt(300, seed=1))
        assert session.reachable() == [
            (0, "start"), (256, "every"), (300, "prefill"), (556, "every"), (600, "now"),
        ]  # fmt: skip
    with model.session(marks=k3.Marks(every=3, prefill=False)) as session:
        step_all(session, IDS[:8])
        session.prefill(IDS[:4])
        assert [p for p, _ in session.reachable()] == [0, 3, 6, 12]
    for marks in (False, NONE):
        with model.session(marks=marks) as session:
            session.prefill(prompt(600))
            snapshot = session.snapshot()
            session.rewind(20)
            session.restore(snapshot)
            session.set_tokens(IDS)
            assert session.reachable() == [(0, "start"), (60, "now")] and session._due > 2**60
    with model.session(marks=k3.Marks(every=0)) as session:
        step_all(session, IDS)
        assert session.reachable() == [(0, "start"), (60, "now")]
        session.restore(session.snapshot())
        assert session.reachable() == [(0, "start"), (60, "load")]


def test_marks_are_made_on_a_long_way_back(model: k3.Model) -> None:
    with opened(model, marks=k3.Marks(every=200)) as session:
        session.set_tokens(prompt(1000))
        assert [p for p, _ in session.reachable()] == [0, 256, 512, 768, 1000]
        session._points = type(session._points)()
        assert session.rewind(900) == 900
        assert [p for p, _ in session.reachable()] == [0, 256, 512, 768, 900]
        assert session.rewind(513) == 1
        same(contents(session), straight(model, prompt(1000)[:513]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": -1}, "every is -1; expected a number of tokens of at least 0"),
        ({"every": 2.0}, "every is 2.0"),
        ({"every": True}, "every is True"),
        ({"budget": "1G"}, "budget is '1G'; expected a number of bytes"),
        ({"prefill": 1}, "prefill is 1; expected True or False"),
    ],
)
def test_a_policy_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(k3.ConfigError, match=words):
        k3.Marks(**options)


@pytest.mark.parametrize("marks", [True, 256, "all", k3.Sampling()])
def test_marks_are_a_policy(model: k3.Model, marks: Any) -> None:
    before = len(model.sessions)
    with pytest.raises(k3.ConfigError, match=r"expected None, False or k3session\.Marks"):
        model.session(marks=marks)
    assert len(model.sessions) == before


def test_the_budget_is_kept_to_the_byte(model: k3.Model) -> None:
    each = FIXED + ROW + page_bytes(PAGE)  # at 5, 10, 15 the last page is not full
    for bytes_, left in ((3 * each, 3), (3 * each - 1, 2), (each, 1), (each - 1, 0)):
        with opened(model, marks=k3.Marks(every=5, budget=bytes_)) as session:
            step_all(session, IDS[:19])
            assert len(session._points) == left and session._points.nbytes == left * each
            assert {p.nbytes for p in session._points} <= {each}
    with opened(model, marks=k3.Marks(every=4, budget=3 * (FIXED + ROW))) as session:
        step_all(session, IDS[:12])  # full pages are the session's
        assert session._points.nbytes == 3 * (FIXED + ROW) == only_marks_keep(session) + FIXED


def test_a_mark_counts_with_what_it_comes_to_keep(model: k3.Model) -> None:
    """Marks at 3, 7, 11 and 15, each in a page of its own; then the session leaves the pages to them."""
    with opened(model, marks=k3.Marks(every=0)) as session:
        for i in range(0, 16, 4):
            session.prefill(IDS[i : i + 4][: 3 if i == 0 else 4], chunk=1)
        assert [p for p, _ in session.reachable()] == [0, 3, 7, 11, 15]
        charged = session._points.nbytes
        assert charged == 4 * (FIXED + ROW + page_bytes(PAGE))
        session._timeline.become(session._decoder.timeline(False, PAGE))  # as far away as can be
        assert only_marks_keep(session) == charged


def test_the_sum_never_exceeds_the_budget(model: k3.Model) -> None:
    rng = np.random.default_rng(0)
    budget = 5 * (FIXED + ROW) + 2 * page_bytes(PAGE)
    with opened(model, marks=k3.Marks(every=6, budget=budget), capacity=400) as session:
        family = [session]
        ids: list[list[int]] = [[]]
        for _ in range(counts(150, 4000)):
            n = int(rng.integers(len(family)))
            one, past = family[n], ids[n]
            kind = rng.integers(6)
            if kind <= 1 and len(past) < 350:
                more = prompt(int(rng.integers(1, 20)), seed=int(rng.integers(1 << 30))).tolist()
                one.prefill(more)
                past += more
            elif kind == 2:
                at = int(rng.integers(len(past) + 1))
                one.rewind(at)
                del past[at:]
            elif kind == 3:
                past[:] = [*past[: int(rng.integers(len(past) + 1))], 3, 4]
                one.set_tokens(past)
            elif kind == 4 and len(family) < 4:
                family.append(one.fork())
                ids.append(list(past))
            elif kind == 5 and len(family) > 1:
                family.pop(n).close()
                ids.pop(n)
            for one in family:
                assert one._points.nbytes <= budget
                where = [p.position for p in one._points]
                assert where == sorted(set(where)) and (not where or where[-1] <= one.position)
        for one, past in zip(family, ids, strict=True):
            same(contents(one), straight(model, past))
            assert only_marks_keep(one) <= budget
            if one is not session:
                one.close()


def point(position: int, kind: str = "every", nbytes: int = 1) -> Point:
    return Point(position, kind, None, None, np.empty(0, np.int32), {}, None, nbytes, "")


def test_what_is_dropped_first() -> None:
    def kept(points: list[Point], present: int, budget: int) -> list[int]:
        return [p.position for p in fitting(points, present, budget)]

    # One of two neighbours goes first, and of equal gaps the one that is farther away.
    assert kept([point(1000), point(2000), point(2010), point(3000)], 3100, 3) == [1000, 2010, 3000]
    assert kept([point(1000), point(2000), point(3000)], 3000, 2) == [2000, 3000]
    # Ends of prefills weigh more, and the last one stays whatever there is.
    assert kept([point(1000), point(2000, "prefill"), point(3000), point(3900)], 4000, 3) == [
        2000,
        3000,
        3900,
    ]
    for budget in (1, 2, 3):
        marks = [point(1000), point(2000), point(2001, "prefill"), point(3000), point(4000)]
        assert 2001 in kept(marks, 4000, budget)
        assert 2001 in kept([*marks[:2], point(2001, "load"), *marks[3:]], 4000, budget)
    # What alone is larger than the budget is not kept, whatever else there is.
    assert kept([point(10), point(20, nbytes=9), point(30)], 40, 5) == [10, 30]
    # Gaps grow with the distance.
    points: list[Point] = []
    for position in range(256, 256 * 2000, 256):
        points = list(fitting([*points, point(position)], position, 12))
    gaps = np.diff([0, *[p.position for p in points]]) // 256
    assert len(points) == 12 and gaps[0] > 200 and gaps[-1] < 30 and np.all(gaps[3:] < gaps[:-3])


def test_dropping_a_mark_takes_one_look_at_each() -> None:
    looks = 0

    class Counted:
        kind, nbytes = "every", 1

        def __init__(self, at: int) -> None:
            self.at = at

        @property
        def position(self) -> int:
            nonlocal looks
            looks += 1
            return self.at

    fitting([Counted(i) for i in range(1, 1001)], 1000, 999)
    assert looks <= 2 * 1000


def test_marks_are_never_the_reason_for_a_lack_of_memory(s: k3.Session, model: k3.Model) -> None:
    decoder = s._decoder

    class Short:
        """Has no memory for another state while there are marks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(decoder, name)

        def forward(self, *arguments: Any) -> Any:
            if s._points:
                raise MemoryError
            return decoder.forward(*arguments)

    s._decoder = Short()
    s.step(5)
    assert s.reachable() == [(0, "start"), (61, "now")]
    s._decoder = decoder
    same(contents(s), straight(model, [*IDS, 5]))


# Marks inside a snapshot.


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["memory", "bytes", "file"])
def test_marks_travel(model: k3.Model, tmp_path: Path, latent: str, way: str) -> None:
    path = tmp_path / "a.k3s"
    with opened(model, latent=latent, marks=k3.Marks(every=16)) as session:
        session.prefill(IDS, chunk=4)
        session.step(1)
        expected = session.reachable()
        if way == "file":
            size = session.save(path, marks=True)
            assert session.save(tmp_path / "b.k3s") < size - 4 * FIXED
            assert k3.snapshot.verify_file(path)["ok"]
            listed = k3.snapshot.inspect_file(path)
            assert [m["position"] for m in listed["marks"]] == [16, 32, 48, 60]
            assert {n.split(".")[2] for n in listed["tensors"] if n.startswith("x.")} == {
                "16",
                "32",
                "48",
                "60",
            }
            again = k3.Session.load(model, path)
        else:
            snapshot = session.snapshot(marks=True)
            assert snapshot.nbytes > session.snapshot().nbytes + 4 * FIXED
            if way == "bytes":
                snapshot = k3.Snapshot.from_bytes(snapshot.to_bytes())
            again = opened(model, pages=3, latent=latent)
            again.restore(snapshot)
    with again:
        assert again.reachable() == [*expected[:-1], (61, "load")]
        for position in (55, 48, 33, 16, 5):
            with again.fork() as fork:
                assert fork.rewind(position) == (position - 48 if position > 48 else position % 16)
                same(contents(fork), straight(model, IDS[:position], latent=latent))
                fork.prefill([1, 2, 3])
                same(contents(fork), straight(model, [*IDS[:position], 1, 2, 3], latent=latent))
        again.step(2)
        same(contents(again), straight(model, [*IDS, 1, 2], latent=latent))


def test_marks_of_a_snapshot_share_its_latent_rows(s: k3.Session, model: k3.Model, tmp_path: Path) -> None:
    s.step(1)
    s.save(tmp_path / "a.k3s", marks=True)
    with k3.Session.load(model, tmp_path / "a.k3s") as session:
        session.step(2)
        points = session._points.points
        assert [p.nbytes for p in points] == [
            FIXED + ROW + page_bytes()
        ] * 5  # 60 and 61 in a page of 64 rows
        assert only_marks_keep(session) == 5 * (FIXED + ROW)
        assert session._timeline.own_bytes >= session.nbytes - page_bytes()


def test_marks_of_a_snapshot_within_the_budget(s: k3.Session, model: k3.Model, tmp_path: Path) -> None:
    path = tmp_path / "a.k3s"
    s.step(1)
    s.save(path, marks=True)
    each = FIXED + ROW
    for budget, left in ((4 * each, [32, 48, 60, 61]), (2 * each, [60]), (each, []), (each - 1, [])):
        with k3.Session.load(model, path, marks=k3.Marks(budget=budget)) as session:
            assert session._points.nbytes <= budget
            assert len(session._points) <= len(left)
            session.rewind(31)
            same(contents(session), straight(model, IDS[:31]))
    with k3.Session.load(model, path, marks=False) as session:
        assert session.reachable() == [(0, "start"), (61, "now")]
    with model.session(marks=NONE) as session:
        session.restore(s.snapshot(marks=True))
        assert session.reachable() == [(0, "start"), (61, "now")]


def test_marks_without_ids(s: k3.Session, model: k3.Model, tmp_path: Path) -> None:
    s.step(1)
    s.save(tmp_path / "a.k3s", marks=True, include_tokens=False)
    with k3.Session.load(model, tmp_path / "a.k3s") as session:
        assert [p for p, _ in session.reachable()] == [0, 16, 32, 48, 60, 61]
        with pytest.raises(k3.RewindError) as error:
            session.rewind(50)
        assert error.value.nearest == 48
        session.rewind(48)
        s.rewind(48)
        assert np.array_equal(session.step(7), s.step(7))
        assert session.rewind(48) == 0
        with pytest.raises(k3.RewindError, match="up to 48 came with a snapshot"):
            session.rewind(47)


def test_a_reader_that_knows_no_marks_passes_over_them(s: k3.Session, model: k3.Model) -> None:
    """Their tensors have names that every reader of this format skips, and nothing else depends on them."""
    s.step(1)
    snapshot = s.snapshot(marks=True)
    facts = {k: v for k, v in snapshot.facts.items() if k != "marks"}
    plain = k3.Snapshot.from_bytes(serialize(snapshot.parts(), facts))
    assert plain.marks == () and plain.nbytes == s.snapshot().nbytes
    with model.session() as session:
        session.restore(plain)
        same_sessions(session, s)
        assert session.reachable() == [(0, "start"), (61, "load")]


def damaged(snapshot: k3.Snapshot, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """A file with whole digests, whose tensors and facts were edited before."""
    parts, facts = {p.name: p for p in snapshot.parts()}, json.loads(json.dumps(snapshot.facts))
    edit(parts, facts)
    return serialize(list(parts.values()), facts)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p, f: p.pop("x.marks.32.layers.0.conv"), "the mark at 32 .* layers.0.conv"),
        (lambda p, f: f["marks"].append({"position": 40, "kind": "every"}), "list of marks cannot be read"),
        (lambda p, f: f["marks"].append({"position": 61, "kind": "every"}), "the mark at 61 does not have"),
        (lambda p, f: f["marks"].append({"position": 62, "kind": "every"}), "list of marks"),
        (lambda p, f: f["marks"][0].update(position=True), "list of marks"),
        (lambda p, f: f["marks"][0].update(kind=3), "list of marks"),
        (lambda p, f: f["marks"][0].pop("kind"), "list of marks"),
        (lambda p, f: f.update(marks=7), "list of marks"),
        (lambda p, f: f.update(marks="16"), "list of marks"),
    ],
)
def test_marks_that_cannot_be_read(
    s: k3.Session, model: k3.Model, tmp_path: Path, edit: Callable[..., Any], words: str
) -> None:
    s.step(1)
    data = damaged(s.snapshot(marks=True), edit)
    path = tmp_path / "a.k3s"
    path.write_bytes(data)
    before = len(model.sessions)
    for use in (lambda: k3.Snapshot.from_bytes(data), lambda: k3.Session.load(model, path)):
        with pytest.raises(k3.SnapshotCorruptError, match=words):
            use()
    assert len(model.sessions) == before


def test_marks_of_another_shape(s: k3.Session, model: k3.Model, tmp_path: Path) -> None:
    s.step(1)
    snapshot = s.snapshot(marks=True)
    path = tmp_path / "a.k3s"

    def edit(parts: dict[str, Any], facts: dict[str, Any]) -> None:
        name = "x.marks.32.layers.0.state"
        array = parts[name].get()[:2]
        parts[name] = type(parts[name])(name, "F32", array.shape, lambda: array)

    path.write_bytes(damaged(snapshot, edit))
    with pytest.raises(k3.SnapshotMismatchError, match=r"x\.marks\.32\.layers\.0\.state has shape"):
        k3.Session.load(model, path)
    odd = k3.Snapshot.open(path)
    with model.session() as session:
        session.prefill(IDS[:3])
        with unchanged(session), pytest.raises(k3.SnapshotMismatchError, match="expected"):
            session.restore(odd)
    wrong = k3.MarkSnapshot(70, "every", None, snapshot.marks[0].layers)
    for marks in ((wrong,), (snapshot.marks[1], snapshot.marks[0])):
        other = k3.Snapshot(
            snapshot.position, snapshot.tokens, snapshot.logits, snapshot.layers, snapshot.facts, marks
        )
        with unchanged(s), pytest.raises(k3.SnapshotMismatchError, match="does not fit the session"):
            s.restore(other)


def test_an_altered_mark_is_found(s: k3.Session, model: k3.Model, tmp_path: Path) -> None:
    path = tmp_path / "a.k3s"
    s.step(1)
    s.save(path, marks=True)
    with SnapshotReader(path) as reader:
        at = reader._start + reader.tensors["x.marks.16.layers.0.state"].begin + 5
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(k3.SnapshotCorruptError, match=r"x\.marks\.16\.layers\.0\.state does not match"):
        k3.Session.load(model, path)
    with k3.Session.load(model, path, marks=False) as session:  # which does not read it
        assert session.position == 61


def test_a_restored_mark_owns_its_memory(s: k3.Session, model: k3.Model) -> None:
    s.step(1)
    snapshot = s.snapshot(marks=True)
    with opened(model) as session:
        session.restore(snapshot)
        for mark in snapshot.marks:
            for _, array in mark.arrays():
                array[...] = np.nan
        session.rewind(48)
        same(contents(session), straight(model, IDS[:48]))


def test_state_of_another_instruction_set_is_not_computed_again(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: k3.Model
) -> None:
    """What a snapshot brought that this build would not give to the bit is kept, or the rewind is refused."""
    if model.isa == "base":
        pytest.skip("needs a second instruction set")
    path, second = tmp_path / "a.k3s", tmp_path / "b.k3s"
    monkeypatch.setenv("K3_ISA", "base")
    with k3.Model.open(nano, threads=1) as other, other.session(marks=k3.Marks(every=10)) as session:
        session.prefill(IDS[:33], chunk=5)
        session.save(path, marks=True)
    with k3.Session.load(model, path) as session:
        assert session.resume == "tolerance"
        at_load = contents(session)
        session.prefill(IDS[33:])
        whole = contents(session)
        session.save(second)
        assert session.rewind(40) == 7 and session.rewind(33) == 0
        same(contents(session), at_load)
        with pytest.raises(k3.RewindError, match="up to 33 came with a snapshot") as error:
            session.rewind(32)
        assert (error.value.nearest, error.value.cost) == (30, None)
        with session.fork() as fork, pytest.raises(k3.RewindError):
            fork.rewind(32)
        assert session.rewind(30) == 0
        session.rewind(20)
        mark = session.mark()
        assert session.set_tokens(IDS[:25]) == (20, 0, 5)
        session.rewind(0)
        session.prefill(IDS[:25])
        assert (20, "mark") not in session.reachable()  # the same tokens, but not the same bits
        same(contents(session) | {"facts": 0}, straight(model, IDS[:25]) | {"facts": 0})
        session.rewind(mark)
    with k3.Session.load(model, second, marks=False) as session:
        assert session.resume == "exact"
        same(contents(session), whole)
        session.prefill([1, 2])
        with pytest.raises(k3.RewindError, match="up to 33 came"):
            session.rewind(61)
        session.rewind(0)


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
def test_a_file_from_before_there_were_marks(latent: str) -> None:
    path = GOLDEN / "snapshots" / f"format-1{'-bf16' * (latent == 'bf16')}.k3s"
    snapshot = k3.Snapshot.open(path)
    assert snapshot.marks == () and "marks" not in snapshot.facts
    with k3.Model.open(TINY, threads=1) as model, k3.Session.load(model, path) as session:
        position = session.position
        assert session.latent == latent and session.reachable() == [(0, "start"), (position, "load")]
        session.step(1)
        assert session.rewind(position) == 0
        if latent == "fp32":  # the other one has embeddings
            assert session.set_tokens(session.tokens) == (position, 0, 0)
