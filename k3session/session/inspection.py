# SPDX-License-Identifier: MIT
"""Looking inside: probabilities, scores, inner values, and counts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3session.errors import InvalidTokenError, K3Error, NonFiniteError, PassCancelled, SessionBusyError
from k3session.inputs import prompt_rows, token_id
from k3session.memory import CHUNK_ROWS
from k3session.progress import Progress, ProgressArgument
from k3session.score import Score, ScoreSheet, check_top, logprobs, most_probable
from k3session.session.drafts import Drafts
from k3session.stats import Stats, collect
from k3session.times import Times
from k3session.trace import Trace, wanted_layers, wanted_names

__all__ = ["Inspection"]

#: Rows of a pass whose logits are all wanted: few, so that they take little memory, many enough to share the weights.
SCORE_ROWS = min(32, CHUNK_ROWS)


class Inspection(Drafts):
    """Probabilities, traces and statistics.  See `k3session.Session`."""

    # ------------------------------------------------------------------------------------------
    # probabilities
    # ------------------------------------------------------------------------------------------

    def logprobs(self, tokens: Iterable[int] | None = None, *, top: int = 5) -> tuple[tuple[int, float], ...]:
        """Log-probabilities of the next token, as (id, logprob) pairs.

        Parameters
        ----------
        tokens
            The ids that are asked for; their order is kept.
        top
            Where none are given: how many, the most probable first, among equals the lowest id first.

        Raises
        ------
        InvalidTokenError
            An id outside the vocabulary, or the session is empty, so that nothing says what comes next.
        ConfigError, SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     logits = s.prefill([82, 79, 77])
        ...     s.logprobs(top=1) == s.logprobs([int(logits.argmax())])
        True
        """
        with self._owner:
            self._begin()
            row = self._logits()
            if row is None:
                raise InvalidTokenError(
                    "the session is empty, and nothing says what comes next: call prefill() or step() first"
                )
            if tokens is None:
                ids = most_probable(row, check_top(top, self._vocab)).tolist()
            else:
                ids = [token_id(t, self._vocab) for t in tokens]
            return tuple(zip(ids, logprobs(row, np.array(ids, np.int32)).tolist(), strict=True))

    def score(self, tokens: Sequence[int] | npt.NDArray[Any], *, top: int = 0) -> Score:
        """Say how probable a text is that would follow.  The session stays as it is.

        Passes of up to 32 rows run beside the session, over a state that shares what it has; the memory is that of
        32 rows of logits, however long the text.

        Parameters
        ----------
        tokens
            Its ids, [n].
        top
            How many of the most probable tokens are kept for each place.

        Returns
        -------
        Score
            ``logprobs`` float64[n], entry i for token i, given the session's tokens and those before it in the text.
            In an empty session the first entry is NaN: nothing says how a text begins.

        Raises
        ------
        InvalidTokenError, CapacityError, PassCancelled, NonFiniteError, ConfigError, SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     _ = s.prefill([82, 79, 77])
        ...     score = s.score([69, 79], top=3)
        ...     score.logprobs.shape, score.top_tokens.shape, s.position
        ((2,), (2, 3), 3)
        """
        with self._owner:
            try:
                self._begin(cancellable=True)
                ids, sheet = self._sheet(tokens, top)
                # The last token is only scored: nothing asks what would come after it.
                timeline, last = self._timeline.share(), ids.size - 1
                buffer = np.empty((min(SCORE_ROWS, last), self._vocab), np.float32)
                for i in range(0, last, SCORE_ROWS):
                    part = ids[i : min(i + SCORE_ROWS, last)]
                    rows = buffer[: part.size]
                    self._pass_beside(timeline, part, rows)
                    for j, row in enumerate(rows, i + 1):
                        sheet.row(j, row)
                return sheet.result()
            finally:
                self._active = False

    def prefill_scored(
        self,
        prompt: Sequence[int] | npt.NDArray[Any],
        *,
        top: int = 0,
        progress: ProgressArgument = False,
    ) -> Score:
        """Take in a prompt, as `prefill` does, and say how probable each of its tokens was.

        Parameters
        ----------
        prompt
            Token ids, [n].
        top
            How many of the most probable tokens are kept for each place.
        progress
            As in `prefill`.

        Returns
        -------
        Score
            ``logprobs`` float64[n], entry i for token i, as `score` gives them; `logits` has what follows.

        Raises
        ------
        PassCancelled, KeyboardInterrupt
            The session stands at the end of the last finished pass of up to 32 rows and can go on.
        InvalidTokenError, CapacityError, NonFiniteError, ConfigError, SessionBusyError, ClosedError
        """
        report = Progress(progress)
        with self._owner:
            try:
                self._begin(cancellable=True)
                ids, sheet = self._sheet(prompt, top)
                n, start = ids.size, self._timeline.position
                if start + n > self._ids.size:
                    self._grow_ids(start + n)
                self._ids[start : start + n] = ids
                buffer = np.empty((min(SCORE_ROWS, n), self._vocab), np.float32)
                for i in range(0, n, SCORE_ROWS):
                    part = ids[i : i + SCORE_ROWS]
                    rows = buffer[: part.size]
                    self._forward(part, None, rows)
                    for j, row in enumerate(rows[: n - 1 - i], i + 1):
                        sheet.row(j, row)
                    report("prefill", i + part.size, n)
                if self._policy.prefill:
                    self._keep_point("prefill")
                return sheet.result()
            finally:
                self._active = False
                report.close()

    # ------------------------------------------------------------------------------------------
    # inner values
    # ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def trace(
        self, layers: int | Iterable[int] | None = None, what: str | Iterable[str] | None = None
    ) -> Iterator[Trace]:
        """Collect the inner values of the session's passes inside a ``with`` block.

        A pass gives the same bits, traced or not.  Recorded are the passes of `step`, `prefill`, `prefill_scored`,
        `generate`, `score` and `verify`, those that `rewind` and `set_tokens` run again, one row for each token, and of
        the passes of `Model.step` and `Model.forward` the rows that are this session's.

        Parameters
        ----------
        layers
            The layers to keep, from 0; None keeps all.
        what
            Names as in docs/architecture.md, such as "attn_in", "route_ids" or "kda_decay"; None keeps all but two
            that cost extra: "logits", the logits of every row, and "state_norm", the norm of each head's recurrent
            matrix after the pass, NaN for a draft, which is committed later.  Of a pass of several rows only the last
            one has "final_mix" and "final_normed", unless "logits" is among the names.

        Yields
        ------
        Trace
            ``trace[name]`` is float32[rows, layers, width]; all of it stays in memory: all names of one row of the
            released model take some 60 MB.  A long prompt is better traced with few names, or few layers.

        Raises
        ------
        ConfigError, SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     with s.trace(layers=[0, 7], what="attn_out") as trace:
        ...         _ = s.prefill([82, 79, 77])
        ...         _ = s.step(69)
        >>> len(trace), trace["attn_out"].shape, trace.positions.tolist()
        (2, (4, 2, 128), [0, 1, 2, 3])
        """
        names = wanted_names(what)
        depth = self._model.config.num_hidden_layers
        chosen = wanted_layers(layers, depth)
        with self._owner:
            self._begin()
            if self._trace is not None:
                raise K3Error(f"{self.name} is being traced already; leave that with block first")
            trace = Trace(names, chosen, depth, self._whence())
            self._trace = trace
        try:
            yield trace
        finally:
            self._trace = None

    # ------------------------------------------------------------------------------------------
    # counts
    # ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What the session has done and holds, in numbers; see `k3session.Stats`."""
        self._check_open()
        return collect(self._model, self._counts, [self])  # type: ignore[list-item]

    @contextlib.contextmanager
    def timed(self) -> Iterator[Times]:
        """Time the ops of the session's passes inside a ``with`` block, on the CPU.

        A pass gives the same bits, timed or not.  A clock reads the time twice for each op, some 100 ns, which a small
        model notices and a large one does not; outside of the block it costs nothing.  Timed are all passes of this
        session alone; those of `Model.step` and `Model.forward` belong to several.

        Yields
        ------
        Times
            Seconds by component, and op by op with bytes and operations; `stats` adds them up afterwards.

        Raises
        ------
        K3Error
            It is being timed already, or a part of the model runs on a GPU.
        SessionBusyError, ClosedError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open(device="cpu") as model, model.session() as s:
        ...     with s.timed() as times:
        ...         _ = s.prefill([82, 79, 77])
        ...     times.expert_reads == s.stats.expert_reads, set(s.stats.component_seconds) == set(times.seconds)
        (True, True)
        """
        with self._owner:
            self._begin()
            if self._times is not None:
                raise K3Error(f"{self.name} is being timed already; leave that with block first")
            times = Times(self._scratch)
            self._times = times
            times._start()
        try:
            yield times
        finally:
            self._stop_timing(times)

    def _stop_timing(self, times: Times) -> None:
        """Take the clock away between two passes: the one that another thread has in flight goes on with its table."""
        while True:
            try:
                with self._owner:
                    times._stop()
                    self._times = None
                    self._counts.timed(times.seconds, times.expert_reads)
                    return
            except SessionBusyError:
                time.sleep(0.001)

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _sheet(self, tokens: Any, top: Any) -> tuple[npt.NDArray[np.int32], ScoreSheet]:
        """The ids of a text, checked, and its score, which has what the session's logits say of the first one."""
        ids, embeddings = prompt_rows(tokens, self._vocab, self._model.config.hidden_size)
        if embeddings is not None:
            raise InvalidTokenError("embeddings have no probability: expected token ids, as integers [n]")
        top = check_top(top, self._vocab)
        if self._timeline.position + ids.size > self._capacity:
            raise self._full(ids.size)
        ids = ids.copy()
        sheet = ScoreSheet(ids, top)
        row = self._logits()
        if row is not None:
            sheet.row(0, row)
        return ids, sheet

    def _pass_beside(
        self, timeline: Any, ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]
    ) -> None:
        """A pass over a timeline that shares the session's state, with the logits of every row."""
        at, trace = timeline.position, self._trace
        taps = None if trace is None else trace.taps(self._decoder.weights, ids.size)
        began = time.perf_counter()
        try:
            bad = self._pass([timeline], [ids.size], ids, None, logits, True, taps)
        except PassCancelled:
            self._scratch.clear_cancel()
            position = self._timeline.position
            raise PassCancelled(
                f"cancelled; {self.name} stands at position {position} and can go on from there", position
            ) from None
        if trace is not None:
            trace.took(at, ids, taps, logits, timeline, None if bad is None else str(bad[0]))
        if bad is not None:
            raise NonFiniteError(
                f"{bad[0]} gave a value that is not finite, in the pass that began at position {at}, beside the "
                f"session; {self.name} is as it was",
                str(bad[0]),
            )
        self._counts.passed(ids.size, time.perf_counter() - began, aside=True)

    def _whence(self) -> dict[str, Any]:
        """What a trace says about where its values came from."""
        facts = self._facts(None, False)
        kept = ("k3session", "build", "isa", "device", "num_hidden_layers", "latent")
        return {"fingerprint": facts["fingerprint"]["digest"], **{name: facts[name] for name in kept}}
