// Teams of threads: every part is done once, the caller sees what all threads wrote, and a team inside of
// a team, or of another thread, is its own.
#include "team.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

// As torch does; before any test, because the runtime is looked for once.
const void* const openmp = dlopen("libgomp.so.1", RTLD_NOW);

// Plain writes by whatever thread has a part, read by the caller: what a thread sanitizer watches.
void check_team(int threads, size_t parts) {
  std::vector<uint64_t> input(parts), output(parts, 0);
  std::iota(input.begin(), input.end(), 1);
  in_parts(threads, parts, [&](size_t part) { output[part] += 3 * input[part]; });
  for (size_t part = 0; part < parts; ++part) CHECK_SAME(output[part], 3 * (part + 1));
}

TEST(a_team_does_every_part_once_and_its_caller_sees_it) {
  if (!openmp) {
    std::puts("without libgomp a caller does all parts itself");
  } else {
    CHECK(has_team());
  }
  for (int turn = 0; turn < 300; ++turn)
    for (int threads : {1, 2, 3, 4}) check_team(threads, size_t(turn % 17));
}

TEST(a_team_inside_of_a_team_is_one_thread) {
  std::vector<uint64_t> sums(8, 0);
  in_parts(4, sums.size(), [&](size_t part) {
    in_parts(4, 100, [&](size_t inner) { sums[part] += inner; });
  });
  for (uint64_t sum : sums) CHECK_SAME(sum, 4950u);
}

TEST(two_threads_have_teams_of_their_own) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller)
    callers.emplace_back([] {
      for (int turn = 0; turn < 100; ++turn) check_team(2, 13);
    });
  for (auto& caller : callers) caller.join();
}

TEST(blocks_make_up_all_units) {
  for (uint64_t count : {0u, 1u, 7u, 1000u, 100'003u})
    for (uint64_t bytes : {0u, 1u, 64u, 1u << 20}) {
      std::vector<uint8_t> seen(count, 0);
      in_blocks(3, count, bytes, [&](uint64_t first, uint64_t units) {
        for (uint64_t unit = first; unit < first + units; ++unit) ++seen[unit];
      });
      CHECK_SAME(uint64_t(std::accumulate(seen.begin(), seen.end(), uint64_t(0))), count);
    }
}

}  // namespace
