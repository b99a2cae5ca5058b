// The state of a slot in one 64-bit word: {generation, owner, state}.
//
// Every change is one strong compare-and-swap on the whole word, so the word alone says who has to
// finish what, and a ticket or lease of an earlier use of the slot can never match again.
#pragma once

#include <atomic>
#include <cstdint>

namespace asyncrl {

enum class SlotState : std::uint8_t {
  kFree,     // -> kWriting (admit)
  kWriting,  // -> kReady (publish), kFree (withdraw)
  kReady,    // -> kReading (take), kEvicted (room for the oldest group)
  kReading,  // -> kFree (release, evict), kReady (put back)
  kEvicted,  // -> kFree, by the one who evicted it
};

inline const char* to_string(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "FREE";
    case SlotState::kWriting:
      return "WRITING";
    case SlotState::kReady:
      return "READY";
    case SlotState::kReading:
      return "READING";
    case SlotState::kEvicted:
      return "EVICTED";
  }
  return "UNKNOWN";
}

struct SlotValue {
  std::uint32_t generation = 0;  // uses of the slot so far
  std::uint32_t owner = 0;       // process id (24 bits) that has to act next; 0 = nobody
  SlotState state = SlotState::kFree;
};

class SlotWord {
 public:
  // Wait-free. [1] acquire: partner is the release of [2] in the change that wrote the value.
  SlotValue load() const { return unpack(word_.load(std::memory_order_acquire)); }

  // Lock-free: fails only if the word is no longer `from`. [2] acquire-release: whoever enters a
  // state sees all that was written by whoever left the one before; its partners are [1] and the
  // previous [2] on the same word.
  bool change(SlotValue from, SlotValue to) {
    std::uint64_t expected = pack(from);
    return word_.compare_exchange_strong(expected, pack(to), std::memory_order_acq_rel,
                                         std::memory_order_acquire);
  }

 private:
  static constexpr std::uint32_t kOwnerMask = (1u << 24) - 1;

  static std::uint64_t pack(SlotValue v) {
    return std::uint64_t{v.generation} << 32 | std::uint64_t{v.owner & kOwnerMask} << 8 |
           static_cast<std::uint64_t>(v.state);
  }
  static SlotValue unpack(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word >> 32),
            static_cast<std::uint32_t>(word >> 8) & kOwnerMask,
            static_cast<SlotState>(word & 0xff)};
  }

  std::atomic<std::uint64_t> word_{0};
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace asyncrl
