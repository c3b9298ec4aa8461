// SPDX-License-Identifier: MIT
//
// KDA, the delta rule.  Per head, with the state S as [key, value], row-major, in float32:
//
//     S <- diag(alpha) S ;  r = v - S^T k ;  S <- S + (beta k) r^T ;  o = S^T q
//
// A piece is one head of one segment and a strip of value columns: the columns are independent, a strip of
// 64 of them (32 KB at 128 keys) stays in the first-level cache while the rows of the segment pass over it, and
// the state is read from memory once and written once, however many rows there are.  Sums over keys ascend.

#include "norm.h"

namespace K3_NS {

namespace {

enum { STRIP = 64, STREAM_FROM = 16 << 20 };

struct Run {
    const k3_dims* dims;
    const k3_pass* pass;
    int64_t mixer_index, strips;
    bool streams;                     // the new state of a segment of one row goes past the caches
    const float *q, *k, *v, *alpha, *beta;
    float* o;
};

// One token over NV vectors of value columns, the last of them `n` wide.
template <int NV, bool STREAM = false>
static inline void token(const float* from, float* to, int64_t ld, int64_t keys, int64_t n, const float* q, const float* k,
                         const float* v, const float* alpha, float beta, float* o) {
    vf r[NV], out[NV];
    for (int j = 0; j < NV; ++j) r[j] = vf(0.0f);
    for (int64_t i = 0; i < keys; ++i) {
        const vf a = vf(alpha[i]), kk = vf(k[i]);
        for (int j = 0; j < NV; ++j) {
            const vf s = j == NV - 1 && n < 16 ? v_load_n(from + i * ld + j * 16, n) : v_load(from + i * ld + j * 16);
            r[j] = m_fma(a * s, kk, r[j]);
        }
    }
    for (int j = 0; j < NV; ++j) {
        const int64_t m = j == NV - 1 ? n : 16;
        r[j] = v_load_n(v + j * 16, m) - r[j];
        out[j] = vf(0.0f);
    }
    for (int64_t i = 0; i < keys; ++i) {
        const vf a = vf(alpha[i]), bk = vf(beta * k[i]), qq = vf(q[i]);
        for (int j = 0; j < NV; ++j) {
            const bool tail = j == NV - 1 && n < 16;
            const vf s = tail ? v_load_n(from + i * ld + j * 16, n) : v_load(from + i * ld + j * 16);
            const vf t = m_fma(bk, r[j], a * s);
            out[j] = m_fma(t, qq, out[j]);
            if (tail) v_store_n(to + i * ld + j * 16, t, n);
            else if (STREAM) v_stream(to + i * ld + j * 16, t);
            else v_store(to + i * ld + j * 16, t);
        }
    }
    for (int j = 0; j < NV; ++j) v_store_n(o + j * 16, out[j], j == NV - 1 ? n : 16);
}

void piece(void* arg, int64_t i) {
    const Run* run = (const Run*)arg;
    const k3_dims* dims = run->dims;
    const int64_t H = dims->kda_num_heads, D = dims->kda_head_k, V = dims->kda_head_v;
    const int64_t strip = i % run->strips, h = i / run->strips % H;
    const k3_segment* seg = run->pass->segments + i / (run->strips * H);
    const int64_t v0 = strip * STRIP, width = min64(STRIP, V - v0), last = (width - 1) % 16 + 1;
    const int64_t at = run->mixer_index * dims->state_stride + h * D * V + v0;
    const float* from = seg->now.state + at;
    float* to = seg->next.state + at;
    for (int64_t t = 0; t < seg->rows; ++t, from = to) {
        const int64_t row = seg->row + t, key = (row * H + h) * D, value = (row * H + h) * V + v0;
        const float *q = run->q + key, *k = run->k + key, *alpha = run->alpha + key, *v = run->v + value;
        const float beta = run->beta[row * H + h];
        float* o = run->o + value;
        if (run->streams && seg->rows == 1 && (uintptr_t)to % 64 == 0) {
            token<4, true>(from, to, V, D, 16, q, k, v, alpha, beta, o);
            v_streamed();
            continue;
        }
        switch ((width + 15) / 16) {
            case 1: token<1>(from, to, V, D, last, q, k, v, alpha, beta, o); break;
            case 2: token<2>(from, to, V, D, last, q, k, v, alpha, beta, o); break;
            case 3: token<3>(from, to, V, D, last, q, k, v, alpha, beta, o); break;
            default: token<4>(from, to, V, D, last, q, k, v, alpha, beta, o); break;
        }
    }
}

}  // namespace

int kda_recurrence(void* ctx, const k3_dims* dims, const k3_pass* pass, int64_t mixer_index, const float* q, const float* k,
                   const float* v, const float* alpha, const float* beta, float* o) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    Run run = {dims, pass, mixer_index, (dims->kda_head_v + STRIP - 1) / STRIP, false, q, k, v, alpha, beta, o};
    // States that no cache would keep until the next token, the old one and the new; in whole strips.
    run.streams = dims->kda_head_v % STRIP == 0 && 2 * dims->n_kda * dims->state_stride * 4 >= STREAM_FROM;
    const int64_t pieces = pass->n_segments * dims->kda_num_heads * run.strips;
    const int64_t bytes = dims->kda_num_heads * dims->kda_head_k * dims->kda_head_v * 4 * pass->rows;
    if (bytes < 2 * K3_PIECE_BYTES)
        for (int64_t i = 0; i < pieces; ++i) piece(&run, i);
    else each(cpu, pieces, piece, &run);
    return 0;
}

}  // namespace K3_NS
