// SPDX-License-Identifier: MIT
//
// prefill_precision="bf16" on the matrix unit of newer Intel processors (AMX): a tile is 16 rows of 64 bytes, and one instruction
// multiplies the 16 by 32 BF16 weights of one with 16 rows of inputs of another, into 16 by 16 float32 sums of a third.
//
// Weights are the tile of rows as they lie, so BF16 matrices are loaded from where the checkpoint is mapped.  The unit wants the
// other side by pairs of columns, the rows beside each other: a block of inputs is prepared so, once for all weights that meet
// it.  Sums therefore lie by weights first, and are turned at the end.
//
// Order of summation: 32 columns at a time, ascending; within them the instruction's own, which rounds to nearest and takes
// subnormals as zero.  A row of inputs has the same bits whatever the others are, and however many.

#include "dot.h"

namespace K3_NS {

#if defined(K3_ISA_AVX512)

namespace {

// Rows of weights at a time: two tiles, which meet two blocks of inputs.  Groups of 32 columns, so that what is unpacked stays in
// the second-level cache; and blocks of inputs, so that the sums do.
enum { LINES = 2 * BLOCK, DEPTH = 32, BLOCKS = 8 };
enum { GROUP = 64, TILE_BYTES = 4 * BLOCK_FLOATS };  // bytes of 32 weights, and of a tile

struct Config {
    uint8_t palette, start_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

// The unit is in use from one to the other: a thread that leaves it on is slower to switch.
struct Unit {
    Unit() {
        Config config = {1, 0, {0}, {0}, {0}};
        for (int i = 0; i < 8; ++i) {
            config.row_bytes[i] = GROUP;
            config.rows[i] = BLOCK;
        }
        _tile_loadconfig(&config);
    }
    ~Unit() { _tile_release(); }
};

// Columns and rows change places.
K3_INLINE void turn(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; ++k) {
            r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + 2 + k]);
            r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + 2 + k]);
        }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// LINES rows of weights, some groups of columns of them, and what is asked of memory meanwhile.
struct Lines {
    const char* row;  // the first one
    int64_t pitch, groups;
    const char* ahead;  // the first of the rows that come next
    bool fresh;  // sums are set, not added to
};

// sums[block][2][16][16] for one or two blocks of inputs, x[b] their first group.  ASKS: how many of the rows ahead are asked for.
template <int COUNT> static inline void tiles(const Lines& w, const float* const* x, float* sums, int64_t asked, int64_t asks) {
    enum { STRIDE = 4 * BLOCK };  // bytes
    if (w.fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if (COUNT == 2) _tile_zero(2);
        if (COUNT == 2) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, STRIDE);
        _tile_loadd(1, sums + BLOCK_FLOATS, STRIDE);
        if (COUNT == 2) _tile_loadd(2, sums + 2 * BLOCK_FLOATS, STRIDE);
        if (COUNT == 2) _tile_loadd(3, sums + 3 * BLOCK_FLOATS, STRIDE);
    }
    for (int64_t g = 0; g < w.groups; ++g) {
        for (int64_t i = asked; i < asked + asks; ++i) __builtin_prefetch(w.ahead + i * w.pitch + g * GROUP);
        _tile_loadd(4, w.row + g * GROUP, w.pitch);
        _tile_loadd(5, w.row + BLOCK * w.pitch + g * GROUP, w.pitch);
        _tile_loadd(6, x[0] + g * BLOCK_FLOATS, STRIDE);
        if (COUNT == 2) _tile_loadd(7, x[1] + g * BLOCK_FLOATS, STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (COUNT == 2) _tile_dpbf16ps(2, 4, 7);
        if (COUNT == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + BLOCK_FLOATS, STRIDE);
    if (COUNT == 2) _tile_stored(2, sums + 2 * BLOCK_FLOATS, STRIDE);
    if (COUNT == 2) _tile_stored(3, sums + 3 * BLOCK_FLOATS, STRIDE);
}

// y[m][at .. at + n) for a block of m inputs and n <= 16 rows of weights, from sums[16][16].
static inline void put(const float* sums, float* const* y, int64_t at, int64_t rows, int64_t n) {
    __m512i r[BLOCK];
    for (int i = 0; i < BLOCK; ++i) r[i] = _mm512_loadu_si512(sums + i * BLOCK);
    turn(r);
    for (int64_t m = 0; m < rows; ++m) v_store_n(y[m] + at, vf::make(_mm512_castsi512_ps(r[m])), n);
}

template <int DT>
static void dot_blocks(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    float buffer[LINES * DEPTH * BLOCK] __attribute__((aligned(64)));
    float sums[BLOCKS * 2 * BLOCK_FLOATS] __attribute__((aligned(64)));
    const v_table table = table_of<DT>(w);
    const int64_t groups = (w->cols + 31) / 32, blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t bytes = DT == K3_BF16 ? 64 : DT == K3_COMPACT ? 48 : 16;  // of a group
    for (int64_t r = r0; r < r1; r += LINES) {
        const int64_t n_rows = min64(LINES, r1 - r);
        Row row[LINES];
        for (int64_t n = 0; n < n_rows; ++n) row[n] = row_of<DT>(w, r + n);
        for (int64_t g0 = 0; g0 < groups; g0 += DEPTH) {
            Lines lines = {(const char*)buffer, DEPTH * GROUP, min64(DEPTH, groups - g0), row[0].data + LINES * w->pitch,
                           g0 == 0};
            const bool as_it_lies = DT == K3_BF16 && n_rows == LINES && (g0 + lines.groups) * 32 <= w->cols;
            if (as_it_lies) {
                lines.row = row[0].data + g0 * GROUP;
                lines.ahead += g0 * GROUP;
                lines.pitch = w->pitch;
            }
            for (int64_t n = 0; !as_it_lies && n < LINES; ++n)
                for (int64_t g = g0; g < g0 + lines.groups; ++g) {
                    float* to = buffer + (n * DEPTH + g - g0) * BLOCK;
                    if (n >= n_rows) {
                        _mm512_storeu_si512(to, _mm512_castps_si512(vf(0.0f).v));
                        continue;
                    }
                    if (g * bytes % 64 == 0) __builtin_prefetch(row[n].data + LINES * w->pitch + g * bytes);
                    _mm512_storeu_si512(to, load_words<DT>(row[n], table, g, min64(32, w->cols - g * 32)));
                }
            for (int64_t b = 0; b < blocks; b += 2) {
                const int64_t count = min64(2, blocks - b), passes = (blocks + 1) / 2, asks = (LINES + passes - 1) / passes;
                const int64_t asked = b / 2 * asks;
                const float* in[2];
                for (int64_t i = 0; i < count; ++i) in[i] = x[(b + i) * BLOCK] + g0 * BLOCK_FLOATS;
                float* to = sums + b * 2 * BLOCK_FLOATS;
                const int64_t wanted = as_it_lies ? max64(0, min64(asks, LINES - asked)) : 0;
                if (count == 2) tiles<2>(lines, in, to, asked, wanted);
                else tiles<1>(lines, in, to, asked, wanted);
            }
        }
        for (int64_t b = 0; b < blocks; ++b)
            for (int64_t half = 0; half * BLOCK < n_rows; ++half)
                put(sums + (2 * b + half) * BLOCK_FLOATS, y + b * BLOCK, r - r0 + half * BLOCK, min64(BLOCK, rows - b * BLOCK),
                    min64(BLOCK, n_rows - half * BLOCK));
    }
}

}  // namespace

void prepare_block(const float* const* x, int64_t rows, int64_t cols, float* out) {
    for (int64_t c = 0; c < cols; c += 32, out += BLOCK_FLOATS) {
        const int64_t first = min64(16, cols - c), second = max64(0, min64(16, cols - c - 16));
        __m512i r[BLOCK];
        for (int64_t i = 0; i < BLOCK; ++i) {
            const vf a = i < rows ? v_load_n(x[i] + c, first) : vf(0.0f);
            const vf b = i < rows ? v_load_n(x[i] + c + 16, second) : vf(0.0f);
            r[i] = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
        }
        turn(r);
        for (int i = 0; i < BLOCK; ++i) _mm512_storeu_si512(out + i * BLOCK, r[i]);
    }
}

void multiply_blocks(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    const Unit unit;
    for (int64_t m = 0; m < rows; m += BLOCKS * BLOCK) {
        const int64_t n = min64(BLOCKS * BLOCK, rows - m);
        if (w->dtype == K3_BF16) dot_blocks<K3_BF16>(w, r0, r1, x + m, y + m, n);
        else if (w->dtype == K3_COMPACT) dot_blocks<K3_COMPACT>(w, r0, r1, x + m, y + m, n);
        else dot_blocks<K3_MXFP4>(w, r0, r1, x + m, y + m, n);
    }
}

#else

// INPUTS_BLOCKS does not occur.
void prepare_block(const float* const* x, int64_t rows, int64_t cols, float* out) { (void)x, (void)rows, (void)cols, (void)out; }
void multiply_blocks(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    (void)w, (void)r0, (void)r1, (void)x, (void)y, (void)rows;
}

#endif

}  // namespace K3_NS
