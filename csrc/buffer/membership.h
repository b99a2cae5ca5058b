// Which processes take part in a segment, and which of them are dead.
//
// Each takes a number that no other ever has, and holds an open-file-description lock on that
// number's byte past the end of the segment's file. The kernel drops the lock when the process
// ends, however it ends; no heartbeat, and no process id that could be used again. A child made by
// fork takes a number of its own before fork returns.
#pragma once

#include <cstdint>

#include "buffer/layout.h"
#include "buffer/status.h"

namespace asyncrl {

class Membership {
 public:
  // `fd` is the segment's file; it is kept and closed at the end.
  Membership(Header* header, int fd);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // Not ok if this process could not join: it must not change the buffer.
  Status status() const;
  // This process's number, from 1.
  std::uint32_t id() const { return id_; }
  // Wait-free, a system call. Whether the process with this number has ended.
  bool is_dead(std::uint32_t id) const;
  // Process id of a participant, 0 if it is no longer known.
  std::uint32_t process_of(std::uint32_t id) const;

  // In the child, after fork. Only calls that are safe there.
  void rejoin();
  Membership* next() const { return next_; }

 private:
  void join();

  Header* header_;
  int fd_;
  std::uint32_t id_ = 0;
  int error_ = 0;
  // All memberships of this process, for the fork handler.
  Membership* next_ = nullptr;
  Membership* previous_ = nullptr;
};

}  // namespace asyncrl
