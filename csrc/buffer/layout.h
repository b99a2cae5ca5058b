// What lies where in the shared segment. Offsets are relative to its start; no pointers inside.
//
//   | Header | Slot x num_slots | order ring cells | granule words | payload arena |
//
// All that more than one process may touch at a time is atomic; the rest is fixed at creation.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "buffer/atomic.h"
#include "buffer/books.h"
#include "buffer/event_count.h"
#include "buffer/slot_word.h"

namespace asyncrl {

inline constexpr std::uint64_t kMagic = 0x46554252'4c525941;  // "AYRLRBUF"
// Raise it with every change of this file: processes of two builds must not share a segment.
inline constexpr std::uint64_t kLayoutVersion = 2;
// x86 fetches lines in pairs and some Arm caches have 128-byte lines.
inline constexpr std::size_t kAlignment = 128;
inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kMaxSlots = 1 << 16;
inline constexpr std::size_t kMinGranuleBytes = 256;
// Words to claim for the largest payload, and memory wasted by the smallest, in balance.
inline constexpr std::size_t kMaxGranules = 1 << 14;
// Participants whose process ids `describe` can name.
inline constexpr std::size_t kNumNamedParticipants = 1024;

constexpr std::uint64_t align_up(std::uint64_t n, std::uint64_t to = kAlignment) {
  return (n + to - 1) / to * to;
}

// A run of tokens that one policy version sampled, up to the next segment's start.
struct VersionSegment {
  std::int64_t token_start;  // in the group's concatenated completion tokens
  std::int64_t policy_version;
};

// One credit, and the prompt group that holds it. Relaxed loads and stores of all but `word` are
// enough: they are written by the owner before it changes the word, and read after loading it.
struct alignas(kAlignment) Slot {
  SlotWord word;
  Atomic<std::int64_t> index{0};         // place in the admission order, see OrderRing
  Atomic<std::int64_t> prompt_index{0};  // assigned with `index`, or kept from an earlier use
  Atomic<std::int64_t> returns_at{0};    // kSpent: engine version that frees it
  Atomic<std::uint64_t> block{0};        // {first granule, number}; kept after the use as a hint
  Atomic<std::uint64_t> payload_bytes{0};
  Atomic<std::uint32_t> max_segments{0};
  Atomic<std::uint32_t> num_segments{0};
  Atomic<std::int64_t> min_version{0};
  Atomic<std::int64_t> max_version{0};
  Atomic<std::uint32_t> num_deliveries{0};  // times this use was put back
  alignas(kAlignment) Books books;
};
static_assert(sizeof(Slot) == 2 * kAlignment);

// Fixed at creation.
struct Settings {
  double staleness_threshold = 0;
  std::int64_t groups_per_version = 1;
  std::int64_t lookahead = 0;
  std::int64_t first_prompt_index = 0;
  std::uint64_t capacity_bytes = 0;
};

struct Header {
  // [3] release by the creator when all else is written; [4] acquire by whoever attaches.
  Atomic<std::uint64_t> magic{0};
  std::uint64_t layout_version = kLayoutVersion;
  std::uint64_t total_bytes = 0;
  std::uint64_t num_slots = 0;
  Settings settings;

  alignas(kAlignment) Atomic<std::uint32_t> is_closed{0};
  Atomic<std::int64_t> trainer_version{0};
  Atomic<std::int64_t> engine_version{0};
  Atomic<std::int64_t> max_staleness_seen{0};

  alignas(kAlignment) Atomic<std::uint64_t> order_end{0};      // OrderRing::End
  alignas(kAlignment) Atomic<std::uint64_t> order_untaken{0};  // OrderRing::Hint
  Atomic<std::int64_t> order_start{0};  // no use before it is in the order any more
  // Hints where to look for a free slot; a wrong one costs time, nothing else.
  alignas(kAlignment) Atomic<std::uint32_t> next_slot{0};
  Atomic<std::uint32_t> num_requeues{0};

  alignas(kAlignment) EventCount published;  // for those who take
  alignas(kAlignment) EventCount freed;      // for those who admit or reserve

  alignas(kAlignment) Atomic<std::uint32_t> num_participants{0};
  std::array<Atomic<std::uint64_t>, kNumNamedParticipants> participants{};  // {id, process id}
};

// Where the parts start, for given sizes.
struct Layout {
  std::uint64_t num_cells;
  std::uint64_t granule_bytes;
  std::uint64_t num_granules;
  std::uint64_t slots;
  std::uint64_t cells;
  std::uint64_t granules;
  std::uint64_t arena;
  std::uint64_t total_bytes;

  Layout(std::uint64_t num_slots, std::uint64_t capacity_bytes)
      // Groups that left the order keep their cells until older groups are taken.
      : num_cells(std::bit_ceil(4 * num_slots)),
        granule_bytes(std::max<std::uint64_t>(kMinGranuleBytes,
                                              std::bit_ceil(capacity_bytes / kMaxGranules))),
        num_granules(capacity_bytes / granule_bytes),
        slots(align_up(sizeof(Header))),
        cells(slots + num_slots * sizeof(Slot)),
        granules(align_up(cells + num_cells * sizeof(std::uint64_t))),
        arena(align_up(granules + num_granules * sizeof(std::uint64_t), kPageBytes)),
        total_bytes(arena + num_granules * granule_bytes) {}
};

}  // namespace asyncrl
