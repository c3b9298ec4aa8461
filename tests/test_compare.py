# SPDX-License-Identifier: MIT
"""Comparisons: the first place where two sides differ is the place where one of them was changed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tools import Raw, Tensors, changed
from device_tools import run_emulated
from session_tools import prompt, same_sessions

import k3session as k3
from k3session._core.ops import best_isa
from k3session.cli import main
from k3session.compare import ROWS, Side, compare, compare_traces, record
from k3session.synth import synth
from k3session.trace import Trace

TEXT = prompt(2 * ROWS + 3)

#: A tensor, and the first value that its change can be seen in.
CHANGES = [
    ("model.embed_tokens", None, "embed"),
    ("layers.2.self_attention_res_proj", 2, "attn_weights"),
    ("layers.2.self_attention_res_norm", 2, "attn_weights"),
    ("layers.1.input_layernorm", 1, "attn_x"),
    ("layers.1.self_attn.q_proj", 1, "kda_q_conv"),
    ("layers.1.self_attn.q_conv1d", 1, "kda_q_conv"),
    ("layers.1.self_attn.k_proj", 1, "kda_k_conv"),
    ("layers.4.self_attn.v_conv1d", 4, "kda_v_conv"),
    ("layers.4.self_attn.f_a_proj", 4, "kda_decay"),
    ("layers.4.self_attn.dt_bias", 4, "kda_decay"),
    ("layers.0.self_attn.b_proj", 0, "kda_beta"),
    ("layers.0.self_attn.g_proj", 0, "kda_on"),
    ("layers.0.self_attn.o_norm", 0, "kda_on"),
    ("layers.0.self_attn.o_proj", 0, "attn_out"),
    ("layers.3.self_attn.q_a_proj", None, None),  # its norm makes the factor disappear
    ("layers.3.self_attn.q_b_proj", 3, "mla_q"),
    ("layers.3.self_attn.kv_a_proj_with_mqa", 3, "mla_kva"),
    ("layers.5.self_attn.kv_a_layernorm", 5, "mla_gated"),
    ("layers.6.self_attn.kv_b_proj", 6, "mla_gated"),
    ("layers.5.self_attn.g_proj", 5, "mla_gated"),
    ("layers.6.self_attn.o_proj", 6, "attn_out"),
    ("layers.4.mlp_res_proj", 4, "ffn_weights"),
    ("layers.4.post_attention_layernorm", 4, "ffn_x"),
    ("layers.0.mlp.down_proj", 0, "ffn_out"),
    ("layers.3.block_sparse_moe.routed_expert_down_proj", 3, "moe_latent_in"),
    ("layers.3.block_sparse_moe.routed_expert_norm", 3, "moe_routed"),
    ("layers.3.block_sparse_moe.routed_expert_up_proj", 3, "moe_routed"),
    ("layers.3.block_sparse_moe.shared_experts.up_proj", 3, "moe_shared"),
    ("model.output_attn_res_proj", None, "final_mix"),
    ("model.norm.weight", None, "final_normed"),
    ("lm_head", None, "logits"),
]


def doubled(raw: Raw) -> Raw:
    """Every value times two."""
    if raw.dtype == "F32":
        return Raw("F32", raw.shape, (np.frombuffer(raw.data, "<f4") * 2).tobytes())
    bits = np.frombuffer(raw.data, "<u2")
    return Raw("BF16", raw.shape, np.where(bits & 0x7F80, bits + 0x80, bits).astype("<u2").tobytes())


@pytest.fixture
def open_model() -> Iterator[Any]:
    opened: list[k3.Model] = []

    def make(folder: Path) -> k3.Model:
        opened.append(k3.Model.open(folder, device="cpu", threads=1))
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.mark.parametrize(("tensor", "layer", "site"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_changed_tensor_is_found(
    nano: Path,
    tmp_path: Path,
    model: k3.Model,
    open_model: Any,
    tensor: str,
    layer: int | None,
    site: str | None,
) -> None:
    def change(tensors: Tensors) -> None:
        (name,) = [n for n in tensors if tensor in n]
        tensors[name] = doubled(tensors[name])

    other = open_model(changed(nano, tmp_path / "other", tensors=change))
    found = compare(model, other, TEXT[:9].tolist())
    if site is None:
        assert found.within
        return
    assert found.first is not None and not found.within
    assert (found.first.layer, found.first.site) == (layer, site)
    assert found.first.error > found.bound == 1e-4
    # The traces of two sessions say the same, whatever the passes were.
    with model.session() as s, other.session() as t:
        with s.trace(what=list(found_names(found))) as a, t.trace(what=list(found_names(found))) as b:
            s.prefill(TEXT[:9])
            t.prefill(TEXT[:9], chunk=4)
        again = compare_traces(a, b)
        assert again.first is not None and (again.first.layer, again.first.site) == (layer, site)


def found_names(found: Any) -> list[str]:
    return [d.site for d in found.sites]


def test_other_experts_are_told_as_such(nano: Path, tmp_path: Path, model: k3.Model, open_model: Any) -> None:
    """The bias takes part in the choice only: where the choice is the same the weights are as well."""

    def change(tensors: Tensors) -> None:
        (name,) = [n for n in tensors if "layers.4" in n and n.endswith("e_score_correction_bias")]
        bias = np.frombuffer(tensors[name].data, "<f4").copy()
        bias[5] += 10
        tensors[name] = Raw("F32", bias.shape, bias.tobytes())

    other = open_model(changed(nano, tmp_path / "other", tensors=change))
    found = compare(model, other, TEXT.tolist())
    assert found.first is not None
    assert (found.first.layer, found.first.site) == (4, "route_ids")
    assert found.first.error == pytest.approx(1 / 3)
    assert "of the experts" in str(found.first)


def test_weights_are_compared_by_expert(model: k3.Model) -> None:
    """In whatever order they stand, and where other experts were chosen not at all."""

    def traced() -> Trace:
        with model.session() as session, session.trace(what=["route_ids", "route_wts"]) as trace:
            session.prefill(TEXT[:6])
        return trace

    a, b = traced(), traced()
    for name in ("route_ids", "route_wts"):
        b.passes[0].arrays[name][:] = b.passes[0].arrays[name][:, :, ::-1].copy()
    assert compare_traces(a, b, bound=0).within
    ids, weights = (b.passes[0].arrays[name] for name in ("route_ids", "route_wts"))
    ids[3, 2, 0] = next(e for e in range(12) if e not in ids[3, 2])
    weights[3, 2] *= 2
    found = compare_traces(a, b)
    assert {d.site: d.error for d in found.sites} == {"route_ids": pytest.approx(1 / 3), "route_wts": 0}
    weights[4, 5, 1] *= 2
    error = {d.site: (d.layer, d.position) for d in compare_traces(a, b).sites if d.error}
    assert error == {"route_ids": (2, 3), "route_wts": (5, 4)}


def test_the_first_token_is_named(model: k3.Model) -> None:
    """In a trace that was altered in one place, and in what comes after it in the graph but before it in time."""
    with model.session() as session, session.trace() as a:
        session.prefill(TEXT)
    with model.session() as session, session.trace() as b:
        session.prefill(TEXT)
    b.passes[0].arrays["kda_o"][20:, 2] *= 1.5
    b.passes[0].arrays["layer_out"][3, 2] *= 1.5
    b.passes[0].arrays["embed"][30] *= 1.00001
    found = compare_traces(a, b)
    assert found.first is not None
    assert (found.first.site, found.first.layer, found.first.position) == ("kda_o", 2, 20)
    assert compare_traces(a, b, bound=1e-9).first.site == "embed"  # type: ignore[union-attr]
    assert compare_traces(a, b, bound=0.6).within
    assert {d.site for d in found.sites if d.error} == {"kda_o", "layer_out", "embed"}


def test_a_value_that_is_not_finite_on_one_side_is_beyond_any_bound(model: k3.Model) -> None:
    with model.session() as session, session.trace(what="attn_in") as a:
        session.prefill(TEXT[:4])
    with model.session() as session, session.trace(what="attn_in") as b:
        session.prefill(TEXT[:4])
    b.passes[0].arrays["attn_in"][2, 5, 7] = np.nan
    found = compare_traces(a, b, bound=1e30)
    assert found.first is not None and found.first.position == 2 and math.isinf(found.first.error)
    assert json.loads(json.dumps(found.to_dict()))["first"] == {
        "site": "attn_in", "layer": 5, "position": 2, "error": None,
    }  # fmt: skip
    a.passes[0].arrays["attn_in"][2, 5, 7] = np.nan
    assert compare_traces(a, b, bound=0).within, "neither side has it"


def test_the_same_model_gives_the_same_bits(model: k3.Model, nano: Path) -> None:
    found = compare(model, Side.read(f"{nano}@cpu,threads=2"), TEXT.tolist(), bound=0)
    assert found.within and found.largest is not None and found.largest.error == 0
    assert (found.tokens, found.layers) == (TEXT.size, 7)
    assert "the same bits everywhere" in found.lines()


def test_steps_and_a_prefill_have_the_same_values(model: k3.Model) -> None:
    with model.session() as s, model.session() as t:
        with s.trace() as a, t.trace() as b:
            s.prefill(TEXT)
            for token in TEXT.tolist():
                t.step(token)
        assert compare_traces(a, b, bound=0).within
        same_sessions(s, t)


@pytest.mark.skipif(best_isa() == "base", reason="this processor has one instruction set only")
def test_instruction_sets_differ_by_rounding(nano: Path) -> None:
    found = compare(
        Side.read(f"{nano}@cpu,isa=base"), Side.read(f"{nano}@cpu,isa={best_isa()}"), TEXT.tolist()
    )
    assert found.within and found.largest is not None and 0 < found.largest.error < 1e-4


def test_latents_of_16_bits_are_found_where_they_are_read(nano: Path) -> None:
    found = compare(Side.read(f"{nano}@cpu"), Side.read(f"{nano}@cpu,latent=bf16"), TEXT.tolist())
    assert found.first is not None and (found.first.layer, found.first.site) == (3, "mla_gated")


def test_a_recorded_trace_stands_for_its_model(model: k3.Model, nano: Path, tmp_path: Path) -> None:
    record(Side.read(f"{nano}@cpu"), TEXT.tolist()).save(tmp_path / "t")
    side = Side.read(str(tmp_path / "t"))
    for a, b in ((side, model), (model, side), (side, side), (Trace.load(tmp_path / "t"), model)):
        found = compare(a, b, bound=0)
        assert found.within and found.tokens == TEXT.size and found_names(found)[-1] == "logits"
    with pytest.raises(k3.ConfigError, match="was recorded with other ids"):
        compare(side, model, [1, 2, 3])
    with pytest.raises(k3.ConfigError, match="is a trace already"):
        record(side, TEXT.tolist())


def test_what_cannot_be_compared(model: k3.Model, tmp_path: Path) -> None:
    def traced(tokens: Any, **options: Any) -> Trace:
        with model.session() as session, session.trace(**options) as trace:
            session.prefill(tokens)
        return trace

    a = traced([1, 2, 3])
    for b, words in (
        (traced([1, 2, 4]), "other tokens"),
        (traced([1, 2]), "other tokens: 3 rows and 2 rows"),
        (traced([1, 2, 3], layers=[1, 2, 4]), "other layers: 0 to 6 and 1, 2, 4"),
        (traced([1, 2, 3], what="logits"), "no value in common"),
    ):
        with pytest.raises(k3.ConfigError, match=words):
            compare_traces(a, b)
    for bound in (-1.0, math.nan, "1", True, None):
        with pytest.raises(k3.ConfigError, match="bound is"):
            compare_traces(a, a, bound)  # type: ignore[arg-type]
    with pytest.raises(k3.ConfigError, match="no ids to run"):
        compare(model, model)
    with pytest.raises(k3.InvalidTokenError, match="97"):
        compare(model, model, [97])
    with model.session() as session:
        session.step(1)
        with session.trace() as late:
            session.step(2)
    with pytest.raises(k3.ConfigError, match="from position 0 on"):
        compare(late, model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no/such/folder", "is no folder and no file"),
        ("no/such/folder@cpu", "is no folder"),
        ("@nothing", "device is 'nothing'"),
        ("@color=red", "'color=red' is no option"),
        ("@isa=mmx", "isa is 'mmx'; expected one of base"),
        ("@threads=0", "threads is '0'"),
        ("@cpu,experts=disk", "experts is 'disk'"),
        ("@latent=fp8", "latent is 'fp8'"),
    ],
)
def test_sides_that_are_none(text: str, words: str) -> None:
    with pytest.raises(k3.K3Error, match=words):
        compare(Side.read(text), Side.read("@cpu"), [1, 2])


def test_a_gpu_and_the_cpu_differ_by_rounding(nano: Path) -> None:
    """All inner values come from the device too, also where two sides share the work; and so do scores."""
    code = """
import sys
import k3session as k3
from k3session.compare import Side, compare
ids = [int(i) for i in sys.argv[2].split(",")]
for options in ("cuda", "cpu,kda=cuda"):
    found = compare(Side.read(f"{sys.argv[1]}@{options}"), Side.read(f"{sys.argv[1]}@cpu"), ids)
    print(found.within, len(found.sites), 0 < found.largest.error < 1e-4)
with k3.Model.open(sys.argv[1], device="cuda") as model, model.session() as s, model.session() as t:
    s.prefill(ids[:2]), t.prefill(ids[:2])
    a, b = s.score(ids), t.prefill_scored(ids)
    print(a.logprobs.tobytes() == b.logprobs.tobytes(), s.position)
"""
    expected = "True 29 True\n" * 2 + "True 2\n"
    assert run_emulated(code, nano, ",".join(map(str, TEXT[:3].tolist()))) == expected


# ---------------------------------------------------------------- the command


def test_the_command(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(synth(tmp_path / "other", "nano", seed=5))
    side = f"{nano}@cpu,threads=1"

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["compare", *arguments])
        out = capsys.readouterr()
        assert bool(out.err) == (code not in (0, 1) or not out.out), out
        return code, out.out or out.err

    assert run(side, side, "--ids", "3, 1,4", "--bound", "0") == (
        0,
        run(side, side, "--ids", "3 1 4", "--bound", "0")[1],
    )
    code, text = run(side, f"{other}@cpu", "--ids", "3,1,4")
    assert code == 1 and "first beyond 0.0001: embed, at position 0" in text
    assert run(side, f"{other}@cpu", "--ids", "3,1,4", "--bound", "10")[0] == 0
    (tmp_path / "ids").write_text("3 1\n4,1")
    code, text = run(side, f"{other}@cpu", "--ids-file", str(tmp_path / "ids"), "--json")
    report = json.loads(text)
    assert code == 1 and report["first"]["site"] == "embed" and report["tokens"] == 4
    trace = str(tmp_path / "t")
    assert run(side, "--record", trace, "--ids", "3,1")[0] == 0
    assert run(trace, side, "--bound", "0")[0] == 0
    assert run(side, trace, "--ids", "3,2") == (1, f"k3session: {trace}: was recorded with other ids: 3,1\n")
    assert run(side, "--ids", "1")[0] == 2
    assert run(side, side, "--record", trace, "--ids", "1")[0] == 2
    assert run(side, "--record", trace)[0] == 2
    (tmp_path / "ids").write_text("three")
    assert run(side, side, "--ids-file", str(tmp_path / "ids"))[0] == 1
    assert run(side, side, "--ids-file", str(tmp_path / "missing"))[0] == 1
    with pytest.raises(SystemExit) as ended:
        main(["compare", side, side, "--ids", "one"])
    assert ended.value.code == 2 and "expected token ids such as 1,2,3" in capsys.readouterr().err
