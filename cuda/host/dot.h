// SPDX-License-Identifier: MIT
//
// The dot products behind every weight matrix (dot.cpp), and how inputs are prepared for them.
//
// The inputs are prepared once per dispatch: split into even and odd columns where the weights are, the two vectors of each 32
// columns lying together (v_store_pair), and padded with zeros to a multiple of 32, so that only the weights need care at the
// end of a row.

#ifndef K3_DOT_H
#define K3_DOT_H

#include "columns.h"

namespace K3_NS {

K3_INLINE int64_t padded(int64_t cols) { return round_up(cols, 32); }

// Bytes of one row of a matrix, scales included.
K3_INLINE int64_t row_bytes(const k3_matrix* w) {
    return w->pitch + (w->dtype == K3_MXFP4 ? w->cols / 32 : w->dtype == K3_Q8 ? w->pitch / 32 * 2 : 0);
}

// What inputs become, beside their order: nothing else; rounded to BF16; or, for a processor that multiplies such numbers, packed
// as BF16 in the order of the columns, or in blocks of 16 rows for the matrix unit (dot_amx.cpp).  All but the first are for
// weights that are BF16 numbers and prefill_precision="bf16".
enum Inputs { INPUTS_EXACT = 0, INPUTS_ROUNDED = 1, INPUTS_PACKED = 2, INPUTS_BLOCKS = 3 };
enum { BLOCK = 16, BLOCK_FLOATS = BLOCK * 16 };              // rows of a block; floats for each 32 columns of it
K3_INLINE Inputs inputs_of(const k3_cpu* cpu, const k3_matrix* w) {
    const bool bf16 = w->dtype == K3_BF16 || w->dtype == K3_COMPACT || w->dtype == K3_MXFP4;
    return bf16 && !w->exact ? (Inputs)cpu->inputs : INPUTS_EXACT;
}
// Floats from one row of prepared inputs to the next.  A block has the address of its first row, which is a multiple of 16.
K3_INLINE int64_t input_pitch(int64_t cols, Inputs how) { return how >= INPUTS_PACKED ? padded(cols) / 2 : padded(cols); }
// Floats that `rows` prepared rows take.
K3_INLINE int64_t input_floats(int64_t rows, int64_t cols, Inputs how) {
    return (how == INPUTS_BLOCKS ? round_up(rows, BLOCK) : rows) * input_pitch(cols, how);
}

// 32 inputs (n of them real) in the order in which weights of this dtype meet them.  Not for blocks.
K3_INLINE void prepare_32(const float* x, int64_t n, int32_t dtype, float* out, Inputs how) {
    float t[32] = {0};
    if (n < 32 || how != INPUTS_EXACT) {
        memcpy(t, x, (size_t)n * 4);
        x = t;
    }
    if (how == INPUTS_PACKED) {
        uint16_t* packed = (uint16_t*)out;
        for (int c = 0; c < 32; ++c) packed[c] = f32_to_bf16(t[c]);
        return;
    }
    if (how == INPUTS_ROUNDED)
        for (int c = 0; c < 32; ++c) t[c] = bf16_to_f32(f32_to_bf16(t[c]));
    vf a, b;
    if (is_split(dtype)) {
        v_load_split(x, a, b);
    } else {
        a = v_load(x);
        b = v_load(x + 16);
    }
    v_store_pair(out, a, b);
}

K3_INLINE void prepare_row(const float* x, int64_t cols, int32_t dtype, float* out, Inputs how) {
    for (int64_t c = 0; c < cols; c += 32)
        prepare_32(x + c, min64(32, cols - c), dtype, out + (how == INPUTS_PACKED ? c / 2 : c), how);
}

// A block of up to 16 rows, zero in those that are not there.
void prepare_block(const float* const* x, int64_t rows, int64_t cols, float* out);

// Rows that are ldx apart: out holds input_floats(rows, cols, how).
K3_INLINE void prepare_rows(const float* x, int64_t ldx, int64_t rows, int64_t cols, int32_t dtype, float* out, Inputs how) {
    const int64_t pitch = input_pitch(cols, how);
    if (how != INPUTS_BLOCKS) {
        for (int64_t m = 0; m < rows; ++m) prepare_row(x + m * ldx, cols, dtype, out + m * pitch, how);
        return;
    }
    for (int64_t m = 0; m < rows; m += BLOCK) {
        const float* row[BLOCK];
        for (int64_t i = 0; i < min64(BLOCK, rows - m); ++i) row[i] = x + (m + i) * ldx;
        prepare_block(row, min64(BLOCK, rows - m), cols, out + m * pitch);
    }
}

// Asks memory for what a multiplication from this row on would wait for: nothing yet tells the processor of it.
K3_INLINE void ask_for(const k3_matrix* w, int64_t row) {
    const char* data = (const char*)w->data + row * w->pitch;
    for (int64_t i = 0; i < 2048; i += 64) __builtin_prefetch(data + i);
    if (w->dtype == K3_MXFP4) {
        const char* scale = (const char*)w->scale + row * (w->cols / 32);
        __builtin_prefetch(scale);
        __builtin_prefetch(scale + 64);
    }
}

// y[m][0 .. r1 - r0) = rows r0 .. r1 of the weights times the prepared inputs x[m], for up to any number of rows.
void multiply(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows);
// The same for packed inputs, and for blocks of them, on the instruction set for which k3_cpu_rounded says so.
void multiply_packed(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows);
void multiply_blocks(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows);
K3_INLINE void multiply(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows,
                        Inputs how) {
    if (how == INPUTS_BLOCKS) multiply_blocks(w, r0, r1, x, y, rows);
    else if (how == INPUTS_PACKED) multiply_packed(w, r0, r1, x, y, rows);
    else multiply(w, r0, r1, x, y, rows);
}

}  // namespace K3_NS
#endif
