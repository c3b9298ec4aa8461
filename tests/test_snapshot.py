# SPDX-License-Identifier: MIT
"""Snapshots: what goes in comes out to the bit, and what is not whole, or not this model's, is refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import os
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from checkpoint_tools import changed
from core_access import counts
from golden_data import GOLDEN, TINY, golden
from hypothesis import given
from hypothesis import strategies as st
from session_tools import Peak, contents, prompt, same, same_sessions, step_all, unchanged

import k3session as k3
from k3session import snapshot_file
from k3session.safetensors_io import plan
from k3session.snapshot import diff_files, inspect_file, verify_file
from k3session.snapshot_file import _sealed
from k3session.synth import synth

Make = Callable[[k3.Model], k3.Session]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[k3.Model]:
    """One KDA and one MLA layer: a snapshot of 4 KB."""
    folder = synth(tmp_path_factory.mktemp("micro") / "model", "micro")
    with k3.Model.open(folder, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def small(micro: k3.Model) -> bytes:
    """The smallest snapshot that has everything."""
    with micro.session() as session:
        session.prefill([3, 1, 4])
        session.sampling = k3.Sampling(seed=7, stop_ids=(1,))
        return session.snapshot(meta={"a": [1, None]}).to_bytes()


@pytest.fixture
def target(micro: k3.Model) -> Iterator[k3.Session]:
    """A session that goes its own way, for damaged snapshots to leave alone."""
    with micro.session() as session:
        session.prefill(prompt(9, vocab=32))
        yield session


# Round trips.


def empty(model: k3.Model) -> k3.Session:
    return model.session()


def one(model: k3.Model) -> k3.Session:
    session = model.session()
    session.step(5)
    return session


def long(model: k3.Model) -> k3.Session:
    session = model.session()
    session.prefill(prompt(150))  # three pages of the latent cache
    return session


def bf16(model: k3.Model) -> k3.Session:
    session = model.session(latent="bf16")
    session.prefill(prompt(65))
    return session


def generated(model: k3.Model) -> k3.Session:
    session = model.session()
    session.prefill(prompt(5))
    list(session.generate(6, sampling=k3.Sampling(seed=3, temperature=0.9, logit_bias={4: -np.inf})))
    return session


def embedded(model: k3.Model) -> k3.Session:
    session = model.session()
    session.prefill([1, 2])
    session.prefill(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
    return session


KINDS: list[Make] = [empty, one, long, bf16, generated, embedded]
every_kind = pytest.mark.parametrize("make", KINDS, ids=lambda f: f.__name__)


@every_kind
def test_a_file_gives_the_session_back(model: k3.Model, tmp_path: Path, make: Make) -> None:
    with make(model) as session:
        session.save(tmp_path / "a.k3s")
        with k3.Session.load(model, tmp_path / "a.k3s") as loaded:
            same_sessions(loaded, session)
            assert (
                loaded.resume == "exact" and loaded.latent == session.latent and loaded.name != session.name
            )
            ids = prompt(30, seed=1)
            assert step_all(loaded, ids[:5]).tobytes() == step_all(session, ids[:5]).tobytes()
            loaded.prefill(ids[5:])
            session.prefill(ids[5:])
            same_sessions(loaded, session)
            more = k3.Sampling(seed=9)
            assert [r.token for r in loaded.generate(9, sampling=more)] == [
                r.token for r in session.generate(9, sampling=more)
            ]


@every_kind
def test_every_way_gives_the_same_bytes(model: k3.Model, tmp_path: Path, make: Make) -> None:
    with make(model) as session:
        for include_tokens in (True, False):
            options = {"meta": {"k": "v"}, "include_tokens": include_tokens}
            size = session.save(tmp_path / "a.k3s", **options)
            snap = session.snapshot(**options)
            snap.save(tmp_path / "b.k3s")
            data = (tmp_path / "a.k3s").read_bytes()
            assert len(data) == size and data == (tmp_path / "b.k3s").read_bytes() == snap.to_bytes()
            assert (
                k3.Snapshot.from_bytes(data).to_bytes()
                == k3.Snapshot.open(tmp_path / "a.k3s").to_bytes()
                == data
            )
            assert k3.Snapshot.from_bytes(bytearray(data)).to_bytes() == data
            assert k3.Snapshot.from_bytes(memoryview(data)).to_bytes() == data


@every_kind
def test_restoring_goes_back_as_often_as_one_likes(model: k3.Model, make: Make) -> None:
    with make(model) as session, model.session(latent=session.latent, capacity=4000) as other:
        snap = session.snapshot()
        before = contents(session)
        ids = prompt(20, seed=2)
        expected = step_all(session, ids)
        other.prefill(prompt(300, seed=3))  # longer than the snapshot, and with another past
        for target in (session, other, session):
            target.restore(snap)
            same(contents(target), before)
            assert target.resume == "exact" and target.meta is None
            assert step_all(target, ids).tobytes() == expected.tobytes()


def test_what_a_snapshot_holds(model: k3.Model) -> None:
    with generated(model) as session:
        snap = session.snapshot(meta=["x"])
        assert snap.position == 11 and np.array_equal(snap.tokens, session.tokens)
        assert np.array_equal(snap.logits, session.logits) and snap.meta == ["x"]
        assert snap.fingerprint == model.fingerprint and len(snap.layers) == 7
        for i, layer in enumerate(snap.layers):
            shapes = {name: (a.shape, a.dtype) for name, a in layer.arrays().items()}
            if i in model.config.kda_layers:
                assert shapes == {"conv": ((3, 3, 48), np.float32), "state": ((3, 16, 16), np.float32)}
                assert layer.latent is None
            else:
                assert shapes == {"latent": ((11, 40), np.float32)} and layer.conv is layer.state is None
        assert snap.nbytes == sum(a.nbytes for layer in snap.layers for a in layer.arrays().values())
        assert "facts" not in repr(snap) and "position=11" in repr(snap)
        facts = snap.facts
        assert facts["latent"] == "fp32" and facts["weights"] == "stored" and facts["device"] == "cpu"
        assert (
            facts["layers"] == [0, 7] and facts["k3session"] == k3.__version__ and facts["isa"] == model.isa
        )
        assert facts["sampling"]["seed"] == 3 and facts["sampling"]["logit_bias"] == {"4": "-inf"}


def test_a_snapshot_in_memory_is_independent_of_the_session(model: k3.Model, tmp_path: Path) -> None:
    with long(model) as session, model.session() as other:
        snap = session.snapshot()
        before = snap.to_bytes()
        ids = prompt(100, seed=4)
        expected = step_all(session, ids[:20])
        background = threading.Thread(target=lambda: [snap.save(tmp_path / "a.k3s") for _ in range(5)])
        background.start()
        step_all(session, ids[20:])
        background.join()
        assert snap.to_bytes() == before == (tmp_path / "a.k3s").read_bytes()
        other.restore(snap)
        assert step_all(other, ids[:20]).tobytes() == expected.tobytes()
        assert snap.to_bytes() == before


@pytest.mark.parametrize(
    "meta", [None, "text", 3, 2.5, True, [], {"a": {"b": [1, "é\u2028\U0001f600", None]}}, {"": ""}]
)
def test_meta_comes_back(model: k3.Model, tmp_path: Path, meta: Any) -> None:
    with one(model) as session:
        session.save(tmp_path / "a.k3s", meta=meta)
    with k3.Session.load(model, tmp_path / "a.k3s") as loaded:
        assert loaded.meta == meta == inspect_file(tmp_path / "a.k3s")["meta"]


def test_meta_that_cannot_be_kept_is_refused(
    model: k3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with one(model) as session:
        session.save(tmp_path / "a.k3s")
        for meta in (cycle, deep, b"bytes", {1, 2}, {(1, 2): 3}, float("inf")):
            with pytest.raises(k3.SnapshotError, match="meta must be what JSON can hold"):
                session.save(tmp_path / "a.k3s", meta=meta)
        monkeypatch.setattr(snapshot_file, "HEADER_LIMIT", 100_000)
        with pytest.raises(
            k3.SnapshotError, match=r"meta is too large: the header would have \d+ .* 100000$"
        ):
            session.save(tmp_path / "a.k3s", meta="x" * 100_000)
        while deep:
            deep = deep.pop()  # freeing it all at once would overflow the stack
        assert verify_file(tmp_path / "a.k3s")["ok"] and os.listdir(tmp_path) == ["a.k3s"]


def test_without_tokens_the_conversation_is_not_in_the_file(model: k3.Model, tmp_path: Path) -> None:
    ids = prompt(40)
    with model.session() as session:
        session.prefill(ids)
        session.save(tmp_path / "a.k3s", include_tokens=False)
        data = (tmp_path / "a.k3s").read_bytes()
        assert ids.tobytes() not in data and inspect_file(tmp_path / "a.k3s")["tokens"] is None
        with k3.Session.load(model, tmp_path / "a.k3s") as loaded:
            assert loaded.position == 40 and np.array_equal(loaded.tokens, [-1] * 40)
            assert np.array_equal(loaded.step(3), session.step(3)) and loaded.tokens[-1] == 3
            # A second save has no ids to leave out, and no digests of embeddings for them.
            assert loaded.snapshot().facts["embeddings"] == {}
            greedy = k3.Sampling(temperature=0, repetition_penalty=1.5)
            assert len(list(loaded.generate(3, sampling=greedy))) == 3
    with embedded(model) as session:
        assert session.snapshot(include_tokens=False).facts["embeddings"] == {}


def test_progress_of_a_save(model: k3.Model, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with long(model) as session:
        size = session.save(tmp_path / "a.k3s", progress=lambda *event: seen.append(event))
        assert {event for event, _, _ in seen} == {"save"} and {total for _, _, total in seen} == {size}
        done = [current for _, current, _ in seen]
        assert done == sorted(set(done)) and done[-1] == size
        with unchanged(session), pytest.raises(ZeroDivisionError):
            session.save(tmp_path / "b.k3s", progress=lambda *_: 1 / 0)
        assert os.listdir(tmp_path) == ["a.k3s"]


# Sizes.


@pytest.mark.parametrize("make", [one, long, bf16])
def test_the_size_is_that_of_the_state(model: k3.Model, tmp_path: Path, make: Make) -> None:
    with make(model) as session:
        size = session.save(tmp_path / "a.k3s")
        recurrent = 4 * (3 * 3 * 48 + 3 * 16 * 16) * 4
        latent = session.position * 3 * 40 * (2 if session.latent == "bf16" else 4)
        ids_and_logits = session.position * 4 + 97 * 4
        assert 0 < size - recurrent - latent - ids_and_logits < 6000  # the header
        assert size <= recurrent + latent + 64 * 1024
    wide = model.session(capacity=10**9)
    wide.prefill(prompt(session_length := 10))
    narrow = model.session(capacity=session_length)
    narrow.prefill(prompt(session_length))
    assert wide.save(tmp_path / "w.k3s") == narrow.save(tmp_path / "n.k3s")
    wide.close()
    narrow.close()


# The file for others.


def test_the_safetensors_library_reads_it(model: k3.Model, tmp_path: Path) -> None:
    for make in KINDS:
        with make(model) as session:
            session.save(tmp_path / "a.k3s")
            if session.latent == "bf16":
                continue  # its NumPy side has no BF16
            held = safetensors.numpy.load_file(tmp_path / "a.k3s")
            snap = session.snapshot()
            assert np.array_equal(held.pop("tokens"), session.tokens)
            if session.position:
                assert np.array_equal(held.pop("logits"), session.logits)
            for i, layer in enumerate(snap.layers):
                for name, array in layer.arrays().items():
                    found = held.pop(f"layers.{i}.{name}")
                    assert found.dtype == array.dtype and found.tobytes() == array.tobytes()
            assert not held


def test_inspect_tells_what_is_inside_without_a_model(model: k3.Model, tmp_path: Path) -> None:
    with generated(model) as session:
        size = session.save(tmp_path / "a.k3s", meta={"user": 1})
        found = inspect_file(tmp_path / "a.k3s")
        assert found["bytes"] == size and found["format_version"] == 1 and found["position"] == 11
        assert found["tokens"] == session.tokens.tolist() and found["meta"] == {"user": 1}
        assert found["fingerprint"] == model.fingerprint.to_dict() and found["sampling"]["temperature"] == 0.9
        state = session.snapshot().layers[0].state
        assert found["tensors"]["layers.0.state"] == {
            "dtype": "F32",
            "shape": [3, 16, 16],
            "xxh3_128": xxhash.xxh3_128_hexdigest(state),
        }
        json.dumps(found)


def test_verify_and_diff(model: k3.Model, tmp_path: Path) -> None:
    with long(model) as session:
        session.save(tmp_path / "a.k3s")
        session.save(tmp_path / "b.k3s")
        assert diff_files(tmp_path / "a.k3s", tmp_path / "b.k3s") == {}
        session.step(5)
        session.save(tmp_path / "b.k3s", meta={"x": 1})
    with bf16(model) as session:
        session.save(tmp_path / "c.k3s", include_tokens=False)
    found = diff_files(tmp_path / "a.k3s", tmp_path / "b.k3s")
    assert (
        found["position"] == (150, 151)
        and found["meta.x"] == (None, 1)
        and found["tensor tokens"][1][1] == [151]
    )
    tensors = {"tokens", "logits", *(f"layers.{i}.{n}" for i in (0, 1, 2, 4) for n in ("conv", "state"))}
    tensors |= {f"layers.{i}.latent" for i in (3, 5, 6)}
    assert {k.removeprefix("tensor ") for k in found if k.startswith("tensor ")} == tensors
    found = diff_files(tmp_path / "a.k3s", tmp_path / "c.k3s")
    assert found["latent"] == ("fp32", "bf16") and found["tensor tokens"][1] is None
    seen: list[int] = []
    report = verify_file(tmp_path / "a.k3s", progress=lambda event, done, total: seen.append(total - done))
    assert report["ok"] and report["tensors"] == 13 and seen[-1] == 0
    data = bytearray((tmp_path / "a.k3s").read_bytes())
    data[-1] ^= 1
    data[-80_000] ^= 1
    (tmp_path / "a.k3s").write_bytes(data)
    with pytest.raises(
        k3.SnapshotCorruptError, match=r"a\.k3s: altered: layers\.\d\.\w+, layers\.6\.latent$"
    ):
        verify_file(tmp_path / "a.k3s")


# Another model, other options.


def refusal(target: k3.Session, snap: k3.Snapshot) -> k3.SnapshotMismatchError:
    """What restoring says; by a file the same is said."""
    with unchanged(target), pytest.raises(k3.SnapshotMismatchError) as error:
        target.restore(snap)
    differences = error.value.differences
    assert differences and all(name.removeprefix("layers.") in str(error.value) for name in differences)
    return error.value


def test_other_weights_of_the_same_shape_are_refused_by_part(
    nano: Path, tmp_path: Path, model: k3.Model
) -> None:
    def edit(tensors: Any) -> None:
        name = "language_model.model.layers.2.self_attn.dt_bias"
        data = bytearray(tensors[name].data)
        data[0] ^= 1
        tensors[name].data = bytes(data)

    with (
        long(model) as session,
        k3.Model.open(changed(nano, tmp_path / "m", tensors=edit), threads=1) as other,
    ):
        snap = session.snapshot()
        session.save(tmp_path / "a.k3s")
        with other.session() as target:
            target.prefill(prompt(3))
            error = refusal(target, snap)
        assert set(error.differences) == {"fingerprint", "fingerprint.layers"}
        here, there = error.differences["fingerprint"]
        assert (here, there) == (model.fingerprint.digest, other.fingerprint.digest)
        assert here in str(error) and there in str(error) and "another model" in str(error)
        before = len(other.sessions)
        with pytest.raises(k3.SnapshotMismatchError, match=here):
            k3.Session.load(other, tmp_path / "a.k3s")
        assert len(other.sessions) == before


def test_another_seed_and_another_shape_are_refused_with_every_difference(
    model: k3.Model, tmp_path: Path
) -> None:
    with long(model) as session:
        session.save(tmp_path / "a.k3s")
        snap = session.snapshot()
    everything = {"fingerprint", *(f"fingerprint.{p}" for p in ("embedding", "layers", "head"))}
    with (
        k3.Model.open(synth(tmp_path / "seed", "nano", seed=2), threads=1) as other,
        other.session() as target,
    ):
        assert set(refusal(target, snap).differences) == everything
    with (
        k3.Model.open(synth(tmp_path / "micro", "micro"), threads=1) as other,
        other.session(latent="bf16") as target,
    ):
        found = refusal(target, snap).differences
        assert set(found) == everything | {
            "fingerprint.config",
            "num_hidden_layers",
            "layers",
            "latent",
            "vocab_size",
        }
        assert found["num_hidden_layers"] == (7, 2) and found["latent"] == ("fp32", "bf16")
        with pytest.raises(k3.SnapshotMismatchError, match="num_hidden_layers: snapshot 7, here 2"):
            k3.Session.load(other, tmp_path / "a.k3s")


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_the_same_weights_in_other_files_are_the_same_model(
    nano: Path, tmp_path: Path, model: k3.Model, shards: int, prefix: str
) -> None:
    def rename(tensors: Any) -> Any:
        return {prefix + name.removeprefix("language_model."): raw for name, raw in sorted(tensors.items())}

    folder = changed(nano, tmp_path / "elsewhere", tensors=rename, shards=shards)
    with long(model) as session, k3.Model.open(folder, threads=1) as other:
        session.save(tmp_path / "a.k3s")
        with k3.Session.load(other, tmp_path / "a.k3s") as loaded:
            assert loaded.resume == "exact"
            same_sessions(loaded, session)
            assert np.array_equal(loaded.step(3), session.step(3))


def test_the_latent_of_the_session_is_not_converted(model: k3.Model) -> None:
    with long(model) as fp32, bf16(model) as rounded:
        assert refusal(fp32, rounded.snapshot()).differences == {"latent": ("bf16", "fp32")}
        assert refusal(rounded, fp32.snapshot()).differences == {"latent": ("fp32", "bf16")}


def test_another_weight_mode_is_refused(model: k3.Model) -> None:
    with long(model) as session:
        snap = session.snapshot()
        other = dataclasses.replace(snap, facts=snap.facts | {"weights": "int8"})
        assert refusal(session, other).differences == {"weights": ("int8", "stored")}


@pytest.mark.parametrize("fact", ["build", "isa", "device"])
def test_resume_says_tolerance_where_the_numbers_may_differ(model: k3.Model, fact: str) -> None:
    with long(model) as session:
        snap = session.snapshot()
        session.restore(dataclasses.replace(snap, facts=snap.facts | {fact: "other"}))
        assert session.resume == "tolerance"
        session.restore(snap)
        assert session.resume == "exact"


def test_across_instruction_sets(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: k3.Model
) -> None:
    ids = prompt(40, seed=8)
    with long(model) as session:
        session.save(tmp_path / "a.k3s")
        expected = step_all(session, ids)
        monkeypatch.setenv("K3_ISA", "base")
        with k3.Model.open(nano, threads=1) as base, k3.Session.load(base, tmp_path / "a.k3s") as loaded:
            assert loaded.resume == ("exact" if model.isa == "base" else "tolerance")
            found = step_all(loaded, ids)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_arrays_that_do_not_fit_are_refused_before_anything_changes(model: k3.Model) -> None:
    with long(model) as session, model.session() as target:
        target.prefill(prompt(5))
        snap = session.snapshot()
        assert snap.tokens is not None and snap.logits is not None
        latent = dataclasses.replace(snap.layers[6], latent=snap.layers[6].latent[:-1])
        state = dataclasses.replace(snap.layers[0], state=snap.layers[0].state.astype(np.float64))
        bad: list[dict[str, Any]] = [
            {"tokens": snap.tokens[:-1]},
            {"tokens": snap.tokens.astype(np.int64)},
            {"tokens": snap.tokens + 97},
            {"logits": snap.logits[:-1]},
            {"logits": snap.logits.astype(np.float64)},
            {"layers": snap.layers[:-1]},
            {"layers": (*snap.layers[:-1], latent)},
            {"layers": (state, *snap.layers[1:])},
            {"layers": (snap.layers[3], *snap.layers[1:])},
            {"position": 149},
        ]
        for change in bad:
            refusal(target, dataclasses.replace(snap, **change))
        with (
            unchanged(target),
            pytest.raises(k3.SnapshotError, match="its sampling or embeddings cannot be read"),
        ):
            target.restore(dataclasses.replace(snap, facts=snap.facts | {"sampling": {"top_p": 7}}))
        target.restore(snap)
        same_sessions(target, session)


# Files that are not whole.


def refused(
    data: bytes,
    target: k3.Session,
    folder: Path,
    error: type[Exception] = k3.SnapshotError,
    *,
    whole: bool = False,
) -> str:
    """Every way of reading refuses `data`, the session stays as it was, and nothing is left behind.

    A `whole` file is only wrong in what it claims; what looks at digests alone does not see it.
    """
    model = target.model
    file = folder / "damaged.k3s"
    file.write_bytes(data)
    sessions = len(model.sessions)
    with unchanged(target), pytest.raises(error) as said:
        target.restore(k3.Snapshot.from_bytes(data))
    uses: list[Callable[[], Any]] = [lambda: k3.Session.load(model, file)]
    uses += [] if whole else [lambda: k3.Snapshot.open(file), lambda: verify_file(file)]
    for use in uses:
        with pytest.raises(error) as by_file:
            use()
        assert "damaged.k3s" in str(by_file.value)
    assert len(model.sessions) == sessions
    return str(said.value)


def test_truncated_at_every_byte(small: bytes, target: k3.Session, tmp_path: Path) -> None:
    for n in range(0, len(small), counts(41, 1)):
        said = refused(small[:n], target, tmp_path, k3.SnapshotCorruptError)
        assert "truncated" in said, n
    assert "belong to no tensor" in refused(small + b"\0", target, tmp_path, k3.SnapshotCorruptError)
    # Without the session around it, all of them are quick enough.
    for n in range(len(small)):
        with pytest.raises(k3.SnapshotCorruptError):
            k3.Snapshot.from_bytes(small[:n])


def test_every_flipped_byte(small: bytes, target: k3.Session, tmp_path: Path) -> None:
    data = bytearray(small)
    version = small.index(b'"format_version":"1"') + len(b'"format_version":"')
    for n in range(len(small)):
        data[n] ^= 1 << n % 8
        error = k3.SnapshotError if n == version else k3.SnapshotCorruptError  # "1" may become a newer one
        if n % counts(41, 1) == 0:
            refused(bytes(data), target, tmp_path, error)
        with pytest.raises(error):
            k3.Snapshot.from_bytes(data)
        data[n] = small[n]
    assert bytes(data) == small


def test_every_bit_of_a_byte(small: bytes) -> None:
    for n in range(0, len(small), counts(29, 1)):
        for bit in range(8):
            data = bytearray(small)
            data[n] ^= 1 << bit
            with pytest.raises(k3.SnapshotError):
                k3.Snapshot.from_bytes(data)


def test_bytes_that_moved(small: bytes, target: k3.Session, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for _ in range(counts(20, 500)):
        a, b, n = rng.integers(0, len(small) - 64, 3) % (len(small) - 64)
        n = 1 + n % 64
        data = bytearray(small)
        data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]
        if bytes(data) != small:
            refused(bytes(data), target, tmp_path)


def test_damage_is_refused_quickly_and_in_little_memory(model: k3.Model, tmp_path: Path) -> None:
    claims = {
        "the length of the header": struct.pack("<Q", 2**40) + b"{}",
        "a tensor of 1 TB": claim("layers.0.state", [2**38], 2**40),
        "an overflowing shape": claim("layers.0.state", [2**40, 2**40], 2**62),
        "two hundred thousand dimensions": claim("layers.0.state", [1] * 200_000, 4),
        "deep nesting": json_file("[" * 200_000 + "]" * 200_000),
        "a huge number": json_file(
            '{"a":{"dtype":"F32","shape":[' + "9" * 100_000 + '],"data_offsets":[0,4]}}'
        ),
    }
    with long(model) as session:
        data = session.snapshot().to_bytes()
        claims["1 TB in the facts"] = with_facts(data, position=2**38)
        claims["a billion layers in the facts"] = with_facts(data, num_hidden_layers=10**9)
        peak = Peak()
        for what, bad in claims.items():
            peak.start()
            began = time.perf_counter()
            refused(bad, session, tmp_path, whole="facts" in what)
            assert time.perf_counter() - began < 5, what
            assert peak.growth() < 50 << 20, what


def test_a_sparse_file_of_1_tb(model: k3.Model, tmp_path: Path) -> None:
    # Everything in it agrees, the digest of the header too, but for the data, which nobody could have.
    file = tmp_path / "sparse.k3s"
    with long(model) as session:
        snap = session.snapshot()
    position = (2**40) // 480
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for i, layer in enumerate(snap.layers):
        for name, array in layer.arrays().items():
            shape = (position, 40) if name == "latent" else array.shape
            tensors.append((f"layers.{i}.{name}", "F32", shape))
    planned = plan(tensors, metadata(snap.facts | {"position": position}, [t[0] for t in tensors]))
    try:
        with open(file, "wb") as out:
            out.write(_sealed(planned.header))
            out.truncate(planned.total)
    except OSError as problem:
        pytest.skip(f"this file system has no files of 1 TB: {problem}")
    peak = Peak()
    began = time.perf_counter()
    with pytest.raises(k3.CapacityError, match=f"holds {position} tokens"):
        k3.Session.load(model, file)
    assert time.perf_counter() - began < 2 and peak.growth() < 50 << 20


def json_file(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def claim(name: str, shape: list[int], end: int) -> bytes:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
    return json_file(json.dumps({name: entry}))


def metadata(facts: Any, names: list[str]) -> dict[str, str]:
    digests = dict.fromkeys(names, "0" * 32)
    return {
        "format": "k3session-snapshot",
        "format_version": "1",
        "facts": json.dumps(facts),
        "digests": json.dumps(digests),
        "header_digest": "0" * 32,
    }


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a file, and its data."""
    (n,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def join(header: dict[str, Any], body: bytes) -> bytes:
    """A file whose header has the right digest, whatever it says."""
    if isinstance(header.get("__metadata__"), dict) and "header_digest" in header["__metadata__"]:
        given = header["__metadata__"]
        given["header_digest"] = given.pop("header_digest") and "0" * 32
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return (_sealed(raw) if b'"header_digest":"' in raw else raw) + body


def with_facts(data: bytes, **facts: Any) -> bytes:
    """The file with other facts and the right digest."""
    header, body = split(data)
    held = json.loads(header["__metadata__"]["facts"])
    header["__metadata__"]["facts"] = json.dumps(held | facts)
    return join(header, body)


def test_the_tools_of_this_test_write_good_files(small: bytes, micro: k3.Model) -> None:
    header, body = split(small)
    again = k3.Snapshot.from_bytes(join(header, body))
    assert again.to_bytes() == small
    assert k3.Snapshot.from_bytes(with_facts(small, meta="new")).meta == "new"


# Files that are something else.


def test_nothing_here_can_run_code_from_a_file() -> None:
    bad = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch", "yaml"}
    for file in Path(k3.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & {"eval", "exec", "compile", "__import__"}
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = {"pickle"}
            else:
                continue
            assert not names & (bad | {"eval", "exec", "compile", "__import__"}), (
                f"{file.name}:{node.lineno}: {names}"
            )


def test_a_pickle_is_not_read(target: k3.Session, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    refused(pickle.dumps(Trap()), target, tmp_path, k3.SnapshotCorruptError)
    refused(pickle.dumps({"state": np.zeros(4)}), target, tmp_path, k3.SnapshotCorruptError)
    assert not (tmp_path / "trapped").exists()


def test_other_files_are_refused(target: k3.Session, tmp_path: Path, nano: Path) -> None:
    checkpoint = next(nano.glob("*.safetensors")).read_bytes()
    said = refused(checkpoint, target, tmp_path, k3.SnapshotCorruptError)
    assert (
        "not a k3session snapshot: its metadata give the format 'pt', expected 'k3session-snapshot'" in said
    )
    for data in (
        b"",
        b"hello",
        b"\x7fELF" + bytes(100),
        b"PK\x03\x04" + bytes(100),
        b"version https://git-lfs" + bytes(99),
    ):
        refused(data, target, tmp_path, k3.SnapshotCorruptError)


def test_what_is_no_file_is_refused(model: k3.Model, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "nothing.k3s": "cannot be opened: No such file",
        "pipe": "is no ordinary file",
        ".": "is no ordinary file",
    }
    for name, words in cases.items():
        for use in (lambda f: k3.Session.load(model, f), k3.Snapshot.open, inspect_file, verify_file):
            with pytest.raises(k3.SnapshotError, match=words):
                use(tmp_path / name)
    with pytest.raises(OSError, match="cannot be opened"):
        k3.Snapshot.open("a\0b")
    with pytest.raises(TypeError, match=r"expected bytes, found str; for a file use Snapshot\.open"):
        k3.Snapshot.from_bytes("chat.k3s")  # type: ignore[arg-type]


def test_a_newer_format_says_so(small: bytes, target: k3.Session, tmp_path: Path) -> None:
    header, body = split(small)
    for version, words in (
        ("2", "written in snapshot format 2; .* reads up to 1: update k3session"),
        ("14", "format 14"),
    ):
        header["__metadata__"]["format_version"] = version
        with pytest.raises(k3.SnapshotMismatchError, match=words) as error:
            k3.Snapshot.from_bytes(join(header, body))
        assert error.value.differences == {"format_version": (int(version), 1)}
        refused(join(header, body), target, tmp_path, k3.SnapshotMismatchError)
    for version in ("", "0", "-1", "one", "1.0", "9" * 5000, "²"):
        header["__metadata__"]["format_version"] = version
        with pytest.raises(k3.SnapshotCorruptError, match="format version is"):
            k3.Snapshot.from_bytes(join(header, body))


def test_sections_that_this_version_does_not_know_are_skipped(
    small: bytes, micro: k3.Model, tmp_path: Path
) -> None:
    header, body = split(small)
    extra = np.arange(6, dtype=np.float32).tobytes()
    header["x.future"] = {"dtype": "F32", "shape": [6], "data_offsets": [len(body), len(body) + 24]}
    digests = json.loads(header["__metadata__"]["digests"])
    header["__metadata__"]["digests"] = json.dumps(digests | {"x.future": xxhash.xxh3_128_hexdigest(extra)})
    held = json.loads(header["__metadata__"]["facts"]) | {"of_a_later_version": [1]}
    header["__metadata__"]["facts"] = json.dumps(held)
    header["__metadata__"]["note"] = "added"
    (tmp_path / "a.k3s").write_bytes(join(header, body + extra))
    with k3.Session.load(micro, tmp_path / "a.k3s") as session, micro.session() as expected:
        expected.restore(k3.Snapshot.from_bytes(small))
        same_sessions(session, expected)
    # A part of a snapshot that is unknown is no such section.
    header["layers.0.memory"] = header.pop("x.future")
    header["__metadata__"]["digests"] = json.dumps(
        digests | {"layers.0.memory": xxhash.xxh3_128_hexdigest(extra)}
    )
    with pytest.raises(k3.SnapshotCorruptError, match=r"layers\.0\.memory' belongs to no part"):
        k3.Snapshot.from_bytes(join(header, body + extra))


@pytest.mark.parametrize("part", ["facts", "digests"])
@pytest.mark.parametrize(
    "value", ["[]", "3", '"x"', "null", "{}", "{", "names", "[" * 100_000, '{"position": true}']
)
def test_facts_and_digests_that_are_none(
    small: bytes, target: k3.Session, tmp_path: Path, part: str, value: str
) -> None:
    header, body = split(small)
    names = json.dumps([name for name in header if name != "__metadata__"])
    header["__metadata__"][part] = names if value == "names" else value
    refused(
        join(header, body),
        target,
        tmp_path,
        k3.SnapshotCorruptError,
        whole=value in ("{}", '{"position": true}'),
    )
    del header["__metadata__"][part]
    refused(join(header, body), target, tmp_path, k3.SnapshotCorruptError)


@pytest.mark.parametrize(
    "facts",
    [
        {"position": 2},
        {"position": True},
        {"position": -1},
        {"position": "3"},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": None},
        {"latent": ["fp32"]},
        {"fingerprint": None},
        {"fingerprint": {"digest": []}},
        {"sampling": 3},
        {"sampling": {"temperature": -1}},
        {"sampling": {"logit_bias": {"x": 1}}},
        {"embeddings": [1]},
        {"embeddings": {"x": "y"}},
    ],
    ids=str,
)
def test_facts_that_do_not_fit(
    small: bytes, target: k3.Session, tmp_path: Path, facts: dict[str, Any]
) -> None:
    refused(with_facts(small, **facts), target, tmp_path, whole=True)


words = st.text("a1.é\0\U0001f600", max_size=8)
values = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | words
anything = st.recursive(values, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3))


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every place in a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*path, key))
    return found


@given(st.data())
def test_a_header_that_says_anything_is_refused_or_understood(
    micro: k3.Model, small: bytes, data: st.DataObject
) -> None:
    header, body = split(small)
    inner = {name: json.loads(header["__metadata__"][name]) for name in ("facts", "digests")}
    tree: dict[str, Any] = {"header": header, **inner}
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(
            st.sampled_from([p for p in paths(tree) if len(p) > 1 or p in (("facts",), ("digests",))])
        )
        place = tree
        for key in path[:-1]:
            place = place[key]
        if data.draw(st.booleans()) or len(path) == 1:
            place[path[-1]] = data.draw(anything)
        else:
            del place[path[-1]]
        if not isinstance(tree["header"].get("__metadata__"), dict):
            break
    held = tree["header"].get("__metadata__")
    if isinstance(held, dict):
        held |= {
            name: json.dumps(tree[name]) for name in ("facts", "digests") if isinstance(held.get(name), str)
        }
    changed_bytes = join(tree["header"], body)
    with micro.session() as session:
        session.prefill([9, 9])
        before = contents(session)
        try:
            session.restore(k3.Snapshot.from_bytes(changed_bytes))
        except (k3.SnapshotError, k3.CapacityError):
            same(contents(session), before)
        else:
            assert session.position == 3  # what was changed does not matter, as `meta` does not
            session.step(1)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    for start in (b"", struct.pack("<Q", len(data))):
        with pytest.raises(k3.SnapshotCorruptError):
            k3.Snapshot.from_bytes(start + data)


# Every released format.


@pytest.mark.parametrize(("name", "tolerance"), [("format-1", 3e-5), ("format-1-bf16", 1e-2)])
def test_a_released_format_stays_readable(name: str, tolerance: float) -> None:
    expected = golden("tiny_k3/golden")
    file = GOLDEN / "snapshots" / f"{name}.k3s"
    assert verify_file(file)["ok"] and inspect_file(file)["position"] == 15
    with k3.Model.open(TINY, threads=1) as model, k3.Session.load(model, file) as session:
        assert session.position == 15 and session.resume in ("exact", "tolerance")
        ids = expected["tokens"]
        logits = np.stack([session.logits, *step_all(session, ids[15:])])
        assert np.abs(logits - expected["logits"][14:]).max() < tolerance * np.abs(expected["logits"]).max()
        assert np.array_equal(logits.argmax(-1), expected["logits"][14:].argmax(-1))
        if name == "format-1":
            assert np.array_equal(session.tokens, ids) and session.latent == "fp32"
            assert session.meta == {"note": "K3 \u2713", "numbers": [1, 2.5, None]}
            expected_sampling = k3.Sampling(
                temperature=0.7, top_k=20, seed=5, logit_bias={3: -2.5}, stop_ids=(1,)
            )
            assert session.sampling == expected_sampling
        else:
            assert (
                np.array_equal(session.tokens, [*ids[:6], *[-1] * 9, *ids[15:]]) and session.latent == "bf16"
            )
            assert sorted(map(int, session.snapshot().facts["embeddings"])) == list(range(6, 15))


def test_a_failed_or_closed_session_is_not_saved(model: k3.Model, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    with long(model) as session:
        session.save(tmp_path / "a.k3s")
        before = (tmp_path / "a.k3s").read_bytes()
        bad = session.snapshot()
        assert bad.layers[0].state is not None
        bad.layers[0].state[0] = np.nan
        session.restore(bad)
        with pytest.raises(k3.NonFiniteError):
            session.step(1)
        for use in (session.snapshot, lambda: session.save(tmp_path / "a.k3s")):
            with pytest.raises(k3.NonFiniteError, match="has failed and accepts only restore"):
                use()
    with pytest.raises(k3.ClosedError):
        session.save(tmp_path / "a.k3s")
    assert (tmp_path / "a.k3s").read_bytes() == before and os.listdir(tmp_path) == ["a.k3s"]
