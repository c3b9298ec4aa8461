// SPDX-License-Identifier: MIT
//
// h = SiTU(x Wgate^T, x Wup^T): both products and the activation in one piece, so that the two hidden rows never
// leave the cache.  Used by the dense MLP and the shared experts.

#include "situ.h"

namespace K3_NS {

namespace {

struct Run {
    const k3_dims* dims;
    const k3_matrix *gate, *up;
    const float *xg, *xu;             // [rows, padded cols] prepared for each matrix
    float* h;
    int64_t rows;
    Inputs how_gate, how_up;
};

void piece(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const int64_t r0 = i * K3_SITU_ROWS, n = min64(K3_SITU_ROWS, run->gate->rows - r0);
    const int64_t ldg = input_pitch(run->gate->cols, run->how_gate), ldu = input_pitch(run->up->cols, run->how_up);
    for (int64_t m0 = 0; m0 < run->rows; m0 += K3_SITU_TILE) {
        const int64_t count = min64(K3_SITU_TILE, run->rows - m0);
        const float *xg[K3_SITU_TILE], *xu[K3_SITU_TILE];
        float* h[K3_SITU_TILE];
        for (int64_t m = 0; m < count; ++m) {
            xg[m] = run->xg + (m0 + m) * ldg;
            xu[m] = run->xu + (m0 + m) * ldu;
            h[m] = run->h + (m0 + m) * run->gate->rows + r0;
        }
        situ_block(run->gate, run->up, r0, n, xg, xu, h, count, run->dims->situ_beta, run->dims->situ_linear_beta, run->how_gate,
                   run->how_up);
    }
}

}  // namespace

int gate_up(void* ctx, const k3_dims* dims, const k3_matrix* gate, const k3_matrix* up, const float* x, float* h, int64_t rows) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    const Inputs how_gate = inputs_of(cpu, gate), how_up = inputs_of(cpu, up);
    const bool same = is_split(gate->dtype) == is_split(up->dtype) && how_gate == how_up;
    const int64_t cols = gate->cols, first = input_floats(rows, cols, how_gate),
                  second = same ? 0 : input_floats(rows, cols, how_up);
    if (first + second > cpu->x_floats) return 1;
    Run run = {dims, gate, up, cpu->x, same ? cpu->x : cpu->x + first, h, rows, how_gate, how_up};
    prepare_rows(x, cols, rows, cols, gate->dtype, cpu->x, how_gate);
    if (!same) prepare_rows(x, cols, rows, cols, up->dtype, cpu->x + first, how_up);
    const int64_t pieces = (gate->rows + K3_SITU_ROWS - 1) / K3_SITU_ROWS;
    const bool small = 2 * gate->rows * row_bytes(gate) * rows < 2 * K3_PIECE_BYTES;
    if (small)
        for (int64_t i = 0; i < pieces; ++i) piece(&run, i);
    else each(cpu, pieces, piece, &run);
    return 0;
}

}  // namespace K3_NS
