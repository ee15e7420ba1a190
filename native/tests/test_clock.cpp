// Own time: it does not count what a sleep takes too long.
#include "clock.h"

#include <thread>
#include <vector>

#include "check.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

// How far own time is behind the clock.
int64_t behind(const OwnTime& time) { return time.on_clock(0); }

TEST(a_sleep_that_ends_in_time_changes_nothing) {
  OwnTime time;
  time.slept(10, 20, 20);
  time.slept(10, 20, 20 + OwnTime::kLate - 1);
  CHECK_SAME(behind(time), 0);
  const int64_t before = now_ns();
  CHECK(time.now() >= before);
}

TEST(own_time_does_not_count_what_a_sleep_takes_too_long) {
  OwnTime time;
  time.slept(10, 20, 20 + 5 * kSecond);
  CHECK_SAME(behind(time), 5 * kSecond);
  const int64_t own = time.now();
  CHECK(own <= now_ns() - 5 * kSecond);
  CHECK_SAME(time.on_clock(7), 7 + 5 * kSecond);
  CHECK_SAME(time.on_clock(INT64_MAX - 1), INT64_MAX);
}

TEST(a_sleep_to_a_moment_that_has_passed_counts_from_its_beginning) {
  OwnTime time;
  time.slept(3 * kSecond, 0, 3 * kSecond + 1);
  CHECK_SAME(behind(time), 0);
}

TEST(threads_that_slept_through_the_same_time_count_it_once) {
  OwnTime time;
  for (int64_t round = 1; round <= 200; ++round) {
    const int64_t began = round * 10 * kSecond;
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < 4; ++i)
      threads.emplace_back([&, i] { time.slept(began + i, began + i, began + 5 * kSecond + i); });
    for (auto& thread : threads) thread.join();
    CHECK_SAME(behind(time), round * 5 * kSecond);
  }
}

}  // namespace
