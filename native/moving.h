// Copies between cores: wide loads with prefetching, which fetch lines that another core has just
// written faster than `rep movsb` does; stores past the cache for results too large to stay in it; and
// lines that another core has just read fetched back before they are written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace weft {

constexpr uint64_t kAhead = 1024;      // how far to fetch ahead what is read, in bytes
constexpr uint64_t kAheadOwned = 512;  // and what is written and another core may hold

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_to_write(void* p) { __builtin_prefetch(p, 1); }

#if defined(__x86_64__)

template <bool Streaming>
inline void store(char* to, __m128i value) {
  if constexpr (Streaming) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), value);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  }
}

inline __m128i load(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// To one or two targets in one reading. Streaming needs `to` on a 16-byte boundary. ToPeer: the last
// target is memory that a peer reads, so its lines are in the peer's cache, and are fetched back ahead.
template <bool Streaming, bool Twice, bool ToPeer = Twice>
inline void copy_lines(char* to, char* also, const char* from, uint64_t bytes) {
  uint64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    prefetch(from + at + kAhead);
    if constexpr (ToPeer) prefetch_to_write((Twice ? also : to) + at + kAheadOwned);
    const __m128i a = load(from + at), b = load(from + at + 16);
    const __m128i c = load(from + at + 32), d = load(from + at + 48);
    store<Streaming>(to + at, a);
    store<Streaming>(to + at + 16, b);
    store<Streaming>(to + at + 32, c);
    store<Streaming>(to + at + 48, d);
    if constexpr (Twice) {
      store<false>(also + at, a);
      store<false>(also + at + 16, b);
      store<false>(also + at + 32, c);
      store<false>(also + at + 48, d);
    }
  }
  if (at < bytes) {
    std::memcpy(to + at, from + at, bytes - at);
    if constexpr (Twice) std::memcpy(also + at, from + at, bytes - at);
  }
  if constexpr (Streaming) _mm_sfence();
}

inline uint64_t to_boundary(const char* p) { return (16 - (reinterpret_cast<uintptr_t>(p) & 15)) & 15; }

// `streaming`: the target will not be read soon, or does not fit into the cache.
inline void move(char* to, const char* from, uint64_t bytes, bool streaming) {
  if (bytes < 256) {
    std::memcpy(to, from, bytes);
  } else if (!streaming) {
    copy_lines<false, false>(to, nullptr, from, bytes);
  } else {
    const uint64_t head = to_boundary(to);
    std::memcpy(to, from, head);
    copy_lines<true, false>(to + head, nullptr, from + head, bytes - head);
  }
}

// To memory that a peer reads.
inline void move_to_peer(char* to, const char* from, uint64_t bytes) {
  copy_lines<false, false, true>(to, nullptr, from, bytes);
}

// To a target and, cached, to memory that a peer reads.
inline void move_twice(char* to, char* also, const char* from, uint64_t bytes, bool streaming) {
  const uint64_t head = std::min(bytes, to_boundary(to));
  std::memcpy(to, from, head);
  std::memcpy(also, from, head);
  if (streaming) {
    copy_lines<true, true>(to + head, also + head, from + head, bytes - head);
  } else {
    copy_lines<false, true>(to + head, also + head, from + head, bytes - head);
  }
}

#else

inline void move(char* to, const char* from, uint64_t bytes, bool) { std::memcpy(to, from, bytes); }

inline void move_to_peer(char* to, const char* from, uint64_t bytes) { std::memcpy(to, from, bytes); }

inline void move_twice(char* to, char* also, const char* from, uint64_t bytes, bool) {
  std::memcpy(to, from, bytes);
  std::memcpy(also, from, bytes);
}

#endif

}  // namespace weft
