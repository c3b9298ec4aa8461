// SPDX-License-Identifier: MIT
//
// The routed experts of one layer.  The rows of the pass are grouped by expert, so that an expert's weights are read
// once however many rows chose it.  Two dispatches: all hidden values SiTU(W1 z, W3 z), then all outputs; in the
// second a piece owns a strip of outputs and visits the experts in ascending id, so that each output is
// w_0 y_0 + w_1 y_1 + ... in that order whatever the other rows chose.

#include "situ.h"

namespace K3_NS {

namespace {

enum { TILE = K3_SITU_TILE };

struct Run {
    const k3_dims* dims;
    const k3_moe* moe;
    const float* weights;             // [R, T]
    const float* z;                   // [R, padded latent] prepared
    float* h;                         // [R * T, padded inner] prepared for w2, in order of slot
    float* u;                         // [R, latent]
    const int64_t *active, *begin;    // experts in use, ascending; first slot of each, and one past the last
    const int64_t *row, *choice;      // [R * T] by slot: the row, and its index into weights
    int64_t n_active, rows, strips, width;
    bool fresh;                       // u is set, not added to
};

void hidden(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const int64_t a = i / run->strips, r0 = i % run->strips * K3_SITU_ROWS;
    const k3_matrix *w1 = run->moe->w1 + run->active[a], *w3 = run->moe->w3 + run->active[a], *w2 = run->moe->w2 + run->active[a];
    const int64_t n = min64(K3_SITU_ROWS, w1->rows - r0), ld = padded(w1->cols), ldh = padded(w2->cols);
    for (int64_t s = run->begin[a]; s < run->begin[a + 1]; s += TILE) {
        const int64_t count = min64(TILE, run->begin[a + 1] - s);
        const float* x[TILE];
        float buffer[TILE][K3_SITU_ROWS] __attribute__((aligned(64)));
        float* h[TILE];
        for (int64_t m = 0; m < count; ++m) {
            x[m] = run->z + run->row[s + m] * ld;
            h[m] = buffer[m];
        }
        situ_block(w1, w3, r0, n, x, x, h, count, run->dims->situ_beta, run->dims->situ_linear_beta);
        for (int64_t m = 0; m < count; ++m) prepare_32(buffer[m], n, w2->dtype, run->h + (s + m) * ldh + r0);
    }
}

void output(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const int64_t latent = run->dims->routed_expert_hidden_size;
    const int64_t r0 = i * run->width, n = min64(run->width, latent - r0);
    for (int64_t r = 0; run->fresh && r < run->rows; ++r) memset(run->u + r * latent + r0, 0, (size_t)n * 4);
    for (int64_t a = 0; a < run->n_active; ++a) {
        const k3_matrix* w2 = run->moe->w2 + run->active[a];
        const int64_t ldh = padded(w2->cols);
        if (a + 1 < run->n_active) ask_for(run->moe->w2 + run->active[a + 1], r0);
        for (int64_t s = run->begin[a]; s < run->begin[a + 1]; s += TILE) {
            const int64_t count = min64(TILE, run->begin[a + 1] - s);
            const float* x[TILE];
            float y[TILE][64] __attribute__((aligned(64)));
            float* out[TILE];
            for (int64_t m = 0; m < count; ++m) {
                x[m] = run->h + (s + m) * ldh;
                out[m] = y[m];
            }
            multiply(w2, r0, r0 + n, x, out, count);
            for (int64_t m = 0; m < count; ++m) {
                float* u = run->u + run->row[s + m] * latent + r0;
                const float w = run->weights[run->choice[s + m]];
                for (int64_t c = 0; c < n; c += 16) {
                    const int64_t k = min64(16, n - c);
                    v_store_n(u + c, m_fma(vf(w), v_load_n(y[m] + c, k), v_load_n(u + c, k)), k);
                }
            }
        }
    }
}

}  // namespace

int experts(void* ctx, const k3_dims* dims, const k3_moe* moe, const k3_pass* pass, const float* z, const int32_t* ids,
            const float* weights, float* u, int64_t first_id, int64_t end_id) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    const int64_t E = dims->num_experts, T = dims->num_experts_per_token, rows = pass->rows;
    const k3_matrix *w1 = moe->w1, *w2 = moe->w2;
    const int64_t ld = padded(w1->cols), ldh = padded(w2->cols);
    if (rows * ld > cpu->x_floats || rows * T * ldh > cpu->work_floats || 2 * (E + 1) + 2 * rows * T > cpu->list_items) return 1;

    // Counting sort of the choices by expert; within an expert the rows stay in order.
    int64_t *active = cpu->list, *begin = active + E + 1, *row = begin + E + 1, *choice = row + rows * T;
    int64_t* fill = active;           // counts first, compacted to the list of active experts afterwards
    for (int64_t e = 0; e < E; ++e) fill[e] = 0;
    const auto wanted = [&](int64_t s) { return pass->owner[s / T] >= 0 && ids[s] >= first_id && ids[s] < end_id; };
    for (int64_t s = 0; s < rows * T; ++s)
        if (wanted(s)) ++fill[ids[s]];
    int64_t at = 0;
    for (int64_t e = 0; e < E; ++e) {
        const int64_t n = fill[e];
        fill[e] = at;
        at += n;
    }
    for (int64_t s = 0; s < rows * T; ++s) {
        if (!wanted(s)) continue;
        const int64_t to = fill[ids[s]]++;
        row[to] = s / T;
        choice[to] = s;
    }
    int64_t n_active = 0, first = 0;
    for (int64_t e = 0; e < E; ++e) {
        const int64_t end = fill[e];
        if (end > first) {
            begin[n_active] = first;
            active[n_active++] = e;
            first = end;
        }
    }
    begin[n_active] = at;

    for (int64_t r = 0; r < rows; ++r) prepare_row(z + r * w1->cols, w1->cols, w1->dtype, cpu->x + r * ld);
    Run run = {dims, moe, weights, cpu->x, cpu->work, u, active, begin, row, choice, n_active, rows, 0, 0, first_id == 0};
    run.strips = (w1->rows + K3_SITU_ROWS - 1) / K3_SITU_ROWS;
    run.width = 64;
    const int64_t outputs = (w2->rows + run.width - 1) / run.width;
    if (at * w1->rows * row_bytes(w1) < 2 * K3_PIECE_BYTES) {
        for (int64_t i = 0; i < n_active * run.strips; ++i) hidden(&run, i);
        for (int64_t i = 0; i < outputs; ++i) output(&run, i);
    } else {
        each(cpu, n_active * run.strips, hidden, &run);
        each(cpu, outputs, output, &run);
    }
    return 0;
}

}  // namespace K3_NS
