// SPDX-License-Identifier: MIT
//
// The op table of one instruction set.

#include "host.h"

#define K3_TABLE_NAME2(ns) ns##_table
#define K3_TABLE_NAME(ns) K3_TABLE_NAME2(ns)

extern "C" void K3_TABLE_NAME(K3_NS)(k3_ops* t) {
    using namespace K3_NS;
    t->embed = embed;
    t->attn_res = attn_res;
    t->linear = linear;
    t->gate_up = gate_up;
    t->rms_norm = rms_norm;
    t->kda_conv = kda_conv;
    t->kda_gates = kda_gates;
    t->kda_recurrence = kda_recurrence;
    t->kda_output = kda_output;
    t->mla_rope = mla_rope;
    t->mla_append = mla_append;
    t->mla_absorb = mla_absorb;
    t->mla_attend = mla_attend;
    t->mla_unabsorb = mla_unabsorb;
    t->route = route;
    t->experts = experts;
    t->residual = residual;
    t->finite = finite;
    t->read = read;
    t->write = write;
    t->submit = submit;
}
