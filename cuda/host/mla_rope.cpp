// SPDX-License-Identifier: MIT
//
// The rotary variant of MLA (mla_use_nope false): the last rope channels of each head's query and of the shared key
// are rotated by position * frequencies[i], which is 1 / theta^(2i / rope); is paired with channel i + rope / 2.  Not called for NoPE models.

#include "latent.h"

namespace K3_NS {

namespace {

K3_INLINE void rotate(float* x, const float* c, const float* s, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * c[i] - b * s[i];
        x[i + half] = b * c[i] + a * s[i];
    }
}

}  // namespace

int mla_rope(void*, const k3_dims* dims, const k3_pass* pass, const double* frequencies, float* q, float* kva) {
    const int64_t rope = dims->qk_rope_head_dim, half = rope / 2, H = dims->num_attention_heads;
    const int64_t qk = dims->qk_nope_head_dim + rope, W = dims->kv_lora_rank + rope;
    float c[half + 1], s[half + 1];
    for (int64_t n = 0; n < pass->n_segments; ++n) {
        const k3_segment* seg = pass->segments + n;
        for (int64_t t = 0; t < seg->rows; ++t) {
            for (int64_t i = 0; i < half; ++i) k3_cos_sin((double)(seg->position + t), frequencies[i], c + i, s + i);
            const int64_t r = seg->row + t;
            for (int64_t h = 0; h < H; ++h) rotate(q + (r * H + h) * qk + dims->qk_nope_head_dim, c, s, half);
            rotate(kva + r * W + dims->kv_lora_rank, c, s, half);
        }
    }
    return 0;
}

}  // namespace K3_NS
