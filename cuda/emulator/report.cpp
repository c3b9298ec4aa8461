// SPDX-License-Identifier: MIT
//
// The list of reports, and file and line of an address, which binutils' addr2line knows.

#include "report.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "options.h"

namespace k3emu {

const char* g_kernel_name = "";
volatile int g_no_escape = 0;

namespace {

constexpr size_t kMostReports = 1000;

struct Report {
    std::string text;
    std::vector<uintptr_t> places;
    bool resolved;
};
typedef std::tuple<std::string, std::string, std::vector<uintptr_t>> Key;

std::deque<Report> g_reports;
std::set<Key> g_seen;
std::map<uintptr_t, std::string> g_places;

std::string look_up(uintptr_t pc) {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(pc), &info) || !info.dli_fname) return "an unknown place";
    const uintptr_t offset = pc - reinterpret_cast<uintptr_t>(info.dli_fbase);
    char command[4096], line[4096];
    snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname, (size_t)offset);
    std::string first, best;
    if (FILE* pipe = popen(command, "r")) {
        while (fgets(line, sizeof line, pipe)) {               // innermost frame first
            std::string frame = line;
            frame.erase(frame.find_last_not_of(" \n") + 1);
            const size_t note = frame.find(" (");              // " (discriminator 3)"
            if (note != std::string::npos) frame.erase(note);
            if (frame.find("??") != std::string::npos) continue;
            if (frame.compare(0, 2, "./") == 0) frame.erase(0, 2);
            if (first.empty()) first = frame;
            if (best.empty() && frame.find(".cu:") != std::string::npos) best = frame;
        }
        pclose(pipe);
    }
    if (!best.empty()) return best;
    if (!first.empty()) return first;
    snprintf(line, sizeof line, "%s+0x%zx", info.dli_fname, (size_t)offset);
    return line;
}

void resolve(Report* r) {
    if (r->resolved) return;
    std::string text;
    for (size_t i = 0; i < r->text.size(); ++i) {
        const size_t n = i + 1 < r->text.size() ? (size_t)(r->text[i + 1] - '0') : 99;
        if (r->text[i] == '@' && n < r->places.size()) {
            text += where(r->places[n]);
            ++i;
        } else {
            text += r->text[i];
        }
    }
    r->text = text;
    r->resolved = true;
}

}  // namespace

const std::string& where(uintptr_t pc) {
    NoEscape guard;
    auto found = g_places.find(pc);
    if (found == g_places.end()) found = g_places.emplace(pc, look_up(pc)).first;
    return found->second;
}

void report(const char* kind, std::initializer_list<uintptr_t> places, const char* format, ...) {
    NoEscape guard;
    if (g_reports.size() >= kMostReports) return;
    if (!g_seen.insert(Key(kind, g_kernel_name, places)).second && places.size() > 0) return;
    char sentence[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(sentence, sizeof sentence, format, list);
    va_end(list);
    std::string text = std::string(kind) + ": ";
    if (*g_kernel_name) text += std::string("in ") + g_kernel_name + ", ";
    g_reports.push_back(Report{text + sentence, places, false});
    if (options().log) {
        resolve(&g_reports.back());
        fprintf(stderr, "k3emu: %s\n", g_reports.back().text.c_str());
    }
}

size_t report_count() { return g_reports.size(); }

const char* report_text(size_t i) {
    if (i >= g_reports.size()) return nullptr;
    resolve(&g_reports[i]);
    return g_reports[i].text.c_str();
}

void clear_reports() {
    g_reports.clear();
    g_seen.clear();
}

}  // namespace k3emu
