// SPDX-License-Identifier: MIT
//
// Options and the random generator.

#include "options.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include <string>

namespace k3emu {

namespace {

struct Entry {
    const char* name;
    uint64_t Options::* field;
};
constexpr Entry kEntries[] = {
    {"seed", &Options::seed},         {"preempt", &Options::preempt},
    {"deferred", &Options::deferred}, {"watchdog_ms", &Options::watchdog_ms},
    {"memory", &Options::memory},     {"devices", &Options::devices},
    {"arch", &Options::arch},         {"driver", &Options::driver},
    {"init", &Options::init},         {"guard", &Options::guard},
    {"log", &Options::log},
};

}  // namespace

Random& schedule() {
    static Random random;
    return random;
}

Options& options() {
    static Options instance;
    return instance;
}

void read_options() {
    options() = Options();
    for (const Entry& entry : kEntries) {
        std::string variable = "K3EMU_";
        for (const char* c = entry.name; *c; ++c) variable += (char)toupper(*c);
        const char* text = getenv(variable.c_str());
        if (text && *text) options().*entry.field = strtoull(text, nullptr, 0);
    }
    schedule().seed(options().seed, 0);
}

bool set_option(const char* name, uint64_t value) {
    for (const Entry& entry : kEntries) {
        if (strcmp(entry.name, name) == 0) {
            options().*entry.field = value;
            schedule().seed(options().seed, 0);
            return true;
        }
    }
    return false;
}

void Random::seed(uint64_t a, uint64_t b) {
    state = a * 0x9e3779b97f4a7c15ull + b * 0xd1b54a32d192ed03ull + 0x8cb92ba72f3d8dd7ull;
    next();
    next();
}

uint64_t Random::next() {        // a 64-bit counter, its bits mixed by two multiplications
    state += 0x9e3779b97f4a7c15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

}  // namespace k3emu
