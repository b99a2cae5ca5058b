// Memory for payloads: an arena of equal granules, each with a word that names the use of a slot
// that claimed it.
//
// A granule whose use is over is free, without anybody having to free it. So no death can leak
// memory, and giving a group's memory back is the same exchange that ends its use of the slot.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "buffer/atomic.h"
#include "buffer/layout.h"

namespace asyncrl {

class PayloadSlab {
 public:
  struct Block {
    std::uint32_t first = 0;
    std::uint32_t num_granules = 0;
  };

  PayloadSlab(std::span<Atomic<std::uint64_t>> words, std::span<Slot> slots)
      : words_(words), slots_(slots) {}

  static Block block_of(const Slot& slot);

  // Lock-free. Claims adjacent granules for a use of a slot that has none yet; kept in the slot's
  // `block`. False if there are none free. Memory of the slot's last use is tried first: it is
  // still in the cache.
  bool claim(std::uint32_t slot, std::uint32_t generation, std::uint32_t num_granules);
  // Wait-free. Whether that many adjacent ones would be free if all ready groups were gone.
  bool could_have(std::uint32_t num_granules) const { return find(num_granules, true).has_value(); }

 private:
  bool is_free(std::uint64_t word, bool without_ready) const;
  std::optional<std::uint32_t> find(std::uint32_t num_granules, bool without_ready) const;
  bool try_claim(Block block, std::uint64_t mine);

  std::span<Atomic<std::uint64_t>> words_;
  std::span<Slot> slots_;
};

}  // namespace asyncrl
