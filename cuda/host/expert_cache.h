// SPDX-License-Identifier: MIT
//
// Which experts are in memory, be it the host's or a GPU's, and which one makes room for another.
//
// Uses are counted, each counting half after some passes, and the expert that is worth least goes first.
// benches/expert_cache.py compares such rules.

#ifndef K3_EXPERT_CACHE_H
#define K3_EXPERT_CACHE_H

#include <stdint.h>

typedef struct k3_cache {
    int64_t n_slots, experts, n_layers;      // experts of a layer
    int64_t share;                           // slots that each layer may call its own
    double half_life;                        // passes after which a use counts half
    int32_t* owner;                          // [n_slots] layer * experts + expert, or -1
    int32_t* pinned;                         // [n_slots] in use, or on its way
    int64_t* pass;                           // [n_slots] that brought it
    int32_t* slot_of;                        // [n_layers * experts], -1 where an expert has none
    double* worth;                           // [n_layers * experts] log2 of its uses, each halved every half_life passes
    int64_t* held;                           // [n_layers] slots that a layer has
} k3_cache;

// Whether there was memory for it; a cache that was not opened is closed as well.
bool k3_cache_open(k3_cache* c, int64_t n_slots, int64_t n_layers, int64_t experts, int64_t moe_layers, double half_life);
void k3_cache_close(k3_cache* c);

void k3_cache_claim(k3_cache* c, int64_t slot, int64_t owner, int64_t pass);     // pinned; whose it was has none now
void k3_cache_release(k3_cache* c, int64_t slot);
void k3_cache_use(k3_cache* c, int64_t owner, int64_t pass);

// The slot to give to an expert of that layer, a free one or the one that is worth least; -1 where all are in use, that is
// pinned, or busy(slot).  In the layer itself once it has its share, else in one that has more than that, else anywhere:
// layers come in turns, so the one whose turn was longest ago, and comes next, would lose its experts to all others.
template <class Busy> int64_t k3_cache_victim(const k3_cache* c, int64_t layer, Busy busy) {
    int64_t best[3] = {-1, -1, -1};
    for (int64_t i = 0; i < c->n_slots; ++i) {
        const int32_t owner = c->owner[i];
        if (owner < 0) return i;
        if (c->pinned[i] || busy(i)) continue;
        const int64_t its = owner / c->experts;
        const int kind = its == layer && c->held[layer] >= c->share ? 0 : c->held[its] > c->share ? 1 : 2;
        if (best[kind] < 0 || c->worth[owner] < c->worth[c->owner[best[kind]]]) best[kind] = i;
    }
    return best[0] >= 0 ? best[0] : best[1] >= 0 ? best[1] : best[2];
}

#endif
