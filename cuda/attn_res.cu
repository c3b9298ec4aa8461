// SPDX-License-Identifier: MIT
//
// Attention Residuals: the input of a sub-layer is a softmax-weighted sum of the banked rows and the running sum,
// followed by that sub-layer's RMS norm.  The scores take the normalised rows as keys; the sum takes the raw rows.
// With an empty bank the running sum is the only source and its weight is 1.
//
// A block per row, of one group of 256 threads for narrow rows and of two for wide ones; the groups share the sources.
// The two sums of a score, v.v and v.u: thread t of a group takes elements 4t .. 4t + 3 of each chunk of 1,024, then
// each warp, then the 8 warps ascending.  Softmax and weighted sum: sources ascending, fused.  Norm: k3_rms_row.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#endif

enum { ATTN_RES_GROUP = 256, ATTN_RES_GROUPS = 2, ATTN_RES_MAX_BANK = 128 };

#ifndef K3_LAUNCH

// Leaves in p[j] the weight of source j: row j of the bank, and s for j = n_bank.
K3_DEVICE void attn_res_weights(const float* bank, int n_bank, int64_t bank_stride, const float* s, const float* u, float eps,
                                int d, float* p /*shared*/) {
    enum { AT_ONCE = 4, WARPS = ATTN_RES_GROUP / K3_WARP, CHUNK = 4 * ATTN_RES_GROUP };
    static __shared__ float vv[ATTN_RES_MAX_BANK + 1][WARPS], vu[ATTN_RES_MAX_BANK + 1][WARPS], e[ATTN_RES_MAX_BANK + 1];
    const int t = (int)threadIdx.x, n = n_bank + 1;
    const bool wide = k3_wide(d, bank, s, u);
    for (int j = t / ATTN_RES_GROUP; j < n; j += (int)blockDim.x / ATTN_RES_GROUP) {
        const float* v = j < n_bank ? bank + j * bank_stride : s;
        float square = 0.0f, product = 0.0f;
        for (int i = 4 * (t % ATTN_RES_GROUP); i < d; i += AT_ONCE * CHUNK) {
            float4 a[AT_ONCE], b[AT_ONCE];
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) a[c] = k3_row_load(v, i + c * CHUNK, d, wide);
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) b[c] = k3_row_load(u, i + c * CHUNK, d, wide);
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) {
                square = k3_dot4(a[c], a[c], square);
                product = k3_dot4(a[c], b[c], product);
            }
        }
        square = k3_warp_sum(square);
        product = k3_warp_sum(product);
        if (k3_lane() == 0) {
            vv[j][k3_warp() % WARPS] = square;
            vu[j][k3_warp() % WARPS] = product;
        }
    }
    __syncthreads();
    if (t < n) {
        float square = 0.0f, product = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            square += vv[t][w];
            product += vu[t][w];
        }
        p[t] = product * (1.0f / m_sqrt(square / (float)d + eps));
    }
    __syncthreads();
    if (t < n) {
        float top = m_bits(0xff800000u);
        for (int j = 0; j < n; ++j) top = top < p[j] ? p[j] : top;
        e[t] = k3_exp(p[t] - top);
    }
    __syncthreads();
    if (t < n) {
        float total = 0.0f;
        for (int j = 0; j < n; ++j) total += e[j];
        p[t] = e[t] / total;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(ATTN_RES_GROUP* ATTN_RES_GROUPS, 2)
    k3_attn_res(const float* bank, int n_bank, int64_t bank_rows, const float* s, const float* u, const float* norm, float eps,
                const int32_t* take, float* keep, float* h, float* x, float* weights, int d) {
    enum { AT_ONCE = 4 };
    static __shared__ float p[ATTN_RES_MAX_BANK + 1], partial[K3_WARP];
    const int64_t r = blockIdx.x, row = take ? take[r] : r, bank_stride = bank_rows * d;
    const int t = (int)threadIdx.x;
    bank += row * d;
    s += row * d;
    x += r * d;
    if (keep) keep += r * d;
    float* mixed = h ? h + r * d : x;
    if (n_bank > 0) attn_res_weights(bank, n_bank, bank_stride, s, u, eps, d, p);
    if (weights && t <= n_bank) weights[r * (n_bank + 1) + t] = n_bank > 0 ? p[t] : 1.0f;

    const bool wide = k3_wide(d, bank, s, keep, mixed);
    for (int i = 4 * t; i < d; i += 4 * (int)blockDim.x) {
        const float4 last = k3_row_load(s, i, d, wide);
        float4 sum = last;
        for (int start = 0; start < n_bank; start += AT_ONCE) {
            float4 v[AT_ONCE];
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) {
                if (start + c < n_bank) v[c] = k3_row_load(bank + (start + c) * bank_stride, i, d, wide);
            }
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) {
                const int j = start + c;
                if (j < n_bank) sum = j == 0 ? k3_mul4(v[c], k3_all4(p[0])) : k3_fma4(v[c], k3_all4(p[j]), sum);
            }
        }
        if (n_bank > 0) sum = k3_fma4(last, k3_all4(p[n_bank]), sum);
        if (keep) k3_row_store(keep, i, d, wide, last);
        k3_row_store(mixed, i, d, wide, sum);
    }
    k3_rms_row(mixed, norm, eps, x, d, partial);       // each thread reads what it has written
}

#else

K3_KERNEL(k3_attn_res, const float*, int, int64_t, const float*, const float*, const float*, float, const int32_t*, float*,
          float*, float*, float*, int)

static int cuda_attn_res(void* ctx, const k3_dims* dims, const float* bank, int64_t n_bank, int64_t bank_rows, const float* s,
                         const float* u, const float* norm, const int32_t* take, float* keep, float* h, float* x, float* weights,
                         int64_t rows) {
    if (n_bank > ATTN_RES_MAX_BANK) return 801;  // CUDA_ERROR_NOT_SUPPORTED
    const int64_t d = dims->hidden_size;
    const unsigned threads = d > 4 * ATTN_RES_GROUP ? ATTN_RES_GROUP * ATTN_RES_GROUPS : ATTN_RES_GROUP;
    return k3_attn_res((k3_cuda*)ctx, grid(rows), threads, 0, bank, (int)n_bank, bank_rows, s, u, norm, dims->rms_norm_eps, take,
                       keep, h, x, weights, (int)d);
}

#endif
