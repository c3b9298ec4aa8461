# SPDX-License-Identifier: MIT
"""Weights with fewer bytes, made at load: the trunk of a model as K3_COMPACT or K3_Q8 (cuda/ops.h).

The embedding stays as it is stored, since a step reads one row of it; kv_b_proj, which MLA reads by head and by column; the
experts, which have 4.25 bits a weight already; and for q8 the router, on which the choice of the experts hangs.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.stdlib cimport free
from posix.mman cimport madvise
from posix.stdlib cimport posix_memalign

from k3session._core.arguments cimport Matrix
from k3session._core.c_ops cimport (
    K3_BF16, K3_COMPACT, K3_F32, K3_Q8, k3_exception, k3_exceptions, k3_layer, k3_matrix, k3_place,
)
from k3session._core.ops cimport compact_fill, compact_plan, q8_fill
from k3session._core.weights cimport Weights

from k3session.errors import CheckpointError, ConfigError

MODES = ("stored", "compact", "q8")

cdef enum:
    HUGE_PAGE = 2 << 20
    PAGE = 4096
    DONT_NEED = 4                       # advice to the system
    HUGE_PAGES = 14


cdef class _Arena:
    """Memory of the recoded rows, on huge pages where the system has them."""
    cdef char* start
    cdef int64_t nbytes, used

    def __cinit__(self, int64_t nbytes):
        cdef void* start = NULL
        if posix_memalign(&start, HUGE_PAGE, <size_t>max(nbytes, 1)) != 0:
            raise MemoryError(f"could not allocate {nbytes / 2**20:.1f} MiB for recoded weights; open the model with "
                              "weights=\"stored\"")
        self.start = <char*>start
        self.nbytes = nbytes
        madvise(start, nbytes, HUGE_PAGES)

    def __dealloc__(self):
        free(self.start)

    cdef char* take(self, int64_t nbytes) noexcept:
        cdef char* at = self.start + self.used
        self.used += (nbytes + 63) // 64 * 64
        return at


cdef class _Job:
    """One matrix that is recoded."""
    cdef k3_matrix* at                  # in the model's tables
    cdef str name
    cdef k3_matrix made
    cdef k3_exceptions beside           # COMPACT
    cdef object first, exceptions       # uint32[rows + 1]; k3_exception[...] as bytes

    cdef int64_t row_memory(self) noexcept:
        return (self.made.rows * self.made.pitch + 63) // 64 * 64


cdef list _trunk(Weights weights, bint router):
    """(address of a matrix in the tables, its name) of all that may be recoded."""
    cdef int64_t i
    cdef k3_layer* L
    found = []
    for i in range(weights.first, weights.end):
        L = &weights.tables.layers[i]
        attn, moe = f"model.layers.{i}.self_attn.", f"model.layers.{i}.block_sparse_moe."
        mlp = f"{moe}shared_experts." if L.is_moe else f"model.layers.{i}.mlp."
        if L.is_kda:
            found += [(<uintptr_t>&L.kda.q_proj, attn + "q_proj"), (<uintptr_t>&L.kda.k_proj, attn + "k_proj"),
                      (<uintptr_t>&L.kda.v_proj, attn + "v_proj"), (<uintptr_t>&L.kda.f_a_proj, attn + "f_a_proj"),
                      (<uintptr_t>&L.kda.f_b_proj, attn + "f_b_proj"), (<uintptr_t>&L.kda.b_proj, attn + "b_proj"),
                      (<uintptr_t>&L.kda.g_proj, attn + "g_proj"), (<uintptr_t>&L.kda.o_proj, attn + "o_proj")]
        else:
            found += [(<uintptr_t>&L.mla.q_a_proj, attn + "q_a_proj"), (<uintptr_t>&L.mla.q_b_proj, attn + "q_b_proj"),
                      (<uintptr_t>&L.mla.kv_a_proj_with_mqa, attn + "kv_a_proj_with_mqa"),
                      (<uintptr_t>&L.mla.g_proj, attn + "g_proj"), (<uintptr_t>&L.mla.o_proj, attn + "o_proj")]
        if L.is_moe:
            found += [(<uintptr_t>&L.moe.routed_expert_down_proj, moe + "routed_expert_down_proj"),
                      (<uintptr_t>&L.moe.routed_expert_up_proj, moe + "routed_expert_up_proj")]
            if router:
                found.append((<uintptr_t>&L.moe.gate, moe + "gate"))
        found += [(<uintptr_t>&L.mlp.gate_proj, mlp + "gate_proj"), (<uintptr_t>&L.mlp.up_proj, mlp + "up_proj"),
                  (<uintptr_t>&L.mlp.down_proj, mlp + "down_proj")]
    found.append((<uintptr_t>&weights.tables.lm_head, "lm_head"))
    return found


def recode(Weights weights not None, str mode not None, int threads, progress=None) -> dict:
    """Recodes the trunk of a model that nothing else uses yet.

    Parameters
    ----------
    weights : Weights
    mode : str
        "compact" (BF16 without loss; a matrix that it would not make smaller stays as stored), or "q8" (BF16 or F32 to
        8 bits in groups of 32, with a BF16 factor).
    threads : int
    progress : callable
        Called as progress("recode", matrices done, matrices in all).

    Returns
    -------
    dict
        weights, stored_bytes, bytes, exceptions (groups of 32 columns that stand as BF16 besides), kept (names of the matrices
        that stay as stored).

    Raises
    ------
    CheckpointError
        A weight is not finite; the tensor and the element are named.
    """
    cdef bint compact = mode == "compact"
    cdef k3_matrix* m
    cdef _Job job
    cdef _Arena arena
    cdef int64_t n = 0, stored = 0, made = 0, exceptions = 0, i, weights_seen = 0
    jobs, kept = [], []
    matrices = _trunk(weights, compact)
    for address, name in matrices:
        m = <k3_matrix*><uintptr_t>address
        if m.data == NULL or m.rows == 0:
            continue
        if m.dtype == K3_BF16 or (m.dtype == K3_F32 and not compact):
            job = _plan(m, name, compact, threads)
            if _bytes(job, compact) < m.rows * m.pitch:
                jobs.append(job)
                continue
        kept.append(name)
    for job in jobs:
        n += job.row_memory()
    arena = _Arena(n)
    for i, job in enumerate(jobs):
        m = job.at
        weights_seen += m.rows * m.cols
        stored += m.rows * m.pitch
        job.made.data = arena.take(job.row_memory())
        _fill(job, compact, threads)
        made += _bytes(job, compact)
        exceptions += int(job.first[job.made.rows]) if compact else 0
        _let_go(m)
        if progress is not None:
            progress("recode", i + 1, len(jobs))
    # All of them now, so that a failure before this leaves the tables as they were.
    for job in jobs:
        job.at[0] = job.made
        weights.beside += _bytes(job, compact) - job.made.rows * job.made.pitch
    weights._keep.append((arena, jobs))
    return {"weights": weights_seen, "stored_bytes": stored, "bytes": made, "exceptions": exceptions, "kept": kept}


def recoded(Matrix matrix not None, str mode not None, int threads=1) -> Matrix:
    """One matrix in another form, for tests and benches: BF16 as "compact", BF16 or F32 as "q8"; the caller holds the pool.

    Its ``data`` are the rows as bytes, its ``scale`` the factors, uint16[out, groups], or the exceptions as bytes.

    Examples
    --------
    >>> import numpy as np
    >>> from k3session._core.arguments import Matrix
    >>> recoded(Matrix(np.ones((8, 64), np.float32)), "q8").nbytes
    544
    """
    cdef bint compact = mode == "compact"
    cdef Matrix result
    cdef _Job job
    if mode not in MODES[1:] or not (matrix.m.dtype == K3_BF16 or (matrix.m.dtype == K3_F32 and not compact)):
        raise ConfigError(f"expected a BF16 matrix for \"compact\", or a BF16 or F32 one for \"q8\"; found {mode!r} of "
                          f"{matrix.data.dtype}")
    job = _plan(&matrix.m, "matrix", compact, threads)
    rows = np.empty((job.made.rows, job.made.pitch), np.uint8)
    job.made.data = <const void*><uintptr_t>rows.__array_interface__["data"][0]
    _fill(job, compact, threads)
    result = Matrix.__new__(Matrix, matrix.data, matrix.scale)
    result.m, result.data, result.keep = job.made, rows, job
    result.scale = job.exceptions[: int(job.first[job.made.rows]) * sizeof(k3_exception)] if compact else job.first
    return result


cdef void _let_go(k3_matrix* m) noexcept:
    """Takes a matrix that was read out of the process's memory; the pages of the file stay with the system."""
    cdef uintptr_t start = (<uintptr_t>m.data + PAGE - 1) // PAGE * PAGE
    cdef uintptr_t end = (<uintptr_t>m.data + m.rows * m.pitch) // PAGE * PAGE
    if end > start:
        madvise(<void*>start, end - start, DONT_NEED)


cdef _Job _plan(k3_matrix* m, str name, bint compact, int threads):
    cdef _Job job = _Job.__new__(_Job)
    cdef k3_place bad
    cdef uint32_t[::1] first
    job.at, job.name, job.made = m, name, m[0]
    if not compact:
        job.made.dtype = K3_Q8
        job.made.pitch = (m.cols + 31) // 32 * 32
        return job
    first = job.first = np.zeros(m.rows + 1, np.uint32)
    with nogil:
        bad = compact_plan(threads, m, job.beside.high, &first[0])
    _refuse(bad, m, name)
    job.beside.first = &first[0]
    job.made.dtype = K3_COMPACT
    job.made.pitch = (m.cols + 63) // 64 * 96
    job.made.scale = &job.beside
    return job


cdef int _fill(_Job job, bint compact, int threads) except -1:
    cdef k3_place bad
    cdef uint8_t[::1] listed
    cdef uint16_t[::1] factors
    cdef k3_exception* list = NULL
    if compact:
        listed = job.exceptions = np.zeros(max(1, int(job.first[job.made.rows])) * sizeof(k3_exception), np.uint8)
        list = <k3_exception*>&listed[0]
        job.beside.list = list
        with nogil:
            compact_fill(threads, job.at, &job.made, list)
        return 0
    factors = job.first = np.zeros(job.made.rows * (job.made.pitch // 32), np.uint16)
    job.made.scale = &factors[0]
    with nogil:
        bad = q8_fill(threads, job.at, &job.made)
    _refuse(bad, job.at, job.name)
    return 0


cdef int64_t _bytes(_Job job, bint compact) except -1:
    """All that the matrix takes, with what lies beside its rows."""
    if not compact:
        return job.made.rows * (job.made.pitch + job.made.pitch // 32 * 2)
    return job.made.rows * job.made.pitch + int(job.first[job.made.rows]) * sizeof(k3_exception) + 4 * (job.made.rows + 1) + 16


cdef int _refuse(k3_place bad, k3_matrix* m, str name) except -1:
    if bad.row >= 0:
        raise CheckpointError(f"{name}.weight: element [{bad.row}, {bad.col}] is not finite; expected finite weights, look at "
                              "the checkpoint with `k3session check --deep`")
    return 0
