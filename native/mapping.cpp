#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace weft {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Closes a descriptor unless it is kept.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int keep() {
    const int kept = fd;
    fd = -1;
    return kept;
  }
};

std::runtime_error failure(const char* what) {
  return std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

// Some systems refuse memory that could hold programs; kernels before 6.3 do not know the difference.
int make() {
  const int fd = memfd_create("weft", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

}  // namespace

int Mapping::create(uint64_t bytes) {
  Descriptor made{make()};
  if (made.fd < 0) throw failure("cannot make shared memory (memfd_create)");
  if (fchmod(made.fd, S_IRUSR | S_IWUSR) != 0) throw failure("cannot protect shared memory (fchmod)");
  // Sparse: a page exists only once it is touched, so the size is only a limit.
  if (ftruncate(made.fd, off_t(bytes)) != 0) throw failure("cannot size shared memory (ftruncate)");
  if (fcntl(made.fd, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0)
    throw failure("cannot seal the size of shared memory (fcntl)");
  return made.keep();
}

Mapping::Mapping(int fd, uint64_t bytes) : fd_(-1), bytes_(bytes) {
  Descriptor given{fd};
  struct stat status;
  if (fstat(fd, &status) != 0) throw failure("cannot look at shared memory (fstat)");
  if (uint64_t(status.st_size) != bytes)
    throw std::runtime_error("shared memory has " + std::to_string(status.st_size) + " bytes, not " +
                             std::to_string(bytes));
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw std::runtime_error("the size of shared memory is not sealed");
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (map == MAP_FAILED) throw failure("cannot map shared memory (mmap)");
  madvise(map, bytes, MADV_DONTDUMP);
  base_ = static_cast<char*>(map);
  fd_ = given.keep();
}

Mapping::~Mapping() {
  munmap(base_, bytes_);
  close(fd_);
}

void Mapping::discard(uint64_t at, uint64_t size) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(at), off_t(size));
}

}  // namespace weft
