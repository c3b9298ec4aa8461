// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix: rows of weights against one prepared row of inputs, or a tile of them.
//
// Order of summation.  Columns are taken 32 at a time.  For BF16 and MXFP4, lane l adds column 2l and then
// column 2l + 1 of each group of 32, because that is how a register of packed weights falls apart; for F32, lane
// l adds column l and then column 16 + l.  The groups ascend, and v_sum folds the 16 lanes at the end.  The tile
// form (several rows of x) runs the same chain for each of its results, so its bits are those of the vector form.

#include "dot.h"

namespace K3_NS {

namespace {

// A 32-column group of row r of the weights, as two vectors.
template <int DT> K3_INLINE void load_group(const char* row, const uint8_t* scale, int64_t group, vf& a, vf& b) {
    if (DT == K3_F32) {
        a = v_load_bytes(row + group * 128);
        b = v_load_bytes(row + group * 128 + 64);
    } else if (DT == K3_BF16) {
        v_bf16_split(row + group * 64, a, b);
    } else {
        v_mxfp4_split(row + group * 16, e8m0_to_f32(scale[group]), a, b);
    }
}
template <int DT> K3_INLINE void load_group_n(const char* row, int64_t group, int64_t n, vf& a, vf& b) {
    if (DT == K3_F32) {
        a = v_load_n(row + group * 128, min64(16, n));
        b = v_load_n(row + group * 128 + 64, max64(0, n - 16));
    } else {
        v_bf16_split_n(row + group * 64, n, a, b);       // MXFP4 rows are whole groups
    }
}

// out[r * ldo + m] for N consecutive rows of weights and M prepared inputs.
template <int DT, int N, int M>
static inline void dot_tile(const k3_matrix* w, int64_t row, const float* const* x, float* out, int64_t ldo) {
    const int64_t cols = w->cols, groups = cols / 32;
    const char* wp[N];
    const uint8_t* sp[N];
    vf acc[N][M];
    for (int n = 0; n < N; ++n) {
        wp[n] = (const char*)w->data + (row + n) * w->pitch;
        sp[n] = DT == K3_MXFP4 ? w->scale + (row + n) * groups : nullptr;
        for (int m = 0; m < M; ++m) acc[n][m] = vf(0.0f);
    }
    for (int64_t g = 0; g < groups; ++g) {
        vf xa[M], xb[M];
        for (int m = 0; m < M; ++m) {
            xa[m] = v_load(x[m] + g * 32);
            xb[m] = v_load(x[m] + g * 32 + 16);
        }
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_group<DT>(wp[n], sp[n], g, a, b);
            for (int m = 0; m < M; ++m) {
                acc[n][m] = m_fma(a, xa[m], acc[n][m]);
                acc[n][m] = m_fma(b, xb[m], acc[n][m]);
            }
        }
    }
    if (DT != K3_MXFP4 && cols % 32) {
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_group_n<DT>(wp[n], groups, cols % 32, a, b);
            for (int m = 0; m < M; ++m) {
                acc[n][m] = m_fma(a, v_load(x[m] + groups * 32), acc[n][m]);
                acc[n][m] = m_fma(b, v_load(x[m] + groups * 32 + 16), acc[n][m]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) out[n * ldo + m] = v_sum(acc[n][m]);
}

// Rows of weights and rows of inputs that meet in one tile: as many sums as the registers hold beside the operands.
#if defined(K3_ISA_AVX512)
enum { TILE_N = 4, TILE_M = 4 };
#else
enum { TILE_N = 2, TILE_M = 3 };
#endif

// N rows of weights at a time for M inputs, then the rest one by one.
template <int DT, int N, int M>
static inline void dot_rows(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y) {
    float t[N * M];
    int64_t r = r0;
    for (; r + N <= r1; r += N) {
        dot_tile<DT, N, M>(w, r, x, t, M);
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) y[m][r - r0 + n] = t[n * M + m];
    }
    for (; r < r1; ++r) {
        dot_tile<DT, 1, M>(w, r, x, t, M);
        for (int m = 0; m < M; ++m) y[m][r - r0] = t[m];
    }
}

template <int DT>
static inline void dot_block(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    if (rows == 1) {
        dot_rows<DT, 4, 1>(w, r0, r1, x, y);
        return;
    }
    // A strip of weights small enough for the first-level cache meets all rows of x before the next strip is read.
    for (int64_t r = r0; r < r1; r += TILE_N) {
        const int64_t e = min64(r + TILE_N, r1);
        float* out[TILE_M];
        int64_t m = 0;
        for (; m + TILE_M <= rows; m += TILE_M) {
            for (int i = 0; i < TILE_M; ++i) out[i] = y[m + i] + (r - r0);
            dot_rows<DT, TILE_N, TILE_M>(w, r, e, x + m, out);
        }
        for (; m + 2 <= rows; m += 2) {
            for (int i = 0; i < 2; ++i) out[i] = y[m + i] + (r - r0);
            dot_rows<DT, TILE_N, 2>(w, r, e, x + m, out);
        }
        for (; m < rows; ++m) {
            out[0] = y[m] + (r - r0);
            dot_rows<DT, TILE_N, 1>(w, r, e, x + m, out);
        }
    }
}

}  // namespace

void multiply(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    if (w->dtype == K3_BF16) dot_block<K3_BF16>(w, r0, r1, x, y, rows);
    else if (w->dtype == K3_F32) dot_block<K3_F32>(w, r0, r1, x, y, rows);
    else dot_block<K3_MXFP4>(w, r0, r1, x, y, rows);
}

}  // namespace K3_NS
