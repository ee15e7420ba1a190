// Engines: strided copies between ranks, waits and counters, failures, and calls one after the other.
#include "engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

std::shared_ptr<Call> call_of(std::shared_ptr<Program> program, uint64_t number, char* target,
                              int world) {
  auto call = std::make_shared<Call>();
  call->program = std::move(program);
  call->number = number;
  call->deadline = now_ns() + 20 * kSecond;
  call->pointers = {target};
  call->signatures.assign(size_t(world), 1);
  return call;
}

Outcome finish(Fabric& fabric, Call& call) {
  for (;;) {
    const Outcome outcome = fabric.finish(call);
    if (outcome.code != Code::again) return outcome;
  }
}

Outcome released(Fabric& fabric, uint64_t call) {
  for (;;) {
    const Outcome outcome = fabric.wait_released(call, now_ns() + 20 * kSecond);
    if (outcome.code != Code::again) return outcome;
  }
}

Command pull(int source, int rank, uint64_t rows, uint64_t row_bytes, int counter = -1) {
  return {0, false, {source, 0, 0, row_bytes}, {rank, 0, 0, row_bytes}, rows, row_bytes,
          {}, counter, {}};
}

TEST(copies_take_rectangles_and_touch_nothing_beside_them) {
  for (const bool paced : {false, true}) {
    Ranks ranks(2);
    ranks.each([&](int rank, Fabric& fabric) {
      const int peer = 1 - rank;
      if (paced) fabric.links().set(1e9, 1000, Topology::mesh);
      const uint64_t at = fabric.heap().allocate(20 * 30);
      char* source = fabric.heap().base(rank) + at;
      for (int i = 0; i < 600; ++i) source[i] = char(i % 100 + 100 * rank);
      std::vector<char> target(25 * 40, -1);
      auto program = std::make_shared<Program>();
      program->lanes[peer].push_back({3, false, {peer, 0, 3 * 30 + 5, 30},
                                      {rank, 0, 2 * 40 + 3, 40}, 7, 11, {}, 0, {rank}});
      auto call = call_of(program, 1, target.data(), 2);
      call->record = true;
      fabric.enter(1, 1, {at}, "");
      fabric.launch(call);
      CHECK(finish(fabric, *call).code == Code::ok);
      CHECK_SAME(fabric.heap().control(rank).counters[0].get(), 1u);
      CHECK_SAME(call->spans.size(), 1u);
      CHECK_SAME(call->spans[0].task, 3);
      CHECK(fabric.done(1).code == Code::ok);
      CHECK(released(fabric, 1).code == Code::ok);
      for (int row = 0; row < 25; ++row)
        for (int column = 0; column < 40; ++column) {
          const bool inside = row >= 2 && row < 9 && column >= 3 && column < 14;
          const int from = (row - 2 + 3) * 30 + column - 3 + 5;
          CHECK_SAME(target[size_t(row * 40 + column)],
                     inside ? char(from % 100 + 100 * peer) : char(-1));
        }
    });
  }
}

TEST(an_empty_copy_only_sets_its_counter) {
  for (const bool paced : {false, true}) {
    Ranks ranks(2);
    ranks.each([&](int rank, Fabric& fabric) {
      if (paced) fabric.links().set(1e9, 0, Topology::mesh);
      auto program = std::make_shared<Program>();
      program->lanes[1 - rank] = {pull(1 - rank, rank, 0, 10, 0), pull(1 - rank, rank, 10, 0, 1)};
      auto call = call_of(program, 1, nullptr, 2);
      fabric.enter(1, 1, {0}, "");
      fabric.launch(call);
      CHECK(finish(fabric, *call).code == Code::ok);
      CHECK_SAME(fabric.heap().control(rank).counters[1].get(), 1u);
    });
  }
}

TEST(a_header_that_places_a_buffer_outside_its_memory_ends_the_call) {
  constexpr uint64_t kSpan = 1 << 20;
  for (const uint64_t offset : {kSpan - 99, kSpan + 4096, UINT64_MAX - 50}) {
    Ranks ranks(2, kSpan);
    std::vector<char> target(100);
    ranks[1].enter(1, 1, {offset}, "");
    auto program = std::make_shared<Program>();
    program->lanes[1].push_back(pull(1, 0, 10, 10));
    auto call = call_of(program, 1, target.data(), 2);
    ranks[0].enter(1, 1, {0}, "");
    ranks[0].launch(call);
    const Outcome outcome = finish(ranks[0], *call);
    CHECK(outcome.code == Code::corrupt);
    CHECK_SAME(outcome.rank, 1);
  }
}

TEST(ranks_that_mean_another_call_move_nothing) {
  Ranks ranks(2);
  ranks[1].enter(1, 2, {0}, "");
  std::vector<char> target(100, 7);
  auto program = std::make_shared<Program>();
  program->lanes[1].push_back(pull(1, 0, 10, 10));
  auto call = call_of(program, 1, target.data(), 2);
  ranks[0].enter(1, 1, {0}, "");
  ranks[0].launch(call);
  CHECK(finish(ranks[0], *call).code == Code::disagree);
  CHECK_SAME(std::count(target.begin(), target.end(), 7), 100);
}

TEST(a_call_that_is_cancelled_ends_though_nobody_came) {
  Ranks ranks(2);
  std::vector<char> target(100);
  auto program = std::make_shared<Program>();
  program->lanes[1].push_back(pull(1, 0, 10, 10));
  auto call = call_of(program, 1, target.data(), 2);
  ranks[0].enter(1, 1, {0}, "");
  ranks[0].launch(call);
  call->cancel.store(true);
  CHECK(finish(ranks[0], *call).code == Code::cancelled);
}

TEST(a_fabric_ends_with_calls_under_way) {
  std::shared_ptr<Call> call;
  std::vector<char> target(100);
  {
    Ranks ranks(2);
    auto program = std::make_shared<Program>();
    program->lanes[1].push_back(pull(1, 0, 10, 10));
    call = call_of(program, 1, target.data(), 2);
    ranks[0].enter(1, 1, {0}, "");
    ranks[0].launch(call);
  }
  CHECK(call->outcome.code != Code::ok);
}

// One rank pulls ten rows of ten bytes from a peer; the thread that waits may make the copy itself.
std::shared_ptr<Call> small_pull(Ranks& ranks, std::vector<char>& target, std::vector<Wait> waits) {
  auto program = std::make_shared<Program>();
  Command command = pull(1, 0, 10, 10, 3);
  command.waits = std::move(waits);
  program->lanes[1].push_back(command);
  auto call = call_of(program, 1, target.data(), 2);
  ranks[0].enter(1, 1, {0}, "");
  ranks[0].launch(call, true);
  return call;
}

TEST(a_small_copy_is_made_by_the_thread_that_waits_for_it) {
  Ranks ranks(2, 4 << 20, 20 * kSecond);
  std::vector<char> target(100);
  std::fill_n(ranks[1].heap().base(1), 100, char(5));
  ranks[1].enter(1, 1, {0}, "");
  auto call = small_pull(ranks, target, {});
  CHECK(call->small);
  CHECK_SAME(std::count(target.begin(), target.end(), 5), 0);  // nobody has waited yet
  CHECK(ranks[0].wait(*call, 0, 3, nullptr).code == Code::ok);
  CHECK_SAME(std::count(target.begin(), target.end(), 5), 100);
  CHECK(finish(ranks[0], *call).code == Code::ok);
}

TEST(engines_take_over_a_small_copy_whose_source_is_late) {
  Ranks ranks(2);
  std::vector<char> target(100);
  std::fill_n(ranks[1].heap().base(1), 100, char(5));
  auto call = small_pull(ranks, target, {{1, 100}});
  CHECK(ranks[0].finish(*call).code == Code::again);  // it has spun, and slept for a while
  CHECK(!call->small);
  ranks[1].enter(1, 1, {0}, "");
  CHECK(ranks[0].finish(*call).code == Code::again);
  ranks[1].heap().control(1).counters[100].set(1);
  CHECK(finish(ranks[0], *call).code == Code::ok);
  CHECK_SAME(std::count(target.begin(), target.end(), 5), 100);
  CHECK_SAME(ranks[0].heap().control(0).counters[3].get(), 1u);
}

TEST(a_small_copy_is_not_made_if_ranks_disagree_or_the_call_is_cancelled) {
  for (const bool cancelled : {false, true}) {
    Ranks ranks(2, 4 << 20, 20 * kSecond);
    std::vector<char> target(100, 7);
    ranks[1].enter(1, cancelled ? 1 : 2, {0}, "");
    auto call = small_pull(ranks, target, {});
    if (cancelled) call->cancel.store(true);
    CHECK(ranks[0].wait(*call, 0, 3, nullptr).code == Code::cancelled);
    CHECK(finish(ranks[0], *call).code == (cancelled ? Code::ok : Code::disagree));
    CHECK_SAME(std::count(target.begin(), target.end(), 7), 100);
  }
}

// Every rank gathers from all others, call after call, without a barrier: two stages take turns, and
// each copy waits for a counter that the owner sets once it has written its stage.
TEST(calls_follow_each_other_without_a_barrier) {
  constexpr int kWorld = 3;
  constexpr uint64_t kWords = 700;
  for (const int64_t spin : {int64_t(0), int64_t(50'000)}) {
    const bool small = spin > 0;  // engines take over from time to time
    Ranks ranks(kWorld, 4 << 20, spin);
    ranks.each([&](int rank, Fabric& fabric) {
      Heap& heap = fabric.heap();
      const uint64_t stages[2] = {heap.allocate(kWords * 8), heap.allocate(kWords * 8)};
      std::vector<uint64_t> target(kWords * kWorld);
      auto program = std::make_shared<Program>();
      for (int peer = 0; peer < kWorld; ++peer)
        if (peer != rank)
          for (int half = 0; half < 2; ++half)
            program->lanes[peer].push_back(
                {peer, half == 1, {peer, 0, half * kWords * 4, kWords * 4},
                 {rank, 0, peer * kWords * 8 + half * kWords * 4, kWords * 4}, 1, kWords * 4,
                 {{peer, 100}}, peer * 2 + half, {rank}});
      for (uint64_t number = 1; number <= uint64_t(100 * kRounds); ++number) {
        const uint64_t stage = stages[number % 2];
        auto call = call_of(program, number, reinterpret_cast<char*>(target.data()), kWorld);
        fabric.enter(number, 1, {stage}, "call");
        fabric.launch(call, small);
        auto* mine = reinterpret_cast<uint64_t*>(heap.base(rank) + stage);
        for (uint64_t i = 0; i < kWords; ++i) mine[i] = number * 1000 + uint64_t(rank);
        heap.control(rank).counters[100].set(number);
        for (int peer = 0; peer < kWorld; ++peer) {
          if (peer == rank) continue;
          Outcome outcome;
          do {
            outcome = fabric.wait(*call, rank, peer * 2 + 1, nullptr);
          } while (outcome.code == Code::again);
          CHECK(outcome.code == Code::ok);
          for (uint64_t i = 0; i < kWords; ++i)
            CHECK_SAME(target[uint64_t(peer) * kWords + i], number * 1000 + uint64_t(peer));
        }
        CHECK(finish(fabric, *call).code == Code::ok);
        CHECK(fabric.done(number).code == Code::ok);
      }
    });
  }
}

}  // namespace
