// Paced links: make one machine behave like a node whose links are slower than its memory.
//
// A link is a moment in shared memory at which it will be free. A transfer reserves time on every
// link of its path, and ends when its last reservation ends. A reservation is one compare-and-swap,
// so a process that is killed can never leave a link locked.
//
// All orders are relaxed: a moment protects no other memory, each compare-and-swap is a complete
// reservation, and signals order the bytes that are moved. The same holds for the numbers of `set`,
// which a Python thread writes while engines read them: each is used alone, and a reservation with
// an old and a new number is as valid as one just before or after.
#pragma once

#include <algorithm>
#include <atomic>

#include "heap.h"

namespace weft {

enum class Topology : int { mesh = 0, ring = 1, switched = 2 };

class Links {
 public:
  explicit Links(Heap& heap) : heap_(heap) {}

  // Bytes per second of one link in each direction; 0 is memory speed.
  void set(double bandwidth, int64_t latency_ns, Topology topology) {
    bandwidth_.store(bandwidth, kRelaxed);
    latency_ns_.store(latency_ns, kRelaxed);
    topology_.store(topology, kRelaxed);
  }

  bool paced() const { return bandwidth_.load(kRelaxed) > 0 || latency() > 0; }
  int64_t latency() const { return latency_ns_.load(kRelaxed); }

  // The most that one reservation should take, so that transfers on one link take turns.
  uint64_t piece_bytes() const {
    constexpr double kTurn = 2e-3, kMost = 0x1p62;
    const double bandwidth = bandwidth_.load(kRelaxed);
    if (bandwidth <= 0) return UINT64_MAX;
    return std::max<uint64_t>(uint64_t(std::min(bandwidth * kTurn, kMost)), 16 << 10);
  }

  // Reserves the path for these bytes, not before a moment; returns when the last byte has passed.
  int64_t reserve(int source, int target, uint64_t bytes, int64_t not_before) {
    const double bandwidth = bandwidth_.load(kRelaxed);
    if (bandwidth <= 0 || source == target) return not_before;
    const int64_t duration = int64_t(std::min(double(bytes) / bandwidth * 1e9, kLongest));
    const int world = heap_.world();
    switch (topology_.load(kRelaxed)) {
      case Topology::mesh:
        return take(source * world + target, duration, not_before);
      case Topology::switched:
        return std::max(take(source, duration, not_before),
                        take(world + target, duration, not_before));
      case Topology::ring: {
        const int ahead = (target - source + world) % world;
        const bool clockwise = ahead <= world - ahead;
        int64_t end = not_before;
        for (int at = source; at != target;) {
          const int next = (at + (clockwise ? 1 : world - 1)) % world;
          end = std::max(end, take((clockwise ? 0 : world) + at, duration, not_before));
          at = next;
        }
        return end;
      }
    }
    return not_before;
  }

 private:
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  static constexpr double kLongest = 0x1p62;  // of a transfer in ns: further than any deadline

  int64_t take(int link, int64_t duration, int64_t not_before) {
    std::atomic<int64_t>& free = heap_.shared().link_free[link];
    int64_t seen = free.load(kRelaxed), end;
    do {
      end = later(std::max(seen, not_before), duration);
    } while (!free.compare_exchange_weak(seen, end, kRelaxed));
    return end;
  }

  Heap& heap_;
  std::atomic<double> bandwidth_{0};
  std::atomic<int64_t> latency_ns_{0};
  std::atomic<Topology> topology_{Topology::mesh};
};

}  // namespace weft
