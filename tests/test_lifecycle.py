# SPDX-License-Identifier: MIT
"""Beginnings and ends: import, fork, interpreter exit, garbage collection, and memory that comes back."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import signal
import subprocess
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from core_access import counts
from session_tools import prompt, run, start

import k3session as k3
from k3session.synth import synth

# Memory.  In a process of its own, that nothing else of the tests has used.

LEAKS = """
import gc, sys, tracemalloc
from pathlib import Path
import k3session as k3
from session_tools import resident
folder, work, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
model = k3.Model.open(folder, threads=2)

def sessions(i):
    with model.session(latent="bf16" if i % 3 == 0 else "fp32") as s:
        s.prefill([1, 2, 3] * (1 + i % 40))
        s.step(4)
        snap = s.snapshot()
        s.restore(snap)
        next(s.generate(2, sampling=k3.Sampling(seed=i)))
        if i % 10 == 0:
            s.save(work / "a.k3s")
            k3.Session.load(model, work / "a.k3s").close()
            k3.Snapshot.from_bytes(snap.to_bytes())

def dropped(i):
    model.session().prefill([1, 2, 3])          # never closed

def refused(*expected):
    def call(use):
        try:
            use()
        except expected:
            return
        raise AssertionError("was not refused")
    return call

def failed_sessions(i):
    refuse = refused(k3.K3Error, TypeError)
    refuse(lambda: model.session(capacity=0))
    refuse(lambda: model.session(latent="x"))
    refuse(lambda: k3.Session.load(model, work / "damaged.k3s"))
    refuse(lambda: k3.Session.load(model, work / "truncated.k3s"))
    refuse(lambda: k3.Session.load(model, work / "nothing.k3s"))
    refuse(lambda: k3.Session.load(model, work / "long.k3s", capacity=3))
    with model.session(capacity=5) as s:
        refuse(lambda: s.prefill([1] * 6))
        refuse(lambda: s.step(99))
        refuse(lambda: s.save(work / "nowhere" / "a.k3s"))

def failed_opens(i):
    refuse = refused(k3.K3Error)
    refuse(lambda: k3.Model.open(work / ("missing", "truncated", "wrong")[i % 3], threads=1))
    refuse(lambda: k3.Model.open(folder, threads=0))

with model.session() as s:
    s.prefill([1] * 9)
    data = bytearray(s.snapshot().to_bytes())
    s.save(work / "long.k3s")
(work / "truncated.k3s").write_bytes(data[:-1])
data[-1] ^= 1
(work / "damaged.k3s").write_bytes(data)

for use in (sessions, dropped, failed_sessions, failed_opens):
    for i in range(100):
        use(i)
    gc.collect()
    before = resident()
    for i in range(count):
        use(i)
    gc.collect()
    print(use.__name__, resident() - before)
assert [s for s in model.sessions] == []
model.close()
"""


def damaged(source: Path, folder: Path) -> None:
    """Checkpoints that cannot be opened: a file that is missing, one cut short, one with a tensor too many."""
    files = {p.name: p.read_bytes() for p in source.iterdir()}
    for kind in ("missing", "truncated", "wrong"):
        (folder / kind).mkdir()
        for name, data in files.items():
            if name.endswith(".safetensors"):
                if kind == "missing":
                    continue
                data = (
                    data[:-100] if kind == "truncated" else data.replace(b"lm_head.weight", b"lm_tail.weight")
                )
            (folder / kind / name).write_bytes(data)


def test_memory_comes_back(tmp_path: Path) -> None:
    folder = synth(tmp_path / "model", "micro")
    damaged(folder, tmp_path)
    count = counts(400, 1000)
    out = run(LEAKS, folder, tmp_path, count, timeout=500)
    growth = {name: int(n) for name, n in (line.split() for line in out.splitlines())}
    assert set(growth) == {"sessions", "dropped", "failed_sessions", "failed_opens"}
    assert all(n < (1 << 20) * count / 1000 for n in growth.values()), growth


CYCLES = """
import gc, os, sys, time
from pathlib import Path
import k3session as k3
from session_tools import resident, threads, threads_beside
def handles():
    maps = Path("/proc/self/maps").read_text()
    return (len(os.listdir("/proc/self/fd")), len(threads()), maps.count(sys.argv[1]))
before = threads()
first, sizes, seen = handles(), [], []
kept = []
for i in range(24):
    model = k3.Model.open(sys.argv[1], threads=3)
    session = model.session()
    session.prefill([5] * 300)
    session.step(1)
    model.fingerprint
    open_now = handles()
    assert open_now[2] > 0, open_now
    seen.append(open_now[1])
    session.close()
    model.close()
    kept.append((model, session))           # closing is enough, whoever still holds them
    assert not threads_beside(before)
    left = handles()
    assert left == first, (left, first)
    gc.collect()
    sizes.append(resident())
assert max(seen) == first[1] + 2, (first, seen)
print(sizes[-1] - max(sizes[:4]))
"""


def test_closing_a_model_lets_go_of_everything(nano: Path) -> None:
    growth = int(run(CYCLES, nano))
    assert growth < 2 << 20, growth


def test_objects_that_are_dropped_are_gone(nano: Path) -> None:
    model = k3.Model.open(nano, threads=1)
    session = model.session()
    session.prefill(prompt(4))
    going = session.generate(5, sampling=k3.Sampling(seed=1))
    next(going)
    references = [weakref.ref(o) for o in (model, session)]
    del model, session, going
    assert [r() for r in references] == [None, None], "no cycle holds them until a collection"
    model = k3.Model.open(nano, threads=1)
    session = model.session()
    knot: Any = [model, session]
    knot.append(knot)
    references = [weakref.ref(o) for o in (model, session)]
    del model, session, knot
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_a_session_keeps_its_model_alive(nano: Path) -> None:
    session = k3.Model.open(nano, threads=1).session()
    gc.collect()
    session.prefill(prompt(4))
    assert not session.model.is_closed
    session.close()
    session.model.close()


def test_handles_do_not_pickle_and_say_so(model: k3.Model) -> None:
    with model.session() as session:
        session.step(1)
        for handle, words in (
            (model, "pass its path and open it there"),
            (session, "save.. it and load.. it there"),
        ):
            for use in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=f"is a handle to .* cannot be pickled; {words}"):
                    use(handle)
        snap = session.snapshot()
        assert copy.deepcopy(snap).to_bytes() == snap.to_bytes()  # plain arrays


# Import.


def test_import_starts_nothing_and_needs_no_driver() -> None:
    out = run(
        """
import os, sys, threading
from pathlib import Path
import numpy                                        # may have threads of its own
before = set(os.listdir("/proc/self/task"))
import k3session
assert set(os.listdir("/proc/self/task")) == before and threading.active_count() == 1
maps = Path("/proc/self/maps").read_text()
assert not any(name in maps for name in ("libcuda", "libcudart", "nvidia", "libgomp", "libomp", "libiomp"))
files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
assert not any("nvidia" in name for name in files), files
heavy = {"torch", "tiktoken", "transformers", "matplotlib", "pytest"} & set(sys.modules)
assert not heavy, heavy
from session_tools import threads, threads_beside
assert threads() == before
model = k3session.Model.open(threads=2)
assert threads() == before                          # threads begin with the first pass that wants them
session = model.session()
session.prefill([1, 2, 3])
assert len(threads()) == len(before) + 1
session.close(); model.close()
assert not threads_beside(before)
try:
    k3session.Model.open(device="cuda")
except k3session.DeviceError as error:
    print(error)
"""
    )
    assert "or use the CPU" in out


def test_the_extension_links_to_no_driver_and_no_openmp() -> None:
    core = Path(k3.__file__).parent / "_core"
    libraries = list(core.glob("*.so"))
    assert libraries
    for library in libraries:
        data = library.read_bytes()
        # Names of needed libraries stand in the string table as they are.
        found = set(re.findall(rb"lib[\w+-]+\.so[.\d]*", data))
        assert not [n for n in found if re.match(rb"lib(cuda|cudart|nv|gomp|omp|iomp|torch)", n)], found


def test_decoding_beside_the_threads_of_numpy(nano: Path) -> None:
    out = run(
        """
import os, sys, threading
import numpy as np
import k3session as k3
stop = threading.Event()
def multiply():
    a = np.random.default_rng(0).normal(size=(200, 200))
    while not stop.is_set():
        a = a @ a
        a /= np.abs(a).max()
with k3.Model.open(sys.argv[1], threads=2) as model, model.session() as a, model.session() as b:
    expected = [a.step(t).tobytes() for t in range(60)]
    before = len(os.listdir("/proc/self/task"))
    others = [threading.Thread(target=multiply) for _ in range(2)]
    for t in others: t.start()
    found = [b.step(t).tobytes() for t in range(60)]
    assert len(os.listdir("/proc/self/task")) <= before + 2 + (os.cpu_count() or 1)
    stop.set()
    for t in others: t.join()
    print(found == expected)
""",
        nano,
    )
    assert out == "True\n"


# The end of the interpreter.

HEAD = """
import atexit, gc, os, signal, sys, threading, time
import k3session as k3
model = k3.Model.open(sys.argv[1], threads=2)
session = model.session()
session.prefill([1, 2, 3] * 20)
def mark():
    sys.stdout.write(f"{time.monotonic()}\\n")
    sys.stdout.flush()
"""

#: How a program ends, and its exit code.
ENDS: dict[str, tuple[str, int]] = {
    "a global": ("mark()", 0),
    "a generation half done": ("g = session.generate(9); next(g); mark()", 0),
    "in a cycle": ("session.loop = [model, session]; del model, session; mark()", 0),
    "kept until late": ("sys.keep = (model, session); sys.modules['kept'] = session; mark()", 0),
    "closed before": ("session.close(); model.close(); mark()", 0),
    "in a thread": (
        """
threading.Thread(target=lambda: [session.step(1) for _ in range(50)]).start()
mark()
""",
        0,
    ),
    "in a daemon thread, in the middle of a pass": (
        """
def work():
    while True:
        with model.session() as s: s.prefill([5] * 3000)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
mark()
""",
        0,
    ),
    "in atexit": ("atexit.register(lambda: (session.step(1), model.session().step(2))); mark()", 0),
    "opened and closed in atexit": (
        """
def late():
    with k3.Model.open(sys.argv[1], threads=2) as m, m.session() as s: s.prefill([1] * 50)
session.close(); model.close()
atexit.register(late)
mark()
""",
        0,
    ),
    "sys.exit": ("mark(); sys.exit(7)", 7),
    "os._exit": ("mark(); os._exit(3)", 3),
    "an exception": ("mark(); raise ZeroDivisionError", 1),
    "SIGTERM": ("mark(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
    "SIGTERM in a pass": (
        """
threading.Timer(0.1, lambda: (mark(), os.kill(os.getpid(), signal.SIGTERM))).start()
while True:
    with model.session() as s: s.prefill([5] * 3000)
""",
        -signal.SIGTERM,
    ),
    "Ctrl-C in a pass": (
        """
threading.Timer(0.1, lambda: (mark(), os.kill(os.getpid(), signal.SIGINT))).start()
while True:
    with model.session() as s: s.prefill([5] * 3000)
""",
        -signal.SIGINT,
    ),
}


@pytest.fixture(scope="module")
def ended(nano: Path) -> dict[str, tuple[int, str, float]]:
    """What became of each way to end: exit code, stderr, and the seconds from the end's beginning."""
    found = {}
    pending = list(ENDS.items())
    while pending:
        batch, pending = pending[:3], pending[3:]
        begun: list[tuple[str, subprocess.Popen[str]]] = []
        for name, (code, _) in batch:
            begun.append((name, start(HEAD + code, nano)))
        try:
            for name, process in begun:
                out, err = process.communicate(timeout=60)
                found[name] = (process.returncode, err, time.monotonic() - float(out.split()[0]))
        finally:  # one that hangs must not be left to warn in the middle of another test
            for _, process in begun:
                process.kill()
                process.communicate()
    return found


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_the_interpreter_is_silent(ended: dict[str, tuple[int, str, float]], name: str) -> None:
    code, err, seconds = ended[name]
    if name in ("an exception", "Ctrl-C in a pass"):
        # The exception that ended it, and nothing after it.
        error = "ZeroDivisionError" if name == "an exception" else "KeyboardInterrupt"
        assert (
            err.startswith("Traceback") and err.splitlines()[-1] == error and err.count("Traceback") == 1
        ), err
    else:
        assert err == ""
    assert code == ENDS[name][1]
    # The processes of a batch are waited for one after the other, so this is an upper bound.
    assert seconds < 4


# Fork.

FORK = """
import os, signal, sys, threading, time
import k3session as k3
from k3session._core.ops import pool_workers

def in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)                       # a child that hangs is killed
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]

def decode(model, n=20):
    with model.session() as s:
        s.prefill([3, 1, 4, 1, 5] * n)
        return s.step(9).tobytes()

def alone():                                       # imported before the fork, used first in the child
    with k3.Model.open(sys.argv[1], threads=2) as m:
        print(decode(m) == expected)

with k3.Model.open(sys.argv[1], threads=1) as m:
    expected = decode(m)
assert in_child(alone) == 0

model = k3.Model.open(sys.argv[1], threads=3)
session = model.session()
session.prefill([1, 2, 3] * 50)                    # the pool runs
before = session.snapshot()
row = session.step(7).tobytes()
session.restore(before)

def inherited():                                   # model and session of the parent, each side going its own way
    assert session.step(7).tobytes() == row
    session.prefill([5] * 200)
    assert decode(model) == expected
    assert pool_workers() == 2
    session.close()
    model.close()
    assert pool_workers() == 0

for _ in range(2):
    assert in_child(inherited) == 0
assert session.step(7).tobytes() == row and decode(model) == expected

# While a pass runs in another thread.
stop = threading.Event()
busy = model.session()
def work():
    while not stop.is_set():
        with model.session() as s:
            s.prefill([5] * 100)
def hold():
    try:
        busy.prefill([6] * 4000, chunk=8)
    except k3.PassCancelled:
        pass
threads = [threading.Thread(target=work), threading.Thread(target=hold)]
for t in threads:
    t.start()
time.sleep(0.05)

def meanwhile():
    assert decode(model) == expected
    with k3.Model.open(sys.argv[1], threads=2) as again:
        assert decode(again) == expected
    position = busy.position                       # its call goes on in the parent only
    assert position % 8 == 0 and busy.tokens.tolist() == [6] * position
    with model.session() as fresh:
        if position:
            fresh.prefill([6] * position)
        assert busy.step(1).tobytes() == fresh.step(1).tobytes()

for _ in range(3):
    time.sleep(0.02)
    assert in_child(meanwhile) == 0
# While one is restored in another thread: the copy in the child is whole, or it says that it is not.
snaps = []
for token in (5, 6):
    with model.session() as s:
        s.prefill([token] * 2000)
        snaps.append(s.snapshot())
whole = [snap.to_bytes() for snap in snaps]
turning = model.session()
def turn():
    while not stop.is_set():
        for snap in snaps:
            turning.restore(snap)
threads.append(threading.Thread(target=turn))
threads[-1].start()

def look():
    try:
        assert turning.snapshot().to_bytes() in whole
    except k3.K3Error as error:
        assert "accepts only restore() and close(): a restore was broken off" in str(error), error
        turning.restore(snaps[0])
        assert turning.snapshot().to_bytes() == whole[0]

for _ in range(10):
    time.sleep(0.002)
    assert in_child(look) == 0
stop.set()
busy.cancel()
for t in threads:
    t.join()
busy.close()
turning.close()
print(decode(model) == expected)
session.close()
model.close()
"""


def test_fork(nano: Path) -> None:
    # Python 3.12 warns of any fork beside threads; that the child works here is what is tested.
    assert run(FORK, nano, PYTHONWARNINGS="error,ignore::DeprecationWarning") == "True\nTrue\n"


def test_multiprocessing_over_an_open_model(nano: Path) -> None:
    out = run(
        """
import multiprocessing, sys
import k3session as k3

model = k3.Model.open(sys.argv[1], threads=2)

def work(seed):
    with model.session() as s:
        s.prefill([seed] * 30)
        return s.step(1).tobytes()

if __name__ == "__main__":
    expected = [work(i) for i in range(6)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(work, range(6)) == expected
    model.close()
""",
        nano,
        PYTHONWARNINGS="error,ignore::DeprecationWarning",
    )
    assert out == ""


def test_scratch_in_a_cycle_is_collected() -> None:
    """A traceback can hold a scratch and what it is made of in one cycle, which is taken apart in any order."""
    run(
        """
import gc
import k3session as k3
from k3session._core.decoder import Scratch
gc.disable()
with k3.Model.open(threads=1) as model:
    for i in range(20):
        z = Scratch(model._decoder, 128, 2)
        box = [z, z.backend, z.backend.memory]
        box.append(box)
        del z, box
        gc.collect()
"""
    )
