// SPDX-License-Identifier: MIT
//
// An op table that computes nothing and notes which matrices it was called with.  The graph, run over it once, says in
// which order a pass needs them, so that the order stands nowhere else.

#include "stream.h"

namespace {

template <class... A> int nothing(void*, A...) { return 0; }

int note(void* ctx, const k3_matrix* a, const k3_matrix* b, int32_t whole) {
    k3_order* order = (k3_order*)ctx;
    if (order->silent) return 0;
    if (order->n == order->room) return 1;
    const k3_step step = {{a, b}, whole, 0};
    order->steps[order->n++] = step;
    return 0;
}

int linear(void* ctx, const k3_linear_job* jobs, int64_t n_jobs, int64_t) {
    int bad = 0;
    for (int64_t j = 0; j < n_jobs; ++j) bad |= note(ctx, jobs[j].w, nullptr, 0);
    return bad;
}

int gate_up(void* ctx, const k3_dims*, const k3_matrix* gate, const k3_matrix* up, const float*, float*, int64_t) {
    return note(ctx, gate, up, 0);
}

int mla_absorb(void* ctx, const k3_dims*, const k3_mla* w, const float*, float*, int64_t) {
    return note(ctx, &w->kv_b_proj, nullptr, 1);
}

}  // namespace

void k3_order_table(k3_order* order, k3_ops* t) {
    t->ctx = order;
    t->embed = nothing;
    t->attn_res = nothing;
    t->linear = linear;
    t->gate_up = gate_up;
    t->rms_norm = nothing;
    t->kda_conv = nothing;
    t->kda_gates = nothing;
    t->kda_recurrence = nothing;
    t->kda_output = nothing;
    t->mla_rope = nothing;
    t->mla_append = nothing;
    t->mla_absorb = mla_absorb;
    t->mla_attend = nothing;
    t->mla_unabsorb = nothing;
    t->route = nothing;
    t->experts = nothing;
    t->residual = nothing;
    t->finite = nothing;
    t->read = nothing;
    t->write = nothing;
    t->submit = nothing;
}
