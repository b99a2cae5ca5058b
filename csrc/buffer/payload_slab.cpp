#include "buffer/payload_slab.h"

namespace asyncrl {

namespace {

std::uint64_t pack(PayloadSlab::Block block) {
  return std::uint64_t{block.first} << 32 | block.num_granules;
}

// Never 0, which is a granule that was never claimed or was given up.
std::uint64_t name_of_use(std::uint32_t slot, std::uint32_t generation) {
  return std::uint64_t{generation} << 32 | (slot + 1);
}

std::uint32_t slot_of(std::uint64_t word) { return static_cast<std::uint32_t>(word) - 1; }

}  // namespace

PayloadSlab::Block PayloadSlab::block_of(const Slot& slot) {
  // Relaxed: the slot's word publishes it; scans of others use it as a hint.
  const std::uint64_t word = slot.block.load(std::memory_order_relaxed);
  return {static_cast<std::uint32_t>(word >> 32), static_cast<std::uint32_t>(word)};
}

bool PayloadSlab::claim(std::uint32_t slot, std::uint32_t generation, std::uint32_t num_granules) {
  const std::uint64_t mine = name_of_use(slot, generation);
  Block block{block_of(slots_[slot]).first, num_granules};
  bool is_mine = block_of(slots_[slot]).num_granules >= num_granules && try_claim(block, mine);
  while (!is_mine) {
    const std::optional<std::uint32_t> first = find(num_granules, false);
    if (!first) return false;
    block.first = *first;
    is_mine = try_claim(block, mine);
  }
  slots_[slot].block.store(pack(block), std::memory_order_relaxed);
  return true;
}

bool PayloadSlab::is_free(std::uint64_t word, bool without_ready) const {
  if (word == 0) return true;
  const SlotValue value = slots_[slot_of(word)].word.load();
  return value.generation != static_cast<std::uint32_t>(word >> 32) || is_unused(value.state) ||
         (without_ready && value.state == SlotState::kReady);
}

// First fit, so that memory that was touched is touched again.
std::optional<std::uint32_t> PayloadSlab::find(std::uint32_t num_granules,
                                               bool without_ready) const {
  std::uint32_t first = 0;
  for (std::uint32_t i = 0; i < words_.size();) {
    // Relaxed: claiming decides.
    const std::uint64_t word = words_[i].load(std::memory_order_relaxed);
    if (is_free(word, without_ready)) {
      if (++i - first == num_granules) return first;
      continue;
    }
    const Block block = block_of(slots_[slot_of(word)]);
    const bool is_in_block = block.first <= i && i - block.first < block.num_granules;
    i = is_in_block ? block.first + block.num_granules : i + 1;
    first = i;
  }
  return std::nullopt;
}

// Upwards, so that of two that claim overlapping blocks one always gets on.
bool PayloadSlab::try_claim(Block block, std::uint64_t mine) {
  for (std::uint32_t i = 0; i < block.num_granules; ++i) {
    Atomic<std::uint64_t>& word = words_[block.first + i];
    // Relaxed, all: a granule's use is named in full, and the slot's word orders what is in it.
    // [11] The exchange from a use that is over is unique: no use claims a granule twice.
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    if (is_free(seen, false) && word.compare_exchange_strong(seen, mine, std::memory_order_acq_rel,
                                                             std::memory_order_relaxed)) {
      continue;
    }
    while (i-- > 0) words_[block.first + i].store(0, std::memory_order_release);
    return false;
  }
  return true;
}

}  // namespace asyncrl
