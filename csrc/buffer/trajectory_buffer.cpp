#include "buffer/trajectory_buffer.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "buffer/staleness.h"

namespace asyncrl {

namespace {

constexpr char kMemoryCause[] = "memory";

std::uint64_t segment_bytes(const Slot& slot) {
  return align_up(slot.max_segments * sizeof(VersionSegment));
}

Status invalid(std::string message) {
  return Status::error(Code::kInvalidArgument, std::move(message));
}

Status check_settings(const Settings& s) {
  if (!std::isfinite(s.staleness_threshold) || s.staleness_threshold < 0) {
    return invalid("staleness_threshold=" + std::to_string(s.staleness_threshold) +
                   " must be finite and >= 0 (async.staleness_threshold)");
  }
  if (s.groups_per_version < 1) {
    return invalid("groups_per_version=" + std::to_string(s.groups_per_version) +
                   " must be >= 1 (mini_batch_groups x require_batches x "
                   "trigger_parameter_sync_step)");
  }
  constexpr std::int64_t kMaxLookahead = std::int64_t{1} << 32;
  if (s.lookahead < 0 || s.lookahead > kMaxLookahead) {
    return invalid("lookahead=" + std::to_string(s.lookahead) + " must be in [0, " +
                   std::to_string(kMaxLookahead) + "] (async.lookahead)");
  }
  if (s.first_prompt_index < 0) {
    return invalid("first_prompt_index=" + std::to_string(s.first_prompt_index) + " must be >= 0");
  }
  constexpr std::uint64_t kMaxCapacity = std::uint64_t{1} << 46;
  if (s.capacity_bytes < 4096 || s.capacity_bytes > kMaxCapacity) {
    return invalid("capacity_bytes=" + std::to_string(s.capacity_bytes) + " must be in [4096, " +
                   std::to_string(kMaxCapacity) + "] (buffer.capacity_bytes)");
  }
  const std::int64_t num_slots =
      staleness::num_credits(s.staleness_threshold, s.groups_per_version);
  if (num_slots > static_cast<std::int64_t>(kMaxSlots)) {
    return invalid("staleness_threshold=" + std::to_string(s.staleness_threshold) +
                   " and groups_per_version=" + std::to_string(s.groups_per_version) + " make " +
                   std::to_string(num_slots) + " slots; at most " + std::to_string(kMaxSlots) +
                   " are possible (lower async.staleness_threshold)");
  }
  return Status::ok();
}

Status check_segments(std::span<const VersionSegment> segments, std::int64_t trainer_version) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto& [start, version] = segments[i];
    const bool is_in_order = i == 0 ? start == 0 : start > segments[i - 1].token_start;
    if (!is_in_order) {
      return invalid("segments[" + std::to_string(i) + "] starts at token " +
                     std::to_string(start) +
                     "; the first must start at 0 and each other after the one before");
    }
    if (version < 0 || version > trainer_version) {
      return invalid("segments[" + std::to_string(i) + "] has policy_version " +
                     std::to_string(version) + "; versions that exist are 0 to " +
                     std::to_string(trainer_version) + " (cut_version makes the next)");
    }
  }
  return segments.empty() ? invalid("segments is empty; a group has at least one token")
                          : Status::ok();
}

}  // namespace

// Holds the lock for a scope and, if anything was changed in it, wakes waiters after it.
class TrajectoryBuffer::Guard {
 public:
  explicit Guard(Header* header, bool notifies = true)
      : header_(header), is_locked_(header->mutex.lock()), notifies_(notifies) {}
  ~Guard() {
    if (!is_locked_) return;
    header_->mutex.unlock();
    if (notifies_) header_->changes.notify_all();
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  bool is_locked() const { return is_locked_; }
  // Nothing was changed: a waiter that wakes others without need would keep them all awake.
  void be_silent() { notifies_ = false; }

 private:
  Header* header_;
  bool is_locked_;
  bool notifies_;
};

TrajectoryBuffer::TrajectoryBuffer(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)),
      header_(std::launder(reinterpret_cast<Header*>(segment_->data()))),
      layout_(header_->num_slots, header_->settings.capacity_bytes) {}

Status TrajectoryBuffer::create(const std::string& name, const Settings& settings,
                                std::shared_ptr<TrajectoryBuffer>* out) {
  if (Status status = check_settings(settings); !status.is_ok()) return status;
  const auto num_slots = static_cast<std::uint64_t>(
      staleness::num_credits(settings.staleness_threshold, settings.groups_per_version));
  const Layout layout(num_slots, settings.capacity_bytes);
  std::shared_ptr<Segment> segment;
  Status status = Segment::create(name, layout.total_bytes, &segment);
  if (!status.is_ok()) return status;
  auto* header = new (segment->data()) Header;
  header->total_bytes = layout.total_bytes;
  header->num_slots = num_slots;
  header->settings = settings;
  header->ledger.next_prompt_index = settings.first_prompt_index;
  for (std::uint64_t i = 0; i < num_slots; ++i) {
    new (segment->data() + layout.slots + i * sizeof(Slot)) Slot{};
  }
  if (const int error = header->mutex.init(); error != 0) {
    (void)Segment::unlink(name);
    return Status::error(Code::kSystem,
                         std::string("creating the buffer's lock: ") + std::strerror(error));
  }
  // [6] release: partner is [7].
  header->magic.store(kMagic, std::memory_order_release);
  *out = std::make_shared<TrajectoryBuffer>(std::move(segment));
  return Status::ok();
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
  // [7] acquire: partner is [6].
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
                        Layout(header->num_slots, header->settings.capacity_bytes).total_bytes ==
                            header->total_bytes &&
                        header->total_bytes == segment->num_bytes();
  if (!is_whole) {
    return Status::error(Code::kForeign, what + "is damaged: its sizes contradict each other");
  }
  *out = std::make_shared<TrajectoryBuffer>(std::move(segment));
  return Status::ok();
}

std::int64_t TrajectoryBuffer::staleness_bound() const {
  return staleness::bound(num_slots(), settings().lookahead, settings().groups_per_version);
}

Status TrajectoryBuffer::try_admit(Ticket* out) {
  // Silent: an admission makes nothing possible for others.
  Guard guard(header_, false);
  if (Status status = enter(guard, false); !status.is_ok()) return status;
  if (num_credits_free() == 0) return Status::error(Code::kWouldBlock, "");
  Ledger& ledger = header_->ledger;
  const auto all = slots();
  const auto slot = std::find_if(all.begin(), all.end(), [](const Slot& s) {
    return s.word.load().state == SlotState::kFree;
  });
  // A free credit means a free slot: every slot in use holds a credit.
  slot->index = ledger.num_admitted++;
  slot->position = ledger.next_position++;
  slot->block_bytes = 0;
  if (ledger.num_requeued > 0) {
    slot->prompt_index = requeued()[ledger.requeue_head];
    ledger.requeue_head = (ledger.requeue_head + 1) % num_slots();
    --ledger.num_requeued;
  } else {
    slot->prompt_index = ledger.next_prompt_index++;
  }
  change(*slot, SlotState::kWriting);
  const Handle handle{static_cast<std::uint32_t>(&*slot - all.data()),
                      slot->word.load().generation};
  *out = {handle, slot->index, slot->prompt_index, ledger.engine_version};
  return Status::ok();
}

Status TrajectoryBuffer::try_reserve(const Ticket& ticket, std::uint64_t num_bytes,
                                     std::uint64_t max_segments, std::span<std::byte>* out) {
  Guard guard(header_);
  if (Status status = enter(guard, false); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(ticket.handle, SlotState::kWriting, "ticket", &slot);
  if (!status.is_ok()) return status;
  if (slot->block_bytes > 0) {
    return invalid("group " + std::to_string(slot->index) + " has its memory already");
  }
  const std::uint64_t capacity = settings().capacity_bytes;
  const std::uint64_t most = std::min(num_bytes, capacity);
  const std::uint64_t block_bytes =
      align_up(std::min(max_segments, capacity) * sizeof(VersionSegment)) +
      align_up(std::max<std::uint64_t>(most, 1));
  if (num_bytes > capacity || max_segments > capacity || block_bytes > capacity) {
    return invalid("group " + std::to_string(slot->index) + " needs " + std::to_string(num_bytes) +
                   " bytes and " + std::to_string(max_segments) +
                   " version segments; the buffer holds " + std::to_string(capacity) +
                   " bytes in all; raise buffer.capacity_bytes");
  }
  std::uint64_t start = 0;
  if (!make_room(*slot, block_bytes, &start)) {
    guard.be_silent();
    return Status::error(Code::kWouldBlock, "");
  }
  slot->block_start = start;
  slot->block_bytes = block_bytes;
  slot->max_segments = max_segments;
  slot->payload_bytes = num_bytes;
  *out = {arena() + start + segment_bytes(*slot), num_bytes};
  return Status::ok();
}

Status TrajectoryBuffer::publish(const Ticket& ticket, std::span<const VersionSegment> segments) {
  Guard guard(header_);
  if (Status status = enter(guard, false); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(ticket.handle, SlotState::kWriting, "ticket", &slot);
  if (!status.is_ok()) return status;
  if (slot->block_bytes == 0) {
    return invalid("group " + std::to_string(slot->index) + " has no memory; call reserve first");
  }
  if (segments.size() > slot->max_segments) {
    return invalid("group " + std::to_string(slot->index) + " has " +
                   std::to_string(segments.size()) + " version segments, but max_segments=" +
                   std::to_string(slot->max_segments) + " were reserved");
  }
  status = check_segments(segments, header_->ledger.trainer_version);
  if (!status.is_ok()) return status;
  std::memcpy(arena() + slot->block_start, segments.data(), segments.size_bytes());
  const auto [oldest, newest] = std::minmax_element(
      segments.begin(), segments.end(),
      [](const auto& a, const auto& b) { return a.policy_version < b.policy_version; });
  slot->num_segments = segments.size();
  slot->min_version = oldest->policy_version;
  slot->max_version = newest->policy_version;
  change(*slot, SlotState::kReady);
  return Status::ok();
}

Status TrajectoryBuffer::withdraw(const Ticket& ticket, Withdrawal cause) {
  Guard guard(header_);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(ticket.handle, SlotState::kWriting, "ticket", &slot);
  if (!status.is_ok()) return status;
  Ledger& ledger = header_->ledger;
  ++(cause == Withdrawal::kFiltered ? ledger.num_filtered : ledger.num_failed);
  leave_order(*slot);
  free_slot(*slot);
  return Status::ok();
}

Status TrajectoryBuffer::try_take(GroupView* out) {
  Guard guard(header_);
  if (Status status = enter(guard, false); !status.is_ok()) return status;
  const Slot* oldest = oldest_untaken();
  Slot* chosen = nullptr;
  for (Slot& slot : slots()) {
    if (slot.word.load().state != SlotState::kReady) continue;
    if (!staleness::may_take(slot.position, oldest->position, settings().lookahead)) continue;
    if (chosen == nullptr || slot.position < chosen->position) chosen = &slot;
  }
  if (chosen == nullptr) {
    guard.be_silent();
    return Status::error(Code::kWouldBlock, "");
  }
  change(*chosen, SlotState::kReading);
  Ledger& ledger = header_->ledger;
  ledger.max_staleness_seen = std::max(
      ledger.max_staleness_seen, staleness::of_token(ledger.trainer_version, chosen->min_version));
  *out = view_of(static_cast<std::uint32_t>(chosen - slots().data()));
  return Status::ok();
}

Status TrajectoryBuffer::put_back(Handle handle) {
  Guard guard(header_);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(handle, SlotState::kReading, "lease", &slot);
  if (status.is_ok()) change(*slot, SlotState::kReady);
  return status;
}

Status TrajectoryBuffer::release(Handle handle, Outcome outcome) {
  Guard guard(header_);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(handle, SlotState::kReading, "lease", &slot);
  if (!status.is_ok()) return status;
  Ledger& ledger = header_->ledger;
  ++(outcome == Outcome::kTrained ? ledger.num_trained : ledger.num_rejected);
  free_slot(*slot);
  return Status::ok();
}

Status TrajectoryBuffer::evict(Handle handle, std::string_view cause, bool is_requeued) {
  Guard guard(header_);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(handle, SlotState::kReading, "lease", &slot);
  if (!status.is_ok()) return status;
  Cause* counted = find_cause(cause);
  if (counted == nullptr) {
    return invalid("cause='" + std::string(cause) + "' cannot be counted; legal: 1 to " +
                   std::to_string(kMaxCauseLength) + " characters, and at most " +
                   std::to_string(kMaxCauses) + " different causes in the buffer's life");
  }
  count_eviction(*slot, *counted, is_requeued);
  return Status::ok();
}

Status TrajectoryBuffer::view(Handle handle, GroupView* out) {
  Guard guard(header_, false);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Slot* slot = nullptr;
  Status status = find(handle, SlotState::kReading, "lease", &slot);
  if (status.is_ok()) *out = view_of(handle.slot);
  return status;
}

Status TrajectoryBuffer::cut_version(std::int64_t version) {
  Guard guard(header_);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Ledger& ledger = header_->ledger;
  if (version != ledger.trainer_version + 1) {
    return invalid("cut_version(" + std::to_string(version) + ") must be called with version " +
                   std::to_string(ledger.trainer_version + 1) +
                   ": the trainer's next, one at a time");
  }
  constexpr auto kMaxAhead = static_cast<std::int64_t>(kMaxUnloadedVersions);
  if (version - ledger.engine_version > kMaxAhead) {
    return invalid("cut_version(" + std::to_string(version) + ") is more than " +
                   std::to_string(kMaxAhead) + " versions ahead of the engines, which hold " +
                   std::to_string(ledger.engine_version) + "; call set_version when they load one");
  }
  ledger.trainer_version = version;
  ledger.num_consumed_at_cut[static_cast<std::size_t>(version) % kMaxUnloadedVersions] =
      num_consumed();
  return Status::ok();
}

Status TrajectoryBuffer::set_version(std::int64_t version) {
  Guard guard(header_);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  Ledger& ledger = header_->ledger;
  if (version < ledger.engine_version || version > ledger.trainer_version) {
    return invalid("set_version(" + std::to_string(version) +
                   ") is not possible: engines may move to versions " +
                   std::to_string(ledger.engine_version) + " to " +
                   std::to_string(ledger.trainer_version) + ", those that cut_version made");
  }
  if (version == ledger.engine_version) return Status::ok();
  ledger.engine_version = version;
  ledger.num_consumed_returned =
      ledger.num_consumed_at_cut[static_cast<std::size_t>(version) % kMaxUnloadedVersions];
  return Status::ok();
}

Status TrajectoryBuffer::stats(Stats* out) {
  Guard guard(header_, false);
  if (Status status = enter(guard, true); !status.is_ok()) return status;
  *out = count();
  return Status::ok();
}

std::string TrajectoryBuffer::describe() {
  Guard guard(header_, false);
  if (Status status = enter(guard, true); !status.is_ok()) return status.message;
  const Stats now = count();
  std::string text = std::to_string(now.num_credits_free) + " of " + std::to_string(now.num_slots) +
                     " slot credits free (" +
                     std::to_string(num_consumed() - header_->ledger.num_consumed_returned) +
                     " wait for set_version); ";
  const Slot* oldest = oldest_untaken();
  if (oldest == nullptr) {
    text += "no group waits to be taken; ";
  } else {
    const SlotValue value = oldest->word.load();
    text += "oldest unconsumed group is " + std::to_string(oldest->index) + " (prompt " +
            std::to_string(oldest->prompt_index) + "), " + to_string(value.state) + " by process " +
            std::to_string(value.owner) + "; ";
  }
  return text + std::to_string(now.num_writing) + " being written, " +
         std::to_string(now.num_ready) + " ready, " + std::to_string(now.num_leased) + " leased; " +
         std::to_string(now.bytes_used) + " of " + std::to_string(now.bytes_capacity) +
         " bytes used; trainer at version " + std::to_string(now.trainer_version) +
         ", engines at " + std::to_string(now.engine_version);
}

void TrajectoryBuffer::close() {
  // [8] release: partner is [9].
  header_->is_closed.store(1, std::memory_order_release);
  header_->changes.notify_all();
}

bool TrajectoryBuffer::is_closed() const {
  // [9] acquire: partner is [8].
  return header_->is_closed.load(std::memory_order_acquire) != 0;
}

std::span<Slot> TrajectoryBuffer::slots() const {
  return {reinterpret_cast<Slot*>(segment_->data() + layout_.slots), header_->num_slots};
}

std::int64_t* TrajectoryBuffer::requeued() const {
  return reinterpret_cast<std::int64_t*>(segment_->data() + layout_.requeued);
}

std::byte* TrajectoryBuffer::arena() const { return segment_->data() + layout_.arena; }

Status TrajectoryBuffer::enter(const Guard& guard, bool even_if_closed) const {
  if (!guard.is_locked()) {
    return Status::error(Code::kBroken,
                         "a process died inside the trajectory buffer's lock, which may have left "
                         "it half changed; end the run and create a new buffer");
  }
  if (!even_if_closed && is_closed()) {
    return Status::error(Code::kClosed, "the trajectory buffer is closed");
  }
  return Status::ok();
}

Status TrajectoryBuffer::find(Handle handle, SlotState state, const char* what, Slot** out) const {
  if (handle.slot < header_->num_slots) {
    Slot& slot = slots()[handle.slot];
    const SlotValue value = slot.word.load();
    if (value.generation == handle.generation && value.state == state) {
      *out = &slot;
      return Status::ok();
    }
  }
  return Status::error(Code::kStaleHandle,
                       std::string("the ") + what + " for slot " + std::to_string(handle.slot) +
                           ", use " + std::to_string(handle.generation) +
                           " is not valid (any more): each is used up once, by publish or "
                           "withdraw, release, evict or put_back");
}

void TrajectoryBuffer::change(Slot& slot, SlotState state) {
  const SlotValue from = slot.word.load();
  const std::uint32_t owner = state == SlotState::kFree || state == SlotState::kReady
                                  ? 0
                                  : static_cast<std::uint32_t>(::getpid());
  const bool is_new_use = from.state == SlotState::kFree;
  // Cannot fail: words change only under the lock.
  slot.word.change(from, {from.generation + is_new_use, owner, state});
}

void TrajectoryBuffer::free_slot(Slot& slot) {
  slot.block_bytes = 0;
  change(slot, SlotState::kFree);
}

void TrajectoryBuffer::leave_order(Slot& slot) {
  for (Slot& other : slots()) {
    if (other.position > slot.position) --other.position;
  }
  --header_->ledger.next_position;
}

void TrajectoryBuffer::requeue(std::int64_t prompt_index) {
  Ledger& ledger = header_->ledger;
  // Never full: prompts here and groups in flight are at most num_slots together.
  requeued()[(ledger.requeue_head + ledger.num_requeued++) % num_slots()] = prompt_index;
}

Cause* TrajectoryBuffer::find_cause(std::string_view name) {
  if (name.empty() || name.size() > kMaxCauseLength) return nullptr;
  for (Cause& cause : header_->ledger.causes) {
    if (cause.name[0] == '\0') name.copy(cause.name, kMaxCauseLength);
    if (name == cause.name) return &cause;
  }
  return nullptr;
}

void TrajectoryBuffer::count_eviction(Slot& slot, Cause& cause, bool is_requeued) {
  ++cause.num_evicted;
  ++header_->ledger.num_evicted;
  leave_order(slot);
  if (is_requeued) requeue(slot.prompt_index);
  free_slot(slot);
}

Slot* TrajectoryBuffer::oldest_untaken() const {
  Slot* oldest = nullptr;
  for (Slot& slot : slots()) {
    const SlotState state = slot.word.load().state;
    if (state != SlotState::kWriting && state != SlotState::kReady) continue;
    if (oldest == nullptr || slot.position < oldest->position) oldest = &slot;
  }
  return oldest;
}

std::int64_t TrajectoryBuffer::num_consumed() const {
  return header_->ledger.num_trained + header_->ledger.num_rejected;
}

std::int64_t TrajectoryBuffer::num_credits_free() const {
  const auto all = slots();
  const auto num_in_flight = std::count_if(all.begin(), all.end(), [](const Slot& slot) {
    return slot.word.load().state != SlotState::kFree;
  });
  return num_slots() - num_in_flight - (num_consumed() - header_->ledger.num_consumed_returned);
}

// First fit between the blocks in use: memory that was touched last is used again first.
bool TrajectoryBuffer::find_room(std::uint64_t num_bytes, bool without_ready,
                                 std::uint64_t* start) const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> blocks;
  for (const Slot& slot : slots()) {
    const SlotState state = slot.word.load().state;
    if (state == SlotState::kFree || slot.block_bytes == 0) continue;
    if (without_ready && state == SlotState::kReady) continue;
    blocks.emplace_back(slot.block_start, slot.block_bytes);
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.emplace_back(settings().capacity_bytes, 0);
  std::uint64_t end = 0;
  for (const auto& [block_start, block_bytes] : blocks) {
    if (block_start - end >= num_bytes) {
      *start = end;
      return true;
    }
    end = block_start + block_bytes;
  }
  return false;
}

bool TrajectoryBuffer::make_room(const Slot& slot, std::uint64_t num_bytes, std::uint64_t* start) {
  if (find_room(num_bytes, false, start)) return true;
  if (&slot != oldest_untaken() || !find_room(num_bytes, true, start)) return false;
  Cause* cause = find_cause(kMemoryCause);
  if (cause == nullptr) return false;
  while (!find_room(num_bytes, false, start)) {
    Slot* youngest = nullptr;
    for (Slot& other : slots()) {
      if (other.word.load().state != SlotState::kReady) continue;
      if (youngest == nullptr || other.position > youngest->position) youngest = &other;
    }
    change(*youngest, SlotState::kEvicted);
    count_eviction(*youngest, *cause, true);
  }
  return true;
}

GroupView TrajectoryBuffer::view_of(std::uint32_t slot_number) const {
  const Slot& slot = slots()[slot_number];
  const std::byte* block = arena() + slot.block_start;
  return {{slot_number, slot.word.load().generation},
          slot.index,
          slot.prompt_index,
          slot.min_version,
          slot.max_version,
          {block + segment_bytes(slot), slot.payload_bytes},
          {reinterpret_cast<const VersionSegment*>(block), slot.num_segments}};
}

Stats TrajectoryBuffer::count() const {
  const Ledger& ledger = header_->ledger;
  Stats out;
  out.num_slots = num_slots();
  out.num_credits_free = num_credits_free();
  out.num_admitted = ledger.num_admitted;
  out.num_trained = ledger.num_trained;
  out.num_rejected = ledger.num_rejected;
  out.num_filtered = ledger.num_filtered;
  out.num_failed = ledger.num_failed;
  out.num_evicted = ledger.num_evicted;
  out.num_requeued = ledger.num_requeued;
  out.bytes_capacity = static_cast<std::int64_t>(settings().capacity_bytes);
  out.trainer_version = ledger.trainer_version;
  out.engine_version = ledger.engine_version;
  out.staleness_bound = staleness_bound();
  out.max_staleness_seen = ledger.max_staleness_seen;
  for (const Slot& slot : slots()) {
    const SlotState state = slot.word.load().state;
    if (state == SlotState::kFree) continue;
    ++out.num_in_flight;
    out.num_writing += state == SlotState::kWriting;
    out.num_ready += state == SlotState::kReady;
    out.num_leased += state == SlotState::kReading;
    out.bytes_used += static_cast<std::int64_t>(slot.block_bytes);
  }
  for (const Cause& cause : ledger.causes) {
    if (cause.name[0] != '\0') out.num_evicted_by_cause.emplace_back(cause.name, cause.num_evicted);
  }
  return out;
}

}  // namespace asyncrl
