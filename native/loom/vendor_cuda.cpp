// The names of CUDA's runtime and driver over loom, with CUDA's arguments, flags and error codes, so
// that code which calls them by ctypes is executed without a GPU.
#include "vendor.h"

namespace v = loom::vendor;

namespace {

// CUstreamBatchMemOpParams: a union of 48 bytes that begins with the kind of operation.
struct MemOp {
  uint32_t operation;
  uint32_t padding;
  uint64_t address;
  uint64_t value;
  uint32_t flags;
  uint32_t rest[5];
};
static_assert(sizeof(MemOp) == 48);
enum : uint32_t { kWait32 = 1, kWrite32 = 2, kWait64 = 4, kWrite64 = 5, kBarrier = 6, kFlush = 3 };

// CUDA_MEMCPY2D
struct Copy2D {
  size_t source_x, source_y;
  uint32_t source_type;
  const void* source_host;
  uint64_t source_device;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  uint32_t target_type;
  void* target_host;
  uint64_t target_device;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};

void* at(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

LOOM_EXPORT int cudaMemcpyAsync(void* target, const void* source, size_t bytes, int kind, void* s) {
  return v::copy_2d(target, bytes, source, bytes, bytes, 1, kind, s, "cudaMemcpyAsync");
}
LOOM_EXPORT int cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                                  size_t source_pitch, size_t width, size_t height, int kind,
                                  void* s) {
  return v::copy_2d(target, target_pitch, source, source_pitch, width, height, kind, s,
                    "cudaMemcpy2DAsync");
}
LOOM_EXPORT int cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes,
                                    void* s) {
  return v::copy_2d(target, bytes, source, bytes, bytes, 1, 3, s, "cudaMemcpyPeerAsync");
}
LOOM_EXPORT int cudaMemsetAsync(void* target, int value, size_t bytes, void* s) {
  return v::set_memory(target, static_cast<unsigned>(value), 1, bytes, s, "cudaMemsetAsync");
}
LOOM_EXPORT int cudaStreamIsCapturing(void* s, int* status) { return v::is_capturing(s, status); }
LOOM_EXPORT int cudaStreamSynchronize(void* s) { return v::synchronize_stream(s); }
LOOM_EXPORT int cudaStreamQuery(void* s) { return v::query_stream(s); }
LOOM_EXPORT int cudaStreamWaitEvent(void* s, void* event, unsigned) {
  return v::wait_event(s, event);
}
LOOM_EXPORT int cudaStreamCreateWithFlags(void** s, unsigned) { return v::make_stream(s, 0); }
LOOM_EXPORT int cudaStreamCreateWithPriority(void** s, unsigned, int priority) {
  return v::make_stream(s, priority);
}
LOOM_EXPORT int cudaStreamDestroy(void* s) { return v::synchronize_stream(s); }
LOOM_EXPORT int cudaEventCreateWithFlags(void** event, unsigned) { return v::create_event(event); }
LOOM_EXPORT int cudaEventRecord(void* event, void* s) { return v::record_event(event, s); }
LOOM_EXPORT int cudaEventQuery(void* event) { return v::query_event(event); }
LOOM_EXPORT int cudaEventSynchronize(void* event) { return v::synchronize_event(event); }
LOOM_EXPORT int cudaEventElapsedTime(float* ms, void* first, void* second) {
  return v::elapsed(ms, first, second);
}
LOOM_EXPORT int cudaEventDestroy(void* event) {
  delete static_cast<loom::Event*>(event);
  return 0;
}
LOOM_EXPORT int cudaLaunchHostFunc(void* s, void (*function)(void*), void* argument) {
  return v::launch_host(s, function, argument, "cudaLaunchHostFunc");
}
LOOM_EXPORT int cudaGetDevice(int* device) { return v::get_device(device); }
LOOM_EXPORT int cudaSetDevice(int device) { return v::set_device(device); }
LOOM_EXPORT int cudaGetDeviceCount(int* count) { return v::count_devices(count); }
LOOM_EXPORT int cudaDeviceSynchronize() { return v::synchronize_all(); }
LOOM_EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return v::can_access_peer(can, device, peer);
}
LOOM_EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 16: *value = loom::config().units; return 0;      // multiprocessors
    case 40: *value = loom::config().world; return 0;      // copy engines
    case 39: case 78: *value = 1; return 0;                // priorities
    case 132: *value = 0; return 0;                        // multicast
    default: return v::said(v::kInvalidValue);
  }
}
LOOM_EXPORT int cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }
LOOM_EXPORT int cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
LOOM_EXPORT int cudaGetLastError() { return v::last_error(true); }
LOOM_EXPORT int cudaPeekAtLastError() { return v::last_error(false); }
LOOM_EXPORT const char* cudaGetErrorString(int code) { return v::error_text(code); }
LOOM_EXPORT const char* cudaGetErrorName(int code) {
  return loom::intern(std::string("cuda") + v::error_name(code));
}
LOOM_EXPORT int cudaMalloc(void** pointer, size_t bytes) { return v::make_memory(pointer, bytes); }
LOOM_EXPORT int cudaFree(void* pointer) { return v::free_memory(pointer); }
LOOM_EXPORT int cudaIpcGetMemHandle(v::Handle* handle, void* pointer) {
  return v::get_handle(handle, pointer);
}
LOOM_EXPORT int cudaIpcOpenMemHandle(void** pointer, v::Handle handle, unsigned) {
  return v::open_handle(pointer, handle);
}
LOOM_EXPORT int cudaIpcCloseMemHandle(void*) { return 0; }

// ---- the driver ----------------------------------------------------------------------------------

LOOM_EXPORT int cuInit(unsigned) { return 0; }
LOOM_EXPORT int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
LOOM_EXPORT int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
LOOM_EXPORT int cuDeviceGetCount(int* count) { return v::count_devices(count); }
LOOM_EXPORT int cuCtxGetDevice(int* device) { return v::get_device(device); }
LOOM_EXPORT int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return v::can_access_peer(can, device, peer);
}
// A context is the number of its device, from 1 on.
LOOM_EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < 0 || device >= loom::config().devices) return v::said(101);
  *context = at(static_cast<uint64_t>(device) + 1);
  return 0;
}
LOOM_EXPORT int cuCtxGetCurrent(void** context) {
  *context = at(static_cast<uint64_t>(loom::current_device()) + 1);
  return 0;
}
LOOM_EXPORT int cuCtxSetCurrent(void* context) {
  return v::set_device(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
}
LOOM_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return v::priority_range(least, greatest);
}
LOOM_EXPORT int cuStreamCreateWithPriority(void** s, unsigned flags, int priority) {
  return flags > 1 ? v::said(v::kInvalidValue) : v::make_stream(s, priority);
}
LOOM_EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  return v::exchange_capture_mode(mode);
}
LOOM_EXPORT int cuDeviceGetName(char* name, int length, int) {
  std::strncpy(name, "loom", static_cast<size_t>(length));
  return 0;
}
LOOM_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  // Streams can write and wait for words of 32 and 64 bits, and wait for NOR.
  if (attribute >= 92 && attribute <= 94) { *value = 1; return 0; }
  if (attribute == 122 || attribute == 123) { *value = 1; return 0; }
  return cudaDeviceGetAttribute(value, attribute, device);
}
LOOM_EXPORT int cuStreamWaitValue32_v2(void* s, uint64_t word, uint32_t value, unsigned flags) {
  return v::wait_value(s, at(word), value, flags, 4, "cuStreamWaitValue32");
}
LOOM_EXPORT int cuStreamWaitValue64_v2(void* s, uint64_t word, uint64_t value, unsigned flags) {
  return v::wait_value(s, at(word), value, flags, 8, "cuStreamWaitValue64");
}
LOOM_EXPORT int cuStreamWriteValue32_v2(void* s, uint64_t word, uint32_t value, unsigned flags) {
  return v::write_value(s, at(word), value, flags, 4, "cuStreamWriteValue32");
}
LOOM_EXPORT int cuStreamWriteValue64_v2(void* s, uint64_t word, uint64_t value, unsigned flags) {
  return v::write_value(s, at(word), value, flags, 8, "cuStreamWriteValue64");
}
LOOM_EXPORT int cuStreamWaitValue32(void* s, uint64_t word, uint32_t value, unsigned flags) {
  return cuStreamWaitValue32_v2(s, word, value, flags);
}
LOOM_EXPORT int cuStreamWriteValue32(void* s, uint64_t word, uint32_t value, unsigned flags) {
  return cuStreamWriteValue32_v2(s, word, value, flags);
}
LOOM_EXPORT int cuStreamBatchMemOp_v2(void* s, unsigned count, MemOp* operations, unsigned flags) {
  if (flags || (count && !operations)) return v::said(v::kInvalidValue);
  for (unsigned i = 0; i < count; ++i) {
    const auto& o = operations[i];
    int code = v::kSuccess;
    switch (o.operation) {
      case kWait32:
        code = cuStreamWaitValue32_v2(s, o.address, static_cast<uint32_t>(o.value), o.flags);
        break;
      case kWait64: code = cuStreamWaitValue64_v2(s, o.address, o.value, o.flags); break;
      case kWrite32:
        code = cuStreamWriteValue32_v2(s, o.address, static_cast<uint32_t>(o.value), o.flags);
        break;
      case kWrite64: code = cuStreamWriteValue64_v2(s, o.address, o.value, o.flags); break;
      case kBarrier: case kFlush: break;  // words are ordered on a stream already
      default: return v::said(v::kInvalidValue);
    }
    if (code) return code;
  }
  return v::kSuccess;
}
LOOM_EXPORT int cuMemsetD32Async(uint64_t target, unsigned value, size_t count, void* s) {
  return v::set_memory(at(target), value, 4, count, s, "cuMemsetD32Async");
}
LOOM_EXPORT int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, void* s) {
  return v::copy_2d(at(target), bytes, at(source), bytes, bytes, 1, 4, s, "cuMemcpyAsync");
}
LOOM_EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void* s) {
  return v::copy_2d(at(target), bytes, at(source), bytes, bytes, 1, 3, s, "cuMemcpyDtoDAsync");
}
LOOM_EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void* s) {
  return v::copy_2d(at(target), bytes, source, bytes, bytes, 1, 1, s, "cuMemcpyHtoDAsync");
}
LOOM_EXPORT int cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t bytes, void* s) {
  return v::copy_2d(target, bytes, at(source), bytes, bytes, 1, 2, s, "cuMemcpyDtoHAsync");
}
LOOM_EXPORT int cuMemcpy2DAsync_v2(const Copy2D* c, void* s) {
  if (!c || c->source_type == 3 || c->target_type == 3) return v::said(v::kInvalidValue);
  const bool from_host = c->source_type == 1, to_host = c->target_type == 1;
  const char* from = from_host ? static_cast<const char*>(c->source_host)
                               : static_cast<const char*>(at(c->source_device));
  char* to = to_host ? static_cast<char*>(c->target_host) : static_cast<char*>(at(c->target_device));
  return v::copy_2d(to + c->target_y * c->target_pitch + c->target_x, c->target_pitch,
                    from + c->source_y * c->source_pitch + c->source_x, c->source_pitch, c->width,
                    c->height, 4, s, "cuMemcpy2DAsync");
}
LOOM_EXPORT int cuStreamIsCapturing(void* s, int* status) { return v::is_capturing(s, status); }
LOOM_EXPORT int cuStreamSynchronize(void* s) { return v::synchronize_stream(s); }
LOOM_EXPORT int cuStreamQuery(void* s) { return v::query_stream(s); }
LOOM_EXPORT int cuGetErrorString(int code, const char** text) {
  *text = v::error_text(code);
  return 0;
}
LOOM_EXPORT int cuGetErrorName(int code, const char** text) {
  *text = loom::intern(std::string("CUDA_") + v::error_name(code));
  return 0;
}
