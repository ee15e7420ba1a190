"""Copy engines for kernels: native threads on the host, copy streams on a GPU.

An engine pulls chunks from its peer in order, and after each one sets the chunk's counter to the
epoch of the call. Engines only wait until their peers have entered the call, never for a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from weft.errors import Unsupported
from weft.fabric.host import chunk_engines
from weft.fabric.host.chunk_engines import ChunkEngines
from weft.fabric.host.process_call import ProcessCall
from weft.fabric.processes import ProcessFabric
from weft.triton.space import Host, HostVisit, Space, SymmetricMemory, SymmetricRegion, aligned

Chunk = tuple[int, int, int, int]


class KernelEngines(Protocol):
    """The engines of one operator."""

    counters: torch.Tensor
    counter_stride: int

    def symmetric_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """The symmetric memory of a shard of at most `rows` rows, in bytes."""

    def prepare(
        self,
        region: SymmetricRegion,
        gathered: torch.Tensor,
        rows: int,
        firsts: Sequence[int],
        chunks: Sequence[Chunk],
    ) -> None:
        """Sets the chunks that every call copies into `gathered`."""

    def start(self, visit: Any, shard: torch.Tensor, number: int) -> int:
        """Starts all copies of a call; returns the value that their counters will have."""

    def end(self, sound: bool) -> None:
        """Waits until no engine touches a buffer. Stops them first if the call has failed (not
        `sound`)."""


def engines_of(space: Space) -> KernelEngines:
    """The engines of a space."""
    if isinstance(space, Host):
        return HostEngines(space)
    if isinstance(space, SymmetricMemory):
        return CopyStreams(space)
    raise Unsupported(
        "plain pointers have no copy engines; use weft.triton.Host or weft.triton.symmetric_memory"
    )


class HostEngines:
    """Native threads, one per peer. The counters are those of the fabric, and epochs are the
    numbers of its calls."""

    def __init__(self, space: Host) -> None:
        self._engines = ChunkEngines(cast(ProcessFabric, space.fabric))
        self._rank = space.rank
        self.counters = self._engines.counters
        self.counter_stride = self._engines.counter_stride

    def symmetric_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return 0  # the fabric stages what is not in its heap

    def prepare(
        self,
        region: SymmetricRegion,
        gathered: torch.Tensor,
        rows: int,
        firsts: Sequence[int],
        chunks: Sequence[Chunk],
    ) -> None:
        row = gathered.shape[1] * gathered.dtype.itemsize
        pulled = [
            chunk_engines.Chunk(
                rank, (first - firsts[rank]) * row, first * row, count * row, counter
            )
            for first, count, rank, counter in chunks
            if rank != self._rank and count and row
        ]
        self._engines.prepare(gathered, pulled)

    def start(self, visit: HostVisit, shard: torch.Tensor, number: int) -> int:
        signatures = [proposal.signature for proposal in visit.proposals]
        return self._engines.start(cast(ProcessCall, visit.call), signatures)

    def end(self, sound: bool) -> None:
        self._engines.end(sound, "triton.all_gather_gemm")


class CopyStreams:
    """One stream per peer, which the driver assigns to a copy engine. The counter is set by a copy
    as well: the peer keeps the epoch beside its shard, and the engine pulls it after the chunk. So
    it takes the same path as the chunk and needs no compute unit."""

    counter_stride = 1

    def __init__(self, space: SymmetricMemory) -> None:
        self.space = space
        self._streams = [torch.Stream(space.device) for _ in range(space.world)]

    def symmetric_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return 2 * aligned(rows * columns * dtype.itemsize) + 2 * aligned(8)

    def prepare(
        self,
        region: SymmetricRegion,
        gathered: torch.Tensor,
        rows: int,
        firsts: Sequence[int],
        chunks: Sequence[Chunk],
    ) -> None:
        shape, dtype = (rows, gathered.shape[1]), gathered.dtype
        self._gathered, self._firsts = gathered, firsts
        self._chunks = [c for c in chunks if c[1] > 0 and c[2] != self.space.rank]
        self._stages = [region.carve(shape, dtype) for _ in range(2)]
        self._epochs = [region.carve((1,), torch.int64) for _ in range(2)]
        count = max((chunk[3] for chunk in chunks), default=0) + 1
        self.counters = torch.zeros(count, dtype=torch.int64, device=self.space.device)
        peer = self.space.peer_tensor
        world = range(self.space.world)
        self._peer_stages = [[peer(stage, rank) for rank in world] for stage in self._stages]
        self._peer_epochs = [[peer(epoch, rank) for rank in world] for epoch in self._epochs]

    def start(self, visit: Any, shard: torch.Tensor, number: int) -> int:
        turn = number % 2
        self._stages[turn][: len(shard)].copy_(shard)
        self._epochs[turn].fill_(number)
        # After the barrier, every shard is staged, and no rank still reads an older one.
        self.space.handle.barrier()
        staged = torch.accelerator.current_stream(self.space.device).record_event()
        for stream in self._streams:
            stream.wait_event(staged)
        for first, count, rank, counter in self._chunks:
            begin = first - self._firsts[rank]
            with self._streams[rank]:
                chunk = self._peer_stages[turn][rank][begin : begin + count]
                self._gathered[first : first + count].copy_(chunk, non_blocking=True)
                epoch = self._peer_epochs[turn][rank]
                self.counters[counter : counter + 1].copy_(epoch, non_blocking=True)
        return number

    def end(self, sound: bool) -> None:
        current = torch.accelerator.current_stream(self.space.device)
        for stream in self._streams:
            current.wait_stream(stream)
