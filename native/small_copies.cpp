// Small copies of a call are made by the thread that waits for them: to wake an engine takes longer
// than to copy some KiB. Engines take over what this thread could not copy in the time for which a
// waiting thread spins, e.g. because a peer is late.
#include <algorithm>

#include "engine.h"

namespace weft {
namespace {

constexpr uint64_t kSmallBytes = 64 << 10;  // of all copies of a call; some microseconds
constexpr size_t kSmallCommands = 64;       // the same, for copies of few bytes each

}  // namespace

bool Fabric::is_small(const Program& program) const {
  if (links_.paced() || spin_ns_ <= 0) return false;
  uint64_t bytes = 0;
  size_t count = 0;
  for (const auto& [peer, commands] : program.lanes) {
    count += commands.size();
    if (count > kSmallCommands) return false;
    for (const Command& command : commands) bytes += command.rows * command.row_bytes;
  }
  return count > 0 && bytes <= kSmallBytes;
}

void Fabric::begin_small(Call& call) {
  for (const auto& [peer, commands] : call.program->lanes) call.made[peer] = 0;
  call.small = true;
}

// Makes copies until the signal has come, or all of them (null). Only the thread of the call comes
// here, and engines do not know of the call yet.
void Fabric::copy_small(Call& call, const Signal* signal, uint64_t target) {
  if (!call.small) return;
  if (call.cancel.load()) return end_small(call, {});
  Outcome outcome = heap_->look_after_peers(call.number);
  const int64_t until = now_ns() + spin_ns_;
  for (int i = 1; outcome.code == Code::ok; ++i) {
    if (signal && signal->get() >= target) return;
    outcome = advance_small(call);
    if (!call.small) return;
    spin_pause();
    if (i % 16 == 0 && now_ns() >= until) {
      call.small = false;
      return push(call);
    }
  }
  end_small(call, outcome);
}

// Makes all copies that need not wait for anything.
Outcome Fabric::advance_small(Call& call) {
  if (!call.agreed) {
    for (int r = 0; r < heap_->world(); ++r)
      if (heap_->control(r).entered.get() < call.number) return {};
    const Outcome outcome = agree(call.number, call.signatures, call.deadline);
    if (outcome.code != Code::ok) return outcome;
    call.agreed = true;
  }
  bool left = false;
  for (const auto& [peer, commands] : call.program->lanes) {
    size_t& next = call.made[peer];
    for (; next < commands.size(); ++next) {
      const Command& command = commands[next];
      const auto missing = [&](const Wait& wait) {
        return heap_->control(wait.rank).counters[wait.counter].get() < call.number;
      };
      if (std::any_of(command.waits.begin(), command.waits.end(), missing)) break;
      come_to(Point::small_copy);
      if (command.rows != 0 && command.row_bytes != 0) {
        const char* source = address(*heap_, call, command.source, command);
        if (!source) return {Code::corrupt, command.source.rank};
        char* to = address(*heap_, call, command.target, command);
        if (!to) return {Code::corrupt, command.target.rank};
        copy_rows({to, command.target.pitch, source, command.source.pitch, command.rows,
                   command.row_bytes});
      }
      come_to(Point::small_signal);
      if (command.counter >= 0)
        heap_->control(heap_->rank()).counters[command.counter].set(call.number);
      for (int r : command.rings) heap_->control(r).doorbell.add_one();
    }
    left |= next < commands.size();
  }
  if (!left) end_small(call, {});
  return {};
}

// No copy is left, or none may be made any more.
void Fabric::end_small(Call& call, const Outcome& outcome) {
  call.small = false;
  std::lock_guard lock(call.mutex);
  call.lanes_left.store(0);
  if (outcome.code == Code::ok) return;
  call.outcome = outcome;
  call.cancel.store(true);
}

}  // namespace weft
