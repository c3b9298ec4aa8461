# SPDX-License-Identifier: MIT
"""The state of one session: what each layer carries from token to token.

KDA layers carry their convolution windows and the recurrent matrix, of fixed size.  MLA layers carry one latent row
per token, in pages: a page covers the same positions of all MLA layers, so a session has one page table, grows
without copying, and reserves its memory before a pass begins.
"""

import numpy as np

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from k3session._core.c_ops cimport K3_BF16, K3_F32, k3_kda_state
from k3session._core.ops cimport aligned
from k3session._core.weights cimport Weights

from k3session.errors import SessionBusyError, SnapshotMismatchError

cdef int64_t SLAB_BYTES = 8 << 20       # what one allocation of latent pages aims at, once a session is that long


cdef k3_kda_state* allocate_kda(Weights weights) except? NULL:
    """Zeroed conv windows and recurrent matrices of all KDA layers, in two blocks; freed by free_kda."""
    cdef int64_t n = weights.dims.n_kda, i
    cdef int64_t C = weights.dims.kda_num_heads * weights.dims.kda_head_k
    cdef int64_t conv = 3 * (weights.dims.conv_kernel - 1) * C
    cdef int64_t state = C * weights.dims.kda_head_v
    cdef k3_kda_state* s = NULL
    cdef int64_t conv_stride = (conv + 15) // 16 * 16, state_stride = (state + 15) // 16 * 16
    s = <k3_kda_state*>calloc(n + 1, sizeof(k3_kda_state))
    if s == NULL:
        raise MemoryError("could not allocate the table of recurrent states")
    if n == 0:
        return s
    try:
        s[0].conv = <float*>aligned(n * conv_stride * 4)
        s[0].state = <float*>aligned(n * state_stride * 4)
    except MemoryError:
        free(s[0].conv)
        free(s)
        raise
    memset(s[0].conv, 0, n * conv_stride * 4)
    memset(s[0].state, 0, n * state_stride * 4)
    for i in range(n):
        s[i].conv = s[0].conv + i * conv_stride
        s[i].state = s[0].state + i * state_stride
    return s


cdef void free_kda(k3_kda_state* s) noexcept:
    """Commits swap whole tables, so the blocks of a table always begin with its first entry."""
    if s != NULL:
        free(s[0].state)
        free(s[0].conv)
        free(s)


cdef class Timeline:
    """All layers of one session.

    Parameters
    ----------
    weights : Weights
        The model's; gives the shapes.
    bf16_latent : bool
        Store latent rows in BF16, rounded once, instead of float32.
    page_rows : int
        Positions in a page; results do not depend on it.
    """

    def __cinit__(self, Weights weights not None, bint bf16_latent=False, int64_t page_rows=64):
        if page_rows < 1:
            raise ValueError(f"page_rows is {page_rows}; expected at least 1")
        self.weights = weights
        self.latent_dtype = K3_BF16 if bf16_latent else K3_F32
        self.page_rows = page_rows
        self.seen = <int64_t*>calloc(weights.dims.num_hidden_layers, sizeof(int64_t))
        if self.seen == NULL:
            raise MemoryError("could not allocate the positions of the layers")
        self.now = allocate_kda(weights)

    def __dealloc__(self):
        self.drop_pages(0)
        free(self.pages)
        free(self.slabs)
        free_kda(self.now)
        free(self.seen)

    @property
    def layers(self) -> list:
        """One K3CpuFallbackState per layer; made anew at each call, since they refer back to this object."""
        return [K3CpuFallbackState.__new__(K3CpuFallbackState, self, i)
                for i in range(self.weights.dims.num_hidden_layers)]

    cdef int64_t conv_bytes(self) noexcept nogil:
        return 3 * (self.weights.dims.conv_kernel - 1) * self.weights.dims.kda_num_heads * self.weights.dims.kda_head_k * 4

    cdef int64_t state_bytes(self) noexcept nogil:
        return self.weights.dims.kda_num_heads * self.weights.dims.kda_head_k * self.weights.dims.kda_head_v * 4

    cdef int64_t row_bytes(self) noexcept nogil:
        return self.weights.dims.latent_stride * (2 if self.latent_dtype == K3_BF16 else 4)

    @property
    def nbytes(self) -> int:
        """Bytes of state held now: conv windows, recurrent matrices and latent pages."""
        cdef int64_t page = self.weights.dims.n_mla * self.page_rows * self.row_bytes()
        return self.weights.dims.n_kda * (self.conv_bytes() + self.state_bytes()) + self.n_pages * page

    cdef int reserve(self, int64_t positions) except -1:
        """Makes room for that many positions; on failure nothing has changed."""
        cdef int64_t need = (positions + self.page_rows - 1) // self.page_rows - self.n_pages
        cdef int64_t page = self.weights.dims.n_mla * self.page_rows * self.row_bytes()
        cdef int64_t count, i, room
        cdef void* grown
        cdef Slab* slab
        if need <= 0 or page == 0:
            return 0
        # A quarter more than the session has, up to a slab's size: few allocations, little unused.
        count = max(need, min(self.n_pages // 4, SLAB_BYTES // page))
        if self.n_pages + count > self.page_room:
            room = max(2 * self.page_room, self.n_pages + count)
            grown = realloc(self.pages, room * sizeof(void*))
            if grown == NULL:
                raise MemoryError("could not grow the page table of the latent cache")
            self.pages = <void**>grown
            grown = realloc(self.slabs, room * sizeof(void*))
            if grown == NULL:
                raise MemoryError("could not grow the page table of the latent cache")
            self.slabs = <Slab**>grown
            self.page_room = room
        slab = <Slab*>malloc(sizeof(Slab))
        if slab == NULL:
            raise MemoryError("could not allocate a slab of the latent cache")
        try:
            slab.data = <char*>aligned(count * page)
        except MemoryError:
            free(slab)
            raise
        slab.pages = count
        for i in range(count):
            self.pages[self.n_pages + i] = slab.data + i * page
            self.slabs[self.n_pages + i] = slab
        self.n_pages += count
        return 0

    cdef int drop_pages(self, int64_t keep) noexcept:
        """Lets go of all pages from number ``keep`` on."""
        cdef Slab* slab
        while self.n_pages > keep:
            self.n_pages -= 1
            slab = self.slabs[self.n_pages]
            slab.pages -= 1
            if slab.pages == 0:
                free(slab.data)
                free(slab)
        return 0

    cdef int check(self, int64_t position) noexcept nogil:
        """The first layer that has not taken in exactly ``position`` tokens, or -1."""
        cdef int64_t i
        for i in range(self.weights.dims.num_hidden_layers):
            if self.seen[i] != position:
                return <int>i
        return -1

    cdef void commit(self, k3_kda_state* next, int64_t rows) noexcept nogil:
        """Takes over what a pass has written: all layers together.  The old buffers go to the caller's table."""
        cdef int64_t i
        cdef k3_kda_state t
        for i in range(self.weights.dims.n_kda):
            t = self.now[i]
            self.now[i] = next[i]
            next[i] = t
        for i in range(self.weights.dims.num_hidden_layers):
            self.seen[i] += rows
        self.position += rows

    cdef char* latent(self, int64_t mla_index, int64_t position) noexcept nogil:
        cdef int64_t row = mla_index * self.page_rows + position % self.page_rows
        return <char*>self.pages[position // self.page_rows] + row * self.row_bytes()

    def replace(self, int64_t position, list arrays) -> None:
        """Sets all layers at once, from arrays as `K3CpuFallbackState.export` gives them, already checked.

        Everything that can fail comes first: after the memory is there, only copies are left.
        """
        cdef int64_t i
        cdef K3CpuFallbackState layer
        shapes = [(layer, {name: np.ascontiguousarray(a) for name, a in given.items()})
                  for layer, given in zip(self.layers, arrays, strict=True)]
        for layer, a in shapes:
            layer.verify(position, a)
        self.reserve(position)
        for layer, a in shapes:
            layer.load(position, a)
        self.position = position
        for i in range(self.weights.dims.num_hidden_layers):
            self.seen[i] = position
        self.drop_pages((position + self.page_rows - 1) // self.page_rows)


cdef class K3CpuFallbackState:
    """The mixer state of one layer of one session: the host's copy, and the seed of a device's.

    A KDA layer has ``conv`` float32[3, K - 1, C], the raw projections of the last K - 1 tokens for q, k and v, oldest
    first, and ``state`` float32[H, D, D] as [head, key, value].  An MLA layer has ``latent`` [position, kv_lora +
    rope], float32 or uint16 holding BF16.
    """

    def __cinit__(self, Timeline timeline not None, int layer):
        self.timeline = timeline
        self.layer = layer
        self.is_kda = timeline.weights.layers[layer].is_kda
        self.mixer_index = timeline.weights.layers[layer].mixer_index

    @property
    def position(self) -> int:
        """Tokens that this layer has taken in."""
        return self.timeline.seen[self.layer]

    def shapes(self, int64_t position) -> dict:
        """Name -> (shape, dtype) of this layer's arrays for a session of that many tokens."""
        d = self.timeline.weights.dims
        if self.is_kda:
            return {"conv": ((3, d.conv_kernel - 1, d.kda_num_heads * d.kda_head_k), np.dtype(np.float32)),
                    "state": ((d.kda_num_heads, d.kda_head_k, d.kda_head_v), np.dtype(np.float32))}
        dtype = np.uint16 if self.timeline.latent_dtype == K3_BF16 else np.float32
        return {"latent": ((position, d.kv_lora_rank + d.qk_rope_head_dim), np.dtype(dtype))}

    def array(self, str name):
        """One of this layer's arrays, "conv", "state" or "latent", copied out in the canonical layout."""
        cdef int64_t t, width, position = self.timeline.position
        cdef char* to
        shape, dtype = self.shapes(position)[name]
        out = np.empty(shape, dtype)
        if name == "conv":
            _copy(out, self.timeline.now[self.mixer_index].conv, True)
        elif name == "state":
            _copy(out, self.timeline.now[self.mixer_index].state, True)
        else:
            width = out.shape[1] * out.itemsize
            to = <char*>address(out)
            with nogil:
                for t in range(position):
                    memcpy(to + t * width, self.timeline.latent(self.mixer_index, t), width)
        return out

    def export(self) -> dict:
        """Name -> array for all of this layer's arrays."""
        return {name: self.array(name) for name in self.shapes(self.timeline.position)}

    def verify(self, int64_t position, dict arrays) -> None:
        """SnapshotMismatchError unless the arrays are this layer's for that position."""
        wanted = self.shapes(position)
        found = {k: (a.shape, a.dtype) for k, a in arrays.items()}
        if wanted != found:
            raise SnapshotMismatchError(f"layer {self.layer}: expected {wanted}, found {found}",
                                        {f"layers.{self.layer}": (found, wanted)})

    def load(self, int64_t position, dict arrays) -> None:
        """Copies arrays that `verify` has passed into place; the pages must have been reserved."""
        cdef int64_t t, width, stride = self.timeline.row_bytes()
        cdef char* start
        cdef char* row
        if self.is_kda:
            _copy(arrays["conv"], self.timeline.now[self.mixer_index].conv, False)
            _copy(arrays["state"], self.timeline.now[self.mixer_index].state, False)
            return
        latent = arrays["latent"]
        width = latent.shape[1] * latent.itemsize
        start = <char*>address(latent)
        with nogil:
            for t in range(position):
                row = self.timeline.latent(self.mixer_index, t)
                memcpy(row, start + t * width, width)
                memset(row + width, 0, stride - width)


cdef void* address(array) except NULL:
    """Where an array's values are.  Not by .ctypes, which is code in Python: Ctrl-C could be raised in the midst of it."""
    return <void*><uintptr_t>array.__array_interface__["data"][0]


cdef int _copy(array, float* memory, bint out) except -1:
    """Between a contiguous float32 array and memory of the same size."""
    cdef int64_t n
    n = array.nbytes
    if out:
        memcpy(address(array), memory, n)
    else:
        memcpy(memory, address(array), n)
    return 0


cdef class Owner:
    """``with owner:`` admits one user at a time; a second one gets SessionBusyError instead of waiting.

    Compiled, so that between taking and giving back there is no bytecode in which Ctrl-C could be raised.
    """

    def __cinit__(self, str name):
        self.name = name
        self.busy = False

    def __enter__(self):
        if self.busy:
            raise SessionBusyError(
                f"{self.name} is in use by another call: give each thread a session of its own, or cancel() that call")
        self.busy = True
        return self

    def __exit__(self, *exc):
        self.busy = False

    def disown(self) -> None:
        """In the child of a fork: the thread that was inside does not exist here."""
        self.busy = False
