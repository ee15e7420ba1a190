// The memory of a group: a memfd that every rank maps. It has no name in the file system, so nothing
// is left behind, however a process ends.
#pragma once

#include <cstdint>

namespace weft {

class Mapping {
 public:
  // Makes the memory and gives its descriptor. Only its owner may open it, and its size is sealed: a
  // rank that could cut it off would end all others by SIGBUS.
  static int create(uint64_t bytes);

  // Maps memory that a rank made with `create`. The descriptor is the mapping's from here on, and is
  // closed whether it could be mapped or not.
  Mapping(int fd, uint64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  // Gives the pages of a stretch back; they come again as zeros.
  void discard(uint64_t at, uint64_t size);

 private:
  int fd_;
  uint64_t bytes_;
  char* base_ = nullptr;
};

}  // namespace weft
