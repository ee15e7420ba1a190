// How to store chunks into rings that peers read: into the cache of this core, or past it into memory.
// If the cores of two ranks are near each other, a reader finds a chunk sooner in the writer's cache. If
// they are not (other complexes of one processor, other sockets), it takes twice as long from there as
// from memory. A virtual machine may be moved from one case to the other. So the first messages of a
// size try both in turns, and now and then again. All ranks make the same collectives in the same order,
// so all of them try the same at the same time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>

namespace weft {

class StoreTrials {
 public:
  static constexpr int kTries = 5;     // of each, before one is chosen
  static constexpr int kAgain = 1000;  // messages after which both are tried again

  // Messages of one kind and about one size are alike.
  static uint64_t class_of(int kind, uint64_t bytes) {
    return uint64_t(kind + 1) << 8 | uint64_t(std::bit_width(bytes));
  }

  // Whether the next message of a class goes past the cache.
  bool next(uint64_t message_class) {
    Trial& trial = trials_[message_class];
    if (trial.begun == kAgain) trial = {};
    if (trial.begun++ >= 2 * kTries) return trial.past();
    return trial.begun % 2 == 0;
  }

  // How long a message took. Only those that were tries count.
  void took(uint64_t message_class, bool past, int64_t ns) {
    Trial& trial = trials_[message_class];
    int& count = trial.count[past];
    if (count < kTries) trial.times[past][count++] = ns;
  }

 private:
  struct Trial {
    int begun = 0;
    int count[2] = {};
    int64_t times[2][kTries];

    int64_t median(bool past) {
      int64_t* const first = times[past];
      std::nth_element(first, first + count[past] / 2, first + count[past]);
      return first[count[past] / 2];
    }
    bool past() { return count[0] && count[1] && median(true) < median(false); }
  };
  std::unordered_map<uint64_t, Trial> trials_;
};

}  // namespace weft
