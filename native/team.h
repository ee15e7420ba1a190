// A team of threads for one task, which is cut into parts that do not depend on the number of threads.
//
// The threads are those that torch's own operators run on: the OpenMP runtime that torch has loaded is
// asked for them. So a process has no second set of threads, the affinity that was set for torch
// (OMP_PLACES, GOMP_CPU_AFFINITY, KMP_AFFINITY) holds, and no thread of weft spins while torch
// computes. Where there is no such runtime, and in a forked child, whose threads are gone, the caller
// does all parts itself.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace weft {

// Calls part(data, i) for every i below `parts`, on up to `threads` threads, the caller's among them.
void run_parts(int threads, size_t parts, void (*part)(void* data, size_t i), void* data);

template <class Part>
void in_parts(int threads, size_t parts, const Part& part) {
  run_parts(
      threads, parts, [](void* data, size_t i) { (*static_cast<const Part*>(data))(i); },
      const_cast<void*>(static_cast<const void*>(std::addressof(part))));
}

// Whether a team can be had in this process.
bool has_team();

// How many threads torch's operators use if this thread calls them; 1 where there is no team.
int torch_threads();

// The same for weft's own work in this thread: 1 in any other thread than the process's first. A thread
// that only communicates must not start a second team, which would compete with the one that computes.
int team_threads();

// The cores of this process: those of its first thread, or of all threads of torch, if the OpenMP runtime
// has bound the first one to its own place (OMP_PROC_BIND). Empty where they cannot be found out.
cpu_set_t process_cores();

constexpr uint64_t kPartBytes = 128 << 10;  // to read or write: far more than it takes to hand a part out

// Calls block(first, units) for blocks of consecutive units, each with so many bytes to read, that
// make up `count`. One thread gets all of them at once.
template <class Block>
void in_blocks(int threads, uint64_t count, uint64_t unit_bytes, const Block& block) {
  if (count == 0) return;
  const uint64_t enough = unit_bytes ? (kPartBytes + unit_bytes - 1) / unit_bytes : kPartBytes;
  // Large blocks are better to read ahead in; four for each thread are enough to share the work out.
  const uint64_t share = count / (4 * uint64_t(threads));
  const uint64_t together = threads > 1 ? std::clamp(share, enough, 8 * enough) : count;
  in_parts(threads, (count + together - 1) / together, [&](size_t part) {
    const uint64_t first = part * together;
    block(first, std::min(together, count - first));
  });
}

}  // namespace weft
