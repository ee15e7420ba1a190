// How many helpers a large copy has (copiers.h), by what such copies took before.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace weft {

constexpr int kMostHelpers = 3;

// Each number of helpers is tried a few times for each size of copies, and then the one that copied
// fastest is used. Where more helpers gain nothing, because the memory is busy already, fewer are taken.
// One of the others is tried again now and then, because what else the machine does changes.
class HelperCount {
 public:
  // For a copy of so many bytes, where at most so many helpers have a core.
  int choose(uint64_t bytes, int most) {
    Size& size = of(bytes);
    const uint64_t turn = size.copies++;
    for (int helpers = most; helpers >= 0; --helpers)
      if (size.by[helpers].tried < kTries) return helpers;
    if (turn % kTryAgain == 0) return int(turn / kTryAgain % uint64_t(most + 1));
    int best = 0;
    for (int helpers = 1; helpers <= most; ++helpers)
      if (size.by[helpers].middle() < kWorthIt * size.by[best].middle()) best = helpers;
    return best;
  }

  void took(uint64_t bytes, int helpers, int64_t nanoseconds) {
    Rate& rate = of(bytes).by[helpers];
    rate.last[rate.tried++ % kTries] = double(nanoseconds) / double(bytes);
  }

 private:
  static constexpr uint32_t kTries = 3;
  static constexpr uint64_t kTryAgain = 64;  // a sixty-fourth of all copies
  static constexpr double kWorthIt = 0.95;   // of the time with fewer helpers

  struct Rate {
    std::array<double, kTries> last{};  // nanoseconds per byte
    uint32_t tried = 0;

    double middle() const {  // one slow copy, e.g. to pages that are touched first, decides nothing
      return std::max(std::min(last[0], last[1]), std::min(std::max(last[0], last[1]), last[2]));
    }
  };
  struct Size {
    std::array<Rate, kMostHelpers + 1> by;
    uint64_t copies = 0;
  };

  // Copies of one power of two and of the largest sizes are alike.
  Size& of(uint64_t bytes) { return sizes_[std::min<size_t>(std::bit_width(bytes), 27) - 1]; }

  std::array<Size, 27> sizes_;
};

}  // namespace weft
