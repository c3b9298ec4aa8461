// SPDX-License-Identifier: MIT
//
// Wrong on purpose: each kernel makes one mistake that kernels are known for, at the line marked `<- kind`, where the
// checking build must report that kind.  All take the same parameters, so that one test launches them all: x and y are
// device arrays of n floats, `other` is what the kernel's mistake needs.

#include "k3_prim.cuh"

#define BAD(NAME) extern "C" __global__ void bad_##NAME(float* x /*[n]*/, float* y /*[n]*/, int n, float* other)

// ---------------------------------------------------------------------------------------------
// addresses
// ---------------------------------------------------------------------------------------------

BAD(global_overrun) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i <= n) y[i] = 1.0f;  // <- out of bounds
}

BAD(global_underrun) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = x[i - 1];  // <- out of bounds
}

BAD(static_overrun) {
    static __shared__ float tile[64];
    static __shared__ float next[64];
    float* p = tile;
    const int i = (int)threadIdx.x;
    next[i & 63] = 0.0f;
    __syncthreads();
    if (i < 65) p[i] = x[i];  // <- out of bounds
    __syncthreads();
    y[i] = p[i & 63] + next[i & 63];
}

BAD(static_index) {
    static __shared__ float tile[64];
    const int i = (int)threadIdx.x;
    tile[i] = x[i];  // <- out of bounds
    __syncthreads();
    y[i] = tile[i ^ 1];
}

BAD(dynamic_overrun) {
    float* row = reinterpret_cast<float*>(k3_dyn);       // as many bytes as the launch gave: 250 floats
    const int i = (int)threadIdx.x;
    if (i < 251) row[i] = x[i];  // <- out of bounds
    __syncthreads();
    y[i] = row[i < 250 ? i : 0];
}

BAD(local_index) {
    float mine[8];
    for (int i = 0; i < 8; ++i) mine[i] = x[i];
    const int i = (int)threadIdx.x;
    y[i] = mine[i < 9 ? i : 0];  // <- out of bounds
}

BAD(host_pointer) {
    const int i = (int)threadIdx.x;
    y[i] = other[i & 7];  // <- host pointer
}

BAD(null_pointer) {
    const int i = (int)threadIdx.x;
    if (x[i] < 1e30f) other = nullptr;
    y[i] = other[i];  // <- null pointer
}

BAD(use_after_free) {
    const int i = (int)threadIdx.x;
    y[i] = other[i & 7];  // <- use after free
}

BAD(misaligned) {
    const int i = (int)threadIdx.x;
    if (i < 8) y[i] = k3_load4(x + 1 + 4 * i).x;  // <- misaligned
}

BAD(local_of_another) {
    static __shared__ float* pointer;
    float mine[4] = {x[0], x[1], x[2], x[3]};
    if (threadIdx.x == 0) pointer = mine;
    __syncthreads();
    if (threadIdx.x < 4) y[threadIdx.x] = pointer[threadIdx.x];  // <- local memory
    __syncthreads();
    y[threadIdx.x] = mine[threadIdx.x & 3];
}

BAD(stack_overflow) {  // <- stack overflow
    float mine[20000];                                   // more than a thread should have, and than it has here
    const int i = (int)threadIdx.x;
    for (int k = 0; k < 20000; ++k) mine[k] = x[k & 255];
    y[i] = mine[(int)x[i] * 77];
}

template <int N> static __device__ float* scratch() {
    static __shared__ float cell[N];
    return cell;
}

BAD(overrun_in_template) {
    const int i = (int)threadIdx.x;
    float *a = scratch<100>(), *b = scratch<300>();
    b[i] = x[i];
    if (i <= 100) a[i] = x[i];  // <- out of bounds
    __syncthreads();
    y[i] = b[255 - i] + a[i % 100];
}

// ---------------------------------------------------------------------------------------------
// values
// ---------------------------------------------------------------------------------------------

BAD(uninitialised_global) {
    const int i = (int)threadIdx.x;
    y[i] = other[i & 7];  // <- uninitialised read
}

BAD(uninitialised_in_template) {
    float* cell = scratch<256>();
    const int i = (int)threadIdx.x;
    if (i < 255) cell[i] = x[i];
    __syncthreads();
    y[i] = cell[i];  // <- uninitialised read
}

BAD(uninitialised_shared) {
    static __shared__ float tile[256];
    const int i = (int)threadIdx.x;
    if (i < 200) tile[i] = x[i];
    __syncthreads();
    y[i] = tile[i];  // <- uninitialised read
}

BAD(index_overflow) {
    const int i = (int)threadIdx.x;
    const int huge = n * 0x1000000;  // <- undefined behaviour
    y[i] = (float)huge;
}

BAD(division_by_zero) {
    const int i = (int)threadIdx.x;
    y[i] = (float)(n / (int)other[i & 7]);  // <- undefined behaviour
}

// ---------------------------------------------------------------------------------------------
// races
// ---------------------------------------------------------------------------------------------

BAD(race_missing_barrier) {
    static __shared__ float tile[256];
    const int i = (int)threadIdx.x;
    tile[i] = x[i];
    y[i] = tile[255 - i];  // <- race
}

BAD(race_write_after_read) {
    static __shared__ float tile[256];
    const int i = (int)threadIdx.x;
    float sum = 0.0f;
    for (int step = 0; step < 2; ++step) {
        tile[i] = x[i] * (float)step;  // <- race
        __syncthreads();
        sum += tile[255 - i];
    }
    y[i] = sum;
}

BAD(race_in_warp) {
    static __shared__ float cell[256];
    const int i = (int)threadIdx.x;
    cell[i] = x[i];
    const float v = __shfl_xor_sync(K3_ALL_LANES, x[i], 1);          // orders nothing in memory
    y[i] = cell[i ^ 1] + v;  // <- race
}

BAD(race_half_warp_sync) {
    static __shared__ float cell[256];
    const int i = (int)threadIdx.x;
    cell[i] = x[i];
    __syncwarp(k3_lane() < 16 ? 0x0000ffffu : 0xffff0000u);          // does not reach the other half
    y[i] = cell[i ^ 16];  // <- race
}

BAD(race_after_many_reads) {
    static __shared__ float cell[8];
    float* mine = &cell[k3_warp()];
    if (k3_lane() == 0) *mine = x[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = *mine;
    if (k3_lane() == 5) *mine = 0.0f;  // <- race
}

BAD(race_in_block) {
    y[threadIdx.x / 2] = x[threadIdx.x];  // <- race
}

BAD(race_of_bytes) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(y);
    bytes[threadIdx.x / 2] = (uint8_t)threadIdx.x;  // <- race
}

BAD(race_between_blocks) {
    y[threadIdx.x] = x[threadIdx.x] + (float)blockIdx.x;  // <- race
}

BAD(race_read_by_another_block) {
    const unsigned other_block = (blockIdx.x + 1) % gridDim.x;
    const float v = x[other_block * 64 + (threadIdx.x & 63)];  // <- race
    __syncthreads();
    if (threadIdx.x < 64) x[blockIdx.x * 64 + threadIdx.x] = v + 1.0f;  // <- race
}

BAD(race_plain_and_atomic) {
    int* count = reinterpret_cast<int*>(other);
    if (threadIdx.x & 1) {
        atomicAdd(count, 1);  // <- race
    } else {
        *count += 1;  // <- race
    }
}

BAD(race_missing_fence) {
    static __shared__ bool last;
    if (threadIdx.x == 0) {
        y[blockIdx.x] = x[blockIdx.x];
        last = atomicAdd(reinterpret_cast<unsigned*>(other), 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        for (unsigned b = 0; b < gridDim.x; ++b) x[0] += y[b];  // <- race
    }
}

// ---------------------------------------------------------------------------------------------
// threads that do not meet
// ---------------------------------------------------------------------------------------------

BAD(barrier_in_branch) {
    if (threadIdx.x < 128) {
        y[threadIdx.x] = x[threadIdx.x];
        __syncthreads();  // <- barrier divergence
    } else {
        y[threadIdx.x] = 0.0f;
        __syncthreads();  // <- barrier divergence
    }
}

BAD(barrier_against_shuffle) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 48) {
        __syncthreads();  // <- barrier divergence
    }
    v += __shfl_xor_sync(K3_ALL_LANES, v, 16);
    y[threadIdx.x] = v;
}

BAD(barrier_after_exit) {
    if (threadIdx.x % 32 >= 20) return;
    y[threadIdx.x] = x[threadIdx.x];
    __syncthreads();  // <- barrier divergence
}

BAD(shuffle_without_me) {
    y[threadIdx.x] = __shfl_down_sync(0x0000ffffu, x[threadIdx.x], 1);  // <- warp divergence
}

BAD(shuffle_from_absent_lane) {
    if (k3_lane() >= 24) return;
    y[threadIdx.x] = __shfl_xor_sync(0x00ffffffu, x[threadIdx.x], 8);  // <- warp divergence
}

BAD(shuffle_against_vote) {
    const int i = (int)threadIdx.x;
    if (k3_lane() < 16) {
        y[i] = __shfl_xor_sync(K3_ALL_LANES, x[i], 1);  // <- warp divergence
    } else {
        y[i] = (float)__ballot_sync(K3_ALL_LANES, x[i] > 0.0f);  // <- warp divergence
    }
}

BAD(wait_for_another_block) {
    unsigned* flag = reinterpret_cast<unsigned*>(other);
    if (blockIdx.x == gridDim.x - 1) atomicExch(flag, 1);
    if (threadIdx.x == 0) {
        while (atomicAdd(flag, 0) == 0) {  // <- timeout
        }
    }
}

// ---------------------------------------------------------------------------------------------
// asynchronous copies
// ---------------------------------------------------------------------------------------------

BAD(async_without_wait) {
    static __shared__ __align__(16) float tile[256];
    const int i = (int)threadIdx.x;
    if (i < 64) k3_copy16(&tile[4 * i], x + 4 * i);
    k3_copy_commit();
    __syncthreads();
    y[i] = tile[i];  // <- async copy
}

BAD(async_waits_too_little) {
    static __shared__ __align__(16) float tile[2][256];
    const int i = (int)threadIdx.x;
    if (i < 64) k3_copy16(&tile[0][4 * i], x + 4 * i);
    k3_copy_commit();
    if (i < 64) k3_copy16(&tile[1][4 * i], x + 4 * i);
    k3_copy_commit();
    k3_copy_wait<1>();
    __syncthreads();
    y[i] = tile[0][i] + tile[1][i];  // <- async copy
}

BAD(async_without_barrier) {
    static __shared__ __align__(16) float tile[256];
    const int i = (int)threadIdx.x;
    if (i < 64) k3_copy16(&tile[4 * i], x + 4 * i);
    k3_copy_commit();
    k3_copy_wait<0>();
    y[i] = tile[i];  // <- race
}

BAD(async_misaligned) {
    static __shared__ __align__(16) float tile[256];
    const int i = (int)threadIdx.x;
    if (i < 32) k3_copy16(&tile[4 * i], x + 4 * i + 1);  // <- misaligned
    k3_copy_commit();
    k3_copy_wait<0>();
    __syncthreads();
    y[i] = tile[i & 127];
}

BAD(async_past_the_end) {
    static __shared__ __align__(16) float tile[512];
    const int i = (int)threadIdx.x;
    if (4 * i < n + 4) k3_copy16(&tile[4 * i], x + 4 * i);  // <- out of bounds
    k3_copy_commit();
    k3_copy_wait<0>();
    __syncthreads();
    y[i] = tile[i];
}

BAD(async_abandoned) {
    static __shared__ __align__(16) float tile[256];
    const int i = (int)threadIdx.x;
    y[i] = x[i];
    if (i < 64) k3_copy16(&tile[4 * i], x + 4 * i);  // <- async copy
    k3_copy_commit();
}
