# SPDX-License-Identifier: MIT
"""Two models, devices, instruction sets or recorded traces side by side: where they first differ, and by how much.

`compare` runs the same tokens through both and holds their inner values against each other in the order of the
graph, so that the first difference beyond a bound names the layer, the place in it and the token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from k3session import env
from k3session._core import ops
from k3session.checkpoint import Checkpoint
from k3session.errors import ConfigError
from k3session.inputs import prompt_rows
from k3session.model import DEFAULT_MODEL, Model
from k3session.placement import COMPONENTS, Wanted
from k3session.progress import Progress, ProgressArgument
from k3session.session import Session
from k3session.trace import AFTER, BEFORE, EXTRA, ORDER, Trace

__all__ = ["Comparison", "Difference", "Side", "compare", "compare_traces", "record"]

#: What is compared: everything that a row has.
NAMES = tuple(n for n in ORDER if n == "logits" or n not in EXTRA)
#: Rows of one pass: all inner values of a pass lie in memory, of both sides.
ROWS = 16
_Values: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Difference:
    """By how much one value of one layer differs.

    Attributes
    ----------
    site
        Its name, as in docs/architecture.md.
    layer
        The layer, from 0; None for what belongs to none.
    position
        The token where it differs most, or, as the first one beyond a bound, the first such token.
    error
        The largest difference over the largest value there.  For "route_ids", the part of the experts that are other
        ones; infinite where one side is not finite.
    """

    site: str
    layer: int | None
    position: int
    error: float

    def __str__(self) -> str:
        where = self.site if self.layer is None else f"layer {self.layer}, {self.site}"
        what = "of the experts" if self.site == "route_ids" else "of the largest value"
        return f"{where}, at position {self.position}: {self.error:.2e} {what}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison has found.

    Attributes
    ----------
    bound
        What was allowed.
    first
        The first difference beyond the bound in the order of the graph; None where there is none.
    sites
        For each value the layer where it differs most, in the order of the graph.
    tokens, layers
        How many were compared.
    """

    bound: float
    first: Difference | None
    sites: tuple[Difference, ...]
    tokens: int
    layers: int

    @property
    def within(self) -> bool:
        """Whether nothing differs by more than the bound."""
        return self.first is None

    @property
    def largest(self) -> Difference | None:
        """The largest difference of all."""
        return max(self.sites, key=lambda d: d.error, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The same as a dict that JSON can hold; an infinite difference is None."""

        def one(d: Difference | None) -> dict[str, Any] | None:
            if d is None:
                return None
            error = d.error if math.isfinite(d.error) else None
            return {"site": d.site, "layer": d.layer, "position": d.position, "error": error}

        return {
            "within": self.within,
            "bound": self.bound,
            "tokens": self.tokens,
            "layers": self.layers,
            "first": one(self.first),
            "sites": [one(d) for d in self.sites],
        }

    def lines(self) -> list[str]:
        """The same as text."""
        largest = self.largest
        if self.first is not None:
            head = f"first beyond {self.bound:g}: {self.first}"
        elif largest is None or largest.error == 0:
            head = "the same bits everywhere"
        else:
            head = f"nothing beyond {self.bound:g}; the most is {largest}"
        text = [f"{self.tokens} tokens, {self.layers} layers", head]
        text.append(f"{'value':14} {'largest':>9} {'layer':>6} {'position':>9}")
        for d in self.sites:
            layer = "-" if d.layer is None else str(d.layer)
            text.append(f"{d.site:14} {d.error:9.2e} {layer:>6} {d.position:>9}")
        return text


def compare_traces(a: Trace, b: Trace, bound: float = 1e-4) -> Comparison:
    """Compare two traces of the same tokens.

    Values are compared row by row, layer by layer; what only one trace has is left out, and so are the
    rows that the head has seen on one side only.  A difference counts relative
    to the largest value that the two have in that layer, over all rows.

    Parameters
    ----------
    a, b
        Traces of the same tokens and layers, in passes of any length.
    bound
        The largest difference that is allowed.

    Raises
    ------
    ConfigError
        Other tokens, positions or layers, other shapes, or no value in common.

    Examples
    --------
    >>> import k3session as k3
    >>> from k3session.compare import compare_traces
    >>> with k3.Model.open() as model, model.session() as s, model.session() as t:
    ...     with s.trace() as a, t.trace() as b:
    ...         _ = s.prefill([82, 79, 77])
    ...         _ = [t.step(i) for i in (82, 79, 77)]
    >>> compare_traces(a, b, bound=0).within
    True
    """
    tally = _Tally(_checked_bound(bound))
    names = [n for n in a.names if n in b.names and n != "state_norm"]
    if not names:
        raise ConfigError(
            "the traces have no value in common; expected two that were made with the same what="
        )
    if not np.array_equal(a.tokens, b.tokens) or not np.array_equal(a.positions, b.positions):
        raise ConfigError(
            f"the traces are of other tokens: {a.tokens.size} rows and {b.tokens.size} rows; expected the same ids at "
            "the same positions"
        )
    if a.layers != b.layers:
        raise ConfigError(f"the traces have other layers: {_listed(a.layers)} and {_listed(b.layers)}")
    if a.passes:
        tally.add(a.positions, a.layers, {n: a[n] for n in names}, {n: b[n] for n in names})
    return tally.result()


@dataclass
class Side:
    """One side of a comparison: a model, opened as is said, or a recorded trace.

    `read` understands ``FOLDER``, ``FOLDER@OPTION,OPTION...`` and the file of a trace.  Options are ``cpu``, ``cuda``,
    ``cuda:N``, ``isa=NAME``, ``threads=N``, ``latent=fp32|bf16``, ``weights=stored|compact|q8``,
    ``prefill_precision=exact|bf16|bf16x2``, and ``kda=``, ``mla=``, ``dense=``, ``experts=`` with ``cpu`` or ``cuda``.
    Without a folder before the ``@`` it is the model that ships.
    """

    text: str
    folder: Path | None = None
    file: Path | None = None
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Side:
        """Understand what was written; ConfigError where that cannot be."""
        if os.path.isdir(text):
            return cls(text, folder=Path(text))
        if os.path.isfile(text):
            return cls(text, file=Path(text))
        name, at, rest = text.rpartition("@")
        if not at:
            raise ConfigError(f"{text}: is no folder and no file; expected a checkpoint folder or a trace")
        options: dict[str, str] = {}
        for word in rest.split(","):
            key, equals, value = word.partition("=")
            if not equals:
                key, value = "device", word
            if key not in ("device", "isa", "threads", "latent", "weights", "prefill_precision", *COMPONENTS):
                raise ConfigError(
                    f"{text}: {word!r} is no option; expected a device, or isa=, threads=, latent=, "
                    f"weights=, prefill_precision=, {'=, '.join(COMPONENTS)}="
                )
            options[key] = value
        folder = Path(name) if name else DEFAULT_MODEL
        if not folder.is_dir():
            raise ConfigError(f"{text}: {folder} is no folder; expected a checkpoint before the @")
        return cls(text, folder=folder, options=options)

    def open(self, threads: int | None = None) -> Model | Trace:
        """Open the model, or read the trace."""
        if self.file is not None:
            return Trace.load(self.file)
        get = self.options.get
        number = get("threads")
        if number is not None:
            if not number.isdecimal() or not 1 <= int(number) <= 256:
                raise ConfigError(f"{self.text}: threads is {number!r}; expected a number from 1 to 256")
            threads = int(number)
        elif threads is None:
            threads = env.default_threads()
        apart = {component: get(component) for component in COMPONENTS}
        precision, weights = get("prefill_precision", "exact"), get("weights", "stored")
        wanted = Wanted.read(get("device", "auto"), prefill_precision=precision, weights=weights, **apart)
        best = ops.best_isa()
        isa = get("isa") or env.instruction_set(best, ops.ISAS)
        if isa not in ops.ISAS or ops.ISAS.index(isa) > ops.ISAS.index(best):
            raise ConfigError(
                f"{self.text}: isa is {isa!r}; expected one of {', '.join(ops.ISAS)}, up to {best} here"
            )
        checkpoint = Checkpoint.open(self.folder or DEFAULT_MODEL)
        try:
            return Model(checkpoint, wanted=wanted, threads=threads, isa=isa)
        except BaseException:
            checkpoint.close()
            raise

    @property
    def latent(self) -> str:
        """How its sessions keep the latent cache."""
        return self.options.get("latent", "fp32")


def compare(
    a: Side | Model | Trace,
    b: Side | Model | Trace,
    ids: Sequence[int] | None = None,
    bound: float = 1e-4,
    *,
    threads: int | None = None,
    progress: ProgressArgument = False,
) -> Comparison:
    """Run the same tokens through two models, or one model and a recorded trace, and compare all inner values.

    Passes of 16 rows run in turn on both sides, so that the memory does not grow with the number of tokens.

    Parameters
    ----------
    a, b
        What is compared.
    ids
        Token ids, [n]; not needed where one side is a trace.
    bound
        The largest difference that is allowed, relative to the largest value in a layer.
    threads
        Threads of a pass of a model that is opened here.
    progress
        True, or a function called as ``progress("compare", tokens done, tokens)``.

    Raises
    ------
    ConfigError
        No ids, or sides that cannot be compared: other tokens, layers or shapes.
    """
    bound = _checked_bound(bound)
    report = Progress(progress)
    with ExitStack() as stack:
        sides = [stack.enter_context(_Running(side, threads)) for side in (a, b)]
        tokens = _tokens(sides, ids)
        if sides[0].layers != sides[1].layers:
            raise ConfigError(
                f"the sides have other layers: {_listed(sides[0].layers)} and {_listed(sides[1].layers)}"
            )
        tally = _Tally(bound)
        try:
            for at in range(0, tokens.size, ROWS):
                part = tokens[at : at + ROWS]
                left, right = (side.values(at, part) for side in sides)
                common = [n for n in ORDER if n in left and n in right]
                if not common:
                    raise ConfigError("the sides have no value in common; expected a trace of more values")
                positions = np.arange(at, at + part.size)
                tally.add(positions, sides[0].layers, {n: left[n] for n in common}, right)
                report("compare", at + part.size, tokens.size)
        finally:
            report.close()
    return tally.result()


def record(
    side: Side | Model,
    ids: Sequence[int],
    *,
    threads: int | None = None,
    progress: ProgressArgument = False,
) -> Trace:
    """Return a trace of everything that `compare` looks at, for a comparison elsewhere; `Trace.save` keeps it."""
    report = Progress(progress)
    with _Running(side, threads) as running:
        tokens = _tokens([running], ids)
        if running.session is None:
            raise ConfigError(f"{running.name} is a trace already; expected a model to record")
        try:
            with running.session.trace(what=NAMES) as trace:
                for at in range(0, tokens.size, ROWS):
                    running.session.prefill(tokens[at : at + ROWS])
                    report("record", min(at + ROWS, tokens.size), tokens.size)
        finally:
            report.close()
    return trace


# ----------------------------------------------------------------------------------------------
# inside
# ----------------------------------------------------------------------------------------------


def _checked_bound(bound: Any) -> float:
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound >= 0:
        raise ConfigError(f"bound is {bound!r}; expected a number of at least 0")
    return float(bound)


def _listed(layers: Sequence[int]) -> str:
    whole = len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers)) or "none"


class _Running:
    """A side that gives the values of the next rows."""

    def __init__(self, side: Side | Model | Trace, threads: int | None) -> None:
        self.name = side.text if isinstance(side, Side) else repr(side)
        self.model: Model | None = None
        self.session: Session | None = None
        self.trace: Trace | None = None
        self._opened = isinstance(side, Side)
        held = side.open(threads) if isinstance(side, Side) else side
        if isinstance(held, Trace):
            self.trace = held
            self.layers = held.layers
            self._whole: _Values = {n: held[n] for n in held.names if n != "state_norm"} if len(held) else {}
            return
        self.model = held
        self.layers = tuple(range(held.config.num_hidden_layers))
        try:
            latent = side.latent if isinstance(side, Side) else "fp32"
            self.session = Session(held, latent=latent, marks=False)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.session is not None:
            self.session.close()
        if self.model is not None and self._opened:
            self.model.close()

    def values(self, at: int, ids: npt.NDArray[np.int32]) -> _Values:
        """The values of rows from `at` on."""
        if self.session is None:
            return {n: a[at : at + ids.size] for n, a in self._whole.items()}
        with self.session.trace(what=NAMES) as trace:
            self.session.prefill(ids)
        (only,) = trace.passes
        return only.arrays


def _tokens(sides: Sequence[_Running], ids: Sequence[int] | None) -> npt.NDArray[np.int32]:
    """The ids that all sides have or can take."""
    found: npt.NDArray[np.int32] | None = None
    if ids is not None:
        vocab = min((s.model.config.vocab_size for s in sides if s.model is not None), default=2**31 - 1)
        found, embeddings = prompt_rows(ids, vocab, 0)
        if embeddings is not None:
            raise ConfigError("expected token ids, as integers [n]; found embeddings")
    for side in sides:
        if side.trace is None:
            continue
        tokens, positions = side.trace.tokens, side.trace.positions
        if not tokens.size or not np.array_equal(positions, np.arange(tokens.size)) or (tokens < 0).any():
            raise ConfigError(f"{side.name}: expected a trace of token ids from position 0 on, without a gap")
        if found is not None and not np.array_equal(found, tokens):
            raise ConfigError(f"{side.name}: was recorded with other ids: {_ids(tokens)}")
        found = tokens
    if found is None:
        raise ConfigError("there are no ids to run; expected some, or a trace on one side")
    return found


def _ids(tokens: npt.NDArray[np.int32]) -> str:
    return ",".join(map(str, tokens[:16].tolist())) + (",..." if tokens.size > 16 else "")


class _Tally:
    """Differences, row by row; the largest values and the errors are only known at the end."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._positions: list[npt.NDArray[np.int64]] = []
        self._layers: Sequence[int] = ()
        #: (layer or None, site) -> the largest difference of each row, and the largest value of all.
        self._rows: dict[tuple[int | None, str], list[npt.NDArray[np.float64]]] = {}
        self._scale: dict[tuple[int | None, str], float] = {}

    def add(self, positions: npt.NDArray[np.int64], layers: Sequence[int], a: _Values, b: _Values) -> None:
        self._positions.append(positions)
        self._layers = layers
        for name, left in a.items():
            right = b[name]
            if left.shape != right.shape:
                raise ConfigError(
                    f"{name} has the shape {list(left.shape)} on one side and {list(right.shape)} on the other; "
                    "expected models of one shape"
                )
            single = name in BEFORE or name in AFTER
            other = None
            if name == "route_wts" and "route_ids" in a:
                left, right, other = _aligned(a["route_ids"], left, b["route_ids"], right)
            for j in range(left.shape[1]):
                x, y = left[:, j], right[:, j]
                if name == "route_ids":
                    rows, scale = _experts(x, y), 1.0
                else:
                    rows, scale = _apart(x, y)
                    if name in AFTER:  # a row that one side's head has not seen
                        rows[np.isnan(x).all(1) | np.isnan(y).all(1)] = np.nan
                    if other is not None:
                        rows[other[:, j]] = 0  # of other experts: said by route_ids
                key = (None if single else layers[j], name)
                self._rows.setdefault(key, []).append(rows)
                self._scale[key] = max(self._scale.get(key, 0.0), scale)

    def result(self) -> Comparison:
        positions = np.concatenate(self._positions or [np.empty(0, np.int64)])
        every = {key: self._relative(key, np.concatenate(rows)) for key, rows in self._rows.items()}
        errors = {
            key: e for key, e in every.items() if not np.isnan(e).all()
        }  # a layer of the other kind has none
        first: Difference | None = None
        for layer, site in filter(errors.__contains__, self._order()):
            beyond = np.flatnonzero(errors[layer, site] > self._bound)
            if beyond.size:
                at = int(beyond[0])
                first = Difference(site, layer, int(positions[at]), float(errors[layer, site][at]))
                break
        sites = []
        for name in ORDER:
            found = [(key, e) for key, e in errors.items() if key[1] == name]
            if found:
                key, rows = max(found, key=lambda item: float(np.nanmax(item[1])))
                at = int(np.nanargmax(rows))
                sites.append(Difference(name, key[0], int(positions[at]), float(rows[at])))
        return Comparison(self._bound, first, tuple(sites), positions.size, len(self._layers))

    def _relative(
        self, key: tuple[int | None, str], rows: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rows == 0, 0.0, rows / self._scale[key])

    def _order(self) -> Iterator[tuple[int | None, str]]:
        """Layer and site as the graph computes them."""
        inner = [n for n in ORDER if n not in BEFORE and n not in AFTER]
        keys: list[tuple[int | None, str]] = [(None, n) for n in BEFORE]
        keys += [(i, n) for i in self._layers for n in inner]
        keys += [(None, n) for n in AFTER]
        return iter(keys)


def _apart(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], float]:
    """The largest difference of each row of [rows, width], NaN where neither has a value; and the largest value."""
    left, right = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(left - right)
    apart[left == right] = 0  # infinite on both sides
    neither = np.isnan(left) & np.isnan(right)
    apart[np.isnan(apart) & ~neither] = np.inf
    apart[neither] = -1
    rows = apart.max(1)
    rows[rows < 0] = np.nan
    finite = [np.abs(v[np.isfinite(v)]) for v in (left, right)]
    return rows, max((float(v.max()) for v in finite if v.size), default=0.0)


def _experts(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The part of each row's experts that the other side has not chosen; NaN where there are none."""
    common = (x[:, :, None] == y[:, None, :]).any(2).mean(1)
    found: npt.NDArray[np.float64] = np.where((x < 0).all(1) & (y < 0).all(1), np.nan, 1.0 - common)
    return found


def _aligned(
    ids_a: npt.NDArray[Any], a: npt.NDArray[Any], ids_b: npt.NDArray[Any], b: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Weights by ascending expert, and where the experts are other ones."""
    order_a, order_b = (np.argsort(ids, -1, kind="stable") for ids in (ids_a, ids_b))
    same = np.take_along_axis(ids_a, order_a, -1) == np.take_along_axis(ids_b, order_b, -1)
    left, right = np.take_along_axis(a, order_a, -1), np.take_along_axis(b, order_b, -1)
    return left, right, ~same.all(-1)
