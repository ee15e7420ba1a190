// loom's own C names, which weft/loom calls by ctypes. A call that fails gives -1 (or null), and
// `loom_error` says why.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "queue.h"
#include "vendor.h"

using namespace loom;

namespace {

thread_local std::string error_here;

template <class Function>
int tried(Function&& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    error_here = error.what();
    return -1;
  }
}

Config& settings() {
  static auto* value = new Config;
  return *value;
}

struct sigaction before;

// The host has touched memory of the device: said in the log, then whoever was there before goes on.
void on_fault(int number, siginfo_t* info, void*) {
  if (const auto* region = region_of(info->si_addr))
    log_touch(region->rank, static_cast<char*>(info->si_addr) - region->device);
  sigaction(number, &before, nullptr);  // the access is tried again, and ends there
}

}  // namespace

namespace loom {
const Config& config() { return settings(); }
}  // namespace loom

LOOM_EXPORT const char* loom_error() { return error_here.c_str(); }

LOOM_EXPORT int loom_configure(int rank, int world, int devices, int mode, uint64_t seed,
                               int queues, int units, double pace, double deadline, int check,
                               uint64_t heap_bytes, const char* session) {
  return tried([&] {
    auto& c = settings();
    c.rank = rank;
    c.world = world;
    c.devices = devices;
    c.mode = static_cast<Mode>(mode);
    c.seed = seed;
    c.queues = queues;
    c.units = units;
    c.pace = pace;
    c.deadline = deadline;
    c.check = check != 0;
    c.heap_bytes = heap_bytes;
    open_session(session);
    own_heap();
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
  });
}

LOOM_EXPORT void loom_shut_down() {
  set_origin_callback(nullptr);
  shut_down();
}
LOOM_EXPORT int loom_device_count() { return config().devices; }
LOOM_EXPORT void loom_label(const char* label) { set_label(label); }
LOOM_EXPORT const char* loom_current_label() { return current_label(); }
LOOM_EXPORT const char* loom_intern(const char* text) { return intern(text); }
LOOM_EXPORT void loom_origin(OriginCallback callback) { set_origin_callback(callback); }
LOOM_EXPORT void loom_logging(int on) { set_logging(on != 0); }
LOOM_EXPORT uint64_t loom_log(char* target, uint64_t bytes) {
  const auto text = own_log();
  if (target) std::memcpy(target, text.data(), std::min<uint64_t>(bytes, text.size()));
  return text.size();
}
LOOM_EXPORT void loom_clear_log() { clear_log(); }
LOOM_EXPORT void loom_host_enter(const char* key) {
  log_host_enter(key);
  host_blocks(true);
}
LOOM_EXPORT void loom_host_leave(const char* key, const int* peers, int count) {
  host_blocks(false);
  log_host_leave(key, std::vector<int>(peers, peers + count));
}
LOOM_EXPORT void loom_inject_failure(const char* why) { inject_failure(why); }
LOOM_EXPORT int loom_broken() { return broken(); }
LOOM_EXPORT void loom_clear_failure() { clear_failure(); }
LOOM_EXPORT void loom_pace(double bytes_per_second) { settings().pace = bytes_per_second; }
LOOM_EXPORT void loom_deadline(double seconds) { settings().deadline = seconds; }
LOOM_EXPORT void loom_mode(int mode, uint64_t seed) {
  settings().mode = static_cast<Mode>(mode);
  settings().seed = seed;
}
LOOM_EXPORT int loom_stream_id(void* s) { return vendor::stream(s)->id; }
LOOM_EXPORT int loom_stream_priority(void* s) { return vendor::stream(s)->priority; }
LOOM_EXPORT int loom_capturing(void* s) { return vendor::stream(s)->capture != nullptr; }

LOOM_EXPORT int loom_copy(void* s, void* target, uint64_t target_pitch, const void* source,
                          uint64_t source_pitch, uint64_t width, uint64_t rows) {
  return tried([&] {
    if (!region_of(target) || !region_of(source))
      throw Error("loom: an engine copies between memory of devices only");
    copy(vendor::stream(s), target, target_pitch, source, source_pitch, width, rows,
         rows > 1 ? "pitched copy" : "copy");
  });
}
LOOM_EXPORT int loom_post(void* s, void* word, uint64_t value, int bytes) {
  return tried([&] { post(vendor::stream(s), word, value, bytes, "post"); });
}
LOOM_EXPORT int loom_wait(void* s, void* word, uint64_t value, int bytes, int compare) {
  return tried([&] {
    hold(vendor::stream(s), word, value, bytes, static_cast<Compare>(compare), "wait for word");
  });
}
LOOM_EXPORT int loom_sleep(void* s, uint64_t nanoseconds) {  // a kernel that takes its time
  return tried([&] {
    Op op;
    op.name = "sleep";
    op.run = [=] {
      const int64_t until = now_ns() + static_cast<int64_t>(nanoseconds);
      while (now_ns() < until && !broken()) usleep(100);
    };
    issue(vendor::stream(s), std::move(op));
  });
}
LOOM_EXPORT int loom_launch(void* s, const char* name, Function function, uint64_t number) {
  return tried([&] { launch(vendor::stream(s), name, function, number); });
}
// A kernel that keeps its unit until the host sets `go`, for a time at most. It counts itself first.
LOOM_EXPORT int loom_spin(void* s, int32_t* started, const int32_t* go, uint64_t nanoseconds) {
  return tried([&] {
    Op op;
    op.name = "spin";
    op.run = [=] {
      const int64_t until = now_ns() + static_cast<int64_t>(nanoseconds);
      __atomic_fetch_add(started, 1, __ATOMIC_ACQ_REL);
      while (!__atomic_load_n(go, __ATOMIC_ACQUIRE) && now_ns() < until && !broken()) usleep(100);
    };
    issue(vendor::stream(s), std::move(op));
  });
}
LOOM_EXPORT uint64_t loom_read_word(void* word) {
  return __atomic_load_n(reinterpret_cast<uint32_t*>(readable(word)), __ATOMIC_ACQUIRE);
}
LOOM_EXPORT void loom_write_word(void* word, uint32_t value) {
  __atomic_store_n(reinterpret_cast<uint32_t*>(readable(word)), value, __ATOMIC_RELEASE);
}
LOOM_EXPORT int loom_rank_of(const void* pointer) {
  const auto* region = region_of(pointer);
  return region ? region->rank : -1;
}
LOOM_EXPORT uint64_t loom_log_lost() { return status(config().rank).log_lost; }
