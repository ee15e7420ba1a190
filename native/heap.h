// The heap: memory that every rank of a group maps, with the group's control words at its start, and
// after them a part for each rank.
//
// What a rank reads there was written by another process, which may have a bug. So a size or an
// offset that a peer wrote is compared with the bounds of the memory before it is used. A faulty
// rank cannot make another rank read or write elsewhere.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mapping.h"
#include "points.h"
#include "signal.h"

namespace weft {

constexpr int kMaxWorld = 64;
constexpr int kMaxSlots = 16;         // buffers of a call that peers may touch
constexpr int kMaxCounters = 1 << 15; // tasks of a rank that another lane waits for
constexpr int kMaxBlob = 3840;        // the text of a call's header

// The header of a rank that enters a call: its proposal, and the offsets of its buffers.
struct Header {
  uint64_t signature;
  uint64_t offsets[kMaxSlots];
  uint32_t blob_size;
  uint32_t unused;
  char blob[kMaxBlob];
};

// Why a rank gave up.
enum class Why : uint32_t {
  itself = 0,    // it was interrupted, or its own code raised
  peer = 1,      // it lost a peer
  deadline = 2,  // a wait passed its deadline
};

struct alignas(64) RankControl {
  alignas(64) Signal entered;   // the call that this rank has entered: its header can be read
  alignas(64) Signal done;      // the call after which this rank touches no other rank's memory
  alignas(64) Signal doorbell;  // counts events that this rank may wait for
  alignas(64) std::atomic<uint64_t> failed;  // the call in which this rank gave up; 0 for none
  std::atomic<int64_t> failed_at;            // when, and why: both are written before `failed`
  std::atomic<Why> why;
  std::atomic<uint32_t> left;                // set when the rank leaves the group in good order
  Header headers[2];  // by parity of the call: a rank is never two calls ahead of another
  Signal counters[kMaxCounters];
};

struct alignas(64) Control {
  alignas(64) std::atomic<int64_t> link_free[kMaxWorld * kMaxWorld];  // when a link is free again
  RankControl ranks[];
};

enum class Code : int {
  ok = 0,
  timeout = 1,
  peer_lost = 2,    // its process has ended
  peer_left = 3,    // it left the group in good order
  peer_failed = 4,  // it gave up in an earlier call
  cancelled = 5,
  disagree = 6,  // a header has another signature than expected
  again = 7,     // nothing yet: Python handles its signals, then waits again
  withdrawn = 8,  // a rank cancelled a collective before it began there
  corrupt = 9,    // an offset or a size of a peer is out of bounds
  outside = 10,   // the caller makes the next step of a kernel, and goes on then
};

struct Outcome {
  Code code = Code::ok;
  int rank = -1;
};

// Whether the main thread of a process has ended. The others of a process that was killed follow it,
// but on a busy machine that may take many seconds, and only then does its pidfd tell.
bool is_dying(int pid);

class Heap {
 public:
  // `fd` is the group's memory; rank 0 made it with `create`. It is the heap's from here on.
  Heap(int fd, int rank, int world, uint64_t span);
  // Another rank on memory that is mapped already: ranks of tests are threads of one process.
  Heap(std::shared_ptr<Mapping> mapping, int rank, int world, uint64_t span);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  static int create(int world, uint64_t span);
  static uint64_t control_bytes(int world);

  int rank() const { return rank_; }
  int world() const { return world_; }
  RankControl& control(int rank) { return control_->ranks[rank]; }
  Control& shared() { return *control_; }
  char* channels(int traffic = 0) const;  // where the channel of some traffic lies
  char* base(int rank) const { return data_ + uint64_t(rank) * span_; }
  bool contains(const void* p) const { return p >= base(rank_) && p < base(rank_) + span_; }
  uint64_t span() const { return span_; }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  // Whether a range of bytes is inside of one rank's part.
  bool holds(uint64_t offset, uint64_t bytes) const {
    return offset <= span_ && bytes <= span_ - offset;
  }
  // The address of a rank's buffer, from its header of a call; null if these bytes are not inside
  // of the rank's part.
  char* buffer(uint64_t call, int rank, int slot, uint64_t bytes) {
    const uint64_t offset = control(rank).headers[call % 2].offsets[slot];
    return holds(offset, bytes) ? base(rank) + offset : nullptr;
  }
  // The text of a rank's header; empty if its size is not valid.
  std::optional<std::string_view> words(uint64_t call, int rank);
  bool forked() const { return getpid() != owner_; }  // a child shares the memory, but is no rank

  // Blocks of this rank's part. Pages come when touched and go back when a block is freed.
  uint64_t allocate(uint64_t size);
  void free(uint64_t offset);
  uint64_t allocated() const;

  // Marks that this rank takes part in no further call.
  void leave();
  // The same in the middle of a call, and why.
  void fail(uint64_t call, Why why);

  void watch(int rank, int pidfd, int pid) { processes_[rank] = {pidfd, pid}; }
  bool ended(int rank) const;  // whether a peer's process is over, or dying
  // A peer that can no longer do its part of the call, if any. Of several, it is the one that is
  // most likely the cause of the others: one that died, then one that was interrupted, then one
  // that left, then one that gave up because of another.
  Outcome check_peers(uint64_t call);
  // The same, at most once in a time slice: for threads that never wait. The memory of a dead peer can
  // still be read, so nothing else would stop them.
  Outcome look_after_peers(uint64_t call);
  // `check_peers`, and also a peer that gave up in this very call: what was read from it may be spoiled.
  Outcome check_results(uint64_t call);

  // Waits until a signal reaches a value; gives up at the deadline, when a peer is lost, or when
  // `cancel` is set. With `patient` false it answers `again` after a slice.
  Outcome wait(Signal& signal, uint64_t target, uint64_t call, int64_t deadline, int64_t spin_ns,
               const std::atomic<bool>* cancel = nullptr, bool patient = true);

 private:
  int rank_, world_;
  uint64_t span_;
  pid_t owner_;
  std::shared_ptr<Mapping> mapping_;
  char* channels_;
  char* data_;
  Control* control_;
  std::vector<std::pair<int, int>> processes_;  // of the ranks: pidfd (-1: not watched), and number
  // When a thread of this rank looks after its peers again: whoever changes it does. It orders nothing
  // else, so it is relaxed; what is found is in the peers' controls.
  std::atomic<int64_t> next_look_{0};
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> size
  std::map<uint64_t, uint64_t> used_;
};

}  // namespace weft
