#include "fused.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "team.h"

namespace weft {
namespace {

uint64_t at(const void* numbers, bool wide, uint64_t i) {
  return wide ? uint64_t(static_cast<const int64_t*>(numbers)[i])
              : uint64_t(int64_t(static_cast<const int32_t*>(numbers)[i]));
}

}  // namespace

std::tuple<int, uint64_t, uint64_t> Bags::check(const Kernels& kernels) const {
  for (uint64_t number = 0; number < tables_.size(); ++number) {
    const Table& t = tables_[number];
    uint64_t last = 0;
    for (uint64_t bag = 0; bag < t.num_bags; ++bag) {
      const uint64_t offset = at(t.offsets, t.wide_offsets, bag);
      if (bag == 0 && offset != 0) return {1, number, bag};
      if (int64_t(offset) < int64_t(last)) return {2, number, bag};
      if (offset > t.num_indices) return {3, number, bag};
      last = offset;
    }
    if (kernels.in_range(t.indices, t.wide_indices, t.num_indices, t.rows)) continue;
    for (uint64_t i = 0; i < t.num_indices; ++i)
      if (at(t.indices, t.wide_indices, i) >= t.rows) return {4, number, i};
  }
  return {0, 0, 0};
}

uint64_t Bags::bytes_of_bag() const {
  uint64_t bytes = 0;
  for (const Table& t : tables_)
    if (t.num_bags) bytes += t.num_indices * t.dim * size_of(t.type) / t.num_bags;
  return bytes;
}

void Bags::pool(const Kernels& kernels, uint64_t first, uint64_t bags, uint64_t column,
                uint64_t columns, char* target, uint64_t pitch, int threads) const {
  in_blocks(threads, bags, bytes_of_bag(), [&](uint64_t from, uint64_t count) {
    for (const Table& t : tables_) {
      const uint64_t begin = std::max(column, t.column);
      const uint64_t end = std::min(column + columns, t.column + t.dim);
      if (begin >= end) continue;
      kernels.pool(t, first + from, count, begin - t.column, end - begin,
                   target + from * pitch + (begin - column) * size_of(t.out), pitch);
    }
  });
}

void Bags::spread(const Kernels& kernels, size_t table, const char* bags, uint64_t pitch,
                  char* target, int threads) const {
  const Table& t = tables_[table];
  if (t.rows == 0 || t.dim == 0) return;
  // Visits are sorted by blocks of rows, whose sums stay in the cache while they are made. The sort
  // keeps the order of the visits of a row, so neither blocks nor slabs of bags change a bit.
  constexpr uint64_t kBlockBytes = 256 << 10, kMostBlocks = 4096, kMostSlabs = 16, kLeastBags = 128;
  const uint64_t row_bytes = t.dim * sizeof(float);
  int shift = 0;  // a block has 2^shift rows
  while ((t.rows - 1) >> shift && (row_bytes << (shift + 1) <= kBlockBytes ||
                                   (t.rows - 1) >> shift >= kMostBlocks))
    ++shift;
  const uint64_t blocks = ((t.rows - 1) >> shift) + 1;
  const uint64_t together = std::max(kLeastBags, (t.num_bags + kMostSlabs - 1) / kMostSlabs);
  const uint64_t slabs = (t.num_bags + together - 1) / together;
  const auto start = [&](uint64_t bag) {
    return bag < t.num_bags ? at(t.offsets, t.wide_offsets, bag) : t.num_indices;
  };
  const auto block = [&](uint64_t i) { return at(t.indices, t.wide_indices, i) >> shift; };
  // Per slab and block: how many visits there are, then where the next one goes.
  std::vector<uint64_t> places(slabs * blocks);
  in_parts(threads, slabs, [&](size_t slab) {
    uint64_t* const own = places.data() + slab * blocks;
    const uint64_t end = start(std::min((slab + 1) * together, t.num_bags));
    for (uint64_t i = start(slab * together); i < end; ++i) ++own[block(i)];
  });
  std::vector<uint64_t> first(blocks + 1);
  uint64_t total = 0;
  for (uint64_t b = 0; b < blocks; ++b) {
    first[b] = total;
    for (uint64_t slab = 0; slab < slabs; ++slab)
      total += std::exchange(places[slab * blocks + b], total);
  }
  first[blocks] = total;
  const std::unique_ptr<Visit[]> visits(new Visit[total]);
  in_parts(threads, slabs, [&](size_t slab) {
    uint64_t* const own = places.data() + slab * blocks;
    const uint64_t last = std::min((slab + 1) * together, t.num_bags);
    for (uint64_t bag = slab * together; bag < last; ++bag)
      for (uint64_t i = start(bag), end = start(bag + 1); i < end; ++i)
        visits[own[block(i)]++] = {i, bag};
  });
  in_parts(threads, blocks, [&](size_t b) {
    const uint64_t row = uint64_t(b) << shift, rows = std::min(uint64_t(1) << shift, t.rows - row);
    char* const out = target + row * t.dim * size_of(t.type);
    thread_local std::vector<float> wide;
    if (t.type != Type::f32 && wide.size() < rows * t.dim) wide.resize(rows * t.dim);
    float* sums = t.type == Type::f32 ? reinterpret_cast<float*>(out) : wide.data();
    std::memset(sums, 0, rows * row_bytes);
    kernels.spread(t, visits.get() + first[b], first[b + 1] - first[b], bags, pitch, row, sums);
    const float* made = sums;
    if (t.type != Type::f32) kernels.add(&made, 1, rows * t.dim, &out, 1, t.type);
  });
}

void multiply(const Kernels& kernels, int threads, const float* x, size_t x_pitch, size_t rows,
              const Weight& w, size_t column, size_t columns, float* out, size_t out_pitch) {
  const uint64_t units = (columns + kColumnsTogether - 1) / kColumnsTogether;
  const uint64_t unit_bytes = kColumnsTogether * w.k * size_of(w.type);
  in_blocks(threads, units, unit_bytes, [&](uint64_t first, uint64_t count) {
    const size_t from = first * kColumnsTogether;
    const size_t size = std::min<size_t>(count * kColumnsTogether, columns - from);
    kernels.multiply(x, x_pitch, rows, w, column + from, size, out + from, out_pitch);
  });
}

KernelRun::KernelRun(Fabric& fabric, std::shared_ptr<const Kernel> kernel, const Kernels& kernels,
                     uint64_t call, int64_t deadline, std::vector<char*> pointers,
                     std::vector<uint64_t> signatures, const Operands& operands, bool record)
    : fabric_(fabric),
      kernel_(std::move(kernel)),
      kernels_(kernels),
      call_(call),
      deadline_(deadline),
      pointers_(std::move(pointers)),
      signatures_(std::move(signatures)),
      operands_(operands),
      record_(record),
      agreed_(fabric.heap().world() == 1) {
  if (record_) spans_.resize(kernel_->steps.size());
}

Outcome KernelRun::go() {
  while (at_ < kernel_->steps.size()) {
    const Step& step = kernel_->steps[at_];
    const Outcome outcome = prepare(step);
    if (outcome.code != Code::ok) return outcome;
    if (step.work == Work::outside && outside_ == 0) {
      outside_ = now_ns();
      return {Code::outside};
    }
    int64_t since = outside_;
    if (since == 0 && (fabric_.links().paced() || record_)) since = now_ns();
    const Outcome executed = execute(step);
    if (executed.code != Code::ok) return executed;
    signal(step, since);
    outside_ = 0;
    if (record_) spans_[at_] = {since, now_ns()};
    ++at_;
  }
  const Outcome outcome = agree();  // a rank that has nothing to do must know that, too
  return outcome.code != Code::ok ? outcome : release(true);
}

Outcome KernelRun::agree() {
  if (agreed_) return {};
  const Outcome outcome = fabric_.agree(call_, signatures_, deadline_);
  agreed_ = outcome.code == Code::ok;
  return outcome;
}

// Before a step: the ranks must agree on the call, for even the first one touches peers; then what it
// waits for must have come. Whoever waits first lets go what its own peers may wait for.
Outcome KernelRun::prepare(const Step& step) {
  const Outcome agreed = agree();
  if (agreed.code != Code::ok) return agreed;
  Heap& heap = fabric_.heap();
  bool waiting = false;
  for (const Wait& wait : step.waits)
    waiting |= heap.control(wait.rank).counters[wait.counter].get() < call_;
  const Outcome released = release(waiting);
  if (released.code != Code::ok || !waiting) return released;
  come_to(Point::kernel_wait);
  for (const Wait& wait : step.waits) {
    Signal& signal = heap.control(wait.rank).counters[wait.counter];
    const Outcome outcome =
        heap.wait(signal, call_, call_, deadline_, fabric_.spin_ns(), nullptr, false);
    if (outcome.code != Code::ok) return outcome;
  }
  return {};
}

Outcome KernelRun::execute(const Step& step) {
  switch (step.work) {
    case Work::multiply:
      return multiply(step);
    case Work::pool:
      return pool(step);
    case Work::add:
      return add(step);
    case Work::wait:
    case Work::outside:
      break;
  }
  return {};
}

Outcome KernelRun::multiply(const Step& step) {
  if (!x_) {
    x_pitch_ = operands_.weight.k;
    if (kernel_->type == Type::f32) {
      x_ = reinterpret_cast<const float*>(operands_.x);
      x_pitch_ = operands_.x_pitch / sizeof(float);
    } else {
      widened_.resize(operands_.x_rows * x_pitch_ + 1);
      for (uint64_t row = 0; row < operands_.x_rows; ++row)
        kernels_.widen(operands_.x + row * operands_.x_pitch, kernel_->type, x_pitch_,
                       widened_.data() + row * x_pitch_);
      x_ = widened_.data();
    }
  }
  for (const Rectangle& piece : step.pieces) {
    char* target = address(piece.target, piece.rows, piece.columns * sizeof(float));
    if (!target) return {Code::corrupt, piece.target.rank};
    weft::multiply(kernels_, operands_.threads, x_, x_pitch_, piece.rows, operands_.weight,
                   piece.column, piece.columns, reinterpret_cast<float*>(target),
                   piece.target.pitch / sizeof(float));
  }
  return {};
}

Outcome KernelRun::pool(const Step& step) {
  for (const Rectangle& piece : step.pieces) {
    char* target = address(piece.target, piece.rows, piece.columns * size_of(kernel_->type));
    if (!target) return {Code::corrupt, piece.target.rank};
    operands_.bags->pool(kernels_, piece.first, piece.rows, piece.column, piece.columns, target,
                         piece.target.pitch, operands_.threads);
  }
  return {};
}

Outcome KernelRun::add(const Step& step) {
  std::vector<const float*> sources(step.sources.size());
  std::vector<char*> targets(step.targets.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    const End& end = step.sources[i];
    sources[i] =
        reinterpret_cast<const float*>(address(end, step.rows, step.columns * sizeof(float)));
    if (!sources[i]) return {Code::corrupt, end.rank};
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    const End& end = step.targets[i];
    targets[i] = address(end, step.rows, step.columns * size_of(kernel_->type));
    if (!targets[i]) return {Code::corrupt, end.rank};
  }
  const uint64_t row_bytes = step.columns * sources.size() * sizeof(float);
  in_blocks(operands_.threads, step.rows, row_bytes, [&](uint64_t first, uint64_t rows) {
    auto from = sources;
    auto to = targets;
    for (size_t i = 0; i < from.size(); ++i)
      from[i] += first * (step.sources[i].pitch / sizeof(float));
    for (size_t i = 0; i < to.size(); ++i) to[i] += first * step.targets[i].pitch;
    for (uint64_t row = 0; row < rows; ++row) {
      kernels_.add(from.data(), from.size(), step.columns, to.data(), to.size(), kernel_->type);
      for (size_t i = 0; i < from.size(); ++i) from[i] += step.sources[i].pitch / sizeof(float);
      for (size_t i = 0; i < to.size(); ++i) to[i] += step.targets[i].pitch;
    }
  });
  return {};
}

// Says that what a step stored is there: now, or on a paced link when it will have come through.
void KernelRun::signal(const Step& step, int64_t since) {
  Heap& heap = fabric_.heap();
  int64_t until = 0;
  if (fabric_.links().paced()) {
    const auto reserve = [&](const End& end, uint64_t bytes) {
      if (end.rank != heap.rank())
        until = std::max(until, fabric_.reserve(heap.rank(), end.rank, bytes, since));
    };
    const bool product = step.work == Work::multiply || step.work == Work::outside;
    const uint64_t item = product ? sizeof(float) : size_of(kernel_->type);
    for (const Rectangle& piece : step.pieces)
      reserve(piece.target, piece.rows * piece.columns * item);
    for (const End& target : step.targets) reserve(target, step.rows * step.columns * item);
  }
  if (step.counter < 0) return;
  if (until == 0) {
    come_to(Point::kernel_signal);
    heap.control(heap.rank()).counters[step.counter].set(call_);
  } else {
    pending_.push_back({until, step.counter});
  }
}

// Sets the counters of what has come through its link by now; with `all`, waits for all of them.
Outcome KernelRun::release(bool all) {
  if (pending_.empty()) return {};
  Heap& heap = fabric_.heap();
  RankControl& own = heap.control(heap.rank());
  while (!pending_.empty()) {
    const auto next = std::min_element(
        pending_.begin(), pending_.end(),
        [](const Pending& a, const Pending& b) { return a.until < b.until; });
    if (next->until > now_ns()) {
      if (!all) return {};
      const Outcome outcome = fabric_.hold(call_, next->until, deadline_);
      if (outcome.code != Code::ok) return outcome;
    }
    come_to(Point::kernel_release);
    own.counters[next->counter].set(call_);
    pending_.erase(next);
  }
  return {};
}

char* KernelRun::address(const End& end, uint64_t rows, uint64_t row_bytes) {
  Heap& heap = fabric_.heap();
  if (end.rank == heap.rank()) return pointers_[end.buffer] + end.offset;
  char* buffer = heap.buffer(call_, end.rank, end.buffer, end.reach(rows, row_bytes));
  return buffer ? buffer + end.offset : nullptr;
}

Outcome Repeat::start(Fabric& fabric, uint64_t call, int64_t patience, const Operands& operands,
                      std::vector<char*> pointers, const std::vector<uint64_t>& offsets) {
  fabric_ = &fabric;
  call_ = call;
  fabric.enter(call, signature_, offsets, blob_);
  run_.emplace(fabric, kernel_, kernels_, call, later(own_time.now(), patience), std::move(pointers),
               signatures_, operands, false);
  return go();
}

Outcome Repeat::go() {
  const Outcome outcome = run_->go();
  if (outcome.code == Code::again || outcome.code == Code::outside) return outcome;
  run_.reset();
  return outcome.code == Code::ok ? fabric_->done(call_) : outcome;
}

}  // namespace weft
