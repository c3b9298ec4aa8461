// SPDX-License-Identifier: MIT
//
// Weights that go to a GPU while a pass runs, into memory of a fixed size there.
//
// What stream.h reads is the first half of the way: its ring and its slots are pinned memory, from which a stream of
// copies takes blocks and experts to the device.  There it is the same again: blocks of the trunk that stay, a ring for
// the others, slots that are a cache of experts.
//
// Nothing is waited for but what the host has to know: the experts that the router has chosen.  Copies wait on the device
// for the launch that used their place last, launches wait there for the copies of what they use.  So the host is ahead
// of the device by as much as the ring holds.
//
// The tables of the layers name the mapping of each file here too: an address there says which weights are meant.

#ifndef K3_GPU_STREAM_H
#define K3_GPU_STREAM_H

#include "driver.h"
#include "expert_cache.h"
#include "k3_launch.h"
#include "stream.h"

enum {
    K3_GROUP = 32,               // experts that are used while the next ones are brought
    K3_GPU_ALIGNMENT = 256,      // of every matrix on the device
};

typedef struct k3_gpu_block {    // a block as in stream.h
    const k3_matrix* matrix[2];
    int64_t first, rows;
    k3_address at;               // where it stays on the device, or 0: it goes through the ring
    int64_t number;              // among those of the ring: the reader's number of it
} k3_gpu_block;

typedef struct k3_gpu_stream {   // of one model
    k3_gpu* gpu;
    void* copies;                // the stream of copies
    k3_stream* host;
    const k3_layer *layers, *host_layers;     // [n_layers] the device's, whose addresses the ops are called with
    int64_t n_layers, experts;
    k3_gpu_block* blocks;        // [n_blocks] in the order of the graph
    int64_t n_blocks, head;      // the first block of lm_head, which is not part of every pass
    k3_address ring;
    int64_t ring_room, n_ring;   // places of equal size
    void **copied, **used;       // [n_ring] events: a place has been filled, and the launches over it are over
    k3_address slots;
    int64_t slot_room;
    k3_cache cache;
    int64_t* launched;           // [slots] the launch that used it last, or 0
    int64_t launches, pass;
    void *experts_copied[2], *experts_used[2];                 // events of a launch, in turns
} k3_gpu_stream;

// One per pass in flight; k3_cuda.streaming, where ops find it.
typedef struct k3_gpu_streaming {
    k3_gpu_stream* stream;
    k3_ops inner;                // the ops over weights that are there
    void* launches;              // the stream of launches
    const char *mail_host, *mail_here;
    int32_t* ids;                // pinned: [rows, T] what the router chose
    void* arrived;               // event: they are there
    const int32_t* routed;       // of which ids on the device that is
    k3_matrix* table;            // pinned: [3, E] the experts of a layer, as far as they are there
    k3_address table_here;
    k3_matrix* found;            // [3, E] where the reader has them
    int32_t* active;             // [E]
    char* rows;                  // pinned: rows of the embedding and, behind `rows_room` bytes, which one each token has
    int64_t rows_room;
    k3_address rows_here;
    char* row;                   // one row of the embedding, with a page on each side
    float* hidden;               // device: [rows, widest block of gate rows]
    int64_t at;                  // the block that the graph asks for next
    int64_t to_bring;            // the first block that is not on its way yet
    int64_t brought, given, done;                              // blocks of the ring: copied, given back to the reader, used
    int32_t settled[K3_GROUP];   // experts whose copies the reader has to keep until then, of which layer and launch
    int64_t n_settled, settled_layer, settled_launch;
    int64_t bytes, wait_ns;      // as in k3_streaming
    int64_t uses, misses;        // experts used, and those that were not in a slot of the device
    int64_t copied;              // bytes that went to the device
    int status;                  // of the first call of the driver that failed, and which one
    const char* what;
} k3_gpu_streaming;

#ifdef __cplusplus
extern "C" {
#endif

void k3_gpu_stream_use(k3_driver* table);

// Bytes of device memory for a block, and for the largest expert.
int64_t k3_gpu_block_room(const k3_matrix* one, const k3_matrix* other, int64_t rows);
int64_t k3_gpu_slot_room(const k3_layer* layers, int64_t n_layers, int64_t experts);

void k3_gpu_streaming_table(k3_gpu_streaming* x, k3_ops* table);
// Around a pass that has its turn (k3_stream_enter): the reader's begin and end, and that of the copies.
int k3_gpu_stream_begin(k3_gpu_streaming* x, int with_head);
int k3_gpu_stream_end(k3_gpu_streaming* x, int complete);

#ifdef __cplusplus
}
#endif
#endif
