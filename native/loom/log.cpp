// The log of a rank: one line of JSON for each operation, in memory that the ranks of a session
// share. The detector reads the logs of all ranks; times are of one clock for all processes.
#include "log.h"

#include <cstdio>
#include <cstring>
#include <ctime>
#include <unordered_map>
#include <unordered_set>

#include "queue.h"

namespace loom {

Log& log() {
  static auto* value = new Log;
  return *value;
}

namespace {

thread_local const char* label_here = "";

// Under the log's lock, so that there is one writer. Readers, also those of other processes, take no
// lock: `log_used` is released after the line was written, and whoever acquires it finds all that is
// below it whole. Nothing is written there again until the ranks have agreed to clear the log.
void append(const std::string& line) {
  auto& here = status(config().rank);
  if (!log().text) return;
  const uint64_t used = here.log_used.load(std::memory_order_relaxed);
  if (used + line.size() + 1 > log().header->log_bytes) {
    here.log_lost++;
    return;
  }
  std::memcpy(log().text + used, line.data(), line.size());
  log().text[used + line.size()] = '\n';
  here.log_used.store(used + line.size() + 1, std::memory_order_release);
}

std::string quoted(const char* text) {
  std::string result = "\"";
  for (; *text; ++text) {
    const auto c = static_cast<unsigned char>(*text);
    if (c == '"' || c == '\\') result += '\\';
    if (c >= 0x20) result += static_cast<char>(c);
  }
  return result + "\"";
}

int number(const char* text) {  // of a string, which is written when it is first used
  auto& l = log();
  auto [it, fresh] = l.strings.emplace(text, static_cast<int>(l.strings.size()));
  if (fresh) append("[\"s\"," + std::to_string(it->second) + "," + quoted(text) + "]");
  return it->second;
}

// The default stream of a rank's own device is 0 in the log; those of other devices come last.
int shown(const Stream& stream) {
  if (stream.id >= config().devices) return stream.id;
  return stream.id == config().rank % config().devices ? 0 : 1'000'000 + stream.id;
}

// kind, time, stream, host, name, label, origin: how every line of an operation begins.
std::string begin(const char* kind, int64_t time, const Op& op) {
  const int name = number(op.name), label = number(op.label), origin = number(op.origin);
  char text[192];
  std::snprintf(text, sizeof text, "[\"%s\",%lld,%d,%u,%d,%d,%d", kind,
                static_cast<long long>(time), shown(*op.stream), op.host, name, label, origin);
  return text;
}

std::string written(const Rect& r) {
  char text[160];
  std::snprintf(text, sizeof text, "[%d,%llu,%llu,%llu,%llu,%d]", r.space,
                static_cast<unsigned long long>(r.offset), static_cast<unsigned long long>(r.width),
                static_cast<unsigned long long>(r.rows), static_cast<unsigned long long>(r.pitch),
                r.write ? 1 : 0);
  return text;
}

std::string rects(const Op& op) {
  std::string text = "[";
  for (auto& rect : op.rects) text += (text.size() > 1 ? "," : "") + written(rect);
  return text + "]";
}

// The words that a small write left behind: they may be flags that others wait for.
std::string values(const Op& op) {
  std::string text = "[";
  for (auto& rect : op.rects) {
    if (!rect.write || rect.rows != 1 || rect.width > 64 || rect.offset % 4) continue;
    const char* at = nullptr;
    if (rect.space == config().rank) at = own_heap().readable + rect.offset;
    if (rect.space >= 0 && !at) at = peer_memory(rect.space, rect.offset);
    for (uint64_t i = 0; at && i + 4 <= rect.width; i += 4) {
      // Another stream may set a flag there meanwhile, as one step.
      const uint32_t word =
          __atomic_load_n(reinterpret_cast<const uint32_t*>(at + i), __ATOMIC_RELAXED);
      char item[96];
      std::snprintf(item, sizeof item, "%s[%d,%llu,%u]", text.size() > 1 ? "," : "", rect.space,
                    static_cast<unsigned long long>(rect.offset + i), word);
      text += item;
    }
  }
  return text + "]";
}

void host_line(const std::string& rest) {
  auto& l = log();
  if (!l.on) return;
  std::lock_guard guard(l.lock);
  const uint32_t at = ++l.host;
  append("[\"h\"," + std::to_string(now_ns()) + "," + std::to_string(at) + rest + "]");
}

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

const char* intern(const std::string& text) {
  static auto* mutex = new std::mutex;
  static auto* strings = new std::unordered_set<std::string>;
  if (text.empty()) return "";
  std::lock_guard guard(*mutex);
  return strings->insert(text).first->c_str();
}

void set_label(const char* label) { label_here = intern(label ? label : ""); }
const char* current_label() { return label_here; }

void set_origin_callback(OriginCallback callback) { log().origin = callback; }

bool logging() { return log().on; }
void set_logging(bool on) { log().on = on; }
uint32_t host_clock() { return log().host; }

void log_op(const Op& op, int64_t start, int64_t end) {
  auto& l = log();
  if (!l.on) return;
  const auto small = values(op);
  std::lock_guard guard(l.lock);
  char rest[96];
  std::snprintf(rest, sizeof rest, ",%lld,%d,%llu,%d,", static_cast<long long>(end), op.engine,
                static_cast<unsigned long long>(op.bytes), static_cast<int>(op.kind));
  std::string after = "[";
  for (uint64_t mark : op.after) after += (after.size() > 1 ? "," : "") + std::to_string(mark);
  append(begin("o", start, op) + rest + rects(op) + "," + small + "," + after + "]]");
}

void log_record(const Op& op) {
  auto& l = log();
  if (!l.on) return;
  std::lock_guard guard(l.lock);
  append(begin("r", op.mark->time, op) + "," + std::to_string(op.mark->id) + "]");
}

void log_wait(const Op& op) {
  auto& l = log();
  if (!l.on) return;
  std::lock_guard guard(l.lock);
  append(begin("w", now_ns(), op) + "," + std::to_string(op.mark->id) + "]");
}

void log_post(const Op& op, const Rect& word, uint64_t value) {
  auto& l = log();
  if (!l.on) return;
  std::lock_guard guard(l.lock);
  append(begin("p", now_ns(), op) + "," + written(word) + "," + std::to_string(value) + "]");
}

void log_hold(const Op& op, const Rect& word, Compare compare, uint64_t value) {
  auto& l = log();
  if (!l.on) return;
  std::lock_guard guard(l.lock);
  append(begin("f", now_ns(), op) + "," + written(word) + "," + std::to_string(value) + "," +
         std::to_string(static_cast<int>(compare)) + "]");
}

void log_host_mark(uint64_t mark) { host_line(",\"mark\"," + std::to_string(mark)); }

void log_host_enter(const std::string& key) { host_line(",\"enter\"," + quoted(key.c_str())); }

void log_host_leave(const std::string& key, const std::vector<int>& peers) {
  std::string list = "[";
  for (int peer : peers) list += (list.size() > 1 ? "," : "") + std::to_string(peer);
  host_line(",\"leave\"," + quoted(key.c_str()) + "," + list + "]");
}

void log_touch(int rank, uint64_t offset) {
  auto& here = status(config().rank);
  if (!log().text || !log().on) return;
  char line[128];  // no lock: the thread that died may hold it
  const int length = std::snprintf(line, sizeof line, "\n[\"t\",%lld,%d,%llu]\n",
                                   static_cast<long long>(now_ns()), rank,
                                   static_cast<unsigned long long>(offset));
  const uint64_t used = here.log_used.load();
  if (used + length > log().header->log_bytes) return;
  std::memcpy(log().text + used, line, length);
  here.log_used.store(used + length);
}

void log_finding(const char* kind, const std::string& what) {
  auto& l = log();
  if (!l.on) return;
  const char* origin = origin_here();
  std::lock_guard guard(l.lock);
  append("[\"n\"," + std::to_string(now_ns()) + "," + quoted(kind) + "," + quoted(what.c_str()) +
         "," + quoted(origin) + "]");
}

void log_pending(const std::string& why) {
  auto& l = log();
  if (!l.on) return;
  const auto ops = pending();
  std::lock_guard guard(l.lock);
  append("[\"x\"," + std::to_string(now_ns()) + "," + quoted(why.c_str()) + "]");
  for (auto& [queue, op] : ops)
    append(begin("q", now_ns(), op) + "," + std::to_string(queue) + "," +
           std::to_string(static_cast<int>(op.kind)) + "," + std::to_string(op.signals) + "," +
           std::to_string(op.value) + "," + rects(op) + "]");
}

std::string own_log() {
  auto& l = log();
  return l.text ? std::string(l.text, status(config().rank).log_used) : std::string();
}

void clear_log() {
  auto& l = log();
  std::lock_guard guard(l.lock);
  l.strings.clear();
  status(config().rank).log_used = 0;
}

}  // namespace loom
