// SPDX-License-Identifier: MIT
//
// A launch: blocks one after another, faults of the hardware turned into reports, and a limit on time.

#include "launch.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "block.h"
#include "check.h"
#include "memory.h"
#include "report.h"

namespace k3emu {

namespace {

std::vector<const k3emu_kernel*>& kernels() {
    static std::vector<const k3emu_kernel*> all;
    return all;
}

struct Fault {
    int signal = 0;
    uintptr_t address = 0, pc = 0;
    uintptr_t call = 0;                  // where the thread last called the runtime
};

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGURG};    // the last is the watchdog's
constexpr int kSignalCount = sizeof kSignals / sizeof kSignals[0];
struct sigaction g_before[kSignalCount];
Fault g_fault;
volatile sig_atomic_t g_running = 0;
pthread_t g_runner;
const Launch* g_launch = nullptr;
std::vector<void*> g_arguments;
uint64_t g_launches = 0;
unsigned char* g_dynamic_end = nullptr;

uintptr_t instruction_of(void* context) {
#if defined(__x86_64__)
    return (uintptr_t)static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#endif
}

// Runs on the alternate stack, with no signal blocked, so that it can leave by switching to the main context.
void on_signal(int number, siginfo_t* info, void* context) {
    const bool ours = g_running && pthread_equal(pthread_self(), g_runner);
    if (!ours && number == SIGURG) return;
    if (!ours) {                                             // not a kernel: whoever was there before deals with it
        for (int i = 0; i < kSignalCount; ++i) {
            if (kSignals[i] == number) sigaction(number, &g_before[i], nullptr);
        }
        return;
    }
    if (number == SIGURG && g_no_escape) return;             // the timer comes again
    g_running = 0;
    g_fault = Fault{number, (uintptr_t)info->si_addr, instruction_of(context), g_block.self->pc};
    g_no_escape = 0;
    stop_launch(kLaunchFailed);
}

class Guard {                                                // signals, timer and floating-point mode of one launch
public:
    explicit Guard(uint64_t limit_ms) {
        static char stack[64 * 1024];
        stack_t alternate = {};
        alternate.ss_sp = stack;
        alternate.ss_size = sizeof stack;
        sigaltstack(&alternate, &stack_before_);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
        for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &g_before[i]);
        if (limit_ms) {
            sigevent event = {};
            event.sigev_notify = SIGEV_THREAD_ID;
            event.sigev_signo = SIGURG;
            event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
            timed_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
            itimerspec when = {};
            when.it_value.tv_sec = (time_t)(limit_ms / 1000);
            when.it_value.tv_nsec = (long)(limit_ms % 1000) * 1000000;
            when.it_interval.tv_nsec = 20000000;
            if (timed_) timer_settime(timer_, 0, &when, nullptr);
        }
        g_runner = pthread_self();
#if defined(__x86_64__)
        mode_ = _mm_getcsr();
        _mm_setcsr(0x1f80);                                  // to nearest, subnormals kept, no traps
#endif
    }
    ~Guard() {
#if defined(__x86_64__)
        _mm_setcsr(mode_);
#endif
        g_running = 0;
        if (timed_) timer_delete(timer_);
        for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &g_before[i], nullptr);
        sigaltstack(&stack_before_, nullptr);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

private:
    stack_t stack_before_ = {};
    timer_t timer_ = {};
    bool timed_ = false;
    unsigned mode_ = 0;
};

Status explain_fault() {
    Fault f = g_fault;
    if (f.call && where(f.pc).find(".cu:") == std::string::npos) f.pc = f.call;
    if (f.signal == SIGURG) {
        report("timeout", {f.pc},
               "the kernel ran for more than %llu ms of processor time, at last at @0; does it wait for another block?",
               (unsigned long long)options().watchdog_ms);
        return kLaunchTimeout;
    }
    if (f.signal == SIGFPE) {
        report("undefined behaviour", {f.pc}, "a division by zero at @0");
        return kLaunchFailed;
    }
    if (f.signal == SIGILL) {
        report("trap", {f.pc}, "an instruction that does not exist at @0");
        return kIllegalInstruction;
    }
    if (in_stacks(f.address)) {
        report("stack overflow", {f.pc}, "thread %zu needs more than %zu bytes of stack at @0", stack_of(f.address),
               (size_t)kStack);
        return kLaunchFailed;
    }
    if (f.address == 0 && f.signal == SIGSEGV) {             // the processor does not say where
        report("misaligned", {f.pc}, "an access at @0 is misaligned, or its address is none");
        return kMisalignedAddress;
    }
    report_address(f.address, 1, "touches", f.pc);
    return kIllegalAddress;
}

void call_kernel() { g_launch->kernel->call(g_arguments.data()); }

uint64_t common_divisor(uint64_t a, uint64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

Status run_blocks(const Launch& l) {
    const uint64_t blocks = (uint64_t)l.grid.x * l.grid.y * l.grid.z;
    uint64_t factor = 1, shift = 0;                          // block number -> factor * number + shift: a permutation
    if (options().seed) {
        Random random;
        random.seed(options().seed, g_launches << 32);
        shift = random.below(blocks);
        while (factor = 1 + random.below(blocks), common_divisor(factor, blocks) != 1) {
        }
    }
    for (uint64_t i = 0; i < blocks; ++i) {
        const uint64_t n = (uint64_t)(((unsigned __int128)factor * i + shift) % blocks);
        k3emu_here.index =
            uint3{(unsigned)(n % l.grid.x), (unsigned)(n / l.grid.x % l.grid.y), (unsigned)(n / ((uint64_t)l.grid.x * l.grid.y))};
        shared_begin_block();
        race_begin_block();
        g_fault = Fault();
        g_running = 1;
        const int status = run_block(l.block, call_kernel, (g_launches << 32) + n + 1);
        g_running = 0;
        g_block.self = nullptr;
        if (g_fault.signal) open_device_memory();            // the signal has closed it to this thread
        if (status != kSuccess) return g_fault.signal ? explain_fault() : (Status)status;
    }
    return kSuccess;
}

bool make_dynamic() {                                        // dynamic shared memory ends at a page without access
    if (g_dynamic_end) return true;
    constexpr size_t size = (kMaxDynamic + 4095) / 4096 * 4096;
    void* p = mmap(nullptr, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    g_dynamic_end = static_cast<unsigned char*>(p) + size;
    g_dynamic_range = reinterpret_cast<uintptr_t>(p);
    g_dynamic_range_size = size + 4096;
    return mprotect(g_dynamic_end, 4096, PROT_NONE) == 0;
}

}  // namespace

const std::vector<const k3emu_kernel*>& all_kernels() { return kernels(); }

const k3emu_kernel* find_kernel(const std::string& name) {
    for (const k3emu_kernel* kernel : kernels()) {
        if (name == kernel->name) return kernel;
    }
    return nullptr;
}

size_t parameter_offset(const k3emu_kernel* kernel, int i) {
    size_t offset = 0;
    for (int j = 0;; ++j) {
        const size_t alignment = kernel->alignments[j];
        offset = (offset + alignment - 1) / alignment * alignment;
        if (j == i) return offset;
        offset += kernel->sizes[j];
    }
}

size_t parameter_bytes(const k3emu_kernel* kernel) { return parameter_offset(kernel, kernel->parameters); }

Status run_launch(const Launch& launch) {
    if (!make_stacks() || !make_dynamic()) return kOperatingSystem;
    find_image();
    ++g_launches;
    g_launch = &launch;
    g_kernel_name = launch.kernel->name;
    g_arguments.clear();
    for (int i = 0; i < launch.kernel->parameters; ++i) {
        g_arguments.push_back(const_cast<unsigned char*>(launch.arguments.data()) + parameter_offset(launch.kernel, i));
    }
    g_no_escape = 0;                                         // a launch that was stopped may have left it raised
    k3emu_here.size = launch.block;
    k3emu_here.grid = launch.grid;
    k3emu_dynamic = g_dynamic_end - (launch.dynamic_bytes + 15) / 16 * 16;
    shared_begin_launch(launch.dynamic_bytes);
    race_begin_launch();
    Status status;
    {
        Guard guard(options().watchdog_ms);
        status = run_blocks(launch);
    }
    check_tails();
    shared_end_launch();
    g_kernel_name = "";
    return status;
}

void forget_launches() { g_launches = 0; }

}  // namespace k3emu

extern "C" void k3emu_add_kernel(const k3emu_kernel* kernel) { k3emu::kernels().push_back(kernel); }
