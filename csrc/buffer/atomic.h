// The atomics of the core.
//
// A build that defines ASYNCRL_ATOMIC_HOOK calls `atomic_hook` before each operation: tests stop,
// reorder or kill there (tests/cpp/explorer, tests/cpp/crash). All other builds are std::atomic.
#pragma once

#include <atomic>

#ifdef ASYNCRL_ATOMIC_HOOK
#include <source_location>
#endif

namespace asyncrl {

#ifdef ASYNCRL_ATOMIC_HOOK

void atomic_hook(const std::source_location& where);

template <typename T>
class Atomic {
  using Where = std::source_location;

 public:
  Atomic(T value = T{}) : value_(value) {}

  T load(std::memory_order order, Where where = Where::current()) const {
    atomic_hook(where);
    return value_.load(order);
  }
  void store(T value, std::memory_order order, Where where = Where::current()) {
    atomic_hook(where);
    value_.store(value, order);
  }
  T fetch_add(T value, std::memory_order order, Where where = Where::current()) {
    atomic_hook(where);
    return value_.fetch_add(value, order);
  }
  T fetch_sub(T value, std::memory_order order, Where where = Where::current()) {
    atomic_hook(where);
    return value_.fetch_sub(value, order);
  }
  bool compare_exchange_strong(T& expected, T desired, std::memory_order success,
                               std::memory_order failure, Where where = Where::current()) {
    atomic_hook(where);
    return value_.compare_exchange_strong(expected, desired, success, failure);
  }

 private:
  std::atomic<T> value_;
};

#else

template <typename T>
using Atomic = std::atomic<T>;

#endif

static_assert(sizeof(Atomic<unsigned long long>) == sizeof(unsigned long long));
static_assert(std::atomic<unsigned long long>::is_always_lock_free);

// Raises `word` to at least `value`. Lock-free: a failed exchange means that another one grew it.
template <typename T>
void raise_to(Atomic<T>& word, T value, std::memory_order order) {
  T seen = word.load(std::memory_order_relaxed);
  while (seen < value &&
         !word.compare_exchange_strong(seen, value, order, std::memory_order_relaxed)) {
  }
}

}  // namespace asyncrl
