// The heap of a rank: one file in memory, mapped twice. Tensors carry addresses of a mapping that
// nobody may touch, so that a stray access of the host ends at once, as on a GPU; workers use the
// other one. Peers map it in the same way.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "log.h"
#include "queue.h"

namespace loom {

namespace {

constexpr size_t kPage = 4096;
constexpr int kMaxRegions = 256;

struct HeapPage {  // the first page of every heap
  std::atomic<int32_t> left;  // its process ended in good order
};

struct Peer {
  int pid = 0, pidfd = -1;
};

struct Regions {
  std::mutex lock;
  Region list[kMaxRegions];
  Peer peers[kMaxRegions];
  std::atomic<int> count{0};
  int file = -1;
};

void map_twice(Region& region, int file, size_t bytes) {
  void* device = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
  void* use = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (device == MAP_FAILED || use == MAP_FAILED)
    throw Error("loom: a heap of " + std::to_string(bytes >> 20) + " MiB cannot be mapped: " +
                std::strerror(errno) + "; set WEFT_LOOM_HEAP to fewer MiB");
  madvise(use, bytes, MADV_DONTDUMP);
  region.device = static_cast<char*>(device);
  region.readable = static_cast<char*>(use);
  region.bytes = bytes;
}

Regions& regions() {
  static auto* value = [] {
    auto* r = new Regions;
    r->file = memfd_create("loom heap", MFD_CLOEXEC);
    if (r->file < 0 || ftruncate(r->file, static_cast<off_t>(config().heap_bytes)))
      throw Error(std::string("loom: no memory file: ") + std::strerror(errno));
    map_twice(r->list[0], r->file, config().heap_bytes);
    r->list[0].rank = config().rank;
    r->count = 1;
    return r;
  }();
  return *value;
}

HeapPage& page_of(const Region& region) { return *reinterpret_cast<HeapPage*>(region.readable); }

}  // namespace

const Region& own_heap() { return regions().list[0]; }

int heap_file() { return regions().file; }

// Without a lock, for it is asked at every operation and by the handler of faults: an entry is written
// once, before `count` is released with it, and only entries below the acquired count are read.
const Region* region_of(const void* device) {
  auto& r = regions();
  const auto* at = static_cast<const char*>(device);
  const int count = r.count.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i)
    if (at >= r.list[i].device && at < r.list[i].device + r.list[i].bytes) return &r.list[i];
  return nullptr;
}

char* readable(const void* device) {
  const auto* region = region_of(device);
  auto* at = static_cast<char*>(const_cast<void*>(device));
  return region ? region->readable + (at - region->device) : at;
}

Rect rect_of(const void* pointer, uint64_t width, uint64_t rows, uint64_t pitch, bool write) {
  const auto* region = region_of(pointer);
  Rect rect;
  rect.space = region ? region->rank : -1 - config().rank;
  rect.offset = region ? static_cast<const char*>(pointer) - region->device
                       : reinterpret_cast<uint64_t>(pointer);
  rect.width = width;
  rect.rows = rows;
  rect.pitch = rows > 1 ? pitch : 0;
  rect.write = write;
  return rect;
}

const Region& map_peer(int rank, int pid, int file, size_t bytes) {
  auto& r = regions();
  if (pid == getpid()) return r.list[0];
  std::lock_guard guard(r.lock);
  for (int i = 1; i < r.count; ++i)
    if (r.peers[i].pid == pid) return r.list[i];
  if (r.count == kMaxRegions) throw Error("loom: too many peers");
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0)
    throw Error("loom: the memory of rank " + std::to_string(rank) + " (process " +
                std::to_string(pid) + ") cannot be opened: " + std::strerror(errno));
  Region& region = r.list[r.count];
  map_twice(region, opened, bytes);
  close(opened);
  region.rank = rank;
  r.peers[r.count] = {pid, static_cast<int>(syscall(SYS_pidfd_open, pid, 0))};
  r.count.fetch_add(1, std::memory_order_release);
  return region;
}

int lost_peer() {
  auto& r = regions();
  const int count = r.count;
  int left = 0;
  for (int i = 1; i < count; ++i) {
    pollfd wanted{r.peers[i].pidfd, POLLIN, 0};
    const bool gone = r.peers[i].pidfd < 0 || poll(&wanted, 1, 0) != 0;
    if (gone && !page_of(r.list[i]).left) return r.list[i].rank;
    left += gone;
  }
  return count > 1 && left == count - 1 ? r.list[1].rank : -1;
}

const char* peer_memory(int rank, uint64_t offset) {
  auto& r = regions();
  for (int i = 1; i < r.count; ++i)
    if (r.list[i].rank == rank) return r.list[i].readable + offset;
  return nullptr;
}

void leave_heap() { page_of(own_heap()).left = 1; }

// ---- host memory that copies may use while the host goes on --------------------------------------

namespace {
std::mutex& pinned_lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<uintptr_t, size_t>& pinned() {
  static auto* map = new std::map<uintptr_t, size_t>;
  return *map;
}
}  // namespace

void* allocate_pinned(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* pointer = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!pointer) throw Error("loom: no host memory is left");
  std::lock_guard guard(pinned_lock());
  pinned()[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return pointer;
}

void free_pinned(void* pointer) {
  if (!pointer) return;
  {
    std::lock_guard guard(pinned_lock());
    pinned().erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
}

bool is_pinned(const void* pointer) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard guard(pinned_lock());
  auto next = pinned().upper_bound(at);
  if (next == pinned().begin()) return false;
  --next;
  return at < next->first + next->second;
}

}  // namespace loom
