// SPDX-License-Identifier: MIT
//
// Chooses the instruction set at run time, and sizes the buffers that the CPU ops work in.

#include "host.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>
#endif

extern "C" unsigned int k3_float_mode_enter(void) {
#if defined(__x86_64__)
    const unsigned int before = _mm_getcsr();
    _mm_setcsr(0x1f80);                                   // the state in which a process starts
    return before;
#else
    return 0;
#endif
}

extern "C" void k3_float_mode_leave(unsigned int before) {
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

extern "C" void k3_base_table(k3_ops*);
#if defined(__x86_64__)
extern "C" void k3_avx2_table(k3_ops*);
extern "C" void k3_avx512_table(k3_ops*);
#endif

extern "C" int k3_cpu_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

#if defined(__x86_64__)
// The matrix unit's registers are large, so a process has to ask for them, once and for all threads; a kernel or a virtual
// machine that does not know them refuses.
static bool has_amx() {
    enum { REQUEST = 0x1023, TILE_DATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}
#endif

extern "C" int k3_cpu_rounded(int isa) {
#if defined(__x86_64__)
    if (isa == 2 && __builtin_cpu_supports("avx512bf16")) return has_amx() ? 3 : 2;
#endif
    (void)isa;
    return 1;
}

extern "C" int k3_cpu_ops(int isa, k3_ops* table) {
    if (isa < 0 || isa > k3_cpu_best_isa()) return 0;
#if defined(__x86_64__)
    if (isa == 2) k3_avx512_table(table);
    else if (isa == 1) k3_avx2_table(table);
    else
#endif
        k3_base_table(table);
    return 1;
}

extern "C" void k3_cpu_sizes(const k3_dims* d, int64_t rows, int64_t* x_floats, int64_t* work_floats, int64_t* list_items) {
    const int64_t C = d->kda_num_heads * d->kda_head_k;
    const int64_t inputs[] = {d->hidden_size,
                              C,
                              d->kda_head_k,
                              d->q_lora_rank,
                              d->num_attention_heads * d->v_head_dim,
                              d->intermediate_size,
                              d->shared_intermediate_size,
                              d->routed_expert_hidden_size};
    int64_t widest = 0;
    for (int64_t n : inputs) widest = n > widest ? n : widest;
    widest = (widest + 31) / 32 * 32;
    const int64_t heads = d->num_attention_heads * ((d->kv_lora_rank + 31) / 32 * 32);
    const int64_t least = rows > 8 ? rows : 8;               // what a block of 16 rows of BF16 takes
    *x_floats = least * (2 * widest > heads ? 2 * widest : heads);
    const int64_t hidden = least * d->num_experts_per_token * ((d->moe_intermediate_size + 31) / 32 * 32);
    const int64_t partial = d->num_attention_heads * K3_MAX_PIECES * (d->kv_lora_rank + 2);
    *work_floats = hidden > partial ? hidden : partial;
    *list_items = 3 * (d->num_experts + 1) + 2 * rows * d->num_experts_per_token;
}
