// SPDX-License-Identifier: MIT
//
// Graphs: looked at, made executable, and launched.

#include <algorithm>

#include "driver.h"

using namespace k3emu;

namespace {

Status instantiate(Context_* context, GraphExec** out, Graph* handle, unsigned long long flags) {
    auto graph = find<Graph>(handle);
    if (!graph || !out) return kInvalidValue;
    auto exec = make_object<GraphExec>(context);
    for (const auto& node : graph->nodes) {
        exec->operations.push_back(node->operation);
        exec->after.push_back(node->after);
    }
    exec->flags = flags;
    *out = exec.get();
    return kSuccess;
}

// Nodes in the order of capture, or with a seed in any order that their dependencies permit.
Status run_graph(const GraphExec& exec) {
    std::vector<bool> done(exec.operations.size(), false);
    for (size_t left = exec.operations.size(); left > 0; --left) {
        std::vector<size_t> ready;
        for (size_t n = 0; n < done.size() && (options().seed || ready.empty()); ++n) {
            const std::vector<size_t>& after = exec.after[n];
            if (!done[n] && std::all_of(after.begin(), after.end(), [&](size_t i) { return done[i]; })) ready.push_back(n);
        }
        const size_t next = ready[options().seed ? schedule().below(ready.size()) : 0];
        const Status status = run_operation(exec.operations[next]);
        if (status != kSuccess) return status;
        done[next] = true;
    }
    return kSuccess;
}

}  // namespace

K3EMU_API int cuGraphCreate(Graph** out, unsigned flags) {
    K3EMU_CALL(0);
    if (!out || flags) return kInvalidValue;
    *out = make_object<Graph>(call.context()).get();
    return kSuccess;
}

K3EMU_API int cuGraphDestroy(Graph* handle) {
    K3EMU_CALL(kReleases | kNoContext);
    auto graph = find<Graph>(handle);
    if (!graph) return kInvalidValue;
    remove_object(graph.get());
    return call.finish(kSuccess);
}

K3EMU_API int cuGraphGetNodes(Graph* handle, Node** nodes, size_t* count) {
    K3EMU_CALL(kNoContext);
    auto graph = find<Graph>(handle);
    if (!graph || !count) return kInvalidValue;
    if (nodes) {
        for (size_t i = 0; i < *count; ++i) nodes[i] = i < graph->nodes.size() ? graph->nodes[i].get() : nullptr;
    }
    *count = nodes ? std::min(*count, graph->nodes.size()) : graph->nodes.size();
    return kSuccess;
}

K3EMU_API int cuGraphNodeGetType(Node* node, int* type) {
    K3EMU_CALL(kNoContext);
    if (!node || !type || !find<Graph>(node->graph)) return kInvalidValue;
    *type = (int)node->operation.type;
    return kSuccess;
}

K3EMU_API int cuGraphInstantiateWithFlags(GraphExec** out, Graph* graph, unsigned long long flags) {
    K3EMU_CALL(kUnsafe);
    return instantiate(call.context(), out, graph, flags);
}

K3EMU_API int cuGraphInstantiateWithParams(GraphExec** out, Graph* graph, void* parameters) {
    K3EMU_CALL(kUnsafe);
    struct Parameters {
        uint64_t flags;
        void* stream;
        void* error_node;
        int result;
    };
    if (!parameters) return kInvalidValue;
    auto* p = static_cast<Parameters*>(parameters);
    p->error_node = nullptr;
    p->result = 0;
    return instantiate(call.context(), out, graph, p->flags);
}

K3EMU_API int cuGraphExecGetFlags(GraphExec* handle, unsigned long long* flags) {
    K3EMU_CALL(kNoContext);
    auto exec = find<GraphExec>(handle);
    if (!exec || !flags) return kInvalidValue;
    *flags = exec->flags;
    return kSuccess;
}

K3EMU_API int cuGraphUpload(GraphExec* handle, void* stream) {
    K3EMU_CALL(0);
    if (!find<GraphExec>(handle)) return kInvalidValue;
    return find_stream(call.context(), stream) ? kSuccess : kInvalidHandle;
}

K3EMU_API int cuGraphLaunch(GraphExec* handle, void* stream_handle) {
    K3EMU_CALL(0);
    auto exec = find<GraphExec>(handle);
    auto stream = find_stream(call.context(), stream_handle);
    if (!exec) return kInvalidValue;
    if (!stream) return kInvalidHandle;
    if (!stream->capture) ++counter("graph_launches");
    Operation operation;
    operation.run = [exec] { return run_graph(*exec); };
    return enqueue(stream.get(), operation);
}

// The graph's work replaces the executable's: the same nodes in the same order, with other parameters.
K3EMU_API int cuGraphExecUpdate_v2(GraphExec* handle, Graph* graph_handle, void* result) {
    K3EMU_CALL(0);
    struct Result {
        int result;
        Node *node, *from;
    };
    auto exec = find<GraphExec>(handle);
    auto graph = find<Graph>(graph_handle);
    if (!exec || !graph || !result) return kInvalidValue;
    auto* out = static_cast<Result*>(result);
    *out = Result{0, nullptr, nullptr};
    bool same = exec->operations.size() == graph->nodes.size();
    for (size_t i = 0; same && i < graph->nodes.size(); ++i) {
        same = exec->operations[i].type == graph->nodes[i]->operation.type && exec->after[i] == graph->nodes[i]->after;
    }
    if (!same) {
        out->result = 2;                                     // the topology changed
        return kGraphExecUpdateFailure;
    }
    for (size_t i = 0; i < graph->nodes.size(); ++i) exec->operations[i] = graph->nodes[i]->operation;
    return kSuccess;
}

K3EMU_API int cuGraphExecDestroy(GraphExec* handle) {
    K3EMU_CALL(kReleases | kNoContext);
    auto exec = find<GraphExec>(handle);
    if (!exec) return kInvalidValue;
    remove_object(exec.get());
    return call.finish(kSuccess);
}
