# SPDX-License-Identifier: MIT
"""Properties of the whole graph over random models of the family, random chunkings and random interleavings."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import Tensors, as_f32, changed
from core_access import FULL, Run, core, counts, disagreements, passes, random_chunks
from device import EMULATED
from golden_data import Tensor, relative
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_tools import ISAS, every_isa, same_bits

import k3session as k3
from k3session._core.ops import pool_workers
from k3session.config import K3Config
from k3session.presets import PRESETS
from k3session.synth import synth

tried = settings(max_examples=3) if EMULATED and not FULL else settings()
"""The emulator takes seconds for what takes milliseconds."""


@dataclass(frozen=True)
class Shape:
    """A random model of the family and how it is stored."""

    config: K3Config
    experts: str
    trunk: str
    seed: int

    def write(self, folder: Path) -> Path:
        trunk = "bf16" if self.trunk == "mixed" else self.trunk
        path = synth(folder / "model", self.config, seed=self.seed, experts=self.experts, trunk=trunk)
        if self.trunk != "mixed":
            return path
        rng = np.random.default_rng(self.seed)

        def widen_some(tensors: Tensors) -> None:
            for name, raw in tensors.items():
                # The experts of a layer have one dtype between them.
                if raw.dtype == "BF16" and ".experts." not in name and rng.integers(2):
                    tensors[name] = as_f32(raw)

        return changed(path, folder / "mixed", tensors=widen_some)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    def one_of(*values: object) -> object:
        return draw(st.sampled_from(values))

    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=7))  # True: MLA
    layers = len(kinds)
    experts = one_of("mxfp4", "bf16", "f32")
    width = st.sampled_from([32, 64, 96] if experts == "mxfp4" else [16, 20, 33, 64])
    rotary = draw(st.booleans())
    count = draw(st.integers(1, 9))
    config = K3Config(
        vocab_size=one_of(2, 31, 64, 97),
        hidden_size=one_of(16, 33, 48, 64, 70),
        num_hidden_layers=layers,
        num_attention_heads=one_of(1, 3, 4, 5, 9),
        q_lora_rank=one_of(8, 17, 32),
        kv_lora_rank=one_of(8, 16, 21, 40),
        qk_nope_head_dim=one_of(4, 8, 19),
        qk_rope_head_dim=one_of(2, 4, 6, 16) if rotary else one_of(1, 4, 7),
        v_head_dim=one_of(4, 16, 20, 35),
        mla_use_nope=not rotary,
        mla_use_output_gate=draw(st.booleans()),
        rope_theta=one_of(10000.0, 50.0),
        rms_norm_eps=one_of(1e-5, 1e-6),
        intermediate_size=one_of(16, 40, 97),
        first_k_dense_replace=draw(st.integers(0, min(2, layers))),
        moe_layer_freq=one_of(1, 2),
        num_experts=count,
        num_experts_per_token=draw(st.integers(1, count)),
        num_shared_experts=one_of(1, 2, 3),
        moe_intermediate_size=draw(width),
        routed_expert_hidden_size=draw(width),
        latent_moe_use_norm=draw(st.booleans()),
        moe_renormalize=draw(st.booleans()),
        routed_scaling_factor=one_of(1.0, 2.5, 0.3),
        attn_res_block_size=draw(st.integers(1, layers + 1)),
        activation_situ_beta=one_of(4.0, 1.5),
        activation_situ_linear_beta=one_of(25.0, 3.0),
        kda_num_heads=one_of(1, 2, 3, 5),
        kda_head_dim=one_of(16, 17, 32, 40, 80),
        short_conv_kernel_size=one_of(2, 3, 4, 5, 9),
        gate_lower_bound=one_of(-5.0, None, -0.5),
        kda_layers=tuple(i for i in range(layers) if not kinds[i]),
        full_attn_layers=tuple(i for i in range(layers) if kinds[i]),
        tie_word_embeddings=draw(st.booleans()),
        max_position_embeddings=4096,
    )
    return Shape(config, str(experts), str(one_of("bf16", "f32", "mixed")), draw(st.integers(0, 2**32)))


def tokens_of(config: K3Config, seed: int, n: int) -> Tensor:
    return np.random.default_rng(seed).integers(0, config.vocab_size, n, dtype=np.int32)


def same_state(a: Run, b: Run) -> None:
    for x, y in zip(a.state, b.state, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            same_bits(x[key], y[key])


# ---------------------------------------------------------------- the numbers


@tried
@given(shapes(), st.integers(1, 5 if EMULATED else 40), st.sampled_from(ISAS))
def test_any_model_agrees_with_the_reference(shape: Shape, n: int, isa: str) -> None:
    """Logits, inner values and state; the experts are the same wherever the choice is clear."""
    tokens = tokens_of(shape.config, shape.seed, n)
    with tempfile.TemporaryDirectory() as folder, core(shape.write(Path(folder)), isa=isa) as c:
        assert not disagreements(c, tokens, c.run(tokens, taps=True, poison=True))


# ---------------------------------------------------------------- the bits


@tried
@given(shapes(), st.integers(1, 9 if EMULATED else 200), st.data())
def test_neither_chunks_nor_threads_nor_pages_change_a_bit(shape: Shape, n: int, data: st.DataObject) -> None:
    tokens = tokens_of(shape.config, shape.seed, n)
    isa, bf16 = data.draw(st.sampled_from(ISAS)), data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        path = shape.write(Path(folder))
        with core(path, isa=isa, rows=200) as c:
            whole = c.run(tokens, bf16=bf16)
        rng = np.random.default_rng(shape.seed)
        with core(path, isa=isa, threads=data.draw(st.integers(1, 4))) as c:
            for chunks in ([1] * n, random_chunks(rng, n), random_chunks(rng, n, 3)):
                page_rows = int(rng.integers(1, 100))
                part = c.run(tokens, chunks, bf16=bf16, poison=True, page_rows=page_rows)
                same_bits(part.logits, whole.logits)
                same_state(part, whole)


@tried
@given(shapes(), st.data())
def test_rows_do_not_see_their_companions(shape: Shape, data: st.DataObject) -> None:
    """Several timelines in one pass, each with rows of its own, as a batch will be."""
    lengths = data.draw(st.lists(st.integers(1, 4 if EMULATED else 30), min_size=2, max_size=4))
    with tempfile.TemporaryDirectory() as folder, core(shape.write(Path(folder)), segments=4) as c:
        prompts = [tokens_of(shape.config, shape.seed + i, n) for i, n in enumerate(lengths)]
        alone = [c.run(p) for p in prompts]
        together = [c.timeline() for _ in prompts]
        left = [list(p) for p in prompts]
        logits: list[list[Tensor]] = [[] for _ in prompts]
        while any(left):
            chosen = data.draw(
                st.lists(st.sampled_from([i for i, p in enumerate(left) if p]), min_size=1, unique=True)
            )
            takes = [data.draw(st.integers(1, len(left[i]))) for i in chosen]
            c.scratch.poison()
            tokens = [[left[i].pop(0) for _ in range(n)] for i, n in zip(chosen, takes, strict=True)]
            rows = c.batch([together[i] for i in chosen], tokens)
            for i, found in zip(chosen, rows, strict=True):
                logits[i].append(found)
        for run, timeline, parts in zip(alone, together, logits, strict=True):
            same_bits(np.concatenate(parts), run.logits)
            same_state(Run(run.logits, {}, timeline), run)


most, turns = (4, 4) if EMULATED else (70, 8)
actions = st.lists(st.tuples(st.booleans(), st.integers(1, most), st.booleans()), min_size=2, max_size=turns)


@tried
@given(actions, st.integers(0, 2**32))
def test_sessions_that_take_turns(model: k3.Model, actions: list[tuple[bool, int, bool]], seed: int) -> None:
    """Two sessions of one model take turns; each gives what it gives undisturbed."""
    rng = np.random.default_rng(seed)
    turns = [(second, rng.integers(0, 97, n, dtype=np.int32), stepped) for second, n, stepped in actions]

    def take(s: k3.Session, tokens: Tensor, stepped: bool) -> Tensor:
        return (
            [s.step(t) for t in tokens][-1] if stepped else s.prefill(tokens, chunk=int(rng.integers(1, 129)))
        )

    with model.session() as a, model.session() as b:
        mixed = [take((a, b)[second], tokens, stepped) for second, tokens, stepped in turns]
        ends = [x.snapshot() for x in (a, b)]
    for which in (False, True):
        with model.session() as s:
            for (second, tokens, stepped), found in zip(turns, mixed, strict=True):
                if second == which:
                    same_bits(take(s, tokens, not stepped), found)
            assert s.snapshot().to_bytes() == ends[which].to_bytes()


# ---------------------------------------------------------------- the bits, on one model and further


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with matrices large enough that even a single row is shared between threads."""
    config = replace(PRESETS["tiny"], num_hidden_layers=2, kda_layers=(0,), full_attn_layers=(1,))
    return synth(tmp_path_factory.mktemp("tiny") / "model", config)


def test_random_splits(nano: Path) -> None:
    """Random prompts of 97 to 513 tokens, each split where a window, a block or a page of the cache begins or ends."""
    rng = np.random.default_rng(8)
    edges = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129)
    with core(nano, rows=513, threads=2) as c:
        for i in range(1 if EMULATED else counts(30, 200)):
            n = int(rng.integers(*((66, 80) if EMULATED else (97, 514))))
            tokens = rng.integers(0, 97, n, dtype=np.int32)
            whole = c.run(tokens, bf16=bool(i % 4 == 0))
            at = sorted(
                {int(rng.choice(edges)), n - int(rng.choice(edges)), int(rng.integers(1, n))}
                & set(range(1, n))
            )
            part = c.run(tokens, np.diff([0, *at, n]).tolist(), bf16=bool(i % 4 == 0), poison=True)
            same_bits(part.logits, whole.logits)
            same_state(part, whole)


@every_isa
def test_threads(tiny: Path, isa: str) -> None:
    """Long enough a context that one row's attention is shared between threads as well."""
    chunks = [17, 1] if EMULATED else [128, 128, 15, *[1] * 19]
    tokens = np.random.default_rng(3).integers(0, 1024, sum(chunks), dtype=np.int32)
    with core(tiny, isa=isa) as c:
        expected = c.run(tokens, chunks)
    for threads in (2,) if EMULATED else (2, 3, 4):
        with core(tiny, isa=isa, threads=threads) as c:
            found = c.run(tokens, chunks, poison=True)
            assert isa == "cuda" or pool_workers() >= threads - 1
        same_bits(found.logits, expected.logits)
        same_state(found, expected)


def test_repeated_runs(tiny: Path) -> None:
    """50 times the same, a prefill and a step, with pieces going to whichever thread is free."""
    n = 4 if EMULATED else 40
    tokens = np.random.default_rng(4).integers(0, 1024, n, dtype=np.int32)
    with core(tiny, threads=2) as c:
        first = c.run(tokens, [n - 1, 1])
        for _ in range(2 if EMULATED else 50):
            again = c.run(tokens, [n - 1, 1], poison=True)
            same_bits(again.logits, first.logits)
            same_state(again, first)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_beyond_4096_positions(bf16: bool, tmp_path: Path) -> None:
    """Attention then runs in pieces of more than one block; checked against the reference from there on."""
    n = 4096 + 70
    tokens = np.random.default_rng(5).integers(0, 32, n, dtype=np.int32)
    folder = synth(tmp_path / "model", "micro")
    if EMULATED:
        beyond_4096_from_the_host(folder, tokens[:4104], bf16)
        return
    with core(folder, threads=2) as c:
        whole = c.run(tokens, bf16=bf16)
        part = c.run(tokens, [*passes(4094, 100), *[1] * 6, 64, 2], bf16=bf16, poison=True)
        same_bits(part.logits, whole.logits)
        same_state(part, whole)
        if not bf16:
            assert not disagreements(c, tokens, c.run(tokens, taps=True))


def beyond_4096_from_the_host(folder: Path, tokens: Tensor, bf16: bool) -> None:
    """The CPU takes in what comes before, and its state goes on where passes take long."""
    start = 4092
    with core(folder, isa="base") as c:
        before = c.run(tokens[:start], bf16=bf16)
        state = before.state
        expected = c.run(tokens[start:], timeline=before.timeline).logits
    with core(folder) as c:
        found = []
        for chunks in ([12], [3, *[1] * 4, 5]):
            timeline = c.timeline(bf16=bf16)
            timeline.replace(start, state)
            found.append(c.run(tokens[start:], chunks, poison=True, timeline=timeline))
        same_bits(found[1].logits, found[0].logits)
        same_state(found[1], found[0])
    assert relative(found[0].logits, expected) < 2e-5
