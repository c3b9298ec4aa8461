// SPDX-License-Identifier: MIT
//
// The AVX-512 intrinsics of cuda/host/simd.h on a processor without AVX-512, by SIMDe (Debian: libsimde-dev).
// Compile a kernel with -DK3_ISA_AVX512 -include avx512_simde.h -mavx2 -mfma and without -mavx512*: every 512-bit
// operation then runs as two 256-bit ones.  The six intrinsics that SIMDe 0.7 lacks are written out below, lane
// by lane.

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
#define _mm512_stream_ps _mm512_storeu_ps

#endif
