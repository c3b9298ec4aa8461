# SPDX-License-Identifier: MIT
"""The number formats of a K3 checkpoint, decoded exactly.

BF16 is carried as ``uint16``; MXFP4 as two ``uint8`` arrays, packed elements and block scales.
Every value of these formats is a float64 without rounding.  The kernels have their own decoders;
these are for the reference, for tools and for tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3session.errors import CheckpointError

__all__ = [
    "E2M1",
    "MXFP4_GROUP",
    "bf16_to_f32",
    "bf16_to_f64",
    "e8m0_to_f64",
    "f32_to_bf16",
    "mxfp4_to_f64",
    "to_f64",
]

MXFP4_GROUP = 32
"""Input columns that share one scale."""

E2M1: NDArray[np.float64] = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
"""The 16 values of a 4-bit element: bit 8 is the sign, the other three index the magnitude."""


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen BF16: its 16 bits are the upper half of a float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_to_f64(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Widen BF16 to float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one, and that is no news
        return bf16_to_f32(bits).astype(np.float64)


def f32_to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to BF16, to nearest and ties to even; a NaN stays a NaN.

    Wider input is rounded to float32 first.
    """
    exact = np.ascontiguousarray(values, np.float32)
    bits = exact.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    # Rounding could carry the payload of a NaN into an infinity or past the sign: set its quiet bit instead.
    quiet = (bits >> np.uint64(16)) | np.uint64(0x40)
    return np.where(np.isnan(exact), quiet, rounded).astype(np.uint16)


def e8m0_to_f64(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Block scales: 2^(code - 127).  Code 0 is 2^-127, not zero; code 255 is NaN."""
    codes = np.asarray(codes, np.uint8)
    scales: NDArray[np.float64] = np.ldexp(1.0, codes.astype(np.int32) - 127)
    return np.where(codes == 255, np.nan, scales)


def mxfp4_to_f64(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Decode an MXFP4 matrix.

    Parameters
    ----------
    packed
        uint8[rows, columns / 2]; the low nibble of byte j is column 2j, the high nibble column 2j + 1.
    scale
        uint8[rows, columns / 32]; E8M0, scale g applies to columns 32g .. 32g + 31.

    Returns
    -------
    float64[rows, columns], exact.
    """
    rows, half = packed.shape
    columns = 2 * half
    if scale.shape != (rows, columns // MXFP4_GROUP) or columns % MXFP4_GROUP:
        raise CheckpointError(
            f"MXFP4 elements of shape {list(packed.shape)} need scales of shape "
            f"[{rows}, {half}/16] with the columns a multiple of {MXFP4_GROUP}, found {list(scale.shape)}"
        )
    elements = np.empty((rows, columns), np.float64)
    elements[:, 0::2] = E2M1[packed & 0x0F]
    elements[:, 1::2] = E2M1[packed >> 4]
    return elements * np.repeat(e8m0_to_f64(scale), MXFP4_GROUP, axis=1)


def to_f64(array: NDArray[Any]) -> NDArray[np.float64]:
    """Widen an array as a :class:`~k3session.checkpoint.Checkpoint` gives it: uint16 is BF16."""
    return bf16_to_f64(array) if array.dtype == np.uint16 else array.astype(np.float64)
