# SPDX-License-Identifier: MIT
"""A model: the weights of a checkpoint, open and immutable, shared by its sessions."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from k3session import batch, env
from k3session._core import ops
from k3session._core.weights import Weights
from k3session.alive import Alive
from k3session.budget import MemoryPlan, read_memory
from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.engine import Engine
from k3session.errors import ClosedError, ConfigError, SessionBusyError
from k3session.fingerprint import Fingerprint
from k3session.marks import Marks
from k3session.memory import CHUNK_ROWS, memory_estimate
from k3session.placement import Wanted, precision_label
from k3session.progress import Progress, ProgressArgument
from k3session.sampling import Sampling, read_generation_config
from k3session.session import Session
from k3session.stats import Counts, Stats, collect
from k3session.streaming import MOST_ROWS, chunk_rows
from k3session.text import Tokenizer

__all__ = ["DEFAULT_MODEL", "Model"]

log = logging.getLogger("k3session")

#: The model that ships in the package.
DEFAULT_MODEL = Path(__file__).parent / "models" / "k3-shakespeare"
_NOT_GIVEN: Any = object()
_alive: Alive[Model] = Alive()


def _after_fork_in_child() -> None:
    for model in _alive:
        model._lock = threading.Lock()  # a thread that held it does not exist here


os.register_at_fork(after_in_child=_after_fork_in_child)


class Model:
    """The weights of one checkpoint.  Make one with `Model.open`.

    A model is immutable: threads and sessions share it.  Close it when its sessions are closed, or use ``with``.
    """

    #: The layers that it holds: (first, end), half open.
    layers: tuple[int, int]
    #: Where each component runs.
    placement: dict[str, str]

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        wanted: Wanted,
        threads: int,
        isa: str,
        memory: int | None = None,
        gpu_memory: int | str | None = None,
        progress: ProgressArgument = False,
    ) -> None:
        report = Progress(progress)
        self._checkpoint: Checkpoint | None = checkpoint
        mode = ops.enter_float_mode()
        try:
            self._weights: Any = Weights(checkpoint, report or None)
        finally:
            ops.leave_float_mode(mode)
        if memory is None:
            checkpoint.read_in_large_pages(self._weights.spans())
        ops.hold_pool()
        self._pool = weakref.finalize(self, ops.release_pool)
        self._pool.atexit = False  # at exit the threads go with the process
        self._engine: Engine | None = Engine(
            self._weights,
            wanted,
            threads,
            isa,
            report or None,
            checkpoint=checkpoint,
            memory=memory,
            gpu_memory=gpu_memory,
        )
        self._ready(self._engine.decoder, checkpoint.config, checkpoint.path, threads, isa)
        self.layers = checkpoint.layers
        self.device = str(self._engine.placement)
        self.placement = self._engine.placement.to_dict()
        self.placement_label = self._engine.placement.label
        plans = [p for p in (self._engine.plan, self._engine.gpu_plan) if p is not None]
        for plan in plans:
            if not plan.mapped:
                self.chunk_rows = chunk_rows(self.config, plan.budget)
        if not plans and precision_label(wanted.prefill_precision, isa) == "bf16amx":
            self.chunk_rows = MOST_ROWS  # to unpack weights takes longer than to multiply with them
        self.prefill_precision = wanted.prefill_precision
        self.weights = wanted.weights

    def _ready(self, decoder: Any, config: K3Config, path: Path, threads: int, isa: str) -> None:
        """What sessions find in a model, wherever its passes are computed."""
        self._decoder: Any = decoder
        self._sessions: Alive[Session] = Alive()
        self._past = Counts()
        self._lock = threading.Lock()
        self._batch_scratch: Any = None  # of batches, made by the first one
        self._tokenizer: Tokenizer | None = None
        self._fingerprint: Fingerprint | None = None
        self.config: K3Config = config
        self.path: Path = path
        self.layers = (0, config.num_hidden_layers)
        self.threads = threads
        self.isa = isa
        self.device = self.placement_label = "cpu"
        self.placement = {}
        self.chunk_rows = CHUNK_ROWS
        self.prefill_precision = "exact"
        self.weights = "stored"
        self.default_sampling: Sampling = read_generation_config(path, config.eos_token_id)
        _alive.add(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] = _NOT_GIVEN,
        *,
        device: str = "auto",
        kda: str | None = None,
        mla: str | None = None,
        dense: str | None = None,
        experts: str | None = None,
        threads: int | None = None,
        weights: str = "stored",
        prefill_precision: str = "exact",
        memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        layers: tuple[int, int] | None = None,
        progress: ProgressArgument = False,
    ) -> Model:
        """Open a checkpoint folder.

        Its files are checked whole, then mapped: what is not read by a pass takes no memory.

        Parameters
        ----------
        path
            A folder in the Hugging Face layout.  Not given: the small model that ships in the package.
        device
            "auto", "cpu", "cuda" or "cuda:N".  "auto" takes the first GPU where that can be used and the model fits,
            and says in the log of ``k3session`` why not; "cuda" raises what stands in the way.
        kda, mla, dense, experts
            "cpu" or "cuda": where these components run (the dense MLP and the shared experts are ``dense``), whatever
            `device` says.  None is the variable ``K3_CUDA_KDA``, ``K3_CUDA_MLA``, ``K3_CUDA_DENSE`` or
            ``K3_CUDA_EXPERTS`` (0 or 1), or else `device`.  ``experts="cpu"`` is how a model runs whose experts are
            larger than the GPU's memory.
        threads
            Threads of one pass.  None is ``K3_NUM_THREADS``, or the cores that this process may use.
        weights
            "stored": as the checkpoint has them, from its mapped files.  On the CPU also, recoded into memory at load:
            "compact": a BF16 trunk without loss in about 12 bits a weight, the same bits out; "q8": the trunk in 8.5
            bits a weight, for speed, with an error (docs/performance.md).  The embedding, the experts and MLA's
            kv_b_proj stay as stored, and for "q8" the router.
        prefill_precision
            "exact": a prefill gives the bits of single steps.  The others are for passes of one session with more
            than 8 rows.  "bf16", on the CPU: what BF16 and MXFP4 matrices multiply is rounded to BF16, as the published
            code does with all activations; several times as fast on processors with a matrix unit for such numbers
            (AMX), faster on some that multiply them in vectors (AVX-512 BF16), and elsewhere not.
            "bf16x2": on a GPU they use the tensor cores, with each activation as the sum of two BF16 numbers, within
            1e-4 of the largest logit.
        memory
            What the process may have in memory, as bytes or a size such as ``"8GiB"``; ``"auto"`` is what is free now,
            less a tenth.  What does not fit within it is read from the files in every pass, with the same bits
            as without a budget: docs/memory.md.  None maps the files and leaves it to the kernel.
        gpu_memory
            What the model may have of a GPU's memory, as bytes or a size; ``"auto"`` is what is free there now, less a
            tenth.  What does not fit within it is brought there in every pass, from the page cache or the files, or
            with `memory` also given from what that keeps, with the same bits: docs/memory.md.  None: everything that
            is placed on the GPU has to fit.
        layers
            (first, end), from 0 and half open: only these layers are loaded, the embedding with the first one of the
            model and the head with the last one.  Tensors of other layers may be missing.  Such a model is for
            `k3session.Stage`; sessions take all layers.
        progress
            True draws a bar on a terminal; a function is called as ``progress(event, current, total)``.

        Raises
        ------
        CheckpointError
            ``problems`` lists everything that is wrong with the folder.
        ConfigError, DeviceError

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model:
        ...     model.config.num_hidden_layers
        8
        """
        if path is _NOT_GIVEN:
            path = DEFAULT_MODEL
        elif not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"path is {path!r}; expected a folder, or nothing for the model that ships")
        if threads is None:
            threads = env.default_threads()
        elif isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256:
            raise ConfigError(f"threads is {threads!r}; expected None or a number from 1 to 256")
        wanted = Wanted.read(device, kda, mla, dense, experts, prefill_precision, weights)
        budget = read_memory(memory)
        read_memory(gpu_memory, "gpu_memory", lambda: 0)
        if gpu_memory is not None and wanted.kind == "cpu" and not any(wanted.apart.values()):
            raise ConfigError(
                f"gpu_memory is {gpu_memory!r}, but no part of the model is placed on a GPU; drop it, or give "
                "device='cuda'"
            )
        if budget is not None and weights != "stored":
            raise ConfigError(
                f'weights="{weights}" recodes the trunk into memory, where memory= leaves it on disk; drop one of them'
            )
        isa = env.instruction_set(ops.best_isa(), ops.ISAS)
        checkpoint = Checkpoint.open(path, layers=layers, progress=progress)
        try:
            if budget is not None:
                checkpoint.leave_mappings_untouched()
            return cls(
                checkpoint,
                wanted=wanted,
                threads=threads,
                isa=isa,
                memory=budget,
                gpu_memory=gpu_memory,
                progress=progress,
            )
        except BaseException:
            checkpoint.close()
            raise

    @property
    def recoded(self) -> dict[str, Any] | None:
        """What recoding the trunk gave, or None for weights="stored".

        ``weights`` in the recoded matrices, their ``stored_bytes`` and ``bytes`` now, ``exceptions`` (groups of 32
        weights of compact matrices that stand as BF16 besides), and ``kept``, the names of matrices left as stored.

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open(weights="compact") as model:
        ...     round(8 * model.recoded["bytes"] / model.recoded["weights"], 1)
        12.3
        """
        return None if self._engine is None else self._engine.recoded

    def session(
        self, *, capacity: int | None = None, latent: str = "fp32", marks: Marks | bool | None = None
    ) -> Session:
        """Return a new `Session` over this model; the parameters are the session's."""
        return Session(self, capacity=capacity, latent=latent, marks=marks)

    def step(self, pairs: Iterable[tuple[Session, int]]) -> list[npt.NDArray[np.float32]]:
        """Take in one token in each of several sessions, at whatever positions, in one pass.

        Weights are read once for all of them.  Each session gets the bits that `Session.step` would have given it,
        whatever its companions.

        Parameters
        ----------
        pairs
            (session, token) pairs; the sessions are of this model, each of them once.

        Returns
        -------
        list of float32[vocab]
            The logits for the token after each, in order; the caller's own.

        Raises
        ------
        BatchError
            Sessions failed: closed, in use by another thread, with an open draft, full, cancelled, or with a value
            that is not finite, and those given a token that is none.  The others have gone on.  ``results`` has a row
            or an exception for each, in order.
        ConfigError
            No pairs, a session twice, or one of another model; nothing was run.
        ClosedError
            The model is closed.

        Examples
        --------
        >>> import k3session as k3
        >>> with k3.Model.open() as model, model.session() as a, model.session() as b:
        ...     rows = model.forward([(a, [82, 79, 77]), (b, [74, 85])])
        ...     rows = model.step([(a, int(rows[0].argmax())), (b, int(rows[1].argmax()))])
        ...     len(rows), a.position, b.position
        (2, 4, 3)
        """
        return batch.step(self, pairs)

    def forward(
        self, pairs: Iterable[tuple[Session, Sequence[int] | npt.NDArray[Any]]]
    ) -> list[npt.NDArray[np.float32]]:
        """Take in tokens in each of several sessions, 128 rows to a pass.

        A session with few tokens drops out when it has them, and the others go on.  Each gets the bits that
        `Session.prefill` would have given it, whatever its companions.

        Parameters
        ----------
        pairs
            (session, ids) pairs: token ids [n], or embeddings float32[n, hidden_size] in their place; the sessions
            are of this model, each of them once.

        Returns
        -------
        list of float32[vocab]
            The logits for the token after the last one of each, in order; the caller's own.

        Raises
        ------
        BatchError
            As in `step`.  A session that fails stands at the end of the last pass that it came through.
        ConfigError
            No pairs, a session twice, or one of another model; nothing was run.
        ClosedError
            The model is closed.
        KeyboardInterrupt
            Every session stands at the end of its last finished pass and can go on.
        """
        return batch.forward(self, pairs)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; needs the extra ``k3session[text]``."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_dir(self.path)
            return self._tokenizer

    def tokenizer_or_none(self) -> Tokenizer | None:
        """The tokenizer, or None where the folder has none."""
        return self.tokenizer if (self.path / "tiktoken.model").is_file() else None

    @property
    def fingerprint(self) -> Fingerprint:
        """Which model this is, whatever folder or shards it lies in; computed when first asked for."""
        with self._lock:
            if self._fingerprint is None:
                if self._checkpoint is None:
                    raise self._closed()
                self._fingerprint = self._checkpoint.fingerprint()
            return self._fingerprint

    @property
    def memory(self) -> MemoryPlan | None:
        """How the budget that the model was opened with was divided; None without one."""
        return None if self._engine is None else self._engine.plan

    @property
    def gpu_memory(self) -> MemoryPlan | None:
        """How the budget of GPU memory that the model was opened with was divided; None without one or a GPU."""
        return None if self._engine is None else self._engine.gpu_plan

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to a session with an fp32 latent cache; half of it with bf16."""
        return memory_estimate(self.config, 0, layers=self.layers)["latent_per_token_fp32"]

    @property
    def sessions(self) -> list[Session]:
        """Sessions that are open."""
        with self._lock:
            return sorted(self._sessions, key=lambda s: s.name)

    @property
    def stats(self) -> Stats:
        """What all sessions have done, closed ones too, and what the open ones hold; see `k3session.Stats`."""
        self._check_open()
        counts, sessions = Counts(), self.sessions
        counts.add(self._past)
        for session in sessions:
            counts.add(session._counts)
        return collect(self, counts, sessions)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._decoder is None

    def close(self) -> None:
        """Let go of the files and the threads.  Closing twice is fine.

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
            # The table of tensors goes too: of the released model it takes hundreds of megabytes.
            checkpoint, self._checkpoint = self._checkpoint, None
            self._weights = self._decoder = self._batch_scratch = None
            engine = self._engine
        if engine is not None:
            engine.close()
        if checkpoint is not None:
            checkpoint.close()
        self._pool()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A session in use by another thread cannot be closed; an exception that is on its way stays the one seen.
        with contextlib.suppress(SessionBusyError) if kind is not None else contextlib.nullcontext():
            for session in self.sessions:
                session.close()
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Model is a handle to mapped files and cannot be pickled; pass its path and open it there"
        )

    def __repr__(self) -> str:
        first, end = self.layers
        n = self.config.num_hidden_layers
        held = f"{n} layers" if end - first == n else f"layers {first} to {end - 1} of {n}"
        state = (
            "closed" if self.is_closed else f"{held} on {self.device} ({self.isa}, {self.threads} threads)"
        )
        return f"<Model {self.path.name}: {state}>"

    # ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._decoder is None:
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(f"the model {self.path.name} has been closed; open it again")

    def _open_decoder(self) -> Any:
        self._check_open()
        first, end = self.layers
        if (first, end) != (0, self.config.num_hidden_layers):
            raise ConfigError(
                f"this model holds layers {first} to {end - 1} of {self.config.num_hidden_layers}, and a session takes "
                "all of them: use k3session.Stage, or k3session.pipeline, which puts the ranges together"
            )
        return self._decoder

    def _register(self, session: Session) -> None:
        with self._lock:
            self._check_open()
            self._sessions.add(session)

    def _forget(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)
            self._past.add(session._counts)
            self._past.add_streamed(session._scratch.streamed())
