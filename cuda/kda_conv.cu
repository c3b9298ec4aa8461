// SPDX-License-Identifier: MIT
//
// KDA, first part: the short convolution over time with SiLU, then q and k to unit length per head.
//
// The windows hold the last K - 1 raw projections, oldest first, so that tap j of row t meets raw row
// t - (K - 1) + j: from the window while that is before the segment, from the segment's own rows after.
//
// A warp per row, head and one of q, k, v; the 8 warps of a block are neighbours in time: blocks (3 H, rows / 8).  The
// warp of a segment's last row writes the segment's new window.  Taps ascend.  The sum of squares: lane l takes
// channels 4l .. 4l + 3 of each chunk of 128, then the warp.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#include "ops.h"
#endif

enum { KDA_CONV_WARPS = 8, KDA_CONV_CHUNKS = 2 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(KDA_CONV_WARPS* K3_WARP)
    k3_kda_conv(const k3_segment* segments, const int32_t* owner, int rows, int64_t layer, const float* conv1d /*[3, K, C]*/,
                const float* q_raw, const float* k_raw, const float* v_raw, float* q, float* k, float* v, int heads, int dim,
                int taps) {
    const int64_t row = (int64_t)blockIdx.y * KDA_CONV_WARPS + k3_warp();
    if (row >= rows || owner[row] < 0) return;
    const k3_segment* seg = segments + owner[row];
    const int which = (int)blockIdx.x / heads, head = (int)blockIdx.x % heads;
    const int64_t C = (int64_t)heads * dim, at = (int64_t)head * dim, t = row - seg->row, window = (int64_t)(taps - 1) * C;
    const float* w = conv1d + which * taps * C + at;
    const float* raw = (which == 0 ? q_raw : which == 1 ? k_raw : v_raw) + seg->row * C + at;
    const float* now = seg->now.conv + layer + which * window + at;
    float* next = seg->next.conv + layer + which * window + at;
    float* out = (which == 0 ? q : which == 1 ? k : v) + row * C + at;
    const bool wide = k3_wide(dim, w, raw, now, next, out);

    float4 y[KDA_CONV_CHUNKS];
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < KDA_CONV_CHUNKS; ++chunk) {
        const int c = 4 * ((int)k3_lane() + K3_WARP * chunk);
        y[chunk] = k3_all4(0.0f);
        if (c >= dim) continue;
#pragma unroll 4
        for (int j = 0; j < taps; ++j) {
            const int64_t back = t - (taps - 1) + j;
            const float* in = back < 0 ? now + (back + taps - 1) * C : raw + back * C;
            y[chunk] = k3_fma4(k3_row_load(w + j * C, c, dim, wide), k3_row_load(in, c, dim, wide), y[chunk]);
        }
        y[chunk] = make_float4(k3_silu(y[chunk].x), k3_silu(y[chunk].y), k3_silu(y[chunk].z), k3_silu(y[chunk].w));
        sum = k3_dot4(y[chunk], y[chunk], sum);
    }
    const float inv = 1.0f / m_sqrt(k3_warp_sum(sum) + 1e-6f);         // eps on the sum, not on the mean
    const float scale = which == 0 ? inv * (1.0f / m_sqrt((float)dim)) : which == 1 ? inv : 1.0f;
#pragma unroll
    for (int chunk = 0; chunk < KDA_CONV_CHUNKS; ++chunk) {
        k3_row_store(out, 4 * ((int)k3_lane() + K3_WARP * chunk), dim, wide, k3_mul4(y[chunk], k3_all4(scale)));
    }

    if (t != seg->rows - 1) return;
    for (int j = 1; j < taps; ++j) {
        const int64_t back = t - (taps - 1) + j;
        const float* in = back < 0 ? now + (back + taps - 1) * C : raw + back * C;
        for (int c = 4 * (int)k3_lane(); c < dim; c += 4 * K3_WARP) {
            k3_row_store(next + (j - 1) * C, c, dim, wide, k3_row_load(in, c, dim, wide));
        }
    }
}

#else

K3_KERNEL(k3_kda_conv, const k3_segment*, const int32_t*, int, int64_t, const float*, const float*, const float*, const float*,
          float*, float*, float*, int, int, int)

// Heads of up to 256 channels.
static int cuda_kda_conv(void* ctx, const k3_dims* dims, const k3_kda* w, const k3_pass* pass, int64_t mixer_index,
                         const float* q_raw, const float* k_raw, const float* v_raw, float* q, float* k, float* v) {
    if (dims->kda_head_k > 128 * KDA_CONV_CHUNKS) return 801;  // CUDA_ERROR_NOT_SUPPORTED
    const int64_t H = dims->kda_num_heads;
    return k3_kda_conv((k3_cuda*)ctx, grid(3 * H, ceil_div(pass->rows, KDA_CONV_WARPS)), KDA_CONV_WARPS * 32, 0, pass->segments,
                       pass->owner, (int)pass->rows, mixer_index * dims->conv_stride, w->conv1d, q_raw, k_raw, v_raw, q, k, v,
                       (int)H, (int)dims->kda_head_k, (int)dims->conv_kernel);
}

#endif
