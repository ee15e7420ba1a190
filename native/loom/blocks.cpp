// The allocator: blocks of the heap, reused in stream order as on a GPU. What is fresh or freed
// holds poison (NaN in every floating type), written by the stream that owned the block before its
// next work: so a use on another stream that nobody recorded, and that this stream does not wait
// for either, reads poison, and is a race that the detector sees.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>

#include "queue.h"

namespace loom {

namespace {

constexpr int kPoison = 0xFF;
constexpr size_t kFirst = 4096;  // the heap's first page is not for blocks

struct Block {
  size_t offset = 0, bytes = 0, requested = 0;
  Stream* stream = nullptr;
  std::set<Stream*> uses;
  Capture* capture = nullptr;
  const char* freed_at = "";
  std::vector<MarkPtr> marks;  // its uses on other streams when it was freed
  // How often it was freed and is not poisoned yet. Its stream takes it before that, in its own
  // order; for all others it is free at 0, which is released after the poison was written.
  std::atomic<int> owed{0};
};

struct Heap {
  std::mutex lock;
  std::unordered_map<size_t, Block*> live;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> idle;
  std::map<size_t, size_t> extents;  // never used, or given back: offset -> bytes
  std::vector<Block*> leaving;       // freed, but other streams still use them
  std::vector<Block*> late;          // freed during a capture
  std::map<Stream*, std::vector<Op>> owed;  // poison of freed blocks, not issued yet
  std::map<Capture*, std::vector<Block*>> captured;  // allocated in one: they stay with its graph
  MemoryStats stats;
  Heap() { extents[kFirst] = own_heap().bytes - kFirst; }
};

Heap& heap() {
  static auto* value = new Heap;
  return *value;
}

// Eight sizes between a power of two and the next, so that freed blocks fit again.
size_t rounded(size_t bytes) {
  size_t step = 512;
  while (step * 16 < bytes) step *= 2;
  return std::max<size_t>((bytes + step - 1) / step * step, 512);
}

size_t take_extent(Heap& h, size_t bytes) {  // 0: none
  for (auto it = h.extents.begin(); it != h.extents.end(); ++it) {
    if (it->second < bytes) continue;
    const size_t offset = it->first, left = it->second - bytes;
    h.extents.erase(it);
    if (left) h.extents[offset + bytes] = left;
    return offset;
  }
  return 0;
}

void give_extent(Heap& h, size_t offset, size_t bytes) {
  auto next = h.extents.lower_bound(offset);
  if (next != h.extents.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = h.extents.erase(next);
  }
  if (next != h.extents.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  h.extents[offset] = bytes;
}

char* address(const Block& block) { return own_heap().device + block.offset; }

// After its last use: poison in stream order, then anybody on that stream may have it.
// That its uses elsewhere are over orders this memory only: whether the allocator saw it in time is
// chance, and nothing that a program may rely on.
void retire(Block* block) {
  Op op;
  for (auto& mark : block->marks) op.after.push_back(mark->id);
  block->marks.clear();
  op.kind = Op::Kind::host;
  op.name = "free";
  op.origin = block->freed_at;
  op.bytes = block->bytes;
  op.rects = {rect_of(address(*block), block->bytes, 1, 0, true)};
  ++block->owed;
  op.run = [at = readable(address(*block)), block] {
    std::memset(at, kPoison, block->bytes);
    block->owed.fetch_sub(1, std::memory_order_release);
  };
  std::lock_guard guard(heap().lock);
  heap().owed[block->stream].push_back(std::move(op));
  block->stream->owes = true;
  heap().idle[{block->stream, block->bytes}].push_back(block);
}

void retire_leaving() {
  std::vector<Block*> ready;
  {
    auto& h = heap();
    std::lock_guard guard(h.lock);
    auto over = [](Block* block) {
      return std::all_of(block->marks.begin(), block->marks.end(),
                         [](auto& mark) { return mark->done.load(); });
    };
    auto middle = std::partition(h.leaving.begin(), h.leaving.end(),
                                 [&](Block* block) { return !over(block); });
    ready.assign(middle, h.leaving.end());
    h.leaving.erase(middle, h.leaving.end());
  }
  for (auto* block : ready) retire(block);
}

void leave(Block* block) {
  if (block->uses.empty()) {
    retire(block);
    return;
  }
  for (auto* stream : block->uses) block->marks.push_back(record(stream));
  block->uses.clear();
  std::lock_guard guard(heap().lock);
  heap().leaving.push_back(block);
}

// A block that was freed on this stream; null if there is none.
Block* take_idle(Heap& h, Stream* stream, size_t bytes) {
  if (stream->capture) return nullptr;
  auto idle = h.idle.find({stream, bytes});
  if (idle == h.idle.end() || idle->second.empty()) return nullptr;
  auto* block = idle->second.back();
  idle->second.pop_back();
  return block;
}

// A block that no stream uses; null if there is no room.
Block* take_fresh(Heap& h, Stream* stream, size_t bytes) {
  const size_t offset = take_extent(h, bytes);
  if (!offset) return nullptr;
  auto* block = new Block;
  block->offset = offset;
  block->bytes = bytes;
  block->stream = stream;
  block->capture = stream->capture;
  if (block->capture) h.captured[block->capture].push_back(block);
  h.stats.reserved += bytes;
  std::memset(own_heap().readable + offset, kPoison, bytes);
  return block;
}

}  // namespace

void poison_freed(Stream* stream) {
  if (stream->capture || !stream->owes) return;
  check_health();
  // All under the lock, and `owes` last: another thread that finds nothing owed issues its work at
  // once, and that work must come after the poison.
  std::lock_guard guard(heap().lock);
  auto& owed = heap().owed[stream];
  for (auto& op : owed) {
    op.label = current_label();
    op.host = host_clock();
    enqueue(stream, std::move(op));
  }
  owed.clear();
  stream->owes = false;
}

namespace {

// Tells the detector that a block is in use again. A block that was freed on this stream is so
// after its poison; the others are fresh, and nothing of the device touches them now.
void log_allocated(const Block& block, Stream* stream, bool fresh) {
  if (!config().check) return;
  Op op;
  op.kind = Op::Kind::host;
  op.name = "alloc";
  op.bytes = block.bytes;
  op.rects = {rect_of(address(block), block.bytes, 1, 0, true)};
  op.run = [] {};
  if (!fresh) {
    issue(stream, std::move(op));
    return;
  }
  op.stream = stream;
  op.host = host_clock();
  log_op(op, now_ns(), now_ns());
}

}  // namespace

void* allocate(size_t bytes, int device, Stream* stream) {
  if (bytes == 0) return nullptr;
  (void)device;
  check_health();
  retire_leaving();
  poison_freed(stream);
  auto& h = heap();
  const size_t size = rounded(bytes);
  for (int attempt = 0;; ++attempt) {
    Block* block;
    bool fresh;
    {
      std::lock_guard guard(h.lock);
      block = take_idle(h, stream, size);
      fresh = !block;
      if (fresh) block = take_fresh(h, stream, size);
      if (block) {
        block->requested = bytes;
        h.live[block->offset] = block;
        h.stats.allocated += size;
        h.stats.total_allocated += size;
        h.stats.peak = std::max(h.stats.peak, h.stats.allocated);
        ++h.stats.blocks;
        ++h.stats.allocations;
      }
    }
    if (block) {
      log_allocated(*block, stream, fresh);
      return address(*block);
    }
    if (attempt || capturing())
      throw Error("loom: out of memory: " + std::to_string(bytes) +
                  " bytes are wanted; set WEFT_LOOM_HEAP to more MiB");
    empty_cache();
  }
}

void release(void* device) {
  if (!device) return;
  auto& h = heap();
  Block* block;
  {
    std::lock_guard guard(h.lock);
    auto it = h.live.find(static_cast<char*>(device) - own_heap().device);
    if (it == h.live.end()) return;
    block = it->second;
    h.live.erase(it);
    h.stats.allocated -= block->bytes;
    h.stats.total_freed += block->bytes;
    --h.stats.blocks;
  }
  if (block->capture) return;  // it belongs to its graph, which gives it back
  try {
    block->freed_at = origin_here();
    if (capturing()) {
      std::lock_guard guard(h.lock);
      h.late.push_back(block);
      return;
    }
    leave(block);
  } catch (const std::exception&) {
    // The device has failed: nothing of it is used again.
  }
}

void release_late_blocks() {
  std::vector<Block*> late;
  {
    std::lock_guard guard(heap().lock);
    late.swap(heap().late);
  }
  for (auto* block : late) leave(block);
}

void release_all_uses(void* device) {
  for (auto* stream : all_streams())
    if (stream->issued) record_use(device, stream);
  release(device);
}

void record_use(void* device, Stream* stream) {
  auto& h = heap();
  std::lock_guard guard(h.lock);
  auto it = h.live.find(static_cast<char*>(device) - own_heap().device);
  if (it != h.live.end() && it->second->stream != stream) it->second->uses.insert(stream);
}

size_t block_bytes(const void* device) {
  auto& h = heap();
  std::lock_guard guard(h.lock);
  auto it = h.live.find(static_cast<const char*>(device) - own_heap().device);
  return it == h.live.end() ? 0 : it->second->requested;
}

void empty_cache() {
  if (capturing()) return;
  synchronize_device();
  retire_leaving();
  for (auto* stream : all_streams()) poison_freed(stream);
  synchronize_device();
  auto& h = heap();
  std::lock_guard guard(h.lock);
  for (auto& [key, blocks] : h.idle) {
    std::vector<Block*> kept;
    for (auto* block : blocks) {
      // Freed by another thread since the device was waited for: its poison is still to come.
      if (block->owed.load(std::memory_order_acquire) > 0) {
        kept.push_back(block);
        continue;
      }
      // The pages go back to the system; read again they would be zero, and are poisoned anew.
      const size_t first = (block->offset + 4095) / 4096 * 4096;
      const size_t end = (block->offset + block->bytes) / 4096 * 4096;
      if (end > first)
        fallocate(heap_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(first), static_cast<off_t>(end - first));
      give_extent(h, block->offset, block->bytes);
      h.stats.reserved -= block->bytes;
      delete block;
    }
    blocks.swap(kept);
  }
}

void release_captured(Capture* capture) {
  synchronize_device();
  auto& h = heap();
  std::lock_guard guard(h.lock);
  for (auto* block : h.captured[capture]) {
    block->capture = nullptr;
    if (h.live.count(block->offset)) continue;  // a tensor still has it
    give_extent(h, block->offset, block->bytes);
    h.stats.reserved -= block->bytes;
    delete block;
  }
  h.captured.erase(capture);
}

MemoryStats memory_stats() {
  std::lock_guard guard(heap().lock);
  return heap().stats;
}

void reset_peak() {
  std::lock_guard guard(heap().lock);
  heap().stats.peak = heap().stats.allocated;
}

}  // namespace loom
