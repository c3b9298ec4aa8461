# SPDX-License-Identifier: MIT
"""Ranges of layers and stages over them, in one process: every cut gives the bits of the whole model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming_tools
from checkpoint_tools import Raw, Tensors, changed, floats, load, write_file
from session_tools import contents, prompt, same, same_sessions, step_all, unchanged

import k3session as k3
from k3session.fingerprint import Fingerprint
from k3session.memory import memory_estimate
from k3session.pipeline import PipelineModel
from k3session.presets import PRESETS
from k3session.synth import synth

LAYERS = PRESETS["nano"].num_hidden_layers
BLOCK = PRESETS["nano"].attn_res_block_size
#: Every single cut: at a block's start (3, 6), inside a block, between the last two MLA layers (6), after layer 0 (1);
#: then several cuts, and each layer by itself.
CUTS = [*([i] for i in range(1, LAYERS)), [2, 5], [1, 6], [3, 4, 6], list(range(1, LAYERS))]


@contextmanager
def opened(
    folder: Path, cuts: Sequence[int], layers: int = LAYERS, **options: Any
) -> Iterator[PipelineModel]:
    """A model that is cut in front of these layers."""
    with ExitStack() as stack:
        bounds = [0, *cuts, layers]
        parts = [stack.enter_context(k3.Model.open(folder, threads=1, layers=p)) for p in pairwise(bounds)]
        yield stack.enter_context(PipelineModel.of_stages(parts, **options))


# What comes out.


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_every_cut_gives_the_bits_of_the_whole_model(nano: Path, model: k3.Model, cuts: list[int]) -> None:
    ids = prompt(60)
    with opened(nano, cuts) as cut, model.session() as a, cut.session() as b:
        assert np.array_equal(a.prefill(ids[:40], chunk=7), b.prefill(ids[:40], chunk=11))
        assert np.array_equal(step_all(a, ids[40:]), step_all(b, ids[40:]))
        same_sessions(b, a)
        assert b.nbytes == a.nbytes


@pytest.mark.parametrize("latent", ["fp32", "bf16"])
def test_the_smallest_model_is_cut_in_two(tmp_path: Path, latent: str) -> None:
    folder = synth(tmp_path / "micro", "micro")
    with (
        opened(folder, [1], 2) as cut,
        k3.Model.open(folder, threads=1) as whole,
        whole.session(latent=latent) as a,
        cut.session(latent=latent) as b,
    ):
        assert np.array_equal(a.prefill(prompt(200, vocab=32)), b.prefill(prompt(200, vocab=32)))
        same_sessions(b, a)


def test_a_tied_head_works_on_its_own_stage(nano: Path, tmp_path: Path) -> None:
    def tie(d: dict[str, Any]) -> None:
        d["tie_word_embeddings"] = d["text_config"]["tie_word_embeddings"] = True

    def headless(tensors: Tensors) -> Tensors:
        return {name: raw for name, raw in tensors.items() if "lm_head" not in name}

    folder = changed(nano, tmp_path / "tied", config=tie, tensors=headless)
    with opened(folder, [4]) as cut, k3.Model.open(folder, threads=1) as whole:
        assert cut.fingerprint == whole.fingerprint
        with whole.session() as a, cut.session() as b:
            assert np.array_equal(a.prefill(prompt(9)), b.prefill(prompt(9)))


@pytest.mark.parametrize("first", range(1, LAYERS))
def test_what_is_handed_over_is_the_running_sum_and_the_bank(nano: Path, model: k3.Model, first: int) -> None:
    ids = prompt(5)
    with model.session() as s, s.trace(what=["embed", "layer_out"]) as trace:
        s.prefill(ids)
    after = trace["layer_out"]  # the running sum after each layer, of the whole model
    blocks = [trace["embed"][:, 0], *(after[:, i - 1] for i in range(BLOCK, first, BLOCK))]
    with k3.Model.open(nano, threads=1, layers=(0, first)) as part:
        stage = k3.Stage(part)
        stage.session("s")
        at = stage.forward(k3.Boundary.begin([k3.Segment("s", 0, 5)], ids))
        assert np.array_equal(at.running_sum, after[:, first - 1])
        assert np.array_equal(at.bank, np.stack(blocks))
        assert at.logits is None and at.bad == (None,)


def test_all_that_a_session_can_do(nano: Path, model: k3.Model, tmp_path: Path) -> None:
    ids = prompt(300)

    def work(model: k3.Model) -> list[Any]:
        seen: list[Any] = []
        with model.session(marks=k3.Marks(every=20)) as s:
            seen.append(s.prefill(ids[:50]))
            with s.fork(seed=3) as t, model.session() as u:
                u.prefill(ids[:3])
                seen += model.step([(s, 5), (t, 6), (u, 7)])
                seen += model.forward([(s, ids[:40]), (t, ids[:9]), (u, ids[:2])])
                seen.append(contents(t))
            m = s.mark("here")
            with s.verify(ids[100:120]) as d:
                seen += [d.logits.copy(), d.accept(7)]
            with s.verify(ids[100:104]) as d:
                pass
            seen.append([r.token for r in s.generate(12, sampling=k3.Sampling(temperature=1.0, seed=9))])
            seen.append(s.rewind(70))
            seen.append(s.rewind(m))
            seen.append(s.set_tokens([*s.tokens[:60].tolist(), 1, 2, 3]))
            seen.append(s.score(ids[:20]).logprobs)
            snap = s.snapshot(marks=True)
            s.step(4)
            s.restore(snap)
            s.save(tmp_path / "s.k3s", marks=True)
            seen += [s.reachable(), contents(s)]
        with k3.Session.load(model, tmp_path / "s.k3s") as s:
            seen += [s.resume, s.reachable(), s.rewind(45), contents(s)]
        return seen

    expected = work(model)
    with opened(nano, [2, 5], micro_rows=1) as cut:
        found = work(cut)
        assert cut.stats.tokens > 200 and cut.stats.weight_bytes > 0
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        same(a if isinstance(a, dict) else {"": a}, b if isinstance(b, dict) else {"": b})


@pytest.mark.parametrize("micro_rows", [1, 3, 1000])
def test_parts_of_a_batch_change_no_bit(nano: Path, model: k3.Model, micro_rows: int) -> None:
    with opened(nano, [3], micro_rows=micro_rows) as cut, ExitStack() as stack:
        a = [stack.enter_context(model.session()) for _ in range(9)]
        b = [stack.enter_context(cut.session()) for _ in range(9)]
        lengths = [1, 50, 3, 2, 1, 9, 1, 1, 30]
        for these, m in ((a, model), (b, cut)):
            m.forward([(s, prompt(n, i)) for i, (s, n) in enumerate(zip(these, lengths, strict=True))])
        rows = [m.step([(s, i) for i, s in enumerate(these)]) for these, m in ((a, model), (b, cut))]
        assert all(np.array_equal(x, y) for x, y in zip(*rows, strict=True))
        for x, y in zip(a, b, strict=True):
            same_sessions(y, x)


def test_threads_take_turns(nano: Path, model: k3.Model) -> None:
    with opened(nano, [3, 5]) as cut:
        found: dict[int, Any] = {}

        def work(i: int) -> None:
            with cut.session() as s:
                s.prefill(prompt(20, i))
                found[i] = step_all(s, prompt(30, i + 100))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(4):
            with model.session() as s:
                s.prefill(prompt(20, i))
                assert np.array_equal(step_all(s, prompt(30, i + 100)), found[i])


@pytest.mark.parametrize("mode", ["compact", "q8"])
def test_stages_with_weights_that_are_recoded(nano: Path, mode: str) -> None:
    with ExitStack() as stack:
        whole = stack.enter_context(k3.Model.open(nano, device="cpu", threads=1, weights=mode))
        parts = [
            stack.enter_context(k3.Model.open(nano, device="cpu", threads=1, weights=mode, layers=p))
            for p in pairwise([0, 2, 5, LAYERS])
        ]
        cut = stack.enter_context(PipelineModel.of_stages(parts))
        with whole.session() as a, cut.session() as b:
            assert np.array_equal(a.prefill(prompt(20)), b.prefill(prompt(20)))
            assert np.array_equal(step_all(a, prompt(5, 1)), step_all(b, prompt(5, 1)))
            same_sessions(b, a)


def test_stages_that_read_their_weights_from_disk(nano: Path, model: k3.Model) -> None:
    with ExitStack() as stack:
        parts = [
            stack.enter_context(streaming_tools.opened(nano, share=share, layers=p))
            for p, share in zip(pairwise([0, 2, 5, LAYERS]), (0.0, 0.5, 0.0), strict=True)
        ]
        cut = stack.enter_context(PipelineModel.of_stages(parts))
        with model.session() as a, cut.session() as b:
            assert np.array_equal(a.prefill(prompt(20)), b.prefill(prompt(20)))
            assert np.array_equal(step_all(a, prompt(5, 1)), step_all(b, prompt(5, 1)))
            with a.verify([1, 2, 3]) as c, b.verify([1, 2, 3]) as d:
                assert np.array_equal(c.accept(2), d.accept(2))
            assert cut.stats.disk_bytes == 0 and all(part.memory is not None for part in parts)


# A pass counts on all stages or on none.


@pytest.fixture
def stages(nano: Path) -> Iterator[list[k3.Stage]]:
    with ExitStack() as stack:
        bounds = (0, 2, 5, LAYERS)
        models = [stack.enter_context(k3.Model.open(nano, threads=1, layers=p)) for p in pairwise(bounds)]
        made = [k3.Stage(m) for m in models]
        for stage in made:
            for name in "ab":
                stage.session(name)
        yield made


def run(stages: list[k3.Stage], boundary: k3.Boundary) -> k3.Boundary:
    for stage in stages:
        boundary = stage.forward(boundary)
    return boundary


def states(stage: k3.Stage, name: str) -> list[bytes]:
    return [array.tobytes() for state in stage.states(name) for array in state.export().values()]


def test_an_aborted_pass_leaves_no_trace(stages: list[k3.Stage], model: k3.Model) -> None:
    ids = prompt(30)
    for start, n in ((0, 20), (20, 5)):
        lost = run(stages, k3.Boundary.begin([k3.Segment("a", start, 7)], prompt(7, 5)))
        before = [states(stage, "a") for stage in stages]
        for stage in stages:
            stage.abort(lost.number)
            stage.abort(lost.number)
        assert [stage.position("a") for stage in stages] == [start] * 3
        assert [states(stage, "a") for stage in stages] == before
        done = run(stages, k3.Boundary.begin([k3.Segment("a", start, n)], ids[start : start + n]))
        for stage in stages:
            stage.commit(done.number)
    with model.session() as s:
        assert np.array_equal(s.prefill(ids[:25]), done.logits[0])


def test_of_a_pass_those_are_committed_that_are_chosen(stages: list[k3.Stage]) -> None:
    both = [k3.Segment("a", 0, 2), k3.Segment("b", 0, 3)]
    done = run(stages, k3.Boundary.begin(both, [1, 2, 3, 4, 5], wanted="every"))
    assert done.logits.shape == (5, 97)
    for stage in stages:
        stage.commit(done.number, [False, True])
    assert [(stage.position("a"), stage.position("b")) for stage in stages] == [(0, 3)] * 3
    # A pass that is kept is committed in part.
    kept = run(
        stages, k3.Boundary.begin([k3.Segment("a", 0, 6)], [1, 2, 3, 4, 5, 6], wanted="every", keep=True)
    )
    plain = run(stages, k3.Boundary.begin([k3.Segment("b", 3, 1)], [9], wanted="none"))
    assert plain.logits is None
    for stage in stages:
        stage.accept(kept.number, 2)
        stage.abort(plain.number)
    assert [stage.position("a") for stage in stages] == [2] * 3


def test_what_a_stage_refuses(stages: list[k3.Stage], nano: Path) -> None:
    one = k3.Segment("a", 0, 1)
    with pytest.raises(k3.ConfigError, match="2 rows and there are tokens of shape"):
        k3.Boundary.begin([k3.Segment("a", 0, 2)], [1])
    with pytest.raises(k3.ConfigError, match="is in the pass twice"):
        k3.Boundary.begin([one, one], [1, 2])
    with pytest.raises(k3.ConfigError, match="wanted is 'all'"):
        k3.Boundary.begin([one], [1], wanted="all")
    with pytest.raises(k3.ConfigError, match="has one session"):
        k3.Boundary.begin([one, k3.Segment("b", 0, 1)], [1, 2], keep=True)
    with pytest.raises(k3.K3Error, match="exactly where there are such layers"):
        stages[1].forward(k3.Boundary.begin([one], [1]))
    with pytest.raises(k3.K3Error, match=r"stands at 0 .* begins at 4"):
        stages[0].forward(k3.Boundary.begin([k3.Segment("a", 4, 1)], [1]))
    with pytest.raises(k3.ClosedError, match="no session 'c'"):
        stages[0].forward(k3.Boundary.begin([k3.Segment("c", 0, 1)], [1]))
    with pytest.raises(k3.ConfigError, match="there is a session 'a' already"):
        stages[0].session("a")
    with pytest.raises(k3.K3Error, match="pass 12345678 is not waiting"):
        stages[0].commit(12345678)
    held = stages[0].forward(k3.Boundary.begin([one], [1]))
    with pytest.raises(k3.K3Error, match="a pass that is not committed yet"):
        stages[0].forward(k3.Boundary.begin([one], [1]))
    cut_short = k3.Boundary(
        **{n: getattr(held, n) for n in held.__slots__} | {"handed": held.handed[:1].copy()}
    )
    with pytest.raises(k3.K3Error, match=r"handed_in must be float32\[2, 1, 64\]"):
        stages[1].forward(cut_short)
    stages[0].drop("a", "never there")
    with pytest.raises(k3.K3Error, match="is not waiting"):
        stages[0].commit(held.number)
    whole = k3.Model.open(nano, threads=1)
    with whole, pytest.raises(k3.ConfigError, match=r"expected 1 ranges|expected 2 ranges"):
        PipelineModel.of_stages([whole, whole])


def nan_in(name: str) -> Any:
    def edit(tensors: Tensors) -> None:
        raw = tensors["language_model." + name]
        values = floats(raw).copy()
        values[7] = np.nan
        bits = values if raw.dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors["language_model." + name] = Raw(raw.dtype, raw.shape, bits.tobytes())

    return edit


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp"),
        ("model.layers.3.self_attn.o_proj.weight", "model.layers.3.self_attn"),
        ("model.layers.5.block_sparse_moe.routed_expert_up_proj.weight", "model.layers.5.block_sparse_moe"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_a_value_that_is_not_finite_is_named_by_the_stage_that_made_it(
    nano: Path, tmp_path: Path, tensor: str, layer: str
) -> None:
    folder = changed(nano, tmp_path / "model", tensors=nan_in(tensor))
    with opened(folder, [2, 5]) as cut, cut.session() as s:
        with pytest.raises(k3.NonFiniteError, match=f"^{layer} gave") as error:
            s.prefill(prompt(6))
        assert error.value.layer == layer and s.position == 0
        assert cut._line.call("position", s._timeline.name) == [0, 0, 0]


def test_one_session_of_a_batch_fails_alone(nano: Path, tmp_path: Path) -> None:
    folder = changed(nano, tmp_path / "model", tensors=nan_in("model.embed_tokens.weight"))
    for micro_rows in (1, 100):
        with opened(folder, [3], micro_rows=micro_rows) as cut, cut.session() as a, cut.session() as b:
            with pytest.raises(k3.BatchError) as error:
                cut.step([(a, 5), (b, 7)])
            assert error.value.results[1].layer == "model.embed_tokens"
            assert (a.position, b.position) == (1, 0)
            assert cut._line.call("position", a._timeline.name) == [1, 1]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stage_without_memory_changes_no_session(
    nano: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with opened(nano, [2, 5]) as cut, cut.session(marks=False) as s, cut.session() as t:
        for session in (s, t):
            session.prefill(prompt(10))
        stage = cut._line.stages[at]
        with unchanged(s), unchanged(t):
            with monkeypatch.context() as patched:
                patched.setattr(stage, "_scratch_for", no_memory)
                with pytest.raises(MemoryError):
                    s.step(1)
                with pytest.raises(k3.BatchError):
                    cut.step([(s, 1), (t, 2)])
                with pytest.raises(MemoryError), s.verify([1, 2]):
                    pass
            with monkeypatch.context() as patched:
                patched.setattr(stage, "load", no_memory)
                snap = s.snapshot()
                s.step(3)
                with pytest.raises(MemoryError):
                    s.restore(snap)
                assert s.position == 11
            s.restore(snap)
        with monkeypatch.context() as patched:
            patched.setattr(stage, "share", no_memory)
            with pytest.raises(MemoryError):
                s.fork()
        assert np.array_equal(s.step(9), t.step(9))


def no_memory(*args: Any, **options: Any) -> Any:
    raise MemoryError("none left")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_cancel_reaches_every_stage(nano: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    with opened(nano, [2, 5]) as cut, cut.session() as s, cut.session() as t:
        for session in (s, t):
            session.prefill(prompt(10))
        stage = cut._line.stages[at]
        forward = stage.forward

        def cancelled(boundary: k3.Boundary) -> k3.Boundary:
            timer = threading.Timer(0, s.cancel)
            timer.start()
            timer.join()
            return forward(boundary)

        with monkeypatch.context() as patched:
            patched.setattr(stage, "forward", cancelled)
            with unchanged(t), pytest.raises(k3.PassCancelled, match="stands at position 10") as error:
                s.step(5)
            assert error.value.position == 10
        assert np.array_equal(s.step(5), t.step(5))


def test_inner_values_are_not_traced(nano: Path) -> None:
    with opened(nano, [3]) as cut, cut.session() as s:
        with pytest.raises(k3.K3Error, match="not traced across them"), s.trace():
            pass
        with pytest.raises(k3.K3Error, match="not timed across them"), s.timed():
            pass
        assert s.step(1).shape == (97,)


def test_drafts_that_are_left_are_forgotten(nano: Path) -> None:
    with opened(nano, [3]) as cut, cut.session() as s, cut.session() as t:
        stage = cut._line.stages[1]
        with s.verify([1, 2, 3]):
            assert len(stage._held) == 1
        cut.step([(s, 4), (t, 4)])
        assert len(stage._held) == 0
        run = s.verify([1, 2])
        run.__enter__()
        assert len(stage._held) == 1
        s.close()
        t.step(1)
        assert len(stage._held) == 0 and len(stage._timelines) == 1
        assert t.tokens.tolist() == [4, 1]


# Opening a range.


def test_only_what_the_layers_need_is_opened(nano: Path, tmp_path: Path, model: k3.Model) -> None:
    whole = model._checkpoint
    parts = []
    for pair in pairwise([0, 2, 5, LAYERS]):
        with k3.Model.open(nano, threads=1, layers=pair) as part:
            assert part.layers == pair
            held = part._checkpoint
            assert set(held.names) == {
                name
                for name in whole.names
                if ((layer := whole.info(name).layer) is not None and pair[0] <= layer < pair[1])
                or (layer is None and name.startswith("model.embed") and pair[0] == 0)
                or (layer is None and not name.startswith("model.embed") and pair[1] == LAYERS)
            }
            assert (
                part.bytes_per_token == memory_estimate(part.config, 0, layers=pair)["latent_per_token_fp32"]
            )
            parts.append(
                (part.fingerprint, part.bytes_per_token, held.total_bytes, part._weights.step_bytes())
            )
    assert Fingerprint.joined(p[0] for p in parts) == model.fingerprint
    assert sum(p[1] for p in parts) == model.bytes_per_token
    assert sum(p[2] for p in parts) == whole.total_bytes
    for key, value in model._weights.step_bytes().items():
        assert sum(p[3][key] for p in parts) == value
    estimates = [memory_estimate(model.config, 0, layers=p) for p in ((0, 2), (2, 5), (5, LAYERS))]
    assert (
        sum(e["state_per_session"] for e in estimates)
        == memory_estimate(model.config, 0)["state_per_session"]
    )


def test_fingerprints_of_other_weights_do_not_join(nano: Path, tmp_path: Path) -> None:
    other = synth(tmp_path / "other", "nano", seed=5)
    with (
        k3.Model.open(nano, threads=1, layers=(0, 3)) as a,
        k3.Model.open(other, threads=1, layers=(3, LAYERS)) as b,
        k3.Model.open(other, threads=1, layers=(0, LAYERS)) as c,
    ):
        PipelineModel.of_stages([c]).close()
        with pytest.raises(ValueError, match=r"layer 0: expected one digest, found 2"):
            Fingerprint.joined([a.fingerprint, c.fingerprint])
        with pytest.raises(ValueError, match="layer 0: expected one digest, found 0"):
            Fingerprint.joined([b.fingerprint])


def by_layer(nano: Path, folder: Path) -> Path:
    """The checkpoint with a file for each layer, and one for what belongs to none."""
    folder.mkdir()
    (folder / "config.json").write_text((nano / "config.json").read_text())
    files: dict[str, Tensors] = {}
    for name, raw in load(nano).items():
        parts = name.split(".")
        which = f"layer-{parts[parts.index('layers') + 1]}" if "layers" in parts else "head"
        which = "embedding" if "embed_tokens" in name else which
        files.setdefault(f"{which}.safetensors", {})[name] = raw
    for file, tensors in files.items():
        write_file(folder / file, tensors)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_files_of_other_layers_may_be_missing(nano: Path, tmp_path: Path, model: k3.Model) -> None:
    with ExitStack() as stack:
        parts = []
        for pair in pairwise([0, 2, 5, LAYERS]):
            folder = by_layer(nano, tmp_path / str(pair[0]))
            for i in range(LAYERS):
                if not pair[0] <= i < pair[1]:
                    (folder / f"layer-{i}.safetensors").unlink()
            if pair[0] > 0:
                (folder / "embedding.safetensors").unlink()
            if pair[1] < LAYERS:
                (folder / "head.safetensors").unlink()
            parts.append(stack.enter_context(k3.Model.open(folder, threads=1, layers=pair)))
            with pytest.raises(k3.CheckpointError, match="files are missing"):
                k3.Model.open(folder, threads=1)
            (folder / f"layer-{pair[0]}.safetensors").unlink()
            with pytest.raises(k3.CheckpointError, match=f"1 of .* files are missing: layer-{pair[0]}"):
                k3.Model.open(folder, threads=1, layers=pair)
        cut = stack.enter_context(PipelineModel.of_stages(parts))
        assert cut.fingerprint == model.fingerprint
        with cut.session() as b, model.session() as a:
            assert np.array_equal(a.prefill(prompt(12)), b.prefill(prompt(12)))


@pytest.mark.parametrize(
    "layers", [(0, 0), (3, 2), (-1, 2), (0, LAYERS + 1), (1,), 3, "01", (0.0, 2), (True, 2)], ids=str
)
def test_a_range_that_is_none_is_refused(nano: Path, layers: Any) -> None:
    with pytest.raises(k3.ConfigError, match=r"expected None or \(first, end\) with 0 <= first < end <= 7"):
        k3.Model.open(nano, threads=1, layers=layers)


def test_a_range_has_no_sessions(nano: Path) -> None:
    with k3.Model.open(nano, threads=1, layers=(2, 5)) as part:
        assert "layers 2 to 4 of 7" in repr(part)
        with pytest.raises(k3.ConfigError, match=r"holds layers 2 to 4 of 7, .* use k3session.Stage"):
            part.session()
    with pytest.raises(k3.ClosedError):
        k3.Stage(part)
