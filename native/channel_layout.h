// What the channel of a group has in shared memory, for each rank.
//
// Memory orders. Every flag here (`stamp`, `posted`, `taken`, `finished`, `failed`, `said`) has one
// writer, only grows, and guards plain memory of its writer: it is stored with release after that memory
// was written or read for the last time, and loaded with acquire before that memory is touched.
//   stamp     guards `place` and `data` of the announcement. They are written again two collectives
//             later, which takes the announcement of every rank for the one between, and with it the
//             end of all reading of this one: ranks announce a collective after they are through with
//             the one before.
//   posted    guards the chunks of a ring; `taken` of each reader guards that they may be written again.
//   finished  guards inputs that peers read in place: their owner goes on once all have finished.
// Wake-ups need more than release and acquire: see Bell.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#include "signal.h"

namespace weft {

constexpr uint64_t kSmallBytes = 32 << 10;   // what fits into an announcement
constexpr uint64_t kChunkBytes = 256 << 10;  // a chunk in a ring
constexpr int kRingChunks = 2;
constexpr uint64_t kRingBytes = kRingChunks * kChunkBytes;
constexpr int kMaxReaders = 64;
constexpr uint64_t kWords = 1024;

// A group has a channel for each: what users call, and what serial calls of operators move. Each has
// an order of its own, so that a collective of another thread cannot come between.
enum class Traffic : int { collectives, calls };
constexpr int kTraffics = 2;

// What a rank sleeps on when it waits for any of several things. Whoever makes one of them true
// rings only where somebody sleeps, so that a ring costs nobody who is awake.
//
// No wake-up is lost. The ringer stores a flag, fences, and looks at `sleepers`; the sleeper marks
// itself, fences, and looks at the flag. The fences are in one order for all: if the ringer's comes
// first, the sleeper's look finds the flag; if the sleeper's comes first, the ringer sees the mark and
// changes `value`, which the sleeper had read before its look, so that the kernel does not let it sleep.
struct alignas(64) Bell {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  void ring() {
    // Pairs with the fence between a sleeper's mark and its last look.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) == 0) return;
    value.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&value);
  }

  // Sleeps unless `ready` or rung, at most so long; gives what `ready` said.
  template <class Ready>
  bool sleep(int64_t timeout_ns, Ready ready) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = value.load(std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool is_ready = ready();
    if (!is_ready) futex_wait(&value, seen, timeout_ns);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_ready;
  }
};

// One cache line with flag and data. The stamp is the collective's number in its upper half and a
// hash of what the rank means in its lower one.
struct alignas(64) Announcement {
  std::atomic<uint64_t> stamp;
  uint64_t place;  // 0: the data is here; 1: it follows in rings; else offset in the heap * 4 + 2
  char data[kSmallBytes + 48];  // begins in the line of its flag
};

constexpr uint64_t kInRings = 1, kInPlace = 2;

struct alignas(64) Line {
  std::atomic<uint64_t> value;
};

struct RankChannel {
  Bell bell;
  Line finished;  // the last collective that this rank has done its part of
  Line failed;    // the one in which it gave up; 0 for none
  Line said;      // the last one that it has explained itself in
  char words[2][kWords];
  Announcement announcements[2];
};

struct alignas(4096) Ring {
  Line posted;
  Line taken[kMaxReaders];
  alignas(4096) char bytes[kRingBytes];
};

// A rank's part: its head, the ring that all read, and for each peer a ring of collectives and one
// of messages. Pages exist once they are touched.
struct ChannelArea {
  char* base = nullptr;
  int world = 0;

  static uint64_t rank_bytes(int world) {
    return kHead + uint64_t(1 + 2 * world) * sizeof(Ring);
  }
  static uint64_t bytes(int world) { return uint64_t(world) * rank_bytes(world); }

  RankChannel& head(int rank) const {
    return *reinterpret_cast<RankChannel*>(base + uint64_t(rank) * rank_bytes(world));
  }
  Ring& shared(int source) const { return ring(source, 0); }
  Ring& pair(int source, int target) const { return ring(source, 1 + target); }
  Ring& messages(int source, int target) const { return ring(source, 1 + world + target); }

 private:
  static constexpr uint64_t kHead = (sizeof(RankChannel) + 4095) / 4096 * 4096;

  Ring& ring(int source, int index) const {
    char* rank = base + uint64_t(source) * rank_bytes(world);
    return *reinterpret_cast<Ring*>(rank + kHead + uint64_t(index) * sizeof(Ring));
  }
};

}  // namespace weft
