// SPDX-License-Identifier: MIT
//
// y = x W^T on tensor cores, for BF16 weights and many rows, where the caller permits it (split_activations): each
// activation is taken as the sum of two BF16 numbers, high = bf16(x) and low = bf16(x - high), and each product as
// w * high + w * low, both exact, added up in float32 by the tensor cores.
//
// Error.  The two parts leave out at most 2^-17 of x, and the tensor cores round each addition a little more coarsely
// than float32: expect some 2^-16 of the sum of |w x|, where the plain product has some 2^-22.
//
// Order: columns ascending, 16 at a time; within those it belongs to the tensor cores.  A row does not depend on the
// other rows; rows that fill up a tile are zeros.
//
// Two launches for the jobs of each x.  Split: blocks (chunks of 1,024 columns, rows).  Product: blocks of 4 warps, 64
// outputs for 32, 64 or 128 rows; the tiles of outputs of each matrix in turn, and of each the tiles of rows next to
// each other.  A warp has 16 to 64 outputs for 32 rows.  Weights and activations come 32 columns at a time through a
// ring of stages in shared memory.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_prim.cuh"
#endif
#include "ops.h"

enum { MMA_THREADS = 128, MMA_OUTS = 64, MMA_COLS = 32, MMA_JOBS = 8, MMA_MIN_ROWS = 16, MMA_SPLIT_THREADS = 256 };

// WN warps beside each other along the rows, 4 / WN along the outputs.
template <int WN> struct mma_shape {
    static constexpr int ROWS = 32 * WN, TILES = WN, STAGES = WN == 1 ? 8 : WN == 2 ? 6 : 4;
    static constexpr int WORDS = (MMA_OUTS + 2 * ROWS) * MMA_COLS / 2, BYTES = STAGES * WORDS * 4;      // of a stage; of all
};

struct mma_job {
    const char* w;
    int64_t pitch;
    float* y;
    int64_t ldy;
    int outs, first;                                                   // the first tile of outputs
};
struct mma_jobs {
    mma_job job[MMA_JOBS];
    const uint16_t *high, *low;                                        // [rows, cols]
    int n, rows, cols;
};

#ifndef K3_LAUNCH

extern "C" __global__ void __launch_bounds__(MMA_SPLIT_THREADS)
    k3_split(const float* x, int64_t ldx, k3_bf16* high, k3_bf16* low, int cols) {
    const int64_t row = blockIdx.y;
    const int c = 4 * (int)(blockIdx.x * MMA_SPLIT_THREADS + threadIdx.x);
    if (c >= cols) return;
    uint32_t h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float v = x[row * ldx + c + i];
        h[i] = f32_to_bf16(v);
        const float rounded = bf16_to_f32((k3_bf16)h[i]);
        l[i] = m_finite(rounded) ? f32_to_bf16(v - rounded) : 0;       // else the high part says it all
    }
    *reinterpret_cast<uint2*>(high + row * cols + c) = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
    *reinterpret_cast<uint2*>(low + row * cols + c) = make_uint2(l[0] | l[1] << 16, l[2] | l[3] << 16);
}

// Where word w (two columns) of a row lies in a stage: rows of 16 words, in fours, which are shuffled so that the 8
// rows that a load of a fragment touches lie in different banks.
K3_DEVICE int mma_word(int row, int w) { return 16 * row + ((w & 12) ^ (row << 1 & 12)) + (w & 3); }

// Starts copying 32 columns of N rows; what lies past the last row or column becomes zero.
template <int N> K3_DEVICE void mma_copy(uint32_t* stage, const char* from, int64_t pitch, int first, int rows, int column,
                                         int cols) {
#pragma unroll
    for (int i = (int)threadIdx.x; i < 4 * N; i += MMA_THREADS) {
        const int r = i / 4, c = column + 8 * (i % 4);
        const bool there = first + r < rows && c < cols;
        k3_copy16(stage + mma_word(r, 4 * (i % 4)), there ? from + (first + r) * pitch + 2 * c : from, there ? 16 : 0);
    }
}

template <int WN> K3_DEVICE void mma_tile(const mma_jobs& jobs) {
    typedef mma_shape<WN> S;
    uint32_t* stages = reinterpret_cast<uint32_t*>(k3_dyn);            // [STAGES]: weights, high, low
    const int of_rows = (jobs.rows + S::ROWS - 1) / S::ROWS, outs = (int)blockIdx.x / of_rows;
    const int row0 = (int)blockIdx.x % of_rows * S::ROWS, cols = jobs.cols, steps = (cols + MMA_COLS - 1) / MMA_COLS;
    int j = 0;
    while (j + 1 < jobs.n && jobs.job[j + 1].first <= outs) ++j;
    const mma_job& job = jobs.job[j];
    const int out0 = (outs - job.first) * MMA_OUTS;

    const auto copy = [&](int step) {
        uint32_t* stage = stages + step % S::STAGES * S::WORDS;
        const int column = step * MMA_COLS;
        mma_copy<MMA_OUTS>(stage, job.w, job.pitch, out0, job.outs, column, cols);
        stage += MMA_OUTS * MMA_COLS / 2;
        mma_copy<S::ROWS>(stage, (const char*)jobs.high, 2 * (int64_t)cols, row0, jobs.rows, column, cols);
        stage += S::ROWS * MMA_COLS / 2;
        mma_copy<S::ROWS>(stage, (const char*)jobs.low, 2 * (int64_t)cols, row0, jobs.rows, column, cols);
    };
#pragma unroll
    for (int s = 0; s < S::STAGES - 1; ++s) {
        if (s < steps) copy(s);
        k3_copy_commit();
    }

    // Lane 4 g + t of a warp has, of each 16 x 8 result, outputs g and g + 8 of rows 2 t and 2 t + 1.
    const int g = (int)k3_lane() / 4, t = (int)k3_lane() % 4;
    const int out = (int)k3_warp() / WN * 16 * S::TILES, row = (int)k3_warp() % WN * 32;
    const bool any = row0 + row < jobs.rows;
    float d[S::TILES][4][4] = {};
    for (int step = 0; step < steps; ++step) {
        k3_copy_wait<S::STAGES - 2>();
        __syncthreads();                                               // this stage is there, the one before has been read
        if (step + S::STAGES - 1 < steps) copy(step + S::STAGES - 1);
        k3_copy_commit();
        if (!any) continue;
        const uint32_t* weights = stages + step % S::STAGES * S::WORDS;
        const uint32_t* parts = weights + MMA_OUTS * MMA_COLS / 2;
#pragma unroll
        for (int k = 0; k < MMA_COLS / 2; k += 8) {                    // words
            uint32_t a[S::TILES][4];
#pragma unroll
            for (int i = 0; i < S::TILES; ++i) {
#pragma unroll
                for (int f = 0; f < 4; ++f) a[i][f] = weights[mma_word(out + 16 * i + g + 8 * (f & 1), k + t + 4 * (f >> 1))];
            }
#pragma unroll
            for (int n = 0; n < 8; ++n) {                              // the high parts of 4 times 8 rows, then the low
                const uint32_t* part = parts + n / 4 * (S::ROWS * MMA_COLS / 2);
                const int r = row + n % 4 * 8 + g;
                const uint32_t b[2] = {part[mma_word(r, k + t)], part[mma_word(r, k + t + 4)]};
#pragma unroll
                for (int i = 0; i < S::TILES; ++i) k3_mma_bf16(d[i][n % 4], a[i], b);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S::TILES; ++i) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const int o = out0 + out + 16 * i + g + (n & 2) * 4, r = row0 + row + n / 4 * 8 + 2 * t + (n & 1);
            if (o < job.outs && r < jobs.rows) job.y[r * job.ldy + o] = d[i][n / 4][n % 4];
        }
    }
}

#define LINEAR_MMA(WN, ROWS) \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS, 2) k3_linear_mma_##ROWS(const mma_jobs jobs) { mma_tile<WN>(jobs); }
LINEAR_MMA(1, 32)
LINEAR_MMA(2, 64)
LINEAR_MMA(4, 128)

#else

K3_KERNEL(k3_split, const float*, int64_t, uint16_t*, uint16_t*, int)
K3_KERNEL(k3_linear_mma_32, mma_jobs)
K3_KERNEL(k3_linear_mma_64, mma_jobs)
K3_KERNEL(k3_linear_mma_128, mma_jobs)

static bool linear_mma_takes(const k3_cuda* c, const k3_linear_job* job, int64_t rows) {
    return c->split_activations && rows >= MMA_MIN_ROWS && job->w->dtype == K3_BF16 && job->w->cols % 16 == 0;
}

// Bytes from the high to the low parts of the activations.
static int64_t linear_mma_part(int64_t rows, int64_t cols) { return ceil_div(rows * cols * 2, 256) * 256; }

// The jobs that it takes, those with the same x together.
static int linear_mma(k3_cuda* c, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows) {
    int bad = 0;
    for (int64_t j = 0; j < n_jobs; ++j) {
        const k3_linear_job* lead = jobs + j;
        const int64_t cols = lead->w->cols, part = linear_mma_part(rows, cols);
        const auto same = [&](const k3_linear_job* job) {
            return linear_mma_takes(c, job, rows) && job->x == lead->x && job->ldx == lead->ldx && job->w->cols == cols;
        };
        int64_t first = 0;
        while (first < j && !same(jobs + first)) ++first;
        if (first < j || !same(lead)) continue;                        // done already, or not one of these
        if (2 * part > c->work_bytes) return K3_UNSUPPORTED;
        mma_jobs mine = {};
        mine.high = (uint16_t*)c->work;
        mine.low = (uint16_t*)(c->work + part);
        mine.rows = (int)rows;
        mine.cols = (int)cols;
        int64_t tiles = 0;
        for (int64_t i = j; i < n_jobs; ++i) {
            if (!same(jobs + i)) continue;
            if (mine.n == MMA_JOBS) return K3_UNSUPPORTED;
            const k3_matrix* w = jobs[i].w;
            mine.job[mine.n++] = {(const char*)w->data, w->pitch, jobs[i].y, jobs[i].ldy, (int)w->rows, (int)tiles};
            tiles += ceil_div(w->rows, MMA_OUTS);
        }
        bad |= k3_split(c, grid(ceil_div(cols, 4 * MMA_SPLIT_THREADS), rows), MMA_SPLIT_THREADS, 0, lead->x, lead->ldx,
                        (uint16_t*)mine.high, (uint16_t*)mine.low, (int)cols);
        if (rows <= 32) bad |= k3_linear_mma_32(c, grid(tiles), MMA_THREADS, mma_shape<1>::BYTES, mine);
        else if (rows <= 64) bad |= k3_linear_mma_64(c, grid(tiles), MMA_THREADS, mma_shape<2>::BYTES, mine);
        else bad |= k3_linear_mma_128(c, grid(tiles * ceil_div(rows, 128)), MMA_THREADS, mma_shape<4>::BYTES, mine);
    }
    return bad;
}

// For the widest x there is.
static int64_t linear_mma_work_bytes(const k3_dims* d, int64_t rows) {
    const int64_t widths[] = {d->hidden_size,
                              d->intermediate_size,
                              d->shared_intermediate_size,
                              d->routed_expert_hidden_size,
                              d->kda_num_heads * d->kda_head_k,
                              d->kda_head_k,
                              d->num_attention_heads * d->v_head_dim,
                              d->q_lora_rank,
                              d->kv_lora_rank};
    int64_t widest = 0;
    for (const int64_t w : widths) widest = w > widest ? w : widest;
    return 2 * linear_mma_part(rows, widest);
}

#endif
#undef LINEAR_MMA
