# SPDX-License-Identifier: MIT
"""A model whose layers are in several processes, as the program in the first one sees it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from k3session.accounting import inspect
from k3session.config import K3Config
from k3session.errors import ConfigError, SessionBusyError
from k3session.fingerprint import Fingerprint
from k3session.marks import Marks
from k3session.model import Model
from k3session.pipeline.chain import ChainDecoder
from k3session.pipeline.line import Line, LocalLine
from k3session.pipeline.mpi_line import MpiLine
from k3session.pipeline.post import world
from k3session.pipeline.ranges import check_ranges, choose, costs
from k3session.pipeline.session import PipelineSession
from k3session.problems import folder_error
from k3session.stage import Stage

__all__ = ["PipelineModel"]

log = logging.getLogger("k3session")

#: Rows from which on a part of a batch is worth the weights that it reads by itself.
MICRO_ROWS = 16


class PipelineModel(Model):
    """A model over several processes; its sessions have the calls of `k3session.Session`, and give the same bits.

    It lives in the process of rank 0.  The others are in `serve` for as long as it is open.  Everything that a session
    can do goes on here but `Session.trace`; on an error of one pass, such as too little memory in one process, no
    stage has committed anything, as in one process.

    Sessions that are used from several threads are in different stages at the same time, and so are the parts of a
    large batch: `step` and `forward` cut a pass into parts of at least `micro_rows` rows that follow each other.

    A `k3session.SaveJob` of a session fetches the state of all stages and writes one file, which any model of this
    kind loads, however its layers are cut; ``save(parts=True)`` has each process write its own layers.

    Attributes
    ----------
    ranges
        The layers of each process, half open.
    """

    def __init__(
        self,
        line: Line,
        config: K3Config,
        path: Path,
        *,
        fingerprint: Fingerprint,
        threads: int,
        isa: str,
        device: str = "cpu",
        label: str = "cpu",
        prefill_precision: str = "exact",
        weights: str = "stored",
        micro_rows: int = MICRO_ROWS,
    ) -> None:
        decoder = ChainDecoder(line, config, micro_rows)
        self._line: Any = line
        self._ready(decoder, config, path, threads, isa)
        self._weights = decoder
        self._engine = None
        self.weights = weights
        self._fingerprint = fingerprint
        self.ranges = list(line.ranges)
        self.device, self.placement_label, self.prefill_precision = device, label, prefill_precision
        # At exit too: a program that ends with an error lets the others end.
        self._pool = weakref.finalize(self, line.close)

    @classmethod
    def open(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        *,
        comm: Any = None,
        layers: Sequence[tuple[int, int]] | None = None,
        threads: int | None = None,
        micro_rows: int = MICRO_ROWS,
        **options: Any,
    ) -> PipelineModel:
        """Open a checkpoint folder over all processes of a job; called in the first one, the others are in `serve`.

        Each process opens the folder under the same path, and needs the files of its own layers there.

        Parameters
        ----------
        path
            The folder.
        comm
            An mpi4py communicator; None is that of all processes of the job.
        layers
            (first, end) for each process, half open.  None chooses them, so that the slowest process takes as short
            as can be: by the bytes that a token reads in each layer, and by the speed at which each process reads
            memory, which is measured.
        threads
            Threads of a pass in each process, as in `Model.open`.
        micro_rows
            The fewest rows of a part that a batch is cut into.
        options
            Other arguments of `Model.open`, used in every process.

        Raises
        ------
        ConfigError
            The ranges do not fit, a pipeline is open already, or the processes have different builds or instruction
            sets, which would not give the bits of one process.
        CheckpointError, DeviceError
            What a process found when it opened its layers.
        PipelineError
            A process has failed.
        TypeError
            An option that `Model.open` does not have.
        ImportError
            No MPI.
        """
        known = set(signature(Model.open).parameters) - {"path", "layers", "threads", "progress"}
        if not known.issuperset(options):
            raise TypeError(
                f"PipelineModel.open has no option {', '.join(sorted(set(options) - known))}; beside its own it takes "
                f"{', '.join(sorted(known))}"
            )
        if MpiLine.opened:
            raise ConfigError(
                "a pipeline is open in this process already, and the others are in its service; close it first"
            )
        comm = world() if comm is None else comm
        if comm.Get_rank() != 0:
            raise ConfigError(
                f"PipelineModel.open was called by rank {comm.Get_rank()}; expected rank 0, and serve() in the others"
            )
        if type(micro_rows) is not int or micro_rows < 1:
            raise ConfigError(f"micro_rows is {micro_rows!r}; expected a number of rows of at least 1")
        line = MpiLine(comm)
        try:
            config, packed = _headers(path)
            probes = line.call("probe", threads)
            _check_alike(probes)
            if layers is None:
                line.ranges = choose(*costs(config, packed.__contains__), [p["speed"] for p in probes])
            else:
                line.ranges = check_ranges(layers, config, line.size)
            found = line.call("open", os.fspath(path), line.ranges, {"threads": threads, **options})
            for p, (first, end) in zip(probes, line.ranges, strict=True):
                log.info("layers %d to %d: process %d on %s", first, end - 1, p["pid"], p["host"])
            return cls(
                line,
                config,
                Path(path),
                fingerprint=_joined(found),
                threads=found[0]["threads"],
                isa=probes[0]["isa"],
                device=_common(found, "device"),
                label=_common(found, "label"),
                prefill_precision=str(options.get("prefill_precision", "exact")),
                weights=str(options.get("weights", "stored")),
                micro_rows=micro_rows,
            )
        except BaseException:
            line.close()
            raise

    @classmethod
    def of_stages(cls, models: Iterable[Model], *, micro_rows: int = MICRO_ROWS) -> PipelineModel:
        """Put models of ranges together in this process, without MPI: to try how a cut behaves.

        Closing it leaves them open.

        Parameters
        ----------
        models
            `Model.open` with ``layers=``, in order; together they are the whole model.
        micro_rows
            As in `open`.

        Raises
        ------
        ConfigError
            The ranges are not the whole model, or of different models.
        """
        given = list(models)
        line = LocalLine([Stage(m) for m in given])
        if not given:
            raise ConfigError("there is no model; expected those of all layers")
        config = given[0].config
        line.ranges = check_ranges(line.ranges, config, len(given))
        found = [
            {"fingerprint": m.fingerprint, "device": m.device, "label": m.placement_label} for m in given
        ]
        return cls(
            line,
            config,
            given[0].path,
            fingerprint=_joined(found),
            threads=given[0].threads,
            isa=given[0].isa,
            device=_common(found, "device"),
            label=_common(found, "label"),
            prefill_precision=given[0].prefill_precision,
            weights=given[0].weights,
            micro_rows=micro_rows,
        )

    def session(
        self, *, capacity: int | None = None, latent: str = "fp32", marks: Marks | bool | None = None
    ) -> PipelineSession:
        """Return a new `PipelineSession` over this model; the parameters are those of `k3session.Session`."""
        return PipelineSession(self, capacity=capacity, latent=latent, marks=marks)

    def close(self) -> None:
        """Let go of the layers in all processes; `serve` returns in the others.  Closing twice is fine.

        Raises
        ------
        SessionBusyError
            Sessions are still open; the message names them.
        """
        with self._lock:
            if self._decoder is None:
                return
            names = ", ".join(sorted(s.name for s in self._sessions))
            if names:
                raise SessionBusyError(
                    f"the model still has open sessions: {names}; close them first, or leave the with block"
                )
            self._weights = self._decoder = self._batch_scratch = None
        self._pool()


def _headers(path: str | os.PathLike[str]) -> tuple[K3Config, set[int]]:
    """The configuration, and the layers whose experts are packed, from the headers that are there."""
    found = inspect(path, layers=(0, 1))
    found.shards.close()
    if found.problems or found.config is None:
        raise folder_error(found.path, found.problems)
    return found.config, found.packed_layers


def _check_alike(probes: list[dict[str, Any]]) -> None:
    for name, what in (("build", "builds of k3session"), ("isa", "instruction sets")):
        values = [p[name] for p in probes]
        if len(set(values)) > 1:
            said = ", ".join(f"rank {i} on {p['host']} {p[name]!r}" for i, p in enumerate(probes))
            raise ConfigError(
                f"the processes have different {what}: {said}; expected the same everywhere, since others give other "
                "bits: install the same build, and set K3_ISA to an instruction set that all of them have"
            )


def _joined(found: list[dict[str, Any]]) -> Fingerprint:
    try:
        return Fingerprint.joined(f["fingerprint"] for f in found)
    except ValueError as problem:
        raise ConfigError(f"the processes have opened different models: {problem}") from None


def _common(found: list[dict[str, Any]], name: str) -> str:
    return " | ".join(dict.fromkeys(str(f[name]) for f in found))
