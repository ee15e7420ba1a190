// The channel: every collective by every way that bytes can take, ranks that disagree or give up, and
// announcements that speak of memory that is not there.
#include "channel.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

std::shared_ptr<Job> job_of(Kind kind, int world, float* in, float* out, uint64_t count) {
  auto job = std::make_shared<Job>();
  job->kind = kind;
  job->dtype = Dtype::f32;
  job->item = 4;
  job->patience = 20 * kSecond;
  const uint64_t bytes = count * 4;
  const bool gathers = kind == Kind::all_gather || kind == Kind::gather;
  const bool scatters = kind == Kind::reduce_scatter || kind == Kind::scatter;
  const bool all = kind == Kind::all_to_all;
  const auto lay = [&](std::vector<Piece>& pieces, float* at, bool many) {
    for (int i = 0; at && i < (many ? world : 1); ++i)
      pieces.push_back({reinterpret_cast<char*>(at + uint64_t(i) * count), bytes});
  };
  job->sizes.assign(gathers || scatters ? size_t(world) : 1, bytes);
  lay(job->in, in, scatters || all);
  lay(job->out, out, gathers || all);
  return job;
}

Outcome finish(Channel& channel, Job& job) {
  for (;;) {
    const Outcome outcome = channel.wait(job, INT64_MAX);
    if (outcome.code != Code::again) return outcome;
  }
}

Outcome run(Channel& channel, const std::shared_ptr<Job>& job, bool background) {
  if (background) {
    channel.submit(job, true);
    return finish(channel, *job);
  }
  const Outcome outcome = channel.at_once(job);
  return outcome.code == Code::again ? finish(channel, *job) : outcome;
}

// A value that says whose it is, and which: exact in sums.
float value(int rank, uint64_t i) { return float(rank * 16 + int(i % 11)); }

// One collective of each kind, with its result compared element by element.
void check_all(Channel& channel, int rank, int world, float* in, float* out, uint64_t n,
               bool background) {
  const auto go = [&](Kind kind, float* from, float* to, uint64_t count, int root = 0) {
    auto job = job_of(kind, world, from, to, count);
    job->root = root;
    CHECK(run(channel, job, background).code == Code::ok);
  };
  const auto fill = [&](uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) in[i] = value(rank, i);
    std::fill(out, out + n * uint64_t(world), -1.0f);
  };
  const auto sum = [&](uint64_t i) {
    float total = 0;
    for (int r = 0; r < world; ++r) total += value(r, i);
    return total;
  };
  const uint64_t w = uint64_t(world), me = uint64_t(rank);
  const int root = world - 1;
  fill(n);
  go(Kind::all_gather, in, out, n);
  for (uint64_t i = 0; i < n * w; ++i) CHECK_SAME(out[i], value(int(i / n), i % n));
  fill(n);
  go(Kind::all_reduce, in, out, n);
  for (uint64_t i = 0; i < n; ++i) CHECK_SAME(out[i], sum(i));
  fill(n * w);
  go(Kind::reduce_scatter, in, out, n);
  for (uint64_t i = 0; i < n; ++i) CHECK_SAME(out[i], sum(me * n + i));
  fill(n * w);
  go(Kind::all_to_all, in, out, n);
  for (uint64_t i = 0; i < n * w; ++i) CHECK_SAME(out[i], value(int(i / n), me * n + i % n));
  fill(n);
  go(Kind::broadcast, in, out, n, root);
  for (uint64_t i = 0; i < n; ++i) CHECK_SAME(out[i], value(root, i));
  fill(n);
  go(Kind::gather, in, rank == root ? out : nullptr, n, root);
  for (uint64_t i = 0; rank == root && i < n * w; ++i) CHECK_SAME(out[i], value(int(i / n), i % n));
  fill(n * w);
  go(Kind::scatter, rank == root ? in : nullptr, out, n, root);
  for (uint64_t i = 0; i < n; ++i) CHECK_SAME(out[i], value(root, me * n + i));
  fill(n);
  go(Kind::reduce, in, rank == root ? out : nullptr, n, root);
  for (uint64_t i = 0; rank == root && i < n; ++i) CHECK_SAME(out[i], sum(i));
}

void check_collectives(int world, uint64_t n, bool symmetric, bool background, double rate = 0,
                       Past past = Past::tried) {
  Ranks ranks(world, 64 << 20);
  ranks.each([&](int rank, Fabric& fabric) {
    if (rate > 0) fabric.links().set(rate, 1000, Topology::mesh);
    Channel channel(fabric, 20'000, true);
    Tuning tuning;
    tuning.past = past;
    channel.tune(tuning);
    const uint64_t size = n * uint64_t(world);
    std::vector<float> own(size), out(size);
    float* in = own.data();
    if (symmetric)
      in = reinterpret_cast<float*>(fabric.heap().base(rank) + fabric.heap().allocate(size * 4));
    check_all(channel, rank, world, in, out.data(), n, background);
    auto barrier = job_of(Kind::barrier, world, nullptr, nullptr, 0);
    CHECK(run(channel, barrier, background).code == Code::ok);
    CHECK_SAME(channel.last().number, 9u);
  });
}

TEST(collectives_of_few_bytes) {
  for (const bool background : {false, true}) {
    check_collectives(1, 5, false, background);
    check_collectives(3, 1, false, background);
    check_collectives(3, 37, true, background);
  }
}

TEST(collectives_through_rings) {
  check_collectives(2, 50'001, false, false);
  check_collectives(3, 150'000, false, false);
  check_collectives(3, 70'001, false, true);
  check_collectives(3, 70'001, false, true, 0, Past::always);
  check_collectives(2, 150'000, false, false, 0, Past::always);
}

// The first messages of a size try both kinds of stores, the faster one is kept, and later both are
// tried again.
TEST(stores_are_tried_in_turns) {
  StoreTrials trials;
  const uint64_t one = StoreTrials::class_of(0, 1 << 20), other = StoreTrials::class_of(0, 1 << 22);
  CHECK(one == StoreTrials::class_of(0, (1 << 20) + 4096));
  CHECK(one != StoreTrials::class_of(1, 1 << 20));
  constexpr int kAll = 2 * StoreTrials::kTries;
  for (int turn = 0; turn < kAll; ++turn) {
    for (const uint64_t each : {one, other}) {
      const bool past = trials.next(each);
      CHECK_SAME(past, turn % 2 == 1);
      const bool slow_moment = turn < 4;  // counts for neither
      trials.took(each, past, slow_moment ? 1000 : past == (each == one) ? 60 : 100);
    }
  }
  trials.took(one, false, 1);  // no try any more
  for (int turn = kAll; turn < StoreTrials::kAgain; ++turn) {
    CHECK(trials.next(one));
    CHECK(!trials.next(other));
  }
  CHECK(!trials.next(one));
  CHECK(trials.next(one));
}

TEST(collectives_try_both_kinds_of_stores) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Channel channel(fabric, 20'000, true);
    std::vector<float> in(60'000), out(60'000);
    for (int turn = 0; turn < 2 * StoreTrials::kTries + 2; ++turn)
      check_all(channel, rank, 2, in.data(), out.data(), 30'000, turn % 2);
  });
}

TEST(collectives_from_memory_in_place) {
  check_collectives(2, 50'001, true, false);
  check_collectives(3, 70'000, true, true);
}

TEST(collectives_over_paced_links) {
  check_collectives(2, 100, false, false, 1e9);
  check_collectives(2, 30'000, false, true, 1e9);
  check_collectives(2, 30'000, true, false, 1e9);
}

// Sizes that only the two ends know, small and large at once.
TEST(uneven_splits) {
  constexpr int kWorld = 3;
  for (const uint64_t unit : {uint64_t(3), uint64_t(20'000)}) {
    for (const bool symmetric : {false, true}) {
      Ranks ranks(kWorld, 16 << 20);
      ranks.each([&](int rank, Fabric& fabric) {
        Channel channel(fabric, 20'000, true);
        // Rank 0 sends little in any case: its data travels with its announcement.
        const auto count = [&](int s, int t) { return s == 0 ? uint64_t(t) : uint64_t(s + t) * unit; };
        std::vector<float> memory(kWorld * 4 * unit), out(kWorld * 4 * unit);
        float* in = memory.data();
        if (symmetric)
          in = reinterpret_cast<float*>(fabric.heap().base(rank) +
                                        fabric.heap().allocate(memory.size() * 4));
        auto job = job_of(Kind::all_to_all, kWorld, nullptr, nullptr, 0);
        job->uneven = true;
        job->sizes.clear();
        float *from = in, *to = out.data();
        for (int t = 0; t < kWorld; ++t) {
          const uint64_t n = count(rank, t);
          for (uint64_t i = 0; i < n; ++i) from[i] = value(rank, i) + float(t);
          job->in.push_back({reinterpret_cast<char*>(from), n * 4});
          from += n;
          job->out.push_back({reinterpret_cast<char*>(to), count(t, rank) * 4});
          to += count(t, rank);
        }
        CHECK(run(channel, job, false).code == Code::ok);
        to = out.data();
        for (int s = 0; s < kWorld; ++s)
          for (uint64_t i = 0; i < count(s, rank); ++i)
            CHECK_SAME(*to++, value(s, i) + float(rank));
      });
    }
  }
}

TEST(ranks_that_disagree_say_so_and_go_on) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Channel channel(fabric, 20'000, true);
    std::vector<float> in(100), out(200);
    auto wrong = job_of(rank ? Kind::all_gather : Kind::all_reduce, 2, in.data(), out.data(), 100);
    CHECK(run(channel, wrong, false).code == Code::disagree);
    CHECK(contains(wrong->words, "rank 0 calls all_reduce (sum of 100 float32)"));
    CHECK(contains(wrong->words, "rank 1 calls all_gather (100 float32)"));
    auto refused = job_of(Kind::all_reduce, 2, in.data(), out.data(), 100);
    if (rank == 1) {
      refused->kind = Kind::refused;
      refused->words = "it is sparse";
    }
    CHECK(run(channel, refused, false).code == Code::disagree);
    CHECK(contains(refused->words, "refused by rank 1: it is sparse"));
    check_all(channel, rank, 2, in.data(), out.data(), 50, false);
  });
}

TEST(words_that_a_peer_did_not_end_are_cut_off) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Channel channel(fabric, 0, true);
    auto job = job_of(Kind::refused, 2, nullptr, nullptr, 0);
    job->words = std::string(5000, 'x');
    if (rank == 0) {
      // As if rank 1 had overwritten what ends its words, and what comes after them.
      ChannelArea area{fabric.heap().channels(), 2};
      std::memset(area.head(1).words[1], 'r', kWords);
      area.head(1).announcements[1].stamp.store(uint64_t(1) << 32);
      area.head(1).said.value.store(1);
      CHECK(run(channel, job, false).code == Code::disagree);
      CHECK(job->words.size() < 2 * kWords);
    }
  });
}

TEST(a_collective_that_has_not_begun_can_be_withdrawn) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Channel channel(fabric, 20'000, true);
    std::vector<float> in(100), out(100);
    auto job = job_of(Kind::all_reduce, 2, in.data(), out.data(), 100);
    channel.submit(job, false);
    if (rank == 0) CHECK(channel.withdraw(*job));
    const Outcome outcome = finish(channel, *job);
    CHECK(outcome.code == Code::withdrawn);
    CHECK_SAME(outcome.rank, 0);
    CHECK(!channel.withdraw(*job));
    check_all(channel, rank, 2, in.data(), out.data(), 50, true);
  });
}

TEST(a_rank_that_aborts_ends_its_peers) {
  for (int round = 0; round < 12; ++round) {
    Ranks ranks(2);
    ranks.each([&](int rank, Fabric& fabric) {
      Channel channel(fabric, 20'000, true);
      std::vector<float> in(100), out(100);
      auto job = job_of(Kind::all_reduce, 2, in.data(), out.data(), 100);
      channel.submit(job, true);
      if (rank == 1) {  // before its thread has begun, while it works, or after
        sleep_until(now_ns() + round * 20'000);
        channel.abort();
      }
      const Outcome outcome = finish(channel, *job);
      // Rank 1 may have made its part before it aborted; then both have their result.
      if (outcome.code != Code::ok)
        CHECK(outcome.code == (rank == 1 ? Code::cancelled : Code::peer_failed));
      CHECK(run(channel, job_of(Kind::barrier, 2, nullptr, nullptr, 0), false).code != Code::ok);
    });
  }
}

TEST(a_rank_that_left_because_of_another_is_not_the_cause) {
  Ranks ranks(3);
  ranks[1].heap().fail(1, Why::peer);
  ranks[1].heap().leave();
  ranks[2].heap().leave();
  Channel channel(ranks[0], 20'000, true);
  const Outcome outcome = run(channel, job_of(Kind::barrier, 3, nullptr, nullptr, 0), false);
  CHECK(outcome.code == Code::peer_left);
  CHECK_SAME(outcome.rank, 2);
}

TEST(a_collective_without_its_peer_ends_at_its_deadline) {
  Ranks ranks(2);
  Channel channel(ranks[0], 20'000, true);
  auto job = job_of(Kind::barrier, 2, nullptr, nullptr, 0);
  job->patience = 1'000'000;
  CHECK(run(channel, job, false).code == Code::timeout);
  CHECK(channel.late(*job) == std::vector<int>{1});
}

TEST(a_patience_without_end_is_no_overflow) {
  Ranks ranks(1);
  Channel channel(ranks[0], 0, true);
  auto job = job_of(Kind::barrier, 1, nullptr, nullptr, 0);
  job->patience = INT64_MAX;
  CHECK(run(channel, job, false).code == Code::ok);
  CHECK_SAME(job->deadline, INT64_MAX);
}

// What rank 1 announces is written by hand here, as a rank that has gone wrong might.
TEST(an_announced_place_outside_the_memory_ends_the_collective) {
  constexpr uint64_t kSpan = 4 << 20, kCount = 50'000;
  for (const uint64_t place : {kSpan - kCount * 4 + 64, kSpan * 2, uint64_t(1) << 61}) {
    Ranks ranks(2, kSpan);
    std::vector<float> in(kCount), out(kCount * 2);
    auto job = job_of(Kind::all_gather, 2, in.data(), out.data(), kCount);
    ChannelArea area{ranks[0].heap().channels(), 2};
    Channel channel(ranks[0], 0, true);
    channel.submit(job, true);
    // It means the same as rank 0, which says so first.
    const Announcement& own = area.head(0).announcements[1];
    while (own.stamp.load() >> 32 != 1) std::this_thread::yield();
    Announcement& theirs = area.head(1).announcements[1];
    theirs.place = place * 4 + kInPlace;
    theirs.stamp.store(own.stamp.load());
    const Outcome outcome = finish(channel, *job);
    CHECK(outcome.code == Code::corrupt);
    CHECK_SAME(outcome.rank, 1);
  }
}

TEST(announced_splits_that_cannot_be_end_the_collective) {
  // Rank 1 says that its bytes for rank 0 come after more than its announcement holds.
  for (const uint64_t before : {kSmallBytes + 16, UINT64_MAX - 3}) {
    Ranks ranks(2);
    Channel channel(ranks[1], 0, true);
    float in[2] = {1, 2}, out[2];
    auto job = job_of(Kind::all_to_all, 2, in, out, 1);
    job->uneven = true;
    job->sizes.clear();
    ChannelArea area{ranks[0].heap().channels(), 2};
    channel.submit(job, true);
    const Announcement& own = area.head(1).announcements[1];
    while (own.stamp.load() >> 32 != 1) std::this_thread::yield();
    Announcement& theirs = area.head(0).announcements[1];
    const uint64_t sizes[4] = {before, 4, before, 4};  // to ranks 0 and 1; from ranks 0 and 1
    std::memcpy(theirs.data, sizes, sizeof sizes);
    theirs.place = 0;
    theirs.stamp.store(own.stamp.load());
    const Outcome outcome = finish(channel, *job);
    CHECK(outcome.code == Code::corrupt);
    CHECK_SAME(outcome.rank, 0);
  }
}

// Many collectives of changing kind, size and place, some in the background, some not, none with a
// barrier after it: what one leaves in slots and rings must never be taken for the next one's.
TEST(collectives_follow_each_other_in_any_mixture) {
  constexpr int kWorld = 3;
  Ranks ranks(kWorld, 32 << 20);
  ranks.each([&](int rank, Fabric& fabric) {
    Channel channel(fabric, 5'000, true);
    uint64_t random = 12345;  // the same on all ranks
    const auto next = [&](uint64_t below) {
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      return (random >> 33) % below;
    };
    constexpr uint64_t kMost = 100'000;
    std::vector<float> own(kMost * kWorld), out(kMost * kWorld);
    float* shared = reinterpret_cast<float*>(fabric.heap().base(rank) +
                                             fabric.heap().allocate(kMost * kWorld * 4));
    for (int round = 0; round < 6 * kRounds; ++round) {
      const uint64_t sizes[] = {1, 100, 3000, 9000, kMost};
      const uint64_t n = 1 + next(sizes[next(5)]);
      float* in = next(2) ? shared : own.data();
      check_all(channel, rank, kWorld, in, out.data(), n, next(2) == 0);
    }
  });
}

// Work in the background beside work in the foreground, and threads that only look.
TEST(many_threads_use_one_channel) {
  Ranks ranks(2);
  ranks.each([&](int, Fabric& fabric) {
    Channel channel(fabric, 5'000, true);
    std::atomic<bool> stop{false};
    std::thread looker([&] {
      while (!stop.load()) (void)channel.last();
    });
    for (int round = 0; round < 60 * kRounds; ++round) {
      std::vector<std::vector<float>> in(3, std::vector<float>(64, 1)), out(3, std::vector<float>(64));
      std::vector<std::shared_ptr<Job>> jobs;
      for (size_t i = 0; i < 3; ++i) {
        jobs.push_back(job_of(Kind::all_reduce, 2, in[i].data(), out[i].data(), 64));
        if (i < 2) channel.submit(jobs[i], true);
      }
      (void)channel.late(*jobs[0]);
      CHECK(run(channel, jobs[2], false).code == Code::ok);
      for (const auto& job : jobs) CHECK(finish(channel, *job).code == Code::ok);
      for (const auto& one : out) CHECK_SAME(one[63], 2.0f);
      auto spare = channel.spare();  // used again and again, also after another thread worked at it
      spare->kind = Kind::barrier;
      spare->patience = 20 * kSecond;
      CHECK(run(channel, spare, round % 2 == 0).code == Code::ok);
    }
    stop.store(true);
    looker.join();
  });
}

}  // namespace
