// The heap: who may touch its memory, what happens when it cannot be mapped, blocks, what is said of
// peers, and that nothing a peer writes of sizes and places is used unchecked.
#include "heap.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "check.h"
#include "ranks.h"

extern char** environ;

using namespace weft;
using namespace weft::test;

namespace {

constexpr uint64_t kSpan = 1 << 20, kPage = 4096;

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(nobody_else_may_open_the_memory) {
  const int fd = Heap::create(2, kSpan);
  struct stat status;
  CHECK_SAME(fstat(fd, &status), 0);
  CHECK_SAME(status.st_mode & 0777, 0600u);
  close(fd);
}

TEST(the_size_of_the_memory_is_sealed) {
  const int fd = Heap::create(2, kSpan);
  struct stat before, after;
  fstat(fd, &before);
  for (const off_t size : {off_t(0), before.st_size - 1, before.st_size + 1}) {
    CHECK_SAME(ftruncate(fd, size), -1);
    CHECK_SAME(errno, EPERM);
  }
  CHECK_SAME(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);  // nor can a rank lock others out
  fstat(fd, &after);
  CHECK_SAME(after.st_size, before.st_size);
  close(fd);
}

TEST(a_descriptor_is_closed_when_its_memory_cannot_be_mapped) {
  const uint64_t beyond = uint64_t(1) << 50;  // a file may be so large, an address space not
  const int large = Heap::create(1, beyond);
  CHECK(contains(thrown([&] { Heap(large, 0, 1, beyond); }), "cannot map"));
  CHECK(!is_open(large));
  const int other = Heap::create(2, kSpan);
  CHECK(contains(thrown([&] { Heap(other, 0, 2, 2 * kSpan); }), "bytes, not"));
  CHECK(!is_open(other));
  const int rank = Heap::create(2, kSpan);
  CHECK(contains(thrown([&] { Heap(rank, 2, 2, kSpan); }), "no place"));
  CHECK(!is_open(rank));
  const int world = Heap::create(2, kSpan);
  CHECK(contains(thrown([&] { Heap(world, 0, kMaxWorld + 1, kSpan); }), "1 to 64 ranks"));
  CHECK(!is_open(world));
}

TEST(memory_that_could_be_cut_off_is_not_mapped) {
  const int fd = memfd_create("weft", MFD_CLOEXEC);
  CHECK_SAME(ftruncate(fd, off_t(Heap::control_bytes(1) + kSpan)), 0);
  CHECK(contains(thrown([&] { Heap(fd, 0, 1, kSpan); }), "not sealed"));
  CHECK(!is_open(fd));
}

TEST(sizes_that_no_memory_has_are_refused) {
  for (const uint64_t span : {UINT64_MAX / 4096 * 4096, uint64_t(1) << 62, uint64_t(100)})
    CHECK(contains(thrown([&] { Heap::create(4, span); }), "cannot have"));
  CHECK(contains(thrown([&] { Heap::create(0, kSpan); }), "1 to 64"));
}

TEST(blocks_are_given_out_and_taken_back) {
  Ranks ranks(1, kSpan);
  Heap& heap = ranks[0].heap();
  const uint64_t one = heap.allocate(1), two = heap.allocate(kPage), three = heap.allocate(kPage + 1);
  CHECK_SAME(two, one + kPage);
  CHECK_SAME(three, two + kPage);
  CHECK_SAME(heap.allocated(), 4 * kPage);
  heap.base(0)[two] = 7;
  heap.free(two);
  heap.free(two);  // not held any more: no effect
  CHECK_SAME(heap.allocated(), 3 * kPage);
  CHECK_SAME(heap.allocate(kPage), two);  // the first hole that fits
  CHECK_SAME(heap.base(0)[two], 0);       // its pages went back in between
  heap.free(one);
  heap.free(three);
  heap.free(two);  // joins its neighbours on both sides
  CHECK_SAME(heap.allocate(kSpan), 0u);
  heap.free(0);
  for (const uint64_t size : {kSpan + 1, UINT64_MAX, UINT64_MAX - 100}) {
    bool refused = false;
    try {
      heap.allocate(size);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
  CHECK_SAME(heap.allocated(), 0u);
}

TEST(blocks_of_many_threads_do_not_overlap) {
  Ranks ranks(1, 16 << 20);
  Heap& heap = ranks[0].heap();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int round = 0; round < 200; ++round) {
        const uint64_t size = uint64_t(1 + (round * 7 + t) % 9) * kPage;
        const uint64_t at = heap.allocate(size);
        char* data = heap.base(0) + at;
        for (uint64_t i = 0; i < size; i += kPage) data[i] = char(t + 1);
        for (uint64_t i = 0; i < size; i += kPage) wrong += data[i] != char(t + 1);
        heap.free(at);
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK_SAME(wrong.load(), 0);
  CHECK_SAME(heap.allocated(), 0u);
}

TEST(places_that_a_header_says_are_compared_with_the_memory) {
  Ranks ranks(2, kSpan);
  ranks[1].enter(1, 5, {kSpan - 100, kSpan, kSpan + 1, UINT64_MAX}, "words");
  Heap& heap = ranks[0].heap();
  CHECK(heap.buffer(1, 1, 0, 100) == heap.base(1) + kSpan - 100);
  CHECK(heap.buffer(1, 1, 0, 101) == nullptr);
  CHECK(heap.buffer(1, 1, 0, UINT64_MAX) == nullptr);
  CHECK(heap.buffer(1, 1, 1, 0) == heap.base(1) + kSpan);
  CHECK(heap.buffer(1, 1, 1, 1) == nullptr);
  CHECK(heap.buffer(1, 1, 2, 0) == nullptr);
  CHECK(heap.buffer(1, 1, 3, 1) == nullptr);
  CHECK(heap.words(1, 1) == "words");
  Header& header = heap.control(1).headers[1];
  header.blob_size = kMaxBlob;
  CHECK_SAME(heap.words(1, 1)->size(), size_t(kMaxBlob));
  header.blob_size = kMaxBlob + 1;
  CHECK(!heap.words(1, 1));
}

TEST(a_header_takes_no_more_than_it_can_hold) {
  Ranks ranks(1);
  CHECK(contains(thrown([&] { ranks[0].enter(1, 1, std::vector<uint64_t>(kMaxSlots + 1), ""); }),
                 "too many"));
  CHECK(contains(thrown([&] { ranks[0].enter(1, 1, {}, std::string(kMaxBlob + 1, 'x')); }),
                 "too many"));
}

TEST(what_became_of_peers) {
  Ranks ranks(3, kSpan);
  Heap& heap = ranks[0].heap();
  CHECK(heap.check_peers(1).code == Code::ok);
  RankControl& one = heap.control(1);
  ranks[1].heap().fail(4, Why::deadline);
  CHECK(heap.check_peers(5).code == Code::peer_failed);
  CHECK_SAME(heap.check_peers(5).rank, 1);
  CHECK(heap.check_peers(4).code == Code::peer_failed);  // it has not entered call 4
  one.entered.set(4);
  CHECK(heap.check_peers(4).code == Code::ok);  // this rank's own deadline is about to pass
  CHECK(heap.check_results(4).code == Code::peer_failed);
  CHECK(heap.check_results(3).code == Code::ok);
  one.failed_at.store(now_ns() - 6 * kSecond);
  CHECK(heap.check_peers(4).code == Code::peer_failed);  // unless this rank has a longer one
  one.done.set(4);
  CHECK(heap.check_peers(4).code == Code::peer_failed);
  one.failed.store(0);
  ranks[2].heap().leave();
  CHECK(heap.check_peers(5).code == Code::peer_left);
  CHECK_SAME(heap.check_peers(5).rank, 2);
  heap.control(2).done.set(5);
  CHECK(heap.check_peers(5).code == Code::ok);  // what it owed this call is done
}

TEST(of_several_peers_that_are_gone_the_cause_is_named) {
  Ranks ranks(4, kSpan);
  Heap& heap = ranks[0].heap();
  for (int r = 1; r < 4; ++r) heap.control(r).entered.set(2);
  ranks[1].heap().fail(2, Why::peer);
  CHECK_SAME(heap.check_peers(2).rank, 1);
  ranks[2].heap().leave();
  CHECK(heap.check_peers(2).code == Code::peer_left);
  CHECK_SAME(heap.check_peers(2).rank, 2);
  ranks[3].heap().fail(2, Why::itself);  // interrupted in the call: its peers hear it at once
  CHECK(heap.check_peers(2).code == Code::peer_failed);
  CHECK_SAME(heap.check_peers(2).rank, 3);
  CHECK_SAME(heap.check_peers(3).rank, 3);
  CHECK(heap.check_peers(1).code == Code::peer_left);  // they had done their part of it
}

TEST(whoever_sees_that_a_rank_gave_up_sees_why) {
  for (int round = 0; round < 50 * kRounds; ++round) {
    Ranks ranks(2, kSpan);
    for (int r = 0; r < 2; ++r) ranks[r].heap().control(r).entered.set(1);
    ranks.each([&](int rank, Fabric& fabric) {
      if (rank == 1) return fabric.heap().fail(1, Why::deadline);
      RankControl& peer = fabric.heap().control(1);
      while (peer.failed.load() == 0) spin_pause();
      CHECK(peer.why.load() == Why::deadline);
      CHECK(peer.failed_at.load() > 0);
      CHECK(fabric.heap().check_peers(1).code == Code::ok);  // its own deadline tells more
    });
  }
}

TEST(a_peer_whose_process_has_ended_is_lost) {
  Ranks ranks(2, kSpan);
  pid_t child = 0;
  char program[] = "/bin/true";
  char* arguments[] = {program, nullptr};
  CHECK_SAME(posix_spawn(&child, program, nullptr, nullptr, arguments, environ), 0);
  const int pidfd = int(syscall(SYS_pidfd_open, child, 0));
  CHECK(pidfd >= 0);
  ranks[0].heap().watch(1, pidfd, child);
  const Outcome outcome =
      ranks[0].heap().wait(ranks[0].heap().control(1).entered, 1, 1, now_ns() + 20 * kSecond, 0);
  CHECK(outcome.code == Code::peer_lost);
  CHECK_SAME(outcome.rank, 1);
  waitpid(child, nullptr, 0);
}

TEST(a_wait_ends_at_its_deadline_or_when_it_is_cancelled) {
  Ranks ranks(2, kSpan);
  Heap& heap = ranks[0].heap();
  Signal& signal = heap.control(1).counters[0];
  CHECK(heap.wait(signal, 1, 1, now_ns() + 1000, 0).code == Code::timeout);
  CHECK(heap.wait(signal, 1, 1, now_ns() + kSecond, 0, nullptr, false).code == Code::again);
  std::atomic<bool> cancel{true};
  CHECK(heap.wait(signal, 1, 1, now_ns() + kSecond, 0, &cancel).code == Code::cancelled);
  signal.set(1);
  CHECK(heap.wait(signal, 1, 1, 0, 0).code == Code::ok);
}

}  // namespace
