# SPDX-License-Identifier: MIT
"""A stage: some layers of a model, and what passes between it and the stages before and behind.

A pass goes through the stages in order.  Each one leaves it uncommitted, so that it counts on all of them or on none:
when the last one is through, whoever began the pass tells every stage to commit it, or to abort it.
`k3session.pipeline` does that over several processes.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from k3session.errors import ClosedError, ConfigError, K3Error
from k3session.session.core import LATENTS

if TYPE_CHECKING:
    from k3session.model import Model

__all__ = ["Boundary", "Segment", "Stage"]

_numbers = itertools.count(1)
_WANTED = ("none", "last", "every")


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one session in a pass: its name, the position of the first one, and how many."""

    session: Hashable
    position: int
    rows: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """A pass where it crosses from one stage to the next; made by `begin`, then by each `Stage.forward`.

    Attributes
    ----------
    number
        Which pass it is.
    segments
        The sessions that take part, each once, their rows one after the other.
    tokens
        int32[R], the ids of all rows; -1 where embeddings were given.
    wanted
        Whose logits the last stage gives: "none", "last" for the last row of each segment, or "every" row.
    keep
        Whether the pass may be committed in part: `Stage.accept`.
    embeddings
        float32[R, hidden] on the way to the first stage, where rows are given as embeddings, else None.
    handed
        float32[1 + banked, R, hidden]: the running sum, then the rows of the bank, one for each block of layers that
        has begun.  None before the first stage and after the last one.
    bad
        For each segment the name of the first sub-layer that gave a value that is not finite, or None.
    logits
        float32[wanted rows, vocab] after the last stage, else None.
    """

    number: int
    segments: tuple[Segment, ...]
    tokens: npt.NDArray[np.int32] = field(repr=False)
    wanted: str = "last"
    keep: bool = False
    embeddings: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    handed: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    bad: tuple[str | None, ...] = ()
    logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)

    @classmethod
    def begin(
        cls,
        segments: Iterable[Segment],
        tokens: Sequence[int] | npt.NDArray[Any],
        *,
        wanted: str = "last",
        keep: bool = False,
        embeddings: npt.NDArray[np.float32] | None = None,
    ) -> Boundary:
        """Return what the first stage takes.

        Raises
        ------
        ConfigError
            The rows of the segments are not those of the tokens, a session is there twice, or `wanted` is unknown.
        """
        parts = tuple(segments)
        ids = np.ascontiguousarray(tokens, np.int32)
        if wanted not in _WANTED:
            raise ConfigError(f"wanted is {wanted!r}; expected one of {', '.join(map(repr, _WANTED))}")
        if not parts or ids.ndim != 1 or sum(s.rows for s in parts) != ids.size:
            raise ConfigError(
                f"the segments have {sum(s.rows for s in parts)} rows and there are tokens of shape {ids.shape}; "
                "expected at least one segment, and a token for each row"
            )
        if len({s.session for s in parts}) != len(parts):
            raise ConfigError("a session is in the pass twice; expected each one once, with all its rows")
        if keep and len(parts) != 1:
            raise ConfigError(f"a pass that is committed in part has one session; found {len(parts)} of them")
        return cls(next(_numbers), parts, ids, wanted, keep, embeddings, None, (None,) * len(parts), None)

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return int(self.tokens.size)

    @property
    def running_sum(self) -> npt.NDArray[np.float32] | None:
        """float32[R, hidden], between two stages."""
        return None if self.handed is None else self.handed[0]

    @property
    def bank(self) -> npt.NDArray[np.float32] | None:
        """float32[banked, R, hidden], between two stages."""
        return None if self.handed is None else self.handed[1:]


@dataclass(slots=True)
class _Held:
    """A pass that is waiting for its commit."""

    scratch: Any
    sessions: frozenset[Hashable]
    keep: bool


class Stage:
    """Some layers of a model with the state that sessions have in them.

    A stage has one user at a time; only `cancel` may come from another thread.

    Parameters
    ----------
    model
        The model, opened with ``layers=`` or whole; it stays open at least as long.

    Examples
    --------
    Two stages in one process:

    >>> import k3session as k3
    >>> with k3.Model.open(layers=(0, 3)) as a, k3.Model.open(layers=(3, 8)) as b:
    ...     stages = [k3.Stage(a), k3.Stage(b)]
    ...     for stage in stages:
    ...         stage.session("s")
    ...     at = k3.Boundary.begin([k3.Segment("s", 0, 3)], [82, 79, 77])
    ...     for stage in stages:
    ...         at = stage.forward(at)
    ...     for stage in stages:
    ...         stage.commit(at.number)
    ...     at.logits.shape, [stage.position("s") for stage in stages]
    ((1, 1280), [3, 3])
    """

    def __init__(self, model: Model) -> None:
        model._check_open()
        self._model = model
        self._decoder: Any = model._decoder
        self._timelines: dict[Hashable, Any] = {}
        self._held: dict[int, _Held] = {}
        self._free: list[Any] = []
        self._lock = threading.Lock()
        self._running: tuple[int, Any] | None = None

    @property
    def model(self) -> Model:
        """The model whose layers these are."""
        return self._model

    @property
    def layers(self) -> tuple[int, int]:
        """(first, end), half open."""
        return self._model.layers

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.layers[1] == self._model.config.num_hidden_layers

    # ------------------------------------------------------------------------------------------
    # sessions
    # ------------------------------------------------------------------------------------------

    def session(self, name: Hashable, latent: str = "fp32", page_rows: int = 64) -> None:
        """Begin a session's part at position 0; `latent` is "fp32" or "bf16"."""
        if latent not in LATENTS:
            raise ConfigError(f"latent is {latent!r}; expected 'fp32' or 'bf16'")
        self._add(name, self._decoder.timeline(LATENTS[latent], page_rows))

    def share(self, name: Hashable, new: Hashable) -> None:
        """Begin another session where this one stands; nothing is copied until one of the two goes on."""
        self._add(new, self._timeline(name).share())

    def earlier(self, name: Hashable, new: Hashable, position: int, arrays: list[dict[str, Any]]) -> None:
        """Begin another session at an earlier position of this one, from its KDA states there, layer by layer."""
        self._add(new, self._timeline(name).earlier(position, arrays))

    def load(
        self,
        name: Hashable,
        position: int,
        arrays: list[dict[str, Any]],
        latent: str = "fp32",
        page_rows: int = 64,
    ) -> None:
        """Begin a session at a position, from the arrays of each layer of this stage, as snapshots have them."""
        timeline = self._decoder.timeline(LATENTS[latent], page_rows)
        timeline.replace(position, arrays)
        self._add(name, timeline)

    def drop(self, *names: Hashable) -> None:
        """Let go of sessions, and of passes of theirs that were not committed; those that are not there are none."""
        for name in names:
            self._timelines.pop(name, None)
        for number, held in list(self._held.items()):
            if not held.sessions.isdisjoint(names):
                self.abort(number)

    def position(self, name: Hashable) -> int:
        """Tokens that a session holds in this stage."""
        return int(self._timeline(name).position)

    def states(self, name: Hashable) -> list[Any]:
        """One ``K3CpuFallbackState`` for each layer of this stage."""
        return list(self._timeline(name).layers)

    def array(self, name: Hashable, layer: int, what: str) -> npt.NDArray[Any]:
        """Copy out an array, "conv", "state" or "latent", of a layer."""
        found: npt.NDArray[Any] = self.states(name)[layer - self.layers[0]].array(what)
        return found

    def nbytes(self, name: Hashable) -> int:
        """Bytes of a session's state in this stage."""
        return int(self._timeline(name).nbytes)

    def own_bytes(self, names: Iterable[Hashable]) -> int:
        """Bytes of state in this stage that no session but these holds."""
        return int(self._decoder.own_bytes([self._timeline(name) for name in names]))

    def step_bytes(self) -> dict[str, int]:
        """Bytes that a pass of one row reads in this stage: "trunk", "experts" and "state"."""
        return dict(self._decoder.weights.step_bytes())

    # ------------------------------------------------------------------------------------------
    # passes
    # ------------------------------------------------------------------------------------------

    def forward(self, boundary: Boundary) -> Boundary:
        """Run a pass through the layers of this stage, and return what the next one takes.

        Nothing is committed: the pass waits for `commit`, `accept` or `abort`.  After the last stage `Boundary.logits`
        is there.

        Raises
        ------
        PassCancelled, MemoryError, K3Error
            The stage is as it was, and does not know the pass.
        """
        b = boundary
        timelines = [self._timeline(s.session) for s in b.segments]
        for segment, timeline in zip(b.segments, timelines, strict=True):
            if timeline.position != segment.position:
                raise K3Error(
                    f"session {segment.session!r} stands at {timeline.position} in layers {self.layers}, and the pass "
                    f"begins at {segment.position}"
                )
        names = frozenset(s.session for s in b.segments)
        waiting = next((h for h in self._held.values() if h.sessions & names), None)
        if waiting is not None:
            raise K3Error(
                f"sessions {sorted(map(str, waiting.sessions & names))} are in a pass that is not committed yet"
            )
        vocab, hidden = self._model.config.vocab_size, self._model.config.hidden_size
        logits = out = None
        if self.is_last:
            if b.wanted != "none":
                logits = np.empty((b.rows if b.wanted == "every" else len(b.segments), vocab), np.float32)
        else:
            out = np.empty((1 + self._banked(self.layers[1]), b.rows, hidden), np.float32)
        scratch = self._scratch_for(len(b.segments))
        with self._lock:
            scratch.clear_cancel()
            self._running = b.number, scratch
        try:
            bad = self._decoder.forward(
                scratch,
                timelines,
                [s.rows for s in b.segments],
                b.tokens,
                b.embeddings if self.is_first else None,
                logits,
                b.wanted == "every" and logits is not None,
                None,
                b.keep,
                b.handed,
                out,
                True,
            )
        except BaseException:
            self._free.append(scratch)
            raise
        finally:
            with self._lock:
                self._running = None
        self._held[b.number] = _Held(scratch, names, b.keep)
        found = tuple(before or here for before, here in zip(b.bad, bad or (None,) * len(b.bad), strict=True))
        return replace(b, embeddings=None, handed=out, bad=found, logits=logits)

    def commit(self, number: int, chosen: Sequence[bool] | None = None) -> None:
        """Make a pass part of its sessions, or of those that are chosen, in the order of its segments."""
        try:
            self.committing(number, chosen)()
        finally:
            self.abort(number)

    def prepare(self, number: int, rows: int) -> None:
        """Say that of a pass that was kept the first `rows` are to be committed; computes what that takes."""
        self._decoder.prepare(self._waiting(number).scratch, rows)

    def accept(self, number: int, rows: int) -> None:
        """Make the first `rows` tokens of a pass that was kept part of its session: `prepare` and `commit`."""
        self.prepare(number, rows)
        self.commit(number)

    def abort(self, number: int) -> None:
        """Forget a pass; one that the stage does not know is forgotten already."""
        held = self._held.pop(number, None)
        if held is not None:
            self._free.append(held.scratch)

    def cancel(self, number: int) -> None:
        """Ask the pass, if it is running just now, to stop at the next sub-layer; from any thread."""
        with self._lock:
            if self._running is not None and self._running[0] == number:
                self._running[1].cancel()

    def committing(self, number: int, chosen: Sequence[bool] | None = None) -> Callable[[], None]:
        """The commit of a pass as one compiled call, for a caller who has something else to do in the same instant.

        `abort` then takes away what is left of the pass.
        """
        held = self._waiting(number)
        if held.keep:
            return functools.partial(self._decoder.commit_kept, held.scratch)
        every = [True] * len(held.sessions) if chosen is None else [bool(c) for c in chosen]
        return functools.partial(self._decoder.commit, held.scratch, every)

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _banked(self, layer: int) -> int:
        """Rows of the bank in front of a layer."""
        return -(-layer // self._model.config.attn_res_block_size)

    def _add(self, name: Hashable, timeline: Any) -> None:
        if name in self._timelines:
            raise ConfigError(f"there is a session {name!r} already; expected a new name")
        self._timelines[name] = timeline

    def _timeline(self, name: Hashable) -> Any:
        if name not in self._timelines:
            raise ClosedError(
                f"there is no session {name!r} in layers {self.layers}; begin it with session()"
            )
        return self._timelines[name]

    def _waiting(self, number: int) -> _Held:
        if number not in self._held:
            raise K3Error(f"pass {number} is not waiting in layers {self.layers}; expected one that was run")
        return self._held[number]

    def _scratch_for(self, segments: int) -> Any:
        """Scratch that no pass waits in: of one segment, or with room for at least so many."""
        for i, scratch in enumerate(self._free):
            room = scratch.segments_room
            if room == 1 if segments == 1 else room >= segments:
                return self._free.pop(i)
        rooms = 1 if segments == 1 else max(2, 1 << (segments - 1).bit_length())
        return self._decoder.scratch(self._model.chunk_rows, rooms)
