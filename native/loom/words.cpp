// Words in memory that streams write and wait for: flags between streams, ranks and processes.
#include <unistd.h>

#include <cstring>
#include <sstream>

#include "queue.h"

namespace loom {

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLook = kSecond / 50;  // how often a wait looks after its peers
// Looks between the end of a peer and the failure of a wait, about two seconds. They are counted
// because time also passes while a busy machine runs none of this process's threads.
constexpr int kGrace = 100;

// A word guards what its writer did before: the store releases, and a wait acquires what it finds.
// `exchange` does both, for its two sides take turns. Nobody sleeps on a word, so no wake-up is lost.
uint64_t read_word(const char* word, int bytes) {
  if (bytes == 8) return __atomic_load_n(reinterpret_cast<const uint64_t*>(word), __ATOMIC_ACQUIRE);
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(word), __ATOMIC_ACQUIRE);
}

void store_word(char* word, int bytes, uint64_t value) {
  if (bytes == 8)
    __atomic_store_n(reinterpret_cast<uint64_t*>(word), value, __ATOMIC_RELEASE);
  else
    __atomic_store_n(reinterpret_cast<uint32_t*>(word), static_cast<uint32_t>(value),
                     __ATOMIC_RELEASE);
}

bool satisfies(uint64_t found, Compare compare, uint64_t value, int bytes) {
  switch (compare) {
    case Compare::at_least:  // cyclic, as the drivers of GPUs compare
      if (bytes == 8) return static_cast<int64_t>(found - value) >= 0;
      return static_cast<int32_t>(static_cast<uint32_t>(found - value)) >= 0;
    case Compare::equal: return found == value;
    case Compare::any_bit: return (found & value) != 0;
    case Compare::nor: return bytes == 8 ? ~(found | value) != 0 : uint32_t(~(found | value)) != 0;
  }
  return false;
}

Rect place_of(const Op& op) {
  // Ops hold readable addresses; the log wants places in heaps.
  Rect rect = op.rects.empty() ? Rect{} : op.rects.front();
  return rect;
}

std::string describe(const Op& op, Compare compare, uint64_t value) {
  std::ostringstream text;
  const auto place = place_of(op);
  text << "stream " << op.stream->id << " of rank " << config().rank << " waits (" << op.name
       << ") for the word at " << place.offset << " of rank " << place.space << " to be "
       << (compare == Compare::equal ? "" : "at least ") << value << ", and it is "
       << read_word(op.word, op.word_bytes);
  if (op.origin[0]) text << ", issued at " << op.origin;
  return text.str();
}

// Waits until a word is as wanted. False if the device has failed meanwhile.
bool until_word(const Op& op, Compare compare, uint64_t value) {
  if (satisfies(read_word(op.word, op.word_bytes), compare, value, op.word_bytes)) return true;
  auto& here = status(config().rank);
  here.running--;
  const int64_t started = now_ns();
  int64_t looked = started;
  int lost = 0;
  const int before = standstills();
  useconds_t nap = 5;
  bool good = false;
  while (!broken()) {
    good = satisfies(read_word(op.word, op.word_bytes), compare, value, op.word_bytes);
    if (good) break;
    usleep(nap);
    nap = nap < 200 ? nap * 2 : 200;
    const int64_t now = now_ns();
    if (now - looked < kLook) continue;
    looked = now;
    int dead = lost_peer();
    const bool stuck = dead < 0 && all_stuck(before);
    // A process that was killed counts as ended before its last thread is gone, which is what
    // lost_peer() waits for.
    if (stuck) dead = killed_rank();
    if (dead >= 0) {
      // A stream of a GPU would wait on. So whoever watches the peers has time to release the word.
      if (++lost < kGrace) continue;
      fail("rank " + std::to_string(dead) + " has ended while " + describe(op, compare, value));
    } else if (stuck) {
      fail("no rank can go on: " + describe(op, compare, value));
    } else if (config().deadline > 0 && now - started > config().deadline * kSecond) {
      fail("the deadline passed while " + describe(op, compare, value));
    }
  }
  here.running++;
  return good;
}

Op word_op(Stream* stream, Op::Kind kind, void* word, int bytes, const char* name) {
  Op op;
  op.kind = kind;
  op.name = name;
  op.word = readable(word);
  op.word_bytes = bytes;
  op.rects = {rect_of(word, bytes, 1, 0, kind == Op::Kind::post)};
  (void)stream;
  return op;
}

// Sets a word from `from` to `to` as one step, when it is `from`.
bool exchange(const Op& op, uint32_t from, uint32_t to) {
  while (!broken()) {
    if (!until_word(op, Compare::equal, from)) return false;
    log_hold(op, op.rects.front(), Compare::equal, from);
    log_post(op, op.rects.front(), to);
    uint32_t expected = from;
    if (__atomic_compare_exchange_n(reinterpret_cast<uint32_t*>(op.word), &expected, to, false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      return true;
  }
  return false;
}

// One operation that exchanges several words, one after another, without holding a unit.
void exchange_all(Stream* stream, std::vector<std::pair<void*, bool>> words, const char* name) {
  for (auto& [word, set] : words) {
    Op op = word_op(stream, Op::Kind::host, word, 4, name);
    op.signals = true;
    op.value = set;
    issue(stream, std::move(op));
  }
}

}  // namespace

void write_word(const Op& op, uint64_t value) {
  log_post(op, place_of(op), value);
  store_word(op.word, op.word_bytes, value);
}

void hold_word(const Op& op, Compare compare, uint64_t value) {
  if (until_word(op, compare, value)) log_hold(op, place_of(op), compare, value);
}

void exchange_signal(const Op& op) {
  op.value ? exchange(op, 0, 1) : exchange(op, 1, 0);
}

void post(Stream* stream, void* word, uint64_t value, int bytes, const char* name) {
  Op op = word_op(stream, Op::Kind::post, word, bytes, name);
  op.value = value;
  issue(stream, std::move(op));
}

void hold(Stream* stream, void* word, uint64_t value, int bytes, Compare compare,
          const char* name) {
  Op op = word_op(stream, Op::Kind::hold, word, bytes, name);
  op.value = value;
  op.compare = compare;
  issue(stream, std::move(op));
}

void put_signal(Stream* stream, void* word, const char* name) {
  exchange_all(stream, {{word, true}}, name);
}

void take_signal(Stream* stream, void* word, const char* name) {
  exchange_all(stream, {{word, false}}, name);
}

void barrier(Stream* stream, const std::vector<void*>& theirs, const std::vector<void*>& mine) {
  std::vector<std::pair<void*, bool>> words;
  for (auto* word : theirs) words.emplace_back(word, true);
  for (auto* word : mine) words.emplace_back(word, false);
  exchange_all(stream, std::move(words), "barrier");
}

void fill(Stream* stream, void* target, uint32_t value, int item_bytes, size_t count,
          const char* name) {
  Op op;
  op.kind = Op::Kind::kernel;
  op.name = name;
  op.bytes = count * item_bytes;
  op.rects = {rect_of(target, op.bytes, 1, 0, true)};
  char* at = readable(target);
  op.run = [=] {
    if (item_bytes == 1) {
      std::memset(at, static_cast<int>(value), count);
      return;
    }
    for (size_t i = 0; i < count; ++i) store_word(at + i * item_bytes, 4, value);
  };
  issue(stream, std::move(op));
}

}  // namespace loom
