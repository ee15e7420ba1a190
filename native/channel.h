// The channel of a group: collectives without an engine's wake-up, without Python, in shared memory.
//
// Every rank has two announcement slots (by parity of the collective's number) and rings of chunks.
// A collective starts with every rank's announcement: one cache line with the number, a hash of what
// the rank means, and the first bytes; small messages are in the announcement whole, so that flag
// and data come together. Larger ones follow in chunks through rings that stay in the cache: one
// ring per rank that all peers read, and one per pair. Inputs in the heap are read in place.
//
// Whoever finishes a collective has seen all announcements of it. So nobody is two ahead of another,
// two slots are enough, and ranks that disagree all find it out before anything is written.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

#include "channel_layout.h"
#include "engine.h"
#include "sums.h"

namespace weft {

// In the order of `weft.collectives.kinds.KINDS`.
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

  enum class Phase { start, agree, say, deliver, move, release, ended };
  Phase phase = Phase::start;
  bool withdrawn = false;
  uint64_t number = 0;
  int64_t deadline = 0;
  uint64_t chunk = 0;
  bool streaming = false, exposed = false;
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

  void renew() {
    phase = Phase::start;
    uneven = withdrawn = exposed = streaming = false;
    words.clear();
    sends.clear();
    receives.clear();
    sizes.clear();
    in.clear();
    out.clear();
    own = sum = {};
    own_to = nullptr;
    own_at = summed = 0;
    due = 0;
    outcome = {};
    done.store(false, std::memory_order_relaxed);
  }
};

class Channel {
 public:
  // crowded: there are more ranks than cores, so a waiting one gives way instead of spinning.
  Channel(Fabric& fabric, int64_t spin_ns, bool crowded);
  ~Channel();

  // An empty job, for one that ends before anybody else sees it: it is used again and again.
  std::shared_ptr<Job> spare();
  // Queues a job; in the background, the channel's own thread works at it. Ranks queue the same jobs
  // in the same order.
  void submit(const std::shared_ptr<Job>& job, bool background);
  // Waits for a job until a moment, working at what is queued where nobody else does; `again` after
  // a slice without an end.
  Outcome wait(Job& job, int64_t until);
  // Withdraws a job that has not begun; every rank will hear it. False if it has begun.
  bool withdraw(Job& job);
  // Ends the channel for this rank: what is queued or under way ends as cancelled, and peers are
  // told. After it, nobody touches the buffers of a job.
  void abort();
  // Ranks that have not announced themselves in a job, or not finished it.
  std::vector<int> late(const Job& job);

 private:
  Outcome work(Job& job, bool patient);
  void announce(Job& job);
  Outcome agree(Job& job, bool patient);
  Outcome say(Job& job, bool patient);
  Outcome deliver(Job& job, bool patient);
  void prepare(Job& job);
  Outcome move_all(Job& job, bool patient);
  Outcome release(Job& job, bool patient);
  Outcome check_peers(uint64_t number);
  void conclude(Job& job, Outcome outcome);
  void run_first(std::unique_lock<std::mutex>& lock, bool patient);
  void loop();

  bool step(Job& job);
  bool send(Job& job, Sending& s);
  bool arrive(Job& job, Receiving& r);
  void take(Job& job, Receiving& r);
  bool add(Job& job);
  bool keep_own(Job& job);

  template <class Ready>
  Outcome await(Job& job, bool patient, int64_t until, Ready ready);

  uint32_t signature(const Job& job) const;
  bool small(const Job& job) const;
  bool exposable(const Job& job) const;
  void send_pair(Job& job, int target, const char* from, uint64_t bytes);
  void send_all(Job& job, const char* from, uint64_t bytes, char* also, const uint64_t* made);
  void receive(Job& job, int source, bool shared, uint64_t offset, char* to, uint64_t bytes);

  int rank() const { return rank_; }
  int world() const { return world_; }
  RankChannel& of(int rank) const { return area_.head(rank); }
  const Announcement& announced(const Job& job, int rank) const {
    return of(rank).announcements[job.number % 2];
  }

  Fabric& fabric_;
  int rank_, world_;
  ChannelArea area_;
  int64_t spin_ns_;
  bool crowded_;
  uint64_t number_ = 0;
  std::vector<uint64_t> posted_;                     // by ring of this rank: 0 is the shared one
  std::vector<uint64_t> taken_shared_, taken_pair_;  // by source

  std::shared_ptr<Job> spare_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool busy_ = false, stop_ = false;
  std::atomic<bool> aborted_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace weft
