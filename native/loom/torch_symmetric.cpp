// torch.distributed._symmetric_memory on loom: every rank's block is in its own heap, and peers map
// each other's heaps. Signals and barriers are operations of the current stream.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>

#include "torch_loom.h"

namespace loom {
namespace {

namespace symm = c10d::symmetric_memory;

// What a rank tells the others of its block.
struct Card {
  int32_t rank, pid, file, reserved;
  uint64_t heap_bytes, offset, bytes, pad;
};

struct Symmetric final : symm::SymmetricMemory {
  std::vector<void*> buffers, pads;
  std::vector<int> global;
  size_t bytes = 0;
  int rank = 0;
  c10::Device device{kLoom, 0};
  void* lists = nullptr;  // the addresses again, in the device's memory

  std::vector<void*> get_buffer_ptrs() override { return buffers; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads; }
  void** get_buffer_ptrs_dev() override { return static_cast<void**>(lists); }
  void** get_signal_pad_ptrs_dev() override {
    return static_cast<void**>(lists) + buffers.size();
  }
  size_t get_buffer_size() override { return bytes; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank; }
  int get_world_size() override { return static_cast<int>(buffers.size()); }
  c10::Device get_device() override { return device; }
  const std::vector<int>& get_rank_to_global_rank() override { return global; }
  bool world_within_direct_access() override { return true; }

  // Where `from` signals `to`, in the pad of `to`.
  void* word(int from, int to, int channel) {
    const size_t at = static_cast<size_t>(channel) * buffers.size() + static_cast<size_t>(from);
    TORCH_CHECK(channel >= 0 && (at + 1) * 4 <= symm::get_signal_pad_size(), "channel ", channel,
                " does not fit into the signal pad");
    return static_cast<char*>(pads.at(static_cast<size_t>(to))) + at * 4;
  }
  void check_rank(int peer) {
    TORCH_CHECK(peer >= 0 && peer < get_world_size(), "there is no rank ", peer, " in the group");
  }
  void barrier(int channel, size_t) override {
    std::vector<void*> theirs, mine;
    for (int peer = 0; peer < get_world_size(); ++peer) {
      if (peer == rank) continue;
      theirs.push_back(word(rank, peer, channel));
      mine.push_back(word(peer, rank, channel));
    }
    loom::barrier(stream_here(), theirs, mine);
  }
  void put_signal(int to, int channel, size_t) override {
    check_rank(to);
    loom::put_signal(stream_here(), word(rank, to, channel), "put_signal");
  }
  void wait_signal(int from, int channel, size_t) override {
    check_rank(from);
    loom::take_signal(stream_here(), word(from, rank, channel), "wait_signal");
  }
};

struct SymmetricAllocator final : symm::SymmetricMemoryAllocator {
  struct Block {
    size_t bytes, pad;
    std::map<std::string, c10::intrusive_ptr<Symmetric>> met;
    std::string group;
  };
  std::mutex lock;
  std::map<char*, Block> blocks;
  std::map<std::string, int> meetings;

  void* alloc(size_t bytes, int device, const std::optional<std::string>& group) override {
    if (device < 0) device = current_device();
    const size_t pad = (bytes + 15) / 16 * 16;
    const size_t all = pad + symm::get_signal_pad_size();
    auto* at = static_cast<char*>(allocate(all, device, default_stream(device)));
    // Memory that peers map is ready when the call returns, whoever had it before.
    synchronize(default_stream(device));
    std::memset(readable(at + pad), 0, symm::get_signal_pad_size());
    std::lock_guard guard(lock);
    blocks[at] = {bytes, pad, {}, group.value_or("")};
    return at;
  }

  void free(void* pointer) override {
    {
      std::lock_guard guard(lock);
      auto it = blocks.find(static_cast<char*>(pointer));
      if (it == blocks.end()) return;
      blocks.erase(it);
    }
    release_all_uses(pointer);
  }

  std::map<char*, Block>::iterator find(void* pointer) {
    auto it = blocks.upper_bound(static_cast<char*>(pointer));
    if (it == blocks.begin()) return blocks.end();
    --it;
    const bool inside = static_cast<char*>(pointer) < it->first + std::max<size_t>(it->second.bytes, 1);
    return inside ? it : blocks.end();
  }

  size_t get_alloc_size(void* pointer) override {
    std::lock_guard guard(lock);
    auto it = find(pointer);
    TORCH_CHECK(it != blocks.end(), "this memory is not of symmetric memory");
    return it->second.bytes;
  }

  bool has_allocation(void* pointer) override {
    std::lock_guard guard(lock);
    return find(pointer) != blocks.end();
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* pointer, const std::optional<std::string>& name) override {
    std::unique_lock held(lock);
    auto it = find(pointer);
    if (it == blocks.end()) return nullptr;
    const std::string group = name.value_or(it->second.group);
    auto& known = it->second.met[group];
    if (known) return known;
    const auto base = it->first;
    const Card mine{config().rank, getpid(), heap_file(), 0, own_heap().bytes,
                    static_cast<uint64_t>(base - own_heap().device), it->second.bytes,
                    it->second.pad};
    const int meeting = meetings[group]++;
    held.unlock();
    auto met = meet(group, meeting, mine);
    held.lock();
    known = met;
    return met;
  }

  // As torch's own allocator: of the process group, or as set by hand.
  static symm::GroupInfo members(const std::string& group) {
    try {
      auto found = c10d::resolve_process_group(group);
      return {found->getRank(), found->getSize(), found->getStore()};
    } catch (const c10::Error&) {
      return symm::get_group_info(group);
    }
  }

  // A rank that is lost, or late beyond the deadline, is an error instead of a wait without end.
  template <class Ready>
  static void wait_for(const std::string& group, Ready&& ready) {
    const int64_t started = now_ns();
    for (int looks = 0; !ready(); ++looks) {
      usleep(looks < 100 ? 500 : 5000);
      if (looks % 100 != 99) continue;
      const int lost = lost_rank();
      TORCH_CHECK(lost < 0, "rank ", lost, " has ended before the rendezvous of group ", group);
      TORCH_CHECK(config().deadline <= 0 || now_ns() - started < config().deadline * 1e9,
                  "the rendezvous of group ", group, " took longer than ", config().deadline,
                  " s: not all ranks came");
    }
  }

  c10::intrusive_ptr<Symmetric> meet(const std::string& group, int meeting, const Card& mine) {
    WithoutGil without;
    const auto info = members(group);
    const std::string key = "loom/" + group + "/" + std::to_string(meeting) + "/";
    const char* bytes = reinterpret_cast<const char*>(&mine);
    log_host_enter(key);
    HostBlocked blocked;
    info.store->set(key + std::to_string(info.rank),
                    std::vector<uint8_t>(bytes, bytes + sizeof mine));
    auto met = c10::make_intrusive<Symmetric>();
    met->rank = info.rank;
    met->bytes = mine.bytes;
    met->device = c10::Device(kLoom, static_cast<c10::DeviceIndex>(current_device()));
    for (int rank = 0; rank < info.world_size; ++rank) {
      wait_for(group, [&] { return info.store->check({key + std::to_string(rank)}); });
      const auto data = info.store->get(key + std::to_string(rank));
      Card card;
      TORCH_CHECK(data.size() == sizeof card, "a peer's memory is of another kind");
      std::memcpy(&card, data.data(), sizeof card);
      TORCH_CHECK(card.bytes == mine.bytes, "rank ", rank, " has a block of ", card.bytes,
                  " bytes, but rank ", info.rank, " one of ", mine.bytes,
                  "; allocate the same size on all ranks, in the same order");
      const auto& region = map_peer(card.rank, card.pid, card.file, card.heap_bytes);
      met->buffers.push_back(region.device + card.offset);
      met->pads.push_back(region.device + card.offset + card.pad);
      met->global.push_back(card.rank);
    }
    // Nobody may leave before all have mapped all.
    info.store->add(key + "mapped", 1);
    wait_for(group, [&] { return info.store->add(key + "mapped", 0) >= info.world_size; });
    log_host_leave(key, met->global);
    const size_t length = met->buffers.size() * sizeof(void*);
    met->lists = allocate(2 * length, 0, default_stream(current_device()));
    synchronize(default_stream(current_device()));
    std::memcpy(readable(met->lists), met->buffers.data(), length);
    std::memcpy(readable(met->lists) + length, met->pads.data(), length);
    return met;
  }

  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return kLoom; }
  std::string name() override { return "LOOM"; }
};

void check_word(const at::Tensor& tensor, int64_t offset, int64_t count, int64_t value) {
  TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() && tensor.element_size() == 4,
              "a flat, contiguous tensor of uint32 is expected");
  TORCH_CHECK(offset >= 0 && count > 0 && offset + count <= tensor.numel(), "offset ", offset,
              " with count ", count, " exceeds the tensor's ", tensor.numel(), " items");
  TORCH_CHECK(value >= 0 && value <= 0xFFFFFFFFLL, "value must be a uint32, got ", value);
}

at::Tensor stream_write_value32(at::Tensor input, int64_t offset, int64_t value) {
  check_word(input, offset, 1, value);
  post(stream_here(), static_cast<char*>(input.data_ptr()) + offset * 4,
       static_cast<uint64_t>(value), 4, "stream_write_value32");
  return input;
}

at::Tensor memset32(at::Tensor input, int64_t offset, int64_t value, int64_t count) {
  check_word(input, offset, count, value);
  fill(stream_here(), static_cast<char*>(input.data_ptr()) + offset * 4,
       static_cast<uint32_t>(value), 4, static_cast<size_t>(count), "memset32");
  return input;
}

TORCH_LIBRARY_IMPL(symm_mem, PrivateUse1, m) {
  m.impl("stream_write_value32_", &stream_write_value32);
  m.impl("memset32_", &memset32);
}

}  // namespace
}  // namespace loom

extern "C" __attribute__((visibility("default"))) void loom_register_symmetric() {
  static bool done = false;
  if (done) return;
  done = true;
  auto allocator = c10::make_intrusive<loom::SymmetricAllocator>();
  loom::symm::register_availability("LOOM", allocator);
  loom::symm::register_allocator(loom::kLoom, allocator);
}
