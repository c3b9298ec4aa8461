// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix: rows of weights against one prepared row of inputs, or several.
//
// Order of summation.  Columns are taken 32 at a time, as two vectors of 16 lanes (columns.h).  A lane adds its column of the
// first vector and then that of the second; the groups ascend, and v_sum folds the 16 lanes at the end.  With several rows of
// inputs each result has the same chain as with one.

#include "dot.h"

#include "strips.h"

namespace K3_NS {

namespace {

// ---------------------------------------------------------------------------------------------
// A few rows of inputs: packed weights stream by, are widened in registers, and meet them there.
// ---------------------------------------------------------------------------------------------

// How many rows of weights one row of inputs meets at a time, and how far ahead of them memory is asked for.  Weights that take
// many instructions to widen keep the processor from looking ahead far enough.
#if defined(K3_ISA_AVX512)
template <int DT> constexpr int rows_together() { return DT == K3_MXFP4 ? 4 : DT == K3_Q8 ? 2 : 1; }
#else
template <int DT> constexpr int rows_together() { return DT == K3_MXFP4 ? 2 : 1; }
#endif
enum { AHEAD = 2048 };                                       // bytes
template <int DT> K3_INLINE void ask_ahead(const char* row, int64_t group) {
    const int64_t bytes = DT == K3_MXFP4 ? 16 : DT == K3_Q8 ? 32 : 48;
    __builtin_prefetch(row + group * bytes + AHEAD);
}

// y[m][at + n] for N consecutive rows of weights and M inputs.
template <int DT, int N, int M>
static inline void dot_rows(const k3_matrix* w, int64_t row, const float* const* x, float* const* y, int64_t at) {
    const int64_t groups = w->cols / 32;
    const v_table table = table_of<DT>(w);
    Row r[N];
    vf acc[N][M];
    for (int n = 0; n < N; ++n) {
        r[n] = row_of<DT>(w, row + n);
        for (int m = 0; m < M; ++m) acc[n][m] = vf(0.0f);
    }
    if (DT == K3_MXFP4) __builtin_prefetch(r[0].scale + AHEAD / 16);
    const auto add = [&](int64_t g, vf* sum, vf a, vf b) {
        for (int m = 0; m < M; ++m) {
            const float* in = x[m] + g * 32;
            asm("" : "+r"(in));                              // else they are kept for the next row, and the sums are not
            vf xa, xb;
            v_load_pair(in, xa, xb);
            sum[m] = m_fma(b, xb, m_fma(a, xa, sum[m]));
        }
    };
    const auto group = [&](int64_t g, bool ask) {
        for (int n = 0; n < N; ++n) {
            vf a, b;
            if (ask) ask_ahead<DT>(r[n].data, g);
            load_group<DT>(r[n], table, g, a, b);
            add(g, acc[n], a, b);
        }
    };
    const auto any = [&](int64_t g, int64_t columns) {
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_any<DT>(r[n], table, g, columns, a, b);
            add(g, acc[n], a, b);
        }
    };
    if (DT == K3_COMPACT) {
        for (int64_t g = 0; g < groups;) {
            int64_t stop = groups;                           // the next group that is an exception in one of the rows
            for (int n = 0; n < N; ++n)
                if (r[n].next != r[n].end) stop = min64(stop, r[n].next->group);
            if (g % 2 && g < stop) group(g++, true);
            for (; g + 2 <= stop; g += 2) {                  // a whole block of 96 bytes
                group(g, true);
                group(g + 1, true);
            }
            if (g < stop) group(g++, true);
            if (g < groups) any(g++, 32);
        }
    } else {
        int64_t g = 0;
        for (; M == 1 && g + 2 <= groups; g += 2) {
            group(g, true);
            group(g + 1, false);
        }
        for (; g < groups; ++g) group(g, g % 2 == 0);
    }
    if (w->cols % 32) any(groups, w->cols % 32);
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) y[m][at + n] = v_sum(acc[n][m]);
}

template <int DT, int M>
static inline void dot_few(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y) {
    int64_t r = r0;
    constexpr int N = M == 1 ? rows_together<DT>() : 2;
    for (; r + N <= r1; r += N) dot_rows<DT, N, M>(w, r, x, y, r - r0);
    for (; r < r1; ++r) dot_rows<DT, 1, M>(w, r, x, y, r - r0);
}

// ---------------------------------------------------------------------------------------------
// One row of inputs over BF16 or F32: short rows cost no more than their columns.
// ---------------------------------------------------------------------------------------------

// Rows at a time: as many as there are registers for, for the more of them the more memory is asked for.
#if defined(K3_ISA_AVX512)
enum { LINES = 8 };
#else
enum { LINES = 4 };
#endif

template <int DT, int N> static inline void dot_plain(const k3_matrix* w, int64_t row, const float* x, float* y) {
    const int64_t cols = w->cols, groups = cols / 32, bytes = DT == K3_F32 ? 128 : 64;
    const v_table table = table_of<DT>(w);
    Row r[N];
    vf acc[N];
    for (int n = 0; n < N; ++n) {
        r[n].data = (const char*)w->data + (row + n) * w->pitch;
        acc[n] = vf(0.0f);
    }
    for (int64_t g = 0; g < groups; ++g) {
        vf xa, xb;
        v_load_pair(x + g * 32, xa, xb);
        for (int n = 0; n < N; ++n) {
            vf a, b;
            if (N == 8) __builtin_prefetch(r[n].data + N * w->pitch + g * bytes, 0, 2);    // the rows that come next
            load_group<DT>(r[n], table, g, a, b);
            acc[n] = m_fma(b, xb, m_fma(a, xa, acc[n]));
        }
    }
    if (cols % 32) {
        vf xa, xb;
        v_load_pair(x + groups * 32, xa, xb);
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_any<DT>(r[n], table, groups, cols % 32, a, b);
            acc[n] = m_fma(b, xb, m_fma(a, xa, acc[n]));
        }
    }
    for (int n = 0; n < N; ++n) y[n] = v_sum(acc[n]);
}

template <int DT> static inline void dot_one(const k3_matrix* w, int64_t r0, int64_t r1, const float* x, float* y) {
    int64_t r = r0;
    for (; r + LINES <= r1; r += LINES) dot_plain<DT, LINES>(w, r, x, y + (r - r0));
    for (; LINES > 4 && r + 4 <= r1; r += 4) dot_plain<DT, 4>(w, r, x, y + (r - r0));
    for (; r < r1; ++r) dot_plain<DT, 1>(w, r, x, y + (r - r0));
}

template <int DT>
static inline void dot(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    if constexpr (is_plain<DT>()) {
        if (rows == 1) return dot_one<DT>(w, r0, r1, x[0], y[0]);
    } else {
        if (rows == 1) return dot_few<DT, 1>(w, r0, r1, x, y);
        if (rows == 2) return dot_few<DT, 2>(w, r0, r1, x, y);
        if (rows == 3) return dot_few<DT, 3>(w, r0, r1, x, y);
    }
    dot_strips<DT, false>(w, r0, r1, x, y, rows);
}

}  // namespace

void multiply(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    switch (w->dtype) {
        case K3_F32: return dot<K3_F32>(w, r0, r1, x, y, rows);
        case K3_BF16: return dot<K3_BF16>(w, r0, r1, x, y, rows);
        case K3_MXFP4: return dot<K3_MXFP4>(w, r0, r1, x, y, rows);
        case K3_COMPACT: return dot<K3_COMPACT>(w, r0, r1, x, y, rows);
        default: return dot<K3_Q8>(w, r0, r1, x, y, rows);
    }
}

}  // namespace K3_NS
