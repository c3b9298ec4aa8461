// SPDX-License-Identifier: MIT
//
// What the CPU ops share: the buffers of one pass in flight, the way work is cut into pieces, and the
// declarations of the ops themselves (one .cpp each, built once per instruction set).

#ifndef K3_HOST_H
#define K3_HOST_H

#include "../ops.h"
#include "pool.h"

// The ctx of the CPU's op table.  One per pass in flight, so that sessions run side by side.
typedef struct k3_cpu {
    int32_t threads;
    int32_t inputs;          // of this pass: 0 as they are, or what k3_cpu_rounded says
    float* x;                // prepared inputs: [rows, cols rounded up to 32] of up to two inputs
    int64_t x_floats;
    float* work;             // hidden rows of the experts; partial results of attention
    int64_t work_floats;
    int64_t* list;           // rows grouped by expert
    int64_t list_items;
} k3_cpu;

#ifdef __cplusplus
extern "C" {
#endif
// Buffer sizes for passes of up to `rows` rows.
void k3_cpu_sizes(const k3_dims* dims, int64_t rows, int64_t* x_floats, int64_t* work_floats, int64_t* list_items);
// Fills the table for an instruction set: 0 portable, 1 AVX2, 2 AVX-512.  Returns 0 where it is not built in.
int k3_cpu_ops(int isa, k3_ops* table);
// The best instruction set that this processor has and this build carries.
int k3_cpu_best_isa(void);
// How passes that are told to round what BF16 and MXFP4 matrices multiply (Inputs in dot.h): 1 to BF16 numbers as float32; where
// this processor multiplies BF16 numbers, 2 with its vectors, 3 with its matrix unit.
int k3_cpu_rounded(int isa);
// Rounding to nearest and subnormals kept, whatever another library has set in this thread; leave restores it.
unsigned int k3_float_mode_enter(void);
void k3_float_mode_leave(unsigned int before);
// Reads a range of memory with up to `threads` threads, for a measurement of bandwidth.
uint64_t k3_probe_read(int threads, const void* start, int64_t bytes);
#ifdef __cplusplus
}
#endif

// The positions of a piece of attention depend on the row's own position alone: blocks of 64 positions,
// in at most 64 pieces.
enum { K3_BLOCK = 64, K3_MAX_PIECES = 64 };

#ifdef K3_NS
#include "simd.h"

namespace K3_NS {

K3_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
K3_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
K3_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Bytes of work worth handing to another thread: some 5 microseconds of streaming.
enum { K3_PIECE_BYTES = 128 * 1024 };

// Rows of a matrix in one piece: a multiple of 4 (8 rows at least), so that a piece is a whole number of tiles.
K3_INLINE int64_t rows_per_piece(int64_t row_bytes, int64_t uses) {
    const int64_t n = K3_PIECE_BYTES / max64(1, row_bytes * uses);
    return max64(8, n / 8 * 8);
}

K3_INLINE void each(const k3_cpu* cpu, int64_t pieces, k3_task task, void* arg) { k3_pool_run(cpu->threads, pieces, task, arg); }

int embed(void*, const k3_dims*, const k3_matrix*, const int32_t*, const float*, float*, int64_t);
int attn_res(void*, const k3_dims*, const float*, int64_t, int64_t, const float*, const float*, const float*, const int32_t*,
             float*, float*, float*, float*, int64_t);
int linear(void*, const k3_linear_job*, int64_t, int64_t);
int gate_up(void*, const k3_dims*, const k3_matrix*, const k3_matrix*, const float*, float*, int64_t);
int rms_norm(void*, const float*, int64_t, const float*, float, float*, int64_t, int64_t, int64_t);
int kda_conv(void*, const k3_dims*, const k3_kda*, const k3_pass*, int64_t, const float*, const float*, const float*, float*,
             float*, float*);
int kda_gates(void*, const k3_dims*, const k3_kda*, float*, float*, int64_t);
int kda_recurrence(void*, const k3_dims*, const k3_pass*, int64_t, const float*, const float*, const float*, const float*,
                   const float*, float*);
int kda_output(void*, const k3_dims*, const k3_kda*, float*, const float*, int64_t);
int mla_rope(void*, const k3_dims*, const k3_pass*, const double*, float*, float*);
int mla_append(void*, const k3_dims*, const k3_mla*, const k3_pass*, int64_t, const float*);
int mla_absorb(void*, const k3_dims*, const k3_mla*, const float*, float*, int64_t);
int mla_attend(void*, const k3_dims*, const k3_pass*, int64_t, const float*, float*);
int mla_unabsorb(void*, const k3_dims*, const k3_mla*, const float*, const float*, float*, int64_t);
int route(void*, const k3_dims*, const float*, const float*, int32_t*, float*, int64_t);
int experts(void*, const k3_dims*, const k3_moe*, const k3_pass*, const float*, const int32_t*, const float*, float*, int64_t,
            int64_t);
int residual(void*, const k3_pass*, float*, const float*, const float*, int32_t, int32_t, int64_t);
int finite(void*, const k3_pass*, const float*, const int32_t*, int32_t, int64_t, int64_t);
int read(void*, void*, const void*, int64_t);
int write(void*, void*, const void*, int64_t);
int submit(void*);

}  // namespace K3_NS
#endif
#endif
