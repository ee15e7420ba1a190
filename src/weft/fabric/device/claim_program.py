"""`in-kernel` on a device: engines push the chunks, and one persistent kernel takes their tiles.

    caller   stage x, post "entered", launch the kernel, join the lanes whose copies it ignores
    lanes    wait for the fork and for the peer, copy a chunk, post its word, copy the next one

The kernel polls the words of chunks in this rank's own memory, so no stream waits for a chunk, and
nothing has to be decided beforehand. It is enqueued after all copies and never holds up a post, so
it ends whatever streams share a hardware queue. The words are like all others: the watchdog writes
them when a peer is lost or late, and then the kernel runs to its end on data that nobody uses.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.dtype import in_triton
from weft.errors import Unsupported
from weft.fabric.device.flight import DeviceFlight
from weft.fabric.device.program import DeviceProgram, Step
from weft.plan.tasks import Copy, KernelTiles, Matmul, Part, Plan, Region
from weft.timeline import COMPUTE

if TYPE_CHECKING:
    from weft.fabric.device.device_call import DeviceCall
    from weft.fabric.device.device_fabric import DeviceFabric


@dataclass(frozen=True)
class Chunks:
    """What the kernel of one weight multiplies, in the order in which it is expected.

    rows: (first row of y, rows, rank, word) of each chunk; `rank` is this rank for rows that need
    not be waited for. own: the rows of x that this rank has itself.
    """

    w: Region
    y: Region
    own: Region | None
    first_own: int
    rows: tuple[tuple[int, int, int, int], ...]
    parts: tuple[Part, ...]


def check_kernels(plan: Plan) -> None:
    """Raises `Unsupported` unless there is a kernel for the operation of a plan."""
    _kernels()
    names = [str(dtype).removeprefix("torch.") for dtype in in_triton()]
    if plan.operation.dtype not in names:
        raise Unsupported(
            f"{plan.schedule} takes {', '.join(names)}, not {plan.operation.dtype}; use adaptive"
        )


def _kernels() -> Any:
    """weft's Triton kernels. They are a layer above this one, and Triton may not be installed."""
    try:
        return importlib.import_module("weft.triton.on_streams")
    except ImportError as missing:
        raise Unsupported(
            f"in-kernel on a device needs Triton ({missing}); pip install 'weft[triton]'"
        ) from None


class ClaimProgram(DeviceProgram):
    """A program whose compute is one kernel."""

    computes = False

    def __init__(
        self, plan: Plan, fabric: DeviceFabric, signatures: Sequence[int], alike: bool
    ) -> None:
        check_kernels(plan)
        super().__init__(plan, fabric, signatures, alike)
        self.arrivals = arrivals_of(plan, fabric.rank)
        self.chunks = chunks_of(plan, fabric.rank, self.arrivals)
        self.num_words = max([self.num_words, *(word + 1 for word in self.arrivals.values())])
        self.tables = [
            torch.tensor([*chunks.rows, (0, 0, 0, 0)], dtype=torch.int32, device=fabric.device)
            for chunks in self.chunks
        ]
        self.status = _kernels().new_status(fabric.device)
        # Calls may come from any stream.
        torch.accelerator.current_stream(fabric.device).synchronize()

    def start(
        self, call: DeviceCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> DeviceFlight:
        self.agree(call)
        return ClaimFlight(self, call, tensors, record)

    def gave_up(self) -> bool:
        """Whether a kernel has polled as often as it may."""
        return self.fabric.driver.read(self.status.data_ptr()) != 0


def arrivals_of(plan: Plan, rank: int) -> dict[int, int]:
    """The own word of every copy that the kernel waits for. Words of this number are posted by no
    peer (see `words_of`)."""
    copies = {
        before
        for task in plan.lanes.get((rank, COMPUTE), ())
        for before in task.after
        if isinstance(plan.tasks[before], Copy)
    }
    world = plan.operation.world
    return {copy: number * world + rank for number, copy in enumerate(sorted(copies))}


def chunks_of(plan: Plan, rank: int, arrivals: dict[int, int]) -> list[Chunks]:
    """The chunks of every weight of a rank."""
    by_weight: dict[str, list[Matmul]] = {}
    for task in plan.lanes.get((rank, COMPUTE), ()):
        assert isinstance(task, Matmul)
        by_weight.setdefault(task.b.buffer, []).append(task)
    return [_chunks(plan, rank, tasks, arrivals) for tasks in by_weight.values()]


def _chunks(plan: Plan, rank: int, tasks: Sequence[Matmul], arrivals: dict[int, int]) -> Chunks:
    rows, own, first_own = [], None, 0
    for task in tasks:
        source, word = rank, 0
        for before in task.after:
            copy = plan.tasks[before]
            assert isinstance(copy, Copy)
            # What an engine copies inside this rank is waited for like the chunk of a peer.
            source = copy.peer if copy.peer != rank else -1
            word = arrivals[before]
        if task.a.buffer == "x":
            own, first_own = task.a, task.c.row
        rows.append((task.c.row, task.c.rows, source, word))
    parts = tuple(Part(task.a, task.b, task.c) for task in tasks)
    y = plan.buffer[tasks[0].c.key].all()
    return Chunks(tasks[0].b, y, own, first_own, tuple(rows), parts)


class ClaimFlight(DeviceFlight):
    """One call with a kernel that takes what has arrived."""

    _program: ClaimProgram

    def end(self) -> DeviceFlight:
        steps = self._program.steps
        while self._at < len(steps):
            if isinstance(steps[self._at].task, Copy):
                self._copy(steps[self._at])
            self._at += 1
        for chunks, table in zip(self._program.chunks, self._program.tables, strict=True):
            self._launch(chunks, table)
        if self._call.captured:  # all of them have been seen, which a graph does not know
            self._join(number for number in self._streams if number)
            for word in self._program.arrivals.values():
                address = self._fabric.word(self._fabric.rank, word, True)
                self._driver.post(address, 0, self._call.stream)
        return super().end()

    def _end_of(self, step: Step) -> None:
        word = self._program.arrivals.get(step.task.id)
        if word is not None:
            self._arrived(word, step)

    def _arrived(self, word: int, step: Step) -> None:
        value = 1 if self._call.captured else self._call.number
        address = self._fabric.word(self._fabric.rank, word, self._call.captured)
        self._driver.post(address, value, self._streams[step.stream])

    def _launch(self, chunks: Chunks, table: torch.Tensor) -> None:
        fabric, captured = self._fabric, self._call.captured
        began = self._event(self._call.stream) if self._record else None
        w, y = self.view(chunks.w), self.view(chunks.y)
        gathered = self._tensors.get("gathered")
        own = gathered if chunks.own is None else self.view(chunks.own)
        assert own is not None
        _kernels().all_gather_claims(
            shard=own,
            gathered=own if gathered is None else gathered,
            w=w,
            y=y,
            chunks=table,
            counters=fabric.own_words(captured),
            claims=torch.zeros(len(table), dtype=torch.int32, device=fabric.device),
            status=self._program.status,
            num_chunks=len(chunks.rows),
            me=fabric.rank,
            shard_first=chunks.first_own,
            epoch=1 if captured else self._call.number,
        )
        if began is not None:
            task = KernelTiles(-1, fabric.rank, (), "in-kernel", chunks.parts)
            self._spans.append((task, began, self._event(self._call.stream)))
