#include "messages.h"

#include <sys/prctl.h>

#include <algorithm>

#include "moving.h"

namespace weft {
namespace {

// Stands before the bytes of every chunk.
struct alignas(64) Envelope {
  uint64_t tag;
  uint64_t total;
};
constexpr uint64_t kRoom = kChunkBytes - sizeof(Envelope);

}  // namespace

Messages::Messages(Fabric& fabric, int64_t spin_ns, bool crowded)
    : fabric_(fabric),
      rank_(fabric.heap().rank()),
      world_(fabric.heap().world()),
      area_{fabric.heap().channels(), world_},
      spin_ns_(spin_ns),
      crowded_(crowded),
      posted_(world_),
      taken_(world_),
      sends_(world_),
      current_(world_),
      kept_(world_),
      spoiled_(world_) {}

Messages::~Messages() {
  if (fabric_.heap().forked()) {  // the thread is the parent's
    (void)thread_.release();
    return;
  }
  abort();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  area_.head(rank_).bell.ring();
  if (thread_) thread_->join();
}

void Messages::send(const std::shared_ptr<Message>& message, bool in_background) {
  std::lock_guard lock(mutex_);
  if (aborted_.load()) return end(*message, {Code::cancelled, -1});
  message->total = message->bytes;
  sends_[message->peer].push_back(message);
  progress();
  background(in_background && !message->done.load());
}

void Messages::receive(const std::shared_ptr<Message>& message, bool in_background) {
  std::lock_guard lock(mutex_);
  if (aborted_.load()) return end(*message, {Code::cancelled, -1});
  receives_.push_back(message);
  progress();
  background(in_background && !message->done.load());
}

void Messages::background(bool wanted) {
  if (!wanted) return;
  if (!thread_) thread_ = std::make_unique<std::thread>([this] { loop(); });
  changed_.notify_all();
}

bool Messages::open() const {
  return !receives_.empty() || std::any_of(sends_.begin(), sends_.end(),
                                           [](const auto& queue) { return !queue.empty(); });
}

void Messages::end(Message& message, Outcome outcome) {
  message.outcome = outcome;
  message.done.store(true);
  // Whoever works at messages ends those of other threads of this rank too, and they may sleep.
  area_.head(rank_).bell.ring();
}

void Messages::abort() {
  std::lock_guard lock(mutex_);
  aborted_.store(true);
  for (auto& queue : sends_) {
    for (const auto& message : queue) end(*message, {Code::cancelled, -1});
    queue.clear();
  }
  for (const auto& message : receives_) end(*message, {Code::cancelled, -1});
  receives_.clear();
  for (auto& message : current_) message.reset();
  area_.head(rank_).bell.ring();
}

// Whether a message from a peer, or from any (-1), can still come.
Outcome Messages::check_peer(int peer) {
  Heap& heap = fabric_.heap();
  Outcome gone;
  int there = world_ - 1;
  for (int r = 0; r < world_; ++r) {
    if (r == rank_ || (peer >= 0 && r != peer)) continue;
    const bool left = heap.control(r).left.load();
    if (heap.ended(r) && !left) return {Code::peer_lost, r};
    if (left) {
      gone = {Code::peer_left, r};
    } else if (area_.head(r).failed.value.load() != 0 || heap.control(r).failed.load() != 0) {
      gone = {Code::peer_failed, r};
    } else {
      continue;
    }
    --there;
  }
  return peer >= 0 || there == 0 ? gone : Outcome{};  // of any, another one may still send
}

// -- work, with the lock held ---------------------------------------------------------------------

bool Messages::progress() {
  bool moved = false;
  for (int r = 0; r < world_; ++r) {
    if (!sends_[r].empty()) moved |= push(r);
    moved |= pull(r);
  }
  return moved;
}

bool Messages::push(int target) {
  bool moved = false;
  Ring& ring = area_.messages(rank_, target);
  while (!sends_[target].empty()) {
    Message& message = *sends_[target].front();
    uint64_t& count = posted_[target];
    if (ring.taken[target].value.load(std::memory_order_acquire) + kRingChunks <= count)
      return moved;
    char* slot = ring.bytes + count % kRingChunks * kChunkBytes;
    const uint64_t size = std::min(kRoom, message.bytes - message.at);
    *reinterpret_cast<Envelope*>(slot) = {message.tag, message.bytes};
    move_to_peer(slot + sizeof(Envelope), message.data + message.at, size);
    come_to(Point::message_post);
    ring.posted.value.store(++count, std::memory_order_release);
    area_.head(target).bell.ring();
    message.at += size;
    moved = true;
    if (message.at < message.bytes) continue;
    end(message, {});
    sends_[target].pop_front();
  }
  return moved;
}

// The first message asked for that this one answers.
std::shared_ptr<Message> Messages::match(int source, uint64_t tag) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    const auto message = *it;
    if (message->source >= 0 || message->tag != tag) continue;
    if (message->peer >= 0 && message->peer != source) continue;
    message->source = source;
    return message;
  }
  return nullptr;
}

bool Messages::deliver_kept(int source) {
  bool moved = false;
  auto& kept = kept_[source];
  for (auto it = kept.begin(); it != kept.end();) {
    if (!(*it)->whole) break;
    const auto asked = match(source, (*it)->tag);
    if (!asked) {
      ++it;
      continue;
    }
    asked->total = (*it)->total;
    const bool fits = asked->bytes == asked->total;
    if (fits) move(asked->data, (*it)->kept.data(), asked->bytes, false);
    receives_.remove(asked);
    end(*asked, {fits ? Code::ok : Code::disagree, source});
    it = kept.erase(it);
    moved = true;
  }
  return moved;
}

// Chunks of one message contradict each other: whatever comes from that rank cannot be told apart any
// more. What waits for it ends; what comes later is not looked at. Gives whether anything ended.
bool Messages::spoil(int source) {
  current_[source].reset();
  kept_[source].clear();
  spoiled_[source] = true;
  bool ended = false;
  for (auto it = receives_.begin(); it != receives_.end();) {
    const auto message = *it;
    if (message->source != source && message->peer != source) {
      ++it;
      continue;
    }
    it = receives_.erase(it);
    end(*message, {Code::corrupt, source});
    ended = true;
  }
  return ended;
}

bool Messages::pull(int source) {
  if (spoiled_[source]) return spoil(source);
  bool moved = deliver_kept(source);
  Ring& ring = area_.messages(source, rank_);
  Links& links = fabric_.links();
  for (;;) {
    auto& coming = current_[source];
    if (coming && coming->due > 0 && now_ns() < coming->due) return moved;
    if (coming && coming->whole) {
      const auto message = std::move(coming);
      if (message->stray) {
        moved |= deliver_kept(source);
      } else {
        const bool fits = message->bytes == message->total;
        receives_.remove(message);
        end(*message, {fits ? Code::ok : Code::disagree, source});
      }
      moved = true;
      continue;
    }
    if (ring.posted.value.load(std::memory_order_acquire) <= taken_[source]) return moved;
    const char* slot = ring.bytes + taken_[source] % kRingChunks * kChunkBytes;
    const Envelope& envelope = *reinterpret_cast<const Envelope*>(slot);
    if (!coming) {
      coming = match(source, envelope.tag);
      if (!coming) {
        // Nobody asked for it: it stays where it is, unless it is in somebody's way.
        const bool in_the_way =
            std::any_of(receives_.begin(), receives_.end(), [&](const auto& message) {
              return message->source < 0 && (message->peer < 0 || message->peer == source);
            });
        if (!in_the_way) return moved;
        coming = std::make_shared<Message>();
        coming->stray = true;
        coming->tag = envelope.tag;
        coming->bytes = envelope.total;
        kept_[source].push_back(coming);
      }
      coming->total = envelope.total;
    } else if (envelope.tag != coming->tag || envelope.total != coming->total) {
      return spoil(source) || moved;
    }
    const uint64_t size = std::min(kRoom, coming->total - coming->at);
    if (coming->stray) {
      // Memory for what has come, not for all that is said to come: that is the peer's word.
      const char* from = slot + sizeof(Envelope);
      coming->kept.insert(coming->kept.end(), from, from + size);
    } else if (coming->bytes == coming->total) {
      move(coming->data + coming->at, slot + sizeof(Envelope), size, false);
    }
    coming->at += size;
    if (links.paced() && source != rank_) {
      constexpr int64_t kLate = 3'000'000;
      const int64_t now = now_ns();
      const int64_t from = coming->clock && now - coming->clock <= kLate ? coming->clock : now;
      coming->clock = links.reserve(source, rank_, size, from);
      coming->due = later(coming->clock, coming->at == coming->total ? links.latency() : 0);
    }
    coming->whole = coming->at == coming->total;
    come_to(Point::message_take);
    ring.taken[rank_].value.store(++taken_[source], std::memory_order_release);
    area_.head(source).bell.ring();
    moved = true;
  }
}

// -- waiting --------------------------------------------------------------------------------------

Outcome Messages::wait(Message& message, int64_t until) {
  const auto ready = [&] {
    if (message.done.load()) return true;
    std::lock_guard lock(mutex_);
    progress();
    return message.done.load();
  };
  if (ready()) return message.outcome;
  come_to(Point::message_wait);
  int64_t now = now_ns();
  const int64_t slice = std::min({until, now + kSlice, own_time.on_clock(message.deadline)});
  const int64_t spin_end = std::min(slice, now + spin_ns_);
  bool waits = !crowded_ || turns_.worth(now);
  while (waits && now < spin_end) {
    if (ready()) return message.outcome;
    if (crowded_) {
      waits = turns_.give_way(now);
    } else {
      spin_pause();
      now = now_ns();
    }
  }
  Bell& bell = area_.head(rank_).bell;
  while (now < slice) {
    int64_t next = slice;
    {
      std::lock_guard lock(mutex_);
      for (const auto& coming : current_)
        if (coming && coming->due > now) next = std::min(next, coming->due);
    }
    if (bell.sleep(next - now, ready) || ready()) return message.outcome;
    now = now_ns();
  }
  const Outcome peer = check_peer(message.peer);
  if (ready()) return message.outcome;
  std::lock_guard lock(mutex_);
  if (message.done.load()) return message.outcome;
  if (peer.code != Code::ok) return peer;
  return {own_time.at(now) >= message.deadline ? Code::timeout : Code::again, -1};
}

void Messages::loop() {
  become_responsive();
  prctl(PR_SET_NAME, "weft-messages");
  Bell& bell = area_.head(rank_).bell;
  for (;;) {
    int64_t until = now_ns() + kSlice;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || open(); });
      if (stop_) return;
      for (const auto& coming : current_)
        if (coming && coming->due > 0) until = std::min(until, std::max(coming->due, now_ns()));
    }
    bell.sleep(std::max<int64_t>(1, until - now_ns()), [&] {
      std::lock_guard lock(mutex_);
      return stop_ || progress();
    });
  }
}

}  // namespace weft
