// SPDX-License-Identifier: MIT
//
// MLA, attention of each row over the latent rows up to its own, in the absorbed form: one shared "key" of
// latent_stride elements per position, whose first kv_lora elements are the "value" as well.
//
// Order.  A row at position p sees n = p + 1 rows, in blocks of 64 and at most 64 pieces of whole blocks; the cut
// depends on n alone.  Inside a piece the softmax is kept running from block to block (maximum, sum, weighted sum);
// the pieces are then merged in ascending order.  With few rows the pieces are spread over the threads and merged
// afterwards; with many, one thread takes all pieces of a row: the same operations in the same order.

#include "latent.h"
#include "norm.h"

namespace K3_NS {

namespace {

enum { HEADS = 8 };                                  // heads that share one reading of a block
// Latent rows, and columns by 16, that four heads meet at a time: with AVX-512 sums of one would wait for each other.
#if defined(K3_ISA_AVX512)
enum { TOGETHER = 4 };
#else
enum { TOGETHER = 1 };
#endif

struct Run {
    const k3_dims* dims;
    const k3_pass* pass;
    int64_t mixer_index, groups;
    const float* qa;
    float* oa;
    float* partial;                                  // [R, H, 64, 2 + kv_lora] where pieces run apart, else NULL
};

struct Cut {
    int64_t n, blocks_per_piece, pieces;
};
K3_INLINE Cut cut(int64_t position) {
    const int64_t n = position + 1, blocks = (n + K3_BLOCK - 1) / K3_BLOCK;
    const int64_t per = (blocks + K3_MAX_PIECES - 1) / K3_MAX_PIECES;
    const Cut c = {n, per, (blocks + per - 1) / per};
    return c;
}

template <int BF16> K3_INLINE vf latent_16(const char* row, int64_t i) {
    if (!BF16) return v_load((const float*)row + i);
    float t[16];
    const uint16_t* h = (const uint16_t*)row + i;
    for (int j = 0; j < 16; ++j) t[j] = bf16_to_f32(h[j]);
    return v_load(t);
}

// Scores of N heads against T latent rows.
template <int BF16, int N, int T> K3_INLINE void scores(const char* const* rows, const float* const* q, int64_t stride,
                                                        float scale, float* out, int64_t ldo) {
    vf acc[T][N];
    for (int t = 0; t < T; ++t)
        for (int h = 0; h < N; ++h) acc[t][h] = vf(0.0f);
    for (int64_t i = 0; i < stride; i += 16) {
        vf x[T];
        for (int t = 0; t < T; ++t) x[t] = latent_16<BF16>(rows[t], i);
        for (int h = 0; h < N; ++h) {
            const vf y = v_load(q[h] + i);
            for (int t = 0; t < T; ++t) acc[t][h] = m_fma(x[t], y, acc[t][h]);
        }
    }
    for (int t = 0; t < T; ++t)
        for (int h = 0; h < N; ++h) out[h * ldo + t] = v_sum(acc[t][h]) * scale;
}

// o <- o * fade + sum over the block of p * latent, for N heads and C times 16 columns from i on (n real ones in each).
template <int BF16, int N, int C>
K3_INLINE void weigh(const char* const* rows, int64_t count, const float* p, const float* fade, float* const* o, int64_t i,
                     int64_t n) {
    vf acc[C][N];
    for (int c = 0; c < C; ++c)
        for (int h = 0; h < N; ++h) acc[c][h] = v_load_n(o[h] + i + 16 * c, n) * vf(fade[h]);
    for (int64_t t = 0; t < count; ++t) {
        vf x[C];
        for (int c = 0; c < C; ++c) x[c] = latent_16<BF16>(rows[t], i + 16 * c);
        for (int h = 0; h < N; ++h) {
            const vf y = vf(p[h * K3_BLOCK + t]);
            for (int c = 0; c < C; ++c) acc[c][h] = m_fma(y, x[c], acc[c][h]);
        }
    }
    for (int c = 0; c < C; ++c)
        for (int h = 0; h < N; ++h) v_store_n(o[h] + i + 16 * c, acc[c][h], n);
}

template <int BF16, int N>
static inline void heads(const char* const* rows, int64_t count, const k3_dims* dims, const float* const* q, float* m, float* l,
                         float* const* o) {
    float p[N * K3_BLOCK] __attribute__((aligned(64))), fade[N];
    const int64_t stride = dims->latent_stride, columns = dims->kv_lora_rank;
    int64_t at = 0;
    for (; at + TOGETHER <= count; at += TOGETHER)
        scores<BF16, N, TOGETHER>(rows + at, q, stride, dims->attention_scale, p + at, K3_BLOCK);
    for (; at < count; ++at) scores<BF16, N, 1>(rows + at, q, stride, dims->attention_scale, p + at, K3_BLOCK);
    for (int h = 0; h < N; ++h) {
        float* ph = p + h * K3_BLOCK;
        float top = m[h];
        for (int64_t t = 0; t < count; ++t) top = top < ph[t] ? ph[t] : top;
        vf sum = vf(0.0f);
        for (int64_t t = 0; t < count; t += 16) {
            const int64_t n = min64(16, count - t);
            const vf e = k3_exp(v_load_n(ph + t, n) - vf(top));
            v_store_n(ph + t, e, n);
            sum = sum + v_load_n(ph + t, n);
        }
        fade[h] = k3_exp(m[h] - top);
        l[h] = m_fma(l[h], fade[h], v_sum(sum));
        m[h] = top;
    }
    int64_t i = 0;
    for (; i + 16 * TOGETHER <= columns; i += 16 * TOGETHER) weigh<BF16, N, TOGETHER>(rows, count, p, fade, o, i, 16);
    for (; i < columns; i += 16) weigh<BF16, N, 1>(rows, count, p, fade, o, i, min64(16, columns - i));
}

// One piece for the heads h0 .. h0 + count of a row: m, l and o are its results.
static void run_piece(const Run* run, const k3_segment* seg, int64_t row, int64_t h0, int64_t n_heads, Cut c, int64_t index,
                      float* m, float* l, float* const* o) {
    const k3_dims* dims = run->dims;
    const int64_t begin = index * c.blocks_per_piece * K3_BLOCK, end = min64(c.n, begin + c.blocks_per_piece * K3_BLOCK);
    const float* q[HEADS];
    for (int64_t h = 0; h < n_heads; ++h) {
        q[h] = run->qa + (row * dims->num_attention_heads + h0 + h) * dims->latent_stride;
        m[h] = m_bits(0xff800000u);
        l[h] = 0.0f;
        memset(o[h], 0, (size_t)dims->kv_lora_rank * 4);
    }
    for (int64_t t = begin; t < end; t += K3_BLOCK) {
        const char* rows[K3_BLOCK];
        const int64_t count = min64(K3_BLOCK, end - t);
        for (int64_t j = 0; j < count; ++j) rows[j] = latent_row(dims, seg, run->mixer_index, t + j);
        int64_t h = 0;
        if (seg->latent_dtype == K3_BF16) {
            for (; h + 4 <= n_heads; h += 4) heads<1, 4>(rows, count, dims, q + h, m + h, l + h, o + h);
            for (; h < n_heads; ++h) heads<1, 1>(rows, count, dims, q + h, m + h, l + h, o + h);
        } else {
            for (; h + 4 <= n_heads; h += 4) heads<0, 4>(rows, count, dims, q + h, m + h, l + h, o + h);
            for (; h < n_heads; ++h) heads<0, 1>(rows, count, dims, q + h, m + h, l + h, o + h);
        }
    }
}

// Adds the result of one piece to the running result of a head.
K3_INLINE void merge(float* M, float* S, float* O, float m, float l, const float* o, int64_t n) {
    const float top = *M < m ? m : *M;
    const float a = k3_exp(*M - top), b = k3_exp(m - top);
    *S = m_fma(*S, a, l * b);
    *M = top;
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t k = min64(16, n - i);
        v_store_n(O + i, m_fma(v_load_n(O + i, k), vf(a), v_load_n(o + i, k) * vf(b)), k);
    }
}
K3_INLINE void divide(float* O, float S, int64_t n) {
    for (int64_t i = 0; i < n; ++i) O[i] = O[i] / S;
}

void whole_row(void* arg, int64_t item) {
    const Run* run = (const Run*)arg;
    const int64_t L = run->dims->kv_lora_rank, H = run->dims->num_attention_heads;
    const int64_t row = item / run->groups, h0 = item % run->groups * HEADS, n_heads = min64(HEADS, H - h0);
    const k3_segment* seg = segment_of(run->pass, row);
    if (!seg) return;
    const Cut c = cut(seg->position + row - seg->row);
    float m[HEADS], l[HEADS], M[HEADS], S[HEADS], part[n_heads * L];
    float* o[HEADS];
    for (int64_t h = 0; h < n_heads; ++h) {
        o[h] = part + h * L;
        M[h] = m_bits(0xff800000u);
        S[h] = 0.0f;
        memset(run->oa + (row * H + h0 + h) * L, 0, (size_t)L * 4);
    }
    for (int64_t i = 0; i < c.pieces; ++i) {
        run_piece(run, seg, row, h0, n_heads, c, i, m, l, o);
        for (int64_t h = 0; h < n_heads; ++h) merge(M + h, S + h, run->oa + (row * H + h0 + h) * L, m[h], l[h], o[h], L);
    }
    for (int64_t h = 0; h < n_heads; ++h) divide(run->oa + (row * H + h0 + h) * L, S[h], L);
}

K3_INLINE float* slot(const Run* run, int64_t row, int64_t head, int64_t index) {
    return run->partial + ((row * run->dims->num_attention_heads + head) * K3_MAX_PIECES + index) * (run->dims->kv_lora_rank + 2);
}

void one_piece(void* arg, int64_t item) {
    const Run* run = (const Run*)arg;
    const int64_t H = run->dims->num_attention_heads;
    const int64_t index = item % K3_MAX_PIECES, group = item / K3_MAX_PIECES % run->groups,
                  row = item / K3_MAX_PIECES / run->groups;
    const k3_segment* seg = segment_of(run->pass, row);
    if (!seg) return;
    const Cut c = cut(seg->position + row - seg->row);
    if (index >= c.pieces) return;
    const int64_t h0 = group * HEADS, n_heads = min64(HEADS, H - h0);
    float m[HEADS], l[HEADS];
    float* o[HEADS];
    for (int64_t h = 0; h < n_heads; ++h) o[h] = slot(run, row, h0 + h, index) + 2;
    run_piece(run, seg, row, h0, n_heads, c, index, m, l, o);
    for (int64_t h = 0; h < n_heads; ++h) {
        o[h][-2] = m[h];
        o[h][-1] = l[h];
    }
}

void merge_head(void* arg, int64_t item) {
    const Run* run = (const Run*)arg;
    const int64_t L = run->dims->kv_lora_rank, H = run->dims->num_attention_heads, row = item / H;
    const k3_segment* seg = segment_of(run->pass, row);
    if (!seg) return;
    const Cut c = cut(seg->position + row - seg->row);
    float M = m_bits(0xff800000u), S = 0.0f;
    float* O = run->oa + item * L;
    memset(O, 0, (size_t)L * 4);
    for (int64_t i = 0; i < c.pieces; ++i) {
        const float* s = slot(run, row, item % H, i);
        merge(&M, &S, O, s[0], s[1], s + 2, L);
    }
    divide(O, S, L);
}

}  // namespace

int mla_attend(void* ctx, const k3_dims* dims, const k3_pass* pass, int64_t mixer_index, const float* qa, float* oa) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    const int64_t H = dims->num_attention_heads, rows = pass->rows;
    Run run = {dims, pass, mixer_index, (H + HEADS - 1) / HEADS, qa, oa, cpu->work};
    int64_t seen = 0;
    for (int64_t n = 0; n < pass->n_segments; ++n)
        seen += pass->segments[n].rows * (pass->segments[n].position + pass->segments[n].rows);
    const bool small = seen * H * dims->latent_stride < 64 * 1024;
    const bool apart = !small && cpu->threads > 1 && rows * run.groups < 4 * cpu->threads && seen > 2 * K3_BLOCK * rows &&
                       rows * H * K3_MAX_PIECES * (dims->kv_lora_rank + 2) <= cpu->work_floats;
    if (apart) {
        each(cpu, rows * run.groups * K3_MAX_PIECES, one_piece, &run);
        each(cpu, rows * H, merge_head, &run);
    } else if (small) {
        for (int64_t i = 0; i < rows * run.groups; ++i) whole_row(&run, i);
    } else {
        each(cpu, rows * run.groups, whole_row, &run);
    }
    return 0;
}

}  // namespace K3_NS
