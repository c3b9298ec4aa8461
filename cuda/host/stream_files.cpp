// SPDX-License-Identifier: MIT
//
// The files behind streamed weights: which bytes of which file a matrix is, reads of them, and whether a file is still
// what it was.

#include "stream_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

void stamp(k3_file* f, const struct stat* st) {
    f->device = (int64_t)st->st_dev;
    f->inode = (int64_t)st->st_ino;
    f->modified = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    f->changed = (int64_t)st->st_ctim.tv_sec * 1000000000 + st->st_ctim.tv_nsec;
}

struct Stretch {
    const char* from;
    int64_t bytes;
};

// A load of these parts, of which nothing has been read.
void begin(k3_load* load, int parts) {
    load->parts = parts;
    load->part_at = load->flying = 0;
    load->cut = 0;
    load->failure.kind = K3_OK;
    load->next = nullptr;
}

// The parts of a load for stretches of the mapping, packed from `to` on; neighbours in a file become one part.
// Returns the memory that they take; with `load` NULL that is all it does.
int64_t lay_out(const k3_file* files, int64_t n_files, Stretch* stretches, int n, char* to, k3_load* load) {
    for (int i = 1; i < n; ++i)
        for (int j = i; j > 0 && stretches[j].from < stretches[j - 1].from; --j) {
            const Stretch t = stretches[j];
            stretches[j] = stretches[j - 1];
            stretches[j - 1] = t;
        }
    int64_t room = 0;
    int parts = 0;
    for (int i = 0; i < n; ++parts) {
        const int32_t file = k3_file_of(files, n_files, stretches[i].from);
        const char *from = stretches[i].from, *end = from + stretches[i].bytes;
        for (++i; i < n && stretches[i].from == end && k3_file_of(files, n_files, end) == file; ++i) end += stretches[i].bytes;
        const int64_t begin = from - files[file].start, at = begin / K3_PAGE * K3_PAGE;
        const int64_t need = begin - at + (end - from);
        if (load) {
            load->part[parts].file = file;
            load->part[parts].at = at;
            load->part[parts].need = need;
            load->part[parts].to = to + room;
        }
        room += up(need, K3_PAGE);
    }
    if (load) begin(load, parts);
    return room;
}

int64_t matrix_bytes(const k3_matrix* m) { return m->rows * m->pitch; }

}  // namespace

void k3_file_note(k3_file* f) {
    struct stat st;
    if (fstat(f->fd, &st) == 0) stamp(f, &st);
}

int32_t k3_file_of(const k3_file* files, int64_t n, const void* p) {
    for (int64_t i = 0; i < n; ++i)
        if ((const char*)p >= files[i].start && (const char*)p < files[i].start + files[i].size) return (int32_t)i;
    return -1;
}

// Whether all files are what they were.  `touched` tells that one was renamed, linked or had its times set: what was
// read ahead meanwhile is not trusted, but the bytes are the same.
bool k3_files_unchanged(k3_file* files, int64_t n_files, bool* touched, k3_failure* failure) {
    *touched = false;
    for (int64_t i = 0; i < n_files; ++i) {
        k3_file *f = files + i, now;
        struct stat st;
        const int bad = fstat(f->fd, &st);
        if (bad == 0) stamp(&now, &st);
        if (bad || st.st_size != f->size || now.modified != f->modified || now.inode != f->inode || now.device != f->device) {
            const k3_failure found = {bad ? K3_READ : K3_CHANGED, bad ? errno : 0, (int32_t)i, 0, 0, f->size,
                                      bad ? 0 : st.st_size};
            if (failure->kind == K3_OK) *failure = found;
            return false;
        }
        if (now.changed != f->changed) {
            f->changed = now.changed;
            *touched = true;
        }
    }
    return true;
}

// Reads `need` bytes from `at` on; `to` has room for whole pages.  Leaves nothing in the page cache, unless asked to.
void k3_file_read(k3_file* files, int32_t file, int64_t at, int64_t need, char* to, k3_fault* fault, k3_failure* failure) {
    k3_file* f = files + file;
    int64_t got = 0;
    int error = 0;
    int fd = __atomic_load_n(&f->direct, __ATOMIC_RELAXED);
    const bool aligned = fd >= 0 && at % K3_PAGE == 0;
    if (!aligned) fd = f->fd;
    if (__atomic_load_n(&fault->after, __ATOMIC_RELAXED) >= 0 && __atomic_fetch_sub(&fault->after, 1, __ATOMIC_RELAXED) == 0) {
        error = fault->error;
        got = need / 2;
    } else {
        while (got < need) {
            const int64_t want = fd == f->fd ? need - got : up(need - got, K3_PAGE);
            const ssize_t n = pread(fd, to + got, (size_t)want, (off_t)(at + got));
            if (n > 0) {
                got += n;
                if (fd != f->fd && got % K3_PAGE) fd = f->fd;         // the rest is not aligned any more
            } else if (n == 0) {
                break;
            } else if (errno == EINVAL && fd != f->fd) {               // this file system has no direct reads after all
                __atomic_store_n(&f->direct, -1, __ATOMIC_RELAXED);
                fd = f->fd;
            } else if (errno != EINTR) {
                error = errno;
                break;
            }
        }
        if (fd == f->fd && !f->cached) posix_fadvise(f->fd, (off_t)at, (off_t)need, POSIX_FADV_DONTNEED);
    }
    __atomic_fetch_add(&fault->total, got < need ? got : need, __ATOMIC_RELAXED);
    if (error || got < need) {
        const k3_failure found = {error ? K3_READ : K3_SHORT, error, file, 0, at, need, got};
        *failure = found;
    }
}

int64_t k3_lay_out_block(const k3_file* files, int64_t n_files, const k3_block* b, char* to, k3_load* load) {
    // Apart, even where they are neighbours: the second begins where the first one's room ends.
    int64_t room = 0;
    int parts = 0;
    for (int i = 0; i < 2 && b->matrix[i]; ++i, ++parts) {
        const k3_matrix* m = b->matrix[i];
        Stretch one = {(const char*)m->data + b->first * m->pitch, b->rows * m->pitch};
        k3_load part;
        const int64_t more = lay_out(files, n_files, &one, 1, to + room, &part);
        if (load) load->part[parts] = part.part[0];
        room += more;
    }
    if (load) begin(load, parts);
    return room;
}

int64_t k3_lay_out_expert(const k3_file* files, int64_t n_files, const k3_moe* moe, int64_t e, char* to, k3_load* load) {
    Stretch s[K3_PARTS];
    int n = 0;
    const k3_matrix* w[3] = {moe->w1 + e, moe->w2 + e, moe->w3 + e};
    for (const k3_matrix* m : w) {
        s[n].from = (const char*)m->data;
        s[n++].bytes = matrix_bytes(m);
        if (m->scale) {
            s[n].from = (const char*)m->scale;
            s[n++].bytes = m->rows * (m->cols / 32);
        }
    }
    return lay_out(files, n_files, s, n, to, load);
}

int64_t k3_load_bytes(const k3_load* load) {
    int64_t n = 0;
    for (int i = 0; i < load->parts; ++i) n += load->part[i].need;
    return n;
}

// Where a load has what the mapping has at `p`.
const char* k3_load_place(const k3_file* files, int64_t n_files, const k3_load* load, const void* p) {
    const int32_t file = k3_file_of(files, n_files, p);
    const int64_t at = (const char*)p - files[file].start;
    for (int i = 0; i < load->parts; ++i) {
        if (load->part[i].file == file && at >= load->part[i].at && at < load->part[i].at + load->part[i].need)
            return load->part[i].to + (at - load->part[i].at);
    }
    return nullptr;
}

int64_t k3_block_room(const k3_file* files, int64_t n_files, const k3_block* block) {
    return k3_lay_out_block(files, n_files, block, nullptr, nullptr);
}

int64_t k3_slot_room(const k3_file* files, int64_t n_files, const k3_layer* layers, int64_t n_layers, int64_t experts) {
    int64_t room = 0;
    for (int64_t i = 0; i < n_layers; ++i) {
        for (int64_t e = 0; layers[i].is_moe && e < experts; ++e) {
            const int64_t one = k3_lay_out_expert(files, n_files, &layers[i].moe, e, nullptr, nullptr);
            room = one > room ? one : room;
        }
    }
    return room;
}
