// Copies of every length and alignment, with guards on both sides.
#include "moving.h"

#include <cstring>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

constexpr uint64_t kGuard = 64, kMost = 700;

TEST(copies_of_every_length_and_alignment) {
  std::vector<char> source(kMost + 64);
  for (uint64_t i = 0; i < source.size(); ++i) source[i] = char(i * 31 + 7);
  for (uint64_t bytes = 0; bytes <= kMost; bytes = bytes < 20 ? bytes + 1 : bytes * 5 / 4)
    for (const uint64_t from : {0, 1, 15})
      for (const uint64_t to : {0, 3, 16, 31})
        for (int way = 0; way < 5; ++way) {
          std::vector<char> one(kMost + 2 * kGuard + 32, 'g'), two = one;
          char *target = one.data() + kGuard + to, *also = two.data() + kGuard;
          const char* data = source.data() + from;
          const bool twice = way >= 3;
          if (way < 2) move(target, data, bytes, way == 1);
          if (way == 2) move_to_peer(target, data, bytes);
          if (twice) move_twice(target, also, data, bytes, way == 4);
          CHECK_SAME(std::memcmp(target, data, bytes), 0);
          for (uint64_t i = 0; i < kGuard; ++i)
            CHECK(target[-1 - int64_t(i)] == 'g' && target[bytes + i] == 'g');
          if (!twice) continue;
          CHECK_SAME(std::memcmp(also, data, bytes), 0);
          CHECK(also[-1] == 'g' && also[bytes] == 'g');
        }
}

}  // namespace
