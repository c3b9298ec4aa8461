// SPDX-License-Identifier: MIT
//
// Weights that are read from the checkpoint's files while a pass runs, into memory of a fixed size.
//
// Three kinds of matrices.  Blocks of the trunk (some rows of one matrix, or the same rows of a gate and an up matrix)
// are asked for in the same order in every pass, so they are read ahead, in that order, into a ring; some of them stay
// in memory for good.  Experts are read when the router has chosen them, before what is read ahead, into slots that are
// a cache.  Rows of the embedding are read one by one.
//
// The tables (k3_matrix) go on naming the mapping of each file, which is never touched: an address there says which
// bytes of which file are meant.

#ifndef K3_STREAM_H
#define K3_STREAM_H

#include <pthread.h>

#include "host.h"

enum {
    K3_PAGE = 4096,          // what direct reads are aligned to
    K3_PARTS = 6,            // stretches of a file in one load: packed weights and scales of three matrices
    K3_AHEAD = 512,          // blocks in the ring at most
    K3_DISK_THREADS = 16,
};

typedef struct k3_file {     // one file of the checkpoint
    const char* start;       // its mapping
    int64_t size;
    int fd;                  // for reads through the page cache
    int direct;              // opened with O_DIRECT, or -1
    int cached, _pad;        // whether what is read through the page cache stays there
    int64_t device, inode, modified, changed;    // as they were when it was opened; times in ns
} k3_file;

enum { K3_OK = 0, K3_READ = 1, K3_SHORT = 2, K3_CHANGED = 3, K3_ORDER = 4 };

typedef struct k3_failure {  // the first thing that went wrong in a pass
    int32_t kind;            // one of the above
    int32_t error;           // errno of a read
    int32_t file;
    int32_t _pad;
    int64_t at;              // K3_READ, K3_SHORT: the byte of the file from which on it was read
    int64_t expected, found; // bytes, or the size of the file
} k3_failure;

typedef struct k3_load {     // one thing to read, cut into chunks that several threads read at a time
    struct {
        int32_t file;
        int64_t at;          // from this byte on, a multiple of K3_PAGE
        int64_t need;        // bytes from there that must arrive
        char* to;
    } part[K3_PARTS];
    int32_t parts;
    int32_t part_at;         // the part from which the next chunk is cut, and how far it is cut
    int64_t cut;
    int32_t flying;          // chunks that are being read
    int32_t _pad;
    k3_failure failure;
    struct k3_load* next;    // in the queue of what is urgent
} k3_load;

typedef struct k3_block {    // rows first .. first + rows of a matrix, or of two of the same shape
    const k3_matrix* matrix[2];
    int64_t first, rows;
    int64_t room;            // bytes of memory that it takes
    char* stays;             // where it stays for good, or NULL: it goes through the ring
} k3_block;

typedef struct k3_slot {     // room for one expert
    char* at;
    k3_load load;
} k3_slot;

typedef struct k3_stream k3_stream;

typedef struct k3_stream_setup {
    const k3_layer* layers;
    int64_t n_layers, experts;       // experts of a layer
    k3_file* files;                  // handed over with their descriptors
    int64_t n_files;
    k3_block* blocks;                // handed over; in the order of the graph; `stays` is set here
    int64_t n_blocks;
    const uint8_t* resident;         // [n_blocks] which blocks stay
    int64_t head;                    // the first block of lm_head, which is not part of every pass
    int64_t ring_bytes, n_slots;
    int64_t chunk_bytes;             // of one read
    int64_t threads;                 // that read
    double half_life;                // passes after which a use of an expert counts half
    char *stays, *ring, *slot_memory;    // the caller's memory for all three, aligned to K3_PAGE, or NULL: its own
} k3_stream_setup;

typedef struct k3_step {     // what the graph asks for: a matrix, or two that are used row by row together
    const k3_matrix* matrix[2];
    int32_t whole;           // used by columns or in two ops, so never in blocks of rows
    int32_t _pad;
} k3_step;

typedef struct k3_order {    // ctx of a table that only notes it
    k3_step* steps;
    int64_t n, room;
    int32_t silent;          // of a device: its matrices are no concern of the host
    int32_t _pad;
} k3_order;

// The ctx of the streaming op table.  One per pass in flight.
typedef struct k3_streaming {
    k3_cpu cpu;              // first, so that ops which take no matrix find their ctx here
    k3_ops inner;
    k3_stream* stream;
    float* hidden;           // [rows, widest block of gate rows]
    char* row;               // one row of the embedding, with a page on each side
    k3_matrix* table;        // [3, E] w1, w2, w3 of the layer at hand, those in use in their slots
    int32_t* active;         // [E]
    int64_t at;              // the block that comes next
    int64_t moe;             // the layer whose router was asked last
    int64_t bytes, wait_ns;  // read from files for these passes, and time that they waited for it
    int64_t uses, misses;    // experts used, and those that were not in a slot
} k3_streaming;

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of memory for a block whose matrices are named by a table, and for the largest expert.
int64_t k3_block_room(const k3_file* files, int64_t n_files, const k3_block* block);
int64_t k3_slot_room(const k3_file* files, int64_t n_files, const k3_layer* layers, int64_t n_layers, int64_t experts);

// NULL where there is no memory; then nothing was handed over.
k3_stream* k3_stream_open(const k3_stream_setup* setup);
void k3_stream_close(k3_stream* s);
int64_t k3_stream_resident(const k3_stream* s);                      // bytes of blocks that stay
int k3_stream_load(k3_stream* s, int64_t first, int64_t end);        // reads those of blocks first .. end that stay
k3_failure k3_stream_failure(k3_stream* s);

// One pass at a time.  Waits at most some 50 ms; whether it is this caller's turn now.
int k3_stream_enter(k3_stream* s);
// Begins a pass that has its turn, with or without lm_head; nonzero where a file is not what it was.
int k3_stream_begin(k3_stream* s, int with_head);
// Ends it; what was read ahead is forgotten unless it came to its end.  Nonzero where a file is not what it was.
int k3_stream_end(k3_stream* s, int complete);

// The memory of a block, when it has arrived; NULL where it did not.  Blocks of the ring come one after the other.
char* k3_stream_take(k3_stream* s, int64_t block, int64_t* bytes, int64_t* wait_ns);
void k3_stream_give(k3_stream* s, int64_t block);                    // the memory is not needed any more
// The same for a caller that has several blocks of the ring at a time: each call the next one, which is its own until
// given back, in order.  Where it has not arrived, NULL after a wait means a failure, and without one nothing.
char* k3_stream_lend(k3_stream* s, int64_t block, int wait, int64_t* bytes, int64_t* wait_ns);
k3_matrix k3_stream_view(k3_stream* s, int64_t block, int which, char* base);   // the rows of a block as a matrix
int k3_stream_row(k3_stream* s, const k3_matrix* table, int64_t row, char* buffer, const char** out, int64_t* bytes);

// Experts of one layer: those that have no slot get one and are read.  Returns how many were missing.
int64_t k3_stream_ask(k3_stream* s, int64_t layer, const int32_t* ids, int64_t n, int64_t* bytes);
int k3_stream_await(k3_stream* s, int64_t layer, const int32_t* ids, int64_t n, k3_matrix* table, int64_t* wait_ns);
void k3_stream_unpin(k3_stream* s, int64_t layer, const int32_t* ids, int64_t n);
void k3_stream_unpin_all(k3_stream* s);
int64_t k3_stream_slots(const k3_stream* s);
void k3_stream_order(k3_stream* s);                                  // notes that the graph asked for another block

// For tests of failures: the read after `after` more ones fails with this errno, or is short where it is 0.
void k3_stream_fail_after(k3_stream* s, int64_t after, int error);
int64_t k3_stream_total(k3_stream* s);                               // bytes read since it was opened

const k3_block* k3_stream_blocks(const k3_stream* s, int64_t* n, int64_t* head);
const k3_layer* k3_stream_layers(const k3_stream* s, int64_t* n);

// Puts the streaming ops in place of those that take matrices; `x->inner` holds the ops of an instruction set.
void k3_streaming_table(k3_streaming* x, k3_ops* table);
void k3_order_table(k3_order* order, k3_ops* table);

#ifdef __cplusplus
}
#endif
#endif
