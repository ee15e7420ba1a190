// One collective, as the channel works at it: what is asked, how far it is, and what became of it.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "channel_layout.h"
#include "heap.h"
#include "sums.h"

namespace weft {

// The numbers are those of `weft.plan.collective.KINDS`.
enum class Kind : int {
  all_gather,
  all_to_all,
  reduce_scatter,
  all_reduce,
  broadcast,
  gather,
  scatter,
  reduce,
  barrier,
  refused,  // this rank cannot take part; `words` say why
};

// How bytes of a peer came to this rank.
enum class Way : int { announcement, ring, in_place };
constexpr int kWays = 3;

// What a rank did in a collective, for a recording. In the order of `weft.collectives.recording.ACTS`.
enum class Act : int { meet, stage, copy, sum, keep, term };

struct Mark {
  Act act;
  int peer;
  uint64_t bytes;
  int64_t start, end;
};

struct Piece {
  char* data = nullptr;
  uint64_t bytes = 0;
};

// A ring as one of its ends sees it.
struct Port {
  Ring* ring = nullptr;
  uint64_t* count = nullptr;  // chunks posted, or taken, since the group began
};

// Bytes of this rank that go to one peer, or to all of them.
struct Sending {
  Port port;
  const char* from;
  uint64_t bytes;
  char* also;            // where they belong in this rank's own result, if anywhere
  const uint64_t* made;  // how many of them are there by now; null for all
  std::vector<int> readers;
  uint64_t at = 0;
};

// Bytes of one peer that come to this rank.
struct Receiving {
  int source;
  Port port;           // without a ring where the peer's memory is read in place
  const char* direct;  // there
  char* to;            // null where they are one term of a sum
  uint64_t bytes;
  uint64_t at = 0;
  int64_t begun = 0;           // for a recording
  const char* here = nullptr;  // the chunk that has come
  int64_t due = 0;             // when it has come, by the link
  int64_t clock = 0;           // when the last one had
};

struct Job {
  Kind kind = Kind::barrier;
  Dtype dtype = Dtype::other;
  Reduction reduction = Reduction::sum;
  int root = 0;
  uint64_t item = 1;           // bytes of an element
  bool holds_core = false;     // `cores`: spins while a link is busy; `dma`: sleeps
  bool uneven = false;         // all_to_all: each rank knows only its own sizes
  std::vector<uint64_t> sizes; // bytes that all ranks know of: of every rank, or of one alike
  std::vector<Piece> in, out;  // one, or one per rank
  std::string words;           // why a rank refuses; in the end, what the ranks disagree about
  int64_t patience = 0;        // how long this rank works at it, in ns
  bool record = false;         // keeps marks
  // Of a call of an operator: its number, which is that of the job, too, and the signature that each
  // rank's header of it must have. A rank announces its part before it has seen those of its peers.
  uint64_t call = 0;
  std::vector<uint64_t> expected;

  enum class Phase { start, agree, say, deliver, move, release, ended };
  Phase phase = Phase::start;
  bool withdrawn = false;
  std::atomic<uint64_t> number{0};  // another thread may ask who is late
  int64_t deadline = 0;
  int corrupt = -1;  // a rank whose announcement speaks of memory that it does not have
  uint64_t chunk = 0;     // of rings; where it is the last, it may be shorter
  bool bounded = false;   // whether a paced link bounds the chunk
  bool streaming = false; // whether the result goes past the cache
  bool past = false;      // and the chunks in rings
  uint64_t trial = 0;     // the class of its message in StoreTrials; 0 if it is no try
  int64_t met = 0;        // when all ranks had announced it
  int threads = 1;        // that move and add its bytes: as many as the thread has that works at it
  bool exposed = false;   // peers read this rank's input where it lies
  bool released = false;  // this rank has said that it reads none of theirs any more
  std::vector<Sending> sends;
  std::vector<Receiving> receives;  // those without a target are terms, in the order of ranks
  Piece own;                        // this rank's term, or what it copies to itself
  char* own_to = nullptr;
  uint64_t own_at = 0;
  Piece sum;
  uint64_t summed = 0;
  int64_t due = 0;

  std::atomic<bool> done{false};
  Outcome outcome;

  int64_t started = 0, ended = 0;
  uint64_t came[kWays] = {};  // bytes of peers, by way
  uint64_t chunks = 0;        // in how many pieces they came
  std::vector<Mark> marks;

  void mark(Act act, int peer, uint64_t bytes, int64_t start) {
    marks.push_back({act, peer, bytes, start, now_ns()});
  }

  void renew() {
    phase = Phase::start;
    corrupt = -1;
    uneven = withdrawn = exposed = released = bounded = streaming = past = record = false;
    for (uint64_t& bytes : came) bytes = 0;
    chunks = 0;
    marks.clear();
    words.clear();
    call = 0;
    expected.clear();
    sends.clear();
    receives.clear();
    sizes.clear();
    in.clear();
    out.clear();
    own = sum = {};
    own_to = nullptr;
    own_at = summed = trial = 0;
    due = 0;
    outcome = {};
    done.store(false, std::memory_order_relaxed);
  }
};

// What a rank means, in the words of a mismatch.
std::string describe(const Job& job);

inline bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::reduce;
}

inline uint64_t total(const std::vector<Piece>& pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

// Where the sizes of all ranks' pieces begin in an uneven announcement: what it sends, what it
// expects, then the data.
inline const uint64_t* splits(const Announcement& a) {
  return reinterpret_cast<const uint64_t*>(a.data);
}
inline uint64_t splits_bytes(int world) { return 2 * sizeof(uint64_t) * uint64_t(world); }

}  // namespace weft
