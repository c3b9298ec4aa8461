# SPDX-License-Identifier: MIT
"""CudaOps: the op table of a GPU, and the weights and state that its kernels read.

A pass is recorded the first time that one of its shape comes along, and replayed from then on: what differs from pass
to pass (tokens, positions, where the state lies) is in the mail, which kernels read on the device.  The decoder walks
the same graph each time; in a replay its launches do nothing, and what was recorded between two seams starts at the
second one.  A pass that is all on the device has no seam but its end: one copy in, one graph, one copy out, one wait.
"""

import numpy as np

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from k3session._core.c_driver cimport (
    CUDA_ERROR_OUT_OF_MEMORY,
    cuGraphDestroy,
    cuGraphExecDestroy,
    cuGraphInstantiate,
    cuGraphLaunch,
    cuMemcpyDtoHAsync,
    cuMemcpyHtoDAsync,
    cuStreamBeginCapture,
    cuStreamEndCapture,
    cuStreamSynchronize,
    k3_call,
    k3_enter,
    k3_launch,
    k3_leave,
    k3_release,
    k3_use,
)
from k3session._core.c_ops cimport k3_cuda, k3_dims, k3_layer, k3_matrix
from k3session._core.driver cimport check, driver_table
from k3session._core.gpu cimport Device, DeviceBuffer, PinnedBuffer, cuda_ops, cuda_work_bytes
from k3session._core.memory cimport Memory
from k3session._core.ops cimport Ops, PassShape
from k3session._core.stream cimport Stream
from k3session._core.weights cimport Tables, Weights

from k3session._core.gpu import KERNELS
from k3session._core.stream import upload
from k3session.errors import DeviceError

k3_use(driver_table())

cdef enum:                              # what a launch does
    EAGER = 0                           # runs at once
    RECORD = 1                          # goes into a graph
    REPLAY = 2                          # is in a graph already

cdef enum:
    CAPTURE_THREAD_LOCAL = 1            # calls of other threads are free meanwhile
    ALIGNMENT = 256                     # of what lies on the device
    MAX_RECORDINGS = 24                 # shapes of passes that are kept


# ---------------------------------------------------------------------------------------------
# memory and weights
# ---------------------------------------------------------------------------------------------


@cython.no_gc_clear
cdef class DeviceMemory(Memory):
    """The memory of a device, for state and scratch.  Its copies wait until they are done."""

    def __cinit__(self, Device device not None):
        self.mapped = False
        self.device = device
        self.stream = Stream(device)
        self.buffers = {}

    cdef void* allocate(self, int64_t nbytes, bint zeroed=True) except NULL:
        buffer = DeviceBuffer(self.device, max(nbytes, ALIGNMENT), zeroed)
        address = (<DeviceBuffer>buffer).pointer
        self.buffers[address] = buffer
        return <void*><uintptr_t>address

    cdef void release(self, void* start) noexcept:
        if start != NULL:
            buffer = self.buffers.pop(<uintptr_t>start, None)
            if buffer is not None:
                buffer.close()

    cdef int read(self, void* host, const void* here, int64_t nbytes) except -1:
        with nogil:
            self.stream.to_host(host, <uint64_t><uintptr_t>here, nbytes)
            self.stream.wait()
        return 0

    cdef int write(self, void* here, const void* host, int64_t nbytes) except -1:
        with nogil:
            self.stream.to_device(<uint64_t><uintptr_t>here, host, nbytes)
            self.stream.wait()
        return 0

    cdef int copy(self, void* to, const void* start, int64_t nbytes, int64_t pitch, int64_t count) except -1:
        cdef int64_t i
        with nogil:
            for i in range(count):
                self.stream.within(<uint64_t><uintptr_t>to + i * pitch, <uint64_t><uintptr_t>start + i * pitch, nbytes)
            self.stream.wait()
        return 0

    cdef int fill(self, void* here, int value, int64_t nbytes) except -1:
        with nogil:
            self.stream.set_bytes(<uint64_t><uintptr_t>here, <unsigned char>value, nbytes)
            self.stream.wait()
        return 0

    def close(self) -> None:
        """Gives the stream back; what was allocated is freed by those who hold it."""
        self.stream.close()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return sum((<DeviceBuffer>b).nbytes for b in self.buffers.values())


cdef class DeviceTables:
    """The weights of a model, or some parts of them, on a device; ``weights`` themselves stay where they are.

    Parts are "trunk" (embedding, AttnRes, norms, router, latent projections, head), "kda", "mla", "dense" (the dense MLP
    and the shared experts) and "experts".
    """

    def __cinit__(self, Weights weights not None):
        self.weights = weights
        self.tables.layers = <k3_layer*>calloc(weights.dims.num_hidden_layers, sizeof(k3_layer))
        if self.tables.layers == NULL:
            raise MemoryError("could not allocate the table of the layers on the device")

    def __dealloc__(self):
        free(self.tables.layers)

    def count(self, frozenset parts not None, bint streamed=False) -> int:
        """Bytes that these parts take on a device; with ``streamed`` those of the vectors alone."""
        cdef DeviceTables counting = DeviceTables(self.weights)     # with addresses from 0 on: of no use but to count
        counting.streamed = streamed
        counting.fill(self.weights, parts)
        return counting.base

    def work_bytes(self, int64_t rows) -> int:
        """Bytes that the ops of a pass of up to ``rows`` rows work in, beside its activations."""
        return cuda_work_bytes(&self.weights.dims, rows)

    def load(self, DeviceMemory memory not None, frozenset parts not None, progress=None, bint streamed=False) -> None:
        """Copies these parts to a device; ``progress`` is called as progress("upload", bytes done, bytes in all).

        With ``streamed`` only vectors are copied.  Matrices go on naming the host's memory, for ops that bring them.
        """
        self.streamed = streamed
        self.nbytes = self.count(parts, streamed)
        self.buffer = DeviceBuffer(memory.device, max(self.nbytes, ALIGNMENT))
        self.base, self.jobs = self.buffer.pointer, []
        try:
            self.fill(self.weights, parts)
            self.memory, self.parts = memory, parts
            upload(memory.device, memory.stream, self.jobs, progress)
        finally:
            self.jobs = self.keep = None

    def close(self) -> None:
        """Frees the device's memory."""
        if self.buffer is not None:
            self.buffer.close()

    cdef uint64_t put(self, const void* host, int64_t rows, int64_t row_bytes, int64_t pitch) except? 0:
        """The address that rows of the host get; without a base they are only counted."""
        cdef uint64_t at = self.base
        if host == NULL or rows == 0:
            return 0
        self.base += (rows * pitch + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if self.jobs is not None:
            self.jobs.append((<uintptr_t>host, rows, row_bytes, at, pitch))
        return at

    cdef const float* vector(self, const float* host, int64_t n) except? NULL:
        return <const float*><uintptr_t>self.put(host, 1, n * 4, n * 4)

    cdef k3_matrix matrix(self, k3_matrix m) except *:
        cdef int64_t row_bytes = m.pitch
        if m.data == NULL or self.streamed:
            return m
        m.pitch = (row_bytes + 15) // 16 * 16
        m.data = <const void*><uintptr_t>self.put(m.data, m.rows, row_bytes, m.pitch)
        if m.scale != NULL:
            m.scale = <const uint8_t*><uintptr_t>self.put(m.scale, 1, m.rows * (m.cols // 32), m.rows * (m.cols // 32))
        return m

    cdef int fill(self, Weights weights, frozenset parts) except -1:
        """Gives everything of these parts its place."""
        cdef int64_t i, d = weights.dims.hidden_size
        cdef Tables* to = &self.tables
        cdef const Tables* at = &weights.tables
        cdef k3_matrix* experts
        self.keep = []
        if "trunk" in parts:
            to.embed_tokens = self.matrix(at.embed_tokens)
            to.lm_head = to.embed_tokens if at.lm_head.data == at.embed_tokens.data else self.matrix(at.lm_head)
            to.norm = self.vector(at.norm, d)
            to.output_attn_res = self.vector(at.output_attn_res, d)
        if "mla" in parts and at.frequencies != NULL:
            i = weights.dims.qk_rope_head_dim // 2 * 8
            to.frequencies = <const double*><uintptr_t>self.put(at.frequencies, 1, i, i)
        table = np.zeros(3 * weights.dims.num_experts * sizeof(k3_matrix), np.uint8)
        for i in range(weights.dims.num_hidden_layers):
            table = np.zeros_like(table)
            experts = <k3_matrix*><uintptr_t>table.__array_interface__["data"][0]
            self.keep.append(table)
            self.fill_layer(weights, parts, i, experts)
        return 0

    cdef int fill_layer(self, Weights weights, frozenset parts, int64_t i, k3_matrix* experts) except -1:
        d = &weights.dims
        cdef int64_t C = d.kda_num_heads * d.kda_head_k, E = d.num_experts, e, nbytes
        cdef const k3_layer* at = &weights.tables.layers[i]
        cdef k3_layer* to = &self.tables.layers[i]
        cdef k3_matrix* table
        to.is_kda, to.is_moe, to.mixer_index = at.is_kda, at.is_moe, at.mixer_index
        if "trunk" in parts:
            to.input_layernorm = self.vector(at.input_layernorm, d.hidden_size)
            to.post_attention_layernorm = self.vector(at.post_attention_layernorm, d.hidden_size)
            to.self_attention_res = self.vector(at.self_attention_res, d.hidden_size)
            to.mlp_res = self.vector(at.mlp_res, d.hidden_size)
            to.moe.gate = self.matrix(at.moe.gate)
            to.moe.e_score_correction_bias = self.vector(at.moe.e_score_correction_bias, E)
            to.moe.routed_expert_down_proj = self.matrix(at.moe.routed_expert_down_proj)
            to.moe.routed_expert_up_proj = self.matrix(at.moe.routed_expert_up_proj)
            to.moe.routed_expert_norm = self.vector(at.moe.routed_expert_norm, d.routed_expert_hidden_size)
        if at.is_kda and "kda" in parts:
            to.kda.q_proj = self.matrix(at.kda.q_proj)
            to.kda.k_proj = self.matrix(at.kda.k_proj)
            to.kda.v_proj = self.matrix(at.kda.v_proj)
            to.kda.f_a_proj, to.kda.f_b_proj = self.matrix(at.kda.f_a_proj), self.matrix(at.kda.f_b_proj)
            to.kda.b_proj, to.kda.g_proj = self.matrix(at.kda.b_proj), self.matrix(at.kda.g_proj)
            to.kda.o_proj = self.matrix(at.kda.o_proj)
            to.kda.conv1d = self.vector(at.kda.conv1d, 3 * d.conv_kernel * C)
            to.kda.A = self.vector(at.kda.A, d.kda_num_heads)
            to.kda.dt_bias = self.vector(at.kda.dt_bias, C)
            to.kda.o_norm = self.vector(at.kda.o_norm, d.kda_head_v)
        if not at.is_kda and "mla" in parts:
            to.mla.q_a_proj, to.mla.q_b_proj = self.matrix(at.mla.q_a_proj), self.matrix(at.mla.q_b_proj)
            to.mla.kv_a_proj_with_mqa, to.mla.kv_b_proj = self.matrix(at.mla.kv_a_proj_with_mqa), self.matrix(at.mla.kv_b_proj)
            to.mla.g_proj, to.mla.o_proj = self.matrix(at.mla.g_proj), self.matrix(at.mla.o_proj)
            to.mla.q_a_layernorm = self.vector(at.mla.q_a_layernorm, d.q_lora_rank)
            to.mla.kv_a_layernorm = self.vector(at.mla.kv_a_layernorm, d.kv_lora_rank)
        if "dense" in parts:
            to.mlp.gate_proj = self.matrix(at.mlp.gate_proj)
            to.mlp.up_proj = self.matrix(at.mlp.up_proj)
            to.mlp.down_proj = self.matrix(at.mlp.down_proj)
        if at.is_moe and "experts" in parts and self.streamed:
            to.moe.w1, to.moe.w2, to.moe.w3 = at.moe.w1, at.moe.w2, at.moe.w3
        elif at.is_moe and "experts" in parts:
            # The table itself goes to the device: kernels look an expert up there.
            for e in range(E):
                experts[e] = self.matrix(at.moe.w1[e])
                experts[E + e] = self.matrix(at.moe.w2[e])
                experts[2 * E + e] = self.matrix(at.moe.w3[e])
            nbytes = 3 * E * sizeof(k3_matrix)
            table = <k3_matrix*><uintptr_t>self.put(experts, 1, nbytes, nbytes)
            to.moe.w1, to.moe.w2, to.moe.w3 = table, table + E, table + 2 * E
        return 0


# ---------------------------------------------------------------------------------------------
# ops
# ---------------------------------------------------------------------------------------------


cdef int note(Recorder* r, int status, const char* what, int kernel) noexcept nogil:
    """Keeps the first failure of a pass; whether this is none."""
    if status != 0 and r.status == 0:
        r.status, r.what, r.kernel = status, what, kernel
    return status


cdef int launch_or_record(k3_cuda* c, int kernel, unsigned int x, unsigned int y, unsigned int z, unsigned int threads,
                          size_t shared, void** args) noexcept nogil:
    """What launch functions of cuda/ call; not in a replay."""
    cdef Recorder* r = <Recorder*>c
    if r.status != 0:
        return r.status
    if r.mode == RECORD and not r.capturing:
        if note(r, k3_call(r.gpu, cuStreamBeginCapture, r.stream, <int>CAPTURE_THREAD_LOCAL), "cuStreamBeginCapture", -1) != 0:
            return r.status
        r.capturing = True
    return note(r, k3_launch(r.gpu, r.stream, kernel, x, y, z, threads, shared, args), "a launch", kernel)


cdef int end_capture(Recorder* r, void** ready) noexcept nogil:
    """Makes what was recorded ready to be replayed."""
    cdef void* graph = NULL
    cdef int status = k3_call(r.gpu, cuStreamEndCapture, r.stream, &graph)
    if status == 0:
        status = k3_call(r.gpu, cuGraphInstantiate, ready, graph, <unsigned long long>0)
    if graph != NULL:
        k3_release(r.gpu, cuGraphDestroy, graph)
    return status


cdef int seam(Recorder* r) noexcept nogil:
    """Starts what was called since the last seam."""
    cdef void* graph = NULL
    cdef void* grown
    cdef Recording* recording = r.recording
    if r.status != 0 or r.mode == EAGER:
        return r.status
    if r.mode == REPLAY:
        graph = recording.graphs[r.next]
        r.next += 1
    else:
        if recording.n == recording.room:
            grown = realloc(recording.graphs, (2 * recording.room + 8) * sizeof(void*))
            if grown == NULL:
                return note(r, CUDA_ERROR_OUT_OF_MEMORY, "the table of recorded graphs", -1)
            recording.graphs = <void**>grown
            recording.room = 2 * recording.room + 8
        if r.capturing:
            r.capturing = False
            if note(r, end_capture(r, &graph), "recording a graph", -1) != 0:
                return r.status
        recording.graphs[recording.n] = graph
        recording.n += 1
    return note(r, k3_call(r.gpu, cuGraphLaunch, graph, r.stream), "cuGraphLaunch", -1) if graph != NULL else 0


cdef int read_op(void* ctx, void* host, const void* here, int64_t nbytes) noexcept nogil:
    cdef Recorder* r = <Recorder*>ctx
    if seam(r) != 0:
        return r.status
    if note(r, k3_call(r.gpu, cuMemcpyDtoHAsync, host, <uint64_t><uintptr_t>here, <size_t>nbytes, r.stream),
            "a copy to the host", -1) != 0:
        return r.status
    return note(r, k3_call(r.gpu, cuStreamSynchronize, r.stream), "waiting for the device", -1)


cdef int write_op(void* ctx, void* here, const void* host, int64_t nbytes) noexcept nogil:
    cdef Recorder* r = <Recorder*>ctx
    if seam(r) != 0:
        return r.status
    return note(r, k3_call(r.gpu, cuMemcpyHtoDAsync, <uint64_t><uintptr_t>here, host, <size_t>nbytes, r.stream),
                "a copy to the device", -1)


cdef int submit_op(void* ctx) noexcept nogil:
    return seam(<Recorder*>ctx)


@cython.no_gc_clear
cdef class CudaOps(Ops):
    """The ops of a GPU for passes of up to ``rows`` rows, in a stream of their own.

    ``streamer`` is for `GpuStreamOps`.
    """

    def __cinit__(self, DeviceMemory memory not None, int64_t rows, bint split_activations=False, streamer=None):
        cdef Recorder* r = &self.recorder
        self.device = memory.device
        self.memory = memory
        self.rows = self.padded(rows)
        self.stream = Stream(self.device)
        cuda_ops(&self.table)
        self.table.ctx = r
        self.table.read, self.table.write, self.table.submit = read_op, write_op, submit_op
        r.cuda.launch = launch_or_record
        self.split_activations = split_activations
        r.gpu, r.stream = self.stream.gpu, self.stream.handle
        self.recordings = <Recording*>calloc(MAX_RECORDINGS, sizeof(Recording))
        if self.recordings == NULL:
            raise MemoryError("could not allocate the table of recorded passes")

    cdef int prepare(self, const k3_dims* dims) except -1:
        """Allocates what ops work in, for a model of these dimensions."""
        cdef Recorder* r = &self.recorder
        r.cuda.work_bytes = cuda_work_bytes(dims, self.rows)
        self.work = DeviceBuffer(self.device, max(r.cuda.work_bytes, ALIGNMENT), False)
        r.cuda.work = <char*><uintptr_t>self.work.pointer
        return 0

    def __dealloc__(self):
        cdef int64_t i
        if self.recordings != NULL:
            for i in range(self.n_recordings):
                self.forget(&self.recordings[i])
        free(self.recordings)

    cdef int64_t padded(self, int64_t rows) noexcept nogil:
        """Powers of two, so that there are few shapes to record."""
        cdef int64_t n = 1
        while n < rows:
            n *= 2
        return n if rows > 0 else 0

    cdef int open_mail(self, int64_t nbytes, char** host, char** here) except -1:
        self.mail_host = PinnedBuffer(self.device, nbytes)
        self.mail_here = DeviceBuffer(self.device, nbytes, False)
        host[0] = self.pinned = <char*>self.mail_host.handle
        here[0] = <char*><uintptr_t>self.mail_here.pointer
        self.device_mail = self.mail_here.pointer
        memset(host[0], 0, nbytes)
        return 0

    cdef Recording* find(self, PassShape shape) noexcept nogil:
        """The recording of a shape, an empty one where there is none; the one not used for longest makes room."""
        cdef Recording* oldest = NULL
        cdef Recording* r
        cdef int64_t i
        self.clock += 1
        for i in range(self.n_recordings):
            r = &self.recordings[i]
            if (r.shape.rows == shape.rows and r.shape.segments == shape.segments and r.shape.take == shape.take
                    and r.shape.kind == shape.kind and r.shape.tape == shape.tape):
                r.used = self.clock
                return r
            if oldest == NULL or r.used < oldest.used:
                oldest = r
        if self.n_recordings < MAX_RECORDINGS:
            oldest = &self.recordings[self.n_recordings]
            self.n_recordings += 1
        else:
            self.forget(oldest)
        oldest.shape = shape
        oldest.used = self.clock
        return oldest

    cdef void forget(self, Recording* recording) noexcept nogil:
        cdef int64_t i
        for i in range(recording.n):
            if recording.graphs[i] != NULL:
                k3_release(self.recorder.gpu, cuGraphExecDestroy, recording.graphs[i])
        free(recording.graphs)
        memset(recording, 0, sizeof(Recording))

    cdef int begin(self, PassShape shape, int64_t mail_bytes) noexcept nogil:
        cdef Recorder* r = &self.recorder
        r.status, r.next, r.capturing, r.kernel = 0, 0, False, -1
        r.recording = NULL
        r.mode = EAGER
        if note(r, k3_enter(r.gpu, &r.before), "cuCtxSetCurrent", -1) != 0:
            return r.status
        # Where each launch is waited for, so that an error names its kernel, nothing is recorded.
        if not shape.traced and not r.gpu.waits and not self.eager:
            r.recording = self.find(shape)
            r.mode = REPLAY if r.recording.n > 0 else RECORD
        r.cuda.replaying = r.mode == REPLAY
        # Tensor cores are for the prefill of one session: rows of a batch stay what they are alone.
        r.cuda.split_activations = self.split_activations and shape.segments == 1
        if mail_bytes == 0:
            return 0
        return note(r, k3_call(r.gpu, cuMemcpyHtoDAsync, self.device_mail, self.pinned, <size_t>mail_bytes, r.stream),
                    "a copy to the device", -1)

    cdef int end(self, bint complete, int64_t offset, int64_t nbytes) noexcept nogil:
        cdef Recorder* r = &self.recorder
        cdef void* graph = NULL
        cdef int waited
        if complete and seam(r) == 0 and nbytes > 0:
            note(r, k3_call(r.gpu, cuMemcpyDtoHAsync, self.pinned + offset, self.device_mail + <uint64_t>offset, <size_t>nbytes,
                            r.stream), "a copy to the host", -1)
        if r.capturing:
            r.capturing = False
            if k3_release(r.gpu, cuStreamEndCapture, r.stream, &graph) == 0 and graph != NULL:
                k3_release(r.gpu, cuGraphDestroy, graph)
        waited = k3_call(r.gpu, cuStreamSynchronize, r.stream)
        note(r, waited, "waiting for the device", -1)
        if r.recording != NULL and r.mode == RECORD and (r.status != 0 or not complete):
            self.forget(r.recording)
        r.recording = NULL
        k3_leave(r.gpu, r.before)
        return r.status

    def failure(self) -> Exception | None:
        """The exception for what went wrong in the last pass on this device, or None."""
        cdef Recorder* r = &self.recorder
        if r.status == 0:
            return None
        try:
            what = r.what.decode() if r.kernel < 0 else f"{r.what.decode()} of {KERNELS[r.kernel]}"
            named = what.encode()
            check(r.gpu, r.status, named)
        except (DeviceError, MemoryError) as error:
            return error
        return None

    def poison(self) -> None:
        """Fills the work memory with NaN, so that a test sees whatever reads it before writing."""
        self.memory.fill(self.recorder.cuda.work, 0xff, self.recorder.cuda.work_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the work memory."""
        return self.recorder.cuda.work_bytes

    @property
    def recorded(self) -> int:
        """Shapes of passes that are recorded now."""
        return self.n_recordings
