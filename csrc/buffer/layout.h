// What lies where in the shared segment. Offsets are relative to its start; no pointers inside.
//
//   | Header | Slot x num_slots | requeued prompts x num_slots | payload arena |
//
// Only process-local constants and the words of slots, events and the closed flag are read without
// the header's lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "buffer/event_count.h"
#include "buffer/robust_mutex.h"
#include "buffer/slot_word.h"

namespace asyncrl {

inline constexpr std::uint64_t kMagic = 0x46554252'4c525941;  // "AYRLRBUF"
// Raise it with every change of this file: processes of two builds must not share a segment.
inline constexpr std::uint64_t kLayoutVersion = 1;
// x86 fetches lines in pairs and some Arm caches have 128-byte lines.
inline constexpr std::size_t kAlignment = 128;
inline constexpr std::size_t kMaxSlots = 1 << 16;
inline constexpr std::size_t kMaxCauses = 16;
inline constexpr std::size_t kMaxCauseLength = 31;
// Versions that the trainer may be ahead of the engines.
inline constexpr std::size_t kMaxUnloadedVersions = 1024;

constexpr std::uint64_t align_up(std::uint64_t n) {
  return (n + kAlignment - 1) / kAlignment * kAlignment;
}

// A run of tokens that one policy version sampled, up to the next segment's start.
struct VersionSegment {
  std::int64_t token_start;  // in the group's concatenated completion tokens
  std::int64_t policy_version;
};

// One admitted prompt group. All but `word` is guarded by the lock, and written before the word
// changes.
struct alignas(kAlignment) Slot {
  SlotWord word;
  std::int64_t index;     // number of its admission
  std::int64_t position;  // place in the order, without the groups that left it
  std::int64_t prompt_index;
  std::uint64_t block_start;  // in the arena: segments, then the payload
  std::uint64_t block_bytes;  // 0 = nothing reserved yet
  std::uint64_t max_segments;
  std::uint64_t num_segments;
  std::uint64_t payload_bytes;
  std::int64_t min_version;
  std::int64_t max_version;
};
static_assert(sizeof(Slot) == kAlignment);

struct Cause {
  char name[kMaxCauseLength + 1];
  std::int64_t num_evicted;
};

// Guarded by the lock.
struct Ledger {
  std::int64_t next_position = 0;
  std::int64_t next_prompt_index = 0;
  std::int64_t num_requeued = 0;  // prompts in the requeue ring
  std::int64_t requeue_head = 0;
  std::int64_t num_admitted = 0;
  std::int64_t num_trained = 0;
  std::int64_t num_rejected = 0;
  std::int64_t num_filtered = 0;
  std::int64_t num_failed = 0;
  std::int64_t num_evicted = 0;
  std::int64_t trainer_version = 0;
  std::int64_t engine_version = 0;
  std::int64_t num_consumed_returned = 0;  // consumed groups whose credit came back
  std::int64_t max_staleness_seen = 0;
  std::array<std::int64_t, kMaxUnloadedVersions> num_consumed_at_cut{};
  std::array<Cause, kMaxCauses> causes{};
};

// Fixed at creation.
struct Settings {
  double staleness_threshold = 0;
  std::int64_t groups_per_version = 1;
  std::int64_t lookahead = 0;
  std::int64_t first_prompt_index = 0;
  std::uint64_t capacity_bytes = 0;
};

struct Header {
  // [6] release by the creator when all else is written; [7] acquire by whoever attaches.
  std::atomic<std::uint64_t> magic{0};
  std::uint64_t layout_version = kLayoutVersion;
  std::uint64_t total_bytes = 0;
  std::uint64_t num_slots = 0;
  Settings settings;
  alignas(kAlignment) std::atomic<std::uint32_t> is_closed{0};
  alignas(kAlignment) EventCount changes;
  alignas(kAlignment) RobustMutex mutex;
  alignas(kAlignment) Ledger ledger;
};

// Where the parts start, for given sizes.
struct Layout {
  std::uint64_t slots;
  std::uint64_t requeued;
  std::uint64_t arena;
  std::uint64_t total_bytes;

  Layout(std::uint64_t num_slots, std::uint64_t capacity_bytes)
      : slots(align_up(sizeof(Header))),
        requeued(slots + num_slots * sizeof(Slot)),
        arena((requeued + num_slots * sizeof(std::int64_t) + 4095) / 4096 * 4096),
        total_bytes(arena + capacity_bytes) {}
};

}  // namespace asyncrl
