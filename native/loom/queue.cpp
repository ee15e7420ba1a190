// The hardware queues that run what streams are given: one thread for each queue, in issue order.
#include "queue.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace loom {

using namespace std::chrono_literals;

Runtime& runtime() {
  static auto* value = new Runtime;
  return *value;
}

std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

namespace {

constexpr std::chrono::milliseconds kGrace = 2ms;  // in late mode: how long an operation that nobody asks for waits

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

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
    Running running(op);
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
