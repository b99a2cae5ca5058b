// The state of a slot in one 64-bit word: {generation, owner, outcome, state}.
//
// Every change is one strong compare-and-swap on the whole word, so the word alone says who has to
// finish what, and a ticket or lease of an earlier use of the slot can never match again. A slot
// *is* a credit: what is given back, and when, is in the same word.
//
//   FREE ------> ENTERING ---+                                 +--> READY (again, same place)
//   SPENT --+                +--> WRITING --> READY --> READING --> RETURNING
//   REQUEUED --> REENTERING -+       |          |          |
//                                    +----------+----------+--> FREE, SPENT or REQUEUED, with the
//                                                               outcome of the use that ended
#pragma once

#include <cstdint>

#include "buffer/atomic.h"

namespace asyncrl {

enum class SlotState : std::uint8_t {
  kFree,        // no group
  kSpent,       // its group was trained or rejected: free once engines hold version `returns_at`
  kRequeued,    // its group was evicted: free, and its prompt is admitted again first
  kEntering,    // claimed for a new prompt, not yet in the order
  kReentering,  // claimed for the requeued prompt, not yet in the order
  kWriting,     // admitted: a rollout fills it
  kReady,       // published
  kReading,     // leased
  kReturning,   // a lease that is being put back
};

// What became of the last use of a slot that is in no use.
enum class Outcome : std::uint8_t {
  kNone,  // never used
  kTrained,
  kRejected,
  kFiltered,
  kFailed,
  kEvictedStale,      // too old when it was taken
  kEvictedMemory,     // its memory was needed for the oldest group
  kEvictedAbandoned,  // its process died before it was published
  kEvictedUnwanted,   // for a reason of the caller's
};
inline constexpr std::size_t kNumOutcomes = 9;

// Free, or free once a version is loaded.
constexpr bool is_unused(SlotState state) { return state <= SlotState::kRequeued; }
constexpr bool is_entering(SlotState state) {
  return state == SlotState::kEntering || state == SlotState::kReentering;
}
// In the order, and not taken by anybody.
constexpr bool is_untaken(SlotState state) {
  return state >= SlotState::kEntering && state != SlotState::kReading;
}
// Some process has to act next.
constexpr bool has_owner(SlotState state) {
  return state >= SlotState::kEntering && state != SlotState::kReady;
}

inline const char* to_string(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "FREE";
    case SlotState::kSpent:
      return "SPENT";
    case SlotState::kRequeued:
      return "REQUEUED";
    case SlotState::kEntering:
      return "ENTERING";
    case SlotState::kReentering:
      return "REENTERING";
    case SlotState::kWriting:
      return "WRITING";
    case SlotState::kReady:
      return "READY";
    case SlotState::kReading:
      return "READING";
    case SlotState::kReturning:
      return "RETURNING";
  }
  return "UNKNOWN";
}

struct SlotValue {
  std::uint32_t generation = 0;  // uses of the slot so far
  std::uint32_t owner = 0;       // participant (24 bits) that has to act next; 0 = nobody
  SlotState state = SlotState::kFree;
  Outcome outcome = Outcome::kNone;  // of the use that ended, if it is unused

  bool operator==(const SlotValue&) const = default;

  SlotValue with(SlotState next, std::uint32_t next_owner) const {
    return {generation, next_owner, next, Outcome::kNone};
  }
  SlotValue ended(SlotState next, Outcome how) const { return {generation, 0, next, how}; }
};

class SlotWord {
 public:
  // Wait-free. [1] acquire: partner is the release of [2] in the change that wrote the value.
  SlotValue load() const { return unpack(word_.load(std::memory_order_acquire)); }

  // Wait-free: fails only if the word is no longer `from`. [2] acquire-release: whoever enters a
  // state sees all that was written by whoever left the one before; partners are [1] and the
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
           static_cast<std::uint64_t>(v.outcome) << 4 | static_cast<std::uint64_t>(v.state);
  }
  static SlotValue unpack(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word >> 32),
            static_cast<std::uint32_t>(word >> 8) & kOwnerMask, static_cast<SlotState>(word & 0xf),
            static_cast<Outcome>(word >> 4 & 0xf)};
  }

  Atomic<std::uint64_t> word_{0};
};

}  // namespace asyncrl
