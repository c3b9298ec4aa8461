// SPDX-License-Identifier: MIT
//
// KDA, last part: RMS norm of each head's output with one weight for all heads, times sigmoid of the full-rank gate.

#include "norm.h"

namespace K3_NS {

namespace {

struct Run {
    const k3_dims* dims;
    const k3_kda* w;
    float* o;
    const float* g;
};

void piece(void* arg, int64_t r) {
    const Run* run = (const Run*)arg;
    const int64_t H = run->dims->kda_num_heads, V = run->dims->kda_head_v;
    for (int64_t h = 0; h < H; ++h) {
        float* o = run->o + (r * H + h) * V;
        const float* g = run->g + (r * H + h) * V;
        rms_row(o, run->w->o_norm, run->dims->rms_norm_eps, o, V);
        for (int64_t c = 0; c < V; c += 16) {
            const int64_t n = min64(16, V - c);
            v_store_n(o + c, v_load_n(o + c, n) * k3_sigmoid(v_load_n(g + c, n)), n);
        }
    }
}

}  // namespace

int kda_output(void* ctx, const k3_dims* dims, const k3_kda* w, float* o, const float* g, int64_t rows) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    Run run = {dims, w, o, g};
    if (rows < 4)
        for (int64_t r = 0; r < rows; ++r) piece(&run, r);
    else each(cpu, rows, piece, &run);
    return 0;
}

}  // namespace K3_NS
