#include "channel.h"

#include <sys/prctl.h>

#include <chrono>

#include "channel_wait.h"
#include "moving.h"

namespace weft {

Channel::Channel(Fabric& fabric, int64_t spin_ns, bool crowded, Traffic traffic)
    : fabric_(fabric),
      rank_(fabric.heap().rank()),
      world_(fabric.heap().world()),
      traffic_(traffic),
      area_{fabric.heap().channels(int(traffic)), world_},
      spin_ns_(spin_ns),
      crowded_(crowded),
      posted_(1 + world_),
      taken_shared_(world_),
      taken_pair_(world_) {}

Channel::~Channel() {
  if (fabric_.heap().forked()) {  // the thread is the parent's
    (void)thread_.release();
    return;
  }
  abort();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_) thread_->join();
}

std::shared_ptr<Job> Channel::spare() {
  // Nobody else refers to it, and whoever last worked at it is through: `done` is the last that is
  // written of a job, so reading it acquires all the rest. The count of uses alone would not.
  if (!spare_ || spare_.use_count() > 1 || !spare_->done.load(std::memory_order_acquire)) {
    spare_ = std::make_shared<Job>();
  } else {
    spare_->renew();
  }
  return spare_;
}

// -- the queue ------------------------------------------------------------------------------------

void Channel::submit(const std::shared_ptr<Job>& job, bool background) {
  std::lock_guard lock(mutex_);
  if (aborted_.load()) return end_with_channel(*job);
  queue_.push_back(job);
  if (!background) return;
  if (!thread_) thread_ = std::make_unique<std::thread>([this] { loop(); });
  changed_.notify_all();
}

void Channel::loop() {
  become_responsive();
  prctl(PR_SET_NAME, "weft-channel");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (!queue_.empty() && !busy_); });
    if (stop_) return;
    run_first(lock, true);
  }
}

// Works at a job; where it is not over, it becomes the first of the queue.
void Channel::run(std::unique_lock<std::mutex>& lock, std::shared_ptr<Job> job, bool patient) {
  busy_ = true;
  lock.unlock();
  // The channel's own thread runs beside torch's: it leaves their cores to them.
  const bool large = std::max(total(job->in), total(job->out)) >= kTeamBytes;
  job->threads = patient || !large || fabric_.links().paced() ? 1 : team_threads();
  const Outcome outcome = work(*job, patient);
  lock.lock();
  busy_ = false;
  if (outcome.code == Code::again && !aborted_.load()) {
    queue_.push_front(std::move(job));
  } else {
    conclude(*job, outcome.code == Code::again ? Outcome{Code::cancelled, -1} : outcome);
  }
  changed_.notify_all();
}

void Channel::run_first(std::unique_lock<std::mutex>& lock, bool patient) {
  std::shared_ptr<Job> job = std::move(queue_.front());
  queue_.pop_front();
  run(lock, std::move(job), patient);
}

Outcome Channel::at_once(const std::shared_ptr<Job>& job) {
  {
    std::unique_lock lock(mutex_);
    if (!busy_ && queue_.empty() && !aborted_.load()) {
      run(lock, job, false);
      return job->done.load() ? job->outcome : Outcome{Code::again, -1};
    }
  }
  submit(job, false);
  return wait(*job, INT64_MAX);
}

Outcome Channel::wait(Job& job, int64_t until) {
  std::unique_lock lock(mutex_);
  const int64_t slice = std::min(until, now_ns() + kSlice);
  while (!job.done.load()) {
    if (!busy_ && !queue_.empty()) {
      run_first(lock, false);
      if (!job.done.load() && now_ns() >= slice) return {Code::again, -1};
      continue;
    }
    const auto left = std::chrono::nanoseconds(std::max<int64_t>(0, slice - now_ns()));
    const bool woken = changed_.wait_for(
        lock, left, [&] { return job.done.load() || (!busy_ && !queue_.empty()); });
    if (!woken) return {Code::again, -1};
  }
  return job.outcome;
}

bool Channel::withdraw(Job& job) {
  std::lock_guard lock(mutex_);
  // Of a job that is not queued, nothing but `done` may be looked at: somebody works at it.
  const auto same = [&](const std::shared_ptr<Job>& other) { return other.get() == &job; };
  if (std::none_of(queue_.begin(), queue_.end(), same)) return false;
  if (job.phase != Job::Phase::start) return false;
  job.words = describe(job);
  job.kind = Kind::refused;
  job.withdrawn = true;
  return true;
}

void Channel::abort() {
  std::unique_lock lock(mutex_);
  if (!aborted_.exchange(true)) {
    of(rank_).failed.value.store(std::max<uint64_t>(1, number_));
    for (int r = 0; r < world_; ++r) of(r).bell.ring();
  }
  for (const auto& job : queue_) end_with_channel(*job);
  queue_.clear();
  changed_.wait(lock, [&] { return !busy_; });
}

// With the lock held, or by the one who works at it.
void Channel::conclude(Job& job, Outcome outcome) {
  job.outcome = outcome;
  job.ended = now_ns();
  if (outcome.code == Code::ok && job.kind != Kind::refused) {
    last_.kind = job.kind;
    last_.dtype = job.dtype;
    last_.reduction = job.reduction;
    last_.holds_core = job.holds_core;
    last_.number = job.number;
    last_.item = job.item;
    last_.in = total(job.in);
    last_.out = total(job.out);
    std::copy(job.came, job.came + kWays, last_.came);
    last_.chunks = job.chunks;
    last_.chunk_bytes = job.chunk;
    last_.started = job.started;
    last_.ended = job.ended;
  }
  job.phase = Job::Phase::ended;
  const bool fatal = outcome.code != Code::ok && outcome.code != Code::disagree &&
                     outcome.code != Code::withdrawn;
  if (fatal && !aborted_.exchange(true)) {
    of(rank_).failed.value.store(std::max<uint64_t>(1, job.number));
    for (int r = 0; r < world_; ++r) of(r).bell.ring();
    fate_ = outcome;
    fatal_ = job.number;
    for (const auto& other : queue_) end_with_channel(*other);
    queue_.clear();
  }
  job.done.store(true);
}

// A job that cannot begin any more has the error of the one that ended the channel: whoever waits for
// it first must hear which rank is lost. With the lock held.
void Channel::end_with_channel(Job& job) {
  job.number = fatal_;
  job.outcome = fate_;
  job.phase = Job::Phase::ended;
  job.done.store(true);
}

Facts Channel::last() {
  std::lock_guard lock(mutex_);
  return last_;
}

std::vector<int> Channel::late(const Job& job) {
  std::vector<int> ranks;
  const uint64_t number = job.number;
  for (int r = 0; r < world_; ++r) {
    if (r == rank_ || of(r).finished.value.load() >= number) continue;
    if (uint32_t(announced(job, r).stamp.load() >> 32) != uint32_t(number)) ranks.push_back(r);
  }
  return ranks;
}

std::optional<int> Channel::why_failed(int rank) {
  const RankControl& peer = fabric_.heap().control(rank);
  if (peer.failed.load() == 0) return std::nullopt;
  return int(peer.why.load());
}

// A peer that can no longer do its part, if any; of several the cause of the others, as in
// `Heap::check_peers`.
Outcome Channel::check_peers(uint64_t number) {
  if (traffic_ == Traffic::calls) return fabric_.heap().check_peers(number);
  Outcome found;
  int known = 0;
  const auto keep = [&](int near, Code code, int rank) {
    if (near > known) found = {code, rank};
    known = std::max(known, near);
  };
  Heap& heap = fabric_.heap();
  for (int r = 0; r < world_; ++r) {
    const auto open = [&] { return of(r).finished.value.load() < number; };
    if (r == rank_ || !open()) continue;
    const bool left = heap.control(r).left.load();
    if (heap.ended(r) && !left && open()) return {Code::peer_lost, r};
    const bool failed = heap.control(r).failed.load() != 0;
    const bool itself = heap.control(r).why.load() == Why::itself;
    if (left) {  // one that gave up before that was not the first
      if (open()) keep(failed && !itself ? 1 : 2, Code::peer_left, r);
    } else if (failed || of(r).failed.value.load() != 0) {
      if (open()) keep(failed && itself ? 3 : 1, Code::peer_failed, r);
    }
  }
  return found;
}

Outcome Channel::work(Job& job, bool patient) {
  Outcome outcome;
  for (;;) {
    switch (job.phase) {
      case Job::Phase::start:
        announce(job);
        job.phase = Job::Phase::agree;
        [[fallthrough]];
      case Job::Phase::agree:
        outcome = agree(job, patient);
        break;
      case Job::Phase::say:
        outcome = say(job, patient);
        break;
      case Job::Phase::deliver:
        outcome = deliver(job, patient);
        break;
      case Job::Phase::move:
        outcome = move_all(job, patient);
        break;
      case Job::Phase::release:
        outcome = release(job, patient);
        break;
      case Job::Phase::ended:
        if (job.trial && job.outcome.code == Code::ok)
          trials_.took(job.trial, job.past, now_ns() - job.met);
        come_to(Point::channel_finish);
        of(rank_).finished.value.store(job.number, std::memory_order_release);
        return job.outcome;
    }
    if (outcome.code != Code::ok) return outcome;
  }
}

}  // namespace weft
