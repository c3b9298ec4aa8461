# SPDX-License-Identifier: MIT
"""A session: one timeline of tokens over a model, and everything that can be done with it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import xxhash

from k3session import __version__
from k3session._core.decoder import Scratch
from k3session._core.ops import BUILD
from k3session._core.state import Owner, Timeline
from k3session.alive import Alive
from k3session.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    K3Error,
    NonFiniteError,
    PassCancelled,
    SessionBusyError,
    SnapshotError,
)
from k3session.generation import Generated, generate
from k3session.identity import check_arrays, check_facts, check_size
from k3session.inputs import out_row, prompt_rows, token_id
from k3session.memory import CHUNK_ROWS
from k3session.progress import Progress, ProgressArgument
from k3session.sampling import Sampling
from k3session.snapshot import LayerSnapshot, Snapshot, check_meta, head_parts, stated_size
from k3session.snapshot_file import Part, SnapshotReader, write_file
from k3session.text import TokenizerLike

if TYPE_CHECKING:
    from k3session.model import Model

__all__ = ["Session"]

_LATENTS = {"fp32": False, "bf16": True}
_NO_IDS = np.empty(0, np.int32)
_NO_ROW = np.empty((1, 0), np.float32)
_numbers = itertools.count(1)
_alive: Alive[Session] = Alive()


def _after_fork_in_child() -> None:
    for session in _alive:
        session._owner.disown()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Session:
    """One mutable timeline over a shared model.

    A session has one owner: a second thread that uses it while it is busy gets `SessionBusyError`.  Sessions of one
    model run in parallel.  Every pass commits at its end or not at all, so a failure, a cancel or Ctrl-C leaves the
    session where it was, or at the end of the last finished chunk of a prefill.

    Parameters
    ----------
    model
        The model; stays open at least as long as the session.
    capacity
        The most tokens that the session may hold.  None is the model's ``max_position_embeddings``.  Memory is taken
        as the session grows, not in advance.
    latent
        How MLA keeps its latent cache: "fp32", or "bf16", half the size, rounded once when a row is appended.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     logits = s.prefill([82, 79, 77])
    ...     logits = s.step(int(logits.argmax()))
    ...     s.position
    4
    """

    def __init__(self, model: Model, *, capacity: int | None = None, latent: str = "fp32") -> None:
        if latent not in _LATENTS:
            raise ConfigError(f"latent is {latent!r}; expected 'fp32' or 'bf16'")
        if capacity is None:
            capacity = model.config.max_position_embeddings
        elif isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"capacity is {capacity!r}; expected None or a number of tokens of at least 1")
        self._closed = True
        self.name = f"session-{next(_numbers)}"
        self._owner = Owner(self.name)
        self._model = model
        self._capacity = capacity
        self._latent = latent
        self._decoder: Any = model._open_decoder()
        weights = self._decoder.weights
        self._timeline: Any = Timeline(weights, _LATENTS[latent])
        self._scratch: Any = Scratch(weights, CHUNK_ROWS, model.threads, model.isa)
        vocab = model.config.vocab_size
        self._vocab = vocab
        # A pass commits inside one call, and Ctrl-C may come right after it.  So what belongs to a position is
        # written before its pass, and counts from the moment that the timeline stands there: ids and digests past
        # the position are none yet, and of two rows of logits the one made for the position is the session's.
        self._ids = np.empty(64, np.int32)
        self._one = np.empty(1, np.int32)
        self._rows = (np.empty((1, vocab), np.float32), np.empty((1, vocab), np.float32))
        self._rows_at = [-1, -1]
        self._digests: dict[int, str] = {}
        self._active = False
        self._generations = 0
        self._failure: K3Error | None = None
        self._resume: str | None = None
        self._meta: Any = None
        self.sampling: Sampling | None = None
        model._register(self)
        _alive.add(self)
        self._closed = False

    # ------------------------------------------------------------------------------------------
    # what it is
    # ------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model."""
        return self._model

    @property
    def position(self) -> int:
        """Tokens that the session holds; the next one gets this position."""
        self._check_open()
        return int(self._timeline.position)

    @property
    def capacity(self) -> int:
        """The most tokens that the session may hold."""
        return self._capacity

    @property
    def latent(self) -> str:
        """How the latent cache is stored: "fp32" or "bf16"."""
        return self._latent

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A copy of the ids so far, int32[position]; -1 where embeddings were given or a snapshot left ids out."""
        self._check_open()
        return self._ids[: self._timeline.position].copy()

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """The logits for the next token, float32[vocab], read-only; None before the first token."""
        self._check_open()
        row = self._logits()
        if row is not None:
            row = row.copy()
            row.flags.writeable = False
        return row

    @property
    def layers(self) -> list[Any]:
        """One ``K3CpuFallbackState`` per layer: the state that it carries from token to token."""
        self._check_open()
        return self._timeline.layers  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of state: recurrent matrices, conv windows and latent pages."""
        self._check_open()
        return int(self._timeline.nbytes)

    @property
    def resume(self) -> str | None:
        """After a load or restore: "exact" where build, instruction set and device agree, else "tolerance"."""
        return self._resume

    @property
    def meta(self) -> Any:
        """The ``meta`` of the snapshot that the session was loaded from."""
        return self._meta

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # ------------------------------------------------------------------------------------------
    # passes
    # ------------------------------------------------------------------------------------------

    def step(self, token: int, *, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Take in one token.

        Parameters
        ----------
        token
            Its id.
        out
            float32[vocab] to fill instead of a new array.

        Returns
        -------
        float32[vocab]
            The logits for the token after it; the caller's own.

        Raises
        ------
        InvalidTokenError, CapacityError, PassCancelled, NonFiniteError, SessionBusyError, ClosedError
        """
        with self._owner:
            try:
                self._begin(cancellable=True)
                self._one[0] = token_id(token, self._vocab)
                if out is not None:
                    out_row(out, self._vocab)
                position = self._timeline.position
                if position >= self._capacity:
                    raise self._full(1)
                if position == self._ids.size:
                    self._grow_ids(position + 1)
                self._ids[position] = self._one[0]
                row = self._forward(self._one)
                if out is None:
                    return row.copy()
                out[:] = row
                return out
            finally:
                self._active = False

    def prefill(
        self,
        prompt: Sequence[int] | npt.NDArray[Any],
        *,
        chunk: int = CHUNK_ROWS,
        progress: ProgressArgument = False,
    ) -> npt.NDArray[np.float32]:
        """Take in a prompt, in chunks.  The result is the same to the bit as that of single steps.

        Parameters
        ----------
        prompt
            Token ids [n], or embeddings float32[n, hidden_size] in their place.
        chunk
            Rows of one pass, from 1 to 128; no result depends on it.
        progress
            True, or a function called as ``progress("prefill", tokens done, tokens)`` after each chunk.

        Returns
        -------
        float32[vocab]
            The logits for the token after the prompt.

        Raises
        ------
        PassCancelled, KeyboardInterrupt
            The session stands at the end of the last finished chunk and can go on.
        InvalidTokenError, CapacityError, NonFiniteError, SessionBusyError, ClosedError
        """
        report = Progress(progress)
        with self._owner:
            try:
                self._begin(cancellable=True)
                ids, embeddings = prompt_rows(prompt, self._vocab, self._model.config.hidden_size)
                if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= CHUNK_ROWS:
                    raise ConfigError(f"chunk is {chunk!r}; expected a number of rows from 1 to {CHUNK_ROWS}")
                n, start = ids.size, self._timeline.position
                if start + n > self._capacity:
                    raise self._full(n)
                if start + n > self._ids.size:
                    self._grow_ids(start + n)
                self._ids[start : start + n] = ids
                for i in range(0, n, chunk):
                    part = ids[i : i + chunk]
                    rows = None if embeddings is None else embeddings[i : i + chunk]
                    if rows is not None:
                        for j, row in enumerate(rows, start + i):
                            self._digests[j] = xxhash.xxh3_128_hexdigest(row)
                    last = self._forward(part, rows)
                    report("prefill", i + part.size, n)
                return last.copy()
            finally:
                self._active = False
                report.close()

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        tokenizer: TokenizerLike | None = None,
    ) -> Iterator[Generated]:
        """Continue with tokens of the model's own.

        A token is chosen, stepped, then yielded, stop tokens too: breaking off, saving, loading and generating again
        repeats nothing and loses nothing.

        Parameters
        ----------
        max_tokens
            None goes on until a stop or the capacity.
        sampling
            None takes that of the last generation or snapshot, else the checkpoint's ``generation_config.json``.
        stop
            Strings that end the text; they are not part of it.
        tokenizer
            An object with ``encode`` and ``decode``, in place of the checkpoint's own.

        Yields
        ------
        Generated
            token, position, text, logprob, finish_reason, seconds.

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as s:
        ...     _ = s.prefill(model.tokenizer.encode("ROMEO.\\n"))
        ...     sum(1 for r in s.generate(8, sampling=k3.Sampling(seed=1)))
        8
        """
        self._check_open()
        return generate(self, max_tokens, sampling, stop, tokenizer)

    def cancel(self) -> bool:
        """Stop the step, prefill or generation that is running in another thread, at the next layer.

        Returns whether there was one; it then ends with `PassCancelled`, and the session stands at the end of the
        last finished pass.
        """
        scratch = self._scratch
        if scratch is not None and (self._active or self._generations):
            scratch.cancel()
            return True
        return False

    # ------------------------------------------------------------------------------------------
    # snapshots
    # ------------------------------------------------------------------------------------------

    def snapshot(self, *, meta: Any = None, include_tokens: bool = True) -> Snapshot:
        """Return everything that the session is, copied.

        Parameters
        ----------
        meta
            Anything that JSON can hold, kept with the snapshot.
        include_tokens
            Whether the ids are kept; without them the conversation cannot be read from the snapshot.
        """
        with self._owner:
            self._begin()
            layers = tuple(LayerSnapshot(**layer.export()) for layer in self._timeline.layers)
            tokens, logits = self._head(include_tokens)
            return Snapshot(
                self._timeline.position, tokens, logits, layers, self._facts(meta, include_tokens)
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot says.  A snapshot that is refused changes nothing.

        Raises
        ------
        SnapshotMismatchError
            Another model, other weights or options: ``differences`` lists every field that differs.
        CapacityError
            The snapshot holds more tokens than this session may.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(
                f"expected a k3session.Snapshot, found {type(snapshot).__name__}; for a file use Session.load"
            )
        with self._owner:
            self._begin(failed_is_fine=True)
            layers = self._model.config.num_hidden_layers
            check_facts(
                snapshot.facts, self._facts(None, False), snapshot.logits, self._vocab, "the snapshot"
            )
            check_arrays(snapshot, layers, self._vocab, "the snapshot")
            self._check_room(snapshot.position)
            self._take(snapshot)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Any = None,
        include_tokens: bool = True,
        progress: ProgressArgument = False,
    ) -> int:
        """Write a snapshot file, and return its size in bytes.

        Crash-safe: at every moment `path` is the old file, whole, or the new one, whole.  On an error the old one is
        there, and the session is as it was.

        Raises
        ------
        SnapshotError
            No space, no folder, no permission: the message says which.
        """
        report = Progress(progress)
        with self._owner:
            try:
                self._begin()
                parts = head_parts(*self._head(include_tokens))
                for i, layer in enumerate(self._timeline.layers):
                    for name, (shape, dtype) in layer.shapes(self._timeline.position).items():
                        # One array is copied out at a time: a save needs little memory beside the session's own.
                        kind = "BF16" if dtype == np.uint16 else "F32"
                        parts.append(
                            Part(f"layers.{i}.{name}", kind, shape, functools.partial(layer.array, name))
                        )
                return write_file(path, parts, self._facts(meta, include_tokens), report)
            finally:
                report.close()

    @classmethod
    def load(cls, model: Model, path: str | os.PathLike[str], *, capacity: int | None = None) -> Session:
        """Return a session that goes on where the file was saved.

        The latent cache keeps the file's dtype.  Facts are compared and every tensor is checked against its digest
        before there is a session.

        Raises
        ------
        SnapshotError, SnapshotCorruptError, SnapshotMismatchError, CapacityError
        """
        with SnapshotReader(path) as reader:
            position, _ = stated_size(reader)
            latent = reader.facts.get("latent")
            known = isinstance(latent, str) and latent in _LATENTS
            session = cls(model, capacity=capacity, latent=str(latent) if known else "fp32")
            try:
                check_facts(reader.facts, session._facts(None, False), None, session._vocab, reader.name)
                check_size(reader, session._timeline.layers)
                session._check_room(position, reader.name)
                snapshot = Snapshot.from_reader(reader)
                check_arrays(snapshot, model.config.num_hidden_layers, session._vocab, reader.name)
                session._take(snapshot, reader.name)
            except BaseException:
                session.close()
                raise
        return session

    # ------------------------------------------------------------------------------------------
    # the end
    # ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the session's memory; further use raises `ClosedError`.  Closing twice is fine."""
        if self._closed:
            return
        with self._owner:
            self._model._forget(self)
            self._closed = True
            self._timeline = self._scratch = self._decoder = None
            self._ids = self._one = _NO_IDS
            self._rows = (_NO_ROW, _NO_ROW)
            self._digests = {}

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(SessionBusyError):  # the exception on its way matters more than this one
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session is a handle to memory of this process and cannot be pickled; save() it and load() it there"
        )

    def __repr__(self) -> str:
        if self._closed:
            return f"<Session {self.name}: closed>"
        return f"<Session {self.name}: position {self._timeline.position} of {self._capacity}, latent {self._latent}>"

    # ------------------------------------------------------------------------------------------
    # inside
    # ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} has been closed; open another with model.session()")

    def _begin(self, *, failed_is_fine: bool = False, cancellable: bool = False) -> None:
        self._check_open()
        if self._failure is not None and not failed_is_fine:
            raise self._failed()
        if not self._generations:
            self._scratch.clear_cancel()
        self._active = cancellable

    def _generating(self, on: bool) -> None:
        if on:
            self._scratch.clear_cancel()
        self._generations += 1 if on else -1

    def _cancelled(self) -> bool:
        return bool(self._scratch.is_cancelled)

    def _failed(self) -> K3Error:
        first = self._failure
        said = f"{self.name} has failed and accepts only restore() and close(): {first}"
        return NonFiniteError(said, first.layer) if isinstance(first, NonFiniteError) else K3Error(said)

    def _logits(self) -> npt.NDArray[np.float32] | None:
        """The row of logits that belongs to the position."""
        position = self._timeline.position
        return next(
            (row[0] for row, at in zip(self._rows, self._rows_at, strict=True) if at == position), None
        )

    def _forward(
        self, ids: npt.NDArray[np.int32], embeddings: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """One pass, committed at its end; returns its row of logits, the session's own."""
        position = self._timeline.position
        spare = 1 if self._rows_at[0] == position else 0
        self._rows_at[spare] = position + ids.size
        row = self._rows[spare]
        try:
            bad = self._decoder.forward(self._scratch, [self._timeline], [ids.size], ids, embeddings, row)
        except PassCancelled:
            self._scratch.clear_cancel()
            raise PassCancelled(
                f"cancelled; {self.name} stands at position {position} and can go on from there", position
            ) from None
        if bad is not None:
            self._failure = NonFiniteError(
                f"{bad[0]} gave a value that is not finite, in the pass that began at position "
                f"{self._timeline.position}; look for NaN or infinite weights with 'k3session check --deep'",
                bad[0],
            )
            raise self._failure
        last: npt.NDArray[np.float32] = row[0]
        return last

    def _full(self, n: int) -> CapacityError:
        return CapacityError(
            f"{self.name} holds {self._timeline.position} of {self._capacity} tokens and cannot take {n} more; "
            "save() it and load() it with a larger capacity"
        )

    def _grow_ids(self, need: int) -> None:
        grown = np.empty(max(need, 2 * self._ids.size), np.int32)
        grown[: self._ids.size] = self._ids
        self._ids = grown

    def _head(
        self, include_tokens: bool
    ) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
        tokens = self._ids[: self._timeline.position].copy() if include_tokens else None
        row = self._logits()
        return tokens, None if row is None else row.copy()

    def _facts(self, meta: Any, include_tokens: bool) -> dict[str, Any]:
        """What the header says beside the tensors."""
        model = self._model
        position = int(self._timeline.position)
        digests = {str(k): v for k, v in self._digests.items() if k < position and self._ids[k] == -1}
        return {
            "k3session": __version__,
            "build": BUILD,
            "isa": model.isa,
            "device": model.device,
            "fingerprint": model.fingerprint.to_dict(),
            "num_hidden_layers": model.config.num_hidden_layers,
            "layers": [0, model.config.num_hidden_layers],
            "position": position,
            "latent": self._latent,
            "weights": "stored",
            "sampling": self.sampling.to_dict() if self.sampling is not None else None,
            "embeddings": digests if include_tokens else {},
            "meta": check_meta(meta),
        }

    def _check_room(self, position: int, name: str = "the snapshot") -> None:
        if position > self._capacity:
            raise CapacityError(
                f"{name} holds {position} tokens; this session may hold {self._capacity}: give it a larger capacity"
            )

    def _take(self, snapshot: Snapshot, name: str = "the snapshot") -> None:
        """Become the snapshot, whose facts and arrays have been compared."""
        here = self._facts(None, False)
        exact = all(snapshot.facts.get(n) == here[n] for n in ("build", "isa", "device"))
        sampling = snapshot.facts.get("sampling")
        position, tokens, logits = snapshot.position, snapshot.tokens, snapshot.logits
        try:
            chosen = Sampling.from_dict(sampling) if sampling is not None else None
            digests = {int(k): str(v) for k, v in (snapshot.facts.get("embeddings") or {}).items()}
        except (ConfigError, TypeError, ValueError, AttributeError) as problem:
            raise SnapshotError(f"{name}: its sampling or embeddings cannot be read: {problem}") from None
        ids = np.full(max(64, position), -1, np.int32)
        if tokens is not None:
            ids[:position] = tokens
        spare = 1 if self._rows_at[0] == self._timeline.position else 0
        rows_at = [-1, -1]
        if logits is not None:
            self._rows[spare][0] = logits
            rows_at[spare] = position
        replace = functools.partial(
            self._timeline.replace, position, [layer.arrays() for layer in snapshot.layers]
        )
        become = functools.partial(
            self.__dict__.update,
            _ids=ids,
            _rows_at=rows_at,
            _digests=digests,
            sampling=chosen,
            _meta=snapshot.facts.get("meta"),
            _failure=None,
            _resume="exact" if exact else "tolerance",
        )
        # Ctrl-C acts after a call: as one call, the two are done together, or neither is where the first one fails.
        # In the midst of it the session is failed, which is what the child of a fork finds that comes just then.
        both = map(operator.call, (replace, become))
        before, broken = self._failure, K3Error("a restore was broken off in the middle")
        try:
            self._failure = broken
            list(both)
        except (K3Error, MemoryError):  # raised before anything was changed
            self._failure = before
            raise
