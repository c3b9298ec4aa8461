// SPDX-License-Identifier: MIT
//
// Makes the weights that no checkpoint has: K3_COMPACT and K3_Q8 (cuda/ops.h) of a matrix as it is stored.

#ifndef K3_RECODE_H
#define K3_RECODE_H

#include "../ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where a value was found that is not finite; row is -1 where there is none.
typedef struct k3_place {
    int64_t row, col;
} k3_place;

// What a BF16 matrix is as K3_COMPACT: the high bytes that get a code, and the number of the first exception of each row
// (first has room for rows + 1).  Returns where a value is not finite; then nothing else holds.
k3_place k3_compact_plan(int threads, const k3_matrix* from, uint8_t* high, uint32_t* first);
// Fills the rows of `to`, and its exceptions in list; `to` has the pitch, and its k3_exceptions what was planned.
void k3_compact_fill(int threads, const k3_matrix* from, const k3_matrix* to, k3_exception* list);
// Fills the rows and factors of `to` from BF16 or F32, to nearest, ties to even.  Returns where a value is not finite.
k3_place k3_q8_fill(int threads, const k3_matrix* from, const k3_matrix* to);

#ifdef __cplusplus
}
#endif
#endif
