// Threads over one mapping: no group is lost, torn or delivered twice, the bound holds, and close
// wakes whoever waits. Run it under sanitizers, which see races within one mapping only.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "buffer/trajectory_buffer.h"

using namespace asyncrl;

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

namespace {

constexpr int kNumProducers = 3;
constexpr int kNumConsumers = 2;
constexpr std::int64_t kGroupsPerVersion = 4;
constexpr std::int64_t kNumConsumed = 4000;
constexpr std::chrono::seconds kPatience{60};

// False once the buffer is closed.
template <typename Attempt>
bool retry(TrajectoryBuffer& buffer, Attempt attempt) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const std::uint32_t seen = buffer.num_changes();
    const Status status = attempt();
    if (status.code == Code::kClosed) return false;
    if (status.is_ok()) return true;
    CHECK(status.code == Code::kWouldBlock);
    CHECK(std::chrono::steady_clock::now() < deadline);
    buffer.wait(seen, std::chrono::milliseconds(50));
  }
}

std::size_t num_words(std::int64_t index) {
  return 1 + static_cast<std::size_t>(index * 7919 % 500);
}

void produce(TrajectoryBuffer* buffer) {
  Ticket ticket;
  while (retry(*buffer, [&] { return buffer->try_admit(&ticket); })) {
    if (ticket.index % 11 == 5) {
      CHECK(buffer->withdraw(ticket, Withdrawal::kFiltered).is_ok());
      continue;
    }
    std::span<std::byte> memory;
    const std::size_t num_bytes = num_words(ticket.index) * sizeof(std::int64_t);
    if (!retry(*buffer, [&] { return buffer->try_reserve(ticket, num_bytes, 1, &memory); })) return;
    std::fill_n(reinterpret_cast<std::int64_t*>(memory.data()), num_words(ticket.index),
                ticket.index);
    const VersionSegment segment{0, ticket.policy_version};
    if (buffer->publish(ticket, {&segment, 1}).code == Code::kClosed) return;
  }
}

void check_books(TrajectoryBuffer* buffer) {
  Stats stats;
  CHECK(buffer->stats(&stats).is_ok());
  CHECK(stats.num_admitted == stats.num_trained + stats.num_rejected + stats.num_evicted +
                                  stats.num_filtered + stats.num_failed + stats.num_in_flight);
}

// Consumers together are the trainer: each kGroupsPerVersion releases make a version.
class Trainer {
 public:
  explicit Trainer(TrajectoryBuffer* buffer) : buffer_(buffer), num_taken_(10 * kNumConsumed) {}

  void consume() {
    GroupView group;
    while (retry(*buffer_, [&] { return buffer_->try_take(&group); })) {
      const auto* words = reinterpret_cast<const std::int64_t*>(group.payload.data());
      CHECK(group.payload.size() == num_words(group.index) * sizeof(std::int64_t));
      CHECK(std::all_of(words, words + num_words(group.index),
                        [&](std::int64_t word) { return word == group.index; }));
      // Relaxed: only counted.
      CHECK(num_taken_[static_cast<std::size_t>(group.index)].fetch_add(
                1, std::memory_order_relaxed) == 0);
      if (group.index % 13 == 6) {
        CHECK(buffer_->evict(group.handle, "stale", true).is_ok());
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
  Stats stats;
  CHECK(buffer->stats(&stats).is_ok());
  CHECK(stats.num_trained == trainer.num_released());
  CHECK(stats.max_staleness_seen <= stats.staleness_bound);
  CHECK(Segment::unlink(name).is_ok());
  std::printf("ok: %lld admitted, %lld trained, %lld evicted, staleness %lld of at most %lld\n",
              static_cast<long long>(stats.num_admitted), static_cast<long long>(stats.num_trained),
              static_cast<long long>(stats.num_evicted),
              static_cast<long long>(stats.max_staleness_seen),
              static_cast<long long>(stats.staleness_bound));
}
