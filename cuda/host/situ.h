// SPDX-License-Identifier: MIT
//
// A block of SiTU-GLU hidden values: shared by gate_up and the routed experts.

#ifndef K3_SITU_H
#define K3_SITU_H

#include "dot.h"

namespace K3_NS {

enum { K3_SITU_ROWS = 32, K3_SITU_TILE = 64 };     // hidden values, and rows of x, in one block

// h[m][0 .. n) = SiTU of hidden values r0 .. r0 + n of gate and up for the prepared inputs of `count` rows.
static inline void situ_block(const k3_matrix* gate, const k3_matrix* up, int64_t r0, int64_t n, const float* const* xg,
                              const float* const* xu, float* const* h, int64_t count, float beta, float linear_beta,
                              Inputs how_gate, Inputs how_up) {
    float g[K3_SITU_TILE][K3_SITU_ROWS] __attribute__((aligned(64)));
    float u[K3_SITU_TILE][K3_SITU_ROWS] __attribute__((aligned(64)));
    float *gp[K3_SITU_TILE], *upp[K3_SITU_TILE];
    for (int64_t m = 0; m < count; ++m) {
        gp[m] = g[m];
        upp[m] = u[m];
    }
    ask_for(up, r0);
    multiply(gate, r0, r0 + n, xg, gp, count, how_gate);
    multiply(up, r0, r0 + n, xu, upp, count, how_up);
    for (int64_t m = 0; m < count; ++m)
        for (int64_t c = 0; c < n; c += 16) {
            const int64_t k = min64(16, n - c);
            const vf y = k3_situ(v_load_n(g[m] + c, k), v_load_n(u[m] + c, k), vf(beta), vf(linear_beta));
            v_store_n(h[m] + c, y, k);
        }
}

}  // namespace K3_NS
#endif
