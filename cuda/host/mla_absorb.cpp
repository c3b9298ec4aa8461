// SPDX-License-Identifier: MIT
//
// MLA, absorbed form: the key half of kv_b_proj is applied to the query instead of to every cached row.
// qa[h] = [sum over nope channels r of q[r] * Wk_h[r] | q_rope | zeros].  A piece is one head, all rows; each
// output is one sum over r ascending.

#include "dot.h"

namespace K3_NS {

namespace {

#if defined(K3_ISA_AVX512)
enum { TOGETHER = 4 };                // rows of queries, as many as there are registers for
#else
enum { TOGETHER = 2 };
#endif

struct Run {
    const k3_dims* dims;
    const k3_matrix* kv_b;
    const float* q;
    float* qa;
    int64_t rows;
};

// 32 columns (n real) from column c of head h for M rows of queries.  The next 32 are asked of memory meanwhile: they lie in other
// lines, of which no processor guesses the order.
template <int M> static inline void columns(const Run* run, int64_t h, int64_t c, int64_t n, int64_t m0) {
    const k3_dims* dims = run->dims;
    const int64_t nope = dims->qk_nope_head_dim, qk = nope + dims->qk_rope_head_dim, H = dims->num_attention_heads;
    const int64_t first = h * (nope + dims->v_head_dim);
    const float* q[M];
    vf a[M], b[M];
    for (int m = 0; m < M; ++m) {
        q[m] = run->q + ((m0 + m) * H + h) * qk;
        a[m] = b[m] = vf(0.0f);
    }
    const bool bf16 = run->kv_b->dtype == K3_BF16;
    for (int64_t r = 0; r < nope; ++r) {
        vf wa, wb;
        const char* row = (const char*)run->kv_b->data + (first + r) * run->kv_b->pitch + c * (bf16 ? 2 : 4);
        __builtin_prefetch(row + (bf16 ? 64 : 128));
        if (bf16) {
            if (n == 32) v_bf16_split(row, wa, wb);
            else v_bf16_split_n(row, n, wa, wb);
        } else {
            wa = v_load_n(row, min64(16, n));
            wb = v_load_n(row + 64, max64(0, n - 16));
        }
        for (int m = 0; m < M; ++m) {
            a[m] = m_fma(vf(q[m][r]), wa, a[m]);
            b[m] = m_fma(vf(q[m][r]), wb, b[m]);
        }
    }
    for (int m = 0; m < M; ++m) {
        float t[32];
        if (bf16) {
            v_store_joined(t, a[m], b[m]);
        } else {
            v_store(t, a[m]);
            v_store(t + 16, b[m]);
        }
        memcpy(run->qa + ((m0 + m) * H + h) * dims->latent_stride + c, t, (size_t)n * 4);
    }
}

void piece(void* arg, int64_t h) {
    const Run* run = (const Run*)arg;
    const k3_dims* dims = run->dims;
    const int64_t nope = dims->qk_nope_head_dim, rope = dims->qk_rope_head_dim, L = dims->kv_lora_rank;
    for (int64_t c = 0; c < L; c += 32) {
        const int64_t n = min64(32, L - c);
        int64_t m = 0;
        for (; m + TOGETHER <= run->rows; m += TOGETHER) columns<TOGETHER>(run, h, c, n, m);
        for (; m < run->rows; ++m) columns<1>(run, h, c, n, m);
    }
    for (int64_t m = 0; m < run->rows; ++m) {
        const int64_t at = m * dims->num_attention_heads + h;
        float* out = run->qa + at * dims->latent_stride + L;
        memcpy(out, run->q + at * (nope + rope) + nope, (size_t)rope * 4);
        memset(out + rope, 0, (size_t)(dims->latent_stride - L - rope) * 4);
    }
}

}  // namespace

int mla_absorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* q, float* qa, int64_t rows) {
    const k3_cpu* cpu = (const k3_cpu*)ctx;
    Run run = {dims, &w->kv_b_proj, q, qa, rows};
    const int64_t H = dims->num_attention_heads, bytes = H * dims->qk_nope_head_dim * dims->kv_lora_rank * 2 * rows;
    if (bytes < 2 * K3_PIECE_BYTES)
        for (int64_t h = 0; h < H; ++h) piece(&run, h);
    else each(cpu, H, piece, &run);
    return 0;
}

}  // namespace K3_NS
