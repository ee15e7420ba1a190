#include "moving.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {

#if defined(__x86_64__)
namespace {

constexpr uint64_t kAhead = 1024;      // how far to fetch ahead what is read, in bytes
constexpr uint64_t kAheadOwned = 512;  // and what is written while another core may hold it
constexpr uint64_t kAlignment = 32;    // what stores past the cache need
constexpr uint64_t kShort = 256;       // below it, nothing is gained

enum class Target { cached, streamed, peer };

// One line ahead of a copy. The builtin would fetch a line only to read it, for the sake of the oldest
// processors; those pass over `prefetchw`.
template <Target First, bool Twice>
[[gnu::always_inline]] inline void fetch(char* to, char* also, const char* from) {
  _mm_prefetch(from + kAhead, _MM_HINT_T0);
  if constexpr (First == Target::peer) asm volatile("prefetchw %0" : : "m"(to[kAheadOwned]));
  if constexpr (Twice) asm volatile("prefetchw %0" : : "m"(also[kAheadOwned]));
}

// Whole lines to a target and, where `Twice`, to memory that a peer reads; gives how many bytes.
template <Target First, bool Twice>
uint64_t copy_lines(char* to, char* also, const char* from, uint64_t bytes) {
  uint64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    fetch<First, Twice>(to + at, also + at, from + at);
    for (uint64_t part = at; part < at + 64; part += 16) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part));
      auto* into = reinterpret_cast<__m128i*>(to + part);
      if constexpr (First == Target::streamed) {
        _mm_stream_si128(into, value);
      } else {
        _mm_storeu_si128(into, value);
      }
      if constexpr (Twice) _mm_storeu_si128(reinterpret_cast<__m128i*>(also + part), value);
    }
  }
  return at;
}

// The same with wide registers.
template <Target First, bool Twice>
__attribute__((target("avx2"))) uint64_t copy_lines_wide(char* to, char* also, const char* from,
                                                         uint64_t bytes) {
  uint64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    fetch<First, Twice>(to + at, also + at, from + at);
    const auto* source = reinterpret_cast<const __m256i*>(from + at);
    const __m256i low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
    auto* into = reinterpret_cast<__m256i*>(to + at);
    if constexpr (First == Target::streamed) {
      _mm256_stream_si256(into, low);
      _mm256_stream_si256(into + 1, high);
    } else {
      _mm256_storeu_si256(into, low);
      _mm256_storeu_si256(into + 1, high);
    }
    if constexpr (Twice) {
      auto* second = reinterpret_cast<__m256i*>(also + at);
      _mm256_storeu_si256(second, low);
      _mm256_storeu_si256(second + 1, high);
    }
  }
  return at;
}

template <Target First, bool Twice>
void copy(char* to, char* also, const char* from, uint64_t bytes) {
  static const bool wide = __builtin_cpu_supports("avx2");
  const auto both = [&](uint64_t at, uint64_t size) {
    std::memcpy(to + at, from + at, size);
    if constexpr (Twice) std::memcpy(also + at, from + at, size);
  };
  if (bytes == 0) return;  // there may be no memory then
  if (bytes < kShort) return both(0, bytes);
  uint64_t at = 0;
  if constexpr (First == Target::streamed) {
    at = -reinterpret_cast<uintptr_t>(to) % kAlignment;
    both(0, at);
  }
  char* second = Twice ? also + at : nullptr;
  const uint64_t rest = bytes - at;
  at += wide ? copy_lines_wide<First, Twice>(to + at, second, from + at, rest)
             : copy_lines<First, Twice>(to + at, second, from + at, rest);
  both(at, bytes - at);
  if constexpr (First == Target::streamed) _mm_sfence();
}

}  // namespace

void move(char* to, const char* from, uint64_t bytes, bool streaming) {
  if (streaming) {
    copy<Target::streamed, false>(to, nullptr, from, bytes);
  } else {
    copy<Target::cached, false>(to, nullptr, from, bytes);
  }
}

void move_to_peer(char* to, const char* from, uint64_t bytes) {
  copy<Target::peer, false>(to, nullptr, from, bytes);
}

void move_twice(char* to, char* also, const char* from, uint64_t bytes, bool streaming) {
  if (streaming) {
    copy<Target::streamed, true>(to, also, from, bytes);
  } else {
    copy<Target::cached, true>(to, also, from, bytes);
  }
}

#else

void move(char* to, const char* from, uint64_t bytes, bool) {
  if (bytes) std::memcpy(to, from, bytes);  // of nothing there may be no memory
}

void move_to_peer(char* to, const char* from, uint64_t bytes) { move(to, from, bytes, false); }

void move_twice(char* to, char* also, const char* from, uint64_t bytes, bool) {
  move(to, from, bytes, false);
  move(also, from, bytes, false);
}

#endif

}  // namespace weft
