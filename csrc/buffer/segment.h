// A named file of shared memory: created, mapped, unmapped, removed. Knows nothing of its content.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "buffer/status.h"

namespace asyncrl {

class Segment {
 public:
  // /dev/shm/asyncrl-<name>, mode 0600, all its pages backed and mapped. kExists, kNoMemory.
  static Status create(const std::string& name, std::size_t num_bytes,
                       std::shared_ptr<Segment>* out);
  // kNotFound when there is none of that name.
  static Status attach(const std::string& name, std::shared_ptr<Segment>* out);
  // Removes the name; mappings stay valid until they end. No error when there is none.
  static Status unlink(const std::string& name);

  Segment(std::byte* data, std::size_t num_bytes, int fd = -1)
      : data_(data), num_bytes_(num_bytes), fd_(fd) {}
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t num_bytes() const { return num_bytes_; }
  // The file's descriptor, which the caller then owns; -1 for memory without a file.
  int take_fd() { return std::exchange(fd_, -1); }

 private:
  std::byte* data_;
  std::size_t num_bytes_;
  int fd_;
};

}  // namespace asyncrl
