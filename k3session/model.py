# SPDX-License-Identifier: MIT
"""A model: the weights of a checkpoint, open and immutable, shared by its sessions."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from k3session import env
from k3session._core import ops
from k3session._core.decoder import Decoder
from k3session._core.weights import Weights
from k3session.alive import Alive
from k3session.checkpoint import Checkpoint
from k3session.config import K3Config
from k3session.errors import ClosedError, ConfigError, DeviceError, SessionBusyError
from k3session.fingerprint import Fingerprint
from k3session.progress import Progress, ProgressArgument
from k3session.sampling import Sampling, read_generation_config
from k3session.session import Session
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

    def __init__(
        self, checkpoint: Checkpoint, *, threads: int, isa: str, progress: ProgressArgument = False
    ) -> None:
        report = Progress(progress)
        self._checkpoint: Checkpoint | None = checkpoint
        mode = ops.enter_float_mode()
        try:
            self._weights: Any = Weights(checkpoint, report or None)
        finally:
            ops.leave_float_mode(mode)
        self._decoder: Any = Decoder(self._weights)
        self._sessions: Alive[Session] = Alive()
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._fingerprint: Fingerprint | None = None
        self.config: K3Config = checkpoint.config
        self.path: Path = checkpoint.path
        self.threads = threads
        self.isa = isa
        self.device = "cpu"
        self.default_sampling: Sampling = read_generation_config(self.path, self.config.eos_token_id)
        _alive.add(self)
        ops.hold_pool()
        self._pool = weakref.finalize(self, ops.release_pool)
        self._pool.atexit = False  # at exit the threads go with the process

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] = _NOT_GIVEN,
        *,
        device: str = "auto",
        threads: int | None = None,
        progress: ProgressArgument = False,
    ) -> Model:
        """Open a checkpoint folder.

        Its files are checked whole, then mapped: what is not read by a pass takes no memory.

        Parameters
        ----------
        path
            A folder in the Hugging Face layout.  Not given: the small model that ships in the package.
        device
            "auto", "cpu", "cuda" or "cuda:N".  This version computes on the CPU: "auto" takes it, "cuda" raises.
        threads
            Threads of one pass.  None is ``K3_NUM_THREADS``, or the cores that this process may use.
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
        _check_device(device)
        isa = env.instruction_set(ops.best_isa(), ops.ISAS)
        checkpoint = Checkpoint.open(path, progress=progress)
        try:
            return cls(checkpoint, threads=threads, isa=isa, progress=progress)
        except BaseException:
            checkpoint.close()
            raise

    def session(self, *, capacity: int | None = None, latent: str = "fp32") -> Session:
        """Return a new `Session` over this model; the parameters are the session's."""
        return Session(self, capacity=capacity, latent=latent)

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
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to a session with an fp32 latent cache; half of it with bf16."""
        c = self.config
        return len(c.full_attn_layers) * (c.kv_lora_rank + c.qk_rope_head_dim) * 4

    @property
    def sessions(self) -> list[Session]:
        """Sessions that are open."""
        with self._lock:
            return sorted(self._sessions, key=lambda s: s.name)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._weights is None

    def close(self) -> None:
        """Let go of the files and the threads.  Closing twice is fine.

        Raises
        ------
        SessionBusyError
            Sessions are still open; the message names them.
        """
        with self._lock:
            if self._weights is None:
                return
            names = ", ".join(sorted(s.name for s in self._sessions))
            if names:
                raise SessionBusyError(
                    f"the model still has open sessions: {names}; close them first, or leave the with block"
                )
            # The table of tensors goes too: of the released model it takes hundreds of megabytes.
            checkpoint, self._checkpoint = self._checkpoint, None
            self._weights = self._decoder = None
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
        state = (
            "closed"
            if self.is_closed
            else f"{self.config.num_hidden_layers} layers on {self.device} ({self.isa}, {self.threads} threads)"
        )
        return f"<Model {self.path.name}: {state}>"

    # ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._weights is None:
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(f"the model {self.path.name} has been closed; open it again")

    def _open_decoder(self) -> Any:
        self._check_open()
        return self._decoder

    def _register(self, session: Session) -> None:
        with self._lock:
            self._check_open()
            self._sessions.add(session)

    def _forget(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)


def _check_device(device: str) -> None:
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdecimal())):
        raise ConfigError(f"device is {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda":
        raise DeviceError("this build of k3session has no CUDA kernels; use device='cpu' or 'auto'")
    if kind == "auto":
        log.info("device 'auto': this build has no CUDA kernels, using the CPU")
