# SPDX-License-Identifier: MIT
"""Choosing a token: each step against a plain oracle, and that a choice depends on seed, position and logits alone."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_access import counts
from hypothesis import given
from hypothesis import strategies as st

import k3session as k3
from k3session.sampling import Sampling, read_generation_config, uniform

Row = np.ndarray[Any, np.dtype[np.float32]]


def row(*values: float) -> Row:
    return np.array(values, np.float32)


def choices(sampling: Sampling, logits: Row, n: int = 400, tokens: Any = None) -> set[int]:
    """Every id that comes up at n positions."""
    return {sampling.choose(logits, position=i, tokens=tokens) for i in range(n)}


# Greedy.


def test_temperature_zero_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    greedy = Sampling(temperature=0)
    assert choices(greedy, row(0.5, 2.0, 1.0), 20) == {1}
    assert choices(greedy, row(1.0, 3.0, 3.0, -1.0, 3.0), 20) == {1}
    assert choices(greedy, row(-math.inf, -5.0), 20) == {1}
    assert choices(Sampling(temperature=0, top_k=1, top_p=0.1, min_p=1, seed=4), row(1.0, 3.0, 3.0), 20) == {
        1
    }


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    assert choices(Sampling(temperature=50, top_k=1, seed=1), row(1.0, 3.0, 3.0, 2.9)) == {1}


# The distribution.


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = row(0.0, 1.0, 2.0, -1.0, 0.5)
    n = counts(3000, 20_000)
    for temperature in (0.5, 1.0, 3.0):
        sampling = Sampling(temperature=temperature, seed=11)
        found = np.bincount([sampling.choose(logits, position=i) for i in range(n)], minlength=5)
        p = np.exp(logits / temperature)
        p /= p.sum()
        # Within five standard deviations of a binomial.
        assert np.all(np.abs(found - n * p) < 5 * np.sqrt(n * p * (1 - p)))


#: (seed, position) -> the upper 53 bits of XXH3-64 over both as little-endian 64-bit integers, as a fraction.
DRAWS = {
    (0, 0): "0x1.a14cd4cb8ea51p-1",
    (0, 1): "0x1.9f75d4e951980p-5",
    (0, 1000): "0x1.598d1e21516a8p-1",
    (0, 1099511627776): "0x1.11c276160b300p-8",
    (1, 0): "0x1.379508a467a90p-3",
    (1, 1): "0x1.b29fe5e38560ap-2",
    (1, 1000): "0x1.a900280f9cfd2p-1",
    (1, 1099511627776): "0x1.78a4a751d114ap-2",
    (12345, 0): "0x1.2e1b9a6f629bcp-1",
    (12345, 1): "0x1.f269100b0c033p-1",
    (12345, 1000): "0x1.188e3d597efb8p-3",
    (12345, 1099511627776): "0x1.9a5c4731eb1a4p-3",
    (18446744073709551615, 0): "0x1.4566f467776acp-3",
    (18446744073709551615, 1): "0x1.2fc0b1f9be8ccp-3",
    (18446744073709551615, 1000): "0x1.6d70f4562a718p-2",
    (18446744073709551615, 1099511627776): "0x1.8dcf9d2d08bd0p-1",
}


def test_uniform_numbers_are_the_same_in_every_release() -> None:
    # Saved sessions hold a seed and a position: a later version, or another program, has to draw these very numbers.
    assert {at: uniform(*at).hex() for at in DRAWS} == DRAWS


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    drawn = np.array(
        [[uniform(seed, position) for position in range(2000)] for seed in (0, 1, 2**63, 2**64 - 1)]
    )
    assert np.all((drawn >= 0) & (drawn < 1)) and np.unique(drawn).size == drawn.size
    assert np.all(np.abs(drawn.mean(axis=1) - 0.5) < 5 * np.sqrt(1 / 12 / 2000))
    assert np.all(np.abs(np.corrcoef(drawn)[np.triu_indices(4, 1)]) < 5 / np.sqrt(2000))
    assert np.all(np.abs([np.corrcoef(d[:-1], d[1:])[0, 1] for d in drawn]) < 5 / np.sqrt(2000))


def test_a_choice_depends_on_seed_position_and_logits_alone() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=50).astype(np.float32)
    kept = logits.copy()
    a = [Sampling(seed=5).choose(logits, position=i) for i in range(200)]
    one = Sampling(seed=5)
    b = [one.choose(logits.copy(), position=i, tokens=rng.integers(0, 50, 7)) for i in reversed(range(200))]
    assert a == b[::-1] and np.array_equal(logits, kept)
    assert a != [Sampling(seed=6).choose(logits, position=i) for i in range(200)]
    assert a[1:] != a[:-1]


# Each step against an oracle that is exact: probabilities as fractions, sets by sorting.


def oracle(s: Sampling, logits: Row, position: int, tokens: list[int]) -> int:
    """What `choose` has to return, from the description of the fields."""
    scores = [float(x) for x in logits]
    for token, bias in s.logit_bias.items():
        scores[token] = float(np.float32(scores[token]) + np.float32(bias))
    penalty = np.float32(s.repetition_penalty)
    for token in {t for t in tokens if t >= 0}:
        x = np.float32(scores[token])
        scores[token] = float(x / penalty if x > 0 else x * penalty)
    ranked = sorted((i for i, x in enumerate(scores) if x > -math.inf), key=lambda i: (-scores[i], i))
    if s.temperature == 0:
        return ranked[0]
    top = scores[ranked[0]]
    weight = {i: Fraction(math.exp((scores[i] - top) / s.temperature)) for i in ranked}
    if s.top_k:
        ranked = ranked[: s.top_k]
    total = sum(weight[i] for i in ranked)
    kept, reached = [], Fraction(0)
    for i in ranked:
        kept.append(i)
        reached += weight[i]
        if s.top_p < 1 and reached >= Fraction(s.top_p) * total:
            break
    kept = [i for i in kept if weight[i] >= Fraction(s.min_p) * weight[ranked[0]] and weight[i] > 0]
    left = Fraction(uniform(s.seed or 0, position)) * sum(weight[i] for i in kept)
    for i in sorted(kept):
        left -= weight[i]
        if left < 0:
            return i
    return max(kept)


# Sixteenths and halves: sums and quotients that decide are far from ties of rounding.
logit_rows = st.lists(st.integers(-64, 64), min_size=1, max_size=24).map(
    lambda v: np.array(v, np.float32) / 16
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 0.83]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    samplings,
    logit_rows,
    st.integers(0, 2**40),
    st.lists(st.integers(-1, 100), max_size=12),
    st.dictionaries(st.integers(0, 23), st.integers(-40, 40), max_size=4),
)
def test_every_step_against_the_oracle(
    s: Sampling, logits: Row, position: int, tokens: list[int], bias: dict[int, int]
) -> None:
    n = logits.size
    tokens = [t for t in tokens if t < n]
    s = Sampling(
        **{
            f: getattr(s, f) for f in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        },
        logit_bias={k: v / 8 for k, v in bias.items() if k < n},
    )
    assert s.choose(logits, position=position, tokens=np.array(tokens, np.int32)) == oracle(
        s, logits, position, tokens
    )


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    assert choices(Sampling(top_k=2, seed=1), row(1.0, 1.0, 1.0, 1.0)) == {0, 1}
    assert choices(Sampling(top_k=3, seed=1), row(0.0, 2.0, 2.0, 2.0, 2.0)) == {1, 2, 3}
    assert choices(Sampling(top_k=100, seed=1), row(1.0, 1.0)) == {0, 1}


def test_top_p_keeps_the_most_probable_until_the_sum_reaches_it() -> None:
    logits = np.log(row(0.5, 0.25, 0.15, 0.1))
    assert choices(Sampling(top_p=0.49, seed=1), logits) == {0}
    assert choices(Sampling(top_p=0.6, seed=1), logits) == {0, 1}
    assert choices(Sampling(top_p=0.8, seed=1), logits) == {0, 1, 2}
    assert choices(Sampling(top_p=1e-9, seed=1), logits) == {0}
    assert choices(Sampling(top_p=math.nextafter(1, 0), seed=1), logits, 2000) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert choices(Sampling(min_p=0.6, seed=1), logits) == {0, 1}
    assert choices(Sampling(min_p=1.0, seed=1), logits) == {0}


def test_the_repetition_penalty_lowers_what_was_said() -> None:
    tokens = np.array([-1, 0, 1, 0, -1], np.int32)
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert greedy.choose(row(4.0, -1.0, 2.5, -1.5), position=5, tokens=tokens) == 2
    assert (
        greedy.choose(row(6.0, -1.0, 2.5, -1.5), position=5, tokens=tokens) == 0
    )  # once, however often it came
    assert greedy.choose(row(-9.0, -1.0, -9.0, -1.5), position=5, tokens=tokens) == 3
    assert greedy.choose(row(4.0, 1.0, 2.5, 3.9), position=0) == 0


def test_a_bias_is_added_and_forbids() -> None:
    logits = row(1.0, 2.0, 3.0)
    assert Sampling(temperature=0, logit_bias={0: 2.5}).choose(logits, position=0) == 0
    assert choices(Sampling(seed=1, logit_bias={2: -math.inf, 1: -math.inf}), logits) == {0}
    with pytest.raises(k3.ConfigError, match="logit_bias names token 3, but the vocabulary has 3"):
        Sampling(logit_bias={3: 1.0}).choose(logits, position=0)
    with pytest.raises(k3.ConfigError, match="no token is left to choose from; look at logit_bias"):
        Sampling(logit_bias=dict.fromkeys(range(3), -math.inf)).choose(logits, position=0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 1e30, 1.7e308])
def test_extreme_temperatures_are_no_trouble(temperature: float) -> None:
    s = Sampling(temperature=temperature, seed=1)
    assert choices(s, row(1.0, 3.0, -math.inf, 2.0)) == ({1} if temperature < 1 else {0, 1, 3})
    assert choices(s, row(3e38, -3e38)) == ({0} if temperature < 1e37 else {0, 1})


# The processor.


def test_the_processor_runs_after_bias_and_penalty_and_before_the_rest() -> None:
    seen: list[Any] = []

    def processor(ids: Any, logits: Any) -> Any:
        seen.append((ids.tolist(), logits.tolist()))
        return row(0.0, 0.0, 50.0)

    s = Sampling(
        processor=processor, logit_bias={0: 1.0}, repetition_penalty=2.0, temperature=1.0, top_k=1, seed=0
    )
    logits = row(3.0, 1.0, 0.0)
    assert s.choose(logits, position=2, tokens=np.array([0, 1], np.int32)) == 2
    assert seen == [([0, 1], [2.0, 0.5, 0.0])] and np.array_equal(logits, row(3.0, 1.0, 0.0))


@pytest.mark.parametrize(
    "given_back",
    [row(1.0, 2.0), row(1.0, math.nan, 0.0), row(1.0, math.inf, 0.0), np.zeros((1, 3)), 1.0],
    ids=["short", "nan", "inf", "2-d", "number"],
)
def test_what_a_processor_returns_is_checked(given_back: Any) -> None:
    with pytest.raises(
        k3.ConfigError, match=r"the logits processor returned shape .*; expected \(3,\), with finite"
    ):
        Sampling(processor=lambda ids, logits: given_back).choose(row(1.0, 2.0, 3.0), position=0)


def test_a_processor_that_forbids_everything() -> None:
    with pytest.raises(
        k3.ConfigError, match="no token is left to choose from; look at logit_bias and at the processor"
    ):
        Sampling(processor=lambda ids, logits: logits - np.float32(np.inf)).choose(row(1.0, 2.0), position=0)


def test_an_error_of_the_processor_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        Sampling(processor=lambda ids, logits: 1 / 0).choose(row(1.0, 2.0), position=0)  # type: ignore[arg-type]


# What is refused.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -1}, "top_k is -1; expected an integer of at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0}, "top_p is 0; expected a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1; expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a finite number above 0"),
        ({"seed": -1}, r"seed is -1; expected None or an integer from 0 to 2\^64 - 1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"stop_ids": (1, -2)}, r"stop_ids is \(1, -2\); expected token ids"),
        ({"stop_ids": "ab"}, "expected token ids"),
        ({"processor": 3}, "processor is 3; expected a function"),
        ({"logit_bias": None}, "logit_bias is None; expected a mapping"),
        ({"logit_bias": [(1, 2.0)]}, "expected a mapping"),
        ({"logit_bias": {1: math.nan}}, "expected a mapping of token ids to numbers below infinity"),
        ({"logit_bias": {1: math.inf}}, "below infinity"),
        ({"logit_bias": {"1": 1.0}}, "a mapping of token ids"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(k3.ConfigError, match=words):
        Sampling(**values)


def test_a_sampling_is_fixed_and_has_no_unknown_fields() -> None:
    with pytest.raises(TypeError, match="topk"):
        Sampling(topk=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Sampling().seed = 1  # type: ignore[misc]
    bias = {1: 2.0}
    s = Sampling(logit_bias=bias, stop_ids=[4, np.int64(5)])  # type: ignore[arg-type]
    bias[2] = 3.0
    assert s.logit_bias == {1: 2.0} and s.stop_ids == (4, 5)
    assert Sampling(stop_ids=4).stop_ids == (4,)  # type: ignore[arg-type]


# Kept in a snapshot.


@given(
    samplings,
    st.dictionaries(st.integers(0, 200_000), st.floats(max_value=1e30, allow_nan=False), max_size=5),
    st.none() | st.lists(st.integers(0, 10**6), max_size=4),
)
def test_a_sampling_survives_json(s: Sampling, bias: dict[int, float], stop: list[int] | None) -> None:
    s = Sampling(**{**s.to_dict(), "logit_bias": bias, "stop_ids": stop})
    text = json.dumps(s.to_dict(), allow_nan=False)
    assert Sampling.from_dict(json.loads(text)) == s


def test_a_processor_is_not_kept_and_unknown_fields_are_let_pass() -> None:
    s = Sampling(processor=lambda ids, logits: logits, seed=3)
    d = s.to_dict()
    assert "processor" not in d and Sampling.from_dict({**d, "of_a_later_version": 1}) == Sampling(seed=3)
    assert s.with_seed(4).seed == 4 and s.with_seed(4).processor is s.processor


# generation_config.json.


def written(folder: Path, value: Any) -> Path:
    (folder / "generation_config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_the_checkpoints_own_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, (7,)) == Sampling(stop_ids=(7,))
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 20, "eos_token_id": [5, 7, 6]}
    expected = Sampling(temperature=0.6, top_p=0.9, stop_ids=(5, 7, 6))
    assert read_generation_config(written(tmp_path, values), (7,)) == expected
    values = {"do_sample": False, "temperature": 0.6, "eos_token_id": 9}
    assert read_generation_config(written(tmp_path, values), (7,)) == Sampling(temperature=0, stop_ids=(9, 7))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "generation_config.json: cannot be read: "),
        ("[1]", "generation_config.json: expected an object with named values"),
        ({"temperature": -1}, "generation_config.json: temperature is -1"),
        ({"eos_token_id": "x"}, "generation_config.json: stop_ids"),
    ],
)
def test_bad_defaults_are_refused_by_file(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(k3.CheckpointError, match=words):
        read_generation_config(written(tmp_path, value), ())


def test_a_model_carries_them(nano: Path) -> None:
    with k3.Model.open(threads=1) as model:
        # Those of generation_config.json first, then those of config.json.
        assert model.default_sampling.stop_ids == (1026, 1025) and model.config.eos_token_id == (1026,)
    with k3.Model.open(nano, threads=1) as model:
        assert model.default_sampling.stop_ids == (1,)
