// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix: rows of weights against one prepared row of inputs, or several.
//
// Order of summation.  Columns are taken 32 at a time, as two vectors of 16 lanes (columns.h).  A lane adds its column of the
// first vector and then that of the second; the groups ascend, and v_sum folds the 16 lanes at the end.  With several rows of
// inputs each result has the same chain as with one.

#include "dot.h"

#include "strips.h"

namespace K3_NS {

namespace {

// ---------------------------------------------------------------------------------------------
// A few rows of inputs: packed weights stream by, are widened in registers, and meet them there.
// ---------------------------------------------------------------------------------------------

// How many rows of weights one row of inputs meets at a time, and how far ahead of them memory is asked for.  Weights that take
// many instructions to widen keep the processor from looking ahead far enough.
template <int DT> constexpr int rows_together() { return DT == K3_MXFP4 ? 4 : 1; }
enum { AHEAD = 2048 };                                       // bytes
template <int DT> K3_INLINE void ask_ahead(const char* row, int64_t group) {
    const int64_t bytes = DT == K3_MXFP4 ? 16 : DT == K3_Q8 ? 32 : 48;
    if (DT == K3_COMPACT || group % 2 == 0) __builtin_prefetch(row + group * bytes + AHEAD);
}

// y[m][at + n] for N consecutive rows of weights and M inputs.
template <int DT, int N, int M>
static inline void dot_rows(const k3_matrix* w, int64_t row, const float* const* x, float* const* y, int64_t at) {
    const int64_t groups = w->cols / 32;
    const v_table table = table_of<DT>(w);
    Row r[N];
    vf acc[N][M];
    for (int n = 0; n < N; ++n) {
        r[n] = row_of<DT>(w, row + n);
        for (int m = 0; m < M; ++m) acc[n][m] = vf(0.0f);
    }
    const auto add = [&](int64_t g, vf* sum, vf a, vf b) {
        for (int m = 0; m < M; ++m) {
            vf xa, xb;
            v_load_pair(x[m] + g * 32, xa, xb);
            sum[m] = m_fma(b, xb, m_fma(a, xa, sum[m]));
        }
    };
    const auto group = [&](int64_t g) {
        for (int n = 0; n < N; ++n) {
            vf a, b;
            if (M == 1) ask_ahead<DT>(r[n].data, g);
            load_group<DT>(r[n], table, g, a, b);
            add(g, acc[n], a, b);
        }
    };
    const auto any = [&](int64_t g, int64_t columns) {
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_any<DT>(r[n], table, g, columns, a, b);
            add(g, acc[n], a, b);
        }
    };
    if (DT == K3_COMPACT) {
        for (int64_t g = 0; g < groups;) {
            int64_t stop = groups;                           // the next group that is an exception in one of the rows
            for (int n = 0; n < N; ++n)
                if (r[n].next != r[n].end) stop = min64(stop, r[n].next->group);
            if (g % 2 && g < stop) group(g++);
            for (; g + 2 <= stop; g += 2) {                  // a whole block of 96 bytes
                group(g);
                group(g + 1);
            }
            if (g < stop) group(g++);
            if (g < groups) any(g++, 32);
        }
    } else {
        for (int64_t g = 0; g < groups; ++g) group(g);
    }
    if (w->cols % 32) any(groups, w->cols % 32);
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) y[m][at + n] = v_sum(acc[n][m]);
}

#if defined(K3_ISA_AVX2)
// MXFP4 in pairs of rows, one in each half of a register: codes become the bytes of BF16 numbers by look-up, and fall apart into
// lanes 4k .. 4k + 3 as those do.  There is a table for every scale, so that nothing is left to multiply with it.
struct Mxfp4Bytes {
    uint8_t low[256][16], high[256][16];             // by scale and code
    constexpr Mxfp4Bytes() : low(), high() {
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 16; ++code) {
                // Codes 1 to 7 are 1 or 1.5 (odd, from 3 on) times 2^-1, 2^0, 2^0, 2^1, 2^1, 2^2, 2^2; 8 is read as 0.
                const int magnitude = code & 7, half = magnitude > 1 ? magnitude & 1 : 0;
                const int exponent = scale + (magnitude >> 1) - 1;     // biased, as scale is
                int word = 0;
                if (scale == 255) word = 0x7fc0;
                else if (magnitude == 0) word = 0;
                else if (exponent >= 255) word = 0x7f80;
                else if (exponent > 0) word = exponent << 7 | half << 6;
                else word = (128 + 64 * half) >> (1 - exponent);       // a subnormal, exactly
                if (code > 8) word |= 0x8000;
                low[scale][code] = (uint8_t)(word & 255);
                high[scale][code] = (uint8_t)(word >> 8);
            }
    }
};
constexpr Mxfp4Bytes kMxfp4;
const uint8_t kOrder[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
K3_INLINE __m256i both_halves(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
K3_INLINE __m256i two_halves(const void* first, const void* second) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first)),
                                   _mm_loadu_si128((const __m128i*)second), 1);
}

// Sums by name: in an array they would live in memory.
struct Sums {
    __m256 k0, k1, k2, k3;
};
K3_INLINE __m256 both_halves(const float* p) { return _mm256_broadcast_ps((const __m128*)p); }
K3_INLINE void add_four(Sums& s, const float* x, __m256 w0, __m256 w1, __m256 w2, __m256 w3) {
    s.k0 = _mm256_fmadd_ps(w0, both_halves(x), s.k0);
    s.k1 = _mm256_fmadd_ps(w1, both_halves(x + 4), s.k1);
    s.k2 = _mm256_fmadd_ps(w2, both_halves(x + 16), s.k2);      // the second register of these lanes (v_store_pair)
    s.k3 = _mm256_fmadd_ps(w3, both_halves(x + 20), s.k3);
}
K3_INLINE void sum_pair(const Sums& s, float* y) {
    y[0] = v_sum(vf::make(_mm256_permute2f128_ps(s.k0, s.k1, 0x20), _mm256_permute2f128_ps(s.k2, s.k3, 0x20)));
    y[1] = v_sum(vf::make(_mm256_permute2f128_ps(s.k0, s.k1, 0x31), _mm256_permute2f128_ps(s.k2, s.k3, 0x31)));
}
template <int M>
static inline void dot_pair(const k3_matrix* w, int64_t row, const float* const* x, float* const* y, int64_t at) {
    const __m256i order = both_halves(kOrder), nibble = _mm256_set1_epi8(15), mask = _mm256_set1_epi32((int)0xffff0000u);
    const __m256 zero = _mm256_setzero_ps();
    const Row r0 = row_of<K3_MXFP4>(w, row), r1 = row_of<K3_MXFP4>(w, row + 1);
    const float *x0 = x[0], *x1 = M > 1 ? x[1] : x0, *x2 = M > 2 ? x[2] : x0;
    Sums s0 = {zero, zero, zero, zero}, s1 = s0, s2 = s0;
    const int64_t groups = w->cols / 32;
    for (int64_t g = 0; g < groups; ++g) {
        const int scale0 = r0.scale[g], scale1 = r1.scale[g];
        const __m256i low = two_halves(kMxfp4.low[scale0], kMxfp4.low[scale1]);
        const __m256i high = two_halves(kMxfp4.high[scale0], kMxfp4.high[scale1]);
        const __m256i bytes = _mm256_shuffle_epi8(two_halves(r0.data + g * 16, r1.data + g * 16), order);
        ask_ahead<K3_MXFP4>(r0.data, g);
        ask_ahead<K3_MXFP4>(r1.data, g);
        const auto half = [&](__m256i code, int64_t c) {
            const __m256i h = _mm256_shuffle_epi8(high, code), l = _mm256_shuffle_epi8(low, code);
            const __m256i u = _mm256_unpacklo_epi8(l, h), v = _mm256_unpackhi_epi8(l, h);
            const __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
            const __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(u, mask));
            const __m256 w2 = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
            const __m256 w3 = _mm256_castsi256_ps(_mm256_and_si256(v, mask));
            add_four(s0, x0 + c, w0, w1, w2, w3);
            if (M > 1) add_four(s1, x1 + c, w0, w1, w2, w3);
            if (M > 2) add_four(s2, x2 + c, w0, w1, w2, w3);
        };
        half(_mm256_and_si256(bytes, nibble), g * 32);
        half(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble), g * 32 + 8);
    }
    sum_pair(s0, y[0] + at);
    if (M > 1) sum_pair(s1, y[1] + at);
    if (M > 2) sum_pair(s2, y[2] + at);
}
#endif

template <int DT, int M>
static inline void dot_few(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y) {
    int64_t r = r0;
#if defined(K3_ISA_AVX2)
    if (DT == K3_MXFP4)
        for (; r + 2 <= r1; r += 2) dot_pair<M>(w, r, x, y, r - r0);
#endif
    constexpr int N = M == 1 ? rows_together<DT>() : 2;
    for (; r + N <= r1; r += N) dot_rows<DT, N, M>(w, r, x, y, r - r0);
    for (; r < r1; ++r) dot_rows<DT, 1, M>(w, r, x, y, r - r0);
}

// ---------------------------------------------------------------------------------------------
// One row of inputs over BF16 or F32: short rows cost no more than their columns.
// ---------------------------------------------------------------------------------------------

template <int DT, int N> static inline void dot_plain(const k3_matrix* w, int64_t row, const float* x, float* y) {
    const int64_t cols = w->cols, groups = cols / 32;
    const v_table table = table_of<DT>(w);
    Row r[N];
    vf acc[N];
    for (int n = 0; n < N; ++n) {
        r[n].data = (const char*)w->data + (row + n) * w->pitch;
        acc[n] = vf(0.0f);
    }
    for (int64_t g = 0; g < groups; ++g) {
        vf xa, xb;
        v_load_pair(x + g * 32, xa, xb);
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_group<DT>(r[n], table, g, a, b);
            acc[n] = m_fma(b, xb, m_fma(a, xa, acc[n]));
        }
    }
    if (cols % 32) {
        vf xa, xb;
        v_load_pair(x + groups * 32, xa, xb);
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_any<DT>(r[n], table, groups, cols % 32, a, b);
            acc[n] = m_fma(b, xb, m_fma(a, xa, acc[n]));
        }
    }
    for (int n = 0; n < N; ++n) y[n] = v_sum(acc[n]);
}

template <int DT> static inline void dot_one(const k3_matrix* w, int64_t r0, int64_t r1, const float* x, float* y) {
    int64_t r = r0;
    for (; r + 4 <= r1; r += 4) dot_plain<DT, 4>(w, r, x, y + (r - r0));
    for (; r < r1; ++r) dot_plain<DT, 1>(w, r, x, y + (r - r0));
}

template <int DT>
static inline void dot(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    if constexpr (is_plain<DT>()) {
        if (rows == 1) return dot_one<DT>(w, r0, r1, x[0], y[0]);
    } else {
        if (rows == 1) return dot_few<DT, 1>(w, r0, r1, x, y);
        if (rows == 2) return dot_few<DT, 2>(w, r0, r1, x, y);
        if (rows == 3) return dot_few<DT, 3>(w, r0, r1, x, y);
    }
    dot_strips<DT, false>(w, r0, r1, x, y, rows);
}

}  // namespace

void multiply(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    switch (w->dtype) {
        case K3_F32: return dot<K3_F32>(w, r0, r1, x, y, rows);
        case K3_BF16: return dot<K3_BF16>(w, r0, r1, x, y, rows);
        case K3_MXFP4: return dot<K3_MXFP4>(w, r0, r1, x, y, rows);
        case K3_COMPACT: return dot<K3_COMPACT>(w, r0, r1, x, y, rows);
        default: return dot<K3_Q8>(w, r0, r1, x, y, rows);
    }
}

}  // namespace K3_NS
