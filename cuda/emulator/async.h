// SPDX-License-Identifier: MIT
//
// Asynchronous copies from global to shared memory.  A copy is carried out when it is waited for, and not before; until
// then its destination is poison, so that a missing wait cannot go unseen.

#ifndef K3EMU_ASYNC_H
#define K3EMU_ASYNC_H

namespace k3emu {

void async_begin_block();
void async_at_exit(int thread);          // a thread that leaves with copies in flight is reported

}  // namespace k3emu
#endif
