// Messages: order, tags, what comes unasked, sizes that differ, and envelopes that cannot be.
#include "messages.h"

#include <cstring>
#include <numeric>

#include "check.h"
#include "ranks.h"

using namespace weft;
using namespace weft::test;

namespace {

std::shared_ptr<Message> message_of(int peer, uint64_t tag, std::vector<char>& data) {
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->data = data.data();
  message->bytes = data.size();
  message->deadline = now_ns() + 20 * kSecond;
  return message;
}

Outcome finish(Messages& messages, Message& message) {
  for (;;) {
    const Outcome outcome = messages.wait(message, INT64_MAX);
    if (outcome.code != Code::again) return outcome;
  }
}

std::vector<char> pattern(uint64_t size, int seed) {
  std::vector<char> data(size);
  for (uint64_t i = 0; i < size; ++i) data[i] = char(i * 7 + uint64_t(seed));
  return data;
}

TEST(messages_of_every_size) {
  for (const bool background : {false, true}) {
    Ranks ranks(2);
    ranks.each([&](int rank, Fabric& fabric) {
      Messages messages(fabric, 20'000, true);
      int seed = 0;
      for (const uint64_t size : {uint64_t(0), uint64_t(1), uint64_t(1000), kChunkBytes - 64,
                                  kChunkBytes - 63, 3 * kChunkBytes + 5}) {
        ++seed;
        auto data = rank == 0 ? pattern(size, seed) : std::vector<char>(size);
        auto message = message_of(1 - rank, 5, data);
        if (rank == 0) {
          messages.send(message, background);
        } else {
          messages.receive(message, background);
        }
        CHECK(finish(messages, *message).code == Code::ok);
        CHECK(data == pattern(size, seed));
        if (rank == 1) CHECK_SAME(message->source, 0);
      }
    });
  }
}

TEST(messages_of_a_tag_keep_their_order_and_pass_others) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Messages messages(fabric, 20'000, true);
    constexpr uint64_t kSize = kChunkBytes + 100;
    if (rank == 0) {
      for (int i = 0; i < 3; ++i) {
        auto data = pattern(kSize, i);
        auto message = message_of(1, i == 2 ? 9 : 1, data);
        messages.send(message, false);
        CHECK(finish(messages, *message).code == Code::ok);
      }
    } else {
      for (const int i : {2, 0, 1}) {  // the one with the other tag first: it comes last
        std::vector<char> data(kSize);
        auto message = message_of(i == 0 ? -1 : 0, i == 2 ? 9 : 1, data);
        messages.receive(message, false);
        CHECK(finish(messages, *message).code == Code::ok);
        CHECK(data == pattern(kSize, i));
      }
    }
  });
}

TEST(a_message_of_another_size_is_said_and_the_next_one_comes) {
  Ranks ranks(2);
  ranks.each([&](int rank, Fabric& fabric) {
    Messages messages(fabric, 20'000, true);
    for (const uint64_t size : {uint64_t(10), uint64_t(700'000)}) {
      auto data = rank == 0 ? pattern(size, 1) : std::vector<char>(size + 1);
      auto message = message_of(1 - rank, 1, data);
      rank == 0 ? messages.send(message, false) : messages.receive(message, false);
      const Outcome outcome = finish(messages, *message);
      CHECK(outcome.code == (rank == 0 ? Code::ok : Code::disagree));
      if (rank == 1) CHECK_SAME(message->total, size);
      auto again = rank == 0 ? pattern(size, 2) : std::vector<char>(size);
      message = message_of(1 - rank, 1, again);
      rank == 0 ? messages.send(message, false) : messages.receive(message, false);
      CHECK(finish(messages, *message).code == Code::ok);
      CHECK(again == pattern(size, 2));
    }
  });
}

TEST(a_message_to_oneself) {
  Ranks ranks(1);
  Messages messages(ranks[0], 0, true);
  auto sent = pattern(600'000, 3);
  std::vector<char> got(600'000);
  auto sending = message_of(0, 1, sent), receiving = message_of(0, 1, got);
  messages.send(sending, false);
  messages.receive(receiving, false);
  CHECK(finish(messages, *sending).code == Code::ok);
  CHECK(finish(messages, *receiving).code == Code::ok);
  CHECK(got == sent);
}

TEST(aborting_ends_messages_that_wait) {
  Ranks ranks(2);
  Messages messages(ranks[0], 0, true);
  std::vector<char> data(10);
  auto message = message_of(1, 1, data);
  messages.receive(message, true);
  messages.abort();
  CHECK(finish(messages, *message).code == Code::cancelled);
}

// A chunk as a rank that has gone wrong might write it.
void write_chunk(Fabric& fabric, int source, int target, uint64_t number, uint64_t tag,
                 uint64_t total) {
  ChannelArea area{fabric.heap().channels(), fabric.heap().world()};
  Ring& ring = area.messages(source, target);
  const uint64_t words[2] = {tag, total};
  std::memcpy(ring.bytes + number % kRingChunks * kChunkBytes, words, sizeof words);
  ring.posted.value.store(number + 1, std::memory_order_release);
  area.head(target).bell.ring();
}

TEST(memory_is_taken_for_what_came_and_not_for_what_is_said_to_come) {
  Ranks ranks(2);
  Messages messages(ranks[0], 0, true);
  std::vector<char> data(10);
  auto message = message_of(1, 1, data);
  message->deadline = now_ns() + 200'000'000;
  messages.receive(message, false);
  write_chunk(ranks[1], 1, 0, 0, 2, uint64_t(1) << 60);  // nobody asked for it, and it is in the way
  CHECK(finish(messages, *message).code == Code::timeout);
}

TEST(chunks_that_contradict_each_other_end_what_waits_for_them) {
  for (const auto& [tag, total] : {std::pair<uint64_t, uint64_t>{1, 5}, {2, 500'000}}) {
    Ranks ranks(2);
    Messages messages(ranks[0], 0, true);
    std::vector<char> data(500'000);
    auto message = message_of(1, 1, data);
    messages.receive(message, false);
    write_chunk(ranks[1], 1, 0, 0, 1, data.size());
    write_chunk(ranks[1], 1, 0, 1, tag, total);
    Outcome outcome = finish(messages, *message);
    CHECK(outcome.code == Code::corrupt);
    CHECK_SAME(outcome.rank, 1);
    message = message_of(1, 3, data);
    messages.receive(message, false);
    CHECK(finish(messages, *message).code == Code::corrupt);
  }
}

// All ranks send to all at once, from threads of their own and in the background.
TEST(messages_between_all_ranks_at_once) {
  constexpr int kWorld = 3;
  Ranks ranks(kWorld);
  ranks.each([&](int rank, Fabric& fabric) {
    Messages messages(fabric, 5'000, true);
    for (int round = 0; round < 20 * kRounds; ++round) {
      const uint64_t size = uint64_t(1 + round * 7919 % 300'000);
      std::vector<std::vector<char>> out, in(kWorld, std::vector<char>(size));
      std::vector<std::shared_ptr<Message>> all;
      for (int peer = 0; peer < kWorld; ++peer) out.push_back(pattern(size, rank * 5 + peer + round));
      for (int peer = 0; peer < kWorld; ++peer) {
        all.push_back(message_of(peer, uint64_t(rank), out[size_t(peer)]));
        messages.send(all.back(), true);
        all.push_back(message_of(round % 2 ? peer : -1, uint64_t(peer), in[size_t(peer)]));
        messages.receive(all.back(), peer == 0);
      }
      for (const auto& message : all) CHECK(finish(messages, *message).code == Code::ok);
      for (int peer = 0; peer < kWorld; ++peer)
        CHECK(in[size_t(peer)] == pattern(size, peer * 5 + rank + round));
    }
    // A rank that is done leaves only when all are: peers may still take chunks of its rings.
  });
}

}  // namespace
