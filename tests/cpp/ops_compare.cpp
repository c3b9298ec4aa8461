// SPDX-License-Identifier: MIT
//
// Runs every op of two instruction sets on the same random inputs, in shapes chosen to break things, and compares
// the results.  AVX2 and AVX-512 must agree bit for bit; the portable build rounds a fused multiply-add twice and is
// held to a tolerance.  Every buffer has exactly the size that the contract names, so that AddressSanitizer sees a
// read or write beyond it.
//
// Compile with -DK3_FIRST=k3_avx2 -DK3_SECOND=k3_avx512 -DK3_TOLERANCE=0 (of the largest value) and, as K3_NEEDS_ISA,
// the number of the best instruction set that the processor must have.  The argument is the number of rounds.
// With -DK3_PACKED=1 the second one multiplies rounded inputs as BF16, with vectors and with the matrix unit, which add in other
// orders: 1e-5 of the largest value, and where hidden values are rounded as well 1e-2.
// Exit status: 0 all agree, 1 some differ, 77 this processor cannot run it.

#include "host/host.h"
#include "host/recode.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#ifndef K3_PACKED
#define K3_PACKED 0
#endif
#define K3_JOIN2(a, b) a##b
#define K3_JOIN(a, b) K3_JOIN2(a, b)
#define K3_TEXT2(a) #a
#define K3_TEXT(a) K3_TEXT2(a)

// The two that are compared are linked in; the third, which dispatch.cpp names too, is not and falls back to these.
#define K3_ABSENT(ns) \
    extern "C" __attribute__((weak)) void ns##_table(k3_ops*) { abort(); }
K3_ABSENT(k3_base)
K3_ABSENT(k3_avx2)
K3_ABSENT(k3_avx512)

namespace {

typedef std::vector<float> Floats;

// ---------------------------------------------------------------------------------------------
// random inputs
// ---------------------------------------------------------------------------------------------

uint64_t g_state;

uint64_t bits() {  // splitmix64
    uint64_t z = (g_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
int64_t below(int64_t n) { return (int64_t)(bits() % (uint64_t)n); }
int64_t pick(std::initializer_list<int64_t> from) { return from.begin()[below((int64_t)from.size())]; }
float uniform() { return (float)(bits() >> 40) / 16777216.0f; }
float normal() {  // near enough: only the spread matters
    float s = 0.0f;
    for (int i = 0; i < 12; ++i) s += uniform();
    return s - 6.0f;
}

// Mostly ordinary numbers, with zeros of both signs, subnormals, and large ones among them; NaN and infinity
// where `wild` asks for them.
float value(bool wild) {
    switch (below(24)) {
        case 0: return below(2) ? 0.0f : -0.0f;
        case 1: return normal() * 1e-40f;
        case 2: return normal() * 40.0f;
        case 3: return wild ? (below(3) ? normal() * 1e30f : below(2) ? INFINITY : NAN) : normal();
        default: return normal();
    }
}
Floats floats(int64_t n, bool wild = false) {
    Floats v((size_t)n);
    for (float& x : v) x = value(wild);
    return v;
}
Floats within(int64_t n, float lo, float hi) {
    Floats v((size_t)n);
    for (float& x : v) x = lo + (hi - lo) * uniform();
    return v;
}

// A weight matrix that may begin at an odd address, as a tensor in a file may.
struct Matrix {
    std::vector<uint8_t> data, scale;
    k3_matrix m;

    Matrix(int64_t rows, int64_t cols, int32_t dtype, bool wild = false) {
        const int64_t shift = dtype == K3_MXFP4 ? below(4) : below(2) * (dtype == K3_BF16 ? 2 : 4) + (below(8) == 0);
        const int64_t bytes = dtype == K3_MXFP4 ? rows * cols / 2 : rows * cols * (dtype == K3_BF16 ? 2 : 4);
        data.resize((size_t)(shift + bytes));
        for (int64_t i = 0; dtype != K3_MXFP4 && i < rows * cols; ++i) {
            const float f = value(wild) * 0.25f;
            uint32_t u;
            memcpy(&u, &f, 4);
            const uint16_t h = (uint16_t)(u >> 16);
            if (dtype == K3_BF16) memcpy(data.data() + shift + 2 * i, &h, 2);
            else memcpy(data.data() + shift + 4 * i, &f, 4);
        }
        if (dtype == K3_MXFP4) {
            for (uint8_t& b : data) b = (uint8_t)bits();
            scale.resize((size_t)(rows * cols / 32));
            for (uint8_t& b : scale) b = (uint8_t)(below(16) == 0 ? 0 : wild && below(64) == 0 ? 255 : 118 + below(10));
        }
        memset(&m, 0, sizeof m);
        m.data = data.data() + shift;
        m.scale = dtype == K3_MXFP4 ? scale.data() : nullptr;
        m.rows = rows;
        m.cols = cols;
        m.pitch = dtype == K3_MXFP4 ? cols / 2 : cols * (dtype == K3_BF16 ? 2 : 4);
        m.dtype = dtype;
    }
};
typedef std::unique_ptr<Matrix> MatrixPtr;

// A BF16 matrix in one of the forms that are made at load.
struct Recoded {
    Matrix from;
    std::vector<uint8_t> rows;
    std::vector<uint32_t> first;
    std::vector<k3_exception> list;
    std::vector<uint16_t> factors;
    k3_exceptions beside;
    k3_matrix m;

    Recoded(int64_t out, int64_t cols, int32_t dtype) : from(out, cols, K3_BF16), m(from.m) {
        const bool compact = dtype == K3_COMPACT;
        m.dtype = dtype;
        m.pitch = compact ? (cols + 63) / 64 * 96 : (cols + 31) / 32 * 32;
        rows.resize((size_t)(out * m.pitch));
        m.data = rows.data();
        if (compact) {
            first.resize((size_t)out + 1);
            k3_compact_plan(1, &from.m, beside.high, first.data());
            list.resize(first[(size_t)out] + 1);
            beside.first = first.data();
            beside.list = list.data();
            m.scale = &beside;
            k3_compact_fill(1, &from.m, &m, list.data());
        } else {
            factors.resize((size_t)(out * (m.pitch / 32)));
            m.scale = factors.data();
            k3_q8_fill(1, &from.m, &m);
        }
    }
};

// ---------------------------------------------------------------------------------------------
// running and comparing
// ---------------------------------------------------------------------------------------------

// What one run of an op has written, in order.
struct Out {
    std::vector<std::unique_ptr<Floats>> buffers;
    std::vector<int64_t> ints;

    float* make(int64_t n) {
        buffers.emplace_back(new Floats((size_t)n, NAN));
        return buffers.back()->data();
    }
    float* copy(const Floats& from) {
        buffers.emplace_back(new Floats(from));
        return buffers.back()->data();
    }
};

int g_threads = 1, g_failures = 0, g_checks = 0;
int g_rounded = 0;                                   // how inputs of BF16 matrices are: k3_cpu_rounded
double g_tolerance = K3_TOLERANCE;

bool same(float a, float b, float largest) {
    if (isnan(a) || isnan(b)) return isnan(a) && isnan(b);
    if (g_tolerance == 0) return memcmp(&a, &b, 4) == 0;
    return a == b || fabsf(a - b) <= (float)g_tolerance * largest;
}

typedef std::function<int(const k3_ops&, Out&)> Call;

void run(void (*fill)(k3_ops*), const k3_dims& dims, int64_t rows, const Call& call, Out& out) {
    k3_ops table;
    k3_cpu cpu;
    fill(&table);
    k3_cpu_sizes(&dims, rows, &cpu.x_floats, &cpu.work_floats, &cpu.list_items);
    Floats x((size_t)cpu.x_floats, NAN), work((size_t)cpu.work_floats, NAN);
    std::vector<int64_t> list((size_t)cpu.list_items, -1);
    cpu.threads = g_threads;
    cpu.inputs = g_rounded && fill != K3_JOIN(K3_SECOND, _table) ? 1 : g_rounded;
    cpu.x = x.data();
    cpu.work = work.data();
    cpu.list = list.data();
    table.ctx = &cpu;
    out.ints.push_back(call(table, out));
}

void compare(const char* op, const k3_dims& dims, int64_t rows, const std::string& shape, const Call& call) {
    Out a, b;
    run(K3_JOIN(K3_FIRST, _table), dims, rows, call, a);
    run(K3_JOIN(K3_SECOND, _table), dims, rows, call, b);
    ++g_checks;
    if (a.ints != b.ints || a.ints.back() != 0) {
        ++g_failures;
        printf("%s %s: status or integers differ (status %ld, %ld)\n", op, shape.c_str(), (long)a.ints.back(),
               (long)b.ints.back());
        return;
    }
    for (size_t i = 0; i < a.buffers.size(); ++i) {
        const Floats &x = *a.buffers[i], &y = *b.buffers[i];
        float largest = 0.0f;
        for (float v : x)
            if (isfinite(v) && fabsf(v) > largest) largest = fabsf(v);
        for (size_t j = 0; j < x.size(); ++j) {
            if (same(x[j], y[j], largest)) continue;
            ++g_failures;
            printf("%s %s: output %zu, element %zu of %zu: %.9g and %.9g\n", op, shape.c_str(), i, j, x.size(), x[j], y[j]);
            return;
        }
    }
}

std::string text(std::initializer_list<int64_t> numbers) {
    std::string s = "(";
    for (int64_t n : numbers) s += (s.size() > 1 ? ", " : "") + std::to_string(n);
    return s + ")";
}

// ---------------------------------------------------------------------------------------------
// a model's shapes, and a pass of several sessions
// ---------------------------------------------------------------------------------------------

int64_t width() { return pick({1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 130}); }
int32_t plain_dtype() { return below(2) ? K3_BF16 : K3_F32; }

k3_dims random_dims() {
    k3_dims d;
    memset(&d, 0, sizeof d);
    d.vocab_size = 5 + below(90);
    d.hidden_size = width();
    d.num_hidden_layers = 6;
    d.attn_res_block_size = 1 + below(4);
    d.kda_num_heads = 1 + below(3);
    d.kda_head_k = d.kda_head_v = width();
    d.conv_kernel = 2 + below(4);
    d.num_attention_heads = pick({1, 2, 3, 4, 5, 9, 12});
    d.q_lora_rank = width();
    d.kv_lora_rank = width();
    d.qk_nope_head_dim = width();
    d.qk_rope_head_dim = 2 * below(9);
    d.v_head_dim = width();
    d.latent_stride = (d.kv_lora_rank + d.qk_rope_head_dim + 15) / 16 * 16;
    d.num_experts = pick({1, 3, 8, 17, 33});
    d.num_experts_per_token = 1 + below(d.num_experts < 6 ? d.num_experts : 6);
    d.moe_intermediate_size = 32 * (1 + below(3));
    d.routed_expert_hidden_size = 32 * (1 + below(5));
    d.shared_intermediate_size = width();
    d.intermediate_size = width();
    d.n_kda = 2;
    d.n_mla = 2;
    d.rms_norm_eps = 1e-5f;
    d.mla_latent_norm_eps = 1e-6f;
    d.situ_beta = 4.0f;
    d.situ_linear_beta = 25.0f;
    d.gate_lower_bound = below(2) ? -5.0f : 0.0f;
    d.routed_scaling_factor = below(2) ? 1.0f : 2.827f;
    d.attention_scale = 1.0f / sqrtf((float)(d.qk_nope_head_dim + d.qk_rope_head_dim));
    d.moe_renormalize = (int32_t)below(2);
    d.rotary = 1;
    d.conv_stride = 3 * (d.conv_kernel - 1) * d.kda_num_heads * d.kda_head_k + below(2) * 16;
    d.state_stride = d.kda_num_heads * d.kda_head_k * d.kda_head_v + below(2) * 16;
    return d;
}

// Segments of several sessions, with their states and latent pages.
struct Pass {
    k3_dims dims;
    k3_pass pass;
    std::vector<k3_segment> segments;
    std::vector<std::unique_ptr<Floats>> memory;  // the states
    std::vector<std::vector<void*>> pages;
    std::vector<std::unique_ptr<std::vector<char>>> page_memory;
    std::vector<int32_t> owner, bad;

    Pass(const k3_dims& d, bool long_context) : dims(d) {
        memset(&pass, 0, sizeof pass);
        const int64_t n = 1 + below(3);
        segments.resize((size_t)n);
        pages.resize((size_t)n);
        for (int64_t i = 0; i < n; ++i) {
            k3_segment& s = segments[(size_t)i];
            memset(&s, 0, sizeof s);
            s.page_rows = pick({1, 3, 16, 64});
            s.latent_dtype = below(2) ? K3_BF16 : K3_F32;
            const int64_t size = s.latent_dtype == K3_BF16 ? 2 : 4;
            s.row = pass.rows;
            s.rows = pick({1, 1, 2, 5, 9});
            s.position = long_context ? pick({0, 63, 64, 200, 4200}) : pick({0, 1, 40});
            memory.emplace_back(new Floats(floats(d.n_kda * d.conv_stride)));
            s.now.conv = memory.back()->data();
            memory.emplace_back(new Floats(floats(d.n_kda * d.state_stride)));
            s.now.state = memory.back()->data();
            const int64_t count = (s.position + s.rows + s.page_rows - 1) / s.page_rows;
            const int64_t elements = d.n_mla * s.page_rows * d.latent_stride;
            for (int64_t p = 0; p < count; ++p) {
                page_memory.emplace_back(new std::vector<char>((size_t)(elements * size)));
                fill_page(page_memory.back()->data(), elements, d.latent_stride, size);
                pages[(size_t)i].push_back(page_memory.back()->data());
            }
            s.pages = pages[(size_t)i].data();
            for (int64_t r = 0; r < s.rows; ++r) owner.push_back((int32_t)i);
            pass.rows += s.rows;
        }
        pass.n_segments = n;
        pass.segments = segments.data();
        bad.assign((size_t)n, K3_NO_BAD_SUBLAYER);
        if (pass.rows > 2 && below(3) == 0) owner[(size_t)(pass.rows - 1)] = -1, --segments.back().rows;
        pass.owner = owner.data();
        pass.bad_sublayer = bad.data();
    }

    void fill_page(char* page, int64_t elements, int64_t stride, int64_t size) const {
        const int64_t W = dims.kv_lora_rank + dims.qk_rope_head_dim;
        for (int64_t e = 0; e < elements; ++e) {
            const float f = e % stride < W ? normal() : 0.0f;
            uint32_t u;
            memcpy(&u, &f, 4);
            const uint16_t h = (uint16_t)(u >> 16);
            if (size == 2) memcpy(page + 2 * e, &h, 2);
            else memcpy(page + 4 * e, &f, 4);
        }
    }

    std::string shape() const {
        return text({pass.rows, pass.n_segments, segments[0].position, segments[0].page_rows, segments[0].latent_dtype});
    }
};

// ---------------------------------------------------------------------------------------------
// the ops
// ---------------------------------------------------------------------------------------------

void check_rows(const k3_dims& d, bool wild) {
    const int64_t R = pick({1, 2, 3, 4, 5, 8, 33}), h = d.hidden_size, blocks = below(9);
    const std::string shape = text({R, h, blocks});

    Matrix table(d.vocab_size, h, plain_dtype());
    std::vector<int32_t> tokens((size_t)R);
    for (int32_t& t : tokens) t = (int32_t)(below(d.vocab_size + 1) - 1);
    const Floats embeddings = floats(R * h);
    compare("embed", d, R, shape, [&](const k3_ops& t, Out& o) {
        return t.embed(t.ctx, &d, &table.m, tokens.data(), embeddings.data(), o.make(R * h), R);
    });

    const Floats bank = floats(blocks * R * h), s = floats(R * h, wild), u = floats(h), norm = floats(h);
    std::vector<int32_t> take;
    for (int64_t r = 0; r < R; ++r) take.push_back((int32_t)below(R));
    const bool use_take = below(2), use_h = below(2), keep = below(2);
    compare("attn_res", d, R, shape, [&](const k3_ops& t, Out& o) {
        float *mixed = use_h ? o.make(R * h) : nullptr, *x = o.make(R * h), *w = o.make(R * (blocks + 1));
        return t.attn_res(t.ctx, &d, bank.data(), blocks, R, s.data(), u.data(), norm.data(), use_take ? take.data() : nullptr,
                          keep ? o.make(R * h) : nullptr, mixed, x, w, R);
    });
    compare("rms_norm", d, R, shape,
            [&](const k3_ops& t, Out& o) { return t.rms_norm(t.ctx, s.data(), h, norm.data(), 1e-6f, o.make(R * h), h, R, h); });

    const Floats x = floats(R * h, wild);
    std::vector<MatrixPtr> matrices;
    const int64_t n_jobs = 1 + below(4);
    for (int64_t j = 0; j < n_jobs; ++j) matrices.emplace_back(new Matrix(width(), h, plain_dtype(), wild));
    compare("linear", d, R * n_jobs, shape, [&](const k3_ops& t, Out& o) {
        std::vector<k3_linear_job> jobs;
        for (const MatrixPtr& m : matrices) jobs.push_back({&m->m, x.data(), o.make(R * m->m.rows), h, m->m.rows});
        return t.linear(t.ctx, jobs.data(), n_jobs, R);
    });

    Matrix gate(d.intermediate_size, h, plain_dtype(), wild), up(d.intermediate_size, h, plain_dtype(), wild);
    compare("gate_up", d, R, shape, [&](const k3_ops& t, Out& o) {
        return t.gate_up(t.ctx, &d, &gate.m, &up.m, x.data(), o.make(R * d.intermediate_size), R);
    });
}

void check_recoded(const k3_dims& d) {
    const int64_t R = 1 + below(9), h = d.hidden_size;
    const Floats x = floats(R * h);
    for (int32_t dtype : {K3_COMPACT, K3_Q8}) {
        Recoded w(width(), h, dtype);
        compare("linear, recoded", d, R, text({R, h, w.m.rows, dtype}), [&](const k3_ops& t, Out& o) {
            const k3_linear_job job = {&w.m, x.data(), o.make(R * w.m.rows), h, w.m.rows};
            return t.linear(t.ctx, &job, 1, R);
        });
    }
}

void check_rounded(const k3_dims& d, int how) {
    const int64_t R = pick({1, 2, 7, 9, 33}), h = d.hidden_size, cols = h + below(40), inner = d.intermediate_size;
    k3_dims wide = d;
    wide.hidden_size = cols;
    const Floats x = floats(R * cols);
    Matrix w(width(), cols, K3_BF16), router(width(), cols, K3_BF16), gate(inner, h, K3_BF16), up(inner, h, plain_dtype());
    Recoded compact(width(), cols, K3_COMPACT);
    router.m.exact = 1;
    g_rounded = how;
    g_tolerance = how > 1 ? 1e-5 : K3_TOLERANCE;
    compare("linear, rounded", wide, 3 * R, text({R, cols}), [&](const k3_ops& t, Out& o) {
        std::vector<k3_linear_job> jobs;
        for (const k3_matrix* m : {&w.m, &router.m, &compact.m})
            jobs.push_back({m, x.data(), o.make(R * m->rows), cols, m->rows});
        return t.linear(t.ctx, jobs.data(), 3, R);
    });
    compare("gate_up, rounded", d, R, text({R, h, inner}),
            [&](const k3_ops& t, Out& o) { return t.gate_up(t.ctx, &d, &gate.m, &up.m, x.data(), o.make(R * inner), R); });
    g_rounded = 0;
    g_tolerance = K3_TOLERANCE;
}

// Large enough to be shared among the threads.
void check_large_linear() {
    k3_dims d = random_dims();
    d.hidden_size = 1056;
    d.routed_expert_hidden_size = 1056;
    const int64_t R = pick({1, 3, 20}), cols = 1056, rows = 403;
    const Floats x = floats(R * cols);
    for (int32_t dtype : {K3_F32, K3_BF16, K3_MXFP4}) {
        Matrix w(rows, cols, dtype);
        compare("linear", d, R, text({R, cols, rows, dtype}), [&](const k3_ops& t, Out& o) {
            const k3_linear_job job = {&w.m, x.data(), o.make(R * rows), cols, rows};
            return t.linear(t.ctx, &job, 1, R);
        });
    }
}

void check_kda(const k3_dims& d, bool wild) {
    const Pass p(d, false);
    const int64_t R = p.pass.rows, H = d.kda_num_heads, D = d.kda_head_k, C = H * D, layer = below(d.n_kda);
    const Floats conv1d = floats(3 * d.conv_kernel * C), A = within(H, 0.1f, 8.0f), dt_bias = floats(C), o_norm = floats(D);
    k3_kda w;
    memset(&w, 0, sizeof w);
    w.conv1d = conv1d.data();
    w.A = A.data();
    w.dt_bias = dt_bias.data();
    w.o_norm = o_norm.data();
    const Floats raw[3] = {floats(R * C, wild), floats(R * C, wild), floats(R * C, wild)};
    const std::string shape = text({R, H, D, d.conv_kernel, p.pass.n_segments});

    // The alternate state is written by the op, so each run has its own.
    auto own_state = [&](Pass& q, Out& o) {
        for (k3_segment& s : q.segments) {
            s.next.conv = o.make(d.n_kda * d.conv_stride);
            s.next.state = o.make(d.n_kda * d.state_stride);
        }
        q.pass.segments = q.segments.data();
    };
    auto with_state = [&](Out& o, const std::function<int(const k3_pass*)>& call) {
        Pass& q = const_cast<Pass&>(p);
        own_state(q, o);
        return call(&q.pass);
    };
    compare("kda_conv", d, R, shape, [&](const k3_ops& t, Out& o) {
        float *q = o.make(R * C), *k = o.make(R * C), *v = o.make(R * C);
        return with_state(o, [&](const k3_pass* pass) {
            return t.kda_conv(t.ctx, &d, &w, pass, layer, raw[0].data(), raw[1].data(), raw[2].data(), q, k, v);
        });
    });
    const Floats f = floats(R * C, wild), b = floats(R * H, wild), g = floats(R * C, wild);
    compare("kda_gates", d, R, shape, [&](const k3_ops& t, Out& o) {
        float *decay = o.copy(f), *beta = o.copy(b);
        return t.kda_gates(t.ctx, &d, &w, decay, beta, R);
    });
    const Floats alpha = within(R * C, 0.0f, 1.0f), beta = within(R * H, 0.0f, 1.0f);
    const float scale = 1.0f / sqrtf((float)D);
    Floats q = floats(R * C), k = floats(R * C);
    for (int64_t i = 0; i < R * C; ++i) {
        q[(size_t)i] *= scale;
        k[(size_t)i] *= scale;
    }
    compare("kda_recurrence", d, R, shape, [&](const k3_ops& t, Out& o) {
        float* out = o.make(R * C);
        return with_state(o, [&](const k3_pass* pass) {
            return t.kda_recurrence(t.ctx, &d, pass, layer, q.data(), k.data(), raw[2].data(), alpha.data(), beta.data(), out);
        });
    });
    compare("kda_output", d, R, shape,
            [&](const k3_ops& t, Out& o) { return t.kda_output(t.ctx, &d, &w, o.copy(raw[0]), g.data(), R); });
}

void check_mla(const k3_dims& d, bool wild) {
    Pass p(d, !wild && below(4) == 0);
    const int64_t R = p.pass.rows, H = d.num_attention_heads, qk = d.qk_nope_head_dim + d.qk_rope_head_dim;
    const int64_t W = d.kv_lora_rank + d.qk_rope_head_dim, V = d.v_head_dim, layer = below(d.n_mla);
    Matrix kv_b(H * (d.qk_nope_head_dim + V), d.kv_lora_rank, plain_dtype());
    const Floats norm = floats(d.kv_lora_rank);
    k3_mla w;
    memset(&w, 0, sizeof w);
    w.kv_b_proj = kv_b.m;
    w.kv_a_layernorm = norm.data();
    const Floats q = floats(R * H * qk), kva = floats(R * W), g = floats(R * H * V, wild);
    const std::string shape = text({H, d.kv_lora_rank, d.qk_nope_head_dim, d.qk_rope_head_dim, V}) + " " + p.shape();

    std::vector<double> frequencies;
    for (int64_t i = 0; i < d.qk_rope_head_dim / 2; ++i)
        frequencies.push_back(pow(10000.0, -2.0 * (double)i / (double)d.qk_rope_head_dim));
    compare("mla_rope", d, R, shape, [&](const k3_ops& t, Out& o) {
        float *a = o.copy(q), *b = o.copy(kva);
        return t.mla_rope(t.ctx, &d, &p.pass, frequencies.data(), a, b);
    });
    compare("mla_append", d, R, shape, [&](const k3_ops& t, Out& o) {
        const int status = t.mla_append(t.ctx, &d, &w, &p.pass, layer, kva.data());
        for (const auto& page : p.page_memory)
            for (char byte : *page) o.ints.push_back(byte);
        return status;
    });
    compare("mla_absorb", d, R, shape,
            [&](const k3_ops& t, Out& o) { return t.mla_absorb(t.ctx, &d, &w, q.data(), o.make(R * H * d.latent_stride), R); });
    Floats qa = floats(R * H * d.latent_stride);
    for (int64_t i = 0; i < R * H * d.latent_stride; ++i)
        if (i % d.latent_stride >= W) qa[(size_t)i] = 0.0f;
    compare("mla_attend", d, R, shape, [&](const k3_ops& t, Out& o) {
        return t.mla_attend(t.ctx, &d, &p.pass, layer, qa.data(), o.make(R * H * d.kv_lora_rank));
    });
    const Floats oa = floats(R * H * d.kv_lora_rank);
    const bool gated = below(2);
    compare("mla_unabsorb", d, R, shape, [&](const k3_ops& t, Out& o) {
        return t.mla_unabsorb(t.ctx, &d, &w, oa.data(), gated ? g.data() : nullptr, o.make(R * H * V), R);
    });
}

void check_moe(const k3_dims& d, bool wild) {
    Pass p(d, false);
    const int64_t R = p.pass.rows, E = d.num_experts, T = d.num_experts_per_token;
    const int64_t latent = d.routed_expert_hidden_size, inner = d.moe_intermediate_size;
    const std::string shape = text({R, E, T, latent, inner});
    Floats logits = floats(R * E, wild), bias = within(E, -0.1f, 0.1f);
    if (below(2)) {  // ties: the lowest id wins
        for (float& x : logits) x = (float)(int)x;
        for (float& x : bias) x = 0.0f;
    }
    std::vector<int32_t> ids((size_t)(R * T));
    compare("route", d, R, shape, [&](const k3_ops& t, Out& o) {
        std::vector<int32_t> chosen((size_t)(R * T), -1);
        const int status = t.route(t.ctx, &d, logits.data(), bias.data(), chosen.data(), o.make(R * T), R);
        for (int32_t id : chosen) o.ints.push_back(id);
        return status;
    });
    for (int64_t r = 0; r < R; ++r) {  // ascending, no expert twice
        int64_t id = 0;
        for (int64_t i = 0; i < T; ++i, ++id) {
            id += below(E - (T - i) - id + 1);
            ids[(size_t)(r * T + i)] = (int32_t)id;
        }
    }
    const int32_t dtype = (int32_t)pick({K3_MXFP4, K3_MXFP4, K3_BF16, K3_F32});
    std::vector<MatrixPtr> keep;
    std::vector<k3_matrix> w[3];
    for (int64_t e = 0; e < E; ++e)
        for (int i = 0; i < 3; ++i) {
            keep.emplace_back(i == 1 ? new Matrix(latent, inner, dtype) : new Matrix(inner, latent, dtype));
            w[i].push_back(keep.back()->m);
        }
    k3_moe moe;
    memset(&moe, 0, sizeof moe);
    moe.w1 = w[0].data();
    moe.w2 = w[1].data();
    moe.w3 = w[2].data();
    const Floats z = floats(R * latent, wild), weights = within(R * T, 0.0f, 1.0f);
    const Call experts = [&](const k3_ops& t, Out& o) {
        return t.experts(t.ctx, &d, &moe, &p.pass, z.data(), ids.data(), weights.data(), o.make(R * latent), 0, d.num_experts);
    };
    compare("experts", d, R, shape, experts);
    for (int how = 1; how <= (K3_PACKED ? 3 : 1) && !wild; ++how) {
        g_rounded = how;
        g_tolerance = how == 1 && K3_TOLERANCE == 0 ? 0 : 1e-2;    // a hidden value may be rounded to the next number
        compare("experts, rounded", d, R, shape + text({how, dtype}), experts);
    }
    g_rounded = 0;
    g_tolerance = K3_TOLERANCE;
}

void check_residual(const k3_dims& d, bool wild) {
    Pass p(d, false);
    const int64_t R = p.pass.rows, h = d.hidden_size;
    const Floats s = floats(R * h, wild), a = floats(R * h, wild), b = floats(R * h);
    const bool use_b = below(2), restart = below(2);
    auto bad = [&](Out& o) {
        for (int32_t& sublayer : p.bad) {
            o.ints.push_back(sublayer);
            sublayer = K3_NO_BAD_SUBLAYER;
        }
    };
    compare("residual", d, R, p.shape(), [&](const k3_ops& t, Out& o) {
        const int status = t.residual(t.ctx, &p.pass, o.copy(s), a.data(), use_b ? b.data() : nullptr, restart, 7, h);
        bad(o);
        return status;
    });
    compare("finite", d, R, p.shape(), [&](const k3_ops& t, Out& o) {
        const int status = t.finite(t.ctx, &p.pass, a.data(), p.owner.data(), 3, R, h);
        bad(o);
        return status;
    });
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 40;
    if (k3_cpu_best_isa() < K3_NEEDS_ISA) {
        printf("skipped: this processor cannot run %s and %s\n", K3_TEXT(K3_FIRST), K3_TEXT(K3_SECOND));
        return 77;
    }
    k3_pool_hold();
    for (int i = 0; i < rounds; ++i) {
        g_state = 1000 + (uint64_t)i;
        g_threads = i % 3 == 0 ? 1 : 2 + i % 2;
        const bool wild = K3_TOLERANCE == 0 && i % 4 == 3;
        const k3_dims d = random_dims();
        check_rows(d, wild);
        check_kda(d, wild);
        check_mla(d, wild);
        check_moe(d, wild);
        check_residual(d, wild);
        check_recoded(d);
        for (int how = 1; how <= (K3_PACKED ? 3 : 1); ++how) check_rounded(d, how);
        if (i % 8 == 0) check_large_linear();
    }
    k3_pool_release();
    printf("%s and %s: %d comparisons, %d differ\n", K3_TEXT(K3_FIRST), K3_TEXT(K3_SECOND), g_checks, g_failures);
    return g_failures != 0;
}
