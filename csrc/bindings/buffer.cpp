// Python face of csrc/buffer: argument conversion, waiting with signals, status -> exception.
// asyncrl/buffer.py documents what users call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer/trajectory_buffer.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

using namespace asyncrl;
using Clock = std::chrono::steady_clock;

// A signal is seen at most this late.
constexpr std::chrono::milliseconds kSlice{50};
// About three hundred years; keeps the clock's arithmetic in range.
constexpr double kMaxTimeoutSeconds = 1e10 / 2;

using HandleTuple = std::pair<std::uint32_t, std::uint32_t>;
using TicketTuple = std::tuple<HandleTuple, std::int64_t, std::int64_t, std::int64_t>;

// Name in this module of what a status becomes.
const char* error_name(Code code) {
  switch (code) {
    case Code::kClosed:
      return "BufferClosed";
    case Code::kStaleHandle:
      return "BufferStaleHandle";
    case Code::kNotFound:
      return "BufferNotFound";
    case Code::kExists:
      return "BufferExists";
    case Code::kForeign:
      return "BufferForeign";
    case Code::kNoMemory:
      return "BufferNoMemory";
    case Code::kWouldBlock:
      return "BufferTimeout";
    case Code::kOk:
    case Code::kInvalidArgument:
    case Code::kSystem:
      break;
  }
  return "TrajectoryBufferError";
}

void check(const Status& status) {
  if (status.is_ok()) return;
  if (status.code == Code::kInvalidArgument) throw py::value_error(status.message);
  const py::object type = py::module_::import("asyncrl._buffer").attr(error_name(status.code));
  PyErr_SetString(type.ptr(), status.message.c_str());
  throw py::error_already_set();
}

// Runs a call of the core without the GIL: it may scan all slots, or wait.
template <typename Call>
auto without_gil(Call call) {
  const py::gil_scoped_release release;
  return call();
}

// What a wait is for.
enum class Event { kPublished, kFreed };

std::uint32_t count(const TrajectoryBuffer& core, Event event) {
  return event == Event::kPublished ? core.num_published() : core.num_freed();
}

void wait(TrajectoryBuffer& core, Event event, std::uint32_t seen, std::uint32_t num_events,
          std::chrono::nanoseconds timeout) {
  if (event == Event::kPublished) {
    core.wait_published(seen, num_events, timeout);
  } else {
    core.wait_freed(seen, timeout);
  }
}

struct NamedOutcome {
  const char* name;
  Outcome outcome;
};
constexpr NamedOutcome kWithdrawals[] = {{"filtered", Outcome::kFiltered},
                                         {"failed", Outcome::kFailed}};
constexpr NamedOutcome kReleases[] = {{"trained", Outcome::kTrained},
                                      {"rejected", Outcome::kRejected}};
constexpr NamedOutcome kEvictions[] = {{"stale", Outcome::kEvictedStale},
                                       {"unwanted", Outcome::kEvictedUnwanted}};

template <std::size_t N>
Outcome parse(const char* what, const std::string& name, const NamedOutcome (&legal)[N]) {
  std::string names;
  for (const NamedOutcome& known : legal) {
    if (name == known.name) return known.outcome;
    names.append(names.empty() ? "" : ", ").append(known.name);
  }
  throw py::value_error(std::string(what) + "='" + name + "' is unknown; legal: " + names);
}

Handle to_handle(const HandleTuple& handle) { return {handle.first, handle.second}; }

Ticket to_ticket(const HandleTuple& handle) { return {to_handle(handle), 0, 0, 0}; }

class Buffer {
 private:
  TrajectoryBuffer& core() {
    if (core_ == nullptr) {
      check(Status::error(Code::kClosed,
                          "this TrajectoryBuffer object was detached from its shared memory"));
    }
    return *core_;
  }

  // Runs without the GIL on a core that no other thread can detach meanwhile.
  template <typename Operation>
  auto call(Operation operation) {
    core();
    const std::shared_ptr<TrajectoryBuffer> held = core_;
    return without_gil([&] { return operation(*held); });
  }

 public:
  explicit Buffer(std::shared_ptr<TrajectoryBuffer> core) : core_(std::move(core)) {}

  static Buffer create(const std::string& name, double staleness_threshold,
                       std::int64_t groups_per_version, std::int64_t lookahead,
                       std::uint64_t capacity_bytes, std::int64_t first_prompt_index) {
    const Settings settings{staleness_threshold, groups_per_version, lookahead, first_prompt_index,
                            capacity_bytes};
    std::shared_ptr<TrajectoryBuffer> core;
    check(without_gil([&] { return TrajectoryBuffer::create(name, settings, &core); }));
    return Buffer(std::move(core));
  }

  static Buffer attach(const std::string& name) {
    std::shared_ptr<TrajectoryBuffer> core;
    check(without_gil([&] { return TrajectoryBuffer::attach(name, &core); }));
    return Buffer(std::move(core));
  }

  std::optional<TicketTuple> admit(double timeout_s) {
    Ticket ticket;
    const bool is_there = retry(timeout_s, "a slot credit", Event::kFreed, 1,
                                [&](auto& core) { return core.try_admit(&ticket); });
    if (!is_there) return std::nullopt;
    return TicketTuple{HandleTuple{ticket.handle.slot, ticket.handle.generation}, ticket.index,
                       ticket.prompt_index, ticket.policy_version};
  }

  py::object reserve(const HandleTuple& handle, std::uint64_t num_bytes, std::uint64_t max_segments,
                     double timeout_s) {
    std::span<std::byte> memory;
    const std::string what = std::to_string(num_bytes) +
                             " bytes of payload memory (raise buffer.capacity_bytes if this "
                             "happens often)";
    const bool is_there = retry(timeout_s, what, Event::kFreed, 1, [&](auto& core) {
      return core.try_reserve(to_ticket(handle), num_bytes, max_segments, &memory);
    });
    if (!is_there) return py::none();
    return array(reinterpret_cast<std::uint8_t*>(memory.data()), {memory.size()}, true);
  }

  void publish(const HandleTuple& handle,
               const py::array_t<std::int64_t, py::array::c_style>& segments) {
    if (segments.ndim() != 2 || segments.shape(1) != 2) {
      throw py::value_error(
          "segments must be [M, 2] int64 rows (token_start, policy_version), got shape " +
          std::string(py::str(segments.attr("shape"))));
    }
    const std::span<const VersionSegment> rows(
        reinterpret_cast<const VersionSegment*>(segments.data()),
        static_cast<std::size_t>(segments.shape(0)));
    check(call([&](auto& core) { return core.publish(to_ticket(handle), rows); }));
  }

  void withdraw(const HandleTuple& handle, const std::string& cause) {
    const Outcome parsed = parse("cause", cause, kWithdrawals);
    check(call([&](auto& core) { return core.withdraw(to_ticket(handle), parsed); }));
  }

  py::object take(double timeout_s, std::uint32_t num_wanted) {
    GroupView group;
    const bool is_there = retry(timeout_s, "the next prompt group", Event::kPublished, num_wanted,
                                [&](auto& core) { return core.try_take(&group); });
    if (!is_there) return py::none();
    return to_tuple(group);
  }

  void put_back(const HandleTuple& handle) {
    check(call([&](auto& core) { return core.put_back(to_handle(handle)); }));
  }

  void release(const HandleTuple& handle, const std::string& outcome) {
    const Outcome parsed = parse("outcome", outcome, kReleases);
    check(call([&](auto& core) { return core.release(to_handle(handle), parsed); }));
  }

  void evict(const HandleTuple& handle, const std::string& cause, bool requeue) {
    const Outcome parsed = parse("cause", cause, kEvictions);
    check(call([&](auto& core) { return core.evict(to_handle(handle), parsed, requeue); }));
  }

  py::tuple view(const HandleTuple& handle) {
    GroupView group;
    check(call([&](auto& core) { return core.view(to_handle(handle), &group); }));
    return to_tuple(group);
  }

  void cut_version(std::int64_t version) {
    check(call([&](auto& core) { return core.cut_version(version); }));
  }
  void set_version(std::int64_t version) {
    check(call([&](auto& core) { return core.set_version(version); }));
  }

  py::dict stats() {
    const Stats now = call([](auto& core) { return core.stats(); });
    const auto ended = [&](Outcome outcome) {
      return now.num_ended[static_cast<std::size_t>(outcome)];
    };
    return py::dict(
        "num_slots"_a = now.num_slots, "num_credits_free"_a = now.num_credits_free,
        "num_admitted"_a = now.num_admitted, "num_trained"_a = ended(Outcome::kTrained),
        "num_rejected"_a = ended(Outcome::kRejected), "num_filtered"_a = ended(Outcome::kFiltered),
        "num_failed"_a = ended(Outcome::kFailed), "num_evicted"_a = now.num_evicted(),
        "num_evicted_stale"_a = ended(Outcome::kEvictedStale),
        "num_evicted_memory"_a = ended(Outcome::kEvictedMemory),
        "num_evicted_abandoned"_a = ended(Outcome::kEvictedAbandoned),
        "num_evicted_unwanted"_a = ended(Outcome::kEvictedUnwanted),
        "num_in_flight"_a = now.num_in_flight, "num_writing"_a = now.num_writing,
        "num_ready"_a = now.num_ready, "num_leased"_a = now.num_leased,
        "num_requeued"_a = now.num_requeued, "bytes_used"_a = now.bytes_used,
        "bytes_capacity"_a = now.bytes_capacity, "trainer_version"_a = now.trainer_version,
        "engine_version"_a = now.engine_version, "staleness_bound"_a = now.staleness_bound,
        "max_staleness_seen"_a = now.max_staleness_seen);
  }

  std::string describe() {
    return call([](auto& core) { return core.describe(); });
  }
  void close() { core().close(); }
  bool is_closed() { return core().is_closed(); }
  std::int64_t reclaim() {
    return call([](auto& core) { return core.reclaim(); });
  }
  std::uint32_t num_published() { return core().num_published(); }
  std::uint32_t num_freed() { return core().num_freed(); }
  std::uint32_t num_wakes() { return core().num_wakes(); }
  void detach() { core_.reset(); }
  bool is_attached() const { return core_ != nullptr; }

  // At most one slice each; they take nothing, so that they may be abandoned at any time.
  void wait_published(std::uint32_t seen) { wait_slice(Event::kPublished, seen); }
  void wait_freed(std::uint32_t seen) { wait_slice(Event::kFreed, seen); }

  const Settings& settings() { return core().settings(); }
  std::int64_t num_slots() { return core().num_slots(); }
  std::int64_t staleness_bound() { return core().staleness_bound(); }

 private:
  void wait_slice(Event event, std::uint32_t seen) {
    const std::shared_ptr<TrajectoryBuffer> held = core_;
    if (held == nullptr) return;
    const py::gil_scoped_release release;
    wait(*held, event, seen, 1, kSlice);
  }

  // Tries until it works (true), until the deadline (BufferTimeout), or, with a negative time,
  // once (false). Between two tries it waits for `num_events` of `event`.
  template <typename Attempt>
  bool retry(double timeout_s, const std::string& what, Event event, std::uint32_t num_events,
             Attempt attempt) {
    if (std::isnan(timeout_s) || timeout_s > kMaxTimeoutSeconds) {
      throw py::value_error("timeout_s=" + std::to_string(timeout_s) +
                            " must be a finite number of seconds: every wait has a deadline");
    }
    // Held here: another thread may detach meanwhile.
    core();
    const std::shared_ptr<TrajectoryBuffer> held = core_;
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(std::max(timeout_s, 0.0)));
    while (true) {
      const std::uint32_t seen = count(*held, event);
      const Status status = without_gil([&] { return attempt(*held); });
      if (status.code != Code::kWouldBlock) {
        check(status);
        return true;
      }
      if (timeout_s < 0) return false;
      const auto left = deadline - Clock::now();
      if (left <= Clock::duration::zero()) {
        check(Status::error(Code::kWouldBlock, "the deadline passed while waiting for " + what +
                                                   ": " + held->describe()));
      }
      without_gil([&] {
        wait(*held, event, seen, num_events, std::min<Clock::duration>(left, kSlice));
        return 0;
      });
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  // Keeps the mapping alive for as long as the array, or a view of it, lives.
  template <typename T>
  py::array array(const T* data, std::vector<std::size_t> shape, bool is_writable) {
    auto* owner = new std::shared_ptr<TrajectoryBuffer>(core_);
    const py::capsule base(
        owner, [](void* p) { delete static_cast<std::shared_ptr<TrajectoryBuffer>*>(p); });
    py::array_t<T> out(std::move(shape), data, base);
    if (!is_writable) out.attr("setflags")("write"_a = false);
    return out;
  }

  py::tuple to_tuple(const GroupView& group) {
    return py::make_tuple(HandleTuple{group.handle.slot, group.handle.generation}, group.index,
                          group.prompt_index, group.min_version, group.max_version,
                          array(reinterpret_cast<const std::uint8_t*>(group.payload.data()),
                                {group.payload.size()}, false),
                          array(reinterpret_cast<const std::int64_t*>(group.segments.data()),
                                {group.segments.size(), 2}, false));
  }

  std::shared_ptr<TrajectoryBuffer> core_;
};

void add_error(py::module_& m, const char* name, const py::object& bases, const char* doc) {
  const std::string full = std::string("asyncrl._buffer.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  m.attr(name) = py::reinterpret_steal<py::object>(type);
}

void add_errors(py::module_& m) {
  const py::object exception = py::reinterpret_borrow<py::object>(PyExc_Exception);
  add_error(m, "TrajectoryBufferError", exception, "Base of the trajectory buffer's errors.");
  const py::object base = m.attr("TrajectoryBufferError");
  const auto with = [&](PyObject* other) {
    return py::make_tuple(base, py::reinterpret_borrow<py::object>(other));
  };
  add_error(m, "BufferClosed", base, "The buffer was closed, or this object detached from it.");
  add_error(m, "BufferTimeout", with(PyExc_TimeoutError),
            "A wait reached its deadline; the message says what for and the buffer's state.");
  add_error(m, "BufferForeign", base, "The shared memory is no buffer of this build.");
  add_error(m, "BufferNotFound", with(PyExc_FileNotFoundError), "No buffer of that name.");
  add_error(m, "BufferExists", with(PyExc_FileExistsError), "A buffer of that name is there.");
  add_error(m, "BufferNoMemory", with(PyExc_MemoryError), "Shared memory is too small.");
  add_error(m, "BufferStaleHandle", base, "A ticket or lease was used up before.");
}

}  // namespace

PYBIND11_MODULE(_buffer, m) {
  m.doc() = "C++ trajectory buffer; use asyncrl.buffer, which documents it.";
  add_errors(m);
  m.def("unlink", [](const std::string& name) { check(Segment::unlink(name)); }, "name"_a);
  py::class_<Buffer>(m, "Buffer")
      .def_static("create", &Buffer::create, "name"_a, py::kw_only(), "staleness_threshold"_a,
                  "groups_per_version"_a, "lookahead"_a, "capacity_bytes"_a, "first_prompt_index"_a)
      .def_static("attach", &Buffer::attach, "name"_a)
      .def("admit", &Buffer::admit, "timeout_s"_a)
      .def("reserve", &Buffer::reserve, "handle"_a, "num_bytes"_a, "max_segments"_a, "timeout_s"_a)
      .def("publish", &Buffer::publish, "handle"_a, "segments"_a)
      .def("withdraw", &Buffer::withdraw, "handle"_a, "cause"_a)
      .def("take", &Buffer::take, "timeout_s"_a, "num_wanted"_a = 1)
      .def("put_back", &Buffer::put_back, "handle"_a)
      .def("release", &Buffer::release, "handle"_a, "outcome"_a)
      .def("evict", &Buffer::evict, "handle"_a, "cause"_a, "requeue"_a)
      .def("view", &Buffer::view, "handle"_a)
      .def("cut_version", &Buffer::cut_version, "version"_a)
      .def("set_version", &Buffer::set_version, "version"_a)
      .def("stats", &Buffer::stats)
      .def("describe", &Buffer::describe)
      .def("close", &Buffer::close)
      .def("detach", &Buffer::detach)
      .def("reclaim", &Buffer::reclaim)
      .def("wait_published", &Buffer::wait_published, "seen"_a)
      .def("wait_freed", &Buffer::wait_freed, "seen"_a)
      .def_property_readonly("num_published", &Buffer::num_published)
      .def_property_readonly("num_freed", &Buffer::num_freed)
      .def_property_readonly("num_wakes", &Buffer::num_wakes)
      .def_property_readonly("is_closed", &Buffer::is_closed)
      .def_property_readonly("is_attached", &Buffer::is_attached)
      .def_property_readonly("num_slots", &Buffer::num_slots)
      .def_property_readonly("staleness_bound", &Buffer::staleness_bound)
      .def_property_readonly("staleness_threshold",
                             [](Buffer& self) { return self.settings().staleness_threshold; })
      .def_property_readonly("groups_per_version",
                             [](Buffer& self) { return self.settings().groups_per_version; })
      .def_property_readonly("lookahead", [](Buffer& self) { return self.settings().lookahead; });
}
