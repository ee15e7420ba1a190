// How large messages move: in chunks through rings, or from the owner's memory.
#include <algorithm>

#include "channel.h"
#include "channel_wait.h"
#include "moving.h"

namespace weft {
namespace {

// Where the part of a rank begins if bytes are shared out by whole cache lines.
uint64_t part(uint64_t bytes, int rank, int world) {
  const uint64_t lines = (bytes + 63) / 64;
  return std::min(bytes, lines * uint64_t(rank) / uint64_t(world) * 64);
}

// A ring is empty when a collective begins: every rank has taken all chunks of the one before when it
// announces the next. So each has chunks of its own size, from the first line of the ring on, which is
// the most likely one to be in a cache.
uint64_t slots(const Job& job) { return kRingBytes / job.chunk; }

char* slot_of(const Job& job, Ring& ring, uint64_t at) {
  return ring.bytes + at / job.chunk % slots(job) * job.chunk;
}

}  // namespace

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
    const Heap& heap = fabric_.heap();
    const uint64_t at = place / 4 + offset;  // place / 4 < 2^62, and offsets are below that, too
    if (!heap.holds(at, bytes)) {
      job.corrupt = source;
      return;
    }
    r.direct = heap.base(source) + at;
    job.came[int(Way::in_place)] += bytes;
  } else {
    r.port = shared ? Port{&area_.shared(source), &taken_shared_[source]}
                    : Port{&area_.pair(source, rank_), &taken_pair_[source]};
    job.came[int(Way::ring)] += bytes;
  }
  job.receives.push_back(r);
}

// How this rank stores its chunks into rings.
void Channel::choose_stores(Job& job) {
  job.past = tuning_.past == Past::always;
  if (tuning_.past != Past::tried || fabric_.links().paced()) return;
  job.trial = StoreTrials::class_of(int(job.kind), message_of(job));
  job.past = trials_.next(job.trial);
  job.met = now_ns();
}

void Channel::prepare(Job& job) {
  job.streaming = total(job.out) >= tuning_.stream;
  choose_stores(job);
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
          const uint64_t at = job.uneven ? splits_bytes(world_) + offset : sizeof theirs.data;
          if (at + to.bytes > sizeof theirs.data) {
            job.corrupt = s;
            return;
          }
          move(to.data, theirs.data + at, to.bytes, false);
          job.came[int(Way::announcement)] += to.bytes;
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
        job.came[int(Way::ring)] += r.bytes;
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
    if (ring.taken[r].value.load(std::memory_order_acquire) + slots(job) <= count) return false;
  char* slot = slot_of(job, ring, s.at);
  const int64_t begun = job.record ? now_ns() : 0;
  by_threads(job.threads, size, [&](uint64_t at, uint64_t bytes) {
    char* const also = s.also ? s.also + s.at + at : nullptr;
    const char* const from = s.from + s.at + at;
    if (job.past) {
      move(slot + at, from, bytes, true);
      if (also) move(also, from, bytes, job.streaming);
    } else if (also) {
      move_twice(also, slot + at, from, bytes, job.streaming);
    } else {
      move_to_peer(slot + at, from, bytes);
    }
  });
  come_to(Point::channel_post);
  ring.posted.value.store(count + 1, std::memory_order_release);
  *s.port.count = count + 1;
  s.at += size;
  for (const int r : s.readers) of(r).bell.ring();
  if (job.record) job.mark(Act::stage, s.readers[0], size, begun);
  return true;
}

// Takes up the next chunk of a peer, and reserves its link for it.
bool Channel::arrive(Job& job, Receiving& r) {
  if (r.here || r.at == r.bytes) return false;
  if (job.record) r.begun = now_ns();
  if (r.direct) {
    r.here = r.direct + r.at;
  } else {
    Ring& ring = *r.port.ring;
    if (ring.posted.value.load(std::memory_order_acquire) <= *r.port.count) return false;
    r.here = slot_of(job, ring, r.at);
  }
  const uint64_t size = std::min(job.chunk, r.bytes - r.at);
  Links& links = fabric_.links();
  if (links.paced()) {
    // Back-to-back chunks follow each other on the link's own clock: a late thread is not the link's.
    constexpr int64_t kLate = 3'000'000;
    const int64_t now = now_ns();
    const int64_t from = r.clock && now - r.clock <= kLate ? r.clock : now;
    r.clock = links.reserve(r.source, rank_, size, from);
    r.due = later(r.clock, r.at + size == r.bytes ? links.latency() : 0);
  }
  if (r.to) move_by(job.threads, r.to + r.at, r.here, size, job.streaming);
  return true;
}

void Channel::take(Job& job, Receiving& r) {
  const uint64_t size = std::min(job.chunk, r.bytes - r.at);
  if (job.record && r.to) job.mark(Act::copy, r.source, size, r.begun);
  ++job.chunks;
  r.at += size;
  r.here = nullptr;
  if (r.direct) return;
  *r.port.count += 1;
  come_to(Point::channel_take);
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
  const int64_t begun = job.record ? now_ns() : 0;
  if (job.record)
    for (const Receiving& r : job.receives)
      if (!r.to) job.mark(Act::term, r.source, size, r.begun);
  reduce_by(job.threads, job.dtype, job.reduction, job.sum.data + job.summed, terms, world_, size);
  if (job.record) job.mark(Act::sum, rank_, size * uint64_t(world_), begun);
  for (Receiving& r : job.receives)
    if (!r.to) take(job, r);
  job.summed += size;
  return true;
}

bool Channel::keep_own(Job& job) {
  if (!job.own_to || job.own_at == job.own.bytes) return false;
  const uint64_t size = std::min(job.chunk, job.own.bytes - job.own_at);
  const int64_t begun = job.record ? now_ns() : 0;
  move_by(job.threads, job.own_to + job.own_at, job.own.data + job.own_at, size, job.streaming);
  if (job.record) job.mark(Act::keep, rank_, size, begun);
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
  // Nobody waits for this rank's own part, so it fills the time in which nothing else can go on.
  return moved || keep_own(job);
}

// Says that this rank reads no peer's memory any more, as soon as that is so: its own part of the
// result may still be on its way. What was read is sound if its owner had not given up by then.
Outcome Channel::say_released(Job& job) {
  job.released = true;
  for (const Receiving& r : job.receives)
    if (r.direct && of(r.source).failed.value.load() != 0) return {Code::peer_failed, r.source};
  come_to(Point::channel_released);
  of(rank_).finished.value.store(job.number, std::memory_order_release);
  for (int r = 0; r < world_; ++r)  // those wait for it whose input is read where it lies
    if (r != rank_ && (announced(job, r).place & kInPlace)) of(r).bell.ring();
  return {};
}

Outcome Channel::move_all(Job& job, bool patient) {
  const auto part_done = [&] {
    for (const Sending& s : job.sends)
      if (s.at < s.bytes) return false;
    for (const Receiving& r : job.receives)
      if (r.at < r.bytes) return false;
    return job.summed == job.sum.bytes;
  };
  int64_t look = now_ns() + kSlice;
  for (;;) {
    // The memory of a dead peer can still be read, and what a link delivers may come without an end.
    if (now_ns() >= look) {
      look = now_ns() + kSlice;
      const Outcome outcome = look_up(job, patient);
      if (outcome.code != Code::ok) return outcome;
    }
    if (!job.released && part_done()) {
      const Outcome outcome = say_released(job);
      if (outcome.code != Code::ok) return outcome;
    }
    if (job.released && (!job.own_to || job.own_at == job.own.bytes)) break;
    if (aborted_.load()) return {Code::cancelled, -1};
    if (step(job)) continue;
    int64_t next = kNever;
    for (const Receiving& r : job.receives)
      if (r.here && r.due) next = std::min(next, r.due);
    come_to(Point::channel_move);
    if (next != kNever && job.holds_core) {
      spin_until(std::min(next, now_ns() + kSlice));
      continue;
    }
    const Outcome outcome = await(job, patient, next, [&] { return step(job); });
    if (outcome.code != Code::ok) return outcome;
  }
  job.phase = job.exposed ? Job::Phase::release : Job::Phase::ended;
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
  come_to(Point::channel_release);
  const Outcome outcome = await(job, patient, kNever, all_finished);
  if (outcome.code == Code::ok) job.phase = Job::Phase::ended;
  return outcome;
}

}  // namespace weft
