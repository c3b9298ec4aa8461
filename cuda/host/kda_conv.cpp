// SPDX-License-Identifier: MIT
//
// KDA, first part: the short convolution over time with SiLU, then q and k to unit length per head.
//
// The windows hold the last K - 1 raw projections, oldest first, so that tap j of row t meets raw row
// t - (K - 1) + j: from the window while that is before the segment, from the segment's own rows after.
// A piece is one head of one segment: its channels, all rows.

#include "norm.h"

namespace K3_NS {

namespace {

struct Run {
    const k3_dims* dims;
    const k3_kda* w;
    const k3_pass* pass;
    int64_t mixer_index;
    const float* raw[3];              // q, k, v: [R, C]
    float* out[3];
};

void piece(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const k3_dims* dims = run->dims;
    const int64_t H = dims->kda_num_heads, D = dims->kda_head_k, K = dims->conv_kernel, C = H * D;
    const k3_segment* seg = run->pass->segments + i / H;
    const int64_t c0 = (i % H) * D;
    const float* now = seg->now.conv + run->mixer_index * dims->conv_stride;
    float* next = seg->next.conv + run->mixer_index * dims->conv_stride;
    for (int64_t which = 0; which < 3; ++which) {
        const float* raw = run->raw[which] + seg->row * C;
        const float* window = now + which * (K - 1) * C;
        const float* taps = run->w->conv1d + which * K * C;
        for (int64_t t = 0; t < seg->rows; ++t) {
            float* out = run->out[which] + (seg->row + t) * C + c0;
            for (int64_t c = 0; c < D; c += 16) {
                const int64_t n = min64(16, D - c), at = c0 + c;
                vf acc = vf(0.0f);
                for (int64_t j = 0; j < K; ++j) {
                    const int64_t back = t - (K - 1) + j;
                    const float* in = back < 0 ? window + (back + K - 1) * C : raw + back * C;
                    acc = m_fma(v_load_n(taps + j * C + at, n), v_load_n(in + at, n), acc);
                }
                v_store_n(out + c, k3_silu(acc), n);
            }
            if (which == 2) continue;                     // v is not normalised
            const float inv = 1.0f / m_sqrt(dot_plain(out, out, D) + 1e-6f);   // eps on the sum, not on the mean
            const float scale = which == 0 ? inv * (1.0f / m_sqrt((float)D)) : inv;
            for (int64_t c = 0; c < D; c += 16) {
                const int64_t n = min64(16, D - c);
                v_store_n(out + c, v_load_n(out + c, n) * vf(scale), n);
            }
        }
        for (int64_t j = 0; j < K - 1; ++j) {             // the last K - 1 raw rows, old window included
            const int64_t back = seg->rows - (K - 1) + j;
            const float* in = back < 0 ? window + (back + K - 1) * C : raw + back * C;
            memcpy(next + (which * (K - 1) + j) * C + c0, in + c0, (size_t)D * 4);
        }
    }
}

}  // namespace

int kda_conv(void* ctx, const k3_dims* dims, const k3_kda* w, const k3_pass* pass, int64_t mixer_index, const float* q_raw,
             const float* k_raw, const float* v_raw, float* q, float* k, float* v) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    Run run = {dims, w, pass, mixer_index, {q_raw, k_raw, v_raw}, {q, k, v}};
    const int64_t pieces = pass->n_segments * dims->kda_num_heads;
    if (pass->rows * dims->kda_num_heads * dims->kda_head_k < 16384)
        for (int64_t i = 0; i < pieces; ++i) piece(&run, i);
    else each(cpu, pieces, piece, &run);
    return 0;
}

}  // namespace K3_NS
