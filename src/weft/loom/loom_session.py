"""A session: memory that the ranks of one run share, with the log and the state of each rank.

Whoever starts the ranks makes it, so that the logs outlive them. It is a file in memory that the
ranks open by the path in WEFT_LOOM_SESSION; nothing is left of it when its maker ends.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from types import TracebackType

from weft.errors import Unsupported

# The layout is that of native/loom/log.h.
_HEADER = struct.Struct("<iiQ48x")
_STATUS = struct.Struct("<iiiiQQQ")

LOG_BYTES = 1 << 28
"""The most that one rank may log; pages that are not written cost nothing."""


@dataclass(frozen=True)
class Status:
    """What a rank shows of itself. pid is 0 as long as it has not loaded loom."""

    pid: int
    blocked: int
    running: int
    exited: bool
    progress: int
    log_used: int
    log_lost: int


class LoomSession:
    """Shared memory of `world` ranks; a context manager."""

    def __init__(self, world: int, log_bytes: int = LOG_BYTES) -> None:
        if world < 1:
            raise Unsupported(f"a session needs at least one rank, not {world}")
        self.world, self._log_bytes = world, log_bytes
        self._first = (_HEADER.size + _STATUS.size * world + 4095) // 4096 * 4096
        self._file = os.memfd_create("loom session", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self._first + log_bytes * world)
        self._memory = mmap.mmap(self._file, self._first)
        self._memory[: _HEADER.size] = _HEADER.pack(world, 1, log_bytes)

    @property
    def path(self) -> str:
        """What the ranks open; valid while this process has the session."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def status(self, rank: int) -> Status:
        place = _HEADER.size + _STATUS.size * rank
        pid, blocked, running, exited, *numbers = _STATUS.unpack_from(self._memory, place)
        progress, log_used, log_lost = numbers
        return Status(pid, blocked, running, bool(exited), progress, log_used, log_lost)

    def log(self, rank: int) -> bytes:
        """What a rank has logged so far."""
        used = self.status(rank).log_used
        return os.pread(self._file, used, self._first + self._log_bytes * rank)

    def logs(self) -> list[bytes]:
        return [self.log(rank) for rank in range(self.world)]

    def clear(self) -> None:
        """Forgets the logs and states of a run, for ranks that start anew."""
        size = _STATUS.size * self.world
        self._memory[_HEADER.size : _HEADER.size + size] = bytes(size)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)

    def __enter__(self) -> LoomSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
