// SPDX-License-Identifier: MIT
//
// Attention Residuals: the input of a sub-layer is a softmax-weighted sum of the banked rows and the running sum,
// followed by that sub-layer's RMS norm.  The scores take the normalised rows as keys; the sum takes the raw rows.
// With an empty bank the running sum is the only source and its weight is 1.

#include "norm.h"

namespace K3_NS {

namespace {

struct Run {
    const k3_dims* dims;
    const float *bank, *s, *u, *norm;
    const int32_t* take;
    float *keep, *h, *x, *weights;
    int64_t n_bank, bank_rows;
};

K3_INLINE const float* source(const Run* run, int64_t j, int64_t row) {
    const int64_t d = run->dims->hidden_size;
    return j < run->n_bank ? run->bank + (j * run->bank_rows + row) * d : run->s + row * d;
}

void piece(void* arg, int64_t r) {
    const Run* run = (const Run*)arg;
    const int64_t d = run->dims->hidden_size, n = run->n_bank + 1, row = run->take ? run->take[r] : r;
    float* x = run->x + r * d;
    const float* mixed = source(run, 0, row);
    if (run->keep) memcpy(run->keep + r * d, run->s + row * d, (size_t)d * 4);
    if (n > 1) {
        float p[n];
        float top = m_bits(0xff800000u);
        for (int64_t j = 0; j < n; ++j) {
            const float* v = source(run, j, row);
            const float inv = 1.0f / m_sqrt(dot_plain(v, v, d) / (float)d + run->dims->rms_norm_eps);
            p[j] = dot_plain(v, run->u, d) * inv;
            top = top < p[j] ? p[j] : top;
        }
        float total = 0.0f;
        for (int64_t j = 0; j < n; ++j) {
            p[j] = k3_exp(p[j] - top);
            total = total + p[j];
        }
        for (int64_t j = 0; j < n; ++j) {
            p[j] = p[j] / total;
            if (run->weights) run->weights[r * n + j] = p[j];
        }
        float* h = run->h ? run->h + r * d : x;
        for (int64_t i = 0; i < d; i += 16) {
            const int64_t k = min64(16, d - i);
            vf acc = v_load_n(source(run, 0, row) + i, k) * vf(p[0]);
            for (int64_t j = 1; j < n; ++j) acc = m_fma(v_load_n(source(run, j, row) + i, k), vf(p[j]), acc);
            v_store_n(h + i, acc, k);
        }
        mixed = h;
    } else {
        if (run->h) memcpy(run->h + r * d, mixed, (size_t)d * 4);
        if (run->weights) run->weights[r] = 1.0f;
    }
    rms_row(mixed, run->norm, run->dims->rms_norm_eps, x, d);
}

}  // namespace

int attn_res(void* ctx, const k3_dims* dims, const float* bank, int64_t n_bank, int64_t bank_rows, const float* s, const float* u,
             const float* norm, const int32_t* take, float* keep, float* h, float* x, float* weights, int64_t rows) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    Run run = {dims, bank, s, u, norm, take, keep, h, x, weights, n_bank, bank_rows};
    if (rows * (n_bank + 1) * dims->hidden_size * 8 < 2 * K3_PIECE_BYTES)
        for (int64_t r = 0; r < rows; ++r) piece(&run, r);
    else each(cpu, rows, piece, &run);
    return 0;
}

}  // namespace K3_NS
