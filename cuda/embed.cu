// SPDX-License-Identifier: MIT
//
// The embedding row of each token, widened to float32; the caller's own row, or zeros, where the token is -1.
//
// A thread per four elements of a row: blocks (chunks of 1,024 elements, rows).

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#include "ops.h"
#endif

enum { EMBED_THREADS = 256 };

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(EMBED_THREADS)
    k3_embed(const char* table, int64_t pitch, int dtype, const int32_t* tokens, const float* embeddings, float* s, int d) {
    const int64_t row = blockIdx.y;
    const int i = 4 * (int)(blockIdx.x * EMBED_THREADS + threadIdx.x), token = tokens[row];
    if (i >= d) return;
    s += row * d;
    float4 v = k3_all4(0.0f);
    if (token >= 0) {
        const char* from = table + token * pitch;          // padded to 16 bytes, so never read past its end
        if (dtype == K3_F32) {
            v = k3_load4((const float*)from + i);
        } else {
            const uint2 pairs = *(const uint2*)(from + 2 * i);
            v = make_float4(bf16_low(pairs.x), bf16_high(pairs.x), bf16_low(pairs.y), bf16_high(pairs.y));
        }
    } else if (embeddings) {
        embeddings += row * d;
        v = k3_row_load(embeddings, i, d, k3_wide(d, embeddings));
    }
    k3_row_store(s, i, d, k3_wide(d, s), v);
}

#else

K3_KERNEL(k3_embed, const char*, int64_t, int, const int32_t*, const float*, float*, int)

static int cuda_embed(void* ctx, const k3_dims* dims, const k3_matrix* table, const int32_t* tokens, const float* embeddings,
                      float* s, int64_t rows) {
    const int64_t d = dims->hidden_size;
    return k3_embed((k3_cuda*)ctx, grid(ceil_div(d, 4 * EMBED_THREADS), rows), EMBED_THREADS, 0, (const char*)table->data,
                    table->pitch, table->dtype, tokens, embeddings, s, (int)d);
}

#endif
