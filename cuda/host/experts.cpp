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
    const float* z;                   // [R, latent]
    float* x;                         // z prepared: by row, or in blocks by expert
    float* h;                         // hidden values prepared for w2, by slot, or in blocks by expert
    float* u;                         // [R, latent]
    const int64_t *active, *begin;    // experts in use, ascending; first slot of each, and one past the last
    const int64_t* block;             // first block of each
    const int64_t *row, *choice;      // [R * T] by slot: the row, and its index into weights
    int64_t from, to;                 // the experts of these two dispatches, as numbers of `active`
    int64_t rows, strips, width;
    Inputs how;
    bool fresh;                       // u is set, not added to
};

// The prepared inputs of one slot of an expert in a buffer of such rows; `row` is what numbers them where they are no blocks.
K3_INLINE float* prepared(const Run* run, float* buffer, int64_t cols, int64_t a, int64_t slot, int64_t row) {
    const int64_t pitch = input_pitch(cols, run->how);
    return buffer + (run->how == INPUTS_BLOCKS ? (run->block[a] - run->block[run->from]) * BLOCK + slot : row) * pitch;
}

// Each expert's rows as blocks: where rows are not blocks, z has been prepared before.
void gather(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const int64_t a = run->from + i, cols = run->dims->routed_expert_hidden_size, slots = run->begin[a + 1] - run->begin[a];
    for (int64_t s = 0; s < slots; s += BLOCK) {
        const float* z[BLOCK];
        for (int64_t m = 0; m < min64(BLOCK, slots - s); ++m) z[m] = run->z + run->row[run->begin[a] + s + m] * cols;
        prepare_block(z, min64(BLOCK, slots - s), cols, prepared(run, run->x, cols, a, s, 0));
    }
}

void hidden(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const int64_t a = run->from + i / run->strips, r0 = i % run->strips * K3_SITU_ROWS;
    const k3_matrix *w1 = run->moe->w1 + run->active[a], *w3 = run->moe->w3 + run->active[a], *w2 = run->moe->w2 + run->active[a];
    const int64_t n = min64(K3_SITU_ROWS, w1->rows - r0), first = run->begin[a], slots = run->begin[a + 1] - first;
    for (int64_t s = 0; s < slots; s += TILE) {
        const int64_t count = min64(TILE, slots - s);
        const float* x[TILE];
        float buffer[TILE][K3_SITU_ROWS] __attribute__((aligned(64)));
        float* h[TILE];
        for (int64_t m = 0; m < count; ++m) {
            x[m] = prepared(run, run->x, w1->cols, a, s + m, run->row[first + s + m]);
            h[m] = buffer[m];
        }
        situ_block(w1, w3, r0, n, x, x, h, count, run->dims->situ_beta, run->dims->situ_linear_beta, run->how, run->how);
        for (int64_t m = 0; m < count; m += run->how == INPUTS_BLOCKS ? BLOCK : 1) {
            float* to = prepared(run, run->h, w2->cols, a, s + m, first + s + m);
            if (run->how == INPUTS_BLOCKS) prepare_block(h + m, min64(BLOCK, count - m), n, to + r0 / 32 * BLOCK_FLOATS);
            else prepare_32(h[m], n, w2->dtype, to + (run->how == INPUTS_PACKED ? r0 / 2 : r0), run->how);
        }
    }
}

void output(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const int64_t latent = run->dims->routed_expert_hidden_size;
    const int64_t r0 = i * run->width, n = min64(run->width, latent - r0);
    for (int64_t r = 0; run->fresh && r < run->rows; ++r) memset(run->u + r * latent + r0, 0, (size_t)n * 4);
    for (int64_t a = run->from; a < run->to; ++a) {
        const k3_matrix* w2 = run->moe->w2 + run->active[a];
        const int64_t first = run->begin[a], slots = run->begin[a + 1] - first;
        if (a + 1 < run->to) ask_for(run->moe->w2 + run->active[a + 1], r0);
        for (int64_t s = 0; s < slots; s += TILE) {
            const int64_t count = min64(TILE, slots - s);
            const float* x[TILE];
            float y[TILE][64] __attribute__((aligned(64)));
            float* out[TILE];
            for (int64_t m = 0; m < count; ++m) {
                x[m] = prepared(run, run->h, w2->cols, a, s + m, first + s + m);
                out[m] = y[m];
            }
            multiply(w2, r0, r0 + n, x, out, count, run->how);
            for (int64_t m = 0; m < count; ++m) {
                float* u = run->u + run->row[first + s + m] * latent + r0;
                const float w = run->weights[run->choice[first + s + m]];
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
    const Inputs how = inputs_of(cpu, w1);
    const bool in_blocks = how == INPUTS_BLOCKS;
    const int64_t block_x = BLOCK * input_pitch(w1->cols, how), block_h = BLOCK * input_pitch(w2->cols, how);
    if (3 * (E + 1) + 2 * rows * T > cpu->list_items || inputs_of(cpu, w2) != how) return 1;
    if (!in_blocks &&
        (input_floats(rows, w1->cols, how) > cpu->x_floats || input_floats(rows * T, w2->cols, how) > cpu->work_floats))
        return 1;

    // Counting sort of the choices by expert; within an expert the rows stay in order.
    int64_t *active = cpu->list, *begin = active + E + 1, *block = begin + E + 1, *row = block + E + 1, *choice = row + rows * T;
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
    block[0] = 0;
    for (int64_t a = 0; a < n_active; ++a) block[a + 1] = block[a] + (begin[a + 1] - begin[a] + BLOCK - 1) / BLOCK;

    if (!in_blocks) prepare_rows(z, w1->cols, rows, w1->cols, w1->dtype, cpu->x, how);
    Run run = {dims, moe,    weights, z,        cpu->x, cpu->work, u, active, begin,        block,
               row,  choice, 0,       n_active, rows,   0,         0, how,    first_id == 0};
    run.strips = (w1->rows + K3_SITU_ROWS - 1) / K3_SITU_ROWS;
    run.width = 64;
    const int64_t outputs = (w2->rows + run.width - 1) / run.width;
    const bool small = at * w1->rows * row_bytes(w1) < 2 * K3_PIECE_BYTES;
    const auto all = [&](int64_t pieces, k3_task task) {
        if (!small) each(cpu, pieces, task, &run);
        for (int64_t i = 0; small && i < pieces; ++i) task(&run, i);
    };
    do {                              // blocks are not full: as many experts at a time as there is room for
        const int64_t rest = block[run.from];
        const auto fits = [&](int64_t a) {
            const int64_t n = block[a + 1] - rest;
            return n * block_x <= cpu->x_floats && n * block_h <= cpu->work_floats;
        };
        for (run.to = in_blocks ? run.from : n_active; run.to < n_active && fits(run.to);) ++run.to;
        if (run.to == run.from && n_active) return 1;
        if (in_blocks) all(run.to - run.from, gather);
        all((run.to - run.from) * run.strips, hidden);
        all(outputs, output);
        run.fresh = false;
        run.from = run.to;
    } while (run.from < n_active);
    return 0;
}

}  // namespace K3_NS
