// SPDX-License-Identifier: MIT
//
// The AVX-512 intrinsics of cuda/host/simd.h on a processor without AVX-512, by SIMDe (Debian: libsimde-dev).
// Compile a kernel with -DK3_ISA_AVX512 -include avx512_simde.h -mavx2 -mfma and without -mavx512*: every 512-bit
// operation then runs as two 256-bit ones.  What SIMDe 0.7 lacks is written out below, lane by lane, and the matrix unit
// (AMX) number by number.

#ifndef K3_AVX512_SIMDE_H
#define K3_AVX512_SIMDE_H

#include <immintrin.h>  // first, so that the names below are redefined after the compiler has declared its own

#define SIMDE_ENABLE_NATIVE_ALIASES
// One by one: all of simde/x86/avx512.h would take longer to read than a kernel to compile.
#include <simde/x86/avx512/add.h>
#include <simde/x86/avx512/and.h>
#include <simde/x86/avx512/blend.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/cmp.h>
#include <simde/x86/avx512/div.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/insert.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/mul.h>
#include <simde/x86/avx512/or.h>
#include <simde/x86/avx512/permutex2var.h>
#include <simde/x86/avx512/permutexvar.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/setr.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/sqrt.h>
#include <simde/x86/avx512/srli.h>
#include <simde/x86/avx512/storeu.h>
#include <simde/x86/avx512/sub.h>
#include <simde/x86/avx512/ternarylogic.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>
#include <simde/x86/fma.h>
#include <stdint.h>
#include <string.h>

static inline simde__m512i k3_cvtepu8_epi32(__m128i a) {
    uint8_t in[16];
    int32_t out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; ++i) out[i] = in[i];
    return simde_mm512_loadu_si512(out);
}

static inline simde__m512i k3_cvtepi8_epi32(__m128i a) {
    int8_t in[16];
    int32_t out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; ++i) out[i] = in[i];
    return simde_mm512_loadu_si512(out);
}

// Each product pair as the instruction adds it: the odd one first, fused, without subnormals.
static inline simde__m512 k3_dpbf16_ps(simde__m512 sum, simde__m512i a, simde__m512i b) {
    uint32_t x[16], y[16];
    float s[16];
    simde_mm512_storeu_si512(x, a);
    simde_mm512_storeu_si512(y, b);
    simde_mm512_storeu_ps(s, sum);
    for (int i = 0; i < 16; ++i)
        for (int half = 1; half >= 0; --half) {
            const uint32_t u = half ? x[i] & 0xffff0000u : x[i] << 16, v = half ? y[i] & 0xffff0000u : y[i] << 16;
            float p, q;
            memcpy(&p, &u, 4);
            memcpy(&q, &v, 4);
            s[i] = __builtin_fmaf(p, q, s[i]);
        }
    return simde_mm512_loadu_ps(s);
}
#define __AVX512BF16__ 1
#define __m512bh simde__m512i

// To nearest, ties to even; subnormals are zero, before and after.
static inline simde__m512i k3_cvtne2ps_pbh(simde__m512 high, simde__m512 low) {
    uint32_t in[32];
    uint16_t out[32];
    simde_mm512_storeu_si512(in, simde_mm512_castps_si512(low));
    simde_mm512_storeu_si512(in + 16, simde_mm512_castps_si512(high));
    for (int i = 0; i < 32; ++i) {
        const uint32_t u = in[i], magnitude = u & 0x7fffffffu;
        if (magnitude > 0x7f800000u) out[i] = (uint16_t)(u >> 16 | 0x40);
        else if (magnitude < 0x00800000u) out[i] = (uint16_t)(u >> 16 & 0x8000);
        else out[i] = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    return simde_mm512_loadu_si512(out);
}

static inline simde__m512i k3_shuffle_i32x4(simde__m512i a, simde__m512i b, int how) {
    uint32_t x[16], y[16], out[16];
    simde_mm512_storeu_si512(x, a);
    simde_mm512_storeu_si512(y, b);
    for (int i = 0; i < 4; ++i) memcpy(out + 4 * i, (i < 2 ? x : y) + 4 * (how >> 2 * i & 3), 16);
    return simde_mm512_loadu_si512(out);
}

// Eight tiles of 16 rows of 64 bytes, all in use; and whether they are on.
static thread_local struct {
    uint32_t tile[8][16][16];
    int on;
} k3_unit;
static inline void k3_tile_loadconfig(const void* config) {
    const uint8_t* c = (const uint8_t*)config;
    k3_unit.on = c[0] == 1;
    for (int i = 0; i < 8; ++i) k3_unit.on &= c[16 + 2 * i] == 64 && c[17 + 2 * i] == 0 && c[48 + i] == 16;
}
static inline void k3_tile_release() { k3_unit.on = 0; }
static inline void k3_tile_check() {
    if (!k3_unit.on) __builtin_trap();
}
static inline void k3_tile_zero(int t) {
    k3_tile_check();
    memset(k3_unit.tile[t], 0, sizeof k3_unit.tile[t]);
}
static inline void k3_tile_loadd(int t, const void* from, int64_t stride) {
    k3_tile_check();
    for (int i = 0; i < 16; ++i) memcpy(k3_unit.tile[t][i], (const char*)from + i * stride, 64);
}
static inline void k3_tile_stored(int t, void* to, int64_t stride) {
    k3_tile_check();
    for (int i = 0; i < 16; ++i) memcpy((char*)to + i * stride, k3_unit.tile[t][i], 64);
}
static inline float k3_tile_value(uint32_t pair, int half) {
    uint32_t u = half ? pair & 0xffff0000u : pair << 16;
    if (!(u & 0x7f800000u)) u &= 0x80000000u;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline void k3_tile_dpbf16ps(int sum, int a, int b) {
    k3_tile_check();
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            float s[2] = {0.0f, 0.0f}, c;
            for (int k = 0; k < 16; ++k)
                for (int half = 0; half < 2; ++half)
                    s[half] = __builtin_fmaf(k3_tile_value(k3_unit.tile[a][m][k], half),
                                             k3_tile_value(k3_unit.tile[b][k][n], half), s[half]);
            memcpy(&c, &k3_unit.tile[sum][m][n], 4);
            c += s[0] + s[1];
            memcpy(&k3_unit.tile[sum][m][n], &c, 4);
        }
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig k3_tile_loadconfig
#define _tile_release k3_tile_release
#define _tile_zero k3_tile_zero
#define _tile_loadd k3_tile_loadd
#define _tile_stored k3_tile_stored
#define _tile_dpbf16ps k3_tile_dpbf16ps

static inline simde__m512 k3_cvtepi32_ps(simde__m512i a) {
    int32_t in[16];
    float out[16];
    simde_mm512_storeu_si512(in, a);
    for (int i = 0; i < 16; ++i) out[i] = (float)in[i];
    return simde_mm512_loadu_ps(out);
}

static inline simde__m512 k3_maskz_loadu_ps(uint16_t mask, const void* p) {
    float out[16];
    for (int i = 0; i < 16; ++i) {
        out[i] = 0.0f;
        if (mask >> i & 1) memcpy(out + i, (const char*)p + 4 * i, 4);
    }
    return simde_mm512_loadu_ps(out);
}

static inline void k3_mask_storeu_ps(void* p, uint16_t mask, simde__m512 a) {
    float in[16];
    simde_mm512_storeu_ps(in, a);
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) memcpy((char*)p + 4 * i, in + i, 4);
}

static inline __m256 k3_extractf32x8_ps(simde__m512 a, int half) {
    float in[16];
    simde_mm512_storeu_ps(in, a);
    return _mm256_loadu_ps(in + 8 * half);
}

#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm512_extractf32x8_ps
#define _mm512_cvtepu8_epi32 k3_cvtepu8_epi32
#define _mm512_cvtepi8_epi32 k3_cvtepi8_epi32
#define _mm512_cvtepi32_ps k3_cvtepi32_ps
#define _mm512_maskz_loadu_ps k3_maskz_loadu_ps
#define _mm512_mask_storeu_ps k3_mask_storeu_ps
#define _mm512_extractf32x8_ps k3_extractf32x8_ps
#define _mm512_dpbf16_ps k3_dpbf16_ps
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 k3_shuffle_i32x4
#define _mm512_cvtne2ps_pbh k3_cvtne2ps_pbh
#define _mm512_stream_ps _mm512_storeu_ps

#endif
