# SPDX-License-Identifier: MIT
"""The state of one session: what each layer carries from token to token, on the host or on a device.

KDA layers carry their convolution windows and the recurrent matrix, of fixed size, all in one block.  A pass reads the
block and writes another one, so a block can be shared by timelines without a copy.  MLA layers carry one latent row
per token, in pages: a page covers the same positions of all MLA layers, so a session has one page table, grows
without copying, and reserves its memory before a pass begins.  Pages are shared as well; of two timelines that share
a page the first one to go on writes behind the rows that are there, and the other one takes a copy.
"""

cimport cython

from functools import partial

import numpy as np

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from k3session._core.c_ops cimport K3_BF16, K3_F32, k3_segment
from k3session._core.memory cimport HOST, Memory
from k3session._core.weights cimport Weights

from k3session.errors import SessionBusyError, SnapshotMismatchError

cdef int64_t SLAB_BYTES = 8 << 20       # what one allocation of latent pages aims at, once a session is that long


cdef Block* new_block(Weights weights, Memory memory, bint zeroed=True) except NULL:
    """A block with one holder."""
    cdef int64_t n = weights.dims.n_kda
    cdef Block* block = <Block*>calloc(1, sizeof(Block))
    if block == NULL:
        raise MemoryError("could not allocate the table of recurrent states")
    block.holders = 1
    try:
        block.at.conv = <float*>memory.allocate(n * weights.dims.conv_stride * 4, zeroed)
        block.at.state = <float*>memory.allocate(n * weights.dims.state_stride * 4, zeroed)
    except BaseException:
        drop_block(block, memory)
        raise
    return block


cdef void drop_block(Block* block, Memory memory) noexcept:
    """One holder less; the last one frees it."""
    if block == NULL:
        return
    block.holders -= 1
    if block.holders == 0:
        memory.release(block.at.state)
        memory.release(block.at.conv)
        free(block)


@cython.no_gc_clear
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
    kda_memory, mla_memory : Memory, optional
        Where the layers' state lives: where their ops run.  The host's by default.
    """

    def __cinit__(self, Weights weights not None, bint bf16_latent=False, int64_t page_rows=64, Memory kda_memory=None,
                  Memory mla_memory=None, bint at_start=True):
        if page_rows < 1:
            raise ValueError(f"page_rows is {page_rows}; expected at least 1")
        self.weights = weights
        self.kda_memory = HOST if kda_memory is None else kda_memory
        self.mla_memory = HOST if mla_memory is None else mla_memory
        self.latent_dtype = K3_BF16 if bf16_latent else K3_F32
        self.page_rows = page_rows
        self.seen = <int64_t*>calloc(weights.dims.num_hidden_layers, sizeof(int64_t))
        if self.seen == NULL:
            raise MemoryError("could not allocate the positions of the layers")
        if at_start:  # else the caller gives it a state
            self.now = new_block(weights, self.kda_memory)

    def __dealloc__(self):
        self.let_go()
        free(self.pages)
        free(self.addresses)
        free(self.seen)

    cdef void let_go(self) noexcept:
        """Frees all that this timeline alone holds."""
        self.drop_pages(0)
        drop_block(self.now, self.kda_memory)
        self.now = NULL
        if self.table != NULL:
            self.mla_memory.release(self.table)
        self.table = NULL
        self.table_pages = self.table_room = 0

    @property
    def layers(self) -> list:
        """One K3CpuFallbackState per layer of the model that is here; made anew at each call: they refer back to this."""
        return [K3CpuFallbackState.__new__(K3CpuFallbackState, self, i)
                for i in range(self.weights.first, self.weights.end)]

    cdef int64_t row_bytes(self) noexcept nogil:
        return self.weights.dims.latent_stride * (2 if self.latent_dtype == K3_BF16 else 4)

    cdef int64_t block_bytes(self) noexcept nogil:
        d = &self.weights.dims
        return d.n_kda * 4 * d.kda_num_heads * d.kda_head_k * (3 * (d.conv_kernel - 1) + d.kda_head_v)

    cdef int64_t page_bytes(self) noexcept nogil:
        return self.weights.dims.n_mla * self.page_rows * self.row_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of state held now: conv windows, recurrent matrices and latent pages, what is shared included."""
        return self.block_bytes() + self.n_pages * self.page_bytes()

    # ------------------------------------------------------------------------------------------
    # pages
    # ------------------------------------------------------------------------------------------

    cdef int reserve(self, int64_t positions) except -1:
        """Makes room for that many positions, for this timeline alone to write; on failure nothing has changed."""
        cdef int64_t need = (positions + self.page_rows - 1) // self.page_rows - self.n_pages
        cdef int64_t i, page = self.page_bytes(), first = self.position // self.page_rows
        if page == 0:
            return 0
        if first < self.n_pages:
            self.own_page(first)
        if need > 0:
            # A quarter more than the session has, up to a slab's size: few allocations, little unused.
            self.add_pages(max(need, min(self.n_pages // 4, SLAB_BYTES // page)))
        for i in range(first, min(self.n_pages, (positions + self.page_rows - 1) // self.page_rows)):
            self.pages[i].filled = max(self.pages[i].filled, min(self.page_rows, positions - i * self.page_rows))
        if not self.mla_memory.mapped:
            self.upload_table()
        return 0

    cdef int own_page(self, int64_t number) except -1:
        """Copies a page that another timeline may go on in as well; rows behind `filled` are nobody's yet."""
        cdef Page* old = self.pages[number]
        cdef int64_t taken = max(0, self.position - number * self.page_rows)
        if old.holders == 1:
            old.filled = taken
            return 0
        if old.filled <= taken:
            return 0
        self.add_pages(1)
        try:
            # The rows that are taken and no others: the other timeline may be writing behind them.
            self.mla_memory.copy(self.addresses[self.n_pages - 1], old.data, taken * self.row_bytes(),
                                 self.page_rows * self.row_bytes(), self.weights.dims.n_mla)
        except BaseException:
            self.drop_pages(self.n_pages - 1)
            raise
        self.pages[number] = self.pages[self.n_pages - 1]
        self.addresses[number] = self.addresses[self.n_pages - 1]
        self.pages[number].filled = taken
        self.pages[self.n_pages - 1] = old
        self.drop_pages(self.n_pages - 1)
        self.table_pages = min(self.table_pages, number)
        return 0

    cdef int room_for_pages(self, int64_t count) except -1:
        cdef int64_t room
        cdef void* grown
        if count > self.page_room:
            room = max(2 * self.page_room, count)
            grown = realloc(self.pages, room * sizeof(void*))
            if grown == NULL:
                raise MemoryError("could not grow the page table of the latent cache")
            self.pages = <Page**>grown
            grown = realloc(self.addresses, room * sizeof(void*))
            if grown == NULL:
                raise MemoryError("could not grow the page table of the latent cache")
            self.addresses = <void**>grown
            self.page_room = room
        return 0

    cdef int add_pages(self, int64_t count, bint zeroed=True) except -1:
        """New pages at the end of the table, in one slab."""
        cdef int64_t i, page = self.page_bytes()
        cdef Slab* slab
        cdef Page** made = self.pages
        self.room_for_pages(self.n_pages + count)
        slab = <Slab*>calloc(1, sizeof(Slab))
        if slab == NULL:
            raise MemoryError("could not allocate a slab of the latent cache")
        try:
            slab.data = <char*>self.mla_memory.allocate(count * page, zeroed)
        except BaseException:
            free(slab)
            raise
        made = self.pages + self.n_pages
        for i in range(count):
            made[i] = <Page*>calloc(1, sizeof(Page))
            if made[i] == NULL:
                break
            made[i].holders = 1
            made[i].slab = slab
            made[i].data = slab.data + i * page
            self.addresses[self.n_pages + i] = made[i].data
        else:
            slab.pages = count
            self.n_pages += count
            return 0
        while i > 0:
            i -= 1
            free(made[i])
        self.mla_memory.release(slab.data)
        free(slab)
        raise MemoryError("could not allocate the pages of the latent cache")

    cdef void drop_pages(self, int64_t keep) noexcept:
        """Lets go of all pages from number ``keep`` on."""
        cdef Page* page
        while self.n_pages > keep:
            self.n_pages -= 1
            page = self.pages[self.n_pages]
            page.holders -= 1
            if page.holders == 0:
                page.slab.pages -= 1
                if page.slab.pages == 0:
                    self.mla_memory.release(page.slab.data)
                    free(page.slab)
                free(page)
        self.table_pages = min(self.table_pages, keep)

    cdef int upload_table(self) except -1:
        """Brings the device's page table up to date: only when the session has grown or a page was exchanged."""
        cdef int64_t room
        cdef void* grown
        if self.n_pages > self.table_room:
            room = max(64, 2 * self.table_room, self.n_pages)
            grown = self.mla_memory.allocate(room * sizeof(void*))
            if self.table != NULL:
                self.mla_memory.release(self.table)
            self.table = grown
            self.table_room = room
            self.table_pages = 0
        if self.table_pages < self.n_pages:
            self.mla_memory.write(<void**>self.table + self.table_pages, self.addresses + self.table_pages,
                                  (self.n_pages - self.table_pages) * sizeof(void*))
            self.table_pages = self.n_pages
        return 0

    cdef int read_rows(self, int64_t mla_index, char* host, int64_t positions, int64_t width) except -1:
        """The first ``width`` bytes of each latent row of a layer, one after the other."""
        cdef int64_t stride = self.row_bytes(), t, i, n
        cdef char* page
        cdef char* staged = NULL
        try:
            if not self.mla_memory.mapped:
                staged = <char*>malloc(self.page_rows * stride)
                if staged == NULL:
                    raise MemoryError("could not allocate a page of the latent cache on the host")
            for t in range(0, positions, self.page_rows):
                n = min(self.page_rows, positions - t)
                page = self.pages[t // self.page_rows].data + mla_index * self.page_rows * stride
                if staged != NULL:
                    self.mla_memory.read(staged, page, n * stride)
                    page = staged
                if width == stride:
                    memcpy(host + t * width, page, n * width)
                    continue
                for i in range(n):
                    memcpy(host + (t + i) * width, page + i * stride, width)
        finally:
            free(staged)
        return 0

    cdef int write_rows(self, int64_t mla_index, const char* host, int64_t positions, int64_t width) except -1:
        """The other way; the rest of each row becomes zero."""
        cdef int64_t stride = self.row_bytes(), t, i, n
        cdef char* page
        cdef char* row
        cdef char* staged = NULL
        try:
            if not self.mla_memory.mapped:
                staged = <char*>malloc(self.page_rows * stride)
                if staged == NULL:
                    raise MemoryError("could not allocate a page of the latent cache on the host")
            for t in range(0, positions, self.page_rows):
                n = min(self.page_rows, positions - t)
                page = self.pages[t // self.page_rows].data + mla_index * self.page_rows * stride
                if width == stride:
                    self.mla_memory.write(page, host + t * width, n * width)
                    continue
                for i in range(n):
                    row = (page if staged == NULL else staged) + i * stride
                    memcpy(row, host + (t + i) * width, width)
                    memset(row + width, 0, stride - width)
                if staged != NULL:
                    self.mla_memory.write(page, staged, n * stride)
        finally:
            free(staged)
        return 0

    # ------------------------------------------------------------------------------------------
    # passes
    # ------------------------------------------------------------------------------------------

    cdef int check(self, int64_t position) noexcept nogil:
        """The first layer that has not taken in exactly ``position`` tokens, or -1."""
        cdef int64_t i
        for i in range(self.weights.dims.num_hidden_layers):
            if self.seen[i] != position:
                return <int>i
        return -1

    cdef void lay_out(self, k3_segment* segment) noexcept:
        """What ops need to know of this timeline; the pages must have been reserved."""
        segment.position = self.position
        segment.now = self.now.at
        segment.pages = self.addresses if self.mla_memory.mapped else <void**>self.table
        segment.page_rows = self.page_rows
        segment.latent_dtype = self.latent_dtype

    cdef Block* commit(self, Block* next, int64_t rows) noexcept:
        """Takes over what a pass has written: all layers together.

        Returns the old block for the next pass to write to, or NULL where another timeline still needs it.
        """
        cdef Block* old = self.now
        cdef int64_t i
        self.now = next
        for i in range(self.weights.dims.num_hidden_layers):
            self.seen[i] += rows
        self.position += rows
        if old.holders == 1:
            return old
        old.holders -= 1
        return NULL

    # ------------------------------------------------------------------------------------------
    # sharing, and exchange with the outside
    # ------------------------------------------------------------------------------------------

    cdef Timeline empty(self):
        """Another timeline of this one's kind, which is to be given a state."""
        return Timeline.__new__(Timeline, self.weights, self.latent_dtype == K3_BF16, self.page_rows, self.kda_memory,
                                self.mla_memory, False)

    cdef void stand_at(self, int64_t position) noexcept:
        """All layers have taken in that many tokens, whose latent rows are in the pages."""
        cdef int64_t i
        self.position = position
        for i in range(self.weights.dims.num_hidden_layers):
            self.seen[i] = position
        for i in range(self.n_pages):
            self.pages[i].filled = max(0, min(self.page_rows, position - i * self.page_rows))

    def share(self) -> Timeline:
        """Another timeline that stands at the same point; nothing is copied until one of the two goes on."""
        cdef Timeline other = self.empty()
        other.become(self)
        return other

    def become(self, Timeline other not None) -> None:
        """Stands where ``other`` stands, sharing its state; nothing changes where that fails."""
        cdef int64_t i, pages = (other.position + self.page_rows - 1) // self.page_rows
        if other is self:
            return
        if (other.weights is not self.weights or other.page_rows != self.page_rows
                or other.latent_dtype != self.latent_dtype or other.kda_memory is not self.kda_memory
                or other.mla_memory is not self.mla_memory):
            raise ValueError("only timelines of one model, with pages of one kind, can share state")
        pages = min(pages, other.n_pages)
        self.room_for_pages(pages)
        for i in range(pages):
            other.pages[i].holders += 1
        other.now.holders += 1
        self.drop_pages(0)
        drop_block(self.now, self.kda_memory)
        self.now = other.now
        for i in range(pages):
            self.pages[i] = other.pages[i]
            self.addresses[i] = other.addresses[i]
        self.n_pages = pages
        self.position = other.position
        for i in range(self.weights.dims.num_hidden_layers):
            self.seen[i] = other.seen[i]

    def becoming(self, Timeline other not None):
        """`become` as a call still to be made; where state is elsewhere, all of it that takes time has then been done."""
        return partial(self.become, other)

    def replacing(self, int64_t position, list arrays):
        """`replace` as a call still to be made."""
        return partial(self.replace, position, arrays)

    def earlier(self, int64_t position, list arrays not None) -> Timeline:
        """Another timeline, at an earlier position of this one: it shares the latent rows up to there.

        ``arrays`` has the recurrent state at that position as `K3CpuFallbackState.export` gives it, and nothing for
        layers that have latent rows.
        """
        cdef int64_t i, pages = (position + self.page_rows - 1) // self.page_rows
        cdef K3CpuFallbackState layer
        cdef Timeline other = self.empty()
        if not 0 <= position <= self.position:
            raise ValueError(f"position is {position}; expected one from 0 to {self.position}")
        other.now = new_block(self.weights, self.kda_memory, False)
        for layer, given in zip(other.layers, arrays, strict=True):
            a = {name: np.ascontiguousarray(array) for name, array in given.items()}
            if layer.is_kda:
                layer.verify(position, a)
            elif a:
                raise SnapshotMismatchError(f"layer {layer.layer}: expected no arrays, found {sorted(a)}", {})
            layer.load(position, a)
        pages = min(pages, self.n_pages)
        other.room_for_pages(pages)
        for i in range(pages):
            self.pages[i].holders += 1
            other.pages[i] = self.pages[i]
            other.addresses[i] = self.addresses[i]
        other.n_pages = pages
        other.position = position
        for i in range(self.weights.dims.num_hidden_layers):
            other.seen[i] = position
        return other

    @property
    def own_bytes(self) -> int:
        """Bytes of state that no other timeline shares."""
        return own_bytes_of([self])

    cdef Timeline room(self, int64_t position, bint over):
        """A timeline with memory for that many tokens, nothing of it written; with ``over`` what this one alone holds.

        Not where any of it is a device's, to which a copy can fail: what lies there is left as it is.
        """
        cdef int64_t i, pages = 0
        cdef Timeline made = self.empty()
        over = over and self.kda_memory.mapped and self.mla_memory.mapped
        if self.page_bytes() > 0:
            pages = (position + self.page_rows - 1) // self.page_rows
        made.room_for_pages(pages)
        if over and self.now.holders == 1:
            made.now = self.now
            made.now.holders += 1
        else:
            made.now = new_block(self.weights, self.kda_memory, False)
        if over:
            for i in range(self.n_pages):
                if made.n_pages < pages and self.pages[i].holders == 1:
                    self.pages[i].holders += 1
                    made.pages[made.n_pages] = self.pages[i]
                    made.addresses[made.n_pages] = self.addresses[i]
                    made.n_pages += 1
        if made.n_pages < pages:
            made.add_pages(pages - made.n_pages, not self.fills)  # where rows have gaps, these are zero
        return made

    def replace(self, int64_t position, list arrays) -> None:
        """Sets all layers at once, from arrays as `K3CpuFallbackState.export` gives them, already checked.

        Memory that this timeline alone holds is written over, the rest is fresh.  All that can fail is done before:
        nothing has changed where it does.
        """
        cdef Timeline made
        cdef K3CpuFallbackState layer
        cdef list writes = []
        cdef tuple write
        given = [{name: np.ascontiguousarray(a) for name, a in some.items()} for some in arrays]
        for layer, a in zip(self.layers, given, strict=True):
            layer.verify(position, a)
        made = self.room(position, True)
        for layer, a in zip(made.layers, given, strict=True):
            for name, array in a.items():
                writes.append((layer, name, <uintptr_t>address(array), array.nbytes))
        self.room_for_pages(made.n_pages)
        # From here on host memory is only copied.
        for write in writes:
            layer = write[0]
            layer.put(<str>write[1], position, <char*><uintptr_t>write[2], write[3])
        made.stand_at(position)
        self.become(made)

    @property
    def fills(self) -> bool:
        """Whether `filled` can be called: the state is in the host's memory, its latent rows without gaps."""
        d = &self.weights.dims
        return (self.kda_memory.mapped and self.mla_memory.mapped
                and (d.n_mla == 0 or d.latent_stride == d.kv_lora_rank + d.qk_rope_head_dim))

    def filled(self, int64_t position, fill) -> Timeline:
        """A timeline of this one's kind at a position, in fresh memory that ``fill`` writes.

        It is called with a list of (layer, name, pieces): buffers which, one after the other, are the bytes of that
        array.
        """
        cdef Timeline made
        cdef K3CpuFallbackState layer
        if not self.fills:
            raise ValueError("state that is elsewhere, or has gaps, is not written in place")
        made = self.room(position, False)
        fill([(layer.layer, name, layer.pieces(name, position)) for layer in made.layers
              for name in layer.shapes(position)])
        made.stand_at(position)
        return made


def own_bytes_of(list timelines not None) -> int:
    """Bytes of state that no timeline but these holds, each counted once."""
    cdef Timeline t
    cdef int64_t i, total = 0
    cdef list several = list({id(t): t for t in timelines}.values())
    for t in several:
        t.now.counted += 1
        for i in range(t.n_pages):
            t.pages[i].counted += 1
    for t in several:
        if t.now.counted == t.now.holders:
            total += t.block_bytes()
        t.now.counted = 0
        for i in range(t.n_pages):
            if t.pages[i].counted == t.pages[i].holders:
                total += t.page_bytes()
            t.pages[i].counted = 0
    return total


cdef class K3CpuFallbackState:
    """The mixer state of one layer of one session, wherever it lives, as the host sees it.

    A KDA layer has ``conv`` float32[3, K - 1, C], the raw projections of the last K - 1 tokens for q, k and v, oldest
    first, and ``state`` float32[H, D, D] as [head, key, value].  An MLA layer has ``latent`` [position, kv_lora +
    rope], float32 or uint16 holding BF16.  Arrays are copied out of and into the layer's own memory, a device's where
    the layer runs there, and are the same whatever that memory is.
    """

    def __cinit__(self, Timeline timeline not None, int layer):
        self.timeline = timeline
        self.layer = layer
        self.is_kda = timeline.weights.tables.layers[layer].is_kda
        self.mixer_index = timeline.weights.tables.layers[layer].mixer_index

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

    cdef float* recurrent(self, str name) noexcept:
        """Where the conv windows or the recurrent matrix of this layer lie."""
        d = &self.timeline.weights.dims
        if name == "conv":
            return self.timeline.now.at.conv + self.mixer_index * d.conv_stride
        return self.timeline.now.at.state + self.mixer_index * d.state_stride

    def array(self, str name):
        """One of this layer's arrays, "conv", "state" or "latent", copied out in the canonical layout."""
        cdef int64_t position = self.timeline.position
        shape, dtype = self.shapes(position)[name]
        out = np.empty(shape, dtype)
        if name == "latent":
            self.timeline.read_rows(self.mixer_index, <char*>address(out), position, out.shape[1] * out.itemsize)
        else:
            self.timeline.kda_memory.read(address(out), self.recurrent(name), out.nbytes)
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
        for name, array in arrays.items():
            self.put(name, position, <char*>address(array), array.nbytes)

    cdef int put(self, str name, int64_t position, const char* host, int64_t nbytes) except -1:
        """Copies the bytes of one array into place."""
        if name != "latent":
            self.timeline.kda_memory.write(self.recurrent(name), host, nbytes)
        elif position > 0:
            self.timeline.write_rows(self.mixer_index, host, position, nbytes // position)
        return 0

    cdef list pieces(self, str name, int64_t position):
        """Buffers in this layer's memory, which one after the other are an array."""
        cdef Timeline t = self.timeline
        cdef int64_t i, stride = t.row_bytes()
        shape, dtype = self.shapes(position)[name]
        if name != "latent":
            return [Window.__new__(Window, self, <uintptr_t>self.recurrent(name), int(np.prod(shape)) * dtype.itemsize)]
        return [Window.__new__(Window, self,
                               <uintptr_t>(t.pages[i].data + self.mixer_index * t.page_rows * stride),
                               min(t.page_rows, position - i * t.page_rows) * stride) for i in range(t.n_pages)]


cdef class Window:
    """Bytes of a layer's state, as a buffer that keeps its timeline."""

    def __cinit__(self, K3CpuFallbackState layer not None, uintptr_t start, Py_ssize_t nbytes):
        self.layer = layer
        self.start = <char*>start
        self.nbytes = nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.start, self.nbytes, 0, flags)

    def __releasebuffer__(self, Py_buffer* view):
        pass


cdef void* address(array) except NULL:
    """Where an array's values are.  Not by .ctypes, which is code in Python: Ctrl-C could be raised in the midst of it."""
    return <void*><uintptr_t>array.__array_interface__["data"][0]


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
