// Whether ranks that share a core give way: not for a while after it took long.
#include "turns.h"

#include "check.h"

using namespace weft;
using namespace weft::test;

namespace {

TEST(giving_way_is_repeated_while_it_is_quick) {
  Turns turns;
  CHECK(turns.worth(0));
  CHECK(turns.may_again(1'000, 1'000 + Turns::kLong - 1));
  CHECK(turns.worth(1'000 + Turns::kLong));
}

TEST(who_is_away_for_long_again_and_again_sleeps_longer_and_longer) {
  Turns turns;
  int64_t pause = Turns::kShortest, now = 1'000;
  for (int i = 0; i < 20; ++i) {
    const int64_t back = now + Turns::kLong;
    CHECK(!turns.may_again(now, back));
    CHECK(!turns.worth(back + pause - 1));
    now = back + pause;
    CHECK(turns.worth(now));
    pause = std::min(2 * pause, Turns::kLongest);
  }
  CHECK_SAME(pause, Turns::kLongest);
  for (int i = 0; i < Turns::kQuick; ++i) CHECK(turns.may_again(now, now + 1'000));
  CHECK(!turns.may_again(now, now + Turns::kLong));
  CHECK(turns.worth(now + Turns::kLong + Turns::kShortest));
}

TEST(giving_way_moves_the_clock_on) {
  Turns turns;
  const int64_t before = now_ns();
  int64_t now = before;
  const bool again = turns.give_way(now);
  CHECK(now >= before);
  CHECK_SAME(again, now - before < Turns::kLong);
}

}  // namespace
