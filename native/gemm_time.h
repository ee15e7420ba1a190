// How long a GEMM takes by counting tiles: the closed form behind the choice of a schedule.
//
// It is `weft.simulate.cost.gemm` again, number for number (tests hold the two together), for the
// choice needs some twenty GEMMs in a few microseconds. The Python text is the one to read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace weft {

using std::int64_t;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// launch; seconds of the body's compute on all units, and on those that are left; bytes of traffic
using Cost = std::tuple<double, double, double, double>;

struct Tile {
  int64_t rows, columns, resident;
  double step_seconds, store_seconds;
};

struct Numbers {
  int64_t step, units, most_splits;
  double step_latency, tile_seconds, settled, settles_after, cache;
  double element, result, split_seconds, split_bytes, kernel, latency, bandwidth;
};

// GEMM times of one machine in one dtype.
class Gemms {
 public:
  virtual ~Gemms() = default;
  // `load`: seconds of the computation that the GEMM is a piece of; `left`: units that remain.
  virtual Cost cost(int64_t m, int64_t n, int64_t k, double load, int64_t left) const = 0;
};

class Tiled : public Gemms {
 public:
  Tiled(const std::vector<std::tuple<int64_t, int64_t, int64_t, double, double>>& tiles,
        std::tuple<int64_t, int64_t, int64_t> counts, const std::vector<double>& numbers) {
    for (const auto& [rows, columns, resident, step, store] : tiles)
      tiles_.push_back({rows, columns, resident, step, store});
    if (tiles.empty() || numbers.size() != 12) throw std::invalid_argument("12 numbers and a tile");
    const double* v = numbers.data();
    const auto [step, units, splits] = counts;
    n_ = {step, units, splits, v[0], v[1], v[2], v[3], v[4],
          v[5], v[6],  v[7],   v[8], v[9], v[10], v[11]};
  }

  Cost cost(int64_t m, int64_t n, int64_t k, double load, int64_t left) const override {
    if (m <= 0 || n <= 0 || k <= 0) return {0.0, 0.0, 0.0, 0.0};
    const auto [index, split] = choice(m, n, k);
    const Tile& tile = tiles_[index];
    const int64_t blocks = ceil_div(m, tile.rows) * ceil_div(n, tile.columns) * split;
    const int64_t steps = ceil_div(ceil_div(k, n_.step), split);
    const double all = loaded(working(tile, blocks, steps, n_.units), load);
    const double some = left == n_.units ? all : loaded(working(tile, blocks, steps, left), load);
    double launch = n_.kernel;
    if (split > 1) launch += second_pass(double(m) * double(n) * double(split));
    return {launch, all, some, traffic(tile, m, n, k)};
  }

 private:
  double loaded(double seconds, double load) const {
    const double clock =
        n_.settled + (1.0 - n_.settled) / (1.0 + std::max(seconds, load) / n_.settles_after);
    return seconds / clock;
  }

  double working(const Tile& tile, int64_t blocks, int64_t steps, int64_t units) const {
    const int64_t room = units * tile.resident;
    const int64_t waves = blocks / room, rest = blocks % room;
    double seconds = 0.0;
    if (waves) seconds = double(waves) * wave(tile, tile.resident, steps);
    if (rest) seconds += wave(tile, ceil_div(rest, units), steps);
    return seconds;
  }

  double wave(const Tile& tile, int64_t held, int64_t steps) const {
    const double inner = std::max(double(held) * tile.step_seconds, n_.step_latency);
    return n_.tile_seconds + double(held) * tile.store_seconds + double(steps) * inner;
  }

  double second_pass(double elements) const {
    return n_.split_seconds + elements * n_.split_bytes / n_.bandwidth;
  }

  double traffic(const Tile& tile, int64_t m, int64_t n, int64_t k) const {
    const double line = double(k) * n_.element;
    const double a = double(m) * line, b = double(n) * line, cache = n_.cache;
    const double once = a + b + double(m) * double(n) * n_.result;
    if (a <= cache || b <= cache) return once;
    const double rows = double(ceil_div(m, tile.rows)), columns = double(ceil_div(n, tile.columns));
    const double wave = std::min(rows * columns, double(n_.units * tile.resident));
    double tall = std::max(
        1.0, std::min(rows, std::sqrt(wave * double(tile.columns) / double(tile.rows))));
    const double wide = std::max(1.0, std::min(columns, wave / tall));
    tall = std::max(1.0, std::min(rows, wave / wide));
    const double more_a = a * (columns / wide - 1.0), more_b = b * (rows / tall - 1.0);
    const double down = more_a * missed(a) +
                        more_b * missed(std::min(b, wide * double(tile.columns) * line));
    const double along = more_b * missed(b) +
                         more_a * missed(std::min(a, tall * double(tile.rows) * line));
    return once + std::min(down, along);
  }

  double missed(double size) const { return size <= n_.cache ? 0.0 : 1.0 - n_.cache / size; }

  std::pair<size_t, int64_t> choice(int64_t m, int64_t n, int64_t k) const {
    double best = std::numeric_limits<double>::infinity();
    std::pair<size_t, int64_t> found{0, 1};
    const int64_t steps = ceil_div(k, n_.step), units = n_.units;
    for (size_t index = 0; index < tiles_.size(); ++index) {
      const Tile& tile = tiles_[index];
      const int64_t blocks = ceil_div(m, tile.rows) * ceil_div(n, tile.columns);
      const double even = double(blocks) * double(steps) * tile.step_seconds / double(units);
      if (even >= best) continue;
      const double moving = n_.latency + traffic(tile, m, n, k) / n_.bandwidth;
      if (moving >= best) continue;
      const double alone = loaded(working(tile, blocks, steps, units), 0.0);
      if (std::max(alone, moving) < best) {
        best = std::max(alone, moving);
        found = {index, 1};
      }
      if (steps == 1 || alone <= moving + n_.split_seconds) continue;
      // Returns whether further splits may still win.
      const auto tried = [&](int64_t split) {
        const double again = second_pass(double(m) * double(n) * double(split));
        if (again + std::max(moving, even) >= best) return false;
        const double split_working = working(tile, blocks * split, ceil_div(steps, split), units);
        const double seconds = again + std::max(loaded(split_working, 0.0), moving);
        if (seconds < best) {
          best = seconds;
          found = {index, split};
        }
        return true;
      };
      const int64_t most = std::min(steps, n_.most_splits), room = units * tile.resident;
      if (blocks > room) {
        for (int64_t split = 2; split <= most; ++split)
          if (!tried(split)) break;
      } else {
        int64_t before[4];
        int count = 0;
        for (const int64_t full : {units, room, 2 * room, 4 * room}) {
          const int64_t split = std::min(most, full / blocks);
          if (split <= 1 || std::find(before, before + count, split) != before + count) continue;
          before[count++] = split;
          if (!tried(split)) break;
        }
      }
    }
    return found;
  }

  std::vector<Tile> tiles_;
  Numbers n_{};
};

// A machine without tiles, by its measured rates: `weft.simulate.cost.rates` again.
class Rated : public Gemms {
 public:
  Rated(double peak, std::tuple<double, double, double> half,
        std::tuple<double, double, double> bytes, std::pair<double, int64_t> kernel_and_units,
        const std::vector<std::tuple<double, double, double, double>>& points)
      : peak_(peak), half_(half), bytes_(bytes), kernel_(kernel_and_units.first),
        units_(kernel_and_units.second) {
    for (const auto& [m, n, k, rate] : points)
      points_.push_back({std::log2(m), std::log2(n), std::log2(k),
                         std::log(rate / (peak * reached(m, n, k)))});
  }

  Cost cost(int64_t m, int64_t n, int64_t k, double, int64_t left) const override {
    if (m <= 0 || n <= 0 || k <= 0) return {0.0, 0.0, 0.0, 0.0};
    const double lm = std::log2(double(m)), ln = std::log2(double(n)), lk = std::log2(double(k));
    const auto [trust, element, result] = bytes_;
    double pull = 0.0, weights = 1.0 / (trust * trust);
    for (const Point& p : points_) {
      const double m_away = lm - p.m, n_away = ln - p.n, k_away = lk - p.k;
      const double away = m_away * m_away + n_away * n_away + k_away * k_away;
      const double weight = 1.0 / (away * away + 1e-3);
      pull += weight * p.found;
      weights += weight;
    }
    const double rate = peak_ * reached(double(m), double(n), double(k)) * std::exp(pull / weights);
    const double whole = 2.0 * double(m) * double(n) * double(k) / rate;
    const double inputs = (double(m) + double(n)) * double(k) * element;
    const double traffic = inputs + double(m) * double(n) * result;
    return {kernel_, whole, whole * double(units_) / double(left), traffic};
  }

 private:
  struct Point {
    double m, n, k, found;
  };

  double reached(double m, double n, double k) const {
    const auto [a, b, c] = half_;
    return m / (m + a) * (n / (n + b)) * (k / (k + c));
  }

  double peak_;
  std::tuple<double, double, double> half_, bytes_;
  double kernel_;
  int64_t units_;
  std::vector<Point> points_;
};

}  // namespace weft
