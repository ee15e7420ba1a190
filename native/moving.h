// Copies between cores: wide loads with prefetching, which fetch lines that another core has just
// written faster than `rep movsb` does; stores past the cache for results too large to stay in it; and
// lines that another core has just read fetched back before they are written.
#pragma once

#include <cstdint>

namespace weft {

// `streaming`: the target will not be read soon, or does not fit into the cache.
void move(char* to, const char* from, uint64_t bytes, bool streaming);

// To memory that a peer reads: its lines are in the peer's cache.
void move_to_peer(char* to, const char* from, uint64_t bytes);

// To a target and, cached, to memory that a peer reads, in one reading.
void move_twice(char* to, char* also, const char* from, uint64_t bytes, bool streaming);

}  // namespace weft
