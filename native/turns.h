// How ranks that share a core wait for each other: they give way (sched_yield), which on a machine
// without other work is twice as fast as to sleep.
//
// If other programs compute there, it is the opposite. Giving way to one of them costs its whole time
// slice, and since Linux 6.18 it costs the rank its own, too: beside two busy programs, collectives of 1
// KiB on 4 ranks took 13 times as long as with sleeping. So whoever was away for long sleeps instead for
// a while.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>

#include "signal.h"

namespace weft {

class Turns {
 public:
  static constexpr int64_t kLong = 500'000;  // another rank that waits is back after some microseconds
  static constexpr int64_t kShortest = 5'000'000, kLongest = 1'280'000'000;  // pauses, in ns
  static constexpr int kQuick = 100;  // so many turns in a row, and the next pause is the shortest

  // Whether a rank should give way at this moment.
  bool worth(int64_t now) const { return now >= from_.load(kRelaxed); }

  // Gives way, and moves `now` on to the moment after that. False if it should not be done again.
  bool give_way(int64_t& now) {
    const int64_t before = now;
    sched_yield();
    now = now_ns();
    return may_again(before, now);
  }

  // Whether one who gave way at a moment, and was back at another, should do so again. A rank may have
  // been away because a peer computes, so the first pauses are short; each is twice as long as the last.
  bool may_again(int64_t before, int64_t after) {
    if (after - before < kLong) {
      if (quick_.fetch_add(1, kRelaxed) + 1 == kQuick) pause_.store(kShortest, kRelaxed);
      return true;
    }
    const int64_t pause = pause_.load(kRelaxed);
    from_.store(later(after, pause), kRelaxed);
    pause_.store(std::min(2 * pause, kLongest), kRelaxed);
    quick_.store(0, kRelaxed);
    return false;
  }

 private:
  // Relaxed: a thread that sees a number late gives way once more, or waits a little longer.
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  std::atomic<int64_t> from_{0}, pause_{kShortest};
  std::atomic<int> quick_{0};
};

}  // namespace weft
