// Copies between cores: wide loads with prefetching, which fetch lines that another core has just
// written faster than `rep movsb` does; stores past the cache for results too large to stay in it; and
// lines that another core has just read fetched back before they are written.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"

namespace weft {

// `streaming`: the target will not be read soon, or does not fit into the cache.
void move(char* to, const char* from, uint64_t bytes, bool streaming);

// To memory that a peer reads: its lines are in the peer's cache.
void move_to_peer(char* to, const char* from, uint64_t bytes);

// To a target and, cached, to memory that a peer reads, in one reading.
void move_twice(char* to, char* also, const char* from, uint64_t bytes, bool streaming);

constexpr uint64_t kTeamBytes = 1 << 20;  // from so many on, all threads of the caller move them

// Calls piece(offset, bytes) for pieces of whole lines that make up so many bytes: for one thread all
// at once, for several threads as many pieces as have enough to do, on the team of this process.
template <class Piece>
void by_threads(int threads, uint64_t bytes, const Piece& piece) {
  constexpr uint64_t kLeast = 32 << 10;  // takes as long as it takes to hand it to a thread
  const uint64_t pieces = std::min<uint64_t>(uint64_t(threads), bytes / kLeast);
  if (pieces <= 1) return piece(uint64_t(0), bytes);
  const uint64_t size = (bytes / pieces + 63) / 64 * 64;
  in_parts(threads, (bytes + size - 1) / size,
           [&](size_t i) { piece(i * size, std::min(size, bytes - i * size)); });
}

inline void move_by(int threads, char* to, const char* from, uint64_t bytes, bool streaming) {
  by_threads(threads, bytes, [&](uint64_t at, uint64_t size) { move(to + at, from + at, size, streaming); });
}

}  // namespace weft
