// How the channel waits: it spins, then sleeps on its rank's bell, and looks after its peers.
#pragma once

#include <algorithm>

#include "channel.h"

namespace weft {

constexpr int64_t kNever = INT64_MAX;

// Until `ready`, or the moment `until`, which is no failure. `ready` may do a piece of work.
template <class Ready>
Outcome Channel::await(Job& job, bool patient, int64_t until, Ready ready) {
  if (ready()) return {};
  int64_t now = now_ns();
  const int64_t spin_end = std::min(until, now + spin_ns_);
  bool waits = !crowded_ || turns_.worth(now);
  while (waits && now < spin_end) {
    if (crowded_) {
      waits = turns_.give_way(now);
      if (ready()) return {};
      continue;
    }
    for (int i = 0; i < 32; ++i) {
      if (ready()) return {};
      spin_pause();
    }
    now = now_ns();
  }
  Bell& bell = of(rank_).bell;
  int64_t look = now + kSlice / 4;
  for (;;) {
    if (now >= until) return {};
    const int64_t left = std::min({until, own_time.on_clock(job.deadline), look}) - now;
    // A piece of work that `ready` did may have been the last: it must count.
    if (bell.sleep(std::clamp<int64_t>(left, 0, kSlice), ready) || ready()) return {};
    if (aborted_.load()) return {Code::cancelled, -1};
    now = now_ns();
    const bool too_late = own_time.at(now) >= job.deadline;
    if (now < look && !too_late) continue;
    look = now + kSlice;
    const Outcome peers = check_peers(job.number);
    if (ready()) return {};
    if (peers.code != Code::ok) return peers;
    if (too_late) return {Code::timeout, -1};
    if (!patient) return {Code::again, -1};
  }
}

// Until a moment of a link. With `cores` it spins, as a collective on cores occupies them.
inline Outcome Channel::hold(Job& job, bool patient, int64_t until) {
  while (job.holds_core) {
    const int64_t next = std::min(until, now_ns() + kSlice);
    spin_until(next);
    if (next == until) return {};
    const Outcome outcome = look_up(job, patient);
    if (outcome.code != Code::ok) return outcome;
  }
  return await(job, patient, until, [&] { return now_ns() >= until; });
}

// What ends a wait early, if anything: for one that does not sleep.
inline Outcome Channel::look_up(Job& job, bool patient) {
  if (aborted_.load()) return {Code::cancelled, -1};
  const Outcome peers = check_peers(job.number);
  if (peers.code != Code::ok) return peers;
  if (own_time.now() >= job.deadline) return {Code::timeout, -1};
  return {patient ? Code::ok : Code::again, -1};
}

}  // namespace weft
