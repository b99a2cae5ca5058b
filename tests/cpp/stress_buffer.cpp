// Threads over one mapping: no group is lost, torn or delivered twice, the bound holds, and close
// wakes whoever waits. Run it under sanitizers, which see races within one mapping only.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "buffer/trajectory_buffer.h"
#include "check.h"

using namespace asyncrl;

namespace {

constexpr int kNumProducers = 3;
constexpr int kNumConsumers = 2;
constexpr std::int64_t kGroupsPerVersion = 4;
constexpr std::int64_t kNumConsumed = 4000;
constexpr std::chrono::seconds kPatience{60};

constexpr std::chrono::milliseconds kSlice{50};

// False once the buffer is closed.
template <typename Count, typename Attempt, typename Wait>
bool retry(Count count, Attempt attempt, Wait wait) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const std::uint32_t seen = count();
    const Status status = attempt();
    if (status.code == Code::kClosed) return false;
    if (status.is_ok()) return true;
    CHECK(status.code == Code::kWouldBlock);
    CHECK(std::chrono::steady_clock::now() < deadline);
    wait(seen);
  }
}

template <typename Attempt>
bool until_freed(TrajectoryBuffer& buffer, Attempt attempt) {
  return retry([&] { return buffer.num_freed(); }, attempt,
               [&](std::uint32_t seen) { buffer.wait_freed(seen, kSlice); });
}

bool take(TrajectoryBuffer& buffer, GroupView* group) {
  return retry([&] { return buffer.num_published(); }, [&] { return buffer.try_take(group); },
               [&](std::uint32_t seen) { buffer.wait_published(seen, 1, kSlice); });
}

std::size_t num_words(std::int64_t index) {
  return 1 + static_cast<std::size_t>(index * 7919 % 500);
}

void produce(TrajectoryBuffer* buffer) {
  Ticket ticket;
  while (until_freed(*buffer, [&] { return buffer->try_admit(&ticket); })) {
    if (ticket.index % 11 == 5) {
      CHECK(buffer->withdraw(ticket, Outcome::kFiltered).is_ok());
      continue;
    }
    std::span<std::byte> memory;
    const std::size_t num_bytes = num_words(ticket.index) * sizeof(std::int64_t);
    const auto reserve = [&] { return buffer->try_reserve(ticket, num_bytes, 1, &memory); };
    if (!until_freed(*buffer, reserve)) return;
    std::fill_n(reinterpret_cast<std::int64_t*>(memory.data()), num_words(ticket.index),
                ticket.index);
    const VersionSegment segment{0, ticket.policy_version};
    if (buffer->publish(ticket, {&segment, 1}).code == Code::kClosed) return;
  }
}

void check_books(TrajectoryBuffer* buffer) {
  const Stats stats = buffer->stats();
  CHECK(stats.num_admitted == std::accumulate(std::begin(stats.num_ended),
                                              std::end(stats.num_ended), stats.num_in_flight));
}

// Consumers together are the trainer: each kGroupsPerVersion releases make a version.
class Trainer {
 public:
  explicit Trainer(TrajectoryBuffer* buffer) : buffer_(buffer), num_taken_(10 * kNumConsumed) {}

  void consume() {
    GroupView group;
    while (take(*buffer_, &group)) {
      const auto* words = reinterpret_cast<const std::int64_t*>(group.payload.data());
      CHECK(group.payload.size() == num_words(group.index) * sizeof(std::int64_t));
      CHECK(std::all_of(words, words + num_words(group.index),
                        [&](std::int64_t word) { return word == group.index; }));
      // Relaxed: only counted.
      CHECK(num_taken_[static_cast<std::size_t>(group.index)].fetch_add(
                1, std::memory_order_relaxed) == 0);
      if (group.index % 13 == 6) {
        CHECK(buffer_->evict(group.handle, Outcome::kEvictedStale, true).is_ok());
      } else {
        release(group);
      }
    }
  }

  std::int64_t num_released() const { return num_released_; }

 private:
  void release(const GroupView& group) {
    const std::lock_guard lock(mutex_);
    CHECK(buffer_->release(group.handle, Outcome::kTrained).is_ok());
    if (++num_released_ % kGroupsPerVersion == 0) {
      CHECK(buffer_->cut_version(num_released_ / kGroupsPerVersion).is_ok());
      CHECK(buffer_->set_version(num_released_ / kGroupsPerVersion).is_ok());
      check_books(buffer_);
    }
    if (num_released_ >= kNumConsumed) buffer_->close();
  }

  TrajectoryBuffer* buffer_;
  std::vector<std::atomic<int>> num_taken_;
  std::mutex mutex_;
  std::int64_t num_released_ = 0;
};

}  // namespace

int main() {
  const std::string name = "stress-" + std::to_string(::getpid());
  std::shared_ptr<TrajectoryBuffer> buffer;
  // Memory for a few of the 10 slots only, so that reservations wait and evict.
  const Settings settings{1.5, kGroupsPerVersion, 2, 0, 16 << 10};
  CHECK(TrajectoryBuffer::create(name, settings, &buffer).is_ok());
  Trainer trainer(buffer.get());
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumProducers; ++i) threads.emplace_back(produce, buffer.get());
  for (int i = 0; i < kNumConsumers; ++i) threads.emplace_back([&] { trainer.consume(); });
  for (std::thread& thread : threads) thread.join();
  const Stats stats = buffer->stats();
  const std::int64_t num_trained = stats.num_ended[static_cast<int>(Outcome::kTrained)];
  CHECK(num_trained == trainer.num_released());
  CHECK(stats.max_staleness_seen <= stats.staleness_bound);
  CHECK(Segment::unlink(name).is_ok());
  std::printf("ok: %lld admitted, %lld trained, %lld evicted, staleness %lld of at most %lld\n",
              static_cast<long long>(stats.num_admitted), static_cast<long long>(num_trained),
              static_cast<long long>(stats.num_evicted()),
              static_cast<long long>(stats.max_staleness_seen),
              static_cast<long long>(stats.staleness_bound));
}
