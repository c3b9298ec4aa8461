// SPDX-License-Identifier: MIT
//
// The router.  Scores are sigmoid(logits) in float32; the bias takes part in the choice only.  Among equals the
// lowest id wins, on every device and for every number of rows.  A NaN anywhere in a row's logits makes its weights
// NaN, so that it is seen at the next residual instead of choosing some expert in silence.

#include "norm.h"

namespace K3_NS {

namespace {

void one_row(const k3_dims* dims, const float* logits, const float* bias, int32_t* ids, float* weights) {
    const int64_t E = dims->num_experts, T = dims->num_experts_per_token;
    float best[T];                    // score + bias of the chosen so far, descending; ties keep the lower id in front
    int64_t n = 0;
    bool nan = false;
    for (int64_t e0 = 0; e0 < E; e0 += 16) {
        float s[16];
        const int64_t count = min64(16, E - e0);
        v_store(s, k3_sigmoid(v_load_n(logits + e0, count)) + v_load_n(bias + e0, count));
        for (int64_t j = 0; j < count; ++j) {
            if (s[j] != s[j]) nan = true;
            if (n == T && !(best[n - 1] < s[j])) continue;
            int64_t at = n < T ? n++ : n - 1;
            for (; at > 0 && best[at - 1] < s[j]; --at) {
                best[at] = best[at - 1];
                ids[at] = ids[at - 1];
            }
            best[at] = s[j];
            ids[at] = (int32_t)(e0 + j);
        }
    }
    for (int64_t i = 1; i < T; ++i)   // ascending ids: the order in which the experts are summed
        for (int64_t j = i; j > 0 && ids[j] < ids[j - 1]; --j) {
            const int32_t t = ids[j];
            ids[j] = ids[j - 1];
            ids[j - 1] = t;
        }
    float total = 0.0f;
    for (int64_t i = 0; i < T; ++i) {
        weights[i] = k3_sigmoid(logits[ids[i]]);
        total = total + weights[i];
    }
    for (int64_t i = 0; i < T; ++i) {
        if (dims->moe_renormalize) weights[i] = weights[i] / (total + 1e-20f);
        weights[i] = weights[i] * dims->routed_scaling_factor;
        if (nan) weights[i] = m_bits(0x7fc00000u);
    }
}

}  // namespace

int route(void*, const k3_dims* dims, const float* logits, const float* bias, int32_t* ids, float* weights, int64_t rows) {
    const int64_t E = dims->num_experts, T = dims->num_experts_per_token;
    for (int64_t r = 0; r < rows; ++r) one_row(dims, logits + r * E, bias, ids + r * T, weights + r * T);
    return 0;
}

}  // namespace K3_NS
