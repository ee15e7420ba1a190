// Memory of another process, read in one copy by the kernel (process_vm_readv). Systems may forbid it
// (Yama's ptrace_scope, seccomp, another user), so a rank first tries it.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace weft {

// Copies bytes from an address of a process. False if not all of them could be read: it is not allowed,
// the process has ended, or the memory is not ordinary (of a device, for example).
bool read_peer(pid_t process, char* to, uint64_t from, uint64_t bytes);

// The same by several threads.
bool read_peer_by(int threads, pid_t process, char* to, uint64_t from, uint64_t bytes);

// Whether peers that may read this process can read these bytes of it.
bool is_ordinary(const char* data, uint64_t bytes);

}  // namespace weft
