# SPDX-License-Identifier: MIT
"""K3's tokenizer: a byte-level BPE whose ranks stand in a checkpoint's ``tiktoken.model``.

The 256 ids that follow the ranks are special tokens, named by ``tokenizer_config.json``.  tiktoken
does the merging and is imported when a tokenizer is made.
"""

from __future__ import annotations

import base64
import importlib
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3session.errors import CheckpointError, ConfigError, InvalidTokenError

if TYPE_CHECKING:
    import tiktoken

__all__ = ["MissingExtraError", "Tokenizer"]

NUM_SPECIAL = 256
#: Name of each special token that K3 names, by its distance from the number of ranks.
SPECIAL_OFFSETS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
#: Either ends a generation: the first closes a chat message, the second a document.
STOP_NAMES = ("<|end_of_msg|>", "[EOS]")

# tiktoken's regex engine gives up on longer inputs, and on longer runs of spaces or of non-spaces; the
# limits are part of the format, because a cut that falls elsewhere changes the tokens around it.
MAX_CHUNK = 400_000
MAX_RUN = 25_000


def split_pattern() -> str:
    """K3's pre-tokenisation: the pieces that byte pairs are never merged across.

    Needs an engine with class intersection (``&&``), as tiktoken's has.
    """
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    before = r"[^\r\n\p{L}\p{N}]?"  # a space or a mark of punctuation belongs to the word it precedes
    contraction = r"(?i:'(?:s|t|re|ve|m|ll|d))?"
    return "|".join(
        (
            r"\p{Han}+",
            f"{before}{upper}*{lower}+{contraction}",
            f"{before}{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is not installed; the message says how to install it."""


class Tokenizer:
    """K3's tokenizer.

    Parameters
    ----------
    ranks
        Bytes of each base token and its rank; the ranks are 0 to ``len(ranks) - 1``.
    special_names
        Name by id, for ids from ``len(ranks)`` to ``len(ranks) + 255``.  An id without a name is
        called ``<|reserved_token_{id}|>``.  Without the argument, K3's names.
    stop_names
        Names of the special tokens that end a generation; those that do not exist are left out.

    Raises
    ------
    CheckpointError
        The ranks or the names cannot be used.
    MissingExtraError
        tiktoken is not installed.

    Examples
    --------
    >>> tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    >>> tokenizer.encode("<|open|>")[:3], tokenizer.encode("<|open|>", allow_special=True)
    ([60, 124, 111], [259])
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_names: Mapping[int, str] | None = None,
        *,
        stop_names: Iterable[str] = STOP_NAMES,
    ) -> None:
        base = len(ranks)
        names = {base + k: v for k, v in SPECIAL_OFFSETS.items()} if special_names is None else special_names
        problems = [*_rank_problems(ranks), *_name_problems(names, base)]
        if problems:
            raise _unusable("the tokenizer", problems)
        ids = range(base, base + NUM_SPECIAL)
        self._special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self._bytes = sorted(ranks, key=ranks.__getitem__) + [name.encode() for name in self._special]
        self._special_ids = frozenset(ids)
        self._eos_ids = tuple(
            self._special[name] for name in dict.fromkeys(stop_names) if name in self._special
        )
        self._encoding: tiktoken.Encoding = _import_tiktoken().Encoding(
            name="kimi-k3",
            pat_str=split_pattern(),
            mergeable_ranks=dict(ranks),
            special_tokens=self._special,
        )

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read ``tiktoken.model`` and, where it exists, ``tokenizer_config.json`` of a checkpoint folder.

        Raises
        ------
        CheckpointError
            A file is missing, malformed, or contradicts the other.
        MissingExtraError
            tiktoken is not installed.
        """
        folder = Path(path)
        ranks = _read_ranks(folder / "tiktoken.model")
        names, eos = _read_names(folder / "tokenizer_config.json")
        try:
            return cls(ranks, names, stop_names=(*STOP_NAMES, *eos))
        except CheckpointError as error:
            raise _unusable(f"the tokenizer in {folder}", error.problems) from None

    @property
    def vocab_size(self) -> int:
        """Number of ids: the ranks and the 256 special tokens."""
        return len(self._bytes)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Id of each special token by name, reserved ones included; a copy."""
        return dict(self._special)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: ``<|end_of_msg|>``, ``[EOS]``, and the ``eos_token`` of the folder."""
        return self._eos_ids

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the ids of ``text``.

        Parameters
        ----------
        text
            Any string.  A lone surrogate, which UTF-8 cannot express, becomes U+FFFD.
        allow_special
            Whether the name of a special token stands for that token.  By default it is ordinary
            text, so that nothing a user writes can be taken for a control token.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode() takes a str, not {type(text).__name__}")
        ids: list[int] = []
        for chunk in _chunks(text):
            if allow_special:
                ids += self._encoding.encode(chunk, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(chunk)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; of a special token, its name in UTF-8."""
        index = as_id(token)
        if 0 <= index < len(self._bytes):
            return self._bytes[index]
        raise InvalidTokenError(f"expected a token id from 0 to {len(self._bytes) - 1}, found {index}")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Return the bytes of ``ids``, with or without the names of special tokens."""
        parts = [self.token_bytes(i) for i in ids if not (skip_special and i in self._special_ids)]
        return b"".join(parts)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of ``ids``, with U+FFFD for bytes that are not UTF-8."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether ``token`` is one of the 256 special tokens."""
        return as_id(token) in self._special_ids

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size})"


def as_id(token: Any) -> int:
    """Return ``token`` as an int, or raise :class:`InvalidTokenError`."""
    try:
        return operator.index(token)
    except TypeError:
        raise InvalidTokenError(f"expected an integer token id, found {token!r}") from None


def _import_tiktoken() -> Any:
    try:
        return importlib.import_module("tiktoken")
    except ImportError as error:
        raise MissingExtraError(
            "K3's tokenizer needs tiktoken, which is not installed: pip install 'k3session[text]'"
        ) from error


def _chunks(text: str, max_chunk: int = MAX_CHUNK, max_run: int = MAX_RUN) -> Iterator[str]:
    """Cut ``text`` at every 400,000 characters, and again inside runs longer than 25,000."""
    long_run = re.compile(rf"\s{{{max_run + 1},}}|\S{{{max_run + 1},}}")
    for start in range(0, len(text), max_chunk):
        chunk = text[start : start + max_chunk]
        begin = 0
        for run in long_run.finditer(chunk):
            for cut in range(run.start() + max_run, run.end(), max_run):
                yield chunk[begin:cut]
                begin = cut
        yield chunk[begin:]


def _unusable(what: str, problems: Sequence[str]) -> CheckpointError:
    shown = "; ".join(problems[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return CheckpointError(f"{what} cannot be used: {shown}{more}", problems)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Parse lines of a base64 token, a space and its rank."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"expected the tokenizer's ranks in {path}, one base64 token and its rank on each line, "
            f"but it cannot be read: {error.strerror}"
        ) from None
    ranks: dict[bytes, int] = {}
    lines_of: dict[int, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            encoded, decimal = line.split()
            token = base64.b64decode(encoded, validate=True)
            rank = int(decimal) if decimal.isdigit() else -1
        except ValueError:
            token, rank = b"", -1
        if not token or rank < 0:
            found = line[:40].decode("ascii", "backslashreplace")
            problems.append(f"line {number}: expected a base64 token and its rank, found {found!r}")
        elif token in ranks:
            problems.append(f"line {number}: the token {token!r} already has rank {ranks[token]}")
        elif rank in lines_of:
            problems.append(f"line {number}: rank {rank} already stands on line {lines_of[rank]}")
        else:
            ranks[token] = rank
            lines_of[rank] = number
    if problems:
        raise _unusable(str(path), problems)
    return ranks


def _read_names(path: Path) -> tuple[dict[int, str] | None, list[str]]:
    """Read the names of the special tokens and the name of the one that ends a document."""
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise TypeError(f"a {type(config).__name__} in place of the object")
        eos = config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        added = config.get("added_tokens_decoder")
        names = None
        if added is not None:
            names = {int(i): token["content"] for i, token in added.items()}
            if not all(isinstance(name, str) for name in names.values()):
                raise TypeError("a content that is not a string")
    except FileNotFoundError:
        return None, []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected JSON with added_tokens_decoder as an object of id: {{content: name}}, "
            f"but reading it failed: {error or type(error).__name__}"
        ) from None
    return names, [eos] if isinstance(eos, str) else []


def _rank_problems(ranks: Mapping[bytes, int]) -> Iterator[str]:
    found = set(ranks.values())
    gap = next((rank for rank in range(len(ranks)) if rank not in found), None)
    if gap is not None:
        yield f"expected ranks 0 to {len(ranks) - 1} once each, and rank {gap} is missing"
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        # Without them some text could not be written in tokens at all.
        first = f"the first {missing[0]:#04x}"
        yield f"expected a rank for every single byte, and {len(missing)} are missing, {first}"


def _name_problems(names: Mapping[int, str], base: int) -> Iterator[str]:
    seen: dict[str, int] = {}
    last = base + NUM_SPECIAL - 1
    for i, name in sorted(names.items()):
        if not base <= i <= last:
            yield f"special token {name!r} has id {i}, expected {base} to {last}, after the {base} ranks"
        if not name or not name.isprintable():
            yield f"special token {i} is called {name!r}, expected one printable character or more"
        if name in seen:
            yield f"special tokens {seen[name]} and {i} are both called {name!r}"
        seen[name] = i
    for i in range(base, last + 1):
        taken = seen.get(f"<|reserved_token_{i}|>", i)
        if i not in names and taken != i:
            yield f"special token {taken} has the name that is reserved for {i}"
