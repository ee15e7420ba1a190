#include "lane.h"

#include <algorithm>

#include "matrix_sums.h"

namespace weft {
namespace {

// The longest run of adjacent products among tasks in the order of their rows, and how many rows it has.
std::pair<int64_t, std::vector<int>> longest(const Lane& lane, const std::vector<int>& tasks) {
  int64_t best_rows = -1, rows = 0, end_a = -1, end_c = -1;
  size_t begin = 0, from = 0, to = 0;
  const Area* last = nullptr;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const LaneTask& task = lane.tasks[size_t(tasks[i])];
    const Area &a = task.a[0], &c = task.c[0];
    const bool same = last && a.rank == last->rank && a.buffer == last->buffer;
    if (!same || c.row != end_c || a.row != end_a) {
      begin = i;
      rows = 0;
    }
    last = &a;
    rows += a.rows;
    end_a = a.row + a.rows;
    end_c = c.row + a.rows;
    if (rows > best_rows) {
      best_rows = rows;
      from = begin;
      to = i + 1;
    }
  }
  return {best_rows, {tasks.begin() + long(from), tasks.begin() + long(to)}};
}

}  // namespace

std::vector<int> Lane::next_run(const std::vector<int>& ready) const {
  std::vector<int> products;
  int sum = -1;
  for (const int place : ready) {
    const LaneTask& task = tasks[size_t(place)];
    if (task.duty != Duty::sum) {
      products.push_back(place);
    } else if (sum < 0 || task.id < tasks[size_t(sum)].id) {
      sum = place;
    }
  }
  if (sum >= 0) return {sum};
  if (products.size() < 2) return products;
  std::stable_sort(products.begin(), products.end(), [&](int x, int y) {
    return tasks[size_t(x)].c[0].row < tasks[size_t(y)].c[0].row;
  });
  std::vector<int> merges;  // in the order of their first rows
  for (const int place : products)
    if (std::find(merges.begin(), merges.end(), tasks[size_t(place)].merge) == merges.end())
      merges.push_back(tasks[size_t(place)].merge);
  std::pair<int64_t, std::vector<int>> best{-1, {}};
  for (const int merge : merges) {
    std::vector<int> group;
    for (const int place : products)
      if (tasks[size_t(place)].merge == merge) group.push_back(place);
    auto found = longest(*this, group);
    if (found.first > best.first) best = std::move(found);
  }
  return best.second;
}

LaneRun::LaneRun(Fabric& fabric, std::shared_ptr<const Lane> lane, std::shared_ptr<Call> copies,
                 std::vector<Matrix> buffers)
    : fabric_(fabric),
      lane_(std::move(lane)),
      copies_(std::move(copies)),
      buffers_(std::move(buffers)),
      agreed_(fabric.heap().world() == 1),
      ended_(lane_->tasks.size(), false) {}

Outcome LaneRun::go() {
  Outcome outcome;
  if (!computed_.empty()) outcome = hold();
  while (outcome.code == Code::ok && stretch_ < lane_->stretches.size()) {
    const Stretch& stretch = lane_->stretches[stretch_];
    outcome = stretch.loose ? loose(stretch) : in_order(stretch);
    if (outcome.code != Code::ok) break;
    ++stretch_;
    next_ = 0;
    begun_ = false;
  }
  if (outcome.code == Code::ok) outcome = deliver();
  if (outcome.code == Code::ok) outcome = agree();
  // Copies that no task of this rank waits for may still run.
  return outcome.code == Code::ok ? fabric_.finish(*copies_) : outcome;
}

int LaneRun::at() const {
  if (stretch_ >= lane_->stretches.size()) return -1;
  const Stretch& stretch = lane_->stretches[stretch_];
  if (!stretch.loose) return lane_->tasks[size_t(stretch.first + next_)].id;
  return waiting_.empty() ? -1 : lane_->tasks[size_t(waiting_.front())].id;
}

// Until all headers are known to agree, a rank touches only its own memory and signals nothing: its
// plan may have to be replaced, and peers must not take a counter of the old plan for one of the new.
Outcome LaneRun::agree() {
  if (agreed_) return {};
  const Outcome outcome = fabric_.agree(copies_->number, copies_->signatures, copies_->deadline);
  if (outcome.code != Code::ok) return outcome;
  agreed_ = true;
  for (const LaneTask* task : pending_) (void)after(*task);
  pending_.clear();
  return {};
}

Outcome LaneRun::in_order(const Stretch& stretch) {
  while (next_ < stretch.count) {
    const int place = stretch.first + next_;
    const LaneTask& task = lane_->tasks[size_t(place)];
    if (task.remote || !task.waits.empty()) {
      const Outcome outcome = await(task);
      if (outcome.code != Code::ok) return outcome;
    }
    ++next_;
    const Outcome outcome = run({place});
    if (outcome.code != Code::ok) return outcome;
  }
  return {};
}

Outcome LaneRun::await(const LaneTask& task) {
  const Outcome agreed = agree();
  if (agreed.code != Code::ok) return agreed;
  if (!task.waits.empty()) {
    const Outcome delivered = deliver();
    if (delivered.code != Code::ok) return delivered;
  }
  for (const Wait& wait : task.waits) {
    const Outcome outcome = fabric_.wait(*copies_, wait.rank, wait.counter, nullptr);
    if (outcome.code != Code::ok) return outcome;
  }
  return {};
}

Outcome LaneRun::loose(const Stretch& stretch) {
  if (!begun_) {
    begun_ = true;
    waiting_.resize(size_t(stretch.count));
    for (int i = 0; i < stretch.count; ++i) waiting_[size_t(i)] = stretch.first + i;
    ready_.clear();
  }
  Signal& doorbell = fabric_.heap().control(fabric_.heap().rank()).doorbell;
  while (!waiting_.empty() || !ready_.empty()) {
    const uint64_t seen = doorbell.get();
    std::erase_if(waiting_, [&](int place) {
      const bool may = may_run(lane_->tasks[size_t(place)]);
      if (may) ready_.push_back(place);
      return may;
    });
    if (ready_.empty()) {
      Outcome outcome;
      if (!agreed_) {
        outcome = agree();
      } else {
        outcome = fabric_.wait_doorbell(*copies_, seen);
        // The bell also rings when an engine has failed.
        if (outcome.code == Code::ok && copies_->cancel.load()) outcome = {Code::cancelled, -1};
      }
      if (outcome.code != Code::ok) return outcome;
      continue;
    }
    const std::vector<int> next = lane_->next_run(ready_);
    std::erase_if(ready_, [&](int place) {
      return std::find(next.begin(), next.end(), place) != next.end();
    });
    const Outcome outcome = run(next);
    if (outcome.code != Code::ok) return outcome;
  }
  return {};
}

bool LaneRun::may_run(const LaneTask& task) {
  for (const int before : task.needs)
    if (!ended_[size_t(before)]) return false;
  if (task.waits.empty()) return true;
  if (!agreed_) return false;  // until then the counters may be those of another plan
  return std::all_of(task.waits.begin(), task.waits.end(), [&](const Wait& wait) {
    return fabric_.heap().control(wait.rank).counters[wait.counter].get() >= copies_->number;
  });
}

// Computes tasks as one, and ends them.
Outcome LaneRun::run(const std::vector<int>& run) {
  const LaneTask &first = lane_->tasks[size_t(run.front())], &last = lane_->tasks[size_t(run.back())];
  const int64_t rows = run.size() == 1 ? 0 : last.c[0].row + last.c[0].rows - first.c[0].row;
  const bool timed = copies_->record || fabric_.links().paced();
  started_ = timed ? now_ns() : 0;
  until_ = 0;
  const Outcome outcome = execute(first, rows);
  if (outcome.code != Code::ok) return outcome;
  computed_ = run;
  return hold();
}

Outcome LaneRun::execute(const LaneTask& task, int64_t rows) {
  switch (task.duty) {
    case Duty::products:
      return multiply(task, rows);
    case Duty::sum:
    case Duty::moves:
      return add(task);
    case Duty::nothing:
      break;
  }
  return {};
}

Outcome LaneRun::multiply(const LaneTask& task, int64_t rows) {
  for (size_t i = 0; i < task.c.size(); ++i) {
    Matrix a, b, c;
    if (!matrix(task.a[i], rows, a)) return {Code::corrupt, task.a[i].rank};
    if (!matrix(task.b[i], 0, b)) return {Code::corrupt, task.b[i].rank};
    if (!matrix(task.c[i], rows, c)) return {Code::corrupt, task.c[i].rank};
    if (task.transposed) a = a.transposed();
    if (c.rows == 0 || c.columns == 0) continue;
    if (a.columns != 0) {
      torch_product(lane_->dtype, a, b, c, task.accumulate);
    } else if (!task.accumulate) {
      zero(c, lane_->item);
    }
  }
  return {};
}

// A move is a sum of one source.
Outcome LaneRun::add(const LaneTask& task) {
  const auto matrices = [&](const std::vector<Area>& areas, int& wrong) {
    std::vector<Matrix> made(areas.size());
    for (size_t i = 0; i < areas.size(); ++i)
      if (!matrix(areas[i], 0, made[i])) wrong = areas[i].rank;
    return made;
  };
  int wrong = -1;
  std::vector<Matrix> sources = matrices(task.a, wrong), targets = matrices(task.c, wrong);
  if (wrong >= 0) return {Code::corrupt, wrong};
  if (task.duty == Duty::sum) {
    add_matrices(lane_->dtype, lane_->item, std::move(sources), std::move(targets));
  } else {
    for (size_t i = 0; i < sources.size(); ++i)
      add_matrices(lane_->dtype, lane_->item, {sources[i]}, {targets[i]});
  }
  return {};
}

// Waits until a paced link would have transferred what the computed tasks read or stored in place, and
// ends them.
Outcome LaneRun::hold() {
  Heap& heap = fabric_.heap();
  if (until_ == 0 && fabric_.links().paced()) {
    until_ = started_;
    for (const int place : computed_) {
      const LaneTask& task = lane_->tasks[size_t(place)];
      const auto touch = [&](const Area& area, bool stores) {
        if (area.rank == heap.rank()) return;
        const uint64_t bytes = uint64_t(area.rows * area.columns) * lane_->item;
        const int from = stores ? heap.rank() : area.rank, to = stores ? area.rank : heap.rank();
        until_ = std::max(until_, fabric_.reserve(from, to, bytes, started_));
      };
      for (const Area& area : task.a) touch(area, false);
      for (const Area& area : task.b) touch(area, false);
      for (const Area& area : task.c) touch(area, true);
    }
  }
  if (until_ > started_ && !lane_->one_launch) {
    const Outcome outcome = fabric_.hold(copies_->number, until_, copies_->deadline);
    if (outcome.code != Code::ok) return outcome;
  }
  const std::vector<int> computed = std::move(computed_);
  computed_.clear();
  if (copies_->record) {
    Span span{{}, started_, now_ns()};
    for (const int place : computed) span.tasks.push_back(lane_->tasks[size_t(place)].id);
    spans_.push_back(std::move(span));
  }
  Outcome outcome;
  for (const int place : computed) {
    const LaneTask& task = lane_->tasks[size_t(place)];
    ended_[size_t(place)] = true;
    if (lane_->one_launch && until_ > started_ && task.counter >= 0) {
      late_.emplace_back(until_, &task);
      continue;
    }
    const Outcome one = after(task);
    if (one.code != Code::ok) outcome = one;
  }
  while (!late_.empty() && late_.front().first <= now_ns()) {
    const LaneTask& task = *late_.front().second;
    late_.pop_front();
    const Outcome one = after(task);
    if (one.code != Code::ok) outcome = one;
  }
  return outcome;
}

// Signals all tasks whose stores are in transfer, each when the link would have delivered them. Before
// this rank waits, because its peers may wait for them.
Outcome LaneRun::deliver() {
  while (!late_.empty()) {
    const Outcome held = fabric_.hold(copies_->number, late_.front().first, copies_->deadline);
    if (held.code != Code::ok) return held;
    const LaneTask& task = *late_.front().second;
    late_.pop_front();
    const Outcome outcome = after(task);
    if (outcome.code != Code::ok) return outcome;
  }
  return {};
}

// Signals that a task has ended, as soon as the ranks are known to agree.
Outcome LaneRun::after(const LaneTask& task) {
  if (task.counter < 0) return {};
  Heap& heap = fabric_.heap();
  if (agreed_) {
    come_to(Point::lane_signal);
    heap.control(heap.rank()).counters[task.counter].set(copies_->number);
    for (const int rank : task.rings) heap.control(rank).doorbell.add_one();
    return {};
  }
  pending_.push_back(&task);
  for (int r = 0; r < heap.world(); ++r)
    if (heap.control(r).entered.get() < copies_->number) return {};
  return agree();
}

bool LaneRun::matrix(const Area& area, int64_t rows, Matrix& made) {
  if (rows == 0) rows = area.rows;
  const int64_t item = int64_t(lane_->item);
  if (area.rank == fabric_.heap().rank()) {
    const Matrix& whole = buffers_[size_t(area.buffer)];
    made = whole;
    made.data += (area.row * whole.row_stride + area.column * whole.column_stride) * item;
  } else {
    const uint64_t offset = uint64_t((area.row * area.pitch + area.column) * item);
    const int64_t last = rows == 0 ? 0 : (rows - 1) * area.pitch + area.columns;
    char* data = fabric_.heap().buffer(copies_->number, area.rank, area.buffer,
                                       offset + uint64_t(last * item));
    if (!data) return false;
    made = {data + offset, 0, 0, area.pitch, 1};
  }
  made.rows = rows;
  made.columns = area.columns;
  return true;
}

Outcome LaneCall::start(uint64_t call, int64_t patience, std::vector<Matrix> buffers,
                        const std::vector<uint64_t>& offsets) {
  fabric_.enter(call, signature_, offsets, blob_);
  call_ = std::make_shared<Call>();
  call_->program = copies_;
  call_->number = call;
  call_->deadline = later(own_time.now(), patience);
  for (const Matrix& buffer : buffers) call_->pointers.push_back(buffer.data);
  call_->signatures = signatures_;
  if (!copies_->lanes.empty()) fabric_.launch(call_, true);
  run_.emplace(fabric_, lane_, call_, std::move(buffers));
  return go();
}

Outcome LaneCall::go() {
  const Outcome outcome = run_->go();
  return outcome.code == Code::ok ? fabric_.done(call_->number) : outcome;
}

}  // namespace weft
