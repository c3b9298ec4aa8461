# SPDX-License-Identifier: MIT
"""NumPy arrays as the ops of cuda/ops.h take them, checked for type, shape and contiguity."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free

from k3session._core.c_ops cimport K3_BF16, K3_F32, K3_MXFP4, K3_NO_BAD_SUBLAYER, k3_segment

from k3session.errors import ConfigError


cdef class Matrix:
    """One weight matrix [out, in] where it lies: uint16 (BF16), float32, or uint8 (packed MXFP4) with its scales.

    The array may begin at any address, as a tensor in a file may.
    """

    def __cinit__(self, data not None, scale=None):
        wanted = "uint16[out, in], float32[out, in], or uint8[out, in / 2] with scales uint8[out, in / 32]"
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.dtype not in (np.uint16, np.float32, np.uint8):
            raise ConfigError(f"matrix: expected {wanted}; found {describe(data)}")
        if not data.flags.c_contiguous:
            raise ConfigError("matrix: expected a C-contiguous array; pass np.ascontiguousarray(...)")
        packed = data.dtype == np.uint8
        if packed != (scale is not None):
            raise ConfigError(f"matrix: expected {wanted}; found {describe(data)} with scales {describe(scale)}")
        if packed:
            groups = data.shape[1] // 16
            if data.shape[1] % 16:
                raise ConfigError(f"matrix: expected packed rows of whole groups of 16 bytes; found {describe(data)}")
            check_array("scale", scale, (data.shape[0], groups), np.uint8)
            self.m.scale = <const uint8_t*><uintptr_t>scale.__array_interface__["data"][0]
        self.m.dtype = K3_MXFP4 if packed else K3_BF16 if data.dtype == np.uint16 else K3_F32
        self.m.rows = data.shape[0]
        self.m.cols = data.shape[1] * 2 if packed else data.shape[1]
        self.m.pitch = data.shape[1] * data.itemsize
        self.m.data = <const void*><uintptr_t>data.__array_interface__["data"][0]
        self.data, self.scale = data, scale

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.m.rows, self.m.cols

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


cdef class Rows:
    """Rows laid out in segments, and the tables that the ops look them up in; alive for one call."""

    def __cinit__(self, int64_t rows, counts, positions=None):
        cdef int64_t i, row = 0
        self.counts = [rows] if counts is None else [int(c) for c in counts]
        starts = [0] * len(self.counts) if positions is None else [int(p) for p in positions]
        if min(self.counts, default=0) < 1 or sum(self.counts) != rows:
            raise ConfigError(f"counts: expected positive numbers that add up to {rows} rows; found {self.counts}")
        if len(starts) != len(self.counts) or min(starts) < 0:
            raise ConfigError(f"positions: expected {len(self.counts)} numbers of at least 0; found {starts}")
        n = len(self.counts)
        self.segments = <k3_segment*>calloc(n, sizeof(k3_segment))
        if self.segments == NULL:
            raise MemoryError("could not allocate the segments of a call")
        self.owner = np.repeat(np.arange(n, dtype=np.int32), self.counts)
        self.noted = np.full(n, K3_NO_BAD_SUBLAYER, np.int32)
        self.page_arrays, self.first_page = [], []
        for i in range(n):
            self.segments[i].row = row
            self.segments[i].rows = self.counts[i]
            self.segments[i].position = starts[i]
            self.segments[i].page_rows = 1
            row += self.segments[i].rows
        self.job.rows = rows
        self.job.n_segments = n
        self.job.segments = self.segments
        self.job.owner = <const int32_t*>address(self.owner)
        self.job.bad_sublayer = <int32_t*>address(self.noted)

    def __dealloc__(self):
        free(self.pages)
        free(self.segments)

    cdef int bind_pages(self, pages, int64_t layer, int64_t stride, bint written) except -1:
        """Takes each segment's list of pages, arrays [layers, page_rows, stride], float32 or BF16 as uint16."""
        cdef int64_t i, bound = 0
        if len(pages) != self.job.n_segments or not all(len(p) for p in pages):
            raise ConfigError(f"pages: expected a list of pages for each of {self.job.n_segments} segments")
        self.pages = <void**>calloc(sum(len(p) for p in pages), sizeof(void*))
        if self.pages == NULL:
            raise MemoryError("could not allocate the page tables of a call")
        for i in range(self.job.n_segments):
            first = pages[i][0]
            if not isinstance(first, np.ndarray) or first.ndim != 3 or first.dtype not in (np.float32, np.uint16):
                raise ConfigError(f"pages: expected float32 or uint16[layers, rows, {stride}]; found {describe(first)}")
            if not 0 <= layer < first.shape[0]:
                raise ConfigError(f"layer: expected 0 to {first.shape[0] - 1}; found {layer}")
            self.segments[i].page_rows = first.shape[1]
            self.segments[i].latent_dtype = K3_BF16 if first.dtype == np.uint16 else K3_F32
            self.segments[i].pages = self.pages + bound
            self.first_page.append(bound)
            end = self.segments[i].position + self.segments[i].rows
            if end > len(pages[i]) * first.shape[1]:
                raise ConfigError(f"pages: segment {i} needs room for {end} positions; found {len(pages[i]) * first.shape[1]}")
            for page in pages[i]:
                check_array("page", page, (first.shape[0], first.shape[1], stride), first.dtype)
                if written and not page.flags.writeable:
                    raise ConfigError("page: expected an array that can be written")
                self.pages[bound] = <void*><uintptr_t>page.ctypes.data
                self.page_arrays.append(page)
                bound += 1
        self.pages_written = written
        return 0

    def bad(self) -> list[int | None]:
        """The sub-layer noted for each segment, or None."""
        return [None if code == K3_NO_BAD_SUBLAYER else int(code) for code in self.noted]


def describe(array) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype}{list(array.shape)}" + ("" if array.flags.c_contiguous else ", not C-contiguous")
    return type(array).__name__


cdef int check_array(str name, array, tuple shape, dtype) except -1:
    """ConfigError unless the array has that shape and dtype, and lies in one aligned piece."""
    good = isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape
    if not good or not array.flags.c_contiguous or not array.flags.aligned:
        raise ConfigError(f"{name}: expected a C-contiguous {np.dtype(dtype)}{list(shape)}; found {describe(array)}")
    return 0


cdef void* address(array) except NULL:
    return <void*><uintptr_t>array.__array_interface__["data"][0]


cdef int expect(Matrix w, str name, tuple shape) except -1:
    if w.shape != shape:
        raise ConfigError(f"{name}: expected a matrix [out, in] of {list(shape)}; found {list(w.shape)}")
    return 0
