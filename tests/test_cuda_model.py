# SPDX-License-Identifier: MIT
"""Whole models on a GPU, or with parts of them there, held against the golden data and against the CPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_access import core, random_chunks
from device import EMULATED, ON_GPU
from device_tools import emulator, run_emulated
from golden_data import TINY, Tensor, altered, golden, relative
from ops_tools import same_bits
from session_tools import contents, prompt, same, same_sessions, step_all, unchanged

import k3session as k3
from k3session.model import DEFAULT_MODEL
from k3session.placement import COMPONENTS, PARTS
from k3session.synth import synth

if not ON_GPU:
    pytest.skip("for a GPU or the emulator: see device.py", allow_module_level=True)

emulated = pytest.mark.skipif(not EMULATED, reason="counts calls of the driver, which the emulator does")

TOLERANCE = 1e-5
"""Of the largest logit, between the CPU and any placement; both are float32 sums in other orders.  Measured: 3e-6."""

IDS = prompt(21)


@pytest.fixture(scope="module")
def cpu(nano: Path) -> Iterator[k3.Model]:
    with k3.Model.open(nano, device="cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def gpu(nano: Path) -> Iterator[k3.Model]:
    with k3.Model.open(nano, device="cuda", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def expected(cpu: k3.Model) -> Tensor:
    """The CPU's logits after 5 tokens, and after each of the others."""
    with cpu.session() as s:
        return np.stack([s.prefill(IDS[:5]), *step_all(s, IDS[5:])])


def near_the_cpu(found: Tensor, expected: Tensor) -> None:
    assert relative(found, expected) < TOLERANCE
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


# ---------------------------------------------------------------- the numbers


def test_golden_tokens() -> None:
    """Another implementation's logits, experts and choices, for every row of one prefill."""
    want = golden("tiny_k3/golden")
    with core(TINY, isa="cuda", rows=24) as c:
        run = c.run(want["tokens"], taps=True, poison=True)
        same_bits(c.run(want["tokens"], poison=True).logits, run.logits)  # from a graph, without taps
    assert relative(run.logits, want["logits"]) < 3e-5
    assert np.array_equal(run.logits.argmax(-1), want["logits"].argmax(-1))
    assert np.array_equal(run.taps["route_ids"], np.sort(want["route_ids"], -1))


def test_the_default_model() -> None:
    want = golden("shakespeare/golden")
    with core(DEFAULT_MODEL, isa="cuda", rows=4) as c:
        run = c.run(want["tokens"][:6], [4, 1, 1])
    assert relative(run.logits, want["logits"][:6]) < 2e-6
    assert np.array_equal(run.logits.argmax(-1), want["logits"][:6].argmax(-1))


def test_a_prefill_on_tensor_cores(nano: Path, gpu: k3.Model) -> None:
    """From 16 rows on, within the tolerance that is stated; a single token has the same bits as ever."""
    with k3.Model.open(nano, device="cuda", threads=1, prefill_precision="bf16x2") as split:
        with gpu.session() as exact, split.session() as s:
            a, b = exact.prefill(IDS), s.prefill(IDS)
            assert 0 < relative(b, a) < 1e-4 and a.argmax() == b.argmax()
        with gpu.session() as exact, split.session() as s:
            same_bits(step_all(s, IDS[:3]), step_all(exact, IDS[:3]))


# ---------------------------------------------------------------- the bits


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_no_way_to_feed_tokens_changes_a_bit(nano: Path, bf16: bool) -> None:
    """One prefill, single steps, any chunks, pages of any length, and beside other sessions; over poisoned scratch."""
    ids = prompt(19)
    rng = np.random.default_rng(1)
    with core(nano, isa="cuda", rows=19, segments=3) as c:
        whole = c.run(ids, bf16=bf16)
        for chunks in ([1] * 19, [3, 16], random_chunks(rng, 19, 19)):
            part = c.run(ids, chunks, bf16=bf16, poison=True, page_rows=int(rng.integers(1, 20)))
            same_bits(part.logits, whole.logits)
            for a, b in zip(part.state, whole.state, strict=True):
                for name in a:
                    same_bits(a[name], b[name])
        timelines = [c.timeline(bf16=bf16) for _ in range(3)]
        found: list[list[Tensor]] = [[], [], []]
        for first, end in ((0, 4), (4, 5), (5, 8)):
            c.scratch.poison()
            rows = c.batch(timelines, [ids[first + i : end + i] for i in range(3)])
            for i in range(3):
                found[i].append(rows[i])
        same_bits(np.concatenate(found[0]), whole.logits[:8])
        for i in (1, 2):
            same_bits(np.concatenate(found[i]), c.run(ids[i : 8 + i], bf16=bf16).logits)


def test_a_bf16_latent_cache(cpu: k3.Model, gpu: k3.Model) -> None:
    with cpu.session(latent="bf16") as a, gpu.session(latent="bf16") as b:
        near_the_cpu(b.prefill(IDS), a.prefill(IDS))


def test_embeddings_as_a_prompt(cpu: k3.Model, gpu: k3.Model) -> None:
    rows = np.random.default_rng(2).standard_normal((5, cpu.config.hidden_size)).astype(np.float32)
    with cpu.session() as a, gpu.session() as b, gpu.session() as c:
        near_the_cpu(b.prefill(rows), a.prefill(rows))
        for i in range(5):
            last = c.prefill(rows[i : i + 1])
        same_bits(last, b.logits)
        same_bits(c.step(3), b.step(3))


# ---------------------------------------------------------------- recordings


def test_a_longer_context_needs_no_new_recording(tmp_path: Path) -> None:
    """Over seven ends of a page."""
    ids = prompt(30, vocab=32)
    with core(synth(tmp_path / "model", "micro"), isa="cuda", rows=1) as c:
        run = c.run(ids[:2], [1, 1], page_rows=4)
        before = emulator().count("cuStreamBeginCapture") if EMULATED else 0
        found = c.run(ids[2:], [1] * 28, timeline=run.timeline)
        assert c.scratch.backend.recorded == 1
        if EMULATED:
            assert emulator().count("cuStreamBeginCapture") == before
        same_bits(found.logits, c.run(ids, [1] * 30).logits[2:])


def test_recordings_are_bounded(tmp_path: Path) -> None:
    """More shapes of passes than are kept; one that made room is recorded again, and gives the same."""
    ids = prompt(32, vocab=32)
    with core(synth(tmp_path / "model", "micro"), isa="cuda", rows=32, segments=4) as c:
        first = c.run(ids[:1]).logits
        most = 0
        for rows, takes, kind in itertools.product((1, 2, 4, 8, 16, 32), ("all", "last", "none"), range(2)):
            embeddings = np.ones((rows, 32), np.float32) if kind else None
            logits = {
                "all": np.empty((rows, 32), np.float32),
                "last": np.empty((1, 32), np.float32),
                "none": None,
            }
            given = np.full(rows, -1, np.int32) if kind else ids[:rows]
            c.decoder.forward(
                c.scratch, [c.timeline()], [rows], given, embeddings, logits[takes], takes == "all"
            )
            most = max(most, c.scratch.backend.recorded)
        assert most == c.scratch.backend.recorded == 24
        same_bits(c.run(ids[:1]).logits, first)


# ---------------------------------------------------------------- placement

MIXES = list(itertools.product((False, True), repeat=len(COMPONENTS)))


@pytest.mark.parametrize("on_gpu", MIXES, ids=["".join("CG"[on] for on in mix) for mix in MIXES])
def test_every_placement(nano: Path, on_gpu: tuple[bool, ...], expected: Tensor) -> None:
    """kda, mla, dense and experts on either, with the trunk on either: the CPU's numbers, and what a label says."""
    chosen = {c: "cuda" if on else "cpu" for c, on in zip(COMPONENTS, on_gpu, strict=True)}
    for device in ("cpu", "cuda"):
        with k3.Model.open(nano, device=device, threads=1, **chosen) as model, model.session() as s:
            wanted = {"trunk": device} | chosen
            assert model.placement == {p: "cuda:0" if wanted[p] == "cuda" else "cpu" for p in PARTS}
            near_the_cpu(np.stack([s.prefill(IDS[:5]), s.step(IDS[5])]), expected[:2])


def test_variables_of_the_environment(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument wins over a variable, which wins over the device."""

    def placed(**options: Any) -> set[str]:
        with k3.Model.open(nano, threads=1, **options) as model:
            return {part for part, where in model.placement.items() if where != "cpu"}

    assert placed(device="cpu") == set()
    assert placed() == placed(device="cuda") == placed(device="cuda:0") == set(PARTS)
    for component in COMPONENTS:
        name = f"K3_CUDA_{component.upper()}"
        monkeypatch.setenv(name, "1")
        assert placed(device="cpu") == {component}
        assert placed(device="cpu", **{component: "cpu"}) == set()
        monkeypatch.setenv(name, "0")
        assert placed(device="cuda") == set(PARTS) - {component}
        assert placed(device="cuda", **{component: "cuda"}) == set(PARTS)
        monkeypatch.setenv(name, "yes")
        with pytest.raises(k3.ConfigError, match=f"{name} is 'yes'; expected 0 for the CPU or 1 for the GPU"):
            placed()
        monkeypatch.setenv(name, "")
        assert placed() == set(PARTS)
        monkeypatch.delenv(name)
        with pytest.raises(k3.ConfigError, match=f"{component} is 'gpu'; expected 'cpu', 'cuda' or None"):
            placed(**{component: "gpu"})


def test_devices_that_are_none(nano: Path) -> None:
    for device in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(k3.ConfigError, match="expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
            k3.Model.open(nano, device=device)
    with pytest.raises(k3.DeviceError, match="there is no GPU 99"):
        k3.Model.open(nano, device="cuda:99")


# ---------------------------------------------------------------- what a token costs

COUNTED = (
    "copies_in", "copies_out", "copies_within", "copies_on_host", "graph_launches", "launches", "fills",
    "synchronisations", "allocations", "pinned_allocations", "frees", "cuStreamBeginCapture",
)  # fmt: skip


def counted(call: Any) -> dict[str, int]:
    """What a call asks the driver for, where that is not nothing."""
    emu = emulator()
    before = {name: emu.count(name) for name in COUNTED}
    call()
    return {name: n for name in COUNTED if (n := emu.count(name) - before[name])}


ONE_OF_EACH = {"copies_in": 1, "copies_out": 1, "graph_launches": 1, "synchronisations": 1}


@emulated
def test_a_pass_is_one_copy_each_way_one_graph_and_one_wait(gpu: k3.Model) -> None:
    """And no memory: of a step, of a prefill and of a batch, once each was recorded and has its state twice."""
    with gpu.session(marks=False) as s, gpu.session(marks=False) as t:
        for _ in range(2):
            s.prefill(IDS[:8])
            s.step(1)
        assert counted(lambda: s.step(2)) == ONE_OF_EACH
        assert counted(lambda: s.prefill(IDS[:8])) == ONE_OF_EACH
        assert counted(lambda: s.prefill(IDS[:7])) == ONE_OF_EACH  # in the same graph
        for _ in range(2):
            gpu.step([(s, 3), (t, 4)])
        assert counted(lambda: gpu.step([(s, 3), (t, 4)])) == ONE_OF_EACH


@emulated
def test_what_experts_on_the_host_cost(nano: Path) -> None:
    """Per MoE layer three rows go out (the latent, ids and weights of experts) and one comes back, between graphs."""
    with (
        k3.Model.open(nano, device="cuda", experts="cpu", threads=1) as model,
        model.session(marks=False) as s,
    ):
        s.prefill(IDS[:3])
        for t in range(2):
            s.step(t)
        layers = model.config.num_hidden_layers - model.config.first_k_dense_replace
        assert counted(lambda: s.step(3)) == {
            "copies_in": 1 + layers,
            "copies_out": 1 + 3 * layers,
            "graph_launches": 1 + 2 * layers,
            "synchronisations": 1 + 3 * layers,
        }


@emulated
def test_a_session_takes_no_more_than_the_check_of_fit_counts(gpu: k3.Model) -> None:
    engine = gpu._engine
    assert engine._device is not None and engine._tables is not None
    counted = engine._session_bytes(engine._tables)
    before = engine._device.allocated
    with gpu.session(marks=False) as s:
        s.prefill([1, 2, 3])
        latent = s._timeline.nbytes - s._fixed_bytes
        taken = engine._device.allocated - before - latent
    assert counted / 2 < taken < counted + 4096, (taken, counted)


def test_memory_grows_by_pages_of_the_latent_cache_alone(gpu: k3.Model) -> None:
    """Before the pass that writes to one, in no other."""
    with gpu.session(marks=False) as s:
        s.prefill(prompt(62))
        for t in range(2):
            s.step(t)
        # The 65th token: a page, zeroed, whose address goes to the device.
        more = {"allocations": 1, "fills": 1, "copies_in": 2, "synchronisations": 3}
        assert counted(lambda: s.step(3)) == ONE_OF_EACH | more
        assert counted(lambda: s.step(4)) == ONE_OF_EACH


# ---------------------------------------------------------------- state that moves


def test_a_snapshot_goes_to_the_gpu_and_back_untouched(cpu: k3.Model, gpu: k3.Model) -> None:
    for latent in ("fp32", "bf16"):
        with (
            cpu.session(latent=latent) as a,
            gpu.session(latent=latent) as b,
            cpu.session(latent=latent) as c,
        ):
            a.prefill(IDS)
            b.restore(a.snapshot())
            assert b.resume == "tolerance" and (b.position, b.tokens.tolist()) == (21, IDS.tolist())
            c.restore(b.snapshot())
            held, back = contents(a), contents(c)
            assert (held.pop("facts")["device"], back.pop("facts")["device"]) == ("cpu", "cpu")
            same(back, held)


def test_a_session_goes_on_where_it_is_taken(cpu: k3.Model, gpu: k3.Model, expected: Tensor) -> None:
    """From the CPU to the GPU and back in the middle of a text, by snapshot."""
    with cpu.session() as a, gpu.session() as b, gpu.session() as c, cpu.session() as d:
        rows = [a.prefill(IDS[:5]), *step_all(a, IDS[5:10])]
        b.restore(a.snapshot())
        rows += [b.step(t) for t in IDS[10:12]]
        c.restore(b.snapshot())
        assert c.resume == "exact" and b.resume == "tolerance"
        same_bits(c.step(IDS[12]), b.step(IDS[12]))
        d.restore(c.snapshot())
        assert d.resume == "tolerance"
        rows += [c.logits, *(d.step(t) for t in IDS[13:])]
        near_the_cpu(np.stack(rows), expected)


def test_files(cpu: k3.Model, gpu: k3.Model, nano: Path, tmp_path: Path) -> None:
    """Saved on a GPU: bytes as from a snapshot, the device in the header; loaded there exactly, elsewhere nearly."""
    with gpu.session() as s:
        s.prefill(IDS[:9])
        s.save(tmp_path / "a.k3s")
        assert (tmp_path / "a.k3s").read_bytes() == s.snapshot().to_bytes()
        assert k3.Snapshot.open(tmp_path / "a.k3s").facts["device"] == "cuda"
        with k3.Session.load(gpu, tmp_path / "a.k3s") as t:
            assert t.resume == "exact"
            same_bits(t.step(3), s.step(3))
            same_sessions(t, s)
        with k3.Session.load(cpu, tmp_path / "a.k3s") as t:
            assert t.resume == "tolerance"
            near_the_cpu(s.logits, t.step(3))
        job = s.save(tmp_path / "b.k3s", wait=False)
        later = s.step(4)
        job.result()
        with k3.Session.load(gpu, tmp_path / "b.k3s") as t:
            same_bits(t.step(4), later)
    with (
        k3.Model.open(nano, device="cuda", experts="cpu", threads=1) as mixed,
        k3.Session.load(mixed, tmp_path / "a.k3s") as t,
    ):
        assert t.resume == "tolerance" and mixed.placement_label == "cuda: trunk, kda, mla, dense"


def test_forks_drafts_and_going_back(gpu: k3.Model) -> None:
    with gpu.session() as s, gpu.session() as plain:
        rows = [plain.prefill(IDS[:5]), *step_all(plain, IDS[5:12])]
        s.prefill(IDS[:5])
        mark = s.mark()
        with s.fork() as t:
            same_bits(t.step(IDS[5]), rows[1])
            t.step(90)
        with s.verify([*IDS[5:8], 96, 95]) as draft:
            same_bits(draft.logits[:3], np.stack(rows[1:4]))
            same_bits(draft.accept(3), rows[3])
        assert s.position == 8
        same_bits(step_all(s, IDS[8:12]), np.stack(rows[4:]))
        same_sessions(s, plain)
        s.rewind(mark)
        same_bits(s.step(IDS[5]), rows[1])
        s.rewind(2)
        same_bits(s.prefill(IDS[2:12]), rows[-1])
        same_sessions(s, plain)


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.layers.3.input_layernorm.weight", "model.layers.3.self_attn"),
        ("model.layers.4.post_attention_layernorm.weight", "model.layers.4.block_sparse_moe"),
        ("model.norm.weight", "lm_head"),
    ],
)
def test_a_value_that_is_not_finite_is_traced_to_its_layer(name: str, where: str, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][3] = 0x7FC0

    folder = altered(tmp_path / "model", edit=edit)
    with k3.Model.open(folder, device="cuda", threads=1) as model, model.session() as s:
        empty = s.snapshot()
        with pytest.raises(k3.NonFiniteError, match=where) as caught:
            s.prefill([1, 2, 3])
        assert caught.value.layer == where and s.position == 0 and s.logits is None
        s.restore(empty)
        with pytest.raises(k3.NonFiniteError, match=where):
            s.step(1)


def test_what_is_not_finite_stays_in_its_own_session(gpu: k3.Model) -> None:
    with gpu.session() as a, gpu.session() as b, gpu.session() as c, gpu.session() as alone:
        for s in (a, b, c, alone):
            s.prefill(IDS[:5])
        good = b.snapshot()
        state = good.layers[1].state
        assert state is not None
        held = state[0, 0, 0]
        state[0, 0, 0] = np.nan
        b.restore(good)
        state[0, 0, 0] = held
        with pytest.raises(k3.BatchError) as caught:
            gpu.step([(a, 7), (b, 7), (c, 8)])
        first, failed, third = caught.value.results
        assert isinstance(failed, k3.NonFiniteError) and failed.layer == "model.layers.1.self_attn"
        assert [s.position for s in (a, b, c)] == [6, 5, 6]
        same_bits(first, alone.step(7))
        same_sessions(a, alone)
        b.restore(good)
        same_bits(b.step(8), third)
        same_sessions(b, c)


def test_a_pass_that_is_cancelled_leaves_the_session_as_it_was(gpu: k3.Model) -> None:
    """In the middle of a recording, and of a replay."""
    with gpu.session() as s, gpu.session() as t:
        s.prefill(IDS[:5])
        t.prefill(IDS[:5])
        for token in IDS[5:7]:
            with unchanged(s):
                s._scratch.cancel()
                with pytest.raises(k3.PassCancelled):
                    s._forward(np.array([token], np.int32))
            same_bits(s.step(token), t.step(token))


MEMORY = """
import json, logging, re, sys
from device_tools import alive, emulator
import k3session as k3
said, found, emu = [], {}, emulator()
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("k3session").addHandler(Handler())
logging.getLogger("k3session").setLevel(logging.INFO)
def attempt(name, memory, **options):
    emu.set(memory=memory)
    emu.lib.k3emu_clear_counts()
    said.clear()
    weights = 0
    try:
        with k3.Model.open(sys.argv[1], threads=1, **options) as model:
            outcome, weights = model.placement_label, emu.live("device_bytes")
    except k3.DeviceMemoryError as error:
        outcome = str(error)
    found[name] = {"outcome": outcome, "bytes_in": emu.count("bytes_in"), "said": list(said), "left": alive(emu)}
    return weights
weights = attempt("enough", 1 << 30, device="cuda")
for device in ("cuda", "auto"):
    attempt(f"nothing, {device}", 1 << 16, device=device)
attempt("by name", 1 << 16, device="auto", kda="cuda")
session = float(re.search(r"([0-9.]+) MiB for a session", found["nothing, cuda"]["outcome"])[1]) * 2**20
tight = int(weights + session) - 170_000
attempt("tight", tight, device="cuda")
attempt("as suggested", tight, device="cuda", dense="cpu")
print(json.dumps(found))
"""


@emulated
def test_a_model_that_does_not_fit_is_refused_before_anything_is_copied(nano: Path) -> None:
    """With the sizes and what would fit; where the device was to be chosen, the CPU is, and the log says why."""
    found = json.loads(run_emulated(MEMORY, nano))
    assert all(case["left"] == {} for case in found.values())
    assert found["enough"]["outcome"] == "cuda" and found["enough"]["bytes_in"] > 900_000
    for name in ("nothing, cuda", "by name", "tight"):
        case = found[name]
        assert (
            "the model needs" in case["outcome"]
            and "kda 0.1 MiB" in case["outcome"]
            and case["bytes_in"] == 0
        )
    assert found["nothing, cuda"]["outcome"].endswith("where 0.1 MiB are free: use device='cpu'")
    assert found["tight"]["outcome"].endswith("are free: it fits with dense='cpu'")
    assert found["as suggested"]["outcome"] == "cuda: trunk, kda, mla, experts"
    automatic = found["nothing, auto"]
    assert automatic["outcome"] == "cpu" and automatic["bytes_in"] == 0
    (line,) = automatic["said"]
    assert line.startswith("device 'auto': using the CPU: the model needs") and "MiB are free" in line


def test_ops_on_a_gpu_are_not_timed(nano: Path, gpu: k3.Model) -> None:
    """An op is not done when its call returns: times would be those of recording it."""
    with gpu.session() as s, pytest.raises(k3.K3Error, match="on the CPU only"), s.timed():
        pass
    with (
        k3.Model.open(nano, device="cpu", experts="cuda") as mixed,
        mixed.session() as s,
        pytest.raises(k3.K3Error, match="on the CPU only"),
        s.timed(),
    ):
        pass
