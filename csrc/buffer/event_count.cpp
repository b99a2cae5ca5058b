#include "buffer/event_count.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace asyncrl {

namespace {

// Not FUTEX_PRIVATE_FLAG: waiters are in other processes.
long futex(Atomic<std::uint32_t>* word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout,
                 nullptr, 0);
}

// Counts wrap.
bool is_reached(std::uint32_t count, std::uint32_t needed) {
  return static_cast<std::int32_t>(count - needed) >= 0;
}

}  // namespace

void EventCount::notify() {
  // [13] sequentially consistent, with [14]: either this thread sees the waiter and its need, or
  // the waiter sees the new count. Release part: partner is [12].
  const std::uint32_t now = count_.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (num_waiters_.load(std::memory_order_seq_cst) == 0) return;
  std::uint32_t needed = needed_.load(std::memory_order_seq_cst);
  if (!is_reached(now, needed)) return;
  // The one who moves it wakes; waiters that are not satisfied say again what they need.
  if (needed_.compare_exchange_strong(needed, now + kFar, std::memory_order_seq_cst,
                                      std::memory_order_seq_cst)) {
    wake();
  }
}

void EventCount::notify_all() {
  // More than any waiter needs. As [13].
  count_.fetch_add(kMaxEvents + 1, std::memory_order_seq_cst);
  if (num_waiters_.load(std::memory_order_seq_cst) > 0) wake();
}

bool EventCount::wait(std::uint32_t seen, std::uint32_t num_events,
                      std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  // [14] sequentially consistent: partner is [13].
  num_waiters_.fetch_add(1, std::memory_order_seq_cst);
  bool is_there = false;
  while (true) {
    need(seen + num_events);
    const std::uint32_t now = count_.load(std::memory_order_seq_cst);
    is_there = is_reached(now, seen + num_events);
    const auto left = deadline - std::chrono::steady_clock::now();
    if (is_there || left <= left.zero()) break;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    timespec relative{};
    relative.tv_sec = seconds.count();
    relative.tv_nsec = (left - seconds).count();
    // The kernel compares the count again, under its own lock.
    futex(&count_, FUTEX_WAIT, now, &relative);
  }
  // Relaxed: a count that is too high for a moment is harmless, and nothing is published by it.
  num_waiters_.fetch_sub(1, std::memory_order_relaxed);
  return is_there;
}

void EventCount::wake() {
  num_wakes_.fetch_add(1, std::memory_order_relaxed);
  futex(&count_, FUTEX_WAKE, INT_MAX, nullptr);
}

void EventCount::need(std::uint32_t count) {
  std::uint32_t needed = needed_.load(std::memory_order_seq_cst);
  while (!is_reached(count, needed)) {
    if (needed_.compare_exchange_strong(needed, count, std::memory_order_seq_cst,
                                        std::memory_order_seq_cst)) {
      return;
    }
  }
}

}  // namespace asyncrl
