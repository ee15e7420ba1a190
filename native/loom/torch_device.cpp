// loom as torch sees it: device and stream guard, allocators, hooks, generator and graphs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "torch_loom.h"

namespace loom {

c10::Stream to_torch(const Stream* stream) {
  const int64_t id = stream->id < config().devices ? 0 : stream->id;
  const c10::Device device(kLoom, static_cast<c10::DeviceIndex>(stream->device));
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

Stream* from_torch(const c10::Stream& stream) {
  return stream_of(stream.device_index(), stream.id());
}

namespace {

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

c10::Device device_at(int index) {
  return c10::Device(kLoom, static_cast<c10::DeviceIndex>(index));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLoom; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(set_current_device(index_of(device)));
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (index_of(device) < config().devices) set_current_device(index_of(device));
  }
  c10::Stream getStream(c10::Device device) const override {
    return to_torch(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_torch(default_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return to_torch(new_stream(index_of(device), high ? -1 : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return to_torch(new_stream(index_of(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_torch(set_current_stream(from_torch(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return from_torch(stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return from_torch(stream)->capture != nullptr;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(config().devices);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return c10::DeviceCapability();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto mark = loom::record(from_torch(stream));
    auto* e = static_cast<Event*>(*event);
    std::lock_guard guard(e->lock);
    e->mark = std::move(mark);
  }
  static MarkPtr mark_of(void* event) {
    if (!event) return nullptr;
    auto* e = static_cast<Event*>(event);
    std::lock_guard guard(e->lock);
    return e->mark;
  }
  void block(void* event, const c10::Stream& stream) const override {
    loom::wait(from_torch(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return finished(mark_of(event)); }
  void synchronizeEvent(void* event) const override { synchronize(mark_of(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto a = mark_of(first), b = mark_of(second);
    TORCH_CHECK(a && b, "both events must be recorded before the time between them is asked for");
    TORCH_CHECK(a->done && b->done, "both events must be over: synchronize with them first");
    return static_cast<double>(b->time - a->time) * 1e-6;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_idle(from_torch(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(from_torch(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), from_torch(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct LoomAllocator final : c10::DeviceAllocator {
  static void free(void* pointer) { release(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* pointer = loom::allocate(bytes, device, current_stream(device));
    return {pointer, pointer, &free, device_at(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    auto* stream = current_stream(current_device());
    loom::copy(stream, target, bytes, source, bytes, bytes, 1, "copy");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), from_torch(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const auto found = memory_stats();
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& array, size_t current, size_t peak, size_t allocated, size_t freed) {
      auto& all = array[0];
      all.current = static_cast<int64_t>(current);
      all.peak = static_cast<int64_t>(peak);
      all.allocated = static_cast<int64_t>(allocated);
      all.freed = static_cast<int64_t>(freed);
    };
    set(stats.allocated_bytes, found.allocated, found.peak, found.total_allocated,
        found.total_freed);
    set(stats.active_bytes, found.allocated, found.peak, found.total_allocated, found.total_freed);
    set(stats.reserved_bytes, found.reserved, found.reserved, found.reserved, 0);
    set(stats.allocation, found.blocks, found.blocks, found.allocations,
        found.allocations - found.blocks);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {own_heap().bytes - memory_stats().reserved, own_heap().bytes};
  }
};

struct PinnedAllocator final : at::HostAllocator {
  // Copies keep the host's memory alive themselves.
  bool record_event(void* pointer, void*, c10::Stream) override { return is_pinned(pointer); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = allocate_pinned(bytes);
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

// Random numbers are made by the host's generator of the same seed, so that they are the host's.
struct LoomGenerator final : c10::GeneratorImpl {
  explicit LoomGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kLoom, device),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new LoomGenerator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device == current_device();
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(config().devices);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_current_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* generators = [] {
      auto* all = new std::vector<at::Generator>;
      for (int i = 0; i < config().devices; ++i)
        all->push_back(at::make_generator<LoomGenerator>(static_cast<c10::DeviceIndex>(i)));
      return all;
    }();
    return generators->at(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<LoomGenerator>(
        device < 0 ? static_cast<c10::DeviceIndex>(current_device()) : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current_device()); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return at::getHostAllocator(kLoom);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto* allocator = impl->allocator();
    TORCH_CHECK(allocator, "this storage cannot be resized");
    auto data = allocator->allocate(bytes);
    if (bytes && impl->nbytes())
      allocator->copy_data(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

struct LoomGraph final : at::GraphImplInterface {
  explicit LoomGraph(const at::GraphImplArgs&) : graph(new_graph()) {}
  ~LoomGraph() override { delete_graph(graph); }
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    static std::atomic<unsigned long long> graphs{0};
    id = ++graphs;
    loom::capture_begin(graph, current_stream(current_device()));
  }
  void capture_end() override { loom::capture_end(graph); }
  void instantiate() override {}
  void replay() override { loom::replay(graph, current_stream(current_device())); }
  void reset() override { loom::reset(graph); }
  at::MempoolId_t pool() const override { return {id, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
  Graph* graph;
  unsigned long long id = 0;
};

}  // namespace

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<LoomGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

const at::Generator& default_generator(int device) {
  return at::detail::getPrivateUse1Hooks().getDefaultGenerator(
      static_cast<c10::DeviceIndex>(device));
}

}  // namespace loom

namespace at {
REGISTER_GRAPH_IMPL(LOOM, loom::LoomGraph)  // torch looks for the device's name in capitals
}

#define LOOM_EXPORT extern "C" __attribute__((visibility("default")))

LOOM_EXPORT void loom_register() {
  static bool done = false;
  if (done) return;
  done = true;
  c10::SetAllocator(c10::kPrivateUse1, new loom::LoomAllocator);
  at::setHostAllocator(c10::kPrivateUse1, new loom::PinnedAllocator);
  at::RegisterPrivateUse1HooksInterface(new loom::Hooks);
}

LOOM_EXPORT void loom_manual_seed(int device, uint64_t seed) {
  auto generator = loom::default_generator(device);
  std::lock_guard guard(generator.mutex());
  generator.set_current_seed(seed);
}

LOOM_EXPORT uint64_t loom_rng_state(int device, void* target, uint64_t bytes) {
  const auto state = loom::host_generator(loom::default_generator(device)).get_state();
  if (target) std::memcpy(target, state.data_ptr(), std::min<uint64_t>(bytes, state.nbytes()));
  return state.nbytes();
}

LOOM_EXPORT void loom_set_rng_state(int device, const void* source, uint64_t bytes) {
  auto generator = loom::host_generator(loom::default_generator(device));
  auto state = generator.get_state().clone();
  std::memcpy(state.data_ptr(), source, std::min<uint64_t>(bytes, state.nbytes()));
  generator.set_state(state);
}
