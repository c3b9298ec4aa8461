// SPDX-License-Identifier: MIT
//
// 32 columns of one row of weights, in float32, for every dtype that a matrix can have.
//
// Order within the 32: two vectors of 16 lanes, `a` and then `b`.  For BF16, MXFP4 and COMPACT they are the even and the odd
// columns, because that is how a register of packed weights falls apart; for F32 and Q8 the first 16 and the last.

#ifndef K3_COLUMNS_H
#define K3_COLUMNS_H

#include "host.h"

namespace K3_NS {

K3_INLINE bool is_split(int32_t dtype) { return dtype != K3_F32 && dtype != K3_Q8; }   // into even and odd columns

// Where one row of weights is, and for COMPACT its exceptions that are still to come.
struct Row {
    const char* data;
    const uint8_t* scale;             // MXFP4
    const uint16_t* factor;           // Q8
    const k3_exception *next, *end;   // COMPACT
};

template <int DT> K3_INLINE Row row_of(const k3_matrix* w, int64_t row) {
    Row r = {(const char*)w->data + row * w->pitch, nullptr, nullptr, nullptr, nullptr};
    if (DT == K3_MXFP4) r.scale = (const uint8_t*)w->scale + row * (w->cols / 32);
    if (DT == K3_Q8) r.factor = (const uint16_t*)w->scale + row * ((w->cols + 31) / 32);
    if (DT == K3_COMPACT) {
        const k3_exceptions* x = (const k3_exceptions*)w->scale;
        r.next = x->list + x->first[row];
        r.end = x->list + x->first[row + 1];
    }
    return r;
}

// The table of a COMPACT matrix; nothing for the others.
template <int DT> K3_INLINE v_table table_of(const k3_matrix* w) {
    static const uint8_t none[16] = {0};
    return v_load_table(DT == K3_COMPACT ? ((const k3_exceptions*)w->scale)->high : none);
}

// Columns 32 * group and on; all 32 are there, and of COMPACT they are none of the exceptions.
template <int DT> K3_INLINE void load_group(const Row& r, v_table table, int64_t group, vf& a, vf& b) {
    if (DT == K3_F32) {
        a = v_load_bytes(r.data + group * 128);
        b = v_load_bytes(r.data + group * 128 + 64);
    } else if (DT == K3_BF16) {
        v_bf16_split(r.data + group * 64, a, b);
    } else if (DT == K3_MXFP4) {
        v_mxfp4_split(r.data + group * 16, r.scale[group], a, b);
    } else if (DT == K3_COMPACT) {
        if (group % 2 == 0) v_compact_split(r.data + group / 2 * 96, 0, table, a, b);
        else v_compact_split(r.data + group / 2 * 96, 1, table, a, b);
    } else {
        v_q8_split(r.data + group * 32, bf16_to_f32(r.factor[group]), a, b);
    }
}

// The same for any group of the row: also the last one, of which only n columns are there, and exceptions, in order.
template <int DT> K3_INLINE void load_any(Row& r, v_table table, int64_t group, int64_t n, vf& a, vf& b) {
    if (DT == K3_COMPACT && r.next != r.end && r.next->group == group) {
        v_bf16_split(r.next++->w, a, b);
    } else if (DT == K3_F32 && n < 32) {
        a = v_load_n(r.data + group * 128, min64(16, n));
        b = v_load_n(r.data + group * 128 + 64, max64(0, n - 16));
    } else if (DT == K3_BF16 && n < 32) {
        v_bf16_split_n(r.data + group * 64, n, a, b);
    } else {
        load_group<DT>(r, table, group, a, b);           // MXFP4 and Q8 have whole groups
    }
}

#if defined(K3_ISA_AVX512)
// The same as 32 BF16 numbers in the order of the columns, of weights that are such numbers.
template <int DT> K3_INLINE __m512i load_words(Row& r, v_table table, int64_t group, int64_t n) {
    static_assert(DT == K3_BF16 || DT == K3_COMPACT || DT == K3_MXFP4, "F32 and Q8 would be rounded");
    if (DT == K3_BF16 && n < 32) {
        uint16_t t[32] = {0};
        memcpy(t, r.data + group * 64, (size_t)n * 2);
        return _mm512_loadu_si512(t);
    }
    if (DT == K3_BF16) return _mm512_loadu_si512(r.data + group * 64);
    if (DT == K3_MXFP4) return v_mxfp4_words(r.data + group * 16, r.scale[group]);
    if (r.next != r.end && r.next->group == group) return _mm512_loadu_si512(r.next++->w);
    if (group % 2 == 0) return v_compact_words(r.data + group / 2 * 96, 0, table);
    return v_compact_words(r.data + group / 2 * 96, 1, table);
}
#endif

}  // namespace K3_NS
#endif
