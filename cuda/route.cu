// SPDX-License-Identifier: MIT
//
// The router.  Scores are sigmoid(logits) in float32; the bias takes part in the choice only.  Among equals the lowest
// id wins.  A NaN anywhere in a row's scores makes its weights NaN, so that it is seen at the next residual instead of
// choosing some expert in silence; the ids stay valid and distinct.
//
// A block per row, a thread per expert.  Every expert has a key of its own, by score and then by id, and the T-th largest
// key is found bit by bit from above, ending as soon as exactly T keys reach the bound.  The chosen find their place by
// counting the chosen with lower ids; the weights are added in that order.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_prim.cuh"
#endif

enum { ROUTE_EXPERTS = 1024 };        // the most that there may be

#ifndef K3_LAUNCH

// Ascends with the score, and descends with the id among equal scores; a NaN is below every number.  At least 1.
K3_DEVICE uint64_t route_key(float score, int id) {
    const uint32_t u = m_word(score), order = (u & 0x80000000u) ? ~u : u | 0x80000000u;
    return ((uint64_t)(score == score ? order : 0u) << 10 | (uint64_t)(ROUTE_EXPERTS - 1 - id)) + 1;
}

extern "C" __global__ void __launch_bounds__(ROUTE_EXPERTS)
    k3_route(const float* logits /*[R, E]*/, const float* bias /*[E]*/, int32_t* ids /*[R, T]*/, float* weights /*[R, T]*/,
             int experts, int chosen, int renormalize, float factor) {
    static __shared__ int counts[K3_WARP];
    static __shared__ float scores[ROUTE_EXPERTS];
    const int id = (int)threadIdx.x, warp = (int)k3_warp();
    const int64_t row = blockIdx.x;
    float score = 0.0f;
    uint64_t key = 0;
    bool nan = false;
    if (id < experts) {
        score = k3_sigmoid(logits[row * experts + id]);
        const float biased = score + bias[id];
        key = route_key(biased, id);
        nan = biased != biased;
    }
    nan = __syncthreads_or(nan);

    uint64_t bound = 0;
    for (int bit = 42; bit >= 0; --bit) {
        const uint64_t next = bound | (uint64_t)1 << bit;
        const int reached = __syncthreads_count(key >= next);
        if (reached >= chosen) bound = next;
        if (reached == chosen) break;
    }

    const bool taken = key >= bound;
    const unsigned votes = __ballot_sync(K3_ALL_LANES, taken);
    if (k3_lane() == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int place = __popc(votes & ((1u << k3_lane()) - 1));
    for (int w = 0; w < warp; ++w) place += counts[w];
    if (taken) scores[place] = score;
    __syncthreads();
    if (!taken) return;
    float total = 0.0f;
    for (int i = 0; i < chosen; ++i) total += scores[i];
    float weight = renormalize ? score / (total + 1e-20f) : score;
    weight = nan ? m_bits(0x7fc00000u) : weight * factor;
    ids[row * chosen + place] = id;
    weights[row * chosen + place] = weight;
}

#else

K3_KERNEL(k3_route, const float*, const float*, int32_t*, float*, int, int, int, float)

static int cuda_route(void* ctx, const k3_dims* dims, const float* logits, const float* bias, int32_t* ids, float* weights,
                      int64_t rows) {
    const int E = (int)dims->num_experts, T = (int)dims->num_experts_per_token;
    if (E > ROUTE_EXPERTS) return K3_UNSUPPORTED;
    return k3_route((k3_cuda*)ctx, grid(rows), (unsigned)ceil_div(E, 32) * 32, 0, logits, bias, ids, weights, E, T,
                    dims->moe_renormalize, dims->routed_scaling_factor);
}

#endif
