// Signals: 64-bit counters in shared memory that only grow. Waiting spins, then sleeps on a futex.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "clock.h"

namespace weft {

constexpr int64_t kSlice = 50'000'000;  // how often a sleeper looks after its peers, in ns

inline void sleep_until(int64_t when) {
  const int64_t began = now_ns();
  timespec t{time_t(when / 1'000'000'000), long(when % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
  own_time.slept(began, when);
}

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void spin_until(int64_t when) {
  const int64_t began = now_ns();
  int64_t now = began;
  for (; now < when; now = now_ns()) spin_pause();
  own_time.slept(began, when, now);
}

inline void futex_wait(const void* word, uint32_t seen, int64_t timeout_ns) {
  timespec t{time_t(timeout_ns / 1'000'000'000), long(timeout_ns % 1'000'000'000)};
  const int64_t began = now_ns();
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, nullptr, 0);
  own_time.slept(began, later(began, timeout_ns));
}

inline void futex_wake_all(const void* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// One writer (or atomic adds), any number of waiters, in any process that maps it.
//
// It guarantees two things. A thread that has seen the new value also sees what the writer did
// before `set`: the store releases (seq_cst includes that), and `get` acquires. And no wake-up is
// lost: see `set`. A killed sleeper leaves `sleepers` above zero, which only costs a system call
// per `set`.
struct Signal {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
  uint32_t unused;

  uint64_t get() const { return value.load(std::memory_order_acquire); }

  // The store and the load of `sleepers` are both sequentially consistent, as are the sleeper's
  // increment and its load of `value`: one of the two always sees the other, so no wake-up is lost.
  void set(uint64_t to) {
    value.store(to, std::memory_order_seq_cst);
    wake();
  }

  void add_one() {
    value.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }

  // Wakes all sleepers without a new value.
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&value);
  }

  // Spins until the value reaches `target` or the time is up; true if it did.
  bool spin(uint64_t target, int64_t spin_ns) const {
    if (get() >= target) return true;
    if (spin_ns <= 0) return false;
    const int64_t until = now_ns() + spin_ns;
    for (;;) {
      for (int i = 0; i < 32; ++i) {
        if (get() >= target) return true;
        spin_pause();
      }
      if (now_ns() >= until) return false;
    }
  }

  // Sleeps until woken or the time is up; true if the value reached `target`.
  bool sleep(uint64_t target, int64_t timeout_ns) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = value.load(std::memory_order_seq_cst);
    // The kernel compares the low half of the counter (little endian: the first four bytes).
    if (seen < target) futex_wait(&value, uint32_t(seen), timeout_ns);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return get() >= target;
  }
};

static_assert(sizeof(Signal) == 16);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace weft
