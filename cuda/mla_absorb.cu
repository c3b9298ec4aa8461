// SPDX-License-Identifier: MIT
//
// MLA, absorbed form: the key half of kv_b_proj is applied to the query instead of to every cached row.
// qa[h] = [sum over nope channels r of q[r] * Wk_h[r] | q_rope | zeros].
//
// Order.  The channels fall into 8 shares of neighbours, one a warp; a share is summed ascending, and so are the shares.
//
// A block per head, 256 columns and 1, 2, 4 or 8 rows: blocks (H, L / 256, rows / tile).  A lane holds 8 columns, so that
// a warp reads whole lines of a row of weights, once for all rows of the tile.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_latent.cuh"
#endif

enum { MLA_ABSORB_WARPS = 8, MLA_ABSORB_COLUMNS = 256, MLA_ABSORB_THREADS = 256 };

struct mla_absorb_args {
    k3_matrix kv_b;                  // [H * (nope + v), L]
    const float* q;                  // [R, H, nope + rope]
    float* qa;                       // [R, H, stride]
    int rows, tile, nope, rope, v, kv_lora, stride;
};

#ifndef K3_LAUNCH

template <bool BF16, int NR> K3_DEVICE void mla_absorb(const mla_absorb_args& a, float* partial /*[8, 256]*/) {
    enum { AT_ONCE = NR > 2 ? 4 : 8 };                                 // rows of weights in flight
    const int t = (int)threadIdx.x, warp = (int)k3_warp(), head = (int)blockIdx.x, heads = (int)gridDim.x;
    const int c0 = (int)blockIdx.y * MLA_ABSORB_COLUMNS, column = c0 + 8 * (int)k3_lane();
    const int row0 = (int)blockIdx.z * NR, rows = min(NR, a.rows - row0), qk = a.nope + a.rope;
    const int64_t at = (int64_t)row0 * heads + head;
    const float* q = a.q + at * qk;                                    // rows heads * qk apart
    float* qa = a.qa + at * a.stride;                                  // rows heads * stride apart

    float* queries = reinterpret_cast<float*>(k3_dyn);                 // [NR, nope]
    for (int i = t; i < NR * a.nope; i += MLA_ABSORB_THREADS) {
        const int m = i / a.nope, r = i % a.nope;
        queries[i] = m < rows ? q[(int64_t)m * heads * qk + r] : 0.0f;
    }
    __syncthreads();

    const char* weights = reinterpret_cast<const char*>(a.kv_b.data) + (int64_t)head * (a.nope + a.v) * a.kv_b.pitch;
    const int share = (a.nope + MLA_ABSORB_WARPS - 1) / MLA_ABSORB_WARPS, end = min(a.nope, (warp + 1) * share);
    float acc[NR][8] = {};
    for (int r = warp * share; r < end; r += AT_ONCE) {
        uint4 raw[AT_ONCE][2];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u)
            kv_b_load<BF16>(raw[u], weights + (r + u) * a.kv_b.pitch, column, r + u < end ? a.kv_lora : 0);
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            if (r + u >= end) break;
            float w[8];
            kv_b_widen<BF16>(raw[u], w);
#pragma unroll
            for (int m = 0; m < NR; ++m) {
                const float x = queries[m * a.nope + r + u];
#pragma unroll
                for (int e = 0; e < 8; ++e) acc[m][e] = m_fma(x, w[e], acc[m][e]);
            }
        }
    }

#pragma unroll
    for (int m = 0; m < NR; ++m) {
        if (m >= rows) break;
        float* mine = partial + warp * MLA_ABSORB_COLUMNS + 8 * k3_lane();
        k3_store4(mine, make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]));
        k3_store4(mine + 4, make_float4(acc[m][4], acc[m][5], acc[m][6], acc[m][7]));
        __syncthreads();
        float sum = partial[t];
#pragma unroll
        for (int w = 1; w < MLA_ABSORB_WARPS; ++w) sum += partial[w * MLA_ABSORB_COLUMNS + t];
        if (c0 + t < a.kv_lora) qa[(int64_t)m * heads * a.stride + c0 + t] = sum;
        __syncthreads();                                               // before the next row is written there
    }

    const int tail = a.stride - a.kv_lora;
    for (int i = t; c0 == 0 && i < rows * tail; i += MLA_ABSORB_THREADS) {
        const int m = i / tail, c = i % tail;
        qa[(int64_t)m * heads * a.stride + a.kv_lora + c] = c < a.rope ? q[(int64_t)m * heads * qk + a.nope + c] : 0.0f;
    }
}

template <bool BF16> K3_DEVICE void mla_absorb_tile(const mla_absorb_args& a, float* partial) {
    if (a.tile == 1) mla_absorb<BF16, 1>(a, partial);
    else if (a.tile == 2) mla_absorb<BF16, 2>(a, partial);
    else if (a.tile == 4) mla_absorb<BF16, 4>(a, partial);
    else mla_absorb<BF16, 8>(a, partial);
}

extern "C" __global__ void __launch_bounds__(MLA_ABSORB_THREADS) k3_mla_absorb(mla_absorb_args a) {
    static __shared__ __align__(16) float partial[MLA_ABSORB_WARPS * MLA_ABSORB_COLUMNS];
    if (a.kv_b.dtype == K3_BF16) mla_absorb_tile<true>(a, partial);
    else mla_absorb_tile<false>(a, partial);
}

#else

K3_KERNEL(k3_mla_absorb, mla_absorb_args)

static int cuda_mla_absorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* q, float* qa, int64_t rows) {
    const int tile = rows > 4 ? 8 : rows > 2 ? 4 : rows > 1 ? 2 : 1;
    const int nope = (int)dims->qk_nope_head_dim, L = (int)dims->kv_lora_rank;
    const mla_absorb_args a = {w->kv_b_proj,
                               q,
                               qa,
                               (int)rows,
                               tile,
                               nope,
                               (int)dims->qk_rope_head_dim,
                               (int)dims->v_head_dim,
                               L,
                               (int)dims->latent_stride};
    return k3_mla_absorb((k3_cuda*)ctx, grid(dims->num_attention_heads, ceil_div(L, MLA_ABSORB_COLUMNS), ceil_div(rows, tile)),
                         MLA_ABSORB_THREADS, (size_t)tile * nope * 4, a);
}

#endif
