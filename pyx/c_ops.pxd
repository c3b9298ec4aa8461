# SPDX-License-Identifier: MIT
"""The C contract of cuda/ops.h and cuda/host/host.h: declarations only."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "ops.h" nogil:
    enum:
        K3_F32
        K3_BF16
        K3_MXFP4
        K3_COMPACT
        K3_Q8
        K3_NO_BAD_SUBLAYER

    ctypedef struct k3_matrix:
        const void* data
        const void* scale
        int64_t rows
        int64_t cols
        int64_t pitch
        int32_t dtype
        int32_t exact

    ctypedef struct k3_exception:
        uint32_t group
        uint16_t w[32]

    ctypedef struct k3_exceptions:
        uint8_t high[16]
        const uint32_t* first
        const k3_exception* list

    ctypedef struct k3_kda:
        k3_matrix q_proj, k_proj, v_proj
        k3_matrix f_a_proj, f_b_proj
        k3_matrix b_proj, g_proj, o_proj
        const float* conv1d
        const float* A
        const float* dt_bias
        const float* o_norm

    ctypedef struct k3_mla:
        k3_matrix q_a_proj, q_b_proj
        k3_matrix kv_a_proj_with_mqa
        k3_matrix kv_b_proj
        k3_matrix g_proj, o_proj
        const float* q_a_layernorm
        const float* kv_a_layernorm

    ctypedef struct k3_mlp:
        k3_matrix gate_proj, up_proj, down_proj

    ctypedef struct k3_moe:
        k3_matrix gate
        const float* e_score_correction_bias
        k3_matrix routed_expert_down_proj, routed_expert_up_proj
        const float* routed_expert_norm
        const k3_matrix* w1
        const k3_matrix* w2
        const k3_matrix* w3

    ctypedef struct k3_layer:
        int32_t is_kda
        int32_t is_moe
        int32_t mixer_index
        k3_kda kda
        k3_mla mla
        k3_mlp mlp
        k3_moe moe
        const float* input_layernorm
        const float* post_attention_layernorm
        const float* self_attention_res
        const float* mlp_res

    ctypedef struct k3_dims:
        int64_t vocab_size, hidden_size, num_hidden_layers, attn_res_block_size
        int64_t kda_num_heads, kda_head_k, kda_head_v, conv_kernel
        int64_t num_attention_heads, q_lora_rank, kv_lora_rank
        int64_t qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        int64_t latent_stride
        int64_t conv_stride, state_stride
        int64_t num_experts, num_experts_per_token, moe_intermediate_size, routed_expert_hidden_size
        int64_t shared_intermediate_size, intermediate_size
        int64_t n_kda, n_mla
        float rms_norm_eps, mla_latent_norm_eps
        float situ_beta, situ_linear_beta
        float gate_lower_bound
        float routed_scaling_factor
        float attention_scale
        int32_t moe_renormalize
        int32_t rotary

    ctypedef struct k3_kda_state:
        float* conv
        float* state

    ctypedef struct k3_segment:
        int64_t row
        int64_t rows
        int64_t position
        k3_kda_state now
        k3_kda_state next
        void* const* pages
        int64_t page_rows
        int32_t latent_dtype

    ctypedef struct k3_pass:
        int64_t rows
        int64_t n_segments
        const k3_segment* segments
        const int32_t* owner
        int32_t* bad_sublayer

    ctypedef struct k3_linear_job:
        const k3_matrix* w
        const float* x
        float* y
        int64_t ldx, ldy

    ctypedef struct k3_ops:
        void* ctx
        int (*embed)(void*, const k3_dims*, const k3_matrix*, const int32_t*, const float*, float*, int64_t) noexcept nogil
        int (*attn_res)(void*, const k3_dims*, const float*, int64_t, int64_t, const float*, const float*, const float*,
                        const int32_t*, float*, float*, float*, float*, int64_t) noexcept nogil
        int (*linear)(void*, const k3_linear_job*, int64_t, int64_t) noexcept nogil
        int (*gate_up)(void*, const k3_dims*, const k3_matrix*, const k3_matrix*, const float*, float*, int64_t) noexcept nogil
        int (*rms_norm)(void*, const float*, int64_t, const float*, float, float*, int64_t, int64_t, int64_t) noexcept nogil
        int (*kda_conv)(void*, const k3_dims*, const k3_kda*, const k3_pass*, int64_t, const float*, const float*,
                        const float*, float*, float*, float*) noexcept nogil
        int (*kda_gates)(void*, const k3_dims*, const k3_kda*, float*, float*, int64_t) noexcept nogil
        int (*kda_recurrence)(void*, const k3_dims*, const k3_pass*, int64_t, const float*, const float*, const float*,
                              const float*, const float*, float*) noexcept nogil
        int (*kda_output)(void*, const k3_dims*, const k3_kda*, float*, const float*, int64_t) noexcept nogil
        int (*mla_rope)(void*, const k3_dims*, const k3_pass*, const double*, float*, float*) noexcept nogil
        int (*mla_append)(void*, const k3_dims*, const k3_mla*, const k3_pass*, int64_t, const float*) noexcept nogil
        int (*mla_absorb)(void*, const k3_dims*, const k3_mla*, const float*, float*, int64_t) noexcept nogil
        int (*mla_attend)(void*, const k3_dims*, const k3_pass*, int64_t, const float*, float*) noexcept nogil
        int (*mla_unabsorb)(void*, const k3_dims*, const k3_mla*, const float*, const float*, float*, int64_t) noexcept nogil
        int (*route)(void*, const k3_dims*, const float*, const float*, int32_t*, float*, int64_t) noexcept nogil
        int (*experts)(void*, const k3_dims*, const k3_moe*, const k3_pass*, const float*, const int32_t*, const float*,
                       float*, int64_t, int64_t) noexcept nogil
        int (*residual)(void*, const k3_pass*, float*, const float*, const float*, int32_t, int32_t, int64_t) noexcept nogil
        int (*finite)(void*, const k3_pass*, const float*, const int32_t*, int32_t, int64_t, int64_t) noexcept nogil
        int (*read)(void*, void*, const void*, int64_t) noexcept nogil
        int (*write)(void*, void*, const void*, int64_t) noexcept nogil
        int (*submit)(void*) noexcept nogil


cdef extern from "host/host.h" nogil:
    ctypedef struct k3_cpu:
        int32_t threads
        int32_t inputs
        float* x
        int64_t x_floats
        float* work
        int64_t work_floats
        int64_t* list
        int64_t list_items

    void k3_cpu_sizes(const k3_dims*, int64_t, int64_t*, int64_t*, int64_t*) noexcept
    int k3_cpu_ops(int, k3_ops*) noexcept
    int k3_cpu_best_isa() noexcept
    int k3_cpu_rounded(int) noexcept
    uint64_t k3_probe_read(int, const void*, int64_t) noexcept
    unsigned int k3_float_mode_enter() noexcept
    void k3_float_mode_leave(unsigned int) noexcept


cdef extern from "host/recode.h" nogil:
    ctypedef struct k3_place:
        int64_t row, col

    k3_place k3_compact_plan(int, const k3_matrix*, uint8_t*, uint32_t*) noexcept
    void k3_compact_fill(int, const k3_matrix*, const k3_matrix*, k3_exception*) noexcept
    k3_place k3_q8_fill(int, const k3_matrix*, const k3_matrix*) noexcept


cdef extern from "host/pool.h" nogil:
    ctypedef void (*k3_task)(void*, int64_t) noexcept nogil
    void k3_pool_run(int, int64_t, k3_task, void*) noexcept
    void k3_pool_hold() noexcept
    void k3_pool_release() noexcept
    int k3_pool_workers() noexcept


cdef extern from "k3_launch.h" nogil:
    ctypedef struct k3_cuda:
        int (*launch)(k3_cuda*, int, unsigned int, unsigned int, unsigned int, unsigned int, size_t, void**) noexcept nogil
        int32_t replaying
        int32_t split_activations
        char* work
        int64_t work_bytes
        void* streaming
