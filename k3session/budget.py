# SPDX-License-Identifier: MIT
"""How a memory budget is divided: what stays, what is read ahead, how many experts there is room for.

A byte of the trunk that stays saves one byte of reading in every pass.  A byte of expert cache saves as much only
where that expert is chosen in every pass, so the trunk comes first: experts get room to work in, and a cache with what
is left when the whole trunk stays.  docs/memory.md has the definition of what a budget covers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k3session.errors import ConfigError

__all__ = [
    "LIMITS",
    "Limits",
    "MemoryPlan",
    "Need",
    "Step",
    "available",
    "cut",
    "divide",
    "read_memory",
    "spread",
]

PAGE = 4096
_MIB = 1 << 20
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """How streaming is done; tests use other values.

    ``block`` and ``chunk`` are the most bytes in a block of the trunk and in one read, ``threads`` how many reads
    there are at a time, ``direct`` whether they go past the page cache where that can be, ``half_life`` the passes
    after which a use of an expert counts half (benches/expert_cache.py has the measurement), ``spare`` what is never
    given out.
    """

    block: int = 64 * _MIB
    least_block: int = _MIB
    chunk: int = 4 * _MIB
    threads: int = 4
    direct: bool = True
    half_life: float = 16.0
    spare: int = 8 * _MIB


LIMITS = Limits()


class Step(NamedTuple):
    """What a pass needs next: ``rows`` of ``row_bytes`` each, of ``parts`` matrices; a ``whole`` one is never cut."""

    rows: int
    row_bytes: int
    parts: int = 1
    whole: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What the host's part of a model asks for.

    ``steps`` is the trunk in the order of the graph; ``weights`` the bytes of everything, the embedding and all experts
    included; ``expert`` the bytes of one expert (0 where they are elsewhere), of which a pass of one token uses
    ``chosen`` in each of ``moe_layers`` layers of ``experts``.
    """

    steps: Sequence[Step]
    weights: int
    expert: int
    experts: int
    moe_layers: int
    chosen: int

    @property
    def trunk(self) -> int:
        """Bytes that every pass reads."""
        return sum(step.nbytes for step in self.steps)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a budget was divided, in bytes, of the host's memory or of a GPU's.

    ``mapped`` tells that everything fits, so that the files are mapped, or all of it is on the GPU, and nothing is
    streamed.  Otherwise ``process`` is what the process held when the model was opened (on a GPU, what is never
    streamed: norms and other vectors), ``session`` what one session takes, ``resident`` the part of the trunk that
    stays, ``ring`` what is read ahead, and ``slots`` the experts of ``slot`` bytes that there is room
    for; ``streamed`` is read from the files for each pass, beside the experts that are not in a slot.  ``smallest`` is
    the smallest budget that works.
    """

    budget: int
    mapped: bool
    process: int
    session: int
    block: int
    ring: int
    slots: int
    slot: int
    resident: int
    streamed: int
    smallest: int

    def to_dict(self) -> dict[str, Any]:
        """The same as a dict that JSON can hold."""
        return asdict(self)


def read_memory(
    memory: int | str | None, name: str = "memory", free: Callable[[], int] | None = None
) -> int | None:
    """Return a budget in bytes from what a user gave: a number of bytes, "8GiB", "auto" or None.

    ``free`` gives what "auto" means; without it, what the process has and may still take.  ``name`` is for messages.

    Raises
    ------
    ConfigError
        It is none of these.
    """
    if memory is None:
        return None
    if memory == "auto":
        return process_bytes() + available() if free is None else free()
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", memory) if isinstance(memory, str) else None
    if found and found[2].upper() in _UNITS:
        budget = int(float(found[1]) * _UNITS[found[2].upper()])
    elif isinstance(memory, int) and not isinstance(memory, bool):
        budget = memory
    else:
        budget = 0
    if budget <= 0:
        raise ConfigError(
            f"{name} is {memory!r}; expected bytes, a size such as '8GiB' or '500MB', 'auto' or None"
        )
    return budget


def process_bytes() -> int:
    """Bytes of memory that this process has in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available() -> int:
    """Bytes that this process may still take: what the machine and its cgroups have free, less a tenth."""
    rooms = [
        int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")
    ]
    for line in _lines("/proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(Path("/sys/fs/cgroup"), place, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            rooms += _rooms(Path("/sys/fs/cgroup/memory"), place, *names)
    return max(0, min(rooms, default=0) * 9 // 10)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _rooms(root: Path, place: str, limit: str, used: str) -> Iterator[int]:
    """What is free under each limit from a cgroup up; the page cache of files counts as free."""
    folder = root / place.strip().lstrip("/")
    for at in (folder, *folder.parents):
        try:
            most, now = int((at / limit).read_text()), int((at / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        cached = [
            int(line.split()[1]) for line in _lines(at / "memory.stat") if line.startswith("inactive_file ")
        ]
        yield max(0, most - now + sum(cached))


def cut(step: Step, block: int) -> list[tuple[int, int]]:
    """Return (first row, rows) of the blocks of a step, of about equal size and at most `block` bytes."""
    if step.whole or step.nbytes <= block:
        return [(0, step.rows)]
    most = max(1, block // step.row_bytes)
    each = -(-step.rows // -(-step.rows // most))
    if most >= 32:  # whole tiles of the kernels
        each = min(most // 32 * 32, -(-each // 32) * 32)
    return [(first, min(each, step.rows - first)) for first in range(0, step.rows, each)]


def room(nbytes: int, parts: int = 1) -> int:
    """The most memory that bytes of a file take, which are read in whole pages, each part by itself."""
    return -(-nbytes // PAGE) * PAGE + parts * PAGE


def spread(rooms: Sequence[int], keep: int) -> list[bool]:
    """Choose blocks that stay, `keep` bytes at most, evenly: so the disk has a block to read during each that stays.

    All of them where they fit.  With the first ones resident and the rest streamed, the disk would fill what there is
    room for ahead, and wait.
    """
    total, kept, seen = sum(rooms), 0, 0
    if total <= keep:
        return [True] * len(rooms)
    chosen = []
    for size in rooms:
        seen += size
        stays = (kept + size) * total <= keep * seen
        kept += size if stays else 0
        chosen.append(stays)
    return chosen


def divide(
    budget: int, process: int, session: int, need: Need, limits: Limits | None = None, name: str = "memory"
) -> MemoryPlan:
    """Divide a budget.

    Parameters
    ----------
    budget
        Bytes of resident memory that the process may have.
    process
        Bytes that it has already.
    session
        Bytes of one session.
    need
        What the model asks for.
    name
        "memory" or "gpu_memory", for messages.

    Raises
    ------
    ConfigError
        The budget is too small; the message has the smallest that works.
    """
    limits = limits or LIMITS
    slot = room(need.expert, 6) if need.expert else 0
    all_slots = need.experts * need.moe_layers
    parts = max((s.parts for s in need.steps), default=1)
    # What can never be cut smaller.
    uncut = max((s.nbytes if s.whole else s.row_bytes for s in need.steps), default=0)

    def biggest(block: int) -> int:
        return room(max(uncut, min(block, max((s.nbytes for s in need.steps), default=0))), parts)

    base = process + session + limits.spare
    least_slots = min(2, all_slots) if slot else 0
    smallest = 2 * biggest(limits.least_block) + least_slots * slot + base
    smallest = -(-smallest * 100 // (99 * _MIB)) * _MIB  # one part in a hundred stays free
    rest = budget * 99 // 100 - base
    plan = {"budget": budget, "process": process, "session": session, "slot": slot, "smallest": smallest}
    if need.weights + PAGE * all_slots <= rest:
        return MemoryPlan(mapped=True, block=0, ring=0, slots=0, resident=0, streamed=0, **plan)
    if budget < smallest:
        # The next attempt finds a process that holds a little more.
        works = smallest + (_MIB if name == "memory" else 0)
        holds = "the process holds" if name == "memory" else "what is never streamed takes"
        already = " already" if name == "memory" else ""
        raise ConfigError(
            f"{name} is {budget} bytes ({budget / _MIB:.0f} MiB); the smallest that works here is {works} "
            f"({works // _MIB} MiB): {holds} {process // _MIB} MiB{already}, and a session takes "
            f"{session // _MIB} MiB"
        )
    block = min(limits.block, max(limits.least_block, rest // 32 // _MIB * _MIB))
    while block > limits.least_block and 2 * biggest(block) + least_slots * slot > rest:
        block = max(limits.least_block, block // 2)
    blocks = sum(len(cut(s, block)) for s in need.steps)
    trunk = need.trunk + 2 * PAGE * parts * blocks
    if trunk + least_slots * slot <= rest:
        slots = min(all_slots, (rest - trunk) // slot) if slot else 0
        return MemoryPlan(
            mapped=False, block=block, ring=0, slots=slots, resident=need.trunk, streamed=0, **plan
        )
    ring = max(2 * biggest(block), min(4 * biggest(block), (rest - least_slots * slot) // 2))
    left = rest - ring
    slots = 0
    if slot:
        slots = min(all_slots, max(least_slots, min(2 * need.chosen, left // 4 // slot)))
    keep = max(0, left - slots * slot)
    resident = need.trunk * keep // trunk
    return MemoryPlan(
        mapped=False, block=block, ring=ring, slots=slots, resident=resident,
        streamed=need.trunk - resident, **plan,
    )  # fmt: skip
