# SPDX-License-Identifier: MIT
"""One model in one runtime, under the same few verbs for k3session and for each peer.

Nothing of a peer is imported before its class is opened: each is optional.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
#: The package that each runtime needs.
PACKAGES = {"k3session": "k3session", "llama.cpp": "llama_cpp", "mlx-lm": "mlx_lm"}


class Refused(Exception):
    """The runtime cannot do what was asked, in a sentence."""


def installed(runtime: str) -> bool:
    """Whether a runtime can be imported."""
    return importlib.util.find_spec(PACKAGES[runtime]) is not None


class Mapped:
    """The first GiB of a file as ranges for the bandwidth probe: pages that the runtime has mapped too."""

    def __init__(self, path: str | os.PathLike[str], most: int = 1 << 30) -> None:
        with open(path, "rb") as file:
            size = min(most, os.fstat(file.fileno()).st_size)
            self._map = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.spans = [(int(self._bytes.ctypes.data), size)]


class Runner:
    """What the worker calls.  ``bytes_per_token`` is what a step reads; ``spans`` are ranges of its weights."""

    bytes_per_token: int
    spans: list[tuple[int, int]]
    vocab: int

    def reset(self) -> None:
        """Go to position 0."""
        raise NotImplementedError

    def prefill(self, ids: Ids) -> Logits:
        """Take in tokens in one call; the logits after the last one."""
        raise NotImplementedError

    def step(self, token: int) -> Logits:
        """Take in one token."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the model."""


class K3(Runner):
    """k3session.  ``weights`` and ``precision`` are options of Model.open that a build may not have yet."""

    def __init__(self, path: str, threads: int, weights: str = "stored", precision: str = "exact") -> None:
        import k3session as k3

        options: dict[str, Any] = {}
        if weights != "stored":
            options["weights"] = weights
        if precision != "exact":
            options["prefill_precision"] = precision
        try:
            self.model = k3.Model.open(path, device="cpu", threads=threads, **options)
        except (TypeError, k3.ConfigError) as problem:
            raise Refused(f"Model.open refuses {options}: {problem}") from None
        self.session: Any = None
        self.vocab = self.model.config.vocab_size
        self.step_bytes: dict[str, int] = self.model._weights.step_bytes()
        self.bytes_per_token = sum(self.step_bytes.values())
        self.spans = self.model._weights.spans()
        self._out = np.empty(self.vocab, np.float32)
        self.reset()

    def reset(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session = self.model.session(marks=False)

    def prefill(self, ids: Ids) -> Logits:
        return self.session.prefill(ids)  # type: ignore[no-any-return]

    def step(self, token: int) -> Logits:
        return self.session.step(token, out=self._out)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.session.close()
        self.model.close()


class Llama(Runner):
    """llama.cpp through the low-level functions of llama-cpp-python: a step is one call of the library."""

    def __init__(self, path: str, threads: int, sizes: dict[str, int], context: int = 1024) -> None:
        import llama_cpp as L

        @L.llama_log_callback
        def quiet(_level: int, text: bytes, _data: Any) -> None:
            self.log.append(text.decode(errors="replace"))

        self.L, self.log, self._quiet = L, [], quiet
        L.llama_log_set(quiet, ctypes.c_void_p(0))
        L.llama_backend_init()
        options = L.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = L.llama_model_load_from_file(os.fsencode(path), options)
        if not self.model:
            raise Refused(f"llama.cpp does not load {Path(path).name}: {''.join(self.log[-3:]).strip()}")
        wanted = L.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = context, 512, 512
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.no_perf = True
        self.context = L.llama_init_from_model(self.model, wanted)
        if not self.context:
            raise Refused(f"llama.cpp makes no context: {''.join(self.log[-3:]).strip()}")
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self._batch = L.llama_batch_init(512, 0, 1)
        self._position = 0
        self._mapped = Mapped(path)
        self.bytes_per_token, self.spans = (
            sizes["trunk"] + sizes["experts"] + sizes["state"],
            self._mapped.spans,
        )

    def reset(self) -> None:
        self.L.llama_memory_clear(self.L.llama_get_memory(self.context), True)
        self._position = 0

    def prefill(self, ids: Ids) -> Logits:
        last = None
        for at in range(0, len(ids), 512):
            last = self._take(ids[at : at + 512].tolist())
        assert last is not None
        return last

    def step(self, token: int) -> Logits:
        return self._take([token])

    def _take(self, ids: list[int]) -> Logits:
        b = self._batch
        b.n_tokens = len(ids)
        for i, token in enumerate(ids):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, self._position + i, 1, 0
            b.logits[i] = i == len(ids) - 1
        status = self.L.llama_decode(self.context, b)
        if status != 0:
            raise Refused(f"llama_decode says {status}: {''.join(self.log[-3:]).strip()}")
        self._position += len(ids)
        row = self.L.llama_get_logits_ith(self.context, len(ids) - 1)  # waits for the result
        return np.ctypeslib.as_array(row, shape=(self.vocab,))

    def close(self) -> None:
        self.L.llama_batch_free(self._batch)
        self.L.llama_free(self.context)
        self.L.llama_model_free(self.model)


class Mlx(Runner):
    """mlx-lm on the CPU.  It decides on its threads itself."""

    def __init__(self, path: str, sizes: dict[str, int], dtype: str | None) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        self.mx, self._cache_of = mx, make_prompt_cache
        try:
            self.model, config = load_model(Path(path))
        except (ValueError, KeyError, RuntimeError) as problem:
            raise Refused(f"mlx-lm does not load the checkpoint: {problem}") from None
        if dtype is not None:
            self.model.set_dtype(getattr(mx, dtype))
        self.vocab = int(config.get("text_config", config)["vocab_size"])
        shard = max(Path(path).glob("*.safetensors"), key=lambda p: p.stat().st_size)
        self._mapped = Mapped(shard)
        self.bytes_per_token, self.spans = (
            sizes["trunk"] + sizes["experts"] + sizes["state"],
            self._mapped.spans,
        )
        self.reset()

    def reset(self) -> None:
        self.cache = self._cache_of(self.model)

    def prefill(self, ids: Ids) -> Logits:
        row = self.model(self.mx.array(ids)[None], cache=self.cache)[0, -1].astype(self.mx.float32)
        self.mx.eval(row)
        return np.array(row)

    def step(self, token: int) -> Logits:
        return self.prefill(np.array([token], np.int32))


def opened(what: dict[str, Any], threads: int) -> Runner:
    """The runner that a description asks for: ``runtime``, ``path`` and its options."""
    runtime, path = what["runtime"], what["path"]
    if not installed(runtime):
        raise Refused(f"{PACKAGES[runtime]} is not installed")
    if runtime == "k3session":
        return K3(path, threads, what.get("weights", "stored"), what.get("precision", "exact"))
    if runtime == "llama.cpp":
        return Llama(path, threads, what["sizes"])
    return Mlx(path, what["sizes"], what.get("dtype"))
