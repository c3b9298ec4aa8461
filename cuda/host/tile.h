// SPDX-License-Identifier: MIT
//
// Several rows of inputs: STRIP rows of weights meet TILE of them, as many sums as there are registers for.
//
// The 16 lanes of a sum (simd.h) fall into PARTS registers; a tile goes over the weights once for each part.  BF16 is widened on
// the way, each time again, which costs no more than to widen it once and to read it twice as long.
//
// Sums, inputs and a weight take all registers.  Left to itself the compiler reads an input from memory again for each product,
// and loads are then what limits a tile; so p_input and p_fma say that they are of registers, and that sums stay in place.

#ifndef K3_TILE_H
#define K3_TILE_H

#include "columns.h"

namespace K3_NS {

#if defined(K3_ISA_AVX512)
enum { PARTS = 1, STRIP = 4, TILE = 6 };
typedef __m512 part;
K3_INLINE part p_zero() { return _mm512_setzero_ps(); }
K3_INLINE part p_load(const void* p) { return _mm512_loadu_ps(p); }
K3_INLINE void p_store(float* p, part x) { _mm512_storeu_ps(p, x); }
K3_INLINE part p_even(const char* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
K3_INLINE part p_odd(const char* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u)));
}
#if defined(__AVX512BF16__)
// 16 sums of two products of BF16 numbers each.
K3_INLINE part p_products(part sum, part a, part b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#endif
#elif defined(K3_ISA_AVX2)
enum { PARTS = 2, STRIP = 4, TILE = 3 };
typedef __m256 part;
K3_INLINE part p_zero() { return _mm256_setzero_ps(); }
K3_INLINE part p_load(const void* p) { return _mm256_loadu_ps((const float*)p); }
K3_INLINE void p_store(float* p, part x) { _mm256_storeu_ps(p, x); }
// The mask comes from memory: it would be the seventeenth register.
static const uint32_t kOdd[8] __attribute__((aligned(32))) = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                              0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
K3_INLINE part p_even(const char* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16)); }
K3_INLINE part p_odd(const char* p) {
    part x = p_load(p);
    asm("vandps %1, %0, %0" : "+x"(x) : "m"(kOdd));
    return x;
}
#else
enum { PARTS = 4, STRIP = 4, TILE = 2 };
typedef v4 part;
K3_INLINE part p_zero() { return part{0.0f, 0.0f, 0.0f, 0.0f}; }
K3_INLINE part p_load(const void* p) {
    part x;
    memcpy(&x, p, 16);
    return x;
}
K3_INLINE void p_store(float* p, part x) { memcpy(p, &x, 16); }
K3_INLINE part p_even(const char* p) { return (part)((u4)p_load(p) << 16); }
K3_INLINE part p_odd(const char* p) { return (part)((u4)p_load(p) & 0xffff0000u); }
#endif
enum { LANES = 16 / PARTS };

#if defined(K3_ISA_AVX2) || (defined(K3_ISA_AVX512) && defined(__AVX512F__))
K3_INLINE part p_input(const float* p) {
    part x = p_load(p);
    asm("" : "+v"(x));
    return x;
}
K3_INLINE part p_fma(part a, part b, part c) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
#else                                 // portable, and AVX-512 emulated (tests/cpp)
K3_INLINE part p_input(const float* p) { return p_load(p); }
K3_INLINE part p_fma(part a, part b, part c) {
#if defined(K3_ISA_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}
#endif

static_assert(STRIP % PARTS == 0, "the parts of one tile ask for a whole strip");

// How weights lie that a tile meets: as the checkpoint has them, widened as v_store_pair does it, or as BF16 that meets BF16.
enum Form { FORM_BF16, FORM_F32, FORM_PAIRS, FORM_PACKED };
K3_INLINE constexpr int64_t group_bytes(Form form) { return form == FORM_BF16 || form == FORM_PACKED ? 64 : 128; }

// Part p of the first or the second vector (columns.h) of a group.
template <Form F, int SECOND> K3_INLINE part p_weights(const char* group, int p) {
    if (F == FORM_PAIRS) return p_load((const float*)group + (2 * p + SECOND) * LANES);
    if (F == FORM_F32) return p_load((const float*)group + 16 * SECOND + p * LANES);
    return SECOND ? p_odd(group + p * LANES * 4) : p_even(group + p * LANES * 4);
}

// STRIP rows of weights, some groups of columns of them, and what is asked of memory meanwhile: `step` bytes a group.
struct Strip {
    const char* row[STRIP];
    const char* ahead[STRIP];
    int64_t groups, step;
    bool fresh;                       // sums are set, not added to
};

// sums[m][n][16] for M rows of inputs.  ASKS: how many of `ahead` each part asks for, from the one with number `asked` on.
template <Form F, int M, int ASKS> static inline void tile(const Strip& w, const float* const* x, float* sums, int asked) {
    for (int p = 0; p < PARTS; ++p) {
        part acc[M][STRIP];
        const float* in[M];
        const char* row[STRIP];
        const char* ahead[ASKS ? ASKS : 1];
        for (int m = 0; m < M; ++m) {
            in[m] = x[m] + p * 2 * LANES;
            for (int n = 0; n < STRIP; ++n) acc[m][n] = w.fresh ? p_zero() : p_load(sums + (m * STRIP + n) * 16 + p * LANES);
        }
        for (int n = 0; n < STRIP; ++n) row[n] = w.row[n];
        for (int i = 0; i < ASKS; ++i) ahead[i] = w.ahead[asked + p * ASKS + i];
        const int64_t groups = w.groups, step = w.step;
        for (int64_t g = 0; g < groups; ++g) {
            part v[M];
            for (int i = 0; i < ASKS; ++i) __builtin_prefetch(ahead[i] + g * step);
#if defined(K3_ISA_AVX512) && defined(__AVX512BF16__)
            if (F == FORM_PACKED) {
                for (int m = 0; m < M; ++m) v[m] = p_input(in[m] + 16 * g);
                for (int n = 0; n < STRIP; ++n) {
                    const part u = p_load(row[n] + g * 64);
                    for (int m = 0; m < M; ++m) acc[m][n] = p_products(acc[m][n], u, v[m]);
                }
                continue;
            }
#endif
            for (int m = 0; m < M; ++m) v[m] = p_input(in[m] + 32 * g);
            for (int n = 0; n < STRIP; ++n) {
                const part u = p_weights<F, 0>(row[n] + g * group_bytes(F), p);
                for (int m = 0; m < M; ++m) acc[m][n] = p_fma(u, v[m], acc[m][n]);
            }
            for (int m = 0; m < M; ++m) v[m] = p_input(in[m] + 32 * g + LANES);
            for (int n = 0; n < STRIP; ++n) {
                const part u = p_weights<F, 1>(row[n] + g * group_bytes(F), p);
                for (int m = 0; m < M; ++m) acc[m][n] = p_fma(u, v[m], acc[m][n]);
            }
        }
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < STRIP; ++n) p_store(sums + (m * STRIP + n) * 16 + p * LANES, acc[m][n]);
    }
}

template <Form F, int ASKS> static inline void tile_of(int64_t rows, const Strip& w, const float* const* x, float* sums,
                                                       int asked) {
    static_assert(TILE == 2 || TILE == 3 || TILE == 6, "a case for each number of rows");
    switch (rows) {
#if defined(K3_ISA_AVX512)
        case 6: return tile<F, 6, ASKS>(w, x, sums, asked);
        case 5: return tile<F, 5, ASKS>(w, x, sums, asked);
        case 4: return tile<F, 4, ASKS>(w, x, sums, asked);
#endif
#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2)
        case 3: return tile<F, 3, ASKS>(w, x, sums, asked);
#endif
        case 2: return tile<F, 2, ASKS>(w, x, sums, asked);
        default: return tile<F, 1, ASKS>(w, x, sums, asked);
    }
}

// The same for any number of rows of inputs, from column `at` of each: in as few tiles as there can be, of about the same size.
template <Form F> static inline void tiles(const Strip& w, const float* const* x, int64_t at, int64_t rows, float* sums) {
    enum { ALL = STRIP / PARTS, HALF = ALL > 1 ? ALL / 2 : 1 };
    const float* in[TILE];
    const int64_t all = (rows + TILE - 1) / TILE;
    int asked = 0;                    // of the rows ahead, each by one tile
    for (int64_t m = 0, left = all; left > 0; --left) {
        const int64_t n = (rows - m + left - 1) / left;
        for (int64_t i = 0; i < n; ++i) in[i] = x[m + i] + at;
        float* to = sums + m * STRIP * 16;
        const int asks = asked == STRIP ? 0 : all == 1 ? ALL : all == 2 ? HALF : 1;
        if (asks == 0) tile_of<F, 0>(n, w, in, to, 0);
        else if (asks == ALL) tile_of<F, ALL>(n, w, in, to, asked);
        else if (asks == HALF) tile_of<F, HALF>(n, w, in, to, asked);
        else tile_of<F, 1>(n, w, in, to, asked);
        asked += asks * PARTS;
        m += n;
    }
}

}  // namespace K3_NS
#endif
