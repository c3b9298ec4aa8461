// SPDX-License-Identifier: MIT
//
// KDA, last part: RMS norm of each head's output with one weight for all heads, times sigmoid of the full-rank gate.
//
// A warp per row and head, 8 to a block.  The sum of squares: lane l takes elements 4l .. 4l + 3 of each chunk of 128,
// then the warp.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#endif

enum { KDA_OUTPUT_WARPS = 8 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(KDA_OUTPUT_WARPS* K3_WARP)
    k3_kda_output(float* o, const float* g, const float* norm, float eps, int64_t row_heads, int dim) {
    const int64_t head = (int64_t)blockIdx.x * KDA_OUTPUT_WARPS + k3_warp();
    if (head >= row_heads) return;
    o += head * dim;
    g += head * dim;
    const bool wide = k3_wide(dim, o, g, norm);
    const int first = 4 * (int)k3_lane();
    float sum = 0.0f;
    for (int i = first; i < dim; i += 4 * K3_WARP) {
        const float4 v = k3_row_load(o, i, dim, wide);
        sum = k3_dot4(v, v, sum);
    }
    const float inv = 1.0f / m_sqrt(k3_warp_sum(sum) / (float)dim + eps);
    for (int i = first; i < dim; i += 4 * K3_WARP) {
        const float4 v = k3_mul4(k3_row_load(o, i, dim, wide), k3_all4(inv)), z = k3_row_load(g, i, dim, wide);
        const float4 gate = make_float4(k3_sigmoid(z.x), k3_sigmoid(z.y), k3_sigmoid(z.z), k3_sigmoid(z.w));
        k3_row_store(o, i, dim, wide, k3_mul4(k3_mul4(v, k3_row_load(norm, i, dim, wide)), gate));
    }
}

#else

K3_KERNEL(k3_kda_output, float*, const float*, const float*, float, int64_t, int)

static int cuda_kda_output(void* ctx, const k3_dims* dims, const k3_kda* w, float* o, const float* g, int64_t rows) {
    const int64_t row_heads = rows * dims->kda_num_heads;
    return k3_kda_output((k3_cuda*)ctx, grid(ceil_div(row_heads, KDA_OUTPUT_WARPS)), KDA_OUTPUT_WARPS * 32, 0, o, g, w->o_norm,
                         dims->rms_norm_eps, row_heads, (int)dims->kda_head_v);
}

#endif
