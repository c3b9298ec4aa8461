# SPDX-License-Identifier: MIT
"""What a session has done and what it holds, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3session.config import K3Config

if TYPE_CHECKING:
    from k3session.model import Model
    from k3session.session import Session

__all__ = ["Counts", "LastSave", "Stats", "collect"]


class Counts:
    """Passes by their number of rows; one owner writes, anybody reads."""

    __slots__ = (
        "aside",
        "components",
        "expert_reads",
        "passes",
        "prefilled",
        "seconds",
        "stepped",
        "streamed",
    )

    def __init__(self) -> None:
        self.stepped = self.prefilled = self.aside = 0
        self.seconds = 0.0
        self.passes: Counter[int] = Counter()
        self.components: dict[str, float] = {}  # seconds of what was timed
        self.expert_reads = 0
        # Bytes read from files, ns that passes waited for them, experts used, those not there, bytes to a GPU.
        self.streamed = (0, 0, 0, 0, 0)

    def passed(self, rows: int, seconds: float, *, aside: bool = False) -> None:
        """Count a pass; ``aside`` is one that left the session where it was."""
        self.passes[rows] += 1
        self.seconds += seconds
        if aside:
            self.aside += rows
        elif rows == 1:
            self.stepped += 1
        else:
            self.prefilled += rows

    def add(self, other: Counts) -> None:
        """Add what another one has counted."""
        self.stepped += other.stepped
        self.prefilled += other.prefilled
        self.aside += other.aside
        self.seconds += other.seconds
        self.passes.update(other.passes.copy())
        self.timed(other.components.copy(), other.expert_reads)
        self.add_streamed(other.streamed)

    def timed(self, components: Mapping[str, float], expert_reads: int) -> None:
        """Count what a clock has found."""
        names = {**self.components, **components}
        self.components = {n: self.components.get(n, 0.0) + components.get(n, 0.0) for n in names}
        self.expert_reads += expert_reads

    def add_streamed(self, counts: tuple[int, int, int, int, int] | None) -> None:
        """Add what a scratch has counted."""
        if counts is not None:
            a, b, c, d, e = self.streamed
            self.streamed = (a + counts[0], b + counts[1], c + counts[2], d + counts[3], e + counts[4])

    def bytes_read(self, config: K3Config, step_bytes: Mapping[str, int]) -> int:
        """Bytes of weights that the passes have read; of the experts of a pass of many rows, the most it can be.

        Each row reads its own experts; where rows of a pass choose the same ones they are read once, which is not
        counted, but no pass reads more than all of them.
        """
        each = max(1, config.num_experts_per_token)
        all_experts = max(1.0, config.num_experts / each)
        passes = self.passes.copy()
        experts = sum(n * min(float(rows), all_experts) for rows, n in passes.items())
        return passes.total() * step_bytes["trunk"] + int(experts * step_bytes["experts"])


@dataclass(frozen=True, slots=True)
class LastSave:
    """The last save that ended well: the file, the position that it holds, and its size in bytes."""

    path: str
    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a session, or all sessions of a model together, have done and hold.

    Attributes
    ----------
    stepped
        Tokens taken in by passes of one row.
    prefilled
        Tokens taken in by passes of several rows.
    aside
        Rows of passes that left the session where it was, such as those of `Session.score`.
    passes
        Passes that came to their end.
    seconds
        Seconds that they took.
    weight_bytes
        Bytes of weights that they have read.  An upper bound: of a pass of many rows, experts that several rows
        have chosen are counted for each of them.
    state_bytes
        Bytes of state held now; pages that several sessions share are counted for each.
    own_bytes
        Bytes of state held now that would be free if the session were closed.
    latent_bytes
        The part of ``state_bytes`` that grows with the tokens: the pages of the latent cache.
    marks, mark_bytes
        Marks kept in memory, automatic ones and the caller's, and what they count with: automatic ones as `Marks`
        says, the caller's with what nobody else keeps.
    last_save
        The last save that ended well, or None.
    component_seconds
        Seconds by component, of the passes that ran inside `Session.timed`; empty where none did.
    expert_reads
        Experts that these passes have read: in each MoE layer of each pass the different ones that its rows chose.
    disk_bytes, disk_seconds
        Within a memory budget: bytes read from the checkpoint's files for passes, and seconds that passes waited for
        them.  Those of batches count for the model, not for its sessions.  Within a budget of GPU memory, what the page
        cache had is part of both.
    experts_used, experts_missed
        Within a memory budget: experts that passes have used, each once per layer and pass, and how many of them were
        not in memory, or with ``gpu_memory`` not on the GPU, when the router chose them.
    gpu_bytes
        Within a budget of GPU memory: bytes of weights that went to the GPU for passes.
    """

    stepped: int
    prefilled: int
    aside: int
    passes: int
    seconds: float
    weight_bytes: int
    state_bytes: int
    own_bytes: int
    latent_bytes: int
    marks: int
    mark_bytes: int
    last_save: LastSave | None
    component_seconds: dict[str, float]
    expert_reads: int
    disk_bytes: int = 0
    disk_seconds: float = 0.0
    experts_used: int = 0
    experts_missed: int = 0
    gpu_bytes: int = 0

    @property
    def disk_bytes_per_token(self) -> float:
        """Bytes read from files for each row of the passes; 0 before the first one."""
        rows = self.tokens + self.aside
        return self.disk_bytes / rows if rows else 0.0

    @property
    def expert_hit_rate(self) -> float | None:
        """The share of experts that were there when they were chosen; None where none are streamed."""
        return 1 - self.experts_missed / self.experts_used if self.experts_used else None

    @property
    def tokens(self) -> int:
        """Tokens taken in; one that was gone back over and taken in again counts twice."""
        return self.stepped + self.prefilled

    @property
    def tokens_per_second(self) -> float:
        """Rows of all passes per second of these passes; 0 before the first one."""
        return (self.tokens + self.aside) / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The same as a dict that JSON can hold."""
        return asdict(self) | {
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "disk_bytes_per_token": self.disk_bytes_per_token,
            "expert_hit_rate": self.expert_hit_rate,
        }


def collect(model: Model, counts: Counts, sessions: Iterable[Session]) -> Stats:
    """The numbers of these sessions, and of what they have counted."""
    state = own = latent = marks = mark_bytes = 0
    last: LastSave | None = None
    streamed = Counts()
    streamed.add_streamed(counts.streamed)
    for session in sessions:
        timeline = session._timeline
        if timeline is None:  # closed by another thread
            continue
        scratch = session._scratch
        streamed.add_streamed(None if scratch is None else scratch.streamed())
        held = int(timeline.nbytes)
        state += held
        latent += held - session._fixed_bytes
        kept = session._points
        own += session._decoder.own_bytes([timeline, *(point.timeline for point in kept)])
        held_marks = [mark for mark in session._marks if not mark.is_closed]
        marks += len(kept) + len(held_marks)
        mark_bytes += kept.nbytes + sum(mark.nbytes for mark in held_marks)
        job = session._last_saved()
        if job is not None:
            last = LastSave(job.path, job.position, job.nbytes)
    return Stats(
        counts.stepped, counts.prefilled, counts.aside, counts.passes.total(), counts.seconds,
        counts.bytes_read(model.config, model._weights.step_bytes()),
        state, own, latent, marks, mark_bytes, last, dict(counts.components), counts.expert_reads,
        streamed.streamed[0], streamed.streamed[1] / 1e9, *streamed.streamed[2:],
    )  # fmt: skip
