#include "buffer/membership.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace asyncrl {

namespace {

// Past any segment's end.
constexpr off_t kFirstLock = off_t{1} << 50;
// What a slot's word has room for.
constexpr std::uint32_t kMaxParticipants = (1u << 24) - 1;

struct flock lock_of(std::uint32_t id) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kFirstLock + id;
  lock.l_len = 1;
  return lock;
}

// Held while a process forks, so that the child finds the list whole.
struct Registry {
  std::mutex mutex;
  Membership* first = nullptr;
};

Registry& registry() {
  static Registry* const made = new Registry;  // never destroyed: fork may come at any time
  return *made;
}

void install_fork_handlers();

}  // namespace

Membership::Membership(Header* header, int fd) : header_(header), fd_(fd) {
  install_fork_handlers();
  join();
  const std::lock_guard lock(registry().mutex);
  next_ = registry().first;
  if (next_ != nullptr) next_->previous_ = this;
  registry().first = this;
}

Membership::~Membership() {
  {
    const std::lock_guard lock(registry().mutex);
    (previous_ == nullptr ? registry().first : previous_->next_) = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
  }
  ::close(fd_);
}

Status Membership::status() const {
  if (error_ == 0) return Status::ok();
  return Status::error(Code::kSystem,
                       std::string("joining the trajectory buffer: ") + std::strerror(error_));
}

bool Membership::is_dead(std::uint32_t id) const {
  if (id == id_) return false;
  struct flock lock = lock_of(id);
  return ::fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

std::uint32_t Membership::process_of(std::uint32_t id) const {
  // Relaxed: only shown.
  const std::uint64_t word =
      header_->participants[id % kNumNamedParticipants].load(std::memory_order_relaxed);
  return word >> 32 == id ? static_cast<std::uint32_t>(word) : 0;
}

void Membership::join() {
  // Relaxed: only unique.
  const std::uint32_t id = header_->num_participants.fetch_add(1, std::memory_order_relaxed) + 1;
  if (id > kMaxParticipants) {
    error_ = EUSERS;
    return;
  }
  struct flock lock = lock_of(id);
  error_ = ::fcntl(fd_, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
  id_ = id;
  header_->participants[id % kNumNamedParticipants].store(
      std::uint64_t{id} << 32 | static_cast<std::uint32_t>(::getpid()), std::memory_order_relaxed);
}

void Membership::rejoin() {
  // The inherited description carries the parent's lock, which would outlive the parent here.
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd_);
  const int own = ::open(path, O_RDWR | O_CLOEXEC);
  const int error = errno;
  ::close(fd_);
  fd_ = own;
  if (own < 0) {
    error_ = error;
  } else {
    join();
  }
}

namespace {

void rejoin_all() {
  for (Membership* m = registry().first; m != nullptr; m = m->next()) m->rejoin();
}

void install_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       rejoin_all();
                       registry().mutex.unlock();
                     });
  });
}

}  // namespace

}  // namespace asyncrl
