// What CUDA's and HIP's calls share and that needs no header: memory of other processes, errors.
#include "vendor.h"

#include <unistd.h>

namespace loom::vendor {

int get_handle(Handle* handle, void* pointer) {
  return guarded([&] {
    if (!handle || !block_bytes(pointer)) return kInvalidValue;
    *handle = Handle{config().rank, getpid(), heap_file(), 0, own_heap().bytes,
                     static_cast<uint64_t>(static_cast<char*>(pointer) - own_heap().device), {}};
    return kSuccess;
  });
}

int open_handle(void** pointer, const Handle& handle) {
  return guarded([&] {
    if (!pointer || handle.offset >= handle.heap_bytes) return kInvalidValue;
    // As on a GPU, a process cannot open what it has exported itself.
    if (handle.pid == getpid()) return kInvalidValue;
    *pointer = map_peer(handle.rank, handle.pid, handle.file, handle.heap_bytes).device + handle.offset;
    return kSuccess;
  });
}

const char* error_name(int code) {
  switch (code) {
    case kSuccess: return "Success";
    case kInvalidValue: return "ErrorInvalidValue";
    case kOutOfMemory: return "ErrorOutOfMemory";
    case 101: return "ErrorInvalidDevice";
    case kInvalidHandle: return "ErrorInvalidHandle";
    case kNotReady: return "ErrorNotReady";
    case kLaunchFailure: return "ErrorLaunchFailure";
    case kCaptureUnsupported: return "ErrorStreamCaptureUnsupported";
    default: return "ErrorUnknown";
  }
}

const char* error_text(int code) {
  switch (code) {
    case kSuccess: return "no error";
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case 101: return "invalid device ordinal";
    case kInvalidHandle: return "invalid resource handle";
    case kNotReady: return "device not ready";
    case kLaunchFailure: return "unspecified launch failure";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "unknown error";
  }
}

}  // namespace loom::vendor
