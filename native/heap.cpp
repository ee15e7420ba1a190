#include "heap.h"

#include "channel_layout.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

constexpr uint64_t kPage = 4096;
// How much longer than a peer a rank waits for the same thing, in ns, before it says that the peer
// gave up. Ranks enter a call at different times, and the deadline of each tells better what is late.
constexpr int64_t kGrace = 5'000'000'000;

uint64_t round_up(uint64_t size, uint64_t to) { return (size + to - 1) / to * to; }

uint64_t calls_bytes(int world) {
  return round_up(sizeof(Control) + uint64_t(world) * sizeof(RankControl), kPage);
}

// All that a group needs, if that can be.
uint64_t heap_bytes(int world, uint64_t span) {
  if (world < 1 || world > kMaxWorld)
    throw std::runtime_error("a heap is for 1 to " + std::to_string(kMaxWorld) + " ranks, not " +
                             std::to_string(world));
  const uint64_t control = Heap::control_bytes(world);
  if (span % kPage != 0 || span > (uint64_t(INT64_MAX) - control) / uint64_t(world))
    throw std::runtime_error("a rank's part of the heap cannot have " + std::to_string(span) +
                             " bytes");
  return control + uint64_t(world) * span;
}

std::shared_ptr<Mapping> map_heap(int fd, int world, uint64_t span) {
  uint64_t bytes = 0;
  try {
    bytes = heap_bytes(world, span);
  } catch (...) {
    close(fd);
    throw;
  }
  return std::make_shared<Mapping>(fd, bytes);
}

}  // namespace

uint64_t Heap::control_bytes(int world) {
  return calls_bytes(world) + kTraffics * ChannelArea::bytes(world);
}

char* Heap::channels(int traffic) const {
  return channels_ + uint64_t(traffic) * ChannelArea::bytes(world_);
}

int Heap::create(int world, uint64_t span) { return Mapping::create(heap_bytes(world, span)); }

Heap::Heap(int fd, int rank, int world, uint64_t span)
    : Heap(map_heap(fd, world, span), rank, world, span) {}

Heap::Heap(std::shared_ptr<Mapping> mapping, int rank, int world, uint64_t span)
    : rank_(rank),
      world_(world),
      span_(span),
      owner_(getpid()),
      mapping_(std::move(mapping)),
      processes_(size_t(world), {-1, 0}) {
  if (rank < 0 || rank >= world || mapping_->bytes() != heap_bytes(world, span))
    throw std::runtime_error("rank " + std::to_string(rank) + " has no place in this heap");
  control_ = reinterpret_cast<Control*>(mapping_->base());
  channels_ = mapping_->base() + calls_bytes(world);
  data_ = mapping_->base() + control_bytes(world);
  free_[0] = span;
}

Heap::~Heap() {
  leave();
  for (const auto& [pidfd, pid] : processes_)
    if (pidfd >= 0) close(pidfd);
}

std::optional<std::string_view> Heap::words(uint64_t call, int rank) {
  const Header& header = control(rank).headers[call % 2];
  const uint32_t size = header.blob_size;
  if (size > kMaxBlob) return std::nullopt;
  return std::string_view(header.blob, size);
}

void Heap::leave() {
  if (forked()) return;  // a forked child ends without a word for its parent
  control(rank_).left.store(1);
  for (int r = 0; r < world_; ++r) control(r).doorbell.add_one();
}

// `failed` is stored last and loaded first (sequentially consistent, which includes release and
// acquire): whoever sees it also sees when and why. The doorbells wake those who sleep.
void Heap::fail(uint64_t call, Why why) {
  RankControl& own = control(rank_);
  own.failed_at.store(now_ns());
  own.why.store(why);
  own.failed.store(call);
  for (int r = 0; r < world_; ++r) control(r).doorbell.add_one();
}

uint64_t Heap::allocate(uint64_t size) {
  if (size > span_) throw std::bad_alloc();
  size = round_up(std::max<uint64_t>(size, 1), kPage);
  std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) continue;
    const uint64_t offset = it->first, left = it->second - size;
    free_.erase(it);
    if (left) free_[offset + size] = left;
    used_[offset] = size;
    return offset;
  }
  throw std::bad_alloc();
}

void Heap::free(uint64_t offset) {
  if (forked()) return;  // the memory is still its parent's
  // Peers may still read what a rank that has left did its part with; it goes with the last mapping.
  if (control(rank_).left.load()) return;
  std::lock_guard lock(mutex_);
  const auto used = used_.find(offset);
  if (used == used_.end()) return;
  uint64_t size = used->second;
  used_.erase(used);
  mapping_->discard(control_bytes(world_) + uint64_t(rank_) * span_ + offset, size);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_[offset] = size;
}

uint64_t Heap::allocated() const {
  std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [offset, size] : used_) total += size;
  return total;
}

bool is_dying(int pid) {
  char text[512];
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[std::max<ssize_t>(size, 0)] = 0;
  const char* name_end = std::strrchr(text, ')');
  return name_end && (name_end[2] == 'Z' || name_end[2] == 'X');
}

bool Heap::ended(int rank) const {
  const auto [pidfd, pid] = processes_[rank];
  if (pidfd < 0) return false;
  pollfd p{pidfd, POLLIN, 0};
  return poll(&p, 1, 0) > 0 || is_dying(pid);
}

Outcome Heap::check_peers(uint64_t call) {
  Outcome found;
  int known = 0;  // how near to the cause what was found is
  const auto keep = [&](int near, Code code, int rank) {
    if (near > known) found = {code, rank};
    known = std::max(known, near);
  };
  for (int r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    RankControl& peer = control(r);
    const uint64_t failed = peer.failed.load();
    const Why why = peer.why.load();
    bool gave_up = failed != 0 && failed <= call;
    // What was too late for a peer in this call is about to be too late for this rank.
    if (gave_up && why == Why::deadline && failed == call && peer.entered.get() >= call)
      gave_up = now_ns() - peer.failed_at.load() > kGrace;
    // A peer that has done its part of the call may end, or leave, without harm to it.
    const auto open = [&] { return peer.done.get() < call; };
    if (!gave_up && !open()) continue;
    const bool left = peer.left.load();
    if (ended(r) && !left && open()) return {Code::peer_lost, r};
    if (gave_up) {
      keep(why == Why::itself ? 3 : 1, Code::peer_failed, r);
    } else if (left && open()) {
      keep(2, Code::peer_left, r);
    }
  }
  return found;
}

Outcome Heap::look_after_peers(uint64_t call) {
  const int64_t now = now_ns();
  int64_t next = next_look_.load(std::memory_order_relaxed);
  if (now < next) return {};
  if (!next_look_.compare_exchange_strong(next, now + kSlice, std::memory_order_relaxed)) return {};
  return check_peers(call);
}

Outcome Heap::check_results(uint64_t call) {
  for (int r = 0; r < world_; ++r) {
    const uint64_t failed = control(r).failed.load();
    if (r == rank_ || failed == 0 || failed > call) continue;
    const Outcome peers = check_peers(call);
    return peers.code != Code::ok ? peers : Outcome{Code::peer_failed, r};
  }
  return {};
}

Outcome Heap::wait(Signal& signal, uint64_t target, uint64_t call, int64_t deadline,
                   int64_t spin_ns, const std::atomic<bool>* cancel, bool patient) {
  if (signal.spin(target, spin_ns)) return {};
  for (;;) {
    const int64_t left = deadline - own_time.now();
    if (signal.sleep(target, std::clamp<int64_t>(left, 0, kSlice))) return {};
    if (cancel && cancel->load()) return {Code::cancelled, -1};
    const Outcome peers = check_peers(call);
    if (signal.get() >= target) return {};
    if (peers.code != Code::ok) return peers;
    if (left <= 0) return {Code::timeout, -1};
    if (!patient) return {Code::again, -1};
  }
}

}  // namespace weft
