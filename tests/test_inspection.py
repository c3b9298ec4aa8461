# SPDX-License-Identifier: MIT
"""Probabilities and counts: exact, aligned, and beside the session, which does not notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from session_tools import Peak, contents, prompt, same, same_sessions, step_all, unchanged

import k3session as k3
from k3session.session.inspection import SCORE_ROWS


def log_softmax(row: Any) -> Any:
    """Plainly, in double precision."""
    row = np.float64(row)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def rows_before(model: k3.Model, start: Any, text: Any) -> list[Any]:
    """For each token of a text the logits that it is chosen from, from single steps; None for the very first."""
    with model.session() as session:
        rows: list[Any] = [session.prefill(start) if len(start) else None]
        rows += list(step_all(session, text[:-1])) if len(text) > 1 else []
    return rows


# ---------------------------------------------------------------- a text


@pytest.mark.parametrize("before", [0, 1, 7])
@pytest.mark.parametrize("n", [1, 2, SCORE_ROWS, SCORE_ROWS + 1, SCORE_ROWS + 2, 3 * SCORE_ROWS - 1])
def test_a_score_belongs_to_the_token_that_follows_and_not_to_the_next_one(
    model: k3.Model, before: int, n: int
) -> None:
    start, text = prompt(before), prompt(n, seed=1)
    rows = rows_before(model, start, text)
    with model.session() as session:
        if before:
            session.prefill(start)
        with unchanged(session):
            score = session.score(text, top=5)
    assert score.tokens.tolist() == text.tolist()
    assert score.logprobs.shape == (n,) and score.top_tokens.shape == score.top_logprobs.shape == (n, 5)
    for i, row in enumerate(rows):
        if row is None:
            assert math.isnan(score.logprobs[i]) and (score.top_tokens[i] == -1).all() and score.top(i) == ()
            continue
        expected = log_softmax(row)
        assert abs(score.logprobs[i] - expected[text[i]]) < 1e-6
        best = np.lexsort((np.arange(97), -row))[:5]
        assert score.top_tokens[i].tolist() == best.tolist()
        assert np.abs(score.top_logprobs[i] - expected[best]).max() < 1e-6
        assert score.top(i)[0] == (best[0], score.top_logprobs[i, 0])


def test_a_score_is_the_same_to_the_bit_however_it_is_asked_for(model: k3.Model) -> None:
    """By a score of the whole, of its parts, by a scored prefill, and by the logprobs of each next token."""
    start, text = prompt(5), prompt(2 * SCORE_ROWS + 3, seed=2)
    with model.session() as session, model.session() as scored:
        session.prefill(start)
        whole = session.score(text, top=3)
        scored.prefill(start)
        committed = scored.prefill_scored(text, top=3)
        one_by_one = []
        for token in text.tolist():
            one_by_one.append(session.logprobs([token])[0][1])
            assert session.score([token]).logprobs[0] == one_by_one[-1]
            session.step(token)
        same_sessions(scored, session)
    for other in (committed.logprobs, np.array(one_by_one)):
        assert other.tobytes() == whole.logprobs.tobytes()
    assert committed.top_tokens.tobytes() == whole.top_tokens.tobytes()
    assert committed.top_logprobs.tobytes() == whole.top_logprobs.tobytes()


def test_sums_leave_out_what_nothing_comes_before(model: k3.Model) -> None:
    with model.session() as session:
        score = session.score([3, 1, 4])
        assert score.counted == 2
        assert score.total == score.logprobs[1] + score.logprobs[2]
        assert math.isclose(score.perplexity, math.exp(-score.total / 2))
        assert math.isclose(2**score.bits_per_token, score.perplexity)
        alone = session.score([3])
        assert (alone.counted, alone.total) == (0, 0.0)
        assert math.isnan(alone.perplexity) and math.isnan(alone.bits_per_token)


def test_equal_logits_go_by_the_lowest_id() -> None:
    from k3session.score import most_probable

    row = np.float32([1, 3, 2, 3, 2, 2, 0])
    assert [most_probable(row, k).tolist() for k in (0, 1, 3, 4, 7)] == [
        [], [1], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4, 5, 0, 6],
    ]  # fmt: skip


def test_a_score_of_a_session_with_a_past_of_another_kind(model: k3.Model) -> None:
    """After a fork, a mark and embeddings, as after plain tokens."""
    width = model.config.hidden_size
    with model.session() as session:
        session.prefill(np.random.default_rng(0).normal(size=(3, width)).astype(np.float32))
        session.prefill(prompt(4))
        wanted = session.score(prompt(40, seed=3)).logprobs.tobytes()
        mark = session.mark()
        with session.fork() as other:
            assert other.score(prompt(40, seed=3)).logprobs.tobytes() == wanted
        session.prefill(prompt(90, seed=4))
        session.rewind(mark)
        assert session.score(prompt(40, seed=3)).logprobs.tobytes() == wanted


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
def test_going_on_after_a_score_is_going_on_without_one(model: k3.Model, latent: str) -> None:
    """Scores share the session's pages; what they write behind its tokens must not be read by it."""
    text = prompt(70)
    with model.session(latent=latent) as plain, model.session(latent=latent) as session:
        for i in range(0, 70, 5):
            plain.prefill(text[i : i + 5])
            session.score(prompt(SCORE_ROWS + 9, seed=i))
            session.prefill(text[i : i + 5])
        same_sessions(session, plain)


def test_the_memory_of_a_score_does_not_grow_with_the_text(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill([1])
        session.score(prompt(300))
        peak = Peak()
        session.score(prompt(3000))
        latent = 3000 * model.bytes_per_token
        assert peak.growth() < 2 * latent + (4 << 20)


# ---------------------------------------------------------------- the next token


def test_logprobs_of_the_next_token(model: k3.Model) -> None:
    with model.session() as session:
        row = session.prefill(prompt(9))
        expected = log_softmax(row)
        with unchanged(session):
            best = session.logprobs(top=97)
            assert [t for t, _ in best] == np.lexsort((np.arange(97), -row)).tolist()
            assert max(abs(p - expected[t]) for t, p in best) < 1e-6
            assert session.logprobs() == best[:5] and session.logprobs(top=0) == ()
            some = session.logprobs([best[3][0], np.int64(best[0][0]), best[3][0]])
            assert some == (best[3], best[0], best[3])


def test_generation_tells_the_most_probable_tokens(model: k3.Model) -> None:
    with model.session() as session, model.session() as plain:
        session.prefill(prompt(5))
        plain.prefill(prompt(5))
        sampling = k3.Sampling(temperature=1.0, seed=3, stop_ids=())
        for r in session.generate(6, sampling=sampling, logprobs=4):
            assert r.top == plain.logprobs(top=4)
            assert r.logprob == plain.logprobs([r.token])[0][1] == plain.score([r.token]).logprobs[0]
            plain.step(r.token)
        assert next(session.generate(1, sampling=sampling)).top == ()
        with pytest.raises(k3.ConfigError, match="logprobs is -1; expected a number of tokens from 0 to 97"):
            session.generate(1, logprobs=-1)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s: s.score([]), k3.InvalidTokenError, "empty"),
        (lambda s: s.score([97]), k3.InvalidTokenError, "97"),
        (lambda s: s.score("text"), k3.InvalidTokenError, "not text"),
        (lambda s: s.score(np.zeros((2, 64), np.float32)), k3.InvalidTokenError, "embeddings have no"),
        (lambda s: s.prefill_scored(np.zeros((2, 64), np.float32)), k3.InvalidTokenError, "no probability"),
        (lambda s: s.score([1], top=98), k3.ConfigError, "top is 98; expected a number of tokens from 0 to"),
        (lambda s: s.score([1], top=True), k3.ConfigError, "top is True"),
        (lambda s: s.prefill_scored([1], top=-1), k3.ConfigError, "top is -1"),
        (lambda s: s.score(prompt(11)), k3.CapacityError, "cannot take 11 more"),
        (lambda s: s.prefill_scored(prompt(11)), k3.CapacityError, "cannot take 11 more"),
        (lambda s: s.logprobs([97]), k3.InvalidTokenError, "97"),
        (lambda s: s.logprobs(top=98), k3.ConfigError, "top is 98"),
    ],
)
def test_refusals_change_nothing(
    model: k3.Model, call: Callable[[k3.Session], Any], error: type[Exception], words: str
) -> None:
    with model.session(capacity=13) as session:
        session.prefill(prompt(3))
        with unchanged(session), pytest.raises(error, match=words):
            call(session)
        session.score(prompt(10))


def test_an_empty_session_says_nothing_of_the_next_token(model: k3.Model) -> None:
    with (
        model.session() as session,
        pytest.raises(k3.InvalidTokenError, match="nothing says what comes next"),
    ):
        session.logprobs()


def test_a_cancelled_score_changes_nothing(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(5))
        before = contents(session)
        session._generating(True)  # a cancel that comes while the pass runs
        session._scratch.cancel()
        with pytest.raises(k3.PassCancelled, match="stands at position 5") as caught:
            session.score(prompt(50))
        session._generating(False)
        assert caught.value.position == 5
        same(contents(session), before)


def test_a_score_that_is_not_finite_is_no_failure_of_the_session(model: k3.Model) -> None:
    """The values come from a state that was made bad, behind the session's back, in the shared timeline alone."""
    with model.session() as session:
        session.prefill(prompt(5))
        share = session._timeline.share

        class Poisoned:
            """A session's timeline whose shares have an infinite recurrent state."""

            position = 5

            @staticmethod
            def share() -> Any:
                other = share()
                arrays = [layer.export() for layer in other.layers]
                arrays[0]["state"][:] = np.inf
                other.replace(5, arrays)
                return other

        kept, session._timeline = session._timeline, Poisoned()
        try:
            with pytest.raises(k3.NonFiniteError, match=r"layers\.0\.self_attn.*is as it was") as caught:
                session.score(prompt(4))
        finally:
            session._timeline = kept
        assert caught.value.layer == "model.layers.0.self_attn"
        session.step(1)


def test_an_interrupted_scored_prefill_goes_on_from_the_last_pass(model: k3.Model) -> None:
    text = prompt(3 * SCORE_ROWS)

    def stop(_: str, done: int, __: int) -> None:
        if done == 2 * SCORE_ROWS:
            raise KeyboardInterrupt

    with model.session() as session, model.session() as plain:
        with pytest.raises(KeyboardInterrupt):
            session.prefill_scored(text, progress=stop)
        assert session.position == 2 * SCORE_ROWS
        plain.prefill(text[: 2 * SCORE_ROWS])
        same_sessions(session, plain)
        session.prefill_scored(text[2 * SCORE_ROWS :])
        plain.prefill(text[2 * SCORE_ROWS :])
        same_sessions(session, plain)


def test_a_scored_prefill_keeps_one_row_of_its_buffer(model: k3.Model) -> None:
    """The next pass writes to the buffer, also one that ends badly; and it would stay in memory."""
    text = prompt(2 * SCORE_ROWS)
    with model.session() as session, model.session() as plain:

        def stop(_: str, done: int, __: int) -> None:
            assert all(row.base is None and row.shape == (1, 97) for row in session._rows)
            if done == SCORE_ROWS:
                session.cancel()

        with pytest.raises(k3.PassCancelled, match=f"position {SCORE_ROWS}"):
            session.prefill_scored(text, progress=stop)
        plain.prefill(text[:SCORE_ROWS])
        same_sessions(session, plain)


# ---------------------------------------------------------------- counts


def test_stats_count_what_was_done(nano: Any) -> None:
    with k3.Model.open(nano, device="cpu", threads=1) as model:
        with model.session() as session:
            zero = session.stats
            assert (zero.tokens, zero.passes, zero.seconds, zero.weight_bytes, zero.tokens_per_second) == (
                0, 0, 0.0, 0, 0.0,
            )  # fmt: skip
            assert zero.latent_bytes == 0 and zero.state_bytes == session.nbytes
            session.prefill(prompt(130))
            session.step(1)
            session.score(prompt(SCORE_ROWS + 2))
            s = session.stats
            assert (s.stepped, s.prefilled, s.aside, s.tokens) == (1, 130, SCORE_ROWS + 1, 131)
            assert s.passes == 2 + 1 + 2 and s.seconds > 0
            assert s.tokens_per_second == (131 + SCORE_ROWS + 1) / s.seconds
            assert s.state_bytes == session.nbytes > s.latent_bytes >= 131 * model.bytes_per_token
            assert s.marks == len(session.reachable()) - (session.reachable()[0][1] == "start") - 1
            assert s.last_save is None
            step = model._weights.step_bytes()
            experts = model.config.num_experts / model.config.num_experts_per_token
            rows = [128, 2, 1, SCORE_ROWS, 1]
            read = 5 * step["trunk"] + int(sum(min(r, experts) for r in rows) * step["experts"])
            assert s.weight_bytes == read
        assert model.stats.tokens == 131 and model.stats.state_bytes == 0, "a closed session still counts"
        with model.session() as other:
            other.step(1)
            assert model.stats.tokens == 132 and model.stats.state_bytes == other.nbytes
        assert set(model.stats.to_dict()) >= {"tokens", "tokens_per_second", "passes", "last_save"}


def test_stats_of_marks_and_saves(model: k3.Model, tmp_path: Any) -> None:
    with model.session(marks=False) as session:
        session.prefill(prompt(5))
        assert (session.stats.marks, session.stats.mark_bytes) == (0, 0)
        mark = session.mark()
        session.step(1)
        assert session.stats.marks == 1 and session.stats.mark_bytes == mark.nbytes > 0
        size = session.save(tmp_path / "x.k3s")
        assert session.stats.last_save == k3.stats.LastSave(str(tmp_path / "x.k3s"), 6, size)
        session.step(1)
        with pytest.raises(k3.SnapshotError):
            session.save(tmp_path / "no" / "x.k3s")
        assert session.stats.last_save is not None and session.stats.last_save.position == 6
