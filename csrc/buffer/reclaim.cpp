// What others do for a process that died. Any process may do it, several at once: each step is one
// exchange of the slot's word from exactly what the dead process left.
#include "buffer/trajectory_buffer.h"

namespace asyncrl {

std::int64_t TrajectoryBuffer::reclaim() {
  std::int64_t num_changed = 0;
  std::uint32_t known_alive = membership_.id();
  for (std::uint32_t number = 0; number < slots_.size(); ++number) {
    const SlotValue value = slot(number).word.load();
    if (!has_owner(value.state) || value.owner == known_alive) continue;
    if (membership_.is_dead(value.owner)) {
      num_changed += reclaim_slot(number, value);
    } else {
      known_alive = value.owner;
    }
  }
  return num_changed;
}

bool TrajectoryBuffer::reclaim_slot(std::uint32_t number, SlotValue value) {
  if (is_entering(value.state)) {
    // Its owner filled a cell or never will: completed, it is being written; else in no order.
    order_.help();
    const bool is_again = value.state == SlotState::kReentering;
    if (slot(number).word.change(value,
                                 value.ended(is_again ? SlotState::kRequeued : SlotState::kFree,
                                             Outcome::kEvictedAbandoned))) {
      // As [20].
      if (is_again) header_->num_requeues.fetch_add(1, std::memory_order_release);
      header_->freed.notify();
      return true;
    }
    const SlotValue now = slot(number).word.load();
    const bool was_completed = now == value.with(SlotState::kWriting, value.owner);
    return was_completed && reclaim_slot(number, now);
  }
  if (value.state == SlotState::kWriting) {
    return end_use(number, value, SlotState::kRequeued, Outcome::kEvictedAbandoned);
  }
  return return_lease(number, value);
}

// Makes a leased group ready again. In kReturning nobody can take it, and whoever looks for the
// oldest untaken group finds it; so it is in reach by the time it is ready.
bool TrajectoryBuffer::return_lease(std::uint32_t number, SlotValue from) {
  Slot& leased = slot(number);
  const SlotValue returning = from.with(SlotState::kReturning, membership_.id());
  if (!leased.word.change(from, returning)) return false;
  // Relaxed: only this process writes it in this state.
  leased.num_deliveries.fetch_add(1, std::memory_order_relaxed);
  order_.reopen(leased.index.load(std::memory_order_relaxed));
  if (!leased.word.change(returning, returning.with(SlotState::kReady, 0))) return false;
  header_->published.notify_all();
  return true;
}

}  // namespace asyncrl
