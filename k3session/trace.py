# SPDX-License-Identifier: MIT
"""Traces: the inner values of passes, by the names of docs/architecture.md, in memory and as a file.

`k3session.Session.trace` makes one, and `k3session.compare` holds two against each other.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import save_file

from k3session._core.decoder import SITES, Taps
from k3session.errors import ConfigError, K3Error
from k3session.safetensors_io import read_header

__all__ = ["ORDER", "Trace", "TracedPass", "TracedTogether"]

#: Every name that a trace can have, in the order in which a layer computes them: the embedding first, then what
#: each layer has, then what comes after the last layer.
ORDER = (
    "embed",
    "attn_weights", "attn_in", "attn_x",
    "kda_q_conv", "kda_k_conv", "kda_v_conv", "kda_decay", "kda_beta", "state_norm", "kda_o", "kda_on",
    "mla_q", "mla_kva", "mla_gated",
    "attn_out",
    "ffn_weights", "ffn_in", "ffn_x",
    "route_ids", "route_wts", "moe_latent_in", "moe_agg", "moe_routed", "moe_shared",
    "ffn_out", "layer_out",
    "final_mix", "final_normed", "logits",
)  # fmt: skip
#: What belongs to no layer.
BEFORE, AFTER = ("embed",), ("final_mix", "final_normed", "logits")
#: What costs extra, and is there only when it is named.
EXTRA = ("logits", "state_norm")

_FORMAT, _VERSION = "k3session-trace", "1"


@dataclass(frozen=True, slots=True)
class TracedPass:
    """What was collected in one pass.

    Attributes
    ----------
    position
        The position of its first row.
    tokens
        int32[rows], -1 where embeddings were given.
    arrays
        Name -> float32[rows, layers, width] (int32 for "route_ids").  "embed", "final_mix", "final_normed" and
        "logits" have one layer; "state_norm" is [1, layers, heads], after the pass.
    failure
        The sub-layer that was not finite, for a pass that was therefore not committed; else None.
    """

    position: int
    tokens: npt.NDArray[np.int32]
    arrays: dict[str, npt.NDArray[Any]]
    failure: str | None = None


class Trace:
    """Inner values of passes; made by `Session.trace` or `Trace.load`.

    ``trace[name]`` is the array of all passes, one after the other, float32[rows, layers, width].  Values that a layer
    or a row does not have are NaN, -1 in "route_ids".

    Attributes
    ----------
    names
        What is collected, in the order of the graph.
    layers
        The layers that the middle axis of an array stands for, from 0.
    passes
        One `TracedPass` per pass.
    facts
        What the values came from: the model's fingerprint, device, instruction set, build.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     with s.trace(what=["route_ids", "kda_decay"]) as trace:
    ...         _ = s.prefill([82, 79, 77])
    >>> trace["kda_decay"].shape, trace.at("kda_decay", 0).shape
    ((3, 8, 128), (3, 128))
    """

    def __init__(
        self, names: Iterable[str], layers: Iterable[int], depth: int, facts: Mapping[str, Any]
    ) -> None:
        self.names: tuple[str, ...] = tuple(sorted(names, key=ORDER.index))
        self.layers: tuple[int, ...] = tuple(layers)
        self.passes: list[TracedPass] = []
        self.facts: dict[str, Any] = dict(facts)
        self._taken = [n for n in self.names if n in SITES]
        self._some = None if self.layers == tuple(range(depth)) else list(self.layers)

    # ------------------------------------------------------------------------------------------
    # what is in it
    # ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of passes."""
        return len(self.passes)

    def __iter__(self) -> Iterator[TracedPass]:
        return iter(self.passes)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.passes)} passes, {self.tokens.size} rows: {', '.join(self.names)}>"

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The id of each row, int32[rows]; -1 where embeddings were given."""
        return np.concatenate([p.tokens for p in self.passes] or [np.empty(0, np.int32)])

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row, int64[rows]."""
        parts = [p.position + np.arange(p.tokens.size) for p in self.passes]
        return np.concatenate(parts or [np.empty(0, np.int64)])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for p in self.passes for a in p.arrays.values())

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """All rows of a value, [rows, layers, width]; of "state_norm" one row per pass."""
        if name not in self.names:
            raise KeyError(f"the trace has no {name!r}; it has {', '.join(self.names)}")
        if not self.passes:
            raise KeyError("the trace is empty: no pass has run in its block")
        return np.concatenate([p.arrays[name] for p in self.passes])

    def at(self, name: str, layer: int) -> npt.NDArray[Any]:
        """All rows of a value of one layer, [rows, width]; of a value that belongs to no layer, whatever `layer` is."""
        array = self[name]
        if name in BEFORE or name in AFTER:
            return array[:, 0]
        if layer not in self.layers:
            raise KeyError(f"the trace has no layer {layer!r}; it has {', '.join(map(str, self.layers))}")
        return array[:, self.layers.index(layer)]

    # ------------------------------------------------------------------------------------------
    # as a file
    # ------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the trace as a safetensors file, and return its size in bytes.

        A tensor is named ``NUMBER OF PASS.NAME``; the metadata say the rest.

        Raises
        ------
        K3Error
            The file cannot be written.
        """
        tensors: dict[str, npt.NDArray[Any]] = {}
        for i, p in enumerate(self.passes):
            tensors[f"{i}.tokens"] = p.tokens
            tensors |= {f"{i}.{name}": np.ascontiguousarray(a) for name, a in p.arrays.items()}
        stated = {
            "names": self.names,
            "layers": self.layers,
            "passes": [{"position": p.position, "failure": p.failure} for p in self.passes],
            "facts": self.facts,
        }
        metadata = {"format": _FORMAT, "format_version": _VERSION, "trace": json.dumps(stated)}
        try:
            save_file(tensors, path, metadata)
            return os.stat(path).st_size
        except (OSError, safetensors.SafetensorError) as problem:
            raise K3Error(f"{os.fspath(path)}: the trace could not be written: {problem}") from problem

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote; needs no model.

        Raises
        ------
        K3Error
            The file cannot be read, or is no trace.
        """
        name = os.fspath(path)
        try:
            header = read_header(path, K3Error)
            stated = json.loads(header.metadata.get("trace", "null"))
            if header.metadata.get("format") != _FORMAT or not isinstance(stated, dict):
                raise K3Error(f"{name}: is no trace; expected a file that Trace.save has written")
            if header.metadata.get("format_version") != _VERSION:
                raise K3Error(
                    f"{name}: has trace format {header.metadata.get('format_version')!r}; this k3session reads "
                    f"{_VERSION}"
                )
            with safetensors.safe_open(path, "numpy") as file:
                arrays = {key: file.get_tensor(key) for key in header.tensors}
            trace = cls(stated["names"], map(int, stated["layers"]), -1, stated["facts"])
            for i, p in enumerate(stated["passes"]):
                values = {n: arrays[f"{i}.{n}"] for n in trace.names}
                tokens = arrays[f"{i}.tokens"]
                rows = {n: tokens.size if n != "state_norm" else 1 for n in trace.names}
                depth = {n: 1 if n in BEFORE or n in AFTER else len(trace.layers) for n in trace.names}
                if any(a.ndim != 3 or a.shape[:2] != (rows[n], depth[n]) for n, a in values.items()):
                    raise K3Error(f"{name}: the arrays of pass {i} do not fit its rows and layers")
                trace.passes.append(TracedPass(int(p["position"]), tokens, values, p["failure"]))
            return trace
        except (OSError, safetensors.SafetensorError) as problem:
            raise K3Error(f"{name}: the trace cannot be read: {problem}") from problem
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            if isinstance(problem, K3Error):
                raise
            raise K3Error(f"{name}: what it says about itself cannot be read: {problem!r}") from None

    # ------------------------------------------------------------------------------------------
    # what a session does with it
    # ------------------------------------------------------------------------------------------

    def taps(self, weights: Any, rows: int) -> Taps | None:
        """What collects the values of a pass of that many rows; None where none of the decoder's own are wanted."""
        return Taps(weights, rows, self._taken) if self._taken else None

    def rows_of_logits(self, rows: int, vocab: int) -> npt.NDArray[np.float32] | None:
        """float32[rows, vocab] for the logits of every row of a pass, where they are wanted; else None."""
        return np.empty((rows, vocab), np.float32) if "logits" in self.names else None

    def took(
        self,
        position: int,
        tokens: npt.NDArray[np.int32],
        taps: Taps | _Rows | None,
        every: npt.NDArray[np.float32] | None,
        timeline: Any,
        failure: str | None = None,
        *,
        committed: bool = True,
    ) -> None:
        """Note what a pass has left: in its taps, its logits of every row, and the state of its timeline."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, array in ({} if taps is None else taps.arrays).items():
            if name in AFTER:
                if (
                    every is None and tokens.size > 1
                ):  # the one row that the head has seen is the last of the pass
                    array[-1], array[0] = array[0].copy(), np.nan
            elif name not in BEFORE and self._some is not None:
                array = np.ascontiguousarray(array[:, self._some])
            arrays[name] = array
        if "logits" in self.names and every is not None:
            arrays["logits"] = every.reshape(tokens.size, 1, -1).copy()
        if "state_norm" in self.names:
            arrays["state_norm"] = _state_norms(timeline, self.layers)
            if not committed:  # what the timeline holds is not what the pass made of it
                arrays["state_norm"].fill(np.nan)
        self.passes.append(TracedPass(position, tokens.copy(), {n: arrays[n] for n in self.names}, failure))


@dataclass(frozen=True, slots=True)
class _Rows:
    """One session's part of what the taps of a pass have taken."""

    arrays: dict[str, npt.NDArray[Any]]


class TracedTogether:
    """What the traces of the sessions in a batch take of one pass, which has one set of taps for all of its rows.

    Attributes
    ----------
    taps
        What the pass fills; None where none of the decoder's own values are wanted.
    every
        float32[rows, vocab] for the logits of every row, where somebody wants them; else None.
    """

    def __init__(
        self, weights: Any, traces: dict[int, Trace], ends: npt.NDArray[np.int64], vocab: int
    ) -> None:
        self._traces, self._ends = traces, ends
        rows = int(ends[-1])
        names = {n for t in traces.values() for n in t._taken}
        self.taps = Taps(weights, rows, names) if names else None
        self.every: npt.NDArray[np.float32] | None = None
        if any("logits" in t.names for t in traces.values()):
            self.every = np.empty((rows, vocab), np.float32)

    def took(
        self, number: int, position: int, tokens: npt.NDArray[np.int32], timeline: Any, failure: str | None
    ) -> None:
        """Give the trace of one session, if it has one, the session's rows of the pass."""
        trace = self._traces.get(number)
        if trace is None:
            return
        rows = slice(int(self._ends[number]) - tokens.size, int(self._ends[number]))
        part = _Rows({})
        taken = {} if self.taps is None else self.taps.arrays
        for name in trace._taken:
            array = taken[name]
            if name in AFTER and self.every is None:  # the head has seen one row of each session
                part.arrays[name] = np.full((tokens.size, *array.shape[1:]), np.nan, np.float32)
                part.arrays[name][0] = array[number]
            else:
                part.arrays[name] = array[rows].copy()
        trace.took(
            position, tokens, part, None if self.every is None else self.every[rows], timeline, failure
        )


def _state_norms(timeline: Any, layers: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The Frobenius norm of each head's recurrent matrix, [1, layers, heads]; NaN where a layer has none."""
    every = timeline.layers
    heads = next((layer.shapes(0)["state"][0][0] for layer in every if layer.is_kda), 1)
    norms = np.full((1, len(layers), heads), np.nan, np.float32)
    for j, i in enumerate(layers):
        if every[i].is_kda:
            state = every[i].array("state")
            norms[0, j] = np.sqrt(np.square(state, dtype=np.float64).sum((1, 2)))
    return norms


def wanted_names(what: Any) -> tuple[str, ...]:
    """Check ``what=``: names of values, one or several; None is all that cost nothing extra."""
    if what is None:
        return tuple(n for n in ORDER if n not in EXTRA)
    names = (what,) if isinstance(what, str) else tuple(what) if isinstance(what, Iterable) else ()
    unknown = [n for n in names if n not in ORDER]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or repr(what)
        raise ConfigError(f"what is {found}; expected some of {', '.join(ORDER)}")
    return names


def wanted_layers(layers: Any, depth: int) -> tuple[int, ...]:
    """Check ``layers=``: numbers of layers, one or several; None is all of them."""
    if layers is None:
        return tuple(range(depth))
    try:
        numbers = [operator.index(i) for i in (layers if isinstance(layers, Iterable) else (layers,))]
    except TypeError:
        numbers = []
    if not numbers or not all(0 <= i < depth for i in numbers):
        raise ConfigError(f"layers is {layers!r}; expected numbers of layers from 0 to {depth - 1}")
    return tuple(sorted(set(numbers)))
