"""Symmetric memory for kernels: the same layout on every rank, and a table of bases.

`Host` is weft's heap, shared by the processes of one machine; kernels on it are interpreted.
`Pointers` is any memory whose bases are known, and `symmetric_memory` makes one from torch's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft import fabric
from weft.errors import Error, Mismatch, Timeout, Unsupported
from weft.fabric import Fabric
from weft.fabric.interface import NOTHING_EXPOSED, Call, Exposed
from weft.fabric.outcomes import TIMEOUT
from weft.fabric.proposal import Items, Proposal, check_same

ALIGNMENT = 256
"""Bytes to which regions and their parts are aligned; `peer` relies on 16."""

Exchange = Callable[[str], Sequence[str]]
"""Returns the texts of all ranks, in the order of ranks. All ranks call it together."""


@dataclass
class SymmetricRegion:
    """A block that every rank has at its own base. `carve` returns this rank's tensors in it. Ranks
    that carve the same shapes in the same order get the same layout."""

    memory: torch.Tensor
    bases: torch.Tensor
    used: int = 0

    def carve(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        part = self.memory[self.used : self.used + size]
        assert part.numel() == size, "the region was made too small"
        self.used += aligned(size)
        return part.view(dtype).view(tuple(shape))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Visit(Protocol):
    """A running call: whether its waits may continue, and the error if one gave up."""

    def go_on(self) -> bool:
        """Whether an interpreted wait may continue."""

    def failure(self, doing: str, waiting_for: str) -> Error:
        """The error for a wait that gave up."""


class Space(Protocol):
    """Symmetric memory of a group of ranks."""

    rank: int
    world: int
    device: torch.device
    deadline: float

    def allocate(
        self, operation: str, size: int, same: Items, own: Items
    ) -> tuple[SymmetricRegion, list[Proposal]]:
        """A zeroed region on every rank, and the proposals of all ranks, which call this
        together."""

    def compare(
        self, operation: str, same: Items, own: Items, error: Error | None
    ) -> list[Proposal]:
        """The proposals of all ranks. Raises on all of them if one has an error or they differ."""

    def visit(
        self, operation: str, same: Items, error: Error | None, share: torch.Tensor | None
    ) -> AbstractContextManager[Visit]:
        """A context for one call of an operation. Raises if a rank has an error or makes another
        call; on all ranks, if the space can inform them. share: memory that peers may read."""

    def look(self, operation: str) -> AbstractContextManager[Visit]:
        """A context in which the status of earlier calls is checked."""

    def least(self, number: int) -> int:
        """The least number of all ranks."""


class Host:
    """weft's shared heap of a group on one machine. Ranks compare their proposals at every call, as
    in all of weft's operators, and an error names a peer that died."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.fabric: Fabric = fabric.of(group)
        if not self.fabric.can.in_kernel:
            raise Unsupported(
                "weft.triton's kernels on CPUs need all ranks of a group on one machine; give them "
                "a group whose ranks share one"
            )
        self.rank, self.world = self.fabric.rank, self.fabric.world
        self.device = torch.device("cpu")

    @property
    def deadline(self) -> float:
        return self.fabric.deadline

    def allocate(
        self, operation: str, size: int, same: Items, own: Items
    ) -> tuple[SymmetricRegion, list[Proposal]]:
        error = memory = None
        exposed = NOTHING_EXPOSED
        try:
            memory = self.fabric.memory.empty((aligned(max(size, 1)),), torch.uint8)
            exposed = Exposed({"region": memory})
        except Error as failure:
            error = failure
        with self._call(operation, same, own, error, exposed) as visit:
            assert visit.call is not None
            bases = visit.call.addresses(0)
        assert memory is not None
        return SymmetricRegion(memory, torch.tensor(bases, dtype=torch.int64)), visit.proposals

    def compare(
        self, operation: str, same: Items, own: Items, error: Error | None
    ) -> list[Proposal]:
        with self._call(operation, same, own, error) as visit:
            return visit.proposals

    @contextmanager
    def visit(
        self, operation: str, same: Items, error: Error | None, share: torch.Tensor | None
    ) -> Iterator[HostVisit]:
        exposed = NOTHING_EXPOSED if share is None or error else Exposed({"shard": share})
        with self._call(operation, same, (), error, exposed) as visit:
            yield visit

    @contextmanager
    def look(self, operation: str) -> Iterator[HostVisit]:
        yield HostVisit(self.fabric, None, [])

    def least(self, number: int) -> int:
        return number  # the interpreted grid is a constant, or was compared with `same`

    @contextmanager
    def _call(
        self,
        operation: str,
        same: Items,
        own: Items,
        error: Error | None,
        exposed: Exposed = NOTHING_EXPOSED,
    ) -> Iterator[HostVisit]:
        """One call of the fabric. All ranks enter and compare proposals before the block runs."""
        proposal = Proposal(operation, same, own, str(error)[:600] if error else "")
        with self.fabric.call(proposal, exposed) as call:
            if error is not None and self.world == 1:
                raise error
            yield HostVisit(self.fabric, call, call.proposals())


@dataclass
class HostVisit:
    """One call of the host fabric."""

    fabric: Fabric
    call: Call | None
    proposals: list[Proposal]
    until: float = field(init=False)
    outcome: tuple[int, int] | None = None
    looked: float = 0.0

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.fabric.deadline

    def go_on(self) -> bool:
        now = time.monotonic()
        if now > self.until:
            self.outcome = (TIMEOUT, -1)
        elif now - self.looked > LOOK:
            self.looked = now
            self.outcome = None if self.call is None else self.call.peer_failure()
        return self.outcome is None

    def failure(self, doing: str, waiting_for: str) -> Error:
        return self.fabric.failure(self.outcome or (TIMEOUT, -1), doing, waiting_for)


LOOK = 0.05
"""Seconds between two checks of the peers."""


class Pointers:
    """Memory with known bases on all ranks. `memory` (uint8, zeroed) is this rank's part, and
    `bases` are the addresses of all parts in this process. Regions are taken from its beginning."""

    def __init__(
        self,
        memory: torch.Tensor,
        bases: Sequence[int],
        rank: int,
        exchange: Exchange,
        deadline: float = 60.0,
    ) -> None:
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise Unsupported("memory must be a contiguous tensor of bytes (torch.uint8)")
        if not 0 <= rank < len(bases) or bases[rank] != memory.data_ptr():
            raise Unsupported(f"bases[{rank}] must be the address of this rank's own memory")
        if any(base % ALIGNMENT for base in bases):
            raise Unsupported(f"every base must be a multiple of {ALIGNMENT} bytes")
        self.memory, self.rank, self.world = memory, rank, len(bases)
        self.device, self.deadline = memory.device, deadline
        self._bases = torch.tensor(bases, dtype=torch.int64)
        self._exchange = exchange
        self._used = 0

    def allocate(
        self, operation: str, size: int, same: Items, own: Items
    ) -> tuple[SymmetricRegion, list[Proposal]]:
        size = aligned(max(size, 1))
        left = self.memory.numel() - self._used
        error: Error | None = None
        if size > left:
            error = Unsupported(f"it needs {size} bytes of symmetric memory, and {left} are left")
        proposals = self.compare(operation, (*same, ("region", self._used)), own, error)
        memory = self.memory[self._used : self._used + size]
        bases = (self._bases + self._used).to(self.device)
        self._used += size
        return SymmetricRegion(memory, bases), proposals

    def compare(
        self, operation: str, same: Items, own: Items, error: Error | None
    ) -> list[Proposal]:
        mine = Proposal(operation, same, own, str(error)[:600] if error else "")
        proposals = [Proposal.read(blob.encode()) for blob in self._exchange(mine.blob.decode())]
        if len(proposals) != self.world:
            raise Mismatch(f"{len(proposals)} ranks answered, but there are {self.world} bases")
        check_same(proposals, 0)
        return proposals

    @contextmanager
    def visit(
        self, operation: str, same: Items, error: Error | None, share: torch.Tensor | None
    ) -> Iterator[PointersVisit]:
        # There is no fabric that could inform the peers, so they raise at their deadline.
        if error is not None:
            raise error
        yield PointersVisit(self.rank, self.deadline)

    @contextmanager
    def look(self, operation: str) -> Iterator[PointersVisit]:
        yield PointersVisit(self.rank, self.deadline)

    def least(self, number: int) -> int:
        return min(int(text) for text in self._exchange(str(number)))


@dataclass
class PointersVisit:
    """One call on memory without a fabric, where only the deadline can end a wait."""

    rank: int
    deadline: float
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.deadline

    def go_on(self) -> bool:
        return time.monotonic() < self.until

    def failure(self, doing: str, waiting_for: str) -> Error:
        return Timeout(
            f"rank {self.rank} waited {self.deadline:g} s in {doing} for {waiting_for}; see what "
            "that rank is doing, or allow more with a longer deadline"
        )


class SymmetricMemory(Pointers):
    """torch's symmetric memory of a device, with the functions of its handle. The memory may begin
    inside of an allocation, at `handle.offset`, which is the same on all ranks."""

    def __init__(
        self, memory: torch.Tensor, handle: Any, rank: int, exchange: Exchange, deadline: float
    ) -> None:
        bases = [base + handle.offset for base in handle.buffer_ptrs]
        super().__init__(memory, bases, rank, exchange, deadline)
        self.handle = handle

    def peer_tensor(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The same tensor of another rank."""
        offset = self.handle.offset + tensor.data_ptr() - self.memory.data_ptr()
        shape, dtype = tuple(tensor.shape), tensor.dtype
        found: torch.Tensor = self.handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
        return found


def symmetric_memory(
    size: int, group: dist.ProcessGroup | None = None, deadline: float = 60.0
) -> SymmetricMemory:
    """`size` bytes of torch's symmetric memory on the current device (CUDA, ROCm), for the kernels
    of this group. All ranks call this together."""
    if not torch.accelerator.is_available():
        raise Unsupported("torch's symmetric memory needs a GPU; use weft.triton.Host without one")
    import torch.distributed._symmetric_memory as symm_mem

    group = group if group is not None else dist.group.WORLD
    assert group is not None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    memory = symm_mem.empty(size, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(memory, group)
    memory.zero_()
    torch.accelerator.synchronize(device)

    def exchange(text: str) -> list[str]:
        texts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    exchange("zeroed")  # so that no rank signals into memory before it is zeroed
    return SymmetricMemory(memory, handle, dist.get_rank(group), exchange, deadline)
