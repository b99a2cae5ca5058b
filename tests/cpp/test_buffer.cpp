// Sequential behaviour of the core: states, order, credits, memory, staleness rules.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "buffer/staleness.h"
#include "buffer/trajectory_buffer.h"
#include "check.h"

using namespace asyncrl;

namespace {

// A buffer that is gone at the end of the scope.
class Fixture {
 public:
  explicit Fixture(const Settings& settings)
      : name_("test-" + std::to_string(::getpid()) + "-" + std::to_string(num_made_++)) {
    CHECK(TrajectoryBuffer::create(name_, settings, &buffer_).is_ok());
  }
  ~Fixture() { (void)Segment::unlink(name_); }

  TrajectoryBuffer* operator->() { return buffer_.get(); }
  const std::string& name() const { return name_; }

  Ticket admit() {
    Ticket ticket;
    CHECK(buffer_->try_admit(&ticket).is_ok());
    return ticket;
  }

  void put(const Ticket& ticket, std::int64_t version, std::uint64_t num_bytes = 64) {
    std::span<std::byte> memory;
    CHECK(buffer_->try_reserve(ticket, num_bytes, 1, &memory).is_ok());
    std::memset(memory.data(), static_cast<int>(ticket.index), memory.size());
    const VersionSegment segment{0, version};
    CHECK(buffer_->publish(ticket, {&segment, 1}).is_ok());
  }

  GroupView take() {
    GroupView group;
    CHECK(buffer_->try_take(&group).is_ok());
    return group;
  }

  Stats stats() { return buffer_->stats(); }

 private:
  static inline int num_made_ = 0;
  std::string name_;
  std::shared_ptr<TrajectoryBuffer> buffer_;
};

void credits_follow_the_decimal_that_was_written() {
  CHECK(staleness::num_credits(0.0, 7) == 7);
  CHECK(staleness::num_credits(0.29, 100) == 129);
  CHECK(staleness::num_credits(0.1, 10) == 11);
  CHECK(staleness::num_credits(1e-300, 10) == 10);
  CHECK(staleness::num_credits(2.5, 3) == 10);
  CHECK(staleness::num_credits(1e3, 2) == 2002);
  CHECK(staleness::num_credits(1e300, 2) == INT64_MAX);
  CHECK(staleness::bound(6, 0, 3) == 1);
  CHECK(staleness::bound(6, 1, 3) == 2);
}

void groups_are_taken_in_admission_order() {
  Fixture buffer({1.0, 2, 0, 10, 1 << 16});
  const Ticket first = buffer.admit();
  const Ticket second = buffer.admit();
  CHECK(first.prompt_index == 10 && second.prompt_index == 11);
  buffer.put(second, 0);
  GroupView group;
  CHECK(buffer->try_take(&group).code == Code::kWouldBlock);
  buffer.put(first, 0);
  CHECK(buffer.take().index == 0);
  group = buffer.take();
  CHECK(group.index == 1 && group.payload.size() == 64 && group.payload[63] == std::byte{1});
}

void a_ready_group_overtakes_no_further_than_the_lookahead() {
  Fixture buffer({3.0, 1, 1, 0, 1 << 16});
  const Ticket oldest = buffer.admit();
  const Ticket filtered = buffer.admit();
  const Ticket third = buffer.admit();
  const Ticket fourth = buffer.admit();
  buffer.put(third, 0);
  buffer.put(fourth, 0);
  GroupView group;
  CHECK(buffer->try_take(&group).code == Code::kWouldBlock);
  CHECK(buffer->withdraw(filtered, Outcome::kFiltered).is_ok());
  CHECK(buffer.take().index == 2);
  // Overtakers stay in the order: the fourth is still two past the oldest.
  CHECK(buffer->try_take(&group).code == Code::kWouldBlock);
  buffer.put(oldest, 0);
  CHECK(buffer.take().index == 0);
  CHECK(buffer.take().index == 3);
}

void a_credit_comes_back_only_with_the_version_trained_on_it() {
  Fixture buffer({0.0, 1, 0, 0, 1 << 16});
  buffer.put(buffer.admit(), 0);
  Ticket ticket;
  CHECK(buffer->try_admit(&ticket).code == Code::kWouldBlock);
  CHECK(buffer->release(buffer.take().handle, Outcome::kTrained).is_ok());
  CHECK(buffer.stats().bytes_used == 0);
  CHECK(buffer->try_admit(&ticket).code == Code::kWouldBlock);
  CHECK(buffer->set_version(1).code == Code::kInvalidArgument);
  CHECK(buffer->cut_version(2).code == Code::kInvalidArgument);
  CHECK(buffer->cut_version(1).is_ok());
  CHECK(buffer->try_admit(&ticket).code == Code::kWouldBlock);
  CHECK(buffer->set_version(1).is_ok() && buffer->set_version(1).is_ok());
  CHECK(buffer->set_version(0).code == Code::kInvalidArgument);
  CHECK(buffer->try_admit(&ticket).is_ok());
  CHECK(ticket.policy_version == 1 && ticket.index == 1);
}

void a_handle_is_used_up_once() {
  Fixture buffer({1.0, 2, 0, 0, 1 << 16});
  const Ticket ticket = buffer.admit();
  buffer.put(ticket, 0);
  CHECK(buffer->withdraw(ticket, Outcome::kFailed).code == Code::kStaleHandle);
  const GroupView group = buffer.take();
  CHECK(buffer->evict(group.handle, Outcome::kEvictedStale, true).is_ok());
  CHECK(buffer->release(group.handle, Outcome::kTrained).code == Code::kStaleHandle);
  const Ticket again = buffer.admit();
  CHECK(again.prompt_index == 0 && again.index == 1);
  CHECK(again.handle.slot == ticket.handle.slot);
  CHECK(buffer->publish(ticket, {}).code == Code::kStaleHandle);
  CHECK(buffer.admit().prompt_index == 1);
}

void the_oldest_group_gets_the_memory_of_the_youngest() {
  Fixture buffer({3.0, 1, 0, 0, 4096});
  const Ticket oldest = buffer.admit();
  const Ticket second = buffer.admit();
  const Ticket third = buffer.admit();
  buffer.put(second, 0, 1024);
  buffer.put(third, 0, 1024);
  std::span<std::byte> memory;
  const Ticket fourth = buffer.admit();
  CHECK(buffer->try_reserve(fourth, 2048, 1, &memory).code == Code::kWouldBlock);
  CHECK(buffer->try_reserve(oldest, 5000, 1, &memory).code == Code::kInvalidArgument);
  buffer.put(oldest, 0, 2048);
  const Stats stats = buffer.stats();
  CHECK(stats.num_evicted() == 1 && stats.num_requeued == 1 && stats.num_ready == 2);
  CHECK(stats.num_ended[static_cast<int>(Outcome::kEvictedMemory)] == 1);
  CHECK(buffer.take().index == 0);
  CHECK(buffer.take().index == 1);
  CHECK(buffer.admit().prompt_index == third.prompt_index);
}

void a_closed_buffer_ends_leases_but_starts_nothing() {
  Fixture buffer({1.0, 2, 0, 0, 1 << 16});
  buffer.put(buffer.admit(), 0);
  const Ticket open = buffer.admit();
  const GroupView group = buffer.take();
  buffer->close();
  Ticket ticket;
  GroupView other;
  CHECK(buffer->try_admit(&ticket).code == Code::kClosed);
  CHECK(buffer->try_take(&other).code == Code::kClosed);
  CHECK(buffer->withdraw(open, Outcome::kFailed).is_ok());
  CHECK(buffer->release(group.handle, Outcome::kRejected).is_ok());
  CHECK(buffer.stats().num_in_flight == 0);
}

void names_are_checked() {
  Fixture buffer({1.0, 2, 0, 0, 1 << 16});
  std::shared_ptr<TrajectoryBuffer> other;
  const Settings settings{1.0, 2, 0, 0, 1 << 16};
  CHECK(TrajectoryBuffer::create(buffer.name(), settings, &other).code == Code::kExists);
  CHECK(TrajectoryBuffer::create("a/b", settings, &other).code == Code::kInvalidArgument);
  CHECK(TrajectoryBuffer::attach(buffer.name() + "-no", &other).code == Code::kNotFound);
  CHECK(TrajectoryBuffer::attach(buffer.name(), &other).is_ok());
  CHECK(other->num_slots() == 4);
}

}  // namespace

int main() {
  credits_follow_the_decimal_that_was_written();
  groups_are_taken_in_admission_order();
  a_ready_group_overtakes_no_further_than_the_lookahead();
  a_credit_comes_back_only_with_the_version_trained_on_it();
  a_handle_is_used_up_once();
  the_oldest_group_gets_the_memory_of_the_youngest();
  a_closed_buffer_ends_leases_but_starts_nothing();
  names_are_checked();
  std::puts("ok");
}
