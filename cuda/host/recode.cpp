// SPDX-License-Identifier: MIT
//
// Recoding at load.  Rows are independent, so that pieces of rows go to the threads of the pool.

#include "recode.h"

#include <string.h>

#include "pool.h"

namespace {

enum { PIECE = 64 };                     // rows

struct Run {
    const k3_matrix *from, *to;
    uint32_t* counts;                    // of high bytes
    uint32_t* first;
    k3_exception* list;
    uint8_t code[256];                   // of each high byte; 255 where it has none
    k3_place bad;
};

int64_t last_row(const Run* run, int64_t i) { return (i + 1) * PIECE < run->from->rows ? (i + 1) * PIECE : run->from->rows; }

const uint16_t* bf16_row(const k3_matrix* w, int64_t row) { return (const uint16_t*)((const char*)w->data + row * w->pitch); }

float value(const k3_matrix* w, int64_t row, int64_t col) {
    const char* p = (const char*)w->data + row * w->pitch;
    uint32_t bits;
    if (w->dtype == K3_F32) {
        memcpy(&bits, p + 4 * col, 4);
    } else {
        uint16_t h;
        memcpy(&h, p + 2 * col, 2);
        bits = (uint32_t)h << 16;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

bool finite(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

void note(Run* run, int64_t row, int64_t col) {
    // Any of them will do; the columns of one row are looked at by one thread.
    int64_t none = -1;
    if (__atomic_compare_exchange_n(&run->bad.row, &none, row, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) run->bad.col = col;
}

// Position within 32 stored columns.
int place(int column) { return (column & 7) | (column & 8) << 1 | (column & 16) >> 1; }

void count_piece(void* arg, int64_t i) {
    Run* run = (Run*)arg;
    uint32_t counts[2][256] = {{0}};     // two, so that equal neighbours do not wait for each other
    for (int64_t r = i * PIECE; r < last_row(run, i); ++r) {
        const uint16_t* w = bf16_row(run->from, r);
        for (int64_t c = 0; c < run->from->cols; ++c) {
            if ((w[c] & 0x7f80u) == 0x7f80u) note(run, r, c);
            ++counts[c & 1][w[c] >> 8];
        }
    }
    for (int h = 0; h < 256; ++h)
        if (counts[0][h] + counts[1][h]) __atomic_fetch_add(run->counts + h, counts[0][h] + counts[1][h], __ATOMIC_RELAXED);
}

bool is_exception(const Run* run, const uint16_t* w) {
    uint8_t all = 0;
    for (int c = 0; c < 32; ++c) all |= run->code[w[c] >> 8];
    return all > 15;
}

void exceptions_piece(void* arg, int64_t i) {
    Run* run = (Run*)arg;
    for (int64_t r = i * PIECE; r < last_row(run, i); ++r) {
        const uint16_t* w = bf16_row(run->from, r);
        uint32_t n = run->from->cols % 32 != 0;
        for (int64_t g = 0; g < run->from->cols / 32; ++g) n += is_exception(run, w + 32 * g);
        run->first[r + 1] = n;
    }
}

void compact_piece(void* arg, int64_t i) {
    Run* run = (Run*)arg;
    const int64_t cols = run->from->cols;
    for (int64_t r = i * PIECE; r < last_row(run, i); ++r) {
        const uint16_t* w = bf16_row(run->from, r);
        uint8_t* row = (uint8_t*)run->to->data + r * run->to->pitch;
        k3_exception* next = run->list + run->first[r];
        memset(row, 0, (size_t)run->to->pitch);
        for (int64_t g = 0; g < (cols + 31) / 32; ++g) {
            uint8_t *low = row + g / 2 * 96 + 32 * (g % 2), *codes = row + g / 2 * 96 + 64;
            const int n = (int)(cols - 32 * g < 32 ? cols - 32 * g : 32);
            for (int c = 0; c < n; ++c) {
                const uint16_t v = w[32 * g + c];
                low[place(c)] = (uint8_t)v;
                codes[place(c)] |= (uint8_t)((run->code[v >> 8] & 15) << 4 * (g % 2));
            }
            if (n < 32 || is_exception(run, w + 32 * g)) {
                next->group = (uint32_t)g;
                memset(next->w, 0, sizeof next->w);
                memcpy(next->w, w + 32 * g, (size_t)n * 2);
                ++next;
            }
        }
    }
}

void set_codes(Run* run, const uint8_t* high) {
    memset(run->code, 255, sizeof run->code);
    for (int i = 16; i-- > 0;) run->code[high[i]] = (uint8_t)i;      // of equal ones the first
}

// The largest BF16 number whose 127-fold is not below the largest magnitude, so that no weight is cut off.
uint16_t factor_of(float largest) {
    const float exact = largest / 127.0f;
    uint32_t bits;
    memcpy(&bits, &exact, 4);
    return (uint16_t)((bits + 0xffffu) >> 16);
}

void q8_piece(void* arg, int64_t i) {
    Run* run = (Run*)arg;
    const int64_t cols = run->from->cols, groups = (cols + 31) / 32;
    for (int64_t r = i * PIECE; r < last_row(run, i); ++r) {
        int8_t* row = (int8_t*)run->to->data + r * run->to->pitch;
        uint16_t* factors = (uint16_t*)run->to->scale + r * groups;
        memset(row, 0, (size_t)run->to->pitch);
        for (int64_t g = 0; g < groups; ++g) {
            const int n = (int)(cols - 32 * g < 32 ? cols - 32 * g : 32);
            float w[32], largest = 0.0f;
            for (int c = 0; c < n; ++c) {
                w[c] = value(run->from, r, 32 * g + c);
                if (!finite(w[c])) note(run, r, 32 * g + c);
                const float magnitude = w[c] < 0.0f ? -w[c] : w[c];
                largest = magnitude > largest ? magnitude : largest;
            }
            factors[g] = factor_of(largest);
            const uint32_t bits = (uint32_t)factors[g] << 16;
            float factor;
            memcpy(&factor, &bits, 4);
            if (factor == 0.0f) continue;
            for (int c = 0; c < n; ++c) {
                // The factor is not below the largest magnitude / 127, so that nothing is cut off.  Adding 1.5 * 2^23 and
                // taking it away again rounds to nearest, ties to even.
                const float q = (w[c] / factor + 12582912.0f) - 12582912.0f;
                row[32 * g + c] = (int8_t)(int32_t)q;
            }
        }
    }
}

int64_t pieces(const k3_matrix* w) { return (w->rows + PIECE - 1) / PIECE; }

}  // namespace

k3_place k3_compact_plan(int threads, const k3_matrix* from, uint8_t* high, uint32_t* first) {
    uint32_t counts[256] = {0};
    Run run = {from, nullptr, counts, first, nullptr, {0}, {-1, 0}};
    k3_pool_run(threads, pieces(from), count_piece, &run);
    if (run.bad.row >= 0) return run.bad;
    for (int i = 0; i < 16; ++i) {       // the 16 most frequent, the smallest first among equals
        int best = 0;
        for (int h = 1; h < 256; ++h)
            if (counts[h] > counts[best]) best = h;
        high[i] = (uint8_t)best;
        counts[best] = 0;
    }
    set_codes(&run, high);
    k3_pool_run(threads, pieces(from), exceptions_piece, &run);
    first[0] = 0;
    for (int64_t r = 0; r < from->rows; ++r) first[r + 1] += first[r];
    return run.bad;
}

void k3_compact_fill(int threads, const k3_matrix* from, const k3_matrix* to, k3_exception* list) {
    const k3_exceptions* x = (const k3_exceptions*)to->scale;
    Run run = {from, to, nullptr, (uint32_t*)x->first, list, {0}, {-1, 0}};
    set_codes(&run, x->high);
    k3_pool_run(threads, pieces(from), compact_piece, &run);
}

k3_place k3_q8_fill(int threads, const k3_matrix* from, const k3_matrix* to) {
    Run run = {from, to, nullptr, nullptr, nullptr, {0}, {-1, 0}};
    k3_pool_run(threads, pieces(from), q8_piece, &run);
    return run.bad;
}
