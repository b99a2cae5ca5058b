// What the buffer says about itself.
#include <algorithm>
#include <numeric>

#include "buffer/trajectory_buffer.h"

namespace asyncrl {

std::int64_t Stats::num_evicted() const {
  const auto first = static_cast<std::size_t>(Outcome::kEvictedStale);
  return std::accumulate(num_ended + first, num_ended + kNumOutcomes, std::int64_t{0});
}

Stats TrajectoryBuffer::stats() const {
  // Acquire, all: what is counted below happened after what these say.
  const auto get = [](const auto& word) { return word.load(std::memory_order_acquire); };
  Stats out;
  out.num_slots = num_slots();
  out.bytes_capacity = static_cast<std::int64_t>(layout_.num_granules * layout_.granule_bytes);
  out.staleness_bound = staleness_bound();
  out.trainer_version = get(header_->trainer_version);
  out.engine_version = get(header_->engine_version);
  out.max_staleness_seen = get(header_->max_staleness_seen);
  for (const Slot& counted : slots_) count(counted, &out);
  return out;
}

void TrajectoryBuffer::count(const Slot& counted, Stats* out) const {
  SlotValue value;
  std::int64_t ended[kNumOutcomes] = {};
  std::int64_t num_granules = 0;
  bool is_free = false;
  do {
    value = counted.word.load();
    for (std::size_t i = 1; i < kNumOutcomes; ++i) {
      ended[i] = counted.books.count(static_cast<Outcome>(i), value);
    }
    is_free = is_admissible(counted, value);
    const bool has_memory = counted.max_segments.load(std::memory_order_relaxed) > 0;
    num_granules = has_memory ? PayloadSlab::block_of(counted).num_granules : 0;
  } while (counted.word.load() != value);
  out->num_admitted += value.generation;
  for (std::size_t i = 1; i < kNumOutcomes; ++i) out->num_ended[i] += ended[i];
  out->num_credits_free += is_free;
  if (is_unused(value.state)) {
    out->num_credits_spent += !is_free;
    out->num_requeued += value.state == SlotState::kRequeued;
    return;
  }
  ++out->num_in_flight;
  out->num_ready += value.state == SlotState::kReady;
  const bool is_leased = value.state == SlotState::kReading || value.state == SlotState::kReturning;
  out->num_leased += is_leased;
  out->num_writing += !is_leased && value.state != SlotState::kReady;
  out->bytes_used += num_granules * static_cast<std::int64_t>(layout_.granule_bytes);
}

std::string TrajectoryBuffer::describe() {
  const Stats now = stats();
  std::string text = std::to_string(now.num_credits_free) + " of " + std::to_string(now.num_slots) +
                     " slot credits free (" + std::to_string(now.num_credits_spent) +
                     " wait for set_version); ";
  const std::optional<std::int64_t> oldest = order_.oldest_untaken();
  const std::optional<OrderRing::Cell> cell = oldest ? order_.at(*oldest) : std::nullopt;
  if (!cell) {
    text += "no group waits to be taken; ";
  } else {
    const SlotValue value = slot(cell->slot).word.load();
    text += "oldest unconsumed group is " + std::to_string(*oldest) + " (prompt " +
            std::to_string(slot(cell->slot).prompt_index.load(std::memory_order_relaxed)) + "), " +
            to_string(value.state);
    if (has_owner(value.state)) {
      text += " by process " + std::to_string(membership_.process_of(value.owner));
      if (membership_.is_dead(value.owner)) text += ", which is dead";
    }
    text += "; ";
  }
  return text + std::to_string(now.num_writing) + " being written, " +
         std::to_string(now.num_ready) + " ready, " + std::to_string(now.num_leased) + " leased; " +
         std::to_string(now.bytes_used) + " of " + std::to_string(now.bytes_capacity) +
         " bytes used; trainer at version " + std::to_string(now.trainer_version) +
         ", engines at " + std::to_string(now.engine_version);
}

}  // namespace asyncrl
