// SPDX-License-Identifier: MIT
//
// Correct kernels of the kinds that the project has, for the tests of the emulator: none may be reported, under any
// schedule.  They are written as the project's own are, and compile with nvcc as well.

#include "k3_prim.cuh"

// y = x * norm / sqrt(mean(x^2) + eps): one block a row, the row in dynamic shared memory, a reduction by shuffles.
extern "C" __global__ void __launch_bounds__(256)
    good_rms_norm(const float* x /*[rows, n]*/, const float* norm /*[n]*/, float* y /*[rows, n]*/, int n, float eps) {
    float* row = reinterpret_cast<float*>(k3_dyn);                     // [n]
    static __shared__ float partial[K3_WARP];
    const float* in = x + (int64_t)blockIdx.x * n;
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        row[i] = in[i];
        sum = m_fma(row[i], row[i], sum);
    }
    sum = k3_block_sum(sum, partial);
    const float scale = 1.0f / m_sqrt(sum / (float)n + eps);
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) y[(int64_t)blockIdx.x * n + i] = row[i] * scale * norm[i];
}

// y = W x with BF16 weights: a warp per output row, x in tiles of static shared memory.
extern "C" __global__ void good_gemv(const k3_bf16* w /*[rows, cols]*/, const float* x /*[cols]*/, float* y /*[rows]*/, int rows,
                                     int cols) {
    enum { TILE = 64 };
    static __shared__ float tile[TILE];
    const int row = (int)(blockIdx.x * (blockDim.x / K3_WARP) + k3_warp());
    float sum = 0.0f;
    for (int start = 0; start < cols; start += TILE) {
        __syncthreads();                                               // the last tile has been read
        for (int i = (int)threadIdx.x; i < TILE; i += (int)blockDim.x) tile[i] = start + i < cols ? x[start + i] : 0.0f;
        __syncthreads();
        if (row < rows) {
            for (int i = (int)k3_lane(); i < TILE && start + i < cols; i += K3_WARP) {
                sum = m_fma(bf16_to_f32(w[(int64_t)row * cols + start + i]), tile[i], sum);
            }
        }
    }
    sum = k3_warp_sum(sum);
    if (row < rows && k3_lane() == 0) y[row] = sum;
}

// sums[b] = sum of row b: cp.async into two buffers in turn, one copied while the other is summed.
extern "C" __global__ void good_pipeline(const float* x /*[blocks, chunks, 128]*/, float* sums /*[blocks]*/, int chunks) {
    static __shared__ __align__(16) float buffer[2][128];
    static __shared__ float partial[K3_WARP];
    const float* in = x + (int64_t)blockIdx.x * chunks * 128;
    const int t = (int)threadIdx.x;
    if (t < 32) k3_copy16(&buffer[0][4 * t], in + 4 * t);
    k3_copy_commit();
    float sum = 0.0f;
    for (int c = 0; c < chunks; ++c) {
        if (c + 1 < chunks && t < 32) k3_copy16(&buffer[(c + 1) & 1][4 * t], in + (int64_t)(c + 1) * 128 + 4 * t);
        k3_copy_commit();
        k3_copy_wait<1>();
        __syncthreads();
        for (int i = t; i < 128; i += (int)blockDim.x) sum += buffer[c & 1][i];
        __syncthreads();                                               // before this buffer is copied into again
    }
    sum = k3_block_sum(sum, partial);
    if (t == 0) sums[blockIdx.x] = sum;
}

// A histogram: atomics in shared memory, then in global memory.
extern "C" __global__ void good_histogram(const uint8_t* x /*[n]*/, unsigned* bins /*[16]*/, int n) {
    static __shared__ unsigned mine[16];
    if (threadIdx.x < 16) mine[threadIdx.x] = 0;
    __syncthreads();
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x)) {
        atomicAdd(&mine[x[i] & 15], 1);
    }
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], mine[threadIdx.x]);
}

// Neighbours write bytes and halves of one word, which is no race.
extern "C" __global__ void good_narrow(uint8_t* bytes /*[n]*/, k3_bf16* halves /*[n]*/, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    bytes[i] = (uint8_t)i;
    halves[i] = f32_to_bf16((float)i);
}

// An exchange inside each warp through shared memory, with __syncwarp instead of a barrier.
extern "C" __global__ void good_warp_exchange(const float* x /*[n]*/, float* y /*[n]*/) {
    static __shared__ float cell[256];
    const int t = (int)threadIdx.x, i = (int)(blockIdx.x * blockDim.x) + t;
    cell[t] = x[i];
    __syncwarp();
    const float other = cell[t ^ 1];
    __syncwarp();
    cell[t] = other * 2.0f;
    __syncwarp();
    y[i] = cell[t ^ 31];
}

// The same in half warps: every lane reads what one has written, which then writes again.
extern "C" __global__ void good_half_warp_broadcast(const float* x /*[n]*/, float* y /*[n]*/) {
    static __shared__ float cell[16];
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const bool low = k3_lane() < 16;
    const unsigned mask = low ? 0x0000ffffu : 0xffff0000u;
    float* mine = &cell[threadIdx.x / 16];
    float sum = 0.0f;
    for (int step = 0; step < 4; ++step) {
        if (k3_lane() % 16 == 4u * step) *mine = x[i];
        __syncwarp(mask);
        sum += *mine;
        __syncwarp(mask);
    }
    y[i] = sum;
}

// Half warps that go different ways, each with its own mask, and votes.
extern "C" __global__ void good_half_warps(const int* x /*[n]*/, int* y /*[n]*/) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const bool low = k3_lane() < 16;
    const unsigned mask = low ? 0x0000ffffu : 0xffff0000u;
    int v = x[i];
    if (low) {
        for (int m = 8; m > 0; m >>= 1) v += __shfl_xor_sync(mask, v, m);
    } else {
        for (int m = 8; m > 0; m >>= 1) v = max(v, __shfl_xor_sync(mask, v, m));
    }
    const unsigned odd = __ballot_sync(K3_ALL_LANES, x[i] & 1);
    y[i] = v + __popc(odd) + (__any_sync(K3_ALL_LANES, v < 0) ? 1000 : 0) + (__all_sync(K3_ALL_LANES, v > -5) ? 0 : 2000);
}

// The block that comes last adds up what all have written: a fence, a counter, and its value.
extern "C" __global__ void good_last_block(const float* x /*[blocks, threads]*/, float* partial /*[blocks]*/, unsigned* count,
                                           float* total) {
    static __shared__ float scratch[K3_WARP];
    static __shared__ bool last;
    const float sum = k3_block_sum(x[blockIdx.x * blockDim.x + threadIdx.x], scratch);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(count, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float all = 0.0f;
    for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) all += partial[b];
    all = k3_block_sum(all, scratch);
    if (threadIdx.x == 0) *total = all;
}

// d = a b^T for one warp on the tensor cores.
extern "C" __global__ void good_mma(const k3_bf16* a /*[16, 16]*/, const k3_bf16* b /*[8, 16]*/, float* d /*[16, 8]*/) {
    const int g = (int)k3_lane() >> 2, t = (int)k3_lane() & 3;
    const uint32_t* aw = reinterpret_cast<const uint32_t*>(a);         // [16, 8]
    const uint32_t* bw = reinterpret_cast<const uint32_t*>(b);         // [8, 8]
    const uint32_t fa[4] = {aw[g * 8 + t], aw[(g + 8) * 8 + t], aw[g * 8 + t + 4], aw[(g + 8) * 8 + t + 4]};
    const uint32_t fb[2] = {bw[g * 8 + t], bw[g * 8 + t + 4]};
    float fd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    k3_mma_bf16(fd, fa, fb);
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = fd[i];
}

// The loads and copies of k3_prim.cuh, and the largest of each warp where some are NaN.
extern "C" __global__ void good_loads(const float* x /*[4 * 64]*/, float* y /*[5, 64]*/) {
    static __shared__ __align__(16) float tile[64 * 4];
    static __shared__ float single[64];
    const int t = (int)threadIdx.x;
    k3_copy16(&tile[4 * t], x + 4 * t, 4 * (t % 5));                   // the rest is zero
    k3_copy4(&single[t], x + t, t % 2 ? 0 : 4);
    k3_copy_commit();
    const float4 a = k3_load4(x + 4 * t);
    const uint4 b = k3_load16(x + 4 * t), c = k3_stream16(x + 4 * t);
    y[t] = a.x + m_bits(b.y) + m_bits(c.z) + bf16_low(c.w) + bf16_high(c.w);
    y[64 + t] = k3_warp_max(t % 3 ? a.x : m_bits(0x7fc00000u));
    k3_copy_wait<0>();
    __syncthreads();
    const float4 d = k3_load4(&tile[4 * (63 - t)]);
    y[128 + t] = d.x + d.y + d.z + d.w;
    y[192 + t] = single[63 - t];
    __syncthreads();
    k3_store4(&tile[4 * t], a);
    y[256 + t] = tile[4 * t + 3];
}

// Shared memory that belongs to a device function, one array for each of its instances.
template <int BY> static __device__ float rotated(float v) {
    static __shared__ float cell[64 + BY];
    cell[threadIdx.x + BY] = v;
    if (threadIdx.x < BY) cell[threadIdx.x] = 0.0f;
    __syncthreads();
    return cell[threadIdx.x];
}
template <int BY> K3_DEVICE float rotated_inline(float v) {
    static __shared__ float cell[64 + BY];
    cell[threadIdx.x + BY] = v;
    if (threadIdx.x < BY) cell[threadIdx.x] = 0.0f;
    __syncthreads();
    return cell[threadIdx.x];
}
extern "C" __global__ void good_shared_of_functions(const float* x /*[64]*/, float* y /*[64]*/) {
    y[threadIdx.x] = rotated<1>(x[threadIdx.x]) + rotated<5>(x[threadIdx.x]) + rotated_inline<8>(x[threadIdx.x]);
}

// The shared functions, element by element, and every number format.
extern "C" __global__ void good_math(const float* x /*[n]*/, float* out /*[6, n]*/, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    out[i] = k3_exp(x[i]);
    out[n + i] = k3_sigmoid(x[i]);
    out[2 * n + i] = k3_tanh(x[i]);
    out[3 * n + i] = k3_situ(x[i], x[i] * 0.5f, 4.0f, 6.0f);
    out[4 * n + i] = bf16_to_f32(f32_to_bf16(x[i]));
    out[5 * n + i] = e2m1_to_f32((uint32_t)i & 15) * e8m0_to_f32((uint8_t)(120 + (i >> 4)));
}

// Threads of one block that wait for each other through an atomic, which independent scheduling permits.
extern "C" __global__ void good_spin(unsigned* flag, int* out) {
    if (threadIdx.x == 0) {
        while (atomicAdd(flag, 0) != 31) __nanosleep(20);
        *out = 31;
    } else if (threadIdx.x < 32) {
        atomicAdd(flag, 1);
    }
}
