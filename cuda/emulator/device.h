// SPDX-License-Identifier: MIT
//
// What nvcc gives a .cu file without an include, for g++: qualifiers, built-in types and variables, and the
// intrinsics that k3_prim.cuh is written with.  build.py includes it before every .cu file.  What is missing here is
// missing on purpose: __activemask and the warp functions without a mask, because their results are not defined,
// and the library's approximate functions, because the project has its own (k3_math.h).
//
// Shared memory is declared `static __shared__ T name[N];` (nvcc takes the `static`, and g++ refuses a section for
// anything else), dynamic shared memory is `k3_dyn` of k3_prim.cuh.  Device functions are `static` as well: a static
// variable of an inline function would have to be merged between files, which a section of its own does not allow.

#ifndef K3EMU_DEVICE_H
#define K3EMU_DEVICE_H

#define K3_EMULATOR 1

#include <math.h>
#include <stddef.h>
#include <stdint.h>

// The device rounds these in its own way; k3_math.h has what both sides compute alike.
#pragma GCC poison expf exp2f exp10f expm1f logf log2f log10f log1pf tanhf sinf cosf tanf sincosf powf rsqrtf erff

// build.py finds the kernels and their bounds by these two words, after the preprocessor, and takes them out.
#define __global__ __k3emu_kernel__
#define __launch_bounds__(...) __k3emu_bounds__(__VA_ARGS__)

#define __device__
#define __host__
#define __constant__
#define __shared__ __attribute__((section("k3emu_shared"), aligned(16)))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

#define K3EMU_INLINE static inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------------------
// types
// ---------------------------------------------------------------------------------------------

struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(8) int2 {
    int x, y;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

K3EMU_INLINE float2 make_float2(float x, float y) { return {x, y}; }
K3EMU_INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
K3EMU_INLINE int2 make_int2(int x, int y) { return {x, y}; }
K3EMU_INLINE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
K3EMU_INLINE uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
K3EMU_INLINE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---------------------------------------------------------------------------------------------
// the runtime below (block.cpp, warp.cpp, atomic.cpp, async.cpp)
// ---------------------------------------------------------------------------------------------

#pragma GCC visibility push(hidden)
extern "C" {

// What the code of a thread can see of itself, and of its block.
struct k3emu_thread {
    uint3 index;
};
struct k3emu_place {
    uint3 index;
    dim3 size, grid;
};

extern const k3emu_thread* k3emu_self;
extern k3emu_place k3emu_here;
extern unsigned char* k3emu_dynamic;                         // dynamic shared memory of the block

void k3emu_barrier(void);
int k3emu_barrier_count(int predicate);                      // of the threads for which it holds
void k3emu_sync_warp(unsigned mask);
enum { K3EMU_SHUFFLE_INDEX, K3EMU_SHUFFLE_UP, K3EMU_SHUFFLE_DOWN, K3EMU_SHUFFLE_XOR };
uint64_t k3emu_shuffle(int mode, unsigned mask, uint64_t bits, int argument, int width);
uint64_t k3emu_vote(unsigned mask, int predicate);           // lanes for which it holds | lanes that voted << 32
void k3emu_mma_bf16(float* d, const uint32_t* a, const uint32_t* b);         // 16 x 8 x 16, d += a b

enum { K3EMU_ADD, K3EMU_MIN, K3EMU_MAX, K3EMU_AND, K3EMU_OR, K3EMU_XOR, K3EMU_EXCHANGE, K3EMU_SWAP_IF };
enum { K3EMU_I32, K3EMU_U32, K3EMU_U64, K3EMU_F32, K3EMU_F64 };
uint64_t k3emu_atomic(int op, int type, void* target, uint64_t value, uint64_t compare);
void k3emu_fence(void);                                      // __threadfence
void k3emu_nap(void);                                        // __nanosleep: lets other threads of the block run
void k3emu_trap(void);

void k3emu_async_copy(void* shared, const void* global, unsigned bytes, unsigned from_global);
void k3emu_async_commit(void);
void k3emu_async_wait(unsigned groups_left);
void k3emu_async_wait_all(void);

struct k3emu_kernel {
    const char* name;
    void (*call)(void* const* arguments);
    const uint32_t* sizes;                                   // of the parameters, in bytes
    const uint32_t* alignments;
    int parameters;
    int max_threads;                                         // of __launch_bounds__, else 0
};
void k3emu_add_kernel(const k3emu_kernel* kernel);

}  // extern "C"
#pragma GCC visibility pop

#define threadIdx (k3emu_self->index)
#define blockIdx (k3emu_here.index)
#define blockDim (k3emu_here.size)
#define gridDim (k3emu_here.grid)
#define warpSize 32

// ---------------------------------------------------------------------------------------------
// bits and arithmetic
// ---------------------------------------------------------------------------------------------

K3EMU_INLINE float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
K3EMU_INLINE unsigned __float_as_uint(float f) { return __builtin_bit_cast(unsigned, f); }
K3EMU_INLINE float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
K3EMU_INLINE int __float_as_int(float f) { return __builtin_bit_cast(int, f); }

K3EMU_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
K3EMU_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
K3EMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
K3EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
K3EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
K3EMU_INLINE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
K3EMU_INLINE int __float2int_rn(float a) { return (int)__builtin_rintf(a); }
K3EMU_INLINE int __float2int_rz(float a) { return (int)a; }
K3EMU_INLINE float __int2float_rn(int a) { return (float)a; }

K3EMU_INLINE int __popc(unsigned u) { return __builtin_popcount(u); }
K3EMU_INLINE int __popcll(unsigned long long u) { return __builtin_popcountll(u); }
K3EMU_INLINE int __clz(int u) { return u ? __builtin_clz((unsigned)u) : 32; }
K3EMU_INLINE int __ffs(int u) { return __builtin_ffs(u); }
K3EMU_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = ((uint64_t)high << 32) | low;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) r |= (unsigned)((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
    return r;
}

#define K3EMU_MIN_MAX(T)                                   \
    K3EMU_INLINE T min(T a, T b) { return b < a ? b : a; } \
    K3EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
K3EMU_MIN_MAX(int)
K3EMU_MIN_MAX(unsigned)
K3EMU_MIN_MAX(long)
K3EMU_MIN_MAX(unsigned long)
K3EMU_MIN_MAX(long long)
K3EMU_MIN_MAX(unsigned long long)
#undef K3EMU_MIN_MAX

template <class T> K3EMU_INLINE T __ldg(const T* p) { return *p; }
template <class T> K3EMU_INLINE T __ldcs(const T* p) { return *p; }
template <class T> K3EMU_INLINE T __ldcg(const T* p) { return *p; }
template <class T> K3EMU_INLINE void __stcs(T* p, T v) { *p = v; }

// ---------------------------------------------------------------------------------------------
// threads that meet
// ---------------------------------------------------------------------------------------------

K3EMU_INLINE void __syncthreads() { k3emu_barrier(); }
K3EMU_INLINE int __syncthreads_count(int p) { return k3emu_barrier_count(p != 0); }
K3EMU_INLINE int __syncthreads_or(int p) { return k3emu_barrier_count(p != 0) != 0; }
K3EMU_INLINE int __syncthreads_and(int p) { return k3emu_barrier_count(p == 0) == 0; }
K3EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { k3emu_sync_warp(mask); }
K3EMU_INLINE void __threadfence() { k3emu_fence(); }
K3EMU_INLINE void __threadfence_block() {}
K3EMU_INLINE void __nanosleep(unsigned) { k3emu_nap(); }
K3EMU_INLINE void __trap() { k3emu_trap(); }

template <class T> struct k3emu_bits {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp functions and atomics take values of 4 or 8 bytes");
    typedef typename k3emu_bits<char[sizeof(T)]>::word word;
};
template <> struct k3emu_bits<char[4]> {
    typedef uint32_t word;
};
template <> struct k3emu_bits<char[8]> {
    typedef uint64_t word;
};
template <class T> K3EMU_INLINE uint64_t k3emu_pack(T v) { return __builtin_bit_cast(typename k3emu_bits<T>::word, v); }
template <class T> K3EMU_INLINE T k3emu_unpack(uint64_t u) { return __builtin_bit_cast(T, (typename k3emu_bits<T>::word)u); }

template <class T> K3EMU_INLINE T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    return k3emu_unpack<T>(k3emu_shuffle(K3EMU_SHUFFLE_INDEX, mask, k3emu_pack(v), lane, width));
}
template <class T> K3EMU_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    return k3emu_unpack<T>(k3emu_shuffle(K3EMU_SHUFFLE_UP, mask, k3emu_pack(v), (int)by, width));
}
template <class T> K3EMU_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    return k3emu_unpack<T>(k3emu_shuffle(K3EMU_SHUFFLE_DOWN, mask, k3emu_pack(v), (int)by, width));
}
template <class T> K3EMU_INLINE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
    return k3emu_unpack<T>(k3emu_shuffle(K3EMU_SHUFFLE_XOR, mask, k3emu_pack(v), lanes, width));
}
K3EMU_INLINE unsigned __ballot_sync(unsigned mask, int p) { return (unsigned)k3emu_vote(mask, p); }
K3EMU_INLINE int __any_sync(unsigned mask, int p) { return (unsigned)k3emu_vote(mask, p) != 0; }
K3EMU_INLINE int __all_sync(unsigned mask, int p) { return (unsigned)k3emu_vote(mask, !p) == 0; }

// ---------------------------------------------------------------------------------------------
// atomics
// ---------------------------------------------------------------------------------------------

template <class T> struct k3emu_type;
template <> struct k3emu_type<int> {
    enum { code = K3EMU_I32 };
};
template <> struct k3emu_type<unsigned> {
    enum { code = K3EMU_U32 };
};
template <> struct k3emu_type<unsigned long long> {
    enum { code = K3EMU_U64 };
};
template <> struct k3emu_type<float> {
    enum { code = K3EMU_F32 };
};
template <> struct k3emu_type<double> {
    enum { code = K3EMU_F64 };
};
// Takes part in no deduction, so that atomicAdd(unsigned*, 1) is one of unsigned.
template <class T> struct k3emu_same {
    typedef T type;
};

#define K3EMU_ATOMIC(NAME, OP)                                                                       \
    template <class T> K3EMU_INLINE T NAME(T* target, typename k3emu_same<T>::type value) {          \
        return k3emu_unpack<T>(k3emu_atomic(OP, k3emu_type<T>::code, target, k3emu_pack(value), 0)); \
    }
K3EMU_ATOMIC(atomicAdd, K3EMU_ADD)
K3EMU_ATOMIC(atomicMin, K3EMU_MIN)
K3EMU_ATOMIC(atomicMax, K3EMU_MAX)
K3EMU_ATOMIC(atomicAnd, K3EMU_AND)
K3EMU_ATOMIC(atomicOr, K3EMU_OR)
K3EMU_ATOMIC(atomicXor, K3EMU_XOR)
K3EMU_ATOMIC(atomicExch, K3EMU_EXCHANGE)
#undef K3EMU_ATOMIC
template <class T>
K3EMU_INLINE T atomicCAS(T* target, typename k3emu_same<T>::type compare, typename k3emu_same<T>::type value) {
    return k3emu_unpack<T>(k3emu_atomic(K3EMU_SWAP_IF, k3emu_type<T>::code, target, k3emu_pack(value), k3emu_pack(compare)));
}

// ---------------------------------------------------------------------------------------------
// how a kernel is called: from an array of pointers to its arguments, as cuLaunchKernel is
// ---------------------------------------------------------------------------------------------

#define K3EMU_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

template <class T> struct k3emu_value {
    typedef T type;
};
template <class T> struct k3emu_value<const T> {
    typedef T type;
};
template <size_t... I> struct k3emu_numbers {};

template <auto* F> struct k3emu_caller;
template <class... P, void (*F)(P...)> struct k3emu_caller<F> {
    static constexpr uint32_t sizes[sizeof...(P) + 1] = {sizeof(P)..., 0};
    static constexpr uint32_t alignments[sizeof...(P) + 1] = {alignof(P)..., 1};
    template <size_t... I> K3EMU_UNCHECKED static void call_with(void* const* a, k3emu_numbers<I...>) {
        F(*static_cast<typename k3emu_value<P>::type*>(a[I])...);
    }
    K3EMU_UNCHECKED static void call(void* const* a) { call_with(a, k3emu_numbers<__integer_pack(sizeof...(P))...>()); }
};
// One line of these per kernel is added by build.py.
template <auto* F> struct k3emu_registration {
    k3emu_kernel kernel;
    k3emu_registration(const char* name, int max_threads, ...)
        : kernel{name,
                 k3emu_caller<F>::call,
                 k3emu_caller<F>::sizes,
                 k3emu_caller<F>::alignments,
                 (int)(sizeof(k3emu_caller<F>::sizes) / sizeof(uint32_t)) - 1,
                 max_threads} {
        k3emu_add_kernel(&kernel);
    }
};

#endif
