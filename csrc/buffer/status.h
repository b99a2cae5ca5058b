// What an operation of the buffer came to. No exceptions here: bindings/ alone turns it into one.
#pragma once

#include <string>
#include <utility>

namespace asyncrl {

enum class Code {
  kOk,
  kWouldBlock,       // legal, but not now: wait for an event and try again
  kClosed,           // the buffer was closed
  kInvalidArgument,  // the caller's value can never be right
  kStaleHandle,      // the ticket or lease was already used up
  kNotFound,         // no segment of that name
  kExists,           // a segment of that name is already there
  kForeign,          // a file that is no buffer, or one of another layout
  kNoMemory,         // shared memory is too small
  kSystem,           // an operating-system call failed
};

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  static Status ok() { return {}; }
  static Status error(Code code, std::string message) { return {code, std::move(message)}; }
  bool is_ok() const { return code == Code::kOk; }
};

}  // namespace asyncrl
