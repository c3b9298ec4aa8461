// SPDX-License-Identifier: MIT
//
// The reader behind the streaming ops: a few threads, a ring for what is read ahead, slots for experts.
//
// One lock guards all of it; it is never held while a file is read.  What is to be read is cut into chunks, so that
// several reads are under way at any time, as a disk needs them.  An expert that a router has chosen comes before what
// is read ahead.
//
// Trust.  Files are compared with what they were before a pass and after it, and a pass only counts if both times they
// were the same: so what it has read is what the checkpoint holds.  After a failure nothing is read ahead until a pass
// has found the files in order again.

#include "expert_cache.h"
#include "stream_files.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct k3_entry {            // a block on its way through the ring
    int64_t block, start, room;
    k3_load load;
};

struct k3_stream {
    pthread_mutex_t lock;
    pthread_cond_t work, ready, turn;        // something to read; something has arrived; the pass is over
    pthread_t threads[K3_DISK_THREADS];
    int n_threads, stop, busy, ahead, with_head;
    pid_t pid;
    k3_stream_setup set;
    char *stays, *ring, *slot_memory;
    int64_t stays_bytes, slot_room;
    // The ring: entries from `first` on, memory from the first one's start up to `free_at`.
    k3_entry entries[K3_AHEAD];
    int64_t first, count, free_at;
    int64_t pass, read_pass, read_block;     // the pass at hand, and what is read ahead next
    int64_t lent;                            // entries, from the first one on, that are with a caller of k3_stream_lend
    k3_slot* slots;
    k3_cache cache;                          // what is in them
    k3_load *urgent, *urgent_last;
    k3_failure failure;
    k3_fault fault;
};

namespace {

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Memory that takes nothing until it is written; direct reads need fewer large pages than small ones.
char* reserve(int64_t bytes) {
    void* p = mmap(nullptr, (size_t)(bytes > 0 ? bytes : K3_PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    if (bytes >= 4 << 20) madvise(p, (size_t)bytes, MADV_HUGEPAGE);
    return (char*)p;
}
void unreserve(char* p, int64_t bytes) {
    if (p) munmap(p, (size_t)(bytes > 0 ? bytes : K3_PAGE));
}

bool whole_cut(const k3_load* l) { return l->part_at == l->parts; }
bool over(const k3_load* l) { return whole_cut(l) && l->flying == 0; }
void drop(k3_load* l) { l->part_at = l->parts; }

void push_urgent(k3_stream* s, k3_load* l) {
    if (s->urgent) s->urgent_last->next = l;
    else s->urgent = l;
    s->urgent_last = l;
}

// Memory of the ring for one more block, or -1.
int64_t ring_place(k3_stream* s, int64_t room) {
    if (s->count == 0) return room <= s->set.ring_bytes ? 0 : -1;
    const int64_t oldest = s->entries[s->first].start;
    if (s->free_at > oldest) {
        if (s->free_at + room <= s->set.ring_bytes) return s->free_at;
        return room <= oldest ? 0 : -1;
    }
    return s->free_at + room <= oldest ? s->free_at : -1;
}

// The next block that is read ahead, admitted to the ring; NULL where there is none or no room.
k3_load* admit(k3_stream* s) {
    if (!s->ahead || s->count == K3_AHEAD) return nullptr;
    for (;;) {
        const int64_t limit = s->read_pass == s->pass && s->with_head ? s->set.n_blocks : s->set.head;
        while (s->read_block < limit && s->set.blocks[s->read_block].stays) ++s->read_block;
        if (s->read_block < limit) break;
        if (s->read_pass > s->pass) return nullptr;          // whether that pass has a head is not known yet
        ++s->read_pass;
        s->read_block = 0;
    }
    const k3_block* b = s->set.blocks + s->read_block;
    const int64_t start = ring_place(s, b->room);
    if (start < 0) return nullptr;
    k3_entry* e = s->entries + (s->first + s->count) % K3_AHEAD;
    e->block = s->read_block++;
    e->start = start;
    e->room = b->room;
    k3_lay_out_block(s->set.files, s->set.n_files, b, s->ring + start, &e->load);
    s->free_at = start + b->room;
    ++s->count;
    return &e->load;
}

k3_load* next_load(k3_stream* s) {
    while (s->urgent && whole_cut(s->urgent)) s->urgent = s->urgent->next;
    if (s->urgent) return s->urgent;
    if (s->count > 0) {
        k3_load* last = &s->entries[(s->first + s->count - 1) % K3_AHEAD].load;
        if (!whole_cut(last)) return last;
    }
    return admit(s);
}

// Reads one chunk, if there is one; the lock is held before and after, not meanwhile.
bool read_one(k3_stream* s) {
    k3_load* l = next_load(s);
    if (!l) return false;
    const int32_t file = l->part[l->part_at].file;
    const int64_t at = l->part[l->part_at].at + l->cut, left = l->part[l->part_at].need - l->cut;
    const int64_t need = left < s->set.chunk_bytes ? left : s->set.chunk_bytes;
    char* to = l->part[l->part_at].to + l->cut;
    l->cut += need;
    if (need == left) {
        ++l->part_at;
        l->cut = 0;
    }
    if (whole_cut(l) && l == s->urgent) s->urgent = l->next;          // its slot may be used anew before the next look
    ++l->flying;
    k3_failure failure = {};
    pthread_mutex_unlock(&s->lock);
    k3_file_read(s->set.files, file, at, need, to, &s->fault, &failure);
    pthread_mutex_lock(&s->lock);
    --l->flying;
    if (failure.kind != K3_OK) {
        if (l->failure.kind == K3_OK) l->failure = failure;
        drop(l);
    }
    if (over(l)) pthread_cond_broadcast(&s->ready);
    return true;
}

void* reader(void* arg) {
    k3_stream* s = (k3_stream*)arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stop)
        if (!read_one(s)) pthread_cond_wait(&s->work, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return nullptr;
}

// Without threads, whoever waits reads.
void wait_ready(k3_stream* s) {
    if (s->n_threads > 0 || !read_one(s)) pthread_cond_wait(&s->ready, &s->lock);
}

// Signals stay with the threads of the program.
void start_threads(k3_stream* s) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (s->n_threads < s->set.threads && pthread_create(&s->threads[s->n_threads], nullptr, reader, s) == 0) ++s->n_threads;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void init_sync(k3_stream* s) {
    pthread_mutex_init(&s->lock, nullptr);
    pthread_cond_init(&s->work, nullptr);
    pthread_cond_init(&s->ready, nullptr);
    pthread_cond_init(&s->turn, nullptr);
    s->pid = getpid();
    s->n_threads = 0;
    s->busy = 0;
}

void free_slot(k3_stream* s, int64_t i) {
    k3_load* load = &s->slots[i].load;
    k3_cache_release(&s->cache, i);
    load->parts = load->part_at = load->flying = 0;
}

// Forgets what is on its way or was read ahead, and with `distrust` the experts that this pass has read.
void reset(k3_stream* s, bool distrust) {
    s->ahead = 0;
    for (int64_t i = 0; i < s->count; ++i) drop(&s->entries[(s->first + i) % K3_AHEAD].load);
    for (int64_t i = 0; i < s->set.n_slots; ++i) {
        k3_load* load = &s->slots[i].load;
        if (s->cache.owner[i] >= 0 && (!over(load) || load->failure.kind != K3_OK)) {
            drop(load);
            s->cache.pass[i] = -1;
        }
    }
    for (bool flying = true; flying;) {
        flying = false;
        for (int64_t i = 0; i < s->count; ++i) flying |= !over(&s->entries[(s->first + i) % K3_AHEAD].load);
        for (int64_t i = 0; i < s->set.n_slots; ++i) flying |= !over(&s->slots[i].load);
        if (flying) pthread_cond_wait(&s->ready, &s->lock);
    }
    for (int64_t i = 0; i < s->set.n_slots; ++i) {
        const int64_t pass = s->cache.pass[i];
        if (s->cache.owner[i] >= 0 && (pass < 0 || (distrust && pass == s->pass))) free_slot(s, i);
        s->cache.pinned[i] = 0;
    }
    s->urgent = s->urgent_last = nullptr;
    s->first = s->count = s->free_at = s->lent = 0;
    s->read_pass = s->pass + 1;
    s->read_block = 0;
}

// The child of a fork has the memory and the files, and none of the threads.
void after_fork(k3_stream* s) {
    init_sync(s);
    for (int64_t i = 0; i < s->count; ++i) s->entries[(s->first + i) % K3_AHEAD].load.flying = 0;
    for (int64_t i = 0; i < s->set.n_slots; ++i) {
        k3_load* load = &s->slots[i].load;
        if (s->cache.owner[i] >= 0 && !over(load)) {
            load->flying = 0;
            drop(load);
            s->cache.pass[i] = -1;
        }
    }
    reset(s, true);
}

}  // namespace

k3_stream* k3_stream_open(const k3_stream_setup* setup) {
    k3_stream* s = (k3_stream*)calloc(1, sizeof(k3_stream));
    if (!s) return nullptr;
    init_sync(s);
    s->set = *setup;
    s->fault.after = -1;
    s->read_pass = 1;
    for (int64_t i = 0; i < setup->n_blocks; ++i)
        if (setup->resident[i]) s->stays_bytes += setup->blocks[i].room;
    s->slot_room =
        setup->n_slots ? k3_slot_room(setup->files, setup->n_files, setup->layers, setup->n_layers, setup->experts) : 0;
    s->stays = setup->stays ? setup->stays : reserve(s->stays_bytes);
    s->ring = setup->ring ? setup->ring : reserve(setup->ring_bytes);
    s->slot_memory = setup->slot_memory ? setup->slot_memory : reserve(setup->n_slots * s->slot_room);
    s->slots = (k3_slot*)calloc((size_t)setup->n_slots + 1, sizeof(k3_slot));
    int64_t moe = 0;
    for (int64_t i = 0; i < setup->n_layers; ++i) moe += setup->layers[i].is_moe;
    const bool cached = k3_cache_open(&s->cache, setup->n_slots, setup->n_layers, setup->experts, moe, setup->half_life);
    if (!s->stays || !s->ring || !s->slot_memory || !s->slots || !cached) {
        s->set.n_files = 0;                                  // they stay with the caller
        s->set.files = nullptr;
        s->set.blocks = nullptr;
        k3_stream_close(s);
        return nullptr;
    }
    for (int64_t i = 0; i < setup->n_slots; ++i) s->slots[i].at = s->slot_memory + i * s->slot_room;
    char* at = s->stays;
    for (int64_t i = 0; i < setup->n_blocks; ++i) {
        s->set.blocks[i].stays = setup->resident[i] ? at : nullptr;
        if (setup->resident[i]) at += setup->blocks[i].room;
    }
    for (int64_t i = 0; i < setup->n_files; ++i) {
        k3_file_note(s->set.files + i);
    }
    return s;
}

void k3_stream_close(k3_stream* s) {
    if (s->pid == getpid()) {
        pthread_mutex_lock(&s->lock);
        s->stop = 1;
        pthread_cond_broadcast(&s->work);
        pthread_mutex_unlock(&s->lock);
        for (int i = 0; i < s->n_threads; ++i) pthread_join(s->threads[i], nullptr);
    }
    if (!s->set.stays) unreserve(s->stays, s->stays_bytes);
    if (!s->set.ring) unreserve(s->ring, s->set.ring_bytes);
    if (!s->set.slot_memory) unreserve(s->slot_memory, s->set.n_slots * s->slot_room);
    for (int64_t i = 0; i < s->set.n_files; ++i) {
        close(s->set.files[i].fd);
        if (s->set.files[i].direct >= 0) close(s->set.files[i].direct);
    }
    free(s->set.files);
    free(s->set.blocks);
    free(s->slots);
    k3_cache_close(&s->cache);
    free(s);
}

int64_t k3_stream_resident(const k3_stream* s) { return s->stays_bytes; }
int64_t k3_stream_slots(const k3_stream* s) { return s->set.n_slots; }
int64_t k3_stream_total(k3_stream* s) { return __atomic_load_n(&s->fault.total, __ATOMIC_RELAXED); }

const k3_block* k3_stream_blocks(const k3_stream* s, int64_t* n, int64_t* head) {
    *n = s->set.n_blocks;
    *head = s->set.head;
    return s->set.blocks;
}

const k3_layer* k3_stream_layers(const k3_stream* s, int64_t* n) {
    *n = s->set.n_layers;
    return s->set.layers;
}

int k3_stream_load(k3_stream* s, int64_t first, int64_t end) {
    k3_load* loads = (k3_load*)calloc((size_t)(end - first) + 1, sizeof(k3_load));
    if (!loads) return 1;
    pthread_mutex_lock(&s->lock);
    start_threads(s);
    s->failure.kind = K3_OK;
    for (int64_t i = first; i < end; ++i) {
        const k3_block* b = s->set.blocks + i;
        if (!b->stays) continue;
        k3_lay_out_block(s->set.files, s->set.n_files, b, b->stays, loads + (i - first));
        push_urgent(s, loads + (i - first));
    }
    pthread_cond_broadcast(&s->work);
    for (int64_t i = 0; i < end - first; ++i) {
        while (!over(loads + i)) wait_ready(s);
        if (s->failure.kind == K3_OK) s->failure = loads[i].failure;
    }
    s->urgent = s->urgent_last = nullptr;
    const int bad = s->failure.kind != K3_OK;
    pthread_mutex_unlock(&s->lock);
    free(loads);
    return bad;
}

k3_failure k3_stream_failure(k3_stream* s) {
    pthread_mutex_lock(&s->lock);
    const k3_failure found = s->failure;
    pthread_mutex_unlock(&s->lock);
    return found;
}

void k3_stream_order(k3_stream* s) {
    pthread_mutex_lock(&s->lock);
    if (s->failure.kind == K3_OK) s->failure.kind = K3_ORDER;
    pthread_mutex_unlock(&s->lock);
}

// ---------------------------------------------------------------------------------------------
// passes
// ---------------------------------------------------------------------------------------------

int k3_stream_enter(k3_stream* s) {
    if (s->pid != getpid()) after_fork(s);
    pthread_mutex_lock(&s->lock);
    if (s->busy) {
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&s->turn, &s->lock, &until);
    }
    const int mine = !s->busy;
    s->busy = 1;
    pthread_mutex_unlock(&s->lock);
    return mine;
}

int k3_stream_begin(k3_stream* s, int with_head) {
    bool touched;
    pthread_mutex_lock(&s->lock);
    s->failure.kind = K3_OK;
    const bool good = k3_files_unchanged(s->set.files, s->set.n_files, &touched, &s->failure);
    bool stale = !good || touched;
    for (int64_t i = 0; i < s->count; ++i) stale |= s->entries[(s->first + i) % K3_AHEAD].load.failure.kind != K3_OK;
    if (stale) reset(s, false);
    ++s->pass;
    s->with_head = with_head;
    if (good) {
        s->ahead = 1;
        start_threads(s);
        pthread_cond_broadcast(&s->work);
    }
    pthread_mutex_unlock(&s->lock);
    return !good;
}

int k3_stream_end(k3_stream* s, int complete) {
    bool touched;
    pthread_mutex_lock(&s->lock);
    const bool good = k3_files_unchanged(s->set.files, s->set.n_files, &touched, &s->failure);
    if (!complete || !good) reset(s, !good);
    s->busy = 0;
    pthread_cond_signal(&s->turn);
    const int bad = s->failure.kind != K3_OK;
    pthread_mutex_unlock(&s->lock);
    return bad;
}

// ---------------------------------------------------------------------------------------------
// the trunk
// ---------------------------------------------------------------------------------------------

namespace {

// The memory of a block that is the entry `nth` of the ring; NULL where it has not arrived, after a wait or without one.
char* arrived(k3_stream* s, int64_t nth, int64_t block, bool wait, int64_t* bytes, int64_t* wait_ns) {
    char* found = nullptr;
    int64_t since = 0;
    pthread_mutex_lock(&s->lock);
    while (s->failure.kind == K3_OK && !found) {
        k3_entry* e = s->entries + (s->first + nth) % K3_AHEAD;
        if (s->count > nth && e->block != block) {
            s->failure.kind = K3_ORDER;
        } else if (s->count > nth && over(&e->load)) {
            if (e->load.failure.kind != K3_OK) {
                s->failure = e->load.failure;
            } else {
                found = s->ring + e->start;
                *bytes += k3_load_bytes(&e->load);
            }
        } else {
            if (!wait) break;
            if (!since) since = now_ns();
            wait_ready(s);
        }
    }
    pthread_mutex_unlock(&s->lock);
    if (since) *wait_ns += now_ns() - since;
    return found;
}

}  // namespace

char* k3_stream_take(k3_stream* s, int64_t block, int64_t* bytes, int64_t* wait_ns) {
    if (s->set.blocks[block].stays) return s->set.blocks[block].stays;
    return arrived(s, 0, block, true, bytes, wait_ns);
}

char* k3_stream_lend(k3_stream* s, int64_t block, int wait, int64_t* bytes, int64_t* wait_ns) {
    if (s->set.blocks[block].stays) return s->set.blocks[block].stays;
    char* found = arrived(s, s->lent, block, wait != 0, bytes, wait_ns);
    if (found) ++s->lent;
    return found;
}

void k3_stream_give(k3_stream* s, int64_t block) {
    if (s->set.blocks[block].stays) return;
    pthread_mutex_lock(&s->lock);
    if (s->lent > 0) --s->lent;
    s->first = (s->first + 1) % K3_AHEAD;
    --s->count;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
}

k3_matrix k3_stream_view(k3_stream* s, int64_t block, int which, char* base) {
    const k3_block* b = s->set.blocks + block;
    k3_matrix m = *b->matrix[which];
    for (int i = 0; i <= which; ++i) {
        const k3_matrix* w = b->matrix[i];
        const char* from = (const char*)w->data + b->first * w->pitch;
        const int64_t offset = (from - s->set.files[k3_file_of(s->set.files, s->set.n_files, from)].start) % K3_PAGE;
        if (i == which) m.data = base + offset;
        else base += up(offset + b->rows * w->pitch, K3_PAGE);
    }
    m.rows = b->rows;
    return m;
}

int k3_stream_row(k3_stream* s, const k3_matrix* table, int64_t row, char* buffer, const char** out, int64_t* bytes) {
    const char* from = (const char*)table->data + row * table->pitch;
    const int32_t file = k3_file_of(s->set.files, s->set.n_files, from);
    const int64_t begin = from - s->set.files[file].start, at = begin / K3_PAGE * K3_PAGE;
    k3_failure failure = {};
    k3_file_read(s->set.files, file, at, begin - at + table->pitch, buffer, &s->fault, &failure);
    *out = buffer + (begin - at);
    *bytes += table->pitch;
    if (failure.kind == K3_OK) return 0;
    pthread_mutex_lock(&s->lock);
    if (s->failure.kind == K3_OK) s->failure = failure;
    pthread_mutex_unlock(&s->lock);
    return 1;
}

// ---------------------------------------------------------------------------------------------
// experts
// ---------------------------------------------------------------------------------------------

int64_t k3_stream_ask(k3_stream* s, int64_t layer, const int32_t* ids, int64_t n, int64_t* bytes) {
    int64_t missing = 0;
    pthread_mutex_lock(&s->lock);
    // Those that are here first, lest one makes room for another of the same group.
    for (int64_t i = 0; i < n; ++i) {
        const int32_t slot = s->cache.slot_of[layer * s->set.experts + ids[i]];
        if (slot >= 0) s->cache.pinned[slot] = 1;
    }
    for (int64_t i = 0; i < n && s->failure.kind == K3_OK; ++i) {
        const int64_t owner = layer * s->set.experts + ids[i];
        if (s->cache.slot_of[owner] >= 0) continue;
        const int64_t v = k3_cache_victim(&s->cache, layer, [s](int64_t slot) { return !over(&s->slots[slot].load); });
        if (v < 0) break;
        k3_slot* slot = s->slots + v;
        free_slot(s, v);
        k3_cache_claim(&s->cache, v, owner, s->pass);
        k3_lay_out_expert(s->set.files, s->set.n_files, &s->set.layers[layer].moe, ids[i], slot->at, &slot->load);
        push_urgent(s, &slot->load);
        *bytes += k3_load_bytes(&slot->load);
        ++missing;
    }
    if (missing) pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    return missing;
}

int k3_stream_await(k3_stream* s, int64_t layer, const int32_t* ids, int64_t n, k3_matrix* table, int64_t* wait_ns) {
    const k3_moe* moe = &s->set.layers[layer].moe;
    const int64_t E = s->set.experts;
    int64_t since = 0;
    pthread_mutex_lock(&s->lock);
    for (int64_t i = 0; i < n && s->failure.kind == K3_OK; ++i) {
        const int64_t e = ids[i], owner = layer * E + e;
        const int32_t at = s->cache.slot_of[owner];
        if (at < 0) {
            s->failure.kind = K3_ORDER;
            break;
        }
        k3_slot* slot = s->slots + at;
        while (!over(&slot->load)) {
            if (!since) since = now_ns();
            wait_ready(s);
        }
        if (slot->load.failure.kind != K3_OK) {
            s->failure = slot->load.failure;
            break;
        }
        k3_cache_use(&s->cache, owner, s->pass);
        const k3_matrix* w[3] = {moe->w1 + e, moe->w2 + e, moe->w3 + e};
        for (int j = 0; j < 3; ++j) {
            k3_matrix* m = table + j * E + e;
            *m = *w[j];
            m->data = k3_load_place(s->set.files, s->set.n_files, &slot->load, w[j]->data);
            if (m->scale) m->scale = (const uint8_t*)k3_load_place(s->set.files, s->set.n_files, &slot->load, w[j]->scale);
        }
    }
    const int bad = s->failure.kind != K3_OK;
    pthread_mutex_unlock(&s->lock);
    if (since) *wait_ns += now_ns() - since;
    return bad;
}

void k3_stream_unpin(k3_stream* s, int64_t layer, const int32_t* ids, int64_t n) {
    pthread_mutex_lock(&s->lock);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t slot = s->cache.slot_of[layer * s->set.experts + ids[i]];
        if (slot >= 0) s->cache.pinned[slot] = 0;
    }
    pthread_mutex_unlock(&s->lock);
}

void k3_stream_unpin_all(k3_stream* s) {
    pthread_mutex_lock(&s->lock);
    for (int64_t i = 0; i < s->set.n_slots; ++i) s->cache.pinned[i] = 0;
    pthread_mutex_unlock(&s->lock);
}

void k3_stream_fail_after(k3_stream* s, int64_t after, int error) {
    s->fault.error = error;
    __atomic_store_n(&s->fault.after, after, __ATOMIC_RELEASE);
}
