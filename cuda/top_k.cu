// SPDX-License-Identifier: MIT
//
// For sampling on the device: the k largest logits of each row, descending and lowest id first among equals, and
// log(sum of exp(logit)).  A NaN ranks last and makes that sum one; minus zero counts as zero.
//
// A block per slice of 4,096 logits selects the k largest of it, one after the other; then a block per row merges the
// slices, a thread holding the first of each that is left.  The sum of a slice, relative to its largest logit: thread t
// takes elements 4t .. 4t + 3 of each chunk of 1,024, then the block; of a row: a thread per slice, then the block.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_row.cuh"
#endif

enum { TOP_K_THREADS = 256, TOP_K_EACH = 16, TOP_K_SLICE = TOP_K_THREADS * TOP_K_EACH, TOP_K_MAX = 64 };

#ifndef K3_LAUNCH

enum { TOP_K_WARPS = TOP_K_THREADS / K3_WARP };

// A logit and its id as one number that is larger for the logit that comes first, and never 0.
K3_DEVICE uint64_t top_k_key(float logit, int id) {
    const uint32_t u = m_word(logit + 0.0f);
    const uint32_t order = logit != logit ? 0 : u >> 31 ? ~u : u | 0x80000000u;
    return (uint64_t)order << 32 | ~(uint32_t)id;
}
K3_DEVICE int top_k_id(uint64_t key) { return (int)~(uint32_t)key; }
K3_DEVICE float top_k_logit(uint64_t key) {
    const uint32_t order = (uint32_t)(key >> 32);
    return m_bits(order >> 31 ? order & 0x7fffffffu : ~order);
}
// What exponents are relative to: finite, so that logits of minus infinity count as nothing.
K3_DEVICE float top_k_base(uint64_t largest) {
    const float lowest = m_bits(0xff7fffffu), v = top_k_logit(largest);
    return m_less(lowest, v, v, lowest);
}

// The largest over the block, in every thread; calls alternate between two `cells`.
K3_DEVICE uint64_t top_k_largest(uint64_t key, uint64_t* cells /*[TOP_K_WARPS]*/) {
    for (int m = 16; m > 0; m >>= 1) key = max(key, (uint64_t)__shfl_xor_sync(K3_ALL_LANES, key, m));
    if (k3_lane() == 0) cells[k3_warp()] = key;
    __syncthreads();
    key = cells[k3_lane() % TOP_K_WARPS];
    for (int m = TOP_K_WARPS / 2; m > 0; m >>= 1) key = max(key, (uint64_t)__shfl_xor_sync(K3_ALL_LANES, key, m));
    return key;
}

extern "C" __global__ void __launch_bounds__(TOP_K_THREADS)
    k3_top_k_slice(const float* logits, int64_t ld, int n, int k, uint64_t* keys /*[rows, slices, k]*/,
                   float* sums /*[rows, slices]*/) {
    static __shared__ uint64_t cells[2][TOP_K_WARPS];
    static __shared__ float partial[K3_WARP];
    const int64_t slice = (int64_t)blockIdx.y * gridDim.x + blockIdx.x;
    logits += blockIdx.y * ld;
    keys += slice * k;
    const bool wide = k3_wide(n, logits);
    uint64_t mine[TOP_K_EACH];                                         // 0 past the end of the row
#pragma unroll
    for (int c = 0; c < TOP_K_EACH; c += 4) {
        const int i = (int)blockIdx.x * TOP_K_SLICE + c * TOP_K_THREADS + 4 * (int)threadIdx.x;
        const float4 v = k3_row_load(logits, i, n, wide);
        mine[c] = i < n ? top_k_key(v.x, i) : 0;
        mine[c + 1] = i + 1 < n ? top_k_key(v.y, i + 1) : 0;
        mine[c + 2] = i + 2 < n ? top_k_key(v.z, i + 2) : 0;
        mine[c + 3] = i + 3 < n ? top_k_key(v.w, i + 3) : 0;
    }
    uint64_t left = 0, largest = 0;                                    // of this thread's own, of the slice
#pragma unroll
    for (int c = 0; c < TOP_K_EACH; ++c) left = max(left, mine[c]);
    for (int i = 0; i < k; ++i) {
        const uint64_t key = top_k_largest(left, cells[i & 1]);
        if (i == 0) largest = key;
        if (threadIdx.x == 0) keys[i] = key;
        if (left != key) continue;
        left = 0;
#pragma unroll
        for (int c = 0; c < TOP_K_EACH; ++c) left = mine[c] < key ? max(left, mine[c]) : left;
    }
    const float base = top_k_base(largest);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < TOP_K_EACH; ++c) sum += mine[c] ? k3_exp(top_k_logit(mine[c]) - base) : 0.0f;
    sum = k3_block_sum(sum, partial);
    if (threadIdx.x == 0) sums[slice] = sum;
}

extern "C" __global__ void __launch_bounds__(TOP_K_THREADS)
    k3_top_k_merge(const uint64_t* keys, const float* sums, int slices, int k, int32_t* ids /*[rows, k]*/,
                   float* values /*[rows, k]*/, float* log_sum /*[rows]*/) {
    static __shared__ uint64_t cells[2][TOP_K_WARPS];
    static __shared__ float partial[K3_WARP];
    const int64_t row = blockIdx.x, slice = row * slices + threadIdx.x;
    const bool mine = (int)threadIdx.x < slices;
    const uint64_t* list = keys + slice * k;
    const uint64_t first = mine ? list[0] : 0;
    uint64_t left = first, largest = 0;
    for (int i = 0, at = 1; i < k; ++i) {
        const uint64_t key = top_k_largest(left, cells[i & 1]);
        if (i == 0) largest = key;
        if (threadIdx.x == 0) {
            ids[row * k + i] = top_k_id(key);
            values[row * k + i] = top_k_logit(key);
        }
        if (left == key) left = at < k ? list[at++] : 0;
    }
    const float base = top_k_base(largest);
    const float sum = k3_block_sum(mine ? sums[slice] * k3_exp(top_k_base(first) - base) : 0.0f, partial);
    if (threadIdx.x == 0) log_sum[row] = sum == sum ? base + k3_log(sum) : sum;
}

#else

K3_KERNEL(k3_top_k_slice, const float*, int64_t, int, int, uint64_t*, float*)
K3_KERNEL(k3_top_k_merge, const uint64_t*, const float*, int, int, int32_t*, float*, float*)

static int64_t top_k_work_bytes(int64_t rows, int64_t n, int64_t k) {
    return rows * ceil_div(n, TOP_K_SLICE) * (k * (int64_t)sizeof(uint64_t) + (int64_t)sizeof(float));
}

// Rows of up to a million logits, 1 <= k <= min(n, 64).
static int cuda_top_k(k3_cuda* c, const float* logits, int64_t rows, int64_t n, int64_t k, int32_t* ids, float* values,
                      float* log_sum) {
    const int64_t slices = ceil_div(n, TOP_K_SLICE);
    if (slices > TOP_K_THREADS || k < 1 || k > TOP_K_MAX || k > n) return 801;  // CUDA_ERROR_NOT_SUPPORTED
    if (top_k_work_bytes(rows, n, k) > c->work_bytes) return 1;                 // CUDA_ERROR_INVALID_VALUE
    uint64_t* keys = (uint64_t*)c->work;
    float* sums = (float*)(keys + rows * slices * k);
    const int status = k3_top_k_slice(c, grid(slices, rows), TOP_K_THREADS, 0, logits, n, (int)n, (int)k, keys, sums);
    if (status) return status;
    return k3_top_k_merge(c, grid(rows), TOP_K_THREADS, 0, keys, sums, (int)slices, (int)k, ids, values, log_sum);
}

extern "C" int k3_cuda_top_k(k3_cuda* c, const float* logits, int64_t rows, int64_t n, int64_t k, int32_t* ids, float* values,
                             float* log_sum) {
    return cuda_top_k(c, logits, rows, n, k, ids, values, log_sum);
}

#endif
