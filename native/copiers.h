// Threads that help the engines of a rank with large copies at memory speed, where one core cannot fill
// the memory's bandwidth.
//
// Engines cannot use the team of torch's threads (team.h): from another thread than torch's it would be
// a second team. So they have helpers of their own, as many as the rank has cores that neither torch nor
// an engine uses, and none where there is no such core; what copies took decides how many of them help
// (helper_count.h). A helper is started when it is first needed, sleeps while there is nothing to copy,
// and never waits for a peer. It may use all cores of the process,
// wherever the thread that starts it was bound to.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "helper_count.h"

namespace weft {

struct Rows {
  char* target;
  uint64_t target_pitch;
  const char* source;
  uint64_t source_pitch;
  uint64_t rows, row_bytes;
};

void copy_rows(const Rows& rows);

class Copiers {
 public:
  // cores: those of this rank.
  explicit Copiers(int cores);
  ~Copiers();

  // How many may help from now on, if torch and engines use so many threads.
  void leave(int used);
  // Copies rows in the calling thread, with helpers where it is worth their while.
  void copy(const Rows& rows);
  int started();

 private:
  struct Task {
    Rows rows;
    uint64_t rows_at_once;
    uint64_t parts;
    std::atomic<uint64_t> next{0};  // relaxed: it only hands parts out; the lock orders what is copied
    int helpers = 0;  // at work, with the lock held
  };

  void copy_with(int helpers, const Rows& rows);
  static void work(Task& task);
  void start(int wanted);
  void loop();

  const int cores_;
  const cpu_set_t places_;  // where helpers run: those of the process, when this was made
  std::atomic<int> allowed_{0};
  std::mutex mutex_;
  std::condition_variable filled_, left_;
  HelperCount counts_;
  std::list<Task*> open_;
  std::vector<std::thread> threads_;
  bool stop_ = false;
};

}  // namespace weft
