# SPDX-License-Identifier: MIT
"""Where the time of a session's passes goes: by component, and op by op."""

from __future__ import annotations

from typing import Any, NamedTuple

from k3session._core.op_clock import COMPONENTS, OpClock

__all__ = ["COMPONENTS", "OpTime", "Times"]


class OpTime(NamedTuple):
    """One op at one place of the graph, over all passes that were timed.

    Attributes
    ----------
    component
        The part of the model: one of "attn_res" (with embedding, norms before a sub-layer and sums after it), "kda",
        "mla", "dense" (the dense MLP and the shared experts), "experts" (router, latent projections and routed
        experts) and "lm_head".
    op
        Its name in cuda/ops.h.
    matrix
        The checkpoint's name of the first tensor that it reads, within its layer; "" where it reads none.
    layer
        From 0; -1 where it belongs to none.
    calls, rows
        How often it was called, and for how many rows together.
    seconds
        What the calls took.
    weight_bytes
        Bytes of matrices, each counted once a call.
    value_bytes
        Bytes of state, latent rows and large activations that are read or written.
    multiplications
        Each with an addition.
    """

    component: str
    op: str
    matrix: str
    layer: int
    calls: int
    rows: int
    seconds: float
    weight_bytes: int
    value_bytes: int
    multiplications: int


class Times:
    """The times of a session's passes; made by `Session.timed`.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open(device="cpu") as model, model.session() as s:
    ...     with s.timed() as times:
    ...         _ = s.prefill([82, 79, 77])
    ...         _ = s.step(69)
    >>> times.passes, sorted(times.seconds)
    (2, ['attn_res', 'dense', 'experts', 'kda', 'lm_head', 'mla'])
    """

    def __init__(self, scratch: Any) -> None:
        self._clock: OpClock | None = OpClock(scratch)
        self._ops: tuple[OpTime, ...] = ()
        self._expert_reads = 0

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return f"<Times of {self.passes} passes: {parts}>"

    @property
    def ops(self) -> tuple[OpTime, ...]:
        """One `OpTime` for each op at each place, in the order of the graph."""
        return self._ops if self._clock is None else tuple(OpTime(*row) for row in self._clock.rows())

    @property
    def seconds(self) -> dict[str, float]:
        """Component -> seconds spent in its ops."""
        found = dict.fromkeys(COMPONENTS, 0.0)
        for op in self.ops:
            found[op.component] += op.seconds
        return found

    @property
    def passes(self) -> int:
        """Passes that were timed, those that came to no end included."""
        return sum(op.calls for op in self.ops if op.op == "embed")

    @property
    def expert_reads(self) -> int:
        """Experts that were read: in each MoE layer of each pass the different ones that its rows have chosen."""
        return self._expert_reads if self._clock is None else self._clock.expert_reads

    def _start(self) -> None:
        if self._clock is not None:
            self._clock.attach()

    def _stop(self) -> None:
        """Put the op table back, and keep the numbers without it."""
        if self._clock is not None:
            self._clock.detach()
            self._ops, self._expert_reads = self.ops, self._clock.expert_reads
            self._clock = None
