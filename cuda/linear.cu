// SPDX-License-Identifier: MIT
//
// y = x W^T for several matrices in one launch.  The order of summation, and the tiles, are those of k3_dot.cuh.
//
// One-dimensional grid: the tiles of outputs of each matrix in turn, and of each the tiles of rows, next to each other,
// so that they find the same weights in the second-level cache.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_prim.cuh"
#endif
#include "k3_dot.cuh"

enum { LINEAR_JOBS = 16 };

struct linear_job {
    k3_matrix w;
    const float* x;
    float* y;
    int64_t ldx, ldy;
};
struct linear_jobs {
    linear_job job[LINEAR_JOBS];
    int first[LINEAR_JOBS];                                                // tile of outputs
    int n, rows;
};

#ifndef K3_LAUNCH

template <int NO, int NR, bool MXFP4> K3_DEVICE void linear_tile(const linear_jobs& jobs) {
    static __shared__ k3_tile<NR> tile;
    const int of_rows = (jobs.rows + NR - 1) / NR, t = (int)threadIdx.x;
    const int outs = (int)blockIdx.x / of_rows, row = (int)blockIdx.x % of_rows * NR + t;
    int j = 0;
    while (j + 1 < jobs.n && jobs.first[j + 1] <= outs) ++j;
    const linear_job& job = jobs.job[j];
    if (t < NR) {
        tile.x[t] = row < jobs.rows ? job.x + row * job.ldx : nullptr;
        tile.y[t] = row < jobs.rows ? job.y + row * job.ldy : nullptr;
    }
    if (t == K3_WARP) {
        tile.w[0] = job.w;
        tile.number = outs - jobs.first[j];
        tile.wide = k3_rows_are_wide(job.x, job.ldx);
    }
    k3_product<NO, NR, MXFP4>(tile);
}

#define LINEAR(NO, NR)                                                                  \
    extern "C" __global__ void __launch_bounds__(K3_DOT_THREADS, K3_DOT_BLOCKS(NO, NR)) \
        k3_linear_##NO##x##NR(const linear_jobs jobs) {                                 \
        linear_tile<NO, NR, false>(jobs);                                               \
    }
#define LINEAR_MXFP4(NO, NR)                                                                  \
    extern "C" __global__ void __launch_bounds__(K3_DOT_THREADS, K3_DOT_MXFP4_BLOCKS(NO, NR)) \
        k3_linear_mxfp4_##NO##x##NR(const linear_jobs jobs) {                                 \
        linear_tile<NO, NR, true>(jobs);                                                      \
    }
K3_DOT_TILES(LINEAR)
K3_DOT_MXFP4_TILES(LINEAR_MXFP4)

#else

#define LINEAR(NO, NR) K3_KERNEL(k3_linear_##NO##x##NR, linear_jobs)
#define LINEAR_MXFP4(NO, NR) K3_KERNEL(k3_linear_mxfp4_##NO##x##NR, linear_jobs)
K3_DOT_TILES(LINEAR)
K3_DOT_MXFP4_TILES(LINEAR_MXFP4)

// On tensor cores, where activations may be split (linear_mma.cu).
static bool linear_mma_takes(const k3_cuda* c, const k3_linear_job* job, int64_t rows);
static int linear_mma(k3_cuda* c, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows);

// One launch, of the jobs whose weights are MXFP4 or of the others.
static int linear_launch(k3_cuda* c, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows, bool mxfp4) {
    linear_jobs mine = {};
    int64_t outs = 0, tiles = 0;
    int dtype = K3_BF16;
    for (int64_t j = 0; j < n_jobs; ++j) {
        const k3_matrix* w = jobs[j].w;
        if ((w->dtype == K3_MXFP4) != mxfp4 || linear_mma_takes(c, &jobs[j], rows)) continue;
        if (mine.n == LINEAR_JOBS) return K3_UNSUPPORTED;
        mine.job[mine.n++] = {*w, jobs[j].x, jobs[j].y, jobs[j].ldx, jobs[j].ldy};
        outs += w->rows;
        if (w->dtype != K3_BF16) dtype = w->dtype;
    }
    if (mine.n == 0 || rows == 0) return 0;
    const k3_dot_tile t = k3_choose_tile(outs, rows, dtype);
    for (int j = 0; j < mine.n; ++j) {
        mine.first[j] = (int)tiles;
        tiles += ceil_div(mine.job[j].w.rows, K3_DOT_WARPS * t.outs);
    }
    mine.rows = (int)rows;
    const k3_grid g = grid(tiles * t.of_rows);
#define LINEAR_CASE(NO, NR) \
    if (!mxfp4 && t.outs == NO && t.rows == NR) return k3_linear_##NO##x##NR(c, g, K3_DOT_THREADS, t.shared, mine);
#define LINEAR_MXFP4_CASE(NO, NR) \
    if (mxfp4 && t.outs == NO && t.rows == NR) return k3_linear_mxfp4_##NO##x##NR(c, g, K3_DOT_THREADS, t.shared, mine);
    K3_DOT_TILES(LINEAR_CASE)
    K3_DOT_MXFP4_TILES(LINEAR_MXFP4_CASE)
    return K3_UNSUPPORTED;
}

static int cuda_linear(void* ctx, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows) {
    k3_cuda* c = (k3_cuda*)ctx;
    int bad = linear_mma(c, jobs, n_jobs, rows);
    bad |= linear_launch(c, jobs, n_jobs, rows, false);
    return bad | linear_launch(c, jobs, n_jobs, rows, true);
}

#endif
#undef LINEAR
#undef LINEAR_MXFP4
