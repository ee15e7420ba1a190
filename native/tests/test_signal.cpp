// Signals and bells: values, waiting, and that no wake-up is lost however the two sides interleave.
#include <atomic>
#include <thread>
#include <vector>

#include "channel_layout.h"
#include "check.h"
#include "signal.h"

using namespace weft;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

TEST(moments_end_with_time) {
  CHECK_SAME(later(3, 4), 7);
  CHECK_SAME(later(INT64_MAX - 1, 5), INT64_MAX);
  CHECK_SAME(later(5, INT64_MAX), INT64_MAX);
}

TEST(a_signal_that_is_there_is_not_waited_for) {
  Signal signal{};
  CHECK(signal.spin(0, 0));
  CHECK(!signal.spin(1, 0));
  signal.set(3);
  CHECK_SAME(signal.get(), 3u);
  CHECK(signal.spin(3, 0));
  CHECK(signal.sleep(2, kSecond));
  signal.add_one();
  CHECK(signal.sleep(4, kSecond));
  CHECK_SAME(signal.sleepers.load(), 0u);
}

TEST(a_signal_that_does_not_come_is_waited_for_so_long) {
  Signal signal{};
  const int64_t start = now_ns();
  CHECK(!signal.spin(1, 2'000'000));
  CHECK(!signal.sleep(1, 5'000'000));
  const int64_t took = now_ns() - start;
  CHECK(took >= 7'000'000);
  CHECK_SAME(signal.sleepers.load(), 0u);
}

// Two sides take turns; the sleeping one must be woken each time, for its sleep would take seconds.
TEST(signals_wake_sleepers_every_time) {
  Signal there{}, back{};
  constexpr int kTurns = 4000;
  uint64_t value = 0;  // plain: what a signal is for
  const int64_t start = now_ns();
  std::thread other([&] {
    for (uint64_t turn = 1; turn <= kTurns; ++turn) {
      while (!there.sleep(turn, 5 * kSecond)) {
      }
      CHECK_SAME(value, 2 * turn - 1);
      value = 2 * turn;
      back.set(turn);
    }
  });
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    value = 2 * turn - 1;
    there.set(turn);
    while (!back.sleep(turn, 5 * kSecond)) {
    }
    CHECK_SAME(value, 2 * turn);
  }
  other.join();
  CHECK(now_ns() - start < 5 * kSecond);  // not one sleep went on to its end
}

TEST(a_signal_wakes_all_of_its_sleepers) {
  Signal signal{}, ready{};
  std::vector<std::thread> sleepers;
  uint64_t word = 0;
  std::atomic<int> right{0};
  for (int i = 0; i < 6; ++i)
    sleepers.emplace_back([&, i] {
      ready.add_one();
      while (i % 2 ? !signal.sleep(7, 5 * kSecond) : !signal.spin(7, 1000)) {
      }
      right += word == 99;
    });
  while (!ready.sleep(6, kSecond)) {
  }
  word = 99;
  signal.set(7);
  for (auto& thread : sleepers) thread.join();
  CHECK_SAME(right.load(), 6);
}

// A bell guards no data itself: flags do, under release and acquire; the bell only wakes.
TEST(bells_wake_sleepers_every_time) {
  Bell bells[2]{};
  std::atomic<uint64_t> flags[2]{};
  uint64_t values[2]{};
  constexpr uint64_t kTurns = 4000;
  const auto await = [&](int side, uint64_t turn) {
    const auto ready = [&] { return flags[side].load(std::memory_order_acquire) >= turn; };
    while (!bells[side].sleep(5 * kSecond, ready)) {
    }
    CHECK_SAME(values[side], turn);
  };
  const auto give = [&](int side, uint64_t turn) {
    values[side] = turn;
    flags[side].store(turn, std::memory_order_release);
    bells[side].ring();
  };
  const int64_t start = now_ns();
  std::thread other([&] {
    for (uint64_t turn = 1; turn <= kTurns; ++turn) {
      await(1, turn);
      give(0, turn);
    }
  });
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    give(1, turn);
    await(0, turn);
  }
  other.join();
  CHECK(now_ns() - start < 5 * kSecond);
  CHECK_SAME(bells[0].sleepers.load() + bells[1].sleepers.load(), 0u);
}

}  // namespace
