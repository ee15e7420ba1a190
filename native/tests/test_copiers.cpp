// Helpers of engines: every byte is copied once, whoever does it, and nobody helps where no core is free.
#include "copiers.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

constexpr uint64_t kGuard = 64;

// Copies so many rows with helpers, and compares every byte of the target and around it.
void check_copy(Copiers& copiers, uint64_t rows, uint64_t row_bytes, uint64_t gap) {
  const uint64_t pitch = row_bytes + gap;
  std::vector<char> source(rows * pitch + 1), target(rows * pitch + 2 * kGuard, 'g');
  for (uint64_t i = 0; i < source.size(); ++i) source[i] = char(i * 31 + i / 251);
  copiers.copy({target.data() + kGuard, pitch, source.data(), pitch, rows, row_bytes});
  for (uint64_t row = 0; row < rows; ++row)
    for (uint64_t i = 0; i < pitch; ++i) {
      const uint64_t at = row * pitch + i;
      const char wanted = i < row_bytes ? source[at] : 'g';
      if (target[kGuard + at] != wanted) CHECK_SAME(at, UINT64_MAX);
    }
  CHECK(target[kGuard - 1] == 'g' && target[kGuard + rows * pitch] == 'g');
}

TEST(helpers_copy_every_byte_once) {
  Copiers copiers(4);
  copiers.leave(1);
  check_copy(copiers, 1, (5 << 20) + 77, 0);   // one run that is no whole number of parts
  check_copy(copiers, 3001, 1000, 0);          // rows that follow each other
  check_copy(copiers, 701, 4099, 13);          // rows apart
  check_copy(copiers, 5, 700'000, 100);        // rows larger than a part
  CHECK_SAME(copiers.started(), 3);
}

TEST(engines_share_their_helpers) {
  Copiers copiers(3);
  copiers.leave(1);
  std::vector<std::thread> engines;
  for (int engine = 0; engine < 3; ++engine)
    engines.emplace_back([&] {
      for (int turn = 0; turn < 10; ++turn) check_copy(copiers, 600, 4096, turn % 2 ? 64 : 0);
    });
  for (auto& engine : engines) engine.join();
  CHECK_SAME(copiers.started(), 2);
}

// The affinity of every helper that this process has.
std::vector<cpu_set_t> where_helpers_run() {
  std::vector<cpu_set_t> found;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(thread.path() / "comm") >> name;
    if (name != "weft-copier") continue;
    found.emplace_back();
    const int id = std::stoi(thread.path().filename());
    CHECK_SAME(sched_getaffinity(id, sizeof(cpu_set_t), &found.back()), 0);
  }
  return found;
}

TEST(helpers_use_all_cores_of_the_process_where_their_engine_is_bound_to_one) {
  cpu_set_t all;
  CHECK_SAME(sched_getaffinity(getpid(), sizeof all, &all), 0);
  Copiers copiers(3);
  copiers.leave(1);
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(size_t(sched_getcpu()), &one);
    sched_setaffinity(0, sizeof one, &one);
    check_copy(copiers, 1, 4 << 20, 0);
  }).join();
  std::vector<cpu_set_t> found;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while ((found = where_helpers_run()).size() < 2 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a helper begins when it has a core
  CHECK_SAME(found.size(), 2u);
  for (const cpu_set_t& cores : found) CHECK(CPU_EQUAL(&cores, &all));
}

TEST(nobody_helps_where_no_core_is_free_or_little_is_copied) {
  Copiers copiers(4);
  check_copy(copiers, 1, 4 << 20, 0);  // nothing was said yet
  copiers.leave(4);
  check_copy(copiers, 1, 4 << 20, 0);
  copiers.leave(9);
  check_copy(copiers, 1, 4 << 20, 0);
  copiers.leave(1);
  check_copy(copiers, 1, (1 << 20) - 1, 0);
  CHECK_SAME(copiers.started(), 0);
}

// The number of helpers that is chosen in the end, if copies take so long with 0, 1, 2 and 3 of them.
int settled(HelperCount& counts, uint64_t bytes, int most, std::array<int64_t, 4> nanoseconds) {
  std::array<int, 4> chosen{};
  for (int copy = 0; copy < 1000; ++copy) {
    const int helpers = counts.choose(bytes, most);
    CHECK(helpers >= 0 && helpers <= most);
    counts.took(bytes, helpers, nanoseconds[size_t(helpers)] * (copy % 50 == 7 ? 20 : 1));
    if (copy >= 500) ++chosen[size_t(helpers)];
  }
  const auto often = std::max_element(chosen.begin(), chosen.end());
  CHECK(*often > 450);  // others are tried again, but seldom
  return int(often - chosen.begin());
}

TEST(as_many_help_as_copied_fastest) {
  HelperCount counts;
  const uint64_t bytes = 8 << 20;
  CHECK_SAME(settled(counts, bytes, 3, {800, 410, 280, 210}), 3);
  CHECK_SAME(settled(counts, bytes, 3, {800, 410, 405, 400}), 1);  // it follows what copies take
  CHECK_SAME(settled(counts, bytes, 3, {400, 410, 420, 500}), 0);
  CHECK_SAME(settled(counts, bytes, 1, {800, 410, 280, 210}), 1);
  CHECK_SAME(settled(counts, bytes * 8, 3, {800, 500, 300, 310}), 2);  // each size by itself
  CHECK_SAME(settled(counts, bytes, 3, {800, 410, 280, 210}), 3);
}

}  // namespace
