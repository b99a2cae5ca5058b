#include "buffer/event_count.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace asyncrl {

namespace {

// Not FUTEX_PRIVATE_FLAG: waiters are in other processes.
long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout,
                 nullptr, 0);
}

}  // namespace

void EventCount::notify_all() {
  // [4] sequentially consistent, with [5]: either this thread sees the waiter, or the waiter's
  // futex call sees the new count. Release part: partner is [3].
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (num_waiters_.load(std::memory_order_seq_cst) > 0) {
    futex(&count_, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void EventCount::wait(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec relative{};
  relative.tv_sec = seconds.count();
  relative.tv_nsec = (timeout - seconds).count();
  // [5] sequentially consistent: partner is [4].
  num_waiters_.fetch_add(1, std::memory_order_seq_cst);
  if (count_.load(std::memory_order_seq_cst) == seen) {
    // The kernel compares the count again, under its own lock.
    futex(&count_, FUTEX_WAIT, seen, &relative);
  }
  // Relaxed: a count that is too high for a moment is harmless, and nothing is published by it.
  num_waiters_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace asyncrl
