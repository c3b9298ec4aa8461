# SPDX-License-Identifier: MIT
"""A session's contract: what its verbs return, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, changed, floats
from session_tools import Peak, contents, prompt, same, same_sessions, step_all, unchanged

import k3session as k3
from k3session.memory import CHUNK_ROWS
from k3session.synth import synth

CAPACITY = 40


@pytest.fixture
def s(model: k3.Model) -> Iterator[k3.Session]:
    """A session of 10 tokens that may hold 40."""
    with model.session(capacity=CAPACITY) as session:
        session.prefill(prompt(10))
        yield session


# What the verbs give.


def test_the_model_that_ships_opens_without_a_path() -> None:
    with k3.Model.open(threads=1) as model, model.session() as session:
        logits = session.prefill([82, 79, 77])
        assert logits.shape == (model.config.vocab_size,) and session.position == 3
        assert session.model is model and session.capacity == model.config.max_position_embeddings
        assert session.latent == "fp32" and session.resume is None and session.meta is None


def test_a_new_session_is_empty(model: k3.Model) -> None:
    with model.session() as session:
        assert session.position == 0 and session.tokens.shape == (0,) and session.logits is None
        assert all(not layer.array("state").any() for layer in session.layers if layer.is_kda)


def test_logits_are_the_callers_own(s: k3.Session, model: k3.Model) -> None:
    logits = s.step(5)
    assert logits.dtype == np.float32 and logits.shape == (97,) and logits.flags.owndata
    kept = logits.copy()
    logits[:] = -np.inf  # as a mask would
    assert s.logits is not None and np.array_equal(s.logits, kept)
    with model.session() as other:
        other.prefill([*prompt(10), 5])
        assert np.array_equal(other.step(6), s.step(6))


def test_the_last_row_is_read_only_and_stays_what_it_was(s: k3.Session) -> None:
    row = s.logits
    assert row is not None
    kept = row.copy()
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1.0
    s.step(5)
    assert np.array_equal(row, kept) and not np.array_equal(s.logits, kept)


def test_out_is_filled_and_returned(s: k3.Session, model: k3.Model) -> None:
    table = np.full((3, 97, 2), 7, np.float32)
    out = table[1, :, 0]  # a view with strides: any writable float32[vocab] will do
    assert s.step(5, out=out) is out
    with model.session() as other:
        other.prefill(prompt(10))
        assert (
            np.array_equal(out, other.step(5)) and np.all(table[[0, 2]] == 7) and np.all(table[1, :, 1] == 7)
        )


def test_tokens_are_a_copy(s: k3.Session) -> None:
    tokens = s.tokens
    assert tokens.dtype == np.int32 and np.array_equal(tokens, prompt(10))
    tokens[:] = 0
    assert np.array_equal(s.tokens, prompt(10))


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda p: p.astype(np.uint8), lambda p: p.astype(np.int64)]
)
def test_a_prompt_may_be_any_sequence_of_integers(
    model: k3.Model, s: k3.Session, kind: Callable[[Any], Any]
) -> None:
    with model.session(capacity=CAPACITY) as other:
        other.prefill(kind(prompt(10)))
        same_sessions(other, s)


def test_a_token_may_be_any_integer(s: k3.Session, model: k3.Model) -> None:
    with model.session(capacity=CAPACITY) as other:
        other.prefill(prompt(10))
        for session, kind in ((s, int), (other, np.uint16)):
            session.step(kind(96))
        same_sessions(s, other)


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "chunks", [(30,), (1,) * 30, (1, 29), (2, 28), (3, 27), (27, 3), (7, 1, 1, 16, 5)], ids=str
)
def test_prefill_and_steps_are_one_timeline(model: k3.Model, latent: str, chunks: tuple[int, ...]) -> None:
    ids = prompt(30)
    with model.session(latent=latent) as whole, model.session(latent=latent) as parts:
        whole.prefill(ids)
        for part in np.split(ids, np.cumsum(chunks)[:-1]):
            if part.size == 1:
                parts.step(part[0])
            else:
                parts.prefill(part)
        same_sessions(parts, whole)


def test_no_result_depends_on_the_chunk(model: k3.Model) -> None:
    ids = prompt(CHUNK_ROWS + 40)
    with model.session() as whole:
        whole.prefill(ids)
        for chunk in (1, 3, 64, 100):
            with model.session() as session:
                session.prefill(ids, chunk=chunk)
                same_sessions(session, whole)


def test_progress_of_a_prefill(model: k3.Model) -> None:
    seen: list[tuple[str, int, int]] = []
    with model.session() as session:
        session.prefill(prompt(25), chunk=10, progress=lambda *event: seen.append(event))
    assert seen == [("prefill", 10, 25), ("prefill", 20, 25), ("prefill", 25, 25)]


def test_an_error_of_the_progress_function_leaves_the_chunks_that_are_done(model: k3.Model) -> None:
    def stop(event: str, done: int, total: int) -> None:
        if done >= 20:
            raise ZeroDivisionError

    with model.session() as session, model.session() as expected:
        with pytest.raises(ZeroDivisionError):
            session.prefill(prompt(25), chunk=10, progress=stop)
        expected.prefill(prompt(25)[:20])
        same_sessions(session, expected)


def test_bytes_of_state(model: k3.Model) -> None:
    rows = 3 * (32 + 8)  # latent values of one token in three MLA layers
    assert model.bytes_per_token == rows * 4
    with model.session() as fp32, model.session(latent="bf16") as bf16:
        fixed = fp32.nbytes
        assert (
            fixed == 4 * (3 * 3 * 48 + 3 * 16 * 16) * 4
        )  # four KDA layers: conv windows and recurrent matrices
        fp32.prefill(prompt(640))
        bf16.prefill(prompt(640))
        # Rows are padded to a cache line, and pages are reserved some ahead.
        assert 640 * rows * 4 <= fp32.nbytes - fixed <= 640 * rows * 4 * 1.2 * 1.25 + 3 * 64 * 48 * 4
        assert fp32.nbytes - fixed == 2 * (bf16.nbytes - fixed)


def test_the_memory_of_a_prefill_does_not_grow_with_the_prompt(nano: Path) -> None:
    grown = []
    for n in (256, 4000):
        with k3.Model.open(nano, threads=1) as model, model.session() as session:
            session.prefill(prompt(128))  # everything is in place
            before = session.nbytes
            peak = Peak()
            session.prefill(prompt(n - 128), chunk=128)
            grown.append(peak.growth() - (session.nbytes - before))
    assert grown[1] < grown[0] + (1 << 20), grown


def test_names_and_representation(model: k3.Model, s: k3.Session) -> None:
    with model.session() as other:
        assert other.name != s.name and other in model.sessions and s in model.sessions
        assert repr(s) == f"<Session {s.name}: position 10 of 40, latent fp32>"
    assert repr(other) == f"<Session {other.name}: closed>" and other not in model.sessions
    assert "nano" not in repr(model) and "7 layers on cpu" in repr(model) and "1 threads" in repr(model)


# Embeddings.


def embedding_rows(model: k3.Model, ids: Any) -> np.ndarray[Any, Any]:
    table = model._checkpoint.tensor("model.embed_tokens.weight")[np.asarray(ids)]
    return (table.astype(np.uint32) << 16).view(np.float32)


def test_embeddings_stand_in_for_tokens(model: k3.Model) -> None:
    ids = prompt(20)
    with model.session() as by_id, model.session() as by_row:
        by_id.prefill(ids)
        by_row.prefill(ids[:5])
        logits = by_row.prefill(embedding_rows(model, ids[5:15]), chunk=4)
        assert logits.shape == (97,)
        by_row.prefill(ids[15:])
        assert np.array_equal(by_row.tokens, [*ids[:5], *[-1] * 10, *ids[15:]])
        expected = contents(by_id)
        found = contents(by_row)
        digests = found["facts"]["embeddings"]
        assert sorted(map(int, digests)) == list(range(5, 15)) and all(len(d) == 32 for d in digests.values())
        expected["tokens"] = found["tokens"]
        expected["facts"] = expected["facts"] | {"embeddings": digests}
        same(found, expected)
        with model.session() as again:
            again.restore(by_row.snapshot())
            same_sessions(again, by_row)


def test_digests_tell_embeddings_apart(model: k3.Model) -> None:
    a, b = embedding_rows(model, [3, 4])
    found = []
    for rows in ([a, b], [a, b], [b, a]):
        with model.session() as session:
            session.prefill(np.stack(rows).astype(np.float64))
            found.append(session.snapshot().facts["embeddings"])
    assert found[0] == found[1] != found[2] and found[0]["0"] == found[2]["1"]


def test_embeddings_that_were_not_taken_in_leave_no_digest(model: k3.Model) -> None:
    with model.session() as session:
        stop = iter([False, True, True])

        def progress(*_: object) -> None:
            if next(stop):
                session.cancel()

        with pytest.raises(k3.PassCancelled):
            session.prefill(embedding_rows(model, prompt(12)), chunk=4, progress=progress)
        assert session.position == 8
        session.step(5)
        assert sorted(map(int, session.snapshot().facts["embeddings"])) == list(range(8))


# Capacity.


def test_capacity_is_a_clean_end(model: k3.Model, s: k3.Session, tmp_path: Path) -> None:
    ids = prompt(CAPACITY + 5)
    s.prefill(ids[10:-6])
    assert s.position == CAPACITY - 1
    with (
        unchanged(s),
        pytest.raises(
            k3.CapacityError, match=r"holds 39 of 40 tokens and cannot take 2 more.*larger capacity"
        ),
    ):
        s.prefill(ids[-6:-4])
    s.step(ids[CAPACITY - 1])  # the last one that fits
    assert s.position == CAPACITY
    going = s.generate(1, sampling=GREEDY)
    for use in (lambda: s.step(1), lambda: s.prefill([1]), lambda: next(going)):
        with unchanged(s), pytest.raises(k3.CapacityError):
            use()
    with pytest.raises(IndexError):
        s.step(1)
    s.save(tmp_path / "full.k3s")
    with pytest.raises(k3.CapacityError, match="holds 40 tokens; this session may hold 39"):
        k3.Session.load(model, tmp_path / "full.k3s", capacity=CAPACITY - 1)
    with k3.Session.load(model, tmp_path / "full.k3s", capacity=100) as larger, model.session() as straight:
        straight.prefill([*prompt(10), *ids[10:CAPACITY]])
        for t in ids[CAPACITY:]:
            assert np.array_equal(larger.step(t), straight.step(t))


def test_generation_ends_at_the_capacity(s: k3.Session) -> None:
    rows = list(s.generate(sampling=k3.Sampling(temperature=0, stop_ids=())))
    assert len(rows) == CAPACITY - 10 == s.capacity - 10
    assert [r.finish_reason for r in rows] == [None] * (len(rows) - 1) + ["capacity"]


def test_room_is_not_taken_in_advance(model: k3.Model) -> None:
    with model.session(capacity=10**12) as session:
        session.prefill(prompt(10))
        assert session.nbytes < 200_000


# What is refused, and that nothing changes.

BAD_TOKENS = [
    (97, "token 97 is not in the vocabulary; expected an integer from 0 to 96"),
    (-1, "token -1 is not in the vocabulary"),
    (2**70, "not in the vocabulary"),
    (True, "token True is not in the vocabulary"),
    (3.0, "a token is an integer below 97; found float"),
    (np.float32(3), "found float32"),
    ("3", "found str"),
    (None, "found NoneType"),
    ([3], "found list"),
]


@pytest.mark.parametrize(("token", "words"), BAD_TOKENS, ids=repr)
def test_step_refuses(s: k3.Session, token: Any, words: str) -> None:
    with unchanged(s), pytest.raises(k3.InvalidTokenError, match=words):
        s.step(token)


BAD_PROMPTS = [
    ([], "the prompt is empty; expected at least one token"),
    (np.empty((0, 64), np.float32), "the prompt is empty"),
    ([1, 2, 97], "token 97 at 2 is not in the vocabulary; expected 0 to 96"),
    ([1, -1], "token -1 at 1"),
    (np.array([1, 2**40]), "token 1099511627776 at 1"),
    ("ROMEO", "takes token ids, not text: use model.tokenizer.encode"),
    (5, "a prompt is token ids"),
    (None, "found object"),
    (b"ab", "a prompt is token ids"),
    ([1.0, 2.0], r"found float64 of shape \(2,\)"),
    ([True, False], "found bool"),
    ([[1, 2], [3, 4]], r"found int64 of shape \(2, 2\)"),
    ([[1], [2, 3]], "a prompt is a sequence of token ids"),
    ([2**70], "found object"),
    (iter([1, 2]), "found object"),
    (np.zeros((2, 63), np.float32), "embeddings have width 63; expected hidden_size, 64"),
    (np.zeros((2, 64), np.complex64), "found complex64"),
    (np.array([[0.0] * 64, [np.nan] * 64], np.float32), "embedding row 1 has a value that is not finite"),
    (np.full((1, 64), 1e300), "embedding row 0 has a value that is not finite"),
]


@pytest.mark.parametrize(("ids", "words"), BAD_PROMPTS, ids=lambda v: repr(v)[:30])
def test_prefill_refuses(s: k3.Session, ids: Any, words: str) -> None:
    with unchanged(s), pytest.raises(k3.InvalidTokenError, match=words):
        s.prefill(ids)


BAD_OPTIONS: list[tuple[str, Callable[[k3.Session], Any], type[Exception], str]] = [
    (
        "out-list",
        lambda s: s.step(1, out=[0.0] * 97),
        k3.ConfigError,
        "out must be a writable float32.*found list",
    ),
    ("out-dtype", lambda s: s.step(1, out=np.zeros(97)), k3.ConfigError, "found float64"),
    ("out-shape", lambda s: s.step(1, out=np.zeros(96, np.float32)), k3.ConfigError, r"of shape \(97,\)"),
    ("out-swapped", lambda s: s.step(1, out=np.zeros(97, ">f4")), k3.ConfigError, "writable float32"),
    ("chunk-0", lambda s: s.prefill([1], chunk=0), k3.ConfigError, "chunk is 0; expected .* from 1 to 128"),
    ("chunk-129", lambda s: s.prefill([1], chunk=129), k3.ConfigError, "chunk is 129"),
    ("chunk-true", lambda s: s.prefill([1], chunk=True), k3.ConfigError, "chunk is True"),
    ("progress", lambda s: s.prefill([1], progress=3), TypeError, "progress is int"),
    (
        "max_tokens",
        lambda s: s.generate(0),
        k3.ConfigError,
        "max_tokens is 0; expected None or a number of at least 1",
    ),
    (
        "sampling",
        lambda s: s.generate(1, sampling=0.7),
        k3.ConfigError,
        "sampling is float; expected k3session.Sampling",
    ),
    ("stop", lambda s: s.generate(1, stop=["x"]), k3.ConfigError, "stop strings need a tokenizer.*stop_ids"),
    (
        "stop-empty",
        lambda s: s.generate(1, stop=[""], tokenizer=Letters()),
        k3.ConfigError,
        "one character or more",
    ),
    ("restore", lambda s: s.restore("chat.k3s"), TypeError, "for a file use Session.load"),
    ("keyword", lambda s: s.step(1, ouput=None), TypeError, "ouput"),
    ("keyword-prefill", lambda s: s.prefill([1], chunks=4), TypeError, "chunks"),
    ("meta", lambda s: s.snapshot(meta={"a": object()}), k3.SnapshotError, "meta must be what JSON can hold"),
    (
        "meta-nan",
        lambda s: s.snapshot(meta=float("nan")),
        k3.SnapshotError,
        "meta must be what JSON can hold",
    ),
]


@pytest.mark.parametrize(
    ("use", "error", "words"), [b[1:] for b in BAD_OPTIONS], ids=[b[0] for b in BAD_OPTIONS]
)
def test_options_are_checked(
    s: k3.Session, use: Callable[[k3.Session], Any], error: type[Exception], words: str
) -> None:
    with unchanged(s), pytest.raises(error, match=words):
        use(s)


def test_a_read_only_out_is_refused(s: k3.Session) -> None:
    out = np.zeros(97, np.float32)
    out.flags.writeable = False
    with unchanged(s), pytest.raises(k3.ConfigError, match="writable"):
        s.step(1, out=out)
    assert not out.any()


@pytest.mark.parametrize("latent", ["fp16", None, 16])
def test_latent_is_checked(model: k3.Model, latent: Any) -> None:
    with pytest.raises(k3.ConfigError, match="expected 'fp32' or 'bf16'"):
        model.session(latent=latent)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, "100", True])
def test_capacity_is_checked(model: k3.Model, capacity: Any) -> None:
    with pytest.raises(k3.ConfigError, match="expected None or a number of tokens of at least 1"):
        model.session(capacity=capacity)


BAD_OPENS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"path": None}, k3.ConfigError, "path is None; expected a folder, or nothing for the model that ships"),
    ({"path": 3}, k3.ConfigError, "path is 3"),
    ({"threads": 0}, k3.ConfigError, "threads is 0; expected None or a number from 1 to 256"),
    ({"threads": True}, k3.ConfigError, "threads is True"),
    ({"device": "gpu"}, k3.ConfigError, "device is 'gpu'; expected 'auto', 'cpu', 'cuda' or 'cuda:N'"),
    ({"device": "cuda:x"}, k3.ConfigError, "device is 'cuda:x'"),
    ({"device": "cpu:1"}, k3.ConfigError, "device is 'cpu:1'"),
    ({"device": None}, k3.ConfigError, "device is None"),
    ({"device": "cuda:999"}, k3.DeviceError, "driver|there is no GPU 999|K3_LIBCUDA"),
    ({"progress": "yes"}, TypeError, "progress is str"),
    ({"thread": 1}, TypeError, "thread"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPENS, ids=repr)
def test_open_refuses(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        k3.Model.open(**options)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("K3_NUM_THREADS", "many", "K3_NUM_THREADS is 'many'; expected a number from 1 to 256"),
        ("K3_NUM_THREADS", "0", "K3_NUM_THREADS is '0'"),
        ("K3_ISA", "sse9", "K3_ISA is 'sse9'; expected one of base, avx2, avx512, or unset"),
    ],
)
def test_the_environment_is_checked(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(k3.ConfigError, match=words):
        k3.Model.open()


def test_the_environment_sets_what_is_not_given(monkeypatch: pytest.MonkeyPatch, nano: Path) -> None:
    monkeypatch.setenv("K3_NUM_THREADS", "3")
    monkeypatch.setenv("K3_ISA", "base")
    with k3.Model.open(nano) as model:
        assert (model.threads, model.isa) == (3, "base")
    with k3.Model.open(nano, threads=2) as model:
        assert model.threads == 2


# The end.

VERBS: dict[str, Callable[[k3.Session], Any]] = {
    "step": lambda s: s.step(1),
    "prefill": lambda s: s.prefill([1]),
    "generate": lambda s: s.generate(1),
    "logits": lambda s: s.logits,
    "tokens": lambda s: s.tokens,
    "position": lambda s: s.position,
    "layers": lambda s: s.layers,
    "nbytes": lambda s: s.nbytes,
    "snapshot": lambda s: s.snapshot(),
    "save": lambda s: s.save("nowhere.k3s"),
    "enter": lambda s: s.__enter__(),
}


def test_use_after_close(model: k3.Model) -> None:
    session = model.session()
    session.prefill(prompt(3))
    snap = session.snapshot()
    going = session.generate(5, sampling=k3.Sampling(seed=1))
    next(going)
    session.close()
    session.close()
    assert session.is_closed and session.cancel() is False
    for use in (*VERBS.values(), lambda s: s.restore(snap), lambda _: next(going)):
        with pytest.raises(k3.ClosedError, match=f"{session.name} has been closed; open another"):
            use(session)
    with pytest.raises(ValueError, match="has been closed"):
        session.step(1)


def test_a_with_block_closes_and_lets_the_error_through(model: k3.Model) -> None:
    with pytest.raises(ZeroDivisionError), model.session() as session:
        raise ZeroDivisionError
    assert session.is_closed


def test_a_model_with_open_sessions_names_them(nano: Path) -> None:
    model = k3.Model.open(nano, threads=1)
    a, b = model.session(), model.session()
    a.prefill(prompt(5))
    with pytest.raises(k3.SessionBusyError, match=f"open sessions: {a.name}, {b.name}; close them first"):
        model.close()
    assert not model.is_closed and a.step(1).shape == (97,)
    a.close()
    del b  # gone without close()
    model.close()
    model.close()
    assert model.is_closed and repr(model).endswith("closed>")
    for use in (model.session, lambda: k3.Session(model), model.__enter__, lambda: model.fingerprint):
        with pytest.raises(k3.ClosedError, match="has been closed; open it again"):
            use()


def test_leaving_the_models_block_closes_its_sessions(nano: Path) -> None:
    with k3.Model.open(nano, threads=1) as model:
        session = model.session()
    assert session.is_closed and model.is_closed
    model = k3.Model.open(nano, threads=1)
    session = model.session()
    with pytest.raises(ZeroDivisionError), model:
        raise ZeroDivisionError
    assert session.is_closed and model.is_closed


# A busy session.


def test_a_call_inside_a_call_is_refused(model: k3.Model, tmp_path: Path) -> None:
    found: dict[str, Exception] = {}
    with model.session() as session, model.session() as expected:
        session.prefill(prompt(4))
        snap = session.snapshot()
        uses = {name: use for name, use in VERBS.items() if name in ("step", "prefill", "snapshot", "save")}
        uses |= {"restore": lambda s: s.restore(snap), "close": lambda s: s.close()}

        def progress(event: str, done: int, total: int) -> None:
            for name, use in uses.items():
                try:
                    use(session)
                except k3.SessionBusyError as error:
                    found[f"{event} {name}"] = error
            assert session.position == done + 4 if event == "prefill" else session.position == 34

        session.prefill(prompt(30), chunk=10, progress=progress)
        session.save(tmp_path / "a.k3s", progress=progress)
        assert set(found) == {f"{event} {name}" for event in ("prefill", "save") for name in uses}
        assert all("is in use by another call" in str(e) and session.name in str(e) for e in found.values())
        expected.prefill([*prompt(4), *prompt(30)])
        same_sessions(session, expected)


def test_an_exception_on_its_way_is_not_hidden_by_a_busy_session(nano: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        inside.set()
        leave.wait(10)

    model = k3.Model.open(nano, threads=1)
    session = model.session()
    thread = threading.Thread(target=lambda: session.prefill(prompt(3), progress=hold))
    thread.start()
    inside.wait(10)
    try:
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), model:
            raise ZeroDivisionError
        with pytest.raises(k3.SessionBusyError), session:
            pass
    finally:
        leave.set()
        thread.join()
    session.close()
    model.close()


# Cancel, from inside; test_threads.py does it from outside.


def test_cancel_without_a_pass_says_so_and_has_no_effect(s: k3.Session) -> None:
    assert s.cancel() is False
    s.step(1)
    assert s.position == 11


def test_a_cancelled_prefill_stands_at_the_last_chunk(model: k3.Model) -> None:
    ids = prompt(50)
    with model.session() as session, model.session() as straight:

        def stop(event: str, done: int, total: int) -> None:
            if done == 20:
                assert session.cancel() is True

        with pytest.raises(
            k3.PassCancelled, match=f"{session.name} stands at position 20 and can go on"
        ) as error:
            session.prefill(ids, chunk=10, progress=stop)
        assert error.value.position == 20 == session.position
        straight.prefill(ids[:20])
        same_sessions(session, straight)
        session.prefill(ids[20:])
        straight.prefill(ids[20:])
        same_sessions(session, straight)


def test_a_cancel_after_the_last_chunk_ends_with_the_call(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(5), progress=lambda *_: session.cancel())
        session.step(1)
        assert session.position == 6


def test_cancelling_a_generation(model: k3.Model) -> None:
    with model.session() as session, model.session() as straight:
        session.prefill(prompt(5))
        straight.prefill(prompt(5))
        expected = [r.token for r in straight.generate(10, sampling=k3.Sampling(seed=3, stop_ids=()))]
        going = session.generate(10, sampling=k3.Sampling(seed=3, stop_ids=()))
        tokens = [next(going).token for _ in range(4)]
        assert session.cancel() is True
        with pytest.raises(k3.PassCancelled) as error:
            next(going)
        assert error.value.position == session.position == 9
        assert session.cancel() is False
        tokens += [r.token for r in session.generate(6)]
        assert tokens == expected
        same_sessions(session, straight)


def test_one_cancel_ends_one_call(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(5))
        waiting = session.generate(10)
        next(waiting)
        assert session.cancel() is True  # between two of its tokens
        with pytest.raises(k3.PassCancelled):
            session.step(1)
        session.step(1)
        assert session.position == 7


# A failed session.


def nan_in(name: str, row: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        raw = tensors["language_model." + name]
        values = floats(raw).copy()
        values[row] = np.nan
        bits = values if raw.dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors["language_model." + name] = Raw(raw.dtype, raw.shape, bits.tobytes())

    return edit


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.layers.0.self_attn.dt_bias", "model.layers.0.self_attn"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp"),
        ("model.layers.3.self_attn.o_proj.weight", "model.layers.3.self_attn"),
        ("model.layers.5.block_sparse_moe.routed_expert_up_proj.weight", "model.layers.5.block_sparse_moe"),
        ("model.norm.weight", "lm_head"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_a_value_that_is_not_finite_is_traced_to_its_layer(
    nano: Path, tmp_path: Path, tensor: str, layer: str
) -> None:
    folder = changed(nano, tmp_path / "model", tensors=nan_in(tensor, 7))
    with k3.Model.open(folder, threads=1) as model, model.session() as session:
        with pytest.raises(
            k3.NonFiniteError, match=f"^{layer} gave a value that is not finite.*position 0;"
        ) as error:
            session.prefill(prompt(6))
        assert error.value.layer == layer
        assert session.position == 0 and session.tokens.size == 0 and session.logits is None


def test_a_failed_session_accepts_restore_and_close_only(nano: Path, tmp_path: Path) -> None:
    folder = changed(nano, tmp_path / "model", tensors=nan_in("model.embed_tokens.weight", 13))
    ids = [t for t in prompt(60).tolist() if t != 13]
    with k3.Model.open(folder, threads=1) as model, model.session() as session, model.session() as sibling:
        session.prefill(ids[:10])
        sibling.prefill(ids[:10])
        snap = session.snapshot()
        kept = session.logits
        with pytest.raises(k3.NonFiniteError, match=r"^model.embed_tokens gave .* began at position 20"):
            session.prefill([*ids[10:20], 13, 1], chunk=5)  # two chunks are fine, the third is not
        assert session.position == 20 and np.array_equal(session.tokens, ids[:20])
        for name in ("step", "prefill", "snapshot", "save"):
            with pytest.raises(k3.NonFiniteError, match="has failed and accepts only restore"):
                VERBS[name](session)
        with pytest.raises(k3.NonFiniteError, match=r"model\.embed_tokens"):
            next(session.generate(1))
        with pytest.raises(ArithmeticError):
            session.step(1)
        # Siblings know nothing of it.
        with model.session() as fresh:
            fresh.prefill(ids[:10])
            same_sessions(sibling, fresh)
            assert np.array_equal(sibling.step(1), fresh.step(1))
        session.restore(snap)
        assert np.array_equal(session.logits, kept)
        assert np.array_equal(step_all(session, ids[10:15]), step_all_after(model, ids[:10], ids[10:15]))
        with pytest.raises(k3.NonFiniteError):
            session.step(13)
        session.close()


def step_all_after(model: k3.Model, first: Any, then: Any) -> np.ndarray[Any, Any]:
    with model.session() as session:
        session.prefill(first)
        return step_all(session, then)


@pytest.mark.parametrize(("layer", "name"), [(2, "state"), (2, "conv"), (3, "latent")])
def test_a_bad_value_in_a_restored_state_is_found(model: k3.Model, layer: int, name: str) -> None:
    with model.session() as session, model.session() as fresh:
        session.prefill(prompt(8))
        good = session.snapshot()
        bad = session.snapshot()
        array = getattr(bad.layers[layer], name)
        array[...] = np.inf if name == "state" else np.nan
        session.restore(bad)
        with pytest.raises(k3.NonFiniteError) as error:
            session.step(1)
        assert error.value.layer == f"model.layers.{layer}.self_attn" and session.position == 8
        session.restore(good)
        fresh.prefill(prompt(8))
        assert np.array_equal(session.step(1), fresh.step(1))


def test_nothing_of_one_session_is_in_the_next(model: k3.Model) -> None:
    with model.session() as first:
        first.prefill(prompt(30))
        expected = contents(first)
    for i in range(4):
        with model.session() as dirty:
            dirty.prefill(prompt(200, seed=i))  # memory with other values, which goes back to the allocator
            bad = dirty.snapshot()
            for layer in bad.layers:
                for array in layer.arrays().values():
                    array[...] = np.nan
            dirty.restore(bad)
            with pytest.raises(k3.NonFiniteError):
                dirty.step(0)
        with model.session() as session:
            session.prefill(prompt(30))
            same(contents(session), expected)


def test_scratch_is_written_before_it_is_read(model: k3.Model) -> None:
    with model.session() as session, model.session() as clean:
        for part in (prompt(17), prompt(1), prompt(5), prompt(3), prompt(64), prompt(1)):
            session._scratch.poison()
            session.prefill(part)
            clean.prefill(part)
        same_sessions(session, clean)


# Generation.


class Letters:
    """A tokenizer that is nothing but encode and decode."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(int(i) + 32) if i < 95 else "\ufffd" for i in ids)


GREEDY = k3.Sampling(temperature=0, seed=0, stop_ids=())


def test_a_token_is_chosen_stepped_and_then_yielded(model: k3.Model) -> None:
    with model.session() as session:
        logits = session.prefill(prompt(7))
        for i, r in enumerate(session.generate(12, sampling=GREEDY)):
            assert r.token == int(logits.argmax()) and r.position == 7 + i
            assert session.position == r.position + 1 and session.tokens[-1] == r.token
            exact = logits.astype(np.float64)
            exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
            assert abs(r.logprob - exact[r.token]) < 1e-5 and r.logprob <= 0
            assert r.text == "" and r.seconds > 0  # this checkpoint has no tokenizer
            assert r.finish_reason == (None if i < 11 else "length")
            assert session.logits is not None
            logits = session.logits.copy()
        assert i == 11


@pytest.mark.parametrize(
    "sampling", [GREEDY, k3.Sampling(temperature=1.3, top_k=40, repetition_penalty=1.1, seed=7, stop_ids=())]
)
def test_breaking_saving_and_loading_repeats_and_loses_nothing(
    model: k3.Model, tmp_path: Path, sampling: k3.Sampling
) -> None:
    with model.session() as straight:
        straight.prefill(prompt(9))
        expected = [r.token for r in straight.generate(30, sampling=sampling)]
        session = model.session()
        session.prefill(prompt(9))
        tokens: list[int] = []
        first = True
        while len(tokens) < 30:
            for r in session.generate(30 - len(tokens), sampling=sampling if first else None):
                tokens.append(r.token)
                if len(tokens) % 4 == 0:
                    break
            first = False
            session.save(tmp_path / "a.k3s")
            session.close()
            session = k3.Session.load(model, tmp_path / "a.k3s")
        assert tokens == expected and len(set(expected)) > 3
        same_sessions(session, straight)
        session.close()


def test_a_stop_id_ends_generation_and_is_part_of_the_session(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(7))
        tokens = [r.token for r in session.generate(20, sampling=GREEDY)]
    stop = tokens[4]
    count = tokens.index(stop) + 1
    with model.session() as session:
        session.prefill(prompt(7))
        rows = list(
            session.generate(20, sampling=k3.Sampling(temperature=0, stop_ids=(stop,)), tokenizer=Letters())
        )
        assert [r.token for r in rows] == tokens[:count] and session.tokens[-1] == stop
        assert rows[-1].finish_reason == "stop" and rows[-1].text == ""
        assert all(r.finish_reason is None for r in rows[:-1])


def test_stop_strings_are_cut_off_wherever_they_fall(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(7))
        sampling = k3.Sampling(seed=5, stop_ids=(), logit_bias={95: -np.inf, 96: -np.inf})
        whole = "".join(r.text for r in session.generate(40, sampling=sampling, tokenizer=Letters()))
    assert len(whole) == 40
    for stop in (whole[10], whole[10:12], whole[20:25], [whole[30:33], whole[12:14]], "no such text"):
        with model.session() as session:
            session.prefill(prompt(7))
            rows = list(session.generate(40, sampling=sampling, stop=stop, tokenizer=Letters()))
            ends = [whole.index(x) for x in ([stop] if isinstance(stop, str) else stop) if x in whole]
            text = "".join(r.text for r in rows)
            assert text == whole[: min(ends, default=40)]
            assert rows[-1].finish_reason == ("stop" if ends else "length")
            assert session.position == 7 + len(rows)


def test_text_is_what_decode_gives_for_all_tokens() -> None:
    with k3.Model.open(threads=1) as model, model.session() as session:
        session.prefill(model.tokenizer.encode("ROMEO.\n"))
        rows = list(session.generate(40, sampling=k3.Sampling(seed=1, stop_ids=())))
        assert "".join(r.text for r in rows) == model.tokenizer.decode([r.token for r in rows])


def test_generation_needs_a_beginning(model: k3.Model) -> None:
    with model.session() as session:
        with pytest.raises(k3.InvalidTokenError, match=r"nothing to continue from: call prefill\(\)"):
            next(session.generate(1))
        assert session.position == 0


def test_the_sampling_is_remembered_with_the_seed_that_was_drawn(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(7))
        assert session.sampling is None
        snap = session.snapshot()
        first = [r.token for r in session.generate(20, sampling=k3.Sampling(temperature=2.0, stop_ids=()))]
        drawn = session.sampling
        assert drawn is not None and drawn.seed is not None and drawn.temperature == 2.0
        session.restore(snap)
        assert session.sampling is None
        again = [r.token for r in session.generate(20, sampling=drawn)]
        session.restore(snap)
        other = [r.token for r in session.generate(20, sampling=k3.Sampling(temperature=2.0, stop_ids=()))]
        assert again == first != other


def test_a_hook_sees_the_ids_and_its_own_copy_of_the_logits(model: k3.Model) -> None:
    calls = []
    with model.session() as session:
        session.prefill(prompt(7))

        def only_even(ids: Any, logits: Any) -> Any:
            calls.append(ids.copy())
            assert np.array_equal(ids, session.tokens) and np.array_equal(logits, session.logits)
            logits[1::2] = -np.inf
            return logits

        rows = list(
            session.generate(10, sampling=k3.Sampling(temperature=0, processor=only_even, stop_ids=()))
        )
        assert all(r.token % 2 == 0 for r in rows) and [c.size for c in calls] == list(range(7, 17))
        assert session.logits is not None and np.isfinite(session.logits).all()
        with model.session() as straight:
            straight.prefill(session.tokens)
            assert np.array_equal(straight.logits, session.logits)


def test_an_error_in_the_hook_leaves_the_session_as_it_was(s: k3.Session) -> None:
    def fail(ids: Any, logits: Any) -> Any:
        raise ZeroDivisionError

    going = s.generate(5, sampling=k3.Sampling(processor=fail, seed=1))
    with unchanged(s), pytest.raises(ZeroDivisionError):
        next(going)
    s.step(1)


def test_a_loop_of_step_alone_can_be_left_anywhere(model: k3.Model) -> None:
    with model.session() as session, model.session() as generated:
        logits = session.prefill(prompt(7))
        for _ in range(9):
            logits = session.step(int(logits.argmax()))
        generated.prefill(prompt(7))
        for r in generated.generate(100, sampling=GREEDY):
            if r.position == 15:
                break
        assert np.array_equal(session.tokens, generated.tokens)
        assert np.array_equal(session.step(3), generated.step(3))


def test_two_models_in_one_process(nano: Path, model: k3.Model, tmp_path: Path) -> None:
    other_folder = synth(tmp_path / "other", "micro", seed=9)
    with model.session() as alone:
        expected = step_all(alone, prompt(20))
    with k3.Model.open(other_folder, threads=1) as other, k3.Model.open(nano, threads=1) as twin:
        with other.session() as solo:
            small = step_all(solo, prompt(20, vocab=32))
        with model.session() as a, other.session() as b, twin.session() as c:
            for i in range(20):
                assert np.array_equal(a.step(prompt(20)[i]), expected[i])
                assert np.array_equal(b.step(prompt(20, vocab=32)[i]), small[i])
                assert np.array_equal(c.step(prompt(20)[i]), expected[i])
            with pytest.raises(k3.InvalidTokenError):
                b.step(96)
