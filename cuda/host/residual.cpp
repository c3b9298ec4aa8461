// SPDX-License-Identifier: MIT
//
// The running sum, and the finite check of the numeric contract: for each segment the lowest sub-layer with a NaN or
// an infinity is noted where the sum is formed, so that nothing is read twice and nothing is synchronised for it.

#include "latent.h"

namespace K3_NS {

namespace {

K3_INLINE void note(const k3_pass* pass, int64_t segment, int32_t sublayer) {
    if (sublayer < pass->bad_sublayer[segment]) pass->bad_sublayer[segment] = sublayer;
}

}  // namespace

int residual(void*, const k3_pass* pass, float* s, const float* a, const float* b, int32_t restart, int32_t sublayer, int64_t d) {
    for (int64_t n = 0; n < pass->n_segments; ++n) {
        const k3_segment* seg = pass->segments + n;
        const int64_t end = (seg->row + seg->rows) * d;
        vf worst = vf(0.0f);                              // the sum of x * 0: zero unless some x is not finite
        for (int64_t i = seg->row * d; i < end; i += 16) {
            const int64_t k = min64(16, end - i);
            vf x = v_load_n(a + i, k);
            if (b) x = x + v_load_n(b + i, k);
            if (!restart) x = v_load_n(s + i, k) + x;
            v_store_n(s + i, x, k);
            worst = m_fma(x, vf(0.0f), worst);
        }
        if (v_sum(worst) != 0.0f) note(pass, n, sublayer);
    }
    return 0;
}

int finite(void*, const k3_pass* pass, const float* x, const int32_t* owner, int32_t sublayer, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; ++r) {
        if (owner[r] < 0) continue;
        vf worst = vf(0.0f);
        for (int64_t i = 0; i < n; i += 16) worst = m_fma(v_load_n(x + r * n + i, min64(16, n - i)), vf(0.0f), worst);
        if (v_sum(worst) != 0.0f) note(pass, owner[r], sublayer);
    }
    return 0;
}

}  // namespace K3_NS
