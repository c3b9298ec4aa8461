// SPDX-License-Identifier: MIT
//
// Sums over one vector in the 16-lane order, and the RMS norm made of them.

#ifndef K3_NORM_H
#define K3_NORM_H

#include "host.h"

namespace K3_NS {

// sum of x[i] * y[i]: lane l takes i = l, l + 16, ...
K3_INLINE float dot_plain(const float* x, const float* y, int64_t n) {
    vf acc = vf(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) acc = m_fma(v_load(x + i), v_load(y + i), acc);
    if (i < n) acc = m_fma(v_load_n(x + i, n - i), v_load_n(y + i, n - i), acc);
    return v_sum(acc);
}

// y = (x / sqrt(mean(x^2) + eps)) * w; x and y may be the same.
K3_INLINE void rms_row(const float* x, const float* w, float eps, float* y, int64_t n) {
    const float inv = 1.0f / m_sqrt(dot_plain(x, x, n) / (float)n + eps);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v_store(y + i, (v_load(x + i) * vf(inv)) * v_load(w + i));
    if (i < n) v_store_n(y + i, (v_load_n(x + i, n - i) * vf(inv)) * v_load_n(w + i, n - i), n - i);
}

}  // namespace K3_NS
#endif
