// SPDX-License-Identifier: MIT
//
// MLA, last part: the value half of kv_b_proj on each head's attention result, then the sigmoid output gate.
// o[h][j] = (sum over L of Wv_h[j] * oa[h]) * sigmoid(g[h][j]).
//
// Order.  Lane l takes columns 8l .. 8l + 7 of each chunk of 256, then the sums of the lanes are added as k3_warp_sum
// adds them.
//
// A warp per head, 4 outputs and 1, 2, 4 or 8 rows: blocks (v / 32, H, rows / tile).  The weights are read once for all
// rows of the tile.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_latent.cuh"
#endif

enum { MLA_UNABSORB_THREADS = 256, MLA_UNABSORB_OUT = 4, MLA_UNABSORB_BLOCK_OUT = 32 };

struct mla_unabsorb_args {
    k3_matrix kv_b;                  // [H * (nope + v), L]
    const float *oa, *g;             // [R, H, L], [R, H, v] or NULL
    float* o;                        // [R, H, v]
    int rows, tile, nope, v, kv_lora;
};

#ifndef K3_LAUNCH

// k3_warp_sum of N values at a time, with fewer shuffles: at each step of the tree a lane keeps half of the values while
// there is more than one.  Lane l gets the sum of value l * N / 32.
template <int N> K3_DEVICE float mla_unabsorb_sums(float* v /*[N]*/) {
    int n = N;
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
        if (n > 1) {
            n /= 2;
            const bool upper = (k3_lane() & m) != 0;
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                if (i >= n) break;
                const float give = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
                v[i] = keep + __shfl_xor_sync(K3_ALL_LANES, give, m);
            }
        } else {
            v[0] += __shfl_xor_sync(K3_ALL_LANES, v[0], m);
        }
    }
    return v[0];
}

template <bool BF16, int NR> K3_DEVICE void mla_unabsorb(const mla_unabsorb_args& a) {
    enum { NO = MLA_UNABSORB_OUT, N = NR * NO };
    const int lane = (int)k3_lane(), head = (int)blockIdx.y, heads = (int)gridDim.y, L = a.kv_lora;
    const int j0 = (int)blockIdx.x * MLA_UNABSORB_BLOCK_OUT + (int)k3_warp() * NO;
    if (j0 >= a.v) return;
    const int64_t row0 = (int64_t)blockIdx.z * NR;
    const float* oa = a.oa + (row0 * heads + head) * L;                // rows heads * L apart
    const bool wide = k3_wide(L, a.oa);
    const char* weights =
        reinterpret_cast<const char*>(a.kv_b.data) + ((int64_t)head * (a.nope + a.v) + a.nope + j0) * a.kv_b.pitch;
    float acc[N] = {};                                                 // [NR, NO]
    for (int c = 8 * lane; c - 8 * lane < L; c += 8 * K3_WARP) {
        float w[NO][8];
        uint4 raw[NO][2];
#pragma unroll
        for (int j = 0; j < NO; ++j) kv_b_load<BF16>(raw[j], weights + j * a.kv_b.pitch, c, j0 + j < a.v ? L : 0);
#pragma unroll
        for (int j = 0; j < NO; ++j) kv_b_widen<BF16>(raw[j], w[j]);
#pragma unroll
        for (int m = 0; m < NR; ++m) {
            const float* x = oa + (int64_t)m * heads * L;
            const int n = row0 + m < a.rows ? L : 0;
            const float4 x0 = k3_row_load(x, c, n, wide), x1 = k3_row_load(x, c + 4, n, wide);
#pragma unroll
            for (int j = 0; j < NO; ++j) {
                float& sum = acc[m * NO + j];
                sum = k3_dot4(make_float4(w[j][0], w[j][1], w[j][2], w[j][3]), x0, sum);
                sum = k3_dot4(make_float4(w[j][4], w[j][5], w[j][6], w[j][7]), x1, sum);
            }
        }
    }
    float y = mla_unabsorb_sums<N>(acc);
    const int which = lane * N / K3_WARP, j = j0 + which % NO;
    const int64_t row = row0 + which / NO, at = (row * heads + head) * a.v + j;
    if (lane % (K3_WARP / N) != 0 || row >= a.rows || j >= a.v) return;
    if (a.g) y = y * k3_sigmoid(a.g[at]);
    a.o[at] = y;
}

template <bool BF16> K3_DEVICE void mla_unabsorb_tile(const mla_unabsorb_args& a) {
    if (a.tile == 1) mla_unabsorb<BF16, 1>(a);
    else if (a.tile == 2) mla_unabsorb<BF16, 2>(a);
    else if (a.tile == 4) mla_unabsorb<BF16, 4>(a);
    else mla_unabsorb<BF16, 8>(a);
}

extern "C" __global__ void __launch_bounds__(MLA_UNABSORB_THREADS) k3_mla_unabsorb(mla_unabsorb_args a) {
    if (a.kv_b.dtype == K3_BF16) mla_unabsorb_tile<true>(a);
    else mla_unabsorb_tile<false>(a);
}

#else

K3_KERNEL(k3_mla_unabsorb, mla_unabsorb_args)

static int cuda_mla_unabsorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* oa, const float* g, float* o,
                             int64_t rows) {
    const int tile = rows > 4 ? 8 : rows > 2 ? 4 : rows > 1 ? 2 : 1;
    const int V = (int)dims->v_head_dim;
    const mla_unabsorb_args a = {w->kv_b_proj,           oa, g, o, (int)rows, tile, (int)dims->qk_nope_head_dim, V,
                                 (int)dims->kv_lora_rank};
    return k3_mla_unabsorb((k3_cuda*)ctx,
                           grid(ceil_div(V, MLA_UNABSORB_BLOCK_OUT), dims->num_attention_heads, ceil_div(rows, tile)),
                           MLA_UNABSORB_THREADS, 0, a);
}

#endif
