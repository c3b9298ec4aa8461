# SPDX-License-Identifier: MIT
"""An open checkpoint folder: every tensor checked against the configuration, none copied.

Opening is strict.  Every tensor of the files is consumed or named as skipped, every parameter of the
model is filled, every file is whole, and everything that is wrong is reported together.  Values are
not read, with one exception: what follows the heads in a padded ``A_log``.  A scale byte 255, which
is NaN, and other values that are not finite are found by ``k3session.audit.audit(deep=True)``.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy.typing as npt

from k3session.accounting import Inspection, inspect
from k3session.config import K3Config
from k3session.errors import ClosedError
from k3session.fingerprint import Fingerprint, Visitor, digest_checkpoint
from k3session.problems import folder_error
from k3session.progress import Progress, ProgressArgument
from k3session.shards import StoredTensor, Unread

__all__ = ["Checkpoint", "StoredTensor"]

log = logging.getLogger("k3session")

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class Checkpoint:
    """A checked checkpoint, memory-mapped.  Make one with `open`.

    Examples
    --------
    >>> with Checkpoint.open("Kimi-K3/") as checkpoint:            # doctest: +SKIP
    ...     checkpoint.tensor("model.norm.weight").dtype           # BF16 comes as its 16 bits
    dtype('uint16')
    """

    def __init__(self, inspection: Inspection, config: K3Config) -> None:
        self._inspection = inspection
        self._config = config
        self._tensors = inspection.tensors
        self._fingerprint: Fingerprint | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        layers: tuple[int, int] | None = None,
        progress: ProgressArgument = False,
    ) -> Checkpoint:
        """Check the folder `path` and map its files.

        Parameters
        ----------
        path
            A folder with ``config.json`` and one safetensors file, or shards and their index.
        layers
            (first, end), from 0 and half open: only the tensors of these layers are used, and of the others only
            the headers are looked at, where they are there.  The embedding goes with the first layer, the final norms
            and the head with the last.
        progress
            Reports ``("open", files done, files)``.

        Raises
        ------
        CheckpointError
            ``problems`` has one sentence for everything that is wrong with the folder.
        ConfigError
            `layers` is no range of the model's layers.
        """
        report = Progress(progress)
        try:
            inspection = inspect(path, report, layers)
        finally:
            report.close()
        return cls.from_inspection(inspection)

    @classmethod
    def from_inspection(cls, inspection: Inspection) -> Checkpoint:
        """Open what `inspect` looked at, or raise what it found."""
        if inspection.problems or inspection.config is None:
            inspection.shards.close()
            raise folder_error(inspection.path, inspection.problems)
        for warning in inspection.warnings:
            log.warning("%s: %s", inspection.path, warning)
        if inspection.skipped:
            log.info(
                "%s: skipped %d tensors that text does not need",
                inspection.path,
                len(inspection.skipped),
            )
        made = cls(inspection, inspection.config)
        for file in {tensor.file for tensor in made._tensors.values()}:
            inspection.shards.map(file)
        return made

    @property
    def path(self) -> Path:
        """The folder."""
        return self._inspection.path

    @property
    def config(self) -> K3Config:
        """The checked configuration."""
        return self._config

    @property
    def layers(self) -> tuple[int, int]:
        """The layers whose tensors are used: (first, end), half open."""
        return self._inspection.layers

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, the embedding first, then layer by layer, the head last."""
        return tuple(self._tensors)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names, as stored, of the tensors that are not used: the vision part, or a repeated tied head."""
        return tuple(self._inspection.skipped)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in `names`."""
        return self._inspection.total_bytes

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def info(self, name: str) -> StoredTensor:
        """Return file, dtype, shape, offset and size of a tensor; the embedding's for a tied head."""
        found = self._tensors.get(name)
        if found is None and name == _HEAD and self._config.tie_word_embeddings:
            found = self._tensors[_EMBEDDING]
        if found is None:
            raise KeyError(f"{name} is not a tensor of {self.path}; see Checkpoint.names")
        return found

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only view of the mapped file, without copying.

        BF16 comes as uint16, F32 as float32, U8 as uint8; ``A_log`` without its padding.  The view
        is unaligned where the file is, and stays valid after `close`.  With tied embeddings
        ``lm_head.weight`` is the embedding table.
        """
        self._check_open()
        return self._inspection.shards.array(self.info(name))

    def located(self, name: str) -> tuple[StoredTensor, int]:
        """Return what `info` does, and the tensor's address in the mapped file, while an array of `held` lives."""
        self._check_open()
        found = self.info(name)
        return found, self._inspection.shards.address(found)

    def read_in_large_pages(self, spans: Sequence[tuple[int, int]]) -> None:
        """Have what is read from the disk for these (address, bytes) of `located` come in pages of the largest size."""
        self._check_open()
        self._inspection.shards.read_in_large_pages(spans)

    def held(self) -> list[npt.NDArray[Any]]:
        """Return arrays that keep all files mapped which `located` has looked into."""
        return list(self._inspection.shards.held())

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor to be read now: as `tensor`, or a copy after `leave_mappings_untouched`."""
        self._check_open()
        return self._inspection.shards.values(self.info(name))

    def leave_mappings_untouched(self) -> None:
        """From here on `values` and `data` read by calls: no page of a mapped file comes to memory through them.

        Arrays of `tensor` still lie in the mappings, for their shapes and addresses.
        """
        self._inspection.shards.leave_untouched()

    def mappings(self) -> list[tuple[Path, int, int]]:
        """Path, address and size of the mapping of each file."""
        self._check_open()
        return self._inspection.shards.mappings()

    def forget_pages(self) -> None:
        """Give back the memory of pages that were looked at through the mappings."""
        self._inspection.shards.advise(mmap.MADV_DONTNEED)

    def data(self, name: str) -> memoryview | Unread:
        """Return the bytes of a tensor as stored, without padding; parts of it are memoryviews."""
        self._check_open()
        return self._inspection.shards.bytes(self.info(name))

    def packed_experts(self, layer: int) -> bool:
        """Whether the routed experts of `layer` are stored as MXFP4."""
        return layer in self._inspection.packed_layers

    def fingerprint(self) -> Fingerprint:
        """Return the sampled fingerprint, computed when first asked for."""
        if self._fingerprint is None:
            self._check_open()
            self._fingerprint = digest_checkpoint(self)
        return self._fingerprint

    def deep_digest(self, progress: ProgressArgument = False, *, visit: Visitor | None = None) -> Fingerprint:
        """Read and hash every byte; `progress` gets ``("hash", bytes done, bytes)``."""
        self._check_open()
        report = Progress(progress)
        try:
            return digest_checkpoint(self, deep=True, progress=report, visit=visit)
        finally:
            report.close()

    @contextmanager
    def reading_at_random(self, wanted: bool = True) -> Iterator[None]:
        """Tell the kernel not to read ahead in the mapped files, inside the block."""
        self._check_open()
        if wanted:
            self._inspection.shards.advise(mmap.MADV_RANDOM)
        try:
            yield
        finally:
            if wanted:
                self._inspection.shards.advise(mmap.MADV_NORMAL)

    def close(self) -> None:
        """Let go of the files.  Arrays that were handed out keep theirs mapped until they go."""
        self._closed = True
        self._inspection.shards.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the checkpoint {self.path} has been closed; open it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Checkpoint holds mapped files and cannot be pickled; pass its path and open it there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._tensors)} tensors, {self.total_bytes} bytes"
        return f"<Checkpoint {str(self.path)!r}: {state}>"
