// Streams and events: what is issued to them, and how hosts and streams wait for them.
#include <chrono>

#include "queue.h"

namespace loom {

using namespace std::chrono_literals;

namespace {

constexpr int kMaxQueues = 128;  // streams beyond that share queues, as on every GPU

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

void issue(Stream* stream, Op op) {
  check_health();
  const bool works = op.kind <= Op::Kind::copy || (op.kind == Op::Kind::host && !op.signals);
  if (works) poison_freed(stream);
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

}  // namespace loom
