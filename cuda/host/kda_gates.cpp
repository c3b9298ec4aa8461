// SPDX-License-Identifier: MIT
//
// KDA, the gates: the decay factor of each key channel and the write strength of each head.
//
// With gate_lower_bound (K3: -5) the log decay is bound * sigmoid(e^A z), z = f + dt_bias; without it (Kimi Linear)
// it is -e^A softplus(z).  The bound is part of the formula, not a clamp.

#include "norm.h"

namespace K3_NS {

int kda_gates(void*, const k3_dims* dims, const k3_kda* w, float* f, float* b, int64_t rows) {
    const int64_t H = dims->kda_num_heads, D = dims->kda_head_k, C = H * D;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t h = 0; h < H; ++h) {
            float* z = f + r * C + h * D;
            const float* bias = w->dt_bias + h * D;
            const float A = w->A[h];
            for (int64_t c = 0; c < D; c += 16) {
                const int64_t n = min64(16, D - c);
                const vf x = v_load_n(z + c, n) + v_load_n(bias + c, n);
                vf g;
                if (dims->gate_lower_bound < 0.0f) {
                    g = vf(dims->gate_lower_bound) * k3_sigmoid(vf(A) * x);
                } else {
                    float t[16];
                    v_store(t, x);
                    for (int i = 0; i < 16; ++i) t[i] = (0.0f - A) * k3_softplus(t[i]);
                    g = v_load(t);
                }
                v_store_n(z + c, k3_exp(g), n);
            }
        }
        for (int64_t h = 0; h < H; ++h) b[r * H + h] = k3_sigmoid(b[r * H + h]);
    }
    return 0;
}

}  // namespace K3_NS
