// SPDX-License-Identifier: MIT
//
// MLA, attention of each row over the latent rows up to its own, in the absorbed form: one shared "key" of
// latent_stride elements per position, whose first kv_lora elements are the "value" as well.
//
// Order.  A row at position p sees n = p + 1 rows, in blocks of 64 and at most 64 pieces of whole blocks; the cut depends
// on n alone.  A score is four sums, of columns 16s .. 16s + 15 of each chunk of 64, which are then added ascending.
// Inside a piece the softmax is kept running from block to block (maximum, sum, weighted sum), positions ascending in a
// weighted sum; the pieces are then merged in ascending order.
//
// A block of 256 threads per row and 16 heads, or 8 where kv_lora is above 512.  It walks over the positions 64 at a
// time and reads them twice, the second time from the cache: for the scores as tiles of 64 positions and 64 columns, for
// the weighted sums as tiles of 8 positions and 512 columns (4 and 1,024).  Every tile is 4,096 elements, in shared memory
// as float32, so that the sums know nothing of the dtype of the pages; while one is used the next is loaded.
//
// With few rows a block takes one piece, and a second kernel merges them: blocks (64, groups of heads, rows), of which
// those return at once whose piece the row does not have.  With many a block takes all pieces of its row and merges them
// as it goes, with the same operations.  A block never has a second row: each row has a cut of its own, and neighbouring
// rows find the latent rows in the cache.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_latent.cuh"
#endif

enum {
    MLA_ATTEND_THREADS = 256,
    MLA_ATTEND_BLOCK = 64,           // positions
    MLA_ATTEND_PIECES = 64,          // at most
    MLA_ATTEND_LORA = 512,           // the widest latent that 16 heads share
    MLA_ATTEND_ROW = 68,             // floats from one position to the next in a tile of scores
    MLA_ATTEND_PART = 72,            // and from one head to the next in the four parts of the scores
    MLA_ATTEND_TILE = 64 * 72,       // floats of a tile, or of the parts of 16 heads
    MLA_ATTEND_MANY = 256            // blocks that fill a GPU without the pieces
};

struct mla_attend_args {
    const k3_segment* segments;
    const int32_t* owner;
    const float* qa;                 // [R, H, stride]
    float* oa;                       // [R, H, L]
    float* partial;                  // [rows of the launch, H, 64, slot]: m, l, o; NULL where a block takes all pieces
    int64_t layer;
    int row0;                        // the first row of the launch
    int heads, kv_lora, stride, slot;
    float scale;
};

#ifndef K3_LAUNCH

struct mla_attend_cut {
    int n, blocks, per_piece, pieces;                                  // n: positions, below 2^31
};
K3_DEVICE mla_attend_cut mla_attend_cut_at(int64_t position) {
    mla_attend_cut c;
    c.n = (int)position + 1;
    c.blocks = (int)position / MLA_ATTEND_BLOCK + 1;
    c.per_piece = (c.blocks + MLA_ATTEND_PIECES - 1) / MLA_ATTEND_PIECES;
    c.pieces = (c.blocks + c.per_piece - 1) / c.per_piece;
    return c;
}

// How a result that ends at a maximum of `before` continues at `now`; `now` leaves out what is not a number.
K3_DEVICE float mla_attend_top(float before, float now) { return before < now ? now : before; }

// A tile in shared memory has 4 * QUADS columns, 16 quads for scores.  A thread brings four quarters of one.
template <int QUADS> struct mla_attend_tile {
    enum { PITCH = QUADS == 16 ? MLA_ATTEND_ROW : 4 * QUADS, ROWS = MLA_ATTEND_THREADS / QUADS };   // ROWS: of a quarter
};
// Begins to load rows `first` on and columns from `column` on, zeros outside.  Float32 goes to shared memory by itself,
// BF16 waits in registers to be widened.
template <int QUADS>
K3_DEVICE void mla_attend_fetch(bool bf16, float* tile, uint2* raw /*[4]*/, const char* const* rows, int first, int count,
                                int column, int columns) {
    typedef mla_attend_tile<QUADS> T;
    const int row = (int)(threadIdx.x / QUADS), offset = 4 * (int)(threadIdx.x % QUADS);
    tile += row * T::PITCH + offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = first + row + T::ROWS * i;
        const bool inside = r < count && column + offset < columns;
        const char* from = rows[inside ? r : 0];
        if (bf16) raw[i] = inside ? reinterpret_cast<const uint2*>(from)[(column + offset) / 4] : make_uint2(0, 0);
        else k3_copy16(tile + T::ROWS * i * T::PITCH, from + (inside ? column + offset : 0) * 4, inside ? 16 : 0);
    }
    if (!bf16) k3_copy_commit();
}
// Has them there, for this thread.
template <int QUADS> K3_DEVICE void mla_attend_land(bool bf16, float* tile, const uint2* raw /*[4]*/) {
    typedef mla_attend_tile<QUADS> T;
    if (!bf16) {
        k3_copy_wait<0>();
        return;
    }
    tile += (int)(threadIdx.x / QUADS) * T::PITCH + 4 * (int)(threadIdx.x % QUADS);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        k3_store4(tile + T::ROWS * i * T::PITCH,
                  make_float4(bf16_low(raw[i].x), bf16_high(raw[i].x), bf16_low(raw[i].y), bf16_high(raw[i].y)));
    }
}

// HEADS heads of a row: one piece, or all.  A tile for weighted sums has 4 * QUADS columns.
template <int HEADS, int QUADS> K3_DEVICE void mla_attend(const mla_attend_args& a) {
    enum {
        SCORE_HEADS = HEADS / 4,                                       // of a thread, times 4 positions
        SUM_HEADS = HEADS * QUADS / MLA_ATTEND_THREADS,                // of a thread, times 4 columns
        WARP_HEADS = HEADS / 8,                                        // whose softmax a warp keeps
        POSITIONS = 1024 / QUADS,                                      // of a weighted-sum tile
        P = HEADS + 4                                                  // floats from one position to the next in p
    };
    const int row = a.row0 + (int)(gridDim.z - 1 - blockIdx.z);        // the later ones see more, and begin first
    if (a.owner[row] < 0) return;
    const mla_attend_cut cut = mla_attend_cut_at(latent_position(a.segments + a.owner[row], row));
    if ((int)blockIdx.x >= cut.pieces) return;
    const bool bf16 = a.segments[a.owner[row]].latent_dtype == K3_BF16;
    const int t = (int)threadIdx.x, lane = (int)k3_lane(), warp = (int)k3_warp(), pitch = a.stride + 4;
    const int head0 = (int)blockIdx.y * HEADS, begin = (int)blockIdx.x * cut.per_piece;
    float* tiles = reinterpret_cast<float*>(k3_dyn);                   // [2, TILE]
    float* p = tiles + 2 * MLA_ATTEND_TILE;                            // [64, P]
    float *m = p + MLA_ATTEND_BLOCK * P, *l = m + HEADS, *fade = l + HEADS;                // [HEADS] each, of the piece
    float *M = fade + HEADS, *S = M + HEADS, *keep = S + HEADS, *gain = keep + HEADS;      // [HEADS] each, of the row
    const char** rows = reinterpret_cast<const char**>(gain + HEADS);  // [2, 64], of this block and the next
    float** results = reinterpret_cast<float**>(gain + HEADS) + 2 * MLA_ATTEND_BLOCK;      // [HEADS], NULL past the last
    float* queries = reinterpret_cast<float*>(results + HEADS);        // [HEADS, pitch]
    const int chunks = (a.stride + 63) / 64, end = a.partial ? min(cut.blocks, begin + cut.per_piece) : cut.blocks;
    const float* qa = a.qa + ((int64_t)row * a.heads + head0) * a.stride;
    for (int i = 4 * t; i < HEADS * a.stride; i += 4 * MLA_ATTEND_THREADS) {
        const int h = i / a.stride, c = i % a.stride;
        k3_store4(queries + h * pitch + c, head0 + h < a.heads ? k3_load4(qa + i) : k3_all4(0.0f));
    }
    const auto count_of = [&](int block) { return min((int)MLA_ATTEND_BLOCK, cut.n - block * MLA_ATTEND_BLOCK); };
    const auto find_rows = [&](int block) {
        if (t >= count_of(block)) return;
        const k3_segment* seg = a.segments + a.owner[row];
        rows[(block & 1) * MLA_ATTEND_BLOCK + t] = latent_row(seg, a.layer, a.stride, (int64_t)block * MLA_ATTEND_BLOCK + t);
    };
    // Hands on the maximum and the sum of a piece, and begins the next.
    const auto end_piece = [&](int head) {
        if (!a.partial) {
            const float top = mla_attend_top(M[head], m[head]);
            keep[head] = k3_exp(M[head] - top);
            gain[head] = k3_exp(m[head] - top);
            S[head] = m_fma(S[head], keep[head], l[head] * gain[head]);
            M[head] = top;
        } else if (results[head]) {
            results[head][0] = m[head];
            results[head][1] = l[head];
        }
        m[head] = m_bits(0xff800000u);
        l[head] = 0.0f;
    };
    const auto rows_of = [&](int block) { return rows + (block & 1) * MLA_ATTEND_BLOCK; };
    const auto tile_of = [&](int turn) { return tiles + (turn & 1) * MLA_ATTEND_TILE; };

    // In scores a lane has heads score_head + 4i and positions score_position + 8j, a warp 16 columns of each 64.
    const int score_head = lane / 8, score_position = (warp & 1) * 32 + lane % 8, score_column = (warp / 2) * 16;
    // In weighted sums a thread has the heads from sum_head on, and four columns.
    const int sum_head = t / QUADS * SUM_HEADS, column = 4 * (t % QUADS);
    float4 o[SUM_HEADS];
#pragma unroll
    for (int h = 0; h < SUM_HEADS; ++h) o[h] = k3_all4(0.0f);
    if (t < HEADS) {
        const int64_t head = (int64_t)row * a.heads + head0 + t,
                      slot = (head - a.row0 * a.heads) * MLA_ATTEND_PIECES + blockIdx.x;
        results[t] = head0 + t >= a.heads ? nullptr : a.partial ? a.partial + slot * a.slot : a.oa + head * a.kv_lora;
        m[t] = M[t] = m_bits(0xff800000u);
        l[t] = S[t] = 0.0f;
    }
    uint2 raw[4];
    find_rows(begin);
    __syncthreads();
    mla_attend_fetch<16>(bf16, tile_of(0), raw, rows_of(begin), 0, count_of(begin), 0, a.stride);
    int turn = 0;
    for (int b = begin; b < end; ++b) {
        const int count = count_of(b);
        const bool piece_ends = b + 1 == end || (b + 1) % cut.per_piece == 0;

        float s[SCORE_HEADS][4] = {};
        for (int c = 0; c < chunks; ++c) {
            float *tile = tile_of(turn), *next = tile_of(++turn);
            mla_attend_land<16>(bf16, tile, raw);
            __syncthreads();
            if (c == 0 && b + 1 < end) find_rows(b + 1);
            if (c + 1 < chunks) mla_attend_fetch<16>(bf16, next, raw, rows_of(b), 0, count, 64 * (c + 1), a.stride);
            if (64 * c + score_column >= a.stride) continue;
            const float* q = queries + score_head * pitch + 64 * c + score_column;
            const float* x = tile + score_position * MLA_ATTEND_ROW + score_column;
#pragma unroll
            for (int k = 0; k < 16; k += 4) {
                float4 qk[SCORE_HEADS];
#pragma unroll
                for (int i = 0; i < SCORE_HEADS; ++i) qk[i] = k3_load4(q + 4 * i * pitch + k);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4 xk = k3_load4(x + 8 * j * MLA_ATTEND_ROW + k);
#pragma unroll
                    for (int i = 0; i < SCORE_HEADS; ++i) s[i][j] = k3_dot4(qk[i], xk, s[i][j]);
                }
            }
        }
        float* parts = tile_of(turn++);                                // [4, HEADS, PART]
#pragma unroll
        for (int i = 0; i < SCORE_HEADS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int head = warp / 2 * HEADS + score_head + 4 * i;
                parts[head * MLA_ATTEND_PART + score_position + 8 * j] = s[i][j];
            }
        }
        __syncthreads();
        mla_attend_fetch<QUADS>(bf16, tile_of(turn), raw, rows_of(b), 0, count, 0, a.kv_lora);

#pragma unroll
        for (int e = 0; e < WARP_HEADS; ++e) {
            const int head = warp * WARP_HEADS + e;
            float v[2], sum = 0.0f;
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const float* part = parts + head * MLA_ATTEND_PART + lane + K3_WARP * u;
                enum { NEXT = HEADS * MLA_ATTEND_PART };
                v[u] = (((part[0] + part[NEXT]) + part[2 * NEXT]) + part[3 * NEXT]) * a.scale;
                if (lane + K3_WARP * u >= count) v[u] = m_bits(0xff800000u);
            }
            const float before = m[head];
            const float top = mla_attend_top(before, k3_warp_max(v[0] < v[1] || v[0] != v[0] ? v[1] : v[0]));
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                v[u] = lane + K3_WARP * u < count ? k3_exp(v[u] - top) : 0.0f;
                p[(lane + K3_WARP * u) * P + head] = v[u];
                sum += v[u];
            }
            sum = k3_warp_sum(sum);
            __syncwarp();                                              // all lanes have read m
            if (lane == 0) {
                fade[head] = k3_exp(before - top);
                l[head] = m_fma(l[head], fade[head], sum);
                m[head] = top;
                if (piece_ends) end_piece(head);
            }
        }

        for (int first = 0; first < count; first += POSITIONS) {
            float *tile = tile_of(turn), *next = tile_of(++turn);
            mla_attend_land<QUADS>(bf16, tile, raw);
            __syncthreads();
            const int more = first + POSITIONS;
            if (more < count) mla_attend_fetch<QUADS>(bf16, next, raw, rows_of(b), more, count, 0, a.kv_lora);
            else if (b + 1 < end) mla_attend_fetch<16>(bf16, next, raw, rows_of(b + 1), 0, count_of(b + 1), 0, a.stride);
            if (first == 0) {
#pragma unroll
                for (int h = 0; h < SUM_HEADS; ++h) o[h] = k3_mul4(o[h], k3_all4(fade[sum_head + h]));
            }
#pragma unroll
            for (int i = 0; i < POSITIONS; ++i) {                      // past the last one p and the tile are zero
                const float4 x = k3_load4(tile + i * 4 * QUADS + column);
#pragma unroll
                for (int h = 0; h < SUM_HEADS; h += 4) {
                    const float4 w = k3_load4(p + (first + i) * P + sum_head + h);
                    o[h] = k3_fma4(x, k3_all4(w.x), o[h]);
                    o[h + 1] = k3_fma4(x, k3_all4(w.y), o[h + 1]);
                    o[h + 2] = k3_fma4(x, k3_all4(w.z), o[h + 2]);
                    o[h + 3] = k3_fma4(x, k3_all4(w.w), o[h + 3]);
                }
            }
        }
        if (!piece_ends) continue;
#pragma unroll
        for (int h = 0; h < SUM_HEADS; ++h) {
            const int head = sum_head + h;
            const float v[4] = {o[h].x, o[h].y, o[h].z, o[h].w};
            o[h] = k3_all4(0.0f);
            if (!results[head]) continue;
            float* out = results[head] + column;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (column + e >= a.kv_lora) break;
                if (a.partial) out[2 + e] = v[e];
                else out[e] = m_fma(b < cut.per_piece ? 0.0f : out[e], keep[head], v[e] * gain[head]);
            }
        }
    }
    if (a.partial) return;
    __syncthreads();
    for (int i = t; i < HEADS * a.kv_lora; i += MLA_ATTEND_THREADS) {
        float* out = results[i / a.kv_lora];
        if (out) out[i % a.kv_lora] = out[i % a.kv_lora] / S[i / a.kv_lora];
    }
}

extern "C" __global__ void __launch_bounds__(MLA_ATTEND_THREADS, 2) k3_mla_attend(mla_attend_args a) { mla_attend<16, 128>(a); }
extern "C" __global__ void __launch_bounds__(MLA_ATTEND_THREADS, 2) k3_mla_attend_wide(mla_attend_args a) {
    mla_attend<8, 256>(a);
}

// Merges the pieces of a head, a thread per column: blocks (H, L / 256, rows).
extern "C" __global__ void __launch_bounds__(MLA_ATTEND_THREADS) k3_mla_attend_merge(mla_attend_args a) {
    static __shared__ float m[MLA_ATTEND_PIECES], keep[MLA_ATTEND_PIECES], gain[MLA_ATTEND_PIECES], sums[MLA_ATTEND_PIECES];
    const int row = a.row0 + (int)blockIdx.z;
    const int64_t at = (int64_t)row * a.heads + blockIdx.x;
    if (a.owner[row] < 0) return;
    const int pieces = mla_attend_cut_at(latent_position(a.segments + a.owner[row], row)).pieces;
    const int t = (int)threadIdx.x, column = (int)blockIdx.y * MLA_ATTEND_THREADS + t;
    const float* slots = a.partial + (at - a.row0 * a.heads) * MLA_ATTEND_PIECES * a.slot;
    if (t < pieces) m[t] = slots[(int64_t)t * a.slot];
    __syncthreads();
    if (t < pieces) {
        float before = m_bits(0xff800000u);
#pragma unroll 8
        for (int i = 0; i < t; ++i) before = mla_attend_top(before, m[i]);
        const float top = mla_attend_top(before, m[t]);
        keep[t] = k3_exp(before - top);
        gain[t] = k3_exp(m[t] - top);
        sums[t] = slots[(int64_t)t * a.slot + 1] * gain[t];
    }
    __syncthreads();
    if (column >= a.kv_lora) return;
    float S = 0.0f, O = 0.0f;
#pragma unroll 8
    for (int i = 0; i < pieces; ++i) {
        S = m_fma(S, keep[i], sums[i]);
        O = m_fma(O, keep[i], slots[(int64_t)i * a.slot + 2 + column] * gain[i]);
    }
    a.oa[at * a.kv_lora + column] = O / S;
}

#else

K3_KERNEL(k3_mla_attend, mla_attend_args)
K3_KERNEL(k3_mla_attend_wide, mla_attend_args)
K3_KERNEL(k3_mla_attend_merge, mla_attend_args)

// Floats of a piece of one head, and the rows whose pieces fit into 128 MiB, at least one.
static int64_t mla_attend_slot(const k3_dims* dims) { return 2 + dims->kv_lora_rank; }
static int64_t mla_attend_row_bytes(const k3_dims* dims) {
    return dims->num_attention_heads * MLA_ATTEND_PIECES * mla_attend_slot(dims) * 4;
}
static int64_t mla_attend_rows_at_once(const k3_dims* dims) {
    const int64_t rows = ((int64_t)128 << 20) / mla_attend_row_bytes(dims);
    return rows < 1 ? 1 : rows;
}
static int64_t mla_attend_work_bytes(const k3_dims* dims, int64_t rows) {
    const int64_t most = mla_attend_rows_at_once(dims);
    return (rows < most ? rows : most) * mla_attend_row_bytes(dims);
}

static int cuda_mla_attend(void* ctx, const k3_dims* dims, const k3_pass* pass, int64_t mixer_index, const float* qa, float* oa) {
    k3_cuda* c = (k3_cuda*)ctx;
    const int64_t H = dims->num_attention_heads, L = dims->kv_lora_rank, stride = dims->latent_stride;
    const int64_t heads = L > MLA_ATTEND_LORA ? 8 : 16, groups = ceil_div(H, heads);
    const size_t shared = (size_t)(heads * (stride + 4) + 2 * MLA_ATTEND_TILE + MLA_ATTEND_BLOCK * (heads + 4) + 7 * heads) * 4 +
                          (2 * MLA_ATTEND_BLOCK + heads) * 8;
    if (L > 2 * MLA_ATTEND_LORA || shared > 100 * 1024) return K3_UNSUPPORTED;
    const auto& attend = L > MLA_ATTEND_LORA ? k3_mla_attend_wide : k3_mla_attend;
    const int64_t most = mla_attend_rows_at_once(dims);
    const bool apart = pass->rows * groups < MLA_ATTEND_MANY;
    mla_attend_args a = {pass->segments,
                         pass->owner,
                         qa,
                         oa,
                         apart ? (float*)c->work : nullptr,
                         mixer_index,
                         0,
                         (int)H,
                         (int)L,
                         (int)stride,
                         (int)mla_attend_slot(dims),
                         dims->attention_scale};
    if (!apart) return attend(c, grid(1, groups, pass->rows), MLA_ATTEND_THREADS, shared, a);
    for (int64_t row = 0; row < pass->rows; row += most) {
        const int64_t rows = pass->rows - row < most ? pass->rows - row : most;
        a.row0 = (int)row;
        int status = attend(c, grid(MLA_ATTEND_PIECES, groups, rows), MLA_ATTEND_THREADS, shared, a);
        if (!status) status = k3_mla_attend_merge(c, grid(H, ceil_div(L, MLA_ATTEND_THREADS), rows), MLA_ATTEND_THREADS, 0, a);
        if (status) return status;
    }
    return 0;
}

#endif
