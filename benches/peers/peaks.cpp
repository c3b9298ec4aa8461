// SPDX-License-Identifier: MIT
//
// How many multiplications and additions one core does in a second when nothing has to be loaded: compiled for the
// processor at hand by benches/peers/machine.py.  Each function returns the operations done, 0 where there is no such
// instruction.  Twelve chains hide the latency of one.

#include <immintrin.h>
#include <stdint.h>

enum { CHAINS = 12 };

extern "C" double peak_f32(int64_t n) {
#if defined(__AVX512F__)
    __m512 a[CHAINS];
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_set1_ps((float)i);
    __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
    for (int64_t k = 0; k < n; k++) {
        for (int i = 0; i < CHAINS; i++) a[i] = _mm512_fmadd_ps(a[i], x, y);
        asm volatile("" : "+x"(x), "+x"(y));
    }
    __m512 sum = a[0];
    for (int i = 1; i < CHAINS; i++) sum = _mm512_add_ps(sum, a[i]);
    volatile float keep = _mm512_cvtss_f32(sum);
    (void)keep;
    return 2.0 * 16 * CHAINS * (double)n;
#elif defined(__FMA__)
    __m256 a[CHAINS];
    for (int i = 0; i < CHAINS; i++) a[i] = _mm256_set1_ps((float)i);
    __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
    for (int64_t k = 0; k < n; k++) {
        for (int i = 0; i < CHAINS; i++) a[i] = _mm256_fmadd_ps(a[i], x, y);
        asm volatile("" : "+x"(x), "+x"(y));
    }
    __m256 sum = a[0];
    for (int i = 1; i < CHAINS; i++) sum = _mm256_add_ps(sum, a[i]);
    volatile float keep = _mm256_cvtss_f32(sum);
    (void)keep;
    return 2.0 * 8 * CHAINS * (double)n;
#else
    (void)n;
    return 0;
#endif
}

extern "C" double peak_bf16(int64_t n) {
#if defined(__AVX512BF16__)
    __m512 a[CHAINS];
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_set1_ps((float)i);
    __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
    for (int64_t k = 0; k < n; k++) {
        for (int i = 0; i < CHAINS; i++) a[i] = _mm512_dpbf16_ps(a[i], x, x);
        asm volatile("" : "+x"(x));
    }
    __m512 sum = a[0];
    for (int i = 1; i < CHAINS; i++) sum = _mm512_add_ps(sum, a[i]);
    volatile float keep = _mm512_cvtss_f32(sum);
    (void)keep;
    return 2.0 * 32 * CHAINS * (double)n;
#else
    (void)n;
    return 0;
#endif
}

extern "C" double peak_int8(int64_t n) {
#if defined(__AVX512VNNI__)
    __m512i a[CHAINS];
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_set1_epi32(i);
    __m512i x = _mm512_set1_epi8(3);
    for (int64_t k = 0; k < n; k++) {
        for (int i = 0; i < CHAINS; i++) a[i] = _mm512_dpbusd_epi32(a[i], x, x);
        asm volatile("" : "+x"(x));
    }
    __m512i sum = a[0];
    for (int i = 1; i < CHAINS; i++) sum = _mm512_add_epi32(sum, a[i]);
    volatile int keep = _mm512_cvtsi512_si32(sum);
    (void)keep;
    return 2.0 * 64 * CHAINS * (double)n;
#elif defined(__AVX2__)
    __m256i a[CHAINS];
    for (int i = 0; i < CHAINS; i++) a[i] = _mm256_set1_epi32(i);
    __m256i x = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
    for (int64_t k = 0; k < n; k++) {
        for (int i = 0; i < CHAINS; i++) {
            __m256i two = _mm256_maddubs_epi16(x, x);
            asm volatile("" : "+x"(two));
            a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(two, ones));
        }
        asm volatile("" : "+x"(x));
    }
    __m256i sum = a[0];
    for (int i = 1; i < CHAINS; i++) sum = _mm256_add_epi32(sum, a[i]);
    volatile int keep = _mm256_cvtsi256_si32(sum);
    (void)keep;
    return 2.0 * 32 * CHAINS * (double)n;
#else
    (void)n;
    return 0;
#endif
}
