#include "copiers.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "signal.h"
#include "team.h"

namespace weft {
namespace {

constexpr uint64_t kLarge = 1 << 20;  // below it, helpers wake too late to be of use
constexpr uint64_t kCopyPart = 256 << 10;

}  // namespace

void copy_rows(const Rows& r) {
  if (r.target_pitch == r.row_bytes && r.source_pitch == r.row_bytes) {
    std::memcpy(r.target, r.source, r.rows * r.row_bytes);
    return;
  }
  for (uint64_t row = 0; row < r.rows; ++row)
    std::memcpy(r.target + row * r.target_pitch, r.source + row * r.source_pitch, r.row_bytes);
}

Copiers::Copiers(int cores) : cores_(cores), places_(process_cores()) {}

Copiers::~Copiers() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  filled_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Copiers::leave(int used) {
  allowed_.store(std::clamp(cores_ - used, 0, kMostHelpers), std::memory_order_relaxed);
}

int Copiers::started() {
  std::lock_guard lock(mutex_);
  return int(threads_.size());
}

void Copiers::work(Task& task) {
  const Rows& all = task.rows;
  for (;;) {
    const uint64_t part = task.next.fetch_add(1, std::memory_order_relaxed);
    if (part >= task.parts) return;
    const uint64_t first = part * task.rows_at_once;
    copy_rows({all.target + first * all.target_pitch, all.target_pitch,
               all.source + first * all.source_pitch, all.source_pitch,
               std::min(task.rows_at_once, all.rows - first), all.row_bytes});
  }
}

void Copiers::copy(const Rows& rows) {
  const int most = allowed_.load(std::memory_order_relaxed);
  const uint64_t bytes = rows.rows * rows.row_bytes;
  if (most == 0 || bytes < kLarge) return copy_rows(rows);
  std::unique_lock lock(mutex_);
  const int helpers = counts_.choose(bytes, most);
  lock.unlock();
  const int64_t began = now_ns();
  copy_with(helpers, rows);
  const int64_t took = now_ns() - began;
  lock.lock();
  counts_.took(bytes, helpers, took);
}

void Copiers::copy_with(int helpers, const Rows& given) {
  Rows rows = given;
  if (helpers == 0) return copy_rows(rows);
  if (rows.target_pitch == rows.row_bytes && rows.source_pitch == rows.row_bytes) {
    // One run of bytes: it is cut anywhere, and the rest that is no whole row is copied at once.
    const uint64_t bytes = rows.rows * rows.row_bytes, whole = bytes / kCopyPart * kCopyPart;
    std::memcpy(rows.target + whole, rows.source + whole, bytes - whole);
    rows = {rows.target, kCopyPart, rows.source, kCopyPart, whole / kCopyPart, kCopyPart};
  }
  Task task;
  task.rows = rows;
  task.rows_at_once = std::max<uint64_t>(1, kCopyPart / rows.row_bytes);
  task.parts = (rows.rows + task.rows_at_once - 1) / task.rows_at_once;
  std::list<Task*>::iterator place;
  {
    std::lock_guard lock(mutex_);
    start(helpers);
    place = open_.insert(open_.end(), &task);
  }
  for (int i = 0; i < helpers; ++i) filled_.notify_one();
  work(task);
  std::unique_lock lock(mutex_);
  open_.erase(place);
  // No part is left to take. A helper has at most one under way, which is a copy of some microseconds.
  left_.wait(lock, [&] { return task.helpers == 0; });
}

// With the lock held. Where no thread can be had, there are fewer helpers.
void Copiers::start(int wanted) {
  try {
    while (int(threads_.size()) < wanted) threads_.emplace_back([this] { loop(); });
  } catch (const std::system_error&) {
    allowed_.store(int(threads_.size()), std::memory_order_relaxed);
  }
}

void Copiers::loop() {
  sched_setaffinity(0, sizeof places_, &places_);  // without effect if there are none
  prctl(PR_SET_NAME, "weft-copier");
  std::unique_lock lock(mutex_);
  const auto todo = [&]() -> Task* {
    for (Task* task : open_)
      if (task->next.load(std::memory_order_relaxed) < task->parts) return task;
    return nullptr;
  };
  for (;;) {
    Task* task = nullptr;
    filled_.wait(lock, [&] { return stop_ || (task = todo()) != nullptr; });
    if (stop_) return;
    ++task->helpers;
    lock.unlock();
    work(*task);
    lock.lock();
    if (--task->helpers == 0) left_.notify_all();
  }
}

}  // namespace weft
