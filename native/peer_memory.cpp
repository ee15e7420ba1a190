#include "peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

#include "moving.h"

namespace weft {

bool read_peer(pid_t process, char* to, uint64_t from, uint64_t bytes) {
  while (bytes) {
    const iovec here{to, bytes}, there{reinterpret_cast<void*>(from), bytes};
    const ssize_t count = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (count <= 0) return false;
    to += count;
    from += uint64_t(count);
    bytes -= uint64_t(count);
  }
  return true;
}

bool read_peer_by(int threads, pid_t process, char* to, uint64_t from, uint64_t bytes) {
  std::atomic<bool> whole{true};
  by_threads(threads, bytes, [&](uint64_t at, uint64_t size) {
    // Relaxed: the end of the team's work orders it before the look below.
    if (!read_peer(process, to + at, from + at, size)) whole.store(false, std::memory_order_relaxed);
  });
  return whole.load(std::memory_order_relaxed);
}

bool is_ordinary(const char* data, uint64_t bytes) {
  const auto can_read = [](const char* at) {
    char byte;
    return read_peer(getpid(), &byte, reinterpret_cast<uint64_t>(at), 1);
  };
  return bytes != 0 && can_read(data) && can_read(data + bytes - 1);
}

}  // namespace weft
