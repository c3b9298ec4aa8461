// SPDX-License-Identifier: MIT
//
// The dot products of weights that are BF16 numbers with inputs that are BF16 as well: prefill_precision="bf16" on a processor that adds two
// such products at once.  Built for AVX-512 with its BF16 instructions; called where k3_cpu_rounded says that they are there.

#include "dot.h"

#include "strips.h"

namespace K3_NS {

void multiply_packed(const k3_matrix* w, int64_t r0, int64_t r1, const float* const* x, float* const* y, int64_t rows) {
#if defined(K3_ISA_AVX512)
    if (w->dtype == K3_BF16) dot_strips<K3_BF16, true>(w, r0, r1, x, y, rows);
    else if (w->dtype == K3_COMPACT) dot_strips<K3_COMPACT, true>(w, r0, r1, x, y, rows);
    else dot_strips<K3_MXFP4, true>(w, r0, r1, x, y, rows);
#else
    (void)w, (void)r0, (void)r1, (void)x, (void)y, (void)rows;    // INPUTS_PACKED does not occur
#endif
}

}  // namespace K3_NS
