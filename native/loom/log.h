// The layout of a session's memory, which Python makes and reads as well (weft/loom/loom_session.py).
#pragma once

#include <unordered_map>

#include "core.h"

namespace loom {

struct Header {
  int32_t world;
  int32_t shared;      // several processes have it
  uint64_t log_bytes;  // of each rank
  std::atomic<int32_t> standstills;  // how often ranks found that none could go on
  char reserved[44];
};
static_assert(sizeof(Header) == 64);
static_assert(sizeof(Status) == 40);

constexpr uint64_t kLogBytes = uint64_t{256} << 20;  // pages that are never written cost nothing

inline uint64_t log_offset(int world, uint64_t log_bytes, int rank) {
  const uint64_t first = (sizeof(Header) + sizeof(Status) * world + 4095) / 4096 * 4096;
  return first + log_bytes * rank;
}

inline uint64_t session_bytes(int world, uint64_t log_bytes) {
  return log_offset(world, log_bytes, world);
}

struct Log {
  std::mutex lock;
  Header* header = nullptr;
  Status* statuses = nullptr;
  char* text = nullptr;
  std::unordered_map<const char*, int> strings;
  std::atomic<uint32_t> host{0};
  std::atomic<bool> on{false};
  std::atomic<OriginCallback> origin{nullptr};
  Status alone{};
};
Log& log();

const char* peer_memory(int rank, uint64_t offset);  // readable; null if it is not mapped
std::string own_log();
void clear_log();

}  // namespace loom
