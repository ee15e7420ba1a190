"""Measurements of the host fabric's native parts: copies by engines, signals, wake-ups.

Calibration and benchmarks time these parts alone, without a plan. All ranks of the group call each
function together.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import Fabric, _native
from weft.fabric.host.packing import packed
from weft.fabric.interface import NOTHING_EXPOSED, Exposed
from weft.fabric.processes import ProcessFabric
from weft.fabric.proposal import Proposal

T = TypeVar("T")
MOST_RANKS: int = _native.MAX_WORLD
_PROPOSAL = Proposal("a measurement")


class Strip(NamedTuple):
    """A copy: from an offset to the same offset, `rows` rows of `row_bytes`, `pitch` apart."""

    offset: int
    rows: int
    row_bytes: int
    pitch: int


@dataclass(frozen=True)
class Copied(Generic[T]):
    """The times of copies: (start, end) of each if they were recorded, and the seconds of processor
    time of the engine. beside: the result of what ran meanwhile."""

    spans: list[tuple[float, float]]
    busy: float
    beside: T


class EngineCopies:
    """Copies by this rank's own engine, queued behind each other: out of a peer's symmetric memory
    (or its own) into private memory."""

    def __init__(
        self,
        fabric: Fabric,
        peer: int,
        source: torch.Tensor,
        target: torch.Tensor,
        strips: Sequence[Strip],
        holds_core: bool = False,
    ) -> None:
        self._fabric, self._source, self._target = host(fabric), source, target
        self._program = _native.Program()
        rank = fabric.rank
        slot = 1 if peer == rank else 0  # a rank's own buffers are numbered by themselves
        for number, strip in enumerate(strips):
            here = (peer, slot, strip.offset, strip.pitch)
            there = (rank, 0, strip.offset, strip.pitch)
            size = (strip.rows, strip.row_bytes)
            self._program.add(peer, number, holds_core, here, there, *size, [], -1, [])

    def run(self, beside: Callable[[], T], record: bool = False) -> Copied[T]:
        """Runs all copies while `beside` runs on this thread."""
        fabric, heap = self._fabric, self._fabric.heap
        with fabric.call(_PROPOSAL, Exposed({"source": self._source})) as call:
            call.meet()
            pointers = [self._target.data_ptr(), self._source.data_ptr()]
            signatures = [_PROPOSAL.signature] * fabric.world
            deadline = fabric.deadline_ns()
            start, own = time.process_time(), time.thread_time()
            flight = heap.launch(self._program, call.number, deadline, pointers, signatures, record)
            result = beside()
            fabric.wait(lambda: heap.finish(flight), "a measurement", "the copies")
            busy = time.process_time() - start - (time.thread_time() - own)
        spans = sorted((begin / 1e9, end / 1e9) for _, begin, end in flight.spans)
        return Copied(spans, busy, result)


def copy_and_memcpy(
    fabric: Fabric, source: torch.Tensor, target: torch.Tensor
) -> tuple[float, float] | None:
    """Seconds in which rank 1 pulls rank 0's symmetric memory by memcpy, and by its engine; None on
    other ranks."""
    own, heap, size = host(fabric), host(fabric).heap, source.nbytes
    program = _native.Program()
    program.add(0, 0, False, (0, 0, 0, size), (1, 0, 0, size), 1, size, [], -1, [])
    with own.call(_PROPOSAL, Exposed({"source": source})) as call:
        call.meet()
        if fabric.rank != 1:
            return None
        pointer = call.addresses(0)[0]
        start = time.perf_counter()
        ctypes.memmove(target.data_ptr(), pointer, size)
        between = time.perf_counter()
        signatures, deadline = [_PROPOSAL.signature] * fabric.world, own.deadline_ns()
        flight = heap.launch(program, call.number, deadline, [target.data_ptr()], signatures, False)
        own.wait(lambda: heap.finish(flight), "a measurement", "the copy")
        return between - start, time.perf_counter() - between


def round_trip(fabric: Fabric) -> float | None:
    """Seconds from rank 0's signal to rank 1's answer, both spinning; None on other ranks."""
    own, heap = host(fabric), host(fabric).heap
    with own.call(_PROPOSAL, NOTHING_EXPOSED) as call:
        flight = heap.launch(_native.Program(), call.number, own.deadline_ns(), [], [], False)
        if fabric.rank == 0:
            heap.wait(flight, 1, 0)
            start = time.perf_counter()
            heap.signal(call.number, 0, [])
            heap.wait(flight, 1, 1)
            return time.perf_counter() - start
        if fabric.rank == 1:
            heap.signal(call.number, 0, [])
            heap.wait(flight, 0, 0)
            heap.signal(call.number, 1, [])
        return None


def wake_up(fabric: Fabric, delay: float) -> int:
    """On rank 0, the moment in nanoseconds at which it signalled, `delay` seconds after rank 1
    began to wait. On rank 1, the moment at which it ran again."""
    own, heap = host(fabric), host(fabric).heap
    with own.call(_PROPOSAL, NOTHING_EXPOSED) as call:
        flight = heap.launch(_native.Program(), call.number, own.deadline_ns(), [], [], False)
        if fabric.rank == 1:
            heap.signal(call.number, 1, [])
            moment = heap.wait_timed(flight, 0, 0)
        else:
            heap.wait(flight, 1, 1)
            until = time.perf_counter() + delay
            while time.perf_counter() < until:
                pass
            moment = heap.signal(call.number, 0, [])
    dist.barrier(group=fabric.group)
    return moment


def look_at_counters(fabric: Fabric, count: int) -> None:
    """Checks which of `count` chunks have arrived, as compute does."""
    own = host(fabric)
    own.heap.doorbell()
    own.heap.reached(own.number, [(fabric.rank, number) for number in range(count)])


def multiply(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    """y = x @ w by the native kernel for few rows, on its own. w is packed as in a call."""
    kept, place = packed(w)
    threads = torch.get_num_threads()
    _native.multiply(x.data_ptr(), x.shape[0], *place, 0, w.shape[1], y.data_ptr(), threads)
    del kept


def sum_of(fabric: Fabric, terms: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A function that stores the sum of terms [count, rows, columns] into y, in float32, by the
    native kernel on its own. The group has one rank."""
    own, kernel = host(fabric), _native.Kernel(0)
    count, rows, columns = terms.shape
    pitch = columns * terms.element_size()
    sources = [(0, 0, number * rows * pitch, pitch) for number in range(count)]
    kernel.add_sum(sources, [(0, 1, 0, pitch)], rows, columns, [], -1)

    def add() -> None:
        operands = _native.Operands()
        operands.threads = torch.get_num_threads()
        deadline, pointers = own.deadline_ns(), [terms.data_ptr(), y.data_ptr()]
        _native.KernelRun(own.heap, kernel, "", 0, deadline, pointers, [0], operands, False).go()

    return add


def host(fabric: Fabric) -> ProcessFabric:
    """Raises unless the ranks of the fabric are processes of one machine; returns the fabric."""
    if not isinstance(fabric, ProcessFabric) or not fabric.can.direct:
        raise Unsupported("this is measured with all ranks of a group on one machine only")
    return fabric
