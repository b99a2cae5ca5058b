#include "buffer/order_ring.h"

#include <algorithm>

namespace asyncrl {

namespace {

constexpr std::uint16_t kLapMask = (1u << 14) - 1;
constexpr int kIndexBits = 38;
constexpr int kUntakenBits = 40;

std::uint64_t pack(const OrderRing::Cell& c) {
  return std::uint64_t{c.generation} << 32 | std::uint64_t{c.slot} << 16 |
         std::uint64_t{c.is_again} << 15 | std::uint64_t{c.has_left} << 14 | c.lap;
}

OrderRing::Cell unpack(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word >> 32), static_cast<std::uint16_t>(word >> 16),
          (word >> 15 & 1) != 0, (word >> 14 & 1) != 0,
          static_cast<std::uint16_t>(word & kLapMask)};
}

}  // namespace

bool OrderRing::enter(std::uint32_t slot, SlotValue entering) {
  while (true) {
    help();
    const End end = load_end();
    // [5] acquire: partner is [6]; whoever sees a use in its cell sees its slot being entered.
    std::uint64_t seen = cell(end.index).load(std::memory_order_acquire);
    // Only now is it sure that `seen` is of this lap or the one before.
    if (load_end().index != end.index || unpack(seen).lap == lap(end.index)) continue;
    if (!has_room(end.index)) return false;
    const Cell mine{entering.generation, static_cast<std::uint16_t>(slot),
                    entering.state == SlotState::kReentering, false, lap(end.index)};
    // [6] acquire-release: partner is [5]. No two uses fill the same cell of a lap: `seen` names a
    // use, which can stand in one cell only.
    if (cell(end.index).compare_exchange_strong(seen, pack(mine), std::memory_order_acq_rel,
                                                std::memory_order_relaxed)) {
      help();
      return true;
    }
  }
}

void OrderRing::help() {
  const End end = load_end();
  // Acquire: partner is [6].
  const Cell filled = unpack(cell(end.index).load(std::memory_order_acquire));
  if (filled.lap == lap(end.index)) complete(filled, end);
}

void OrderRing::complete(const Cell& filled, End end) {
  Slot& slot = slots_[filled.slot];
  const SlotValue value = slot.word.load();
  if (value.generation == filled.generation && is_entering(value.state)) {
    // Relaxed, all four: the exchange of the word publishes them.
    std::int64_t none = unassigned(filled.generation);
    slot.index.compare_exchange_strong(none, end.index, std::memory_order_relaxed,
                                       std::memory_order_relaxed);
    none = unassigned(filled.generation);
    const std::int64_t next = header_->settings.first_prompt_index + end.index - end.num_again;
    slot.prompt_index.compare_exchange_strong(none, next, std::memory_order_relaxed,
                                              std::memory_order_relaxed);
    slot.word.change(value, value.with(SlotState::kWriting, value.owner));
  }
  const auto packed = [](End e) {
    return static_cast<std::uint64_t>(e.num_again) << kIndexBits |
           static_cast<std::uint64_t>(e.index);
  };
  std::uint64_t expected = packed(end);
  // [7] release: partner is [8]; who sees the new end sees the slot admitted.
  header_->order_end.compare_exchange_strong(
      expected, packed({end.index + 1, end.num_again + filled.is_again}), std::memory_order_acq_rel,
      std::memory_order_relaxed);
}

std::optional<std::int64_t> OrderRing::oldest_untaken() {
  while (true) {
    const Hint hint = load_untaken();
    if (hint.index >= end()) return std::nullopt;
    const std::optional<Cell> found = at(hint.index);
    if (found) {
      const SlotValue value = slots_[found->slot].word.load();
      if (value.generation == found->generation && is_untaken(value.state)) return hint.index;
    }
    // Fails if a group was put back since the hint was read: it may be this one.
    change_untaken(hint, {hint.index + 1, hint.tag});
  }
}

std::int64_t OrderRing::end() const { return load_end().index; }

std::optional<OrderRing::Cell> OrderRing::at(std::int64_t index) const {
  // Acquire: partner is [6].
  const Cell found = unpack(cell(index).load(std::memory_order_acquire));
  if (found.lap != lap(index)) return std::nullopt;
  return found;
}

void OrderRing::leave(std::int64_t index, std::uint32_t slot, std::uint32_t generation) {
  // Relaxed, both: a mark that is seen late lets a group overtake late, nothing else.
  std::uint64_t seen = cell(index).load(std::memory_order_relaxed);
  Cell marked = unpack(seen);
  if (marked.slot != slot || marked.generation != generation) return;
  marked.has_left = true;
  cell(index).compare_exchange_strong(seen, pack(marked), std::memory_order_relaxed,
                                      std::memory_order_relaxed);
}

void OrderRing::reopen(std::int64_t index) {
  while (true) {
    const Hint hint = load_untaken();
    if (change_untaken(hint, {std::min(hint.index, index), hint.tag + 1})) return;
  }
}

OrderRing::End OrderRing::load_end() const {
  // [8] acquire: partner is [7].
  const std::uint64_t word = header_->order_end.load(std::memory_order_acquire);
  return {static_cast<std::int64_t>(word & ((1ull << kIndexBits) - 1)),
          static_cast<std::int64_t>(word >> kIndexBits)};
}

OrderRing::Hint OrderRing::load_untaken() const {
  // [9] acquire: partner is [10].
  const std::uint64_t word = header_->order_untaken.load(std::memory_order_acquire);
  return {static_cast<std::int64_t>(word & ((1ull << kUntakenBits) - 1)), word >> kUntakenBits};
}

bool OrderRing::change_untaken(Hint from, Hint to) {
  const auto packed = [](Hint h) {
    return h.tag << kUntakenBits | static_cast<std::uint64_t>(h.index);
  };
  std::uint64_t expected = packed(from);
  // [10] acquire-release: partner is [9]; who sees a group put back sees its word in kReturning.
  return header_->order_untaken.compare_exchange_strong(
      expected, packed(to), std::memory_order_acq_rel, std::memory_order_relaxed);
}

Atomic<std::uint64_t>& OrderRing::cell(std::int64_t index) const {
  return cells_[static_cast<std::size_t>(index) & (cells_.size() - 1)];
}

std::uint16_t OrderRing::lap(std::int64_t index) const {
  return static_cast<std::uint16_t>((static_cast<std::uint64_t>(index) / cells_.size() + 1) &
                                    kLapMask);
}

bool OrderRing::has_room(std::int64_t index) {
  const auto num_cells = static_cast<std::int64_t>(cells_.size());
  // Relaxed: it only grows, and a value that is too low makes this look again.
  std::int64_t start = header_->order_start.load(std::memory_order_relaxed);
  if (index - start < num_cells) return true;
  while (start < index && is_over(start)) ++start;
  raise_to(header_->order_start, start, std::memory_order_relaxed);
  return index - start < num_cells;
}

bool OrderRing::is_over(std::int64_t index) const {
  const std::optional<Cell> found = at(index);
  if (!found) return true;
  const SlotValue value = slots_[found->slot].word.load();
  return value.generation != found->generation || is_unused(value.state);
}

}  // namespace asyncrl
