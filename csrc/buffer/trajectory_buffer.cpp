#include "buffer/trajectory_buffer.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "buffer/checks.h"
#include "buffer/staleness.h"

namespace asyncrl {

namespace {

std::uint64_t num_slots_of(const Settings& s) {
  return static_cast<std::uint64_t>(
      staleness::num_credits(s.staleness_threshold, s.groups_per_version));
}

std::uint64_t table_bytes(std::uint64_t max_segments) {
  return align_up(max_segments * sizeof(VersionSegment));
}

template <typename T>
std::span<T> part(std::byte* memory, std::uint64_t offset, std::uint64_t n) {
  return {std::launder(reinterpret_cast<T*>(memory + offset)), n};
}

template <typename T>
void make(std::byte* memory, std::uint64_t offset, std::uint64_t n) {
  std::uninitialized_value_construct_n(reinterpret_cast<T*>(memory + offset), n);
}

}  // namespace

TrajectoryBuffer::TrajectoryBuffer(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)),
      header_(std::launder(reinterpret_cast<Header*>(segment_->data()))),
      layout_(header_->num_slots, header_->settings.capacity_bytes),
      slots_(part<Slot>(segment_->data(), layout_.slots, header_->num_slots)),
      order_(header_,
             part<Atomic<std::uint64_t>>(segment_->data(), layout_.cells, layout_.num_cells),
             slots_),
      slab_(part<Atomic<std::uint64_t>>(segment_->data(), layout_.granules, layout_.num_granules),
            slots_),
      membership_(header_, segment_->take_fd()) {}

std::uint64_t TrajectoryBuffer::num_bytes(const Settings& settings) {
  return Layout(num_slots_of(settings), settings.capacity_bytes).total_bytes;
}

void TrajectoryBuffer::format(std::byte* memory, const Settings& settings) {
  const std::uint64_t num_slots = num_slots_of(settings);
  const Layout layout(num_slots, settings.capacity_bytes);
  auto* header = new (memory) Header;
  header->total_bytes = layout.total_bytes;
  header->num_slots = num_slots;
  header->settings = settings;
  make<Slot>(memory, layout.slots, num_slots);
  make<Atomic<std::uint64_t>>(memory, layout.cells, layout.num_cells);
  make<Atomic<std::uint64_t>>(memory, layout.granules, layout.num_granules);
  // [3] release: partner is [4].
  header->magic.store(kMagic, std::memory_order_release);
}

Status TrajectoryBuffer::create(const std::string& name, const Settings& settings,
                                std::shared_ptr<TrajectoryBuffer>* out) {
  if (Status status = check_settings(settings); !status.is_ok()) return status;
  std::shared_ptr<Segment> segment;
  Status status = Segment::create(name, num_bytes(settings), &segment);
  if (!status.is_ok()) return status;
  format(segment->data(), settings);
  auto made = std::make_shared<TrajectoryBuffer>(std::move(segment));
  status = made->membership_.status();
  if (status.is_ok()) {
    *out = std::move(made);
  } else {
    (void)Segment::unlink(name);
  }
  return status;
}

Status TrajectoryBuffer::attach(const std::string& name, std::shared_ptr<TrajectoryBuffer>* out) {
  std::shared_ptr<Segment> segment;
  Status status = Segment::attach(name, &segment);
  if (!status.is_ok()) return status;
  const std::string what = "the shared memory named '" + name + "' ";
  if (segment->num_bytes() < sizeof(Header)) {
    return Status::error(Code::kForeign, what + "is no trajectory buffer: it is too small");
  }
  const auto* header = reinterpret_cast<const Header*>(segment->data());
  // [4] acquire: partner is [3].
  if (header->magic.load(std::memory_order_acquire) != kMagic) {
    return Status::error(Code::kForeign, what + "is no trajectory buffer, or not yet a whole one");
  }
  if (header->layout_version != kLayoutVersion) {
    return Status::error(Code::kForeign,
                         what + "has layout version " + std::to_string(header->layout_version) +
                             "; this build reads version " + std::to_string(kLayoutVersion) +
                             " (use one build of asyncrl in all processes)");
  }
  const bool is_whole = header->num_slots <= kMaxSlots &&
                        check_settings(header->settings).is_ok() &&
                        num_slots_of(header->settings) == header->num_slots &&
                        num_bytes(header->settings) == header->total_bytes &&
                        header->total_bytes == segment->num_bytes();
  if (!is_whole) {
    return Status::error(Code::kForeign, what + "is damaged: its sizes contradict each other");
  }
  *out = std::make_shared<TrajectoryBuffer>(std::move(segment));
  return (*out)->membership_.status();
}

std::int64_t TrajectoryBuffer::staleness_bound() const {
  return staleness::bound(num_slots(), settings().lookahead, settings().groups_per_version);
}

Status TrajectoryBuffer::try_admit(Ticket* out) {
  if (Status status = enter(false); !status.is_ok()) return status;
  std::uint32_t number = 0;
  SlotValue from;
  if (!claim_requeued(&number, &from) && !claim_any(&number, &from)) {
    return Status::error(Code::kWouldBlock, "");
  }
  Slot& claimed = slot(number);
  const SlotValue entering = claimed.word.load();
  claimed.index.store(unassigned(entering.generation), std::memory_order_relaxed);
  if (entering.state == SlotState::kEntering) {
    claimed.prompt_index.store(unassigned(entering.generation), std::memory_order_relaxed);
  }
  claimed.max_segments.store(0, std::memory_order_relaxed);
  claimed.num_deliveries.store(0, std::memory_order_relaxed);
  if (!order_.enter(number, entering)) {
    // Nobody has seen this generation, so it is as if it had not been.
    claimed.word.change(entering, from);
    // As [20]: others may have looked for the requeued prompt meanwhile.
    if (from.state == SlotState::kRequeued) {
      header_->num_requeues.fetch_add(1, std::memory_order_release);
    }
    return Status::error(Code::kWouldBlock, "");
  }
  *out = {{number, entering.generation},
          claimed.index.load(std::memory_order_relaxed),
          claimed.prompt_index.load(std::memory_order_relaxed),
          // Read after the entry: the bound's proof needs the version of that moment, or a later
          // one. Acquire: partner is [16].
          header_->engine_version.load(std::memory_order_acquire)};
  return Status::ok();
}

Status TrajectoryBuffer::try_reserve(const Ticket& ticket, std::uint64_t num_bytes,
                                     std::uint64_t max_segments, std::span<std::byte>* out) {
  if (Status status = enter(false); !status.is_ok()) return status;
  SlotValue writing;
  Status status = find(ticket.handle, SlotState::kWriting, "ticket", &writing);
  if (!status.is_ok()) return status;
  Slot& mine = slot(ticket.handle.slot);
  const std::string group = "group " + std::to_string(mine.index.load(std::memory_order_relaxed));
  if (mine.max_segments.load(std::memory_order_relaxed) > 0) {
    return invalid(group + " has its memory already");
  }
  if (max_segments < 1) return invalid("max_segments=0; a group has at least one version segment");
  const std::uint64_t capacity = layout_.num_granules * layout_.granule_bytes;
  const std::uint64_t block_bytes = table_bytes(std::min(max_segments, capacity)) +
                                    align_up(std::clamp<std::uint64_t>(num_bytes, 1, capacity));
  if (num_bytes > capacity || block_bytes > capacity) {
    return invalid(group + " needs " + std::to_string(num_bytes) + " bytes and " +
                   std::to_string(max_segments) + " version segments; the buffer holds " +
                   std::to_string(capacity) + " bytes in all; raise buffer.capacity_bytes");
  }
  const auto num_granules =
      static_cast<std::uint32_t>((block_bytes + layout_.granule_bytes - 1) / layout_.granule_bytes);
  if (!slab_.claim(ticket.handle.slot, writing.generation, num_granules) &&
      !make_room(ticket.handle.slot, writing, num_granules)) {
    return Status::error(Code::kWouldBlock, "");
  }
  mine.payload_bytes.store(num_bytes, std::memory_order_relaxed);
  mine.max_segments.store(static_cast<std::uint32_t>(max_segments), std::memory_order_relaxed);
  std::byte* block =
      segment_->data() + layout_.arena + PayloadSlab::block_of(mine).first * layout_.granule_bytes;
  *out = {block + table_bytes(max_segments), num_bytes};
  return Status::ok();
}

Status TrajectoryBuffer::publish(const Ticket& ticket, std::span<const VersionSegment> segments) {
  if (Status status = enter(false); !status.is_ok()) return status;
  SlotValue writing;
  Status status = find(ticket.handle, SlotState::kWriting, "ticket", &writing);
  if (!status.is_ok()) return status;
  Slot& mine = slot(ticket.handle.slot);
  const std::string group = "group " + std::to_string(mine.index.load(std::memory_order_relaxed));
  const std::uint32_t max_segments = mine.max_segments.load(std::memory_order_relaxed);
  if (max_segments == 0) return invalid(group + " has no memory; call reserve first");
  if (segments.size() > max_segments) {
    return invalid(group + " has " + std::to_string(segments.size()) +
                   " version segments, but max_segments=" + std::to_string(max_segments) +
                   " were reserved");
  }
  // Acquire: partner is [15].
  status = check_segments(segments, header_->trainer_version.load(std::memory_order_acquire));
  if (!status.is_ok()) return status;
  std::memcpy(
      segment_->data() + layout_.arena + PayloadSlab::block_of(mine).first * layout_.granule_bytes,
      segments.data(), segments.size_bytes());
  const auto [oldest, newest] = std::minmax_element(
      segments.begin(), segments.end(),
      [](const auto& a, const auto& b) { return a.policy_version < b.policy_version; });
  mine.num_segments.store(static_cast<std::uint32_t>(segments.size()), std::memory_order_relaxed);
  mine.min_version.store(oldest->policy_version, std::memory_order_relaxed);
  mine.max_version.store(newest->policy_version, std::memory_order_relaxed);
  if (!mine.word.change(writing, writing.with(SlotState::kReady, 0))) {
    return find(ticket.handle, SlotState::kWriting, "ticket", &writing);
  }
  header_->published.notify();
  return Status::ok();
}

Status TrajectoryBuffer::withdraw(const Ticket& ticket, Outcome outcome) {
  return end("ticket", ticket.handle, SlotState::kWriting, SlotState::kFree, outcome);
}

Status TrajectoryBuffer::try_take(GroupView* out) {
  if (Status status = enter(false); !status.is_ok()) return status;
  std::uint32_t number = 0;
  SlotValue reading;
  std::int64_t trainer_version = 0;
  if (!take_next(&number, &reading, &trainer_version)) return Status::error(Code::kWouldBlock, "");
  *out = view_of(number, reading);
  raise_to(header_->max_staleness_seen, staleness::of_token(trainer_version, out->min_version),
           std::memory_order_relaxed);
  return Status::ok();
}

Status TrajectoryBuffer::put_back(Handle handle) {
  if (Status status = enter(true); !status.is_ok()) return status;
  SlotValue reading;
  Status status = find(handle, SlotState::kReading, "lease", &reading);
  if (!status.is_ok()) return status;
  if (!return_lease(handle.slot, reading)) {
    return find(handle, SlotState::kReading, "lease", &reading);
  }
  return Status::ok();
}

Status TrajectoryBuffer::release(Handle handle, Outcome outcome) {
  return end("lease", handle, SlotState::kReading, SlotState::kSpent, outcome);
}

Status TrajectoryBuffer::evict(Handle handle, Outcome cause, bool is_requeued) {
  const SlotState next = is_requeued ? SlotState::kRequeued : SlotState::kFree;
  return end("lease", handle, SlotState::kReading, next, cause);
}

Status TrajectoryBuffer::view(Handle handle, GroupView* out) {
  if (Status status = enter(true); !status.is_ok()) return status;
  SlotValue reading;
  Status status = find(handle, SlotState::kReading, "lease", &reading);
  if (!status.is_ok()) return status;
  *out = view_of(handle.slot, reading);
  // What was read belongs to the lease only if it has not ended meanwhile.
  return find(handle, SlotState::kReading, "lease", &reading);
}

Status TrajectoryBuffer::cut_version(std::int64_t version) {
  if (Status status = enter(true); !status.is_ok()) return status;
  std::int64_t expected = version - 1;
  // [15] acquire-release: who sees the version sees what was released before it.
  if (header_->trainer_version.compare_exchange_strong(expected, version, std::memory_order_acq_rel,
                                                       std::memory_order_acquire)) {
    return Status::ok();
  }
  return invalid("cut_version(" + std::to_string(version) + ") must be called with version " +
                 std::to_string(expected + 1) + ", one above the trainer's");
}

Status TrajectoryBuffer::set_version(std::int64_t version) {
  if (Status status = enter(true); !status.is_ok()) return status;
  const std::int64_t newest = header_->trainer_version.load(std::memory_order_acquire);
  std::int64_t now = header_->engine_version.load(std::memory_order_acquire);
  do {
    if (version < now || version > newest) {
      return invalid("set_version(" + std::to_string(version) +
                     ") is not possible: engines may move to versions " + std::to_string(now) +
                     " to " + std::to_string(newest) + ", those that cut_version made");
    }
    // [16] acquire-release: who admits at this version sees the slots that it frees.
  } while (now != version &&
           !header_->engine_version.compare_exchange_strong(now, version, std::memory_order_acq_rel,
                                                            std::memory_order_acquire));
  header_->freed.notify();
  return Status::ok();
}

void TrajectoryBuffer::close() {
  // [17] release: partner is [18].
  header_->is_closed.store(1, std::memory_order_release);
  header_->published.notify_all();
  header_->freed.notify_all();
}

bool TrajectoryBuffer::is_closed() const {
  // [18] acquire: partner is [17].
  return header_->is_closed.load(std::memory_order_acquire) != 0;
}

void TrajectoryBuffer::wait_published(std::uint32_t seen, std::uint32_t num_events,
                                      std::chrono::nanoseconds timeout) {
  if (!header_->published.wait(seen, std::min(num_events, EventCount::kMaxEvents), timeout)) {
    reclaim();
  }
}

void TrajectoryBuffer::wait_freed(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  if (!header_->freed.wait(seen, 1, timeout)) reclaim();
}

Status TrajectoryBuffer::enter(bool even_if_closed) const {
  if (!even_if_closed && is_closed()) {
    return Status::error(Code::kClosed, "the trajectory buffer is closed");
  }
  return membership_.status();
}

Status TrajectoryBuffer::find(Handle handle, SlotState state, const char* what,
                              SlotValue* out) const {
  if (handle.slot < slots_.size()) {
    *out = slot(handle.slot).word.load();
    if (out->generation == handle.generation && out->state == state) return Status::ok();
  }
  return Status::error(Code::kStaleHandle,
                       std::string("the ") + what + " for slot " + std::to_string(handle.slot) +
                           ", use " + std::to_string(handle.generation) +
                           " is not valid (any more): each is used up once, by publish or "
                           "withdraw, release, evict or put_back");
}

// A credit is free when its slot is, or once engines hold what was trained on its last group.
bool TrajectoryBuffer::is_admissible(const Slot& candidate, SlotValue value) const {
  if (value.state != SlotState::kSpent) return is_unused(value.state);
  // Acquire: partner is [16].
  return candidate.returns_at.load(std::memory_order_relaxed) <=
         header_->engine_version.load(std::memory_order_acquire);
}

bool TrajectoryBuffer::try_claim(std::uint32_t number, SlotValue* from) {
  Slot& candidate = slot(number);
  *from = candidate.word.load();
  if (!is_admissible(candidate, *from)) return false;
  candidate.books.fold(*from);
  SlotValue entering;
  entering.generation = from->generation + 1;
  entering.owner = membership_.id();
  entering.state =
      from->state == SlotState::kRequeued ? SlotState::kReentering : SlotState::kEntering;
  return candidate.word.change(*from, entering);
}

// Prompts that were evicted come before new ones, the oldest first.
bool TrajectoryBuffer::claim_requeued(std::uint32_t* number, SlotValue* from) {
  while (true) {
    // [19] acquire: partner is [20]; whoever sees the count sees the slot in kRequeued.
    const std::uint32_t num_requeues = header_->num_requeues.load(std::memory_order_acquire);
    // Relaxed: a count that is too low costs a look at all slots.
    if (num_requeues == num_requeues_seen_.load(std::memory_order_relaxed)) return false;
    const Slot* oldest = nullptr;
    for (const Slot& other : slots_) {
      if (other.word.load().state != SlotState::kRequeued) continue;
      if (oldest == nullptr || other.prompt_index.load(std::memory_order_relaxed) <
                                   oldest->prompt_index.load(std::memory_order_relaxed)) {
        oldest = &other;
      }
    }
    if (oldest == nullptr) {
      num_requeues_seen_.store(num_requeues, std::memory_order_relaxed);
      return false;
    }
    *number = static_cast<std::uint32_t>(oldest - slots_.data());
    if (try_claim(*number, from)) return true;
  }
}

bool TrajectoryBuffer::claim_any(std::uint32_t* number, SlotValue* from) {
  // Relaxed: a hint.
  const std::uint32_t first = header_->next_slot.load(std::memory_order_relaxed);
  const auto num_slots = static_cast<std::uint32_t>(slots_.size());
  for (std::uint32_t i = 0; i < num_slots; ++i) {
    *number = (first + i) % num_slots;
    if (!try_claim(*number, from)) continue;
    header_->next_slot.store((*number + 1) % num_slots, std::memory_order_relaxed);
    return true;
  }
  return false;
}

// Takes the oldest group, or a ready one that has at most `lookahead` groups of the order, taken or
// not, between itself and the oldest.
bool TrajectoryBuffer::take_next(std::uint32_t* number, SlotValue* reading,
                                 std::int64_t* trainer_version) {
  while (true) {
    // Before the exchange: after it, others may take more, train it and cut versions.
    *trainer_version = header_->trainer_version.load(std::memory_order_acquire);
    const std::optional<std::int64_t> oldest = order_.oldest_untaken();
    if (!oldest) return false;
    bool has_raced = false;
    std::int64_t distance = 0;
    for (std::int64_t index = *oldest; index < order_.end(); ++index) {
      const std::optional<OrderRing::Cell> cell = order_.at(index);
      if (!cell || (cell->has_left && index > *oldest)) continue;
      if (!staleness::may_take(distance++, 0, settings().lookahead)) break;
      const SlotValue ready = slot(cell->slot).word.load();
      if (ready.generation != cell->generation || ready.state != SlotState::kReady) continue;
      *number = cell->slot;
      *reading = ready.with(SlotState::kReading, membership_.id());
      if (slot(cell->slot).word.change(ready, *reading)) return true;
      has_raced = true;
    }
    if (!has_raced) return false;
  }
}

// Lets the oldest untaken group have the memory of the youngest ready ones.
bool TrajectoryBuffer::make_room(std::uint32_t number, SlotValue writing,
                                 std::uint32_t num_granules) {
  const std::int64_t index = slot(number).index.load(std::memory_order_relaxed);
  if (order_.oldest_untaken() != index || !slab_.could_have(num_granules)) return false;
  bool has_evicted = true;
  while (!slab_.claim(number, writing.generation, num_granules)) {
    if (!has_evicted) return false;
    has_evicted = evict_youngest_ready(index);
  }
  return true;
}

bool TrajectoryBuffer::evict_youngest_ready(std::int64_t after) {
  for (std::int64_t index = order_.end() - 1; index > after; --index) {
    const std::optional<OrderRing::Cell> cell = order_.at(index);
    if (!cell) continue;
    const SlotValue ready = slot(cell->slot).word.load();
    if (ready.generation != cell->generation || ready.state != SlotState::kReady) continue;
    if (end_use(cell->slot, ready, SlotState::kRequeued, Outcome::kEvictedMemory)) return true;
  }
  return false;
}

Status TrajectoryBuffer::end(const char* what, Handle handle, SlotState state, SlotState next,
                             Outcome outcome) {
  if (Status status = enter(true); !status.is_ok()) return status;
  SlotValue value;
  Status status = find(handle, state, what, &value);
  if (status.is_ok() && !end_use(handle.slot, value, next, outcome)) {
    status = find(handle, state, what, &value);
  }
  return status;
}

// Ends a use that is in the order. False if its word is no longer `from`.
bool TrajectoryBuffer::end_use(std::uint32_t number, SlotValue from, SlotState next,
                               Outcome outcome) {
  Slot& ended = slot(number);
  const std::int64_t index = ended.index.load(std::memory_order_relaxed);
  if (next == SlotState::kSpent) {
    // Acquire: partner is [15]. Cut meanwhile, the version may count this group or not.
    const std::int64_t trained = header_->trainer_version.load(std::memory_order_acquire) + 1;
    ended.returns_at.store(trained, std::memory_order_relaxed);
  }
  if (!ended.word.change(from, from.ended(next, outcome))) return false;
  if (next == SlotState::kRequeued) {
    // [20] release: partner is [19].
    header_->num_requeues.fetch_add(1, std::memory_order_release);
  }
  if (next != SlotState::kSpent) {
    order_.leave(index, number, from.generation);
    // The groups behind it moved up.
    header_->published.notify_all();
  }
  header_->freed.notify();
  return true;
}

GroupView TrajectoryBuffer::view_of(std::uint32_t number, SlotValue value) const {
  // Relaxed, all: the word orders them.
  const auto get = [](const auto& field) { return field.load(std::memory_order_relaxed); };
  const Slot& held = slot(number);
  const std::byte* block =
      segment_->data() + layout_.arena + PayloadSlab::block_of(held).first * layout_.granule_bytes;
  return {{number, value.generation},
          get(held.index),
          get(held.prompt_index),
          get(held.min_version),
          get(held.max_version),
          {block + table_bytes(get(held.max_segments)), get(held.payload_bytes)},
          {reinterpret_cast<const VersionSegment*>(block), get(held.num_segments)}};
}

}  // namespace asyncrl
