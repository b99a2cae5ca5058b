// Whole prompt groups through shared memory, in admission order, with bounded staleness.
//
//             admit              reserve, publish             take                release
//   FREE, ----------> WRITING ------------------> READY -------------> READING ----------+
//   SPENT or             |                          |                     | evict        |
//   REQUEUED             | withdraw                 | room for the oldest  |              v
//      ^                 v                          v                     v     SPENT: trained or
//      +-------------- FREE ------------------- REQUEUED -----------------+     rejected
//      |                                                                                 |
//      +------------------- set_version: engines hold the version cut after it ----------+
//
// A slot is a credit. Its memory is free at the release; it may be admitted again only with the
// version trained on it. That is what bounds staleness: see staleness.h.
//
// Progress. Any process may be stopped or killed at any instruction and the others go on: every
// method but `wait_*` is lock-free (some call somewhere completes), most are wait-free up to the
// scan of the slots; each says which. System calls are made only by `reclaim`, by waiting and by
// waking. What a dead process left behind is reclaimed by whoever waits next.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "buffer/layout.h"
#include "buffer/membership.h"
#include "buffer/order_ring.h"
#include "buffer/payload_slab.h"
#include "buffer/segment.h"
#include "buffer/status.h"

namespace asyncrl {

// Names one use of one slot, in any process.
struct Handle {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
};

// The right and duty to fill one slot.
struct Ticket {
  Handle handle;
  std::int64_t index = 0;           // place in the admission order
  std::int64_t prompt_index = 0;    // which prompt to roll out
  std::int64_t policy_version = 0;  // that all engines held at admission
};

// A published group. Memory is valid while the group is leased and the buffer object lives.
struct GroupView {
  Handle handle;
  std::int64_t index = 0;
  std::int64_t prompt_index = 0;
  std::int64_t min_version = 0;
  std::int64_t max_version = 0;
  std::span<const std::byte> payload;
  std::span<const VersionSegment> segments;
};

// Each slot is counted at one moment; one slot's moment is not another's.
struct Stats {
  std::int64_t num_slots = 0;  // C, the number of credits
  std::int64_t num_credits_free = 0;
  std::int64_t num_credits_spent = 0;  // wait for set_version
  std::int64_t num_admitted = 0;
  std::int64_t num_ended[kNumOutcomes] = {};  // by Outcome
  std::int64_t num_in_flight = 0;
  std::int64_t num_writing = 0;
  std::int64_t num_ready = 0;
  std::int64_t num_leased = 0;
  std::int64_t num_requeued = 0;  // prompts that wait to be admitted again
  std::int64_t bytes_used = 0;
  std::int64_t bytes_capacity = 0;
  std::int64_t trainer_version = 0;
  std::int64_t engine_version = 0;
  std::int64_t staleness_bound = 0;
  std::int64_t max_staleness_seen = 0;

  std::int64_t num_evicted() const;
};

class TrajectoryBuffer {
 public:
  static Status create(const std::string& name, const Settings& settings,
                       std::shared_ptr<TrajectoryBuffer>* out);
  static Status attach(const std::string& name, std::shared_ptr<TrajectoryBuffer>* out);
  // Lays a buffer out in memory that is all zeros and large enough.
  static void format(std::byte* memory, const Settings& settings);
  static std::uint64_t num_bytes(const Settings& settings);

  // `segment` holds a buffer.
  explicit TrajectoryBuffer(std::shared_ptr<Segment> segment);

  const Settings& settings() const { return header_->settings; }
  std::int64_t num_slots() const { return static_cast<std::int64_t>(header_->num_slots); }
  std::int64_t staleness_bound() const;

  // Lock-free. kWouldBlock: no credit is free.
  Status try_admit(Ticket* out);
  // Lock-free. Memory to write the payload into, in place. kWouldBlock: none is free. The oldest
  // group that is not yet taken evicts the youngest ready ones if that makes room, and has their
  // prompts admitted again; otherwise they could hold its memory while they wait for it.
  Status try_reserve(const Ticket& ticket, std::uint64_t num_bytes, std::uint64_t max_segments,
                     std::span<std::byte>* out);
  // Wait-free. The group becomes ready; its payload must not be written any more.
  Status publish(const Ticket& ticket, std::span<const VersionSegment> segments);
  // Wait-free. kFiltered or kFailed. The credit is free at once; later groups move up.
  Status withdraw(const Ticket& ticket, Outcome outcome);

  // Lock-free. kWouldBlock: no group is ready that may be taken now.
  Status try_take(GroupView* out);
  // Lock-free. Undoes a take: the group is ready again, at its old place.
  Status put_back(Handle handle);
  // Wait-free. kTrained or kRejected. The memory is free; the credit waits for `set_version`.
  Status release(Handle handle, Outcome outcome);
  // Wait-free. One of kEvicted*. Memory and credit are free; later groups move up.
  Status evict(Handle handle, Outcome cause, bool is_requeued);
  // Wait-free. What a lease elsewhere holds.
  Status view(Handle handle, GroupView* out);

  // Wait-free. The trainer made `version`, its next, of all groups released so far.
  Status cut_version(std::int64_t version);
  // Lock-free. All engines hold `version`; the credits of what it was trained on are free.
  Status set_version(std::int64_t version);

  // Lock-free. Ends or returns what dead processes hold: a group that was not published is evicted
  // and its prompt admitted again, a lease is put back. Returns the number of slots it changed.
  std::int64_t reclaim();

  // Lock-free: a slot that changes while it is counted is counted again.
  Stats stats() const;
  // Lock-free. One line: what blocks progress, if anything.
  std::string describe();

  // Wait-free but for the wake-up. Admit, reserve, publish and take then answer kClosed.
  void close();
  // Wait-free.
  bool is_closed() const;

  // Wait-free. See EventCount.
  std::uint32_t num_published() const { return header_->published.count(); }
  std::uint32_t num_freed() const { return header_->freed.count(); }
  std::uint32_t num_wakes() const {
    return header_->published.num_wakes() + header_->freed.num_wakes();
  }
  // Block until `num_events` groups were published, or something was freed, since `seen`, or the
  // time is up; then they reclaim what dead processes hold.
  void wait_published(std::uint32_t seen, std::uint32_t num_events,
                      std::chrono::nanoseconds timeout);
  void wait_freed(std::uint32_t seen, std::chrono::nanoseconds timeout);

 private:
  Status enter(bool even_if_closed) const;
  Status find(Handle handle, SlotState state, const char* what, SlotValue* out) const;
  Slot& slot(std::uint32_t number) const { return slots_[number]; }

  bool is_admissible(const Slot& candidate, SlotValue value) const;
  bool try_claim(std::uint32_t number, SlotValue* from);
  bool claim_requeued(std::uint32_t* number, SlotValue* from);
  bool claim_any(std::uint32_t* number, SlotValue* from);
  bool take_next(std::uint32_t* number, SlotValue* reading, std::int64_t* trainer_version);
  bool make_room(std::uint32_t number, SlotValue writing, std::uint32_t num_granules);
  bool evict_youngest_ready(std::int64_t after);
  Status end(const char* what, Handle handle, SlotState state, SlotState next, Outcome outcome);
  bool end_use(std::uint32_t number, SlotValue from, SlotState next, Outcome outcome);
  bool return_lease(std::uint32_t number, SlotValue from);
  bool reclaim_slot(std::uint32_t number, SlotValue value);
  GroupView view_of(std::uint32_t number, SlotValue value) const;
  void count(const Slot& counted, Stats* out) const;

  std::shared_ptr<Segment> segment_;
  Header* header_;
  Layout layout_;
  std::span<Slot> slots_;
  OrderRing order_;
  PayloadSlab slab_;
  Membership membership_;
  // Requeues that this object has looked for.
  std::atomic<std::uint32_t> num_requeues_seen_{0};
};

}  // namespace asyncrl
