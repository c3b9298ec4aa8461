// SPDX-License-Identifier: MIT
//
// What the kernels stand on: number formats, the scalar primitives of k3_math.h, loads, reductions over a warp and a
// block, and the special instructions, each behind one thin function.  Nothing else in a .cu file names an
// instruction, so that the same source runs on the host (cuda/emulator/, which supplies the CUDA built-ins).
//
// Bits.  The file is compiled with -fmad=false and without flushing to zero (g++: -ffp-contract=off), a fused
// multiply-add is written m_fma, and every reduction has one order; so host and device agree bit for bit, except
// for k3_mma_bf16, whose accumulation order belongs to the tensor cores.

#ifndef K3_PRIM_CUH
#define K3_PRIM_CUH

#include <stdint.h>

#define K3_DEVICE static __device__ __forceinline__
#define K3_MATH_INLINE static __device__ __forceinline__

enum { K3_WARP = 32 };
#define K3_ALL_LANES 0xffffffffu

// Dynamic shared memory; kernels carve it up.
#ifdef K3_EMULATOR
#define k3_dyn k3emu_dynamic
#else
extern __shared__ __align__(16) unsigned char k3_dyn[];
#endif

// ---------------------------------------------------------------------------------------------
// scalar primitives, as in host/simd.h
// ---------------------------------------------------------------------------------------------

K3_DEVICE float m_bits(uint32_t u) { return __uint_as_float(u); }
K3_DEVICE uint32_t m_word(float f) { return __float_as_uint(f); }
K3_DEVICE float m_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
K3_DEVICE double m_fma64(double a, double b, double c) { return __fma_rn(a, b, c); }
K3_DEVICE float m_less(float a, float b, float x, float y) { return a < b ? x : y; }
K3_DEVICE float m_abs(float x) { return m_bits(m_word(x) & 0x7fffffffu); }
K3_DEVICE float m_sign(float x, float y) { return m_bits((m_word(x) & 0x7fffffffu) | (m_word(y) & 0x80000000u)); }
K3_DEVICE float m_pow2(float t) { return m_bits((m_word(t) - 0x4b400000u + 127u) << 23); }
K3_DEVICE float m_split(float x, int* e) {       // x = m * 2^e, 1 <= m < 2, for a normal x
    const uint32_t u = m_word(x);
    *e = (int)((u >> 23) & 0xff) - 127;
    return m_bits((u & 0x007fffffu) | 0x3f800000u);
}
K3_DEVICE float m_sqrt(float x) { return __fsqrt_rn(x); }
K3_DEVICE bool m_finite(float x) { return (m_word(x) & 0x7f800000u) != 0x7f800000u; }

#include "k3_math.h"

// ---------------------------------------------------------------------------------------------
// number formats
// ---------------------------------------------------------------------------------------------

typedef uint16_t k3_bf16;

K3_DEVICE float bf16_to_f32(k3_bf16 h) { return m_bits((uint32_t)h << 16); }
K3_DEVICE k3_bf16 f32_to_bf16(float f) {         // to nearest, ties to even; a NaN stays one
    const uint32_t u = m_word(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (k3_bf16)((u >> 16) | 0x40);
    return (k3_bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
// The two halves of a word that holds two BF16 values, the first in the low half.
K3_DEVICE float bf16_low(uint32_t pair) { return m_bits(pair << 16); }
K3_DEVICE float bf16_high(uint32_t pair) { return m_bits(pair & 0xffff0000u); }

K3_DEVICE float e8m0_to_f32(uint8_t b) {         // 2^(b - 127): code 0 is a subnormal, code 255 a NaN
    const uint32_t u = b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : (uint32_t)b << 23;
    return m_bits(u);
}
// An E2M1 code (the low four bits): 0, 0.5, 1, 1.5, 2, 3, 4, 6, and with bit 3 the same below zero.  Code 8, minus
// zero, is read as zero, as on the CPU.
K3_DEVICE float e2m1_to_f32(uint32_t code) {
    const float half = (float)((0xc8643210u >> (4 * (code & 7))) & 15u) * 0.5f;
    return (code & 8) ? 0.0f - half : half;
}
// The two FP16 numbers of a word, both finite.
K3_DEVICE void k3_half2_to_f32(uint32_t pair, float* low, float* high) {
#ifdef K3_EMULATOR
    const float rescale = m_bits((127u + 112u) << 23);                 // from the exponent of FP16 to that of float
    *low = m_bits((pair & 0x8000u) << 16 | (pair & 0x7fffu) << 13) * rescale;
    *high = m_bits((pair & 0x80000000u) | (pair >> 16 & 0x7fffu) << 13) * rescale;
#else
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(*low), "=f"(*high) : "r"(pair));
#endif
}
// Four bytes out of eight: each of the four lowest digits of the selector names one, 0 .. 3 of `low` and 4 .. 7 of
// `high`; digit 8 + n stands for the sign bit of byte n, eight times.
K3_DEVICE uint32_t k3_permute(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef K3_EMULATOR
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t digit = selector >> (4 * i) & 15u, byte = (uint32_t)(bytes >> (8 * (digit & 7))) & 255u;
        r |= (digit < 8 ? byte : byte >> 7 ? 255u : 0u) << (8 * i);
    }
    return r;
#else
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
#endif
}

// ---------------------------------------------------------------------------------------------
// 16-byte loads and stores; the address must be a multiple of 16
// ---------------------------------------------------------------------------------------------

K3_DEVICE float4 k3_load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
K3_DEVICE void k3_store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }
K3_DEVICE uint4 k3_load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
// Weights: read once, not written by this kernel, so past the first-level cache.
K3_DEVICE uint4 k3_stream16(const void* p) {
#ifdef K3_EMULATOR
    return *reinterpret_cast<const uint4*>(p);
#else
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
#endif
}

// ---------------------------------------------------------------------------------------------
// reductions over whole warps of a one-dimensional block: (l, l + 16), (l, l + 8), .. (l, l + 1), and over the warps
// of a block the same way
// ---------------------------------------------------------------------------------------------

K3_DEVICE uint32_t k3_lane() { return threadIdx.x & 31u; }
K3_DEVICE uint32_t k3_warp() { return threadIdx.x >> 5; }

K3_DEVICE float k3_warp_sum(float v) {           // every lane gets the sum, with the same bits
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(K3_ALL_LANES, v, m);
    return v;
}
K3_DEVICE float k3_warp_max(float v) {           // of the lanes that are not NaN; equal, not the same bits, for zeros
    for (int m = 16; m > 0; m >>= 1) {
        const float other = __shfl_xor_sync(K3_ALL_LANES, v, m);
        v = v < other || v != v ? other : v;
    }
    return v;
}
// The sum over the block, in every thread.  `partial` is shared memory for one value a
// warp, which the caller must not touch until the next barrier.
K3_DEVICE float k3_block_sum(float v, float* partial /*[32]*/) {
    v = k3_warp_sum(v);
    if (k3_lane() == 0) partial[k3_warp()] = v;
    __syncthreads();
    v = k3_lane() < blockDim.x / K3_WARP ? partial[k3_lane()] : 0.0f;
    return k3_warp_sum(v);
}

// ---------------------------------------------------------------------------------------------
// asynchronous copies from global to shared memory: issue, commit a group, wait until N groups are left, barrier
// ---------------------------------------------------------------------------------------------

// 16 bytes, of which `from_global` (0 .. 16) are read and the rest become zero; both addresses multiples of 16.
K3_DEVICE void k3_copy16(void* shared, const void* global, uint32_t from_global = 16) {
#ifdef K3_EMULATOR
    k3emu_async_copy(shared, global, 16, from_global);
#else
    const uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s), "l"(global), "r"(from_global) : "memory");
#endif
}
// 4 bytes; both addresses multiples of 4.
K3_DEVICE void k3_copy4(void* shared, const void* global, uint32_t from_global = 4) {
#ifdef K3_EMULATOR
    k3emu_async_copy(shared, global, 4, from_global);
#else
    const uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s), "l"(global), "r"(from_global) : "memory");
#endif
}
K3_DEVICE void k3_copy_commit() {
#ifdef K3_EMULATOR
    k3emu_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for this thread's own copies only; other threads see them after the next barrier.
template <int groups_left> K3_DEVICE void k3_copy_wait() {
#ifdef K3_EMULATOR
    k3emu_async_wait(groups_left);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(groups_left) : "memory");
#endif
}

// ---------------------------------------------------------------------------------------------
// tensor cores: d += a b for a warp, a [16, 16] and b [16, 8] in BF16, d [16, 8] in float32, as m16n8k16 lays
// them out over the lanes
// ---------------------------------------------------------------------------------------------

K3_DEVICE void k3_mma_bf16(float* d /*[4]*/, const uint32_t* a /*[4]*/, const uint32_t* b /*[2]*/) {
#ifdef K3_EMULATOR
    k3emu_mma_bf16(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#endif
