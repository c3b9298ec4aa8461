// SPDX-License-Identifier: MIT
//
// The streaming form of a GPU's ops that take matrices: they have the rows brought to the device, block by block, and hand
// them to the ops there as matrices of fewer rows.  A row's sum does not depend on the other rows of its matrix, so the
// bits are those of the whole matrix.

#include "gpu_stream.h"

#include <string.h>

namespace {

enum { JOBS = 8, LENT = 2 };     // matrices in one launch; blocks that are copied at a time

k3_gpu_streaming* of(void* ctx) { return (k3_gpu_streaming*)((k3_cuda*)ctx)->streaming; }

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t pitch_of(const k3_matrix* m) { return up(m->pitch, 16); }
int64_t data_room(const k3_matrix* m, int64_t rows) { return up(rows * pitch_of(m), K3_GPU_ALIGNMENT); }
int64_t scale_bytes(const k3_matrix* m) { return m->scale ? m->rows * (m->cols / 32) : 0; }

template <class... P, class... A> int call(k3_gpu_streaming* x, const char* what, int (*entry)(P...), A... a) {
    const int status = k3_call(x->stream->gpu, entry, a...);
    if (status != 0 && x->status == 0) {
        x->status = status;
        x->what = what;
    }
    return status;
}
int record(k3_gpu_streaming* x, void* event, void* stream) {
    return call(x, "cuEventRecord", k3_cu->cuEventRecord, event, stream);
}
int after(k3_gpu_streaming* x, void* stream, void* event) {
    return call(x, "cuStreamWaitEvent", k3_cu->cuStreamWaitEvent, stream, event, 0u);
}
int wait_for(k3_gpu_streaming* x, void* event) { return call(x, "waiting for the device", k3_cu->cuEventSynchronize, event); }
int to_device(k3_gpu_streaming* x, k3_address to, const void* from, int64_t bytes, void* stream) {
    x->copied += bytes;
    return call(x, "a copy to the device", k3_cu->cuMemcpyHtoDAsync, to, from, (size_t)bytes, stream);
}

// Rows of a file to the device, where each begins at a multiple of 16 bytes and is followed by zeros up to there.
int put_rows(k3_gpu_streaming* x, k3_address to, const char* from, int64_t rows, const k3_matrix* m) {
    void* stream = x->stream->copies;
    const int64_t pitch = pitch_of(m);
    if (pitch == m->pitch) return to_device(x, to, from, rows * pitch, stream);
    int bad = call(x, "cuMemsetD8Async", k3_cu->cuMemsetD8Async, to, (unsigned char)0, (size_t)(rows * pitch), stream);
    for (int64_t r = 0; r < rows && !bad; ++r) bad = to_device(x, to + r * pitch, from + r * m->pitch, m->pitch, stream);
    return bad;
}

// Unless it is what an earlier failure of the device has led to.
int out_of_order(k3_gpu_streaming* x) {
    if (x->status == 0) k3_stream_order(x->stream->host);
    return 1;
}

// ---------------------------------------------------------------------------------------------
// the trunk
// ---------------------------------------------------------------------------------------------

// Gives the reader its memory back once the oldest copy is done.
int give_back(k3_gpu_streaming* x) {
    if (wait_for(x, x->stream->copied[x->given % x->stream->n_ring])) return 1;
    k3_stream_give(x->stream->host, x->given++);
    return 0;
}

// Has the next block copied to the ring: 1, or 0 where it cannot be without a wait that is not wanted, or -1.
int bring(k3_gpu_streaming* x, bool wait) {
    k3_gpu_stream* g = x->stream;
    const k3_gpu_block* b = g->blocks + x->to_bring;
    if (x->brought - x->done >= g->n_ring) return 0;                   // every place has a block that was not used yet
    if (x->brought - x->given >= LENT) {
        if (!wait) return 0;
        if (give_back(x)) return -1;
    }
    char* from = k3_stream_lend(g->host, b->number, 0, &x->bytes, &x->wait_ns);
    if (!from) {
        if (!wait) return 0;
        while (x->given < x->brought)                                  // the reader may lack the room
            if (give_back(x)) return -1;
        from = k3_stream_lend(g->host, b->number, 1, &x->bytes, &x->wait_ns);
        if (!from) return -1;
    }
    const int64_t place = b->number % g->n_ring;
    k3_address to = g->ring + place * g->ring_room;
    ++x->brought;                                                      // also where the copy fails: it is lent
    ++x->to_bring;
    int bad = after(x, g->copies, g->used[place]);
    for (int i = 0; i < 2 && b->matrix[i] && !bad; ++i) {
        const k3_matrix view = k3_stream_view(g->host, b->number, i, from);
        bad = put_rows(x, to, (const char*)view.data, b->rows, b->matrix[i]);
        to += data_room(b->matrix[i], b->rows);
    }
    bad = bad || record(x, g->copied[place], g->copies);
    return bad ? -1 : 1;
}

// Copies as much ahead as needs no wait.
int ahead(k3_gpu_streaming* x, int64_t end) {
    k3_gpu_stream* g = x->stream;
    for (;;) {
        while (x->to_bring < end && g->blocks[x->to_bring].at) ++x->to_bring;
        if (x->to_bring >= end) return 0;
        const int done = bring(x, false);
        if (done <= 0) return done;
    }
}

// Where a block is on the device, for launches from here on; 0 where it cannot be had.
k3_address have(k3_gpu_streaming* x, int64_t i) {
    k3_gpu_stream* g = x->stream;
    const k3_gpu_block* b = g->blocks + i;
    if (b->at) return b->at;
    while (x->to_bring <= i) {
        if (g->blocks[x->to_bring].at) {
            ++x->to_bring;
            continue;
        }
        const int done = bring(x, true);
        if (done == 0) out_of_order(x);
        if (done <= 0) return 0;
    }
    const int64_t place = b->number % g->n_ring;
    return after(x, x->launches, g->copied[place]) ? 0 : g->ring + place * g->ring_room;
}

// Its place may be filled anew when the launches up to now are over.
int done_with(k3_gpu_streaming* x, int64_t i) {
    const k3_gpu_block* b = x->stream->blocks + i;
    if (b->at) return 0;
    ++x->done;
    return record(x, x->stream->used[b->number % x->stream->n_ring], x->launches);
}

k3_matrix view(const k3_gpu_block* b, int which, k3_address at) {
    k3_matrix m = *b->matrix[which];
    if (which) at += data_room(b->matrix[0], b->rows);
    m.data = (const void*)at;
    m.pitch = pitch_of(b->matrix[which]);
    m.rows = b->rows;
    return m;
}

// The block that comes next, if it begins with this matrix; -1 where the graph asks for something else.
int64_t expect(k3_gpu_streaming* x, const k3_matrix* w) {
    const k3_gpu_stream* g = x->stream;
    if (x->at < g->n_blocks && g->blocks[x->at].matrix[0]->data == w->data && g->blocks[x->at].first == 0) return x->at;
    out_of_order(x);
    return -1;
}

// One past the last block of the matrix whose first block is `at`.
int64_t end_of(const k3_gpu_stream* g, int64_t at) {
    const k3_matrix* w = g->blocks[at].matrix[0];
    while (at < g->n_blocks && g->blocks[at].matrix[0] == w) ++at;
    return at;
}

int embed(void* ctx, const k3_dims* dims, const k3_matrix* table, const int32_t* tokens, const float* embeddings, float* s,
          int64_t rows) {
    k3_gpu_streaming* x = of(ctx);
    const int32_t* wanted = (const int32_t*)(x->mail_host + ((const char*)tokens - x->mail_here));
    int32_t* place = (int32_t*)(x->rows + x->rows_room);
    k3_matrix few = *table;
    few.pitch = pitch_of(table);
    few.rows = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const char* data = nullptr;
        place[r] = -1;
        if (wanted[r] < 0) continue;
        if (k3_stream_row(x->stream->host, table, wanted[r], x->row, &data, &x->bytes)) return 1;
        char* to = x->rows + few.rows * few.pitch;
        memset(to + table->pitch, 0, (size_t)(few.pitch - table->pitch));
        memcpy(to, data, (size_t)table->pitch);
        place[r] = (int32_t)few.rows++;
    }
    few.data = (const void*)x->rows_here;
    const k3_address places = x->rows_here + x->rows_room;
    if (few.rows > 0 && to_device(x, x->rows_here, x->rows, few.rows * few.pitch, x->launches)) return 1;
    if (to_device(x, places, place, rows * (int64_t)sizeof(int32_t), x->launches)) return 1;
    return x->inner.embed(ctx, dims, &few, (const int32_t*)places, embeddings, s, rows);
}

int linear(void* ctx, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows) {
    k3_gpu_streaming* x = of(ctx);
    const k3_gpu_block* blocks = x->stream->blocks;
    const int64_t begin = x->at;
    // What is there already comes first: the others are copied meanwhile.
    for (int stays = 1; stays >= 0; --stays) {
        k3_matrix w[JOBS];
        k3_linear_job part[JOBS];
        int64_t n = 0;
        x->at = begin;
        for (int64_t j = 0; j < n_jobs; ++j) {
            const int64_t first = expect(x, jobs[j].w);
            if (first < 0) return 1;
            x->at = end_of(x->stream, first);
            for (int64_t i = first; i < x->at; ++i) {
                if ((blocks[i].at != 0) != (stays == 1)) continue;
                const k3_address at = have(x, i);
                if (!at) return 1;
                w[n] = view(blocks + i, 0, at);
                part[n] = jobs[j];
                part[n].w = w + n;
                part[n].y = jobs[j].y + blocks[i].first;
                ++n;
                if (n < JOBS && stays) continue;
                if (x->inner.linear(ctx, part, n, rows) || done_with(x, i)) return 1;
                n = 0;
            }
        }
        if (n > 0 && x->inner.linear(ctx, part, n, rows)) return 1;
    }
    return 0;
}

int gate_up(void* ctx, const k3_dims* dims, const k3_matrix* gate, const k3_matrix* up, const float* in, float* h, int64_t rows) {
    k3_gpu_streaming* x = of(ctx);
    const int64_t first = expect(x, gate);
    if (first < 0) return 1;
    const int64_t end = end_of(x->stream, first);
    for (int64_t i = first; i < end; ++i) {
        const k3_gpu_block* b = x->stream->blocks + i;
        const k3_address at = have(x, i);
        if (!at) return 1;
        const k3_matrix g = view(b, 0, at), u = view(b, 1, at);
        // The op's rows lie one after the other, and a block has a part of each.
        const bool direct = rows == 1 || b->rows == gate->rows;
        float* to = direct ? h + b->first : x->hidden;
        int bad = x->inner.gate_up(ctx, dims, &g, &u, in, to, rows);
        for (int64_t r = 0; !direct && !bad && r < rows; ++r) {
            bad = call(x, "a copy within the device", k3_cu->cuMemcpyDtoDAsync, (k3_address)(h + r * gate->rows + b->first),
                       (k3_address)(to + r * b->rows), (size_t)b->rows * sizeof(float), x->launches);
        }
        if (bad || done_with(x, i)) return 1;
    }
    x->at = end;
    return 0;
}

// The key half of kv_b_proj is used here and the value half in mla_unabsorb: the block stays until then.
int mla_absorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* q, float* qa, int64_t rows) {
    k3_gpu_streaming* x = of(ctx);
    const int64_t i = expect(x, &w->kv_b_proj);
    const k3_address at = i < 0 ? 0 : have(x, i);
    if (!at) return 1;
    k3_mla here = *w;
    here.kv_b_proj = view(x->stream->blocks + i, 0, at);
    return x->inner.mla_absorb(ctx, dims, &here, q, qa, rows);
}

int mla_unabsorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* oa, const float* g, float* o, int64_t rows) {
    k3_gpu_streaming* x = of(ctx);
    const int64_t i = expect(x, &w->kv_b_proj);
    const k3_address at = i < 0 ? 0 : have(x, i);
    if (!at) return 1;
    k3_mla here = *w;
    here.kv_b_proj = view(x->stream->blocks + i, 0, at);
    x->at = i + 1;
    return x->inner.mla_unabsorb(ctx, dims, &here, oa, g, o, rows) || done_with(x, i);
}

// ---------------------------------------------------------------------------------------------
// experts
// ---------------------------------------------------------------------------------------------

struct group {                   // experts of one launch, ascending
    const int32_t* ids;
    int64_t n, n_missing;
    int32_t missing[K3_GROUP];   // those that have to be brought
};

// The chosen experts of a pass, ascending; rows without an owner have none.
int64_t chosen(k3_gpu_streaming* x, const k3_dims* dims, const int32_t* owner, int64_t rows) {
    const int64_t E = dims->num_experts, T = dims->num_experts_per_token;
    memset(x->active, 0, (size_t)E * sizeof(int32_t));
    for (int64_t s = 0; s < rows * T; ++s)
        if (owner[s / T] >= 0) x->active[x->ids[s]] = 1;
    int64_t n = 0;
    for (int64_t e = 0; e < E; ++e)
        if (x->active[e]) x->active[n++] = (int32_t)e;
    return n;
}

// How many are used at a time: all of them where there is room, else few enough that as many can be brought meanwhile.
int64_t group_of(const k3_gpu_streaming* x, int64_t n) {
    const int64_t slots = least(x->stream->cache.n_slots, k3_stream_slots(x->stream->host));
    if (n <= least(slots, K3_GROUP)) return n > 0 ? n : 1;
    const int64_t half = least(slots / 2, K3_GROUP);
    return half > 0 ? half : 1;
}

// Lets go of what the reader has kept for the copies of the launch before, once they are done.
int settle(k3_gpu_streaming* x) {
    if (x->n_settled == 0) return 0;
    if (wait_for(x, x->stream->experts_copied[x->settled_launch % 2])) return 1;
    k3_stream_unpin(x->stream->host, x->settled_layer, x->settled, x->n_settled);
    x->n_settled = 0;
    return 0;
}

// Gives each expert of a group a slot, and has those read that are not there.
int claim(k3_gpu_streaming* x, int64_t layer, group* a) {
    k3_cache* cache = &x->stream->cache;
    const int64_t from = layer * cache->experts;
    // Those that are here first, lest one makes room for another of the same group.
    for (int64_t i = 0; i < a->n; ++i) {
        const int32_t slot = cache->slot_of[from + a->ids[i]];
        if (slot >= 0) cache->pinned[slot] = 1;
    }
    a->n_missing = 0;
    for (int64_t i = 0; i < a->n; ++i) {
        if (cache->slot_of[from + a->ids[i]] >= 0) continue;
        const int64_t slot = k3_cache_victim(cache, layer, [](int64_t) { return false; });
        if (slot < 0) return out_of_order(x);
        k3_cache_claim(cache, slot, from + a->ids[i], x->stream->pass);
        a->missing[a->n_missing++] = a->ids[i];
    }
    x->uses += a->n;
    x->misses += a->n_missing;
    if (a->n_missing) k3_stream_ask(x->stream->host, layer, a->missing, a->n_missing, &x->bytes);
    return 0;
}

// One expert as the slot has it: data and scales of w1, w2, w3, one after the other.
void place_expert(const k3_moe* moe, int64_t e, k3_address at, k3_matrix out[3]) {
    const k3_matrix* w[3] = {moe->w1 + e, moe->w2 + e, moe->w3 + e};
    for (int j = 0; j < 3; ++j) {
        out[j] = *w[j];
        out[j].pitch = pitch_of(w[j]);
        out[j].data = (const void*)at;
        at += data_room(w[j], w[j]->rows);
        if (w[j]->scale) out[j].scale = (const void*)at;
        at += up(scale_bytes(w[j]), K3_GPU_ALIGNMENT);
    }
}

// Copies what a group lacks to its slots.
int bring_experts(k3_gpu_streaming* x, int64_t layer, const group* a) {
    k3_gpu_stream* g = x->stream;
    const int64_t E = g->experts, turn = g->launches % 2;
    const k3_moe* moe = &g->host_layers[layer].moe;
    if (a->n_missing == 0) return 0;
    if (k3_stream_await(g->host, layer, a->missing, a->n_missing, x->found, &x->wait_ns)) return 1;
    // Before the launches that used these slots last are over, nothing may change there.
    bool waits[2] = {};
    for (int64_t i = 0; i < a->n_missing; ++i) {
        const int64_t last = g->launched[g->cache.slot_of[layer * E + a->missing[i]]];
        if (last > 0) waits[last % 2] = true;
    }
    for (int p = 0; p < 2; ++p)
        if (waits[p] && after(x, g->copies, g->experts_used[p])) return 1;
    for (int64_t i = 0; i < a->n_missing; ++i) {
        const int64_t e = a->missing[i];
        k3_matrix here[3];
        place_expert(moe, e, g->slots + g->cache.slot_of[layer * E + e] * g->slot_room, here);
        for (int j = 0; j < 3; ++j) {
            const k3_matrix* host = x->found + j * E + e;
            if (put_rows(x, (k3_address)here[j].data, (const char*)host->data, host->rows, host)) return 1;
            if (host->scale && to_device(x, (k3_address)here[j].scale, host->scale, scale_bytes(host), g->copies)) return 1;
        }
    }
    memcpy(x->settled, a->missing, sizeof(a->missing));
    x->n_settled = a->n_missing;
    x->settled_layer = layer;
    x->settled_launch = g->launches;
    return record(x, g->experts_copied[turn], g->copies) || after(x, x->launches, g->experts_copied[turn]);
}

// Tells the device where the experts of a group are.  A copy of the table that is still to come may find more in it than
// its launch needs, and no harm is done; nothing else changes until the ids of the next layer have been waited for.
int place_group(k3_gpu_streaming* x, int64_t layer, const group* a) {
    k3_gpu_stream* g = x->stream;
    const int64_t E = g->experts;
    for (int64_t i = 0; i < a->n; ++i) {
        const int64_t e = a->ids[i], owner = layer * E + e;
        const int32_t slot = g->cache.slot_of[owner];
        k3_matrix here[3];
        place_expert(&g->host_layers[layer].moe, e, g->slots + slot * g->slot_room, here);
        for (int j = 0; j < 3; ++j) x->table[j * E + e] = here[j];
        g->launched[slot] = g->launches;
        k3_cache_use(&g->cache, owner, g->pass);
    }
    return call(x, "a copy to the device", k3_cu->cuMemcpyHtoDAsync, x->table_here, (const void*)x->table,
                (size_t)(3 * E) * sizeof(k3_matrix), x->launches);
}

// The ids come to the host while the device goes on with the shared experts; and the trunk is copied ahead.
int route(void* ctx, const k3_dims* dims, const float* logits, const float* bias, int32_t* ids, float* weights, int64_t rows) {
    k3_gpu_streaming* x = of(ctx);
    const int bad = x->inner.route(ctx, dims, logits, bias, ids, weights, rows);
    if (bad) return bad;
    if (x->stream->cache.n_slots > 0) {
        if (call(x, "a copy to the host", k3_cu->cuMemcpyDtoHAsync, (void*)x->ids, (k3_address)ids,
                 (size_t)(rows * dims->num_experts_per_token) * sizeof(int32_t), x->launches))
            return 1;
        if (record(x, x->arrived, x->launches)) return 1;
        x->routed = ids;
    }
    return ahead(x, x->stream->head) < 0;
}

int experts(void* ctx, const k3_dims* dims, const k3_moe* moe, const k3_pass* pass, const float* z, const int32_t* ids,
            const float* weights, float* u, int64_t first, int64_t end) {
    k3_gpu_streaming* x = of(ctx);
    k3_gpu_stream* g = x->stream;
    const int64_t E = dims->num_experts;
    int64_t layer = 0;
    while (layer < g->n_layers && &g->layers[layer].moe != moe) ++layer;
    if (layer == g->n_layers || first != 0 || end != E) return out_of_order(x);
    if (x->routed != ids) {                                            // a router that is not on this device
        if (call(x, "a copy to the host", k3_cu->cuMemcpyDtoHAsync, (void*)x->ids, (k3_address)ids,
                 (size_t)(pass->rows * dims->num_experts_per_token) * sizeof(int32_t), x->launches))
            return 1;
        if (record(x, x->arrived, x->launches)) return 1;
    }
    x->routed = nullptr;
    if (wait_for(x, x->arrived)) return 1;
    const int64_t n = chosen(x, dims, (const int32_t*)(x->mail_host + ((const char*)pass->owner - x->mail_here)), pass->rows);
    const int64_t most = group_of(x, n);
    group a = {x->active, least(most, n), 0, {}};
    int64_t from = 0;
    if (settle(x) || claim(x, layer, &a)) return 1;
    do {
        group next = {x->active + from + a.n, least(most, n - from - a.n), 0, {}};
        if (settle(x)) return 1;
        if (next.n > 0 && claim(x, layer, &next)) return 1;
        ++g->launches;
        if (bring_experts(x, layer, &a) || place_group(x, layer, &a)) return 1;
        k3_moe here = *moe;
        here.w1 = (const k3_matrix*)x->table_here;
        here.w2 = here.w1 + E;
        here.w3 = here.w1 + 2 * E;
        const int64_t low = from == 0 ? 0 : a.ids[0], high = next.n > 0 ? next.ids[0] : E;
        if (x->inner.experts(ctx, dims, &here, pass, z, ids, weights, u, low, high)) return 1;
        if (record(x, g->experts_used[g->launches % 2], x->launches)) return 1;
        for (int64_t i = 0; i < a.n; ++i) g->cache.pinned[g->cache.slot_of[layer * E + a.ids[i]]] = 0;
        from += a.n;
        a = next;
    } while (from < n);
    return 0;
}

}  // namespace

void k3_gpu_stream_use(k3_driver* table) { k3_use(table); }

int64_t k3_gpu_block_room(const k3_matrix* one, const k3_matrix* other, int64_t rows) {
    return data_room(one, rows) + (other ? data_room(other, rows) : 0);
}

int64_t k3_gpu_slot_room(const k3_layer* layers, int64_t n_layers, int64_t experts) {
    int64_t room = 0;
    for (int64_t i = 0; i < n_layers; ++i) {
        if (!layers[i].is_moe || experts == 0 || !layers[i].moe.w1) continue;
        const k3_matrix* w[3] = {layers[i].moe.w1, layers[i].moe.w2, layers[i].moe.w3};
        int64_t one = 0;
        for (const k3_matrix* m : w) one += data_room(m, m->rows) + up(scale_bytes(m), K3_GPU_ALIGNMENT);
        room = one > room ? one : room;
    }
    return room;
}

void k3_gpu_streaming_table(k3_gpu_streaming* x, k3_ops* table) {
    x->inner = *table;
    table->embed = embed;
    table->linear = linear;
    table->gate_up = gate_up;
    table->mla_absorb = mla_absorb;
    table->mla_unabsorb = mla_unabsorb;
    table->route = route;
    table->experts = experts;
}

int k3_gpu_stream_begin(k3_gpu_streaming* x, int with_head) {
    x->at = x->to_bring = x->brought = x->given = x->done = x->n_settled = 0;
    x->routed = nullptr;
    x->status = 0;
    ++x->stream->pass;
    if (k3_stream_begin(x->stream->host, with_head)) return 1;
    return ahead(x, x->stream->head) < 0;
}

int k3_gpu_stream_end(k3_gpu_streaming* x, int complete) {
    k3_gpu_stream* g = x->stream;
    // Whatever happened, nothing reads the reader's memory any more.
    if (call(x, "waiting for the device", k3_cu->cuStreamSynchronize, g->copies)) complete = 0;
    while (x->given < x->brought) k3_stream_give(g->host, x->given++);
    k3_stream_unpin_all(g->host);
    const int bad = k3_stream_end(g->host, complete);
    for (int64_t i = 0; i < g->cache.n_slots; ++i) {
        g->cache.pinned[i] = 0;
        if ((bad || !complete) && g->cache.owner[i] >= 0 && g->cache.pass[i] == g->pass) k3_cache_release(&g->cache, i);
    }
    return bad || x->status != 0;
}
