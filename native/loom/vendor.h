// What the calls of CUDA and HIP have in common: the same errors, handles and checks, under two
// sets of names. A stream is a handle of loom (`torch.Stream.native_handle`); null is the default.
#pragma once

#include <cstring>
#include <utility>

#include "log.h"

#define LOOM_EXPORT extern "C" __attribute__((visibility("default")))

namespace loom::vendor {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidHandle = 400,
              kNotReady = 600, kLaunchFailure = 719, kCaptureUnsupported = 900;

inline thread_local int last = 0;

inline int said(int code) {
  if (code != kSuccess) last = code;
  return code;
}

template <class Function>
int guarded(Function&& function) {
  try {
    return said(function());
  } catch (const Error& error) {
    if (std::strstr(error.what(), "captur")) return said(kCaptureUnsupported);
    return said(std::strstr(error.what(), "memory") ? kOutOfMemory : kLaunchFailure);
  }
}

inline Stream* stream(void* handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 2) return default_stream(current_device());  // null, legacy and per-thread
  return static_cast<Stream*>(handle);
}

// Where a copy of that kind must begin and end; 4 is "find out", 1024 is HIP's "no compute units".
inline bool kind_fits(const void* target, const void* source, int kind) {
  const bool to = region_of(target), from = region_of(source);
  switch (kind) {
    case 0: return !to && !from;
    case 1: return to && !from;
    case 2: return !to && from;
    case 3: case 1024: return to && from;
    case 4: return true;
    default: return false;
  }
}

inline int copy_2d(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                   size_t width, size_t rows, int kind, void* handle, const char* name) {
  return guarded([&] {
    if (!kind_fits(target, source, kind) || (rows > 1 && (target_pitch < width || source_pitch < width)))
      return kInvalidValue;
    copy(stream(handle), target, target_pitch, source, source_pitch, width, rows, name);
    return kSuccess;
  });
}

inline int wait_value(void* handle, void* word, uint64_t value, unsigned flags, int bytes,
                      const char* name) {
  return guarded([&] {
    const unsigned how = flags & 3u;
    if ((flags & ~(3u | 1u << 30)) || !region_of(word) ||
        reinterpret_cast<uintptr_t>(word) % static_cast<unsigned>(bytes))
      return kInvalidValue;
    constexpr Compare compares[] = {Compare::at_least, Compare::equal, Compare::any_bit,
                                    Compare::nor};
    hold(stream(handle), word, value, bytes, compares[how], name);
    return kSuccess;
  });
}

inline int write_value(void* handle, void* word, uint64_t value, unsigned flags, int bytes,
                       const char* name) {
  return guarded([&] {
    if ((flags & ~1u) || !region_of(word) ||
        reinterpret_cast<uintptr_t>(word) % static_cast<unsigned>(bytes))
      return kInvalidValue;
    post(stream(handle), word, value, bytes, name);
    return kSuccess;
  });
}

inline int set_memory(void* target, unsigned value, int item_bytes, size_t count, void* handle,
                      const char* name) {
  return guarded([&] {
    if (!region_of(target)) return kInvalidValue;
    fill(stream(handle), target, value, item_bytes, count, name);
    return kSuccess;
  });
}

inline int is_capturing(void* handle, int* status) {
  return guarded([&] {
    if (!status) return kInvalidValue;
    *status = stream(handle)->capture ? 1 : 0;
    return kSuccess;
  });
}

inline int synchronize_stream(void* handle) {
  return guarded([&] { synchronize(stream(handle)); return kSuccess; });
}

inline int query_stream(void* handle) {
  return guarded([&] { return stream_idle(stream(handle)) ? kSuccess : kNotReady; });
}

inline int launch_host(void* handle, void (*function)(void*), void* argument, const char* name) {
  return guarded([&] {
    if (!function) return kInvalidValue;
    Op op;
    op.kind = Op::Kind::host;
    op.name = name;
    op.run = [=] { function(argument); };
    issue(stream(handle), std::move(op));
    return kSuccess;
  });
}

inline int create_event(void** event) {
  if (!event) return said(kInvalidValue);
  *event = new Event;
  return kSuccess;
}

inline MarkPtr mark_of(void* event) {
  auto* e = static_cast<Event*>(event);
  std::lock_guard guard(e->lock);
  return e->mark;
}

inline int record_event(void* event, void* handle) {
  return guarded([&] {
    if (!event) return kInvalidHandle;
    auto mark = record(stream(handle));
    auto* e = static_cast<Event*>(event);
    std::lock_guard guard(e->lock);
    e->mark = std::move(mark);
    return kSuccess;
  });
}

inline int wait_event(void* handle, void* event) {
  return guarded([&] {
    if (!event) return kInvalidHandle;
    wait(stream(handle), mark_of(event));
    return kSuccess;
  });
}

inline int query_event(void* event) {
  return guarded([&] { return finished(mark_of(event)) ? kSuccess : kNotReady; });
}

inline int synchronize_event(void* event) {
  return guarded([&] { synchronize(mark_of(event)); return kSuccess; });
}

inline int elapsed(float* milliseconds, void* first, void* second) {
  return guarded([&] {
    auto a = mark_of(first), b = mark_of(second);
    if (!milliseconds || !a || !b) return kInvalidHandle;
    if (!a->done || !b->done) return kNotReady;
    *milliseconds = static_cast<float>(static_cast<double>(b->time - a->time) * 1e-6);
    return kSuccess;
  });
}

inline int make_stream(void** handle, int priority) {
  return guarded([&] {
    *handle = new_stream(current_device(), priority);
    return kSuccess;
  });
}

inline int set_device(int device) {
  return guarded([&] {
    if (device < 0 || device >= config().devices) return 101;  // no such device
    set_current_device(device);
    return kSuccess;
  });
}

inline int get_device(int* device) {
  *device = current_device();
  return kSuccess;
}

inline int count_devices(int* count) {
  *count = config().devices;
  return kSuccess;
}

inline int synchronize_all() {
  return guarded([&] { synchronize_device(); return kSuccess; });
}

// Calls of a thread are never refused while another captures, so the mode is only remembered.
inline int exchange_capture_mode(int* mode) {
  static thread_local int held = 0;
  if (!mode || *mode < 0 || *mode > 2) return said(kInvalidValue);
  std::swap(*mode, held);
  return kSuccess;
}

inline int priority_range(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -1;
  return kSuccess;
}

inline int can_access_peer(int* can, int device, int peer) {
  if (device < 0 || peer < 0 || device >= config().devices || peer >= config().devices)
    return said(101);
  *can = device != peer;
  return kSuccess;
}

inline int make_memory(void** pointer, size_t bytes) {
  return guarded([&] {
    *pointer = allocate(bytes, current_device(), default_stream(current_device()));
    return kSuccess;
  });
}

inline int free_memory(void* pointer) {
  return guarded([&] {
    if (pointer && !block_bytes(pointer)) return kInvalidValue;
    release_all_uses(pointer);
    return kSuccess;
  });
}

// A handle that another process opens: whose heap, and where in it.
struct Handle {
  int32_t rank, pid, file, reserved;
  uint64_t heap_bytes, offset;
  char rest[32];
};
static_assert(sizeof(Handle) == 64);

int get_handle(Handle* handle, void* pointer);
int open_handle(void** pointer, const Handle& handle);

const char* error_name(int code);
const char* error_text(int code);

inline int last_error(bool clear) {
  const int found = last;
  if (clear) last = kSuccess;
  return found;
}

}  // namespace loom::vendor
