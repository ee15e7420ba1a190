#include "channel.h"

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "moving.h"

namespace weft {
namespace {

constexpr int64_t kSlice = 50'000'000;      // how often a sleeper looks up, in ns
constexpr int64_t kNever = INT64_MAX;
constexpr uint64_t kStreamBytes = 4 << 20;  // results from this size on go past the cache
constexpr uint64_t kInRings = 1, kInPlace = 2;
constexpr char kMeant = 'm', kRefused = 'r', kWithdrawn = 'w';

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::reduce;
}

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"all_gather", "all_to_all", "reduce_scatter", "all_reduce",
                                   "broadcast",  "gather",     "scatter",        "reduce",
                                   "barrier",    "refused"};
  return names[int(kind)];
}

const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"float64", "float32", "float16", "bfloat16", "int8", "uint8",
                                   "int16",   "int32",   "int64",   "bool",     "bytes"};
  return names[int(dtype)];
}

const char* name_of(Reduction reduction) {
  constexpr const char* names[] = {"sum", "product", "min", "max", "and", "or", "xor", "average"};
  return names[int(reduction)];
}

std::string elements(const Job& job) {
  const auto count = [&](uint64_t bytes) { return std::to_string(bytes / std::max<uint64_t>(1, job.item)); };
  if (job.sizes.empty()) return "";
  const bool alike = std::all_of(job.sizes.begin(), job.sizes.end(),
                                 [&](uint64_t size) { return size == job.sizes[0]; });
  if (alike) return count(job.sizes[0]);
  std::string text = "[";
  for (size_t i = 0; i < job.sizes.size(); ++i) text += (i ? ", " : "") + count(job.sizes[i]);
  return text + "]";
}

// What a rank means, in the words of a mismatch.
std::string describe(const Job& job) {
  std::string text = name_of(job.kind);
  if (job.kind == Kind::barrier) return text;
  text += " (";
  if (reduces(job.kind)) text += std::string(name_of(job.reduction)) + " of ";
  text += job.uneven ? "uneven splits of " : elements(job) + " ";
  text += job.dtype == Dtype::other ? std::to_string(job.item) + "-byte elements" : name_of(job.dtype);
  if (job.kind == Kind::broadcast || job.kind == Kind::gather || job.kind == Kind::scatter ||
      job.kind == Kind::reduce)
    text += ", root " + std::to_string(job.root);
  if (job.chunk != kChunkBytes) text += ", chunks of " + std::to_string(job.chunk) + " bytes";
  return text + ")";
}

// Where the part of a rank begins if bytes are shared out by whole cache lines.
uint64_t part(uint64_t bytes, int rank, int world) {
  const uint64_t lines = (bytes + 63) / 64;
  return std::min(bytes, lines * uint64_t(rank) / uint64_t(world) * 64);
}

uint64_t total(const std::vector<Piece>& pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

// Where the sizes of all ranks' pieces begin in an uneven announcement: what it sends, what it
// expects, then the data.
const uint64_t* splits(const Announcement& a) { return reinterpret_cast<const uint64_t*>(a.data); }

}  // namespace

Channel::Channel(Fabric& fabric, int64_t spin_ns, bool crowded)
    : fabric_(fabric),
      rank_(fabric.heap().rank()),
      world_(fabric.heap().world()),
      area_{fabric.heap().channels(), world_},
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
  if (!spare_ || spare_.use_count() > 1) {
    spare_ = std::make_shared<Job>();
  } else {
    spare_->renew();
  }
  return spare_;
}

// -- the queue ------------------------------------------------------------------------------------

void Channel::submit(const std::shared_ptr<Job>& job, bool background) {
  std::lock_guard lock(mutex_);
  if (aborted_.load()) return conclude(*job, {Code::cancelled, -1});
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

// Works at the first job of the queue; where it is not over, it stays the first.
void Channel::run_first(std::unique_lock<std::mutex>& lock, bool patient) {
  std::shared_ptr<Job> job = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  lock.unlock();
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
  if (job.done.load() || job.phase != Job::Phase::start) return false;
  const auto same = [&](const std::shared_ptr<Job>& other) { return other.get() == &job; };
  if (std::none_of(queue_.begin(), queue_.end(), same)) return false;  // just begun
  job.chunk = kChunkBytes;
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
  for (const auto& job : queue_) conclude(*job, {Code::cancelled, -1});
  queue_.clear();
  changed_.wait(lock, [&] { return !busy_; });
}

// With the lock held, or by the one who works at it.
void Channel::conclude(Job& job, Outcome outcome) {
  job.outcome = outcome;
  job.phase = Job::Phase::ended;
  const bool fatal = outcome.code != Code::ok && outcome.code != Code::disagree &&
                     outcome.code != Code::withdrawn;
  if (fatal && !aborted_.exchange(true)) {
    of(rank_).failed.value.store(std::max<uint64_t>(1, job.number));
    for (int r = 0; r < world_; ++r) of(r).bell.ring();
    for (const auto& other : queue_) {
      other->outcome = {Code::cancelled, -1};
      other->phase = Job::Phase::ended;
      other->done.store(true);
    }
    queue_.clear();
  }
  job.done.store(true);
}

std::vector<int> Channel::late(const Job& job) {
  std::vector<int> ranks;
  for (int r = 0; r < world_; ++r) {
    if (r == rank_ || of(r).finished.value.load() >= job.number) continue;
    if (uint32_t(announced(job, r).stamp.load() >> 32) != uint32_t(job.number)) ranks.push_back(r);
  }
  return ranks;
}

// -- waiting --------------------------------------------------------------------------------------

// A peer that can no longer do its part, if any: one that died before one that only gave up.
Outcome Channel::check_peers(uint64_t number) {
  Outcome found;
  Heap& heap = fabric_.heap();
  for (int r = 0; r < world_; ++r) {
    const auto open = [&] { return of(r).finished.value.load() < number; };
    if (r == rank_ || !open()) continue;
    const bool left = heap.control(r).left.load();
    if (heap.ended(r) && !left && open()) return {Code::peer_lost, r};
    if (found.code != Code::ok) continue;
    if (left) {
      if (open()) found = {Code::peer_left, r};
    } else if (of(r).failed.value.load() != 0 || heap.control(r).failed.load() != 0) {
      if (open()) found = {Code::peer_failed, r};
    }
  }
  return found;
}

// Until `ready`, or the moment `until`, which is no failure. `ready` may do a piece of work.
template <class Ready>
Outcome Channel::await(Job& job, bool patient, int64_t until, Ready ready) {
  if (ready()) return {};
  int64_t now = now_ns();
  const int64_t spin_end = std::min(until, now + spin_ns_);
  while (now < spin_end) {
    if (crowded_) {
      sched_yield();
      if (ready()) return {};
    } else {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return {};
        spin_pause();
      }
    }
    now = now_ns();
  }
  Bell& bell = of(rank_).bell;
  int64_t look = now + kSlice / 4;
  for (;;) {
    if (now >= until) return {};
    const int64_t left = std::min({until, job.deadline, look}) - now;
    // A piece of work that `ready` did may have been the last: it must count.
    if (bell.sleep(std::clamp<int64_t>(left, 0, kSlice), ready) || ready()) return {};
    if (aborted_.load()) return {Code::cancelled, -1};
    now = now_ns();
    if (now < look && now < job.deadline) continue;
    look = now + kSlice;
    const Outcome peers = check_peers(job.number);
    if (ready()) return {};
    if (peers.code != Code::ok) return peers;
    if (now >= job.deadline) return {Code::timeout, -1};
    if (!patient) return {Code::again, -1};
  }
}

// -- one collective -------------------------------------------------------------------------------

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
        of(rank_).finished.value.store(job.number, std::memory_order_release);
        for (int r = 0; r < world_; ++r)
          if (r != rank_) of(r).bell.ring();
        return job.outcome;
    }
    if (outcome.code != Code::ok) return outcome;
  }
}

uint32_t Channel::signature(const Job& job) const {
  if (job.kind == Kind::refused) return 0;
  uint64_t hash = 1469598103934665603ull;
  const auto mix = [&](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  };
  mix(uint64_t(job.kind));
  mix(uint64_t(job.dtype) << 8 | job.item);
  mix(reduces(job.kind) ? uint64_t(job.reduction) : 0);
  mix(uint64_t(job.root) << 1 | job.uneven);
  mix(job.chunk);
  for (const uint64_t size : job.sizes) mix(size);
  return uint32_t(hash >> 32) | 1;
}

// Whether announcements hold all data. The same on all ranks, except for uneven splits, where each
// rank decides for its own.
bool Channel::small(const Job& job) const {
  uint64_t most = 0, sum = 0;
  for (const uint64_t size : job.sizes) {
    most = std::max(most, size);
    sum += size;
  }
  switch (job.kind) {
    case Kind::all_gather:
    case Kind::gather:
    case Kind::broadcast:
    case Kind::reduce:
      return most <= kSmallBytes;
    case Kind::all_reduce:  // every rank adds everything
      return most <= kSmallBytes && most * uint64_t(world_ - 1) <= 2 * kSmallBytes;
    case Kind::reduce_scatter:
    case Kind::scatter:
      return sum <= kSmallBytes;
    case Kind::all_to_all:
      if (job.uneven) return total(job.in) + 16 * uint64_t(world_) <= kSmallBytes;
      return most * uint64_t(world_) <= kSmallBytes;
    default:
      return true;
  }
}

// Whether the input can be read by peers where it is.
bool Channel::exposable(const Job& job) const {
  if (job.in.empty() || !fabric_.heap().contains(job.in[0].data)) return false;
  const char* next = job.in[0].data;
  for (const Piece& piece : job.in) {
    if (piece.bytes && piece.data != next) return false;
    next += piece.bytes;
  }
  return true;
}

void Channel::announce(Job& job) {
  job.number = ++number_;
  job.deadline = now_ns() + job.patience;
  const Links& links = fabric_.links();
  job.chunk = std::min<uint64_t>(kChunkBytes, links.piece_bytes() / 64 * 64);
  Announcement& own = of(rank_).announcements[job.number % 2];
  char* data = own.data;
  own.place = 0;
  const bool sends = job.kind == Kind::broadcast || job.kind == Kind::scatter ? job.root == rank_
                                                                              : !job.in.empty();
  if (job.kind != Kind::refused && world_ > 1) {
    if (job.uneven) {
      uint64_t* sizes = reinterpret_cast<uint64_t*>(data);
      for (const Piece& piece : job.in) *sizes++ = piece.bytes;
      for (const Piece& piece : job.out) *sizes++ = piece.bytes;
      data = reinterpret_cast<char*>(sizes);
    }
    if (small(job)) {
      if (sends)
        for (const Piece& piece : job.in) {
          move(data, piece.data, piece.bytes, false);
          data += piece.bytes;
        }
    } else {
      own.place = kInRings;
      job.exposed = sends && exposable(job);
      if (job.exposed) {
        const Heap& heap = fabric_.heap();
        own.place = uint64_t(job.in[0].data - heap.base(rank_)) * 4 + kInPlace;
      }
    }
  }
  own.stamp.store(job.number << 32 | signature(job), std::memory_order_release);
  for (int r = 0; r < world_; ++r)
    if (r != rank_) of(r).bell.ring();
}

Outcome Channel::agree(Job& job, bool patient) {
  int next = 0;
  const auto all_here = [&] {
    for (; next < world_; ++next)
      if (uint32_t(announced(job, next).stamp.load(std::memory_order_acquire) >> 32) !=
          uint32_t(job.number))
        return false;
    return true;
  };
  const Outcome outcome = await(job, patient, kNever, all_here);
  if (outcome.code != Code::ok) return outcome;
  const uint32_t meant = signature(job);
  bool same = meant != 0;
  for (int r = 0; r < world_; ++r) same &= uint32_t(announced(job, r).stamp.load()) == meant;
  if (!same) {
    job.phase = Job::Phase::say;
    return {};
  }
  bool here = true;
  for (int r = 0; r < world_; ++r) here &= announced(job, r).place == 0;
  if (job.uneven && world_ > 1) {
    for (int s = 0; s < world_; ++s)
      for (int t = 0; t < world_; ++t) {
        const uint64_t sent = splits(announced(job, s))[t];
        const uint64_t expected = splits(announced(job, t))[world_ + s];
        if (sent == expected) continue;
        const uint64_t item = std::max<uint64_t>(1, job.item);
        job.words = "ranks disagree on the splits of all_to_all: rank " + std::to_string(s) +
                    " sends " + std::to_string(sent / item) + " elements to rank " +
                    std::to_string(t) + ", which expects " + std::to_string(expected / item);
        job.outcome = {Code::disagree, -1};
        job.phase = Job::Phase::ended;
        return {};
      }
  }
  job.phase = here ? Job::Phase::deliver : Job::Phase::move;
  if (!here) prepare(job);
  return {};
}

// Ranks that disagree explain themselves, and all read the same.
Outcome Channel::say(Job& job, bool patient) {
  RankChannel& own = of(rank_);
  const uint64_t parity = job.number % 2;
  if (own.said.value.load() < job.number) {
    std::string text(1, job.withdrawn ? kWithdrawn : job.kind == Kind::refused ? kRefused : kMeant);
    text += job.kind == Kind::refused ? job.words : describe(job);
    std::strncpy(own.words[parity], text.c_str(), kWords - 1);
    own.words[parity][kWords - 1] = 0;
    own.said.value.store(job.number, std::memory_order_release);
    for (int r = 0; r < world_; ++r) of(r).bell.ring();
  }
  int next = 0;
  const auto all_said = [&] {
    for (; next < world_; ++next)
      if (of(next).said.value.load(std::memory_order_acquire) < job.number) return false;
    return true;
  };
  const Outcome outcome = await(job, patient, kNever, all_said);
  if (outcome.code != Code::ok) return outcome;
  job.outcome = {Code::disagree, -1};
  job.words.clear();
  for (int r = 0; r < world_ && job.words.empty(); ++r) {
    const char* text = of(r).words[parity];
    if (text[0] == kMeant) continue;
    const bool withdrawn = text[0] == kWithdrawn;
    if (withdrawn) job.outcome = {Code::withdrawn, r};
    job.words = "collective " + std::to_string(job.number) +
                (withdrawn ? std::string(", ") + (text + 1) + ", was cancelled by rank " +
                                 std::to_string(r)
                           : " was refused by rank " + std::to_string(r) + ": " + (text + 1));
  }
  for (int r = 1; r < world_ && job.words.empty(); ++r)
    if (std::strcmp(of(0).words[parity], of(r).words[parity]) != 0)
      job.words = "ranks disagree in collective " + std::to_string(job.number) + ": rank 0 calls " +
                  (of(0).words[parity] + 1) + ", rank " + std::to_string(r) + " calls " +
                  (of(r).words[parity] + 1);
  job.phase = Job::Phase::ended;
  return {};
}

// Takes small messages out of the announcements.
Outcome Channel::deliver(Job& job, bool patient) {
  Links& links = fabric_.links();
  if (job.due == 0) {
    const char* sources[kMaxWorld];
    uint64_t moved[kMaxWorld] = {};
    for (int s = 0; s < world_; ++s)
      sources[s] = announced(job, s).data + (job.uneven ? 16 * uint64_t(world_) : 0);
    const auto copy = [&](int s, const Piece& to, uint64_t offset, const Piece& own) {
      const char* from = s == rank_ ? own.data : sources[s] + offset;
      if (from != to.data && to.bytes) move(to.data, from, to.bytes, false);
      moved[s] = to.bytes;
    };
    const auto add = [&](const Piece& to, uint64_t offset, const Piece& own) {
      for (int s = 0; s < world_; ++s) {
        sources[s] = s == rank_ ? own.data : sources[s] + offset;
        moved[s] = to.bytes;
      }
      reduce(job.dtype, job.reduction, to.data, sources, world_, to.bytes);
    };
    uint64_t offset = 0;
    switch (job.kind) {
      case Kind::all_gather:
      case Kind::gather:
        for (int s = 0; s < int(job.out.size()); ++s) copy(s, job.out[s], 0, job.in[0]);
        break;
      case Kind::broadcast:
        copy(job.root, job.out[0], 0, job.in[0]);
        break;
      case Kind::scatter:
        for (int r = 0; r < rank_; ++r) offset += job.sizes[r];
        copy(job.root, job.out[0], offset, job.in.empty() ? Piece{} : job.in[rank_]);
        break;
      case Kind::all_to_all:
        for (int s = 0; s < world_; ++s) {
          offset = 0;
          for (int r = 0; r < rank_; ++r)
            offset += s == rank_ ? 0 : job.uneven ? splits(announced(job, s))[r] : job.sizes[0];
          copy(s, job.out[s], offset, job.in[rank_]);
        }
        break;
      case Kind::reduce_scatter:
        for (int r = 0; r < rank_; ++r) offset += job.sizes[r];
        add(job.out[0], offset, job.in[rank_]);
        break;
      case Kind::all_reduce:
        add(job.out[0], 0, job.in[0]);
        break;
      case Kind::reduce:
        if (job.root == rank_) add(job.out[0], 0, job.in[0]);
        break;
      default:
        break;
    }
    if (links.paced()) {
      const int64_t now = now_ns();
      for (int s = 0; s < world_; ++s)
        if (s != rank_ && moved[s])
          job.due = std::max(job.due, links.reserve(s, rank_, moved[s], now) + links.latency());
    }
  }
  if (job.due) {
    if (job.holds_core) {
      spin_until(job.due);
    } else {
      const Outcome outcome = await(job, patient, job.due, [&] { return now_ns() >= job.due; });
      if (outcome.code != Code::ok) return outcome;
    }
  }
  job.phase = Job::Phase::ended;
  return {};
}

// -- large messages -------------------------------------------------------------------------------

void Channel::send_pair(Job& job, int target, const char* from, uint64_t bytes) {
  if (job.exposed || bytes == 0) return;
  job.sends.push_back({{&area_.pair(rank_, target), &posted_[1 + target]}, from, bytes, nullptr,
                       nullptr, {target}});
}

void Channel::send_all(Job& job, const char* from, uint64_t bytes, char* also,
                       const uint64_t* made) {
  if (bytes == 0) return;
  std::vector<int> readers;
  for (int step = 1; step < world_; ++step) readers.push_back((rank_ + step) % world_);
  job.sends.push_back({{&area_.shared(rank_), &posted_[0]}, from, bytes, also, made, readers});
}

// offset: where the bytes begin in the source's input. to: null for a term of a sum.
void Channel::receive(Job& job, int source, bool shared, uint64_t offset, char* to,
                      uint64_t bytes) {
  if (bytes == 0) return;
  const uint64_t place = announced(job, source).place;
  Receiving r{};
  r.source = source;
  r.to = to;
  r.bytes = bytes;
  if (place & kInPlace) {
    r.direct = fabric_.heap().base(source) + place / 4 + offset;
  } else if (shared) {
    r.port = {&area_.shared(source), &taken_shared_[source]};
  } else {
    r.port = {&area_.pair(source, rank_), &taken_pair_[source]};
  }
  job.receives.push_back(r);
}

void Channel::prepare(Job& job) {
  job.streaming = total(job.out) >= kStreamBytes;
  const auto keep = [&](const Piece& from, const Piece& to) {
    if (from.data == to.data) return;
    job.own = from;
    job.own_to = to.data;
  };
  const auto before = [&](int rank) {
    uint64_t offset = 0;
    for (int r = 0; r < rank; ++r) offset += job.sizes[r];
    return offset;
  };
  // The next rank first: no two ranks begin with the same peer.
  const auto peers = [&](auto each) {
    for (int step = 1; step < world_; ++step) each((rank_ + step) % world_);
  };
  switch (job.kind) {
    case Kind::all_gather: {
      Piece& mine = job.out[rank_];
      char* also = mine.data == job.in[0].data ? nullptr : mine.data;
      if (job.exposed) {
        keep(job.in[0], mine);
      } else {
        send_all(job, job.in[0].data, job.in[0].bytes, also, nullptr);
      }
      peers([&](int s) { receive(job, s, true, 0, job.out[s].data, job.out[s].bytes); });
      break;
    }
    case Kind::broadcast:
      if (job.root != rank_) {
        receive(job, job.root, true, 0, job.out[0].data, job.out[0].bytes);
      } else {
        keep(job.in[0], job.out[0]);
        if (!job.exposed) send_all(job, job.in[0].data, job.in[0].bytes, nullptr, nullptr);
      }
      break;
    case Kind::gather:
      if (job.root != rank_) {
        send_pair(job, job.root, job.in[0].data, job.in[0].bytes);
      } else {
        keep(job.in[0], job.out[rank_]);
        peers([&](int s) { receive(job, s, false, 0, job.out[s].data, job.out[s].bytes); });
      }
      break;
    case Kind::scatter:
      if (job.root != rank_) {
        receive(job, job.root, false, before(rank_), job.out[0].data, job.out[0].bytes);
      } else {
        keep(job.in[rank_], job.out[0]);
        peers([&](int t) { send_pair(job, t, job.in[t].data, job.in[t].bytes); });
      }
      break;
    case Kind::all_to_all:
      keep(job.in[rank_], job.out[rank_]);
      if (announced(job, rank_).place != 0)
        peers([&](int t) { send_pair(job, t, job.in[t].data, job.in[t].bytes); });
      peers([&](int s) {
        const Announcement& theirs = announced(job, s);
        uint64_t offset = 0;
        for (int r = 0; r < rank_; ++r) offset += job.uneven ? splits(theirs)[r] : job.sizes[0];
        const Piece& to = job.out[s];
        if (theirs.place == 0) {  // its part of uneven splits is small, and here already
          move(to.data, theirs.data + 16 * uint64_t(world_) + offset, to.bytes, false);
        } else {
          receive(job, s, false, offset, to.data, to.bytes);
        }
      });
      break;
    case Kind::reduce_scatter:
      peers([&](int t) { send_pair(job, t, job.in[t].data, job.in[t].bytes); });
      job.own = job.in[rank_];
      job.sum = job.out[0];
      for (int s = 0; s < world_; ++s)
        if (s != rank_) receive(job, s, false, before(rank_), nullptr, job.sum.bytes);
      break;
    case Kind::reduce:
      if (job.root != rank_) {
        send_pair(job, job.root, job.in[0].data, job.in[0].bytes);
      } else {
        job.own = job.in[0];
        job.sum = job.out[0];
        for (int s = 0; s < world_; ++s)
          if (s != rank_) receive(job, s, false, 0, nullptr, job.sum.bytes);
      }
      break;
    case Kind::all_reduce: {
      // Each rank adds its part, and passes the sums on as they are made.
      const uint64_t bytes = job.in[0].bytes;
      const auto start = [&](int r) { return part(bytes, r, world_); };
      const auto end = [&](int r) { return r + 1 == world_ ? bytes : part(bytes, r + 1, world_); };
      peers([&](int t) { send_pair(job, t, job.in[0].data + start(t), end(t) - start(t)); });
      const uint64_t mine = start(rank_), size = end(rank_) - mine;
      job.own = {job.in[0].data + mine, size};
      job.sum = {job.out[0].data + mine, size};
      for (int s = 0; s < world_; ++s)
        if (s != rank_) receive(job, s, false, mine, nullptr, size);
      send_all(job, job.sum.data, size, nullptr, &job.summed);
      peers([&](int s) {
        if (end(s) == start(s)) return;
        Receiving r{};
        r.source = s;
        r.port = {&area_.shared(s), &taken_shared_[s]};
        r.to = job.out[0].data + start(s);
        r.bytes = end(s) - start(s);
        job.receives.push_back(r);
      });
      break;
    }
    default:
      break;
  }
}

bool Channel::send(Job& job, Sending& s) {
  if (s.at == s.bytes) return false;
  const uint64_t size = std::min(job.chunk, s.bytes - s.at), count = *s.port.count;
  if (s.made && *s.made < s.at + size) return false;
  Ring& ring = *s.port.ring;
  for (const int r : s.readers)
    if (ring.taken[r].value.load(std::memory_order_acquire) + kRingChunks <= count) return false;
  char* slot = ring.chunks[count % kRingChunks];
  if (s.also) {
    move_twice(s.also + s.at, slot, s.from + s.at, size, job.streaming);
  } else {
    move(slot, s.from + s.at, size, false);
  }
  ring.posted.value.store(count + 1, std::memory_order_release);
  *s.port.count = count + 1;
  s.at += size;
  for (const int r : s.readers) of(r).bell.ring();
  return true;
}

// Takes up the next chunk of a peer, and reserves its link for it.
bool Channel::arrive(Job& job, Receiving& r) {
  if (r.here || r.at == r.bytes) return false;
  if (r.direct) {
    r.here = r.direct + r.at;
  } else {
    Ring& ring = *r.port.ring;
    if (ring.posted.value.load(std::memory_order_acquire) <= *r.port.count) return false;
    r.here = ring.chunks[*r.port.count % kRingChunks];
  }
  const uint64_t size = std::min(job.chunk, r.bytes - r.at);
  Links& links = fabric_.links();
  if (links.paced()) {
    // Back-to-back chunks follow each other on the link's own clock: a late thread is not the link's.
    constexpr int64_t kLate = 3'000'000;
    const int64_t now = now_ns();
    const int64_t from = r.clock && now - r.clock <= kLate ? r.clock : now;
    r.clock = links.reserve(r.source, rank_, size, from);
    r.due = r.clock + (r.at + size == r.bytes ? links.latency() : 0);
  }
  if (r.to) move(r.to + r.at, r.here, size, job.streaming);
  return true;
}

void Channel::take(Job& job, Receiving& r) {
  r.at += std::min(job.chunk, r.bytes - r.at);
  r.here = nullptr;
  if (r.direct) return;
  *r.port.count += 1;
  r.port.ring->taken[rank_].value.store(*r.port.count, std::memory_order_release);
  of(r.source).bell.ring();
}

// Adds the next chunk of all terms, once all have come.
bool Channel::add(Job& job) {
  if (job.summed == job.sum.bytes) return false;
  const char* terms[kMaxWorld];
  int count = 0;
  const int64_t now = fabric_.links().paced() ? now_ns() : 0;
  for (const Receiving& r : job.receives) {
    if (r.to) continue;
    if (count == rank_) ++count;
    if (!r.here || r.due > now) return false;
    terms[count++] = r.here;
  }
  terms[rank_] = job.own.data + job.summed;
  const uint64_t size = std::min(job.chunk, job.sum.bytes - job.summed);
  reduce(job.dtype, job.reduction, job.sum.data + job.summed, terms, world_, size);
  for (Receiving& r : job.receives)
    if (!r.to) take(job, r);
  job.summed += size;
  return true;
}

bool Channel::keep_own(Job& job) {
  if (!job.own_to || job.own_at == job.own.bytes) return false;
  const uint64_t size = std::min(job.chunk, job.own.bytes - job.own_at);
  move(job.own_to + job.own_at, job.own.data + job.own_at, size, job.streaming);
  job.own_at += size;
  return true;
}

// One round over everything that can go on.
bool Channel::step(Job& job) {
  bool moved = false;
  const int64_t now = fabric_.links().paced() ? now_ns() : 0;
  for (Sending& s : job.sends) moved |= send(job, s);
  for (Receiving& r : job.receives) {
    moved |= arrive(job, r);
    if (r.here && r.to && r.due <= now) {
      take(job, r);
      moved = true;
    }
  }
  moved |= add(job);
  moved |= keep_own(job);
  return moved;
}

Outcome Channel::move_all(Job& job, bool patient) {
  const auto complete = [&] {
    for (const Sending& s : job.sends)
      if (s.at < s.bytes) return false;
    for (const Receiving& r : job.receives)
      if (r.at < r.bytes) return false;
    return job.summed == job.sum.bytes && (!job.own_to || job.own_at == job.own.bytes);
  };
  while (!complete()) {
    if (aborted_.load()) return {Code::cancelled, -1};
    if (step(job)) continue;
    int64_t next = kNever;
    for (const Receiving& r : job.receives)
      if (r.here && r.due) next = std::min(next, r.due);
    if (next != kNever && job.holds_core) {
      spin_until(std::min(next, now_ns() + kSlice));
      continue;
    }
    const Outcome outcome = await(job, patient, next, [&] { return step(job); });
    if (outcome.code != Code::ok) return outcome;
  }
  job.phase = job.exposed ? Job::Phase::release : Job::Phase::ended;
  if (job.exposed) {  // peers need not wait for one another's release
    of(rank_).finished.value.store(job.number, std::memory_order_release);
    for (int r = 0; r < world_; ++r) of(r).bell.ring();
  }
  return {};
}

// Waits until no peer reads this rank's input any more.
Outcome Channel::release(Job& job, bool patient) {
  int next = 0;
  const auto all_finished = [&] {
    for (; next < world_; ++next)
      if (next != rank_ && of(next).finished.value.load(std::memory_order_acquire) < job.number)
        return false;
    return true;
  };
  const Outcome outcome = await(job, patient, kNever, all_finished);
  if (outcome.code == Code::ok) job.phase = Job::Phase::ended;
  return outcome;
}

}  // namespace weft
