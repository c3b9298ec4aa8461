// SPDX-License-Identifier: MIT
//
// What the MLA kernels share: where a latent row lies, and how kv_b_proj is read.  A page covers page_rows positions
// of all MLA layers, layer by layer, rows of latent_stride elements: [c (kv_lora) | k_r (rope) | zeros].

#ifndef K3_LATENT_CUH
#define K3_LATENT_CUH

#include "k3_row.cuh"
#include "ops.h"

// The position of a row of the pass in its session.
K3_DEVICE int64_t latent_position(const k3_segment* seg, int64_t row) { return seg->position + row - seg->row; }

// Positions and the rows of a page stay below 2^32, where a division is cheap; the offset does not.
K3_DEVICE char* latent_row(const k3_segment* seg, int64_t layer, int stride, int64_t position) {
    const uint32_t at = (uint32_t)position, page_rows = (uint32_t)seg->page_rows;
    const int64_t row = layer * page_rows + at % page_rows, size = seg->latent_dtype == K3_BF16 ? 2 : 4;
    return reinterpret_cast<char*>(seg->pages[at / page_rows]) + row * stride * size;
}

// Eight weights of a row from column c, a multiple of 8, as they lie there; zeros from column `cols` on.
template <bool BF16> K3_DEVICE void kv_b_load(uint4* raw /*[2]*/, const char* row, int c, int cols) {
    raw[0] = raw[1] = make_uint4(0, 0, 0, 0);
    if (c < cols) raw[0] = k3_stream16(row + c * (BF16 ? 2 : 4));
    if (!BF16 && c + 4 < cols) raw[1] = k3_stream16(row + c * 4 + 16);
}
template <bool BF16> K3_DEVICE void kv_b_widen(const uint4* raw /*[2]*/, float* w /*[8]*/) {
    const uint32_t a[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
    for (int e = 0; e < 8; ++e) w[e] = !BF16 ? m_bits(a[e]) : (e & 1) ? bf16_high(a[e / 2]) : bf16_low(a[e / 2]);
}

#endif
