// The rules that bound staleness, as pure functions: no state, no atomics, no waiting.
//
// s = staleness threshold (any real >= 0), G = prompt groups per policy version (R * T),
// W = lookahead, C = slot credits. A group's position is its place in the admission order, not
// counting groups that left it (filtered, failed, evicted).
//
// Why the bound holds: the group at position k was admitted when at least k - C + 1 groups had
// their credit given back, so at version >= ceil((k - C + 1) / G). It is consumed when at most
// k + W groups were consumed before it, so at version <= floor((k + W) / G). The difference is at
// most floor((C + W - 1) / G). It needs the trainer to cut a version each time it has released G
// groups: cut sooner, versions run ahead; cut later, one version gives back more than G credits.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>

namespace asyncrl::staleness {

// floor(s * G), with s the shortest decimal that reads back as the same double: 0.29 * 100 is 29,
// as written, though the double nearest to 0.29 lies below it. Saturates at the largest int64.
inline std::int64_t extra_slots(double threshold, std::int64_t groups_per_version) {
  char text[32];
  const auto end =
      std::to_chars(text, text + sizeof(text), threshold, std::chars_format::scientific);
  __int128 digits = 0;
  int exponent = 0;
  bool is_fraction = false;
  const char* p = text;
  for (; p != end.ptr && *p != 'e'; ++p) {
    if (*p == '.') {
      is_fraction = true;
      continue;
    }
    digits = digits * 10 + (*p - '0');
    exponent -= is_fraction;
  }
  int written = 0;
  // from_chars takes no plus sign.
  p += p + 1 < end.ptr && p[1] == '+' ? 2 : 1;
  std::from_chars(p, end.ptr, written);
  exponent += written;

  constexpr __int128 kMax = std::numeric_limits<std::int64_t>::max();
  __int128 product = digits * groups_per_version;
  for (; exponent > 0 && product <= kMax && product > 0; --exponent) product *= 10;
  for (; exponent < 0 && product > 0; ++exponent) product /= 10;
  return static_cast<std::int64_t>(std::min(product, kMax));
}

// C = floor((1 + s) G): groups admitted whose credit is not given back yet, at most.
inline std::int64_t num_credits(double threshold, std::int64_t groups_per_version) {
  const std::int64_t extra = extra_slots(threshold, groups_per_version);
  return extra > std::numeric_limits<std::int64_t>::max() - groups_per_version
             ? std::numeric_limits<std::int64_t>::max()
             : groups_per_version + extra;
}

// floor((C + W - 1) / G): the staleness of any token of a taken group is at most this.
inline std::int64_t bound(std::int64_t num_credits, std::int64_t lookahead,
                          std::int64_t groups_per_version) {
  return (num_credits + lookahead - 1) / groups_per_version;
}

// Whether a ready group may be taken now. The window is anchored at the oldest group that is not
// yet taken, ready or not; anchored anywhere else, that one could be passed for ever.
inline bool may_take(std::int64_t position, std::int64_t oldest_untaken_position,
                     std::int64_t lookahead) {
  return position - oldest_untaken_position <= lookahead;
}

// Versions between the trainer's weights and those that sampled a token.
inline std::int64_t of_token(std::int64_t trainer_version, std::int64_t token_version) {
  return trainer_version - token_version;
}

}  // namespace asyncrl::staleness
