// SPDX-License-Identifier: MIT
//
// Several rows of inputs against many rows of weights: strip after strip of weights meets tiles of inputs (tile.h).

#ifndef K3_STRIPS_H
#define K3_STRIPS_H

#include "tile.h"

namespace K3_NS {

// Columns 32 * group and on of a row, n of them there, as a tile takes what is unpacked: widened, or as BF16.
template <int DT, bool PACKED> K3_INLINE void unpack(float* to, Row& row, v_table table, int64_t group, int64_t n) {
#if defined(K3_ISA_AVX512)
    if constexpr (PACKED) {
        _mm512_storeu_si512(to, load_words<DT>(row, table, group, n));
        return;
    }
#endif
    vf a, b;
    load_any<DT>(row, table, group, n, a, b);
    v_store_pair(to, a, b);
}

// Weights that a tile can take as they are.
template <int DT> constexpr bool is_plain() { return DT == K3_BF16 || DT == K3_F32; }

// Groups of columns at a time, so that a strip stays in the first-level cache, and rows of inputs, so that the sums do, and the
// inputs in the second: whole tiles of them.
// BF16 and F32 are met where they lie, but for a last group that is not whole; other weights are unpacked before, once for all
// rows of inputs.  PACKED: inputs are BF16, and so the weights are.
enum { ROWS = 36 };
template <int DT, bool PACKED>
static void dot_strips_of(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    constexpr bool plain = is_plain<DT>();
    constexpr Form unpacked = PACKED ? FORM_PACKED : FORM_PAIRS;
    constexpr Form form = !plain || PACKED ? unpacked : DT == K3_BF16 ? FORM_BF16 : FORM_F32;
    constexpr int64_t depth = !plain ? 16 : DT == K3_BF16 ? 64 : 32, room = plain ? 1 : depth, width = PACKED ? 16 : 32;
    float buffer[STRIP][room * width] __attribute__((aligned(64)));
    float sums[ROWS * STRIP * 16] __attribute__((aligned(64)));
    const v_table table = table_of<DT>(w);
    const int64_t groups = plain ? w->cols / 32 : (w->cols + 31) / 32;
    Strip strip;
    strip.step = DT == K3_F32 ? 128 : DT == K3_BF16 ? 64 : DT == K3_COMPACT ? 48 : DT == K3_Q8 ? 32 : 16;
    for (int64_t r = r0; r < r1; r += STRIP) {
        const int64_t n_rows = min64(STRIP, r1 - r);
        Row row[STRIP];
        for (int64_t n = 0; n < STRIP; ++n) row[n] = row_of<DT>(w, r + min64(n, n_rows - 1));   // the last one again
        const auto begin = [&](int64_t group, int64_t count, bool packed) {
            strip.groups = count;
            strip.fresh = group == 0;
            for (int n = 0; n < STRIP; ++n) strip.ahead[n] = row[0].data + (STRIP + n) * w->pitch + group * strip.step;
            for (int n = 0; n < STRIP; ++n) {
                strip.row[n] = packed ? (const char*)buffer[n] : row[n].data + group * strip.step;
                for (int64_t g = group; packed && g < group + count; ++g)
                    unpack<DT, PACKED>(buffer[n] + (g - group) * width, row[n], table, g, min64(32, w->cols - g * 32));
            }
        };
        for (int64_t g = 0; g < groups; g += depth) {
            begin(g, min64(depth, groups - g), !plain);
            tiles<form>(strip, x, g * width, rows, sums);
        }
        if (groups * 32 < w->cols) {
            begin(groups, 1, true);
            tiles<unpacked>(strip, x, groups * width, rows, sums);
        }
        for (int64_t m = 0; m < rows; ++m)
            for (int64_t n = 0; n < n_rows; ++n) y[m][r - r0 + n] = v_sum(v_load(sums + (m * STRIP + n) * 16));
    }
}

template <int DT, bool PACKED>
static inline void dot_strips(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    for (int64_t m = 0; m < rows; m += ROWS) dot_strips_of<DT, PACKED>(w, r0, r1, x + m, y + m, min64(ROWS, rows - m));
}

}  // namespace K3_NS
#endif
