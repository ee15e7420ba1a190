// The session: what the ranks of a run show each other, and how they know that none can go on.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "log.h"

namespace loom {

void open_session(const char* path) {
  auto& l = log();
  int file;
  if (path && *path) {
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) throw Error(std::string("loom: the session ") + path + " cannot be opened");
  } else {
    file = memfd_create("loom session", MFD_CLOEXEC);
    const size_t bytes = session_bytes(config().world, kLogBytes);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)))
      throw Error("loom: no memory file for the session");
  }
  const off_t bytes = lseek(file, 0, SEEK_END);
  void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) throw Error("loom: the session cannot be mapped");
  l.header = static_cast<Header*>(at);
  if (!l.header->world) {  // of this process alone
    l.header->world = config().world;
    l.header->log_bytes = kLogBytes;
    l.header->shared = 0;
  }
  if (config().rank >= l.header->world)
    throw Error("loom: rank " + std::to_string(config().rank) + " is not in the session");
  char* base = static_cast<char*>(at);
  l.statuses = reinterpret_cast<Status*>(base + sizeof(Header));
  l.text = base + log_offset(l.header->world, l.header->log_bytes, config().rank);
  status(config().rank).pid = getpid();
  l.on = config().check;
}

Status& status(int rank) {
  auto& l = log();
  return l.statuses ? l.statuses[rank] : l.alone;
}

void host_blocks(bool blocks) {
  auto& here = status(config().rank);
  blocks ? here.blocked++ : here.blocked--;
}

namespace {

// The state of a process's main thread as the system says it; X if it is no more.
char state_of(int pid) {
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 'X';
  const ssize_t got = read(file, text, sizeof text - 1);
  close(file);
  if (got <= 0) return 'X';
  text[got] = 0;
  const char* after = std::strrchr(text, ')');
  return after ? after[2] : 'X';
}

bool process_is_over(int pid) { return state_of(pid) == 'X' || state_of(pid) == 'Z'; }

bool main_thread_sleeps(int pid) { return state_of(pid) != 'R' && state_of(pid) != 'D'; }

}  // namespace

namespace {

int ended_rank(bool also_orderly) {
  auto& l = log();
  if (!l.header || !l.header->shared) return -1;
  for (int rank = 0; rank < l.header->world; ++rank) {
    auto& s = l.statuses[rank];
    if (s.pid && process_is_over(s.pid) && (also_orderly || !s.exited)) return rank;
  }
  return -1;
}

}  // namespace

int lost_rank() { return ended_rank(true); }

int killed_rank() { return ended_rank(false); }

int standstills() { return log().header ? log().header->standstills.load() : 0; }

bool all_stuck(int before) {
  auto& l = log();
  static std::mutex mutex;
  static uint64_t seen = 0;
  static int64_t looked = 0, still = 0;
  if (!l.header || (!l.header->shared && config().world > 1)) return false;
  if (standstills() != before) return true;  // another rank was first to find out
  std::lock_guard guard(mutex);
  uint64_t progress = 1;
  bool stuck = true;
  for (int rank = 0; rank < l.header->world; ++rank) {
    auto& s = l.statuses[rank];
    progress += s.progress;
    const bool over = s.exited || (s.pid && process_is_over(s.pid));
    stuck = stuck && s.pid &&
            (over || (s.running == 0 && s.blocked > 0 && main_thread_sleeps(s.pid)));
  }
  // A second in which all ranks were seen to stand still: while a busy machine runs no thread of this
  // process, nobody looks, and that time does not count.
  const int64_t now = now_ns(), since = std::exchange(looked, now);
  if (!stuck || progress != seen) {
    seen = progress;
    still = 0;
    return false;
  }
  still += std::min<int64_t>(now - since, 50'000'000);
  if (still < 1'000'000'000) return false;
  l.header->standstills++;
  return true;
}

}  // namespace loom
