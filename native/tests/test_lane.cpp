// Compute lanes without Python: moves, sums, waits and signals of two ranks, and the policy for loose
// tasks. Products need torch; the tests of the operators run them.
#include "lane.h"

#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr int64_t kRows = 6, kColumns = 10;
enum Buffer { kX, kInbox, kY };
enum Slot { kInboxSlot };

Area area(int rank, int buffer, int64_t row, int64_t rows) {
  return {rank, buffer, row, rows, 0, kColumns, kColumns};
}

float x_of(int rank, int64_t i, uint64_t call) { return float((i * 3 + rank + int64_t(call)) % 17 - 8); }

// Rank r stores its rows into the inbox of its peer, in two halves, and adds what has come to its own:
// y = x of both. Sums are loose where the test asks for it.
std::shared_ptr<Lane> lane_of(int rank, bool loose) {
  const int peer = 1 - rank;
  auto lane = std::make_shared<Lane>();
  for (int half = 0; half < 2; ++half) {
    const int64_t row = half * kRows / 2, rows = kRows / 2;
    LaneTask store{half, Duty::moves, {area(rank, kX, row, rows)}, {}, {area(peer, kInboxSlot, row, rows)}};
    store.remote = true;
    store.counter = half;
    store.rings = {peer};
    lane->tasks.push_back(store);
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t row = half * kRows / 2, rows = kRows / 2;
    // In the order of ranks, as all sums.
    std::vector<Area> sources{area(rank, kX, row, rows), area(rank, kInbox, row, rows)};
    if (rank == 1) std::swap(sources[0], sources[1]);
    LaneTask sum{2 + half, Duty::sum, sources, {}, {area(rank, kY, row, rows)}};
    sum.waits = {{peer, half}};
    lane->tasks.push_back(sum);
  }
  lane->stretches = {{0, 2, false}, {2, 2, loose}};
  return lane;
}

void run_calls(bool loose, bool paced, bool one_launch) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    if (paced) fabric.links().set(1e9, 2000, Topology::mesh);
    Heap& heap = fabric.heap();
    const uint64_t inbox[2] = {heap.allocate(kRows * kColumns * 4), heap.allocate(kRows * kColumns * 4)};
    auto lane = lane_of(rank, loose);
    lane->one_launch = one_launch;
    LaneCall known(fabric, lane, std::make_shared<Program>(), 1, "words", {1, 1});
    std::vector<float> x(kRows * kColumns), y(x.size());
    for (uint64_t call = 1; call <= uint64_t(40 * kRounds); ++call) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = x_of(rank, int64_t(i), call);
      std::fill(y.begin(), y.end(), 0.0f);
      const uint64_t at = inbox[call % 2];
      const auto matrix = [](void* data) {
        return Matrix{static_cast<char*>(data), kRows, kColumns, kColumns, 1};
      };
      Outcome outcome = known.start(
          call, 20 * kSecond, {matrix(x.data()), matrix(heap.base(rank) + at), matrix(y.data())}, {at});
      while (outcome.code == Code::again) outcome = known.go();
      CHECK_SAME(int(outcome.code), int(Code::ok));
      for (size_t i = 0; i < y.size(); ++i)
        CHECK_SAME(y[i], x_of(0, int64_t(i), call) + x_of(1, int64_t(i), call));
    }
  });
}

LaneTask product(int id, int merge, int64_t row, int64_t rows, int64_t a_row, int buffer = 0) {
  LaneTask task{id, Duty::products, {area(0, buffer, a_row, rows)}, {area(0, 1, 0, 1)}, {area(0, 2, row, rows)}};
  task.merge = merge;
  return task;
}

}  // namespace

TEST(a_lane_stores_and_adds_in_order) { run_calls(false, false, false); }
TEST(loose_sums_run_when_their_sources_have_come) { run_calls(true, false, false); }
TEST(a_lane_is_held_by_a_paced_link) { run_calls(true, true, false); }
TEST(the_stores_of_one_launch_arrive_while_it_computes) { run_calls(false, true, true); }

TEST(adjacent_products_become_one_and_sums_come_first) {
  Lane lane;
  lane.tasks = {product(0, 7, 0, 2, 0), product(1, 7, 2, 2, 2), product(2, 7, 6, 5, 6),
                product(3, 8, 4, 2, 4), product(4, 7, 4, 2, 9, 3)};
  LaneTask sum{5, Duty::sum, {area(0, 0, 0, 1)}, {}, {area(0, 2, 0, 1)}};
  lane.tasks.push_back(sum);
  sum.id = 4;
  lane.tasks.push_back(sum);
  CHECK(lane.next_run({0, 1, 3}) == (std::vector<int>{0, 1}));
  CHECK(lane.next_run({0, 1, 2}) == (std::vector<int>{2}));  // five rows are more than four
  CHECK(lane.next_run({1, 0}) == (std::vector<int>{0, 1}));
  CHECK(lane.next_run({1, 4}) == (std::vector<int>{1}));  // rows of another buffer do not follow
  CHECK(lane.next_run({3, 0}) == (std::vector<int>{0}));  // of equal runs, the one that begins first
  CHECK(lane.next_run({0, 5, 1, 6}) == (std::vector<int>{6}));
  CHECK(lane.next_run({}).empty());
}

TEST(a_rank_with_another_header_is_seen_before_anything_is_stored) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Heap& heap = fabric.heap();
    const uint64_t at = heap.allocate(kRows * kColumns * 4);
    LaneCall known(fabric, lane_of(rank, true), std::make_shared<Program>(), uint64_t(1 + rank), "", {1, 1});
    std::vector<float> x(kRows * kColumns, 1.0f), y(x.size());
    char* inbox = heap.base(rank) + at;
    const auto matrix = [](void* data) {
      return Matrix{static_cast<char*>(data), kRows, kColumns, kColumns, 1};
    };
    Outcome outcome = known.start(1, 20 * kSecond, {matrix(x.data()), matrix(inbox), matrix(y.data())}, {at});
    while (outcome.code == Code::again) outcome = known.go();
    CHECK_SAME(int(outcome.code), int(Code::disagree));
    for (size_t i = 0; i < x.size(); ++i) CHECK_SAME(reinterpret_cast<float*>(inbox)[i], 0.0f);
  });
}
