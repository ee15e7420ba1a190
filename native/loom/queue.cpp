// Streams, events and the hardware queues that run them: one thread for each queue, in issue order.
#include "queue.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace loom {

using namespace std::chrono_literals;

// Everything here lives until the process ends: threads may use it while the rest is torn down.
std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

namespace {

constexpr int kMaxQueues = 128;  // streams beyond that share queues, as on every GPU
constexpr std::chrono::milliseconds kGrace = 2ms;  // in late mode: how long an operation that nobody asks for waits

struct Runtime {
  std::vector<Queue*> queues;
  std::vector<Stream*> streams;  // by id; the default streams of devices come first
  std::atomic<uint64_t> marks{0};
  std::string failure, injected;
  std::atomic<bool> broken{false}, stopping{false};
};

Runtime& runtime() {
  static auto* value = new Runtime;
  return *value;
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

Queue* queue_for(size_t index) {
  auto& r = runtime();
  size_t most = config().queues > 0 ? config().queues : kMaxQueues;
  if (index < most) {
    r.queues.push_back(new Queue);
    r.queues.back()->index = index;
  }
  return r.queues[index % most];
}

Stream* add_stream(int device, int priority) {
  auto& r = runtime();
  auto* stream = new Stream;
  stream->id = static_cast<int>(r.streams.size());
  stream->device = device;
  stream->priority = priority;
  stream->queue = queue_for(r.streams.size());
  r.streams.push_back(stream);
  return stream;
}

void make_default_streams() {  // under the lock
  auto& r = runtime();
  while (r.streams.size() < static_cast<size_t>(config().devices))
    add_stream(static_cast<int>(r.streams.size()), 0);
}

thread_local int device_here = -1;
thread_local std::map<int, Stream*> streams_here;

void delay(const Op& op) {
  const auto key = (uint64_t(config().rank) << 48) ^ (uint64_t(op.stream->id) << 32) ^ op.seq;
  const uint64_t dice = mix(config().seed ^ mix(key));
  if (dice & 1) usleep((dice >> 8) % 400);
}

void execute(Op& op) {
  const int64_t start = now_ns();
  if (op.kind == Op::Kind::kernel) {
    Unit unit(op.stream->priority);
    const int64_t begun = now_ns();
    std::string injected;
    {
      std::lock_guard guard(lock());
      injected.swap(runtime().injected);
    }
    if (!injected.empty()) throw Error(injected);
    op.run();
    log_op(op, begun, now_ns());
  } else if (op.kind == Op::Kind::copy) {
    if (op.engine >= 0)
      run_on_engine(op.engine, op.run, op.bytes);
    else
      op.run();
    log_op(op, start, now_ns());
  } else if (op.signals) {
    exchange_signal(op);
  } else if (op.kind == Op::Kind::host) {
    op.run();
    log_op(op, start, now_ns());
  } else if (op.kind == Op::Kind::post) {
    write_word(op, op.value);
  } else if (op.kind == Op::Kind::hold) {
    hold_word(op, op.compare, op.value);
  }
}

bool is_work(const Op& op) { return op.kind <= Op::Kind::copy; }

void run_op(Queue& queue, Op& op, std::unique_lock<std::mutex>& held) {
  auto& r = runtime();
  if (op.kind == Op::Kind::record) {
    op.mark->time = now_ns();
    if (op.mark->id && !r.broken) log_record(op);
    op.mark->done = true;
    op.mark->changed.notify_all();
  } else if (op.kind == Op::Kind::wait) {
    status(config().rank).running--;
    while (!op.mark->done && !r.broken && !r.stopping) {
      if (config().mode != Mode::late || op.place <= queue.demanded)
        demand(*op.mark->queue, op.mark->place);
      op.mark->changed.wait_for(held, config().mode == Mode::late ? kGrace : 20ms);
      if (config().mode == Mode::late) demand(queue, op.place);
    }
    status(config().rank).running++;
    if (!r.broken) log_wait(op);
  } else if (!r.broken) {
    held.unlock();
    try {
      execute(op);
    } catch (const std::exception& error) {
      fail(std::string(op.name) + " on stream " + std::to_string(op.stream->id) + " of rank " +
           std::to_string(config().rank) + " failed: " + error.what());
    } catch (...) {
      fail(std::string(op.name) + " failed");
    }
    op.run = nullptr;  // what it holds is freed before others learn that it is done
    held.lock();
  }
}

void worker(Queue* queue) {
  auto& r = runtime();
  std::unique_lock held(lock());
  for (;;) {
    queue->changed.wait(held, [&] { return r.stopping || !queue->ops.empty(); });
    if (r.stopping) break;
    Op& op = queue->ops.front();
    if (config().mode == Mode::late && is_work(op) && !r.broken) {
      const auto until = std::chrono::steady_clock::now() + kGrace;
      queue->changed.wait_until(held, until, [&] {
        return r.stopping || r.broken || op.place <= queue->demanded;
      });
      if (r.stopping) break;
    }
    auto& here = status(config().rank);
    here.running++;
    if (config().mode == Mode::random && is_work(op)) {
      held.unlock();
      delay(op);
      held.lock();
    }
    run_op(*queue, op, held);
    here.running--;
    here.progress++;
    op.stream->done = op.seq;
    queue->ops.pop_front();
  }
  queue->parked = true;
}

void start(Queue& queue) {
  if (queue.started) return;
  queue.started = true;
  std::thread(worker, &queue).detach();
}

Op mark_op(Stream* stream, Op::Kind kind, MarkPtr mark) {
  Op op;
  op.kind = kind;
  op.name = kind == Op::Kind::record ? "record" : "wait";
  op.mark = std::move(mark);
  op.stream = stream;
  return op;
}

MarkPtr new_mark(Stream* stream, bool seen) {
  auto mark = std::make_shared<Mark>();
  mark->id = seen ? ++runtime().marks : 0;
  mark->stream = stream;
  mark->queue = stream->queue;
  return mark;
}

void wait_on_host(const MarkPtr& mark) {
  WithoutGil without;
  HostBlocked blocked;
  std::unique_lock held(lock());
  while (!mark->done && !runtime().stopping) {
    demand(*mark->queue, mark->place);
    mark->changed.wait_for(held, 100ms);
  }
}

void refuse_if_capturing(Stream* stream, const char* what) {
  if (stream->capture)
    throw Error(std::string("loom: ") + what +
                " is not allowed while the stream is capturing a graph");
}

}  // namespace

void demand(Queue& queue, uint64_t place) {
  if (place > queue.demanded) {
    queue.demanded = place;
    queue.changed.notify_all();
    if (queue.ops.empty() || queue.ops.front().kind != Op::Kind::wait) return;
    const auto& mark = *queue.ops.front().mark;  // which it waits for itself
    demand(*mark.queue, mark.place);
  }
}

Stream* default_stream(int device) {
  std::lock_guard guard(lock());
  make_default_streams();
  if (device < 0 || device >= config().devices)
    throw Error("loom: there is no device loom:" + std::to_string(device));
  return runtime().streams[device];
}

Stream* new_stream(int device, int priority) {
  std::lock_guard guard(lock());
  make_default_streams();
  return add_stream(device, priority);
}

Stream* stream_of(int device, int64_t id) {
  // torch numbers the default stream of every device 0.
  if (id == 0) return default_stream(device);
  std::lock_guard guard(lock());
  return runtime().streams.at(id);
}

int current_device() {
  if (device_here < 0) device_here = config().rank % config().devices;
  return device_here;
}

int set_current_device(int device) {
  if (device < 0 || device >= config().devices)
    throw Error("loom: there is no device loom:" + std::to_string(device) + "; there are " +
                std::to_string(config().devices));
  const int before = current_device();
  device_here = device;
  return before;
}

Stream* current_stream(int device) {
  auto& stream = streams_here[device];
  if (!stream) stream = default_stream(device);
  return stream;
}

Stream* set_current_stream(Stream* stream) {
  auto* before = current_stream(stream->device);
  streams_here[stream->device] = stream;
  return before;
}

std::vector<Stream*> all_streams() {
  std::lock_guard guard(lock());
  return runtime().streams;
}

void enqueue(Stream* stream, Op op) {
  std::lock_guard guard(lock());
  op.stream = stream;
  op.seq = ++stream->issued;
  op.place = ++stream->queue->places;
  if (op.kind == Op::Kind::record) op.mark->place = op.place;
  status(config().rank).progress++;
  stream->queue->ops.push_back(std::move(op));
  start(*stream->queue);
  stream->queue->changed.notify_all();
}

void issue(Stream* stream, Op op) {
  check_health();
  if (!op.origin[0]) op.origin = origin_here();  // before any lock: it may need the GIL
  op.label = current_label();
  op.host = host_clock();
  if (stream->capture)
    capture_op(stream, std::move(op));
  else
    enqueue(stream, std::move(op));
}

MarkPtr record(Stream* stream) {
  auto mark = new_mark(stream, true);
  issue(stream, mark_op(stream, Op::Kind::record, mark));
  return mark;
}

void wait(Stream* stream, const MarkPtr& mark) {
  if (!mark) return;  // never recorded: nothing to wait for
  if (mark->capture || stream->capture) {
    Op op = mark_op(stream, Op::Kind::wait, mark);
    op.origin = origin_here();
    op.label = current_label();
    capture_op(stream, std::move(op));
    return;
  }
  issue(stream, mark_op(stream, Op::Kind::wait, mark));
}

bool finished(const MarkPtr& mark) {
  check_health();
  if (!mark) return true;
  if (mark->capture) throw Error("loom: an event of a capture cannot be queried");
  if (!mark->done) {
    std::lock_guard guard(lock());
    demand(*mark->queue, mark->place);
    return false;
  }
  log_host_mark(mark->id);
  return true;
}

void synchronize(const MarkPtr& mark) {
  if (!mark) return;
  if (mark->capture) throw Error("loom: an event of a capture cannot be waited for by the host");
  wait_on_host(mark);
  check_health();
  log_host_mark(mark->id);
}

void synchronize(Stream* stream) {
  refuse_if_capturing(stream, "waiting for a stream");
  synchronize(record(stream));
}

void synchronize_device() {
  if (capturing()) throw Error("loom: waiting for the device is not allowed during a capture");
  std::vector<MarkPtr> marks;
  for (auto* stream : all_streams())
    if (stream->issued) marks.push_back(record(stream));
  for (auto& mark : marks) synchronize(mark);
  check_health();
}

bool stream_idle(Stream* stream) {
  refuse_if_capturing(stream, "querying a stream");
  check_health();
  bool idle;
  {
    std::lock_guard guard(lock());
    idle = stream->done == stream->issued;
    if (!idle) demand(*stream->queue, stream->queue->places);
  }
  // What was seen to be over is an order: the mark is recorded at once and known to the host.
  if (idle && stream->issued) synchronize(record(stream));
  return idle;
}

void settle(Stream* stream) {
  auto mark = new_mark(stream, false);
  enqueue(stream, mark_op(stream, Op::Kind::record, mark));
  wait_on_host(mark);
  check_health();
}

// ---- failures ------------------------------------------------------------------------------------

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

std::vector<Pending> pending() {
  std::lock_guard guard(lock());
  std::vector<Pending> found;
  for (auto* queue : runtime().queues)
    for (auto& op : queue->ops) {
      Op copy;
      copy.kind = op.kind;
      copy.name = op.name;
      copy.rects = op.rects;
      copy.word = op.word;
      copy.value = op.value;
      copy.stream = op.stream;
      copy.label = op.label;
      copy.origin = op.origin;
      found.push_back({queue->index, std::move(copy)});
    }
  return found;
}

}  // namespace loom
