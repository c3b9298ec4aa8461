// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix (dot.cpp), and how inputs are prepared for them.
//
// The inputs are prepared once per dispatch: split into even and odd columns where the weights are, the two vectors of each 32
// columns lying together (v_store_pair), and padded with zeros to a multiple of 32, so that only the weights need care at the
// end of a row.

#ifndef K3_DOT_H
#define K3_DOT_H

#include "columns.h"

namespace K3_NS {

K3_INLINE int64_t padded(int64_t cols) { return round_up(cols, 32); }

// Bytes of one row of a matrix, scales included.
K3_INLINE int64_t row_bytes(const k3_matrix* w) {
    return w->pitch + (w->dtype == K3_MXFP4 ? w->cols / 32 : w->dtype == K3_Q8 ? w->pitch / 32 * 2 : 0);
}

// 32 inputs (n of them real) in the order in which weights of this dtype meet them.
K3_INLINE void prepare_32(const float* x, int64_t n, int32_t dtype, float* out) {
    float t[32] = {0};
    if (n < 32) {
        memcpy(t, x, (size_t)n * 4);
        x = t;
    }
    vf a, b;
    if (is_split(dtype)) {
        v_load_split(x, a, b);
    } else {
        a = v_load(x);
        b = v_load(x + 16);
    }
    v_store_pair(out, a, b);
}

// One row of inputs: out holds padded(n) floats.
K3_INLINE void prepare_row(const float* x, int64_t n, int32_t dtype, float* out) {
    for (int64_t c = 0; c < n; c += 32) prepare_32(x + c, min64(32, n - c), dtype, out + c);
}

// y[m][0 .. r1 - r0) = rows r0 .. r1 of the weights times the prepared inputs x[m], for up to any number of rows.
void multiply(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows);

}  // namespace K3_NS
#endif
