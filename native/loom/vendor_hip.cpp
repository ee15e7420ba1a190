// The names of HIP over loom, with HIP's arguments, flags and error codes, so that code which calls
// them by ctypes is executed without a GPU.
#include "vendor.h"

namespace v = loom::vendor;

LOOM_EXPORT int hipMemcpyAsync(void* target, const void* source, size_t bytes, int kind, void* s) {
  return v::copy_2d(target, bytes, source, bytes, bytes, 1, kind, s, "hipMemcpyAsync");
}
LOOM_EXPORT int hipMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                                 size_t source_pitch, size_t width, size_t height, int kind,
                                 void* s) {
  return v::copy_2d(target, target_pitch, source, source_pitch, width, height, kind, s,
                    "hipMemcpy2DAsync");
}
LOOM_EXPORT int hipMemcpyDtoDAsync(void* target, void* source, size_t bytes, void* s) {
  return v::copy_2d(target, bytes, source, bytes, bytes, 1, 3, s, "hipMemcpyDtoDAsync");
}
LOOM_EXPORT int hipMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes,
                                   void* s) {
  return v::copy_2d(target, bytes, source, bytes, bytes, 1, 3, s, "hipMemcpyPeerAsync");
}
LOOM_EXPORT int hipMemsetAsync(void* target, int value, size_t bytes, void* s) {
  return v::set_memory(target, static_cast<unsigned>(value), 1, bytes, s, "hipMemsetAsync");
}
LOOM_EXPORT int hipMemsetD32Async(void* target, int value, size_t count, void* s) {
  return v::set_memory(target, static_cast<unsigned>(value), 4, count, s, "hipMemsetD32Async");
}
LOOM_EXPORT int hipStreamWaitValue32(void* s, void* word, uint32_t value, unsigned flags,
                                     uint32_t mask) {
  if (mask != 0xFFFFFFFFu) return v::said(v::kInvalidValue);  // loom compares whole words
  return v::wait_value(s, word, value, flags, 4, "hipStreamWaitValue32");
}
LOOM_EXPORT int hipStreamWaitValue64(void* s, void* word, uint64_t value, unsigned flags,
                                     uint64_t mask) {
  if (mask != ~uint64_t{0}) return v::said(v::kInvalidValue);
  return v::wait_value(s, word, value, flags, 8, "hipStreamWaitValue64");
}
LOOM_EXPORT int hipStreamWriteValue32(void* s, void* word, uint32_t value, unsigned flags) {
  return v::write_value(s, word, value, flags, 4, "hipStreamWriteValue32");
}
LOOM_EXPORT int hipStreamWriteValue64(void* s, void* word, uint64_t value, unsigned flags) {
  return v::write_value(s, word, value, flags, 8, "hipStreamWriteValue64");
}
LOOM_EXPORT int hipStreamIsCapturing(void* s, int* status) { return v::is_capturing(s, status); }
LOOM_EXPORT int hipStreamSynchronize(void* s) { return v::synchronize_stream(s); }
LOOM_EXPORT int hipStreamQuery(void* s) { return v::query_stream(s); }
LOOM_EXPORT int hipStreamWaitEvent(void* s, void* event, unsigned) {
  return v::wait_event(s, event);
}
LOOM_EXPORT int hipStreamCreateWithFlags(void** s, unsigned) { return v::make_stream(s, 0); }
LOOM_EXPORT int hipStreamCreateWithPriority(void** s, unsigned, int priority) {
  return v::make_stream(s, priority);
}
LOOM_EXPORT int hipStreamDestroy(void* s) { return v::synchronize_stream(s); }
LOOM_EXPORT int hipEventCreateWithFlags(void** event, unsigned) { return v::create_event(event); }
LOOM_EXPORT int hipEventRecord(void* event, void* s) { return v::record_event(event, s); }
LOOM_EXPORT int hipEventQuery(void* event) { return v::query_event(event); }
LOOM_EXPORT int hipEventSynchronize(void* event) { return v::synchronize_event(event); }
LOOM_EXPORT int hipEventElapsedTime(float* ms, void* first, void* second) {
  return v::elapsed(ms, first, second);
}
LOOM_EXPORT int hipEventDestroy(void* event) {
  delete static_cast<loom::Event*>(event);
  return 0;
}
LOOM_EXPORT int hipLaunchHostFunc(void* s, void (*function)(void*), void* argument) {
  return v::launch_host(s, function, argument, "hipLaunchHostFunc");
}
LOOM_EXPORT int hipGetDevice(int* device) { return v::get_device(device); }
LOOM_EXPORT int hipSetDevice(int device) { return v::set_device(device); }
LOOM_EXPORT int hipGetDeviceCount(int* count) { return v::count_devices(count); }
LOOM_EXPORT int hipDeviceSynchronize() { return v::synchronize_all(); }
LOOM_EXPORT int hipDeviceCanAccessPeer(int* can, int device, int peer) {
  return v::can_access_peer(can, device, peer);
}
LOOM_EXPORT int hipThreadExchangeStreamCaptureMode(int* mode) {
  return v::exchange_capture_mode(mode);
}
LOOM_EXPORT int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return v::priority_range(least, greatest);
}
LOOM_EXPORT int hipDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device >= loom::config().devices) return v::said(101);
  switch (attribute) {
    case 63: *value = loom::config().units; return 0;  // multiprocessors
    case 2: *value = loom::config().world; return 0;   // copy engines
    case 10013: *value = 1; return 0;                  // streams wait for words
    default: return v::said(v::kInvalidValue);
  }
}
LOOM_EXPORT int hipRuntimeGetVersion(int* version) { *version = 70200000; return 0; }
LOOM_EXPORT int hipDriverGetVersion(int* version) { *version = 70200000; return 0; }
LOOM_EXPORT int hipGetLastError() { return v::last_error(true); }
LOOM_EXPORT int hipPeekAtLastError() { return v::last_error(false); }
LOOM_EXPORT const char* hipGetErrorString(int code) { return v::error_text(code); }
LOOM_EXPORT const char* hipGetErrorName(int code) {
  return loom::intern(std::string("hip") + v::error_name(code));
}
LOOM_EXPORT int hipMalloc(void** pointer, size_t bytes) { return v::make_memory(pointer, bytes); }
LOOM_EXPORT int hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned) {
  return v::make_memory(pointer, bytes);
}
LOOM_EXPORT int hipFree(void* pointer) { return v::free_memory(pointer); }
LOOM_EXPORT int hipIpcGetMemHandle(v::Handle* handle, void* pointer) {
  return v::get_handle(handle, pointer);
}
LOOM_EXPORT int hipIpcOpenMemHandle(void** pointer, v::Handle handle, unsigned) {
  return v::open_handle(pointer, handle);
}
LOOM_EXPORT int hipIpcCloseMemHandle(void*) { return 0; }
