// SPDX-License-Identifier: MIT
//
// The table of handles, and the lock.

#include <unordered_map>

#include "driver.h"
#include "memory.h"

namespace k3emu {

namespace {

pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t g_changed = PTHREAD_COND_INITIALIZER;

std::unordered_map<const void*, std::shared_ptr<Object>>& table() {
    static std::unordered_map<const void*, std::shared_ptr<Object>> objects;
    return objects;
}

// A child of fork would wait for ever for a lock that another thread of its parent held.
void free_lock() {
    g_lock = PTHREAD_MUTEX_INITIALIZER;
    g_changed = PTHREAD_COND_INITIALIZER;
}
const int g_at_fork = pthread_atfork(nullptr, nullptr, free_lock);

}  // namespace

Driver& driver() {
    static Driver instance;
    return instance;
}

void lock_driver() {
    pthread_mutex_lock(&g_lock);
    open_device_memory();
}
void unlock_driver() {
    close_device_memory();
    pthread_mutex_unlock(&g_lock);
}
void wait_driver() { pthread_cond_wait(&g_changed, &g_lock); }
void wake_driver() { pthread_cond_broadcast(&g_changed); }

void add_object(std::shared_ptr<Object> object) {
    const void* handle = object.get();
    table()[handle] = std::move(object);
}

void remove_object(Object* object) { table().erase(object); }

std::shared_ptr<Object> find_object(const void* handle) {
    auto found = table().find(handle);
    return found == table().end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Object>> all_objects() {
    std::vector<std::shared_ptr<Object>> all;
    for (const auto& entry : table()) all.push_back(entry.second);
    return all;
}

void forget_objects() { table().clear(); }

}  // namespace k3emu
