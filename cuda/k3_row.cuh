// SPDX-License-Identifier: MIT
//
// Rows of float32, four elements at a time: a thread takes elements i .. i + 3.  Rows that are `wide` are loaded 16
// bytes at a time, others element by element; a lane past the end of a row counts as zero, and both ways give the
// same bits.

#ifndef K3_ROW_CUH
#define K3_ROW_CUH

#include "k3_prim.cuh"

// Whether rows of n elements that start here can be read 16 bytes at a time.
template <class... P> K3_DEVICE bool k3_wide(int n, P... rows) { return (((uintptr_t)rows | ...) & 15) == 0 && (n & 3) == 0; }

K3_DEVICE float4 k3_row_load(const float* x, int i, int n, bool wide) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (wide) {
        if (i < n) v = k3_load4(x + i);
    } else {
        if (i < n) v.x = x[i];
        if (i + 1 < n) v.y = x[i + 1];
        if (i + 2 < n) v.z = x[i + 2];
        if (i + 3 < n) v.w = x[i + 3];
    }
    return v;
}
K3_DEVICE void k3_row_store(float* x, int i, int n, bool wide, float4 v) {
    if (wide) {
        if (i < n) k3_store4(x + i, v);
    } else {
        if (i < n) x[i] = v.x;
        if (i + 1 < n) x[i + 1] = v.y;
        if (i + 2 < n) x[i + 2] = v.z;
        if (i + 3 < n) x[i + 3] = v.w;
    }
}

// sum + a . b, one element after the other.
K3_DEVICE float k3_dot4(float4 a, float4 b, float sum) {
    return m_fma(a.w, b.w, m_fma(a.z, b.z, m_fma(a.y, b.y, m_fma(a.x, b.x, sum))));
}
K3_DEVICE float4 k3_fma4(float4 a, float4 b, float4 c) {
    return make_float4(m_fma(a.x, b.x, c.x), m_fma(a.y, b.y, c.y), m_fma(a.z, b.z, c.z), m_fma(a.w, b.w, c.w));
}
K3_DEVICE float4 k3_add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
K3_DEVICE float4 k3_sub4(float4 a, float4 b) { return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w); }
K3_DEVICE float4 k3_mul4(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
K3_DEVICE float4 k3_all4(float v) { return make_float4(v, v, v, v); }
K3_DEVICE bool k3_finite4(float4 v) { return m_finite(v.x) && m_finite(v.y) && m_finite(v.z) && m_finite(v.w); }

// y = x * norm / sqrt(mean(x^2) + eps), over a whole block; x and y may be the same.  The sum of squares: thread t
// takes elements 4t .. 4t + 3 of each chunk of 4 * blockDim.x, then k3_block_sum.
K3_DEVICE void k3_rms_row(const float* x, const float* norm, float eps, float* y, int n, float* partial /*[32]*/) {
    enum { AT_ONCE = 4 };
    const bool wide = k3_wide(n, x, norm, y);
    const int first = 4 * (int)threadIdx.x, chunk = 4 * (int)blockDim.x;
    float sum = 0.0f;
    for (int i = first; i < n; i += AT_ONCE * chunk) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int c = 0; c < AT_ONCE; ++c) v[c] = k3_row_load(x, i + c * chunk, n, wide);
#pragma unroll
        for (int c = 0; c < AT_ONCE; ++c) sum = k3_dot4(v[c], v[c], sum);
    }
    sum = k3_block_sum(sum, partial);
    const float inv = 1.0f / m_sqrt(sum / (float)n + eps);
    for (int i = first; i < n; i += chunk) {
        const float4 v = k3_mul4(k3_row_load(x, i, n, wide), k3_all4(inv));
        k3_row_store(y, i, n, wide, k3_mul4(v, k3_row_load(norm, i, n, wide)));
    }
}

#endif
