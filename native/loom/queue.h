// What the files of the runtime share about hardware queues and words.
#pragma once

#include "core.h"

namespace loom {

struct Queue {
  size_t index = 0;
  std::deque<Op> ops;  // the first is under way
  std::condition_variable changed;
  uint64_t places = 0, demanded = 0;
  bool started = false, parked = false;
};

std::mutex& lock();
void demand(Queue& queue, uint64_t place);  // under the lock: somebody waits for that place

void write_word(const Op& op, uint64_t value);
void hold_word(const Op& op, Compare compare, uint64_t value);
void exchange_signal(const Op& op);

void leave_heap();                        // says to peers that this process ends in good order
void release_late_blocks();               // what was freed during a capture
void release_captured(Capture* capture);  // what was allocated in one, when its graph is no more

struct Pending {
  size_t queue;
  Op op;
};
std::vector<Pending> pending();

}  // namespace loom
