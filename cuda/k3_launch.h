// SPDX-License-Identifier: MIT
//
// The host half of the CUDA ops: what the functions that launch kernels share.  Every .cu file has its kernels first
// and, where K3_LAUNCH is defined, the function of the op table that launches them; cuda/launch.cpp collects these.
//
// A launch is recorded once into a graph and replayed with other tokens and positions, so what it passes depends on
// the shapes alone; everything else is read by the kernel from device memory.

#ifndef K3_LAUNCH_H
#define K3_LAUNCH_H

#include <stddef.h>

#include "ops.h"

// The ctx of the device's op table.  One per pass in flight.
typedef struct k3_cuda {
    int (*launch)(struct k3_cuda*, int kernel, unsigned x, unsigned y, unsigned z, unsigned threads, size_t shared, void** args);
    int32_t replaying;               // the launches of this pass are in a graph already
    int32_t split_activations;       // prefill on tensor cores, activations as two BF16 parts
    char* work;                      // device memory for what an op keeps between its kernels
    int64_t work_bytes;
    void* streaming;                 // what brings weights to the device while a pass runs (host/gpu_stream.h), or NULL
} k3_cuda;

enum { K3_UNSUPPORTED = 801 };       // what a launch function returns for shapes that its kernel does not take

#ifdef __cplusplus

extern "C" {
// Fills the table with the launch functions.
void k3_cuda_ops(k3_ops* table);
// Bytes of device memory that ops work in, for passes of up to `rows` rows.
int64_t k3_cuda_work_bytes(const k3_dims* dims, int64_t rows);
// For each row of logits the k largest with their ids, the largest first and of equals the lowest id, and log sum exp.
int k3_cuda_top_k(k3_cuda*, const float* logits, int64_t rows, int64_t n, int64_t k, int32_t* ids, float* values, float* log_sum);
// The kernels that the launch functions use, by number: the name, and NULL past the last one.
const char* k3_cuda_kernel(int number);
}

#ifdef K3_LAUNCH

struct k3_grid {
    unsigned x, y, z;
};
static inline k3_grid grid(int64_t x, int64_t y = 1, int64_t z = 1) {
    const k3_grid g = {(unsigned)x, (unsigned)y, (unsigned)z};
    return g;
}
static inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

enum { K3_MAX_KERNELS = 128 };
extern const char* k3_kernel_names[K3_MAX_KERNELS];
extern int k3_kernel_count;

// A kernel by its name, with the types of its parameters.
template <class... A> struct k3_kernel {
    int number;
    explicit k3_kernel(const char* name) : number(k3_kernel_count) { k3_kernel_names[k3_kernel_count++] = name; }
    int operator()(k3_cuda* c, k3_grid g, unsigned threads, size_t shared, A... a) const {
        if (c->replaying || g.x == 0 || g.y == 0 || g.z == 0) return 0;
        void* args[] = {(void*)&a...};
        return c->launch(c, number, g.x, g.y, g.z, threads, shared, args);
    }
};
#define K3_KERNEL(name, ...) static const k3_kernel<__VA_ARGS__> name(#name);

#endif
#endif
#endif
