// Copy engines: one thread for each peer moves bytes, in order, as fast as the link is set to be.
// Also the places where kernels run, which are given by priority.
#include <unistd.h>

#include <cstring>
#include <set>

#include "queue.h"

namespace loom {

namespace {

struct Job {
  const std::function<void()>* run;
  uint64_t bytes;
  bool done = false;
  std::exception_ptr error;
};

struct Engine {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Job*> jobs;
};

void engine_loop(Engine* engine) {
  std::unique_lock held(engine->lock);
  for (;;) {
    engine->changed.wait(held, [&] { return !engine->jobs.empty(); });
    Job* job = engine->jobs.front();
    engine->jobs.pop_front();
    held.unlock();
    const int64_t start = now_ns();
    try {
      (*job->run)();
    } catch (...) {
      job->error = std::current_exception();
    }
    if (config().pace > 0) {
      const auto ends = start + static_cast<int64_t>(job->bytes / config().pace * 1e9);
      for (int64_t left; (left = ends - now_ns()) > 0 && !broken();)
        usleep(static_cast<useconds_t>(std::min<int64_t>(left / 1000 + 1, 10000)));
    }
    held.lock();
    job->done = true;
    engine->changed.notify_all();
  }
}

Engine& engine_of(int peer) {
  static auto* mutex = new std::mutex;
  static auto* engines = new std::map<int, Engine*>;
  std::lock_guard guard(*mutex);
  auto& engine = (*engines)[peer];
  if (!engine) {
    engine = new Engine;
    std::thread(engine_loop, engine).detach();
  }
  return *engine;
}

struct Units {
  std::mutex lock;
  std::condition_variable changed;
  int taken = 0;
  uint64_t arrivals = 0;
  std::set<std::pair<int, uint64_t>> waiting;  // by priority, then in order of arrival
};

Units& units() {
  static auto* value = new Units;
  return *value;
}

void move(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width,
          size_t rows) {
  if (rows == 1 || (to_pitch == width && from_pitch == width)) {
    // A word may be a flag that somebody waits for: it must never be seen half written.
    if (width * rows == 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
      uint32_t word;
      std::memcpy(&word, from, 4);
      __atomic_store_n(reinterpret_cast<uint32_t*>(to), word, __ATOMIC_RELEASE);
    } else {
      std::memmove(to, from, width * rows);
    }
    return;
  }
  for (size_t row = 0; row < rows; ++row)
    std::memmove(to + row * to_pitch, from + row * from_pitch, width);
}

}  // namespace

void run_on_engine(int peer, const std::function<void()>& run, uint64_t bytes) {
  auto& engine = engine_of(peer);
  Job job{&run, bytes, false, nullptr};
  std::unique_lock held(engine.lock);
  engine.jobs.push_back(&job);
  engine.changed.notify_all();
  engine.changed.wait(held, [&] { return job.done; });
  if (job.error) std::rethrow_exception(job.error);
}

Unit::Unit(int priority) {
  auto& u = units();
  std::unique_lock held(u.lock);
  const auto me = std::make_pair(priority, u.arrivals++);
  u.waiting.insert(me);
  u.changed.wait(held, [&] { return u.taken < config().units && *u.waiting.begin() == me; });
  u.waiting.erase(me);
  ++u.taken;
  u.changed.notify_all();
}

Unit::~Unit() {
  auto& u = units();
  std::lock_guard guard(u.lock);
  --u.taken;
  u.changed.notify_all();
}

void copy(Stream* stream, void* target, size_t target_pitch, const void* source,
          size_t source_pitch, size_t width, size_t rows, const char* name) {
  if (width == 0 || rows == 0) return;
  Op op;
  op.kind = Op::Kind::copy;
  op.name = name;
  op.bytes = width * rows;
  op.rects = {rect_of(source, width, rows, source_pitch, false),
              rect_of(target, width, rows, target_pitch, true)};
  const auto *from = region_of(source), *to = region_of(target);
  if (from && from->rank != config().rank)
    op.engine = from->rank;
  else if (to && to->rank != config().rank)
    op.engine = to->rank;
  char* at = readable(target);
  const char* of = readable(source);
  op.run = [=] { move(at, target_pitch, of, source_pitch, width, rows); };
  issue(stream, std::move(op));
}

}  // namespace loom
