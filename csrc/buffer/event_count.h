// Waiting between processes: a counter of changes in shared memory, and a futex on it.
//
//   seen = count(); try; if it would block: wait(seen, timeout); try again.
//
// A change between `count` and `wait` moves the counter, so the wait returns at once: no wake-up
// is lost. Not a queue: all waiters wake, in no order.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace asyncrl {

class EventCount {
 public:
  // Wait-free. [3] acquire: partner is [4]; who sees the new count sees the change behind it.
  std::uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // Wait-free but for the system call, which is made only if somebody waits.
  void notify_all();

  // Blocks until the count is no longer `seen`, or the time is up. May return early.
  void wait(std::uint32_t seen, std::chrono::nanoseconds timeout);

 private:
  std::atomic<std::uint32_t> count_{0};
  // A waiter that dies leaves this too high: that costs a needless system call, nothing else.
  std::atomic<std::uint32_t> num_waiters_{0};
};

}  // namespace asyncrl
