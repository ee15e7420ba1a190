// What happens when the device fails, and when the process ends.
#include <unistd.h>

#include <chrono>

#include "queue.h"

namespace loom {

using namespace std::chrono_literals;

void fail(const std::string& why) {
  log_pending(why);
  auto& r = runtime();
  std::lock_guard guard(lock());
  if (r.broken) return;
  r.failure = why;
  r.broken = true;
  for (auto* queue : r.queues) queue->changed.notify_all();
}

bool broken() { return runtime().broken || runtime().stopping; }

void check_health() {
  if (!runtime().broken) return;
  std::lock_guard guard(lock());
  throw Error("loom: the device has failed: " + runtime().failure);
}

void clear_failure() {
  for (auto* stream : all_streams()) {
    WithoutGil without;
    std::unique_lock held(lock());
    while (stream->done != stream->issued) {
      held.unlock();
      usleep(200);
      held.lock();
    }
  }
  runtime().broken = false;
}

void inject_failure(const std::string& why) {
  std::lock_guard guard(lock());
  runtime().injected = why;
}

void shut_down() {
  auto& r = runtime();
  WithoutGil without;
  std::unique_lock held(lock());
  if (r.stopping) return;
  r.stopping = true;
  status(config().rank).exited = 1;
  leave_heap();
  for (auto* queue : r.queues) queue->changed.notify_all();
  const auto until = std::chrono::steady_clock::now() + 5s;
  for (auto* queue : r.queues)
    while (queue->started && !queue->parked && std::chrono::steady_clock::now() < until) {
      held.unlock();
      usleep(200);
      held.lock();
    }
}

}  // namespace loom
