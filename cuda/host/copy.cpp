// SPDX-License-Identifier: MIT
//
// Copies between the table's memory and the host's, which here are one; ops have run when they return.

#include "host.h"

namespace K3_NS {

int read(void*, void* host, const void* here, int64_t bytes) {
    memcpy(host, here, (size_t)bytes);
    return 0;
}

int write(void*, void* here, const void* host, int64_t bytes) {
    memcpy(here, host, (size_t)bytes);
    return 0;
}

int submit(void*) { return 0; }

}  // namespace K3_NS
