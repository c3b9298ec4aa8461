# SPDX-License-Identifier: MIT
"""Streaming: weights that are read from the checkpoint's files while a pass runs, within a fixed amount of memory.

A `Streamer` is the memory and the reader of one model (cuda/host/stream.cpp); `StreamOps` is the op table over it, for the
same graph as any other.  `OrderOps` finds out in which order the graph needs its matrices.
"""

import os

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.stdlib cimport posix_memalign
from posix.unistd cimport close

from k3session._core.c_ops cimport k3_layer, k3_matrix, k3_ops
from k3session._core.c_stream cimport (
    K3_CHANGED,
    K3_DISK_THREADS,
    K3_ORDER,
    K3_PAGE,
    K3_SHORT,
    k3_block,
    k3_block_room,
    k3_cache,
    k3_cache_close,
    k3_cache_open,
    k3_failure,
    k3_file,
    k3_gpu_block_room,
    k3_gpu_slot_room,
    k3_gpu_stream_begin,
    k3_gpu_stream_end,
    k3_gpu_stream_use,
    k3_gpu_streaming,
    k3_gpu_streaming_table,
    k3_order_table,
    k3_slot_room,
    k3_step,
    k3_stream_begin,
    k3_stream_close,
    k3_stream_end,
    k3_stream_enter,
    k3_stream_fail_after,
    k3_stream_failure,
    k3_stream_load,
    k3_stream_open,
    k3_stream_order,
    k3_stream_resident,
    k3_stream_setup,
    k3_stream_total,
    k3_streaming,
    k3_streaming_table,
)
from k3session._core.driver cimport driver_table
from k3session._core.gpu cimport Device, PinnedBuffer
from k3session._core.memory cimport HOST, aligned

from k3session.errors import CheckpointError, K3Error

cdef int64_t LOAD_BYTES = 1 << 28       # read between two reports of progress

k3_gpu_stream_use(driver_table())


cdef const k3_matrix* matrix_at(address) except NULL:
    return <const k3_matrix*><uintptr_t>address


@cython.no_gc_clear
cdef class OrderOps(Ops):
    """Ops that compute nothing, and know afterwards which matrices they were called with; ``silent`` ones do not."""

    def __cinit__(self, Weights weights not None, bint silent):
        self.memory = HOST
        self.rows = 1
        self.order.silent = silent
        self.order.room = 16 * weights.dims.num_hidden_layers + 16
        self.order.steps = <k3_step*>calloc(self.order.room, sizeof(k3_step))
        if self.order.steps == NULL:
            raise MemoryError("could not allocate the order of the matrices")
        k3_order_table(&self.order, &self.table)

    def __dealloc__(self):
        free(self.mail)
        free(self.order.steps)

    def steps(self) -> list:
        """For each step (matrix, other matrix or 0, whether it is used whole, rows, bytes of a row of both)."""
        cdef k3_step* s
        found = []
        for i in range(self.order.n):
            s = &self.order.steps[i]
            width = s.matrix[0].pitch + (0 if s.matrix[1] == NULL else s.matrix[1].pitch)
            found.append((<uintptr_t>s.matrix[0], <uintptr_t>s.matrix[1], bool(s.whole), s.matrix[0].rows, width))
        return found


@cython.no_gc_clear
cdef class Streamer:
    """The reader of one model, and the memory that it reads to.

    Parameters
    ----------
    weights : Weights
        The model's, over mapped files; the mappings of what is streamed are never touched.
    files : list
        (path, address of the mapping, size) of each file.
    blocks : list
        (matrix, other or 0, first row, rows) of the trunk, in the order of the graph.
    resident : uint8[len(blocks)]
        Which of them stay in memory.
    head : int
        The first block of lm_head; all blocks where it is not streamed.
    ring, slots : int
        Bytes for what is read ahead, and experts that there is room for (0 where they are elsewhere).
    chunk, threads, half_life, direct
        Bytes of one read; how many there are at a time; passes after which a use of an expert counts half; whether
        files are opened for direct reads where that can be.
    locate : callable
        locate(file, byte) names the tensor there, for messages.
    device : Device, optional
        What is read goes on to that GPU: it is read to pinned memory.
    cached : bool
        What is read through the page cache stays there.
    """

    def __cinit__(self, Weights weights not None, list files not None, list blocks not None,
                  const uint8_t[::1] resident not None, int64_t head, int64_t ring, int64_t slots, int64_t chunk,
                  int64_t threads, double half_life, bint direct, locate, Device device=None, bint cached=False):
        cdef k3_stream_setup setup
        cdef k3_block* b
        cdef k3_file* f
        cdef int64_t i
        self.weights, self.locate = weights, locate
        self.names = tuple(os.path.basename(file[0]) for file in files)
        self.blocks, self.head = len(blocks), head
        memset(&setup, 0, sizeof(setup))
        setup.files = <k3_file*>calloc(len(files) + 1, sizeof(k3_file))
        setup.blocks = <k3_block*>calloc(len(blocks) + 1, sizeof(k3_block))
        try:
            if setup.files == NULL or setup.blocks == NULL:
                raise MemoryError("could not allocate the tables of what is streamed")
            for path, address, size in files:
                f = &setup.files[setup.n_files]
                f.start, f.size = <const char*><uintptr_t>address, size
                f.fd = _open(path, 0)
                f.direct = -1
                f.cached = cached
                setup.n_files += 1
                if direct and f.size > 0:
                    try:
                        f.direct = _open(path, os.O_DIRECT)
                    except CheckpointError:
                        f.direct = -1           # a file system without direct reads
            for i, (one, other, first, rows) in enumerate(blocks):
                b = &setup.blocks[i]
                b.matrix[0], b.first, b.rows = matrix_at(one), first, rows
                if other:
                    b.matrix[1] = matrix_at(other)
                    if rows < b.matrix[0].rows:
                        self.widest = max(self.widest, b.rows)
                b.room = k3_block_room(setup.files, setup.n_files, b)
            setup.layers, setup.n_layers = weights.tables.layers, weights.dims.num_hidden_layers
            setup.experts = weights.dims.num_experts if slots > 0 else 0
            setup.n_blocks, setup.head = len(blocks), head
            setup.resident = &resident[0] if len(blocks) else NULL
            setup.ring_bytes, setup.n_slots = ring, slots
            setup.chunk_bytes, setup.threads, setup.half_life = chunk, min(threads, <int64_t>K3_DISK_THREADS), half_life
            if device is not None:
                room = k3_slot_room(setup.files, setup.n_files, setup.layers, setup.n_layers, setup.experts)
                ring = (ring + K3_PAGE - 1) // K3_PAGE * K3_PAGE
                stays = sum(setup.blocks[i].room for i in range(len(blocks)) if resident[i])
                self.pinned = PinnedBuffer(device, stays + ring + slots * room + K3_PAGE)
                setup.stays = <char*>((<uintptr_t>self.pinned.handle + K3_PAGE - 1) // K3_PAGE * K3_PAGE)
                setup.ring = setup.stays + <int64_t>stays
                setup.slot_memory = setup.ring + ring
            self.stream = k3_stream_open(&setup)
            if self.stream == NULL:
                raise MemoryError("could not allocate the memory that weights are streamed to")
        finally:
            if self.stream == NULL:
                if setup.files != NULL:
                    for i in range(setup.n_files):
                        close(setup.files[i].fd)
                        if setup.files[i].direct >= 0:
                            close(setup.files[i].direct)
                free(setup.files)
                free(setup.blocks)

    def __dealloc__(self):
        if self.stream != NULL:
            with nogil:
                k3_stream_close(self.stream)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks that stay in memory."""
        return k3_stream_resident(self.stream)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return 0 if self.pinned is None else self.pinned.nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files since the model was opened."""
        return k3_stream_total(self.stream)

    def load(self, progress=None) -> None:
        """Reads what stays in memory; ``progress`` is called as progress("read", bytes done, bytes in all)."""
        cdef int64_t first = 0, end, done, step = max(1, self.blocks * LOAD_BYTES // max(1, self.resident_bytes))
        cdef int bad
        while first < self.blocks:
            end = min(self.blocks, first + step)
            with nogil:
                bad = k3_stream_load(self.stream, first, end)
            if bad:
                raise self.failure() or MemoryError("could not allocate the list of what is read")
            first = end
            done = self.resident_bytes * first // self.blocks
            if progress is not None and self.resident_bytes:
                progress("read", done, self.resident_bytes)

    def fail_after(self, int64_t reads, int error=0) -> None:
        """For tests: the read after so many more ones fails with this errno, or with 0 gives half of its bytes."""
        k3_stream_fail_after(self.stream, reads, error)

    def failure(self) -> Exception | None:
        """What went wrong in the last pass, or None."""
        cdef k3_failure f = k3_stream_failure(self.stream)
        if f.kind == 0:
            return None
        if f.kind == K3_ORDER:
            return K3Error("the graph asked for another matrix than the one that comes next; please report this with the "
                           "model's config.json")
        name = self.names[f.file]
        if f.kind == K3_CHANGED:
            found = f"{f.found} bytes" if f.found != f.expected else "the same size and another time of change"
            return CheckpointError(
                f"{name}: the file has been changed while the model is open: expected the {f.expected} bytes that were opened, "
                f"found {found}; put the file back as it was, times included, or open the model again.")
        tensor = self.locate(f.file, f.at + f.found)
        asked = f"{name}: {tensor}: expected {f.expected} bytes at byte {f.at}"
        if f.kind == K3_SHORT:
            return CheckpointError(f"{asked}, found {f.found}: the file ends there; put the file back as it was, or open the "
                                   "model again.")
        return CheckpointError(f"{asked}, found {f.found}: {os.strerror(f.error)}; look at the disk, and try again.")


def _open(path, int more) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | more)
    except OSError as error:
        raise CheckpointError(f"{os.path.basename(path)}: cannot be opened: {error.strerror or error}.") from error


cdef void* paged(int64_t nbytes) except NULL:
    cdef void* p = NULL
    if posix_memalign(&p, K3_PAGE, <size_t>((nbytes + K3_PAGE - 1) // K3_PAGE * K3_PAGE)) != 0:
        raise MemoryError(f"could not allocate {nbytes / 2**20:.1f} MiB of host memory")
    return p


@cython.no_gc_clear
cdef class StreamOps(CpuOps):
    """The ops of one instruction set over weights that a `Streamer` brings to memory; one pass of it at a time."""

    def __cinit__(self, Weights weights not None, int64_t rows, int threads, str isa, Streamer streamer=None,
                  bint round_inputs=False):
        cdef int64_t experts = max(1, weights.dims.num_experts)
        cdef int64_t hidden = rows * streamer.widest * 4, row = weights.tables.embed_tokens.pitch + 3 * K3_PAGE
        self.streamer = streamer
        self.streaming.cpu = self.cpu
        self.streaming.inner = self.table
        self.streaming.stream = streamer.stream
        self.streaming.hidden = <float*>aligned(hidden)
        self.streaming.row = <char*>paged(row)
        self.streaming.table = <k3_matrix*>aligned(3 * experts * sizeof(k3_matrix))
        self.streaming.active = <int32_t*>aligned(experts * 4)
        self.buffers = hidden + row + 3 * experts * <int64_t>sizeof(k3_matrix) + experts * 4
        k3_streaming_table(&self.streaming, &self.table)

    def __dealloc__(self):
        free(self.streaming.active)
        free(self.streaming.table)
        free(self.streaming.row)
        free(self.streaming.hidden)

    @property
    def nbytes(self) -> int:
        """Bytes of the work buffers."""
        return CpuOps.nbytes.__get__(self) + self.buffers

    cdef bint ready(self) noexcept nogil:
        if not self.entered:
            self.entered = k3_stream_enter(self.streaming.stream) != 0
        return self.entered

    cdef int begin(self, PassShape shape, int64_t mail_bytes) noexcept nogil:
        CpuOps.begin(self, shape, mail_bytes)
        self.streaming.cpu.inputs = self.cpu.inputs
        if not self.entered:                # a commit: no matrix is needed
            return 0
        self.streaming.at = self.streaming.moe = 0
        self.end_at = self.streamer.blocks if shape.take > 0 else self.streamer.head
        return k3_stream_begin(self.streaming.stream, shape.take > 0)

    cdef int end(self, bint complete, int64_t offset, int64_t nbytes) noexcept nogil:
        if not self.entered:
            return 0
        if complete and self.streaming.at != self.end_at:
            k3_stream_order(self.streaming.stream)
            complete = False
        self.entered = False
        return k3_stream_end(self.streaming.stream, complete)

    def failure(self) -> Exception | None:
        """What went wrong with the files in the last pass, or None."""
        return self.streamer.failure()

    def counts(self, bint clear=False) -> tuple[int, int, int, int, int]:
        """Bytes read for passes in this scratch, ns that they waited for them, experts used, those not in memory, and 0."""
        cdef k3_streaming* x = &self.streaming
        found = x.bytes, x.wait_ns, x.uses, x.misses, 0
        if clear:
            x.bytes = x.wait_ns = x.uses = x.misses = 0
        return found


# ---------------------------------------------------------------------------------------------
# for gpu_streaming
# ---------------------------------------------------------------------------------------------


cdef bint stream_enter(k3_stream* stream) noexcept nogil:
    return k3_stream_enter(stream) != 0


cdef void stream_order(k3_stream* stream) noexcept nogil:
    k3_stream_order(stream)


cdef int64_t gpu_block_room(const k3_matrix* one, const k3_matrix* other, int64_t rows) noexcept nogil:
    return k3_gpu_block_room(one, other, rows)


cdef int64_t gpu_slot_room(const k3_layer* layers, int64_t n_layers, int64_t experts) noexcept nogil:
    return k3_gpu_slot_room(layers, n_layers, experts)


cdef bint cache_open(k3_cache* cache, int64_t slots, int64_t layers, int64_t experts, int64_t moe,
                     double half_life) noexcept nogil:
    return k3_cache_open(cache, slots, layers, experts, moe, half_life)


cdef void cache_close(k3_cache* cache) noexcept nogil:
    k3_cache_close(cache)


cdef void gpu_streaming_table(k3_gpu_streaming* x, k3_ops* table) noexcept nogil:
    k3_gpu_streaming_table(x, table)


cdef int gpu_stream_begin(k3_gpu_streaming* x, bint with_head) noexcept nogil:
    return k3_gpu_stream_begin(x, with_head)


cdef int gpu_stream_end(k3_gpu_streaming* x, bint complete) noexcept nogil:
    return k3_gpu_stream_end(x, complete)
