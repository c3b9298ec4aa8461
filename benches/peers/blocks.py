# SPDX-License-Identifier: MIT
"""Weights in GGML's blocks: MXFP4 with its order of nibbles, and Q8_0."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: The 16 values of an MXFP4 element, by code.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_E2M1, -_E2M1])


def widened(array: Array) -> Array:
    """BF16 bits or float32 as float32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, np.float32)


def q8_0(values: Array) -> Array:
    """Blocks of 32 values as a float16 scale and 32 signed bytes: the nearest ones."""
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    out = np.empty((blocks.shape[0], 34), np.uint8)
    out[:, :2] = scale.astype(np.float16).view(np.uint8)
    out[:, 2:] = np.rint(blocks * inverse).astype(np.int8).view(np.uint8)
    return out.reshape(*values.shape[:-1], -1)


def mxfp4_blocks(packed: Array, scale: Array) -> Array:
    """The checkpoint's nibbles (columns 2j and 2j + 1 in a byte) in GGML's blocks (columns j and j + 16)."""
    rows, groups = scale.shape
    pairs = packed.reshape(rows, groups, 16)
    codes = np.empty((rows, groups, 32), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = pairs & 15, pairs >> 4
    out = np.empty((rows, groups, 17), np.uint8)
    out[..., 0] = scale
    out[..., 1:] = codes[..., :16] | codes[..., 16:] << 4
    return out.reshape(rows, -1)


def mxfp4_values(packed: Array, scale: Array) -> Array:
    """The same as float32."""
    rows, groups = scale.shape
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, groups, 32)
    return (_VALUES[codes] * np.exp2(scale.astype(np.float32) - 127)[..., None]).reshape(rows, -1)
