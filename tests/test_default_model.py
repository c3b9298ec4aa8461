# SPDX-License-Identifier: MIT
"""The model that ships, against an implementation that shares no code with this one."""

from __future__ import annotations

import numpy as np
import pytest
from core_access import Core, core, disagreements
from golden_data import SHAKESPEARE, Tensor, golden, relative
from ops_tools import ISAS, every_isa

import k3session as k3
from k3session.model import DEFAULT_MODEL
from k3session.reference import Reference
from k3session.text import Tokenizer

EXPECTED = golden("shakespeare/golden")
EOS = 1025
GREEDY = k3.Sampling(temperature=0, stop_ids=())


@every_isa
@pytest.mark.parametrize("chunks", [None, [1] * 96, [31, 1, 64]], ids=["prefill", "steps", "mixed"])
def test_logits(isa: str, chunks: list[int] | None) -> None:
    """Both are float32 and about as far from exact, 6.6e-7 and 2.5e-7 of the largest logit; measured: 7.1e-7."""
    with core(DEFAULT_MODEL, isa=isa, threads=2) as c:
        run = c.run(EXPECTED["tokens"], chunks)
    assert relative(run.logits, EXPECTED["logits"]) < 2e-6
    assert np.array_equal(run.logits.argmax(-1), EXPECTED["logits"].argmax(-1))


@every_isa
def test_values_inside(isa: str) -> None:
    """Every site, layer by layer, so that a mismatch can be traced to where it begins."""
    with core(DEFAULT_MODEL, isa=isa) as c:
        run = c.run(EXPECTED["tokens"], taps=True)
        assert not disagreements(c, EXPECTED["tokens"], run)


@pytest.mark.parametrize("isa", ISAS)
def test_greedy_continuation(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_ISA", isa)
    with k3.Model.open() as model, model.session() as s:
        s.prefill(EXPECTED["prompt"])
        assert [r.token for r in s.generate(64, sampling=GREEDY)] == EXPECTED["greedy"].tolist()


@pytest.mark.parametrize("prompt", ["ROMEO.\n", pytest.param("The tragedy of", marks=pytest.mark.soak)])
def test_a_thousand_greedy_tokens(prompt: str) -> None:
    """The reference, given the same text, would have chosen each token of it."""
    with k3.Model.open() as model, model.session() as s:
        s.prefill(model.tokenizer.encode(prompt))
        start = s.position
        for _ in s.generate(1000, sampling=GREEDY):
            pass
        tokens = s.tokens
    with core(DEFAULT_MODEL) as c:
        model64 = Reference(c.checkpoint)
        state = model64.new_state()
        logits = np.concatenate([model64.forward(part, state) for part in np.split(tokens, [256, 512, 768])])
    assert np.array_equal(logits[start - 1 : -1].argmax(-1), tokens[start:])
    assert len(tokens) == start + 1000 and len(set(tokens.tolist())) > 50


def bits(c: Core, tokens: Tensor, *, bf16: bool = False) -> float:
    """Bits that it takes to write down all tokens but the first."""
    logits = np.float64(c.run(tokens[:-1], bf16=bf16).logits)
    top = logits.max(-1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return float((total - logits[np.arange(len(logits)), tokens[1:]]).sum() / np.log(2))


def macbeth() -> tuple[Tensor, Tokenizer]:
    tokenizer = Tokenizer.from_dir(DEFAULT_MODEL)
    text = (SHAKESPEARE / "heldout_macbeth.txt").read_text(encoding="utf-8")
    return np.array([EOS, *tokenizer.encode(text)]), tokenizer


def test_bits_per_byte_on_text_it_was_not_trained_on() -> None:
    """The first 4,096 tokens of Macbeth in one context.  A BF16 latent cache costs next to nothing."""
    tokens, tokenizer = macbeth()
    size = len(tokenizer.decode_bytes(tokens[1:4097].tolist()))
    with core(DEFAULT_MODEL, threads=2) as c:
        assert abs(bits(c, tokens[:4097]) / size - EXPECTED["bpb_macbeth_first4096"]) < 1e-6
        exact, rounded = (bits(c, tokens[:1025], bf16=bf16) for bf16 in (False, True))
    assert 0 < abs(rounded / exact - 1) < 1e-3


def test_a_bf16_latent_cache() -> None:
    """Measured: 6e-4 of the largest logit."""
    with core(DEFAULT_MODEL) as c:
        exact, rounded = (c.run(EXPECTED["tokens"], bf16=bf16).logits for bf16 in (False, True))
    assert 1e-5 < relative(rounded, exact) < 2e-3
    assert np.array_equal(rounded.argmax(-1), exact.argmax(-1))


@pytest.mark.soak
@every_isa
def test_bits_per_byte_of_the_whole_play(isa: str) -> None:
    """Windows of 2,048 tokens, each from an empty state."""
    tokens, tokenizer = macbeth()
    size = len(tokenizer.decode_bytes(tokens[1:].tolist()))
    with core(DEFAULT_MODEL, isa=isa, threads=2) as c:
        total = sum(bits(c, tokens[i : i + 2049]) for i in range(0, len(tokens) - 1, 2048))
    assert abs(total / size - EXPECTED["bpb_macbeth_full_w2048"]) < 1e-6
