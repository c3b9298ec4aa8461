# SPDX-License-Identifier: MIT
"""Forks: two sessions with one past, each of them exact, and memory that is shared and comes back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_access import counts
from session_tools import contents, prompt, run, same, same_sessions, step_all, unchanged

import k3session as k3

PAGE = 4
"""Rows of a page where a test wants small ones."""


def opened(model: k3.Model, *, pages: int = 64, **options: Any) -> k3.Session:
    """A session with latent pages of a size of its own."""
    session = model.session(**options)
    session._timeline = session._decoder.timeline(session.latent == "bf16", pages)
    return session


def straight(model: k3.Model, ids: Any, **options: Any) -> dict[str, Any]:
    """What a session is that took in these tokens and did nothing else."""
    with model.session(**options) as session:
        if len(ids):
            session.prefill(ids)
        return contents(session)


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 8, 30])
def test_both_go_on_as_if_alone(model: k3.Model, latent: str, n: int) -> None:
    ids = prompt(n)
    ways = [prompt(9, seed=1), prompt(9, seed=2)]
    with opened(model, pages=PAGE, latent=latent) as s:
        if n:
            s.prefill(ids)
        with s.fork() as t:
            assert t.name != s.name and t in model.sessions and t.latent == latent
            same_sessions(t, s)
            for pair in zip(*ways, strict=True):  # in turns, so that each finds the other in its last page
                for session, token in zip((s, t), pair, strict=True):
                    session.step(token)
            for session, way in zip((s, t), ways, strict=True):
                same(contents(session), straight(model, [*ids, *way], latent=latent))


@pytest.mark.parametrize("first", [0, 1])
def test_who_goes_first_does_not_matter(model: k3.Model, first: int) -> None:
    with opened(model, pages=PAGE) as s:
        s.prefill(prompt(6))
        with s.fork() as t:
            pair = [s, t]
            pair[first].prefill(prompt(20, seed=1))
            same(contents(pair[1 - first]), straight(model, prompt(6)))
            pair[1 - first].prefill(prompt(20, seed=2))
            same(contents(pair[first]), straight(model, [*prompt(6), *prompt(20, seed=1)]))
            same(contents(pair[1 - first]), straight(model, [*prompt(6), *prompt(20, seed=2)]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_forks_of_forks_close_in_any_order(model: k3.Model, order: tuple[int, ...]) -> None:
    with opened(model, pages=PAGE) as s:
        s.prefill(prompt(7))
        family = [s, s.fork()]
        family[1].step(1)
        family.append(family[1].fork())
        family[2].step(2)
        family.append(s.fork())
        paths: list[list[int]] = [[], [1], [1, 2], []]
        for number in order:
            for other, path in zip(family, paths, strict=True):
                if not other.is_closed:
                    other.step(5)
                    path.append(5)
                    same(contents(other), straight(model, [*prompt(7), *path]))
            family[number].close()
        assert all(session.is_closed for session in family)


def test_a_hundred_forks_of_one_prefix(model: k3.Model) -> None:
    with opened(model, pages=PAGE) as s:
        s.prefill(prompt(30))
        forks = [s.fork() for _ in range(100)]
        s.close()  # the parent first
        rng = np.random.default_rng(0)
        for i, fork in enumerate(forks):
            fork.step(i % 97)
        for i in rng.permutation(100):
            same(contents(forks[i]), straight(model, [*prompt(30), i % 97]))
            forks[i].close()


def test_nothing_is_copied_until_one_goes_on(model: k3.Model) -> None:
    page = 3 * 64 * 48 * 4
    with model.session(marks=False) as s:
        s.prefill(prompt(200))
        before = s._timeline.own_bytes
        with s.fork() as t:
            assert s._timeline.own_bytes <= page and t._timeline.own_bytes == 0 and t.nbytes <= before
            t.step(1)
            assert t._timeline.own_bytes == t._fixed_bytes  # the last page has room behind the rows of both
            s.step(2)
            assert page <= s._timeline.own_bytes - s._fixed_bytes <= 2 * page  # and here it was taken
        assert s._timeline.own_bytes <= before + page


def test_what_goes_along(model: k3.Model, tmp_path: Path) -> None:
    with model.session(latent="bf16", capacity=50) as s:
        s.prefill(prompt(12))
        next(s.generate(2, sampling=k3.Sampling(seed=5, temperature=0.7)))
        s.save(tmp_path / "a.k3s", meta={"user": "ada"})
    with k3.Session.load(model, tmp_path / "a.k3s", capacity=50) as s, s.fork() as t:
        assert (t.meta, t.resume, t.capacity, t.latent) == ({"user": "ada"}, "exact", 50, "bf16")
        assert t.sampling == s.sampling and t.reachable() == s.reachable()
        same_sessions(t, s)
        tokens = [[r.token for r in session.generate(10)] for session in (s, t)]
        assert tokens[0] == tokens[1]
        same_sessions(t, s)


def test_a_seed_of_its_own(model: k3.Model) -> None:
    with model.session() as s:
        s.prefill(prompt(12))
        with s.fork(seed=1) as a, s.fork(seed=2) as b, s.fork(seed=1) as c:
            assert a.sampling == model.default_sampling.with_seed(1) and s.sampling is None
            texts = [[r.token for r in session.generate(20)] for session in (a, b, c)]
            assert texts[0] == texts[2] != texts[1]
            with a.fork(seed=9) as d:
                assert d.sampling is not None and d.sampling.seed == 9
                assert a.sampling is not None and a.sampling.seed == 1
        with pytest.raises(k3.ConfigError, match="seed"):
            s.fork(seed=-1)


def test_embeddings_go_along(model: k3.Model) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    with model.session() as s:
        s.prefill(prompt(3))
        s.prefill(rows)
        with s.fork() as t:
            same_sessions(t, s)
            s.prefill(rows[::-1])
            t.prefill(rows)
            ours, theirs = (session.snapshot().facts["embeddings"] for session in (s, t))
            assert {k: v for k, v in ours.items() if int(k) < 9} == {
                k: v for k, v in theirs.items() if int(k) < 9
            }
            assert ours["9"] != theirs["9"] and len(ours) == len(theirs) == 12


def test_a_fork_may_be_larger_but_not_smaller_than_what_it_holds(model: k3.Model) -> None:
    with model.session(capacity=10) as s:
        s.prefill(prompt(10))
        before = len(model.sessions)
        for capacity, error, words in (
            (9, k3.CapacityError, "holds 10 tokens; this session may hold 9"),
            (0, k3.ConfigError, "capacity is 0"),
            (True, k3.ConfigError, "capacity is True"),
        ):
            with unchanged(s), pytest.raises(error, match=words):
                s.fork(capacity=capacity)
        assert len(model.sessions) == before
        with s.fork(capacity=11) as t:
            t.step(1)
            same(contents(t), straight(model, [*prompt(10), 1]))
        with pytest.raises(k3.CapacityError):
            s.step(1)


def test_a_session_that_is_closed_or_busy_is_not_forked(model: k3.Model) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        inside.set()
        leave.wait(10)

    with model.session() as s:
        thread = threading.Thread(target=lambda: s.prefill(prompt(3), progress=hold))
        thread.start()
        inside.wait(10)
        uses: list[Callable[[], Any]] = [s.fork, s.mark, s.reachable]
        uses += [lambda: s.rewind(0), lambda: s.set_tokens([1])]
        try:
            for use in uses:
                with pytest.raises(k3.SessionBusyError, match=s.name):
                    use()
        finally:
            leave.set()
            thread.join()
    for use in uses:
        with pytest.raises(k3.ClosedError, match=f"{s.name} has been closed"):
            use()


def test_a_fork_goes_back_by_itself(model: k3.Model) -> None:
    ids = prompt(60)
    with opened(model, pages=PAGE, marks=k3.Marks(every=10)) as s:
        step_all(s, ids)
        with s.fork() as t:
            assert t.rewind(20) == 0
            assert s.position == 60 and (30, "every") in s.reachable() and (30, "every") not in t.reachable()
            t.step(3)
            same(contents(t), straight(model, [*ids[:20], 3]))
            s.close()
            assert t.rewind(15) == 5
            same(contents(t), straight(model, ids[:15]))


def test_a_fork_goes_to_marks_of_its_parent(model: k3.Model) -> None:
    ids = prompt(40)
    with opened(model, pages=PAGE, marks=k3.Marks(every=8)) as s:
        s.prefill(ids[:10])
        early = s.mark("early")
        s.prefill(ids[10:20])
        with s.fork() as t:
            s.prefill(ids[20:])
            late = s.mark("late")
            t.prefill(prompt(30, seed=1))
            t.rewind(late)
            same(contents(t), straight(model, ids))
            assert t.reachable() == [(0, "start"), (40, "now")]  # what it passed lies on another way
            t.rewind(early)
            same(contents(t), straight(model, ids[:10]))
            s.rewind(13)
            same(contents(s), straight(model, ids[:13]))


# Memory.  In a process of its own, that nothing else of the tests has used.

LEAKS = """
import gc, sys
from pathlib import Path
import k3session as k3
from session_tools import resident
folder, count = Path(sys.argv[1]), int(sys.argv[2])
model = k3.Model.open(folder, threads=1)
s = model.session(marks=k3.Marks(every=50))
s.prefill(list(range(90)) * 4)

def forks(i):
    with s.fork(seed=i) as t, t.fork() as u:
        t.step(i % 97)
        u.step(1)

def ways(i):
    with s.fork() as t:
        m = t.mark()
        t.prefill([1, 2, 3])
        t.rewind(m)
        t.rewind(300 + i % 10)
        t.set_tokens([5] * (i % 9))

def dropped(i):
    s.fork().step(3)                # never closed
    s.fork().mark()

def back(i):
    s.rewind(300)
    s.prefill(list(range(20)))

for use in (forks, ways, dropped, back):
    for i in range(50):
        use(i)
    gc.collect()
    before = resident()
    for i in range(count if use is forks else count // 5):
        use(i)
    gc.collect()
    print(use.__name__, resident() - before)
s.set_tokens(list(range(90)) * 4)
assert [t for t in model.sessions] == [s]
s.close()
model.close()
"""


def test_a_thousand_forks_return_to_the_start(nano: Path) -> None:
    out = run(LEAKS, nano, counts(1000, 20000), timeout=600)
    grown = {name: int(n) for name, n in (line.split() for line in out.splitlines())}
    assert grown.keys() == {"forks", "ways", "dropped", "back"} and max(grown.values()) < 2 << 20, grown
