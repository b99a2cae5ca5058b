// What a caller's values must fulfil, and what it is told when they do not.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "buffer/layout.h"
#include "buffer/status.h"

namespace asyncrl {

Status invalid(std::string message);
Status check_settings(const Settings& settings);
// A group's version segments; versions up to `trainer_version` exist.
Status check_segments(std::span<const VersionSegment> segments, std::int64_t trainer_version);

}  // namespace asyncrl
