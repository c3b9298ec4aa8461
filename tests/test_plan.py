# SPDX-License-Identifier: MIT
"""Memory budgets in numbers: what a user may write, how a budget is divided, and predictions from headers."""

from __future__ import annotations

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from streaming_tools import opened

import k3session as k3
from k3session import budget, plan
from k3session.budget import Need, Step
from k3session.cli import main
from k3session.config import K3Config
from k3session.layout import parameters
from k3session.presets import PRESETS
from k3session.rates import Rates, disk_rate
from k3session.safetensors_io import plan as lay_out
from k3session.synth import synth

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30), ("8 gib", 8 << 30), ("1.5MiB", 3 << 19), ("500MB", 500_000_000), ("2TB", 2 * 10**12),
        ("64kB", 64_000), ("7B", 7), (12345, 12345), (None, None),
    ],
)  # fmt: skip
def test_sizes_that_a_user_may_write(text: int | str | None, expected: int | None) -> None:
    assert budget.read_memory(text) == expected


@pytest.mark.parametrize("text", ["8", "8Gi", "-1GiB", "0MB", "", "much", 0, -5, True, 1.5, b"8GiB", "1e3MB"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(k3.ConfigError, match=r"memory is .*expected bytes, a size such as '8GiB'"):
        k3.Model.open(memory=text)  # type: ignore[arg-type]


def test_auto_is_what_is_free_less_a_margin() -> None:
    found = budget.read_memory("auto")
    free = next(
        int(s.split()[1]) * 1024
        for s in Path("/proc/meminfo").read_text().splitlines()
        if "MemAvailable" in s
    )
    assert found is not None and 0 < found < free + budget.process_bytes()


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    """The page cache of a cgroup is free memory, and the tightest of the groups above decides; "max" is no limit."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "memory.current").write_text("700\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 1\ninactive_file 150\n")
    (inner / "memory.current").write_text("5\n")
    assert list(budget._rooms(tmp_path, "/a/b", "memory.max", "memory.current")) == [450]


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 640, 1000])
@pytest.mark.parametrize("block", [1, 100, 3200, 7000, 10**6])
def test_blocks_cover_a_matrix_once(rows: int, block: int) -> None:
    blocks = budget.cut(Step(rows, 100), block)
    at = 0
    for first, count in blocks:
        assert first == at and count > 0 and (count * 100 <= block or count == 1)
        at += count
    assert at == rows
    assert budget.cut(Step(rows, 100, whole=True), block) == [(0, rows)]


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_blocks_that_stay_are_spread_evenly(keep: float) -> None:
    rooms = [7, 3, 9, 1, 5] * 40
    total = sum(rooms)
    chosen = budget.spread(rooms, int(keep * total))
    held = [r if c else 0 for r, c in zip(rooms, chosen, strict=True)]
    assert sum(held) <= keep * total and sum(held) >= keep * total - 9
    for i in range(0, len(rooms), 20):  # in each stretch about as much as in all
        assert abs(sum(held[i : i + 20]) - keep * sum(rooms[i : i + 20])) <= 18


NEED = Need(
    [Step(1000, 10_000), Step(500, 20_000, 2), Step(200, 10_000, whole=True)] * 20, 10**9, 10**6, 100, 4, 4
)


@pytest.mark.parametrize("total", [100, 150, 300, 500, 700, 900])
def test_a_budget_is_kept(total: int) -> None:
    process, session = 40 * MIB, 10 * MIB
    made = budget.divide(total * MIB, process, session, NEED)
    held = made.ring + made.resident + made.slots * made.slot
    assert not made.mapped and process + session + held <= total * MIB
    assert made.resident + made.streamed == NEED.trunk
    assert made.slots >= 2 and made.smallest <= total * MIB
    assert made.ring == 0 or made.ring >= 2 * made.block
    if made.streamed == 0:
        assert made.slots > 8  # the cache grows when the trunk stays


def test_more_memory_reads_less() -> None:
    made = [budget.divide(m * MIB, 0, 0, NEED) for m in (60, 100, 200, 400, 600, 900)]
    streamed = [m.streamed for m in made]
    assert streamed == sorted(streamed, reverse=True) and streamed[0] > streamed[-1] == 0
    assert budget.divide(2000 * MIB, 0, 0, NEED).mapped


def test_a_budget_that_is_too_small_names_one_that_works() -> None:
    with pytest.raises(k3.ConfigError, match=r"the smallest that works here is (\d+) ") as caught:
        budget.divide(20 * MIB, 10 * MIB, 5 * MIB, NEED)
    smallest = int(str(caught.value).split("works here is ")[1].split()[0])
    budget.divide(smallest, 10 * MIB, 5 * MIB, NEED)
    with pytest.raises(k3.ConfigError):
        budget.divide(smallest - 2 * MIB, 10 * MIB, 5 * MIB, NEED)


def test_a_model_that_fits_is_mapped(nano: Path) -> None:
    with k3.Model.open(nano, device="cpu", memory="4GiB") as model, model.session() as s:
        assert model.memory is not None and model.memory.mapped and model._engine.streamer is None
        s.step(1)
        assert s.stats.disk_bytes == 0
    with k3.Model.open(nano, device="cpu") as model:
        assert model.memory is None


def test_a_budget_below_the_process_is_refused(nano: Path) -> None:
    with pytest.raises(
        k3.ConfigError, match=r"the smallest that works here is \d+ \(\d+ MiB\): the process holds"
    ):
        k3.Model.open(nano, device="cpu", memory="1MiB")


# ----------------------------------------------------------------------------------------------
# predictions
# ----------------------------------------------------------------------------------------------


def sparse(folder: Path, config: K3Config, shards: int) -> Path:
    """The headers of a checkpoint, layer by layer in its shards, over files that hold nothing."""
    tensors: list[list[tuple[str, str, tuple[int, ...]]]] = [[] for _ in range(shards)]
    for p in parameters(config):
        small = p.name.endswith(
            ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
        )
        dtype = "U8" if p.dtypes == ("U8",) else "F32" if small else "BF16"
        place = (shards - 3 if p.layer is None else p.layer) % shards
        tensors[place].append(("language_model." + p.name, dtype, p.shape))
    for place in (-2, -1):  # of the vision part
        tensors[place].append((f"vision_tower.part{place}.weight", "BF16", (8, 8)))
    where = {}
    folder.mkdir()
    for i, part in enumerate(tensors):
        name = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        laid_out = lay_out(part)
        with open(folder / name, "wb") as file:
            file.write(laid_out.header)
            file.truncate(laid_out.total)
        where |= dict.fromkeys((t[0] for t in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.mark.parametrize("experts", [28, pytest.param(896, marks=pytest.mark.soak)])
def test_the_released_model_is_planned_from_its_headers(tmp_path: Path, experts: int) -> None:
    """Its 96 files and widths, over files that hold nothing; with all experts, half a million tensors and 1.56 TB."""
    released = sparse(tmp_path / "K3", replace(PRESETS["k3"], num_experts=experts), 96)
    assert sum(f.stat().st_blocks for f in released.iterdir()) * 512 < 200 * MIB
    headers = plan.survey(released)
    rates = Rates(2e9, 50e9, 50e9)
    found = {m: plan.plan(headers, m, rates=rates, threads=8) for m in ("8GiB", "64GiB", "136GiB")}
    # Published sums, with the router's rows of the experts that are left out taken off.
    trunk, chosen = 111_160_000_000 - 92 * (896 - experts) * 7168 * 2, 25_830_000_000
    for name, one in found.items():
        assert not one["memory"]["mapped"]
        assert abs(one["per_token"]["cores"] / (trunk + chosen) - 1) < 0.001, name
        read = one["memory"]["streamed"] + chosen * (1 - one["expert_hit_rate"])
        assert abs(one["per_token"]["disk"] / read - 1) < 0.01
        assert one["seconds"]["disk"] == one["per_token"]["disk"] / 2e9
        assert one["seconds"]["token"] == max(one["seconds"][k] for k in ("disk", "memory", "cores"))
        assert one["limit"] == "disk" and "disk" in one["advice"]
    small, middle, large = found.values()
    assert 0.93 * trunk < small["memory"]["streamed"] < trunk
    assert 0.4 * trunk < middle["memory"]["streamed"] < 0.6 * trunk
    assert large["memory"]["streamed"] == 0 and large["memory"]["slots"] > 500
    assert "more memory would save" in middle["advice"] and "faster disk helps most" in large["advice"]
    with pytest.raises(k3.ConfigError, match="the smallest that works here is"):
        plan.plan(headers, "1GiB")


def test_the_command_prints_the_plan(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", str(nano), "--memory", "1GiB", "--core-rate", "2GB", "--threads", "8", "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["seconds"]["cores"] == printed["per_token"]["cores"] / 2e9 and printed["threads"] == 8
    assert main(["plan", str(nano), "--memory", "1MiB"]) == 1
    assert "the smallest that works here is" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", str(nano), "--memory", "1GiB", "--disk-rate", "fast"])
    assert "expected bytes a second such as 3GB" in capsys.readouterr().err


def test_a_plan_is_what_opening_does(tmp_path: Path, nano: Path) -> None:
    """Bytes from the disk in a token, as predicted and as read."""
    with opened(nano, share=0.0, slots=2) as model, model.session() as s:
        made = plan.plan(nano, "4GiB")
        assert made["memory"]["mapped"] and made["per_token"]["disk"] == 0
        steps = model._weights.step_bytes()
        assert made["per_token"]["cores"] == steps["trunk"] + steps["experts"]
        before = s.step(1) is not None and s.stats.disk_bytes
        s.step(2)
        read = s.stats.disk_bytes - before
        assert steps["trunk"] <= read < 3 * (steps["trunk"] + steps["experts"]) + 4 * MIB


def test_tied_heads_are_read_as_a_part_of_the_trunk(tmp_path: Path) -> None:
    folder = synth(tmp_path / "tied", replace(PRESETS["nano"], tie_word_embeddings=True))
    with k3.Model.open(folder, device="cpu", threads=1) as model, model.session() as s:
        wanted = s.prefill([1, 2, 3]).tobytes()
        assert plan.plan(folder, "1GiB")["per_token"]["cores"] == sum(
            model._weights.step_bytes()[k] for k in ("trunk", "experts")
        )
    with opened(folder, share=0.3) as model, model.session() as s:
        assert s.prefill([1, 2, 3]).tobytes() == wanted


def test_rates_are_measured(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(nano), "--memory", "1GiB", "--measure", "--threads", "1", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["rates"]
    assert rates["measured"] and all(rates[k] > 10**6 for k in ("disk", "memory", "cores"))
    assert main(["plan", str(nano), "--memory", "1GiB", "--measure", "--disk-rate", "1GB"]) == 2
    assert main(["plan", str(nano), "--memory", "1GiB"]) == 0
    assert "everything fits" in capsys.readouterr().out


def test_the_rate_of_a_disk_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(k3.CheckpointError, match="cannot be read"):
        disk_rate([tmp_path], 0.05)


def test_the_command_line_takes_a_budget(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(nano), "--memory", "4GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 7
    assert main(["info", str(nano), "--memory", "1MiB"]) == 1
    assert "the smallest that works here" in capsys.readouterr().err
    assert os.sysconf("SC_PAGE_SIZE") == budget.PAGE


def test_measured_figures_of_the_page_come_from_results() -> None:
    root = Path(__file__).parent.parent
    table = runpy.run_path(str(root / "benches" / "streaming.py"))["table"]
    page = (root / "docs" / "memory.md").read_text(encoding="utf-8")
    assert table(root / "benches" / "results" / "streaming.csv") in page
