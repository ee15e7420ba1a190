"""Copy engines for kernels that wait for chunks by themselves, as `weft.triton`'s do: chunks are
pulled from peers in order, and each has a counter that a kernel can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.errors import Unsupported
from weft.fabric import _native
from weft.fabric.host.process_call import ProcessCall
from weft.fabric.outcomes import AGAIN, OK, Outcome
from weft.fabric.processes import ProcessFabric


class Chunk(NamedTuple):
    """Bytes to pull: from an offset in a peer's exposed memory to an offset in the target."""

    peer: int
    source: int
    target: int
    size: int
    counter: int


class ChunkEngines:
    """The engines of one rank. Counters are the fabric's, and show the number of the call."""

    counter_stride = 2  # a counter is followed by the number of its sleepers

    def __init__(self, fabric: ProcessFabric) -> None:
        self._fabric = fabric
        self.counters = torch.from_numpy(fabric.heap.counters())
        self._program: _native.Program | None = None
        self._running: _native.Call | None = None

    def prepare(self, target: torch.Tensor, chunks: Sequence[Chunk]) -> None:
        """Queues are made once: these chunks, into `target`, at every call."""
        me, program = self._fabric.rank, _native.Program()
        self._target = target
        for chunk in chunks:
            if chunk.counter >= _native.MAX_COUNTERS:
                raise Unsupported(f"more than {_native.MAX_COUNTERS} chunks; use a smaller depth")
            source = (chunk.peer, 0, chunk.source, chunk.size)
            into = (me, 0, chunk.target, chunk.size)
            counter = chunk.counter
            program.add(chunk.peer, counter, False, source, into, 1, chunk.size, [], counter, [])
        self._program = program if chunks else None

    def start(self, call: ProcessCall, signatures: Sequence[int]) -> int:
        """Starts all copies of a call; gives the number that counters will show."""
        if self._program is not None:
            fabric, pointers = self._fabric, [self._target.data_ptr()]
            self._running = fabric.heap.launch(
                self._program, call.number, fabric.deadline_ns(), pointers, signatures, False
            )
        return call.number

    def end(self, sound: bool, doing: str) -> None:
        """Waits until no engine touches a buffer; stops them first if the call is not sound."""
        running, self._running = self._running, None
        if running is None:
            return
        heap = self._fabric.heap
        if not sound:
            heap.cancel(running)
        outcome = finish(self._fabric, running)
        if sound and outcome[0] != OK:
            raise self._fabric.failure(outcome, doing, "chunks of x")


def finish(fabric: ProcessFabric, running: _native.Call) -> Outcome:
    """Waits until a launched program has ended, however it did."""
    outcome = fabric.heap.finish(running)
    while outcome[0] == AGAIN:
        outcome = fabric.heap.finish(running)
    return outcome
