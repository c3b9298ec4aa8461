# SPDX-License-Identifier: MIT
"""``mpiexec -n 4 python -m k3session.pipeline generate DIR PROMPT``, or ``... run PROGRAM``: see docs/pipeline.md.

Each process that MPI starts is a keeper, which starts the one that works and waits for it.  When that one is killed,
the keeper is there to say which rank it was, and its own exit code makes MPI end the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Any

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_USAGE = """usage: mpiexec -n N python -m k3session.pipeline generate DIR PROMPT [--layers A:B,B:C,...] [options]
       mpiexec -n N python -m k3session.pipeline run PROGRAM [arguments]

generate   continue a text, with the options of 'k3session generate'
run        run a program of yours in the first process, which opens a k3session.pipeline.PipelineModel; the others serve
"""


def main(arguments: list[str]) -> int:
    """Keep the process that works, and return its exit code."""
    if not arguments or arguments[0] not in ("generate", "run") or len(arguments) < 2:
        sys.stderr.write(_USAGE)
        return 2
    reader, writer = os.pipe()
    child = os.fork()  # before anything else is loaded: one thread, little memory
    if child == 0:
        os.close(reader)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # without its keeper it is not to stay
        code = 1
        try:
            code = _work(arguments, writer)
        except SystemExit as end:
            code = _code_of(end)
        except BaseException:  # noqa: BLE001 - the last frame of this process: what would be printed is printed here
            sys.excepthook(*sys.exc_info())
        return code
    os.close(writer)
    with os.fdopen(reader) as said:
        rank = said.readline().strip() or "not known yet"
        status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(
            f"k3session.pipeline: rank {rank} (process {child} on {socket.gethostname()}) was ended by {name}; "
            "the job ends\n"
        )
        sys.stderr.flush()
        code = 128 - code
    os._exit(code)


def _work(arguments: list[str], writer: int) -> int:
    """What the process does that works: rank 0 the command, the others their stage."""
    from k3session.pipeline.place import serve
    from k3session.pipeline.post import world

    comm = world()
    os.write(writer, f"{comm.Get_rank()} of {comm.Get_size()}\n".encode())
    os.close(writer)
    if serve(comm):
        return 0
    return _run(arguments[1:]) if arguments[0] == "run" else _generate(arguments[1:])


def _run(arguments: list[str]) -> int:
    """A program of the user's, as ``python PROGRAM`` runs it."""
    import runpy

    sys.argv[:] = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _generate(arguments: list[str]) -> int:
    from k3session import cli
    from k3session.pipeline.model import PipelineModel

    folder, rest = arguments[0], arguments[1:]
    layers: list[tuple[int, int]] | None = None
    if "--layers" in rest:
        at = rest.index("--layers")
        try:
            layers = [(int(a), int(b)) for a, b in (pair.split(":") for pair in rest[at + 1].split(","))]
        except (ValueError, IndexError):
            sys.stderr.write(
                "k3session.pipeline: --layers expects a range for each process, as in 0:24,24:47,47:70,70:93\n"
            )
            return 2
        del rest[at : at + 2]

    def open_model(path: str, **options: Any) -> PipelineModel:
        return PipelineModel.open(path, layers=layers, **options)

    return cli.main(["generate", "--model", folder, *rest], open_model=open_model)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
