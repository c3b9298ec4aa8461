// SPDX-License-Identifier: MIT
//
// What cuda/host/stream.cpp asks of the files.

#ifndef K3_STREAM_FILES_H
#define K3_STREAM_FILES_H

#include "stream.h"

typedef struct k3_fault {    // for tests: after so many more reads (never where it is negative) one fails
    int64_t after;
    int64_t total;           // bytes read so far
    int error;               // with this errno, or, where it is 0, with half of its bytes
} k3_fault;

// The file in whose mapping an address lies, or -1.
int32_t k3_file_of(const k3_file* files, int64_t n, const void* p);
// Writes down what a file is now.
void k3_file_note(k3_file* f);
bool k3_files_unchanged(k3_file* files, int64_t n_files, bool* touched, k3_failure* failure);
void k3_file_read(k3_file* files, int32_t file, int64_t at, int64_t need, char* to, k3_fault* fault, k3_failure* failure);

// The load of a block or an expert to memory from `to` on; returns the room that it takes, which is all with `load` NULL.
int64_t k3_lay_out_block(const k3_file* files, int64_t n_files, const k3_block* b, char* to, k3_load* load);
int64_t k3_lay_out_expert(const k3_file* files, int64_t n_files, const k3_moe* moe, int64_t e, char* to, k3_load* load);
int64_t k3_load_bytes(const k3_load* load);
const char* k3_load_place(const k3_file* files, int64_t n_files, const k3_load* load, const void* p);

#endif
