#include "buffer/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace asyncrl {

namespace {

constexpr char kFolder[] = "/dev/shm";

// Closes a file descriptor when it goes.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

std::string path_of(const std::string& name) { return std::string(kFolder) + "/asyncrl-" + name; }

Status system_error(const std::string& what, int error) {
  return Status::error(Code::kSystem, what + ": " + std::strerror(error));
}

Status check_name(const std::string& name) {
  constexpr std::size_t kMaxLength = 200;
  constexpr char kLegal[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (name.empty() || name.size() > kMaxLength ||
      name.find_first_not_of(kLegal) != std::string::npos) {
    return Status::error(Code::kInvalidArgument,
                         "buffer name '" + name +
                             "' is not usable; legal: 1 to 200 letters, digits, '.', '_' and '-'");
  }
  return Status::ok();
}

Status no_memory(std::size_t num_bytes, unsigned long long num_free_bytes) {
  return Status::error(Code::kNoMemory,
                       "the trajectory buffer needs " + std::to_string(num_bytes) + " bytes of " +
                           kFolder + ", which has " + std::to_string(num_free_bytes) +
                           " free; lower buffer.capacity_bytes, or give the machine (container: "
                           "--shm-size) more shared memory");
}

unsigned long long num_free_bytes() {
  struct statvfs folder{};
  if (::statvfs(kFolder, &folder) != 0) return 0;
  return static_cast<unsigned long long>(folder.f_bavail) * folder.f_frsize;
}

Status map(File& file, std::size_t num_bytes, int flags, std::shared_ptr<Segment>* out) {
  void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, file.fd(), 0);
  if (data == MAP_FAILED) return system_error("mapping the trajectory buffer", errno);
  *out = std::make_shared<Segment>(static_cast<std::byte*>(data), num_bytes, file.take());
  return Status::ok();
}

}  // namespace

Status Segment::create(const std::string& name, std::size_t num_bytes,
                       std::shared_ptr<Segment>* out) {
  if (Status status = check_name(name); !status.is_ok()) return status;
  if (num_bytes > num_free_bytes()) return no_memory(num_bytes, num_free_bytes());
  const std::string path = path_of(name);
  File file(::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.fd() < 0 && errno == EEXIST) {
    return Status::error(Code::kExists, path +
                                            " is already there; choose another buffer name, or "
                                            "remove it if no run uses it any more");
  }
  if (file.fd() < 0) return system_error("creating " + path, errno);
  // Backs every page now: a page that cannot be had later is a SIGBUS in the middle of a run.
  const int error = ::posix_fallocate(file.fd(), 0, static_cast<off_t>(num_bytes));
  Status status = error == ENOSPC ? no_memory(num_bytes, num_free_bytes())
                  : error != 0    ? system_error("allocating " + path, error)
                                  : map(file, num_bytes, MAP_POPULATE, out);
  if (!status.is_ok()) ::unlink(path.c_str());
  return status;
}

Status Segment::attach(const std::string& name, std::shared_ptr<Segment>* out) {
  if (Status status = check_name(name); !status.is_ok()) return status;
  const std::string path = path_of(name);
  File file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.fd() < 0 && errno == ENOENT) {
    return Status::error(Code::kNotFound, "there is no trajectory buffer '" + name + "' (" + path +
                                              "); it was never created or is already unlinked");
  }
  if (file.fd() < 0) return system_error("opening " + path, errno);
  struct stat info{};
  if (::fstat(file.fd(), &info) != 0) return system_error("reading the size of " + path, errno);
  if (info.st_size == 0) {
    return Status::error(Code::kForeign, path + " is empty: it is no trajectory buffer");
  }
  return map(file, static_cast<std::size_t>(info.st_size), 0, out);
}

Status Segment::unlink(const std::string& name) {
  if (Status status = check_name(name); !status.is_ok()) return status;
  const std::string path = path_of(name);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    return system_error("removing " + path, errno);
  return Status::ok();
}

Segment::~Segment() {
  ::munmap(data_, num_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace asyncrl
