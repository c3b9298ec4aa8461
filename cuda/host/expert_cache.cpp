// SPDX-License-Identifier: MIT

#include "expert_cache.h"

#include <math.h>
#include <stdlib.h>

bool k3_cache_open(k3_cache* c, int64_t n_slots, int64_t n_layers, int64_t experts, int64_t moe_layers, double half_life) {
    const int64_t all = n_layers * experts;
    c->n_slots = n_slots;
    c->experts = experts;
    c->n_layers = n_layers;
    c->share = moe_layers ? n_slots / moe_layers : 0;
    c->half_life = half_life;
    c->owner = (int32_t*)malloc((size_t)(n_slots + 1) * sizeof(int32_t));
    c->pinned = (int32_t*)calloc((size_t)n_slots + 1, sizeof(int32_t));
    c->pass = (int64_t*)calloc((size_t)n_slots + 1, sizeof(int64_t));
    c->slot_of = (int32_t*)malloc((size_t)(all + 1) * sizeof(int32_t));
    c->worth = (double*)malloc((size_t)(all + 1) * sizeof(double));
    c->held = (int64_t*)calloc((size_t)n_layers + 1, sizeof(int64_t));
    if (!c->owner || !c->pinned || !c->pass || !c->slot_of || !c->worth || !c->held) return false;
    for (int64_t i = 0; i < n_slots; ++i) c->owner[i] = -1;
    for (int64_t i = 0; i < all; ++i) {
        c->slot_of[i] = -1;
        c->worth[i] = -INFINITY;
    }
    return true;
}

void k3_cache_close(k3_cache* c) {
    free(c->owner);
    free(c->pinned);
    free(c->pass);
    free(c->slot_of);
    free(c->worth);
    free(c->held);
}

void k3_cache_release(k3_cache* c, int64_t slot) {
    const int32_t owner = c->owner[slot];
    if (owner >= 0) {
        c->slot_of[owner] = -1;
        --c->held[owner / c->experts];
    }
    c->owner[slot] = -1;
    c->pinned[slot] = 0;
}

void k3_cache_claim(k3_cache* c, int64_t slot, int64_t owner, int64_t pass) {
    k3_cache_release(c, slot);
    c->owner[slot] = (int32_t)owner;
    c->pinned[slot] = 1;
    c->pass[slot] = pass;
    c->slot_of[owner] = (int32_t)slot;
    ++c->held[owner / c->experts];
}

// In logarithms, so that what the others are worth need not be brought up to date.
void k3_cache_use(k3_cache* c, int64_t owner, int64_t pass) {
    const double age = (double)pass / c->half_life;
    c->worth[owner] = age + log2(1.0 + exp2(c->worth[owner] - age));
}
