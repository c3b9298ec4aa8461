# SPDX-License-Identifier: MIT
"""Everything that can be done to sessions, in any order, against a plain model that replays every timeline from its
tokens: the same bits, always.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from core_access import FULL
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import k3session as k3
from k3session._core.decoder import Scratch
from k3session.synth import synth

VOCAB_USED = 24
"""Few different tokens, so that timelines meet again."""

ROWS = np.random.default_rng(7).standard_normal((3, 256)).astype(np.float32)
"""Embeddings that prompts are made of; entry -1 - i of a timeline is row i."""

tokens = st.lists(st.integers(0, VOCAB_USED - 1), min_size=1, max_size=9)


class Truth:
    """Logits and state after any sequence, by single steps of the compiled graph with a page size of its own."""

    def __init__(self, model: k3.Model) -> None:
        self.decoder = model._open_decoder()
        self.scratch = Scratch(self.decoder, 1)
        self.hidden, self.vocab = model.config.hidden_size, model.config.vocab_size
        self.known: dict[tuple[int, ...], Any] = {}

    def at(self, line: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        """The row of logits after the line, and its timeline."""
        if line not in self.known:
            before = self.at(line[:-1])[1] if len(line) > 1 else self.decoder.timeline(False, 64)
            timeline, row = before.share(), np.empty((1, self.vocab), np.float32)
            last = line[-1]
            rows = None if last >= 0 else np.ascontiguousarray(ROWS[-1 - last : -last, : self.hidden])
            ids = np.array([max(last, -1)], np.int32)
            assert self.decoder.forward(self.scratch, [timeline], [1], ids, rows, row) is None
            if len(self.known) > 4000:
                self.known.clear()
            self.known[line] = row[0], timeline
        return self.known[line]


class Sessions(RuleBasedStateMachine):
    """A few sessions of one model."""

    folder: Path
    sessions = Bundle("sessions")
    marks = Bundle("marks")
    snapshots = Bundle("snapshots")
    files = Bundle("files")

    @initialize()
    def start(self) -> None:
        self.model = k3.Model.open(self.folder, device="cpu", threads=1)
        self.truth = Truth(self.model)
        self.lines: dict[Any, tuple[int, ...]] = {}
        self.place = Path(tempfile.mkdtemp())
        self.changed: Any = None
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for s in list(self.lines):
                s.close()
            self.model.close()
            for file in self.place.iterdir():
                file.unlink()
            self.place.rmdir()

    def open(self, **options: Any) -> Any:
        policy = k3.Marks(every=5, prefill=True, budget=1 << 16)
        return self.model.session(marks=policy, **options)

    def note(self, s: Any, line: tuple[int, ...]) -> Any:
        self.lines[s] = line
        self.changed = s
        return s

    # ---- sessions ----

    @rule(target=sessions)
    def new(self) -> Any:
        return self.note(self.open(), ())

    @rule(target=sessions, s=sessions)
    @precondition(lambda self: len(self.lines) < 8)
    def fork(self, s: Any) -> Any:
        return self.note(s.fork(), self.lines[s])

    @rule(s=consumes(sessions))
    def close(self, s: Any) -> None:
        s.close()
        self.lines.pop(s, None)
        self.changed = None

    # ---- passes ----

    @rule(s=sessions, token=st.integers(0, VOCAB_USED - 1))
    def step(self, s: Any, token: int) -> None:
        s.step(token)
        self.note(s, (*self.lines[s], token))

    @rule(s=sessions, ids=tokens, chunk=st.integers(1, 4))
    def prefill(self, s: Any, ids: list[int], chunk: int) -> None:
        s.prefill(ids, chunk=chunk)
        self.note(s, (*self.lines[s], *ids))

    @rule(s=sessions, which=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def embeddings(self, s: Any, which: list[int]) -> None:
        s.prefill(ROWS[which, : self.model.config.hidden_size])
        self.note(s, (*self.lines[s], *(-1 - w for w in which)))

    @rule(s=sessions, ids=tokens, keep=st.integers(0, 9))
    def verify(self, s: Any, ids: list[int], keep: int) -> None:
        keep = min(keep, len(ids))
        with s.verify(ids) as draft:
            for i in range(len(ids)):
                assert np.array_equal(draft.logits[i], self.truth.at((*self.lines[s], *ids[: i + 1]))[0])
            draft.accept(keep)
        self.note(s, (*self.lines[s], *ids[:keep]))

    @rule(s=sessions, ids=tokens)
    def leave_a_draft(self, s: Any, ids: list[int]) -> None:
        with s.verify(ids), pytest.raises(k3.SessionBusyError):
            s.step(1)
        self.changed = s

    @rule(data=st.data())
    @precondition(lambda self: len(self.lines) > 1)
    def batch(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.lines)), min_size=1, max_size=5, unique=True))
        if data.draw(st.booleans()):
            parts: list[Any] = [data.draw(tokens) for _ in chosen]
            rows = self.model.forward(list(zip(chosen, parts, strict=True)))
        else:
            parts = [[data.draw(st.integers(0, VOCAB_USED - 1))] for _ in chosen]
            rows = self.model.step([(s, p[0]) for s, p in zip(chosen, parts, strict=True)])
        for s, part, row in zip(chosen, parts, rows, strict=True):
            self.note(s, (*self.lines[s], *part))
            assert np.array_equal(row, self.truth.at(self.lines[s])[0])

    # ---- going back ----

    @rule(target=marks, s=sessions)
    def mark(self, s: Any) -> Any:
        return s, s.mark(), self.lines[s]

    @rule(kept=marks)
    def rewind_to_mark(self, kept: Any) -> None:
        s, mark, line = kept
        if s in self.lines:
            s.rewind(mark)
            self.note(s, line)
        else:
            with pytest.raises(k3.ClosedError):
                mark_position(mark, s)

    @rule(s=sessions, part=st.floats(0, 1), limit=st.sampled_from([None, 0, 3]))
    def rewind(self, s: Any, part: float, limit: int | None) -> None:
        line = self.lines[s]
        to = round(part * len(line))
        try:
            s.rewind(to, max_replay=limit)
        except k3.RewindError as error:
            refused = error
        else:
            self.note(s, line[:to])
            return
        assert refused.nearest is not None and 0 <= refused.nearest <= len(line)
        assert limit is not None or min(line) < 0, "with ids and no limit every position is within reach"
        self.changed = s

    @rule(s=sessions, cut=st.integers(0, 12), ids=tokens)
    def set_tokens(self, s: Any, cut: int, ids: list[int]) -> None:
        line = self.lines[s]
        if line and min(line) < 0:
            return
        wanted = (*line[: max(0, len(line) - cut)], *ids)
        kept = s.set_tokens(wanted)
        pairs = enumerate(zip(line, wanted, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(line), len(wanted)))
        assert kept.kept <= common and kept.kept + kept.replayed + kept.computed >= len(wanted) - kept.kept
        self.note(s, wanted)

    @rule(s=sessions)
    def every_reachable_point_is(self, s: Any) -> None:
        points = [p[0] for p in s.reachable()]
        assert points == sorted(points) and points[0] == 0 and points[-1] == len(self.lines[s])

    # ---- snapshots ----

    @rule(target=snapshots, s=sessions)
    def snapshot(self, s: Any) -> Any:
        return s.snapshot(), self.lines[s]

    @rule(s=sessions, kept=snapshots)
    def restore(self, s: Any, kept: Any) -> None:
        s.restore(kept[0])
        self.note(s, kept[1])

    @rule(target=files, s=sessions)
    def save(self, s: Any) -> Any:
        self.count += 1
        path = self.place / f"{self.count}.k3s"
        s.save(path)
        return path, self.lines[s]

    @rule(target=sessions, kept=files)
    @precondition(lambda self: len(self.lines) < 8)
    def load(self, kept: Any) -> Any:
        return self.note(k3.Session.load(self.model, kept[0]), kept[1])

    @rule(s=sessions)
    def cancel_without_a_pass(self, s: Any) -> None:
        assert s.cancel() is False

    # ---- what always holds ----

    @invariant()
    def the_session_that_changed_is_what_its_tokens_say(self) -> None:
        s = getattr(self, "changed", None)
        if s is None or s not in self.lines:
            return
        line = self.lines[s]
        assert s.position == len(line)
        assert s.tokens.tolist() == [max(t, -1) for t in line]
        if not line:
            assert s.logits is None
            return
        row, timeline = self.truth.at(line)
        assert np.array_equal(s.logits, row)
        for found, expected in zip(s.layers, timeline.layers, strict=True):
            for name, array in expected.export().items():
                assert np.array_equal(found.array(name), array), (name, found.layer)


def mark_position(mark: Any, s: Any) -> None:
    """Use of a mark whose session is closed."""
    s.rewind(mark)


@pytest.mark.parametrize("page_rows", [3, 64])
def test_any_order_of_everything(tmp_path: Path, page_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = synth(tmp_path / "model", "micro")
    monkeypatch.setattr(k3.Session, "_page_rows", page_rows)
    machine = type("Machine", (Sessions,), {"folder": folder})
    count = 400 if FULL else 30
    run = settings(max_examples=count, stateful_step_count=60, deadline=None)

    run_state_machine_as_test(machine, settings=run)
