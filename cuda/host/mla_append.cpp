// SPDX-License-Identifier: MIT
//
// Normalises the latent part of each new row and writes [c | k_r] to the session's pages.  With a BF16 cache the row
// is rounded here, once, so that what is stored is what every later token uses.

#include "latent.h"
#include "norm.h"

namespace K3_NS {

int mla_append(void*, const k3_dims* dims, const k3_mla* w, const k3_pass* pass, int64_t mixer_index, const float* kva) {
    const int64_t L = dims->kv_lora_rank, W = L + dims->qk_rope_head_dim, stride = dims->latent_stride;
    float row[stride];
    for (int64_t n = 0; n < pass->n_segments; ++n) {
        const k3_segment* seg = pass->segments + n;
        for (int64_t t = 0; t < seg->rows; ++t) {
            const float* in = kva + (seg->row + t) * W;
            char* out = latent_row(dims, seg, mixer_index, seg->position + t);
            rms_row(in, w->kv_a_layernorm, dims->mla_latent_norm_eps, row, L);
            memcpy(row + L, in + L, (size_t)(W - L) * 4);
            memset(row + W, 0, (size_t)(stride - W) * 4);
            if (seg->latent_dtype == K3_BF16) {
                uint16_t* h = (uint16_t*)out;
                for (int64_t i = 0; i < stride; ++i) h[i] = f32_to_bf16(row[i]);
            } else {
                memcpy(out, row, (size_t)stride * 4);
            }
        }
    }
    return 0;
}

}  // namespace K3_NS
