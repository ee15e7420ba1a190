// Points: the places at which a rank waits for its peers or informs them.
//
// Tests have a rank be killed, stopped or interrupted at every one of them (tests/chaos), in the build
// that is shipped. Unless a test asks, a point is one look at a word that nobody writes.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace weft {

#define WEFT_POINTS(POINT)                                                        \
  /* a call of an operator */                                                     \
  POINT(enter) POINT(agree) POINT(wait) POINT(wait_doorbell) POINT(signal)        \
  POINT(lane_signal) POINT(hold) POINT(finish) POINT(done) POINT(wait_released)   \
  /* its copy engines */                                                          \
  POINT(engine_wait) POINT(engine_copy) POINT(engine_pause) POINT(engine_signal)  \
  /* small copies of the thread that waits */                                     \
  POINT(small_copy) POINT(small_signal)                                           \
  /* a kernel that communicates */                                                \
  POINT(kernel_wait) POINT(kernel_signal) POINT(kernel_release)                   \
  /* collectives, and serial calls, which agree on their headers too */           \
  POINT(announce) POINT(channel_agree) POINT(serial_agree) POINT(channel_say)     \
  POINT(channel_hear) POINT(channel_deliver) POINT(channel_post)                  \
  POINT(channel_take) POINT(channel_move) POINT(channel_released)                 \
  POINT(channel_release) POINT(channel_finish)                                    \
  /* messages */                                                                  \
  POINT(message_post) POINT(message_take) POINT(message_wait)

enum class Point : int {
#define POINT(name) name,
  WEFT_POINTS(POINT)
#undef POINT
};

inline const char* const kPointNames[] = {
#define POINT(name) #name,
    WEFT_POINTS(POINT)
#undef POINT
};

// What happens at a point of this process: this signal is sent to it when it is reached for the
// `left`-th time from now on.
struct Trap {
  std::atomic<int> point{-1};
  std::atomic<int> left{0};
  std::atomic<int> signal{0};
};
inline Trap trap;

// Relaxed, because tests set the trap before the threads that reach it have anything to do.
inline void come_to(Point point) {
  if (trap.point.load(std::memory_order_relaxed) != int(point)) [[likely]] return;
  if (trap.left.fetch_sub(1, std::memory_order_relaxed) != 1) return;
  syscall(SYS_kill, getpid(), trap.signal.load());  // not kill(): a file here is called signal.h
}

}  // namespace weft
