// SPDX-License-Identifier: MIT
//
// The one pool of threads of the process.  Work is handed out piece by piece, so that a disturbed core
// holds up one piece and not the rest; which thread runs a piece can never change a result.

#ifndef K3_POOL_H
#define K3_POOL_H

#include <stdint.h>

typedef void (*k3_task)(void* arg, int64_t piece);

// Runs task(arg, 0 .. pieces - 1) with up to `threads` threads, the caller among them, and returns when all
// are done.  A caller that finds the pool busy runs all pieces itself.
void k3_pool_run(int threads, int64_t pieces, k3_task task, void* arg);

// A model that is open holds the pool; its threads start at the first run that needs them and are joined
// when the last model lets go.
void k3_pool_hold();
void k3_pool_release();

// Worker threads alive now, callers not counted.
int k3_pool_workers();

#endif
