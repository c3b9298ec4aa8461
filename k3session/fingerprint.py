# SPDX-License-Identifier: MIT
"""Which model this is: digests that do not depend on how a checkpoint is cut into files.

A tensor is identified by its canonical name, dtype, shape and bytes.  Up to 16 KiB all bytes count; of
a larger one the first, middle and last 512, and of a large matrix of a routed expert, of which there
may be half a million, the middle 512.  So two models that differ only between those windows look the
same here; a training step, another quantisation or a truncated download does not.
:meth:`k3session.checkpoint.Checkpoint.deep_digest` reads everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import xxhash

from k3session.config import K3Config
from k3session.progress import Progress
from k3session.shards import StoredTensor, Unread

if TYPE_CHECKING:
    from k3session.checkpoint import Checkpoint

__all__ = ["Fingerprint", "config_digest", "digest_checkpoint"]

WHOLE = 16 * 1024
WINDOW = 512
_BLOCK = 8 * 2**20
_VERSION = 1
#: Configuration values that no logit depends on.
_NOT_NUMERIC = (
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)

#: Called with each block of a tensor and the place of its first byte, while everything is read anyway.
Visitor = Callable[[StoredTensor, memoryview, int], None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """XXH3-128 digests, in hex, of a model and its parts.

    ``layers[i]`` covers the tensors of layer i, ``embedding`` the embedding table, ``head`` the final
    norms and the output head, ``config`` the values that the logits depend on.  ``deep`` tells
    whether all bytes were read.  Where a checkpoint was opened for some of its layers, the parts that
    are not there are empty strings; `joined` puts such fingerprints together.
    """

    config: str
    embedding: str
    layers: tuple[str, ...]
    head: str
    deep: bool = False

    @property
    def digest(self) -> str:
        """One digest over all of it."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self._parts(), sort_keys=True).encode())

    def __str__(self) -> str:
        return self.digest

    @classmethod
    def joined(cls, parts: Iterable[Fingerprint]) -> Fingerprint:
        """Put the fingerprints of ranges of layers together.

        Raises
        ------
        ValueError
            They are of different models, or a part is in none of them.
        """
        given = list(parts)
        if not given or len({(p.config, len(p.layers), p.deep) for p in given}) != 1:
            raise ValueError("fingerprints of different configurations cannot be joined")

        def one(name: str, digests: Iterable[str]) -> str:
            found = {digest for digest in digests if digest}
            if len(found) != 1:
                raise ValueError(
                    f"{name}: expected one digest, found {len(found)}: different weights, or none"
                )
            return found.pop()

        layers = [one(f"layer {i}", d) for i, d in enumerate(zip(*(p.layers for p in given), strict=True))]
        embedding = one("the embedding", (p.embedding for p in given))
        head = one("the head", (p.head for p in given))
        return cls(given[0].config, embedding, tuple(layers), head, given[0].deep)

    def _parts(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "deep": self.deep,
            "config": self.config,
            "embedding": self.embedding,
            "layers": list(self.layers),
            "head": self.head,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can hold."""
        return self._parts() | {"digest": self.digest}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Fingerprint:
        """Read what `to_dict` returned.

        Raises
        ------
        ValueError
            The dict is not a fingerprint, is of another version, or does not match its own digest.
        """
        if not isinstance(d, Mapping) or d.get("version") != _VERSION:
            found = d.get("version") if isinstance(d, Mapping) else d
            raise ValueError(f"fingerprint version is {found!r}; expected {_VERSION}")
        layers = d.get("layers")
        texts = [d.get(key) for key in ("config", "embedding", "head")]
        texts += layers if isinstance(layers, list) else [None]
        if not all(isinstance(text, str) for text in texts) or not isinstance(d.get("deep"), bool):
            raise ValueError("a fingerprint holds digests in config, embedding, layers and head")
        made = cls(d["config"], d["embedding"], tuple(d["layers"]), d["head"], d["deep"])
        if d.get("digest", made.digest) != made.digest:
            raise ValueError("the fingerprint's digest does not match its parts")
        return made

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Return the parts that differ as ``{part: (here, in other)}``; empty for the same model."""
        mine, theirs = self._named(), other._named()
        return {
            key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)
        }

    def _named(self) -> dict[str, Any]:
        named = {"deep": self.deep, "config": self.config, "embedding": self.embedding}
        named |= {f"layers[{i}]": digest for i, digest in enumerate(self.layers)}
        return named | {"head": self.head}


def config_digest(config: K3Config) -> str:
    """Digest of the values that the logits depend on."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _NOT_NUMERIC}
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def digest_checkpoint(
    checkpoint: Checkpoint,
    *,
    deep: bool = False,
    progress: Progress | None = None,
    visit: Visitor | None = None,
) -> Fingerprint:
    """Digest the tensors of an open checkpoint; `visit` sees every block when `deep`."""
    layers: list[list[StoredTensor]] = [[] for _ in range(checkpoint.config.num_hidden_layers)]
    embedding: list[StoredTensor] = []
    head: list[StoredTensor] = []
    for name in checkpoint.names:
        tensor = checkpoint.info(name)
        if tensor.layer is not None:
            layers[tensor.layer].append(tensor)
        else:
            (embedding if tensor.component == "embedding" else head).append(tensor)
    report = progress or Progress()
    done = 0
    total = sum(checkpoint.info(name).nbytes for name in checkpoint.names)

    def digest(tensors: Iterable[StoredTensor]) -> str:
        nonlocal done
        state = xxhash.xxh3_128()
        for tensor in sorted(tensors, key=lambda t: t.name):
            state.update(f"{tensor.name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            data = checkpoint.data(tensor.name)
            if deep:
                for start in range(0, len(data), _BLOCK):
                    block = data[start : start + _BLOCK]
                    state.update(block)
                    if visit is not None:
                        visit(tensor, block, start)
                    done += len(block)
                    report("hash", done, total)
            else:
                _sample(state, data, ends=tensor.component != "experts")
        return state.hexdigest()

    # Sampling touches a page here and there: reading ahead would fetch many times what is looked at.
    with checkpoint.reading_at_random(not deep):
        parts = [digest(tensors) if tensors else "" for tensors in (embedding, *layers, head)]
    return Fingerprint(config_digest(checkpoint.config), parts[0], tuple(parts[1:-1]), parts[-1], deep)


def _sample(state: Any, data: memoryview | Unread, *, ends: bool) -> None:
    if len(data) <= WHOLE:
        state.update(data[:])
        return
    middle, last = (len(data) - WINDOW) // 2, len(data) - WINDOW
    for start in (0, middle, last) if ends else (middle,):
        state.update(data[start : start + WINDOW])
