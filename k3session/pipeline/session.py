# SPDX-License-Identifier: MIT
"""A session over a pipeline: all of `k3session.Session`, and saves in parts."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from k3session.errors import K3Error
from k3session.marks import Point
from k3session.pipeline.chain import ChainTimeline
from k3session.progress import Progress, ProgressArgument
from k3session.saving import SaveJob
from k3session.session import Session
from k3session.snapshot import Head, head_parts
from k3session.snapshot_file import Part, write_file

__all__ = ["PipelineSession"]


class PipelineSession(Session):
    """A session whose layers are in several processes; see `k3session.pipeline.PipelineModel`."""

    def save(  # type: ignore[override]
        self,
        path: str | os.PathLike[str],
        *,
        meta: Any = None,
        include_tokens: bool = True,
        marks: bool = False,
        wait: bool = True,
        progress: ProgressArgument = False,
        parts: bool = False,
    ) -> int | SaveJob:
        """Write a snapshot, and return its size in bytes; see `k3session.Session.save`.

        Parameters
        ----------
        parts
            False fetches the state of all stages and writes one file here.  True has each process write the state of
            its own layers, beside `path` on its own machine, as ``NAME.XXXXXXXX.FIRST-END.part``; `path`, which is
            written last, then has the tokens and the logits, and names the parts.  Whatever takes a snapshot file
            takes such a head too, where its parts lie beside it; ``k3session snapshot merge`` makes one file of them.
            The parts of the snapshot that was there before are removed when the new one is in place.
        """
        how = self._in_parts if parts else None
        return self._save(path, meta, include_tokens, marks, wait, Progress(progress), how)

    def trace(self, layers: Any = None, what: Any = None) -> Any:
        """Not here: inner values do not cross from process to process.

        Raises
        ------
        K3Error
            Always.
        """
        raise K3Error(
            f"{self.name} is over several stages, and inner values are not traced across them; open the model in one "
            "process for that"
        )

    def timed(self) -> Any:
        """Not here: each stage has ops of its own.

        Raises
        ------
        K3Error
            Always.
        """
        raise K3Error(
            f"{self.name} is over several stages, and ops are not timed across them; open the model in one process for "
            "that"
        )

    def _in_parts(
        self,
        path: str | os.PathLike[str],
        held: ChainTimeline,
        points: Sequence[Point],
        head: Head,
        facts: dict[str, Any],
        report: Progress,
    ) -> Callable[[], int]:
        return functools.partial(_write_parts, path, held, tuple(points), head, facts, report)


def _write_parts(
    path: str | os.PathLike[str],
    held: ChainTimeline,
    points: tuple[Point, ...],
    head: Head,
    facts: dict[str, Any],
    report: Progress,
) -> int:
    line: Any = held.weights.line
    number = secrets.token_hex(4)
    marks = [(point.position, point.timeline.name) for point in points]
    try:
        made = line.call("save_part", os.fspath(path), number, held.name, marks, facts)
        tensors = head_parts(*head)
        for point in points:
            row = point.row
            if row is not None:
                get = functools.partial(_itself, row)
                tensors.append(Part(f"x.marks.{point.position}.logits", "F32", row.shape, get))
        listed = [{k: part[k] for k in ("file", "layers", "header_digest")} for part in made]
        size = write_file(path, tensors, facts | {"parts": listed}, report)
    except BaseException:
        with suppress(K3Error):
            line.call("remove_parts", os.fspath(path), (), [number])
        raise
    finally:
        report.close()
    line.call("remove_parts", os.fspath(path), [number], ())
    return size + sum(int(part["bytes"]) for part in made)


def _itself(row: Any) -> Any:
    return row
