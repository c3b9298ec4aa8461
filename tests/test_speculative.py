# SPDX-License-Identifier: MIT
"""Speculation: whatever the drafter does, the tokens are those that `Session.generate` gives."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, changed, floats
from core_access import counts
from hypothesis import given
from session_tools import prompt, same_sessions

import k3session as k3
from k3session.speculative import Drafter, NgramDrafter, SessionDrafter, Speculation, speculate
from k3session.synth import synth

GREEDY = k3.Sampling(temperature=0, stop_ids=())


class Letters:
    """One character for each id."""

    def encode(self, text: str, /) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(chr(32 + i) for i in ids)


class Fixed:
    """Drafts by a function of the tokens so far, and how many are wanted."""

    def __init__(self, draft: Callable[[Any, int], Any]) -> None:
        self._draft = draft
        self.asked: list[tuple[int, int]] = []

    def draft(self, tokens: Any, n: int, /) -> Any:
        self.asked.append((tokens.size, n))
        return self._draft(tokens, n)


def knowing(model: k3.Model, ids: Any, n: int, sampling: k3.Sampling) -> list[int]:
    """What `generate` will give: an oracle to draft from, or against."""
    with model.session() as session:
        session.prefill(ids)
        return [r.token for r in session.generate(n, sampling=sampling)]


def drafters(expected: list[int], start: int) -> dict[str, Fixed]:
    """Drafters of every kind for a generation that begins at a position and of which the tokens are known."""
    rng = np.random.default_rng(5)

    def right(tokens: Any, n: int) -> list[int]:
        done = tokens.size - start
        return expected[done : done + n]

    def mixed(tokens: Any, n: int) -> list[int]:
        return [t if rng.integers(0, 4) else int(rng.integers(0, 97)) for t in right(tokens, n)]

    return {
        "right": Fixed(right),
        "wrong": Fixed(lambda tokens, n: [(t + 1) % 97 for t in right(tokens, n)]),
        "last wrong": Fixed(lambda tokens, n: [*right(tokens, n)[:-1], 5]),
        "mixed": Fixed(mixed),
        "empty": Fixed(lambda tokens, n: []),
        "too long": Fixed(lambda tokens, n: [*right(tokens, 50), *range(60)]),
        "array": Fixed(lambda tokens, n: np.array(right(tokens, n), np.uint16)),
        "generator": Fixed(lambda tokens, n: iter(right(tokens, n))),
        "now and then": Fixed(lambda tokens, n: right(tokens, n) if rng.integers(0, 2) else []),
    }


KINDS = list(drafters([], 0))
SAMPLINGS = [
    GREEDY,
    k3.Sampling(seed=1, stop_ids=()),
    k3.Sampling(seed=2, temperature=0.3, stop_ids=()),
    k3.Sampling(
        seed=3, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, stop_ids=()
    ),
    k3.Sampling(seed=4, temperature=0.05, logit_bias={3: 4.0, 9: -np.inf}, stop_ids=()),
]


def alike(found: list[k3.Generated], expected: list[k3.Generated]) -> None:
    """The same records but for the time that they took."""
    assert [r._replace(seconds=0) for r in found] == [r._replace(seconds=0) for r in expected]


# The same tokens.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_whatever_is_drafted_the_records_are_those_of_generate(
    model: k3.Model, kind: str, sampling: k3.Sampling
) -> None:
    ids = prompt(9)
    with model.session() as session, model.session() as straight:
        straight.prefill(ids)
        expected = list(straight.generate(40, sampling=sampling, tokenizer=Letters(), logprobs=3))
        session.prefill(ids)
        drafter = drafters([r.token for r in expected], 9)[kind]
        loop = speculate(session, drafter, 40, sampling=sampling, tokenizer=Letters(), logprobs=3)
        alike(list(loop), expected)
        same_sessions(session, straight)
        assert np.array_equal(session.step(1), straight.step(1))
        assert all(0 < n <= 8 for _, n in drafter.asked)
        if kind in ("right", "too long", "array", "generator"):
            assert loop.passes == 5 and loop.accepted == loop.drafted == 35  # 40 tokens, nine to a pass
        elif kind == "empty":
            assert (loop.passes, loop.drafted, loop.accepted) == (40, 0, 0)
        elif kind == "wrong":
            assert loop.passes == 40 and loop.drafted > 200 and loop.accepted == 0
        assert loop.passes + loop.accepted == 40


@pytest.mark.parametrize("n", [1, 2, 3, 7, 127])
def test_drafts_of_any_length(model: k3.Model, n: int) -> None:
    sampling = k3.Sampling(seed=9, stop_ids=())
    expected = knowing(model, prompt(5), 150, sampling)
    with model.session() as session:
        session.prefill(prompt(5))
        loop = speculate(session, drafters(expected, 5)["mixed"], 150, sampling=sampling, draft=n)
        assert [r.token for r in loop] == expected


@given(data=st.data())
def test_random_drafters(model: k3.Model, data: st.DataObject) -> None:
    sampling = k3.Sampling(seed=data.draw(st.integers(0, 2**64 - 1)), stop_ids=())
    start = data.draw(st.integers(1, 70))
    expected = knowing(model, prompt(start), 30, sampling)

    def draft(tokens: Any, n: int) -> list[int]:
        done = tokens.size - start
        good = expected[done : done + data.draw(st.integers(0, n))]
        bad = data.draw(st.lists(st.integers(0, 96), max_size=max(0, n - len(good))))
        return good + bad

    with model.session() as session, model.session() as straight:
        session.prefill(prompt(start))
        assert [r.token for r in speculate(session, Fixed(draft), 30, sampling=sampling)] == expected
        straight.prefill(session.tokens)
        session.sampling = None
        same_sessions(session, straight)


def test_the_distribution_is_the_models(model: k3.Model) -> None:
    """Tokens that were drafted, accepted or not, over many seeds, against the softmax of what they follow."""
    first = 7
    drafted = iter(np.random.default_rng(1).integers(0, 97, 10**6).tolist())
    with model.session() as session:
        session.prefill(prompt(9))
        start = session.mark()
        session.step(first)
        logits = session.logits
        assert logits is not None
        p = np.exp(logits.astype(np.float64) - logits.max())
        p /= p.sum()
        likely = np.argsort(-p)[:5].tolist()
        n = counts(800, 20000)
        found = np.zeros(97)
        accepted = 0
        for seed in range(n):
            session.rewind(start)
            # The processor makes the first token the same every time; what counts is the second, a draft.
            guess = likely[seed % 5] if seed % 2 else next(drafted)
            only = k3.Sampling(seed=seed, stop_ids=(), processor=lambda ids, x: only_at(ids, x, 9, first))
            loop = speculate(session, Fixed(lambda tokens, n, g=guess: [g, g]), 3, sampling=only)
            tokens = [r.token for r in loop]
            assert tokens[0] == first and loop.drafted >= 2
            accepted += loop.accepted > 0
            found[tokens[1]] += 1
    rare = p * n < 5
    observed = np.append(found[~rare], found[rare].sum())
    expected = np.append(p[~rare], p[rare].sum()) * n
    kept = expected > 0
    chi = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert degrees > 20 and accepted > n / 50
    # Chi-square has mean `degrees` and variance twice that; the seeds are fixed, so this holds or does not, always.
    assert abs(chi - degrees) < 3.5 * np.sqrt(2 * degrees), (chi, degrees)


def only_at(ids: Any, logits: Any, position: int, token: int) -> Any:
    """At one position leave a single token to choose."""
    if ids.size == position:
        kept = logits[token]
        logits[:] = -np.inf
        logits[token] = kept
    return logits


def test_a_hook_is_called_as_in_generate(model: k3.Model) -> None:
    calls: list[list[tuple[int, bytes]]] = [[], []]

    def hook(kept: list[tuple[int, bytes]]) -> Callable[[Any, Any], Any]:
        def call(ids: Any, logits: Any) -> Any:
            kept.append((ids.size, ids.tobytes() + logits.tobytes()))
            logits[::3] = -np.inf
            return logits

        return call

    with model.session() as a, model.session() as b:
        a.prefill(prompt(9))
        b.prefill(prompt(9))
        tokens = [
            r.token
            for r in a.generate(30, sampling=k3.Sampling(seed=1, stop_ids=(), processor=hook(calls[0])))
        ]
        sampling = k3.Sampling(seed=1, stop_ids=(), processor=hook(calls[1]))
        found = [r.token for r in speculate(b, drafters(tokens, 9)["mixed"], 30, sampling=sampling)]
    assert found == tokens and calls[0] == calls[1] and len(calls[0]) == 30


# Ends.


def test_stop_ids_stop_strings_and_capacity(model: k3.Model) -> None:
    tokens = knowing(model, prompt(7), 33, GREEDY)
    stop = tokens[4]
    text = Letters().decode(tokens)
    endings: list[dict[str, Any]] = [
        {"sampling": k3.Sampling(temperature=0, stop_ids=(stop,))},
        {"sampling": GREEDY, "stop": text[11:13]},
        {"sampling": GREEDY, "stop": [text[20:23], "no such text"]},
        {"sampling": GREEDY, "max_tokens": 1},
        {"sampling": GREEDY, "max_tokens": 10},
        {"sampling": GREEDY},
    ]
    for options in endings:
        for kind in KINDS:
            with model.session(capacity=40) as session, model.session(capacity=40) as straight:
                session.prefill(prompt(7))
                straight.prefill(prompt(7))
                expected = list(straight.generate(**options, tokenizer=Letters()))
                drafter = drafters(tokens, 7)[kind]
                alike(list(speculate(session, drafter, **options, tokenizer=Letters())), expected)
                assert expected[-1].finish_reason in ("stop", "length", "capacity")
                same_sessions(session, straight)


def test_defaults_are_those_of_generate(model: k3.Model) -> None:
    with model.session() as session, model.session() as straight:
        for each in (session, straight):
            each.prefill(prompt(5))
            next(each.generate(1, sampling=k3.Sampling(seed=6, temperature=1.2, stop_ids=())))
        expected = [r.token for r in straight.generate(20)]
        assert [r.token for r in speculate(session, NgramDrafter(), 20)] == expected
        assert session.sampling == straight.sampling
    with model.session() as session:
        session.prefill(prompt(5))
        next(speculate(session, NgramDrafter(), 1, sampling=k3.Sampling(temperature=2.0)))
        assert session.sampling is not None and session.sampling.seed is not None


# Each token is part of the session when it is yielded, and none after it is.


@pytest.mark.parametrize("kind", ["right", "mixed", "too long"])
def test_the_session_stands_at_every_record(model: k3.Model, kind: str) -> None:
    sampling = k3.Sampling(seed=5, stop_ids=())
    expected = knowing(model, prompt(9), 30, sampling)
    with model.session() as session, model.session() as straight:
        session.prefill(prompt(9))
        straight.prefill(prompt(9))
        for r in speculate(session, drafters(expected, 9)[kind], 30, sampling=sampling):
            row = straight.step(r.token)
            # What can be read without a call that changes anything ...
            assert session.position == straight.position == r.position + 1
            assert np.array_equal(session.tokens, straight.tokens) and np.array_equal(session.logits, row)
            assert f"position {straight.position} of" in repr(session)
            if r.position % 5 == 0:  # ... and all the rest, for which the tokens so far are committed
                straight.sampling = session.sampling
                same_sessions(session, straight)
            if r.position % 7 == 0:
                assert all(layer.position == straight.position for layer in session.layers)
        same_sessions(session, straight)


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=range(3))
def test_breaking_saving_and_loading_repeats_and_loses_nothing(
    model: k3.Model, tmp_path: Path, sampling: k3.Sampling
) -> None:
    expected = knowing(model, prompt(9), 40, sampling)
    straight = model.session()
    straight.prefill(prompt(9))
    list(straight.generate(40, sampling=sampling))
    for every in (1, 3, 4):
        session = model.session()
        session.prefill(prompt(9))
        tokens: list[int] = []
        while len(tokens) < 40:
            drafter = drafters(expected, 9)["right" if len(tokens) % 2 else "mixed"]
            for r in speculate(session, drafter, 40 - len(tokens), sampling=None if tokens else sampling):
                tokens.append(r.token)
                if len(tokens) % every == 0:
                    break
            session.save(tmp_path / "a.k3s")
            session.close()
            session = k3.Session.load(model, tmp_path / "a.k3s")
        assert tokens == expected
        same_sessions(session, straight)
        session.close()
    straight.close()


def test_saving_inside_the_loop(model: k3.Model, tmp_path: Path) -> None:
    expected = knowing(model, prompt(9), 40, GREEDY)
    with model.session() as session:
        session.prefill(prompt(9))
        for i, r in enumerate(speculate(session, drafters(expected, 9)["right"], 40, sampling=GREEDY)):
            session.save(tmp_path / "a.k3s")
            if i % 3 == 0:
                with k3.Session.load(model, tmp_path / "a.k3s") as loaded:
                    assert loaded.position == r.position + 1
                    assert [x.token for x in loaded.generate(39 - i)] == expected[i + 1 :] if i < 39 else True


USES: dict[str, Callable[[k3.Session, int], Any]] = {
    "step": lambda s, i: s.step(i % 97),
    "prefill": lambda s, i: s.prefill([i % 97, 3]),
    "rewind": lambda s, i: s.rewind(max(3, s.position - 2)),
    "restore": lambda s, i: s.restore(s.snapshot()),
    "fork": lambda s, i: s.fork().close(),
    "mark": lambda s, i: s.mark(),
    "verify": lambda s, i: s.verify([1, 2]).__enter__().accept(1),
    "batch": lambda s, i: s.model.step([(s, i % 97)]),
    "score": lambda s, i: s.score([1, 2, 3]),
    "set_tokens": lambda s, i: s.set_tokens([*s.tokens.tolist()[:-1], 4]),
    "speculate": lambda s, i: next(speculate(s, NgramDrafter(), 1, sampling=GREEDY)),
}


@pytest.mark.parametrize("use", USES)
def test_the_caller_may_use_the_session_inside_the_loop(model: k3.Model, use: str) -> None:
    """The loop goes on from wherever the session stands, as `generate` does."""
    rng = np.random.default_rng(1)
    when = [i for i in range(25) if rng.integers(0, 3) == 0]
    with model.session() as session, model.session() as straight:
        for each in (session, straight):
            each.prefill(prompt(9))
        sampling = k3.Sampling(seed=2, stop_ids=())
        twin = SessionDrafter(
            model.session(), sampling
        )  # the same model is always right, but for what is put in
        drafter = Fixed(lambda tokens, n: [*twin.draft(tokens, n)[: tokens.size % 4], 96])
        found = []
        for i, r in enumerate(speculate(session, drafter, 25, sampling=sampling)):
            found.append(r.token)
            if i in when:
                USES[use](session, i)
        expected = []
        for i, r in enumerate(straight.generate(25, sampling=sampling)):
            expected.append(r.token)
            if i in when:
                USES[use](straight, i)
        assert found == expected
        straight.sampling = session.sampling
        same_sessions(session, straight)
        twin.session.close()


def test_closing_the_loop_and_dropping_it(model: k3.Model) -> None:
    expected = knowing(model, prompt(9), 30, GREEDY)
    for close in (True, False):
        session = model.session()
        session.prefill(prompt(9))
        loop = speculate(session, drafters(expected, 9)["right"], 30, sampling=GREEDY)
        next(loop), next(loop)
        if close:
            loop.close()
            assert list(loop) == []
        del loop
        assert session.cancel() is False and session._draft is None
        with model.session() as straight:
            straight.prefill([*prompt(9), *expected[:2]])
            straight.sampling = session.sampling
            same_sessions(session, straight)
        gone = weakref.ref(session)
        gc.disable()
        try:
            del session
            assert gone() is None  # nothing goes round in a circle
        finally:
            gc.enable()


def test_the_session_may_be_closed_in_the_middle(model: k3.Model) -> None:
    session = model.session()
    session.prefill(prompt(9))
    loop = speculate(session, Fixed(lambda tokens, n: [1] * n), 30, sampling=GREEDY)
    next(loop)
    session.close()
    with pytest.raises(k3.ClosedError):
        next(loop)


def test_cancel_between_two_tokens_and_in_a_pass(model: k3.Model) -> None:
    expected = knowing(model, prompt(9), 30, GREEDY)
    with model.session() as session:
        session.prefill(prompt(9))
        loop = speculate(session, drafters(expected, 9)["right"], 30, sampling=GREEDY)
        tokens = [next(loop).token for _ in range(4)]
        assert session.cancel() is True
        with pytest.raises(k3.PassCancelled) as error:
            next(loop)
        assert error.value.position == session.position == 13 and session.cancel() is False
        tokens += [r.token for r in speculate(session, drafters(expected, 9)["right"], 26)]
        assert tokens == expected
        session.rewind(9)
        ended: list[Any] = []

        def run() -> None:
            try:
                for r in speculate(
                    session, Fixed(lambda t, n: [1] * n), sampling=k3.Sampling(seed=1, stop_ids=())
                ):
                    ended.append(r.token)
            except k3.PassCancelled as stop:
                ended.append(stop)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.05)
        while not session.cancel():
            time.sleep(0.001)
        thread.join()
        assert ended[-1].position == session.position == 9 + len(ended) - 1
        assert session.tokens[9:].tolist() == ended[:-1]


# Drafters that cannot be used, and guesses that should not have been run.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([97], "token 97 is not in the vocabulary"),
        ([3, -1], "token -1 is not"),
        ([1.5], "found float"),
        ("AB", "found str"),
        (None, "not iterable"),
        (5, "not iterable"),
        ([True], "token True"),
    ],
)
def test_drafts_that_are_none(model: k3.Model, given: Any, words: str) -> None:
    with model.session() as session:
        session.prefill(prompt(5))
        loop = speculate(session, Fixed(lambda tokens, n: given), 5, sampling=GREEDY)
        with pytest.raises(k3.InvalidTokenError, match=rf"Fixed.draft\(\) must give token ids.*{words}"):
            next(loop)
        assert session.position == 5
        session.step(1)


def test_an_error_of_the_drafter_comes_through(model: k3.Model) -> None:
    def draft(tokens: Any, n: int) -> list[int]:
        if tokens.size > 8:
            raise ZeroDivisionError
        return [1]

    with model.session() as session:
        session.prefill(prompt(5))
        tokens: list[int] = []
        loop = speculate(session, Fixed(draft), 9, sampling=GREEDY)
        with pytest.raises(ZeroDivisionError):
            tokens.extend(r.token for r in loop)
        assert session.tokens[5:].tolist() == tokens
        session.step(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft": 0}, "draft is 0; expected a number of tokens from 1 to 127"),
        ({"draft": 128}, "draft is 128"),
        ({"draft": True}, "draft is True"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"sampling": 0.5}, "sampling is float"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"drafter": [1, 2]}, r"drafter is list; expected an object with a method draft\(tokens, n\)"),
        ({"session": None}, "session is NoneType"),
    ],
)
def test_options_are_checked(model: k3.Model, options: dict[str, Any], words: str) -> None:
    with model.session() as session:
        session.prefill([1])
        with pytest.raises(k3.ConfigError, match=words):
            speculate(**{"session": session, "drafter": NgramDrafter()} | options)


def test_it_needs_a_beginning_and_an_open_session(model: k3.Model) -> None:
    with model.session() as session, pytest.raises(k3.InvalidTokenError, match="nothing to continue from"):
        next(speculate(session, NgramDrafter(), 1))
    with pytest.raises(k3.ClosedError):
        speculate(session, NgramDrafter(), 1)
    for bad in (0, True, "4"):
        with pytest.raises(k3.ConfigError, match="longest is"):
            NgramDrafter(bad)  # type: ignore[arg-type]
    with pytest.raises(k3.ConfigError, match="session is NgramDrafter"):
        SessionDrafter(NgramDrafter())  # type: ignore[arg-type]


def test_a_guess_that_is_not_finite_spoils_nothing(nano: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        raw = tensors["language_model.model.embed_tokens.weight"]
        values = floats(raw).copy()
        values[13] = np.nan
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors["language_model.model.embed_tokens.weight"] = Raw(raw.dtype, raw.shape, bits.tobytes())

    sampling = k3.Sampling(seed=3, stop_ids=(), logit_bias={13: -np.inf})
    with k3.Model.open(changed(nano, tmp_path / "model", tensors=edit), threads=1) as model:
        expected = knowing(model, [1, 2, 3], 20, sampling)
        with model.session() as session:
            session.prefill([1, 2, 3])
            loop = speculate(session, Fixed(lambda tokens, n: [13] * n), 20, sampling=sampling)
            assert [r.token for r in loop] == expected
            assert loop.accepted == 0 and loop.passes == 20
        # Where the model itself takes such a token, it fails as in generate.
        with model.session() as session:
            session.prefill([1, 2, 3])
            sure = k3.Sampling(temperature=0, stop_ids=(), logit_bias={13: 1000.0})
            with pytest.raises(k3.NonFiniteError, match=r"model\.embed_tokens"):
                next(speculate(session, Fixed(lambda tokens, n: [1] * n), 20, sampling=sure))


# The drafters that come with it.


def by_search(tokens: list[int], longest: int, n: int) -> list[int]:
    """What `NgramDrafter` gives, found by looking everywhere."""
    for length in range(min(longest, len(tokens)), 0, -1):
        last = tokens[len(tokens) - length :]
        if min(last) < 0:
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == last:
                found = list(tokens)
                for i in range(n):
                    if found[end + i] < 0:
                        break
                    found.append(found[end + i])
                return found[len(tokens) :]
    return []


@given(
    st.lists(st.integers(-1, 3), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_ngrams(tokens: list[int], longest: int, n: int, cuts: list[int]) -> None:
    drafter = NgramDrafter(longest)
    for cut in [*cuts, len(tokens)]:  # forward and back, as a session that is rewound
        ids = tokens[: max(1, cut)]
        assert drafter.draft(np.array(ids, np.int32), n) == by_search(ids, longest, n)
    other = [3, 2, 1, 3, 2, 1, 3]
    assert drafter.draft(np.array(other, np.int32), n) == by_search(other, longest, n)


def test_ngrams_are_learnt_as_they_come() -> None:
    drafter = NgramDrafter()
    ids = np.random.default_rng(0).integers(0, 50, 20000).astype(np.int32)
    drafter.draft(ids[:10000], 8)
    began = time.perf_counter()
    for i in range(10000, 20000, 10):
        drafter.draft(ids[:i], 8)
    assert time.perf_counter() - began < 3


def test_ngrams_find_what_repeats() -> None:
    with k3.Model.open(threads=1) as model, model.session() as session, model.session() as straight:
        text = model.tokenizer.encode("To be, or not to be, that is the question. " * 6)
        session.prefill(text)
        straight.prefill(text)
        expected = [r.token for r in straight.generate(60, sampling=GREEDY)]
        loop = speculate(session, NgramDrafter(), 60, sampling=GREEDY)
        assert [r.token for r in loop] == expected
        assert loop.accepted >= 5 and loop.passes == 60 - loop.accepted


@pytest.mark.parametrize("sampling", SAMPLINGS[:4], ids=range(4))
def test_the_same_model_as_drafter_is_always_right(model: k3.Model, sampling: k3.Sampling) -> None:
    """Draws are coupled by seed and position; only sampling that looks at more than the row can tell the two apart."""
    expected = knowing(model, prompt(9), 40, sampling)
    with model.session() as session, model.session(marks=False) as small:
        session.prefill(prompt(9))
        loop = speculate(session, SessionDrafter(small), 40, sampling=sampling)
        assert [r.token for r in loop] == expected
        assert loop.passes == 5 and loop.accepted == loop.drafted == 35


def test_another_model_as_drafter(model: k3.Model, tmp_path: Path) -> None:
    folder = synth(tmp_path / "other", "nano", seed=5)
    for sampling in SAMPLINGS[:3]:
        expected = knowing(model, prompt(9), 40, sampling)
        with k3.Model.open(folder, threads=1) as other, other.session() as small, model.session() as session:
            small.prefill([1, 2, 3])  # whatever it holds
            session.prefill(prompt(9))
            drafter = SessionDrafter(small)
            tokens = [r.token for r in speculate(session, drafter, 20, sampling=sampling)]
            tokens += [r.token for r in speculate(session, drafter, 20)]
            assert tokens == expected
            held = small.position
            assert np.array_equal(small.tokens[: held - 8], session.tokens[: held - 8])


def test_a_drafter_with_little_room_or_without_ids(model: k3.Model) -> None:
    expected = knowing(model, prompt(9), 40, GREEDY)
    with model.session() as session, model.session(capacity=20) as small:
        session.prefill(prompt(9))
        loop = speculate(session, SessionDrafter(small), 40, sampling=GREEDY)
        assert [r.token for r in loop] == expected and 0 < loop.drafted < 15
    with model.session() as session, model.session() as small:
        session.prefill(np.zeros((3, 64), np.float32) + 0.1)
        session.prefill(prompt(3))
        loop = speculate(session, SessionDrafter(small), 5, sampling=GREEDY)
        assert len(list(loop)) == 5 and loop.drafted == 0 and small.position == 0


def test_a_vocabulary_of_another_size(nano: Path, tmp_path: Path, model: k3.Model) -> None:
    folder = synth(tmp_path / "other", "micro")
    with k3.Model.open(folder, threads=1) as other, other.session() as small, model.session() as session:
        session.prefill([1])
        with pytest.raises(k3.ConfigError, match="vocabulary of 32 tokens, and the session's has 97"):
            speculate(session, SessionDrafter(small), 4)


def test_a_drafter_may_be_told_how_tokens_are_chosen(model: k3.Model) -> None:
    told: list[k3.Sampling] = []

    class Told:
        def begin(self, sampling: k3.Sampling) -> None:
            told.append(sampling)

        def draft(self, tokens: Any, n: int, /) -> list[int]:
            return []

    drafter: Drafter = Told()
    with model.session() as session:
        session.prefill([1])
        loop: Iterator[k3.Generated] = speculate(session, drafter, 2, sampling=k3.Sampling(stop_ids=()))
        assert isinstance(loop, Speculation)
        list(loop)
        assert told == [session.sampling] and told[0].seed is not None
