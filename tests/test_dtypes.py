# SPDX-License-Identifier: MIT
"""BF16 and MXFP4 are decoded exactly."""

from __future__ import annotations

import numpy as np
import pytest

from k3session.dtypes import (
    E2M1,
    bf16_to_f32,
    bf16_to_f64,
    e8m0_to_f64,
    f32_to_bf16,
    mxfp4_to_f64,
    to_f64,
)
from k3session.errors import CheckpointError

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)


def test_every_bf16_value_survives() -> None:
    wide = bf16_to_f32(EVERY_BF16)
    number = ~np.isnan(wide)
    assert np.array_equal(f32_to_bf16(wide)[number], EVERY_BF16[number])
    assert np.isnan(bf16_to_f32(f32_to_bf16(wide[~number]))).all()
    assert np.array_equal(bf16_to_f64(EVERY_BF16)[number], wide[number].astype(np.float64))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # a tie, down to even
        (1 + 3 * 2**-8, 1 + 2**-6),  # a tie, up to even
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-(1 + 2**-8 + 2**-20), -(1 + 2**-7)),
        (3.4e38, np.inf),
        (2.0**-133, 2.0**-133),  # the smallest subnormal
        (2.0**-134, 0.0),
        (-0.0, -0.0),
    ],
)
def test_rounding_to_bf16(value: float, expected: float) -> None:
    found = bf16_to_f64(f32_to_bf16(np.array([value])))[0]
    assert found == expected
    assert np.signbit(found) == np.signbit(expected)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_a_nan_stays_one_of_the_same_sign(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    found = f32_to_bf16(value)
    assert np.isnan(bf16_to_f32(found)).all()
    assert found[0] >> 15 == bits >> 31


def test_scales() -> None:
    codes = np.arange(256, dtype=np.uint8)
    scales = e8m0_to_f64(codes)
    assert [scales[0], scales[1], scales[127], scales[254]] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(scales[255])
    assert np.array_equal(scales[1:255], 2 * scales[:254])


def test_elements() -> None:
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert np.array_equal(E2M1, magnitudes + [-m for m in magnitudes])
    assert np.signbit(E2M1[8])


def test_low_nibble_is_the_even_column_and_a_scale_covers_32() -> None:
    packed = np.zeros((2, 32), np.uint8)
    packed[1, 0] = 0x21  # columns 0 and 1: 0.5 and 1
    packed[1, 15] = 0xF0  # column 31: -6
    packed[1, 16] = 0x07  # column 32: 6
    scale = np.array([[127, 127], [128, 0]], np.uint8)
    expected = np.zeros((2, 64))
    expected[1, [0, 1, 31, 32]] = 1.0, 2.0, -12.0, 6 * 2.0**-127
    assert np.array_equal(mxfp4_to_f64(packed, scale), expected)


@pytest.mark.parametrize("scale", [(2, 1), (1, 2), (2, 3), (2, 32)])
def test_scales_of_another_shape_are_refused(scale: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="scales of shape"):
        mxfp4_to_f64(np.zeros((2, 32), np.uint8), np.zeros(scale, np.uint8))


def test_uint16_is_bf16_and_the_rest_is_itself() -> None:
    assert to_f64(np.array([0x3F80], np.uint16)) == 1.0
    assert to_f64(np.array([0.1], np.float32)) == np.float64(np.float32(0.1))
