// Copy engines: native threads that run queues of (wait for counters, 2-D copy, set a counter).
//
// A Program is the engine part of a plan for one rank: made once, launched at every call. Its
// commands are queued ahead and released by counters, as those of DMA engines are.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

#include "copiers.h"
#include "heap.h"
#include "links.h"

namespace weft {

// One end of a copy: a buffer of this rank (index into the call's pointers), or of a peer (slot
// of the peer's header).
struct End {
  int rank;
  int buffer;
  uint64_t offset;
  uint64_t pitch;

  // The bytes of the buffer that these rows extend over.
  uint64_t reach(uint64_t rows, uint64_t row_bytes) const {
    return rows == 0 ? offset : offset + (rows - 1) * pitch + row_bytes;
  }
};

struct Wait {
  int rank;
  int counter;
};

struct Command {
  int task;
  bool holds_core;  // `cores`: spins while the link is busy; `dma`: sleeps
  End source, target;
  uint64_t rows, row_bytes;
  std::vector<Wait> waits;
  int counter;             // set to the number of the call when done; -1 if no task waits
  std::vector<int> rings;  // ranks whose compute may wait for it
};

struct Program {
  std::map<int, std::vector<Command>> lanes;  // by peer
};

struct Span {
  int task;
  int64_t start, end;
};

// One running call: the inputs of its commands, and their outcome.
struct Call : std::enable_shared_from_this<Call> {
  std::shared_ptr<const Program> program;
  uint64_t number = 0;
  int64_t deadline = 0;
  std::vector<char*> pointers;       // this rank's buffers
  std::vector<uint64_t> signatures;  // those that the headers must have
  bool record = false;

  // While the thread of the call makes its copies itself (small_copies.cpp):
  bool small = false, agreed = false;
  std::map<int, size_t> made;  // by peer: how many commands of the lane that thread has carried out

  // Both are in the one order of all seq_cst operations, and neither publishes anything by itself:
  // `outcome` and `spans` are written and read with `mutex` held.
  std::atomic<bool> cancel{false};
  std::atomic<int> lanes_left{0};
  std::mutex mutex;
  std::condition_variable ended;
  Outcome outcome;
  std::vector<Span> spans;
};

// Where an end of a command is; null if a peer's header places it outside of the peer's memory.
char* address(Heap& heap, const Call& call, const End& end, const Command& command);

// For a thread that mostly sleeps: it should run at once when it wakes.
void become_responsive();

class Engine;

class Fabric {
 public:
  // spin_ns: how long to spin for a peer before sleeping. engine_spin_ns: the same for this rank's
  // own engines, which could not run meanwhile if the rank has only one core.
  // cores: of this rank, for itself.
  Fabric(int fd, int rank, int world, uint64_t span, int64_t spin_ns, int64_t engine_spin_ns,
         int cores = 1);
  Fabric(std::shared_ptr<Heap> heap, int64_t spin_ns, int64_t engine_spin_ns, int cores = 1);
  ~Fabric();

  Heap& heap() { return *heap_; }
  std::shared_ptr<Heap> heap_owner() { return heap_; }
  Links& links() { return links_; }
  Copiers& copiers() { return *copiers_; }
  int64_t spin_ns() const { return spin_ns_; }

  // Posts this rank's header: it has entered a call, with buffers at these offsets.
  void enter(uint64_t call, uint64_t signature, const std::vector<uint64_t>& offsets,
             const std::string& blob);
  // Waits for every rank to enter the call; `disagree` if a signature is not the expected one.
  Outcome agree(uint64_t call, const std::vector<uint64_t>& signatures, int64_t deadline,
                const std::atomic<bool>* cancel = nullptr);

  // small: the thread that waits for the call may make its copies itself, if they are small. Only
  // `wait`, `wait_doorbell` and `finish` may then wait for them.
  void launch(const std::shared_ptr<Call>& call, bool small = false);
  // Whether the copies of a program are small, and a waiting thread spins for long enough to make
  // them. Those of a paced link are made by engines, which keep its time.
  bool is_small(const Program& program) const;
  // Waits for every command of the call; once it is cancelled, until no engine touches a buffer of
  // the call any more.
  Outcome finish(Call& call);
  // Waits for a counter, giving up early if the call's engines have failed.
  Outcome wait(Call& call, int rank, int counter, int64_t* woken_at);
  // Waits for the doorbell to ring once more than `seen`.
  Outcome wait_doorbell(Call& call, uint64_t seen);
  // The moment at which bytes that were read or written in place since another have passed the link.
  int64_t reserve(int source, int target, uint64_t bytes, int64_t since);
  // Holds the calling thread, and its core, until a moment.
  Outcome hold(uint64_t call, int64_t until, int64_t deadline);
  // Posts that this rank no longer touches the memory of other ranks in the call; returns whether
  // all that it read there is valid.
  Outcome done(uint64_t call);
  // Waits until no peer touches this rank's memory for a call any more.
  Outcome wait_released(uint64_t call, int64_t deadline);

 private:
  void push(Call& call);
  void begin_small(Call& call);
  void copy_small(Call& call, const Signal* signal, uint64_t target);
  Outcome advance_small(Call& call);
  void end_small(Call& call, const Outcome& outcome);

  std::shared_ptr<Heap> heap_;
  Links links_;
  int64_t spin_ns_, engine_spin_ns_;
  std::unique_ptr<Copiers> copiers_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Engine>> engines_;
};

class Engine {
 public:
  Engine(Fabric& fabric, int peer);
  ~Engine();
  void push(std::shared_ptr<Call> call);

 private:
  void loop();
  void run(Call& call);
  Outcome run_commands(Call& call);
  Outcome copy(Call& call, const Command& command, int64_t not_before);
  Outcome pause(const Call& call, int64_t until, bool holds_core);

  Fabric& fabric_;
  int peer_;
  int64_t free_at_ = 0;  // when the last transfer ended by the link's clock
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::shared_ptr<Call>> queue_;
  std::shared_ptr<Call> running_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace weft
