// Which way is faster for large messages: rings, which are two copies through the cache, or the memory of
// the process that has them, which is one copy by the kernel. It depends on how near the cores of two
// ranks are and on the pages of the memory: either was seen to take 1.8 times as long as the other. So
// the first messages of a size try both in turns. All ranks make the same collectives in the same order,
// so all of them try the same way at the same time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>

namespace weft {

class WayTrials {
 public:
  enum Way : int { rings, process };

  // Messages of one kind and about one size are alike.
  static uint64_t class_of(int kind, uint64_t bytes) {
    return uint64_t(kind) << 8 | uint64_t(std::bit_width(bytes));
  }

  // The way of the next message. tries: of each way, before one is chosen.
  Way next(uint64_t message_class, int tries) {
    Trial& trial = trials_[message_class];
    if (trial.begun >= 2 * tries) return trial.chosen(tries);
    return ++trial.begun % 2 ? rings : process;
  }

  // A message of this class took so long. Slow moments make times longer, so the shortest counts.
  void took(uint64_t message_class, Way way, int64_t ns) {
    int64_t& best = trials_[message_class].best[way];
    best = std::min(best, ns);
  }

 private:
  struct Trial {
    int begun = 0;
    int64_t best[2] = {INT64_MAX, INT64_MAX};

    Way chosen(int tries) const {
      if (tries == 0) return process;
      return best[process] < best[rings] - best[rings] / 32 ? process : rings;
    }
  };
  std::unordered_map<uint64_t, Trial> trials_;
};

}  // namespace weft
