# SPDX-License-Identifier: MIT
"""Traces: the values that the graph computes, under their names, at no cost where none is taken, and their file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from core_access import core
from session_tools import contents, prompt, same, same_sessions, unchanged

import k3session as k3
from k3session._core.decoder import SITES
from k3session.trace import EXTRA, ORDER, Trace

ALL = (*ORDER,)


def equal(a: Any, b: Any) -> bool:
    """The same bits, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_names_are_those_of_the_graph() -> None:
    assert set(ORDER) == {*SITES, *EXTRA} and len(set(ORDER)) == len(ORDER)


def test_names_are_explained() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
    if not page.is_file():
        pytest.skip("the documentation is not part of a wheel's tests")
    section = page.read_text(encoding="utf-8").split("### Names of inner values")[1].split("\n## ")[0]
    assert [n for n in ORDER if f"`{n}`" not in section] == []


@pytest.mark.parametrize("chunk", [1, 3, 11])
def test_values_are_those_of_the_decoder(model: k3.Model, nano: Path, chunk: int) -> None:
    text = prompt(11)
    with core(nano) as c:
        expected = c.run(text, taps=True)
    with model.session() as session:
        with session.trace(what=ALL) as trace:
            session.prefill(text, chunk=chunk)
        assert len(trace) == -(-11 // chunk) and trace.layers == tuple(range(7))
        assert trace.tokens.tolist() == text.tolist() and trace.positions.tolist() == list(range(11))
        for name, array in expected.taps.items():
            assert equal(trace[name], array), name
        assert equal(trace["logits"][:, 0], expected.logits)


def test_a_traced_pass_gives_the_bits_of_any_other(model: k3.Model) -> None:
    text = prompt(140)
    with model.session() as plain, model.session() as traced:
        for session in (plain, traced):
            session.prefill(text[:5])
        plain.prefill(text[5:])
        plain.step(1)
        with traced.trace(), unchanged(plain):
            traced.prefill(text[5:])
        assert traced.position == 140
        with traced.trace(what="logits"):
            traced.step(1)
        same_sessions(traced, plain)


def test_after_the_block_nothing_is_collected(model: k3.Model) -> None:
    with model.session() as session:
        with pytest.raises(k3.InvalidTokenError), session.trace() as trace:
            [session.step(t) for t in (1, 97)]
        session.step(2)
        assert trace.tokens.tolist() == [1]
        with session.trace() as another:
            session.step(3)
        assert another.tokens.tolist() == [3] and another.positions.tolist() == [2]


def test_layers_and_names_are_chosen(model: k3.Model) -> None:
    text = prompt(4)
    with (
        model.session() as session,
        model.session() as other,
        session.trace() as whole,
        other.trace(layers=[5, 1], what=["route_ids", "attn_in", "embed"]) as some,
    ):
        session.prefill(text)
        other.prefill(text)
    assert some.names == ("embed", "attn_in", "route_ids") and some.layers == (1, 5)
    assert equal(some["embed"], whole["embed"])
    for name in ("attn_in", "route_ids"):
        assert equal(some[name], np.ascontiguousarray(whole[name][:, [1, 5]]))
        assert equal(some.at(name, 5), np.ascontiguousarray(whole.at(name, 5)))
    assert whole.names == tuple(n for n in ORDER if n not in EXTRA)
    with pytest.raises(KeyError, match="it has embed, attn_in, route_ids"):
        some["attn_out"]
    with pytest.raises(KeyError, match="it has 1, 5"):
        some.at("attn_in", 2)
    assert some.nbytes == sum(some[n].nbytes for n in some.names)


def test_the_last_row_of_a_pass_has_what_the_head_reads(model: k3.Model) -> None:
    text = prompt(9)
    with model.session() as session, model.session() as every:
        with session.trace(what="final_normed") as trace:
            session.prefill(text, chunk=5)
        with every.trace(what=["final_normed", "logits"]) as full:
            every.prefill(text, chunk=4)
        rows = trace["final_normed"][:, 0]
        assert np.flatnonzero(~np.isnan(rows).any(1)).tolist() == [4, 8]
        assert equal(rows[[4, 8]], full["final_normed"][[4, 8], 0])
        assert np.isfinite(full["final_normed"]).all() and equal(full["logits"][8, 0], session.logits)
        same_sessions(every, session)


def test_norms_of_the_state(model: k3.Model) -> None:
    with model.session() as session:
        with session.trace(what="state_norm") as trace:
            session.prefill(prompt(6), chunk=4)
            norms = trace["state_norm"]
        states = session.snapshot().layers
        assert norms.shape == (2, 7, 3)
        for i, layer in enumerate(states):
            if layer.state is None:
                assert np.isnan(norms[:, i]).all()
            else:
                assert np.allclose(norms[1, i], np.linalg.norm(layer.state, axis=(1, 2)), rtol=1e-6)


def test_scores_and_generations_are_traced_too(model: k3.Model) -> None:
    with model.session() as session:
        session.prefill(prompt(3))
        with session.trace(what="attn_out") as trace:
            session.score([4, 5, 6])
            records = list(session.generate(2, sampling=k3.Sampling(temperature=0, stop_ids=())))
            session.prefill_scored([7, 8])
        assert trace.tokens.tolist() == [4, 5, *(r.token for r in records), 7, 8]
        assert trace.positions.tolist() == [3, 4, 3, 4, 5, 6]


def test_drafts_and_what_is_run_again_are_traced_too(model: k3.Model) -> None:
    """The same values as stepping the same tokens, for a draft, for `rewind` and for `set_tokens`."""
    names = ["attn_out", "state_norm", "logits"]
    with model.session(marks=False) as plain, plain.trace(what=names) as expected:
        for token in (1, 2, 3, 4):
            plain.step(token)
    with model.session(marks=False) as session:
        session.step(1)
        with session.trace(what=names) as draft, session.verify([2, 3, 4]) as d:
            d.accept(2)
        assert draft.tokens.tolist() == [2, 3, 4] and draft.positions.tolist() == [1, 2, 3]
        assert equal(draft["attn_out"], expected["attn_out"][1:]) and equal(
            draft["logits"], expected["logits"][1:]
        )
        assert draft["state_norm"].shape == (1, *expected["state_norm"].shape[1:])
        assert np.isnan(draft["state_norm"]).all(), "a draft has not been committed when its pass ends"
        with session.trace(what=names) as back:
            assert session.rewind(2) == 2
        assert back.tokens.tolist() == [1, 2] and back.positions.tolist() == [0, 1]
        assert equal(back["attn_out"], expected["attn_out"][:2]) and equal(
            back["logits"], expected["logits"][:2]
        )
        assert equal(back["state_norm"][-1], expected["state_norm"][1])
        with session.trace(what="attn_out") as edit:
            session.set_tokens([1, 2, 3, 4])
        assert equal(edit["attn_out"], expected["attn_out"][4 - edit.tokens.size :])
        assert equal(session.logits, expected["logits"][-1, 0])


def spoil(session: k3.Session) -> None:
    """Three tokens, and a state of the first layer that is not finite."""
    session.prefill(prompt(3))
    snap = session.snapshot()
    state = snap.layers[0].state
    assert state is not None
    state[:] = np.inf
    session.restore(snap)


@pytest.mark.parametrize("what", [ALL, tuple(n for n in ALL if n != "logits"), ("logits",), ("state_norm",)])
def test_batches_are_traced_as_each_session_alone(model: k3.Model, what: tuple[str, ...]) -> None:
    texts = [prompt(n, seed=n) for n in (1, 9, 30, 4)]

    def run(together: bool) -> list[Trace]:
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(model.session()) for _ in texts]
            # The last one is not traced, and the others not all for the same.
            traces = [
                stack.enter_context(s.trace(what=w))
                for s, w in zip(sessions, (what, "attn_out", what), strict=False)
            ]
            for token in (None, 5, 6):
                pairs = [
                    (s, text if token is None else [token + i])
                    for i, (s, text) in enumerate(zip(sessions, texts, strict=True))
                ]
                if together:
                    model.forward(pairs)
                else:
                    for pair in pairs:
                        model.forward([pair])
            return traces

    for a, b in zip(run(True), run(False), strict=True):
        assert a.names == b.names and a.positions.tolist() == b.positions.tolist()
        assert a.tokens.tolist() == b.tokens.tolist() and len(a) == len(b) == 3
        for name in a.names:
            assert equal(a[name], b[name]), name
    # and a batch of one is what the session does by itself
    with model.session() as s, s.trace(what=what) as alone:
        s.prefill(texts[2])
        s.prefill([7])
        s.prefill([8])
    for name in alone.names:
        together = np.concatenate([p.arrays[name] for p in b.passes])
        assert equal(alone[name], together), name


def test_a_session_that_fails_in_a_batch_is_traced(model: k3.Model) -> None:
    with model.session() as a, model.session() as b:
        spoil(b)
        with a.trace() as good, b.trace() as failed, pytest.raises(k3.BatchError):
            model.step([(a, 1), (b, 1)])
        assert [p.failure for p in good] == [None] and np.isfinite(good["attn_out"]).all()
        assert [p.failure for p in failed] == ["model.layers.0.self_attn"]
        assert np.isfinite(failed.at("attn_x", 0)).all() and not np.isfinite(failed.at("kda_o", 0)).all()


def test_embeddings_have_no_ids(model: k3.Model) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    with model.session() as session, session.trace(what="embed") as trace:
        session.prefill(rows)
    assert trace.tokens.tolist() == [-1] * 3 and equal(trace.at("embed", 0), rows)


def test_a_pass_that_was_not_finite_can_be_looked_at(model: k3.Model) -> None:
    """Where the value first appeared, and what it was made of: what a trace is for."""
    with model.session() as session:
        spoil(session)
        with session.trace() as trace, pytest.raises(k3.NonFiniteError):
            session.step(1)
        assert [p.failure for p in trace] == ["model.layers.0.self_attn"]
        assert np.isfinite(trace.at("attn_x", 0)).all() and not np.isfinite(trace.at("kda_o", 0)).all()
        assert session.position == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"what": "attn"}, "what is 'attn'; expected some of embed, attn_weights"),
        ({"what": []}, r"what is \[\]"),
        ({"what": ["embed", 3]}, "what is 3"),
        ({"what": 3}, "what is 3"),
        ({"layers": 7}, "layers is 7; expected numbers of layers from 0 to 6"),
        ({"layers": [-1]}, "layers is"),
        ({"layers": []}, "layers is"),
        ({"layers": ["a"]}, "layers is"),
    ],
)
def test_refusals(model: k3.Model, options: dict[str, Any], words: str) -> None:
    with model.session() as session:
        with pytest.raises(k3.ConfigError, match=words), session.trace(**options):
            pass
        session.step(1)


def test_one_trace_at_a_time(model: k3.Model) -> None:
    with model.session() as session, session.trace(what="embed") as trace:
        with pytest.raises(k3.K3Error, match="is being traced already"), session.trace():
            pass
        session.step(1)
        assert len(trace) == 1
        with model.session() as other, other.trace(what="embed") as second:
            other.step(2)
        assert second.tokens.tolist() == [2] and trace.tokens.tolist() == [1]


def test_an_empty_trace(model: k3.Model, tmp_path: Path) -> None:
    with model.session() as session, session.trace() as trace:
        pass
    assert len(trace) == 0 and trace.tokens.size == trace.positions.size == trace.nbytes == 0
    with pytest.raises(KeyError, match="the trace is empty"):
        trace["embed"]
    trace.save(tmp_path / "t")
    assert len(Trace.load(tmp_path / "t")) == 0


# ---------------------------------------------------------------- the file


@pytest.fixture(scope="module")
def recorded(model: k3.Model) -> Trace:
    with (
        model.session() as session,
        session.trace(layers=[0, 3], what=["attn_in", "route_ids", "state_norm", "logits"]) as t,
    ):
        session.prefill(prompt(5), chunk=3)
    return t


def test_a_file_holds_all_of_it(recorded: Trace, model: k3.Model, tmp_path: Path) -> None:
    size = recorded.save(tmp_path / "t.trace")
    assert size == (tmp_path / "t.trace").stat().st_size
    again = Trace.load(tmp_path / "t.trace")
    assert (again.names, again.layers, again.facts) == (recorded.names, recorded.layers, recorded.facts)
    assert again.facts["fingerprint"] == model.fingerprint.digest and again.facts["isa"] == model.isa
    assert len(again) == len(recorded)
    for a, b in zip(again, recorded, strict=True):
        assert (a.position, a.failure, a.tokens.tolist()) == (b.position, b.failure, b.tokens.tolist())
        assert a.arrays.keys() == b.arrays.keys() and all(equal(a.arrays[n], b.arrays[n]) for n in b.arrays)
    tensors = safetensors.numpy.load_file(tmp_path / "t.trace")  # any tool can look inside
    assert equal(tensors["1.attn_in"], recorded.passes[1].arrays["attn_in"])


def test_files_that_are_no_traces(recorded: Trace, tmp_path: Path) -> None:
    good = tmp_path / "t.trace"
    recorded.save(good)
    tensors = safetensors.numpy.load_file(good)
    stated = json.loads(safetensors.safe_open(good, "numpy").metadata()["trace"])

    def refused(words: str, metadata: dict[str, str] | None = None, **changed: Any) -> None:
        said = {"format": "k3session-trace", "format_version": "1", "trace": json.dumps(stated)} | (
            metadata or {}
        )
        safetensors.numpy.save_file(tensors | changed, tmp_path / "bad", said)
        with pytest.raises(k3.K3Error, match=words):
            Trace.load(tmp_path / "bad")

    refused("is no trace", {"format": "another"})
    refused("has trace format '2'; this k3session reads 1", {"format_version": "2"})
    refused("cannot be read", {"trace": "{"})
    refused("is no trace", {"trace": "[]"})
    for key in stated:
        if key != "facts":
            refused("cannot be read", {"trace": json.dumps({k: v for k, v in stated.items() if k != key})})
    refused("cannot be read", {"trace": json.dumps(stated | {"names": ["nothing"]})})
    refused("do not fit its rows and layers", {}, **{"0.attn_in": tensors["0.attn_in"][:1]})
    refused("do not fit its rows and layers", {}, **{"0.attn_in": tensors["0.attn_in"][:, 0]})
    data = good.read_bytes()
    (tmp_path / "short").write_bytes(data[:-1])
    with pytest.raises(k3.K3Error, match="truncated"):
        Trace.load(tmp_path / "short")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(k3.K3Error):
            Trace.load(path)
    with pytest.raises(k3.K3Error, match="could not be written"):
        recorded.save(tmp_path / "no" / "t")


def test_a_session_can_be_used_after_a_refused_trace(model: k3.Model) -> None:
    with model.session() as session:
        before = contents(session)
        with pytest.raises(k3.ConfigError), session.trace(what="?"):
            pass
        same(contents(session), before)
