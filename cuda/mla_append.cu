// SPDX-License-Identifier: MIT
//
// Normalises the latent part of each new row and writes [c | k_r | zeros] to the session's pages.  With a BF16 cache
// the row is rounded here, once, so that what is stored is what every later token uses.
//
// A block per row.  The sum of squares: thread t takes columns 4t .. 4t + 3 of each chunk of 512, then the block.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_latent.cuh"
#endif

enum { MLA_APPEND_THREADS = 128 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(MLA_APPEND_THREADS)
    k3_mla_append(const k3_segment* segments, const int32_t* owner, int64_t layer, const float* kva, const float* norm, float eps,
                  int kv_lora, int rope, int stride) {
    static __shared__ float partial[K3_WARP];
    const int64_t row = blockIdx.x;
    if (owner[row] < 0) return;
    const k3_segment* seg = segments + owner[row];
    const int width = kv_lora + rope, t = (int)threadIdx.x;
    const float* in = kva + row * width;
    const bool wide = k3_wide(kv_lora, in);
    float sum = 0.0f;
    for (int i = 4 * t; i < kv_lora; i += 4 * MLA_APPEND_THREADS) {
        const float4 v = k3_row_load(in, i, kv_lora, wide);
        sum = k3_dot4(v, v, sum);
    }
    const float inv = 1.0f / m_sqrt(k3_block_sum(sum, partial) / (float)kv_lora + eps);

    char* out = latent_row(seg, layer, stride, latent_position(seg, row));
    for (int i = t; i < stride; i += MLA_APPEND_THREADS) {
        const float x = i < kv_lora ? (in[i] * inv) * norm[i] : i < width ? in[i] : 0.0f;
        if (seg->latent_dtype == K3_BF16) reinterpret_cast<k3_bf16*>(out)[i] = f32_to_bf16(x);
        else reinterpret_cast<float*>(out)[i] = x;
    }
}

#else

K3_KERNEL(k3_mla_append, const k3_segment*, const int32_t*, int64_t, const float*, const float*, float, int, int, int)

static int cuda_mla_append(void* ctx, const k3_dims* dims, const k3_mla* w, const k3_pass* pass, int64_t mixer_index,
                           const float* kva) {
    return k3_mla_append((k3_cuda*)ctx, grid(pass->rows), MLA_APPEND_THREADS, 0, pass->segments, pass->owner, mixer_index, kva,
                         w->kv_a_layernorm, dims->mla_latent_norm_eps, (int)dims->kv_lora_rank, (int)dims->qk_rope_head_dim,
                         (int)dims->latent_stride);
}

#endif
