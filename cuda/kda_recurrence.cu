// SPDX-License-Identifier: MIT
//
// KDA, the delta rule.  Per head, with the state S as [key, value], row-major, in float32:
//
//     S <- diag(alpha) S ;  r = v - S^T k ;  S <- S + (beta k) r^T ;  o = S^T q
//
// A block of 64 threads per segment, head and strip of 32 value columns.  The strip of the state stays in registers
// while the rows of the segment pass, so that it is read from memory once and written once.  A thread holds four
// columns of an eighth of the keys: lane l has columns 4 (l % 8) .. + 3 and the eighth 4 warp + l / 8.  One barrier a row:
// rows are fetched two ahead into four slots, and what the warps add up for each other has two.
//
// Sums over keys: a thread's own, ascending; the four eighths of a warp, (e, e ^ 2) and then (e, e ^ 1); the two warps.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#include "ops.h"
#endif

enum { RECURRENCE_THREADS = 64, RECURRENCE_STRIP = 32, RECURRENCE_PARTS = 8 };

#ifndef K3_LAUNCH

// One row's vectors of a head; keys and columns past the head's width are zero.
template <int KEYS> struct __align__(16) recurrence_row {
    float q[KEYS], k[KEYS], alpha[KEYS], v[RECURRENCE_STRIP], beta, _pad[3];
};

template <int N> K3_DEVICE void recurrence_read(float* to, const float* from) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 v = k3_load4(from + i);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
}

// The sum over the four parts of the keys that a warp has, in every lane.
K3_DEVICE float4 recurrence_sum(float4 v) {
#pragma unroll
    for (int m = 16; m >= 8; m >>= 1) {
        const float4 other = make_float4(__shfl_xor_sync(K3_ALL_LANES, v.x, m), __shfl_xor_sync(K3_ALL_LANES, v.y, m),
                                         __shfl_xor_sync(K3_ALL_LANES, v.z, m), __shfl_xor_sync(K3_ALL_LANES, v.w, m));
        v = k3_add4(v, other);
    }
    return v;
}

// KEYS: those that a thread holds.
template <int KEYS>
K3_DEVICE void recurrence(const k3_segment* segments, int64_t layer, const float* q, const float* k, const float* v,
                          const float* alpha, const float* beta, float* o, int dim_k, int dim_v) {
    enum { SLOTS = 4, ALL_KEYS = KEYS * RECURRENCE_PARTS };
    static __shared__ recurrence_row<ALL_KEYS> slots[SLOTS];
    static __shared__ __align__(16) float sums[2][2][RECURRENCE_STRIP], outs[2][2][RECURRENCE_STRIP];   // [row % 2][warp]
    const k3_segment* seg = segments + blockIdx.z;
    const int rows = (int)seg->rows;
    if (rows == 0) return;
    const int thread = (int)threadIdx.x, lane = (int)k3_lane(), warp = (int)k3_warp();
    const int heads = (int)gridDim.y, head = (int)blockIdx.y, strip = (int)blockIdx.x * RECURRENCE_STRIP;
    const int width = min((int)RECURRENCE_STRIP, dim_v - strip);
    const int own = 4 * (lane % 8), first = KEYS * (4 * warp + lane / 8);          // the thread's columns and keys

    const int64_t at = seg->row * heads + head, key_step = (int64_t)heads * dim_k, value_step = (int64_t)heads * dim_v;
    q += at * dim_k;
    k += at * dim_k;
    alpha += at * dim_k;
    v += at * dim_v + strip;
    o += at * dim_v + strip;
    beta += at;
    const bool wide_keys = k3_wide(dim_k, q, k, alpha);
    const auto fetch = [&](int t) {
        if (t < rows) {
            recurrence_row<ALL_KEYS>* slot = &slots[t % SLOTS];
            const int64_t from = t * key_step;
            if (!wide_keys) {
#pragma unroll 1
                for (int i = thread; i < dim_k; i += RECURRENCE_THREADS) {
                    k3_copy4(slot->q + i, q + from + i);
                    k3_copy4(slot->k + i, k + from + i);
                    k3_copy4(slot->alpha + i, alpha + from + i);
                }
            } else if (4 * thread < dim_k) {                                       // at most 256 keys
                k3_copy16(slot->q + 4 * thread, q + from + 4 * thread);
                k3_copy16(slot->k + 4 * thread, k + from + 4 * thread);
                k3_copy16(slot->alpha + 4 * thread, alpha + from + 4 * thread);
            }
            if (thread < width) k3_copy4(slot->v + thread, v + t * value_step + thread);
            if (thread == RECURRENCE_STRIP) k3_copy4(&slot->beta, beta + (int64_t)t * heads);
        }
        k3_copy_commit();
    };
    const auto finish = [&](int t) {                                               // the row's output
        if (thread < width) o[t * value_step + thread] = outs[t & 1][0][thread] + outs[t & 1][1][thread];
    };

    fetch(0);
    fetch(1);
    const int64_t state = layer + (int64_t)head * dim_k * dim_v + strip;
    const float* now = seg->now.state + state;
    float* next = seg->next.state + state;
    const bool wide = k3_wide(dim_v, now, next);
    float4 S[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        S[i] = k3_all4(0.0f);
        if (first + i < dim_k) S[i] = k3_row_load(now + (first + i) * dim_v, own, width, wide);
    }
    for (int s = 0; s < SLOTS; ++s) {
        for (int i = dim_k + thread; i < ALL_KEYS; i += RECURRENCE_THREADS)
            slots[s].q[i] = slots[s].k[i] = slots[s].alpha[i] = 0.0f;
        if (thread >= width && thread < RECURRENCE_STRIP) slots[s].v[thread] = 0.0f;
    }
    k3_copy_wait<1>();
    __syncthreads();

    for (int t = 0; t < rows; ++t) {
        fetch(t + 2);
        const recurrence_row<ALL_KEYS>* row = &slots[t % SLOTS];
        float kk[KEYS], a[KEYS];
        recurrence_read<KEYS>(kk, row->k + first);
        recurrence_read<KEYS>(a, row->alpha + first);
        float4 sum = k3_all4(0.0f);
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            S[i] = k3_mul4(k3_all4(a[i]), S[i]);
            sum = k3_fma4(S[i], k3_all4(kk[i]), sum);
        }
        sum = recurrence_sum(sum);
        if (lane < 8) k3_store4(&sums[t & 1][warp][own], sum);
        k3_copy_wait<1>();                                                         // row t + 1 is there
        __syncthreads();

        if (t > 0) finish(t - 1);
        sum = k3_add4(k3_load4(&sums[t & 1][0][own]), k3_load4(&sums[t & 1][1][own]));
        const float4 r = k3_sub4(k3_load4(row->v + own), sum);
        float qq[KEYS];
        recurrence_read<KEYS>(qq, row->q + first);
        float4 out = k3_all4(0.0f);
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            S[i] = k3_fma4(k3_all4(row->beta * kk[i]), r, S[i]);
            out = k3_fma4(S[i], k3_all4(qq[i]), out);
        }
        out = recurrence_sum(out);
        if (lane < 8) k3_store4(&outs[t & 1][warp][own], out);
    }
    __syncthreads();
    finish(rows - 1);
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        if (first + i < dim_k) k3_row_store(next + (first + i) * dim_v, own, width, wide, S[i]);
    }
}

#define RECURRENCE_KERNEL(KEYS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(RECURRENCE_THREADS, 2)                                                     \
        k3_kda_recurrence_##KEYS(const k3_segment* segments, int64_t layer, const float* q, const float* k, const float* v, \
                                 const float* alpha, const float* beta, float* o, int dim_k, int dim_v) {                   \
        recurrence<KEYS>(segments, layer, q, k, v, alpha, beta, o, dim_k, dim_v);                                           \
    }
RECURRENCE_KERNEL(4)
RECURRENCE_KERNEL(8)
RECURRENCE_KERNEL(16)
RECURRENCE_KERNEL(32)

#else

#define RECURRENCE_TYPES \
    const k3_segment*, int64_t, const float*, const float*, const float*, const float*, const float*, float*, int, int
K3_KERNEL(k3_kda_recurrence_4, RECURRENCE_TYPES)
K3_KERNEL(k3_kda_recurrence_8, RECURRENCE_TYPES)
K3_KERNEL(k3_kda_recurrence_16, RECURRENCE_TYPES)
K3_KERNEL(k3_kda_recurrence_32, RECURRENCE_TYPES)

// Heads of up to 256 keys.
static int cuda_kda_recurrence(void* ctx, const k3_dims* dims, const k3_pass* pass, int64_t mixer_index, const float* q,
                               const float* k, const float* v, const float* alpha, const float* beta, float* o) {
    const int64_t keys = ceil_div(dims->kda_head_k, RECURRENCE_PARTS);             // of a thread
    if (keys > 32) return 801;  // CUDA_ERROR_NOT_SUPPORTED
    const auto& kernel = keys <= 4    ? k3_kda_recurrence_4
                         : keys <= 8  ? k3_kda_recurrence_8
                         : keys <= 16 ? k3_kda_recurrence_16
                                      : k3_kda_recurrence_32;
    return kernel((k3_cuda*)ctx, grid(ceil_div(dims->kda_head_v, RECURRENCE_STRIP), dims->kda_num_heads, pass->n_segments),
                  RECURRENCE_THREADS, 0, pass->segments, mixer_index * dims->state_stride, q, k, v, alpha, beta, o,
                  (int)dims->kda_head_k, (int)dims->kda_head_v);
}

#endif
