// SPDX-License-Identifier: MIT
//
// Sixteen float lanes on every instruction set.  The CPU's order of summation is written in these lanes:
// a sum over columns adds column by column into 16 partial sums, which v_sum folds in one fixed tree.
// AVX-512 has the 16 lanes in one register, AVX2 in two, the portable build in four; AVX2 and AVX-512 give
// the same bits, the portable build rounds a fused multiply-add twice and so differs in the last place.
//
// This file is included by every kernel, once per instruction set, inside the namespace K3_NS: an inline
// function shared between two builds would be merged by the linker, and the baseline could then call AVX-512
// code.  For the same reason nothing of the C++ library is used here.

#ifndef K3_SIMD_H
#define K3_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2)
#include <immintrin.h>
#endif

#define K3_INLINE static inline __attribute__((always_inline))
#define K3_MATH_INLINE static inline __attribute__((always_inline))

namespace K3_NS {

// ---------------------------------------------------------------------------------------------
// scalar
// ---------------------------------------------------------------------------------------------

K3_INLINE float m_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
K3_INLINE uint32_t m_word(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
K3_INLINE float m_fma(float a, float b, float c) {
#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
K3_INLINE double m_fma64(double a, double b, double c) { return __builtin_fma(a, b, c); }
K3_INLINE float m_less(float a, float b, float x, float y) { return a < b ? x : y; }
K3_INLINE float m_abs(float x) { return m_bits(m_word(x) & 0x7fffffffu); }
K3_INLINE float m_sign(float x, float y) { return m_bits((m_word(x) & 0x7fffffffu) | (m_word(y) & 0x80000000u)); }
K3_INLINE float m_pow2(float t) { return m_bits((m_word(t) - 0x4b400000u + 127u) << 23); }
K3_INLINE float m_split(float x, int* e) {       // x = m * 2^e, 1 <= m < 2, for a normal x
    const uint32_t u = m_word(x);
    *e = (int)((u >> 23) & 0xff) - 127;
    return m_bits((u & 0x007fffffu) | 0x3f800000u);
}
K3_INLINE float m_sqrt(float x) { return __builtin_sqrtf(x); }
K3_INLINE bool m_finite(float x) { return (m_word(x) & 0x7f800000u) != 0x7f800000u; }

K3_INLINE float bf16_to_f32(uint16_t h) { return m_bits((uint32_t)h << 16); }
K3_INLINE uint16_t f32_to_bf16(float f) {        // to nearest, ties to even; a NaN stays one
    const uint32_t u = m_word(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
struct e8m0_table {
    uint32_t bits[256];
    constexpr e8m0_table() : bits() {
        for (uint32_t b = 1; b < 255; ++b) bits[b] = b << 23;
        bits[0] = 0x00400000u;                               // 2^-127, a subnormal
        bits[255] = 0x7fc00000u;                             // NaN
    }
};
static constexpr e8m0_table k3_e8m0;
K3_INLINE float e8m0_to_f32(uint8_t b) { return m_bits(k3_e8m0.bits[b]); }   // 2^(b - 127)

// The BF16 number that a code of MXFP4 is with this scale.  Code 8, minus zero, is read as zero everywhere, so that no instruction
// set can differ in the sign of an underflow.
K3_INLINE constexpr uint16_t mxfp4_word(int scale, int code) {
    // Codes 1 to 7 are 1 or 1.5 (odd, from 3 on) times 2^-1, 2^0, 2^0, 2^1, 2^1, 2^2, 2^2.
    const int magnitude = code & 7, half = magnitude > 1 ? magnitude & 1 : 0;
    const int exponent = scale + (magnitude >> 1) - 1;  // biased, as scale is
    const int word = scale == 255      ? 0x7fc0
                     : magnitude == 0  ? 0
                     : exponent >= 255 ? 0x7f80
                     : exponent > 0    ? exponent << 7 | half << 6
                                       : (128 + 64 * half) >> (1 - exponent);  // a subnormal, exactly
    return (uint16_t)(code > 8 ? word | 0x8000 : word);
}

// ---------------------------------------------------------------------------------------------
// 16 lanes
// ---------------------------------------------------------------------------------------------

#if defined(K3_ISA_AVX512)

struct vf {
    __m512 v;
    vf() = default;
    K3_INLINE vf make(__m512 x) {
        vf r;
        r.v = x;
        return r;
    }
    explicit inline __attribute__((always_inline)) vf(float x) : v(_mm512_set1_ps(x)) {}
};
K3_INLINE vf operator+(vf a, vf b) { return vf::make(_mm512_add_ps(a.v, b.v)); }
K3_INLINE vf operator-(vf a, vf b) { return vf::make(_mm512_sub_ps(a.v, b.v)); }
K3_INLINE vf operator*(vf a, vf b) { return vf::make(_mm512_mul_ps(a.v, b.v)); }
K3_INLINE vf operator/(vf a, vf b) { return vf::make(_mm512_div_ps(a.v, b.v)); }
K3_INLINE vf m_fma(vf a, vf b, vf c) { return vf::make(_mm512_fmadd_ps(a.v, b.v, c.v)); }
K3_INLINE vf m_less(vf a, vf b, vf x, vf y) {
    return vf::make(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v));
}
K3_INLINE vf m_abs(vf a) {
    return vf::make(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))));
}
K3_INLINE vf m_sign(vf x, vf y) {  // bitwise select: sign bit from y, the rest from x
    return vf::make(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32((int)0x80000000u), _mm512_castps_si512(y.v),
                                                                  _mm512_castps_si512(x.v), 0xca)));
}
K3_INLINE vf m_pow2(vf t) {
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(0x4b400000 - 127));
    return vf::make(_mm512_castsi512_ps(_mm512_slli_epi32(n, 23)));
}
K3_INLINE vf m_sqrt(vf a) { return vf::make(_mm512_sqrt_ps(a.v)); }
K3_INLINE vf v_load(const float* p) { return vf::make(_mm512_loadu_ps(p)); }
K3_INLINE void v_store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
K3_INLINE void v_stream(float* p, vf a) { _mm512_stream_ps(p, a.v); }  // past the caches; p at a multiple of 64 bytes
K3_INLINE void v_streamed() { _mm_sfence(); }  // .. and in memory for every thread
K3_INLINE vf v_load_n(const void* p, int64_t n) {  // the first n lanes, zero beyond; reads nothing beyond
    return vf::make(_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p));
}
K3_INLINE void v_store_n(float* p, vf a, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), a.v); }
K3_INLINE vf v_load_bytes(const void* p) { return vf::make(_mm512_loadu_ps(p)); }
// Two vectors that lie together, register by register: part 0 of both, part 1 of both, ..
K3_INLINE void v_store_pair(float* p, vf a, vf b) {
    _mm512_storeu_ps(p, a.v);
    _mm512_storeu_ps(p + 16, b.v);
}
K3_INLINE void v_load_pair(const float* p, vf& a, vf& b) {
    a.v = _mm512_loadu_ps(p);
    b.v = _mm512_loadu_ps(p + 16);
}
K3_INLINE float v_fold4(__m128 a) {
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    a = _mm_add_ss(a, _mm_shuffle_ps(a, a, 1));
    return _mm_cvtss_f32(a);
}
K3_INLINE float v_sum(vf a) {  // (l, l + 8), (l, l + 4), (l, l + 2), (l, l + 1)
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    return v_fold4(_mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)));
}
// 32 BF16 weights at p: columns 0, 2, .. 30 and columns 1, 3, .. 31.
K3_INLINE void v_bf16_split(const void* p, vf& even, vf& odd) {
    const __m512i w = _mm512_loadu_si512(p);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
}
// 16 bytes of packed E2M1 at p, times the scale: columns 0, 2, .. 30 (low nibbles) and 1, 3, .. 31.
struct mxfp4_floats {
    uint32_t bits[256][16];  // by scale and code
    constexpr mxfp4_floats() : bits() {
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 16; ++code) bits[scale][code] = (uint32_t)mxfp4_word(scale, code) << 16;
    }
};
static constexpr mxfp4_floats k3_mxfp4_floats __attribute__((aligned(64)));
K3_INLINE void v_mxfp4_split(const void* p, uint8_t scale, vf& even, vf& odd) {
    const __m512 table = _mm512_loadu_ps(k3_mxfp4_floats.bits[scale]);
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    even.v = _mm512_permutexvar_ps(b, table);  // takes the low four bits of each index
    odd.v = _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), table);
}
// The same as BF16 numbers, in the order of the columns.
struct mxfp4_words {
    uint16_t word[256][16];  // by scale and code
    constexpr mxfp4_words() : word() {
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 16; ++code) word[scale][code] = mxfp4_word(scale, code);
    }
};
static constexpr mxfp4_words k3_mxfp4;
K3_INLINE __m512i v_mxfp4_words(const void* p, uint8_t scale) {
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m512i code = _mm512_and_si512(_mm512_or_si512(b, _mm512_slli_epi32(b, 12)), _mm512_set1_epi32(0x000f000f));
    const __m256i table = _mm256_loadu_si256((const __m256i*)k3_mxfp4.word[scale]);
    return _mm512_permutexvar_epi16(code, _mm512_castsi256_si512(table));
}
// 32 compact weights (K3_COMPACT in cuda/ops.h): half 0 or 1 of a block of 96 bytes, with the table of high bytes.
struct v_table {
    __m256i bytes;
};
K3_INLINE v_table v_load_table(const void* p) {
    v_table t;
    t.bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return t;
}
K3_INLINE __m512i v_compact_words(const void* block, int half, v_table table) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)((const char*)block + 32 * half));
    const __m256i both = _mm256_loadu_si256((const __m256i*)((const char*)block + 64));
    const __m256i code = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    const __m256i high = _mm256_shuffle_epi8(table.bytes, code);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi8(low, high)), _mm256_unpackhi_epi8(low, high), 1);
}
K3_INLINE void v_compact_split(const void* block, int half, v_table table, vf& even, vf& odd) {
    const __m512i w = v_compact_words(block, half, table);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
}
// 32 signed bytes at p, times the scale: columns 0 .. 15 and 16 .. 31.
K3_INLINE void v_q8_split(const void* p, float scale, vf& first, vf& second) {
    const __m128i* q = (const __m128i*)p;
    const __m512 s = _mm512_set1_ps(scale);
    first.v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))), s);
    second.v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q + 1))), s);
}
// 32 floats in natural order from their even and odd columns.
K3_INLINE void v_store_joined(float* p, vf even, vf odd) {
    const __m512i lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i hi = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(even.v, lo, odd.v));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even.v, hi, odd.v));
}
K3_INLINE void v_load_split(const float* p, vf& even, vf& odd) {
    const __m512i e = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i o = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    even.v = _mm512_permutex2var_ps(a, e, b);
    odd.v = _mm512_permutex2var_ps(a, o, b);
}

#elif defined(K3_ISA_AVX2)

struct vf {
    __m256 a, b;                                         // lanes 0..7, 8..15
    vf() = default;
    K3_INLINE vf make(__m256 x, __m256 y) {
        vf r;
        r.a = x;
        r.b = y;
        return r;
    }
    explicit inline __attribute__((always_inline)) vf(float x) : a(_mm256_set1_ps(x)), b(_mm256_set1_ps(x)) {}
};
K3_INLINE vf operator+(vf x, vf y) { return vf::make(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
K3_INLINE vf operator-(vf x, vf y) { return vf::make(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
K3_INLINE vf operator*(vf x, vf y) { return vf::make(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
K3_INLINE vf operator/(vf x, vf y) { return vf::make(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
K3_INLINE vf m_fma(vf x, vf y, vf z) { return vf::make(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
K3_INLINE vf m_less(vf p, vf q, vf x, vf y) {
    return vf::make(_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
                    _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ)));
}
K3_INLINE vf m_abs(vf x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return vf::make(_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m));
}
K3_INLINE vf m_sign(vf x, vf y) {
    const __m256 s = _mm256_castsi256_ps(_mm256_set1_epi32((int)0x80000000u));
    return vf::make(_mm256_or_ps(_mm256_and_ps(s, y.a), _mm256_andnot_ps(s, x.a)),
                    _mm256_or_ps(_mm256_and_ps(s, y.b), _mm256_andnot_ps(s, x.b)));
}
K3_INLINE __m256 pow2_half(__m256 t) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000 - 127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
K3_INLINE vf m_pow2(vf t) { return vf::make(pow2_half(t.a), pow2_half(t.b)); }
K3_INLINE vf m_sqrt(vf x) { return vf::make(_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)); }
K3_INLINE vf v_load(const float* p) { return vf::make(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
K3_INLINE void v_store(float* p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
K3_INLINE void v_stream(float* p, vf x) {
    _mm256_stream_ps(p, x.a);
    _mm256_stream_ps(p + 8, x.b);
}
K3_INLINE void v_streamed() { _mm_sfence(); }
K3_INLINE vf v_load_bytes(const void* p) {
    return vf::make(_mm256_loadu_ps((const float*)p), _mm256_loadu_ps((const float*)((const char*)p + 32)));
}
K3_INLINE vf v_load_n(const void* p, int64_t n) {
    if (n == 16) return v_load_bytes(p);
    float t[16] = {0};
    memcpy(t, p, (size_t)n * 4);
    return v_load(t);
}
K3_INLINE void v_store_n(float* p, vf x, int64_t n) {
    if (n == 16) return v_store(p, x);
    float t[16];
    v_store(t, x);
    memcpy(p, t, (size_t)n * 4);
}
K3_INLINE void v_store_pair(float* p, vf x, vf y) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, y.a);
    _mm256_storeu_ps(p + 16, x.b);
    _mm256_storeu_ps(p + 24, y.b);
}
K3_INLINE void v_load_pair(const float* p, vf& x, vf& y) {
    x = vf::make(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 16));
    y = vf::make(_mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 24));
}
K3_INLINE float v_sum(vf x) {
    const __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    c = _mm_add_ss(c, _mm_shuffle_ps(c, c, 1));
    return _mm_cvtss_f32(c);
}
K3_INLINE void v_bf16_split(const void* p, vf& even, vf& odd) {
    const __m256i w0 = _mm256_loadu_si256((const __m256i*)p), w1 = _mm256_loadu_si256((const __m256i*)((const char*)p + 32));
    const __m256i m = _mm256_set1_epi32((int)0xffff0000u);
    even.a = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
    even.b = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
    odd.a = _mm256_castsi256_ps(_mm256_and_si256(w0, m));
    odd.b = _mm256_castsi256_ps(_mm256_and_si256(w1, m));
}
// 32 MXFP4 weights.  Codes become the two bytes of BF16 numbers by look-up, with a table for every scale, so that nothing is left
// to multiply with it.  The bytes are laid so that the low words of the registers are lanes 0 to 7 and the high words 8 to 15.
struct mxfp4_bytes {
    uint8_t low[256][16], high[256][16];             // by scale and code
    constexpr mxfp4_bytes() : low(), high() {
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 16; ++code) {
                low[scale][code] = (uint8_t)(mxfp4_word(scale, code) & 255);
                high[scale][code] = (uint8_t)(mxfp4_word(scale, code) >> 8);
            }
    }
};
static constexpr mxfp4_bytes k3_mxfp4;
K3_INLINE __m256i both_halves(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
K3_INLINE void v_mxfp4_split(const void* p, uint8_t scale, vf& even, vf& odd) {
    const __m256i order = _mm256_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 4, 12,
                                           5, 13, 6, 14, 7, 15);
    const __m256i shift = _mm256_setr_epi64x(0, 4, 0, 4), mask = _mm256_set1_epi32((int)0xffff0000u);
    const __m256i bytes = _mm256_shuffle_epi8(both_halves(p), order);
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi64(bytes, shift), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(both_halves(k3_mxfp4.low[scale]), code);
    const __m256i high = _mm256_shuffle_epi8(both_halves(k3_mxfp4.high[scale]), code);
    const __m256i e = _mm256_unpacklo_epi8(low, high), o = _mm256_unpackhi_epi8(low, high);
    even.a = _mm256_castsi256_ps(_mm256_slli_epi32(e, 16));
    even.b = _mm256_castsi256_ps(_mm256_and_si256(e, mask));
    odd.a = _mm256_castsi256_ps(_mm256_slli_epi32(o, 16));
    odd.b = _mm256_castsi256_ps(_mm256_and_si256(o, mask));
}
struct v_table {
    __m256i bytes;
};
K3_INLINE v_table v_load_table(const void* p) {
    v_table t;
    t.bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return t;
}
K3_INLINE void v_compact_split(const void* block, int half, v_table table, vf& even, vf& odd) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)((const char*)block + 32 * half));
    const __m256i both = _mm256_loadu_si256((const __m256i*)((const char*)block + 64));
    const __m256i code = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    const __m256i high = _mm256_shuffle_epi8(table.bytes, code), m = _mm256_set1_epi32((int)0xffff0000u);
    const __m256i w0 = _mm256_unpacklo_epi8(low, high), w1 = _mm256_unpackhi_epi8(low, high);
    even.a = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
    even.b = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
    odd.a = _mm256_castsi256_ps(_mm256_and_si256(w0, m));
    odd.b = _mm256_castsi256_ps(_mm256_and_si256(w1, m));
}
K3_INLINE __m256 q8_8(const void* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
K3_INLINE void v_q8_split(const void* p, float scale, vf& first, vf& second) {
    const char* q = (const char*)p;
    const __m256 s = _mm256_set1_ps(scale);
    first = vf::make(_mm256_mul_ps(q8_8(q), s), _mm256_mul_ps(q8_8(q + 8), s));
    second = vf::make(_mm256_mul_ps(q8_8(q + 16), s), _mm256_mul_ps(q8_8(q + 24), s));
}
K3_INLINE void join8(float* p, __m256 e, __m256 o) {
    const __m256 lo = _mm256_unpacklo_ps(e, o), hi = _mm256_unpackhi_ps(e, o);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(lo, hi, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(lo, hi, 0x31));
}
K3_INLINE void v_store_joined(float* p, vf even, vf odd) {
    join8(p, even.a, odd.a);
    join8(p + 16, even.b, odd.b);
}
K3_INLINE void split8(const float* p, __m256& e, __m256& o) {
    const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
    const __m256 x = _mm256_permute2f128_ps(a, b, 0x20), y = _mm256_permute2f128_ps(a, b, 0x31);
    e = _mm256_shuffle_ps(x, y, 0x88);
    o = _mm256_shuffle_ps(x, y, 0xdd);
}
K3_INLINE void v_load_split(const float* p, vf& even, vf& odd) {
    split8(p, even.a, odd.a);
    split8(p + 16, even.b, odd.b);
}

#else

typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
struct vf {
    v4 q[4];                                             // lanes 0..3, 4..7, 8..11, 12..15
    vf() = default;
    explicit inline __attribute__((always_inline)) vf(float x) {
        for (int i = 0; i < 4; ++i) q[i] = v4{x, x, x, x};
    }
};
#define K3_EACH(EXPR)                            \
    vf r;                                        \
    for (int i = 0; i < 4; ++i) r.q[i] = (EXPR); \
    return r
K3_INLINE vf operator+(vf a, vf b) { K3_EACH(a.q[i] + b.q[i]); }
K3_INLINE vf operator-(vf a, vf b) { K3_EACH(a.q[i] - b.q[i]); }
K3_INLINE vf operator*(vf a, vf b) { K3_EACH(a.q[i] * b.q[i]); }
K3_INLINE vf operator/(vf a, vf b) { K3_EACH(a.q[i] / b.q[i]); }
K3_INLINE vf m_fma(vf a, vf b, vf c) { K3_EACH(a.q[i] * b.q[i] + c.q[i]); }
K3_INLINE vf m_less(vf a, vf b, vf x, vf y) { K3_EACH(a.q[i] < b.q[i] ? x.q[i] : y.q[i]); }
K3_INLINE vf m_abs(vf a) { K3_EACH((v4)((u4)a.q[i] & 0x7fffffffu)); }
K3_INLINE vf m_sign(vf x, vf y) { K3_EACH((v4)(((u4)x.q[i] & 0x7fffffffu) | ((u4)y.q[i] & 0x80000000u))); }
K3_INLINE vf m_pow2(vf t) { K3_EACH((v4)(((u4)t.q[i] - (0x4b400000u - 127u)) << 23)); }
K3_INLINE vf v_load_bytes(const void* p) {
    vf r;
    memcpy(&r, p, 64);
    return r;
}
K3_INLINE vf v_load(const float* p) { return v_load_bytes(p); }
K3_INLINE void v_store(float* p, vf a) { memcpy(p, &a, 64); }
K3_INLINE void v_stream(float* p, vf a) { v_store(p, a); }
K3_INLINE void v_streamed() {}
K3_INLINE vf v_load_n(const void* p, int64_t n) {
    if (n == 16) return v_load_bytes(p);
    float t[16] = {0};
    memcpy(t, p, (size_t)n * 4);
    return v_load(t);
}
K3_INLINE void v_store_n(float* p, vf a, int64_t n) { memcpy(p, &a, (size_t)n * 4); }
K3_INLINE vf m_sqrt(vf a) {
    float t[16];
    v_store(t, a);
    for (int i = 0; i < 16; ++i) t[i] = m_sqrt(t[i]);
    return v_load(t);
}
K3_INLINE void v_store_pair(float* p, vf a, vf b) {
    for (int i = 0; i < 4; ++i) {
        memcpy(p + 8 * i, &a.q[i], 16);
        memcpy(p + 8 * i + 4, &b.q[i], 16);
    }
}
K3_INLINE void v_load_pair(const float* p, vf& a, vf& b) {
    for (int i = 0; i < 4; ++i) {
        memcpy(&a.q[i], p + 8 * i, 16);
        memcpy(&b.q[i], p + 8 * i + 4, 16);
    }
}
K3_INLINE float v_sum(vf a) {
    const v4 c = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
    return (c[0] + c[2]) + (c[1] + c[3]);
}
K3_INLINE void v_bf16_split(const void* p, vf& even, vf& odd) {
    vf w = v_load_bytes(p);
    for (int i = 0; i < 4; ++i) {
        even.q[i] = (v4)((u4)w.q[i] << 16);
        odd.q[i] = (v4)((u4)w.q[i] & 0xffff0000u);
    }
}
K3_INLINE void v_mxfp4_split(const void* p, uint8_t scale, vf& even, vf& odd) {
    static const float table[16] = {0.0f, 0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const uint8_t* b = (const uint8_t*)p;
    float e[16], o[16];
    for (int i = 0; i < 16; ++i) {
        e[i] = table[b[i] & 15] * e8m0_to_f32(scale);
        o[i] = table[b[i] >> 4] * e8m0_to_f32(scale);
    }
    even = v_load(e);
    odd = v_load(o);
}
struct v_table {
    const uint8_t* bytes;
};
K3_INLINE v_table v_load_table(const void* p) {
    v_table t;
    t.bytes = (const uint8_t*)p;
    return t;
}
K3_INLINE void v_compact_split(const void* block, int half, v_table table, vf& even, vf& odd) {
    const uint8_t *low = (const uint8_t*)block + 32 * half, *code = (const uint8_t*)block + 64;
    float e[16], o[16];
    for (int i = 0; i < 32; ++i) {
        const int at = (i & 7) | (i & 8) << 1 | (i & 16) >> 1;
        const float w = bf16_to_f32((uint16_t)(table.bytes[code[at] >> 4 * half & 15] << 8 | low[at]));
        (i % 2 ? o : e)[i / 2] = w;
    }
    even = v_load(e);
    odd = v_load(o);
}
K3_INLINE void v_q8_split(const void* p, float scale, vf& first, vf& second) {
    const int8_t* q = (const int8_t*)p;
    float t[32];
    for (int i = 0; i < 32; ++i) t[i] = (float)q[i] * scale;
    first = v_load(t);
    second = v_load(t + 16);
}
K3_INLINE void v_store_joined(float* p, vf even, vf odd) {
    float e[16], o[16];
    v_store(e, even);
    v_store(o, odd);
    for (int i = 0; i < 16; ++i) {
        p[2 * i] = e[i];
        p[2 * i + 1] = o[i];
    }
}
K3_INLINE void v_load_split(const float* p, vf& even, vf& odd) {
    float e[16], o[16];
    for (int i = 0; i < 16; ++i) {
        e[i] = p[2 * i];
        o[i] = p[2 * i + 1];
    }
    even = v_load(e);
    odd = v_load(o);
}

#endif

// n < 32 BF16 weights at p, zero beyond; reads nothing beyond.
K3_INLINE void v_bf16_split_n(const void* p, int64_t n, vf& even, vf& odd) {
    uint16_t t[32] = {0};
    memcpy(t, p, (size_t)n * 2);
    v_bf16_split(t, even, odd);
}
K3_INLINE float v_max(vf a) {  // the largest lane that is not a NaN; -inf when there is none
    float t[16], m = m_bits(0xff800000u);
    v_store(t, a);
    for (int i = 0; i < 16; ++i) m = m < t[i] ? t[i] : m;
    return m;
}

#include "../k3_math.h"

}  // namespace K3_NS
#endif
