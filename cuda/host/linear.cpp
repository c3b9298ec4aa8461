// SPDX-License-Identifier: MIT
//
// y = x W^T for several matrices in one dispatch: their rows are cut into pieces of about equal bytes, so that
// matrices of different shapes share the threads without a barrier between them.

#include "dot.h"

namespace K3_NS {

namespace {

enum { K3_JOBS = 16, K3_TILE_ROWS = 128 };

struct Run {
    const k3_linear_job* jobs;
    const float* x[K3_JOBS];          // [rows, padded cols] prepared inputs of each job
    int64_t first[K3_JOBS + 1];       // first piece of each job
    int64_t step[K3_JOBS];            // rows of weights in a piece
    Inputs how[K3_JOBS];
    int64_t n_jobs, rows;
};

void piece(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    int64_t j = 0;
    while (run->first[j + 1] <= i) ++j;
    const k3_linear_job* job = run->jobs + j;
    const int64_t r0 = (i - run->first[j]) * run->step[j], r1 = min64(r0 + run->step[j], job->w->rows);
    const int64_t ldx = input_pitch(job->w->cols, run->how[j]);
    for (int64_t m0 = 0; m0 < run->rows; m0 += K3_TILE_ROWS) {
        const int64_t n = min64(K3_TILE_ROWS, run->rows - m0);
        const float* x[K3_TILE_ROWS];
        float* y[K3_TILE_ROWS];
        for (int64_t m = 0; m < n; ++m) {
            x[m] = run->x[j] + (m0 + m) * ldx;
            y[m] = job->y + (m0 + m) * job->ldy + r0;
        }
        multiply(job->w, r0, r1, x, y, n, run->how[j]);
    }
}

}  // namespace

int linear(void* ctx, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    Run run;
    if (n_jobs > K3_JOBS) return 1;
    run.jobs = jobs;
    run.n_jobs = n_jobs;
    run.rows = rows;
    run.first[0] = 0;
    float* free = cpu->x;             // beyond what is prepared
    int64_t bytes = 0;
    for (int64_t j = 0; j < n_jobs; ++j) {
        const k3_matrix* w = jobs[j].w;
        const bool split = is_split(w->dtype);
        run.how[j] = inputs_of(cpu, w);
        int64_t same = 0;             // an earlier job with this input, prepared the same way
        while (same < j && !(jobs[same].x == jobs[j].x && is_split(jobs[same].w->dtype) == split && run.how[same] == run.how[j]))
            ++same;
        if (same < j) {
            run.x[j] = run.x[same];
        } else {
            const int64_t floats = input_floats(rows, w->cols, run.how[j]);
            if (free + floats > cpu->x + cpu->x_floats) return 1;
            run.x[j] = free;
            prepare_rows(jobs[j].x, jobs[j].ldx, rows, w->cols, w->dtype, free, run.how[j]);
            free += floats;
        }
        bytes += w->rows * row_bytes(w);
    }
    // Small dispatches stay with the caller: waking a thread costs more than they do.
    const bool small = bytes * rows < 2 * K3_PIECE_BYTES;
    for (int64_t j = 0; j < n_jobs; ++j) {
        const k3_matrix* w = jobs[j].w;
        const int64_t rows_a_piece = rows_per_piece(row_bytes(w), rows > 16 && run.how[j] != INPUTS_BLOCKS ? 4 : 1);
        run.step[j] = small ? max64(1, w->rows) : run.how[j] == INPUTS_BLOCKS ? round_up(rows_a_piece, 2 * BLOCK) : rows_a_piece;
        run.first[j + 1] = run.first[j] + (w->rows + run.step[j] - 1) / run.step[j];
    }
    if (small)
        for (int64_t i = 0; i < run.first[n_jobs]; ++i) piece(&run, i);
    else each(cpu, run.first[n_jobs], piece, &run);
    return 0;
}

}  // namespace K3_NS
