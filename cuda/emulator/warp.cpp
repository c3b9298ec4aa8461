// SPDX-License-Identifier: MIT
//
// Warp functions: each is a meeting of lanes at which the last one computes for all.

#include "block.h"
#include "check.h"
#include "report.h"
#include "status.h"

using namespace k3emu;

namespace {

struct Shuffle {
    int mode, argument, width;
    uint64_t bits, result;
    uintptr_t pc;
};

int source_lane(const Shuffle& s, int lane) {
    const int first = lane & ~(s.width - 1), last = first + s.width - 1;
    switch (s.mode) {
        case K3EMU_SHUFFLE_INDEX: return first + (s.argument & (s.width - 1));
        case K3EMU_SHUFFLE_UP: return lane - s.argument < first ? lane : lane - s.argument;
        case K3EMU_SHUFFLE_DOWN: return lane + s.argument > last ? lane : lane + s.argument;
        default: return (lane ^ s.argument) > last ? lane : lane ^ s.argument;
    }
}

void shuffle_all(int, unsigned arrived, void* const* operands) {
    for (unsigned left = arrived; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        Shuffle& mine = *static_cast<Shuffle*>(operands[lane]);
        const int from = source_lane(mine, lane);
        if (from >= 0 && from < kWarp && (arrived >> from & 1)) {
            mine.result = static_cast<Shuffle*>(operands[from])->bits;
        } else {
            report("warp divergence", {mine.pc}, "lane %d reads lane %d at @0, which takes no part", lane, from);
            mine.result = ~0ull;
        }
    }
}

struct Vote {
    uint64_t predicate, result;
};

void vote_all(int, unsigned arrived, void* const* operands) {
    unsigned yes = 0;
    for (unsigned left = arrived; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        if (static_cast<Vote*>(operands[lane])->predicate) yes |= 1u << lane;
    }
    for (unsigned left = arrived; left; left &= left - 1) {
        static_cast<Vote*>(operands[__builtin_ctz(left)])->result = ((uint64_t)arrived << 32) | yes;
    }
}

void sync_all(int warp, unsigned arrived, void* const*) { sync_lanes(warp, arrived); }

struct Mma {
    float* d;
    const uint32_t *a, *b;
};

float half_of(const uint32_t* words, int word, int half) {
    return __uint_as_float(half ? words[word] & 0xffff0000u : words[word] << 16);
}

// Lane 4 g + t holds: of a rows g and g + 8, columns 2 t, 2 t + 1 and 8 further; of b the same rows of column g; of d
// rows g and g + 8, columns 2 t and 2 t + 1.  Sums are in double: what a tensor core does is its own affair.
void mma_all(int, unsigned, void* const* operands) {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
        const Mma& m = *static_cast<Mma*>(operands[lane]);
        const int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 2; ++i) {
            for (int half = 0; half < 2; ++half) {
                a[g][8 * i + 2 * t + half] = half_of(m.a, 2 * i, half);
                a[g + 8][8 * i + 2 * t + half] = half_of(m.a, 2 * i + 1, half);
                b[8 * i + 2 * t + half][g] = half_of(m.b, i, half);
            }
        }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
        const Mma& m = *static_cast<Mma*>(operands[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = (lane >> 2) + 8 * (i >> 1), column = 2 * (lane & 3) + (i & 1);
            double sum = m.d[i];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            m.d[i] = (float)sum;
        }
    }
}

}  // namespace

extern "C" {

void k3emu_sync_warp(unsigned mask) { meet(mask, sync_all, nullptr, K3EMU_PC); }

uint64_t k3emu_shuffle(int mode, unsigned mask, uint64_t bits, int argument, int width) {
    Shuffle s = {mode, argument, width, bits, 0, K3EMU_PC};
    meet(mask, shuffle_all, &s, s.pc);
    return s.result;
}

uint64_t k3emu_vote(unsigned mask, int predicate) {
    Vote v = {(uint64_t)(predicate != 0), 0};
    meet(mask, vote_all, &v, K3EMU_PC);
    return v.result;
}

void k3emu_mma_bf16(float* d, const uint32_t* a, const uint32_t* b) {
    const uintptr_t pc = K3EMU_PC;
    if (g_block.warps[g_block.self->warp].live != ~0u) {
        report("warp divergence", {pc}, "a matrix instruction at @0 needs all 32 lanes of the warp");
        stop_launch(kLaunchFailed);
    }
    Mma m = {d, a, b};
    meet(~0u, mma_all, &m, pc);
}

}  // extern "C"
