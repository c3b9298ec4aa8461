# SPDX-License-Identifier: MIT
"""`Session.timed`: the same bits, every op counted once, exact counts of bytes and experts, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import k3session as k3
from k3session._core.op_clock import OpClock
from k3session.times import COMPONENTS

IDS = [5, 9, 2, 40, 17, 3, 88]


@pytest.fixture(scope="module")
def cpu(nano: Path) -> Iterator[k3.Model]:
    """A model that has every kind of layer, on the CPU."""
    with k3.Model.open(nano, device="cpu", threads=2) as model:
        yield model


def test_a_timed_pass_has_the_same_bits(cpu: k3.Model) -> None:
    with cpu.session() as plain, cpu.session() as timed:
        expected = [plain.prefill(IDS), plain.step(4)]
        with timed.timed():
            found = [timed.prefill(IDS), timed.step(4)]
        found.append(timed.step(6))
        expected.append(plain.step(6))
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
        for a, b in zip(plain.snapshot().layers, timed.snapshot().layers, strict=True):
            assert all(np.array_equal(x, b.arrays()[n]) for n, x in a.arrays().items())


def test_every_op_of_the_graph_is_counted_at_its_place(cpu: k3.Model) -> None:
    """One prefill and two steps: each place three times, in the order of the graph, with its name."""
    c = cpu.config
    with cpu.session() as s, s.timed() as times:
        s.prefill(IDS)
        s.step(1)
        s.step(2)
        ops = times.ops
        assert times.passes == 3
    assert {op.calls for op in ops} == {3}
    assert {op.rows for op in ops if op.component != "lm_head" and op.matrix != "output_attn_res"} == {
        len(IDS) + 2
    }
    assert {op.rows for op in ops if op.matrix in ("output_attn_res", "lm_head")} == {3}, (
        "the head sees one row a pass"
    )
    kinds = Counter(op.op for op in ops)
    kda, mla, moe = len(c.kda_layers), len(c.full_attn_layers), sum(map(c.is_moe, range(c.num_hidden_layers)))
    assert kinds["kda_recurrence"] == kinds["kda_conv"] == kinds["kda_gates"] == kinds["kda_output"] == kda
    assert kinds["mla_attend"] == kinds["mla_absorb"] == kinds["mla_unabsorb"] == kinds["mla_append"] == mla
    assert kinds["experts"] == kinds["route"] == moe
    assert kinds["gate_up"] == c.num_hidden_layers and kinds["residual"] == 2 * c.num_hidden_layers
    assert kinds["attn_res"] == 2 * c.num_hidden_layers + 1
    layers = [op.layer for op in ops if op.layer >= 0]
    assert layers == sorted(layers), "in the order of the graph"
    assert {op.component for op in ops} == set(COMPONENTS)
    unnamed = {op.op for op in ops if not op.matrix}
    assert unnamed <= {"kda_recurrence", "mla_attend", "residual", "finite"}, (
        "an op at a place that has no name"
    )


def test_a_step_reads_the_bytes_that_the_model_states(cpu: k3.Model) -> None:
    """Matrices and experts, against what the weights say a step reads; multiplications, one for each weight."""
    stated = cpu._weights.step_bytes()
    with cpu.session() as s:
        s.step(1)
        with s.timed() as times:
            s.step(2)
    ops = [op for op in times.ops if op.op != "embed"]
    assert sum(op.weight_bytes for op in ops if op.op != "experts") == stated["trunk"]
    assert sum(op.weight_bytes for op in ops if op.op == "experts") == stated["experts"]
    assert sum(op.value_bytes for op in ops if op.op == "kda_recurrence") == stated["state"]
    for op in ops:
        if op.op in ("linear", "gate_up"):
            assert op.multiplications == op.weight_bytes // 2, "BF16 has two bytes a weight"


def test_experts_are_counted_once_a_pass(cpu: k3.Model) -> None:
    """Against the ids that a trace of the same passes has."""
    with cpu.session() as s, s.trace(what="route_ids") as trace, s.timed() as times:
        s.prefill(IDS)
        s.step(1)
    expected = 0
    for p in trace:
        ids = p.arrays["route_ids"]
        expected += sum(len(set(ids[:, i].ravel().tolist()) - {-1}) for i in range(ids.shape[1]))
    c = cpu.config
    moe = sum(map(c.is_moe, range(c.num_hidden_layers)))
    assert times.expert_reads == expected
    assert expected < (len(IDS) + 1) * moe * c.num_experts_per_token, (
        "rows share experts, or the test shows nothing"
    )


def test_the_time_is_that_of_the_passes(cpu: k3.Model) -> None:
    with cpu.session() as s, s.timed() as times:
        began = time.perf_counter()
        s.prefill(IDS * 8)
        took = time.perf_counter() - began
        assert all(seconds > 0 for seconds in times.seconds.values())
        assert sum(times.seconds.values()) < took


def test_stats_add_up_what_was_timed(cpu: k3.Model) -> None:
    with cpu.session() as s:
        s.prefill(IDS)
        assert s.stats.component_seconds == {} and s.stats.expert_reads == 0, "off unless asked for"
        with s.timed() as one:
            s.step(1)
        s.step(1)
        with s.timed() as two:
            s.step(2)
        stats = s.stats
        assert stats.expert_reads == one.expert_reads + two.expert_reads > 0
        assert stats.component_seconds == {n: one.seconds[n] + two.seconds[n] for n in COMPONENTS}
        assert stats.to_dict()["component_seconds"] == stats.component_seconds
        before = cpu.stats.expert_reads
    assert cpu.stats.expert_reads == before, "a closed session still counts"


def test_drafts_scores_and_rewinds_are_timed(cpu: k3.Model) -> None:
    with cpu.session() as s:
        s.prefill(IDS)
        with s.timed() as times:
            with s.verify([1, 2, 3]) as draft:
                draft.accept(2)
            assert times.passes == 1, "what is run again of a draft is no pass"
            assert sum(op.calls for op in times.ops if op.op == "kda_recurrence") == 2 * len(
                cpu.config.kda_layers
            )
            s.score([4, 5])
            assert times.passes == 2
            s.rewind(2)
        assert times.passes > 2


def test_a_clock_is_taken_away_however_the_block_ends(cpu: k3.Model) -> None:
    with cpu.session() as s:
        with pytest.raises(RuntimeError), s.timed() as times:  # noqa: PT012 - a pass, and then the end
            s.step(1)
            raise RuntimeError
        s.step(2)
        assert times.passes == 1, "what comes after the block is not timed"
        with pytest.raises(k3.K3Error, match="timed already"), s.timed(), s.timed():
            pass
        with s.timed() as times:
            s.step(3)
            s.close()
        assert times.passes == 1
    with pytest.raises(k3.ClosedError), s.timed():
        pass


def test_a_clock_that_is_dropped_while_attached_puts_the_table_back(cpu: k3.Model) -> None:
    with cpu.session() as s, cpu.session() as other:
        clock = OpClock(s._scratch)
        clock.attach()
        clock.attach()
        assert clock.is_attached
        expected = other.step(1)
        assert np.array_equal(s.step(1), expected)
        del clock
        gc.collect()
        assert np.array_equal(s.step(2), other.step(2))


def test_leaving_the_block_waits_for_a_pass_of_another_thread(cpu: k3.Model) -> None:
    """The table must not change under a pass; its numbers are whole."""
    with cpu.session() as s:
        started, ids = threading.Event(), IDS * 40

        def report(event: str, current: int, total: int) -> None:
            started.set()

        with s.timed() as times:
            thread = threading.Thread(target=s.prefill, args=(ids,), kwargs={"chunk": 16, "progress": report})
            thread.start()
            started.wait(10)
        thread.join()
        assert s.position == len(ids) and s._times is None
        assert sum(op.rows for op in times.ops if op.op == "embed") == len(ids)


@pytest.mark.parametrize("weights", ["compact", "q8"])
def test_recoded_matrices_are_counted_at_their_own_size(nano: Path, weights: str) -> None:
    """The bytes of a step as the model states them, which are fewer than those of the checkpoint."""
    with k3.Model.open(nano, device="cpu", threads=1, weights=weights) as model, model.session() as s:
        stated = model._weights.step_bytes()
        with s.timed() as times:
            s.step(1)
    found = sum(op.weight_bytes for op in times.ops if op.op not in ("embed", "experts"))
    assert abs(found - stated["trunk"]) <= 0.01 * stated["trunk"]
