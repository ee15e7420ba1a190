// loom's runtime by itself, as a stress test for the thread sanitizer: streams, events, words, copy
// engines, the allocator, graphs and the log, used by several threads of one process at once.
//
// What makes a race visible is plain memory: kernels write and read it, and only what loom promises
// (events, words, stream order) stands between them. Ranks are processes, between which a sanitizer
// sees nothing; so the "peer" here is a child that only lends the number of its process, and its heap
// is this process's own, mapped again.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "log.h"
#include "queue.h"

extern "C" {
int loom_configure(int rank, int world, int devices, int mode, uint64_t seed, int queues, int units,
                   double pace, double deadline, int check, uint64_t heap_bytes,
                   const char* session);
void loom_pace(double bytes_per_second);
void loom_deadline(double seconds);
void loom_mode(int mode, uint64_t seed);
}

using namespace weft::test;

namespace {

constexpr size_t kHeap = 32 << 20;
constexpr int kModes = 3;  // eager, late, random
constexpr int kTurns = 60 * kRounds;

// The device of this process, and the child that stands for rank 1.
const loom::Region& peer() {
  static const loom::Region& region = []() -> const loom::Region& {
    if (loom_configure(0, 2, 1, 0, 7, 0, 2, 0, 20, 1, kHeap, nullptr)) fail("loom", 0, "no device");
    const int parent = getpid();
    const int child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(0);
      for (;;) pause();
    }
    return loom::map_peer(1, child, loom::heap_file(), kHeap);
  }();
  return region;
}

loom::Stream* stream(int priority = 0) {
  peer();
  return loom::new_stream(0, priority);
}

void kernel(loom::Stream* on, std::function<void()> run) {
  loom::Op op;
  op.name = "kernel";
  op.run = std::move(run);
  loom::issue(on, std::move(op));
}

// Memory of the device that a kernel of `on` has written zeros to.
char* zeros(loom::Stream* on, size_t bytes) {
  auto* memory = static_cast<char*>(loom::allocate(bytes, 0, on));
  loom::fill(on, memory, 0, 1, bytes, "zero");
  loom::synchronize(on);
  return memory;
}

// Two sides that add one in turn to a plain number: each must see what the other has written.
struct Turns {
  uint64_t value = 0;
  std::atomic<int> wrong{0};

  std::function<void()> step(uint64_t expected) {
    return [this, expected] {
      wrong += value != expected;
      value = expected + 1;
    };
  }

  void check(uint64_t count) {
    CHECK_SAME(wrong.load(), 0);
    CHECK_SAME(value, count);
  }
};

TEST(events_order_streams) {
  for (int mode = 0; mode < kModes; ++mode) {
    loom::Stream *one = stream(), *two = stream(mode);
    loom_mode(mode, 3);
    Turns turns;
    loom::MarkPtr back;
    for (uint64_t turn = 0; turn < kTurns; ++turn) {
      loom::wait(one, back);
      kernel(one, turns.step(2 * turn));
      loom::wait(two, loom::record(one));
      kernel(two, turns.step(2 * turn + 1));
      back = loom::record(two);
    }
    loom::synchronize(back);
    turns.check(2 * kTurns);
  }
  loom_mode(0, 0);
}

// `post` releases and `hold` acquires; both also through the copy of a word.
TEST(words_order_streams) {
  for (const int bytes : {4, 8}) {
    loom::Stream *one = stream(), *two = stream();
    char* there = zeros(one, 64);
    char* back = zeros(one, 64);
    Turns turns;
    for (uint64_t turn = 0; turn < kTurns; ++turn) {
      loom::hold(one, back, turn, bytes, loom::Compare::at_least, "hold");
      kernel(one, turns.step(2 * turn));
      loom::post(one, there, turn + 1, bytes, "post");
      loom::hold(two, there, turn + 1, bytes, loom::Compare::equal, "hold");
      kernel(two, turns.step(2 * turn + 1));
      loom::post(two, back, turn + 1, bytes, "post");
    }
    loom::synchronize(one);
    loom::synchronize(two);
    turns.check(2 * kTurns);
    loom::release(there);
    loom::release(back);
  }
}

TEST(signals_order_streams) {
  loom::Stream *one = stream(), *two = stream();
  char* there = zeros(one, 64);
  char* back = zeros(one, 64);
  Turns turns;
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    kernel(one, turns.step(2 * turn));
    loom::put_signal(one, there, "put");
    loom::take_signal(one, back, "take");
    loom::take_signal(two, there, "take");
    kernel(two, turns.step(2 * turn + 1));
    loom::put_signal(two, back, "put");
  }
  loom::synchronize_device();
  turns.check(2 * kTurns);
  loom::release(there);
  loom::release(back);
}

// Copies run on the engine of a peer, while the pace of links, the mode and the deadline are set.
TEST(engines_copy_while_settings_change) {
  constexpr size_t kBytes = 4096;
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  peer();
  for (int thread = 0; thread < 2; ++thread)
    threads.emplace_back([&, thread] {
      loom::Stream* on = stream();
      char* source = zeros(on, kBytes);
      char* target = zeros(on, kBytes);
      const char* theirs = peer().device + (source - loom::own_heap().device);
      for (int turn = 0; turn < kTurns / 2; ++turn) {
        const char value = char(turn + thread);
        loom::fill(on, source, uint8_t(value), 1, kBytes, "fill");
        loom::copy(on, target, kBytes / 4, theirs, kBytes / 4, kBytes / 4, 4, "copy");
        kernel(on, [=, &wrong, at = loom::readable(target)] {
          for (size_t i = 0; i < kBytes; ++i) wrong += at[i] != value;
        });
      }
      loom::synchronize(on);
      loom::release(source);
      loom::release(target);
    });
  std::thread setter([&] {
    for (int i = 0; !stop.load(); ++i) {
      loom_pace(i % 2 ? 1e9 : 0);
      loom_mode(i % kModes, uint64_t(i));
      loom_deadline(20 + i % 3);
      usleep(500);
    }
  });
  for (auto& thread : threads) thread.join();
  stop.store(true);
  setter.join();
  loom_pace(0);
  loom_mode(0, 0);
  loom_deadline(20);
  CHECK_SAME(wrong.load(), 0);
}

// A block comes back only when all its uses are over: a reader on another stream never sees what the
// next owner, or the poison, writes.
TEST(blocks_are_used_by_many_threads) {
  constexpr size_t kItems = 256;
  peer();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      loom::Stream *own = stream(), *other = stream();
      for (int turn = 0; turn < kTurns / 2; ++turn) {
        void* memory = loom::allocate(kItems * 4, 0, own);
        auto* items = reinterpret_cast<uint32_t*>(loom::readable(memory));
        const uint32_t value = uint32_t(thread * 1000 + turn);
        kernel(own, [=] { std::fill(items, items + kItems, value); });
        loom::wait(other, loom::record(own));
        kernel(other, [=, &wrong] {
          for (size_t i = 0; i < kItems; ++i) wrong += items[i] != value;
        });
        loom::record_use(memory, other);
        loom::release(memory);
        if (turn % 16 == 7) loom::empty_cache();
        (void)loom::memory_stats();
      }
      loom::synchronize(own);
      loom::synchronize(other);
    });
  for (auto& thread : threads) thread.join();
  CHECK_SAME(wrong.load(), 0);
}

// Host threads that ask, while others issue.
TEST(hosts_ask_while_streams_work) {
  peer();
  std::atomic<bool> stop{false};
  std::atomic<int> ran{0};
  loom::Stream* shared = stream();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread)
    threads.emplace_back([&] {
      for (int turn = 0; turn < kTurns; ++turn) {
        kernel(shared, [&] { ++ran; });
        const auto mark = loom::record(shared);
        (void)loom::finished(mark);
        if (turn % 8 == 0) loom::synchronize(mark);
      }
    });
  std::thread looker([&] {
    while (!stop.load()) {
      (void)loom::stream_idle(shared);
      (void)loom::pending();
      loom::synchronize_device();
    }
  });
  for (auto& thread : threads) thread.join();
  stop.store(true);
  looker.join();
  loom::synchronize(shared);
  CHECK_SAME(ran.load(), 2 * kTurns);
}

TEST(units_are_given_by_priority) {
  peer();
  std::atomic<int> running{0}, most{0}, ran{0};
  std::vector<loom::Stream*> streams;
  for (int i = 0; i < 5; ++i) streams.push_back(stream(i % 2 ? -1 : 0));
  for (int turn = 0; turn < kTurns / 4; ++turn)
    for (auto* on : streams)
      kernel(on, [&] {
        const int now = ++running;
        for (int seen = most.load(); seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        ++ran;
        --running;
      });
  loom::synchronize_device();
  CHECK_SAME(ran.load(), kTurns / 4 * 5);
  CHECK(most.load() <= 2);
}

TEST(graphs_replay_what_was_captured) {
  loom::Stream *one = stream(), *two = stream();
  Turns turns;
  uint64_t at = 0;  // of the kernels alone
  loom::Graph* graph = loom::new_graph();
  loom::capture_begin(graph, one);
  kernel(one, [&] { turns.wrong += turns.value != at, ++turns.value; });
  loom::wait(two, loom::record(one));
  kernel(two, [&] { turns.wrong += turns.value != at + 1, ++turns.value; });
  loom::wait(one, loom::record(two));
  kernel(one, [&] { at = turns.value; });
  loom::capture_end(graph);
  for (int turn = 0; turn < kTurns; ++turn) loom::replay(graph, one);
  loom::synchronize(one);
  turns.check(2 * kTurns);
  loom::delete_graph(graph);
}

// The log has one place that says how far it is (`log_used`): what is below that is whole, for a reader
// that takes no lock, as the readers of other processes do. The words that an operation leaves are
// logged while another stream writes one of them.
TEST(a_log_is_read_while_it_is_written) {
  loom::Stream* on = stream();
  char* words = zeros(on, 64);
  std::vector<loom::Stream*> streams = {stream(), stream(), stream()};
  for (int turn = 0; turn < kTurns; ++turn)
    for (size_t i = 0; i < streams.size(); ++i) {
      loom::post(streams[i], words + 4 * i, uint64_t(turn), 4, "post");
      loom::fill(streams[i], words + 16, uint32_t(turn), 4, 8, "fill");
    }
  const char* text = loom::log().text;
  std::atomic<bool> stop{false};
  std::string found;
  std::thread reader([&] {
    while (!stop.load()) {
      const uint64_t used = loom::status(0).log_used.load(std::memory_order_acquire);
      if (used > 0 && text[used - 1] != '\n') found = "a line that is not whole";
      if (used > 0 && text[used - 2] != ']') found = std::string(text + used - 20, 20);
    }
  });
  loom::synchronize_device();
  stop.store(true);
  reader.join();
  CHECK(found.empty());
  const std::string all = loom::own_log();
  uint64_t lines = 0;
  for (size_t at = 0; at < all.size(); at = all.find('\n', at) + 1, ++lines) CHECK(all[at] == '[');
  CHECK(lines > uint64_t(6 * kTurns));
  loom::release(words);
}

TEST(a_failed_device_ends_every_wait_and_can_be_cleared) {
  for (int turn = 0; turn < 4; ++turn) {
    loom::Stream *one = stream(), *two = stream();
    char* word = zeros(one, 64);
    loom::hold(one, word, 1, 4, loom::Compare::equal, "hold");  // which nobody posts
    std::thread host([&] { CHECK(contains(thrown([&] { loom::synchronize(one); }), "injected")); });
    loom::inject_failure("injected");
    kernel(two, [] {});
    CHECK(contains(thrown([&] { loom::synchronize(two); }), "injected"));
    host.join();
    loom::clear_failure();
    int ran = 0;
    kernel(two, [&] { ++ran; });
    loom::synchronize(two);
    CHECK_SAME(ran, 1);
  }
}

TEST(a_word_that_does_not_come_ends_at_the_deadline) {
  loom::Stream* on = stream();
  char* word = zeros(on, 64);
  loom_deadline(0.05);
  loom::hold(on, word, 1, 4, loom::Compare::equal, "hold");
  CHECK(contains(thrown([&] { loom::synchronize(on); }), "the deadline passed"));
  loom_deadline(20);
  loom::clear_failure();
  loom::shut_down();  // the last test: its threads end
}

}  // namespace
