// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix: rows of weights against one prepared row of inputs, or several.
//
// Order of summation.  Columns are taken 32 at a time, as two vectors of 16 lanes (columns.h).  A lane adds its column of the
// first vector and then that of the second; the groups ascend, and v_sum folds the 16 lanes at the end.  With several rows of
// inputs each result has the same chain as with one.

#include "dot.h"

#include "columns.h"

namespace K3_NS {

namespace {

// ---------------------------------------------------------------------------------------------
// A few rows of inputs: the weights stream by, and meet them in registers.
// ---------------------------------------------------------------------------------------------

// How many rows of weights one row of inputs meets at a time, and how far ahead of them memory is asked for.  Weights that take
// many instructions to widen keep the processor from looking ahead far enough; BF16 and F32 come no faster for being asked for.
template <int DT> constexpr int rows_together() { return DT == K3_COMPACT || DT == K3_Q8 ? 1 : 4; }
enum { AHEAD = 2048 };                                       // bytes
template <int DT> K3_INLINE void ask_ahead(const char* row, int64_t group) {
    const int64_t bytes = DT == K3_MXFP4 ? 16 : DT == K3_Q8 ? 32 : 48;
    const bool asks = DT == K3_COMPACT || ((DT == K3_MXFP4 || DT == K3_Q8) && group % 2 == 0);
    if (asks) __builtin_prefetch(row + group * bytes + AHEAD);
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
        for (int m = 0; m < M; ++m) sum[m] = m_fma(b, v_load(x[m] + g * 32 + 16), m_fma(a, v_load(x[m] + g * 32), sum[m]));
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
// lanes 4k .. 4k + 3 as those do.  sum[k] holds these lanes of both rows.
const uint8_t kOrder[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
const uint8_t kHigh[16] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
const uint8_t kLow[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
K3_INLINE __m256i both_halves(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }

struct Pair {
    const char *data0, *data1;
    const uint8_t *scale0, *scale1;
    __m256 sum[4];
};
K3_INLINE void add_group(Pair& p, int64_t g, const float* x) {
    const __m256i order = both_halves(kOrder), high = both_halves(kHigh), low = both_halves(kLow);
    const __m256i nibble = _mm256_set1_epi8(15), mask = _mm256_set1_epi32((int)0xffff0000u);
    const __m256 scale = _mm256_set_m128(_mm_broadcast_ss((const float*)(k3_e8m0.bits + p.scale1[g])),
                                         _mm_broadcast_ss((const float*)(k3_e8m0.bits + p.scale0[g])));
    __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(p.data0 + g * 16))),
                                            _mm_loadu_si128((const __m128i*)(p.data1 + g * 16)), 1);
    ask_ahead<K3_MXFP4>(p.data0, g);
    ask_ahead<K3_MXFP4>(p.data1, g);
    bytes = _mm256_shuffle_epi8(bytes, order);
    for (int i = 0; i < 2; ++i) {
        const __m256i code = _mm256_and_si256(i ? _mm256_srli_epi16(bytes, 4) : bytes, nibble);
        const __m256i h = _mm256_shuffle_epi8(high, code), l = _mm256_shuffle_epi8(low, code);
        const __m256i u = _mm256_unpacklo_epi8(l, h), v = _mm256_unpackhi_epi8(l, h);
        const __m256i w[4] = {_mm256_slli_epi32(u, 16), _mm256_and_si256(u, mask), _mm256_slli_epi32(v, 16),
                              _mm256_and_si256(v, mask)};
        for (int k = 0; k < 4; ++k)
            p.sum[k] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_castsi256_ps(w[k]), scale),
                                       _mm256_broadcast_ps((const __m128*)(x + 16 * i + 4 * k)), p.sum[k]);
    }
}
K3_INLINE void dot_pair(const k3_matrix* w, int64_t row, const float* x, float* y) {
    const Row r0 = row_of<K3_MXFP4>(w, row), r1 = row_of<K3_MXFP4>(w, row + 1);
    Pair p = {r0.data, r1.data, r0.scale, r1.scale, {}};
    for (int k = 0; k < 4; ++k) p.sum[k] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w->cols / 32; ++g) add_group(p, g, x + g * 32);
    y[0] = v_sum(vf::make(_mm256_permute2f128_ps(p.sum[0], p.sum[1], 0x20), _mm256_permute2f128_ps(p.sum[2], p.sum[3], 0x20)));
    y[1] = v_sum(vf::make(_mm256_permute2f128_ps(p.sum[0], p.sum[1], 0x31), _mm256_permute2f128_ps(p.sum[2], p.sum[3], 0x31)));
}
template <>
inline void dot_rows<K3_MXFP4, 4, 1>(const k3_matrix* w, int64_t row, const float* const* x, float* const* y, int64_t at) {
    dot_pair(w, row, x[0], y[0] + at);
    dot_pair(w, row + 2, x[0], y[0] + at + 2);
}
#endif

// The same for weights that lie one after the other, with nothing beside them: short rows cost no more than their columns.
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
        const vf xa = v_load(x + g * 32), xb = v_load(x + g * 32 + 16);
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_group<DT>(r[n], table, g, a, b);
            acc[n] = m_fma(b, xb, m_fma(a, xa, acc[n]));
        }
    }
    if (cols % 32) {
        const vf xa = v_load(x + groups * 32), xb = v_load(x + groups * 32 + 16);
        for (int n = 0; n < N; ++n) {
            vf a, b;
            load_any<DT>(r[n], table, groups, cols % 32, a, b);
            acc[n] = m_fma(b, xb, m_fma(a, xa, acc[n]));
        }
    }
    for (int n = 0; n < N; ++n) y[n] = v_sum(acc[n]);
}

template <int DT, int N, int M>
static inline void dot_few(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y) {
    int64_t r = r0;
    if (M == 1 && (DT == K3_BF16 || DT == K3_F32)) {
        for (; r + N <= r1; r += N) dot_plain<DT, N>(w, r, x[0], y[0] + (r - r0));
        for (; r < r1; ++r) dot_plain<DT, 1>(w, r, x[0], y[0] + (r - r0));
        return;
    }
    for (; r + N <= r1; r += N) dot_rows<DT, N, M>(w, r, x, y, r - r0);
    for (; r < r1; ++r) dot_rows<DT, 1, M>(w, r, x, y, r - r0);
}

// ---------------------------------------------------------------------------------------------
// Many rows of inputs: a strip of weights is widened once, into the first-level cache, and meets all of them.
// ---------------------------------------------------------------------------------------------

// Registers of one vf that a tile goes over one after the other, rows of weights in a strip, rows of inputs in a tile (as
// many sums as there are registers for), groups of columns at a time, and inputs that a strip meets before it is left.
#if defined(K3_ISA_AVX512)
enum { PARTS = 1, STRIP = 4, TILE = 6 };
typedef __m512 part;
K3_INLINE part p_load(const float* p) { return _mm512_loadu_ps(p); }
K3_INLINE void p_store(float* p, part x) { _mm512_storeu_ps(p, x); }
K3_INLINE part p_fma(part a, part b, part c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(K3_ISA_AVX2)
enum { PARTS = 2, STRIP = 4, TILE = 3 };
typedef __m256 part;
K3_INLINE part p_load(const float* p) { return _mm256_loadu_ps(p); }
K3_INLINE void p_store(float* p, part x) { _mm256_storeu_ps(p, x); }
K3_INLINE part p_fma(part a, part b, part c) { return _mm256_fmadd_ps(a, b, c); }
#else
enum { PARTS = 4, STRIP = 4, TILE = 2 };
typedef v4 part;
K3_INLINE part p_load(const float* p) {
    part x;
    memcpy(&x, p, 16);
    return x;
}
K3_INLINE void p_store(float* p, part x) { memcpy(p, &x, 16); }
K3_INLINE part p_fma(part a, part b, part c) { return a * b + c; }
#endif
enum { LANES = 16 / PARTS, DEPTH = 16, ROWS = 64 };

// Adds `groups` groups of a widened strip to the sums of M rows of inputs.
template <int M> static inline void tile(const float* strip, int64_t groups, const float* const* x, int64_t at, float* sums) {
    for (int p = 0; p < PARTS; ++p) {
        part acc[M][STRIP];
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < STRIP; ++n) acc[m][n] = p_load(sums + (m * STRIP + n) * 16 + p * LANES);
        const float* in[M];
        for (int m = 0; m < M; ++m) in[m] = x[m] + at + p * LANES;
        const float* w = strip + p * LANES;
        for (int64_t i = 0; i < 2 * groups; ++i) {
            part v[M];
            for (int m = 0; m < M; ++m) v[m] = p_load(in[m] + 16 * i);
            for (int n = 0; n < STRIP; ++n) {
                const part u = p_load(w + (i * STRIP + n) * 16);
                for (int m = 0; m < M; ++m) acc[m][n] = p_fma(u, v[m], acc[m][n]);
            }
        }
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < STRIP; ++n) p_store(sums + (m * STRIP + n) * 16 + p * LANES, acc[m][n]);
    }
}

template <int DT>
static void dot_strips(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    float strip[STRIP * DEPTH * 32] __attribute__((aligned(64)));
    float sums[ROWS * STRIP * 16] __attribute__((aligned(64)));
    const v_table table = table_of<DT>(w);
    const int64_t groups = (w->cols + 31) / 32;
    for (int64_t r = r0; r < r1; r += STRIP) {
        const int64_t n_rows = min64(STRIP, r1 - r);
        Row row[STRIP];
        for (int64_t n = 0; n < STRIP; ++n) row[n] = row_of<DT>(w, r + min64(n, n_rows - 1));   // the last one again
        memset(sums, 0, (size_t)rows * STRIP * 64);
        for (int64_t g0 = 0; g0 < groups; g0 += DEPTH) {
            const int64_t depth = min64(DEPTH, groups - g0);
            for (int n = 0; n < STRIP; ++n)
                for (int64_t g = 0; g < depth; ++g) {
                    vf a, b;
                    load_any<DT>(row[n], table, g0 + g, min64(32, w->cols - (g0 + g) * 32), a, b);
                    v_store(strip + (2 * g * STRIP + n) * 16, a);
                    v_store(strip + ((2 * g + 1) * STRIP + n) * 16, b);
                }
            int64_t m = 0;
            for (; m + TILE <= rows; m += TILE) tile<TILE>(strip, depth, x + m, g0 * 32, sums + m * STRIP * 16);
            for (; m + 2 <= rows; m += 2) tile<2>(strip, depth, x + m, g0 * 32, sums + m * STRIP * 16);
            for (; m < rows; ++m) tile<1>(strip, depth, x + m, g0 * 32, sums + m * STRIP * 16);
        }
        for (int64_t m = 0; m < rows; ++m)
            for (int64_t n = 0; n < n_rows; ++n) y[m][r - r0 + n] = v_sum(v_load(sums + (m * STRIP + n) * 16));
    }
}

template <int DT>
static inline void dot(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
    if (rows == 1) return dot_few<DT, rows_together<DT>(), 1>(w, r0, r1, x, y);
    if (rows == 2) return dot_few<DT, 2, 2>(w, r0, r1, x, y);
    if (rows == 3) return dot_few<DT, 2, 3>(w, r0, r1, x, y);
    for (int64_t m = 0; m < rows; m += ROWS) dot_strips<DT>(w, r0, r1, x + m, y + m, min64(ROWS, rows - m));
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
