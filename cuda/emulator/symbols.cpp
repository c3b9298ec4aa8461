// SPDX-License-Identifier: MIT
//
// Reads the library's own ELF symbol table.

#include "symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>

extern "C" {
// The linker names the ends of a section whose name is a word.
extern unsigned char __start_k3emu_shared[] __attribute__((visibility("hidden")));
extern unsigned char __stop_k3emu_shared[] __attribute__((visibility("hidden")));
extern unsigned char k3emu_shared_tail[] __attribute__((visibility("hidden")));      // linked last; see build.py
}

namespace k3emu {

unsigned char* const g_shared_start = __start_k3emu_shared;
unsigned char* const g_shared_end = __stop_k3emu_shared;
unsigned char* const g_shared_tail = k3emu_shared_tail;

namespace {

std::vector<char> read_file(const char* path) {
    std::vector<char> bytes;
    if (FILE* file = fopen(path, "rb")) {
        fseek(file, 0, SEEK_END);
        bytes.resize((size_t)ftell(file));
        rewind(file);
        if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) bytes.clear();
        fclose(file);
    }
    return bytes;
}

// "name::tile" for a static variable `tile` of the kernel `name`; a device function has its parameters in there too.
SharedArray array_of(uintptr_t start, size_t size, const char* symbol) {
    int status = 0;
    std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(symbol, nullptr, nullptr, &status), free);
    SharedArray array = {start, start + size, "", status == 0 ? plain.get() : symbol};
    const size_t colons = array.name.rfind("::");
    if (colons != std::string::npos && array.name.find('(') == std::string::npos) array.kernel = array.name.substr(0, colons);
    return array;
}

std::vector<SharedArray> read_arrays() {
    std::vector<SharedArray> arrays;
    Dl_info info;
    if (!dladdr(g_shared_start, &info)) return arrays;
    const uintptr_t base = reinterpret_cast<uintptr_t>(info.dli_fbase);
    const uintptr_t first = reinterpret_cast<uintptr_t>(g_shared_start), last = reinterpret_cast<uintptr_t>(g_shared_end);
    const std::vector<char> file = read_file(info.dli_fname);
    if (file.size() < sizeof(Elf64_Ehdr) || memcmp(file.data(), ELFMAG, SELFMAG) != 0) return arrays;
    const Elf64_Ehdr* header = reinterpret_cast<const Elf64_Ehdr*>(file.data());
    const Elf64_Shdr* sections = reinterpret_cast<const Elf64_Shdr*>(file.data() + header->e_shoff);
    for (int s = 0; s < header->e_shnum; ++s) {
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const char* names = file.data() + sections[sections[s].sh_link].sh_offset;
        const Elf64_Sym* symbols = reinterpret_cast<const Elf64_Sym*>(file.data() + sections[s].sh_offset);
        for (size_t i = 0; i < sections[s].sh_size / sizeof(Elf64_Sym); ++i) {
            const uintptr_t start = base + symbols[i].st_value;
            if (ELF64_ST_TYPE(symbols[i].st_info) != STT_OBJECT || start < first || start >= last) continue;
            if (start == reinterpret_cast<uintptr_t>(g_shared_tail)) continue;
            arrays.push_back(array_of(start, symbols[i].st_size, names + symbols[i].st_name));
        }
    }
    std::sort(arrays.begin(), arrays.end(), [](const SharedArray& a, const SharedArray& b) { return a.start < b.start; });
    return arrays;
}

}  // namespace

const std::vector<SharedArray>& shared_arrays() {
    static const std::vector<SharedArray> arrays = read_arrays();
    return arrays;
}

}  // namespace k3emu
