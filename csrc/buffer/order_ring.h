// The admission order: which use of which slot has which index.
//
//   cells  | left | READING | left | WRITING | READY | WRITING |  (next)  |
//            ^start                    ^untaken                    ^end
//
// Cell k mod N names the slot's use that has index k. A cell is filled *before* the end moves, and
// whoever meets a filled cell at the end moves it, so no process can hold the order up by dying.
// Start and untaken are hints behind which nothing is to be found.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "buffer/atomic.h"
#include "buffer/layout.h"

namespace asyncrl {

class OrderRing {
 public:
  struct Cell {
    std::uint32_t generation = 0;
    std::uint16_t slot = 0;
    bool is_again = false;  // the use of a requeued prompt
    bool has_left = false;  // filtered, failed or evicted: later groups moved up. A hint
    std::uint16_t lap = 0;  // (k / N + 1) mod 2^14; 0 = never filled

    bool operator==(const Cell&) const = default;
  };

  OrderRing(Header* header, std::span<Atomic<std::uint64_t>> cells, std::span<Slot> slots)
      : header_(header), cells_(cells), slots_(slots) {}

  // Lock-free. Gives the use its index and a prompt, and makes its word kWriting. False if the ring
  // is full of groups that left behind one that is still in the order.
  bool enter(std::uint32_t slot, SlotValue entering);
  // Lock-free. Completes the entry that another process may have left half made.
  void help();

  // Lock-free. Index of the oldest group that nobody has taken, if there is any.
  std::optional<std::int64_t> oldest_untaken();
  // Wait-free. Index of the next group to be admitted.
  std::int64_t end() const;
  // Wait-free. What has index `index`; nothing if its cell is used by a later one.
  std::optional<Cell> at(std::int64_t index) const;

  // Wait-free. The use that has `index` is no longer in the order.
  void leave(std::int64_t index, std::uint32_t slot, std::uint32_t generation);
  // Lock-free. The group at `index` is about to be untaken again.
  void reopen(std::int64_t index);

 private:
  struct End {
    std::int64_t index = 0;      // 38 bits
    std::int64_t num_again = 0;  // 26 bits: admissions before `index` of requeued prompts
  };
  struct Hint {
    std::int64_t index = 0;  // 40 bits
    std::uint64_t tag = 0;   // 24 bits: times a group was put back
  };

  End load_end() const;
  Hint load_untaken() const;
  bool change_untaken(Hint from, Hint to);
  Atomic<std::uint64_t>& cell(std::int64_t index) const;
  std::uint16_t lap(std::int64_t index) const;
  void complete(const Cell& cell, End end);
  bool has_room(std::int64_t index);
  bool is_over(std::int64_t index) const;

  Header* header_;
  std::span<Atomic<std::uint64_t>> cells_;
  std::span<Slot> slots_;
};

// What a slot's index and prompt hold until the entry of this use assigns them: a value that no
// other use ever has, so that a helper who comes too late changes nothing.
constexpr std::int64_t unassigned(std::uint32_t generation) {
  return INT64_MIN + static_cast<std::int64_t>(generation);
}

}  // namespace asyncrl
