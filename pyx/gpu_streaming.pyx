# SPDX-License-Identifier: MIT
"""Streaming to a GPU: weights that are brought there while a pass runs, into device memory of a fixed size.

A `GpuStreamer` is that memory, for one model; `GpuStreamOps` is the op table over it, for the same graph as any other.  What
they bring is read by a `Streamer` into pinned memory.  cuda/host/gpu_stream.cpp does the work.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from k3session._core.c_ops cimport k3_dims, k3_matrix
from k3session._core.c_stream cimport K3_PAGE, k3_gpu_block, k3_gpu_streaming
from k3session._core.cuda_ops cimport CudaOps, DeviceMemory, DeviceTables
from k3session._core.driver cimport check
from k3session._core.gpu cimport DeviceBuffer, PinnedBuffer
from k3session._core.memory cimport aligned
from k3session._core.ops cimport PassShape
from k3session._core.stream cimport Event, Stream
from k3session._core.streaming cimport (
    Streamer,
    cache_close,
    cache_open,
    gpu_block_room,
    gpu_slot_room,
    gpu_stream_begin,
    gpu_stream_end,
    gpu_streaming_table,
    paged,
    stream_enter,
    stream_order,
)
from k3session._core.weights cimport Weights

from k3session._core.stream import upload
from k3session.errors import DeviceError

cdef int64_t ALIGNMENT = 256            # of what lies on the device


cdef const k3_matrix* matrix_at(address) noexcept:
    return <const k3_matrix*><uintptr_t>address


cdef int64_t up(int64_t n) noexcept:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def block_bytes(one, other, int64_t rows) -> int:
    """Bytes of device memory for rows of a matrix, or of two; both by address, the second one 0 where there is none."""
    return gpu_block_room(matrix_at(one), matrix_at(other), rows)


def expert_bytes(Weights weights not None) -> int:
    """Bytes of device memory for one expert, the largest there is."""
    return gpu_slot_room(weights.tables.layers, weights.dims.num_hidden_layers, weights.dims.num_experts)


def pass_bytes(Weights weights not None, int64_t rows, int64_t widest) -> int:
    """Bytes of device memory for what a pass of up to ``rows`` rows brings beside blocks and experts."""
    return sum(_pass_bytes(&weights.dims, weights.tables.embed_tokens.pitch, rows, widest))


cdef tuple _pass_bytes(const k3_dims* d, int64_t embedding_pitch, int64_t rows, int64_t widest):
    """Rows of the embedding, which of them each token has, a table of experts, and gate rows of a block."""
    return (up(rows * ((embedding_pitch + 15) // 16 * 16)), up(rows * 4), up(3 * d.num_experts * sizeof(k3_matrix)),
            up(rows * widest * 4))


@cython.no_gc_clear
cdef class GpuStreamer:
    """The device memory that a model's weights go through.

    Parameters
    ----------
    tables : DeviceTables
        Loaded with ``streamed=True``.
    reader : Streamer
        With pinned memory; of the blocks that do not stay on the device, in their order.
    blocks : list
        (matrix, other or 0, first row, rows) of the trunk's part on the device, in the order of the graph.
    resident : uint8[len(blocks)]
        Which of them stay on the device.
    head : int
        The first block of lm_head; all blocks where it is not on the device.
    places : int
        Blocks that have room in the ring.
    slots : int
        Experts that there is room for; 0 where they are elsewhere.
    half_life : float
        Passes after which a use of an expert counts half.
    """

    def __cinit__(self, DeviceTables tables not None, Streamer reader not None, list blocks not None,
                  const uint8_t[::1] resident not None, int64_t head, int64_t places, int64_t slots, double half_life):
        cdef k3_gpu_block* b
        cdef int64_t i, room, moe = 0
        cdef uint64_t at
        weights = tables.weights
        device = tables.memory.device
        s = &self.stream
        self.tables, self.reader = tables, reader
        s.blocks = <k3_gpu_block*>calloc(len(blocks) + 1, sizeof(k3_gpu_block))
        s.launched = <int64_t*>calloc(slots + 1, 8)
        if s.blocks == NULL or s.launched == NULL:
            raise MemoryError("could not allocate the tables of what is streamed")
        s.n_blocks, s.head = len(blocks), head
        number = 0
        for i, (one, other, first, rows) in enumerate(blocks):
            b = &s.blocks[i]
            b.matrix[0], b.matrix[1], b.first, b.rows = matrix_at(one), matrix_at(other), first, rows
            if other and rows < b.matrix[0].rows:
                self.widest = max(self.widest, b.rows)
            room = gpu_block_room(b.matrix[0], b.matrix[1], b.rows)
            if resident[i]:
                self.resident_bytes += room
            else:
                b.number, number = number, number + 1
                s.ring_room = max(s.ring_room, room)
        s.n_ring = places if number else 0
        s.layers, s.host_layers = tables.tables.layers, weights.tables.layers
        s.n_layers, s.experts = weights.dims.num_hidden_layers, weights.dims.num_experts
        s.slot_room = gpu_slot_room(s.host_layers, s.n_layers, s.experts) if slots else 0
        for i in range(s.n_layers):
            moe += s.host_layers[i].is_moe
        if not cache_open(&s.cache, slots, s.n_layers, s.experts, moe, half_life):
            raise MemoryError("could not allocate the table of the experts on the device")
        self.nbytes = self.resident_bytes + s.n_ring * s.ring_room + slots * s.slot_room
        self.memory = DeviceBuffer(device, max(self.nbytes, ALIGNMENT))
        self.copies = Stream(device)
        self.events = []
        s.copied, s.used = <void**>calloc(s.n_ring + 1, sizeof(void*)), <void**>calloc(s.n_ring + 1, sizeof(void*))
        if s.copied == NULL or s.used == NULL:
            raise MemoryError("could not allocate the events of what is streamed")
        for i in range(s.n_ring):
            s.copied[i], s.used[i] = self.event(), self.event()
        for i in range(2):
            s.experts_copied[i], s.experts_used[i] = self.event(), self.event()
        s.gpu, s.copies, s.host = self.copies.gpu, self.copies.handle, reader.stream
        at = self.memory.pointer
        self.jobs = []
        for i in range(s.n_blocks):
            b = &s.blocks[i]
            if resident[i]:
                b.at = at
                self.plan_upload(i)
                at += gpu_block_room(b.matrix[0], b.matrix[1], b.rows)
        s.ring = at
        s.slots = at + s.n_ring * s.ring_room

    cdef int plan_upload(self, int64_t i) except -1:
        """Notes what of a block that stays has to be copied."""
        cdef k3_gpu_block* b = &self.stream.blocks[i]
        cdef uint64_t at = b.at
        for j in range(2):
            if b.matrix[j] != NULL:
                pitch = b.matrix[j].pitch
                self.jobs.append((<uintptr_t>b.matrix[j].data + b.first * pitch, b.rows, pitch, at, (pitch + 15) // 16 * 16))
                at += gpu_block_room(b.matrix[j], NULL, b.rows)
        return 0

    cdef void* event(self) except NULL:
        cdef Event made = Event(self.tables.memory.device)
        self.events.append(made)
        return made.handle

    def __dealloc__(self):
        cache_close(&self.stream.cache)
        free(self.stream.used)
        free(self.stream.copied)
        free(self.stream.launched)
        free(self.stream.blocks)

    def load(self, progress=None) -> None:
        """Copies what stays; ``progress`` is called as progress("upload", bytes done, bytes in all)."""
        jobs, self.jobs = self.jobs, []
        upload(self.tables.memory.device, self.copies, jobs, progress)

    def close(self) -> None:
        """Frees the device's memory; no pass may run any more."""
        self.memory.close()
        for event in self.events:
            event.close()
        self.copies.close()


@cython.no_gc_clear
cdef class GpuStreamOps(CudaOps):
    """The ops of a GPU over weights that a `GpuStreamer` brings there; one pass of it at a time, and nothing is recorded."""

    def __cinit__(self, DeviceMemory memory not None, int64_t rows, bint split_activations=False, GpuStreamer streamer=None):
        self.streamer = streamer

    cdef int prepare(self, const k3_dims* dims) except -1:
        cdef k3_gpu_streaming* x = &self.streaming
        cdef Weights weights = self.streamer.tables.weights
        cdef int64_t pitch = weights.tables.embed_tokens.pitch, chosen
        cdef char* there
        CudaOps.prepare(self, dims)
        rows, places, table, hidden = _pass_bytes(dims, pitch, self.rows, self.streamer.widest)
        chosen = up(self.rows * dims.num_experts_per_token * 4)
        self.here = DeviceBuffer(self.device, rows + places + table + hidden)
        self.there = PinnedBuffer(self.device, rows + places + table + chosen)
        self.arrived = Event(self.device)
        x.stream = &self.streamer.stream
        x.launches, x.arrived = self.stream.handle, self.arrived.handle
        x.rows_here, x.rows_room = self.here.pointer, rows
        x.table_here = x.rows_here + <uint64_t>(rows + places)
        x.hidden = <float*><uintptr_t>(x.table_here + <uint64_t>table)
        there = x.rows = <char*>self.there.handle
        there += rows + places
        x.table, x.ids = <k3_matrix*>there, <int32_t*>(there + <int64_t>table)
        x.found = <k3_matrix*>aligned(3 * dims.num_experts * sizeof(k3_matrix))
        x.active = <int32_t*>aligned(dims.num_experts * 4)
        x.row = <char*>paged(pitch + 3 * K3_PAGE)
        self.recorder.cuda.streaming = x
        gpu_streaming_table(x, &self.table)
        return 0

    def __dealloc__(self):
        free(self.streaming.found)
        free(self.streaming.active)
        free(self.streaming.row)

    cdef int open_mail(self, int64_t nbytes, char** host, char** here) except -1:
        CudaOps.open_mail(self, nbytes, host, here)
        self.streaming.mail_host, self.streaming.mail_here = host[0], here[0]
        return 0

    cdef bint ready(self) noexcept nogil:
        if not self.entered:
            self.entered = stream_enter(self.streaming.stream.host)
        return self.entered

    cdef int begin(self, PassShape shape, int64_t mail_bytes) noexcept nogil:
        cdef int status
        self.eager = self.entered           # else a commit: no matrix is needed
        status = CudaOps.begin(self, shape, mail_bytes)
        if status == 0 and self.entered:
            self.end_at = self.streaming.stream.n_blocks if shape.take > 0 else self.streaming.stream.head
            status = gpu_stream_begin(&self.streaming, shape.take > 0)
        return status

    cdef int end(self, bint complete, int64_t offset, int64_t nbytes) noexcept nogil:
        cdef int status
        if self.entered and complete and self.streaming.at != self.end_at:
            stream_order(self.streaming.stream.host)
            complete = False
        status = CudaOps.end(self, complete, offset, nbytes)
        if self.entered:
            self.entered = False
            status |= gpu_stream_end(&self.streaming, complete and status == 0)
        return status

    def failure(self) -> Exception | None:
        """What went wrong on the device, or with the files, in the last pass; or None."""
        cdef k3_gpu_streaming* x = &self.streaming
        found = CudaOps.failure(self)
        if found is None and x.status != 0:
            try:
                check(self.recorder.gpu, x.status, x.what)
            except (DeviceError, MemoryError) as error:
                return error
        return found or self.streamer.reader.failure()

    def counts(self, bint clear=False) -> tuple[int, int, int, int, int]:
        """As `StreamOps.counts`, with the experts that were not on the device, and the bytes that went there."""
        cdef k3_gpu_streaming* x = &self.streaming
        found = x.bytes, x.wait_ns, x.uses, x.misses, x.copied
        if clear:
            x.bytes = x.wait_ns = x.uses = x.misses = x.copied = 0
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the work memory on the device."""
        return CudaOps.nbytes.__get__(self) + self.here.nbytes
