// Waiting between processes: a counter of events in shared memory, and a futex on it.
//
//   seen = count(); try; if it would block: wait(seen, n, timeout); try again.
//
// An event between `count` and `wait` moves the counter, so the wait returns at once: no wake-up is
// lost. A waiter says how many events it needs, so that a batch costs one wake-up. Not a queue: all
// waiters wake, in no order. A process that dies between an event and its wake-up costs the others
// one time-out; one that dies waiting costs them a needless system call.
#pragma once

#include <chrono>
#include <cstdint>

#include "buffer/atomic.h"

namespace asyncrl {

class EventCount {
 public:
  static constexpr std::uint32_t kMaxEvents = (1u << 16) - 1;

  // Wait-free. [12] acquire: partner is [13]; who sees the new count sees the event behind it.
  std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
  // Wait-free. Wake-ups since the segment was created.
  std::uint32_t num_wakes() const { return num_wakes_.load(std::memory_order_relaxed); }

  // Wait-free but for the system call, which is made only if somebody waits for no more than this.
  void notify();
  // The same, for an event that ends every wait.
  void notify_all();

  // Blocks until `num_events` happened since `seen`, or one that ends every wait; false when the
  // time is up. May return early. num_events: at most kMaxEvents.
  bool wait(std::uint32_t seen, std::uint32_t num_events, std::chrono::nanoseconds timeout);

 private:
  // No waiter needs a count that far away.
  static constexpr std::uint32_t kFar = 1u << 30;

  void wake();
  void need(std::uint32_t count);

  Atomic<std::uint32_t> count_{0};
  Atomic<std::uint32_t> num_waiters_{0};
  Atomic<std::uint32_t> needed_{kFar};  // the least count that a waiter waits for
  Atomic<std::uint32_t> num_wakes_{0};
};

}  // namespace asyncrl
