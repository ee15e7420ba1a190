// The clock, and the own time of this process, in which deadlines are counted.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace weft {

// The clock that all ranks of a machine share.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// A moment after another, or the largest one if the sum would overflow.
inline int64_t later(int64_t moment, int64_t by) {
  int64_t sum;
  return __builtin_add_overflow(moment, by, &sum) ? INT64_MAX : sum;
}

// Own time stands still while this process does: when a user suspends the job (Ctrl-Z), its virtual
// machine is paused, or other programs take all cores. Deadlines are moments of own time, so a job that
// was suspended for longer than its deadline goes on: its ranks had no time in which to be late.
//
// A process learns that it stood still from a sleep that ends much too late.
class OwnTime {
 public:
  static constexpr int64_t kLate = 1'000'000'000;

  int64_t now() const { return at(now_ns()); }

  // Own time at a moment of the clock that has just passed.
  int64_t at(int64_t moment) const { return moment - still_.load(kRelaxed); }

  // The moment on the clock at which own time comes to a moment, if it does not stand still before.
  int64_t on_clock(int64_t moment) const { return later(moment, still_.load(kRelaxed)); }

  // A sleep is over that began at a moment and was to end at another, both on the clock.
  void slept(int64_t began, int64_t due, int64_t now = now_ns()) {
    const int64_t late = now - std::max(began, due);
    if (late < kLate) return;
    // Of all threads that slept through the same time, the first notes it.
    int64_t noted = noted_.load(kRelaxed);
    if (began >= noted && noted_.compare_exchange_strong(noted, now, kRelaxed))
      still_.fetch_add(late, kRelaxed);
  }

 private:
  // Relaxed: a thread that sees a number late counts a little too much time, once.
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  std::atomic<int64_t> still_{0}, noted_{0};
};

inline OwnTime own_time;

}  // namespace weft
