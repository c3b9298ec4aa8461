// SPDX-License-Identifier: MIT
//
// Where a latent row lies.  A page covers page_rows positions of all MLA layers, layer by layer, rows of
// latent_stride elements: [c (kv_lora) | k_r (rope) | zeros].

#ifndef K3_LATENT_H
#define K3_LATENT_H

#include "host.h"

namespace K3_NS {

K3_INLINE char* latent_row(const k3_dims* dims, const k3_pass* pass, const k3_segment* seg, int64_t layer, int64_t position) {
    const int64_t size = pass->latent_dtype == K3_BF16 ? 2 : 4;
    const int64_t row = layer * pass->page_rows + position % pass->page_rows;
    return (char*)seg->pages[position / pass->page_rows] + row * dims->latent_stride * size;
}

K3_INLINE const k3_segment* segment_of(const k3_pass* pass, int64_t row) {
    int64_t a = 0, b = pass->n_segments - 1;              // segments ascend by row
    while (a < b) {
        const int64_t m = (a + b + 1) / 2;
        if (pass->segments[m].row <= row) a = m;
        else b = m - 1;
    }
    return pass->segments + a;
}

}  // namespace K3_NS
#endif
