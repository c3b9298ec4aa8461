// SPDX-License-Identifier: MIT
//
// The driver's statuses that the emulator gives, under their numbers.  status_name and status_text are what
// cuGetErrorName and cuGetErrorString answer with.

#ifndef K3EMU_STATUS_H
#define K3EMU_STATUS_H

namespace k3emu {

enum Status : int {
#define X(NAME, NUMBER, ...) NAME = NUMBER,
#include "statuses.inc"
#undef X
};

const char* status_name(int status);     // NULL for a number that is not listed
const char* status_text(int status);

}  // namespace k3emu
#endif
