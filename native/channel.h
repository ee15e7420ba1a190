// The channel of a group: collectives without an engine's wake-up, without Python, in shared memory.
//
// Every rank has two announcement slots (by parity of the collective's number) and rings of chunks.
// A collective starts with every rank's announcement: one cache line with the number, a hash of what
// the rank means, and the first bytes; small messages are in the announcement whole, so that flag
// and data come together. Larger ones follow in chunks through small rings: one ring per rank that all
// peers read, and one per pair. Inputs in the heap are read in place.
//
// Whoever finishes a collective has seen all announcements of it. So nobody is two ahead of another,
// two slots are enough, and ranks that disagree all find it out before anything is written.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <optional>
#include <thread>

#include "engine.h"
#include "job.h"
#include "store_trials.h"
#include "turns.h"

namespace weft {

// What is known of the last collective that ended.
struct Facts {
  Kind kind = Kind::barrier;
  Dtype dtype = Dtype::other;
  Reduction reduction = Reduction::sum;
  bool holds_core = false;
  uint64_t number = 0, item = 1, in = 0, out = 0;
  uint64_t came[kWays] = {};
  uint64_t chunks = 0, chunk_bytes = 0;
  int64_t started = 0, ended = 0;
};

// Whether chunks of rings go past the cache: what was faster for the first messages of a size, or always
// the same.
enum class Past : int { tried, never, always };

// Sizes that say how bytes move. `weft bench channel` measures others beside these; all ranks of a
// group have the same, and change them only when no collective is under way.
struct Tuning {
  uint64_t small = kSmallBytes;     // what travels with an announcement, at most as much as fits
  uint64_t least_chunk = 32 << 10;  // chunks of a ring are a part of the message between these
  uint64_t most_chunk = kChunkBytes;
  uint64_t stream = 8 << 20;        // results from this size on go past the cache
  Past past = Past::tried;          // whether chunks of rings do
};

class Channel {
 public:
  // crowded: there are more ranks than cores, so a waiting one gives way instead of spinning.
  Channel(Fabric& fabric, int64_t spin_ns, bool crowded,
          Traffic traffic = Traffic::collectives);
  ~Channel();

  // An empty job, for one that ends before anybody else sees it: it is used again and again.
  std::shared_ptr<Job> spare();
  // Queues a job; in the background, the channel's own thread works at it. Ranks queue the same jobs
  // in the same order.
  void submit(const std::shared_ptr<Job>& job, bool background);
  // Carries out a job in the calling thread, after what is queued; `again` after a slice.
  Outcome at_once(const std::shared_ptr<Job>& job);
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
  // Why a rank gave the group up; nothing if it has not said so.
  std::optional<int> why_failed(int rank);
  Facts last();
  void tune(const Tuning& tuning) { tuning_ = tuning; }

  int rank() const { return rank_; }
  int world() const { return world_; }

 private:
  Outcome work(Job& job, bool patient);
  void announce(Job& job);
  Outcome agree(Job& job, bool patient);
  Outcome agree_on_job(Job& job, bool patient);
  Outcome agree_on_call(Job& job, bool patient);
  Outcome say(Job& job, bool patient);
  Outcome deliver(Job& job, bool patient);
  void prepare(Job& job);
  Outcome move_all(Job& job, bool patient);
  Outcome release(Job& job, bool patient);
  Outcome say_released(Job& job);
  Outcome check_peers(uint64_t number);
  void conclude(Job& job, Outcome outcome);
  void end_with_channel(Job& job);
  void run(std::unique_lock<std::mutex>& lock, std::shared_ptr<Job> job, bool patient);
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
  Outcome hold(Job& job, bool patient, int64_t until);
  Outcome look_up(Job& job, bool patient);

  uint32_t signature(const Job& job) const;
  bool small(const Job& job) const;
  uint64_t message_of(const Job& job) const;
  uint64_t chunk_of(const Job& job) const;
  void choose_stores(Job& job);
  bool exposable(const Job& job) const;
  int overfull(const Job& job) const;
  void send_pair(Job& job, int target, const char* from, uint64_t bytes);
  void send_all(Job& job, const char* from, uint64_t bytes, char* also, const uint64_t* made);
  void receive(Job& job, int source, bool shared, uint64_t offset, char* to, uint64_t bytes);

  RankChannel& of(int rank) const { return area_.head(rank); }
  const Announcement& announced(const Job& job, int rank) const {
    return of(rank).announcements[job.number % 2];
  }

  Fabric& fabric_;
  int rank_, world_;
  Traffic traffic_;
  ChannelArea area_;
  int64_t spin_ns_;
  bool crowded_;
  Turns turns_;
  Tuning tuning_;
  StoreTrials trials_;
  std::atomic<uint64_t> number_{0};  // of the last job begun; `abort` may look while one works
  std::vector<uint64_t> posted_;                     // by ring of this rank: 0 is the shared one
  std::vector<uint64_t> taken_shared_, taken_pair_;  // by source

  std::shared_ptr<Job> spare_;
  Facts last_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool busy_ = false, stop_ = false;
  std::atomic<bool> aborted_{false};
  Outcome fate_{Code::cancelled, -1};  // what ended the channel
  uint64_t fatal_ = 0;                 // the number of the job in which that was
  std::unique_ptr<std::thread> thread_;
};

}  // namespace weft
