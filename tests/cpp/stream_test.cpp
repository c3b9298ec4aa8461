// SPDX-License-Identifier: MIT
//
// The reader of streamed weights by itself, so that ThreadSanitizer sees every access of it and nothing else: callers
// take turns, what a block or an expert holds is what the file has, passes are broken off and reads fail in between.

#include "host/stream.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

namespace {

#define CHECK(WHAT)                                                  \
    do {                                                             \
        if (!(WHAT)) {                                               \
            printf("stream_test:%d: not so: %s\n", __LINE__, #WHAT); \
            exit(1);                                                 \
        }                                                            \
    } while (0)

enum { LAYERS = 3, EXPERTS = 7, MATRICES = 12, ROWS = 40, COLS = 96, PASSES = 15, CALLERS = 3, ODD = 37 };

unsigned char at_byte(int64_t i) { return (unsigned char)(i * 2654435761u >> 13); }

struct World {
    std::vector<k3_matrix> trunk, experts;
    std::vector<k3_layer> layers;
    k3_stream* stream;
    const char* start;
};

// The next matrix of the file, at an odd place.
k3_matrix matrix(const char** at, int64_t rows) {
    k3_matrix m;
    memset(&m, 0, sizeof m);
    m.data = *at;
    m.rows = rows;
    m.cols = COLS;
    m.pitch = COLS * 4;
    m.dtype = K3_F32;
    *at += rows * m.pitch + ODD;
    return m;
}

bool holds(const World* w, const k3_matrix* here, const k3_matrix* there, int64_t first) {
    const int64_t from = (const char*)there->data + first * there->pitch - w->start;
    for (int64_t i = 0; i < here->rows * here->pitch; ++i)
        if (((const unsigned char*)here->data)[i] != at_byte(from + i)) return false;
    return true;
}

// One pass, broken off after `stop` blocks; whether all of it could be read.
bool pass(World* w, unsigned* seed, int64_t stop, bool with_head) {
    int64_t n, head, bytes = 0, wait = 0;
    const k3_block* blocks = k3_stream_blocks(w->stream, &n, &head);
    const int64_t end = with_head ? n : head;
    std::vector<k3_matrix> table(3 * EXPERTS);
    while (!k3_stream_enter(w->stream)) {
    }
    bool good = k3_stream_begin(w->stream, with_head) == 0;
    int64_t i = 0;
    for (; good && i < end && i < stop; ++i) {
        char* base = k3_stream_take(w->stream, i, &bytes, &wait);
        good = base != nullptr;
        if (!good) break;
        const k3_matrix here = k3_stream_view(w->stream, i, 0, base);
        CHECK(holds(w, &here, blocks[i].matrix[0], blocks[i].first));
        k3_stream_give(w->stream, i);
        if (i % 3) continue;
        const int64_t layer = i / 3 % LAYERS;
        const int32_t ids[3] = {(int32_t)(rand_r(seed) % 2), (int32_t)(2 + rand_r(seed) % 2), (int32_t)(4 + rand_r(seed) % 3)};
        k3_stream_ask(w->stream, layer, ids, 2, &bytes);
        k3_stream_ask(w->stream, layer, ids, 3, &bytes);
        good = k3_stream_await(w->stream, layer, ids, 3, table.data(), &wait) == 0;
        for (int e = 0; good && e < 3; ++e)
            for (int j = 0; j < 3; ++j)
                CHECK(holds(w, &table[j * EXPERTS + ids[e]],
                            (j == 0   ? w->layers[layer].moe.w1
                             : j == 1 ? w->layers[layer].moe.w2
                                      : w->layers[layer].moe.w3) +
                                ids[e],
                            0));
        k3_stream_unpin(w->stream, layer, ids, 3);
        k3_stream_unpin_all(w->stream);
    }
    const bool whole = good && i == end;
    return k3_stream_end(w->stream, whole) == 0 && whole;
}

void* caller(void* arg) {
    World* w = (World*)arg;
    unsigned seed = (unsigned)(uintptr_t)pthread_self();
    for (int i = 0; i < PASSES; ++i) {
        const bool broken_off = i % 5 == 3;
        CHECK(pass(w, &seed, broken_off ? rand_r(&seed) % MATRICES : 1 << 20, i % 2) != broken_off || broken_off);
    }
    return nullptr;
}

World* open_world(const char* path, int64_t resident_every, int64_t slots, int64_t threads) {
    World* w = new World();
    const int64_t size = (MATRICES + LAYERS * EXPERTS * 3) * (ROWS * COLS * 4 + ODD) + 4096;
    const int out = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    std::vector<unsigned char> content((size_t)size);
    for (int64_t i = 0; i < size; ++i) content[(size_t)i] = at_byte(i);
    CHECK(out >= 0 && write(out, content.data(), content.size()) == (ssize_t)size);
    // Addresses that name the file and that nobody may touch.
    w->start = (const char*)mmap(nullptr, (size_t)size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const char* at = w->start + 11;
    for (int i = 0; i < MATRICES; ++i) w->trunk.push_back(matrix(&at, ROWS));
    for (int i = 0; i < LAYERS * 3 * EXPERTS; ++i) w->experts.push_back(matrix(&at, 5 + i % 3));
    w->layers.resize(LAYERS);
    for (int i = 0; i < LAYERS; ++i) {
        memset(&w->layers[i], 0, sizeof(k3_layer));
        w->layers[i].is_moe = 1;
        const k3_matrix* first = w->experts.data() + i * 3 * EXPERTS;
        w->layers[i].moe.w1 = first;
        w->layers[i].moe.w2 = first + EXPERTS;
        w->layers[i].moe.w3 = first + 2 * EXPERTS;
    }
    k3_stream_setup setup;
    memset(&setup, 0, sizeof setup);
    setup.layers = w->layers.data();
    setup.n_layers = LAYERS;
    setup.experts = EXPERTS;
    setup.files = (k3_file*)calloc(1, sizeof(k3_file));
    setup.n_files = 1;
    setup.files[0].start = w->start;
    setup.files[0].size = size;
    setup.files[0].fd = out;
    setup.files[0].direct = open(path, O_RDONLY | O_DIRECT);
    setup.blocks = (k3_block*)calloc(2 * MATRICES, sizeof(k3_block));
    std::vector<uint8_t> resident;
    for (int i = 0; i < 2 * MATRICES; ++i) {
        k3_block* b = setup.blocks + setup.n_blocks++;
        b->matrix[0] = &w->trunk[(size_t)(i / 2)];
        b->first = i % 2 ? 13 : 0;
        b->rows = i % 2 ? ROWS - 13 : 13;
        b->room = k3_block_room(setup.files, 1, b);
        resident.push_back(resident_every && i % resident_every == 0);
    }
    setup.resident = resident.data();
    setup.head = 2 * MATRICES - 2;
    setup.ring_bytes = 40000;
    setup.n_slots = slots;
    setup.chunk_bytes = 4096;
    setup.threads = threads;
    setup.half_life = 16;
    w->stream = k3_stream_open(&setup);
    CHECK(w->stream);
    CHECK(k3_stream_load(w->stream, 0, setup.n_blocks) == 0);
    unlink(path);
    return w;
}

void run(const char* path, int64_t resident_every, int64_t slots, int64_t threads) {
    World* w = open_world(path, resident_every, slots, threads);
    pthread_t callers[CALLERS];
    for (auto& c : callers) CHECK(pthread_create(&c, nullptr, caller, w) == 0);
    for (auto& c : callers) pthread_join(c, nullptr);
    unsigned seed = 1;
    for (int after = 0; after < 40; ++after) {
        k3_stream_fail_after(w->stream, after, after % 2 ? EIO : 0);
        if (pass(w, &seed, 1 << 20, true)) continue;         // fewer reads than that
        const k3_failure failure = k3_stream_failure(w->stream);
        CHECK(failure.kind == (after % 2 ? K3_READ : K3_SHORT) && failure.found < failure.expected);
    }
    k3_stream_fail_after(w->stream, -1, 0);
    CHECK(pass(w, &seed, 1 << 20, true));
    CHECK(pass(w, &seed, 1 << 20, false));
    k3_stream_close(w->stream);
    delete w;
}

}  // namespace

int main() {
    char path[] = "stream_test.XXXXXX";
    const int made = mkstemp(path);
    CHECK(made >= 0);
    close(made);
    for (int64_t resident_every : {0, 2, 1})
        for (int64_t slots : {3, 8, LAYERS * EXPERTS})
            for (int64_t threads : {1, 4}) run(path, resident_every, slots, threads);
    printf("stream_test: what was read is what the file has\n");
    return 0;
}
