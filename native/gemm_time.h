// How long a GEMM takes by counting tiles: the closed form behind the choice of a schedule.
//
// It is `weft.simulate.cost.gemm` again, number for number (tests hold the two together), for the
// choice needs some twenty GEMMs in a few microseconds. The Python text is the one to read.
#pragma once

#include <algorithm>
#include <array>
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
  double spread, tie;
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
    if (tiles.empty() || numbers.size() != 14) throw std::invalid_argument("14 numbers and a tile");
    const double* v = numbers.data();
    const auto [step, units, splits] = counts;
    n_ = {step, units, splits, v[0], v[1], v[2], v[3], v[4],
          v[5], v[6],  v[7],   v[8], v[9], v[10], v[11], v[12], v[13]};
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
    const double whole = waves ? wave(tile, tile.resident, steps) : 0.0;
    double seconds = double(waves) * whole;
    if (rest) {
      double last = wave(tile, ceil_div(rest, units), steps);
      const double even = whole * double(rest) / double(room);
      if (waves) last -= n_.spread * std::max(0.0, last - even);
      seconds += last;
    }
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
    for (size_t index = tiles_.size(); index-- > 0;) {  // from the largest
      const Tile& tile = tiles_[index];
      const double wanted = best * (1.0 - n_.tie);
      const int64_t blocks = ceil_div(m, tile.rows) * ceil_div(n, tile.columns);
      const double even = double(blocks) * double(steps) * tile.step_seconds / double(units);
      if (even >= wanted) continue;
      const double moving = n_.latency + traffic(tile, m, n, k) / n_.bandwidth;
      if (moving >= wanted) continue;
      const double alone = loaded(working(tile, blocks, steps, units), 0.0);
      double seconds = std::max(alone, moving);
      int64_t taken = 1;
      // Returns whether further splits may still win.
      const auto tried = [&](int64_t split) {
        const double again = second_pass(double(m) * double(n) * double(split));
        if (again + std::max(moving, even) >= seconds) return false;
        const double split_working = working(tile, blocks * split, ceil_div(steps, split), units);
        const double both = again + std::max(loaded(split_working, 0.0), moving);
        if (both < seconds) {
          seconds = both;
          taken = split;
        }
        return true;
      };
      const int64_t most = std::min(steps, n_.most_splits), room = units * tile.resident;
      if (steps == 1 || alone <= moving + n_.split_seconds) {
        // nothing that a split could fill
      } else if (blocks > room) {
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
      if (seconds < wanted) {
        best = seconds;
        found = {index, taken};
      }
    }
    return found;
  }

  std::vector<Tile> tiles_;
  Numbers n_{};
};

// A machine without tiles, by its measured rates: `weft.simulate.cost.rates` again. Corrections of
// the curve at the measured points come from there; between points they go from one to the next.
class Rated : public Gemms {
 public:
  using Point = std::tuple<double, double, double, double>;  // log2 of m, n, k; the correction

  Rated(double peak, std::tuple<double, double, double> half,
        std::tuple<double, double, double> bytes, std::pair<double, int64_t> kernel_and_units,
        const std::array<std::vector<double>, 3>& axes, const std::vector<Point>& points)
      : peak_(peak), half_(half), bytes_(bytes), kernel_(kernel_and_units.first),
        units_(kernel_and_units.second), axes_(axes) {
    found_.assign(axes[0].size() * axes[1].size() * axes[2].size(),
                  std::numeric_limits<double>::quiet_NaN());
    for (const auto& [m, n, k, correction] : points)
      found_[place(index(axes[0], m), index(axes[1], n), index(axes[2], k))] = correction;
  }

  Cost cost(int64_t m, int64_t n, int64_t k, double, int64_t left) const override {
    if (m <= 0 || n <= 0 || k <= 0) return {0.0, 0.0, 0.0, 0.0};
    const auto [trust, element, result] = bytes_;
    const double rows = double(m), columns = double(n), inner = double(k);
    const double rate = peak_ * reached(rows, columns, inner) * corrected(m, n, k, trust);
    const double whole = 2.0 * rows * columns * inner / rate;
    const double traffic = (rows + columns) * inner * element + rows * columns * result;
    return {kernel_, whole, whole * double(units_) / double(left), traffic};
  }

 private:
  // The measured sizes on both sides with their weights, and how far outside of all it is.
  struct Around {
    size_t low = 0, high = 0;
    double share = 0.0, beyond = 0.0;
  };

  static size_t index(const std::vector<double>& axis, double at) {
    return size_t(std::lower_bound(axis.begin(), axis.end(), at) - axis.begin());
  }

  size_t place(size_t m, size_t n, size_t k) const {
    return (m * axes_[1].size() + n) * axes_[2].size() + k;
  }

  static Around around(const std::vector<double>& axis, double at) {
    if (at <= axis.front()) return {0, 0, 0.0, axis.front() - at};
    const size_t last = axis.size() - 1;
    if (at >= axis.back()) return {last, last, 0.0, at - axis.back()};
    const size_t above = size_t(std::upper_bound(axis.begin(), axis.end(), at) - axis.begin());
    return {above - 1, above, (at - axis[above - 1]) / (axis[above] - axis[above - 1]), 0.0};
  }

  double corrected(int64_t m, int64_t n, int64_t k, double trust) const {
    if (found_.empty()) return 1.0;
    const double at[3] = {std::log2(double(m)), std::log2(double(n)), std::log2(double(k))};
    Around a[3];
    double away = 0.0, pull = 0.0, weights = 0.0;
    for (int i = 0; i < 3; ++i) {
      a[i] = around(axes_[size_t(i)], at[i]);
      away += a[i].beyond * a[i].beyond;
    }
    for (int corner = 0; corner < 8; ++corner) {
      double weight = 1.0;
      size_t where[3];
      for (int i = 0; i < 3; ++i) {
        const bool high = (corner >> i) & 1;
        weight *= high ? a[i].share : 1.0 - a[i].share;
        where[i] = high ? a[i].high : a[i].low;
      }
      const double known = found_[place(where[0], where[1], where[2])];
      if (weight == 0.0 || std::isnan(known)) continue;
      pull += weight * known;
      weights += weight;
    }
    if (weights == 0.0) return 1.0;
    const double fade = away / (trust * trust);
    return std::exp(pull / weights / (1.0 + fade * fade));
  }

  double reached(double m, double n, double k) const {
    const auto [a, b, c] = half_;
    return m / (m + a) * (n / (n + b)) * (k / (k + c));
  }

  double peak_;
  std::tuple<double, double, double> half_, bytes_;
  double kernel_;
  int64_t units_;
  std::array<std::vector<double>, 3> axes_;
  std::vector<double> found_;
};

}  // namespace weft
