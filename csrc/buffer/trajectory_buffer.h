// Whole prompt groups through shared memory, in admission order, with bounded staleness.
//
//             admit              reserve, publish             take                release
//   credits ---------> WRITING ------------------> READY -------------> READING ----------+
//      ^                  |                          |                     | evict        |
//      |    withdraw      |     room for the oldest  |                     |              v
//      +------------------+--------------------------+---------------------+     trained, rejected
//      |                                                                                  |
//      +------------------------ set_version: engines hold the version cut after it ------+
//
// A slot's memory is free at its release; its credit comes back only with the version trained on
// it. That is what bounds staleness: see staleness.h.
//
// Progress. All methods but `is_closed`, `num_changes` and `wait` take one robust lock between
// processes for a time that grows with the number of slots (`close` and the payload's reading and
// writing do not take it): they are blocking, not lock-free. A process that dies inside the lock
// breaks the buffer: every call then answers kBroken. One that dies with a ticket or a lease
// leaves its slot behind; waits for it end at their deadline with a message that names it. Nothing
// here reclaims such slots, saves a checkpoint or spans two machines.
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
  std::int64_t index = 0;           // number of the admission
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

enum class Withdrawal { kFiltered, kFailed };
enum class Outcome { kTrained, kRejected };

struct Stats {
  std::int64_t num_slots = 0;  // C, the number of credits
  std::int64_t num_credits_free = 0;
  std::int64_t num_admitted = 0;
  std::int64_t num_trained = 0;
  std::int64_t num_rejected = 0;
  std::int64_t num_filtered = 0;
  std::int64_t num_failed = 0;
  std::int64_t num_evicted = 0;
  std::int64_t num_in_flight = 0;  // counted slot by slot
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
  std::vector<std::pair<std::string, std::int64_t>> num_evicted_by_cause;
};

class TrajectoryBuffer {
 public:
  static Status create(const std::string& name, const Settings& settings,
                       std::shared_ptr<TrajectoryBuffer>* out);
  static Status attach(const std::string& name, std::shared_ptr<TrajectoryBuffer>* out);

  explicit TrajectoryBuffer(std::shared_ptr<Segment> segment);

  const Settings& settings() const { return header_->settings; }
  std::int64_t num_slots() const { return static_cast<std::int64_t>(header_->num_slots); }
  std::int64_t staleness_bound() const;

  // Blocking (lock). kWouldBlock: no credit is free.
  Status try_admit(Ticket* out);
  // Blocking (lock). Memory to write the payload into, in place. kWouldBlock: none is free. The
  // oldest group that is not yet taken evicts the youngest ready ones if that makes room, and has
  // their prompts admitted again; otherwise they could hold its memory while they wait for it.
  Status try_reserve(const Ticket& ticket, std::uint64_t num_bytes, std::uint64_t max_segments,
                     std::span<std::byte>* out);
  // Blocking (lock). The group becomes ready; its payload must not be written any more.
  Status publish(const Ticket& ticket, std::span<const VersionSegment> segments);
  // Blocking (lock). The credit is free at once; later groups move up.
  Status withdraw(const Ticket& ticket, Withdrawal cause);

  // Blocking (lock). kWouldBlock: no group is ready that may be taken now.
  Status try_take(GroupView* out);
  // Blocking (lock). Undoes a take: the group is ready again, at its old place.
  Status put_back(Handle handle);
  // Blocking (lock). The memory is free; the credit waits for `set_version`.
  Status release(Handle handle, Outcome outcome);
  // Blocking (lock). Memory and credit are free; later groups move up.
  Status evict(Handle handle, std::string_view cause, bool is_requeued);
  // Blocking (lock). What a lease elsewhere holds.
  Status view(Handle handle, GroupView* out);

  // Blocking (lock). The trainer made `version`, its next, of all groups released so far.
  Status cut_version(std::int64_t version);
  // Blocking (lock). All engines hold `version`; the credits of what it was trained on are free.
  Status set_version(std::int64_t version);

  // Blocking (lock). One consistent count.
  Status stats(Stats* out);
  // Blocking (lock). One line: what blocks progress, if anything.
  std::string describe();

  // Wait-free but for the wake-up. Admit, reserve, publish and take then answer kClosed.
  void close();
  // Wait-free.
  bool is_closed() const;
  // Wait-free. See EventCount; any change of the buffer counts.
  std::uint32_t num_changes() const { return header_->changes.count(); }
  // Blocks until there was a change since `seen` or the time is up.
  void wait(std::uint32_t seen, std::chrono::nanoseconds timeout) {
    header_->changes.wait(seen, timeout);
  }

 private:
  class Guard;

  std::span<Slot> slots() const;
  std::int64_t* requeued() const;
  std::byte* arena() const;

  Status enter(const Guard& guard, bool even_if_closed) const;
  Status find(Handle handle, SlotState state, const char* what, Slot** out) const;
  void change(Slot& slot, SlotState state);
  void free_slot(Slot& slot);
  void leave_order(Slot& slot);
  void requeue(std::int64_t prompt_index);
  Cause* find_cause(std::string_view name);
  void count_eviction(Slot& slot, Cause& cause, bool is_requeued);

  Slot* oldest_untaken() const;
  std::int64_t num_consumed() const;
  std::int64_t num_credits_free() const;
  bool find_room(std::uint64_t num_bytes, bool without_ready, std::uint64_t* start) const;
  bool make_room(const Slot& slot, std::uint64_t num_bytes, std::uint64_t* start);
  GroupView view_of(std::uint32_t slot_number) const;
  Stats count() const;

  std::shared_ptr<Segment> segment_;
  Header* header_;
  Layout layout_;
};

}  // namespace asyncrl
