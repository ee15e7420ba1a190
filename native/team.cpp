#include "team.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

namespace weft {
namespace {

// The entry of an OpenMP runtime for a parallel region. GNU's, LLVM's and Intel's all have it.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

std::atomic<bool> forked{false};

// The path of the first OpenMP runtime that the process has loaded, empty where there is none.
std::string loaded_runtime() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const char* name = std::strrchr(info->dlpi_name, '/');
        name = name ? name + 1 : info->dlpi_name;
        for (const char* prefix : {"libgomp", "libiomp5", "libomp"}) {
          if (std::strncmp(name, prefix, std::strlen(prefix)) != 0) continue;
          *static_cast<std::string*>(data) = info->dlpi_name;
          return 1;
        }
        return 0;
      },
      &found);
  return found;
}

struct Runtime {
  Parallel parallel = nullptr;
  int (*max_threads)() = nullptr;
  int (*num_places)() = nullptr;
  int (*num_place_cores)(int place) = nullptr;
  void (*place_cores)(int place, int* cores) = nullptr;
};

Runtime find_runtime() {
  const std::string path = loaded_runtime();
  if (path.empty()) return {};
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return {};
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  Runtime found;
  const auto find = [library](auto& entry, const char* name) {
    entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(dlsym(library, name));
  };
  find(found.parallel, "GOMP_parallel");
  find(found.max_threads, "omp_get_max_threads");
  find(found.num_places, "omp_get_num_places");
  find(found.num_place_cores, "omp_get_place_num_procs");
  find(found.place_cores, "omp_get_place_proc_ids");
  return found;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();  // torch is loaded before any call
  return found;
}

Parallel parallel() {
  const Parallel found = runtime().parallel;
  return forked.load(std::memory_order_relaxed) ? nullptr : found;
}

// What the threads of a team share. Whoever is free takes the next part, so that a thread that the
// system has stopped holds up the others by one part only.
//
// The runtime's own barriers order all memory; `next` and `done` order it once more, because a thread
// sanitizer does not see into the runtime: what the caller wrote before is released by its store to
// `next`, which every thread acquires with the part that it takes; what the threads did is released by
// their last addition to `done`, which the caller acquires. For the same reason a team is not made anew
// for every task: its atomics would be initialised by plain writes, which nothing orders there.
struct Team {
  void (*part)(void*, size_t) = nullptr;
  void* data = nullptr;
  size_t parts = 0;
  bool works = false;
  std::atomic<size_t> next{0}, done{0};

  void work() {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_acq_rel)) < parts;) part(data, i);
    done.fetch_add(1, std::memory_order_release);
  }
};

constinit thread_local Team team;  // of the thread that has the task

}  // namespace

bool has_team() { return parallel() != nullptr; }

int torch_threads() {
  if (!has_team() || !runtime().max_threads) return 1;
  return std::max(1, runtime().max_threads());
}

int team_threads() {
  thread_local const bool first = gettid() == getpid();  // asked once: both are system calls
  return first ? torch_threads() : 1;
}

cpu_set_t process_cores() {
  cpu_set_t first, all;
  CPU_ZERO(&first);
  CPU_ZERO(&all);
  if (sched_getaffinity(getpid(), sizeof first, &first) != 0) CPU_ZERO(&first);
  const Runtime& omp = runtime();
  if (!omp.num_places || !omp.num_place_cores || !omp.place_cores) return first;
  bool bound = false;
  for (int place = 0; place < omp.num_places(); ++place) {
    std::vector<int> cores(size_t(omp.num_place_cores(place)));
    omp.place_cores(place, cores.data());
    cpu_set_t some;
    CPU_ZERO(&some);
    for (int core : cores) CPU_SET(size_t(core), &some);
    bound |= CPU_EQUAL(&some, &first);
    CPU_OR(&all, &all, &some);
  }
  return bound ? all : first;
}

void run_parts(int threads, size_t parts, void (*part)(void*, size_t), void* data) {
  const Parallel run = threads > 1 && parts > 1 && !team.works ? parallel() : nullptr;
  if (!run) {
    for (size_t i = 0; i < parts; ++i) part(data, i);
    return;
  }
  team.part = part;
  team.data = data;
  team.parts = parts;
  team.works = true;
  team.next.store(0, std::memory_order_release);
  const unsigned wanted = unsigned(std::min<size_t>(size_t(threads), parts));
  run([](void* shared) { static_cast<Team*>(shared)->work(); }, &team, wanted, 0);
  (void)team.done.load(std::memory_order_acquire);
  team.works = false;
}

}  // namespace weft
