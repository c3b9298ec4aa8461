# SPDX-License-Identifier: MIT
"""Multi-head Latent Attention, op by op: rope, append, absorb, attend, unabsorb; and against the expanded form."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from device import ON_GPU
from ops_tools import (
    Array,
    Weight,
    bf16_values,
    every_build,
    every_isa,
    make,
    near,
    normal,
    product,
    rms,
    same_bits,
    sigmoid,
    weight,
    within,
)

from k3session._core.gpu import Arena, Device
from k3session._core.kernels import Kernels
from k3session._core.stream import Stream
from k3session.errors import ConfigError

SIZES = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
SHAPES: list[dict[str, int]] = [
    dict(zip(SIZES, values, strict=True))
    for values in (
        (1, 16, 16, 16, 16),
        (3, 32, 16, 24, 32),
        (5, 17, 6, 9, 24),
        (9, 8, 0, 33, 50),
        (2, 128, 64, 128, 512),
    )
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))


def stored(k: Kernels, latent: Array, page_rows: int, layer: int = 0, layers: int = 1) -> list[Array]:
    """Pages that hold `latent` [n, kv_lora + rope] for one layer, and NaN wherever nothing should be read."""
    n, width = latent.shape
    empty = np.nan if latent.dtype == np.float32 else 0x7FC0
    shape = (layers, page_rows, k.latent_stride)
    pages = [np.full(shape, empty, latent.dtype) for _ in range((n + page_rows - 1) // page_rows)]
    for i in range(n):
        row = pages[i // page_rows][layer, i % page_rows]
        row[:width], row[width:] = latent[i], 0
    return pages


def attention(qa: Array, latent: Array, value_width: int, scale: float) -> Array:
    """softmax(q . latent) over all given rows, of one query row [H, stride], in float64."""
    rows = latent.astype(np.float64)
    score = qa[:, : rows.shape[1]].astype(np.float64) @ rows.T * scale
    p = np.exp(score - score.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ rows[:, :value_width]


def query(k: Kernels, rng: np.random.Generator, rows: int, shape: dict[str, int], size: float = 1.0) -> Array:
    qa = np.zeros((rows, shape["num_attention_heads"], k.latent_stride), np.float32)
    width = shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
    qa[:, :, :width] = normal(rng, *qa.shape[:2], width, scale=size)
    return qa


# append -----------------------------------------------------------------------------------------------------------


@every_isa
@shapes
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("page_rows", [1, 3, 64])
def test_append(isa: str, shape: dict[str, int], dtype: Any, page_rows: int) -> None:
    """The norm covers the latent only; the rope channels are stored as they are, and zeros behind them."""
    rng = np.random.default_rng(40)
    L, W = shape["kv_lora_rank"], shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
    k = make(isa, **shape)
    kva, w = normal(rng, 9, W, scale=3e-3), normal(rng, L)
    positions, counts = [0, 7, 2], [5, 1, 3]
    pages = [
        [np.full((3, page_rows, k.latent_stride), 7, dtype) for _ in range(10 // page_rows + 1)]
        for _ in counts
    ]
    k.mla_append(kva, w, pages, positions, counts, layer=1)
    want = np.concatenate([rms(kva[:, :L], w, 1e-6), kva[:, L:]], axis=1)
    row = 0
    for table, position, count in zip(pages, positions, counts, strict=True):
        for i in range(position, position + count):
            page = table[i // page_rows]
            found = page[1, i % page_rows].copy()
            page[1, i % page_rows] = 7
            assert not found[W:].any()
            if dtype == np.float32:
                near(found[None, :W], want[row][None], 1e-6)
                np.testing.assert_array_equal(found[L:W], kva[row, L:])
            else:
                assert np.max(np.abs(bf16_values(found[:W]) - want[row]) / np.abs(want[row])) < 2**-8
            row += 1
        assert all(np.all(page == 7) for page in table), "nothing else was written"


@every_isa
def test_append_rounds_to_bf16_once_and_to_even(isa: str) -> None:
    k = make(isa, kv_lora_rank=16, qk_rope_head_dim=16)
    words = [
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0x3F807FFF,
        0x7F7FFFFF,
        0x00018000,
        0x80008001,
        0x7F800000,
        0x7F800001,
    ]
    kva = np.zeros((1, 32), np.float32)
    kva[0, 16 : 16 + len(words)] = np.array(words, np.uint32).view(np.float32)
    pages = [[np.zeros((1, 1, 32), np.uint16)]]
    k.mla_append(kva, np.ones(16, np.float32), pages, [0])
    want = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x0002, 0x8001, 0x7F80, 0x7FC0]
    assert [hex(v) for v in pages[0][0][0, 0, 16 : 16 + len(words)]] == [hex(v) for v in want]


# absorb, unabsorb -------------------------------------------------------------------------------------------------


def halves(kv_b: Weight, shape: dict[str, int]) -> tuple[Array, Array]:
    """The key and value halves of kv_b_proj, [H, nope, L] and [H, v, L]."""
    per_head = kv_b.values.reshape(shape["num_attention_heads"], -1, shape["kv_lora_rank"])
    return per_head[:, : shape["qk_nope_head_dim"]], per_head[:, shape["qk_nope_head_dim"] :]


def kv_b_of(rng: np.random.Generator, kind: str, shape: dict[str, int]) -> Weight:
    out = shape["num_attention_heads"] * (shape["qk_nope_head_dim"] + shape["v_head_dim"])
    return weight(rng, kind, out, shape["kv_lora_rank"])


@every_build
@shapes
@pytest.mark.parametrize("kind", ["bf16", "f32", "bf16-odd"])
def test_absorb_and_unabsorb(isa: str, threads: int, shape: dict[str, int], kind: str) -> None:
    rng = np.random.default_rng(41)
    H, nope, L = shape["num_attention_heads"], shape["qk_nope_head_dim"], shape["kv_lora_rank"]
    rope, V = shape["qk_rope_head_dim"], shape["v_head_dim"]
    k = make(isa, threads, rows=37, **shape)
    kv_b = kv_b_of(rng, kind, shape)
    keys, values = halves(kv_b, shape)
    q, oa, g = normal(rng, 37, H * (nope + rope)), normal(rng, 37, H, L), normal(rng, 37, H * V)
    qa = k.mla_absorb(q, kv_b.matrix)
    per_head = q.reshape(37, H, nope + rope)
    for h in range(H):  # one sum over the nope channels, ascending: 2 nope roundings
        want = per_head[:, h, :nope].astype(np.float64) @ keys[h]
        bound = 2.0**-23 * (nope + 1) * (np.abs(per_head[:, h, :nope]).astype(np.float64) @ np.abs(keys[h]))
        within(qa[:, h, :L], want, bound)
    same_bits(np.ascontiguousarray(qa[:, :, L : L + rope]), np.ascontiguousarray(per_head[:, :, nope:]))
    assert not qa[:, :, L + rope :].any()

    o = k.mla_unabsorb(oa, kv_b.matrix).reshape(37, H, V)
    gated = k.mla_unabsorb(oa, kv_b.matrix, g).reshape(37, H, V)
    for h in range(H):
        within(o[:, h], *product(oa[:, h], values[h]))
    np.testing.assert_allclose(gated, o * sigmoid(g).reshape(37, H, V), rtol=4e-7)

    for rows in (1, 2, 4, 5):
        at = 37 - rows
        same_bits(k.mla_absorb(q[at:].copy(), kv_b.matrix), qa[at:])
        same_bits(k.mla_unabsorb(oa[at:].copy(), kv_b.matrix, g[at:].copy()), gated[at:].reshape(rows, -1))


# attend -----------------------------------------------------------------------------------------------------------


@every_build
@shapes
@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
def test_attend_from_an_empty_session(isa: str, threads: int, shape: dict[str, int], bf16: bool) -> None:
    """Each row sees the rows up to itself; rows behind it hold NaN and are not read."""
    rng = np.random.default_rng(42)
    L, W = shape["kv_lora_rank"], shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
    k = make(isa, threads, rows=70, **shape)
    latent = normal(rng, 70, W)
    if bf16:
        latent = (latent.view(np.uint32) >> 16).astype(np.uint16)
    values = bf16_values(latent) if bf16 else latent
    qa = query(k, rng, 70, shape, 2 / np.sqrt(W))
    scale = (shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"]) ** -0.5
    whole = k.mla_attend(qa, [stored(k, latent, 64)], [0])
    for t in (0, 1, 15, 16, 17, 62, 63, 64, 69):
        near(whole[t], attention(qa[t], values[: t + 1], L, scale), 4e-6)
        pages = stored(k, latent[: t + 1], 7, layer=1, layers=2)
        same_bits(k.mla_attend(qa[t : t + 1], [pages], [t], layer=1)[0], whole[t])


@every_build
@pytest.mark.parametrize("n", [1, 63, 64, 65, 129, 1000, 4096, 4097, 8193])
def test_attend_over_a_long_past(isa: str, threads: int, n: int) -> None:
    """The cut into pieces depends on a row's own position only: not on threads, nor on the rows beside it."""
    rng = np.random.default_rng(43)
    shape = dict(zip(SIZES, (9, 8, 6, 8, 24), strict=True))
    k = make(isa, threads, rows=5, **shape)
    latent = normal(rng, n + 4, 30)
    qa = query(k, rng, 5, shape)
    pages = stored(k, latent, 64)
    five = k.mla_attend(qa, [pages], [n - 1])
    one_thread = make(isa, 1, rows=5, **shape)
    for t in range(5):
        alone = k.mla_attend(qa[t : t + 1], [pages], [n - 1 + t])
        same_bits(alone[0], five[t])
        same_bits(one_thread.mla_attend(qa[t : t + 1], [pages], [n - 1 + t])[0], five[t])
    near(five[4], attention(qa[4], latent, 24, 14**-0.5), 2e-5)


@every_build
def test_attend_of_several_sessions(isa: str, threads: int) -> None:
    rng = np.random.default_rng(44)
    shape = SHAPES[1]
    k = make(isa, threads, rows=8, **shape)
    positions, counts = [0, 300, 64, 17], [3, 1, 2, 2]
    latents = [normal(rng, p + c, 48) for p, c in zip(positions, counts, strict=True)]
    tables = [stored(k, latent, 16) for latent in latents]
    qa = query(k, rng, 8, shape)
    together = k.mla_attend(qa, tables, positions, counts)
    at = 0
    for table, position, count in zip(tables, positions, counts, strict=True):
        alone = k.mla_attend(qa[at : at + count], [table], [position])
        same_bits(alone, together[at : at + count])
        at += count


@every_isa
def test_bf16_pages_are_their_widened_values(isa: str) -> None:
    rng = np.random.default_rng(45)
    shape = SHAPES[2]
    k = make(isa, **shape)
    bits = (normal(rng, 150, 30).view(np.uint32) >> 16).astype(np.uint16)
    qa = query(k, rng, 1, shape)
    narrow = k.mla_attend(qa, [stored(k, bits, 64)], [149])
    same_bits(narrow, k.mla_attend(qa, [stored(k, bf16_values(bits).astype(np.float32), 64)], [149]))


@every_build
def test_scores_of_any_size(isa: str, threads: int) -> None:
    """+-1e4 and beyond: the largest score takes all, without overflow."""
    rng = np.random.default_rng(46)
    shape = SHAPES[1]
    k = make(isa, threads, **shape)
    latent = normal(rng, 400, 48)
    pages = [stored(k, latent, 64)]
    for size in (1e2, 1e4, 1e8):
        qa = query(k, rng, 1, shape, size)
        found = k.mla_attend(qa, pages, [399])
        best = np.argmax(qa[0, :, :48].astype(np.float64) @ latent.T.astype(np.float64), axis=-1)
        np.testing.assert_allclose(found[0], latent[best, :32], rtol=1e-5 if size > 1e3 else 0.3, atol=1e-5)
    equal = k.mla_attend(np.zeros((1, 3, 48), np.float32), pages, [399])
    near(equal[0, :1], latent[:, :32].astype(np.float64).mean(axis=0)[None], 3e-6)


@every_build
def test_what_is_not_finite_spoils_no_earlier_row_and_no_other_session(isa: str, threads: int) -> None:
    rng = np.random.default_rng(47)
    shape = SHAPES[1]
    k = make(isa, threads, rows=140, **shape)
    latents = [normal(rng, 70, 48) for _ in range(2)]
    qa = query(k, rng, 140, shape)
    clean = k.mla_attend(qa, [stored(k, a, 64) for a in latents], [0, 0], [70, 70])
    for column, value in ((5, np.nan), (40, np.nan), (5, np.inf)):
        latent = latents[0].copy()
        latent[30, column] = value
        found = k.mla_attend(qa, [stored(k, latent, 64), stored(k, latents[1], 64)], [0, 0], [70, 70])
        same_bits(found[:30], clean[:30])
        same_bits(found[70:], clean[70:])
        assert not np.isfinite(found[30:70]).all(axis=-1).any()


@every_build
@shapes
@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_absorbed_form_is_the_expanded_one(isa: str, threads: int, shape: dict[str, int], kind: str) -> None:
    """softmax([q_n | q_r] . [Wk c | k_r]) Wv c, head by head, then the gate."""
    rng = np.random.default_rng(48)
    H, nope, rope = shape["num_attention_heads"], shape["qk_nope_head_dim"], shape["qk_rope_head_dim"]
    L, V, n = shape["kv_lora_rank"], shape["v_head_dim"], 21
    k = make(isa, threads, rows=n, **shape)
    kv_b = kv_b_of(rng, kind, shape)
    q, kva, g = normal(rng, n, H * (nope + rope)), normal(rng, n, L + rope), normal(rng, n, H * V)
    w = normal(rng, L, scale=L**-0.5)
    pages = [[np.full((1, 8, k.latent_stride), np.nan, np.float32) for _ in range(3)]]
    k.mla_append(kva, w, pages, [0])
    o = k.mla_unabsorb(k.mla_attend(k.mla_absorb(q, kv_b.matrix), pages, [0]), kv_b.matrix, g)

    keys, values = halves(kv_b, shape)
    c = rms(kva[:, :L], w, 1e-6)
    want = np.empty((n, H, V))
    for h in range(H):
        key = np.concatenate([c @ keys[h].T, kva[:, L:]], axis=1)
        for t in range(n):
            score = key[: t + 1] @ q.reshape(n, H, -1)[t, h].astype(np.float64) * (nope + rope) ** -0.5
            p = np.exp(score - score.max())
            want[t, h] = p / p.sum() @ (c[: t + 1] @ values[h].T)
    near(o, want.reshape(n, -1) * sigmoid(g), 2e-5)


# rope -------------------------------------------------------------------------------------------------------------


@every_isa
@pytest.mark.parametrize("rope", [2, 6, 64])
def test_rope(isa: str, rope: int) -> None:
    """Channel i turns with channel i + rope / 2; the rest of q and the latent stay."""
    rng = np.random.default_rng(49)
    H, nope, L = 3, 5, 7
    k = make(
        isa,
        num_attention_heads=H,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        kv_lora_rank=L,
        rope_theta=1000.0,
    )
    q, kva = normal(rng, 6, H * (nope + rope)), normal(rng, 6, L + rope)
    q2, kva2 = k.mla_rope(q, kva, [4, 1000], [4, 2])
    position = np.array([4, 5, 6, 7, 1000, 1001])
    angle = position[:, None] * 1000.0 ** (-2 * np.arange(rope // 2) / rope)
    z = np.exp(1j * angle)

    def turned(x: Array) -> Array:
        y = (x[..., : rope // 2] + 1j * x[..., rope // 2 :]) * z.reshape(6, *[1] * (x.ndim - 2), -1)
        return np.concatenate([y.real, y.imag], axis=-1)

    a, b = q.reshape(6, H, -1), q2.reshape(6, H, -1)
    np.testing.assert_array_equal(b[..., :nope], a[..., :nope])
    np.testing.assert_array_equal(kva2[:, :L], kva[:, :L])
    near(b[..., nope:], turned(a[..., nope:].astype(np.float64)), 3e-7)
    near(kva2[:, L:], turned(kva[:, L:].astype(np.float64)), 3e-7)


# Far offsets ------------------------------------------------------------------------------------------------------


K3_F32, K3_BF16 = 0, 1  # of cuda/ops.h


def reserved(shape: tuple[int, int, int], dtype: Any) -> Array:
    """An array of zeros in address space that takes no memory until it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as e:
        pytest.skip(f"no {nbytes / 2**30:.0f} GiB of address space here: {e}")
    return np.frombuffer(memory, dtype).reshape(shape)


SEGMENT = np.dtype("i8, i8, i8, 4u8, u8, i8, i4, i4")
"""k3_segment of cuda/ops.h."""
ATTEND = np.dtype(
    [("segments", "u8"), ("owner", "u8"), ("qa", "u8"), ("oa", "u8"), ("partial", "u8"), ("layer", "i8")]
    + [(name, "i4") for name in ("row0", "heads", "kv_lora", "stride", "slot")]
    + [("scale", "f4")]
)
"""mla_attend_args of cuda/mla_attend.cu."""


def far_on_a_gpu(kva: Array, w: Array, qa: Array, small: Array, want: Array) -> None:
    """The kernels by themselves: the page begins far below its rows, and only these are there."""
    stride, page_rows = small.shape[-1], 2**20
    with Device() as device:
        stream, arena = Stream(device), Arena(device)

        def put(array: Array) -> np.uint64:
            address = arena.alloc(array.nbytes)
            stream.write(address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            return np.uint64(address)

        given = {"kva": put(kva), "w": put(w), "qa": put(qa), "owner": put(np.zeros(3, np.int32))}
        for layer, position in ((68, 0), (149, 0), (149, page_rows - 3)):
            assert layer * page_rows * stride > 2**31
            rows = put(np.zeros_like(small[0, :3]))
            begin = int(rows) - (layer * page_rows + position) * stride * small.itemsize
            pages = put(np.array([begin % 2**64], np.uint64))
            dtype = K3_F32 if small.dtype == np.float32 else K3_BF16
            segment = put(np.array((0, 3, position, [0] * 4, pages, page_rows, dtype, 0), SEGMENT))
            scalars = [np.float32(1e-6), *map(np.int32, (16, 16, stride))]
            arguments = (segment, given["owner"], np.int64(layer), given["kva"], given["w"], *scalars)
            stream.launch("k3_mla_append", (3, 1, 1), 128, *arguments)
            found = np.empty_like(small[0, :3])
            stream.read(int(rows), found.reshape(-1).view(np.uint8))
            same_bits(found, small[0, :3])
            if position == 0:
                out = arena.alloc(want.nbytes)
                job = (segment, given["owner"], given["qa"], out, 0, layer, 0, 1, 16, stride, 18, 32**-0.5)
                stream.launch("k3_mla_attend", (1, 1, 3), 256, np.array(job, ATTEND), shared=96 * 1024)
                attended = np.empty_like(want)
                stream.read(out, attended)
                same_bits(attended, want)
        stream.close()
        arena.close()


@every_isa
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_rows_beyond_two_to_the_31_elements(isa: str, dtype: Any) -> None:
    """Layer and position are widened to 64 bits before they meet a stride."""
    rng = np.random.default_rng(50)
    shape = SHAPES[0]
    k = make(isa, rows=3, **shape)
    kva, w, qa = normal(rng, 3, 32), normal(rng, 16), query(k, rng, 3, shape)
    small = np.zeros((1, 4, k.latent_stride), dtype)
    k.mla_append(kva, w, [[small]], [0])
    want = k.mla_attend(qa, [[small]], [0])
    if ON_GPU:
        far_on_a_gpu(kva, w, qa, small, want)
        return
    layers, page_rows = 150, 2**20  # past 2^32 elements; memory that is not touched costs nothing
    page = reserved((layers, page_rows, k.latent_stride), dtype)
    assert page.size > 2**32
    for layer in (layers // 2 + 33, layers - 1):
        k.mla_append(kva, w, [[page]], [0], layer=layer)
        same_bits(page[layer, :3], small[0, :3])
        same_bits(k.mla_attend(qa, [[page]], [0], layer=layer), want)
    k.mla_append(kva, w, [[page]], [page_rows - 3], layer=layers - 1)
    same_bits(page[-1, -3:], small[0, :3])
    assert not any(page[(layers - 1) % at, :3].any() for at in (64, 128)), "no smaller offset was written"


@every_isa
def test_positions_beyond_two_to_the_31(isa: str) -> None:
    k = make(isa, rows=1, **SHAPES[0])
    page_rows = 2**16
    page, last = np.zeros((2, 1, page_rows, k.latent_stride), np.float32)
    kva = np.ones((1, 32), np.float32)
    k.mla_append(kva, np.ones(16, np.float32), [[page] * 2**15 + [last]], [2**31 + 5])
    assert not page.any()
    assert np.flatnonzero(last[0].any(axis=1)).tolist() == [5]


def test_pages_are_checked() -> None:
    k = make("base", **SHAPES[0])
    page = np.zeros((2, 4, 32), np.float32)
    kva, w = np.zeros((2, 32), np.float32), np.ones(16, np.float32)
    with pytest.raises(ConfigError, match="needs room for 5 positions; found 4"):
        k.mla_append(kva, w, [[page]], [3])
    with pytest.raises(ConfigError, match="layer: expected 0 to 1; found 2"):
        k.mla_append(kva, w, [[page]], [0], layer=2)
    with pytest.raises(ConfigError, match="counts: expected positive numbers that add up to 2 rows"):
        k.mla_append(kva, w, [[page]], [0], [1])
    with pytest.raises(ConfigError, match="pages: expected a list of pages for each of 2 segments"):
        k.mla_append(kva, w, [[page]], [0, 0], [1, 1])
    with pytest.raises(ConfigError, match=r"page: expected a C-contiguous float32\[2, 4, 32\]"):
        k.mla_append(kva, w, [[page, page[:, :2]]], [0])
