// GEMM times in closed form: sizes of nothing, what is refused, and a machine small enough to reckon by
// hand. That the numbers are those of the simulator is a test of Python's, which has both.
#include "gemm_time.h"

#include <cmath>

#include "check.h"

using namespace weft;
using namespace weft::test;

namespace {

bool near(double a, double b) { return std::abs(a - b) <= 1e-12 * std::abs(b); }

TEST(parts_of_a_whole_are_rounded_up) {
  CHECK_SAME(ceil_div(0, 4), 0);
  CHECK_SAME(ceil_div(1, 4), 1);
  CHECK_SAME(ceil_div(8, 4), 2);
  CHECK_SAME(ceil_div(9, 4), 3);
}

TEST(a_machine_without_all_of_its_numbers_is_refused) {
  const std::vector<std::tuple<int64_t, int64_t, int64_t, double, double>> tile{{16, 16, 1, 1, 1}};
  CHECK(contains(thrown([&] { Tiled(tile, {1, 1, 1}, {1.0, 2.0}); }), "numbers"));
  CHECK(contains(thrown([&] { Tiled({}, {1, 1, 1}, std::vector<double>(14, 1.0)); }), "numbers"));
}

// A rate of 1e9 at every size, of four units; one launch takes a microsecond.
Rated flat(const std::vector<Rated::Point>& points, const std::array<std::vector<double>, 3>& axes) {
  return Rated(1e9, {0, 0, 0}, {1.0, 2.0, 4.0}, {1e-6, 4}, axes, points);
}

TEST(a_rated_machine_by_hand) {
  const std::array<std::vector<double>, 3> axes{{{3.0}, {3.0}, {3.0}}};
  const Rated machine = flat({{3.0, 3.0, 3.0, 0.0}}, axes);
  const auto [launch, all, some, traffic] = machine.cost(8, 8, 8, 0.0, 2);
  CHECK(near(launch, 1e-6));
  CHECK(near(all, 2.0 * 8 * 8 * 8 / 1e9));
  CHECK(near(some, 2 * all));  // on two of the four units
  CHECK(near(traffic, (8 + 8) * 8 * 2.0 + 8 * 8 * 4.0));
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{0, 8, 8}, {8, 0, 8}, {8, 8, 0}})
    CHECK_SAME(std::get<1>(machine.cost(m, n, k, 0.0, 4)), 0.0);
}

TEST(corrections_hold_at_their_points_and_go_from_one_to_the_next) {
  const std::array<std::vector<double>, 3> axes{{{3.0, 5.0}, {3.0}, {3.0}}};
  const double half = std::log(0.5), quarter = std::log(0.25);
  const Rated machine = flat({{3.0, 3.0, 3.0, half}, {5.0, 3.0, 3.0, quarter}}, axes);
  const auto rate = [&](int64_t m) {
    return 2.0 * double(m) * 64 / std::get<1>(machine.cost(m, 8, 8, 0.0, 4)) / 1e9;
  };
  CHECK(near(rate(8), 0.5));
  CHECK(near(rate(32), 0.25));
  CHECK(near(rate(16), std::exp((half + quarter) / 2)));
  CHECK(rate(1 << 20) > 0.9);  // far from all points, the curve stands by itself
}

}  // namespace
