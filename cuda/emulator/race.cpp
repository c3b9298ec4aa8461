// SPDX-License-Identifier: MIT
//
// Races.  Two accesses to a byte, one of them a write and not both atomic, must be ordered.  What orders them, under
// CUDA's rules: the same thread; a barrier of the block between them; __syncwarp between lanes that both take part; a
// __threadfence and an atomic operation by the first block and an atomic operation on the same address by the second;
// the end of the kernel.  A shuffle orders nothing, and blocks are not ordered at all.
//
// Time.  An era is the time of one block between two barriers; eras are numbered through the whole process, so that a
// number tells block and launch as well.  Inside an era each warp counts its __syncwarps.
//
// Memory.  Each word of four bytes has the stamps of its last write and of its reads since then.  A word that is
// touched in parts has four such sets instead, one per byte.

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <vector>

#include "block.h"
#include "check.h"
#include "memory.h"
#include "report.h"

namespace k3emu {

namespace {

enum : uint8_t {
    kAtomic = 1,
    kManyWarps = 2,          // `lanes` is of one warp; others have done the same in this era
    kManyBlocks = 4,         // so have earlier blocks of the launch
    kSplit = 8,              // look at the four bytes instead
};

struct Stamp {
    uint32_t era;            // 0: never
    uint32_t pc;             // from the start of this library
    uint32_t lanes;          // that have done it at this time
    uint16_t time;           // of the warp
    uint8_t warp, flags;
};
struct Cell {
    Stamp write;
    Stamp before;            // a read by an earlier block of the launch
    Stamp read;              // by this block
};

struct Shadow {              // of a range of memory
    Cell* words = nullptr;
    Cell* bytes = nullptr;
};

struct Clock {               // of a warp, in one era
    uint32_t era = 0;
    uint16_t time = 1;
    uint16_t full = 0;       // the last __syncwarp of all lanes
    bool partial = false;    // some were of fewer lanes: `known` is in use
    uint16_t known[kWarp][kWarp];        // [lane][other]: up to which time the other's accesses come before the lane's
};

struct Release {             // what a block has published through one atomic operation
    uint32_t first, last;    // eras of the whole block, up to its last barrier before the fence
    uint32_t own_era;        // and what the thread itself did after that
    uint8_t warp, lane;
};
typedef std::vector<Release> Releases;

constexpr size_t kSharedBytes = 512 * 1024;

Shadow g_global, g_shared;
Clock g_clocks[kMaxWarps];
uint32_t g_era = 0, g_launch_era = 1, g_block_era = 1;
uint32_t g_fenced[kMaxThreads];          // the era of the thread's last fence
std::map<uintptr_t, Releases> g_releases;                        // by address, of this launch
std::vector<std::pair<const Releases*, size_t>> g_acquired;      // by this block: the first so many of a list

Cell* reserve(size_t cells) {
    void* p = mmap(nullptr, cells * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<Cell*>(p);
}

bool ready(Shadow* s, size_t bytes) {
    if (!s->words) s->words = reserve(bytes / 4);
    if (!s->bytes) s->bytes = reserve(bytes);
    return s->words && s->bytes;
}

Clock& clock_of(int warp) {
    Clock& c = g_clocks[warp];
    if (c.era != g_era) {
        c.era = g_era;
        c.time = 1;
        c.full = 0;
        c.partial = false;
    }
    return c;
}

bool acquired(const Stamp& s) {
    for (const auto& list : g_acquired) {
        for (size_t i = 0; i < list.second; ++i) {
            const Release& r = (*list.first)[i];
            if (s.era >= r.first && s.era <= r.last) return true;
            if (s.era == r.own_era && s.warp == r.warp && s.lanes == 1u << r.lane && !(s.flags & kManyWarps)) return true;
        }
    }
    return false;
}

// Whether what the stamp tells of comes before what the thread that runs does now.
bool ordered(const Stamp& s, bool shared) {
    if (s.era < g_launch_era) return true;
    if (s.era < g_block_era) return shared || ((s.flags & kManyBlocks) == 0 && acquired(s));
    if (s.flags & kManyBlocks) return false;
    if (s.era < g_era) return true;
    const Thread& t = *g_block.self;
    if (s.flags & kManyWarps || s.warp != t.warp) return false;
    const Clock& c = clock_of(t.warp);
    for (unsigned others = s.lanes & ~(1u << t.lane); others; others &= others - 1) {
        const uint16_t known = c.partial ? std::max(c.full, c.known[t.lane][__builtin_ctz(others)]) : c.full;
        if (known < s.time) return false;
    }
    return true;
}

// Adds the thread's access to a stamp of accesses that are not ordered before it.
void join(Stamp* s, const Stamp& now) {
    if (s->era < g_launch_era) {
        *s = now;
        return;
    }
    const uint8_t keep = s->flags & (kManyWarps | kManyBlocks);
    if (s->era < g_block_era) {
        *s = now;
        s->flags |= (uint8_t)(kManyBlocks | (keep & kManyBlocks));
    } else if (s->era < g_era) {
        *s = now;
        s->flags |= keep & kManyBlocks;
    } else if (s->warp == now.warp) {
        s->lanes |= now.lanes;
        s->time = now.time;
        s->pc = now.pc;
    } else {
        s->flags |= kManyWarps;
    }
}

const char* doing(Access access) {
    return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "updates atomically";
}

void conflict(const Stamp& s, bool shared, const char* did, Access access, uintptr_t pc) {
    const Thread& t = *g_block.self;
    const uintptr_t other = g_image + s.pc;
    const uint3& b = k3emu_here.index;
    if (s.era < g_block_era || s.flags & kManyBlocks) {
        report("race", {pc, other},
               "thread %d of block (%u, %u, %u) %s global memory at @0 that another block of the launch %s at @1", t.id, b.x, b.y,
               b.z, doing(access), did);
    } else {
        report("race", {pc, other},
               "thread %d of block (%u, %u, %u) %s %s memory at @0 that thread %d %s at @1, with no barrier between", t.id, b.x,
               b.y, b.z, doing(access), shared ? "shared" : "global", s.warp * kWarp + __builtin_ctz(s.lanes), did);
    }
}

void visit(Cell* cell, bool shared, Access access, const Stamp& now, uintptr_t pc) {
    const bool both_atomic = access == Access::kAtomic && cell->write.flags & kAtomic;
    const bool after_write = ordered(cell->write, shared);
    if (!after_write && !both_atomic) {
        conflict(cell->write, shared, cell->write.flags & kAtomic ? "updated atomically" : "wrote", access, pc);
    }
    if (access == Access::kRead) {
        if (!shared && cell->read.era >= g_launch_era && cell->read.era < g_block_era) cell->before = cell->read;
        if (ordered(cell->read, true)) {
            cell->read = now;
        } else {
            join(&cell->read, now);
        }
        return;
    }
    if (!shared && !ordered(cell->before, shared)) {
        conflict(cell->before, shared, "read", access, pc);
    } else if (!ordered(cell->read, shared)) {
        conflict(cell->read, shared, "read", access, pc);
    }
    if (both_atomic && !after_write) {
        join(&cell->write, now);
    } else {
        cell->write = now;
    }
    cell->before.era = cell->read.era = 0;
}

}  // namespace

void race_begin_launch() {
    g_launch_era = ++g_era;
    g_releases.clear();
}

void race_begin_block() {
    g_block_era = ++g_era;
    g_acquired.clear();
    memset(g_fenced, 0, sizeof g_fenced);
}

void next_era() { ++g_era; }

void sync_lanes(int warp, unsigned lanes) {
    if (!g_checking) return;
    Clock& c = clock_of(warp);
    if (lanes == g_block.warps[warp].live) {
        c.full = c.time;
    } else {
        if (!c.partial) memset(c.known, 0, sizeof c.known);
        c.partial = true;
        uint16_t joined[kWarp] = {};
        for (unsigned left = lanes; left; left &= left - 1) {
            const uint16_t* known = c.known[__builtin_ctz(left)];
            for (int i = 0; i < kWarp; ++i) joined[i] = std::max(joined[i], known[i]);
        }
        for (unsigned left = lanes; left; left &= left - 1) joined[__builtin_ctz(left)] = c.time;
        for (unsigned left = lanes; left; left &= left - 1) memcpy(c.known[__builtin_ctz(left)], joined, sizeof joined);
    }
    if (c.time < 0xffff) ++c.time;
}

void note_fence() {
    if (g_checking) g_fenced[g_block.self->id] = g_era;
}

void note_atomic(uintptr_t address) {
    if (!g_checking || !in_arena(address)) return;
    NoEscape guard;
    const Thread& t = *g_block.self;
    Releases& list = g_releases[address];
    if (!list.empty()) g_acquired.emplace_back(&list, list.size());
    const uint32_t fenced = g_fenced[t.id];
    if (fenced) list.push_back(Release{g_block_era, fenced - 1, fenced, (uint8_t)t.warp, (uint8_t)t.lane});
}

void race_check(bool shared, size_t offset, size_t size, Access access, uintptr_t pc) {
    Shadow& shadow = shared ? g_shared : g_global;
    if (!ready(&shadow, shared ? kSharedBytes : g_arena_size)) return;
    const Thread& t = *g_block.self;
    const Stamp now = {g_era,           (uint32_t)(pc - g_image),
                       1u << t.lane,    clock_of(t.warp).time,
                       (uint8_t)t.warp, (uint8_t)(access == Access::kAtomic ? kAtomic : 0)};
    for (size_t at = offset, end = offset + size; at < end;) {
        Cell* word = &shadow.words[at / 4];
        Cell* bytes = &shadow.bytes[at / 4 * 4];
        const bool whole = at % 4 == 0 && end - at >= 4;
        if (word->write.era < g_launch_era && word->write.flags & kSplit) word->write.flags = 0;   // of an earlier launch
        if (whole && !(word->write.flags & kSplit)) {
            visit(word, shared, access, now, pc);
            at += 4;
            continue;
        }
        if (!(word->write.flags & kSplit)) {
            for (int i = 0; i < 4; ++i) bytes[i] = *word;
            word->write.era = g_era;
            word->write.flags = kSplit;
        }
        word->write.era = g_era;
        for (const size_t stop = std::min(end, at / 4 * 4 + 4); at < stop; ++at)
            visit(&shadow.bytes[at], shared, access, now, pc);
    }
}

void race_forget(size_t offset, size_t size) {
    if (g_global.words) madvise(g_global.words + offset / 4, size / 4 * sizeof(Cell), MADV_DONTNEED);
    if (g_global.bytes) madvise(g_global.bytes + offset, size * sizeof(Cell), MADV_DONTNEED);
}

}  // namespace k3emu
