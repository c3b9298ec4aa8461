# SPDX-License-Identifier: MIT
"""Work of a device in order: streams, events, graphs, and uploads through pinned memory."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from k3session._core.c_driver cimport (
    CUDA_ERROR_NOT_READY, cuEventCreate, cuEventDestroy, cuEventRecord, cuEventSynchronize, cuGraphDestroy,
    cuGraphExecDestroy, cuGraphInstantiate, cuGraphLaunch, cuGraphUpload, cuMemcpyDtoDAsync, cuMemcpyDtoHAsync,
    cuMemcpyHtoDAsync, cuMemsetD8Async, cuStreamBeginCapture, cuStreamCreate, cuStreamDestroy, cuStreamEndCapture,
    cuStreamGetCtx, cuStreamQuery, cuStreamSynchronize, cuStreamWaitEvent, k3_call, k3_gpu, k3_launch, k3_release, k3_use,
)
from k3session._core.driver cimport check, driver_table, enter, leave
from k3session._core.gpu cimport Device, PinnedBuffer, Resource

from k3session._core.gpu import KERNELS
from k3session.errors import DeviceError

cdef enum:
    NON_BLOCKING = 1                    # a stream that does not wait for the legacy stream
    DISABLE_TIMING = 2                  # an event
    CAPTURE_THREAD_LOCAL = 1
    STAGING = 32 << 20                  # bytes of a buffer of an upload

k3_use(driver_table())


cdef k3_gpu* both(Resource a, Resource b) noexcept nogil:
    """The device of two objects; NULL, which no call accepts, where one is closed or they are of two devices."""
    return a.gpu if a.gpu == b.gpu else NULL


@cython.no_gc
cdef class Event(Resource):
    """A moment in a stream."""

    def __cinit__(self, Device device not None):
        self.attach(device)
        check(self.gpu, k3_call(self.gpu, cuEventCreate, &self.handle, <unsigned int>DISABLE_TIMING), "cuEventCreate")

    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil:
        return k3_release(gpu, cuEventDestroy, handle)

    cdef int mark(self, Stream stream) except -1 nogil:
        return check(self.gpu, k3_call(both(self, stream), cuEventRecord, self.handle, stream.handle), "cuEventRecord")

    cdef int wait(self) except -1 nogil:
        return check(self.gpu, k3_call(self.gpu, cuEventSynchronize, self.handle), "cuEventSynchronize")

    def record(self, Stream stream not None) -> None:
        """The moment when the stream has done what it was asked for up to now."""
        self.mark(stream)

    def synchronize(self) -> None:
        with nogil:
            self.wait()


@cython.no_gc
cdef class Stream(Resource):
    """Work in order: of its own, or in a stream of another library, which goes on to belong to that.

    Parameters
    ----------
    device : Device
    foreign : object
        None for a new stream; else the handle as an integer, or an object with ``__cuda_stream__``.
    """

    def __cinit__(self, Device device not None, foreign=None):
        cdef void* context = NULL
        cdef void* handle
        self.attach(device)
        if foreign is None:
            check(self.gpu, k3_call(self.gpu, cuStreamCreate, &self.handle, <unsigned int>NON_BLOCKING), "cuStreamCreate")
            self.owned = True
            return
        if hasattr(foreign, "__cuda_stream__"):
            foreign = foreign.__cuda_stream__()[1]
        handle = <void*><uintptr_t>int(foreign)
        check(self.gpu, k3_call(self.gpu, cuStreamGetCtx, handle, &context), "cuStreamGetCtx")
        if context != self.gpu.context:
            raise DeviceError(f"the stream {foreign:#x} is not of GPU {self.context.number}'s primary context; make it with that "
                              "device current, and without a context of its own")
        self.handle = handle

    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil:
        self._end_capture(gpu, handle)
        return k3_release(gpu, cuStreamDestroy, handle) if self.owned else 0

    cdef void _end_capture(self, k3_gpu* gpu, void* handle) noexcept nogil:
        cdef void* graph = NULL
        if self.capturing:
            self.capturing = False
            k3_release(gpu, cuStreamEndCapture, handle, &graph)
            if graph != NULL:
                k3_release(gpu, cuGraphDestroy, graph)

    cdef int wait(self) except -1 nogil:
        return check(self.gpu, k3_call(self.gpu, cuStreamSynchronize, self.handle), "cuStreamSynchronize")

    cdef int after(self, Event event) except -1 nogil:
        """What comes later in this stream waits for the event."""
        cdef int status = k3_call(both(self, event), cuStreamWaitEvent, self.handle, event.handle, <unsigned int>0)
        return check(self.gpu, status, "cuStreamWaitEvent")

    cdef int to_device(self, uint64_t to, const void* host, size_t nbytes) except -1 nogil:
        if nbytes == 0:
            return 0
        return check(self.gpu, k3_call(self.gpu, cuMemcpyHtoDAsync, to, host, nbytes, self.handle), "a copy to the device")

    cdef int to_host(self, void* host, uint64_t address, size_t nbytes) except -1 nogil:
        if nbytes == 0:
            return 0
        return check(self.gpu, k3_call(self.gpu, cuMemcpyDtoHAsync, host, address, nbytes, self.handle), "a copy to the host")

    cdef int within(self, uint64_t to, uint64_t address, size_t nbytes) except -1 nogil:
        if nbytes == 0:
            return 0
        return check(self.gpu, k3_call(self.gpu, cuMemcpyDtoDAsync, to, address, nbytes, self.handle), "a copy within the device")

    cdef int set_bytes(self, uint64_t to, unsigned char value, size_t nbytes) except -1 nogil:
        if nbytes == 0:
            return 0
        return check(self.gpu, k3_call(self.gpu, cuMemsetD8Async, to, value, nbytes, self.handle), "cuMemsetD8Async")

    cdef int begin(self) except -1 nogil:
        """From here to end(), work is recorded and not done.  Calls of other threads are free."""
        check(self.gpu, k3_call(self.gpu, cuStreamBeginCapture, self.handle, <int>CAPTURE_THREAD_LOCAL), "cuStreamBeginCapture")
        self.capturing = True
        return 0

    cdef Graph end(self):
        """What was recorded, ready to be replayed."""
        cdef Graph recorded = Graph.__new__(Graph)
        cdef void* graph = NULL
        cdef k3_gpu* gpu = self.gpu
        cdef int status
        cdef const char* what = "cuStreamEndCapture"
        with nogil:
            status = k3_call(gpu, cuStreamEndCapture, self.handle, &graph)
            self.capturing = False
            if status == 0:
                what = "cuGraphInstantiate"
                status = k3_call(gpu, cuGraphInstantiate, &recorded.handle, graph, <unsigned long long>0)
            if graph != NULL:
                k3_release(gpu, cuGraphDestroy, graph)
        recorded.context = self.context
        recorded.gpu = gpu
        check(gpu, status, what)
        # Now, so that the first replay is as fast as the others.
        check(gpu, k3_call(gpu, cuGraphUpload, recorded.handle, self.handle), "cuGraphUpload")
        return recorded

    cdef void abandon(self) noexcept nogil:
        """Ends a recording that failed; harmless where there is none."""
        if self.gpu != NULL:
            self._end_capture(self.gpu, self.handle)

    @property
    def is_capturing(self) -> bool:
        return self.capturing

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is done."""
        cdef int status
        with nogil:
            status = k3_call(self.gpu, cuStreamQuery, self.handle)
        if status != CUDA_ERROR_NOT_READY:
            check(self.gpu, status, "cuStreamQuery")
        return status == 0

    def __cuda_stream__(self) -> tuple:
        """For other libraries: the version of this protocol, and the handle."""
        return 0, <uintptr_t>self.handle

    def synchronize(self) -> None:
        with nogil:
            self.wait()

    def write(self, uint64_t to, data) -> None:
        """Copies an array to the device; returns when it may change."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                self.to_device(to, view.buf, view.len)
                self.wait()
        finally:
            PyBuffer_Release(&view)

    def read(self, uint64_t address, out) -> None:
        """Copies from the device into an array, and waits for it."""
        cdef Py_buffer view
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        try:
            with nogil:
                self.to_host(view.buf, address, view.len)
                self.wait()
        finally:
            PyBuffer_Release(&view)

    def copy(self, uint64_t to, uint64_t address, size_t nbytes) -> None:
        with nogil:
            self.within(to, address, nbytes)

    def fill(self, uint64_t to, unsigned char value, size_t nbytes) -> None:
        with nogil:
            self.set_bytes(to, value, nbytes)

    def launch(self, str kernel, grid, int threads, *args, size_t shared=0) -> None:
        """Launches a kernel by its name, with NumPy scalars of its parameters' types; for tests."""
        cdef void* pointers[64]
        cdef void* before
        cdef unsigned int x, y, z
        cdef int number = KERNELS.index(kernel), status, i
        x, y, z = grid
        values = [a.tobytes() for a in args]
        if len(values) > 64:
            raise ValueError(f"{len(values)} arguments; expected at most 64")
        for i, value in enumerate(values):
            pointers[i] = PyBytes_AS_STRING(value)
        with nogil:
            enter(self.gpu, &before)
            status = k3_launch(self.gpu, self.handle, number, x, y, z, threads, shared, pointers)
            leave(self.gpu, before)
        check(self.gpu, status, "a launch")

    def wait_for(self, Event event not None) -> None:
        """What comes later in this stream waits for the event."""
        self.after(event)

    def begin_capture(self) -> None:
        with nogil:
            self.begin()

    def end_capture(self) -> Graph:
        return self.end()

    def abandon_capture(self) -> None:
        self.abandon()


@cython.no_gc
cdef class Graph(Resource):
    """Recorded work; made by Stream.end_capture."""

    cdef int release(self, k3_gpu* gpu, void* handle) noexcept nogil:
        return k3_release(gpu, cuGraphExecDestroy, handle)

    cdef int replay(self, Stream stream) except -1 nogil:
        return check(self.gpu, k3_call(both(self, stream), cuGraphLaunch, self.handle, stream.handle), "cuGraphLaunch")

    def launch(self, Stream stream not None) -> None:
        with nogil:
            self.replay(stream)


cdef void pack(char* to, const char* rows, size_t row_bytes, size_t pitch, size_t at, size_t n) noexcept nogil:
    """n bytes, from byte `at` on, of the rows as the device has them: each followed by zeros up to the pitch."""
    cdef size_t column, part
    while n > 0:
        column = at % pitch
        if column < row_bytes:
            part = min(n, row_bytes - column)
            memcpy(to, rows + at // pitch * row_bytes + column, part)
        else:
            part = min(n, pitch - column)
            memset(to, 0, part)
        to += part
        at += part
        n -= part


cdef class _Staging:
    """Two pinned buffers: one is filled while what is in the other is copied to the device."""
    cdef Stream stream
    cdef PinnedBuffer filling, other
    cdef Event filling_free, other_free     # behind the copies out of each
    cdef size_t room, used

    def __cinit__(self, Device device, Stream stream, size_t room):
        self.stream = stream
        self.room = room
        self.filling = PinnedBuffer.__new__(PinnedBuffer, device, room)
        self.other = PinnedBuffer.__new__(PinnedBuffer, device, room)
        self.filling_free = Event.__new__(Event, device)
        self.other_free = Event.__new__(Event, device)

    cdef size_t put(self, const char* rows, size_t row_bytes, size_t pitch, size_t at, size_t end, uint64_t to) except 0:
        """Copies as much of bytes `at` to `end` of a matrix as the buffer has room for; returns how much that is."""
        cdef Stream stream = self.stream
        cdef Event free
        cdef char* buffer
        cdef size_t n
        if self.used == self.room:
            self.filling_free.mark(stream)
            self.filling, self.other = self.other, self.filling
            self.filling_free, self.other_free = self.other_free, self.filling_free
            free = self.filling_free
            with nogil:
                free.wait()
            self.used = 0
        buffer = <char*>self.filling.handle + self.used
        n = min(end - at, self.room - self.used)
        with nogil:
            pack(buffer, rows, row_bytes, pitch, at, n)
            stream.to_device(to + at, buffer, n)
        self.used = min(self.room, (self.used + n + 63) // 64 * 64)
        return n

    cdef int finish(self) noexcept:
        """Waits, whatever has happened, since the device may still read the buffers."""
        cdef Stream stream = self.stream
        cdef int status
        with nogil:
            status = k3_call(stream.gpu, cuStreamSynchronize, stream.handle)
        self.filling.drop()
        self.other.drop()
        return status


def upload(Device device not None, Stream stream not None, list jobs not None, progress=None) -> None:
    """Copies matrices to the device, in pieces, through pinned memory.

    Parameters
    ----------
    device : Device
    stream : Stream
        Of that device; has done all of it at the end.
    jobs : list
        (host address, rows, bytes of a row, device address, pitch): a row on the device is the row on the host, followed by
        zeros up to the pitch.
    progress : callable
        Called as progress("upload", bytes done, bytes in all).
    """
    cdef uintptr_t host, to
    cdef size_t rows, row_bytes, pitch, at, n, done = 0, total = 0
    cdef _Staging staging
    for _, rows, row_bytes, _, pitch in jobs:
        if pitch < row_bytes:
            raise ValueError(f"the pitch is {pitch} bytes; expected at least {row_bytes}, a row")
        total += rows * pitch
    if total == 0:
        return
    staging = _Staging.__new__(_Staging, device, stream, min(total, <size_t>STAGING))
    try:
        for host, rows, row_bytes, to, pitch in jobs:
            at = 0
            while at < rows * pitch:
                n = staging.put(<const char*>host, row_bytes, pitch, at, rows * pitch, to)
                at += n
                done += n
                PyErr_CheckSignals()
                if progress is not None and done < total:
                    progress("upload", done, total)
    finally:
        status = staging.finish()
    check(stream.gpu, status, "an upload")
    if progress is not None:
        progress("upload", total, total)
