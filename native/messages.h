// Messages from one rank to another: in order for each pair and tag, through a ring per pair.
//
// Whoever waits works at everything that is open; where nobody waits, a thread does. A message that
// nobody asked for yet stays in its ring, unless one behind it is asked for.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <thread>

#include "channel_layout.h"
#include "engine.h"
#include "turns.h"

namespace weft {

struct Message {
  int peer = -1;  // -1: from any rank
  uint64_t tag = 0;
  char* data = nullptr;
  uint64_t bytes = 0;
  int64_t deadline = 0;

  uint64_t at = 0, total = 0;
  int source = -1;              // whom it came from
  int64_t due = 0, clock = 0;   // by the link
  std::vector<char> kept;       // of one that came before it was asked for
  bool stray = false, whole = false;
  std::atomic<bool> done{false};
  Outcome outcome;
};

class Messages {
 public:
  Messages(Fabric& fabric, int64_t spin_ns, bool crowded);
  ~Messages();

  void send(const std::shared_ptr<Message>& message, bool background);
  void receive(const std::shared_ptr<Message>& message, bool background);
  // Waits until a moment; `again` after a slice.
  Outcome wait(Message& message, int64_t until);
  void abort();

 private:
  bool progress();
  bool push(int target);
  bool pull(int source);
  bool spoil(int source);
  bool deliver_kept(int source);
  std::shared_ptr<Message> match(int source, uint64_t tag);
  void end(Message& message, Outcome outcome);
  Outcome check_peer(int peer);
  void background(bool wanted);
  void loop();
  bool open() const;

  Fabric& fabric_;
  int rank_, world_;
  ChannelArea area_;
  int64_t spin_ns_;
  bool crowded_;
  Turns turns_;
  std::vector<uint64_t> posted_, taken_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;
  std::list<std::shared_ptr<Message>> receives_;             // in the order of asking
  std::vector<std::shared_ptr<Message>> current_;            // by source: the one that is coming
  std::vector<std::deque<std::shared_ptr<Message>>> kept_;   // by source: came unasked
  std::vector<bool> spoiled_;  // by source: what came contradicts itself

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> aborted_{false};
  bool stop_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace weft
