// SPDX-License-Identifier: MIT
//
// The routed experts: u = sum over a row's choices, ascending id, of weight * W2 SiTU(W1 z, W3 z), fused multiply-adds
// from zero.  The dot products have the order of k3_dot.cuh, so that a row's bits do not depend on the other rows.
//
// A slot is one choice of one row.  Four launches:
//   plan     one block: sorts the slots of rows that have an owner by expert, and cuts those of each expert into
//            items of up to NR slots, so that an item reads its weights once.  With one slot per item there is no
//            plan: every slot is an item;
//   hidden   blocks (tiles of the inner width, items): h of each slot;
//   output   blocks (tiles of the latent width, items): y = W2 h of each slot;
//   combine  blocks (chunks of 256 columns, rows): u, zeros for a row without an owner.
// The grid has room for as many items as there can be; blocks of those that do not exist return at once.
//
// Where not all experts are on the device at a time, the op is called for one range of ids after the other.  The first
// three launches then take the slots of that range only, and y is kept in the work memory until the last range, after
// which everything is combined: so the bits are those of one call.

#ifdef K3_LAUNCH
#include "k3_launch.h"
#else
#include "k3_prim.cuh"
#endif
#include "k3_dot.cuh"

enum { EXPERTS_MAX = 1024, EXPERTS_PLAN_THREADS = 256, EXPERTS_PLAN_SLOTS = 4096, EXPERTS_COMBINE_THREADS = 256 };

// The tiles that kernels exist for.
#define EXPERTS_TILES(X) X(4, 1) X(4, 2) X(4, 4) X(4, 8)

struct experts_item {
    int expert, first, n, _pad;                                        // n slots, from place `first` of the order on
};
struct experts_job {
    const k3_matrix *w1, *w2, *w3;                                     // [E] each
    const float* z;                                                    // [rows, latent]
    const int32_t* ids;                                                // [rows, T]
    const int32_t* owner;                                              // [rows]
    const experts_item* items;                                         // NULL without a plan
    const int32_t* order;                                              // [rows * T] slots, sorted by expert
    float* h;                                                          // [rows * T, ldh]
    float* y;                                                          // [rows * T, latent]
    int64_t ldh;
    int latent, T;
    float beta, linear_beta;
    int begin, end;                                                    // the experts of this call
};

#ifndef K3_LAUNCH

// A warp puts the slots in order row by row; the ids of a row differ, so that its lanes meet nowhere.
extern "C" __global__ void __launch_bounds__(EXPERTS_PLAN_THREADS)
    k3_experts_plan(const int32_t* ids, const int32_t* owner, int rows, int E, int T, int NR, experts_item* items, int n_items,
                    int32_t* order, int first, int last) {
    static __shared__ int count[EXPERTS_MAX], place[EXPERTS_MAX], item[EXPERTS_MAX], used;
    static __shared__ uint16_t chosen[EXPERTS_PLAN_SLOTS];
    const int t = (int)threadIdx.x, lane = (int)k3_lane();
    for (int e = t; e < E; e += EXPERTS_PLAN_THREADS) count[e] = 0;
    __syncthreads();
    for (int s = t; s < rows * T; s += EXPERTS_PLAN_THREADS) {
        if (owner[s / T] >= 0 && ids[s] >= first && ids[s] < last) atomicAdd(&count[ids[s]], 1);
    }
    __syncthreads();
    if (k3_warp() == 0) {                                              // each lane a stretch of experts, then over the lanes
        const int stretch = (E + K3_WARP - 1) / K3_WARP, begin = min(E, lane * stretch), end = min(E, begin + stretch);
        int slots = 0, needed = 0;
        for (int e = begin; e < end; ++e) {
            slots += count[e];
            needed += (count[e] + NR - 1) / NR;
        }
        int slots_to = slots, items_to = needed;
        for (int m = 1; m < K3_WARP; m *= 2) {
            const int a = __shfl_up_sync(K3_ALL_LANES, slots_to, m), b = __shfl_up_sync(K3_ALL_LANES, items_to, m);
            if (lane >= m) {
                slots_to += a;
                items_to += b;
            }
        }
        if (lane == K3_WARP - 1) used = items_to;
        slots_to -= slots;
        items_to -= needed;
        for (int e = begin; e < end; ++e) {
            place[e] = slots_to;
            item[e] = items_to;
            slots_to += count[e];
            items_to += (count[e] + NR - 1) / NR;
        }
    }
    __syncthreads();
    for (int e = t; e < E; e += EXPERTS_PLAN_THREADS) {
        for (int k = 0; k < count[e]; k += NR) items[item[e] + k / NR] = {e, place[e] + k, min(NR, count[e] - k), 0};
    }
    for (int i = used + t; i < n_items; i += EXPERTS_PLAN_THREADS) items[i] = {0, 0, 0, 0};
    const int rows_at_once = EXPERTS_PLAN_SLOTS / T;
    for (int base = 0; base < rows; base += rows_at_once) {
        const int n = min(rows_at_once, rows - base);
        __syncthreads();
        for (int s = t; s < n * T; s += EXPERTS_PLAN_THREADS) {
            const int e = ids[base * T + s];
            chosen[s] = (uint16_t)(owner[base + s / T] >= 0 && e >= first && e < last ? e : EXPERTS_MAX);
        }
        __syncthreads();
        if (k3_warp() != 0) continue;
        for (int r = 0; r < n; ++r) {
            for (int s = r * T + lane; s < (r + 1) * T; s += K3_WARP) {
                if (chosen[s] < EXPERTS_MAX) order[atomicAdd(&place[chosen[s]], 1)] = base * T + s;
            }
            __syncwarp();
        }
    }
}

// Fills in the tile of this block; false where it has no item.
template <bool HIDDEN, int NR> K3_DEVICE bool experts_begin(const experts_job& job, k3_tile<NR>* tile) {
    const int i = (int)blockIdx.y, t = (int)threadIdx.x;
    experts_item item;
    if (job.items) item = job.items[i];
    else item = {job.ids[i], i, job.owner[i / job.T] >= 0 && job.ids[i] >= job.begin && job.ids[i] < job.end, 0};
    if (item.n == 0) return false;
    if (t < NR) {
        const int64_t slot = t >= item.n ? -1 : job.items ? job.order[item.first + t] : i;
        const float* z = job.z + slot / job.T * job.latent;
        float *h = job.h + slot * job.ldh, *y = job.y + slot * job.latent;
        tile->x[t] = slot < 0 ? nullptr : HIDDEN ? z : h;
        tile->y[t] = slot < 0 ? nullptr : HIDDEN ? h : y;
    }
    if (t == K3_WARP) {
        tile->w[0] = (HIDDEN ? job.w1 : job.w2)[item.expert];
        tile->number = (int)blockIdx.x;
        tile->wide = !HIDDEN || k3_rows_are_wide(job.z, job.latent);
    }
    if (t == 2 * K3_WARP && HIDDEN) tile->w[1] = job.w3[item.expert];
    return true;
}

template <int NO, int NR> K3_DEVICE void experts_hidden(const experts_job& job) {
    static __shared__ k3_tile<NR> tile;
    if (experts_begin<true, NR>(job, &tile)) k3_situ_product<NO, NR, true>(tile, job.beta, job.linear_beta);
}

template <int NO, int NR> K3_DEVICE void experts_output(const experts_job& job) {
    static __shared__ k3_tile<NR> tile;
    if (experts_begin<false, NR>(job, &tile)) k3_product<NO, NR, true>(tile);
}

#define EXPERTS(NO, NR)                                                                       \
    extern "C" __global__ void __launch_bounds__(K3_DOT_THREADS, K3_DOT_MXFP4_BLOCKS(NO, NR)) \
        k3_experts_hidden_##NR(const experts_job job) {                                       \
        experts_hidden<NO, NR>(job);                                                          \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(K3_DOT_THREADS, K3_DOT_MXFP4_BLOCKS(NO, NR)) \
        k3_experts_output_##NR(const experts_job job) {                                       \
        experts_output<NO, NR>(job);                                                          \
    }
EXPERTS_TILES(EXPERTS)

extern "C" __global__ void __launch_bounds__(EXPERTS_COMBINE_THREADS)
    k3_experts_combine(const float* y, const float* weights, const int32_t* owner, float* u, int latent, int T) {
    const int64_t row = blockIdx.y;
    const int c = (int)(blockIdx.x * EXPERTS_COMBINE_THREADS + threadIdx.x);
    if (c >= latent) return;
    const bool owned = owner[row] >= 0;
    float sum = 0.0f;
#pragma unroll 4
    for (int k = 0; k < T && owned; ++k) sum = m_fma(weights[row * T + k], y[(row * T + k) * latent + c], sum);
    u[row * latent + c] = sum;
}

#else

K3_KERNEL(k3_experts_plan, const int32_t*, const int32_t*, int, int, int, int, experts_item*, int, int32_t*, int, int)
#define EXPERTS(NO, NR)                            \
    K3_KERNEL(k3_experts_hidden_##NR, experts_job) \
    K3_KERNEL(k3_experts_output_##NR, experts_job)
EXPERTS_TILES(EXPERTS)
K3_KERNEL(k3_experts_combine, const float*, const float*, const int32_t*, float*, int, int)

// Where the pieces of the work memory begin, and how the slots are cut.
struct experts_layout {
    int64_t NR, items;                                                 // slots of an item; items that there can be
    int64_t ldh, order, h, y, bytes;
};
static experts_layout experts_lay_out(const k3_dims* dims, int64_t rows) {
    const int64_t E = dims->num_experts, slots = rows * dims->num_experts_per_token;
    experts_layout l;
    // An expert of a large pass has slots / E of them; where that is little, tiles of many would be empty.
    l.NR = rows == 1 || 4 * slots <= E ? 1 : 4 * slots <= 3 * E ? 2 : slots <= 2 * E ? 4 : 8;
    l.items = (slots + (E < slots ? E : slots) * (l.NR - 1)) / l.NR;
    if (l.items > slots) l.items = slots;
    l.ldh = ceil_div(dims->moe_intermediate_size, 4) * 4;              // rows of h can be copied 16 bytes at a time
    l.order = ceil_div(l.items * (int64_t)sizeof(experts_item), 256) * 256;
    l.h = l.order + ceil_div(slots * 4, 256) * 256;
    l.y = l.h + ceil_div(slots * l.ldh * 4, 256) * 256;
    l.bytes = l.y + slots * dims->routed_expert_hidden_size * 4;
    return l;
}

static int64_t experts_work_bytes(const k3_dims* dims, int64_t rows) {
    return dims->num_experts ? experts_lay_out(dims, rows).bytes : 0;
}

static int cuda_experts(void* ctx, const k3_dims* dims, const k3_moe* moe, const k3_pass* pass, const float* z,
                        const int32_t* ids, const float* weights, float* u, int64_t first, int64_t end) {
    k3_cuda* c = (k3_cuda*)ctx;
    const experts_layout l = experts_lay_out(dims, pass->rows);
    const int64_t E = dims->num_experts, T = dims->num_experts_per_token, latent = dims->routed_expert_hidden_size;
    if (E > EXPERTS_MAX || T > EXPERTS_PLAN_SLOTS || l.bytes > c->work_bytes) return K3_UNSUPPORTED;
    experts_item* items = l.NR > 1 ? (experts_item*)c->work : nullptr;
    int32_t* order = (int32_t*)(c->work + l.order);
    float *h = (float*)(c->work + l.h), *y = (float*)(c->work + l.y);
    const experts_job job = {moe->w1,
                             moe->w2,
                             moe->w3,
                             z,
                             ids,
                             pass->owner,
                             items,
                             order,
                             h,
                             y,
                             l.ldh,
                             (int)latent,
                             (int)T,
                             dims->situ_beta,
                             dims->situ_linear_beta,
                             (int)first,
                             (int)end};
    int bad = 0;
    if (items) {
        bad |= k3_experts_plan(c, grid(1), EXPERTS_PLAN_THREADS, 0, ids, pass->owner, (int)pass->rows, (int)E, (int)T, (int)l.NR,
                               items, (int)l.items, order, (int)first, (int)end);
    }
#define EXPERTS_CASE(NO, N)                                                                                                    \
    if (l.NR == N) {                                                                                                           \
        const int64_t outs = K3_DOT_WARPS * NO;                                                                                \
        const size_t shared = k3_slab<K3_MXFP4, N>::BYTES;                                                                     \
        bad |=                                                                                                                 \
            k3_experts_hidden_##N(c, grid(ceil_div(dims->moe_intermediate_size, outs), l.items), K3_DOT_THREADS, shared, job); \
        bad |= k3_experts_output_##N(c, grid(ceil_div(latent, outs), l.items), K3_DOT_THREADS, shared, job);                   \
    }
    EXPERTS_TILES(EXPERTS_CASE)
    if (end < E) return bad;
    return bad | k3_experts_combine(c, grid(ceil_div(latent, EXPERTS_COMBINE_THREADS), pass->rows), EXPERTS_COMBINE_THREADS, 0, y,
                                    weights, pass->owner, u, (int)latent, (int)T);
}

#endif
#undef EXPERTS
