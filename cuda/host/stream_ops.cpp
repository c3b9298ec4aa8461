// SPDX-License-Identifier: MIT
//
// The streaming form of the ops that take matrices: they have the rows brought to memory, block by block, and hand them
// to the ops of an instruction set as matrices of fewer rows.  A row's sum does not depend on the other rows of its
// matrix, so the bits are those of the whole matrix.

#include "stream.h"

#include <string.h>

namespace {

enum { BATCH = 16, GROUP = 32 };       // jobs in one dispatch; experts that are used while the next ones are read

// The block that comes next, if it begins with this matrix; -1 where the graph asks for something else.
int64_t expect(k3_streaming* x, const k3_matrix* w) {
    int64_t n, head;
    const k3_block* blocks = k3_stream_blocks(x->stream, &n, &head);
    if (x->at < n && blocks[x->at].matrix[0] == w && blocks[x->at].first == 0) return x->at;
    k3_stream_order(x->stream);
    return -1;
}

// One past the last block of the matrix whose first block is `at`.
int64_t end_of(k3_streaming* x, int64_t at) {
    int64_t n, head;
    const k3_block* blocks = k3_stream_blocks(x->stream, &n, &head);
    const k3_matrix* w = blocks[at].matrix[0];
    while (at < n && blocks[at].matrix[0] == w) ++at;
    return at;
}

const k3_block* block_at(k3_streaming* x, int64_t i) {
    int64_t n, head;
    return k3_stream_blocks(x->stream, &n, &head) + i;
}

int embed(void* ctx, const k3_dims* dims, const k3_matrix* table, const int32_t* tokens, const float* embeddings, float* s,
          int64_t rows) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int64_t d = dims->hidden_size;
    for (int64_t r = 0; r < rows; ++r) {
        k3_matrix one = *table;
        const char* data = nullptr;
        const int32_t token = tokens[r] < 0 ? -1 : 0;
        if (token == 0 && k3_stream_row(x->stream, table, tokens[r], x->row, &data, &x->bytes)) return 1;
        one.data = data;
        one.rows = 1;
        const int bad = x->inner.embed(ctx, dims, &one, &token, embeddings ? embeddings + r * d : nullptr, s + r * d, 1);
        if (bad) return bad;
    }
    return 0;
}

int linear(void* ctx, const k3_linear_job* jobs, int64_t n_jobs, int64_t rows) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int64_t begin = x->at;
    int64_t end = begin;
    // What is in memory already comes first: the disk works meanwhile.
    for (int stays = 1; stays >= 0; --stays) {
        k3_matrix w[BATCH];
        k3_linear_job part[BATCH];
        int64_t n = 0;
        x->at = begin;
        for (int64_t j = 0; j < n_jobs; ++j) {
            const int64_t first = expect(x, jobs[j].w);
            if (first < 0) return 1;
            end = end_of(x, first);
            for (int64_t i = first; i < end; ++i) {
                if ((block_at(x, i)->stays != nullptr) != (stays == 1)) continue;
                char* base = k3_stream_take(x->stream, i, &x->bytes, &x->wait_ns);
                if (!base) return 1;
                w[n] = k3_stream_view(x->stream, i, 0, base);
                part[n] = jobs[j];
                part[n].w = w + n;
                part[n].y = jobs[j].y + block_at(x, i)->first;
                ++n;
                if (n < BATCH && stays) continue;
                const int bad = x->inner.linear(ctx, part, n, rows);
                n = 0;
                k3_stream_give(x->stream, i);
                if (bad) return bad;
            }
            x->at = end;
        }
        if (n > 0) {
            const int bad = x->inner.linear(ctx, part, n, rows);
            if (bad) return bad;
        }
    }
    return 0;
}

int gate_up(void* ctx, const k3_dims* dims, const k3_matrix* gate, const k3_matrix* up, const float* in, float* h, int64_t rows) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int64_t first = expect(x, gate);
    if (first < 0) return 1;
    const int64_t end = end_of(x, first);
    for (int64_t i = first; i < end; ++i) {
        const k3_block* b = block_at(x, i);
        char* base = k3_stream_take(x->stream, i, &x->bytes, &x->wait_ns);
        if (!base) return 1;
        const k3_matrix g = k3_stream_view(x->stream, i, 0, base), u = k3_stream_view(x->stream, i, 1, base);
        // The op's rows lie one after the other, and a block has a part of each.
        const bool direct = rows == 1 || b->rows == gate->rows;
        float* to = direct ? h + b->first : x->hidden;
        const int bad = x->inner.gate_up(ctx, dims, &g, &u, in, to, rows);
        for (int64_t r = 0; !direct && !bad && r < rows; ++r)
            memcpy(h + r * gate->rows + b->first, to + r * b->rows, (size_t)b->rows * sizeof(float));
        k3_stream_give(x->stream, i);
        if (bad) return bad;
    }
    x->at = end;
    return 0;
}

// The key half of kv_b_proj is used here and the value half in mla_unabsorb: the block stays until then.
int mla_absorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* q, float* qa, int64_t rows) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int64_t i = expect(x, &w->kv_b_proj);
    char* base = i < 0 ? nullptr : k3_stream_take(x->stream, i, &x->bytes, &x->wait_ns);
    if (!base) return 1;
    k3_mla here = *w;
    here.kv_b_proj = k3_stream_view(x->stream, i, 0, base);
    return x->inner.mla_absorb(ctx, dims, &here, q, qa, rows);
}

int mla_unabsorb(void* ctx, const k3_dims* dims, const k3_mla* w, const float* oa, const float* g, float* o, int64_t rows) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int64_t i = expect(x, &w->kv_b_proj);
    int64_t none = 0;
    char* base = i < 0 ? nullptr : k3_stream_take(x->stream, i, &none, &x->wait_ns);
    if (!base) return 1;
    k3_mla here = *w;
    here.kv_b_proj = k3_stream_view(x->stream, i, 0, base);
    const int bad = x->inner.mla_unabsorb(ctx, dims, &here, oa, g, o, rows);
    k3_stream_give(x->stream, i);
    x->at = i + 1;
    return bad;
}

// The chosen experts of a pass, ascending; rows without an owner have none.
int64_t chosen(k3_streaming* x, const k3_dims* dims, const int32_t* ids, const int32_t* owner, int64_t rows) {
    const int64_t E = dims->num_experts, T = dims->num_experts_per_token;
    for (int64_t e = 0; e < E; ++e) x->active[e] = 0;
    for (int64_t s = 0; s < rows * T; ++s)
        if (!owner || owner[s / T] >= 0) x->active[ids[s]] = 1;
    int64_t n = 0;
    for (int64_t e = 0; e < E; ++e)
        if (x->active[e]) x->active[n++] = (int32_t)e;
    return n;
}

// How many are used at a time: all of them where there is room, else few enough that as many can be read meanwhile.
int64_t group_of(k3_streaming* x, int64_t n) {
    const int64_t slots = k3_stream_slots(x->stream);
    if (n <= (slots < GROUP ? slots : GROUP)) return n > 0 ? n : 1;
    const int64_t half = slots / 2 < GROUP ? slots / 2 : GROUP;
    return half > 0 ? half : 1;
}

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// The experts are read from here on, while the shared ones are computed.
int route(void* ctx, const k3_dims* dims, const float* logits, const float* bias, int32_t* ids, float* weights, int64_t rows) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int bad = x->inner.route(ctx, dims, logits, bias, ids, weights, rows);
    if (bad || k3_stream_slots(x->stream) == 0) return bad;
    int64_t n_layers;
    const k3_layer* layers = k3_stream_layers(x->stream, &n_layers);
    for (int64_t i = 0; i < n_layers && layers[x->moe].moe.e_score_correction_bias != bias; ++i) x->moe = (x->moe + 1) % n_layers;
    if (layers[x->moe].moe.e_score_correction_bias != bias) return 0;
    for (int64_t s = 0; s < rows * dims->num_experts_per_token; ++s)
        if (ids[s] < 0 || ids[s] >= dims->num_experts) return 0;      // of values that are not finite: the pass will fail
    const int64_t n = chosen(x, dims, ids, nullptr, rows);
    x->misses += k3_stream_ask(x->stream, x->moe, x->active, at_most(n, group_of(x, n)), &x->bytes);
    return 0;
}

int experts(void* ctx, const k3_dims* dims, const k3_moe* moe, const k3_pass* pass, const float* z, const int32_t* ids,
            const float* weights, float* u, int64_t first, int64_t end) {
    k3_streaming* x = (k3_streaming*)ctx;
    const int64_t E = dims->num_experts;
    int64_t n_layers, layer = 0;
    const k3_layer* layers = k3_stream_layers(x->stream, &n_layers);
    while (layer < n_layers && &layers[layer].moe != moe) ++layer;
    if (layer == n_layers || first != 0 || end != E) return 1;
    const int64_t n = chosen(x, dims, ids, pass->owner, pass->rows), group = group_of(x, n);
    k3_moe here = *moe;
    memcpy(x->table, moe->w1, (size_t)E * sizeof(k3_matrix));
    memcpy(x->table + E, moe->w2, (size_t)E * sizeof(k3_matrix));
    memcpy(x->table + 2 * E, moe->w3, (size_t)E * sizeof(k3_matrix));
    here.w1 = x->table;
    // k3_stream_await fills w1, w2, w3 one table after the other.
    here.w2 = x->table + E;
    here.w3 = x->table + 2 * E;
    x->uses += n;
    int bad = 0;
    int64_t from = 0;
    do {
        const int64_t count = at_most(group, n - from), more = at_most(group, n - from - count);
        const int32_t* now = x->active + from;
        x->misses += k3_stream_ask(x->stream, layer, now, count, &x->bytes);
        if (more > 0) x->misses += k3_stream_ask(x->stream, layer, now + count, more, &x->bytes);
        bad = k3_stream_await(x->stream, layer, now, count, x->table, &x->wait_ns);
        if (!bad) {
            const int64_t low = from == 0 ? 0 : now[0], high = more > 0 ? now[count] : E;
            bad = x->inner.experts(ctx, dims, &here, pass, z, ids, weights, u, low, high);
        }
        k3_stream_unpin(x->stream, layer, now, count);
        from += count;
    } while (!bad && from < n);
    k3_stream_unpin_all(x->stream);
    return bad;
}

}  // namespace

void k3_streaming_table(k3_streaming* x, k3_ops* table) {
    *table = x->inner;
    table->ctx = x;
    table->embed = embed;
    table->linear = linear;
    table->gate_up = gate_up;
    table->mla_absorb = mla_absorb;
    table->mla_unabsorb = mla_unabsorb;
    table->route = route;
    table->experts = experts;
}
