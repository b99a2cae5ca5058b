// How many uses of a slot came to which outcome, kept so that no crash can lose or double a count.
//
// A use ends by one exchange of the slot's word, which keeps the outcome. Whoever wants the slot
// next first folds that outcome into its tally; a tally remembers the generation it counted last,
// so folding twice is folding once. Every moment's books therefore balance, slot by slot:
// generation = sum of all tallies + (in use ? 1 : 0) + (ended and not yet folded ? 1 : 0).
#pragma once

#include <array>
#include <cstdint>

#include "buffer/atomic.h"
#include "buffer/slot_word.h"

namespace asyncrl {

class Books {
 public:
  // Wait-free. Counts the outcome of the use that ended with `ended`, once.
  void fold(SlotValue ended) {
    if (ended.outcome == Outcome::kNone) return;
    Atomic<std::uint64_t>& tally = tallies_[static_cast<std::size_t>(ended.outcome)];
    // Relaxed: the slot's word, exchanged next, publishes it.
    std::uint64_t seen = tally.load(std::memory_order_relaxed);
    if (generation_of(seen) >= ended.generation) return;
    const std::uint64_t counted = std::uint64_t{ended.generation} << 32 | (number_of(seen) + 1);
    // Fails only if another process folded the same use; one of a later use cannot come before it.
    tally.compare_exchange_strong(seen, counted, std::memory_order_relaxed,
                                  std::memory_order_relaxed);
  }

  // Wait-free. Uses that came to `outcome`, with the one that ended with `value`, if it did. Exact
  // if the slot's word is still `value` afterwards.
  std::int64_t count(Outcome outcome, SlotValue value) const {
    // Acquire: the second look at the word must come after.
    const std::uint64_t tally =
        tallies_[static_cast<std::size_t>(outcome)].load(std::memory_order_acquire);
    const bool is_unfolded = value.outcome == outcome && generation_of(tally) < value.generation;
    return number_of(tally) + is_unfolded;
  }

 private:
  static std::uint32_t generation_of(std::uint64_t tally) {
    return static_cast<std::uint32_t>(tally >> 32);
  }
  static std::uint32_t number_of(std::uint64_t tally) { return static_cast<std::uint32_t>(tally); }

  std::array<Atomic<std::uint64_t>, kNumOutcomes> tallies_{};
};

}  // namespace asyncrl
