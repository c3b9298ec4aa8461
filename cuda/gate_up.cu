// SPDX-License-Identifier: MIT
//
// h = SiTU(x Wgate^T, x Wup^T): both products and the activation in one kernel, for the dense MLP and the shared
// experts.  The order of summation, and the tiles, are those of k3_dot.cuh.
//
// One-dimensional grid: the tiles of outputs, and of each the tiles of rows, next to each other.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_prim.cuh"
#endif
#include "k3_dot.cuh"

struct gate_up_job {
    k3_matrix gate, up;
    const float* x;                                                    // [rows, cols]
    float* h;                                                          // [rows, outs]
    float beta, linear_beta;
    int rows;
};

#ifndef K3_LAUNCH

template <int NO, int NR, bool MXFP4> K3_DEVICE void gate_up_tile(const gate_up_job& job) {
    static __shared__ k3_tile<NR> tile;
    const int of_rows = (job.rows + NR - 1) / NR, t = (int)threadIdx.x, row = (int)blockIdx.x % of_rows * NR + t;
    if (t < NR) {
        tile.x[t] = row < job.rows ? job.x + row * job.gate.cols : nullptr;
        tile.y[t] = row < job.rows ? job.h + row * job.gate.rows : nullptr;
    }
    if (t == K3_WARP) {
        tile.w[0] = job.gate;
        tile.w[1] = job.up;
        tile.number = (int)blockIdx.x / of_rows;
        tile.wide = k3_rows_are_wide(job.x, job.gate.cols);
    }
    k3_situ_product<NO, NR, MXFP4>(tile, job.beta, job.linear_beta);
}

#define GATE_UP(NO, NR)                                                                 \
    extern "C" __global__ void __launch_bounds__(K3_DOT_THREADS, K3_DOT_BLOCKS(NO, NR)) \
        k3_gate_up_##NO##x##NR(const gate_up_job job) {                                 \
        gate_up_tile<NO, NR, false>(job);                                               \
    }
#define GATE_UP_MXFP4(NO, NR)                                                                 \
    extern "C" __global__ void __launch_bounds__(K3_DOT_THREADS, K3_DOT_MXFP4_BLOCKS(NO, NR)) \
        k3_gate_up_mxfp4_##NO##x##NR(const gate_up_job job) {                                 \
        gate_up_tile<NO, NR, true>(job);                                                      \
    }
K3_DOT_TILES(GATE_UP)
K3_DOT_MXFP4_TILES(GATE_UP_MXFP4)

#else

#define GATE_UP(NO, NR) K3_KERNEL(k3_gate_up_##NO##x##NR, gate_up_job)
#define GATE_UP_MXFP4(NO, NR) K3_KERNEL(k3_gate_up_mxfp4_##NO##x##NR, gate_up_job)
K3_DOT_TILES(GATE_UP)
K3_DOT_MXFP4_TILES(GATE_UP_MXFP4)

static int cuda_gate_up(void* ctx, const k3_dims* dims, const k3_matrix* gate, const k3_matrix* up, const float* x, float* h,
                        int64_t rows) {
    k3_cuda* c = (k3_cuda*)ctx;
    const gate_up_job job = {*gate, *up, x, h, dims->situ_beta, dims->situ_linear_beta, (int)rows};
    const bool mxfp4 = gate->dtype == K3_MXFP4 || up->dtype == K3_MXFP4;
    const k3_dot_tile t = k3_choose_tile(gate->rows, rows, mxfp4 ? K3_MXFP4 : gate->dtype == up->dtype ? gate->dtype : K3_F32);
    const k3_grid g = grid(ceil_div(gate->rows, K3_DOT_WARPS * t.outs) * t.of_rows);
#define GATE_UP_CASE(NO, NR) \
    if (!mxfp4 && t.outs == NO && t.rows == NR) return k3_gate_up_##NO##x##NR(c, g, K3_DOT_THREADS, t.shared, job);
#define GATE_UP_MXFP4_CASE(NO, NR) \
    if (mxfp4 && t.outs == NO && t.rows == NR) return k3_gate_up_mxfp4_##NO##x##NR(c, g, K3_DOT_THREADS, t.shared, job);
    K3_DOT_TILES(GATE_UP_CASE)
    K3_DOT_MXFP4_TILES(GATE_UP_MXFP4_CASE)
    return K3_UNSUPPORTED;
}

#endif
#undef GATE_UP
#undef GATE_UP_MXFP4
