# SPDX-License-Identifier: MIT
"""What a session finds in the place of a decoder, its scratch and its timeline, where the layers are in stages.

The orders go to a `Line`.  A pass is run by all stages and then committed by all of them, or by none; a timeline here
is the name that the stages know a session's state by, and the position, which is the same on all of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3session.config import K3Config
from k3session.errors import K3Error, PassCancelled
from k3session.pipeline.line import Line
from k3session.stage import Boundary, Segment

__all__ = ["ChainDecoder", "ChainLayer", "ChainScratch", "ChainTimeline"]

_LATENTS = ("fp32", "bf16")


class _Name:
    """The name of a session's state on all stages, which let go of it when nobody here has it any more."""

    __slots__ = ("_line", "value")

    def __init__(self, line: Line, value: int) -> None:
        self._line = line
        self.value = value

    def __del__(self) -> None:
        self._line.drop(self.value)


class ChainLayer:
    """One layer of a session, wherever it is: what `K3CpuFallbackState` is in one process."""

    __slots__ = ("_timeline", "is_kda", "layer")

    def __init__(self, timeline: ChainTimeline, layer: int) -> None:
        self._timeline = timeline
        self.layer = layer
        self.is_kda = timeline.weights.config.is_kda(layer)

    @property
    def position(self) -> int:
        """Tokens that this layer has taken in."""
        return self._timeline.position

    def shapes(self, position: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Name -> (shape, dtype) of this layer's arrays for a session of that many tokens."""
        c = self._timeline.weights.config
        if self.is_kda:
            return {
                "conv": ((3, c.short_conv_kernel_size - 1, c.kda_dim), np.dtype(np.float32)),
                "state": ((c.kda_num_heads, c.kda_head_dim, c.kda_head_dim), np.dtype(np.float32)),
            }
        kind = np.uint16 if self._timeline.bf16 else np.float32
        return {"latent": ((position, c.latent_width), np.dtype(kind))}

    def array(self, name: str) -> npt.NDArray[Any]:
        """One of this layer's arrays, "conv", "state" or "latent", fetched from its stage."""
        t = self._timeline
        found: npt.NDArray[Any] = t.weights.line.call_at(
            t.weights.stage_of(self.layer), "array", t.name, self.layer, name
        )
        return found

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Name -> array for all of this layer's arrays."""
        return {name: self.array(name) for name in self.shapes(self.position)}


class ChainTimeline:
    """A session's state on all stages; the parts of `k3session._core.state.Timeline` that sessions use."""

    def __init__(self, decoder: ChainDecoder, name: _Name, position: int, bf16: bool, page_rows: int) -> None:
        self.weights = decoder
        self.bf16 = self.latent_dtype = bf16
        self.page_rows = page_rows
        self.position = position
        self.fills = False
        self.kept: int | None = None  # a pass over it that is kept for `accept`
        self._name = name

    @property
    def name(self) -> int:
        """What the stages call it."""
        return self._name.value

    @property
    def layers(self) -> list[ChainLayer]:
        """All layers, in order."""
        return [ChainLayer(self, i) for i in range(self.weights.config.num_hidden_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of state on all stages."""
        return sum(self.weights.line.call("nbytes", self.name))

    @property
    def own_bytes(self) -> int:
        """Bytes of state that no other timeline shares."""
        return self.weights.own_bytes([self])

    def share(self) -> ChainTimeline:
        """Another timeline that stands at the same point."""
        name = self.weights.new_name()
        self.weights.line.call("share", self.name, name.value)
        return ChainTimeline(self.weights, name, self.position, self.bf16, self.page_rows)

    def become(self, other: ChainTimeline) -> None:
        """Stand where `other` stands, sharing its state."""
        self.becoming(other)()

    def becoming(self, other: ChainTimeline) -> Callable[[], None]:
        """`become`, of which all has been done but a compiled call."""
        if other.weights is not self.weights or other.bf16 != self.bf16:
            raise ValueError("only timelines of one model, with latent rows of one kind, can share state")
        return self._being(other.share())

    def earlier(self, position: int, arrays: list[dict[str, npt.NDArray[Any]]]) -> ChainTimeline:
        """Another timeline, at an earlier position of this one, with the recurrent states that are given."""
        name, line = self.weights.new_name(), self.weights.line
        line.call_each("earlier", [(self.name, name.value, position, arrays[a:b]) for a, b in line.ranges])
        return ChainTimeline(self.weights, name, position, self.bf16, self.page_rows)

    def replace(self, position: int, arrays: list[dict[str, npt.NDArray[Any]]]) -> None:
        """Set all layers at once; nothing has changed where that fails."""
        self.replacing(position, arrays)()

    def replacing(self, position: int, arrays: list[dict[str, npt.NDArray[Any]]]) -> Callable[[], None]:
        """`replace`, of which all has been done but a compiled call."""
        name, line = self.weights.new_name(), self.weights.line
        latent = _LATENTS[self.bf16]
        line.call_each(
            "load", [(name.value, position, arrays[a:b], latent, self.page_rows) for a, b in line.ranges]
        )
        return self._being(ChainTimeline(self.weights, name, position, self.bf16, self.page_rows))

    def _being(self, new: ChainTimeline) -> Callable[[], None]:
        """Name and position change in one call: Ctrl-C comes before it or after it."""
        return functools.partial(self.__dict__.update, _name=new._name, position=new.position, kept=None)


class ChainScratch:
    """What belongs to passes that come one after the other: whether they are to stop, and which one is kept."""

    def __init__(self, decoder: ChainDecoder, rows: int, segments: int) -> None:
        self.decoder = decoder
        self.rows = rows
        self.segments_room = segments
        self.is_cancelled = False
        self.running: list[int] = []
        self.kept: tuple[int, ChainTimeline, int] | None = None  # a pass, its timeline and its rows

    def cancel(self) -> None:
        """Ask the pass in flight to stop."""
        self.is_cancelled = True
        self.decoder.line.cancel(list(self.running))

    def streamed(self, take: bool = False) -> None:
        """What was read from disk is counted by each stage for itself, and not here."""

    def clear_cancel(self) -> None:
        """Forget an earlier cancel()."""
        self.is_cancelled = False


class ChainDecoder:
    """The graph over several stages; what `k3session._core.decoder.Decoder` is in one process.

    Parameters
    ----------
    line
        The stages.
    config
        The model's.
    micro_rows
        Passes of many sessions are cut into parts of at least so many rows, which follow each other through the
        stages.  Every part reads all weights, so parts of few rows cost more than they bring.
    """

    def __init__(self, line: Line, config: K3Config, micro_rows: int) -> None:
        self.line = line
        self.config = config
        self.micro_rows = micro_rows
        self._numbers = itertools.count(1)

    @property
    def weights(self) -> ChainDecoder:
        """What timelines of one model have in common."""
        return self

    def new_name(self) -> _Name:
        """A name that no stage knows yet."""
        return _Name(self.line, next(self._numbers))

    def stage_of(self, layer: int) -> int:
        """The stage that has a layer."""
        return next(i for i, (first, end) in enumerate(self.line.ranges) if first <= layer < end)

    def step_bytes(self) -> dict[str, int]:
        """Bytes that a decode step reads on all stages together: the trunk, the chosen experts, and the state."""
        found = self.line.call("step_bytes")
        return {key: sum(each[key] for each in found) for key in found[0]}

    def own_bytes(self, timelines: Sequence[ChainTimeline]) -> int:
        """Bytes of state on all stages that no timeline but these holds."""
        return sum(self.line.call("own_bytes", list({t.name for t in timelines})))

    def timeline(self, bf16: bool, page_rows: int) -> ChainTimeline:
        """A new timeline at position 0."""
        name = self.new_name()
        self.line.call("session", name.value, _LATENTS[bf16], page_rows)
        return ChainTimeline(self, name, 0, bf16, page_rows)

    def scratch(self, rows: int, segments: int = 1) -> ChainScratch:
        """What passes of up to ``rows`` rows in up to ``segments`` segments need here."""
        return ChainScratch(self, rows, segments)

    def forward(
        self,
        z: ChainScratch,
        timelines: list[ChainTimeline],
        counts: list[int],
        tokens: npt.NDArray[np.int32],
        embeddings: npt.NDArray[np.float32] | None = None,
        logits: npt.NDArray[np.float32] | None = None,
        every_row: bool = False,
        taps: Any = None,
        keep: bool = False,
    ) -> list[str | None] | None:
        """One pass; see `k3session._core.decoder.Decoder.forward`."""
        if taps is not None:
            raise K3Error("inner values are not traced across stages: open the model in one process for that")
        self._forget_kept(z, timelines)
        wanted = "none" if logits is None else "every" if every_row else "last"
        parts = self._parts(timelines, counts, tokens, embeddings, wanted, keep)
        numbers = [b.number for b, _ in parts]
        done: list[bool] = []
        z.running = numbers
        try:
            for boundary, _ in parts:
                self._check_cancel(z, timelines[0])
                self.line.start(boundary)
            results, first = [], None
            for number in numbers:  # all of them, so that nothing of the pass is under way any more
                try:
                    results.append(self.line.finish(number))
                except (K3Error, MemoryError) as error:
                    first = first or error
            if first is not None:
                raise first
            self._check_cancel(z, timelines[0])
            row = 0
            for result in results:
                if result.logits is not None and logits is not None:
                    logits[row : row + len(result.logits)] = result.logits
                    row += len(result.logits)
            bad = [name for result in results for name in result.bad]
            if keep:
                if bad[0] is None:
                    timelines[0].kept = numbers[0]
                    z.kept = numbers[0], timelines[0], counts[0]
                    done.append(True)
            else:
                self._commit(z, parts, results, done)
            return bad if any(bad) else None
        finally:
            z.running = []
            if not done:
                self.line.abort(numbers)

    def accept(self, z: ChainScratch, rows: int) -> None:
        """Commit the first ``rows`` tokens of the pass that was kept last, on all stages."""
        if z.kept is None or not 0 <= rows <= z.kept[2]:
            raise K3Error(f"no pass is kept of which {rows} rows could be committed")
        number, timeline, _ = z.kept
        with self.line.lock:
            self.line.call("prepare", number, rows)
            after = timeline.position + rows
            position = functools.partial(timeline.__dict__.update, position=after, kept=None)
            forget = functools.partial(z.__dict__.update, kept=None)
            together([*self.line.committing(number, None), position, forget])
            self.line.settled([number])

    def _commit(
        self,
        z: ChainScratch,
        parts: list[tuple[Boundary, list[ChainTimeline]]],
        results: list[Boundary],
        done: list[bool],
    ) -> None:
        """All stages and the positions here, together."""
        with self.line.lock:
            calls: list[Callable[[], Any]] = []
            for (boundary, timelines), result in zip(parts, results, strict=True):
                chosen = [name is None for name in result.bad]
                calls += self.line.committing(boundary.number, chosen)
                for segment, timeline, good in zip(boundary.segments, timelines, chosen, strict=True):
                    if good:
                        at = segment.position + segment.rows
                        calls.append(functools.partial(timeline.__dict__.update, position=at))
            calls.append(functools.partial(done.append, True))
            together(calls)
            self.line.settled([boundary.number for boundary, _ in parts])

    def _parts(
        self,
        timelines: list[ChainTimeline],
        counts: list[int],
        tokens: npt.NDArray[np.int32],
        embeddings: npt.NDArray[np.float32] | None,
        wanted: str,
        keep: bool,
    ) -> list[tuple[Boundary, list[ChainTimeline]]]:
        """The pass in parts that follow each other through the stages, whole sessions each."""
        stages, total = len(self.line.ranges), int(tokens.size)
        most = max(1, min(len(timelines), 2 * stages if stages > 1 else 1, total // self.micro_rows))
        parts: list[tuple[Boundary, list[ChainTimeline]]] = []
        i = row = 0
        while i < len(timelines):
            begin, start, left = i, row, most - len(parts)
            goal = (total - row) / max(1, left)
            while i < len(timelines) and (row == start or row + counts[i] - start <= goal):
                row += counts[i]
                i += 1
            if left <= 1:
                row += sum(counts[i:])
                i = len(timelines)
            chosen = timelines[begin:i]
            segments = [Segment(t.name, t.position, n) for t, n in zip(chosen, counts[begin:i], strict=True)]
            given = None if embeddings is None else np.ascontiguousarray(embeddings[start:row])
            boundary = Boundary.begin(
                segments, tokens[start:row].copy(), wanted=wanted, keep=keep, embeddings=given
            )
            parts.append((boundary, chosen))
        return parts

    def _check_cancel(self, z: ChainScratch, timeline: ChainTimeline) -> None:
        if z.is_cancelled:
            raise PassCancelled("the pass was cancelled", timeline.position)

    def _forget_kept(self, z: ChainScratch, timelines: Sequence[ChainTimeline]) -> None:
        """A pass that was kept goes when the next one comes, in the same scratch or over the same timeline."""
        gone = [t.kept for t in timelines if t.kept is not None]
        if z.kept is not None:
            gone.append(z.kept[0])
            z.kept[1].kept = None
            z.kept = None
        for timeline in timelines:
            timeline.kept = None
        if gone:
            self.line.abort(gone)


def together(calls: Sequence[Callable[[], Any]]) -> None:
    """Make compiled calls in one call, in the midst of which no code in Python runs: Ctrl-C comes before or after."""
    list(map(operator.call, calls))
