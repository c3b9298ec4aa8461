// SPDX-License-Identifier: MIT
//
// RMS norm of each row, with an eps of its own: the latent norms of MLA use 1e-6 where the layers use 1e-5.
//
// A block per row.  The sum of squares: thread t takes elements 4t .. 4t + 3 of each chunk of 1,024, then the block.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#endif

enum { RMS_NORM_THREADS = 256 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(RMS_NORM_THREADS)
    k3_rms_norm(const float* x, int64_t ldx, const float* norm, float eps, float* y, int64_t ldy, int n) {
    static __shared__ float partial[K3_WARP];
    k3_rms_row(x + blockIdx.x * ldx, norm, eps, y + blockIdx.x * ldy, n, partial);
}

#else

K3_KERNEL(k3_rms_norm, const float*, int64_t, const float*, float, float*, int64_t, int)

static int cuda_rms_norm(void* ctx, const float* x, int64_t ldx, const float* norm, float eps, float* y, int64_t ldy,
                         int64_t rows, int64_t n) {
    return k3_rms_norm((k3_cuda*)ctx, grid(rows), RMS_NORM_THREADS, 0, x, ldx, norm, eps, y, ldy, (int)n);
}

#endif
