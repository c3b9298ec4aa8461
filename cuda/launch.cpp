// SPDX-License-Identifier: MIT
//
// The launching halves of all .cu files, as one part of the extension, and the op table that they fill.

#define K3_LAUNCH
#include "k3_launch.h"

// Filled by the K3_KERNEL lines below, in their order.
const char* k3_kernel_names[K3_MAX_KERNELS];
int k3_kernel_count;

#include "attn_res.cu"
#include "embed.cu"
#include "experts.cu"
#include "gate_up.cu"
#include "kda_conv.cu"
#include "kda_gates.cu"
#include "kda_output.cu"
#include "kda_recurrence.cu"
#include "linear.cu"
#include "linear_mma.cu"
#include "mla_absorb.cu"
#include "mla_append.cu"
#include "mla_attend.cu"
#include "mla_rope.cu"
#include "mla_unabsorb.cu"
#include "residual.cu"
#include "rms_norm.cu"
#include "route.cu"
#include "top_k.cu"

extern "C" {

const char* k3_cuda_kernel(int number) { return number < k3_kernel_count ? k3_kernel_names[number] : nullptr; }

int64_t k3_cuda_work_bytes(const k3_dims* dims, int64_t rows) {
    const int64_t needed[] = {experts_work_bytes(dims, rows), linear_mma_work_bytes(dims, rows),
                              dims->n_mla ? mla_attend_work_bytes(dims, rows) : 0,
                              top_k_work_bytes(rows, dims->vocab_size, TOP_K_MAX)};
    int64_t most = 0;
    for (const int64_t n : needed) most = n > most ? n : most;
    return most;
}

void k3_cuda_ops(k3_ops* t) {
    t->embed = cuda_embed;
    t->attn_res = cuda_attn_res;
    t->linear = cuda_linear;
    t->gate_up = cuda_gate_up;
    t->rms_norm = cuda_rms_norm;
    t->kda_conv = cuda_kda_conv;
    t->kda_gates = cuda_kda_gates;
    t->kda_recurrence = cuda_kda_recurrence;
    t->kda_output = cuda_kda_output;
    t->mla_rope = cuda_mla_rope;
    t->mla_append = cuda_mla_append;
    t->mla_absorb = cuda_mla_absorb;
    t->mla_attend = cuda_mla_attend;
    t->mla_unabsorb = cuda_mla_unabsorb;
    t->route = cuda_route;
    t->experts = cuda_experts;
    t->residual = cuda_residual;
    t->finite = cuda_finite;
}
}
