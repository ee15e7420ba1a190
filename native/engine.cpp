#include "engine.h"

#include <sched.h>
#include <sys/prctl.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "team.h"

namespace weft {
namespace {

constexpr int64_t kPause = 20'000'000;  // how often one that is held by a link looks up, in ns
constexpr int64_t kEngineSpin = 5'000;  // engines share cores with compute: they spin only briefly

}  // namespace

char* address(Heap& heap, const Call& call, const End& end, const Command& command) {
  if (end.rank == heap.rank()) return call.pointers[end.buffer] + end.offset;
  char* buffer =
      heap.buffer(call.number, end.rank, end.buffer, end.reach(command.rows, command.row_bytes));
  return buffer ? buffer + end.offset : nullptr;
}

// A thread that mostly sleeps should run at once when it wakes: ask for exact timers and a short
// slice, which is what gives a waking thread precedence. Neither needs a privilege; where the kernel
// knows no slices the call fails and nothing changes. And it may run on every core of the process:
// the thread that started it may be bound to the one on which it computes.
void become_responsive() {
  const cpu_set_t cores = process_cores();
  if (CPU_COUNT(&cores) > 0) sched_setaffinity(0, sizeof cores, &cores);
  prctl(PR_SET_TIMERSLACK, 1UL);
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  attributes.size = sizeof attributes;
  attributes.policy = SCHED_OTHER;
  attributes.runtime = 100'000;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

Fabric::Fabric(int fd, int rank, int world, uint64_t span, int64_t spin_ns, int64_t engine_spin_ns,
               int cores)
    : Fabric(std::make_shared<Heap>(fd, rank, world, span), spin_ns, engine_spin_ns, cores) {}

Fabric::Fabric(std::shared_ptr<Heap> heap, int64_t spin_ns, int64_t engine_spin_ns, int cores)
    : heap_(std::move(heap)),
      links_(*heap_),
      spin_ns_(spin_ns),
      engine_spin_ns_(engine_spin_ns),
      copiers_(std::make_unique<Copiers>(cores)) {}

Fabric::~Fabric() {
  // The threads of the engines are the parent's: in a forked child there is nobody to stop.
  if (heap_->forked()) {
    for (auto& [peer, engine] : engines_) engine.release();
    (void)copiers_.release();
  }
  engines_.clear();
}

void Fabric::enter(uint64_t call, uint64_t signature, const std::vector<uint64_t>& offsets,
                   const std::string& blob) {
  if (offsets.size() > kMaxSlots || blob.size() > kMaxBlob)
    throw std::length_error("a call has too many buffers for its header");
  RankControl& own = heap_->control(heap_->rank());
  Header& header = own.headers[call % 2];
  header.signature = signature;
  std::copy(offsets.begin(), offsets.end(), header.offsets);
  header.blob_size = uint32_t(blob.size());
  std::memcpy(header.blob, blob.data(), blob.size());
  come_to(Point::enter);
  own.entered.set(call);
}

Outcome Fabric::agree(uint64_t call, const std::vector<uint64_t>& signatures, int64_t deadline,
                      const std::atomic<bool>* cancel) {
  come_to(Point::agree);
  bool same = true;
  const int64_t spin = cancel ? kEngineSpin : spin_ns_;
  for (int r = 0; r < heap_->world(); ++r) {
    RankControl& peer = heap_->control(r);
    Outcome outcome =
        heap_->wait(peer.entered, call, call, deadline, spin, cancel, cancel != nullptr);
    if (outcome.code == Code::timeout) outcome.rank = r;
    if (outcome.code != Code::ok) return outcome;
    if (!signatures.empty()) same &= peer.headers[call % 2].signature == signatures[r];
  }
  if (!same) return {Code::disagree, -1};
  return heap_->check_results(call);
}

void Fabric::launch(const std::shared_ptr<Call>& call, bool small) {
  call->lanes_left.store(int(call->program->lanes.size()));
  if (small && !call->record && is_small(*call->program)) return begin_small(*call);
  push(*call);
}

void Fabric::push(Call& call) {
  copiers_->leave(torch_threads() + int(call.program->lanes.size()));
  std::lock_guard lock(mutex_);
  for (const auto& [peer, commands] : call.program->lanes) {
    auto& engine = engines_[peer];
    if (!engine) engine = std::make_unique<Engine>(*this, peer);
    engine->push(call.shared_from_this());
  }
}

Outcome Fabric::finish(Call& call) {
  come_to(Point::finish);
  copy_small(call, nullptr, 0);
  std::unique_lock lock(call.mutex);
  const auto all_ended = [&] { return call.lanes_left.load() == 0; };
  const int64_t began = now_ns();
  if (call.ended.wait_for(lock, std::chrono::nanoseconds(kSlice), all_ended)) return call.outcome;
  own_time.slept(began, began + kSlice);
  if (call.cancel.load()) return {Code::again, -1};
  const Outcome peers = heap_->check_peers(call.number);
  if (peers.code != Code::ok) return peers;
  return {own_time.now() > call.deadline ? Code::timeout : Code::again, -1};
}

Outcome Fabric::wait(Call& call, int rank, int counter, int64_t* woken_at) {
  come_to(Point::wait);
  Signal& signal = heap_->control(rank).counters[counter];
  copy_small(call, &signal, call.number);
  if (call.cancel.load()) return {Code::cancelled, -1};
  const int64_t spin = rank == heap_->rank() ? engine_spin_ns_ : spin_ns_;
  const Outcome outcome =
      heap_->wait(signal, call.number, call.number, call.deadline, spin, &call.cancel, false);
  if (woken_at) *woken_at = now_ns();
  return outcome;
}

Outcome Fabric::wait_doorbell(Call& call, uint64_t seen) {
  come_to(Point::wait_doorbell);
  Signal& doorbell = heap_->control(heap_->rank()).doorbell;
  copy_small(call, &doorbell, seen + 1);
  if (call.cancel.load()) return {Code::cancelled, -1};
  return heap_->wait(doorbell, seen + 1, call.number, call.deadline, engine_spin_ns_, &call.cancel,
                     false);
}

int64_t Fabric::reserve(int source, int target, uint64_t bytes, int64_t since) {
  return later(links_.reserve(source, target, bytes, since), links_.latency());
}

Outcome Fabric::hold(uint64_t call, int64_t until, int64_t deadline) {
  come_to(Point::hold);
  const int64_t now = now_ns();
  spin_until(std::min(until, now + kPause));
  const Outcome peers = heap_->look_after_peers(call);
  if (peers.code != Code::ok) return peers;
  if (until <= now + kPause) return {};
  return {own_time.now() > deadline ? Code::timeout : Code::again, -1};
}

Outcome Fabric::done(uint64_t call) {
  const Outcome outcome = heap_->check_results(call);
  come_to(Point::done);
  heap_->control(heap_->rank()).done.set(call);
  return outcome;
}

Outcome Fabric::wait_released(uint64_t call, int64_t deadline) {
  come_to(Point::wait_released);
  for (int r = 0; r < heap_->world(); ++r) {
    if (r == heap_->rank()) continue;
    Outcome outcome =
        heap_->wait(heap_->control(r).done, call, call, deadline, spin_ns_, nullptr, false);
    if (outcome.code == Code::timeout) outcome.rank = r;
    if (outcome.code != Code::ok) return outcome;
  }
  return {};
}

Engine::Engine(Fabric& fabric, int peer) : fabric_(fabric), peer_(peer) {
  thread_ = std::thread([this] { loop(); });
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    for (auto& call : queue_) call->cancel.store(true);
    if (running_) running_->cancel.store(true);
  }
  filled_.notify_all();
  thread_.join();
}

void Engine::push(std::shared_ptr<Call> call) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(call));
  }
  filled_.notify_one();
}

void Engine::loop() {
  become_responsive();
  prctl(PR_SET_NAME, "weft-engine");
  for (;;) {
    std::shared_ptr<Call> call;
    {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      call = running_ = std::move(queue_.front());
      queue_.pop_front();
    }
    run(*call);
    std::lock_guard lock(mutex_);
    running_.reset();
  }
}

void Engine::run(Call& call) {
  const Outcome outcome = run_commands(call);
  std::lock_guard lock(call.mutex);
  if (outcome.code != Code::ok) {
    if (call.outcome.code == Code::ok) call.outcome = outcome;
    call.cancel.store(true);
    // Compute may sleep on its doorbell or on a counter that will never come; its next look at the
    // call, at the latest after one slice, finds it cancelled. The bell makes it look now.
    fabric_.heap().control(fabric_.heap().rank()).doorbell.add_one();
  }
  if (call.lanes_left.fetch_sub(1) == 1) call.ended.notify_all();
}

Outcome Engine::run_commands(Call& call) {
  Heap& heap = fabric_.heap();
  Outcome outcome = fabric_.agree(call.number, call.signatures, call.deadline, &call.cancel);
  if (outcome.code != Code::ok) return outcome;
  // Nothing of a call was on a link before all ranks were in it, however near the last call was.
  free_at_ = std::max(free_at_, now_ns());
  const std::vector<Command>& lane = call.program->lanes.at(peer_);
  for (size_t next = call.made.empty() ? 0 : call.made.at(peer_); next < lane.size(); ++next) {
    const Command& command = lane[next];
    int64_t not_before = free_at_;
    for (const Wait& wait : command.waits) {
      Signal& signal = heap.control(wait.rank).counters[wait.counter];
      if (signal.get() >= call.number) continue;
      come_to(Point::engine_wait);
      outcome = heap.wait(signal, call.number, call.number, call.deadline, kEngineSpin, &call.cancel);
      if (outcome.code != Code::ok) return outcome;
      not_before = now_ns();
    }
    if (call.cancel.load()) return {Code::cancelled, -1};
    outcome = heap.look_after_peers(call.number);
    if (outcome.code != Code::ok) return outcome;
    // A late wake-up of this thread is not the link's: back-to-back transfers follow each other
    // on the link's own clock, unless the engine had been idle.
    constexpr int64_t kLate = 3'000'000;
    const int64_t now = now_ns();
    if (now - not_before > kLate) not_before = now;
    come_to(Point::engine_copy);
    outcome = copy(call, command, not_before);
    if (outcome.code != Code::ok) return outcome;
    come_to(Point::engine_signal);
    if (command.counter >= 0) heap.control(heap.rank()).counters[command.counter].set(call.number);
    for (int r : command.rings) heap.control(r).doorbell.add_one();
  }
  return {};
}

Outcome Engine::copy(Call& call, const Command& command, int64_t not_before) {
  const bool empty = command.rows == 0 || command.row_bytes == 0;
  const char* source = empty ? nullptr : address(fabric_.heap(), call, command.source, command);
  if (!source && !empty) return {Code::corrupt, command.source.rank};
  char* target = empty ? nullptr : address(fabric_.heap(), call, command.target, command);
  if (!target && !empty) return {Code::corrupt, command.target.rank};
  Links& links = fabric_.links();
  const int64_t start = now_ns();
  const bool local = command.source.rank == command.target.rank;
  const Rows all{target, command.target.pitch, source, command.source.pitch, command.rows,
                 command.row_bytes};
  if (empty) {
    free_at_ = 0;
  } else if (!links.paced()) {
    fabric_.copiers().copy(all);
    free_at_ = 0;
  } else if (local) {
    copy_rows(all);
    free_at_ = 0;
  } else {
    const uint64_t rows_at_once =
        std::clamp<uint64_t>(links.piece_bytes() / command.row_bytes, 1, command.rows);
    int64_t end = not_before;
    for (uint64_t row = 0; row < command.rows; row += rows_at_once) {
      const uint64_t rows = std::min(rows_at_once, command.rows - row);
      end = links.reserve(command.source.rank, command.target.rank, rows * command.row_bytes, end);
      copy_rows({target + row * command.target.pitch, command.target.pitch,
                 source + row * command.source.pitch, command.source.pitch, rows,
                 command.row_bytes});
      const bool last = row + rows == command.rows;
      const int64_t until = later(end, last ? links.latency() : 0);
      const Outcome paused = pause(call, until, command.holds_core);
      if (paused.code != Code::ok) return paused;
    }
    free_at_ = end;
  }
  if (call.record) {
    const Span span{command.task, start, now_ns()};
    std::lock_guard lock(call.mutex);
    call.spans.push_back(span);
  }
  return {};
}

// Waits for a moment of the link, unless the call is cancelled or a peer is lost meanwhile.
Outcome Engine::pause(const Call& call, int64_t until, bool holds_core) {
  come_to(Point::engine_pause);
  for (;;) {
    const int64_t next = std::min(until, now_ns() + kPause);
    if (holds_core) {
      spin_until(next);
    } else {
      sleep_until(next);
    }
    if (call.cancel.load()) return {Code::cancelled, -1};
    const Outcome peers = fabric_.heap().look_after_peers(call.number);
    if (peers.code != Code::ok) return peers;
    if (next == until) return {};
  }
}

}  // namespace weft
