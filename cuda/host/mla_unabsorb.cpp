// SPDX-License-Identifier: MIT
//
// MLA, last part: the value half of kv_b_proj on each head's attention result, then the sigmoid output gate.
// A piece is one head, all rows.

#include "dot.h"

namespace K3_NS {

namespace {

enum { TILE = 32 };

struct Run {
    const k3_dims* dims;
    const k3_matrix* kv_b;
    const float *oa, *g;
    float *o, *x;                     // x: [R * H, padded kv_lora] prepared inputs
    int64_t rows;
};

void piece(void* arg, int64_t h) {
    const Run* run = (const Run*)arg;
    const k3_dims* dims = run->dims;
    const int64_t L = dims->kv_lora_rank, H = dims->num_attention_heads, V = dims->v_head_dim, ld = padded(L);
    const int64_t first = h * (dims->qk_nope_head_dim + V) + dims->qk_nope_head_dim;
    for (int64_t m0 = 0; m0 < run->rows; m0 += TILE) {
        const int64_t count = min64(TILE, run->rows - m0);
        const float* x[TILE];
        float* y[TILE];
        for (int64_t m = 0; m < count; ++m) {
            const int64_t at = (m0 + m) * H + h;
            prepare_row(run->oa + at * L, L, run->kv_b->dtype, run->x + at * ld, INPUTS_EXACT);
            x[m] = run->x + at * ld;
            y[m] = run->o + at * V;
        }
        multiply(run->kv_b, first, first + V, x, y, count);
        for (int64_t m = 0; run->g && m < count; ++m) {
            const float* g = run->g + ((m0 + m) * H + h) * V;
            for (int64_t c = 0; c < V; c += 16) {
                const int64_t n = min64(16, V - c);
                v_store_n(y[m] + c, v_load_n(y[m] + c, n) * k3_sigmoid(v_load_n(g + c, n)), n);
            }
        }
    }
}

}  // namespace

int mla_unabsorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* oa, const float* g, float* o, int64_t rows) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    const int64_t H = dims->num_attention_heads;
    if (rows * H * padded(dims->kv_lora_rank) > cpu->x_floats) return 1;
    Run run = {dims, &w->kv_b_proj, oa, g, o, cpu->x, rows};
    const int64_t bytes = H * dims->v_head_dim * dims->kv_lora_rank * 2 * rows;
    if (bytes < 2 * K3_PIECE_BYTES)
        for (int64_t h = 0; h < H; ++h) piece(&run, h);
    else each(cpu, H, piece, &run);
    return 0;
}

}  // namespace K3_NS
