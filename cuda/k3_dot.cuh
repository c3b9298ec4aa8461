// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix: linear, gate_up and the routed experts.
//
// Order of summation.  The lanes of a warp share a dot product.  Lane l takes run l of each chunk of 32 runs, chunks
// ascending; a run is 8 columns of BF16 or F32, or one block of 32 columns of MXFP4.  BF16 and F32: one sum for each
// lane, to which its products are added in the order of the columns, fused.  MXFP4: the products code * x of a block
// are added up from zero the same way, then scale * block to the sum of the lane, fused.  Last, the tree of k3_warp_sum over
// the lanes.  Columns that fill up the last chunk are zeros.  Every tile has this order, so that the bits of a row do
// not depend on how many rows there are.
//
// Tiles.  A warp computes NO outputs for NR rows of x, a block of 8 warps the next 8 NO outputs for the same rows.  The
// weights go from memory to registers, AHEAD chunks before they are used; each is used for NR rows.  x goes to shared
// memory in slabs, one copied while the other is used; a load from it serves NO outputs.

#ifndef K3_DOT_CUH
#define K3_DOT_CUH

#include "ops.h"

enum { K3_DOT_WARPS = 8, K3_DOT_THREADS = 256, K3_DOT_FILL = 264 };    // FILL: blocks that occupy a large GPU

// The tiles that kernels of linear and gate_up exist for, as X(NO, NR), and with MXFP4 among the weights.
#define K3_DOT_TILES(X) X(1, 1) X(2, 1) X(4, 1) X(1, 4) X(2, 4) X(4, 4) X(2, 8) X(4, 8) X(2, 16) X(4, 16) X(8, 16)
#define K3_DOT_MXFP4_TILES(X) X(4, 1) X(4, 8)
// Blocks that a processor shall hold, which bounds the registers.
#define K3_DOT_BLOCKS(NO, NR) ((NO) * (NR) <= 32 ? 2 : 1)
#define K3_DOT_MXFP4_BLOCKS(NO, NR) ((NO) * (NR) <= 16 ? 2 : 1)

// Columns of x in one of the two slabs: whole chunks.
template <int DT, int NR> struct k3_slab {
    static constexpr int CHUNK = DT == K3_MXFP4 ? 1024 : 256, FIT = NR == 1 ? 2048 : 4096 / NR;
    static constexpr int COLUMNS = FIT < CHUNK ? CHUNK : FIT, BYTES = 2 * NR * COLUMNS * 4;
};

#ifdef K3_LAUNCH

struct k3_dot_tile {
    int64_t outs, rows;                                                // NO, NR
    int64_t of_rows;                                                   // tiles that cover all rows
    size_t shared;
};
// The tile for products of `rows` rows with `outs` outputs in all.  Float32 weights leave registers for 16 sums.
static inline k3_dot_tile k3_choose_tile(int64_t outs, int64_t rows, int dtype) {
    k3_dot_tile t = {4, 8, 0, k3_slab<K3_BF16, 8>::BYTES};
    if (rows == 1) {
        t.rows = 1;
        t.shared = k3_slab<K3_BF16, 1>::BYTES;
    } else if (dtype == K3_MXFP4) {
        t.shared = k3_slab<K3_MXFP4, 8>::BYTES;
    } else if (rows <= 4) {
        t.rows = 4;
    } else if (dtype == K3_F32) {
        t.outs = 2;
    } else if (rows > 8) {
        t.rows = 16;
        t.outs = 8;
    }
    t.of_rows = ceil_div(rows, t.rows);
    if (dtype == K3_MXFP4) return t;
    while (t.outs > (t.rows < 8 ? 1 : 2) && ceil_div(outs, K3_DOT_WARPS * t.outs) * t.of_rows < K3_DOT_FILL) t.outs /= 2;
    return t;
}

#else

// ---------------------------------------------------------------------------------------------
// one run of weights, as it is stored, and its columns four by four
// ---------------------------------------------------------------------------------------------

template <int DT> struct k3_run;

template <> struct k3_run<K3_BF16> {
    enum { QUADS = 2 };
    uint4 q;
    __device__ __forceinline__ void load(const char* row, uint32_t run, uint32_t cols) {
        q = make_uint4(0, 0, 0, 0);
        if (8 * run < cols) q = k3_stream16(row + 16 * run);
    }
    __device__ __forceinline__ void quad(int i, float* w) const {
        const uint32_t a = i ? q.z : q.x, b = i ? q.w : q.y;
        w[0] = bf16_low(a);
        w[1] = bf16_high(a);
        w[2] = bf16_low(b);
        w[3] = bf16_high(b);
    }
};

template <> struct k3_run<K3_F32> {
    enum { QUADS = 2 };
    uint4 q[2];
    __device__ __forceinline__ void load(const char* row, uint32_t run, uint32_t cols) {
        q[0] = q[1] = make_uint4(0, 0, 0, 0);
        if (8 * run < cols) q[0] = k3_load16(row + 32 * run);
        if (8 * run + 4 < cols) q[1] = k3_load16(row + 32 * run + 16);
    }
    __device__ __forceinline__ void quad(int i, float* w) const {
        w[0] = m_bits(q[i].x);
        w[1] = m_bits(q[i].y);
        w[2] = m_bits(q[i].z);
        w[3] = m_bits(q[i].w);
    }
};

template <> struct k3_run<K3_MXFP4> {
    enum { QUADS = 8 };
    uint4 q = {0, 0, 0, 0};
    uint32_t exponent = 0;
    // Past the last column the codes of the block before meet zeros, and add nothing to its sum.
    __device__ __forceinline__ void load(const char* row, uint32_t run, uint32_t cols) {
        if (32 * run < cols) q = k3_stream16(row + 16 * run);
    }
    __device__ __forceinline__ void load_scale(const uint8_t* row, uint32_t run, uint32_t cols) {
        if (32 * run < cols) exponent = __ldg(row + run);
    }
    __device__ __forceinline__ float scale() const { return e8m0_to_f32((uint8_t)exponent); }
    // Of the FP16 number of a code only the upper byte is not zero: a permutation finds it among eight.  Another one,
    // with the sign in its selector, finds 0xff or 0x80.
    __device__ __forceinline__ void quad(int i, float* w) const {
        const uint32_t word = i < 2 ? q.x : i < 4 ? q.y : i < 6 ? q.z : q.w, codes = i & 1 ? word >> 16 : word;
        const uint32_t magnitude = k3_permute(0x3e3c3800u, 0x46444240u, codes & 0x7777u);
        const uint32_t sign = k3_permute(0x80808080u, 0x80808080u, codes) << 1;
        const uint32_t bytes = magnitude | (sign & 0x80808080u);
        k3_half2_to_f32(k3_permute(bytes, 0, 0x1404u), w, w + 1);
        k3_half2_to_f32(k3_permute(bytes, 0, 0x3424u), w + 2, w + 3);
    }
};

// ---------------------------------------------------------------------------------------------
// x in shared memory
// ---------------------------------------------------------------------------------------------

// What a block works on, in shared memory.
template <int NR> struct k3_tile {
    const float* x[NR];                                                // rows; NULL where there are fewer than NR
    float* y[NR];
    k3_matrix w[2];                                                    // one matrix, or gate and up
    int number;                                                        // among the tiles of outputs
    int wide;                                                          // x can be copied 16 bytes at a time

    // The first output of a warp.  It is read again where it is needed, since registers are scarce.
    template <int NO> __device__ __forceinline__ int out() const { return (number * K3_DOT_WARPS + (int)k3_warp()) * NO; }
};
K3_DEVICE int k3_rows_are_wide(const float* x, int64_t ldx) { return (((uintptr_t)x | (uintptr_t)(4 * ldx)) & 15) == 0; }

// Where quad i of lane l lies in its chunk: neither the copies nor the loads meet in a bank.
template <int QUADS> K3_DEVICE unsigned k3_quad_place(unsigned i, unsigned lane) { return 32 * i + (lane ^ i * (8 / QUADS)); }

// Starts copying COLUMNS columns of all rows, from `first` on.
template <int QUADS, int COLUMNS, int NR>
K3_DEVICE void k3_copy_slab(float4* slab, const k3_tile<NR>& tile, unsigned first, unsigned cols) {
    enum { EACH = COLUMNS / 4, CHUNK = 32 * QUADS };                   // quads of a row, of a chunk
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < NR * EACH; i += K3_DOT_THREADS) {
        const unsigned row = i / EACH, in_chunk = i % CHUNK, column = first + 4 * (i % EACH);
        if (column - 4 * in_chunk >= cols) continue;                   // a chunk that nobody reads
        float4* to = slab + i - in_chunk + k3_quad_place<QUADS>(in_chunk % QUADS, in_chunk / QUADS);
        const unsigned n = tile.x[row] && column < cols ? min(4u, cols - column) : 0;
        const float* from = n ? tile.x[row] + column : tile.x[0];
        if (tile.wide) {
            k3_copy16(to, from, 4 * n);
        } else {
            for (unsigned k = 0; k < 4; ++k) k3_copy4((float*)to + k, k < n ? from + k : tile.x[0], k < n ? 4 : 0);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// the products
// ---------------------------------------------------------------------------------------------

// What each lane adds to the NO * NR sums of a warp; number NR * o + r is that of its output o and row r.
template <int DT, int NO, int NR>
K3_DEVICE void k3_dot(const k3_matrix& w, const k3_tile<NR>& tile, float* sum /*[NO * NR]*/) {
    typedef k3_run<DT> Run;
    typedef k3_slab<DT, NR> Slab;
    enum { QUADS = Run::QUADS, CHUNK = Slab::CHUNK, COLUMNS = Slab::COLUMNS, CHUNKS = COLUMNS / CHUNK };
    enum { DEEP = DT == K3_F32 || NR > (DT == K3_MXFP4 ? 1 : 4) ? 1 : 8 / NO, AHEAD = DEEP < CHUNKS ? DEEP : CHUNKS };
    float4* slabs = reinterpret_cast<float4*>(k3_dyn);                 // [2][NR][COLUMNS / 4]
    const unsigned cols = (unsigned)w.cols;
    const int first = min(tile.template out<NO>(), (int)w.rows - 1);   // outputs past the last repeat it
    const char* rows = (const char*)w.data + first * w.pitch;
    const uint8_t* scales = static_cast<const uint8_t*>(w.scale) + (int64_t)first * (cols / 32);
    uint32_t row[NO], scale_row[NO];                                   // relative to those, in bytes
#pragma unroll
    for (int o = 0; o < NO; ++o) {
        const uint32_t r = (uint32_t)min(o, (int)w.rows - 1 - first);
        row[o] = r * (uint32_t)w.pitch;
        scale_row[o] = r * (cols / 32);
    }
    Run run[AHEAD][NO];
    const auto load = [&](int a, unsigned column) {
#pragma unroll
        for (int o = 0; o < NO; ++o) run[a][o].load(rows + row[o], column / (4 * QUADS) + k3_lane(), cols);
    };
    const auto load_scales = [&](int a, unsigned column) {
        if constexpr (DT == K3_MXFP4) {
#pragma unroll
            for (int o = 0; o < NO; ++o) run[a][o].load_scale(scales + scale_row[o], column / (4 * QUADS) + k3_lane(), cols);
        }
    };
    const auto copy = [&](unsigned column) {
        k3_copy_slab<QUADS, COLUMNS, NR>(slabs + column / COLUMNS % 2 * (NR * COLUMNS / 4), tile, column, cols);
        k3_copy_commit();
    };
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        load(a, a * CHUNK);
        load_scales(a, a * CHUNK);
    }
#pragma unroll
    for (int i = 0; i < NO * NR; ++i) sum[i] = 0.0f;
    __syncthreads();                                                   // the slabs are free
    copy(0);
    for (unsigned column = 0; column < cols; column += AHEAD * CHUNK) {
        if (column % COLUMNS == 0) {
            k3_copy_wait<0>();
            __syncthreads();                                           // this slab is there, the other one has been read
            if (column + COLUMNS < cols) copy(column + COLUMNS);
        }
        const float4* at = slabs + column / COLUMNS % 2 * (NR * COLUMNS / 4) + column % COLUMNS / 4;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (column + a * CHUNK >= cols) break;
            float block[NO * NR];
            float* to = DT == K3_MXFP4 ? block : sum;
            if constexpr (DT == K3_MXFP4) {
#pragma unroll
                for (int i = 0; i < NO * NR; ++i) block[i] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                float v[NO][4];
#pragma unroll
                for (int o = 0; o < NO; ++o) run[a][o].quad(i, v[o]);
                if (i == QUADS - 1) load(a, column + (a + AHEAD) * CHUNK);  // all are decoded, so the registers are free
                const float4* here = at + a * (CHUNK / 4) + k3_quad_place<QUADS>(i, k3_lane());
#pragma unroll
                for (int r = 0; r < NR; ++r) {
                    const float4 u = here[r * (COLUMNS / 4)];
#pragma unroll
                    for (int o = 0; o < NO; ++o) {
                        float& s = to[o * NR + r];
                        s = m_fma(v[o][3], u.w, m_fma(v[o][2], u.z, m_fma(v[o][1], u.y, m_fma(v[o][0], u.x, s))));
                    }
                }
            }
            if constexpr (DT == K3_MXFP4) {
#pragma unroll
                for (int i = 0; i < NO * NR; ++i) sum[i] = m_fma(run[a][i / NR].scale(), block[i], sum[i]);
                load_scales(a, column + (a + AHEAD) * CHUNK);
            }
        }
    }
}

// N sums over the lanes at once, with the bits of k3_warp_sum: at each step a lane gives half of its values away and
// keeps the other half, until it has number N * lane / 32 (and the next N / 32 - 1).
template <int N, int M = 16> K3_DEVICE void k3_warp_sums(float* v /*[N]*/) {
    const bool upper = k3_lane() & M;
    if constexpr (N == 1) v[0] += __shfl_xor_sync(K3_ALL_LANES, v[0], M);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const float keep = upper ? v[N / 2 + i] : v[i], give = upper ? v[i] : v[N / 2 + i];
        v[i] = keep + __shfl_xor_sync(K3_ALL_LANES, give, M);
    }
    if constexpr (M > 1) k3_warp_sums<(N > 1 ? N / 2 : 1), M / 2>(v);
}

// The sums of a tile, spread over the lanes as k3_warp_sums leaves them.  Without MXFP4, tiles of more than 16 sums are
// for BF16 only: there are registers for no other.
template <int NO, int NR, bool MXFP4>
K3_DEVICE void k3_tile_sums(const k3_matrix& w, const k3_tile<NR>& tile, float* sum /*[NO * NR]*/) {
    constexpr bool F32 = MXFP4 || NO * NR <= 16;
    if (MXFP4 && w.dtype == K3_MXFP4) {
        if constexpr (MXFP4) k3_dot<K3_MXFP4, NO, NR>(w, tile, sum);
    } else if (F32 && w.dtype == K3_F32) {
        if constexpr (F32) k3_dot<K3_F32, NO, NR>(w, tile, sum);
    } else {
        k3_dot<K3_BF16, NO, NR>(w, tile, sum);
    }
    k3_warp_sums<NO * NR>(sum);
}

// Calls put(place, value) for each value of a tile and its place in y.
template <int NO, int NR, class F> K3_DEVICE void k3_put_tile(const k3_tile<NR>& tile, const float* v, F put) {
    enum { N = NO * NR, EACH = N < 32 ? 1 : N / 32, LANES = N < 32 ? 32 / N : 1 };
    if (k3_lane() % LANES) return;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int n = (int)k3_lane() * N / 32 + i, out = tile.template out<NO>() + n / NR;
        float* y = tile.y[n % NR];
        if (out < tile.w[0].rows && y) put(y[out], v[i]);
    }
}

// y = x W^T.
template <int NO, int NR, bool MXFP4> K3_DEVICE void k3_product(const k3_tile<NR>& tile) {
    __syncthreads();  // the tile is known
    float sum[NO * NR];
    k3_tile_sums<NO, NR, MXFP4>(tile.w[0], tile, sum);
    k3_put_tile<NO, NR>(tile, sum, [](float& y, float v) { y = v; });
}

// y = SiTU(x Wgate^T, x Wup^T).  The gate waits in y.
template <int NO, int NR, bool MXFP4> K3_DEVICE void k3_situ_product(const k3_tile<NR>& tile, float beta, float linear_beta) {
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < 2; ++m) {
        float sum[NO * NR];
        k3_tile_sums<NO, NR, MXFP4>(tile.w[m], tile, sum);
        k3_put_tile<NO, NR>(tile, sum, [&](float& y, float v) { y = m == 0 ? v : k3_situ(y, v, beta, linear_beta); });
    }
}

#endif
#endif
