// SPDX-License-Identifier: MIT
//
// The running sum, and the finite check of the numeric contract: the lowest sub-layer with a NaN or an infinity is
// noted per segment where the sum is formed, so that nothing is read twice and nothing is synchronised for it.
//
// A thread per four elements of a row: blocks (chunks of 1,024 elements, rows).  A row without an owner is left alone.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#endif

enum { RESIDUAL_THREADS = 256 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(RESIDUAL_THREADS)
    k3_residual(const int32_t* owner, int32_t* bad_sublayer, float* s, const float* a, const float* b, int restart, int sublayer,
                int d) {
    const int64_t row = blockIdx.y;
    const int i = 4 * (int)(blockIdx.x * RESIDUAL_THREADS + threadIdx.x), segment = owner[row];
    if (i >= d || segment < 0) return;
    s += row * d;
    a += row * d;
    if (b) b += row * d;
    const bool wide = k3_wide(d, s, a, b);
    float4 v = k3_row_load(a, i, d, wide);
    if (b) v = k3_add4(v, k3_row_load(b, i, d, wide));
    if (!restart) v = k3_add4(k3_row_load(s, i, d, wide), v);
    k3_row_store(s, i, d, wide, v);
    if (!k3_finite4(v)) atomicMin(&bad_sublayer[segment], sublayer);
}

extern "C" __global__ void __launch_bounds__(RESIDUAL_THREADS)
    k3_finite(const int32_t* owner, int32_t* bad_sublayer, const float* x, int sublayer, int n) {
    const int64_t row = blockIdx.y;
    const int i = 4 * (int)(blockIdx.x * RESIDUAL_THREADS + threadIdx.x), segment = owner[row];
    if (i >= n || segment < 0) return;
    x += row * n;
    if (!k3_finite4(k3_row_load(x, i, n, k3_wide(n, x)))) atomicMin(&bad_sublayer[segment], sublayer);
}

#else

K3_KERNEL(k3_residual, const int32_t*, int32_t*, float*, const float*, const float*, int, int, int)
K3_KERNEL(k3_finite, const int32_t*, int32_t*, const float*, int, int)

static int cuda_residual(void* ctx, const k3_pass* pass, float* s, const float* a, const float* b, int32_t restart,
                         int32_t sublayer, int64_t d) {
    return k3_residual((k3_cuda*)ctx, grid(ceil_div(d, 4 * RESIDUAL_THREADS), pass->rows), RESIDUAL_THREADS, 0, pass->owner,
                       pass->bad_sublayer, s, a, b, restart, sublayer, (int)d);
}

static int cuda_finite(void* ctx, const k3_pass* pass, const float* x, const int32_t* owner, int32_t sublayer, int64_t rows,
                       int64_t n) {
    return k3_finite((k3_cuda*)ctx, grid(ceil_div(n, 4 * RESIDUAL_THREADS), rows), RESIDUAL_THREADS, 0, owner, pass->bad_sublayer,
                     x, sublayer, (int)n);
}

#endif
