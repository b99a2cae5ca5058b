#include "buffer/checks.h"

#include <cmath>
#include <utility>

#include "buffer/staleness.h"

namespace asyncrl {

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

}  // namespace asyncrl
