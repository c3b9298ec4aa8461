// SPDX-License-Identifier: MIT
//
// Where a latent row lies.  A page covers page_rows positions of all MLA layers, layer by layer, rows of
// latent_stride elements: [c (kv_lora) | k_r (rope) | zeros].

#ifndef K3_LATENT_H
#define K3_LATENT_H

#include "host.h"

namespace K3_NS {

K3_INLINE char* latent_row(const k3_dims* dims, const k3_segment* seg, int64_t layer, int64_t position) {
    const int64_t size = seg->latent_dtype == K3_BF16 ? 2 : 4;
    const int64_t row = layer * seg->page_rows + position % seg->page_rows;
    return (char*)seg->pages[position / seg->page_rows] + row * dims->latent_stride * size;
}

// The segment of a row, or NULL for one that only fills the pass.
K3_INLINE const k3_segment* segment_of(const k3_pass* pass, int64_t row) {
    return pass->owner[row] < 0 ? nullptr : pass->segments + pass->owner[row];
}

}  // namespace K3_NS
#endif
