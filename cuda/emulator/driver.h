// SPDX-License-Identifier: MIT
//
// The driver's objects, and what every entry point does first.  All state is behind one lock, which is let go only
// while a host function of a stream runs.
//
// Handles are the addresses of objects that are kept in one table, so that a handle of an object that is gone, or of
// another kind, is noticed.  Work in streams is a queue of operations that run when something waits for them
// (streams.cpp); a capturing stream adds nodes to a graph instead (graphs.cpp).

#ifndef K3EMU_DRIVER_H
#define K3EMU_DRIVER_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "launch.h"
#include "options.h"
#include "report.h"
#include "status.h"

#define K3EMU_API extern "C" __attribute__((visibility("default")))

namespace k3emu {

struct Context_;
struct Stream;
struct Event;
struct Graph;
struct Capture;

struct Object {
    explicit Object(Context_* c) : context(c) {}
    virtual ~Object() = default;
    Context_* context;                       // NULL for a library, which belongs to none
};

enum class NodeType { kKernel = 0, kCopy = 1, kFill = 2, kHost = 3, kEmpty = 5 };

struct Operation {
    NodeType type = NodeType::kEmpty;
    std::function<Status()> run;             // NULL: nothing but order
    bool is_host = false;                    // runs without the lock
    std::shared_ptr<Event> record, wait;
    uint64_t ticket = 0;                     // of the record, or of the one that is waited for
    uint64_t sequence = 0;                   // in the order in which the host asked for them
};

struct Event : Object {
    using Object::Object;
    unsigned flags = 0;
    uint64_t recorded = 0, done = 0;         // tickets; equal when nothing is pending
    Stream* stream = nullptr;                // of the last record
    double milliseconds = 0;                 // when it was done
    std::shared_ptr<Capture> capture;        // where the last record was captured
    std::vector<size_t> nodes;               // what it stands for there
};

struct Stream : Object {
    using Object::Object;
    unsigned flags = 0;
    int priority = 0;
    uint64_t number = 0;
    bool legacy = false, busy = false;       // busy: its first operation runs now
    std::deque<Operation> queue;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> tail;                // nodes that the next captured operation comes after
    bool blocking() const { return (flags & 1u) == 0; }
};

struct InOrder {                             // of their making, so that a seed means the same everywhere
    bool operator()(const Stream* a, const Stream* b) const { return a->number < b->number; }
};
typedef std::set<Stream*, InOrder> Streams;

struct Node {
    Operation operation;
    std::vector<size_t> after;               // numbers of earlier nodes
    Graph* graph = nullptr;
};

struct Graph : Object {
    using Object::Object;
    std::vector<std::unique_ptr<Node>> nodes;
};

struct GraphExec : Object {
    using Object::Object;
    std::vector<Operation> operations;
    std::vector<std::vector<size_t>> after;
    unsigned long long flags = 0;
};

struct Capture {
    Stream* origin = nullptr;
    int mode = 0;                            // 0 global, 1 this thread, 2 relaxed
    pthread_t thread = {};
    uint64_t number = 0;
    bool invalid = false, over = false;
    std::shared_ptr<Graph> graph;
    Streams streams;
};

struct Library : Object {
    using Object::Object;
    bool module = false;                     // made by cuModuleLoad
    std::set<struct Function*> functions;
};

struct Function : Object {
    using Object::Object;
    const k3emu_kernel* kernel = nullptr;
    Library* library = nullptr;
    int max_dynamic = kDefaultDynamic;
    int carveout = -1;
    bool loaded = false;
};

struct Pool : Object {
    using Object::Object;
    bool is_default = false;
    uint64_t threshold = 0;
};

struct Context_ : Object {
    Context_() : Object(this) {}
    int device = 0;
    int primary_users = 0;
    bool primary = false;
    unsigned flags = 0;
    uint64_t number = 0;
    Status sticky = kSuccess;                // the first error of a kernel; every call gives it from then on
    Stream legacy_stream{this};
    Streams streams;                         // the legacy one among them
};

struct Driver {
    bool initialised = false;
    pid_t process = 0;
    std::vector<Context_*> primaries;        // by device, NULL when not active
    std::vector<unsigned> primary_flags;
    uint64_t numbers = 0;                    // of contexts, streams, captures, operations, event tickets
    std::set<Capture*> captures;             // under way
};
Driver& driver();

void lock_driver();
void unlock_driver();
void wait_driver();                          // lets the lock go until another thread has finished an operation
void wake_driver();

// ---- handles (objects.cpp) ----

void add_object(std::shared_ptr<Object> object);
void remove_object(Object* object);
std::shared_ptr<Object> find_object(const void* handle);
template <class T> std::shared_ptr<T> find(const void* handle) { return std::dynamic_pointer_cast<T>(find_object(handle)); }
template <class T, class... A> std::shared_ptr<T> make_object(A&&... arguments) {
    auto object = std::make_shared<T>(static_cast<A&&>(arguments)...);
    add_object(object);
    return object;
}
std::vector<std::shared_ptr<Object>> all_objects();
void forget_objects();

// ---- what every entry point does first (call.cpp) ----

enum : unsigned {
    kAnyTime = 1,        // before cuInit as well
    kNoContext = 2,      // needs no current context
    kUnsafe = 4,         // not permitted while a stream captures
    kReleases = 8,       // frees something: an injected or sticky error is returned, but the thing is freed
    kQuiet = 16,         // does not return the sticky error
};

class Call {
public:
    Call(const char* entry, unsigned flags);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    // What to return at once; kSuccess to go on.
    Status refused() const { return refused_; }
    // At the end of a call that releases: the error that was put off, or else `status`.
    Status finish(Status status) const { return put_off_ != kSuccess ? put_off_ : status; }
    Context_* context() const { return context_; }

private:
    Context_* context_ = nullptr;
    Status refused_ = kSuccess, put_off_ = kSuccess;
};
#define K3EMU_CALL(FLAGS)         \
    Call call(__func__, (FLAGS)); \
    if (call.refused() != kSuccess) return call.refused()

Context_*& current_context();                // of the calling thread
int& capture_mode();                         // of the calling thread
bool& in_host_function();                    // whether the calling thread runs one, which may make no call
bool is_live(const Context_* context);

// ---- counters and faults (control.cpp) ----

uint64_t& counter(const char* name);
// Counts the call; the status to fail with, or kSuccess.
Status count_call(const char* entry);
// The same for the n-th kernel that runs ("kernel"), which fails as if it had faulted.
Status count_kernel(const char* name);

// ---- contexts (contexts.cpp) ----

void destroy_context(Context_* context);
Status require_device(int device);
void forget_contexts();

// ---- streams (streams.cpp) ----

std::shared_ptr<Stream> find_stream(Context_* context, const void* handle);      // 0, 1: the legacy stream
// Adds to the queue, or to the capture; runs at once where streams are not deferred.
Status enqueue(Stream* stream, Operation operation);
Status run_operation(const Operation& operation);
Status finish_stream(Stream* stream);        // runs all of it
Status finish_context(Context_* context);
Status finish_event(Event* event);
bool try_stream(Stream* stream);             // runs one operation, if any; true when none is left
void drop_work(Context_* context);           // after a sticky error

// ---- captures (graphs.cpp) ----

// Whether a call that is unsafe during capture is permitted now; invalidates the capture where it is not.
Status check_unsafe();
Status check_capturing(Context_* context);   // no stream of it may capture, in any mode
Status check_legacy(Stream* stream);         // the legacy stream while a blocking one captures
Status capture_operation(Stream* stream, Operation operation);
Status capture_record(Stream* stream, const std::shared_ptr<Event>& event);
Status capture_wait(Stream* stream, const std::shared_ptr<Event>& event);
void invalidate(Capture* capture);
void leave_capture(Stream* stream);          // because it is destroyed
void abandon_captures(Context_* context);

// ---- memory (transfers.cpp) ----

void free_context_memory(Context_* context, bool report_leaks);

}  // namespace k3emu
#endif
