# SPDX-License-Identifier: MIT
"""Ops: an op table with what one pass in flight needs beside it; CpuOps for each instruction set of the host."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport free

from k3session._core.c_ops cimport (
    k3_compact_fill,
    k3_compact_plan,
    k3_cpu_best_isa,
    k3_cpu_ops,
    k3_cpu_rounded,
    k3_cpu_sizes,
    k3_dims,
    k3_exception,
    k3_float_mode_enter,
    k3_float_mode_leave,
    k3_matrix,
    k3_ops,
    k3_place,
    k3_pool_hold,
    k3_pool_release,
    k3_pool_workers,
    k3_probe_read,
    k3_q8_fill,
)
from k3session._core.memory cimport HOST, aligned
from k3session._core.weights cimport Weights

from k3session.errors import ConfigError

cdef extern from "k3_build.h":
    const char* K3_BUILD

cdef enum:
    ROUNDED_FROM = 8                    # passes with more rows may round, as on a GPU

ISAS = ("base", "avx2", "avx512")
# To BF16 as float32, in the order of an exact prefill; or multiplied as BF16 by vectors, or by the matrix unit.
ROUNDINGS = ("bf16", "bf16dp", "bf16amx")
BUILD = K3_BUILD.decode()               # digest of the sources and flags of the compiled core


cdef unsigned int float_mode_enter() noexcept nogil:
    """Rounding to nearest, subnormals kept, whatever another library has set in this thread."""
    return k3_float_mode_enter()


cdef void float_mode_leave(unsigned int before) noexcept nogil:
    k3_float_mode_leave(before)


cdef int op_table(str isa, k3_ops* table) except -1:
    """Fills the table for an instruction set by name; ConfigError where this processor or build has it not."""
    if isa not in ISAS or not k3_cpu_ops(ISAS.index(isa), table):
        raise ConfigError(f"instruction set {isa!r} is not available here: the best is {best_isa()!r}")
    return 0


cdef void buffer_sizes(const k3_dims* dims, int64_t rows, int64_t* x, int64_t* work, int64_t* items) noexcept nogil:
    """Sizes of the work buffers for passes of up to ``rows`` rows."""
    k3_cpu_sizes(dims, rows, x, work, items)


def read_memory(address: int, int64_t nbytes, int threads) -> int:
    """Reads that range and returns the bytes read: for measurements of bandwidth."""
    cdef const void* start = <const void*><uintptr_t>address
    with nogil:
        k3_probe_read(threads, start, nbytes)
    return nbytes


cdef void pool_hold() noexcept nogil:
    """hold_pool() for objects that may outlive their module's names."""
    k3_pool_hold()


cdef void pool_release() noexcept nogil:
    """release_pool() for the same; without the GIL, since it joins threads."""
    k3_pool_release()


# The recoding of cuda/host/recode.h, for pyx/recode.pyx: it runs in this module's pool.

cdef k3_place compact_plan(int threads, const k3_matrix* w, uint8_t* high, uint32_t* first) noexcept nogil:
    return k3_compact_plan(threads, w, high, first)


cdef void compact_fill(int threads, const k3_matrix* w, const k3_matrix* to, k3_exception* list) noexcept nogil:
    k3_compact_fill(threads, w, to, list)


cdef k3_place q8_fill(int threads, const k3_matrix* w, const k3_matrix* to) noexcept nogil:
    return k3_q8_fill(threads, w, to)


def enter_float_mode() -> int:
    """Rounding to nearest, subnormals kept, in this thread; returns what leave_float_mode takes."""
    return k3_float_mode_enter()


def leave_float_mode(unsigned int before) -> None:
    """Puts back what another library may have set."""
    k3_float_mode_leave(before)


def best_isa() -> str:
    """The best instruction set that this processor and this build share: "base", "avx2" or "avx512"."""
    return ISAS[k3_cpu_best_isa()]


def roundings(isa: str) -> tuple[str, ...]:
    """How that instruction set can round a prefill here: the first of `ROUNDINGS`, of which a model takes the last."""
    return ROUNDINGS[: k3_cpu_rounded(ISAS.index(isa))]


def hold_pool() -> None:
    """Keeps the process's thread pool; paired with release_pool()."""
    k3_pool_hold()


def release_pool() -> None:
    """Lets go of the thread pool; its threads are joined when nobody holds it any more."""
    with nogil:
        k3_pool_release()


def pool_workers() -> int:
    """Worker threads that are alive now."""
    return k3_pool_workers()


@cython.no_gc_clear
cdef class Ops:
    """What the decoder asks of a device beside the ops themselves.

    A pass is bracketed by `begin` and `end`.  What differs from one pass to the next (tokens, segments) is written to
    the mail, host memory that the ops read at another address, if they cannot read the host's.
    """

    cdef int64_t padded(self, int64_t rows) noexcept nogil:
        """How many rows, or segments, a pass is laid out for that has so many."""
        return rows

    cdef int open_mail(self, int64_t nbytes, char** host, char** here) except -1:
        """Allocates the mail; called once."""
        self.mail = <char*>aligned(nbytes)
        host[0] = here[0] = self.mail
        return 0

    cdef bint ready(self) noexcept nogil:
        """Whether a pass may begin; ops that run one at a time wait a moment for their turn, and are asked again."""
        return True

    cdef int begin(self, PassShape shape, int64_t mail_bytes) noexcept nogil:
        """Before the ops of a pass: the first ``mail_bytes`` of the mail are delivered."""
        return 0

    cdef int end(self, bint complete, int64_t offset, int64_t nbytes) noexcept nogil:
        """After the last op: all have run, and those bytes of the mail are back; or the pass was broken off."""
        return 0

    def failure(self) -> Exception | None:
        """What went wrong on the device in the last pass, or None."""
        return None

    def poison(self) -> None:
        """Fills the work memory with NaN, so that a test sees whatever reads it before writing."""


@cython.no_gc_clear
cdef class CpuOps(Ops):
    """The ops of one instruction set for passes of up to ``rows`` rows on up to ``threads`` threads.

    ``streamer`` is for `StreamOps`.  ``round_inputs``: in passes of one session with more than `ROUNDED_FROM` rows, what
    BF16 matrices multiply is rounded to BF16.
    """

    def __cinit__(self, Weights weights not None, int64_t rows, int threads, str isa, streamer=None,
                  bint round_inputs=False):
        cdef int64_t x_floats, work_floats, list_items
        op_table(isa, &self.table)
        k3_pool_hold()                  # for as long as a pass could use the threads
        self.holds_pool = True
        self.isa = isa
        self.rounded = k3_cpu_rounded(ISAS.index(isa)) if round_inputs else 0
        self.memory = HOST
        self.rows = rows
        self.table.ctx = &self.cpu
        self.cpu.threads = threads
        k3_cpu_sizes(&weights.dims, rows, &x_floats, &work_floats, &list_items)
        self.cpu.x_floats = x_floats
        self.cpu.work_floats = work_floats
        self.cpu.list_items = list_items
        self.cpu.x = <float*>aligned(x_floats * 4)
        self.cpu.work = <float*>aligned(work_floats * 4)
        self.cpu.list = <int64_t*>aligned(list_items * 8)

    def __dealloc__(self):
        if self.holds_pool:
            with nogil:
                k3_pool_release()
        free(self.mail)
        free(self.cpu.list)
        free(self.cpu.work)
        free(self.cpu.x)

    cdef int begin(self, PassShape shape, int64_t mail_bytes) noexcept nogil:
        self.cpu.inputs = self.rounded if shape.segments == 1 and shape.rows > ROUNDED_FROM else 0
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the work buffers."""
        return self.cpu.x_floats * 4 + self.cpu.work_floats * 4 + self.cpu.list_items * 8

    def poison(self) -> None:
        """Fills the work buffers with NaN, so that a test sees whatever reads them before writing."""
        cdef int64_t i
        cdef float nan = float("nan")
        for i in range(self.cpu.x_floats):
            self.cpu.x[i] = nan
        for i in range(self.cpu.work_floats):
            self.cpu.work[i] = nan
