// SPDX-License-Identifier: MIT
//
// The contract of every op of a forward pass.  The decoder (pyx/decoder.pyx) calls through the table
// `k3_ops`; cuda/host/ implements it for the CPU, once per instruction set, and the CUDA kernels beside
// this file implement it for the GPU.
//
// Conventions.  Activations and state are float32, row-major.  A weight matrix is [out, in], as stored in
// the checkpoint, and so are its bytes.  An op never allocates and never throws; it returns 0, or a status
// that the caller turns into an exception.  A row's result does not depend on the other rows of the call,
// nor on the number of threads (docs/numerics.md).
//
// Shapes use: R rows, d = hidden_size, H heads, D = head_dim, C = H * D, K = short_conv_kernel_size,
// L = kv_lora_rank, W = L + qk_rope_head_dim (the width of a latent row), E experts, T chosen of them.

#ifndef K3_OPS_H
#define K3_OPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The dtype of a matrix, or (the first two) of the latent cache.  The last two are made at load, and for the CPU alone.
//
// K3_COMPACT is BF16 without loss.  The low byte of a weight (the last bit of the exponent, and the mantissa) stands as it is;
// the high byte (sign and exponent) is one of 16 of the matrix's own, as a code of 4 bits.  A row is blocks of 64 columns: 64
// low bytes, then 32 bytes of codes, those of columns 0 .. 31 in the low nibbles, those of 32 .. 63 in the high ones.  Within
// 32 columns, bits 3 and 4 of a column's number change places, so that two registers of bytes interleave to words in order.
// Groups of 32 columns that have another high byte, and what is left of a row beyond whole groups, stand beside as BF16.
//
// K3_Q8 has signed bytes in groups of 32 columns, each group with a BF16 factor; rows are padded with zeros to whole groups.
enum { K3_F32 = 0, K3_BF16 = 1, K3_MXFP4 = 2, K3_COMPACT = 3, K3_Q8 = 4 };
enum { K3_NO_BAD_SUBLAYER = 0x7fffffff };

typedef struct k3_matrix {          // one weight matrix: on the CPU where the checkpoint has it, at any address
    const void* data;               // [rows, cols] F32 or BF16; or [rows, cols / 2] packed E2M1, low nibble first
    const void* scale;              // MXFP4: E8M0[rows, cols / 32]; Q8: BF16[rows, groups]; COMPACT: k3_exceptions; or NULL
    int64_t rows;                   // out
    int64_t cols;                   // in
    int64_t pitch;                  // bytes from one row of `data` to the next; on a GPU a multiple of 16, as `data` is
    int32_t dtype;                  // K3_F32 .. K3_Q8
    int32_t exact;                  // what it multiplies is never rounded for speed: the router
} k3_matrix;

typedef struct k3_exception {       // 32 columns of a compact row that its codes can't say
    uint32_t group;                      // the first column's number, divided by 32
    uint16_t w[32];                      // BF16, zeros beyond the end of the row
} k3_exception;

typedef struct k3_exceptions {      // what a compact matrix has beside its rows
    uint8_t high[16];                    // the high byte of each code
    const uint32_t* first;               // [rows + 1] the first exception of each row
    const k3_exception* list;            // by row, then by group, ascending
} k3_exceptions;

typedef struct k3_kda {             // one Kimi Delta Attention layer
    k3_matrix q_proj, k_proj, v_proj;    // [C, d]
    k3_matrix f_a_proj, f_b_proj;        // [D, d], [C, D]
    k3_matrix b_proj, g_proj, o_proj;    // [H, d], [C, d], [d, C]
    const float* conv1d;                 // [3, K, C]: q, k, v; tap-major, last tap = the current token
    const float* A;                      // [H] = exp(A_log)
    const float* dt_bias;                // [C]
    const float* o_norm;                 // [D]
} k3_kda;

typedef struct k3_mla {             // one Multi-head Latent Attention layer
    k3_matrix q_a_proj, q_b_proj;        // [q_lora, d], [H * (nope + rope), q_lora]
    k3_matrix kv_a_proj_with_mqa;        // [W, d]
    k3_matrix kv_b_proj;                 // [H * (nope + v), L]
    k3_matrix g_proj, o_proj;            // [H * v, d] (data NULL without an output gate), [d, H * v]
    const float* q_a_layernorm;          // [q_lora]
    const float* kv_a_layernorm;         // [L]
} k3_mla;

typedef struct k3_mlp {             // a SiTU-GLU MLP: the dense layer's, or the shared experts'
    k3_matrix gate_proj, up_proj, down_proj;
} k3_mlp;

typedef struct k3_moe {             // Stable LatentMoE
    k3_matrix gate;                      // [E, d] router
    const float* e_score_correction_bias;  // [E]
    k3_matrix routed_expert_down_proj, routed_expert_up_proj;   // [latent, d], [d, latent]
    const float* routed_expert_norm;     // [latent], or NULL where the model has none
    const k3_matrix *w1, *w2, *w3;       // [E] each: gate, down, up; the tables lie where the weights do
} k3_moe;

typedef struct k3_layer {
    int32_t is_kda;                      // else MLA
    int32_t is_moe;                      // else the dense MLP
    int32_t mixer_index;                 // this layer's number among those of its kind
    int32_t _pad;
    k3_kda kda;
    k3_mla mla;
    k3_mlp mlp;                          // dense MLP, or shared experts
    k3_moe moe;
    const float *input_layernorm, *post_attention_layernorm;    // [d]
    const float *self_attention_res, *mlp_res;                  // [d] res_norm * res_proj, folded in float32
} k3_layer;

typedef struct k3_dims {
    int64_t vocab_size, hidden_size, num_hidden_layers, attn_res_block_size;
    int64_t kda_num_heads, kda_head_k, kda_head_v, conv_kernel;
    int64_t num_attention_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    int64_t latent_stride;               // elements from one latent row to the next, W rounded up to 16
    int64_t conv_stride, state_stride;   // floats from one layer to the next in a k3_kda_state
    int64_t num_experts, num_experts_per_token, moe_intermediate_size, routed_expert_hidden_size;
    int64_t shared_intermediate_size, intermediate_size;
    int64_t n_kda, n_mla;
    float rms_norm_eps, mla_latent_norm_eps;
    float situ_beta, situ_linear_beta;
    float gate_lower_bound;              // bounded sigmoid decay when < 0; softplus decay when 0
    float routed_scaling_factor;
    float attention_scale;               // 1 / sqrt(nope + rope)
    int32_t moe_renormalize;
    int32_t rotary;                      // mla_use_nope is false
    int32_t _pad;
} k3_dims;

typedef struct k3_kda_state {       // what the KDA layers of one session carry from token to token
    float* conv;                         // [n_kda, conv_stride], each [3, K - 1, C]: raw projections of q, k, v, oldest first
    float* state;                        // [n_kda, state_stride], each [H, D, D] = [head, key, value]
} k3_kda_state;

typedef struct k3_segment {         // consecutive rows of one session
    int64_t row;                         // first row in the pass
    int64_t rows;                        // 0 in a segment that only fills the table
    int64_t position;                    // of the first row
    k3_kda_state now;                    // read
    k3_kda_state next;                   // written; never the same buffers as `now`
    void* const* pages;                  // latent pages of positions 0 .. position + rows - 1
    int64_t page_rows;                   // positions in a page
    int32_t latent_dtype;                // K3_F32 or K3_BF16
    int32_t _pad;
} k3_segment;

typedef struct k3_pass {
    int64_t rows;
    int64_t n_segments;
    const k3_segment* segments;          // ascending by row
    const int32_t* owner;                // [rows] the segment of each row; -1 for a row that only fills the pass
    int32_t* bad_sublayer;  // [n_segments] lowest sub-layer with a value that is not finite, else K3_NO_BAD_SUBLAYER
} k3_pass;

typedef struct k3_linear_job {  // y = x W^T for one matrix of a dispatch
    const k3_matrix* w;
    const float* x;  // [R, cols], rows ldx apart
    float* y;  // [R, rows], rows ldy apart
    int64_t ldx, ldy;
} k3_linear_job;

typedef struct k3_ops {
    void* ctx;  // the implementation's own: threads and buffers, or stream and kernels

    // s[r] = table[tokens[r]]; where tokens[r] is -1 it is embeddings[r], or zeros without embeddings.
    int (*embed)(void* ctx, const k3_dims*, const k3_matrix* table, const int32_t* tokens /*[R]*/,
                 const float* embeddings /*[R, d] or NULL*/, float* s /*[R, d]*/, int64_t rows);

    // AttnRes: h = softmax-weighted sum of n_bank banked rows and the running sum; x = rms(h; norm).
    // Row r of the output is row take[r] of the sources (r itself when take is NULL).  h may be NULL.
    // With keep, the running sum as it is goes there too, as the next row of the bank.
    int (*attn_res)(void* ctx, const k3_dims*, const float* bank /*[n_bank, bank_rows, d]*/, int64_t n_bank, int64_t bank_rows,
                    const float* s /*[R, d]*/, const float* u /*[d]*/, const float* norm /*[d]*/,
                    const int32_t* take /*[rows] or NULL*/, float* keep /*[rows, d] or NULL*/, float* h /*[rows, d]*/,
                    float* x /*[rows, d]*/, float* weights /*[rows, n_bank + 1] or NULL*/, int64_t rows);

    // y = x W^T for several matrices in one dispatch.
    int (*linear)(void* ctx, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows);

    // h = SiTU(x Wgate^T, x Wup^T).
    int (*gate_up)(void* ctx, const k3_dims*, const k3_matrix* gate, const k3_matrix* up, const float* x /*[R, cols]*/,
                   float* h /*[R, rows]*/, int64_t rows);

    // y = x * norm / sqrt(mean(x^2) + eps).
    int (*rms_norm)(void* ctx, const float* x, int64_t ldx, const float* norm /*[n]*/, float eps, float* y, int64_t ldy,
                    int64_t rows, int64_t n);

    // Short convolution over time, SiLU, then q and k to unit length per head (q times D^-1/2 as well).
    // Reads the windows of segment->now, writes those of segment->next.
    int (*kda_conv)(void* ctx, const k3_dims*, const k3_kda*, const k3_pass*, int64_t mixer_index, const float* q_raw,
                    const float* k_raw, const float* v_raw,  // [R, C]
                    float* q, float* k, float* v /*[R, C]*/);

    // f <- decay factor exp(g) per key channel; b <- sigmoid(b).
    int (*kda_gates)(void* ctx, const k3_dims*, const k3_kda*, float* f /*[R, C]*/, float* b /*[R, H]*/, int64_t rows);

    // The delta rule over the rows of each segment: S <- diag(alpha) S; S <- S + beta k (v - S^T k)^T; o = S^T q.
    int (*kda_recurrence)(void* ctx, const k3_dims*, const k3_pass*, int64_t mixer_index, const float* q, const float* k,
                          const float* v, const float* alpha,  // [R, C]
                          const float* beta /*[R, H]*/, float* o /*[R, C]*/);

    // o <- rms(o per head; o_norm) * sigmoid(g).
    int (*kda_output)(void* ctx, const k3_dims*, const k3_kda*, float* o /*[R, C]*/, const float* g /*[R, C]*/, int64_t rows);

    // Rotary variant only: rotates the rope channels of q per head and of the shared key, half-split pairs.
    // The angle of pair i is position * frequencies[i].
    int (*mla_rope)(void* ctx, const k3_dims*, const k3_pass*, const double* frequencies /*[rope / 2]*/,
                    float* q /*[R, H * (nope + rope)]*/, float* kva /*[R, W]*/);

    // Normalises the latent part of kva and appends [c | k_r] to the pages of each segment.
    int (*mla_append)(void* ctx, const k3_dims*, const k3_mla*, const k3_pass*, int64_t mixer_index, const float* kva /*[R, W]*/);

    // qa[h] = [Wk_h^T q_nope | q_rope], rows of latent_stride elements, padded with zeros.
    int (*mla_absorb)(void* ctx, const k3_dims*, const k3_mla*, const float* q /*[R, H * (nope + rope)]*/,
                      float* qa /*[R, H, latent_stride]*/, int64_t rows);

    // Causal attention of each row over the latent rows of its segment: oa[h] = sum p c.
    int (*mla_attend)(void* ctx, const k3_dims*, const k3_pass*, int64_t mixer_index, const float* qa /*[R, H, latent_stride]*/,
                      float* oa /*[R, H, L]*/);

    // o[h] = Wv_h oa[h], times sigmoid(g) when g is not NULL.
    int (*mla_unabsorb)(void* ctx, const k3_dims*, const k3_mla*, const float* oa /*[R, H, L]*/,
                        const float* g /*[R, H * v] or NULL*/, float* o /*[R, H * v]*/, int64_t rows);

    // Sigmoid scores; the T experts with the largest score + bias, lowest id first among equals;
    // ids ascending; weights are the scores without the bias, renormalised and scaled as the model says.
    int (*route)(void* ctx, const k3_dims*, const float* logits /*[R, E]*/, const float* bias /*[E]*/, int32_t* ids /*[R, T]*/,
                 float* weights /*[R, T]*/, int64_t rows);

    // u = sum over the chosen experts, ascending id, of weight * W2 SiTU(W1 z, W3 z).  Rows without an owner get zeros.
    // Only of experts first <= id < end, so that who has not all of them at a time may call with one range after the other,
    // ascending, from 0 on to the end; u is there after the last one.  A device keeps in its work memory what the ranges
    // before have given, so no other op comes between.
    int (*experts)(void* ctx, const k3_dims*, const k3_moe*, const k3_pass*, const float* z /*[R, latent]*/,
                   const int32_t* ids /*[R, T]*/, const float* weights /*[R, T]*/, float* u /*[R, latent]*/, int64_t first,
                   int64_t end);

    // s <- (restart ? 0 : s) + (a + b), b may be NULL; notes per segment the first sub-layer that is not finite.
    int (*residual)(void* ctx, const k3_pass*, float* s /*[R, d]*/, const float* a /*[R, d]*/, const float* b, int32_t restart,
                    int32_t sublayer, int64_t d);

    // Notes the segment of each row that is not finite; row r belongs to segment owner[r], or to none where that is -1.
    int (*finite)(void* ctx, const k3_pass*, const float* x /*[rows, n]*/, const int32_t* owner /*[rows]*/, int32_t sublayer,
                  int64_t rows, int64_t n);

    // Copies between this table's memory and the host's, in order with its ops; the host's side is ready on return.
    int (*read)(void* ctx, void* host, const void* here, int64_t bytes);
    int (*write)(void* ctx, void* here, const void* host, int64_t bytes);
    // Lets the ops called so far run while the host does something else.
    int (*submit)(void* ctx);
} k3_ops;

#ifdef __cplusplus
}
#endif
#endif
