// How a collective begins: announcements, agreement, and small messages, which are over with that.
#include <algorithm>
#include <cstring>

#include "channel.h"
#include "channel_wait.h"
#include "moving.h"

namespace weft {
namespace {

constexpr char kMeant = 'm', kRefused = 'r', kWithdrawn = 'w';
constexpr uint64_t kMostBytes = 1ull << 62;  // of one rank in one collective; sums of offsets fit

}  // namespace

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
  mix(tuning_.small);
  for (const uint64_t size : job.sizes) mix(size);
  for (const uint64_t header : job.expected) mix(header);
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
      return most <= tuning_.small;
    case Kind::all_reduce:  // every rank adds everything
      return most <= tuning_.small && most * uint64_t(world_ - 1) <= 2 * tuning_.small;
    case Kind::reduce_scatter:
    case Kind::scatter:
      return sum <= tuning_.small;
    case Kind::all_to_all:
      if (job.uneven) return total(job.in) + splits_bytes(world_) <= tuning_.small;
      return most * uint64_t(world_) <= tuning_.small;
    default:
      return true;
  }
}

// The most that one rank sends to another. The same on all ranks: 0 if only the sender knows it.
uint64_t Channel::message_of(const Job& job) const {
  if (job.uneven || job.sizes.empty()) return 0;
  const uint64_t most = *std::max_element(job.sizes.begin(), job.sizes.end());
  return job.kind == Kind::all_reduce ? most / uint64_t(world_) : most;
}

// A message moves in at least so many chunks, so that its reader begins before its writer ends.
// Small chunks cost more flags, large ones leave the innermost caches. The same on all ranks.
uint64_t Channel::chunk_of(const Job& job) const {
  constexpr uint64_t kParts = 4;
  if (job.uneven || job.sizes.empty()) return tuning_.most_chunk;
  const uint64_t lines = (message_of(job) / kParts + 63) / 64;
  return std::clamp(lines * 64, tuning_.least_chunk, tuning_.most_chunk);
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
  // Only one works at a time. Calls have their own numbers.
  const uint64_t number = job.call ? job.call : number_.load(std::memory_order_relaxed) + 1;
  number_.store(number, std::memory_order_relaxed);
  job.number.store(number, std::memory_order_relaxed);
  job.started = now_ns();
  job.deadline = later(own_time.at(job.started), job.patience);
  const Links& links = fabric_.links();
  const uint64_t piece = links.piece_bytes() / 64 * 64;
  job.chunk = chunk_of(job);
  job.bounded = !job.call && piece < job.chunk;  // in a call the headers agree, not the links
  if (job.bounded) job.chunk = piece;
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
          move_to_peer(data, piece.data, piece.bytes);
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
  come_to(Point::announce);
  own.stamp.store(job.number << 32 | signature(job), std::memory_order_release);
  for (int r = 0; r < world_; ++r)
    if (r != rank_) of(r).bell.ring();
}

// A rank whose splits cannot be: their sum is beyond any memory, or, where the data is said to be in the
// announcement, beyond that. -1 if there is none.
int Channel::overfull(const Job& job) const {
  for (int s = 0; s < world_; ++s) {
    const Announcement& theirs = announced(job, s);
    const uint64_t room = theirs.place == 0 ? sizeof theirs.data - splits_bytes(world_) : kMostBytes;
    uint64_t sum = 0;
    for (int t = 0; t < world_; ++t) {
      const uint64_t size = splits(theirs)[t];
      if (size > room - sum) return s;
      sum += size;
    }
  }
  return -1;
}

// Of a call: the headers of all ranks are as expected, and then every rank announces the same. Headers
// alone decide, so that all ranks decide alike. A rank that expected others has announced something
// else, and announces once more, so nothing but the same will do.
Outcome Channel::agree_on_call(Job& job, bool patient) {
  Heap& heap = fabric_.heap();
  const uint64_t wanted = job.number << 32 | signature(job);
  int here = 0, next = 0;
  bool differs = false;
  const auto all_here = [&] {
    for (; here < world_; ++here) {
      RankControl& peer = heap.control(here);
      if (peer.entered.get() < job.call) return false;  // its header was written before
      differs = peer.headers[job.call % 2].signature != job.expected[size_t(here)];
      if (differs) return true;
    }
    for (; next < world_; ++next)
      if (announced(job, next).stamp.load(std::memory_order_acquire) != wanted) return false;
    return true;
  };
  come_to(Point::serial_agree);
  const Outcome outcome = await(job, patient, kNever, all_here);
  if (outcome.code != Code::ok) return outcome;
  return differs ? Outcome{Code::disagree, -1} : Outcome{};
}

Outcome Channel::agree_on_job(Job& job, bool patient) {
  int next = 0;
  const auto all_here = [&] {
    for (; next < world_; ++next)
      if (uint32_t(announced(job, next).stamp.load(std::memory_order_acquire) >> 32) !=
          uint32_t(job.number))
        return false;
    return true;
  };
  come_to(Point::channel_agree);
  const Outcome outcome = await(job, patient, kNever, all_here);
  if (outcome.code != Code::ok) return outcome;
  const uint32_t meant = signature(job);
  bool same = meant != 0;
  for (int r = 0; r < world_; ++r) same &= uint32_t(announced(job, r).stamp.load()) == meant;
  if (!same) job.phase = Job::Phase::say;
  return {};
}

Outcome Channel::agree(Job& job, bool patient) {
  const Outcome outcome = job.call ? agree_on_call(job, patient) : agree_on_job(job, patient);
  if (outcome.code != Code::ok || job.phase == Job::Phase::say) return outcome;
  if (job.record) job.mark(Act::meet, rank_, 0, job.started);
  bool here = true;
  for (int r = 0; r < world_; ++r) here &= announced(job, r).place == 0;
  if (job.uneven && world_ > 1) {
    const int corrupt = overfull(job);
    if (corrupt >= 0) return {Code::corrupt, corrupt};
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
  return job.corrupt < 0 ? Outcome{} : Outcome{Code::corrupt, job.corrupt};
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
    come_to(Point::channel_say);
    own.said.value.store(job.number, std::memory_order_release);
    for (int r = 0; r < world_; ++r) of(r).bell.ring();
  }
  int next = 0;
  const auto all_said = [&] {
    for (; next < world_; ++next)
      if (of(next).said.value.load(std::memory_order_acquire) < job.number) return false;
    return true;
  };
  come_to(Point::channel_hear);
  const Outcome outcome = await(job, patient, kNever, all_said);
  if (outcome.code != Code::ok) return outcome;
  job.outcome = {Code::disagree, -1};
  job.words.clear();
  // What a rank said, without the letter that says how it means it.
  const auto said = [&](int r) {
    const char* text = of(r).words[parity] + 1;
    return std::string(text, strnlen(text, kWords - 1));
  };
  const std::string number = std::to_string(job.number);
  for (int r = 0; r < world_ && job.words.empty(); ++r) {
    const char means = of(r).words[parity][0];
    if (means == kMeant) continue;
    const std::string rank = std::to_string(r);
    if (means == kWithdrawn) {
      job.outcome = {Code::withdrawn, r};
      job.words = "collective " + number + ", " + said(r) + ", was cancelled by rank " + rank;
    } else {
      job.words = "collective " + number + " was refused by rank " + rank + ": " + said(r);
    }
  }
  for (int r = 1; r < world_ && job.words.empty(); ++r)
    if (said(r) != said(0))
      job.words = "ranks disagree in collective " + number + ": rank 0 calls " + said(0) +
                  ", rank " + std::to_string(r) + " calls " + said(r);
  job.phase = Job::Phase::ended;
  return {};
}

// Takes small messages out of the announcements.
Outcome Channel::deliver(Job& job, bool patient) {
  Links& links = fabric_.links();
  if (job.due == 0) {
    const int64_t begun = job.record ? now_ns() : 0;
    const bool streams = total(job.out) >= tuning_.stream;  // large only if there is one rank
    const char* sources[kMaxWorld];
    uint64_t moved[kMaxWorld] = {};
    for (int s = 0; s < world_; ++s)
      sources[s] = announced(job, s).data + (job.uneven ? splits_bytes(world_) : 0);
    const auto copy = [&](int s, const Piece& to, uint64_t offset, const Piece& own) {
      const char* from = s == rank_ ? own.data : sources[s] + offset;
      if (from != to.data && to.bytes) move_by(job.threads, to.data, from, to.bytes, streams);
      moved[s] = to.bytes;
    };
    const auto add = [&](const Piece& to, uint64_t offset, const Piece& own) {
      for (int s = 0; s < world_; ++s) {
        sources[s] = s == rank_ ? own.data : sources[s] + offset;
        moved[s] = to.bytes;
      }
      reduce_by(job.threads, job.dtype, job.reduction, to.data, sources, world_, to.bytes);
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
    for (int s = 0; s < world_; ++s) {
      if (!moved[s]) continue;
      if (s == rank_) {
        if (job.record && !reduces(job.kind)) job.mark(Act::keep, s, moved[s], begun);
        continue;
      }
      job.came[int(Way::announcement)] += moved[s];
      ++job.chunks;
      if (job.record) {
        if (reduces(job.kind)) job.mark(Act::sum, s, moved[s], begun);
        job.mark(reduces(job.kind) ? Act::term : Act::copy, s, moved[s], begun);
      }
    }
    if (links.paced()) {
      const int64_t now = now_ns();
      for (int s = 0; s < world_; ++s)
        if (s != rank_ && moved[s])
          job.due = std::max(job.due, later(links.reserve(s, rank_, moved[s], now), links.latency()));
    }
  }
  if (job.due) {
    come_to(Point::channel_deliver);
    const Outcome outcome = hold(job, patient, job.due);
    if (outcome.code != Code::ok) return outcome;
    const int64_t came = now_ns();  // by the link, not by the copy
    for (Mark& mark : job.marks)
      if (mark.act == Act::copy || mark.act == Act::term) mark.end = came;
  }
  job.phase = Job::Phase::ended;
  return {};
}

}  // namespace weft
