// SPDX-License-Identifier: MIT
//
// The rotary variant of MLA (mla_use_nope false): the last rope channels of each head's query and of the shared key
// are turned by position * frequencies[i], channel i paired with channel i + rope / 2.  Not called for NoPE models.
//
// A block per row: the angles of its position once, in double, then a thread per pair of channels.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_latent.cuh"
#endif

enum { MLA_ROPE_THREADS = 256 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(MLA_ROPE_THREADS)
    k3_mla_rope(const k3_segment* segments, const int32_t* owner, const double* frequencies, float* q, float* kva, int heads,
                int nope, int rope, int kv_lora) {
    const int64_t row = blockIdx.x;
    if (owner[row] < 0) return;
    const double position = (double)latent_position(segments + owner[row], row);
    const int half = rope / 2;
    float *c = reinterpret_cast<float*>(k3_dyn), *s = c + half;        // [half] each
    for (int i = (int)threadIdx.x; i < half; i += MLA_ROPE_THREADS) k3_cos_sin(position, frequencies[i], c + i, s + i);
    __syncthreads();
    for (int at = (int)threadIdx.x; at < (heads + 1) * half; at += MLA_ROPE_THREADS) {
        const int h = at / half, i = at % half;
        float* x = h < heads ? q + (row * heads + h) * (nope + rope) + nope : kva + row * (kv_lora + rope) + kv_lora;
        const float a = x[i], b = x[i + half];
        x[i] = a * c[i] - b * s[i];
        x[i + half] = b * c[i] + a * s[i];
    }
}

#else

K3_KERNEL(k3_mla_rope, const k3_segment*, const int32_t*, const double*, float*, float*, int, int, int, int)

static int cuda_mla_rope(void* ctx, const k3_dims* dims, const k3_pass* pass, const double* frequencies, float* q, float* kva) {
    return k3_mla_rope((k3_cuda*)ctx, grid(pass->rows), MLA_ROPE_THREADS, (size_t)dims->qk_rope_head_dim * 4, pass->segments,
                       pass->owner, frequencies, q, kva, (int)dims->num_attention_heads, (int)dims->qk_nope_head_dim,
                       (int)dims->qk_rope_head_dim, (int)dims->kv_lora_rank);
}

#endif
