// Links: what a transfer reserves on each topology, and that no reservation is lost between threads.
#include "links.h"

#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr double kRate = 1e9;  // a byte per nanosecond
constexpr Topology kAll[] = {Topology::mesh, Topology::ring, Topology::switched};

TEST(links_at_memory_speed_reserve_nothing) {
  Ranks ranks(2);
  Links& links = ranks[0].links();
  CHECK(!links.paced());
  CHECK_SAME(links.reserve(0, 1, 1000, 5), 5);
  CHECK_SAME(links.piece_bytes(), UINT64_MAX);
  links.set(0, 30, Topology::mesh);
  CHECK(links.paced());
  CHECK_SAME(links.latency(), 30);
}

TEST(links_of_a_mesh_are_each_their_own) {
  Ranks ranks(3);
  Links& links = ranks[0].links();
  links.set(kRate, 0, Topology::mesh);
  CHECK_SAME(links.reserve(0, 1, 1000, 0), 1000);
  CHECK_SAME(links.reserve(0, 1, 500, 0), 1500);   // after the one before
  CHECK_SAME(links.reserve(0, 1, 10, 9000), 9010);  // not before its moment
  CHECK_SAME(links.reserve(0, 2, 1000, 0), 1000);
  CHECK_SAME(links.reserve(1, 0, 1000, 0), 1000);
  CHECK_SAME(links.reserve(1, 1, 1000, 7), 7);  // to itself
}

TEST(a_switch_has_one_port_out_and_one_in_per_rank) {
  Ranks ranks(4);
  Links& links = ranks[0].links();
  links.set(kRate, 0, Topology::switched);
  CHECK_SAME(links.reserve(0, 1, 1000, 0), 1000);
  CHECK_SAME(links.reserve(0, 2, 1000, 0), 2000);  // the same port out
  CHECK_SAME(links.reserve(3, 2, 1000, 0), 2000);  // the same port in
  CHECK_SAME(links.reserve(1, 0, 1000, 0), 1000);
}

TEST(a_ring_goes_the_shorter_way_over_all_links_between) {
  Ranks ranks(5);
  Links& links = ranks[0].links();
  links.set(kRate, 0, Topology::ring);
  CHECK_SAME(links.reserve(0, 2, 1000, 0), 1000);  // over 0-1 and 1-2
  CHECK_SAME(links.reserve(1, 2, 1000, 0), 2000);
  CHECK_SAME(links.reserve(0, 4, 1000, 0), 1000);  // the other way round
  CHECK_SAME(links.reserve(4, 0, 1000, 0), 1000);
  CHECK_SAME(links.reserve(1, 4, 1000, 0), 2000);  // by 1-0 and 0-4
}

TEST(a_transfer_without_end_ends_with_time) {
  Ranks ranks(2);
  Links& links = ranks[0].links();
  links.set(1e-300, 0, Topology::mesh);
  CHECK(links.reserve(0, 1, UINT64_MAX, 0) > (int64_t(1) << 61));
  CHECK_SAME(links.reserve(0, 1, UINT64_MAX, INT64_MAX - 5), INT64_MAX);
  links.set(1e300, 0, Topology::mesh);
  CHECK(links.piece_bytes() >= uint64_t(16 << 10));
}

TEST(no_reservation_is_lost_between_threads) {
  for (const Topology topology : kAll) {
    Ranks ranks(2);
    constexpr int kTransfers = 2000;
    ranks.each([&](int, Fabric& fabric) {
      fabric.links().set(kRate, 0, topology);
      for (int i = 0; i < kTransfers; ++i) fabric.links().reserve(0, 1, 10, 0);
    });
    CHECK_SAME(ranks[0].links().reserve(0, 1, 0, 0), 2 * kTransfers * 10);
  }
}

TEST(a_link_may_be_set_while_engines_use_it) {
  Ranks ranks(2);
  Links& links = ranks[0].links();
  std::atomic<bool> stop{false};
  std::thread engine([&] {
    while (!stop.load()) links.reserve(0, 1, links.paced() ? 10 : 20, 0);
  });
  for (int i = 0; i < 500; ++i) links.set(i % 2 ? kRate : 0, i % 3, kAll[i % 3]);
  stop.store(true);
  engine.join();
}

}  // namespace
