// SPDX-License-Identifier: MIT
//
// KDA, the gates: the decay factor of each key channel and the write strength of each head.
//
// With gate_lower_bound (K3: -5) the log decay is bound * sigmoid(e^A z), z = f + dt_bias; without it (Kimi Linear)
// it is -e^A softplus(z).  The bound is part of the formula, not a clamp.
//
// A thread per gate, the C decay factors of a row and then its H write strengths: blocks (256 gates, rows).

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_prim.cuh"
#endif

enum { KDA_GATES_THREADS = 256 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(KDA_GATES_THREADS)
    k3_kda_gates(float* f, float* b, const float* A, const float* dt_bias, float lower_bound, int heads, int dim) {
    const int64_t row = blockIdx.y;
    const int i = (int)(blockIdx.x * KDA_GATES_THREADS + threadIdx.x), channels = heads * dim;
    if (i < channels) {
        f += row * channels + i;
        const float z = *f + dt_bias[i], a = A[i / dim];
        *f = k3_exp(lower_bound < 0.0f ? lower_bound * k3_sigmoid(a * z) : (0.0f - a) * k3_softplus(z));
    } else if (i < channels + heads) {
        b += row * heads + (i - channels);
        *b = k3_sigmoid(*b);
    }
}

#else

K3_KERNEL(k3_kda_gates, float*, float*, const float*, const float*, float, int, int)

static int cuda_kda_gates(void* ctx, const k3_dims* dims, const k3_kda* w, float* f, float* b, int64_t rows) {
    const int64_t gates = dims->kda_num_heads * (dims->kda_head_k + 1);
    return k3_kda_gates((k3_cuda*)ctx, grid(ceil_div(gates, KDA_GATES_THREADS), rows), KDA_GATES_THREADS, 0, f, b, w->A,
                        w->dt_bias, dims->gate_lower_bound, (int)dims->kda_num_heads, (int)dims->kda_head_k);
}

#endif
